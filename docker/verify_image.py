"""Runs as the last step of the image's build and fails it where the parts do not fit together.

A misfit found here costs a build; found by the pods it costs GPU hours. The facts are read from the image (``Facts``),
the rules (``problems``) are plain functions of them. No GPU, no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOME = Path("/opt/nvrx-eks")
LIBRARY_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib")
NCCL_PLUGIN = "libnccl-net.so"
"""What NCCL looks for by itself; it registers the network "AWS Libfabric" that the manifest pins."""
NCCL_FORBIDDEN = ((2, 28, 3), (2, 28, 9))
"""NVRx's in-process restart: aborts hang from the first on, up to but not including the second."""


@dataclass(frozen=True)
class Variant:
    """What an image must hold."""

    python: str
    glibc: tuple[int, int]
    """The oldest that the locked wheels run on."""
    torch: str
    cuda: str
    """torch.version.cuda begins with it; empty: a CPU build."""
    nvrx: str


VARIANTS = {
    "deploy": Variant(python="3.12", glibc=(2, 39), torch="2.9.1", cuda="12.8", nvrx="0.7.0"),
    "reproduce": Variant(python="3.12", glibc=(2, 35), torch="2.9.0", cuda="13.0", nvrx="0.4.1"),
    "cpu": Variant(python="3.11", glibc=(2, 36), torch="2.13.0", cuda="", nvrx="0.4.1"),
}


@dataclass(frozen=True)
class Facts:
    """What was found in the image."""

    python: str
    glibc: str
    torch: str
    """Version without the local part."""
    cuda: str
    nccl: tuple[int, ...]
    """Empty without CUDA."""
    installed: Mapping[str, str]
    """Distribution -> version, names normalised."""
    locked: Mapping[str, str]
    conflicts: str
    """What ``pip check`` says; empty: nothing."""
    plugin: str
    """Path of NCCL's network plugin; empty: none found."""
    fi_info: str
    """Path of libfabric's command; empty: none found."""
    refused: str
    """Why NVRx's launcher refused the options that we render; empty: it takes them."""
    uid: int
    strangers: tuple[str, ...]
    """Files or packages that do not belong into the image."""


def problems(name: str, facts: Facts) -> Iterator[str]:
    """One line a misfit: what was found, and what is legal."""
    wanted = VARIANTS[name]
    if not facts.python.startswith(wanted.python + "."):
        yield f"Python {facts.python}; legal: {wanted.python}"
    if version(facts.glibc) < wanted.glibc:
        yield f"glibc {facts.glibc}; legal: {'.'.join(map(str, wanted.glibc))} or newer, for which the wheels are built"
    if facts.torch != wanted.torch:
        yield f"torch {facts.torch}; legal: {wanted.torch}"
    if facts.cuda[:4] != wanted.cuda:
        yield f"torch is built for CUDA {facts.cuda or 'none'}; legal: {wanted.cuda or 'none'}"
    first, last = NCCL_FORBIDDEN
    if facts.nccl and first <= facts.nccl < last:
        yield f"NCCL {'.'.join(map(str, facts.nccl))}; legal: before 2.28.3, or from 2.28.9 on (in-process restart)"
    if facts.installed.get("nvidia-resiliency-ext") != wanted.nvrx:
        yield f"NVRx {facts.installed.get('nvidia-resiliency-ext', 'not installed')}; legal: {wanted.nvrx}"
    for package, right in facts.locked.items():
        if facts.installed.get(package, "").partition("+")[0] != right:
            yield f"{package} {facts.installed.get(package, 'not installed')}; legal: {right}, as locked"
    if facts.conflicts:
        yield f"packages contradict each other: {facts.conflicts}"
    if wanted.cuda and not facts.plugin:
        yield f"no {NCCL_PLUGIN}; legal: the base image brings aws-ofi-nccl, without which NCCL cannot use EFA"
    if wanted.cuda and not facts.fi_info:
        yield "no fi_info; legal: the base image brings libfabric with EFA"
    if facts.refused:
        yield f"NVRx's launcher refuses the options that the payload renders: {facts.refused}"
    if facts.uid == 0:
        yield "the user is root; legal: any other, as the namespace admits no root"
    for stranger in facts.strangers:
        yield f"{stranger} is in the image; legal: the payload alone"


def version(text: str) -> tuple[int, ...]:
    """``2.39`` -> (2, 39)."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def locked_versions(text: str) -> dict[str, str]:
    """Distribution -> version of a lock file."""
    return {normal(name): found for name, found in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def find_plugin(search_path: str) -> str:
    """The plugin in a folder of LD_LIBRARY_PATH, in those that the EFA installer uses, or known to ldconfig."""
    folders = [*filter(None, search_path.split(":")), *LIBRARY_FOLDERS]
    found = [str(Path(folder) / NCCL_PLUGIN) for folder in folders if (Path(folder) / NCCL_PLUGIN).exists()]
    if not found:
        cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
        found = re.findall(rf"{re.escape(NCCL_PLUGIN)} .*=> (\S+)", cache)
    return found[0] if found else ""


def launcher_refusal(home: Path) -> str:
    """Parses what the launcher renders for a pod with the installed release's own parser."""
    script = (
        "import json, os, sys, tempfile, pathlib\n"
        "from payload.config import RunConfig\n"
        "from payload.environment import PodEnvironment\n"
        "from payload.recovery.ft_launcher import ft_arguments\n"
        "from nvidia_resiliency_ext.fault_tolerance import launcher\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'run.json'\n"
        "path.write_text(RunConfig().to_json())\n"
        "values = dict(NVRX_EKS_CONFIG=str(path), JOB_COMPLETION_INDEX='1', NVRX_EKS_COORDINATOR='pod-0.pods',\n"
        "              NVRX_EKS_PORT='29400', POD_NAME='pod-1', POD_UID='u', NODE_NAME='n')\n"
        "parser = launcher.get_args_parser()\n"
        "options = ft_arguments(PodEnvironment.read(values), '10.0.0.1', '10.0.0.2', parser)\n"
        "parser.parse_args([*options, '--no-python', 'python'])\n"
    )
    # Warnings of the imports go to stderr as well: only the end of a failure is shown.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=home, timeout=300
    )
    return "" if done.returncode == 0 else done.stderr.strip()[-600:]


def gather(name: str) -> Facts:
    """The facts of the image that this runs in."""
    import torch

    cuda = torch.version.cuda or ""
    nccl: tuple[int, ...] = ()
    if cuda:
        from torch.cuda import nccl as torch_nccl

        nccl = tuple(torch_nccl.version())[:3]  # type: ignore[no-untyped-call]
    # The base of this variant has packages of its own, whose order is not ours to judge.
    check = [sys.executable, "-m", "pip", "check"]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    conflicts = "" if name == "reproduce" or checked.returncode == 0 else checked.stdout.strip()
    if name == "cpu":
        # torch's PyPI metadata asks for CUDA's parts, which its CPU build does not.
        conflicts = "\n".join(line for line in conflicts.splitlines() if not line.startswith("torch "))
    found = [f"{part}" for part in ("stacks", "app.py", "cdk.json", "tests", "shared") if (HOME / part).exists()]
    installed = {normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    fi_info = [Path(p) / "fi_info" for p in [*os.environ.get("PATH", "").split(":"), "/opt/amazon/efa/bin"]]
    return Facts(
        python=platform.python_version(),
        glibc=platform.libc_ver()[1],
        torch=torch.__version__.partition("+")[0],
        cuda=cuda,
        nccl=nccl,
        installed=installed,
        locked=locked_versions((HOME / f"requirements-{name}.lock").read_text()),
        conflicts=conflicts,
        plugin=find_plugin(os.environ.get("LD_LIBRARY_PATH", "")),
        fi_info=next((str(path) for path in fi_info if path.exists()), ""),
        refused=launcher_refusal(HOME),
        uid=os.getuid(),
        strangers=(*found, *(name for name in installed if name.startswith("aws-cdk"))),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True, choices=sorted(VARIANTS))
    name = parser.parse_args().variant
    facts = gather(name)
    found = list(problems(name, facts))
    for line in found:
        sys.stderr.write(f"image variant {name}: {line}\n")
    if found:
        return 1
    nccl = ".".join(map(str, facts.nccl)) or "none"
    sys.stdout.write(f"image variant {name}: torch {facts.torch}, CUDA {facts.cuda or 'none'}, NCCL {nccl}, fits\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
