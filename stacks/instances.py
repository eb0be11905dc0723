"""What an instance type offers: the facts that AWS would check minutes into a deployment.

Sources: the EC2 user guide's "Accelerated computing" and "EFA maximize bandwidth" pages (GPUs, memory, NVMe,
network cards); `aws ec2 describe-instance-types` gives the same figures.  Prices: see `PRICES_AS_OF`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

EfaLayout = Literal["classic", "modern", "none"]

PRICES_AS_OF = "2026-11-09"
"""Day of the newest price below (p5, p4de); p5en is of 2026-08-06, g5 of 2026-06-17. AWS publishes no on-demand price
for p5e in every region: p5en's, which is not lower, stands for it."""
PRICE_REGION = "us-east-1"
"""Linux, on demand, in US dollars; other regions and agreements differ, most by less than a third."""
PRICE_SOURCE = "https://aws.amazon.com/ec2/pricing/on-demand/"

HUGEPAGE_MIB = 2
EFA_HUGEPAGES = 5128
"""2 MiB pages that the EFA driver of the EKS NVIDIA image reserves at boot."""
POD_HUGEPAGES_MIB = 5120
"""What a pod asks for of them: libfabric's own need, the rest stays with the host."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance type.

    Attributes:
        gpus: GPUs a node.
        gpu_memory_gib: Memory of one GPU as nvidia-smi rounds it.
        efa_cards: Network cards that take an EFA device; 0: no EFA used.
        efa_layouts: Legal ways of numbering the interfaces.
        num_nvme: NVMe disks of `nvme_gb` each, joined to RAID 0 by nodeadm.
        memory_gib: Host memory.
        price_usd_h: On demand, `PRICE_REGION`, `PRICES_AS_OF`.
        capacity_blocks: Sold as EC2 Capacity Blocks for ML.
    """

    name: str
    gpu: str
    gpus: int
    gpu_memory_gib: int
    efa_cards: int
    efa_layouts: tuple[EfaLayout, ...]
    num_nvme: int
    nvme_gb: int
    memory_gib: int
    vcpus: int
    price_usd_h: float
    capacity_blocks: bool

    @property
    def hugepages_mib(self) -> int:
        """Host memory that is taken from ordinary pages at boot."""
        return EFA_HUGEPAGES * HUGEPAGE_MIB if self.efa_cards else 0

    @property
    def pod_hugepages_mib(self) -> int:
        return POD_HUGEPAGES_MIB if self.efa_cards else 0

    @property
    def allocatable_memory_gib(self) -> int:
        """What one pod may ask for beside the DaemonSets, rounded down.

        Firmware and kernel keep about 3 percent of the nominal memory; nodeadm reserves 255 MiB and 11 MiB a pod slot
        (110 assumed) for the kubelet, the eviction threshold is 100 MiB, and 2 GiB are left to the device plugins, the
        CSI driver, the CNI, kube-proxy and the agents.
        """
        reserved_mib = 255 + 11 * 110 + 100 + 2048
        return int(self.memory_gib * 0.97 - (self.hugepages_mib + reserved_mib) / 1024)

    @property
    def allocatable_cpus(self) -> int:
        """vCPUs less those for the kubelet and the DaemonSets (device plugins, CSI driver, CNI, kube-proxy)."""
        return self.vcpus - (2 if self.vcpus >= 16 else 1)


_P5 = Instance(
    name="p5.48xlarge",
    gpu="H100",
    gpus=8,
    gpu_memory_gib=80,
    efa_cards=32,
    efa_layouts=("classic", "modern"),
    num_nvme=8,
    nvme_gb=3840,
    memory_gib=2048,
    vcpus=192,
    price_usd_h=55.04,
    capacity_blocks=True,
)
_P5E = replace(_P5, name="p5e.48xlarge", gpu="H200", gpu_memory_gib=141, price_usd_h=63.296)
_P5EN = replace(_P5E, name="p5en.48xlarge", efa_cards=16)
_P4DE = replace(
    _P5,
    name="p4de.24xlarge",
    gpu="A100",
    efa_cards=4,
    efa_layouts=("classic",),
    nvme_gb=1000,
    memory_gib=1152,
    vcpus=96,
    price_usd_h=27.44705,
)


def _g5(name: str, gpus: int, vcpus: int, memory_gib: int, num_nvme: int, nvme_gb: int, price: float) -> Instance:
    return Instance(
        name=name,
        gpu="A10G",
        gpus=gpus,
        gpu_memory_gib=24,
        efa_cards=0,
        efa_layouts=("none",),
        num_nvme=num_nvme,
        nvme_gb=nvme_gb,
        memory_gib=memory_gib,
        vcpus=vcpus,
        price_usd_h=price,
        capacity_blocks=False,
    )


CATALOGUE: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        _P5,
        _P5E,
        _P5EN,
        _P4DE,
        _g5("g5.xlarge", 1, 4, 16, 1, 250, 1.006),
        _g5("g5.2xlarge", 1, 8, 32, 1, 450, 1.212),
        _g5("g5.12xlarge", 4, 48, 192, 1, 3800, 5.672),
        _g5("g5.48xlarge", 8, 192, 768, 2, 3800, 16.288),
    )
}
