"""Interfaces and user data, as pure functions."""

from __future__ import annotations

import email
from collections import Counter
from typing import Any

import pytest
import yaml

from stacks.efa import ClusterAddress, network_interfaces, user_data
from stacks.instances import CATALOGUE, EfaLayout, Instance
from stacks.nodes import Taint

GROUPS = ("sg-a", "sg-b", "sg-c")
ADDRESS = ClusterAddress(name="c", endpoint="https://api", certificate_authority="Q0E=", service_cidr="172.20.0.0/16")
LAYOUTS = [(instance, layout) for instance in CATALOGUE.values() for layout in instance.efa_layouts]


def slots(interfaces: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [(item["NetworkCardIndex"], item["DeviceIndex"], item["InterfaceType"]) for item in interfaces]


def test_classic_p5_one_by_one() -> None:
    """F36: card 0 is device 0 and an EFA, cards 1 to 31 are device 1 and EFA-only."""
    found = slots(network_interfaces(CATALOGUE["p5.48xlarge"], "classic", GROUPS))
    assert found == [(0, 0, "efa"), *((card, 1, "efa-only") for card in range(1, 32))]


def test_modern_p5_one_by_one() -> None:
    """F36: a plain interface, device 1 of card 0, then device 0 of cards 1 to 31: 32 EFA devices of 33 interfaces."""
    found = slots(network_interfaces(CATALOGUE["p5.48xlarge"], "modern", GROUPS))
    expected = [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 32))]
    assert found == expected


@pytest.mark.parametrize(("instance", "layout"), LAYOUTS, ids=[f"{i.name}-{layout}" for i, layout in LAYOUTS])
def test_every_layout(instance: Instance, layout: EfaLayout) -> None:
    """F36: each card carries one EFA device, groups are on each interface, none is left behind or public."""
    interfaces = network_interfaces(instance, layout, GROUPS)
    efa = Counter(item["NetworkCardIndex"] for item in interfaces if item["InterfaceType"] != "interface")
    assert efa == Counter(range(instance.efa_cards))
    places = [(card, device) for card, device, _ in slots(interfaces)]
    assert len(places) == len(set(places))
    assert places[0] == (0, 0)
    assert interfaces[0]["InterfaceType"] != "efa-only", "EFA-only takes no IP address"
    for interface in interfaces:
        assert interface["Groups"] == list(GROUPS)
        assert interface["DeleteOnTermination"] is True
    assert interfaces[0]["AssociatePublicIpAddress"] is False
    assert not any("AssociatePublicIpAddress" in interface for interface in interfaces[1:])


def parts(text: str) -> dict[str, str]:
    message = email.message_from_string(text)
    found = {}
    for part in message.get_payload():
        assert isinstance(part, email.message.Message)
        found[part.get_content_type()] = str(part.get_payload())
    return found


def test_user_data_is_a_mime_document_of_two_parts() -> None:
    taints = (Taint(key="nvidia.com/gpu"), Taint(key="team", value="llm", effect="NoExecute"))
    found = parts(user_data(ADDRESS, labels={"a": "b", "c/d": "e"}, taints=taints))
    assert list(found) == ["text/x-shellscript", "application/node.eks.aws"]
    assert "dnf install -y lustre-client" in found["text/x-shellscript"]
    config = yaml.safe_load(found["application/node.eks.aws"])
    assert config["kind"] == "NodeConfig"
    assert config["spec"]["cluster"] == {
        "name": "c",
        "apiServerEndpoint": "https://api",
        "certificateAuthority": "Q0E=",
        "cidr": "172.20.0.0/16",
    }
    assert config["spec"]["instance"]["localStorage"]["strategy"] == "RAID0"
    assert config["spec"]["kubelet"]["flags"] == [
        "--node-labels=a=b,c/d=e",
        "--register-with-taints=nvidia.com/gpu=true:NoSchedule,team=llm:NoExecute",
    ]


def test_user_data_without_taints() -> None:
    config = yaml.safe_load(parts(user_data(ADDRESS, labels={"a": "b"}, taints=()))["application/node.eks.aws"])
    assert config["spec"]["kubelet"]["flags"] == ["--node-labels=a=b"]
