"""Sets the desired capacity of the GPU nodes' Auto Scaling group (constructs/gpu_capacity.py)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from . import waiting
from .waiting import Answer, Event, Failed

UP, DOWN = "nvrx-eks-block-start", "nvrx-eks-block-end"
"""Names of the scheduled actions."""
BLOCK_MARGIN = timedelta(minutes=35)
"""EC2 begins to terminate a Capacity Block's instances 30 minutes before the block's end."""
BLOCK_COMES = ("scheduled", "pending", "payment-pending", "assessing", "delayed")
LEFT_STATES = ["pending", "running", "shutting-down", "stopping", "stopped"]
QUOTED = 3


def on_event(event: Event, context: object) -> Answer:
    return waiting.began(event, f"gpu-capacity/{event['ResourceProperties']['AutoScalingGroupName']}")


def is_complete(event: Event, context: object) -> Answer:
    """Raises Failed when the group is missing on create, or when instances are left on delete."""
    name = event["ResourceProperties"]["AutoScalingGroupName"]
    if event["RequestType"] == "Delete":
        return _delete(event, name)
    return _create(event, name)


def group(name: str) -> dict[str, Any] | None:
    """The Auto Scaling group, None when there is none."""
    found = waiting.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    groups: list[dict[str, Any]] = found["AutoScalingGroups"]
    return groups[0] if groups else None


def _create(event: Event, name: str) -> Answer:
    found = group(name)
    if found is None:
        raise Failed(f"Auto Scaling group {name} does not exist")
    wanted = int(event["ResourceProperties"]["NumNodes"])
    block_id = event["ResourceProperties"].get("CapacityBlockId")
    if block_id:
        note = _schedule(name, block_id, wanted)
        if note:
            return _report(found, note)
    else:
        _unschedule(name)
    refusal = _set(found, wanted)
    found = group(name) or found
    in_service = _in_service(found)
    settled = in_service == wanted and len(found["Instances"]) == wanted and not refusal
    if settled:
        return _report(found, "")
    if waiting.waited_s(event) < waiting.limit_s(event, "CreateSeconds"):
        return waiting.pending(f"{in_service} of {wanted} instances in service {refusal}")
    return _report(
        found,
        f"{in_service} of {wanted} instances in service after {waiting.waited_s(event):.0f} s. EC2 goes on trying, "
        f"and the Job stays Pending meanwhile. {refusal}{activities(name)}",
    )


def _report(found: dict[str, Any], warning: str) -> Answer:
    return waiting.done(Warning=warning or "none", InService=str(_in_service(found)))


def _in_service(found: dict[str, Any]) -> int:
    return sum(1 for instance in found["Instances"] if instance["LifecycleState"] == "InService")


def _set(found: dict[str, Any], wanted: int) -> str:
    """Sets desired capacity where it differs; the refusal in AWS's words, '' when there is none."""
    if found["DesiredCapacity"] == wanted and found["MinSize"] <= wanted:
        return ""
    changes = {"DesiredCapacity": wanted, "MinSize": min(found["MinSize"], wanted)}
    try:
        waiting.client("autoscaling").update_auto_scaling_group(
            AutoScalingGroupName=found["AutoScalingGroupName"], **changes
        )
    except ClientError as error:
        return f"The group refuses {wanted} instances: {waiting.code(error)}: {waiting.text(error)}. "
    return ""


def _schedule(name: str, block_id: str, wanted: int) -> str:
    """Scheduled actions of a Capacity Block; why there are no nodes now, '' when the block is active."""
    try:
        blocks = waiting.client("ec2").describe_capacity_reservations(CapacityReservationIds=[block_id])
    except ClientError as error:
        return f"Capacity Block {block_id}: {waiting.text(error)}. No nodes are started"
    block = blocks["CapacityReservations"][0]
    now = datetime.fromtimestamp(waiting.now(), UTC)
    last = block["EndDate"] - BLOCK_MARGIN
    begins = block.get("StartDate") or block["CreateDate"]
    if block["State"] not in ("active", *BLOCK_COMES) or last <= now:
        return f"Capacity Block {block_id} is {block['State']} and ends at {block['EndDate']:%F %R} UTC: no nodes"
    scaling = waiting.client("autoscaling")
    scaling.put_scheduled_update_group_action(
        AutoScalingGroupName=name, ScheduledActionName=DOWN, StartTime=last, MinSize=0, DesiredCapacity=0
    )
    if block["State"] == "active":
        return ""
    starts = max(begins, now + timedelta(minutes=2))
    scaling.put_scheduled_update_group_action(
        AutoScalingGroupName=name, ScheduledActionName=UP, StartTime=starts, DesiredCapacity=wanted
    )
    return f"Capacity Block {block_id} begins at {begins:%F %R} UTC: {wanted} nodes start then, until {last:%F %R} UTC"


def _unschedule(name: str) -> None:
    scaling = waiting.client("autoscaling")
    found = scaling.describe_scheduled_actions(AutoScalingGroupName=name)["ScheduledUpdateGroupActions"]
    for action in {item["ScheduledActionName"] for item in found} & {UP, DOWN}:
        scaling.delete_scheduled_action(AutoScalingGroupName=name, ScheduledActionName=action)


def _delete(event: Event, name: str) -> Answer:
    found = group(name)
    refusal = ""
    if found is not None:
        _unschedule(name)
        refusal = _set(found, 0)
        _stuck(group(name) or found)
    left = _left(name)
    found = group(name)
    held = [f"{i['InstanceId']} ({i['LifecycleState']})" for i in found["Instances"]] if found else []
    if not left and not held and not refusal:
        return waiting.done(Warning="none", InService="0")
    reason = f"{refusal}Instances left: {', '.join(held or left) or 'none'}"
    if waiting.waited_s(event) < waiting.limit_s(event, "DeleteSeconds"):
        return waiting.pending(reason)
    raise Failed(
        f"Auto Scaling group {name} is not empty after {waiting.waited_s(event):.0f} s. {reason}. {activities(name)} "
        f"look: aws autoscaling describe-scaling-activities --auto-scaling-group-name {name}; "
        "run the command again once it is empty"
    )


def _stuck(found: dict[str, Any]) -> None:
    """Raises Failed for what no waiting resolves: somebody set it, so it is not undone here."""
    name = found["AutoScalingGroupName"]
    guarded = [i["InstanceId"] for i in found["Instances"] if i.get("ProtectedFromScaleIn")]
    if guarded:
        raise Failed(
            f"Auto Scaling group {name} refuses: {', '.join(guarded)} protected from scale-in. "
            f"{activities(name)} undo: aws autoscaling set-instance-protection --no-protected-from-scale-in "
            f"--auto-scaling-group-name {name} --instance-ids {' '.join(guarded)}; then run the command again"
        )
    stopped = [p["ProcessName"] for p in found.get("SuspendedProcesses") or [] if p["ProcessName"] == "Terminate"]
    if stopped and found["Instances"]:
        raise Failed(
            f"Auto Scaling group {name} refuses: its Terminate process is suspended. {activities(name)} "
            f"undo: aws autoscaling resume-processes --auto-scaling-group-name {name} "
            "--scaling-processes Terminate; then run the command again"
        )


def _left(name: str) -> list[str]:
    """Instances of the group that EC2 still has, also when the group itself knows them no longer."""
    filters = [
        {"Name": "tag:aws:autoscaling:groupName", "Values": [name]},
        {"Name": "instance-state-name", "Values": LEFT_STATES},
    ]
    pages = waiting.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
    return [
        f"{instance['InstanceId']} ({instance['State']['Name']})"
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]


def activities(name: str) -> str:
    """The newest scaling activities in AWS's words, failed ones first; short enough for a stack event."""
    try:
        found = waiting.client("autoscaling").describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=20)
    except ClientError as error:
        return f"Scaling activities cannot be read: {waiting.text(error)}."
    newest = sorted(found["Activities"], key=lambda item: item["StatusCode"] not in ("Failed", "Cancelled"))
    return f"Scaling activities: {'; '.join(_quote(newest[:QUOTED])) or 'none'}."


def _quote(items: Iterable[dict[str, Any]]) -> list[str]:
    return [
        f"{item['StatusCode']}: {(item.get('StatusMessage') or item.get('Description') or item['Cause'])[:300]}"
        for item in items
    ]
