"""The account's quotas that a profile needs: how much is used, how much more, and what to ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from stacks.profile import Profile

Client = Callable[[str], Any]
"""From a service's name to its client in the profile's region."""

VCPU_QUOTAS = {"p": ("L-417A185B", "Running On-Demand P instances"), "g": ("L-DB2E81BA", "Running On-Demand G and VT")}
"""By the first letter of the instance type; service-quotas code and name, counted in vCPUs (EC2 user guide)."""
ECR_QUOTA = "L-CFEB8E8D"
EKS_QUOTA = "L-1194D53C"
VPC_QUOTA = "L-F678F1CE"


@dataclass(frozen=True)
class Line:
    ok: bool
    name: str
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'MISS'}  {self.name}: {self.text}"


def vcpus(profile: Profile, client: Client) -> Iterator[Line]:
    """A Capacity Block does not count against the on-demand quota."""
    if profile.nodes.capacity.kind == "capacity-block":
        return
    family = profile.nodes.instance_type[0]
    code, name = VCPU_QUOTAS[family]
    limit = _quota(client, "ec2", code)
    filters = [
        {"Name": "instance-type", "Values": [f"{family}*"]},
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
    ]
    pages = client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
    instances = [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]
    # The nodes of this very profile may run already.
    others = [i for i in instances if not _of_group(i, f"{profile.prefix}-gpu")]
    used = sum(i["CpuOptions"]["CoreCount"] * i["CpuOptions"]["ThreadsPerCore"] for i in others)
    needed = profile.nodes.maximum * profile.nodes.instance.vcpus
    said = f"{needed} vCPUs needed, {used} used by others, quota {limit:.0f}"
    advice = f"; ask for {used + needed} of {name} ({code}) in Service Quotas"
    yield Line(used + needed <= limit, "vCPUs", said if used + needed <= limit else said + advice)


def _of_group(instance: dict[str, Any], name: str) -> bool:
    return {"Key": "aws:autoscaling:groupName", "Value": name} in instance.get("Tags", [])


def file_systems(profile: Profile, client: Client) -> Iterator[Line]:
    """Scratch storage and number; the quotas' names are matched, as their codes differ between regions."""
    pages = client("fsx").get_paginator("describe_file_systems").paginate()
    systems = [system for page in pages for system in page["FileSystems"] if system["FileSystemType"] == "LUSTRE"]
    scratch = [s for s in systems if s.get("LustreConfiguration", {}).get("DeploymentType", "").startswith("SCRATCH")]
    used = sum(system["StorageCapacity"] for system in scratch)
    pages = client("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="fsx")
    limits = {quota["QuotaName"].lower(): quota["Value"] for page in pages for quota in page["Quotas"]}
    lustre = {name: value for name, value in limits.items() if "lustre" in name and "scratch" in name}
    wanted = profile.storage.capacity_gib
    for what, needed, pattern in (
        ("FSx storage", used + wanted, r"storage|capacity"),
        ("FSx file systems", len(scratch) + 1, r"file systems|number|count"),
    ):
        found = {name: value for name, value in lustre.items() if re.search(pattern, name)}
        if not found:
            yield Line(False, what, "no quota of that name found; look for 'Lustre' under FSx in Service Quotas")
            continue
        name, limit = min(found.items(), key=lambda pair: pair[1])
        unit = 1024 if "tib" in name else 1
        said = f"{needed} of {limit * unit:.0f} ({name})"
        short = needed > limit * unit
        yield Line(not short, what, said + ("; ask for more in Service Quotas" if short else ""))


def repositories(profile: Profile, client: Client) -> Iterator[Line]:
    pages = client("ecr").get_paginator("describe_repositories").paginate()
    names = [item["repositoryName"] for page in pages for item in page["repositories"]]
    yield _count(client, "ECR repositories", names, profile.repository_name, "ecr", ECR_QUOTA)


def clusters(profile: Profile, client: Client) -> Iterator[Line]:
    pages = client("eks").get_paginator("list_clusters").paginate()
    names = [name for page in pages for name in page["clusters"]]
    yield _count(client, "EKS clusters", names, profile.cluster_name, "eks", EKS_QUOTA)


def vpcs(profile: Profile, client: Client) -> Iterator[Line]:
    if not profile.network.vpc_id:
        pages = client("ec2").get_paginator("describe_vpcs").paginate()
        names = [_tag(vpc, "Name") or vpc["VpcId"] for page in pages for vpc in page["Vpcs"]]
        yield _count(client, "VPCs", names, f"{profile.prefix}-network/Vpc", "vpc", VPC_QUOTA)


def _tag(item: dict[str, Any], key: str) -> str:
    return next((tag["Value"] for tag in item.get("Tags", []) if tag["Key"] == key), "")


def _quota(client: Client, service: str, code: str) -> float:
    """The account's value, AWS's default where none was ever asked for."""
    quotas = client("service-quotas")
    try:
        found = quotas.get_service_quota(ServiceCode=service, QuotaCode=code)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        found = quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)
    return float(found["Quota"]["Value"])


def _count(client: Client, what: str, names: Sequence[str], ours: str, service: str, code: str) -> Line:
    """Room for one more, where ours is not among them already."""
    limit = _quota(client, service, code)
    needed = len(names) + (ours not in names)
    said = f"{needed} of {limit:.0f}"
    return Line(needed <= limit, what, said + ("" if needed <= limit else f"; ask for more ({code}), or delete one"))
