"""Namespace, service account, volume and claims as plain objects."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from payload import volumes
from payload.config import ConfigError
from payload.deployment import Deployment

VERSIONS = ("1.34", "1.35", "1.36")
PLACE = Deployment(image="i", namespace="space", volume_claim="claim")


def volume() -> dict[str, Any]:
    return volumes.persistent_volume(
        "volume",
        claim="claim",
        namespace="space",
        capacity_gib=1200,
        volume_handle="fs-1",
        dns_name="fs-1.fsx",
        mount_name="abc",
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str) -> None:
    items = [
        volumes.namespace("space", "restricted"),
        volumes.service_account("training", "space"),
        volume(),
        volumes.static_claim("claim", namespace="space", volume="volume", capacity_gib=1200),
        volumes.dynamic_claim("claim", namespace="space", size="10Gi"),
        volumes.settings("space", image="i", deployment="{}"),
    ]
    for item in items:
        kubernetes_validate.validate(item, version, strict=True)


def test_volume_and_claim_find_each_other_and_nobody_else() -> None:
    """F39: no class on either side, both name the other; the file system is the stack's, so it is retained."""
    spec = volume()["spec"]
    claim = volumes.static_claim("claim", namespace="space", volume="volume", capacity_gib=1200)["spec"]
    assert spec["storageClassName"] == claim["storageClassName"] == ""
    assert (claim["volumeName"], spec["claimRef"]["name"], spec["claimRef"]["namespace"]) == (
        "volume",
        "claim",
        "space",
    )
    assert spec["capacity"]["storage"] == claim["resources"]["requests"]["storage"] == "1200Gi"
    assert spec["persistentVolumeReclaimPolicy"] == "Retain" and spec["mountOptions"] == ["flock"]


def test_a_host_path_needs_a_privileged_namespace_and_no_claim() -> None:
    """F49: no host path on a cluster of ours; where a user wants one, the namespace says so."""
    kinds = [item["kind"] for item in volumes.prerequisites(PLACE, "1Gi")]
    assert kinds == ["Namespace", "PersistentVolumeClaim"]
    (space,) = volumes.prerequisites(Deployment(image="i", host_path="/data"), "1Gi")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize("size", ["", "ten", "10 Gi", "1.5Gi"])
def test_a_bad_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="legal: a whole number"):
        volumes.dynamic_claim("claim", namespace="space", size=size)
