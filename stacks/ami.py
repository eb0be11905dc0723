"""The node image that a profile pins, beside the newest: ``python -m stacks.ami --profile p5 [--write]``.

AWS moves the parameter ``recommended``; a stack that reads it replaces its nodes at some later deployment.  So the
profile holds one release, and this command, with the user's credentials, shows the newest and writes it on request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from payload.config import ConfigError
from stacks import config
from stacks.nodes import AMI_FAMILY
from stacks.profile import Profile


@dataclass(frozen=True)
class Newest:
    """What ``recommended`` points to today."""

    release: str
    """The image's name, amazon-eks-node-al2023-x86_64-nvidia-1.35-v20260903 for one."""
    image_id: str
    path: str
    """The versioned parameter of that release: what a profile pins."""


def newest(profile: Profile) -> Newest:
    """Asks SSM in the profile's region. Raises botocore's errors."""
    family = AMI_FAMILY.format(version=profile.cluster.kubernetes_version)
    names = [f"{family}/recommended/image_name", f"{family}/recommended/image_id"]
    answer = boto3.client("ssm", region_name=profile.region).get_parameters(Names=names)
    if answer["InvalidParameters"]:
        raise ConfigError(f"no parameter {', '.join(answer['InvalidParameters'])} in {profile.region}")
    values = {item["Name"]: item["Value"] for item in answer["Parameters"]}
    release, image_id = (values[name] for name in names)
    return Newest(release, image_id, f"{family}/{release}/image_id")


def pin(path: Path, old: str, new: str) -> None:
    """Writes ``new`` in place of ``old`` in a profile, leaving all else as it is.

    Raises ConfigError when the old value is not there exactly once, or the outcome is not a legal profile.
    """
    text = path.read_text()
    if text.count(f'"{old}"') != 1:
        raise ConfigError(f"profile {path}: nodes.ami: {old!r} is not there exactly once; write {new!r} by hand")
    changed = text.replace(f'"{old}"', f'"{new}"')
    config.parse(changed)
    path.write_text(changed)


def main(argv: Sequence[str]) -> int:
    """Prints both images; 1 when SSM cannot be asked, 2 for a profile that is refused."""
    parser = argparse.ArgumentParser(prog="python -m stacks.ami", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--profile", default=config.DEFAULT, help="name in profiles/, or the path of a TOML file")
    parser.add_argument("--write", action="store_true", help="pin the newest in the profile")
    options = parser.parse_args(argv)
    try:
        profile = config.load(options.profile)
        found = newest(profile)
        sys.stdout.write(f"pinned  {profile.nodes.ami}\nnewest  {found.path}\n        {found.image_id}\n")
        if profile.nodes.ami in (found.path, found.image_id):
            sys.stdout.write("the pinned image is the newest\n")
        elif options.write:
            pin(config.path_of(options.profile), profile.nodes.ami, found.path)
            sys.stdout.write("pinned the newest; it applies to nodes launched after the next deployment\n")
        else:
            sys.stdout.write("--write pins the newest\n")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (BotoCoreError, ClientError) as error:
        sys.stderr.write(f"SSM in {profile.region}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
