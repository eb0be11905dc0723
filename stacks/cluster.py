"""ClusterStack: the EKS control plane, its system nodes and its add-ons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk.lambda_layer_kubectl_v35 import KubectlV35Layer
from constructs import Construct

from stacks.base import ProfileStack
from stacks.network import NetworkStack
from stacks.profile import Profile

KUBECTL_MINOR = 35
"""Of KubectlV35Layer; sections.KUBERNETES_VERSIONS stays within one minor of it."""


class ClusterStack(ProfileStack):
    """EKS with API access entries only.

    Attributes: ``cluster``; ``kubectl_layer``; ``system_nodes``; ``admin_role``, what users assume;
    ``fsx_csi_addon``; ``pod_identity_addon``; ``monitoring_addon``.
    """

    def __init__(self, scope: Construct, *, profile: Profile, network: NetworkStack) -> None:
        super().__init__(scope, "cluster", profile=profile, description="EKS cluster, system nodes and add-ons")
        # Made here, with the name that EKS would use, or it would outlive the stack.
        log_group = logs.LogGroup(
            self,
            "ControlPlaneLogs",
            log_group_name=f"/aws/eks/{profile.cluster_name}/cluster",
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.kubectl_layer = KubectlV35Layer(self, "Kubectl")
        cluster = eks.Cluster(
            self,
            "Cluster",
            cluster_name=profile.cluster_name,
            version=eks.KubernetesVersion.of(profile.cluster.kubernetes_version),
            vpc=network.vpc,
            vpc_subnets=[ec2.SubnetSelection(subnets=list(network.private_subnets))],
            endpoint_access=self._endpoint_access(),
            service_ipv4_cidr=profile.cluster.service_cidr,
            default_capacity_type=eks.DefaultCapacityType.NODEGROUP,
            default_capacity=0,
            cluster_logging=list(eks.ClusterLoggingTypes),
            kubectl_provider_options=eks.KubectlProviderOptions(
                kubectl_layer=self.kubectl_layer, private_subnets=list(network.private_subnets)
            ),
            output_config_command=False,
            prune=False,
        )
        cluster.node.add_dependency(log_group)
        # The L2's type lacks one member of the interface that its users take; at run time it has it.
        self.cluster = cast("eks.ICluster", cluster)
        self.admin_role = self._admin_role()
        cluster.grant_cluster_admin("Admin", self.admin_role.role_arn)
        self.system_nodes = self._system_nodes(cluster, network)
        self.pod_identity_addon = self._addon("PodIdentity", "eks-pod-identity-agent")
        self.fsx_csi_addon = self._fsx_csi_addon()
        self.monitoring_addon = self._addon("NodeMonitoring", "eks-node-monitoring-agent")
        self._outputs()

    def _endpoint_access(self) -> eks.EndpointAccess:
        choice = self.profile.cluster
        if choice.endpoint == "private":
            return eks.EndpointAccess.PRIVATE
        access = eks.EndpointAccess.PUBLIC_AND_PRIVATE
        return access.only_from(*choice.public_cidrs) if choice.public_cidrs else access

    def _admin_role(self) -> iam.IRole:
        """What the kubeconfig assumes. The cluster's creator is CloudFormation's role, which nobody logs in with."""
        arn = self.profile.cluster.admin_role_arn
        if arn:
            return iam.Role.from_role_arn(self, "AdminRole", arn)
        role = iam.Role(
            self,
            "AdminRole",
            assumed_by=iam.AccountRootPrincipal(),
            description=f"Cluster admin of {self.profile.cluster_name}; whom IAM allows to assume it, may",
        )
        role.add_to_policy(iam.PolicyStatement(actions=["eks:DescribeCluster"], resources=[self.cluster.cluster_arn]))
        return role

    def _system_nodes(self, cluster: eks.Cluster, network: NetworkStack) -> eks.Nodegroup:
        """Where CoreDNS and the CSI controller run when no GPU node exists."""
        template = ec2.LaunchTemplate(
            self,
            "SystemTemplate",
            require_imdsv2=True,
            http_put_response_hop_limit=2,  # the CSI controller asks IMDS for its region, from a pod
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(50, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3),
                )
            ],
        )
        version = template.latest_version_number
        count = self.profile.cluster.system_nodes
        return cluster.add_nodegroup_capacity(
            "System",
            instance_types=[ec2.InstanceType(self.profile.cluster.system_instance_type)],
            ami_type=eks.NodegroupAmiType.AL2023_X86_64_STANDARD,
            min_size=count,
            max_size=count + 1,
            desired_size=count,
            subnets=ec2.SubnetSelection(subnets=list(network.private_subnets)),
            launch_template_spec=eks.LaunchTemplateSpec(id=template.launch_template_id or "", version=version),
        )

    def _addon(self, id: str, name: str, configuration: Mapping[str, Any] | None = None, **more: Any) -> eks.CfnAddon:
        addon = eks.CfnAddon(
            self,
            id,
            addon_name=name,
            cluster_name=self.cluster.cluster_name,
            resolve_conflicts="OVERWRITE",
            configuration_values=json.dumps(configuration, sort_keys=True) if configuration else None,
            **more,
        )
        addon.node.add_dependency(self.system_nodes)
        return addon

    def _fsx_csi_addon(self) -> eks.CfnAddon:
        """The driver. Its controller makes nothing here, as the volume is static, so it may describe and no more."""
        role = iam.Role(
            self,
            "FsxCsiRole",
            assumed_by=iam.SessionTagsPrincipal(iam.ServicePrincipal("pods.eks.amazonaws.com")),
            description="FSx CSI controller: reads the file systems of this account and region",
        )
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["fsx:DescribeFileSystems"],
                resources=[self.format_arn(service="fsx", resource="file-system", resource_name="*")],
            )
        )
        identity = eks.CfnAddon.PodIdentityAssociationProperty(
            role_arn=role.role_arn, service_account="fsx-csi-controller-sa"
        )
        addon = self._addon(
            "FsxCsi",
            "aws-fsx-csi-driver",
            {"node": {"tolerations": list(self.profile.nodes.tolerations)}},
            pod_identity_associations=[identity],
        )
        addon.node.add_dependency(self.pod_identity_addon)
        return addon

    def _outputs(self) -> None:
        name, region = self.cluster.cluster_name, self.profile.region
        command = f"aws eks update-kubeconfig --name {name} --region {region} --role-arn {self.admin_role.role_arn}"
        self.output("ClusterName", name, "EKS cluster")
        self.output("UpdateKubeconfig", command, "Run this to point kubectl at the cluster")
