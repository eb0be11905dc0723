"""Which files of the checkout form the image's build context, and the hash that stands for them.

The list is a short one on purpose: a change of a stack, a profile or a test must not build an image and replace a
running Job. docker/Dockerfile.dockerignore says the same to Docker, podman and buildah.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from stacks.profile import Profile
from stacks.sections import ImageConfig

CHECKOUT = Path(__file__).parents[1]
DOCKERFILE = "docker/Dockerfile"
FOLDERS = ("payload", "examples")
"""Their Python files, at any depth."""
FILES = (DOCKERFILE, "docker/verify_image.py")

EXCLUDE = (
    "/*",
    *(f"!/{folder}" for folder in (*FOLDERS, "docker")),
    "/docker/*",
    *(f"!/{file}" for file in FILES),
    "!/docker/requirements-*.lock",
    "__pycache__",
    *(f"/{folder}/**/*.*" for folder in FOLDERS),
    *(f"!/{folder}/**/*.py" for folder in FOLDERS),
)
"""The same as patterns of a .gitignore, for an asset of the whole checkout."""

BASE_REGISTRY = "763104351884"
"""AWS's account of the Deep Learning Containers, in most regions (AWS Deep Learning Containers, "Available images")."""
BASES = {
    "deploy": "base:12.8.1-gpu-py312-cu128-ubuntu24.04-ec2",
    "reproduce": "pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2",
}


def files(root: Path = CHECKOUT) -> list[Path]:
    """Relative paths, sorted."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    found += [root / file for file in FILES] + list((root / "docker").glob("requirements-*.lock"))
    return sorted(path.relative_to(root) for path in found)


@functools.cache
def checkout_hash() -> str:
    """Of this checkout; one process sees one state of it."""
    return context_hash(CHECKOUT)


def context_hash(root: Path) -> str:
    """Of the files' names and contents; modes and times do not count."""
    digest = hashlib.sha256()
    for path in files(root):
        content = (root / path).read_bytes()
        digest.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def base_image(image: ImageConfig, region: str) -> str:
    """The base to build on: the profile's, or AWS's image of the variant in the region; with its digest where given.

    Without a digest the build looks up the tag's when the stack is deployed.
    """
    named = image.base_image or f"{BASE_REGISTRY}.dkr.ecr.{region}.amazonaws.com/{BASES[image.variant]}"
    return f"{named}@{image.base_digest}" if image.base_digest else named


def image_id(profile: Profile) -> str:
    """A plain value that changes with what the image is built of; it stands for the image in the Job's name."""
    parts = [checkout_hash(), profile.image.variant, base_image(profile.image, profile.region)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
