"""NetworkStack: a VPC in two zones, or the user's own."""

from __future__ import annotations

from aws_cdk import Acknowledgment, CfnWaitConditionHandle, RemovalPolicy, Validations
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from stacks.base import ProfileStack
from stacks.profile import Profile


class NetworkStack(ProfileStack):
    """The chain's first stack, so the last to go.

    Attributes: ``vpc``; ``gpu_subnet``, the one private subnet of nodes and file system; ``private_subnets``, that
    one first.
    """

    def __init__(self, scope: Construct, *, profile: Profile) -> None:
        super().__init__(scope, "network", profile=profile, description="VPC of the training cluster")
        self.vpc = self._existing() if profile.network.vpc_id else self._new()
        self.private_subnets = tuple(self.vpc.private_subnets)
        self.gpu_subnet = self.private_subnets[0]
        self.output("VpcId", self.vpc.vpc_id, "VPC")
        self.output("GpuSubnetId", self.gpu_subnet.subnet_id, "Subnet of nodes and file system")

    def _existing(self) -> ec2.IVpc:
        network = self.profile.network
        # CloudFormation takes no template without a resource; this one does nothing and costs nothing.
        CfnWaitConditionHandle(self, "Nothing")
        return ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=network.vpc_id,
            vpc_cidr_block=network.cidr,
            availability_zones=self.availability_zones,
            private_subnet_ids=[network.gpu_subnet_id, network.second_subnet_id],
        )

    def _new(self) -> ec2.IVpc:
        """One NAT gateway, in the GPU zone: traffic between zones costs, and a second one helps no training run."""
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(self.profile.network.cidr),
            max_azs=2,
            nat_gateways=1,
            restrict_default_security_group=False,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=26, map_public_ip_on_launch=False
                ),
                ec2.SubnetConfiguration(name="private", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS),
            ],
        )
        reason = "nodes, reservation and file system must share the zone that the profile names"
        Validations.of(self).acknowledge(Acknowledgment(id="CloudFormation-Validate::W3010", reason=reason))
        # Image layers and checkpoint exports would otherwise pay the NAT gateway by the gigabyte.
        vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        group = logs.LogGroup(
            self, "FlowLogs", retention=logs.RetentionDays.ONE_MONTH, removal_policy=RemovalPolicy.DESTROY
        )
        vpc.add_flow_log("FlowLog", destination=ec2.FlowLogDestination.to_cloud_watch_logs(group))
        return vpc
