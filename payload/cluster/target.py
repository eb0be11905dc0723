"""Where a command acts: the cluster, its Deployment, and the GPU group behind it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from payload import settings, volumes
from payload.cluster.kubectl import ClusterError, Kubectl
from payload.config import ConfigError, RunConfig
from payload.deployment import Deployment, Toleration
from payload.settings import LineParser

EXIT_FAILED = 1


@dataclass(frozen=True)
class GpuGroup:
    """The Auto Scaling group of the stacks."""

    auto_scaling_group_name: str
    region: str
    num_nodes: int
    """What ``submit`` scales it to; 0: others decide (a Capacity Block's schedule)."""


@dataclass(frozen=True)
class Target:
    kubectl: Kubectl
    config: RunConfig
    deployment: Deployment
    group: GpuGroup | None
    """None on a cluster that no stack of ours made."""
    run_id_given: bool

    @property
    def by_stacks(self) -> bool:
        return self.group is not None


def parser(command: str, description: str) -> LineParser:
    """That of all commands, with where to go."""
    made = settings.parser(command, description, profile="p5")
    place = made.add_argument_group("where")
    place.add_argument("--context", default="", help="kubectl context (default: the current one)")
    place.add_argument("--namespace", default="", help="default: the profile's")
    place.add_argument("--image", default="", help="default: the stacks' image, or the profile's")
    return made


def read(given: argparse.Namespace) -> Target:
    """From the profile, and from what the stacks left in the cluster. Raises ConfigError and ClusterError."""
    found = settings.read(given)
    deployment = found.deployment
    namespace = given.namespace or deployment.namespace
    kubectl = Kubectl(namespace=namespace, context=given.context)
    left = kubectl.find("configmap", volumes.SETTINGS_NAME)
    group = None
    if left is not None:
        deployment, group = from_settings(left["data"])
    deployment = dataclasses.replace(deployment, namespace=namespace)
    if given.image:
        deployment = dataclasses.replace(deployment, image=given.image, image_id="")
    return Target(kubectl, found.config, deployment, group, found.run_id_given)


def from_settings(data: dict[str, str]) -> tuple[Deployment, GpuGroup]:
    """What TrainingPayload wrote (payload/volumes.py: ``settings``). Raises ClusterError where it is another's."""
    try:
        facts = json.loads(data[volumes.SETTINGS_KEY])
        values = {name: _frozen(value) for name, value in facts["deployment"].items()}
        values["tolerations"] = tuple(Toleration(**item) for item in values["tolerations"])
        values["image"] = data[volumes.IMAGE_KEY]
        return Deployment(**values), GpuGroup(**facts["gpu_group"])
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterError(
            f"ConfigMap {volumes.SETTINGS_NAME}: {error!r}; it is of another release: deploy the stacks again"
        ) from error


def _frozen(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def command(function: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A ClusterError becomes one line on stderr and exit code 1; ConfigError stays the caller's."""

    @wraps(function)
    def called(argv: Sequence[str]) -> int:
        try:
            return function(argv)
        except ClusterError as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED

    return called


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def number(text: str, name: str, low: float) -> float:
    """A number from ``low`` on. Raises ConfigError naming the option."""
    try:
        value = float(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ConfigError(f"{name}: {text!r}; legal: a number from {low:g} on")
    return value


def as_json(values: Any) -> str:
    return json.dumps(values, indent=1, sort_keys=True)
