"""Sets the GPU nodes to zero when no training Job has been active for some time."""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import Duration
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.provider import (
    HandlerNetwork,
    auto_scaling_group_arn,
    describe_cluster,
    grant_cluster,
    handler_function,
)


class IdleGuard(Construct):
    """A scheduled function. When it cannot read the API it changes nothing and says so in its log.

    The time since when the cluster is idle is kept as a tag of the Auto Scaling group, so that a run which was
    deleted without a trace still gets its whole grace. ``submit`` scales the nodes up again.

    Attributes: ``function``, ``rule``.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        cluster: eks.ICluster,
        auto_scaling_group_name: str,
        namespace: str,
        selector: Mapping[str, str],
        idle_minutes: int,
        network: HandlerNetwork | None = None,
    ) -> None:
        """``selector``: labels of the training Jobs; ``idle_minutes``: 10 or more (0, off, is not to build it)."""
        super().__init__(scope, id)
        if idle_minutes < 10:
            raise ValueError(f"idle_minutes: {idle_minutes}; legal: 10 or more (nodes take minutes to start)")
        write = iam.PolicyStatement(
            actions=[
                "autoscaling:UpdateAutoScalingGroup",
                "autoscaling:CreateOrUpdateTags",
                "autoscaling:DeleteTags",
            ],
            resources=[auto_scaling_group_arn(self, auto_scaling_group_name)],
        )
        read = iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingGroups"], resources=["*"])
        self.function = handler_function(
            self,
            "Function",
            handler="idle_guard.handler",
            statements=[describe_cluster(cluster), write, read],
            network=network,
        )
        access = grant_cluster(
            self,
            "Access",
            cluster=cluster,
            function=self.function,
            policy="AmazonEKSViewPolicy",
            namespaces=[namespace],
        )
        self.rule = events.Rule(
            self, "Schedule", schedule=events.Schedule.rate(Duration.minutes(5)), description="GPU idle guard"
        )
        message = {
            "ClusterName": cluster.cluster_name,
            "AutoScalingGroupName": auto_scaling_group_name,
            "Namespace": namespace,
            "Selector": dict(selector),
            "IdleMinutes": idle_minutes,
        }
        self.rule.add_target(
            targets.LambdaFunction(self.function, event=events.RuleTargetInput.from_object(message), retry_attempts=0)
        )
        self.rule.node.add_dependency(access, *([network.rule] if network else []))
