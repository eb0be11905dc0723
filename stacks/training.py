"""TrainingStack: the number of GPU nodes and what runs on them; the last of the chain, the first to go."""

from __future__ import annotations

from constructs import Construct

from stacks.base import ProfileStack
from stacks.cluster import ClusterStack
from stacks.constructs.gpu_capacity import GpuCapacity
from stacks.gpu_nodes import GpuNodesStack
from stacks.network import NetworkStack
from stacks.profile import Profile
from stacks.storage import StorageStack


class TrainingStack(ProfileStack):
    """Attributes: ``capacity``."""

    def __init__(
        self,
        scope: Construct,
        *,
        profile: Profile,
        network: NetworkStack,
        cluster: ClusterStack,
        storage: StorageStack,
        gpu_nodes: GpuNodesStack,
    ) -> None:
        super().__init__(scope, "training", profile=profile, description="GPU capacity, volume and training Job")
        capacity = profile.nodes.capacity
        self.capacity = GpuCapacity(
            self,
            "Capacity",
            auto_scaling_group_name=gpu_nodes.auto_scaling_group_name,
            num_nodes=profile.nodes.maximum,
            capacity_block_id=capacity.id if capacity.kind == "capacity-block" else None,
        )
