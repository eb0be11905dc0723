"""StorageStack: the registry that never blocks a deletion, the file system and the ports that it needs."""

from __future__ import annotations

from tests.graph import Graph
from tests.synth import Synthesis, synthesis, variant

LUSTRE_PORTS = {(988, 988), (1018, 1023)}


def test_registry_with_images_does_not_block_deletion(each: Synthesis) -> None:
    """F47: the repository is emptied and deleted with its stack, and tags never change their image."""
    repository = each.only("storage", "AWS::ECR::Repository")
    assert repository["DeletionPolicy"] == "Delete"
    properties = repository["Properties"]
    assert properties["EmptyOnDelete"] is True
    assert properties["ImageTagMutability"] == "IMMUTABLE"
    assert properties["ImageScanningConfiguration"] == {"ScanOnPush": True}


def test_file_system(each: Synthesis) -> None:
    """F40: SCRATCH_2 of the profile's size, without the throughput setting that it does not take."""
    resource = each.only("storage", "AWS::FSx::FileSystem")
    properties = resource["Properties"]
    assert properties["StorageCapacity"] == each.profile.storage.capacity_gib
    assert properties["FileSystemTypeVersion"] == "2.15"
    assert properties["LustreConfiguration"] == {
        "DeploymentType": "SCRATCH_2",
        "DataCompressionType": each.profile.storage.compression,
    }
    assert resource["DeletionPolicy"] == "Delete"
    assert len(properties["SubnetIds"]) == 1


def test_lustre_ports_are_open_between_clients_and_servers(each: Synthesis) -> None:
    """F39: 988 and 1018-1023, from the servers and the clients to the servers, and back to the clients."""
    servers = each.logical_id(each.stacks.storage.file_system_security_group)
    clients = each.logical_id(each.stacks.storage.client_security_group)
    opened: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for rule in each.of_type("storage", "AWS::EC2::SecurityGroupIngress").values():
        properties = rule["Properties"]
        assert properties["IpProtocol"] == "tcp"
        pair = (properties["GroupId"]["Fn::GetAtt"][0], properties["SourceSecurityGroupId"]["Fn::GetAtt"][0])
        opened.setdefault(pair, set()).add((properties["FromPort"], properties["ToPort"]))
    assert opened == {pair: LUSTRE_PORTS for pair in ((servers, servers), (servers, clients), (clients, servers))}


def test_file_system_comes_after_its_rules_and_goes_before_the_registry(each: Synthesis) -> None:
    """F39: every rule is there before the file system, and outlives it; so does the registry."""
    graph = Graph(each)
    file_system = ("storage", each.logical_id(each.stacks.storage.file_system))
    rules = graph.of_type("AWS::EC2::SecurityGroupIngress")
    rules = [rule for rule in rules if rule[0] == "storage"]
    assert len(rules) == 6
    for earlier in (*rules, ("storage", each.logical_id(each.stacks.storage.repository))):
        assert graph.needs(file_system, earlier, across_stacks=False)


def test_no_export_without_a_bucket(each: Synthesis) -> None:
    assert each.profile.storage.export_bucket == ""
    assert not each.of_type("storage", "AWS::FSx::DataRepositoryAssociation")
    assert each.stacks.storage.data_repository is None


def test_export_to_a_bucket() -> None:
    guest = variant("guest")
    association = guest.only("storage", "AWS::FSx::DataRepositoryAssociation")["Properties"]
    assert association["FileSystemPath"] == "/runs"
    assert association["DataRepositoryPath"] == "s3://results-of-mine/llm/runs"
    assert set(association["S3"]["AutoExportPolicy"]["Events"]) == {"NEW", "CHANGED", "DELETED"}
    assert guest.profile.run.run_dir.is_relative_to(f"{guest.profile.run.workdir}/runs")
    assert guest.templates["storage"]["Outputs"]["ExportPath"]["Value"] == "s3://results-of-mine/llm/runs"
    assert not [warning for warning in guest.warnings if "destroy" in warning]


def test_synthesis_says_what_destroying_costs() -> None:
    assert any("destroying is refused until" in warning for warning in synthesis("p5").warnings)
    assert any("deletes all runs" in warning for warning in variant("changed").warnings)
