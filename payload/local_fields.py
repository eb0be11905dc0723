"""Which fields of a Job the local runner acts on, which say nothing here, and that all others are refused.

A runner that passes over a field shows a Job that is not the one on the cluster. So every field is in one of three
groups: acted on; ``PLACEMENT``, which only chooses or confines a real node and cannot matter on one machine; refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from payload.config import ConfigError

ANY = object()
"""Acted on with any value."""
PLACEMENT = object()
"""Only places or confines the pod on a node: resources, taints, users, kernel capabilities."""

_METADATA = {"name": ANY, "namespace": ANY, "labels": ANY, "annotations": ANY}
_RULE = {
    "action": {"FailJob", "Ignore", "Count"},
    "onExitCodes": {"containerName": ANY, "operator": {"In", "NotIn"}, "values": ANY},
    "onPodConditions": [{"type": {"DisruptionTarget"}, "status": {"True"}}],
}
FIELD_PATHS = {
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "status.podIP",
}
_CONTAINER = {
    "name": ANY,
    "image": ANY,
    "command": ANY,
    "args": ANY,
    "env": [{"name": ANY, "value": ANY, "valueFrom": {"fieldRef": {"fieldPath": FIELD_PATHS}}}],
    "ports": [{"name": ANY, "containerPort": ANY}],
    "resources": PLACEMENT,
    "securityContext": PLACEMENT,
    "volumeMounts": [{"name": ANY, "mountPath": ANY, "readOnly": ANY}],
}
_VOLUME = {
    "name": ANY,
    "persistentVolumeClaim": {"claimName": ANY},
    "hostPath": {"path": ANY, "type": {"DirectoryOrCreate"}},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": PLACEMENT},
    "configMap": {"name": ANY},
}
_POD = {
    "subdomain": ANY,
    "restartPolicy": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": ANY,
    "containers": [_CONTAINER],
    "volumes": [_VOLUME],
    "nodeSelector": PLACEMENT,
    "tolerations": ANY,
    "affinity": PLACEMENT,
    "securityContext": PLACEMENT,
    "serviceAccountName": PLACEMENT,
    "automountServiceAccountToken": PLACEMENT,
}
_SHAPES: dict[str, Any] = {
    "Job": {
        "completionMode": {"Indexed"},
        "completions": ANY,
        "parallelism": ANY,
        "backoffLimit": ANY,
        "podReplacementPolicy": {"Failed"},
        "podFailurePolicy": {"rules": [_RULE]},
        "template": {"metadata": _METADATA, "spec": _POD},
    },
    "Service": {"clusterIP": {"None"}, "publishNotReadyAddresses": {True}, "selector": ANY, "ports": ANY},
}
_NEEDED = ("completionMode", "completions", "parallelism", "backoffLimit", "podReplacementPolicy")


def refuse_unknown(manifest: Mapping[str, Any]) -> None:
    """Raises ConfigError, one line a field that the local runner does not implement."""
    kind = manifest["kind"]
    top = {"apiVersion": ANY, "kind": ANY, "metadata": _METADATA}
    if kind == "ConfigMap":
        shape: dict[str, Any] = {**top, "data": ANY}
    elif kind in _SHAPES:
        shape = {**top, "spec": _SHAPES[kind]}
    else:
        raise ConfigError(f"kind: {kind}; the local runner implements ConfigMap, Service and Job")
    problems = list(_walk(manifest, shape, ""))
    if kind == "Job":
        spec = manifest["spec"]
        problems += [f"spec.{name}: missing; the local runner takes no default" for name in _NEEDED if name not in spec]
        if len(spec["template"]["spec"]["containers"]) != 1:
            problems.append("spec.template.spec.containers: the local runner implements exactly one")
    if problems:
        raise ConfigError("\n".join(f"{kind} {manifest['metadata']['name']}: {line}" for line in problems))


def _walk(value: Any, shape: Any, path: str) -> Iterator[str]:
    if shape is ANY or shape is PLACEMENT:
        return
    if isinstance(shape, set):
        if value not in shape:
            yield f"{path}: {value!r}; the local runner implements {', '.join(sorted(map(str, shape)))}"
    elif isinstance(shape, list):
        for number, item in enumerate(value):
            yield from _walk(item, shape[0], f"{path}[{number}]")
    else:
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            if key in shape:
                yield from _walk(item, shape[key], below)
            else:
                yield f"{below}: not implemented by the local runner"
