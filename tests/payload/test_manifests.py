"""Manifests: what is rendered, which rules hold between its fields, and that each rule is checked."""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest

from payload.config import ARMS, ConfigError, RunConfig
from payload.manifests import (
    CONFIG_KEY,
    JOB_LABEL,
    KIND,
    LOCAL,
    Deployment,
    Toleration,
    coordinator,
    job_of,
    render,
    render_prepare_data,
    validate,
)

P5 = Deployment(
    image="registry.example/nvrx-eks@sha256:" + "0" * 64,
    node_selector=(("nvidia.com/gpu.present", "true"),),
    tolerations=(Toleration("nvidia.com/gpu", effect="NoSchedule"),),
    cpu="190",
    memory_mib=1_900_000,
    num_gpus=8,
    num_efa=32,
    hugepages_2mi_mib=5120,
    shm_mib=400_000,
    env=(("FI_PROVIDER", "efa"),),
    service_account="training",
)
CPU = {"parallelism.device": "cpu"}


def config(arm: str = "layered", **overrides: Any) -> RunConfig:
    return RunConfig().with_overrides({"recovery.arm": arm, **overrides})


def gpu_config(arm: str = "layered", num_nodes: int = 2) -> RunConfig:
    return config(
        arm, **{"parallelism.num_nodes": num_nodes, "parallelism.ranks_per_node": 8, "training.global_batch_size": 32}
    )


def local_job(arm: str = "layered", **overrides: Any) -> dict[str, Any]:
    return job_of(render(config(arm, **CPU, **overrides), LOCAL))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def environment_of(job: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod_of(job)["containers"][0]["env"]}


@pytest.mark.parametrize("version", ["1.34", "1.35", "1.36"])
@pytest.mark.parametrize("arm", ARMS)
def test_kubernetes_accepts_every_object(arm: str, version: str) -> None:
    for objects in (
        render(config(arm, **CPU), LOCAL),
        render(config(arm, **CPU), KIND),
        render(gpu_config(arm), P5),
        render_prepare_data(gpu_config(arm), P5, ["--source", "c4"]),
    ):
        for item in objects:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_run_config_arrives_as_it_was_rendered() -> None:
    given = config("in-job", **CPU)
    objects = render(given, LOCAL)
    assert RunConfig.from_json(objects[0]["data"][CONFIG_KEY]) == given
    mounts = {mount["name"]: mount["mountPath"] for mount in pod_of(objects[2])["containers"][0]["volumeMounts"]}
    assert environment_of(objects[2])["NVRX_EKS_CONFIG"] == f"{mounts['config']}/{CONFIG_KEY}"
    assert mounts["shared"] == given.workdir and mounts["memory"] == given.checkpoint.memory_dir


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_f30_f31_job_policy_of_the_restarting_arms(num_nodes: int) -> None:
    """F30, F31: no two pods of one index; disruptions are ignored first, only the no-progress code fails the Job."""
    for arm in ("in-process", "in-job", "layered"):
        given = gpu_config(arm, num_nodes)
        job = job_of(render(given, P5))
        spec, pod = job["spec"], pod_of(job)
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == num_nodes
        assert spec["podReplacementPolicy"] == "Failed" and pod["restartPolicy"] == "Never"
        first, second = spec["podFailurePolicy"]["rules"]
        assert first == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert second["action"] == "FailJob" and second["onExitCodes"]["values"] == [42]
        assert spec["backoffLimit"] >= given.recovery.max_restarts * num_nodes
        assert "ttlSecondsAfterFinished" not in spec


def test_f30_the_baseline_is_restarted_by_the_kubelet() -> None:
    """F30: OnFailure, and so without podFailurePolicy, which the API allows with Never only."""
    job = job_of(render(gpu_config("kubernetes"), P5))
    assert pod_of(job)["restartPolicy"] == "OnFailure"
    assert "podFailurePolicy" not in job["spec"]
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_f33_names_resolve_before_pods_are_ready() -> None:
    """F33: headless, addresses of pods that are not ready too, selector and subdomain fit the pods."""
    _, service, job = render(gpu_config(), P5)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert pod_of(job)["subdomain"] == service["metadata"]["name"]
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"]


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_f34_one_endpoint_for_all_and_the_index_from_the_job(num_nodes: int) -> None:
    """F34: pod 0's stable name for every pod, no role by pod, nothing parsed from a host name, no shell."""
    job = job_of(render(gpu_config(num_nodes=num_nodes), P5))
    name, env = job["metadata"]["name"], environment_of(job)
    assert env["NVRX_EKS_COORDINATOR"] == coordinator(name, "nvrx-eks") == f"{name}-0.{name}.nvrx-eks.svc"
    assert "JOB_COMPLETION_INDEX" not in env, "the Job controller sets it"
    assert pod_of(job)["containers"][0]["command"] == ["python", "-m", "payload.launcher"]
    assert env["POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert env["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_f49_pod_resources() -> None:
    """F49: /dev/shm below the memory limit, requests equal limits, one pod a node, no hostPath, no root."""
    job = job_of(render(gpu_config(), P5))
    pod = pod_of(job)
    memory = next(volume for volume in pod["volumes"] if volume["name"] == "memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "400000Mi"}
    assert not any("hostPath" in volume for volume in pod["volumes"])
    resources = pod["containers"][0]["resources"]
    for name in ("memory", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"):
        assert resources["requests"][name] == resources["limits"][name]
    assert "hugepages-2Mi" not in json.dumps(local_job()), "asked for only where the node reserves them"
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {JOB_LABEL: job["metadata"]["name"]}


def test_meets_the_restricted_pod_security_level() -> None:
    """The fields that the restricted level asks for; baseline is implied."""
    pod = pod_of(job_of(render(gpu_config(), P5)))
    assert P5.pod_security == "restricted"
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = pod["containers"][0]["securityContext"]
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {key for volume in pod["volumes"] for key in volume} <= {
        "name",
        "configMap",
        "emptyDir",
        "persistentVolumeClaim",
    }
    assert dataclasses.replace(P5, ipc_lock=True).pod_security == "privileged"
    assert dataclasses.replace(P5, host_path="/data").pod_security == "privileged"


def test_the_grace_period_fits_the_last_save() -> None:
    assert pod_of(local_job(**{"timeouts.save_grace_s": 12.2}))["terminationGracePeriodSeconds"] == 13


def test_name_follows_the_spec_and_nothing_else() -> None:
    """F45 (manifest side): any change makes another Job, equal input the same name."""
    base = job_of(render(gpu_config(), P5))["metadata"]["name"]
    assert job_of(render(gpu_config(), P5))["metadata"]["name"] == base
    others = [
        render(gpu_config(), dataclasses.replace(P5, image="registry.example/nvrx-eks:other")),
        render(gpu_config().with_overrides({"training.max_steps": 200}), P5),
        render(gpu_config("in-job"), P5),
        render(gpu_config(), dataclasses.replace(P5, num_efa=16)),
    ]
    assert len({base, *(job_of(objects)["metadata"]["name"] for objects in others)}) == 5


def test_a_token_may_stand_for_the_image_alone() -> None:
    token = "${Token[TOKEN.123]}"
    first = dataclasses.replace(P5, image=token, image_id="abc")
    second = dataclasses.replace(P5, image="${Token[TOKEN.999]}", image_id="abc")
    names = {job_of(render(gpu_config(), deployment))["metadata"]["name"] for deployment in (first, second)}
    assert len(names) == 1, "the number of a token says nothing of the image"
    assert pod_of(job_of(render(gpu_config(), first)))["containers"][0]["image"] == token
    with pytest.raises(ConfigError, match="image_id: empty; legal"):
        render(gpu_config(), dataclasses.replace(P5, image=token))
    with pytest.raises(ConfigError, match="volume_claim: a value known at deployment only"):
        render(gpu_config(), dataclasses.replace(P5, volume_claim=token))
    with pytest.raises(ConfigError, match="run config: a value known at deployment only"):
        render(gpu_config().with_overrides({"model.name": token}), P5)


def test_prepare_data_asks_for_no_gpu() -> None:
    job = job_of(render_prepare_data(gpu_config(), P5, ["--source", "c4"]))
    command = pod_of(job)["containers"][0]["command"]
    assert command == ["python", "-m", "payload", "prepare-data", "--out", "/fsx/data", "--source", "c4"]
    assert "resources" in pod_of(job)["containers"][0] and pod_of(job)["containers"][0]["resources"] == {}
    assert job["spec"]["completions"] == 1 and pod_of(job)["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("overrides", "deployment", "expected"),
    [
        ({"checkpoint.memory_dir": "/mnt"}, LOCAL, "checkpoint.memory_dir: /mnt; legal: /dev/shm"),
        ({"data.path": "/data"}, LOCAL, "data.path: /data; legal: a folder below workdir (/fsx)"),
        ({}, dataclasses.replace(LOCAL, num_gpus=2), "num_gpus: 2; legal: 0"),
        ({"parallelism.device": "cuda"}, LOCAL, "num_gpus: 0; legal: 2"),
        ({}, dataclasses.replace(LOCAL, name_prefix="N"), "metadata.name: 'N-local-"),
        ({}, dataclasses.replace(LOCAL, name_prefix="n" * 60), "characters; legal: up to 63"),
        ({}, dataclasses.replace(LOCAL, memory_mib=64), "volumes.memory.sizeLimit: 64Mi; legal: below the memory"),
    ],
)
def test_render_refuses(overrides: dict[str, Any], deployment: Deployment, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        render(config(**{**CPU, **overrides}), deployment)
    assert expected in str(refused.value)


Mutation = Callable[[dict[str, Any], dict[str, Any]], object]
RULES: list[tuple[Mutation, str]] = [
    (lambda spec, pod: pod.update(restartPolicy="OnFailure"), "podFailurePolicy: set with restartPolicy OnFailure"),
    (
        lambda spec, pod: (pod.update(restartPolicy="Always"), spec.pop("podFailurePolicy")),
        "restartPolicy: Always; legal: Never or OnFailure",
    ),
    (lambda spec, pod: spec.pop("completions"), "completions: missing; legal: at least 1 with completionMode Indexed"),
    (lambda spec, pod: spec.update(parallelism=1), "parallelism: 1; legal: completions (2)"),
    (lambda spec, pod: spec.update(backoffLimit=-1), "backoffLimit: -1; legal: 0 or more"),
    (
        lambda spec, pod: spec.update(podReplacementPolicy="TerminatingOrFailed"),
        "podReplacementPolicy: TerminatingOrFailed; legal: Failed",
    ),
    (lambda spec, pod: spec.update(ttlSecondsAfterFinished=60), "ttlSecondsAfterFinished: set; legal: unset"),
    (lambda spec, pod: pod.update(terminationGracePeriodSeconds=0), "terminationGracePeriodSeconds: 0; legal"),
    (
        lambda spec, pod: spec["podFailurePolicy"]["rules"][0].update(
            onExitCodes={"operator": "In", "values": [1], "containerName": "training"}
        ),
        "rules[0]: legal: exactly one of onExitCodes and onPodConditions",
    ),
    (lambda spec, pod: spec["podFailurePolicy"]["rules"][1].update(action="FailIndex"), "action: FailIndex; legal"),
    (
        lambda spec, pod: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[0, 42]),
        "values: holds 0, which is success",
    ),
    (
        lambda spec, pod: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[43, 42]),
        "values: [43, 42]; legal: 1 to 255 codes, rising",
    ),
    (
        lambda spec, pod: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(containerName="other"),
        "containerName: 'other'; legal: training",
    ),
    (lambda spec, pod: pod.update(subdomain="a.b"), "subdomain: 'a.b'; legal"),
    (lambda spec, pod: pod["volumes"].append(pod["volumes"][0]), "volumes: 'shared' twice"),
    (lambda spec, pod: pod["volumes"].pop(0), "volumeMounts: 'shared' names no volume"),
    (
        lambda spec, pod: pod["containers"][0]["volumeMounts"][0].update(mountPath="/dev/shm"),
        "volumeMounts.mountPath: /dev/shm twice",
    ),
    (
        lambda spec, pod: pod["containers"][0]["volumeMounts"][0].update(mountPath="fsx"),
        "volumeMounts.mountPath: 'fsx'; legal: an absolute path",
    ),
    (lambda spec, pod: pod["containers"][0]["env"].append({"name": "HOME", "value": "x"}), "env: HOME twice"),
    (
        lambda spec, pod: pod["containers"][0]["env"][-1].update(value="x"),
        "env.NODE_NAME: value and valueFrom; legal: one of them",
    ),
    (
        lambda spec, pod: pod["containers"][0].update(
            resources={"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}
        ),
        "resources.nvidia.com/gpu: request 1, limit 2; legal: equal",
    ),
    (
        lambda spec, pod: pod["containers"][0].update(
            resources={"requests": {"hugepages-2Mi": "2Mi"}, "limits": {"hugepages-2Mi": "2Mi"}}
        ),
        "resources: hugepages alone",
    ),
    (
        lambda spec, pod: pod["containers"][0].update(
            resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}
        ),
        "resources.memory: request 2Gi above limit 1Gi",
    ),
    (
        lambda spec, pod: pod["tolerations"].append({"key": "x", "operator": "Exists", "value": "y"}),
        "tolerations.x: operator Exists with a value",
    ),
    (lambda spec, pod: pod["tolerations"].append({"operator": "Equal"}), "tolerations: empty key"),
    (
        lambda spec, pod: pod["tolerations"].append({"key": "x", "operator": "Exists", "tolerationSeconds": 1}),
        "tolerations.x.tolerationSeconds: effect None; legal: with NoExecute only",
    ),
    (lambda spec, pod: pod["securityContext"].update(runAsUser=0), "securityContext.runAsUser: 0; legal: 1 or more"),
    (lambda spec, pod: pod["containers"][0].update(image=""), "containers.training.image: empty"),
    (
        lambda spec, pod: spec["template"]["metadata"]["labels"].update(x="-"),
        "labels.x: '-'; legal: up to 63",
    ),
]


@pytest.mark.parametrize(("mutate", "expected"), RULES, ids=[expected.split(";")[0] for _, expected in RULES])
def test_each_rule_between_fields_is_enforced(mutate: Mutation, expected: str) -> None:
    job = copy.deepcopy(local_job())
    validate(job)
    mutate(job["spec"], pod_of(job))
    with pytest.raises(ConfigError) as refused:
        validate(job)
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
