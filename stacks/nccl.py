"""Environment of NCCL and EFA by instance type.

Sources: NCCL user guide, "Environment Variables"; libfabric's fi_efa(7); aws-ofi-nccl's README (the plugin registers
the network "AWS Libfabric" and picks the settings of p4d, p4de and p5 itself, so that none is repeated here); NVRx
usage guide of in-process restart, "Known issues".
"""

from __future__ import annotations

from stacks.instances import Instance


def environment(instance: Instance) -> dict[str, str]:
    """What a pod on ``instance`` gets, the same in every arm, so that arms compare."""
    network = _efa() if instance.efa_cards else _socket()
    return {**_common(), **network}


def _common() -> dict[str, str]:
    return {
        # Bootstrap and sockets only; "^" leaves out: loopback, bridges, and the VPC CNI's host side (aws-do-eks #54).
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni,pod-id-link",
        # gloo takes exact names only; the VPC CNI calls a pod's interface eth0.
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "WARN",
        # NVRx in-process restart: an aborted NVLS communicator cannot be made again.
        "NCCL_NVLS_ENABLE": "0",
        # The watchdog must not end a process whose communicator was aborted on purpose.
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }


def _efa() -> dict[str, str]:
    return {
        # By name: without the plugin or the devices NCCL fails at its first communicator instead of using sockets.
        "NCCL_NET": "AWS Libfabric",
        # The same one layer down: libfabric offers no TCP provider in EFA's place.
        "FI_PROVIDER": "efa",
    }


def _socket() -> dict[str, str]:
    return {"NCCL_NET": "Socket"}
