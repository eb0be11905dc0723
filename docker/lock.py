"""Writes requirements-<variant>.lock from requirements-<variant>.in: every version and every file's hash.

Run by hand when a pin changes, with uv on the path: ``python docker/lock.py [VARIANT ...]``. The build installs the
locked files and nothing else, without resolving (``pip install --no-deps --require-hashes``).
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Target:
    """What the files of one variant must run on."""

    python: str
    platform: str
    """As uv names it; the number is the glibc of the base image."""
    left_out: str = r"(?!)"
    """Packages that are not locked, as the base image has them or the variant needs none."""
    files: tuple[tuple[str, str], ...] = ()
    """Package and sha256 of the one file of the locked version that will do."""


_CUDA_PARTS = r"triton|nvidia-(?!ml-py|resiliency-ext).*|cuda-.*"
TARGETS = {
    "deploy": Target("3.12", "x86_64-manylinux_2_39"),
    "reproduce": Target("3.12", "x86_64-manylinux_2_35", left_out=rf"torch|{_CUDA_PARTS}"),
    "cpu": Target(
        "3.11",
        "x86_64-manylinux_2_36",
        left_out=_CUDA_PARTS,
        # torch's own CPU build of that release (CPython 3.11, x86_64), which PyPI does not carry: the build needs
        # WHEEL_INDEX or WHEEL_FOLDER. The other files of the release need CUDA's parts.
        files=(("torch", "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"),),
    ),
}


def compiled(variant: str, target: Target) -> str:
    """What uv resolves, hashes included, without any index named in it."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--upgrade"]
    command += ["--python-version", target.python, "--python-platform", target.platform]
    done = subprocess.run(
        [*command, str(FOLDER / f"requirements-{variant}.in")], check=True, capture_output=True, text=True
    )
    return done.stdout


def entries(text: str) -> dict[str, list[str]]:
    """Package -> its line and those of its hashes, without continuation marks."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        content = line.strip().removesuffix("\\").strip()
        if content.startswith("--hash="):
            found[name].append(content)
        elif content and not content.startswith("#"):
            name = re.split(r"[=\[;@ ]", content, maxsplit=1)[0]
            found[name] = [content]
    return found


def lock(variant: str) -> str:
    """The text of the variant's lock file."""
    target = TARGETS[variant]
    locked = entries(compiled(variant, target))
    for name, sha256 in target.files:
        locked[name][1:] = [f"--hash=sha256:{sha256}"]
    kept = {name: lines for name, lines in locked.items() if not re.fullmatch(target.left_out, name)}
    head = f"# Made by docker/lock.py for Python {target.python}, {target.platform}. Not to be edited.\n"
    return head + "".join(" \\\n    ".join(lines) + "\n" for lines in kept.values())


def main(variants: list[str]) -> int:
    for variant in variants or list(TARGETS):
        if variant not in TARGETS:
            sys.stderr.write(f"{variant!r}; legal: {', '.join(TARGETS)}\n")
            return 2
        (FOLDER / f"requirements-{variant}.lock").write_text(lock(variant))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
