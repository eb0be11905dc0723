"""The handler of Kubernetes objects and its client, against the stub API: what CloudFormation may do to them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest

from stacks.handlers import kube, kubernetes_objects, waiting
from stacks.handlers.kube import Ref
from stacks.handlers.waiting import Failed
from tests.stacks.handler_world import CLUSTER, World, handler_world, make_cluster
from tests.stacks.kube_stub import PVC_PROTECTION, serve

NAMESPACE = "train"
LABELS = {"app.kubernetes.io/part-of": "nvrx-eks"}
GATE = {"namespace": NAMESPACE, "selector": LABELS, "replaces": LABELS, "onChange": "replace"}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for world in handler_world(monkeypatch):
        make_cluster()
        yield world


def namespace(name: str = NAMESPACE) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def volume() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "data"}, "spec": {}}


def claim() -> dict[str, Any]:
    meta = {"name": "data", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {"volumeName": "data"}}


def config(name: str = "run") -> dict[str, Any]:
    meta = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"run.json": "{}"}}


def pod(name: str, *, labels: dict[str, str] | None = None, owner: str = "") -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "labels": labels or {}}
    if owner:
        meta["ownerReferences"] = [{"kind": "ReplicaSet", "name": owner}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": mounts()}


def mounts() -> dict[str, Any]:
    return {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}], "containers": []}


def job(name: str, labels: dict[str, str] = LABELS, nodes: int = 2) -> dict[str, Any]:
    template = {"metadata": {"labels": labels}, "spec": {**mounts(), "containers": [{"image": name}]}}
    meta = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {"parallelism": nodes, "template": template},
    }


def properties(*objects: dict[str, Any], wait: str = "ready", gate: dict[str, Any] | None = None) -> dict[str, Any]:
    made = {
        "ClusterName": CLUSTER,
        "Objects": json.dumps(objects),
        "Wait": wait,
        "CreateSeconds": 1800,
        "DeleteSeconds": 2700,
        "ForeignSeconds": 600,
    }
    return {**made, "Jobs": json.dumps(gate)} if gate else made


def create(world: World, *objects: dict[str, Any], **options: Any) -> dict[str, Any]:
    return world.run(kubernetes_objects, world.request("Create", properties(*objects, **options)))


def delete(world: World, *objects: dict[str, Any], **options: Any) -> dict[str, Any]:
    return world.run(kubernetes_objects, world.request("Delete", properties(*objects, **options)))


def deployed(world: World) -> None:
    for item in (namespace(), volume(), claim()):
        create(world, item)
    create(world, config(), job("train-a"), gate=GATE)


def gone_order(world: World) -> list[str]:
    return [f"{ref.kind}/{ref.name}" for verb, ref in world.kube.log if verb == "gone"]


# -- create and update


def test_creates_and_verifies_each(world: World) -> None:
    deployed(world)
    assert world.kube.objects[Ref("PersistentVolumeClaim", NAMESPACE, "data")]["status"]["phase"] == "Bound"
    assert len(world.kube.of_kind("Pod")) == 2


def test_called_twice_changes_nothing(world: World) -> None:
    deployed(world)
    before = json.dumps(sorted(map(str, world.kube.objects)))
    deployed(world)
    assert json.dumps(sorted(map(str, world.kube.objects))) == before


def test_killed_half_way_and_called_again(world: World) -> None:
    """The API answers the first object only; the next call applies the rest."""
    create(world, namespace())
    event = world.begin(kubernetes_objects, world.request("Create", properties(volume(), claim(), config())))
    refuse_claims, patch = True, world.kube._patch

    def killed(ref: Ref, *rest: Any) -> Any:
        if refuse_claims and ref.kind == "PersistentVolumeClaim":
            raise KeyboardInterrupt
        return patch(ref, *rest)

    world.kube._patch = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.step(kubernetes_objects, event)
    assert not world.kube.has("ConfigMap", "run", NAMESPACE)
    refuse_claims = False
    assert world.step(kubernetes_objects, event) is not None
    assert world.kube.has("ConfigMap", "run", NAMESPACE)


def test_unbound_claim_is_named_in_time(world: World) -> None:
    create(world, namespace())
    with pytest.raises(Failed, match=r"PersistentVolumeClaim train/data: phase Pending.*kubectl get"):
        create(world, claim())


def test_an_object_that_is_being_deleted_is_awaited_not_patched(world: World) -> None:
    create(world, namespace())
    create(world, config())
    ref = Ref("ConfigMap", NAMESPACE, "run")
    world.kube.objects[ref]["metadata"]["finalizers"] = ["example.com/hold"]
    kube.connect(CLUSTER).delete(ref)
    event = world.begin(kubernetes_objects, world.request("Create", properties(config())))
    assert world.step(kubernetes_objects, event) is None
    world.kube.objects[ref]["metadata"]["finalizers"] = []
    assert world.step(kubernetes_objects, event) is not None
    assert "deletionTimestamp" not in world.kube.objects[ref]["metadata"]


def test_a_volume_that_an_unfinished_teardown_left_is_made_anew(world: World) -> None:
    """Its reference to the former claim would keep every new claim Pending."""
    retained = {**volume(), "spec": {"persistentVolumeReclaimPolicy": "Retain"}}
    create(world, namespace())
    create(world, retained, claim())
    delete(world, claim())
    assert world.kube.of_kind("PersistentVolume")[0]["status"]["phase"] == "Released"
    create(world, retained, claim())
    assert world.kube.of_kind("PersistentVolumeClaim")[0]["status"]["phase"] == "Bound"


def test_wait_for_a_job_to_complete_or_fail(world: World) -> None:
    create(world, namespace())
    event = world.begin(kubernetes_objects, world.request("Create", properties(job("prepare"), wait="complete")))
    assert world.step(kubernetes_objects, event) is None
    world.kube.finish("prepare")
    assert world.step(kubernetes_objects, event) is not None
    world.kube.finish("prepare", "Failed")
    with pytest.raises(Failed, match=r"Job train/prepare failed; look: kubectl logs -n train job/prepare"):
        world.step(kubernetes_objects, event)


def test_update_removes_what_it_holds_no_longer(world: World) -> None:
    create(world, namespace())
    old, new = properties(config("a"), config("b")), properties(config("b"), config("c"))
    world.run(kubernetes_objects, world.request("Create", old))
    world.run(kubernetes_objects, world.request("Update", new, old))
    assert sorted(ref.name for ref in world.kube.objects if ref.kind == "ConfigMap") == ["b", "c"]


def test_a_changed_job_follows_the_end_of_the_old_one(world: World) -> None:
    """F45: SIGTERM, save, pods gone; only then the new Job. No template is ever patched."""
    deployed(world)
    world.kube.grace_s = 300.0
    old, new = properties(job("train-a"), gate=GATE), properties(job("train-b"), gate=GATE)
    event = world.begin(kubernetes_objects, world.request("Update", new, old))
    while world.step(kubernetes_objects, event) is None:
        assert not world.kube.has("Job", "train-b", NAMESPACE), "two Jobs of one run at the same time"
        world.time_s += 10.0
    assert gone_order(world) == ["Pod/train-a-0", "Pod/train-a-1", "Job/train-a"]
    assert [ref.name for ref in world.kube.objects if ref.kind == "Pod"] == ["train-b-0", "train-b-1"]


def test_keep_leaves_the_running_job_and_follows_a_finished_one(world: World) -> None:
    deployed(world)
    keep = {**GATE, "onChange": "keep"}
    old, new = properties(config(), job("train-a"), gate=keep), properties(config("new"), job("train-b"), gate=keep)
    data = world.run(kubernetes_objects, world.request("Update", new, old))
    assert "kept: Job train/train-a" in data["Message"]
    assert world.kube.has("ConfigMap", "run", NAMESPACE), "the running Job still mounts it"
    assert not world.kube.has("Job", "train-b", NAMESPACE)
    world.kube.finish("train-a")
    world.run(kubernetes_objects, world.request("Update", new, old))
    assert world.kube.has("Job", "train-a", NAMESPACE), "its logs may still be wanted"
    assert world.kube.has("Job", "train-b", NAMESPACE)
    delete(world, config(), job("train-b"), gate=GATE)
    assert not world.kube.of_kind("Job")


# -- delete


def test_deletes_in_order_each_gone_before_the_next(world: World) -> None:
    """F42: the Job, its pods, the claim, the volume; each request returns only when it is so."""
    deployed(world)
    delete(world, config(), job("train-a"), gate=GATE)
    assert not world.kube.of_kind("Pod")
    for item in (claim(), volume(), namespace()):
        delete(world, item)
    expected = ["Pod/train-a-0", "Pod/train-a-1", "Job/train-a", "ConfigMap/run"]
    expected += ["PersistentVolumeClaim/data", "PersistentVolume/data", "Namespace/train"]
    assert gone_order(world) == expected


def test_deleting_what_is_gone_is_success(world: World) -> None:
    for item in (claim(), volume(), namespace()):
        delete(world, item)
    delete(world, config(), job("train-a"), gate=GATE)
    assert not [entry for entry in world.kube.log if entry[0] == "delete"]


def test_a_cluster_that_no_longer_exists_is_success(world: World) -> None:
    deployed(world)
    boto3.client("eks").delete_cluster(name=CLUSTER)
    world.kube.down = True
    assert "no longer exists" in delete(world, claim())["Message"]


def test_a_cluster_that_cannot_be_reached_is_an_error(world: World) -> None:
    deployed(world)
    world.kube.down = True
    with pytest.raises(Failed, match=r"cluster train exists, but its API .* does not answer"):
        delete(world, claim())
    world.kube.down = False
    assert world.kube.has("PersistentVolumeClaim", "data", NAMESPACE)


def test_a_job_submitted_by_hand_goes_too(world: World) -> None:
    deployed(world)
    by_hand = job("by-hand")
    by_hand["spec"]["template"]["metadata"]["labels"] = {}
    world.kube.put(by_hand)
    delete(world, config(), job("train-a"), gate=GATE)
    assert not world.kube.of_kind("Job")
    assert not world.kube.of_kind("Pod")


def test_jobs_of_others_are_left_alone(world: World) -> None:
    deployed(world)
    world.kube.put(job("theirs", {"app": "theirs"}))
    delete(world, config(), job("train-a"), gate=GATE)
    assert [ref.name for ref in world.kube.objects if ref.kind == "Job"] == ["theirs"]


def test_an_orphaned_pod_of_ours_is_ended(world: World) -> None:
    deployed(world)
    world.kube.put(pod("orphan", labels=LABELS))
    delete(world, config(), job("train-a"), gate=GATE)
    assert not world.kube.of_kind("Pod")


def test_a_pod_stuck_on_unmount_is_named_and_never_forced(world: World) -> None:
    deployed(world)
    world.kube.stuck = {"train-a-1"}
    with pytest.raises(Failed) as caught:
        delete(world, config(), job("train-a"), gate=GATE)
    reason = str(caught.value)
    for part in ("Pod train/train-a-1", "node-2", "foregroundDeletion", "kubectl get pods train-a-1 -n train"):
        assert part in reason
    assert "Nothing was forced" in reason
    world.kube.stuck = set()
    delete(world, config(), job("train-a"), gate=GATE)
    assert not world.kube.of_kind("Job")


def test_a_claim_in_use_by_others_is_not_touched_and_they_are_named(world: World) -> None:
    deployed(world)
    delete(world, config(), job("train-a"), gate=GATE)
    world.kube.put(pod("notebook", owner="jupyter"))
    with pytest.raises(Failed, match=r"in*use|others use it: Pod train/notebook .*owned by ReplicaSet jupyter"):
        delete(world, claim())
    ref = Ref("PersistentVolumeClaim", NAMESPACE, "data")
    assert "deletionTimestamp" not in world.kube.objects[ref]["metadata"], "it would refuse new pods for ever"
    kube.connect(CLUSTER).delete(Ref("Pod", NAMESPACE, "notebook"))
    delete(world, claim())
    assert ref not in world.kube.objects


def test_a_foreign_pod_that_leaves_in_time_is_awaited(world: World) -> None:
    deployed(world)
    delete(world, config(), job("train-a"), gate=GATE)
    world.kube.put(pod("notebook"))
    event = world.begin(kubernetes_objects, world.request("Delete", properties(claim())))
    assert world.step(kubernetes_objects, event) is None
    kube.connect(CLUSTER).delete(Ref("Pod", NAMESPACE, "notebook"))
    world.time_s += 60.0
    assert world.step(kubernetes_objects, event) is not None


def test_a_finalizer_that_stays_is_named_and_not_stripped(world: World) -> None:
    deployed(world)
    delete(world, config(), job("train-a"), gate=GATE)
    ref = Ref("PersistentVolumeClaim", NAMESPACE, "data")
    world.kube.objects[ref]["metadata"]["finalizers"] = [PVC_PROTECTION, "example.com/hold"]
    with pytest.raises(
        Failed, match=r"PersistentVolumeClaim train/data .*finalizers .*example.com/hold; look: kubectl"
    ):
        delete(world, claim())
    assert world.kube.objects[ref]["metadata"]["finalizers"] == ["example.com/hold"]


def test_a_namespace_with_the_work_of_others_is_kept(world: World) -> None:
    create(world, namespace())
    world.kube.put(pod("theirs"))
    with pytest.raises(Failed, match=r"Namespace train was not deleted.*Pod train/theirs"):
        delete(world, namespace())
    assert world.kube.has("Pod", "theirs", NAMESPACE)


# -- the way to the API


@pytest.mark.parametrize("status", [429, 500, 503])
def test_throttling_and_server_errors_are_waited_out(world: World, status: int) -> None:
    world.kube.answers = [(status, {"Retry-After": "3"})] * 4
    started = world.time_s
    create(world, namespace())
    assert world.kube.has("Namespace", NAMESPACE)
    assert 12.0 <= world.time_s - started <= kube.RETRY_BUDGET_S


def test_throttling_without_end_is_an_error_in_time(world: World) -> None:
    world.kube.answers = [(429, {})] * 1000
    started = world.time_s
    with pytest.raises(Failed, match="does not answer: 429"):
        create(world, namespace())
    assert world.time_s - started <= kube.RETRY_BUDGET_S


def test_a_new_access_entry_may_take_a_while(world: World) -> None:
    world.kube.unauthorized = True
    event = world.begin(kubernetes_objects, world.request("Create", properties(namespace())))
    assert world.step(kubernetes_objects, event) is None
    world.time_s += 60.0
    world.kube.unauthorized = False
    assert world.step(kubernetes_objects, event) is not None


def test_a_refusal_for_good_is_an_error(world: World) -> None:
    """F43: an access entry that went first must not look like success."""
    deployed(world)
    world.kube.unauthorized = True
    with pytest.raises(Failed, match="401 Unauthorized"):
        delete(world, claim())


def test_lists_are_read_to_the_end(world: World) -> None:
    create(world, namespace())
    for index in range(7):
        world.kube.put(config(f"c{index}"))
    world.kube.page_size = 3
    assert len(kube.connect(CLUSTER).list("ConfigMap", NAMESPACE)) == 7


def test_the_client_speaks_http(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a socket, with the real ``send`` but for TLS, which the stub does not speak."""
    monkeypatch.undo()
    world.kube.clock = lambda: 0.0
    contexts: list[Any] = []
    monkeypatch.setattr(kube.ssl, "create_default_context", lambda cadata: contexts.append(cadata) or FakeContext())
    monkeypatch.setattr(waiting, "sleep", lambda duration_s: None)
    opened = kube.urllib.request.urlopen

    def plain(request: Any, timeout: float, context: Any) -> Any:
        assert not context.verify_flags & kube.ssl.VERIFY_X509_STRICT
        return opened(request, timeout=30.0)

    monkeypatch.setattr(kube.urllib.request, "urlopen", plain)
    with serve(world.kube) as url:
        client = kube.Client(CLUSTER, url, "the authority", "k8s-aws-v1.token", waiting.now() + 60.0)
        client.apply(namespace())
        assert client.get(Ref("Namespace", "", NAMESPACE)) is not None
        assert client.get(Ref("Namespace", "", "absent")) is None
        client.delete(Ref("Namespace", "", "absent"))
        client.delete(Ref("Namespace", "", NAMESPACE))
        assert client.list("Namespace", "") == []
    assert set(contexts) == {"the authority"}


class FakeContext:
    verify_flags = kube.ssl.VERIFY_X509_STRICT | kube.ssl.VERIFY_DEFAULT


def test_the_token_is_a_signed_identity_request_for_this_cluster(world: World) -> None:
    prefix, _, encoded = kube.token(CLUSTER).partition(".")
    url = urlsplit(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode())
    query = parse_qs(url.query)
    assert prefix == "k8s-aws-v1"
    assert url.hostname == "sts.us-east-1.amazonaws.com"
    assert query["Action"] == ["GetCallerIdentity"]
    assert "x-k8s-aws-id" in query["X-Amz-SignedHeaders"][0]
    assert int(query["X-Amz-Expires"][0]) <= 900
