"""What the custom resources share: their functions' code, roles, network, access to the cluster, and provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aws_cdk import CustomResource, Duration, IgnoreMode, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import custom_resources as cr
from constructs import Construct, IDependable

HANDLERS = Path(__file__).parents[1] / "handlers"
RUNTIME = lambda_.Runtime.PYTHON_3_13
PROVIDER_TIMEOUT = Duration.minutes(59)
"""The provider framework allows at most one hour; handlers end earlier, with a reason of their own."""
SERVICE_TIMEOUT = Duration.minutes(60)
"""CloudFormation's largest ServiceTimeout: a handler that never answers fails the stack after this."""
LONGEST_WAIT = Duration.minutes(55)


@dataclass(frozen=True)
class HandlerNetwork:
    """Where functions run that must reach an API endpoint which only the VPC can reach."""

    vpc: ec2.IVpc
    subnets: tuple[ec2.ISubnet, ...]
    security_group: ec2.ISecurityGroup
    rule: IDependable
    """Lets the functions into the API endpoint; must outlive every call to the API."""


def handler_network(
    scope: Construct, id: str, *, cluster: eks.ICluster, vpc: ec2.IVpc, subnets: Sequence[ec2.ISubnet]
) -> HandlerNetwork:
    """A security group for the handlers, and the rule that lets it into the cluster's API endpoint.

    The rule belongs to ``scope``'s stack: added to the cluster's group through its L2 it would land in the
    cluster's stack and turn the order of the stacks around. ``vpc`` and ``subnets`` need a way to the AWS
    APIs (NAT or endpoints).
    """
    group = ec2.SecurityGroup(
        scope, id, vpc=vpc, description="Functions that talk to the cluster API", allow_all_outbound=False
    )
    group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "Cluster API and AWS APIs")
    rule = ec2.CfnSecurityGroupIngress(
        scope,
        f"{id}ToApi",
        group_id=cluster.cluster_security_group_id,
        source_security_group_id=group.security_group_id,
        ip_protocol="tcp",
        from_port=443,
        to_port=443,
        description="Handlers to the cluster API",
    )
    return HandlerNetwork(vpc=vpc, subnets=tuple(subnets), security_group=group, rule=rule)


def handler_function(
    scope: Construct,
    id: str,
    *,
    handler: str,
    statements: Sequence[iam.PolicyStatement],
    network: HandlerNetwork | None = None,
    timeout: Duration | None = None,
) -> lambda_.Function:
    """One function of ``stacks/handlers``; ``handler`` is ``module.function``.

    Its log group goes with the stack (reasons of failures are in the stack's events), and its role may write
    to that log group only. With ``network`` the function runs in the VPC; CloudFormation deletes its network
    interfaces with the function, for which the role is still there.
    """
    log_group = logs.LogGroup(
        scope, f"{id}Logs", retention=logs.RetentionDays.ONE_MONTH, removal_policy=RemovalPolicy.DESTROY
    )
    # ec2:CreateNetworkInterface and its siblings allow no narrower resource than this policy has.
    managed = [iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AWSLambdaVPCAccessExecutionRole")]
    role = iam.Role(
        scope,
        f"{id}Role",
        assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
        managed_policies=managed if network else None,
    )
    log_group.grant_write(role)
    for statement in statements:
        role.add_to_policy(statement)
    placed: dict[str, Any] = {}
    if network:
        placed = {
            "vpc": network.vpc,
            "vpc_subnets": ec2.SubnetSelection(subnets=list(network.subnets)),
            "security_groups": [network.security_group],
        }
    return lambda_.Function(
        scope,
        id,
        runtime=RUNTIME,
        handler=f"handlers.{handler}",
        code=handler_code(),
        role=role,
        log_group=log_group,
        # The cluster's token is signed for the region; older SDKs choose the global endpoint by themselves.
        environment={"AWS_STS_REGIONAL_ENDPOINTS": "regional"},
        memory_size=256,
        timeout=timeout or Duration.minutes(4),
        **placed,
    )


def handler_code() -> lambda_.AssetCode:
    """The package ``handlers``, without anything else of ``stacks``."""
    return lambda_.Code.from_asset(
        str(HANDLERS.parent), exclude=["*", "!handlers/", "!handlers/*.py"], ignore_mode=IgnoreMode.GIT
    )


class WaitingProvider(Construct):
    """Provider whose handler module has ``on_event`` and ``is_complete``.

    Attributes: ``service_token``; ``functions``: of on_event and is_complete.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        module: str,
        statements: Sequence[iam.PolicyStatement],
        query_interval: Duration,
        on_event_statements: Sequence[iam.PolicyStatement] = (),
        network: HandlerNetwork | None = None,
    ) -> None:
        """``statements`` and ``network`` are of ``is_complete``, which does the work."""
        super().__init__(scope, id)
        on_event = handler_function(self, "OnEvent", handler=f"{module}.on_event", statements=on_event_statements)
        is_complete = handler_function(
            self, "IsComplete", handler=f"{module}.is_complete", statements=statements, network=network
        )
        framework_logs = logs.LogGroup(
            self, "FrameworkLogs", retention=logs.RetentionDays.ONE_MONTH, removal_policy=RemovalPolicy.DESTROY
        )
        provider = cr.Provider(
            self,
            "Provider",
            on_event_handler=on_event,
            is_complete_handler=is_complete,
            query_interval=query_interval,
            total_timeout=PROVIDER_TIMEOUT,
            log_group=framework_logs,
            disable_waiter_state_machine_logging=True,
        )
        self.service_token = provider.service_token
        self.functions = (on_event, is_complete)

    def resource(
        self, scope: Construct, id: str, *, resource_type: str, properties: Mapping[str, Any]
    ) -> CustomResource:
        """A custom resource of this provider; it ends within CloudFormation's ServiceTimeout."""
        return CustomResource(
            scope,
            id,
            service_token=self.service_token,
            resource_type=resource_type,
            service_timeout=SERVICE_TIMEOUT,
            properties=properties,
        )


def grant_cluster(
    scope: Construct,
    id: str,
    *,
    cluster: eks.ICluster,
    function: lambda_.Function,
    policy: str,
    namespaces: Sequence[str] = (),
) -> eks.AccessEntry:
    """An access entry for the function's role; without ``namespaces`` the policy holds in the whole cluster.

    What calls the API through it must depend on it, so that it is deleted later.
    """
    scope_type = eks.AccessScopeType.NAMESPACE if namespaces else eks.AccessScopeType.CLUSTER
    access = eks.AccessPolicy.from_access_policy_name(
        policy, access_scope_type=scope_type, namespaces=list(namespaces) or None
    )
    assert function.role is not None
    return eks.AccessEntry(scope, id, cluster=cluster, principal=function.role.role_arn, access_policies=[access])


def describe_cluster(cluster: eks.ICluster) -> iam.PolicyStatement:
    """What a handler needs to find the API endpoint and its certificate."""
    return iam.PolicyStatement(actions=["eks:DescribeCluster"], resources=[cluster.cluster_arn])


def describe_stack(scope: Construct) -> iam.PolicyStatement:
    """What a handler needs to tell a destruction from a roll-back."""
    return iam.PolicyStatement(actions=["cloudformation:DescribeStacks"], resources=[Stack.of(scope).stack_id])


def seconds(name: str, duration: Duration) -> str:
    """A bounded wait as a property. Raises ValueError when the provider would end before the handler does."""
    if not 0 < duration.to_seconds() <= LONGEST_WAIT.to_seconds():
        raise ValueError(
            f"{name}: {duration.to_seconds():g} s; legal: 1 to {LONGEST_WAIT.to_seconds():g} s, "
            "as the provider framework ends after an hour"
        )
    return str(int(duration.to_seconds()))


def auto_scaling_group_arn(scope: Construct, name: str) -> str:
    """ARN pattern of one Auto Scaling group; the id between the colons is known only to AWS."""
    stack = Stack.of(scope)
    return (
        f"arn:{stack.partition}:autoscaling:{stack.region}:{stack.account}:"
        f"autoScalingGroup:*:autoScalingGroupName/{name}"
    )
