"""The objects in the training stack's template, as far as the stacks below decide them."""

from __future__ import annotations

from typing import Any

from stacks.instances import CATALOGUE
from tests.synth import Synthesis


def by_kind(synthesis: Synthesis, construct: Any) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in synthesis.objects(construct)}


def pod_of(synthesis: Synthesis) -> dict[str, Any]:
    job = by_kind(synthesis, synthesis.stacks.training.payload.job)["Job"]
    spec = job["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def test_volume_is_the_file_system_of_the_stack(each: Synthesis) -> None:
    """F39: no storage class on either side, volume and claim name each other, handle and names are the stack's."""
    found = by_kind(each, each.stacks.training.payload.volume)
    volume, claim = found["PersistentVolume"], found["PersistentVolumeClaim"]
    file_system = each.logical_id(each.stacks.storage.file_system)
    assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == ""
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert volume["spec"]["csi"]["volumeHandle"] == f"Ref {file_system}"
    attributes = volume["spec"]["csi"]["volumeAttributes"]
    assert attributes["dnsname"] == f"GetAtt {file_system}.DNSName"
    assert attributes["mountname"] == f"GetAtt {file_system}.LustreMountName"


def test_one_size_everywhere(each: Synthesis) -> None:
    """F40: file system, volume and claim show the profile's number."""
    found = by_kind(each, each.stacks.training.payload.volume)
    size = each.only("storage", "AWS::FSx::FileSystem")["Properties"]["StorageCapacity"]
    assert found["PersistentVolume"]["spec"]["capacity"]["storage"] == f"{size}Gi"
    assert found["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"] == f"{size}Gi"


def test_image_comes_from_the_stacks_repository(each: Synthesis) -> None:
    """F47: by digest, out of the repository that the storage stack empties and deletes."""
    repository = each.logical_id(each.stacks.storage.repository)
    for container in pod_of(each)["containers"]:
        image = container["image"]
        assert repository in image
        assert "@" in image and ":latest" not in image


def test_pod_asks_for_what_its_node_has(each: Synthesis) -> None:
    """F36: as many EFA devices as the launch template gives the node, and the hugepages that its driver reserves."""
    instance = CATALOGUE[each.profile.nodes.instance_type]
    data = each.only("gpu-nodes", "AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]
    devices = [item for item in data["NetworkInterfaces"] if item["InterfaceType"] != "interface"]
    limits = pod_of(each)["containers"][0]["resources"]["limits"]
    assert int(limits.get("vpc.amazonaws.com/efa", 0)) == len(devices)
    assert int(limits["nvidia.com/gpu"]) == instance.gpus
    assert ("hugepages-2Mi" in limits) == bool(devices)


def test_job_tolerates_and_selects_its_nodes(each: Synthesis) -> None:
    """F50: the Job tolerates every taint of the nodes and selects the labels that user data sets."""
    pod = pod_of(each)
    for taint in each.profile.nodes.taints:
        assert taint.toleration in pod["tolerations"]
    assert pod["nodeSelector"] == each.profile.node_labels


def test_number_of_pods_is_the_profiles(each: Synthesis) -> None:
    spec = by_kind(each, each.stacks.training.payload.job)["Job"]["spec"]
    assert spec["completions"] == spec["parallelism"] == each.profile.nodes.count
    (capacity,) = each.of_type("training", "Custom::GpuCapacity").values()
    assert capacity["Properties"]["NumNodes"] == str(each.profile.nodes.maximum)
