"""The handlers of GPU capacity and the idle guard, against moto: repetition, refusal, and what never comes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest

from stacks.handlers import gpu_capacity, idle_guard
from stacks.handlers.waiting import Failed
from tests.stacks.handler_world import CLUSTER, World, handler_world, make_cluster, make_group, refuse

GROUP = "gpus"
BLOCK = "cr-0123456789abcdef0"
NO_CAPACITY = {
    "StatusCode": "Failed",
    "StatusMessage": "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone",
    "Cause": "an instance was started in response to a difference between desired and actual capacity",
}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for world in handler_world(monkeypatch):
        make_group(GROUP)
        yield world


def properties(nodes: int = 2, block: str = "") -> dict[str, Any]:
    made = {"AutoScalingGroupName": GROUP, "NumNodes": nodes, "CreateSeconds": 900, "DeleteSeconds": 2700}
    return {**made, "CapacityBlockId": block} if block else made


def create(world: World, **options: Any) -> dict[str, Any]:
    return world.run(gpu_capacity, world.request("Create", properties(**options)), poll_s=60.0)


def delete(world: World) -> dict[str, Any]:
    return world.run(gpu_capacity, world.request("Delete", properties()), poll_s=60.0)


def group() -> dict[str, Any]:
    found = gpu_capacity.group(GROUP)
    assert found is not None
    return found


def schedule() -> dict[str, dict[str, Any]]:
    found = boto3.client("autoscaling").describe_scheduled_actions(AutoScalingGroupName=GROUP)
    return {action["ScheduledActionName"]: dict(action) for action in found["ScheduledUpdateGroupActions"]}


def a_block(world: World, state: str, starts_in_h: float, ends_in_h: float) -> None:
    now = datetime.fromtimestamp(world.time_s, UTC)
    block = {
        "State": state,
        "StartDate": now + timedelta(hours=starts_in_h),
        "EndDate": now + timedelta(hours=ends_in_h),
        "CreateDate": now,
    }
    world.aws["DescribeCapacityReservations"] = lambda query: {"CapacityReservations": [block]}


def test_up_then_down_to_nothing(world: World) -> None:
    assert create(world) == {"Warning": "none", "InService": "2"}
    delete(world)
    assert group()["DesiredCapacity"] == 0
    assert group()["Instances"] == []


def test_repeated_calls_change_nothing(world: World) -> None:
    create(world)
    before = [instance["InstanceId"] for instance in group()["Instances"]]
    world.calls.clear()
    create(world)
    assert "UpdateAutoScalingGroup" not in world.calls
    assert [instance["InstanceId"] for instance in group()["Instances"]] == before
    delete(world)
    delete(world)


def test_an_update_changes_the_number(world: World) -> None:
    create(world)
    event = world.request("Update", properties(3), properties(2))
    assert world.run(gpu_capacity, event)["InService"] == "3"


def test_a_group_that_is_gone_is_an_error_up_and_success_down(world: World) -> None:
    boto3.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=GROUP, ForceDelete=True)
    with pytest.raises(Failed, match="Auto Scaling group gpus does not exist"):
        create(world)
    delete(world)


def test_no_capacity_is_a_warning_that_quotes_the_activities(world: World) -> None:
    """The stack stands, the Job stays Pending: nothing is rolled back after minutes of deployment."""
    world.aws["UpdateAutoScalingGroup"] = lambda query: {}  # accepted, but no instance ever comes
    world.activities = [{"StatusCode": "InProgress", "Cause": "x"}, NO_CAPACITY]
    started = world.time_s
    data = create(world)
    assert data["InService"] == "0"
    assert "sufficient p5.48xlarge capacity" in data["Warning"]
    assert 900 <= world.time_s - started <= 1000


def test_a_group_that_refuses_the_number_is_a_warning(world: World) -> None:
    world.aws["UpdateAutoScalingGroup"] = refuse("ValidationError", "desired capacity 2 is above max value 1")
    assert "above max value 1" in create(world)["Warning"]


@pytest.mark.parametrize("fault", ["Throttling", "ScalingActivityInProgress"])
def test_a_passing_refusal_is_waited_out(world: World, fault: str) -> None:
    create(world)
    passing = refuse(fault)
    world.aws["UpdateAutoScalingGroup"] = passing
    event = world.begin(gpu_capacity, world.request("Delete", properties()))
    assert world.step(gpu_capacity, event) is None
    del world.aws["UpdateAutoScalingGroup"]
    assert world.step(gpu_capacity, event) is not None


def test_a_protected_instance_is_named_at_once(world: World) -> None:
    create(world)
    (kept, _) = [instance["InstanceId"] for instance in group()["Instances"]]
    scaling = boto3.client("autoscaling")
    scaling.set_instance_protection(AutoScalingGroupName=GROUP, InstanceIds=[kept], ProtectedFromScaleIn=True)
    started = world.time_s
    with pytest.raises(Failed, match=f"refuses: {kept} protected from scale-in.*undo: aws autoscaling"):
        delete(world)
    assert world.time_s - started < 60, "no wait resolves it"
    scaling.set_instance_protection(AutoScalingGroupName=GROUP, InstanceIds=[kept], ProtectedFromScaleIn=False)
    scaling.update_auto_scaling_group(AutoScalingGroupName=GROUP, DesiredCapacity=0)  # the group itself retries
    delete(world)
    assert group()["Instances"] == []


def test_a_suspended_terminate_process_is_named(world: World) -> None:
    create(world)
    scaling = boto3.client("autoscaling")
    scaling.suspend_processes(AutoScalingGroupName=GROUP, ScalingProcesses=["Terminate"])
    world.aws["UpdateAutoScalingGroup"] = lambda query: {}
    with pytest.raises(Failed, match="its Terminate process is suspended"):
        delete(world)


def test_instances_that_never_end_are_an_error_in_time(world: World) -> None:
    create(world)
    world.aws["UpdateAutoScalingGroup"] = lambda query: {}
    world.activities = [{"StatusCode": "WaitingForELBConnectionDraining", "Cause": "a hook holds the instance"}]
    with pytest.raises(Failed, match=r"not empty after 27\d\d s.*Instances left: i-.*a hook holds the instance"):
        delete(world)


def test_instances_that_only_ec2_still_has_are_awaited(world: World) -> None:
    """The group forgets an instance before EC2 has ended it; its interfaces are still in the subnet."""
    create(world)
    boto3.client("autoscaling").update_auto_scaling_group(AutoScalingGroupName=GROUP, DesiredCapacity=0)
    shutting = [{"InstanceId": "i-1", "State": {"Name": "shutting-down"}}]
    world.aws["DescribeInstances"] = lambda query: {"Reservations": [{"Instances": shutting}]}
    event = world.begin(gpu_capacity, world.request("Delete", properties()))
    assert world.step(gpu_capacity, event) is None
    del world.aws["DescribeInstances"]
    assert world.step(gpu_capacity, event) is not None


def test_a_block_to_come_returns_at_once_with_its_schedule(world: World) -> None:
    a_block(world, "scheduled", 48, 96)
    started = world.time_s
    data = create(world, block=BLOCK)
    assert world.time_s == started
    assert group()["DesiredCapacity"] == 0
    assert "begins at 2026-06-03 12:00 UTC" in data["Warning"]
    up, down = schedule()[gpu_capacity.UP], schedule()[gpu_capacity.DOWN]
    assert up["DesiredCapacity"] == 2
    assert up["StartTime"].astimezone(UTC) == datetime(2026, 6, 3, 12, 0, tzinfo=UTC)
    assert (down["DesiredCapacity"], down["MinSize"]) == (0, 0)
    left = datetime(2026, 6, 5, 12, 0, tzinfo=UTC) - down["StartTime"].astimezone(UTC)
    assert left >= timedelta(minutes=35)


def test_an_active_block_starts_now_and_leaves_in_time(world: World) -> None:
    a_block(world, "active", -1, 24)
    assert create(world, block=BLOCK)["InService"] == "2"
    assert set(schedule()) == {gpu_capacity.DOWN}


@pytest.mark.parametrize(("state", "ends_in_h"), [("expired", 5.0), ("active", 0.5)])
def test_a_block_at_its_end_starts_nothing(world: World, state: str, ends_in_h: float) -> None:
    a_block(world, state, -24, ends_in_h)
    assert f"{BLOCK} is {state}" in create(world, block=BLOCK)["Warning"]
    assert group()["DesiredCapacity"] == 0


def test_an_unknown_block_starts_nothing(world: World) -> None:
    world.aws["DescribeCapacityReservations"] = refuse("InvalidCapacityReservationId.NotFound", "does not exist")
    assert "does not exist" in create(world, block=BLOCK)["Warning"]


def test_delete_takes_the_schedule_away(world: World) -> None:
    """Or the nodes would come back in the middle of the teardown."""
    a_block(world, "scheduled", 48, 96)
    create(world, block=BLOCK)
    delete(world)
    assert schedule() == {}


# -- idle guard


SELECTOR = {"app.kubernetes.io/name": "nvrx-eks"}
MESSAGE = {
    "ClusterName": CLUSTER,
    "AutoScalingGroupName": GROUP,
    "Namespace": "train",
    "Selector": SELECTOR,
    "IdleMinutes": 30,
}


@pytest.fixture
def busy(world: World) -> World:
    """Two nodes and an active Job."""
    make_cluster()
    create(world)
    world.kube.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "train"}})
    a_job(world, "run")
    return world


def a_job(world: World, name: str, **spec: Any) -> None:
    meta = {"name": name, "namespace": "train", "labels": SELECTOR}
    template = {"metadata": {"labels": SELECTOR}, "spec": {"containers": []}}
    world.kube.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {"template": template, **spec}})


def guard(world: World, after_min: float = 0.0) -> dict[str, str]:
    world.time_s += after_min * 60
    return idle_guard.handler(MESSAGE, None)


def test_an_active_job_keeps_the_nodes(busy: World) -> None:
    for _ in range(3):
        assert guard(busy, 60)["reason"] == "active: run"
    assert group()["DesiredCapacity"] == 2


def test_idle_for_long_enough_sets_zero(busy: World) -> None:
    busy.kube.finish("run")
    assert guard(busy)["reason"] == "idle from now on"
    assert guard(busy, 29)["action"] == "none"
    assert group()["DesiredCapacity"] == 2
    assert guard(busy, 2)["action"] == "scaled to zero"
    assert group()["DesiredCapacity"] == 0
    assert guard(busy, 5)["reason"] == "there are no nodes"


def test_a_job_in_between_starts_the_time_anew(busy: World) -> None:
    busy.kube.finish("run")
    guard(busy)
    a_job(busy, "second")
    assert guard(busy, 20)["reason"] == "active: second"
    busy.kube.finish("second", "Failed")
    assert guard(busy, 20)["reason"] == "idle from now on"
    assert guard(busy, 20)["action"] == "none"


def test_a_suspended_job_is_not_active(busy: World) -> None:
    busy.kube.finish("run")
    a_job(busy, "waiting", suspend=True)
    guard(busy)
    assert guard(busy, 31)["action"] == "scaled to zero"


@pytest.mark.parametrize("fault", ["down", "unauthorized", "no cluster"])
def test_unknown_state_changes_nothing_and_says_so(busy: World, fault: str) -> None:
    busy.kube.finish("run")
    guard(busy)
    if fault == "no cluster":
        boto3.client("eks").delete_cluster(name=CLUSTER)
    else:
        setattr(busy.kube, fault, True)
    answer = guard(busy, 300)
    assert answer["action"] == "none"
    assert "is not known" in answer["reason"]
    assert group()["DesiredCapacity"] == 2
