"""The profile: every choice a user makes, as one frozen tree; the rules that AWS would enforce minutes later.

A profile is one TOML file.  Its ``[run]`` table is payload.config.RunConfig; the other tables are in sections.py and
nodes.py.  Reading files and CDK context is stacks/config.py's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import model_validator

from payload.config import RunConfig
from stacks.nodes import NodesConfig
from stacks.sections import (
    SECRET,
    Check,
    ClusterConfig,
    IdleGuardConfig,
    ImageConfig,
    JobConfig,
    NetworkConfig,
    Section,
    StorageConfig,
    matches,
    overlap,
    raise_for,
)

_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_REGION = r"[a-z]{2}(-[a-z]+)+-[0-9]"


class Profile(Section):
    name: str
    """Part of every stack's and resource's name: up to 20 of a-z, 0-9 and '-'."""
    region: str
    availability_zone: str
    """Nodes and file system."""
    second_zone: str
    """EKS wants subnets in two zones; nothing but system nodes runs here."""
    account: str = ""
    """12 digits; empty: the account of the deploying credentials."""
    network: NetworkConfig = NetworkConfig()
    cluster: ClusterConfig = ClusterConfig()
    nodes: NodesConfig
    storage: StorageConfig = StorageConfig()
    image: ImageConfig = ImageConfig()
    job: JobConfig = JobConfig()
    idle_guard: IdleGuardConfig = IdleGuardConfig()
    tags: dict[str, str] = {}
    """Put on every resource that takes tags."""
    run: RunConfig
    """What the pods are given; payload/config.py."""

    @model_validator(mode="after")
    def _rules(self) -> Profile:
        raise_for(check for checks in (self._place(), self._names(), self._shape(), self._fit()) for check in checks)
        return self

    @property
    def prefix(self) -> str:
        """Of stacks, cluster, repository and Auto Scaling group."""
        return f"nvrx-{self.name}"

    @property
    def cluster_name(self) -> str:
        return self.prefix

    @property
    def repository_name(self) -> str:
        return f"nvrx-eks/{self.name}"

    @property
    def volume_name(self) -> str:
        """Of the persistent volume and its claim."""
        return f"{self.prefix}-fsx"

    @property
    def node_labels(self) -> dict[str, str]:
        """What user data sets and the Job selects: the plugin's own label, the profile, and the user's."""
        return {"nvidia.com/gpu.present": "true", "nvrx-eks/profile": self.name} | self.nodes.labels

    @property
    def pod_cpus(self) -> int:
        return self.job.cpus or self.nodes.instance.allocatable_cpus

    @property
    def pod_memory_gib(self) -> int:
        return self.job.memory_gib or self.nodes.instance.allocatable_memory_gib

    @property
    def pod_memory_volume_gib(self) -> int:
        return self.job.memory_volume_gib or self.pod_memory_gib // 2

    def _place(self) -> Iterator[Check]:
        region, zone, second = self.region, self.availability_zone, self.second_zone
        yield matches(_REGION, region), "region", repr(region), "an AWS region, us-east-1 for one"
        yield matches(re.escape(region) + "[a-z]", zone), "availability_zone", repr(zone), f"a zone of {region}"
        other = matches(re.escape(region) + "[a-z]", second) and second != zone
        yield other, "second_zone", repr(second), f"another zone of {region} than {zone}"
        account = self.account
        yield not account or matches(r"[0-9]{12}", account), "account", repr(account), "empty or 12 digits"
        secret = re.fullmatch(SECRET, self.job.hf_token_secret_arn)
        here = not secret or secret[1] == region
        yield here, "job.hf_token_secret_arn", repr(self.job.hf_token_secret_arn), f"a secret in {region}"
        separate = not overlap(self.network.cidr, self.cluster.service_cidr)
        legal = f"a block apart from network.cidr ({self.network.cidr})"
        yield separate, "cluster.service_cidr", repr(self.cluster.service_cidr), legal

    def _names(self) -> Iterator[Check]:
        legal = "up to 20 of a-z, 0-9 and '-', beginning with a letter, ending with none of '-'"
        yield matches(_NAME, self.name) and len(self.name) <= 20, "name", repr(self.name), legal
        for key, value in self.tags.items():
            right = 0 < len(key) <= 128 and len(value) <= 256 and not key.startswith("aws:")
            legal = "a key of up to 128 characters, not beginning with aws:, and a value of up to 256"
            yield right, f"tags.{key}", repr(value), legal
            yield not key.startswith("kubernetes.io/cluster/"), f"tags.{key}", repr(value), "no tag of a cluster's"

    def _shape(self) -> Iterator[Check]:
        shape, nodes = self.run.parallelism, self.nodes
        legal = f"nodes.count ({nodes.count})"
        yield shape.num_nodes == nodes.count, "run.parallelism.num_nodes", shape.num_nodes, legal
        gpus = nodes.instance.gpus
        legal = f"the GPUs of a {nodes.instance_type} ({gpus})"
        yield shape.ranks_per_node == gpus, "run.parallelism.ranks_per_node", shape.ranks_per_node, legal
        yield shape.device == "cuda", "run.parallelism.device", repr(shape.device), "cuda on GPU nodes"
        version = nodes.ami.split("/")[5] if nodes.ami.startswith("/") else self.cluster.kubernetes_version
        legal = f"an image of cluster.kubernetes_version ({self.cluster.kubernetes_version})"
        yield version == self.cluster.kubernetes_version, "nodes.ami", repr(nodes.ami), legal

    def _fit(self) -> Iterator[Check]:
        instance, job = self.nodes.instance, self.job
        cpus, memory = instance.allocatable_cpus, instance.allocatable_memory_gib
        yield job.cpus <= cpus, "job.cpus", job.cpus, f"0 (all) to {cpus} on a {instance.name}"
        yield job.memory_gib <= memory, "job.memory_gib", job.memory_gib, f"0 (all) to {memory} on a {instance.name}"
        limit = self.pod_memory_gib - 1
        legal = f"0 (half) to {limit}, less than the pod's memory"
        yield job.memory_volume_gib <= limit, "job.memory_volume_gib", job.memory_volume_gib, legal
