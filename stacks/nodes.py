"""The [nodes] table of a profile: which instances, from where, with which image, labels and taints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stacks.instances import CATALOGUE, EfaLayout, Instance
from stacks.sections import Check, NonNegativeInt, PositiveInt, Section, matches, raise_for

GPU_TAINT_KEY = "nvidia.com/gpu"
BLOCK_MARGIN = timedelta(minutes=35)
"""EC2 begins to terminate a Capacity Block's instances 30 minutes before its end; the nodes leave before that."""

_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_AMI_ID = r"ami-([0-9a-f]{8}|[0-9a-f]{17})"
AMI_FAMILY = "/aws/service/eks/optimized-ami/{version}/amazon-linux-2023/x86_64/nvidia"
"""Public SSM parameters of the image with driver, fabric manager, container toolkit and EFA host parts."""
_AMI_PARAMETER = AMI_FAMILY.format(version="[0-9.]+") + r"/[a-z0-9_.-]+-v[0-9]{8}/image_id"


class Taint(Section):
    """Put on the GPU nodes; the plugins, the CSI driver and the Job tolerate the same list."""

    key: str
    value: str = "true"
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"] = "NoSchedule"

    @model_validator(mode="after")
    def _rules(self) -> Taint:
        legal = "a Kubernetes label key, nvidia.com/gpu for one"
        value = "up to 63 of letters, digits, '-', '_' and '.'"
        raise_for(
            iter(
                [
                    (matches(_LABEL_KEY, self.key), "key", repr(self.key), legal),
                    (matches(_LABEL_VALUE, self.value), "value", repr(self.value), value),
                ]
            )
        )
        return self

    @property
    def toleration(self) -> dict[str, str]:
        """The one toleration that matches key, value and effect."""
        return {"key": self.key, "operator": "Equal", "value": self.value, "effect": self.effect}

    @property
    def kubelet_flag(self) -> str:
        return f"{self.key}={self.value}:{self.effect}"


class CapacityConfig(Section):
    """Where the instances come from."""

    kind: Literal["on-demand", "odcr", "capacity-block"] = "on-demand"
    id: str = ""
    """Of the reservation or block: cr- and 17 hex digits."""
    start: datetime | None = None
    """Of the block, with its offset from UTC."""
    end: datetime | None = None
    """Of the block. The nodes are taken down 35 minutes before."""

    @model_validator(mode="after")
    def _rules(self) -> CapacityConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        if self.kind == "on-demand":
            yield not self.id, "id", repr(self.id), "empty with kind on-demand"
        else:
            named = matches(r"cr-[0-9a-f]{17}", self.id)
            yield named, "id", repr(self.id), f"cr- and 17 hex digits with kind {self.kind}"
        block = self.kind == "capacity-block"
        for field, value in (("start", self.start), ("end", self.end)):
            given = value.isoformat() if value else "missing"
            legal = "a time with its UTC offset with kind capacity-block, else absent"
            yield bool(value and value.tzinfo) if block else value is None, field, given, legal
        if block and self.start and self.end and self.start.tzinfo and self.end.tzinfo:
            length = self.end - self.start
            legal = "1 to 182 days after start"
            yield timedelta(days=1) <= length <= timedelta(days=182), "end", self.end.isoformat(), legal

    @property
    def last_moment(self) -> datetime | None:
        """When the nodes are scheduled to leave a block, in UTC; None without one."""
        return (self.end - BLOCK_MARGIN).astimezone(UTC) if self.end else None


class NodesConfig(Section):
    instance_type: str
    """One of stacks/instances.py."""
    count: PositiveInt = 2
    """Nodes that the Job uses."""
    spare: NonNegativeInt = 0
    """Further nodes that run idle, at full price, and take a lost node's place at once."""
    efa_layout: EfaLayout = "classic"
    """``classic``: EFA with IP on card 0, EFA-only on the rest. ``modern``: a plain interface beside an EFA-only
    device on every card. ``none`` for types without EFA."""
    ami: str
    """Pinned node image: an id, or the versioned SSM path that EC2 resolves at launch. Never ``recommended``."""
    placement_group: bool = False
    """A cluster placement group; can end in insufficient capacity, or in half of a reservation (eksctl #7949)."""
    root_volume_gib: Annotated[int, Field(ge=100, le=16000)] = 200
    """Of the node; the NVMe disks hold images and pods."""
    labels: dict[str, str] = {}
    """Further node labels."""
    taints: tuple[Taint, ...] = (Taint(key=GPU_TAINT_KEY),)
    capacity: CapacityConfig = CapacityConfig()
    replace_on_change: bool = False
    """A changed launch template replaces running nodes by a rolling update. Off: it applies to the next launch, and
    nodes are replaced one by one by hand."""

    @model_validator(mode="after")
    def _rules(self) -> NodesConfig:
        raise_for(self._checks())
        return self

    @property
    def instance(self) -> Instance:
        return CATALOGUE[self.instance_type]

    @property
    def maximum(self) -> int:
        return self.count + self.spare

    @property
    def image_reference(self) -> str:
        """What the launch template holds: an id, or an SSM path that EC2 (not CloudFormation) resolves."""
        return self.ami if self.ami.startswith("ami-") else f"resolve:ssm:{self.ami}"

    @property
    def tolerations(self) -> tuple[dict[str, str], ...]:
        return tuple(taint.toleration for taint in self.taints)

    def _checks(self) -> Iterator[Check]:
        known = self.instance_type in CATALOGUE
        yield known, "instance_type", repr(self.instance_type), ", ".join(CATALOGUE)
        if known:
            layouts = self.instance.efa_layouts
            yield self.efa_layout in layouts, "efa_layout", repr(self.efa_layout), ", ".join(layouts)
            block = self.capacity.kind != "capacity-block" or self.instance.capacity_blocks
            sold = ", ".join(name for name, instance in CATALOGUE.items() if instance.capacity_blocks)
            yield block, "capacity.kind", "'capacity-block'", f"on-demand or odcr; blocks are sold for {sold}"
        pinned = matches(_AMI_ID, self.ami) or matches(_AMI_PARAMETER, self.ami)
        legal = "an ami- id or a versioned path .../nvidia/<image name>-v<date>/image_id, not recommended (make ami)"
        yield pinned, "ami", repr(self.ami), legal
        reserved = self.capacity.kind == "on-demand" or not self.placement_group
        yield reserved, "placement_group", "true", "false with a reservation or block, which has a place already"
        yield self.maximum <= 64, "count", f"{self.count} and {self.spare} spare", "up to 64 together"
        block = self.capacity.kind != "capacity-block" or not self.replace_on_change
        yield block, "replace_on_change", "true", "false with a Capacity Block"
        for key, value in self.labels.items():
            right = matches(_LABEL_KEY, key) and matches(_LABEL_VALUE, value)
            yield right, f"labels.{key}", repr(value), "a Kubernetes label key and value"
            own = not re.fullmatch(r"(.*\.)?(kubernetes|k8s)\.io", key.partition("/")[0]) or "/" not in key
            yield own, f"labels.{key}", repr(value), "a key that the kubelet may set: none of kubernetes.io, k8s.io"
        keys = [(taint.key, taint.effect) for taint in self.taints]
        yield len(keys) == len(set(keys)), "taints", keys, "one taint a key and effect"
