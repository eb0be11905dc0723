"""`cdk destroy`, walked: the templates' own order, run with the real handlers, and proven to be needed.

F42, F43.  For every required pair all dependency paths are taken away, the worst order that remains is chosen, and
the walk must fail for the pair's own reason; so no pair holds by luck.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from stacks.handlers import kube
from stacks.handlers.kube import Ref
from stacks.handlers.waiting import Failed
from tests.graph import Graph, Key
from tests.stacks.handler_world import World, handler_world, refuse
from tests.synth import Synthesis, synthesis, variant
from tests.teardown.cloud import Cloud, Violation
from tests.teardown.order import Plan, teardown
from tests.teardown.pairs import Pair, pairs

APPLICATIONS = ("p5", "guest")
"""With everything public and without a bucket; and in the user's VPC, all private, with an export."""
FAILURES = (Failed, Violation)
pytestmark = pytest.mark.timeout(400)
"""The first test of each application synthesizes it."""


@functools.cache
def application(name: str) -> tuple[Synthesis, Graph, Plan]:
    found = variant(name) if name == "guest" else synthesis(name)
    graph = Graph(found)
    return found, graph, Plan(graph)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from handler_world(monkeypatch)


def deployed(name: str, world: World) -> Cloud:
    found, graph, plan = application(name)
    cloud = Cloud(found, graph, world)
    cloud.deploy(list(reversed(plan.order(graph.types))))
    assert len(cloud.pods()) >= 2
    assert len(cloud.instances()) >= 2
    return cloud


def destroy(name: str, cloud: Cloud, plan: Plan | None = None, early: Key | None = None, seed: int = 0) -> list[str]:
    """One `cdk destroy` of what is left; the reasons of what failed."""
    plan = plan or application(name)[2]
    failed = teardown(plan, plan.order(cloud.present, early, seed), cloud.delete, FAILURES)
    return [str(error) for _, error in failed]


def place(cloud: Cloud, construct: Any, part: str = "training") -> int:
    """When it was deleted."""
    return cloud.deleted.index((part, cloud.synthesis.logical_id(construct)))


# -- the order, and that it is needed


@pytest.mark.parametrize("name", APPLICATIONS)
def test_every_required_pair_is_held_by_a_path(name: str) -> None:
    found, graph, plan = application(name)
    required = pairs(found, graph)
    assert len(required) >= 40
    missing = [pair.name for pair in required if pair.second not in plan.reach(pair.first)]
    assert missing == []


@pytest.mark.parametrize("name", APPLICATIONS)
def test_orders_that_cloudformation_may_choose_all_end_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn orders, and those that hurry what the pairs protect: with its paths in place none can go wrong."""
    found, graph, _ = application(name)
    hurried = sorted({pair.second for pair in pairs(found, graph)})[::4]
    assert len(hurried) >= 5
    for seed, early in enumerate([None, None, *hurried]):
        for world in handler_world(monkeypatch):
            cloud = deployed(name, world)
            assert destroy(name, cloud, early=early, seed=seed) == []
            assert cloud.present == set()
            assert cloud.world.kube.objects == {}
            assert cloud.instances() == []


def test_the_order_that_the_documents_promise(world: World) -> None:
    """F42: Job and pods, claim and volume, GPUs, file system, repository, cluster, network."""
    cloud = deployed("p5", world)
    destroy("p5", cloud)
    stacks = cloud.synthesis.stacks
    chain = [
        place(cloud, stacks.training.payload.job.resource),
        place(cloud, stacks.training.payload.volume.resource),
        place(cloud, stacks.training.capacity.resource),
        place(cloud, stacks.storage.file_system, "storage"),
        place(cloud, stacks.storage.repository, "storage"),
        place(cloud, stacks.cluster.cluster, "cluster"),
        place(cloud, stacks.network.vpc, "network"),
    ]
    assert chain == sorted(chain)
    gone = [ref.kind for verb, ref in world.kube.log if verb == "gone"]
    last_pod = max(index for index, kind in enumerate(gone) if kind == "Pod")
    assert last_pod < gone.index("PersistentVolumeClaim") < gone.index("PersistentVolume") < gone.index("Namespace")


@pytest.mark.parametrize("name", APPLICATIONS)
def test_without_its_paths_every_pair_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, graph, _ = application(name)
    harmless = [pair.name for pair in pairs(found, graph) if not breaks(name, pair, monkeypatch)]
    assert harmless == []


def breaks(name: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the walk fails, for the pair's reason, once nothing makes ``first`` go before ``second``."""
    cut = application(name)[2].cut(pair.first, pair.second)
    for world in handler_world(monkeypatch):
        cloud = deployed(name, world)
        reasons = destroy(name, cloud, cut, early=pair.second)
        return any(re.search(pair.reason, reason) for reason in reasons)
    raise AssertionError("no world")


# -- what may go wrong


def test_a_pod_stuck_on_unmount_stops_it_and_a_second_run_goes_on(world: World) -> None:
    cloud = deployed("p5", world)
    stuck = next(name for name in cloud.pods() if name.endswith("-1"))
    world.kube.stuck = {stuck}
    (reason,) = destroy("p5", cloud)
    for part in (
        f"Pod training/{stuck}",
        "deleting since",
        "finalizers",
        f"kubectl get pods {stuck}",
        "Nothing was forced",
    ):
        assert part in reason
    assert len(cloud.instances()) >= 2
    assert len(cloud.volumes()) == 2
    assert cloud.of_type("AWS::FSx::FileSystem")
    assert stuck in cloud.pods(), "no finalizer was stripped"
    world.kube.stuck = set()
    assert destroy("p5", cloud) == []
    assert cloud.present == set()


def test_a_claim_with_a_foreign_user_stops_it_and_names_them(world: World) -> None:
    cloud = deployed("p5", world)
    claim = cloud.world.kube.of_kind("PersistentVolumeClaim")[0]["metadata"]["name"]
    notebook = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "notebook", "namespace": "training"},
        "spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]},
    }
    world.kube.put(notebook)
    (reason,) = destroy("p5", cloud)
    assert "others use it: Pod training/notebook" in reason
    assert cloud.of_type("AWS::FSx::FileSystem")
    assert len(cloud.instances()) >= 2
    kube.connect("nvrx-p5").delete(Ref("Pod", "training", "notebook"))
    assert destroy("p5", cloud) == []


def test_an_api_server_that_does_not_answer_stops_it(world: World) -> None:
    cloud = deployed("p5", world)
    world.kube.down = True
    reasons = destroy("p5", cloud)
    assert reasons
    assert all("exists, but its API" in reason for reason in reasons)
    assert len(cloud.instances()) >= 2
    world.kube.down = False
    assert destroy("p5", cloud) == []


def test_a_cluster_that_somebody_deleted_is_no_obstacle(world: World) -> None:
    cloud = deployed("p5", world)
    boto3.client("eks").delete_cluster(name="nvrx-p5")
    world.kube.objects.clear()
    world.kube.down = True
    cloud.allow_data_loss = True
    reasons = destroy("p5", cloud)
    assert reasons == ["Custom::DataLossGuard"] or not [r for r in reasons if "DataLossGuard" not in r]


def test_a_group_that_refuses_keeps_the_file_system(world: World) -> None:
    cloud = deployed("p5", world)
    world.aws["UpdateAutoScalingGroup"] = refuse("ValidationError", "a policy forbids it")
    world.activities = [{"StatusCode": "Failed", "Cause": "x", "StatusMessage": "termination is not permitted"}]
    (reason,) = destroy("p5", cloud)
    assert "a policy forbids it" in reason
    assert "termination is not permitted" in reason
    assert cloud.pods() == []
    assert cloud.of_type("AWS::FSx::FileSystem")
    del world.aws["UpdateAutoScalingGroup"]
    assert destroy("p5", cloud) == []


def test_a_job_submitted_by_hand_goes_with_the_rest(world: World) -> None:
    cloud = deployed("p5", world)
    job = json.loads(json.dumps(cloud.world.kube.of_kind("Job")[0]))
    job["metadata"] = {"name": "by-hand", "namespace": "training", "labels": {"app.kubernetes.io/name": "nvrx-eks"}}
    job["spec"]["template"]["metadata"] = {"labels": {"app.kubernetes.io/name": "nvrx-eks"}}
    world.kube.put(job)
    assert "by-hand-0" in cloud.pods()
    assert destroy("p5", cloud) == []
    assert world.kube.objects == {}


def test_without_the_users_word_nothing_is_ended(world: World) -> None:
    cloud = deployed("p5", world)
    cloud.allow_data_loss = False
    before = cloud.pods()
    (reason,) = destroy("p5", cloud)
    assert "storage.allow_data_loss = true" in reason
    assert cloud.pods() == before
    assert len(cloud.instances()) >= 2
    cloud.allow_data_loss = True
    assert destroy("p5", cloud) == []


def test_a_failed_export_keeps_the_claim_and_a_second_run_exports_again(world: World) -> None:
    cloud = deployed("guest", world)
    cloud.export_lifecycle = "FAILED"
    (reason,) = destroy("guest", cloud)
    assert "the bucket is gone. Nothing was deleted" in reason
    assert cloud.pods() == []
    assert len(cloud.volumes()) == 2
    cloud.export_lifecycle = "SUCCEEDED"
    world.time_s += 3600
    assert destroy("guest", cloud) == []
    assert [task["Lifecycle"] for task in cloud.tasks] == ["FAILED", "SUCCEEDED"]
