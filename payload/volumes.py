"""What a run's pods need to be there first, as plain dicts: namespace, service account, volume and claim.

Pure, as payload/manifests.py: no torch, no CDK. Of the values only the volume's handle, DNS name and mount name may be
known at deployment alone (CDK tokens); they are nobody's name and part of no hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.deployment import Deployment, PodSecurity
from payload.manifest_rules import parse_quantity

Manifest = dict[str, Any]
DRIVER = "fsx.csi.aws.com"
PART_OF = {"app.kubernetes.io/part-of": "nvrx-eks"}
SETTINGS_NAME = "nvrx-eks"
"""Of the ConfigMap that tells the command line where it may submit to."""
SETTINGS_KEY = "deployment.json"
IMAGE_KEY = "image"
_LEVELS: dict[PodSecurity, str] = {"restricted": "restricted", "privileged": "privileged"}


def namespace(name: str, security: PodSecurity) -> Manifest:
    """With the Pod Security Standards level that it enforces; a stricter pod than the level says is admitted.

    The version is ``latest``: the cluster's own, so that an upgrade cannot leave the namespace behind.
    """
    level = _LEVELS[security]
    modes = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "audit", "warn")}
    versions = {f"{key}-version": "latest" for key in modes}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**PART_OF, **modes, **versions}},
    }


def service_account(name: str, namespace: str) -> Manifest:
    """Gives pods their AWS identity (EKS Pod Identity finds it by name); its Kubernetes token is mounted nowhere."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(PART_OF)},
        "automountServiceAccountToken": False,
    }


def persistent_volume(
    name: str, *, claim: str, namespace: str, capacity_gib: int, volume_handle: str, dns_name: str, mount_name: str
) -> Manifest:
    """An FSx for Lustre file system that exists already, kept for one claim.

    ``Retain``: deleting the claim must not try to delete a file system that a stack owns. ``flock``: file locks work
    across nodes. The three last arguments may be tokens.
    """
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "labels": dict(PART_OF)},
        "spec": {
            "capacity": {"storage": f"{capacity_gib}Gi"},
            "accessModes": ["ReadWriteMany"],
            "volumeMode": "Filesystem",
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "mountOptions": ["flock"],
            # Nobody else's claim can take it.
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "name": claim,
                "namespace": namespace,
            },
            "csi": {
                "driver": DRIVER,
                "volumeHandle": volume_handle,
                "volumeAttributes": {"dnsname": dns_name, "mountname": mount_name},
            },
        },
    }


def static_claim(name: str, *, namespace: str, volume: str, capacity_gib: int) -> Manifest:
    """The claim of ``persistent_volume``. The empty class keeps the default class from making a second volume."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(PART_OF)},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": volume,
            "resources": {"requests": {"storage": f"{capacity_gib}Gi"}},
        },
    }


def dynamic_claim(name: str, *, namespace: str, size: str) -> Manifest:
    """A claim of the cluster's default storage class, for a cluster of one node (kind, k3d, minikube).

    Such classes offer ReadWriteOnce: all pods that mount it run on one node. Raises ConfigError for a bad ``size``.
    """
    parse_quantity(size)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(PART_OF)},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


def settings(namespace: str, *, image: str, deployment: str) -> Manifest:
    """What ``python -m payload submit`` reads from the cluster: the image (may be a token) and a Deployment's JSON."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SETTINGS_NAME, "namespace": namespace, "labels": dict(PART_OF)},
        "data": {IMAGE_KEY: image, SETTINGS_KEY: deployment},
    }


def prerequisites(deployment: Deployment, storage: str) -> list[Manifest]:
    """Namespace and, without a host path, a claim of the default class: what ``submit`` makes on a small cluster."""
    found = [namespace(deployment.namespace, deployment.pod_security)]
    if not deployment.host_path:
        found.append(dynamic_claim(deployment.volume_claim, namespace=deployment.namespace, size=storage))
    return found


def identity(values: Mapping[str, Any]) -> tuple[str, str, str]:
    """Kind, namespace ('' without one) and name of an object."""
    metadata = values["metadata"]
    return str(values["kind"]), str(metadata.get("namespace", "")), str(metadata["name"])
