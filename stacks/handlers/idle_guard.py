"""Sets the GPU nodes to zero when no training Job has been active for a while (constructs/idle_guard.py)."""

from __future__ import annotations

import json
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from . import gpu_capacity, kube, pods, waiting
from .waiting import Event

IDLE_SINCE = "nvrx-eks/idle-since"
"""Tag of the Auto Scaling group: seconds since the epoch."""


def handler(event: Event, context: object) -> dict[str, str]:
    """What was done and why; changes nothing unless the API server said that no Job is active."""
    try:
        action, reason = _guard(event)
    except (kube.NoCluster, kube.Unreachable, kube.ApiError, ClientError, BotoCoreError) as error:
        action, reason = "none", f"the state of the Jobs is not known: {type(error).__name__}: {error}"
    answer = {"action": action, "reason": reason}
    waiting.log.info(json.dumps(answer))
    return answer


def _guard(event: Event) -> tuple[str, str]:
    name = event["AutoScalingGroupName"]
    found = gpu_capacity.group(name)
    if found is None:
        return "none", f"Auto Scaling group {name} does not exist"
    if not found["DesiredCapacity"] and not found["Instances"]:
        _mark(name, None, found)
        return "none", "there are no nodes"
    client = kube.connect(event["ClusterName"])
    jobs = client.list("Job", event["Namespace"], event["Selector"])
    active = [job["metadata"]["name"] for job in jobs if not pods.finished(job) and not job["spec"].get("suspend")]
    if active:
        _mark(name, None, found)
        return "none", f"active: {', '.join(sorted(active))}"
    since = next((float(tag["Value"]) for tag in found["Tags"] if tag["Key"] == IDLE_SINCE), None)
    if since is None:
        _mark(name, waiting.now(), found)
        return "none", "idle from now on"
    idle_min = (waiting.now() - since) / 60
    if idle_min < float(event["IdleMinutes"]):
        return "none", f"idle for {idle_min:.0f} of {event['IdleMinutes']} minutes"
    waiting.client("autoscaling").update_auto_scaling_group(AutoScalingGroupName=name, MinSize=0, DesiredCapacity=0)
    return "scaled to zero", f"no active Job for {idle_min:.0f} minutes"


def _mark(name: str, since: float | None, found: dict[str, Any]) -> None:
    """Notes since when the nodes are idle; None: they are not."""
    tag = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": IDLE_SINCE}
    scaling = waiting.client("autoscaling")
    if since is not None:
        scaling.create_or_update_tags(Tags=[{**tag, "Value": f"{since:.0f}", "PropagateAtLaunch": False}])
    elif any(item["Key"] == IDLE_SINCE for item in found["Tags"]):
        scaling.delete_tags(Tags=[tag])
