"""The tables of a profile that need nothing but themselves to be checked; nodes are in stacks/nodes.py."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KUBERNETES_VERSIONS = ("1.34", "1.35")
"""Within one minor of the kubectl layer (cluster.py: v35).  1.36 is left out: its node image has kernel 6.18, for
which there is no Lustre client."""
SCRATCH_CAPACITIES = "1200, 2400 or a multiple of 2400"
SECRET = r"arn:aws:secretsmanager:([a-z0-9-]+):[0-9]{12}:secret:[A-Za-z0-9/_+=.@-]+"
"""Group 1 is the region."""
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"

Check = tuple[bool, str, object, str]
"""Whether it holds, the field, its value, the legal values."""
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def raise_for(checks: Iterable[Check]) -> None:
    """Raises ValueError with one line for each check that does not hold."""
    problems = [f"{field}: {value}; legal: {legal}" for right, field, value, legal in checks if not right]
    if problems:
        raise ValueError("\n".join(problems))


def is_block(cidr: str, shortest: int, longest: int) -> bool:
    try:
        return shortest <= ipaddress.IPv4Network(cidr).prefixlen <= longest
    except ValueError:
        return False


def overlap(one: str, other: str) -> bool:
    return ipaddress.IPv4Network(one).overlaps(ipaddress.IPv4Network(other))


class Section(BaseModel):
    """A table of the profile: unknown fields are refused, defaults never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NetworkConfig(Section):
    """A new VPC, or an existing one: then give `vpc_id` and both subnets, which need a route to the internet."""

    cidr: str = "10.0.0.0/16"
    """Of the VPC, new or existing."""
    vpc_id: str = ""
    """Empty: a VPC is made."""
    gpu_subnet_id: str = ""
    """Private subnet in `availability_zone`: nodes and file system."""
    second_subnet_id: str = ""
    """Private subnet in `second_zone`: EKS wants two zones."""

    @model_validator(mode="after")
    def _rules(self) -> NetworkConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        yield is_block(self.cidr, 16, 20), "cidr", repr(self.cidr), "an IPv4 block of /16 to /20, 10.0.0.0/16 for one"
        given = {"vpc_id": self.vpc_id, "gpu_subnet_id": self.gpu_subnet_id, "second_subnet_id": self.second_subnet_id}
        for field, value in given.items():
            kind = "vpc" if field == "vpc_id" else "subnet"
            legal = f"{kind}- and 8 or 17 hex digits, in an existing VPC; all three or none"
            right = matches(rf"{kind}-([0-9a-f]{{8}}|[0-9a-f]{{17}})", value) if any(given.values()) else True
            yield right, field, repr(value), legal
        distinct = not self.vpc_id or self.gpu_subnet_id != self.second_subnet_id
        yield distinct, "second_subnet_id", repr(self.second_subnet_id), "another subnet than gpu_subnet_id"


class ClusterConfig(Section):
    kubernetes_version: str = "1.35"
    """Control plane and node image."""
    endpoint: Literal["public-and-private", "private"] = "public-and-private"
    """``private``: kubectl works from inside the VPC only, and so do the handlers."""
    public_cidrs: tuple[str, ...] = ()
    """Who may reach the public endpoint; empty: everyone who can authenticate."""
    service_cidr: str = "172.20.0.0/16"
    """Set explicitly: nodeadm needs it and CloudFormation has no attribute for it."""
    system_instance_type: str = "m6i.large"
    """Nodes for CoreDNS and the CSI controller."""
    system_nodes: Annotated[int, Field(ge=2, le=5)] = 2
    admin_role_arn: str = ""
    """IAM role that gets cluster-admin besides CDK's own; empty: none."""

    @model_validator(mode="after")
    def _rules(self) -> ClusterConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        version = self.kubernetes_version
        yield version in KUBERNETES_VERSIONS, "kubernetes_version", repr(version), ", ".join(KUBERNETES_VERSIONS)
        legal = "an IPv4 block of /12 to /24, 172.20.0.0/16 for one"
        yield is_block(self.service_cidr, 12, 24), "service_cidr", repr(self.service_cidr), legal
        for i, cidr in enumerate(self.public_cidrs):
            yield is_block(cidr, 0, 32), f"public_cidrs[{i}]", repr(cidr), "an IPv4 block"
        public = self.endpoint != "private" or not self.public_cidrs
        yield public, "public_cidrs", list(self.public_cidrs), "empty with a private endpoint"
        kind = self.system_instance_type
        yield matches(r"[a-z0-9-]+\.[a-z0-9]+", kind), "system_instance_type", repr(kind), "an instance type"
        role = self.admin_role_arn
        named = not role or matches(r"arn:aws:iam::[0-9]{12}:role/.+", role)
        yield named, "admin_role_arn", repr(role), "empty or arn:aws:iam::<account>:role/<name>"


class StorageConfig(Section):
    capacity_gib: int = 1200
    """FSx for Lustre SCRATCH_2: 200 MB/s a TiB."""
    compression: Literal["NONE", "LZ4"] = "LZ4"
    export_bucket: str = ""
    """Existing S3 bucket, in the region, that the runs are exported to; empty: none."""
    export_prefix: str = "nvrx-eks"
    allow_data_loss: bool = False
    """Without a bucket, destroying the stacks loses the runs: refused until this is true and deployed."""

    @model_validator(mode="after")
    def _rules(self) -> StorageConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        size = self.capacity_gib
        right = size == 1200 or (size > 0 and size % 2400 == 0)
        yield right, "capacity_gib", size, f"{SCRATCH_CAPACITIES} (SCRATCH_2)"
        bucket, prefix = self.export_bucket, self.export_prefix
        yield not bucket or matches(_BUCKET, bucket), "export_bucket", repr(bucket), "empty or an S3 bucket's name"
        right = matches(r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*", prefix)
        yield right, "export_prefix", repr(prefix), "an S3 prefix without slashes at its ends"


class ImageConfig(Section):
    variant: Literal["deploy", "reproduce"] = "deploy"
    """``deploy``: Ubuntu 24.04, NVRx 0.6 or newer. ``reproduce``: the article's PyTorch 2.9 image with NVRx 0.4.1."""
    base_image: str = ""
    """Replaces the variant's base, ``repository:tag``."""
    base_digest: str = ""
    """``sha256:`` and 64 hex digits of the base; empty: the tag alone."""
    build_compute: Literal["large", "xlarge", "2xlarge"] = "2xlarge"
    """CodeBuild's machine; smaller ones do not finish within the 50 minutes that a build may take."""

    @model_validator(mode="after")
    def _rules(self) -> ImageConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        base, digest = self.base_image, self.base_digest
        named = not base or matches(r"[a-z0-9][a-z0-9.:/_-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*", base)
        fixed = named and not base.endswith(":latest")
        yield fixed, "base_image", repr(base), "empty or repository:tag with another tag than latest"
        hashed = not digest or matches(r"sha256:[0-9a-f]{64}", digest)
        yield hashed, "base_digest", repr(digest), "empty or sha256: and 64 hex digits"


class JobConfig(Section):
    namespace: str = "training"
    on_change: Literal["replace", "keep"] = "replace"
    """A changed spec replaces the running Job (save, then resume), or leaves it until it ends."""
    hf_token_secret_arn: str = ""
    """Secrets Manager secret with a Hugging Face token; empty: public models only."""
    prepare_data: tuple[str, ...] = ("--source", "c4")
    """Options of `python -m payload prepare-data` for the Job that fills the data folder; empty: no such Job."""
    cpus: NonNegativeInt = 0
    """Of a pod; 0: all that the node can give."""
    memory_gib: NonNegativeInt = 0
    """Of a pod, memory volume included; 0: all that the node can give."""
    memory_volume_gib: NonNegativeInt = 0
    """Size limit of /dev/shm, counted against the memory; 0: half of it."""
    max_hours: Annotated[float, Field(gt=0, le=4368)] = 24.0
    """The Job is ended after so long (activeDeadlineSeconds); the bound of its cost."""

    @model_validator(mode="after")
    def _rules(self) -> JobConfig:
        raise_for(self._checks())
        return self

    def _checks(self) -> Iterator[Check]:
        space = self.namespace
        named = matches(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", space) and len(space) <= 63
        legal = "up to 63 of a-z, 0-9 and '-', and none of Kubernetes' own"
        yield named and not space.startswith("kube-") and space != "default", "namespace", repr(space), legal
        arn = self.hf_token_secret_arn
        legal = "empty or arn:aws:secretsmanager:<region>:<account>:secret:<name>"
        yield not arn or matches(SECRET, arn), "hf_token_secret_arn", repr(arn), legal


class IdleGuardConfig(Section):
    minutes: NonNegativeInt = 60
    """Without an active training Job for so long, the GPUs are set to zero; 0: never."""

    @model_validator(mode="after")
    def _rules(self) -> IdleGuardConfig:
        right = self.minutes == 0 or 10 <= self.minutes <= 1440
        raise_for(iter([(right, "minutes", self.minutes, "0 (off) or 10 to 1440")]))
        return self
