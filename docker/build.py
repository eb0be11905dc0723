"""Builds an image on this machine with docker, podman or buildah: ``python docker/build.py --variant cpu``.

The stacks build theirs in CodeBuild from the same file and the same context; this is for laptops and kind.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
ENGINES = ("docker", "podman", "buildah")
_PUBLIC = "public.ecr.aws/deep-learning-containers"
BASES = {
    "deploy": f"{_PUBLIC}/base:12.8.1-gpu-py312-cu128-ubuntu24.04-ec2",
    "reproduce": f"{_PUBLIC}/pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2",
    "cpu": "python:3.11-slim-bookworm",
}


def command(engine: str, variant: str, base: str, tag: str, more: list[str]) -> list[str]:
    """docker (BuildKit) finds Dockerfile.dockerignore by itself, the others are told."""
    ignore = [] if engine == "docker" else ["--ignorefile", "docker/Dockerfile.dockerignore"]
    return [
        *(engine, "build", "--file", "docker/Dockerfile", *ignore),
        *("--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"VARIANT={variant}"),
        *("--tag", tag, *more, "."),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="cpu", choices=sorted(BASES))
    parser.add_argument("--base", default="", help="default: the variant's")
    parser.add_argument("--tag", default="", help="default: nvrx-eks:<variant>")
    parser.add_argument("--engine", default="", choices=("", *ENGINES), help="default: the first that is installed")
    given, more = parser.parse_known_args()
    engine = given.engine or next((name for name in ENGINES if shutil.which(name)), "")
    if not engine:
        sys.stderr.write(f"no engine found; legal: one of {', '.join(ENGINES)} on the PATH\n")
        return 2
    tag = given.tag or f"nvrx-eks:{given.variant}"
    built = command(engine, given.variant, given.base or BASES[given.variant], tag, more)
    return subprocess.run(built, cwd=CHECKOUT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
