"""TrainingStack: the image, the number of GPU nodes and what runs on them; the last of the chain, the first to go."""

from __future__ import annotations

from aws_cdk import CfnResource
from aws_cdk import aws_codebuild as codebuild
from constructs import Construct

from stacks import image_context
from stacks.base import ProfileStack
from stacks.cluster import ClusterStack
from stacks.constructs.export import DataLossGuard, FileSystemExport
from stacks.constructs.gpu_capacity import GpuCapacity
from stacks.constructs.idle_guard import IdleGuard
from stacks.constructs.image_build import ImageBuild
from stacks.constructs.kubernetes_objects import KubernetesProvider
from stacks.constructs.provider import HandlerNetwork, handler_network
from stacks.constructs.training_payload import JOB_SELECTOR, GpuGroup, LustreVolume, TrainingPayload
from stacks.deployment import deployment
from stacks.gpu_nodes import GpuNodesStack
from stacks.network import NetworkStack
from stacks.profile import Profile
from stacks.storage import StorageStack

COMPUTE = {
    "large": codebuild.ComputeType.LARGE,
    "xlarge": codebuild.ComputeType.X_LARGE,
    "2xlarge": codebuild.ComputeType.X2_LARGE,
}


class TrainingStack(ProfileStack):
    """Image, then capacity, then the payload: no GPU is paid for while an image is built.

    Attributes: ``image``; ``capacity``; ``kubernetes``; ``payload``; ``export``, or None without a bucket;
    ``data_loss_guard``, or None with one; ``idle_guard``, or None where it is off or the nodes come from a Capacity
    Block, which is paid for in any case.
    """

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
        super().__init__(scope, "training", profile=profile, description="Image, GPU capacity, volume and training Job")
        self._block = profile.nodes.capacity.kind == "capacity-block"
        self._cluster = cluster.cluster
        self._group_name = gpu_nodes.auto_scaling_group_name
        self.image = self._image(storage)
        self.capacity = GpuCapacity(
            self,
            "Capacity",
            auto_scaling_group_name=self._group_name,
            num_nodes=profile.nodes.maximum,
            capacity_block_id=profile.nodes.capacity.id if self._block else None,
        )
        self.capacity.resource.node.add_dependency(self.image.resource)
        handlers = self._handler_network(network)
        paths = storage.exported_paths
        self.export = (
            FileSystemExport(self, "Export", file_system_id=storage.file_system_id, paths=paths)
            if storage.data_repository
            else None
        )
        self.kubernetes = KubernetesProvider(self, "Kubernetes", cluster=self._cluster, network=handlers)
        self.payload = self._payload(storage)
        # A changed Job finds its nodes, though the idle guard may have taken them since the last deployment.
        self._capacity_resource().add_property_override("Job", self.payload.job_name)
        self.idle_guard = self._idle_guard(handlers) if profile.idle_guard.minutes and not self._block else None
        self.data_loss_guard = None if self.export else self._data_loss_guard()
        self._outputs()

    def _capacity_resource(self) -> CfnResource:
        resource = self.capacity.resource.node.default_child
        assert isinstance(resource, CfnResource)
        return resource

    def _image(self, storage: StorageStack) -> ImageBuild:
        choice = self.profile.image
        return ImageBuild(
            self,
            "Image",
            repository=storage.repository,
            context=image_context.CHECKOUT,
            base_image=image_context.base_image(choice, self.profile.region),
            dockerfile=image_context.DOCKERFILE,
            build_args={"VARIANT": choice.variant},
            exclude=image_context.EXCLUDE,
            compute_type=COMPUTE[choice.build_compute],
        )

    def _handler_network(self, network: NetworkStack) -> HandlerNetwork | None:
        """Only a private endpoint needs the handlers inside the VPC."""
        if self.profile.cluster.endpoint != "private":
            return None
        return handler_network(
            self, "Handlers", cluster=self._cluster, vpc=network.vpc, subnets=network.private_subnets
        )

    def _payload(self, storage: StorageStack) -> TrainingPayload:
        profile, job = self.profile, self.profile.job
        image_id = image_context.image_id(profile)
        return TrainingPayload(
            self,
            "Payload",
            provider=self.kubernetes,
            config=profile.run,
            deployment=deployment(profile, image=self.image.uri, image_id=image_id),
            volume=LustreVolume(
                capacity_gib=profile.storage.capacity_gib,
                file_system_id=storage.file_system_id,
                dns_name=storage.dns_name,
                mount_name=storage.mount_name,
            ),
            volume_name=profile.volume_name,
            image_ready=self.image.resource,
            needs=[self.capacity.resource],
            prepare_data=job.prepare_data,
            on_change=job.on_change,
            token_secret_arn=job.hf_token_secret_arn,
            gpu_group=GpuGroup(
                auto_scaling_group_name=self._group_name,
                region=profile.region,
                num_nodes=0 if self._block else profile.nodes.maximum,
            ),
            after_pods=self.export.resource if self.export else None,
        )

    def _idle_guard(self, handlers: HandlerNetwork | None) -> IdleGuard:
        guard = IdleGuard(
            self,
            "IdleGuard",
            cluster=self._cluster,
            auto_scaling_group_name=self._group_name,
            namespace=self.profile.job.namespace,
            selector=JOB_SELECTOR,
            idle_minutes=self.profile.idle_guard.minutes,
            network=handlers,
        )
        # It counts from the Job on, and must not act while the stack is still being made.
        guard.node.add_dependency(self.payload.job.resource)
        return guard

    def _data_loss_guard(self) -> DataLossGuard:
        guard = DataLossGuard(self, "DataLossGuard", allow_data_loss=self.profile.storage.allow_data_loss)
        needed = [self.payload, *([self.idle_guard] if self.idle_guard else [])]
        guard.resource.node.add_dependency(*needed)
        return guard

    def _outputs(self) -> None:
        namespace = self.profile.job.namespace
        self.output("Namespace", namespace, "Namespace of the training Jobs")
        self.output("JobName", self.payload.job_name, "Training Job of this stack")
        self.output("JobMessage", self.payload.job.message, "What the last deployment did with the Job")
        self.output("ImageUri", self.image.uri, "Training image")
        self.output("CapacityWarning", self.capacity.warning, "Why GPU nodes are missing; none: all are there")
        status = f"python -m payload status --profile {self.profile.name}"
        self.output("Status", f"{status} --wait", "Waits for the first step and shows where the run is")
