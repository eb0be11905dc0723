"""The five stacks of one profile, in their chain."""

from __future__ import annotations

from dataclasses import dataclass

from aws_cdk import App, Stack

from stacks import config
from stacks.cluster import ClusterStack
from stacks.gpu_nodes import GpuNodesStack
from stacks.network import NetworkStack
from stacks.profile import Profile
from stacks.storage import StorageStack
from stacks.training import TrainingStack


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """In the order of creation; destroyed from the end."""

    network: NetworkStack
    cluster: ClusterStack
    storage: StorageStack
    gpu_nodes: GpuNodesStack
    training: TrainingStack

    @property
    def chain(self) -> tuple[Stack, ...]:
        return (self.network, self.cluster, self.storage, self.gpu_nodes, self.training)


def build(app: App, profile: Profile | None = None) -> Stacks:
    """The stacks of ``profile``, or of the one that the context names.

    The edges between neighbours are explicit: references alone leave Storage and GpuNodes unordered in places, and
    `cdk destroy` then removes the file system under mounted nodes.
    """
    profile = profile or config.from_context(app.node)
    network = NetworkStack(app, profile=profile)
    cluster = ClusterStack(app, profile=profile, network=network)
    storage = StorageStack(app, profile=profile, network=network)
    gpu_nodes = GpuNodesStack(app, profile=profile, network=network, cluster=cluster, storage=storage)
    training = TrainingStack(
        app, profile=profile, network=network, cluster=cluster, storage=storage, gpu_nodes=gpu_nodes
    )
    stacks = Stacks(network=network, cluster=cluster, storage=storage, gpu_nodes=gpu_nodes, training=training)
    for earlier, later in zip(stacks.chain, stacks.chain[1:], strict=False):
        later.add_stack_dependency(earlier)
    return stacks
