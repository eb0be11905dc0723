"""ClusterStack: the API's doors, the versions that must agree, the add-ons and their rights."""

from __future__ import annotations

import json
import re

from stacks.cluster import KUBECTL_MINOR
from stacks.sections import KUBERNETES_VERSIONS
from tests.synth import VARIANTS, Synthesis, variant


def addon(synthesis: Synthesis, name: str) -> dict[str, object]:
    (found,) = [
        resource["Properties"]
        for resource in synthesis.of_type("cluster", "AWS::EKS::Addon").values()
        if resource["Properties"]["AddonName"] == name
    ]
    return dict(found)


def test_kubectl_layer_is_within_one_minor_of_every_supported_version(p5: Synthesis) -> None:
    """F46: a layer is there, near enough to the cluster, and the versions are a constant in one place."""
    minors = [int(version.partition(".")[2]) for version in KUBERNETES_VERSIONS]
    assert all(abs(minor - KUBECTL_MINOR) <= 1 for minor in minors)
    layers = p5.of_type("cluster", "AWS::Lambda::LayerVersion")
    kubectl = p5.logical_id(p5.stacks.cluster.kubectl_layer)
    assert kubectl in layers
    users = [
        function
        for function in p5.of_type("cluster", "AWS::Lambda::Function").values()
        if {"Ref": kubectl} in function["Properties"].get("Layers", [])
    ]
    assert len(users) == 1
    assert type(p5.stacks.cluster.kubectl_layer).__name__ == f"KubectlV{KUBECTL_MINOR}Layer"


def test_nothing_is_pruned(each: Synthesis) -> None:
    """F46: prune is off, so an update deletes no object that another resource applied."""
    kinds = {"Custom::AWSCDK-EKS-KubernetesResource", "Custom::AWSCDK-EKS-HelmChart"}
    for part in each.templates:
        for resource in each.templates[part]["Resources"].values():
            assert resource["Type"] not in kinds or "PruneLabel" not in resource["Properties"]


def test_control_plane(each: Synthesis) -> None:
    properties = each.only("cluster", "AWS::EKS::Cluster")["Properties"]
    assert properties["Version"] == each.profile.cluster.kubernetes_version
    assert properties["AccessConfig"]["AuthenticationMode"] == "API"
    assert properties["ComputeConfig"] == {"Enabled": False}
    assert properties["KubernetesNetworkConfig"]["ServiceIpv4Cidr"] == each.profile.cluster.service_cidr
    logs = {item["Type"] for item in properties["Logging"]["ClusterLogging"]["EnabledTypes"]}
    assert logs == {"api", "audit", "authenticator", "controllerManager", "scheduler"}
    assert properties["ResourcesVpcConfig"]["EndpointPrivateAccess"] is True


def test_control_plane_logs_are_ours_to_delete(p5: Synthesis) -> None:
    names = [group["Properties"].get("LogGroupName") for group in p5.of_type("cluster", "AWS::Logs::LogGroup").values()]
    assert f"/aws/eks/{p5.profile.cluster_name}/cluster" in names


def test_private_endpoint_puts_every_caller_into_the_vpc() -> None:
    synthesis = variant("guest")
    access = synthesis.only("cluster", "AWS::EKS::Cluster")["Properties"]["ResourcesVpcConfig"]
    assert (access["EndpointPublicAccess"], access["EndpointPrivateAccess"]) == (False, True)
    functions = synthesis.of_type("cluster", "AWS::Lambda::Function").values()
    assert functions
    assert all(function["Properties"]["VpcConfig"]["SubnetIds"] for function in functions)


def test_public_endpoint_can_be_narrowed() -> None:
    synthesis = variant("changed")
    access = synthesis.only("cluster", "AWS::EKS::Cluster")["Properties"]["ResourcesVpcConfig"]
    assert access["EndpointPublicAccess"] is True
    assert access["PublicAccessCidrs"] == ["203.0.113.0/24"]


def test_system_nodes(p5: Synthesis) -> None:
    group = p5.only("cluster", "AWS::EKS::Nodegroup")["Properties"]
    assert group["ScalingConfig"] == {"DesiredSize": 2, "MaxSize": 3, "MinSize": 2}
    data = p5.only("cluster", "AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True


def test_csi_driver_may_describe_and_no_more(each: Synthesis) -> None:
    """F39: the add-on's role has the rights it needs for a static volume, and only those."""
    csi = addon(each, "aws-fsx-csi-driver")
    (identity,) = csi["PodIdentityAssociations"]  # type: ignore[misc]
    assert identity["ServiceAccount"] == "fsx-csi-controller-sa"
    role = identity["RoleArn"]["Fn::GetAtt"][0]
    resource = each.of_type("cluster", "AWS::IAM::Role")[role]["Properties"]
    assert "ManagedPolicyArns" not in resource
    (trust,) = resource["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert set(trust["Action"]) == {"sts:AssumeRole", "sts:TagSession"}
    policies = [
        policy["Properties"]["PolicyDocument"]["Statement"]
        for policy in each.of_type("cluster", "AWS::IAM::Policy").values()
        if {"Ref": role} in policy["Properties"]["Roles"]
    ]
    assert [statement["Action"] for statements in policies for statement in statements] == ["fsx:DescribeFileSystems"]


def test_csi_node_driver_tolerates_the_nodes_taints(each: Synthesis) -> None:
    """F50: the tolerations of the CSI driver come from the profile's taints."""
    values = json.loads(str(addon(each, "aws-fsx-csi-driver")["ConfigurationValues"]))
    assert values["node"]["tolerations"] == [taint.toleration for taint in each.profile.nodes.taints]


def test_pod_identity_and_monitoring_agents(p5: Synthesis) -> None:
    assert addon(p5, "eks-pod-identity-agent")
    assert addon(p5, "eks-node-monitoring-agent")


def test_admin_role_is_made_or_the_users_own(p5: Synthesis) -> None:
    output = p5.templates["cluster"]["Outputs"]["UpdateKubeconfig"]["Value"]
    role = p5.logical_id(p5.stacks.cluster.admin_role)
    assert {"Fn::GetAtt": [role, "Arn"]} in output["Fn::Join"][1]
    arn = VARIANTS["guest"]["cluster.admin_role_arn"]
    own = variant("guest")
    assert arn in json.dumps(own.templates["cluster"]["Outputs"]["UpdateKubeconfig"])
    principals = [entry["Properties"]["PrincipalArn"] for _, _, entry in own.all_of_type("AWS::EKS::AccessEntry")]
    assert arn in principals


def test_outputs_hold_what_comes_next_and_no_secret(each: Synthesis) -> None:
    names = {name for template in each.templates.values() for name in template.get("Outputs", {})}
    wanted = {"UpdateKubeconfig", "ClusterName", "RepositoryUri", "FileSystemId", "AutoScalingGroup", "VpcId"}
    assert wanted <= names
    text = json.dumps([template.get("Outputs", {}) for template in each.templates.values()])
    assert not re.search(r"secret|token|password", text.replace("Custom::", ""), re.IGNORECASE)
