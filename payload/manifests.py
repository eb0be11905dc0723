"""RunConfig and the facts of a place become Kubernetes objects, as plain dicts: ConfigMap, Service, Indexed Job.

Pure: no torch, no CDK, no clock, no environment. The same objects go to EKS, to any other Kubernetes, and to the
local runner (payload/local.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from payload.config import EXIT_NO_PROGRESS, ConfigError, RunConfig
from payload.deployment import KIND as KIND
from payload.deployment import LOCAL as LOCAL
from payload.deployment import Deployment as Deployment
from payload.deployment import Toleration as Toleration
from payload.deployment import load_deployment as load_deployment
from payload.manifest_rules import validate as validate

CONFIG_MOUNT = "/etc/nvrx-eks"
CONFIG_KEY = "run.json"
MEMORY_MOUNT = "/dev/shm"
SCRATCH_MOUNT = "/scratch"
"""Temporary files and caches; gone with the pod."""
RENDEZVOUS_PORT = 29400
CONTAINER = "training"
RUN_LABEL = "nvrx-eks/run-id"
JOB_LABEL = "nvrx-eks/job"
NAME_LABEL = "app.kubernetes.io/name"
"""With ``NAME``: on every Job of ours and its pods, by whomever submitted."""
NAME = "nvrx-eks"
COMPONENT_LABEL = "app.kubernetes.io/component"
TRAINING = "training"
PREPARE_DATA = "prepare-data"
BACKOFF_MARGIN = 6
"""Pod failures beyond the run's own restarts (a pull error, a bad node); 6 is the API's default backoffLimit."""
TOKEN_MARK = "${Token["
"""How CDK spells a value that is known at deployment only."""

Manifest = dict[str, Any]


def render(config: RunConfig, deployment: Deployment) -> list[Manifest]:
    """ConfigMap, headless Service and Job, in the order to apply them; the Job is the last.

    The Job's name ends in a hash of everything that it is made of, plain values only, since a Job's template is
    immutable: a change makes another Job, and the same input always the same name.

    Raises:
        ConfigError: a field that Kubernetes would refuse, or a token where none may be.
    """
    _refuse_tokens(config, deployment)
    _check_mounts(config)
    _check_gpus(config, deployment)
    draft = _job("", config, dataclasses.replace(deployment, image=deployment.image_id or deployment.image))
    name = f"{deployment.name_prefix}-{config.run_id}-{_digest([draft, config.to_json()])}"
    job = _job(name, config, deployment)
    validate(job)
    return [_config_map(name, config, deployment), _service(name, config, deployment), job]


def render_prepare_data(config: RunConfig, deployment: Deployment, arguments: Sequence[str] = ()) -> list[Manifest]:
    """ConfigMap and a one-pod Job that fills ``config.data_dir``: ``python -m payload prepare-data``.

    ``arguments`` go to the command as they are. It asks for no GPU but runs on the training nodes, the ones that can
    mount the volume.
    """
    _refuse_tokens(config, deployment)
    _check_mounts(config)
    plain = dataclasses.replace(deployment, num_gpus=0, num_efa=0, hugepages_2mi_mib=0, memory_mib=0, cpu="")
    command = ["python", "-m", "payload", "prepare-data", "--out", str(config.data_dir), *arguments]

    def build(name: str, image: str) -> Manifest:
        pod = _pod_spec(name, config, dataclasses.replace(plain, image=image), command)
        pod["restartPolicy"] = "Never"
        labels = _labels(name, config, PREPARE_DATA)
        spec: Manifest = {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 3,
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        metadata = {**_metadata(name, config, plain), "labels": labels}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}

    digest = _digest(build("", deployment.image_id or deployment.image))
    name = f"{deployment.name_prefix}-{config.run_id}-d-{digest}"
    job = build(name, deployment.image)
    validate(job)
    return [_config_map(name, config, deployment), job]


def job_of(manifests: Sequence[Manifest]) -> Manifest:
    """The one Job among rendered objects."""
    jobs = [item for item in manifests if item["kind"] == "Job"]
    if len(jobs) != 1:
        raise ConfigError(f"manifests: {len(jobs)} Jobs; legal: exactly one")
    return jobs[0]


def coordinator(job_name: str, namespace: str) -> str:
    """Stable name of pod 0: an Indexed Job's hostname in the subdomain that the headless Service serves."""
    return f"{job_name}-0.{job_name}.{namespace}.svc"


def backoff_limit(config: RunConfig) -> int:
    """Container restarts (OnFailure) and failed pods count one by one, so each restart of the run may cost all pods."""
    return config.recovery.max_restarts * config.parallelism.num_nodes + BACKOFF_MARGIN


def _refuse_tokens(config: RunConfig, deployment: Deployment) -> None:
    plain = dataclasses.asdict(dataclasses.replace(deployment, image=""))
    for field, value in {**plain, "run config": config.to_json()}.items():
        if TOKEN_MARK in json.dumps(value):
            raise ConfigError(
                f"{field}: a value known at deployment only; legal: a plain value (image alone may be one)"
            )
    if TOKEN_MARK in deployment.image and not deployment.image_id:
        raise ConfigError("image_id: empty; legal: a plain value that changes with the image, which is a token here")


def _check_mounts(config: RunConfig) -> None:
    memory = config.checkpoint.memory_dir
    if memory != MEMORY_MOUNT and not memory.startswith(MEMORY_MOUNT + "/"):
        raise ConfigError(
            f"checkpoint.memory_dir: {memory}; legal: {MEMORY_MOUNT} or a folder below, the memory volume"
        )
    if config.data.path and not f"{config.data.path}/".startswith(config.workdir.rstrip("/") + "/"):
        raise ConfigError(f"data.path: {config.data.path}; legal: a folder below workdir ({config.workdir})")


def _check_gpus(config: RunConfig, deployment: Deployment) -> None:
    wanted = config.parallelism.ranks_per_node if config.parallelism.device == "cuda" else 0
    if deployment.num_gpus != wanted:
        device = config.parallelism.device
        raise ConfigError(f"num_gpus: {deployment.num_gpus}; legal: {wanted}, a GPU a rank of a node (device {device})")


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def _labels(name: str, config: RunConfig, component: str = TRAINING) -> dict[str, str]:
    return {NAME_LABEL: NAME, COMPONENT_LABEL: component, RUN_LABEL: config.run_id, JOB_LABEL: name}


def _metadata(name: str, config: RunConfig, deployment: Deployment) -> Manifest:
    return {"name": name, "namespace": deployment.namespace, "labels": _labels(name, config)}


def _config_map(name: str, config: RunConfig, deployment: Deployment) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, config, deployment),
        "data": {CONFIG_KEY: config.to_json()},
    }


def _service(name: str, config: RunConfig, deployment: Deployment) -> Manifest:
    """Headless, and with the addresses of pods that are not ready: launchers meet before any of them is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, config, deployment),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT}],
        },
    }


def _job(name: str, config: RunConfig, deployment: Deployment) -> Manifest:
    nodes = config.parallelism.num_nodes
    pod = _pod_spec(name, config, deployment, list(deployment.command))
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": backoff_limit(config),
        # A replacement starts when the old pod is gone for good: never two pods of one index.
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": _labels(name, config)}, "spec": pod},
    }
    if deployment.max_s:
        spec["activeDeadlineSeconds"] = deployment.max_s
    if config.recovery.arm == "kubernetes":
        # The baseline: the kubelet restarts the container. The API allows podFailurePolicy with Never only.
        pod["restartPolicy"] = "OnFailure"
    else:
        pod["restartPolicy"] = "Never"
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_NO_PROGRESS]},
                },
            ]
        }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(name, config, deployment), "spec": spec}


def _pod_spec(name: str, config: RunConfig, deployment: Deployment, command: list[str]) -> Manifest:
    """Meets ``deployment.pod_security``: non-root, no capabilities, the runtime's seccomp profile."""
    pod: Manifest = {
        "subdomain": name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(config.timeouts.save_grace_s),
        "nodeSelector": dict(deployment.node_selector),
        "tolerations": [item.render() for item in (*deployment.tolerations, *_unreachable(deployment))],
        "affinity": _one_pod_per_node(name),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": deployment.user_id,
            "runAsGroup": deployment.group_id,
            "fsGroup": deployment.group_id,
            # Else the kubelet changes the owner of every file of the shared file system at each mount.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(name, config, deployment, command)],
        "volumes": _volumes(name, deployment),
    }
    if deployment.service_account:
        pod["serviceAccountName"] = deployment.service_account
    return pod


def _unreachable(deployment: Deployment) -> list[Toleration]:
    seconds = deployment.unreachable_s
    return [
        Toleration(key=f"node.kubernetes.io/{what}", effect="NoExecute", seconds=seconds)
        for what in ("not-ready", "unreachable")
    ]


def _one_pod_per_node(name: str) -> Manifest:
    term = {"labelSelector": {"matchLabels": {JOB_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _volumes(name: str, deployment: Deployment) -> list[Manifest]:
    shared: Manifest = {"name": "shared", "persistentVolumeClaim": {"claimName": deployment.volume_claim}}
    if deployment.host_path:
        shared = {"name": "shared", "hostPath": {"path": deployment.host_path, "type": "DirectoryOrCreate"}}
    return [
        shared,
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{deployment.shm_mib}Mi"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "config", "configMap": {"name": name}},
    ]


def _container(name: str, config: RunConfig, deployment: Deployment, command: list[str]) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if deployment.ipc_lock:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "name": CONTAINER,
        "image": deployment.image,
        "command": command,
        "env": _environment(name, deployment),
        "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}],
        "resources": _resources(deployment),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [
            {"name": "shared", "mountPath": config.workdir},
            {"name": "memory", "mountPath": MEMORY_MOUNT},
            {"name": "scratch", "mountPath": SCRATCH_MOUNT},
            {"name": "config", "mountPath": CONFIG_MOUNT, "readOnly": True},
        ],
    }


def _environment(name: str, deployment: Deployment) -> list[Manifest]:
    """JOB_COMPLETION_INDEX is not here: the Job controller sets it."""
    values = {
        "NVRX_EKS_CONFIG": f"{CONFIG_MOUNT}/{CONFIG_KEY}",
        "NVRX_EKS_COORDINATOR": coordinator(name, deployment.namespace),
        "NVRX_EKS_PORT": str(RENDEZVOUS_PORT),
        # One thread and fixed algorithms: equal input gives equal bits.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Where Triton is installed, importing torch's compiler starts a thread and a pool; the fork server must not.
        "TORCH_WARM_POOL": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HOME": SCRATCH_MOUNT,
        "TMPDIR": SCRATCH_MOUNT,
        **dict(deployment.env),
    }
    if deployment.token_secret:
        values["NVRX_EKS_HF_SECRET"] = deployment.token_secret
    if deployment.await_data:
        values["NVRX_EKS_AWAIT_DATA"] = "1"
    downward = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid", "NODE_NAME": "spec.nodeName"}
    return [
        *({"name": key, "value": value} for key, value in values.items()),
        *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in downward.items()),
    ]


def _resources(deployment: Deployment) -> Manifest:
    """Requests equal limits for all but the CPU, of which a pod may take what the node has left."""
    asked: dict[str, str] = {}
    if deployment.memory_mib:
        asked["memory"] = f"{deployment.memory_mib}Mi"
    if deployment.num_gpus:
        asked["nvidia.com/gpu"] = str(deployment.num_gpus)
    if deployment.num_efa:
        asked["vpc.amazonaws.com/efa"] = str(deployment.num_efa)
    if deployment.hugepages_2mi_mib:
        asked["hugepages-2Mi"] = f"{deployment.hugepages_2mi_mib}Mi"
    cpu = {"cpu": deployment.cpu} if deployment.cpu else {}
    return {"requests": {**cpu, **asked}, "limits": asked} if asked or cpu else {}
