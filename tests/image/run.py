"""Builds the CPU image without a Docker engine and trains in it: ``python -m tests.image.run``.

Needs root, buildah and debootstrap (Debian packages), about 6 GB of disk and a few minutes. The base is a minimal
Debian 12, the wheels are downloaded here with this machine's pip, so the build itself needs no network. In the image
the launcher runs as the manifest of profile kind says: one pod of two ranks, one injected exception, to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from payload import settings
from payload.config import RunConfig
from payload.manifests import CONFIG_MOUNT, job_of, render, render_prepare_data

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".image"
TAG = "localhost/nvrx-eks:cpu"
BASE_TAG = "localhost/nvrx-eks-base:bookworm"
INCLUDED = "python3,python3-venv,ca-certificates"
STEPS, FAULT_STEP = 30, 14
USER = 1000


def buildah(*arguments: str) -> list[str]:
    """Storage of its own, below the checkout; plain copies, which work on any file system."""
    store = ["--root", str(WORK / "storage"), "--runroot", str(WORK / "run"), "--storage-driver", "vfs"]
    return ["buildah", *store, *arguments]


def call(command: Sequence[str], *, capture: bool = False) -> str:
    print("+", " ".join(command[:6]), "..." if len(command) > 6 else "", flush=True)
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return (done.stdout or "").strip()


def need(*programs: str) -> None:
    missing = [name for name in programs if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise SystemExit(f"image test: {', '.join(missing) or 'not root'}; legal: root, with {', '.join(programs)}")


def wheels() -> Path:
    """Every locked file, checked against its hash by pip."""
    folder = WORK / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--python-version=3.11"]
    lock = "docker/requirements-cpu.lock"
    call([sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", f"--requirement={lock}"])
    return folder


def base(mirror: str) -> None:
    """An image of a minimal Debian, unless it is there."""
    found = subprocess.run(buildah("images", "--quiet", BASE_TAG), capture_output=True, text=True, check=False)
    if found.returncode == 0 and found.stdout.strip():
        return
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        root = f"{folder}/root"
        call(
            ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", "bookworm", root, *([mirror] * bool(mirror))]
        )
        container = call(buildah("from", "scratch"), capture=True)
        call(buildah("add", "--quiet", container, root, "/"))
        call(buildah("commit", "--quiet", "--rm", container, BASE_TAG))


def build(folder: Path) -> None:
    """By the file and the ignore list that Docker uses."""
    call(
        buildah(
            *("build", "--isolation=chroot", "--layers=false", "--file=docker/Dockerfile"),
            *("--ignorefile=docker/Dockerfile.dockerignore", f"--volume={folder}:/wheels:ro"),
            *(f"--build-arg=BASE_IMAGE={BASE_TAG}", "--build-arg=VARIANT=cpu", "--build-arg=WHEEL_FOLDER=/wheels"),
            *(f"--tag={TAG}", "."),
        )
    )


class Pod:
    """Runs containers of a rendered Job in the image, as pod 0 on this machine."""

    def __init__(self, container: str, folder: Path, config: RunConfig) -> None:
        self._container, self._folder, self._config = container, folder, config
        for name in ("fsx", "config", "scratch", "shm"):
            (folder / name).mkdir()
            os.chown(folder / name, USER, USER)
        (folder / "config" / "run.json").write_text(config.to_json())
        (folder / "config" / "hosts").write_text("")

    def run(self, job: dict[str, Any]) -> int:
        """The container's exit code."""
        container = job["spec"]["template"]["spec"]["containers"][0]
        values = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        values |= {"JOB_COMPLETION_INDEX": "0", "POD_NAME": "pod-0", "POD_UID": "uid-0", "NODE_NAME": "node-0"}
        # No DNS of a cluster here: names come from a file, as on the local runner.
        values |= {"NVRX_EKS_HOSTS": f"{CONFIG_MOUNT}/hosts", "GLOO_SOCKET_IFNAME": "lo"}
        (self._folder / "config" / "hosts").write_text(f"{values['NVRX_EKS_COORDINATOR']} 127.0.0.1\n")
        mounts = {"fsx": self._config.workdir, "config": CONFIG_MOUNT, "scratch": "/scratch", "shm": "/dev/shm"}
        options = [f"--volume={self._folder / name}:{target}" for name, target in mounts.items()]
        options += [f"--env={name}={value}" for name, value in values.items()]
        command = buildah("run", "--isolation=chroot", f"--user={USER}:{USER}", *options, self._container, "--")
        print("+ in the image:", " ".join(container["command"]), flush=True)
        return subprocess.run([*command, *container["command"]], check=False, timeout=900).returncode


def train() -> None:
    """Raises AssertionError with what did not hold."""
    found = settings.read(settings.parser("image-test", "").parse_args(["--profile", "kind"]))
    config = found.config.with_overrides(
        {
            "run_id": "image-test",
            "training.max_steps": STEPS,
            "training.min_step_s": 0,
            "checkpoint.interval": 10,
            "faults.schedule": [{"step": FAULT_STEP, "rank": 1, "type": "exception"}],
        }
    )
    container = call(buildah("from", TAG), capture=True)
    try:
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            pod = Pod(container, Path(folder), config)
            data = render_prepare_data(config, found.deployment, ["--source", "pydoc"])
            assert pod.run(job_of(data)) == 0, "prepare-data failed in the image"
            assert pod.run(job_of(render(config, found.deployment))) == 0, "the launcher failed in the image"
            examine(Path(folder) / "fsx" / "runs" / config.run_id)
    finally:
        call(buildah("rm", container), capture=True)


def examine(run_dir: Path) -> None:
    """The run went through its fault and to its end."""
    result = json.loads((run_dir / "result.json").read_text())
    assert result["succeeded"], result
    records = [json.loads(line) for path in sorted((run_dir / "events").glob("rank*.jsonl")) for line in path.open()]
    faults = [record for record in records if record["kind"] == "fault"]
    assert [fault["step"] for fault in faults] == [FAULT_STEP], faults
    ends = {record["step"] for record in records if record["kind"] == "train_end"}
    assert ends == {STEPS}, ends
    print(f"image test: {STEPS} steps in the image, through an exception at step {FAULT_STEP}; {result['versions']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirror", default="", help="Debian mirror (default: debootstrap's)")
    parser.add_argument("--keep", action="store_true", help="keep .image/ for the next time")
    given = parser.parse_args()
    need("buildah", "debootstrap")
    WORK.mkdir(exist_ok=True)
    try:
        folder = wheels()
        base(given.mirror)
        build(folder)
        train()
    finally:
        if not given.keep:
            shutil.rmtree(WORK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
