"""The image: which files form its context, what is locked, and what the check in its build refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest
from aws_cdk import App, IgnoreMode, Stack
from aws_cdk import aws_s3_assets as s3_assets

from payload.config import merge
from stacks import config as profiles
from stacks import image_context
from stacks.sections import ImageConfig

DOCKER = image_context.CHECKOUT / "docker"
VARIANTS = ("deploy", "reproduce", "cpu")


def load(name: str) -> ModuleType:
    """A script of docker/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"image_{name}", DOCKER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


verify, lock, build = load("verify_image"), load("lock"), load("build")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small one, with files of every sort around those of the context."""
    for name in (
        "payload/__init__.py",
        "payload/recovery/base.py",
        "payload/__pycache__/x.cpython-311.pyc",
        "payload/notes.txt",
        "examples/task.py",
        "docker/Dockerfile",
        "docker/Dockerfile.dockerignore",
        "docker/verify_image.py",
        "docker/lock.py",
        "docker/requirements-cpu.lock",
        "docker/requirements-cpu.in",
        "stacks/training.py",
        "stacks/payload/decoy.py",
        "profiles/p5.toml",
        "tests/test_x.py",
        ".venv/lib/payload/x.py",
        "app.py",
    ):
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "checkout"


CONTEXT = {
    "payload/__init__.py",
    "payload/recovery/base.py",
    "examples/task.py",
    "docker/Dockerfile",
    "docker/verify_image.py",
    "docker/requirements-cpu.lock",
}


def test_context_is_the_payload_and_nothing_of_the_stacks(checkout: Path) -> None:
    assert {path.as_posix() for path in image_context.files(checkout)} == CONTEXT
    assert not [path for path in image_context.files() if path.parts[0] in ("stacks", "tests", "profiles")]


def test_what_is_uploaded_is_the_context(checkout: Path, tmp_path: Path) -> None:
    """CDK's patterns and the hash's list choose the same files."""
    out = tmp_path / "out"
    stack = Stack(App(outdir=str(out)), "Alone")
    s3_assets.Asset(stack, "Asset", path=str(checkout), exclude=list(image_context.EXCLUDE), ignore_mode=IgnoreMode.GIT)
    (staged,) = out.glob("asset.*")
    assert {p.relative_to(staged).as_posix() for p in staged.rglob("*") if p.is_file()} == CONTEXT


def test_what_docker_is_sent_is_the_context() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "nothing but what is named"
    named = {rule[1:] for rule in rules if rule.startswith("!")}
    assert named == {*image_context.FOLDERS, *image_context.FILES, "docker/requirements-*.lock"}
    others = [p for f in image_context.FOLDERS for p in (image_context.CHECKOUT / f).rglob("*") if p.is_file()]
    assert {p.suffix for p in others if "__pycache__" not in p.parts} == {".py"}


def test_hash_follows_content_alone(checkout: Path) -> None:
    """An unchanged context builds nothing, whatever else changed."""
    before = image_context.context_hash(checkout)
    for name in ("stacks/training.py", "profiles/p5.toml", "payload/__pycache__/x.cpython-311.pyc"):
        (checkout / name).write_text("other")
    os.utime(checkout / "payload/__init__.py", (1, 1))
    assert image_context.context_hash(checkout) == before
    (checkout / "payload/recovery/base.py").write_text("other")
    changed = image_context.context_hash(checkout)
    (checkout / "payload/recovery/base.py").rename(checkout / "payload/recovery/moved.py")
    assert len({before, changed, image_context.context_hash(checkout)}) == 3


def test_image_id_changes_with_variant_and_base() -> None:
    tables = profiles.load("p5").model_dump(mode="json")
    changes = [{}, {"image.variant": "reproduce"}, {"image.base_digest": f"sha256:{'0' * 64}"}]
    assert len({image_context.image_id(profiles.validate(merge(tables, change))) for change in changes}) == 3


def test_base_image_is_of_the_region_unless_given() -> None:
    found = image_context.base_image(ImageConfig(), "eu-west-1")
    assert found.endswith(".dkr.ecr.eu-west-1.amazonaws.com/base:12.8.1-gpu-py312-cu128-ubuntu24.04-ec2")
    given = ImageConfig(base_image="mine:1", base_digest=f"sha256:{'a' * 64}")
    assert image_context.base_image(given, "eu-west-1") == f"mine:1@sha256:{'a' * 64}"
    assert ":latest" not in str([*image_context.BASES.values(), *build.BASES.values()])


@pytest.mark.parametrize("variant", VARIANTS)
def test_lock_pins_and_hashes_every_file(variant: str) -> None:
    """F48: exact pins; no address of an index, so that a user's own is used."""
    text = (DOCKER / f"requirements-{variant}.lock").read_text()
    entries = lock.entries(text)
    assert len(entries) > 40
    for name, (line, *hashes) in entries.items():
        assert re.fullmatch(rf"{re.escape(name)}==\S+( ; .+)?", line), line
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", item) for item in hashes), name
    assert "://" not in text and "--index" not in text and "find-links" not in text
    asked = verify.locked_versions((DOCKER / f"requirements-{variant}.in").read_text())
    locked = verify.locked_versions(text)
    left_out = lock.TARGETS[variant].left_out
    assert {n: v for n, v in asked.items() if not re.fullmatch(left_out, n)}.items() <= locked.items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_lock_build_and_check_speak_of_the_same_image(variant: str) -> None:
    """F48: a pin that is changed in one place only ends here and not in a pod."""
    wanted, target = verify.VARIANTS[variant], lock.TARGETS[variant]
    asked = verify.locked_versions((DOCKER / f"requirements-{variant}.in").read_text())
    assert (asked["torch"], asked["nvidia-resiliency-ext"]) == (wanted.torch, wanted.nvrx)
    assert target.python == wanted.python
    assert target.platform.endswith("manylinux_{}_{}".format(*wanted.glibc))
    assert set(build.BASES) == set(verify.VARIANTS) == set(lock.TARGETS)
    cuda = [
        name for name in verify.locked_versions((DOCKER / f"requirements-{variant}.lock").read_text()) if "-cu1" in name
    ]
    assert bool(cuda) == (variant == "deploy"), "reproduce has the base's CUDA, cpu has none"


def fitting(variant: str) -> object:
    wanted = verify.VARIANTS[variant]
    locked = {"nvidia-resiliency-ext": wanted.nvrx, "numpy": "2.4.6"}
    return verify.Facts(
        python=f"{wanted.python}.3",
        glibc=".".join(map(str, wanted.glibc)),
        torch=wanted.torch,
        cuda=wanted.cuda,
        nccl=(2, 27, 5) if wanted.cuda else (),
        installed={**locked, "torch": wanted.torch},
        locked=locked,
        conflicts="",
        plugin="/opt/amazon/ofi-nccl/lib/libnccl-net.so" if wanted.cuda else "",
        fi_info="/opt/amazon/efa/bin/fi_info" if wanted.cuda else "",
        refused="",
        uid=1000,
        strangers=(),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fitting_image_passes(variant: str) -> None:
    assert list(verify.problems(variant, fitting(variant))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "3.11.7"}, "Python 3.11.7; legal: 3.12"),
        ({"python": "3.120.1"}, "Python 3.120.1"),
        ({"glibc": "2.35"}, "glibc 2.35; legal: 2.39 or newer"),
        ({"torch": "2.9.0"}, "torch 2.9.0; legal: 2.9.1"),
        ({"cuda": ""}, "CUDA none; legal: 12.8"),
        ({"nccl": (2, 28, 3)}, "NCCL 2.28.3"),
        ({"nccl": (2, 28, 8)}, "NCCL 2.28.8"),
        ({"installed": {}}, "NVRx not installed; legal: 0.7.0"),
        ({"locked": {"numpy": "9"}}, "numpy 2.4.6; legal: 9, as locked"),
        ({"conflicts": "a needs b"}, "contradict each other: a needs b"),
        ({"plugin": ""}, "no libnccl-net.so"),
        ({"fi_info": ""}, "no fi_info"),
        ({"refused": "unrecognized arguments: --ft-x"}, "refuses the options"),
        ({"uid": 0}, "the user is root"),
        ({"strangers": ("stacks",)}, "stacks is in the image"),
    ],
)
def test_each_misfit_ends_the_build(change: dict[str, object], said: str) -> None:
    """F48: found by a build, not by pods on GPUs."""
    found = list(verify.problems("deploy", dataclasses.replace(fitting("deploy"), **change)))
    assert any(said in line for line in found), found


@pytest.mark.parametrize("nccl", [(2, 28, 2), (2, 28, 9), (2, 27, 5)])
def test_nccl_outside_the_forbidden_range_passes(nccl: tuple[int, ...]) -> None:
    assert list(verify.problems("deploy", dataclasses.replace(fitting("deploy"), nccl=nccl))) == []


def test_plugin_is_found_on_the_search_path(tmp_path: Path) -> None:
    assert verify.find_plugin(f"/nowhere:{tmp_path}") == ""
    (tmp_path / verify.NCCL_PLUGIN).write_text("")
    assert verify.find_plugin(f"/nowhere:{tmp_path}") == str(tmp_path / verify.NCCL_PLUGIN)


@pytest.mark.timeout(240)
def test_installed_launcher_takes_what_is_rendered() -> None:
    """F48: the check of the build, here with the release that is installed."""
    assert verify.launcher_refusal(image_context.CHECKOUT) == ""


def test_dockerfile_ends_as_the_namespace_wants_it() -> None:
    """Not root, checked after everything was put in, and started without a shell."""
    text = (DOCKER / "Dockerfile").read_text()
    steps = [line for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    copied = [word for line in steps if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {word.split("/")[0] for word in copied} == {"payload", "examples", "docker"}
    order = [
        next(n for n, line in enumerate(steps) if re.match(start, line))
        for start in ("USER 1000", "RUN python .*verify")
    ]
    assert order == sorted(order) and not [line for line in steps[order[1] :] if line.startswith(("COPY", "ADD"))]
    assert 'CMD ["python", "-m", "payload.launcher"]' in text and "ENTRYPOINT []" in text
    assert "--require-hashes" in text and ":latest" not in text


@pytest.mark.parametrize("engine", build.ENGINES)
def test_one_file_for_every_engine(engine: str) -> None:
    found = build.command(engine, "cpu", "base:1", "tag:1", ["--build-arg", "WHEEL_INDEX=x"])
    assert found[:4] == [engine, "build", "--file", "docker/Dockerfile"]
    assert ("--ignorefile" in found) == (engine != "docker")
    assert found[-1] == "." and "BASE_IMAGE=base:1" in found and "VARIANT=cpu" in found
