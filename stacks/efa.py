"""Network interfaces and user data of the GPU nodes, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stacks.instances import EfaLayout, Instance
from stacks.nodes import Taint

_BOUNDARY = "==nvrx-eks=="
_MEMLOCK = (
    "mkdir -p /etc/systemd/system/containerd.service.d",
    "printf '[Service]\\nLimitMEMLOCK=infinity\\n' > /etc/systemd/system/containerd.service.d/memlock.conf",
    "systemctl daemon-reload",
)
"""EFA pins memory. Containers inherit the limit from containerd, which nodeadm starts later; the capability IPC_LOCK
would not help, as a process that is not root gets none of the container's capabilities."""


def network_interfaces(instance: Instance, layout: EfaLayout, groups: Sequence[str]) -> list[dict[str, Any]]:
    """``LaunchTemplateData.NetworkInterfaces`` of one node.

    ``classic``: an EFA with IP on card 0, EFA-only devices as device 1 of the other cards.  ``modern``: an ordinary
    interface as device 0 of card 0, an EFA-only device as its device 1, and as device 0 of the other cards; one
    interface more, the same number of EFA devices.  EFA-only devices take no IP address.  (EC2 user guide, "Maximize
    network bandwidth"; a wrong index makes EC2 refuse the launch, eksctl #7520.)
    """
    if layout == "none":
        return [_interface(0, 0, "interface", groups)]
    cards = range(instance.efa_cards)
    if layout == "classic":
        return [_interface(card, 1 if card else 0, "efa-only" if card else "efa", groups) for card in cards]
    devices = [_interface(card, 0 if card else 1, "efa-only", groups) for card in cards]
    return [_interface(0, 0, "interface", groups), *devices]


def _interface(card: int, device: int, kind: str, groups: Sequence[str]) -> dict[str, Any]:
    interface: dict[str, Any] = {
        "NetworkCardIndex": card,
        "DeviceIndex": device,
        "InterfaceType": kind,
        "Groups": list(groups),
        "DeleteOnTermination": True,
    }
    if card == device == 0:
        # Legal on the primary interface only; false is legal beside others, true is not.
        interface["AssociatePublicIpAddress"] = False
    return interface


@dataclass(frozen=True, kw_only=True)
class ClusterAddress:
    """What nodeadm needs to find the cluster; values may be CDK tokens."""

    name: str
    endpoint: str
    certificate_authority: str
    service_cidr: str


def user_data(cluster: ClusterAddress, *, labels: Mapping[str, str], taints: Sequence[Taint]) -> str:
    """MIME document: the Lustre client is installed, then nodeadm joins the cluster.

    The shell part ends before nodeadm runs, so it cannot attest the join.  NVMe disks become one RAID 0 under
    containerd and kubelet, where the images and emptyDir volumes lie.
    """
    node_labels = ",".join(f"{key}={value}" for key, value in labels.items())
    flags = [f"--node-labels={node_labels}"]
    if taints:
        flags.append(f"--register-with-taints={','.join(taint.kubelet_flag for taint in taints)}")
    config = "\n".join(
        [
            "apiVersion: node.eks.aws/v1alpha1",
            "kind: NodeConfig",
            "spec:",
            "  cluster:",
            f"    name: {cluster.name}",
            f"    apiServerEndpoint: {cluster.endpoint}",
            f"    certificateAuthority: {cluster.certificate_authority}",
            f"    cidr: {cluster.service_cidr}",
            "  instance:",
            "    localStorage:",
            "      strategy: RAID0",
            "  kubelet:",
            "    flags:",
            *(f"      - {flag}" for flag in flags),
        ]
    )
    shell = "\n".join(["#!/bin/bash", "set -euo pipefail", *_MEMLOCK, "dnf install -y lustre-client"])
    parts = [("text/x-shellscript; charset=us-ascii", shell), ("application/node.eks.aws", config)]
    lines = ["MIME-Version: 1.0", f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"', ""]
    for kind, text in parts:
        lines += [f"--{_BOUNDARY}", f"Content-Type: {kind}", "", text, ""]
    return "\n".join([*lines, f"--{_BOUNDARY}--", ""])
