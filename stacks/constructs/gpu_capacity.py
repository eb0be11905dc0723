"""The GPU nodes' number as a custom resource: up once everything they need is there, zero before it goes."""

from __future__ import annotations

from aws_cdk import Duration
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.provider import WaitingProvider, auto_scaling_group_arn, seconds


class GpuCapacity(Construct):
    """Desired capacity of the Auto Scaling group.

    Create: sets it and waits for the instances, at most ``create_timeout``. When they do not all come (no
    capacity, a quota) the resource still succeeds, and ``warning`` quotes the scaling activities: EC2 keeps
    trying, the Job stays Pending until then, and a roll-back of everything would help nobody. With a Capacity
    Block: scheduled actions put it up at the block's start and to zero 35 minutes before its end (EC2 begins to
    terminate 30 minutes before); before the start the resource completes at once.

    Delete: sets it to zero and waits until no instance is left. A group that refuses (scale-in protection,
    suspended Terminate process, a hook that holds an instance) ends in an error that quotes the activities.

    Attributes: ``resource`` (depend on it), ``warning`` (``none`` when all is well: an output may
    not be empty), ``in_service``.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        auto_scaling_group_name: str,
        num_nodes: int,
        capacity_block_id: str | None = None,
        create_timeout: Duration | None = None,
        delete_timeout: Duration | None = None,
    ) -> None:
        """``create_timeout``: 15 minutes; ``delete_timeout``: 45 minutes (a p5 may take 20 to shut down)."""
        super().__init__(scope, id)
        if num_nodes < 0:
            raise ValueError(f"num_nodes: {num_nodes}; legal: 0 or more")
        write = iam.PolicyStatement(
            actions=[
                "autoscaling:UpdateAutoScalingGroup",
                "autoscaling:PutScheduledUpdateGroupAction",
                "autoscaling:DeleteScheduledAction",
            ],
            resources=[auto_scaling_group_arn(self, auto_scaling_group_name)],
        )
        read = iam.PolicyStatement(
            actions=[
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeScalingActivities",
                "autoscaling:DescribeScheduledActions",
                "ec2:DescribeInstances",
                "ec2:DescribeCapacityReservations",
            ],
            resources=["*"],  # these actions know no resources
        )
        self.provider = WaitingProvider(
            self, "Waiting", module="gpu_capacity", statements=[write, read], query_interval=Duration.seconds(15)
        )
        properties = {
            "AutoScalingGroupName": auto_scaling_group_name,
            "NumNodes": str(num_nodes),
            "CreateSeconds": seconds("create_timeout", create_timeout or Duration.minutes(15)),
            "DeleteSeconds": seconds("delete_timeout", delete_timeout or Duration.minutes(45)),
        }
        if capacity_block_id:
            properties["CapacityBlockId"] = capacity_block_id
        self.resource = self.provider.resource(
            self, "Resource", resource_type="Custom::GpuCapacity", properties=properties
        )
        self.warning = self.resource.get_att_string("Warning")
        self.in_service = self.resource.get_att_string("InService")
