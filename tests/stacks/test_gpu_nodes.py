"""GpuNodesStack: launch template, group, plugins."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from payload.config import merge
from stacks import config
from stacks.efa import network_interfaces
from tests.stacks.test_config import P5
from tests.synth import Synthesis, synthesis, synthesize, variant

HELM = "Custom::AWSCDK-EKS-HelmChart"


def launch_template(synthesis: Synthesis) -> dict[str, Any]:
    data = synthesis.only("gpu-nodes", "AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]
    assert isinstance(data, dict)
    return data


def user_data(synthesis: Synthesis) -> str:
    """With tokens as JSON text."""
    pieces = launch_template(synthesis)["UserData"]["Fn::Base64"]["Fn::Join"][1]
    return "".join(piece if isinstance(piece, str) else json.dumps(piece) for piece in pieces)


def chart(synthesis: Synthesis, name: str) -> dict[str, Any]:
    (found,) = [
        resource["Properties"]
        for resource in synthesis.of_type("gpu-nodes", HELM).values()
        if resource["Properties"]["Chart"] == name
    ]
    return {**found, "Values": json.loads(found["Values"])}


def resolved(synthesis: Synthesis, value: Any) -> Any:
    """An import followed to what the exporting stack puts out."""
    if isinstance(value, dict) and "Fn::ImportValue" in value:
        for template in synthesis.templates.values():
            for output in template.get("Outputs", {}).values():
                if output.get("Export", {}).get("Name") == value["Fn::ImportValue"]:
                    return output["Value"]
    return value


def test_interfaces_of_the_template(each: Synthesis) -> None:
    """F36: the template holds the profile's layout, as many EFA devices as the type has, and no other groups."""
    data = launch_template(each)
    nodes = each.profile.nodes
    groups = data["NetworkInterfaces"][0]["Groups"]
    assert data["NetworkInterfaces"] == network_interfaces(nodes.instance, nodes.efa_layout, groups)
    assert "SecurityGroupIds" not in data and "SecurityGroups" not in data
    devices = [item for item in data["NetworkInterfaces"] if item["InterfaceType"] != "interface"]
    assert len(devices) == nodes.instance.efa_cards
    assert len(groups) == (3 if nodes.instance.efa_cards else 2)


def test_interfaces_carry_cluster_and_lustre_client_groups(each: Synthesis) -> None:
    """F37: every interface is in the cluster's group (DNS, API) and in the Lustre clients' group."""
    groups = [resolved(each, group) for group in launch_template(each)["NetworkInterfaces"][-1]["Groups"]]
    cluster = each.logical_id(each.stacks.cluster.cluster)
    assert {"Fn::GetAtt": [cluster, "ClusterSecurityGroupId"]} in groups
    clients = each.logical_id(each.stacks.storage.client_security_group)
    assert {"Fn::GetAtt": [clients, "GroupId"]} in groups


def test_efa_group_has_rules_whose_peer_is_itself(each: Synthesis) -> None:
    """F37: ingress and egress of every protocol from and to the group itself; a CIDR rule does not count."""
    construct = each.stacks.gpu_nodes.efa_security_group
    if construct is None:
        assert each.profile.nodes.instance.efa_cards == 0
        return
    own = {"Fn::GetAtt": [each.logical_id(construct), "GroupId"]}
    ingress = [rule["Properties"] for rule in each.of_type("gpu-nodes", "AWS::EC2::SecurityGroupIngress").values()]
    egress = [rule["Properties"] for rule in each.of_type("gpu-nodes", "AWS::EC2::SecurityGroupEgress").values()]
    assert [(r["GroupId"], r["SourceSecurityGroupId"], r["IpProtocol"]) for r in ingress] == [(own, own, "-1")]
    assert [(r["GroupId"], r["DestinationSecurityGroupId"], r["IpProtocol"]) for r in egress] == [(own, own, "-1")]
    assert own in launch_template(each)["NetworkInterfaces"][0]["Groups"]


def test_one_group_is_tagged_as_the_clusters(each: Synthesis) -> None:
    """F37: EKS tags its own group; a second one with the tag breaks the load balancer and node controllers."""
    tag = f"kubernetes.io/cluster/{each.profile.cluster_name}"
    tagged = [
        id
        for _, id, group in each.all_of_type("AWS::EC2::SecurityGroup")
        if tag in [item["Key"] for item in group["Properties"].get("Tags", [])]
    ]
    assert tagged == []
    group = each.only("gpu-nodes", "AWS::AutoScaling::AutoScalingGroup")["Properties"]
    owned = [item for item in group["Tags"] if item["Key"] == tag]
    assert owned == [{"Key": tag, "Value": "owned", "PropagateAtLaunch": True}]


def test_metadata_and_disks(each: Synthesis) -> None:
    data = launch_template(each)
    options = data["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 2)
    (disk,) = data["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"] is True
    assert disk["Ebs"]["VolumeSize"] == each.profile.nodes.root_volume_gib
    assert data["InstanceType"] == each.profile.nodes.instance_type


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("p5", set()),
        ("p5-odcr", {"CapacityReservationSpecification"}),
        ("p5-capacity-block", {"CapacityReservationSpecification", "InstanceMarketOptions"}),
    ],
)
def test_reservation_keys(name: str, keys: set[str]) -> None:
    found = synthesis(name)
    data = launch_template(found)
    assert keys == {"CapacityReservationSpecification", "InstanceMarketOptions"} & set(data)
    if keys:
        target = data["CapacityReservationSpecification"]["CapacityReservationTarget"]
        assert target == {"CapacityReservationId": found.profile.nodes.capacity.id}
    if "InstanceMarketOptions" in keys:
        assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}


def test_placement_group_only_where_asked_for(each: Synthesis) -> None:
    assert not each.of_type("gpu-nodes", "AWS::EC2::PlacementGroup")
    assert "Placement" not in launch_template(each)
    changed = variant("changed")
    assert changed.only("gpu-nodes", "AWS::EC2::PlacementGroup")["Properties"]["Strategy"] == "cluster"
    assert "GroupName" in launch_template(changed)["Placement"]


def test_image_is_a_plain_value(each: Synthesis) -> None:
    """No parameter, so nothing that CloudFormation resolves anew at each deployment, feeds the launch template."""
    assert launch_template(each)["ImageId"] == each.profile.nodes.image_reference
    assert launch_template(variant("changed"))["ImageId"] == "ami-0123456789abcdef0"
    resource = each.only("gpu-nodes", "AWS::EC2::LaunchTemplate")
    text = json.dumps(resource)
    parameters = each.templates["gpu-nodes"].get("Parameters", {})
    assert not [name for name in parameters if f'"Ref": "{name}"' in text]
    assert "recommended" not in text
    assert "{{resolve:" not in text


def test_two_syntheses_give_one_launch_template(p5: Synthesis) -> None:
    again = synthesize(config.load("p5"))
    kind = "AWS::EC2::LaunchTemplate"
    assert again.of_type("gpu-nodes", kind) == p5.of_type("gpu-nodes", kind)
    group = "AWS::AutoScaling::AutoScalingGroup"
    assert again.of_type("gpu-nodes", group) == p5.of_type("gpu-nodes", group)


def test_the_run_does_not_reach_the_nodes(p5: Synthesis) -> None:
    """Another run, image or idle time changes no launch template: nodes are not replaced for them."""
    overrides = {"run.training.max_steps": 500, "run.run_id": "other", "image.variant": "reproduce"}
    again = synthesize(config.validate(merge(P5, {**overrides, "idle_guard.minutes": 30})))
    assert again.templates["gpu-nodes"] == p5.templates["gpu-nodes"]


def test_auto_scaling_group(each: Synthesis) -> None:
    """No desired capacity: a deployment changes no number of nodes. No rolling update unless asked for."""
    resource = each.only("gpu-nodes", "AWS::AutoScaling::AutoScalingGroup")
    properties = resource["Properties"]
    assert (properties["MinSize"], properties["MaxSize"]) == ("0", str(each.profile.nodes.maximum))
    assert "DesiredCapacity" not in properties
    assert len(properties["VPCZoneIdentifier"]) == 1
    assert "AutoScalingRollingUpdate" not in resource.get("UpdatePolicy", {})
    assert "AutoScalingReplacingUpdate" not in resource.get("UpdatePolicy", {})
    assert "CreationPolicy" not in resource
    assert properties["AutoScalingGroupName"] == each.stacks.gpu_nodes.auto_scaling_group_name


def test_rolling_update_where_asked_for() -> None:
    resource = variant("changed").only("gpu-nodes", "AWS::AutoScaling::AutoScalingGroup")
    policy = resource["UpdatePolicy"]["AutoScalingRollingUpdate"]
    assert policy["MinInstancesInService"] == 0
    assert policy.get("WaitOnResourceSignals", False) is False


def test_node_role(each: Synthesis) -> None:
    role = each.of_type("gpu-nodes", "AWS::IAM::Role")[each.logical_id(each.stacks.gpu_nodes.node_role)]["Properties"]
    names = {re.split(r"[:/]", json.dumps(arn))[-1].rstrip('"]}') for arn in role["ManagedPolicyArns"]}
    assert names == {
        "AmazonEKSWorkerNodePolicy",
        "AmazonEKS_CNI_Policy",
        "AmazonEC2ContainerRegistryReadOnly",
        "AmazonSSMManagedInstanceCore",
    }


def test_access_entry_is_for_linux_nodes(each: Synthesis) -> None:
    """F43: the node role's entry has the type that lets nodes join."""
    entry = each.only("gpu-nodes", "AWS::EKS::AccessEntry")["Properties"]
    assert entry["Type"] == "EC2_LINUX"
    role = each.logical_id(each.stacks.gpu_nodes.node_role)
    assert entry["PrincipalArn"] == {"Fn::GetAtt": [role, "Arn"]}


def taints_of(synthesis: Synthesis) -> list[dict[str, str]]:
    """As tolerations, read back from the kubelet's flag in the user data."""
    (flag,) = re.findall(r"--register-with-taints=(\S+)", user_data(synthesis))
    found = []
    for text in flag.split(","):
        pair, effect = text.rsplit(":", 1)
        key, value = pair.split("=")
        found.append({"key": key, "operator": "Equal", "value": value, "effect": effect})
    return found


def labels_of(synthesis: Synthesis) -> dict[str, str]:
    (flag,) = re.findall(r"--node-labels=(\S+)", user_data(synthesis))
    return dict(pair.split("=") for pair in flag.split(","))


@pytest.mark.parametrize("name", [*config.names(), "changed"])
def test_plugins_tolerate_the_taints_of_the_nodes(name: str) -> None:
    """F50: key, value and effect of each taint in the user data are tolerated by both plugins."""
    found = variant(name) if name == "changed" else synthesis(name)
    taints = taints_of(found)
    assert len(taints) == len(found.profile.nodes.taints)
    names = ["nvidia-device-plugin"]
    if found.profile.nodes.instance.efa_cards:
        names.append("aws-efa-k8s-device-plugin")
    assert len(found.of_type("gpu-nodes", HELM)) == len(names)
    for plugin in names:
        assert chart(found, plugin)["Values"]["tolerations"] == taints


def test_labels_that_the_job_selects(each: Synthesis) -> None:
    """F50: user data sets what the Job selects, and what the NVIDIA plugin's affinity wants."""
    assert labels_of(each) == each.profile.node_labels
    assert labels_of(each)["nvidia.com/gpu.present"] == "true"
    assert labels_of(variant("changed"))["team"] == "llm"


def test_plugin_versions(p5: Synthesis) -> None:
    nvidia = chart(p5, "nvidia-device-plugin")
    assert nvidia["Version"] == "0.19.3"
    assert nvidia["Values"]["mofedEnabled"] is False
    assert chart(p5, "aws-efa-k8s-device-plugin")["Version"] == "v0.5.30"


def test_nodes_find_the_cluster(p5: Synthesis) -> None:
    text = user_data(p5)
    assert f"name: {p5.profile.cluster_name}\n" in text
    assert f"cidr: {p5.profile.cluster.service_cidr}\n" in text
    assert text.count("Fn::ImportValue") == 2
