"""TrainingPayload: what it puts into the cluster, its names, its order, and what the training process receives."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from aws_cdk import App, Stack
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_s3 as s3
from constructs import Construct

from payload.cluster.target import from_settings
from payload.config import ARMS, ConfigError, RunConfig, load_profile, merge
from payload.environment import PodEnvironment, WorkerEnvironment
from payload.manifest_rules import parse_quantity
from payload.manifest_rules import validate as validate_job
from payload.manifests import COMPONENT_LABEL, RUN_LABEL, Deployment, job_of, render
from stacks import config as profiles
from stacks.constructs.kubernetes_objects import KubernetesProvider, OnChange
from stacks.constructs.training_payload import GpuGroup, LustreVolume, TrainingPayload
from stacks.deployment import deployment, deployment_of
from stacks.instances import CATALOGUE
from stacks.nccl import environment
from tests.graph import Graph
from tests.synth import Synthesis, synthesis

VERSIONS = ("1.34", "1.35", "1.36")
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"
P5 = profiles.load("p5")
PLACE = GpuGroup(auto_scaling_group_name="gpus", region="us-east-1", num_nodes=2)
TOKEN = re.compile(r"\b(Ref|GetAtt) [A-Za-z0-9]+|\$\{Token")


def payload_in(
    scope: Construct,
    id: str,
    config: RunConfig = P5.run,
    *,
    image_id: str = "one",
    secret: str = "",
    on_change: OnChange = "replace",
) -> TrainingPayload:
    """A payload alone, in a stack without the others; its image is a token as in the real one."""
    name = f"{id}Cluster"
    cluster = eks.Cluster.from_cluster_attributes(scope, name, cluster_name="cluster")
    image = s3.CfnBucket(scope, f"{id}Image")
    where = deployment(P5, image=f"{image.attr_arn}@sha256", image_id=image_id)
    return TrainingPayload(
        scope,
        id,
        provider=KubernetesProvider(scope, f"{id}Api", cluster=cluster),
        config=config,
        deployment=dataclasses.replace(where, token_secret=secret),
        volume=LustreVolume(capacity_gib=1200, file_system_id=image.ref, dns_name="dns", mount_name="mount"),
        volume_name="fsx",
        image_ready=image,
        needs=[image],
        prepare_data=("--source", "c4"),
        on_change=on_change,
        token_secret_arn=secret,
        gpu_group=PLACE,
    )


def alone(**choices: Any) -> TrainingPayload:
    return payload_in(Stack(App(), "Alone"), "Payload", **choices)


def template_of(scope: Stack) -> dict[str, Any]:
    app = scope.node.root
    assert isinstance(app, App)
    return json.loads(Path(app.synth().get_stack_by_name(scope.stack_name).template_full_path).read_text())


def objects_of(template: dict[str, Any], id: str) -> list[dict[str, Any]]:
    """The objects of the custom resource whose logical id begins with ``id``; tokens read ``Ref X``."""
    (resource,) = [r for name, r in template["Resources"].items() if re.fullmatch(rf"{id}[0-9A-F]{{8}}", name)]
    text = resource["Properties"]["Objects"]
    pieces = text["Fn::Join"][1] if isinstance(text, dict) else [text]
    return json.loads(
        "".join(p if isinstance(p, str) else f"Ref {json.dumps(p)[2:8]}" for p in pieces).replace('"Re"', "")
    )


def everything(each: Synthesis) -> list[dict[str, Any]]:
    payload = each.stacks.training.payload
    parts = [payload.namespace, payload.volume, payload.data, payload.job, payload.settings]
    return [item for part in parts if part for item in each.objects(part)]


def job(each: Synthesis) -> dict[str, Any]:
    return job_of(each.objects(each.stacks.training.payload.job))


def container(each: Synthesis) -> dict[str, Any]:
    (found,) = job(each)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def env(each: Synthesis) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(each)["env"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_for_every_supported_kubernetes(each: Synthesis, version: str) -> None:
    for item in everything(each):
        kubernetes_validate.validate(item, version, strict=True)
        if item["kind"] == "Job":
            validate_job(item)


def test_namespace_names_a_pod_security_level_and_the_pods_meet_it(each: Synthesis) -> None:
    """No IPC_LOCK, no host path: the nodes' containerd lifts the memlock limit instead (F49)."""
    (space,) = [item for item in everything(each) if item["kind"] == "Namespace"]
    labels = space["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}
    for item in everything(each):
        if item["kind"] == "Job":
            assert list(not_restricted(item["spec"]["template"]["spec"])) == []
    node = each.only("gpu-nodes", "AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]
    assert "LimitMEMLOCK=infinity" in json.dumps(node["UserData"])


def not_restricted(pod: dict[str, Any]) -> Iterator[str]:
    """What the level ``restricted`` forbids (Kubernetes, "Pod Security Standards")."""
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in pod["volumes"]:
        yield from (f"volume {kind}" for kind in set(volume) - {"name"} - allowed)
    context = pod["securityContext"]
    if not context.get("runAsNonRoot") or context.get("runAsUser") == 0:
        yield "root"
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccomp"
    for item in pod["containers"]:
        rules = item["securityContext"]
        if rules.get("privileged") or rules.get("allowPrivilegeEscalation") is not False:
            yield "privilege"
        if rules["capabilities"].get("drop") != ["ALL"] or set(rules["capabilities"].get("add", [])) - {
            "NET_BIND_SERVICE"
        }:
            yield "capabilities"
        yield from (f"hostPort {port}" for port in item.get("ports", []) if port.get("hostPort"))


def test_restricted_is_a_rule_that_can_fail() -> None:
    where = dataclasses.replace(deployment(P5, image="i", image_id="i"), ipc_lock=True)
    assert "capabilities" in list(not_restricted(job_of(render(P5.run, where))["spec"]["template"]["spec"]))
    assert where.pod_security == "privileged"


def test_tokens_stand_where_they_may_and_nowhere_else(each: Synthesis) -> None:
    """Known at deployment only: the image, and the volume's handle, DNS name and mount name."""
    for item in everything(each):
        if item["kind"] == "Job":
            (inside,) = item["spec"]["template"]["spec"]["containers"]
            assert TOKEN.search(inside.pop("image"))
        elif item["kind"] == "PersistentVolume":
            csi = item["spec"]["csi"]
            for part in (csi.pop("volumeHandle"), *csi.pop("volumeAttributes").values()):
                assert TOKEN.search(part)
        elif item["metadata"]["name"] == "nvrx-eks" and item["kind"] == "ConfigMap":
            assert TOKEN.search(item["data"].pop("image"))
        assert not TOKEN.search(json.dumps(item)), item["kind"]


def test_a_token_elsewhere_is_refused() -> None:
    stack = Stack(App(), "Alone")
    where = deployment(P5, image="i", image_id="i")
    for changed in (
        dataclasses.replace(where, namespace=stack.stack_id),
        dataclasses.replace(where, image=stack.stack_id, image_id=""),
    ):
        with pytest.raises(ConfigError, match=r"known at deployment|image_id: empty"):
            render(P5.run, changed)


def test_job_name_changes_with_the_spec_and_with_nothing_else() -> None:
    """F45: image and steps change it; equal input and an unrelated construct do not."""
    before = alone().job_name
    stack = Stack(App(), "Other")
    s3.CfnBucket(stack, "Unrelated")
    assert payload_in(stack, "Payload").job_name == before
    assert alone(image_id="two").job_name != before
    longer = P5.run.with_overrides({"training.max_steps": 2000})
    assert alone(config=longer).job_name not in (before, alone(image_id="two").job_name)
    assert {before.rpartition("-")[0], alone(config=longer).job_name.rpartition("-")[0]} == {"nvrx-p5-1"}


def test_stack_and_command_line_give_the_job_one_name(each: Synthesis) -> None:
    """F45: the name in the template, the stack's output, and what render shows for the same profile."""
    path = profiles.PROFILES / f"{each.profile.name}.toml"
    shown = job_of(render(load_profile(path), deployment_of(path)))
    assert job(each)["metadata"]["name"] == each.stacks.training.payload.job_name == shown["metadata"]["name"]
    assert "ttlSecondsAfterFinished" not in job(each)["spec"]


def test_submit_learns_the_deployment_from_the_cluster(each: Synthesis) -> None:
    """What the stack leaves for ``python -m payload submit`` is what the stack itself used."""
    (found,) = each.objects(each.stacks.training.payload.settings)
    where, group = from_settings(found["data"])
    own = deployment_of(profiles.PROFILES / f"{each.profile.name}.toml")
    assert dataclasses.replace(where, image="") == dataclasses.replace(own, image="")
    assert where.image == container(each)["image"]
    block = each.profile.nodes.capacity.kind == "capacity-block"
    assert group.num_nodes == (0 if block else each.profile.nodes.maximum)
    assert group.auto_scaling_group_name == each.stacks.gpu_nodes.auto_scaling_group_name


@functools.cache
def arms_template(folder: str) -> dict[str, Any]:
    stack = Stack(App(outdir=f"{folder}.out"), "Arms")
    for arm in ARMS:
        run = P5.run.with_overrides({"recovery.arm": arm, "workdir": folder, "run_id": f"arm-{arm}"})
        payload_in(stack, f"Arm{ARMS.index(arm)}", run)
    return template_of(stack)


@pytest.fixture(scope="module")
def arms() -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder that stands for the volume, and a template with a payload of every arm."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/fsx", arms_template(f"{folder}/fsx")


@pytest.mark.parametrize("arm", ARMS)
def test_round_trip(
    arms: tuple[str, dict[str, Any]], arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile -> template -> manifest in it -> launcher's and worker's environment -> what train() is given."""
    folder, template = arms
    asked = P5.run.with_overrides({"recovery.arm": arm, "workdir": folder, "run_id": f"arm-{arm}"})
    items = objects_of(template, f"Arm{ARMS.index(arm)}Job")
    (values, config_map) = (pod_values(job_of(items)), next(i for i in items if i["kind"] == "ConfigMap"))
    mounted = tmp_path / "run.json"
    mounted.write_text(config_map["data"]["run.json"])
    assert values["NVRX_EKS_CONFIG"] == "/etc/nvrx-eks/run.json"
    values["NVRX_EKS_CONFIG"] = str(mounted)
    pod = PodEnvironment.read(values)
    assert (pod.config, pod.index, pod.await_data) == (asked, 1, True)
    name = job_of(items)["metadata"]["name"]
    assert pod.coordinator == f"{name}-0.{name}.training.svc"
    rank = {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "NVRX_EKS_STORE": "10.0.0.1:29400",
        "NVRX_EKS_CYCLE": "0",
    }
    worker = WorkerEnvironment.read({**values, **rank})
    assert (worker.rank, worker.local_rank, worker.pod_index) == (9, 1, 1)
    assert received(worker, monkeypatch) == [asked]


def pod_values(item: dict[str, Any]) -> dict[str, str]:
    """The environment of pod 1, as the kubelet and the Job controller fill it in."""
    (inside,) = item["spec"]["template"]["spec"]["containers"]
    fields = {"metadata.name": "pod-1", "metadata.uid": "u", "spec.nodeName": "node-1"}
    values = {
        e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]]
        for e in inside["env"]
    }
    return {**values, "JOB_COMPLETION_INDEX": "1"}


def received(environment: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """What the real worker passes to train(); the arm enters it once, as a run without faults does."""
    from payload import parallel, recovery, train, worker

    found: list[RunConfig] = []

    class Session:
        stopped = False

        def __init__(self, *_: Any) -> None:
            self.request_stop = lambda: None

        def close(self) -> None: ...

    class Arm:
        def run(self, enter: Any) -> None:
            enter(None)

    monkeypatch.setattr(worker, "preload", lambda config: None)
    monkeypatch.setattr(worker, "_stop_on_sigterm", lambda ask: None)
    monkeypatch.setattr(parallel, "make_deterministic", lambda: None)
    monkeypatch.setattr(train, "Session", Session)
    monkeypatch.setattr(train, "train", lambda config, attempt, session: found.append(config))
    monkeypatch.setattr(recovery, "build", lambda config, env, events: Arm())
    assert worker.run(environment) == 0
    return found


def test_arms_differ_in_the_job_as_the_api_wants_it(arms: tuple[str, dict[str, Any]]) -> None:
    """F25, F30, F31: the baseline restarts containers; the others fail pods by rules, no progress ends the Job."""
    for arm in ARMS:
        spec = job_of(objects_of(arms[1], f"Arm{ARMS.index(arm)}Job"))["spec"]
        assert ("podFailurePolicy" in spec) == (arm != "kubernetes")
        assert spec["template"]["spec"]["restartPolicy"] == ("OnFailure" if arm == "kubernetes" else "Never")
        assert spec["podReplacementPolicy"] == "Failed"


def test_changed_run_replaces_the_jobs_of_its_run_only() -> None:
    """The run id outlives the spec: another run's Job, and the one that prepares data, go on."""
    stack = Stack(App(), "Alone")
    payload_in(stack, "Payload", on_change="keep")
    resources = template_of(stack)["Resources"]
    (properties,) = [r["Properties"] for r in resources.values() if "Jobs" in r.get("Properties", {})]
    gate = json.loads(properties["Jobs"])
    assert gate["onChange"] == "keep"
    assert gate["replaces"][RUN_LABEL] == "p5-1" and gate["replaces"][COMPONENT_LABEL] == "training"
    assert set(gate["selector"]) == {"app.kubernetes.io/name"}, "on delete every Job of ours goes, by hand or not"


def test_token_stays_in_secrets_manager() -> None:
    """The pods may read that one secret by their identity; only its name is in the manifest."""
    stack = Stack(App(), "Alone")
    payload = payload_in(stack, "Payload", secret=SECRET)
    template = template_of(stack)
    resources = template["Resources"]
    (association,) = [r for r in resources.values() if r["Type"] == "AWS::EKS::PodIdentityAssociation"]
    assert association["Properties"]["ServiceAccount"] == "training"
    policies = [
        r["Properties"]["PolicyDocument"]["Statement"] for r in resources.values() if r["Type"] == "AWS::IAM::Policy"
    ]
    readers = [s for statements in policies for s in statements if "secretsmanager:GetSecretValue" in str(s["Action"])]
    assert [statement["Resource"] for statement in readers] == [SECRET]
    (spec,) = [job_of(objects_of(template, "PayloadJob"))["spec"]["template"]["spec"]]
    values = {item["name"]: item.get("value") for item in spec["containers"][0]["env"]}
    assert values["NVRX_EKS_HF_SECRET"] == SECRET and "HF_TOKEN" not in values
    assert spec["serviceAccountName"] == "training" and spec["automountServiceAccountToken"] is False
    assert payload.identity is not None
    logical = stack.resolve(payload.identity.logical_id)
    jobs = [
        r
        for name, r in resources.items()
        if name.startswith(("PayloadJob", "PayloadData")) and "Objects" in r["Properties"]
    ]
    assert jobs and all(logical in item["DependsOn"] for item in jobs), "the pods find their identity when they start"
    assert alone().identity is None


def test_no_gpu_is_paid_for_while_the_image_is_built_and_no_job_starts_before(each: Synthesis) -> None:
    graph, stack = Graph(each), each.stacks.training
    image, capacity = (("training", each.logical_id(item.resource)) for item in (stack.image, stack.capacity))
    for later in (stack.payload.job, stack.payload.data, stack.payload.settings):
        assert later is not None
        assert graph.needs(("training", each.logical_id(later.resource)), image, across_stacks=False)
    assert graph.needs(capacity, image, across_stacks=False)


def test_a_changed_job_asks_for_its_nodes_again(each: Synthesis) -> None:
    """The idle guard may have set them to zero: a deployment that changes the Job updates the capacity as well."""
    (capacity,) = each.of_type("training", "Custom::GpuCapacity").values()
    assert capacity["Properties"]["Job"] == each.stacks.training.payload.job_name


def test_nccl_and_efa_by_instance(each: Synthesis) -> None:
    """F37: the network is pinned by name, so that a fallback to sockets is an error. F34: no foreign interface."""
    values, instance = env(each), each.profile.nodes.instance
    assert values["NCCL_NET"] == ("AWS Libfabric" if instance.efa_cards else "Socket")
    assert values.get("FI_PROVIDER") == ("efa" if instance.efa_cards else None)
    left_out = values["NCCL_SOCKET_IFNAME"]
    assert left_out[0] == "^" and set(left_out[1:].split(",")) >= {"lo", "docker", "veth", "eni", "pod-id-link"}


def test_every_instance_has_a_network() -> None:
    assert {environment(item)["NCCL_NET"] for item in CATALOGUE.values()} == {"AWS Libfabric", "Socket"}
    assert all(environment(item)["NCCL_NVLS_ENABLE"] == "0" for item in CATALOGUE.values())


def test_pod_resources(each: Synthesis) -> None:
    """F49: a sized memory volume below the limit, requests equal to limits, one pod a node."""
    resources, pod = container(each)["resources"], job(each)["spec"]["template"]["spec"]
    limits, requests = resources["limits"], resources["requests"]
    for name in ("memory", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"):
        assert limits.get(name) == requests.get(name)
    (memory,) = [v["emptyDir"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert 64 * 2**20 < parse_quantity(memory["sizeLimit"]) < parse_quantity(limits["memory"])
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert pod["terminationGracePeriodSeconds"] >= each.profile.run.timeouts.save_grace_s
    seconds = {t["key"]: t["tolerationSeconds"] for t in pod["tolerations"] if "tolerationSeconds" in t}
    assert set(seconds) == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert all(value <= 60 for value in seconds.values())


def test_a_job_that_waits_for_its_capacity_block_has_no_deadline(each: Synthesis) -> None:
    block = each.profile.nodes.capacity.kind == "capacity-block"
    assert job(each)["spec"].get("activeDeadlineSeconds") == (None if block else each.profile.job.max_hours * 3600)
    assert (each.stacks.training.idle_guard is None) == block


def test_spare_node_is_there_for_the_same_job() -> None:
    """A hot spare changes the number of nodes and nothing of the Job, so that a lost node's pod goes there."""
    tables = merge(P5.model_dump(mode="json"), {"nodes.spare": 1})
    spared = profiles.validate(tables)
    assert spared.nodes.maximum == P5.nodes.maximum + 1
    one, other = (job_of(render(p.run, deployment(p, image="i", image_id="i"))) for p in (P5, spared))
    assert one == other


def test_a_task_of_ones_own_has_no_job_that_prepares_data() -> None:
    run = P5.run.with_overrides({"model.task": "examples.regression_task:build"})
    assert alone(config=run).data is None and alone().data is not None


def test_monitoring_agent_is_installed(p5: Synthesis) -> None:
    names = [addon["Properties"]["AddonName"] for addon in p5.of_type("cluster", "AWS::EKS::Addon").values()]
    assert "eks-node-monitoring-agent" in names


def test_deployment_meets_its_own_level() -> None:
    where = deployment_of(profiles.PROFILES / "p5.toml")
    assert isinstance(where, Deployment) and where.pod_security == "restricted"
    assert synthesis("p5").profile.job.namespace == where.namespace
