"""NetworkStack: one zone for nodes and file system, no way in from the internet, the user's VPC if given."""

from __future__ import annotations

from tests.synth import VPC, Synthesis, variant


def test_nodes_and_file_system_share_one_private_subnet(each: Synthesis) -> None:
    group = each.only("gpu-nodes", "AWS::AutoScaling::AutoScalingGroup")["Properties"]
    file_system = each.only("storage", "AWS::FSx::FileSystem")["Properties"]
    subnet = each.logical_id(each.stacks.network.gpu_subnet)
    assert group["VPCZoneIdentifier"] == file_system["SubnetIds"]
    (reference,) = group["VPCZoneIdentifier"]
    exports = {
        output["Export"]["Name"]: output["Value"]
        for output in each.templates["network"]["Outputs"].values()
        if "Export" in output
    }
    assert exports[reference["Fn::ImportValue"]] == {"Ref": subnet}
    properties = each.of_type("network", "AWS::EC2::Subnet")[subnet]["Properties"]
    assert properties["AvailabilityZone"] == each.profile.availability_zone
    assert properties["MapPublicIpOnLaunch"] is False


def test_no_subnet_hands_out_public_addresses(each: Synthesis) -> None:
    subnets = each.of_type("network", "AWS::EC2::Subnet").values()
    assert len(subnets) == 4
    assert not any(subnet["Properties"]["MapPublicIpOnLaunch"] for subnet in subnets)
    zones = {subnet["Properties"]["AvailabilityZone"] for subnet in subnets}
    assert zones == {each.profile.availability_zone, each.profile.second_zone}


def test_one_nat_gateway_s3_endpoint_and_flow_logs(p5: Synthesis) -> None:
    p5.only("network", "AWS::EC2::NatGateway")
    endpoint = p5.only("network", "AWS::EC2::VPCEndpoint")["Properties"]
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert p5.only("network", "AWS::EC2::FlowLog")["Properties"]["TrafficType"] == "ALL"


def test_log_groups_go_with_their_stack(each: Synthesis) -> None:
    groups = list(each.all_of_type("AWS::Logs::LogGroup"))
    assert groups
    assert [id for _, id, group in groups if group.get("DeletionPolicy") != "Delete"] == []


def test_existing_vpc_is_used_as_it_is() -> None:
    synthesis = variant("guest")
    assert not list(synthesis.all_of_type("AWS::EC2::VPC"))
    assert not list(synthesis.all_of_type("AWS::EC2::Subnet"))
    group = synthesis.only("gpu-nodes", "AWS::AutoScaling::AutoScalingGroup")["Properties"]
    file_system = synthesis.only("storage", "AWS::FSx::FileSystem")["Properties"]
    assert group["VPCZoneIdentifier"] == file_system["SubnetIds"] == [VPC["network.gpu_subnet_id"]]
    cluster = synthesis.only("cluster", "AWS::EKS::Cluster")["Properties"]
    subnets = [VPC["network.gpu_subnet_id"], VPC["network.second_subnet_id"]]
    assert cluster["ResourcesVpcConfig"]["SubnetIds"] == subnets
    vpcs = {group["Properties"]["VpcId"] for _, _, group in synthesis.all_of_type("AWS::EC2::SecurityGroup")}
    assert vpcs == {VPC["network.vpc_id"]}
