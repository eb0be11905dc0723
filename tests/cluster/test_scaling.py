"""capacity and node replace: kubectl of our own, and AWS's own checks of the calls' parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from payload.cli import main
from payload.cluster import scaling
from payload.cluster.target import GpuGroup
from payload.config import ConfigError
from tests.cluster.conftest import FakeCluster
from tests.cluster.test_submit import GROUP, settings_of

P5 = ["--profile", "p5"]
NAME = str(GROUP["auto_scaling_group_name"])


@pytest.fixture
def aws(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    """Answers in order; a call with a parameter that AWS does not know, or out of order, fails the test."""
    cluster.put(settings_of())
    client = boto3.client(
        "autoscaling", region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    monkeypatch.setattr(scaling, "client", lambda group: client)
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def group(desired: int, *instances: str) -> dict[str, Any]:
    """An answer of DescribeAutoScalingGroups."""
    common = {"AvailabilityZone": "us-east-1a", "HealthStatus": "Healthy", "ProtectedFromScaleIn": False}
    return {
        "AutoScalingGroups": [
            {
                "AutoScalingGroupName": NAME,
                "MinSize": 0,
                "MaxSize": 3,
                "DesiredCapacity": desired,
                "DefaultCooldown": 300,
                "AvailabilityZones": ["us-east-1a"],
                "HealthCheckType": "EC2",
                "CreatedTime": "2026-01-01T00:00:00Z",
                "Instances": [{**common, "InstanceId": item, "LifecycleState": "InService"} for item in instances],
            }
        ]
    }


def node(name: str, instance: str, *, ready: bool = True) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "uid": f"uid-{instance}", "labels": {"nvrx-eks/profile": "p5"}},
        "spec": {"providerID": f"aws:///us-east-1a/{instance}"},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "allocatable": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"},
        },
    }


def test_capacity_shows_nodes_and_why_some_are_missing(
    aws: Stubber, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    one = node("one", "i-01")
    sick = {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NvidiaXID79Error", "message": "fell off"}
    one["status"]["conditions"].append(sick)
    cluster.put(one)
    aws.add_response("describe_auto_scaling_groups", group(2, "i-01"), {"AutoScalingGroupNames": [NAME]})
    activity = {
        "ActivityId": "a",
        "AutoScalingGroupName": NAME,
        "Cause": "c",
        "StartTime": "2026-01-01T00:00:00Z",
        "StatusCode": "Failed",
        "StatusMessage": "InsufficientInstanceCapacity",
    }
    asked = {"AutoScalingGroupName": NAME, "MaxRecords": 3}
    aws.add_response("describe_scaling_activities", {"Activities": [activity]}, asked)
    assert main(["capacity", *P5]) == 0
    text = capsys.readouterr().out
    assert "one: Ready, AcceleratedHardwareReady false: NvidiaXID79Error fell off; 8 nvidia.com/gpu" in text
    assert "2 asked for, 1 in service" in text and "InsufficientInstanceCapacity" in text


def test_capacity_sets_the_number_within_the_group(
    aws: Stubber, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.add_response("describe_auto_scaling_groups", group(2))
    wanted = {"AutoScalingGroupName": NAME, "DesiredCapacity": 0, "HonorCooldown": False}
    aws.add_response("set_desired_capacity", {}, wanted)
    assert main(["capacity", "0", *P5]) == 0
    aws.add_response("describe_auto_scaling_groups", group(2))
    assert main(["capacity", "4", *P5]) == 2
    assert "number: 4; legal: 0 to 3" in capsys.readouterr().err


def test_no_permission_is_one_line(aws: Stubber, capsys: pytest.CaptureFixture[str]) -> None:
    aws.add_client_error("describe_auto_scaling_groups", "AccessDenied", "not authorized")
    assert main(["capacity", "1", *P5]) == 1
    assert "not authorized" in capsys.readouterr().err


def test_a_cluster_of_others_has_no_group(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "1", "--profile", "kind"]) == 2
    assert "not made by the stacks" in capsys.readouterr().err


def test_replace_cordons_hands_back_and_waits_for_a_ready_successor(
    aws: Stubber, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.put(node("sick", "i-01"), node("well", "i-02"))
    aws.add_response("describe_auto_scaling_groups", group(2, "i-01", "i-02"))
    unhealthy = {"InstanceId": "i-01", "HealthStatus": "Unhealthy", "ShouldRespectGracePeriod": False}
    aws.add_response("set_instance_health", {}, unhealthy)
    turns = iter(["gone", "joining", "ready"])
    listed = scaling.gpu_nodes

    def nodes(target: Any) -> list[dict[str, Any]]:
        """What EC2 does meanwhile: one step a look, once the instance was handed back."""
        if cluster.calls("cordon"):
            turn = next(turns)
            if turn == "gone":
                state = cluster.read()
                del state["objects"]["node//sick"]
                cluster.write(state)
            else:
                cluster.put(node("new", "i-03", ready=turn == "ready"))
        return listed(target)

    monkeypatch.setattr(scaling, "gpu_nodes", nodes)
    assert main(["node", "replace", "sick", *P5]) == 0
    assert cluster.calls("cordon") == [["cordon", "sick"]]
    text = capsys.readouterr().out
    assert "handed back as unhealthy: i-01" in text and "replaced: sick" in text
    assert next(turns, "none") == "none", "it waited until the successor was ready"


def _cordoned(cluster: FakeCluster) -> bool:
    nodes = [item for item in cluster.read()["objects"].values() if item["kind"] == "Node"]
    return any(item["spec"].get("unschedulable") for item in nodes)


def test_replace_ends_in_time_with_what_is_missing(
    aws: Stubber, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.put(node("sick", "i-01"))
    aws.add_response("describe_auto_scaling_groups", group(1, "i-01"))
    aws.add_response("set_instance_health", {})
    assert main(["node", "replace", "sick", "--timeout", "1", *P5]) == 1
    assert "node sick is still there; look: aws ec2 describe-instances" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "provider", "wrong"),
    [
        ("none", "aws:///us-east-1a/i-01", "legal: sick"),
        ("sick", "aws:///us-east-1a/i-09", "not in nvrx-p5-gpu"),
        ("sick", "kind://docker/x", "legal: a node on EC2"),
    ],
)
def test_replace_refuses_what_is_no_node_of_the_group(
    aws: Stubber, cluster: FakeCluster, capsys: pytest.CaptureFixture[str], name: str, provider: str, wrong: str
) -> None:
    item = node("sick", "i-01")
    item["spec"]["providerID"] = provider
    cluster.put(item)
    if "i-09" in provider:
        aws.add_response("describe_auto_scaling_groups", group(1, "i-01"))
    assert main(["node", "replace", name, *P5]) == 2
    assert wrong in capsys.readouterr().err
    assert not _cordoned(cluster)


def test_capacity_block_is_left_to_its_schedule() -> None:
    """No AWS call at all: nodes asked for before a block begins can only fail."""
    scaling.scale_up(GpuGroup("g", "us-east-1", 0), 2)


def test_more_nodes_than_the_group_can_have(aws: Stubber) -> None:
    aws.add_response("describe_auto_scaling_groups", group(2))
    with pytest.raises(ConfigError, match="legal: up to 3"):
        scaling.scale_up(GpuGroup(NAME, "us-east-1", 2), 4)
