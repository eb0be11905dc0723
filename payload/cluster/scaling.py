"""The Auto Scaling group of the GPU nodes: its number, and one node's replacement. boto3 is imported when called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from payload.cluster.kubectl import ClusterError, Kubectl, condition, wait_until
from payload.cluster.target import GpuGroup, Target, command, number, parser, read, say
from payload.config import ConfigError
from payload.manifests import Manifest

POLL_S = 10.0


def client(group: GpuGroup) -> Any:
    """With the user's own AWS credentials."""
    import boto3

    return boto3.client("autoscaling", region_name=group.region)


def describe(group: GpuGroup, autoscaling: Any) -> dict[str, Any]:
    """Raises ClusterError where the group or the permission is missing."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group.auto_scaling_group_name])
    except (BotoCoreError, ClientError) as error:
        raise ClusterError(f"Auto Scaling group {group.auto_scaling_group_name}: {error}") from error
    if not found["AutoScalingGroups"]:
        raise ClusterError(f"Auto Scaling group {group.auto_scaling_group_name}: none in {group.region}")
    return dict(found["AutoScalingGroups"][0])


def scale_up(group: GpuGroup, num_needed: int) -> None:
    """To what the stack asked for, spares included: the idle guard may have set it to zero. Never down."""
    if not group.num_nodes:
        return
    wanted = max(group.num_nodes, num_needed)
    autoscaling = client(group)
    found = describe(group, autoscaling)
    if num_needed > found["MaxSize"]:
        raise ConfigError(
            f"parallelism.num_nodes: {num_needed}; legal: up to {found['MaxSize']}, the most nodes of the group"
        )
    if found["DesiredCapacity"] < wanted:
        set_capacity(group, min(wanted, found["MaxSize"]), autoscaling)


def set_capacity(group: GpuGroup, num_nodes: int, autoscaling: Any) -> None:
    """Returns at once; nodes come and go over minutes."""
    name = group.auto_scaling_group_name
    autoscaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=num_nodes, HonorCooldown=False)
    say(f"GPU nodes: {num_nodes} asked for ({name})")


def gpu_nodes(target: Target) -> list[Manifest]:
    return target.kubectl.list("node", dict(target.deployment.node_selector))


def describe_node(node: Manifest) -> str:
    """One line."""
    state = "Ready" if condition(node, "Ready") else "not ready"
    if node["spec"].get("unschedulable"):
        state += ", cordoned"
    state += "".join(f", {reason}" for reason in _monitor_findings(node))
    offered = node["status"].get("allocatable") or {}
    parts = [f"{offered[key]} {key}" for key in ("nvidia.com/gpu", "vpc.amazonaws.com/efa") if key in offered]
    return f"  {node['metadata']['name']}: {state}; {', '.join(parts) or 'no GPU offered yet'}"


def _monitor_findings(node: Manifest) -> list[str]:
    """What the node monitoring agent reports: its conditions are all "...Ready", False with a reason when not."""
    found = node["status"].get("conditions") or []
    sick = [c for c in found if c["type"].endswith("Ready") and c["type"] != "Ready" and c["status"] == "False"]
    return [f"{c['type']} false: {c.get('reason', '')} {c.get('message', '')}".rstrip() for c in sick]


@command
def capacity(argv: Sequence[str]) -> int:
    """Shows nodes and group, or sets the group's number."""
    made = parser("capacity", "shows the GPU nodes, or sets their number: capacity 0")
    made.add_argument("number", nargs="?", default="", help="GPU nodes to ask for; absent: show")
    given = made.parse_args(argv)
    target = read(given)
    if given.number:
        group = _group(target)
        autoscaling = client(group)
        found = describe(group, autoscaling)
        wanted = int(number(given.number, "number", 0))
        if wanted > found["MaxSize"]:
            raise ConfigError(f"number: {wanted}; legal: 0 to {found['MaxSize']} (nodes.count and nodes.spare)")
        set_capacity(group, wanted, autoscaling)
        return 0
    nodes = gpu_nodes(target)
    say(f"{len(nodes)} nodes that the run may use")
    for node in nodes:
        say(describe_node(node))
    if target.group:
        _show_group(target.group)
    return 0


def _group(target: Target) -> GpuGroup:
    if target.group is None:
        raise ConfigError("this cluster was not made by the stacks; legal: its own way to add or replace nodes")
    return target.group


def _show_group(group: GpuGroup) -> None:
    autoscaling = client(group)
    found = describe(group, autoscaling)
    instances = found["Instances"]
    serving = sum(item["LifecycleState"] == "InService" for item in instances)
    say(f"{group.auto_scaling_group_name}: {found['DesiredCapacity']} asked for, {serving} in service")
    if serving < found["DesiredCapacity"]:
        name = group.auto_scaling_group_name
        recent = autoscaling.describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=3)["Activities"]
        for activity in recent:
            say(f"  {activity['StatusCode']}: {activity.get('StatusMessage') or activity['Description']}")


@command
def node(argv: Sequence[str]) -> int:
    """``node replace NAME``: cordon, hand the instance back as unhealthy, wait for its successor.

    The pod on it leaves with the node object; by ordinary scheduling it goes to a spare or to the successor.
    """
    made = parser("node", "replaces a sick node: node replace NAME")
    made.add_argument("action", choices=("replace",))
    made.add_argument("name", help="of the Kubernetes node")
    made.add_argument("--timeout", default="3600", help="seconds until it is an error (default: 3600)")
    given = made.parse_args(argv)
    timeout_s = number(given.timeout, "--timeout", 1)
    target = read(given)
    group = _group(target)
    found = target.kubectl.find("node", given.name)
    if found is None:
        names = ", ".join(item["metadata"]["name"] for item in gpu_nodes(target))
        raise ConfigError(f"name: no node {given.name!r}; legal: {names or 'none there'}")
    replace(target.kubectl, group, found, client(group), timeout_s=timeout_s, nodes=lambda: gpu_nodes(target))
    return 0


def replace(
    kubectl: Kubectl, group: GpuGroup, found: Manifest, autoscaling: Any, *, timeout_s: float, nodes: Any
) -> None:
    """Raises ClusterError when the old node does not go or no new one comes in time."""
    name, instance = found["metadata"]["name"], instance_of(found)
    in_group = [item["InstanceId"] for item in describe(group, autoscaling)["Instances"]]
    if instance not in in_group:
        raise ConfigError(f"name: {name} is {instance}, which is not in {group.auto_scaling_group_name}")
    num_before = len(in_group)
    before = {item["metadata"]["uid"] for item in nodes()}
    kubectl.run("cordon", name)
    say(f"cordoned: {name}")
    autoscaling.set_instance_health(InstanceId=instance, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False)
    say(f"handed back as unhealthy: {instance}; waiting for its end and for a new node")

    def missing() -> str:
        now = nodes()
        if any(item["metadata"]["uid"] == found["metadata"]["uid"] for item in now):
            return f"node {name} is still there; look: aws ec2 describe-instances --instance-ids {instance}"
        new = [item for item in now if item["metadata"]["uid"] not in before and condition(item, "Ready")]
        return "" if new else f"{len(now)} of {num_before} nodes; look: python -m payload capacity"

    wait_until(missing, timeout_s=timeout_s, poll_s=POLL_S, what=f"replacement of {name}")
    say(f"replaced: {name}")


def instance_of(node: Manifest) -> str:
    """EC2 instance id of a node. Raises ConfigError for a node that is none of EC2."""
    provider = str(node["spec"].get("providerID", ""))
    match = re.fullmatch(r"aws:///[^/]+/(i-[0-9a-f]+)", provider)
    if not match:
        raise ConfigError(f"name: providerID {provider!r}; legal: a node on EC2")
    return match[1]
