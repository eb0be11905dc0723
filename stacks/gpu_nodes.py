"""GpuNodesStack: launch template, Auto Scaling group and device plugins of the GPU nodes."""

from __future__ import annotations

from typing import Any

from aws_cdk import Tags
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.base import ProfileStack
from stacks.cluster import ClusterStack
from stacks.efa import ClusterAddress, network_interfaces, user_data
from stacks.network import NetworkStack
from stacks.nodes import CapacityConfig
from stacks.profile import Profile
from stacks.storage import StorageStack

NVIDIA_PLUGIN_VERSION = "0.19.3"
"""0.19.0 mounts every uverbs device into every pod (k8s-device-plugin #1692); with mofedEnabled false, none."""
EFA_PLUGIN_VERSION = "v0.5.30"
NODE_POLICIES = (
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryReadOnly",
    "AmazonSSMManagedInstanceCore",
)


class GpuNodesStack(ProfileStack):
    """Self-managed nodes in one subnet. Their number is zero until the training stack's capacity resource sets it.

    Attributes: ``asg``; ``auto_scaling_group_name``, a plain value; ``node_role``; ``access_entry``;
    ``launch_template``; ``efa_security_group`` or None; ``nvidia_plugin``; ``efa_plugin`` or None; ``plugins``.
    """

    def __init__(
        self,
        scope: Construct,
        *,
        profile: Profile,
        network: NetworkStack,
        cluster: ClusterStack,
        storage: StorageStack,
    ) -> None:
        super().__init__(scope, "gpu-nodes", profile=profile, description="GPU nodes and device plugins")
        self._cluster = cluster.cluster
        self.node_role = iam.Role(
            self,
            "NodeRole",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name(name) for name in NODE_POLICIES],
        )
        self.access_entry = eks.AccessEntry(
            self,
            "NodeAccess",
            cluster=cluster.cluster,
            principal=self.node_role.role_arn,
            access_entry_type=eks.AccessEntryType.EC2_LINUX,
            access_policies=[],
        )
        instance = profile.nodes.instance
        self.efa_security_group = self._efa_group(network) if instance.efa_cards else None
        groups = [cluster.cluster.cluster_security_group_id, storage.client_security_group.security_group_id]
        if self.efa_security_group:
            groups.insert(0, self.efa_security_group.security_group_id)
        self.launch_template = self._launch_template(groups)
        self.auto_scaling_group_name = f"{profile.prefix}-gpu"
        self.asg = self._auto_scaling_group(network)
        self.nvidia_plugin = self._nvidia_plugin()
        self.efa_plugin = self._efa_plugin() if instance.efa_cards else None
        self.plugins = [plugin for plugin in (self.nvidia_plugin, self.efa_plugin) if plugin]
        self.output("AutoScalingGroup", self.auto_scaling_group_name, "Auto Scaling group of the GPU nodes")

    def _efa_group(self, network: NetworkStack) -> ec2.SecurityGroup:
        """EFA's handshake wants rules whose peer is the group itself, in and out; 0.0.0.0/0 does not count.

        CDK drops an egress rule to the group where all outbound traffic is allowed, hence the L1.
        """
        group = ec2.SecurityGroup(self, "Efa", vpc=network.vpc, description="EFA between GPU nodes")
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "EFA")
        ec2.CfnSecurityGroupEgress(
            self,
            "EfaToItself",
            group_id=group.security_group_id,
            destination_security_group_id=group.security_group_id,
            ip_protocol="-1",
            description="EFA",
        )
        return group

    def _launch_template(self, groups: list[str]) -> ec2.LaunchTemplate:
        profile, nodes = self.profile, self.profile.nodes
        address = ClusterAddress(
            name=profile.cluster_name,
            endpoint=self._cluster.cluster_endpoint,
            certificate_authority=self._cluster.cluster_certificate_authority_data,
            service_cidr=profile.cluster.service_cidr,
        )
        data = user_data(address, labels=profile.node_labels, taints=nodes.taints)
        placement = (
            ec2.PlacementGroup(self, "Placement", strategy=ec2.PlacementGroupStrategy.CLUSTER)
            if nodes.placement_group
            else None
        )
        template = ec2.LaunchTemplate(
            self,
            "LaunchTemplate",
            instance_type=ec2.InstanceType(nodes.instance_type),
            # A plain value: CloudFormation resolves nothing, so that a redeploy changes nothing.
            machine_image=ec2.MachineImage.generic_linux({profile.region: nodes.image_reference}),
            user_data=ec2.UserData.custom(data),
            role=self.node_role,
            require_imdsv2=True,
            http_put_response_hop_limit=2,
            placement_group=placement,
            detailed_monitoring=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        nodes.root_volume_gib, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3
                    ),
                )
            ],
        )
        resource = template.node.default_child
        assert isinstance(resource, ec2.CfnLaunchTemplate)
        resource.add_property_deletion_override("LaunchTemplateData.SecurityGroupIds")
        overrides: dict[str, Any] = {
            "NetworkInterfaces": network_interfaces(nodes.instance, nodes.efa_layout, groups),
            **reservation(nodes.capacity),
        }
        for key, value in overrides.items():
            resource.add_property_override(f"LaunchTemplateData.{key}", value)
        return template

    def _auto_scaling_group(self, network: NetworkStack) -> autoscaling.AutoScalingGroup:
        """No desired capacity, so that a deployment never changes the number of running nodes.

        One subnet, so there is nothing to balance between zones.
        """
        nodes = self.profile.nodes
        rolling = autoscaling.UpdatePolicy.rolling_update(min_instances_in_service=0, max_batch_size=1)
        group = autoscaling.AutoScalingGroup(
            self,
            "Nodes",
            auto_scaling_group_name=self.auto_scaling_group_name,
            vpc=network.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=[network.gpu_subnet]),
            launch_template=self.launch_template,
            min_capacity=0,
            max_capacity=nodes.maximum,
            update_policy=rolling if nodes.replace_on_change else None,
        )
        Tags.of(group).add(f"kubernetes.io/cluster/{self.profile.cluster_name}", "owned")
        Tags.of(group).add("Name", self.auto_scaling_group_name)
        # Nodes join through the entry, and leave through it.
        group.node.add_dependency(self.access_entry, self.node_role)
        if self.efa_security_group:
            group.node.add_dependency(self.efa_security_group, self.node.find_child("EfaToItself"))
        return group

    def _nvidia_plugin(self) -> eks.HelmChart:
        """Its affinity wants the label nvidia.com/gpu.present, which the user data sets."""
        return eks.HelmChart(
            self,
            "NvidiaPlugin",
            cluster=self._cluster,
            chart="nvidia-device-plugin",
            repository="https://nvidia.github.io/k8s-device-plugin",
            version=NVIDIA_PLUGIN_VERSION,
            release="nvidia-device-plugin",
            namespace="kube-system",
            values={"mofedEnabled": False, "tolerations": list(self.profile.nodes.tolerations)},
        )

    def _efa_plugin(self) -> eks.HelmChart:
        """The chart tolerates no GPU taint by itself."""
        return eks.HelmChart(
            self,
            "EfaPlugin",
            cluster=self._cluster,
            chart="aws-efa-k8s-device-plugin",
            repository="https://aws.github.io/eks-charts",
            version=EFA_PLUGIN_VERSION,
            release="aws-efa-k8s-device-plugin",
            namespace="kube-system",
            values={"tolerations": list(self.profile.nodes.tolerations)},
        )


def reservation(capacity: CapacityConfig) -> dict[str, Any]:
    """The launch template's keys for a reservation or block; none on demand."""
    if capacity.kind == "on-demand":
        return {}
    keys: dict[str, Any] = {
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": capacity.id}}
    }
    if capacity.kind == "capacity-block":
        keys["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    return keys
