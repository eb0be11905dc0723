"""The preflight: each miss is one line that says what to do; nothing is written, nothing else is asked for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest

from payload.config import merge
from stacks import config, preflight
from stacks.profile import Profile
from stacks.quotas import Line
from tests.stacks.handler_world import World, handler_world, refuse, session

QUOTAS = {"L-417A185B": 768.0, "L-DB2E81BA": 64.0, "L-CFEB8E8D": 100.0, "L-1194D53C": 100.0, "L-F678F1CE": 5.0}
FSX = {"Lustre Scratch storage capacity (GiB)": 100800.0, "Lustre Scratch file systems": 100.0}


class Account:
    """AWS as moto has it, and what moto lacks; all is well until a test says otherwise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.quotas = dict(QUOTAS)
        self.fsx = dict(FSX)
        self.zones = ["us-east-1a", "us-east-1b"]
        self.images = [{"imageId": {"imageDigest": "sha256:1"}}]
        self.instances: list[dict[str, Any]] = []
        world.aws.update(
            {
                "GetServiceQuota": lambda query: {"Quota": {"Value": self.quotas[query["QuotaCode"]]}},
                "ListServiceQuotas": lambda query: {
                    "Quotas": [{"QuotaName": name, "Value": value} for name, value in self.fsx.items()]
                },
                "DescribeInstanceTypeOfferings": lambda query: {
                    "InstanceTypeOfferings": [{"Location": zone} for zone in self.zones]
                },
                "BatchGetImage": lambda query: {"images": self.images},
                "DescribeInstances": lambda query: {"Reservations": [{"Instances": self.instances}]},
                "GetParameter": lambda query: {"Parameter": {"Value": "21"}},
                "DescribeFileSystems": lambda query: {"FileSystems": []},
            }
        )

    def instance(self, vcpus: int, group: str = "") -> None:
        tags = [{"Key": "aws:autoscaling:groupName", "Value": group}] if group else []
        self.instances.append({"CpuOptions": {"CoreCount": vcpus // 2, "ThreadsPerCore": 2}, "Tags": tags})


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    for world in handler_world(monkeypatch):
        yield Account(world)


def profile(name: str = "p5", **changes: Any) -> Profile:
    if not changes:
        return config.load(name)
    tables = tomllib.loads((config.PROFILES / f"{name}.toml").read_text())
    return config.validate(merge(tables, {key.replace("__", "."): value for key, value in changes.items()}))


def misses(found: Profile) -> list[str]:
    lines = preflight.run(found, session())
    assert lines
    return [str(line) for line in lines if not line.ok]


@pytest.mark.parametrize("name", ["p5", "g5"])
def test_nothing_is_missing(account: Account, name: str) -> None:
    assert misses(profile(name)) == []


def test_only_reads(account: Account) -> None:
    misses(profile())
    reads = ("Get", "List", "Describe", "Batch", "Head")
    assert [call for call in account.world.calls if not call.startswith(reads)] == []


def test_zone_without_the_instance_type(account: Account) -> None:
    account.zones = ["us-east-1c", "us-east-1d"]
    (line,) = misses(profile())
    assert "p5.48xlarge is not offered in us-east-1a; set availability_zone to one of us-east-1c, us-east-1d" in line
    account.zones = []
    assert "choose another region" in misses(profile())[0]


def test_zone_in_which_eks_has_no_place(account: Account) -> None:
    zones = [("us-east-1a", "use1-az3"), ("us-east-1b", "use1-az1")]
    account.world.aws["DescribeAvailabilityZones"] = lambda query: {
        "AvailabilityZones": [{"ZoneName": name, "ZoneId": id} for name, id in zones]
    }
    (line,) = misses(profile())
    assert "set availability_zone to one of us-east-1b" in line


def test_vcpu_quota_counts_what_others_use(account: Account) -> None:
    account.quotas["L-417A185B"] = 500.0
    assert misses(profile()) == []
    account.instance(192)
    (line,) = misses(profile())
    assert "384 vCPUs needed, 192 used by others, quota 500; ask for 576" in line
    account.instances.clear()
    account.instance(192, "nvrx-p5-gpu")
    assert misses(profile()) == [], "the profile's own nodes count once"


def test_quota_that_was_never_raised(account: Account) -> None:
    account.world.aws["GetServiceQuota"] = refuse("NoSuchResourceException")
    account.world.aws["GetAWSDefaultServiceQuota"] = lambda query: {"Quota": {"Value": 0.0}}
    assert any("vCPUs" in line for line in misses(profile()))


def reserve(account: Account, **changes: Any) -> None:
    item = {
        "State": "active",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1a",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        "ReservationType": "default",
        **changes,
    }
    account.world.aws["DescribeCapacityReservations"] = lambda query: {"CapacityReservations": [item]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"State": "expired"}, "it is expired, not active"),
        ({"InstanceType": "p4d.24xlarge"}, "it is of p4d.24xlarge; set nodes.instance_type"),
        ({"AvailabilityZone": "us-east-1d"}, "it is in us-east-1d; set availability_zone to that"),
        ({"TotalInstanceCount": 1}, "it holds 1 instances"),
        ({"ReservationType": "capacity-block"}, "correct nodes.capacity.kind"),
    ],
)
def test_reservation_that_does_not_fit(account: Account, changes: dict[str, Any], said: str) -> None:
    reserve(account, **changes)
    (line,) = misses(profile("p5-odcr"))
    assert said in line


def test_reservation_that_fits_and_one_that_is_unknown(account: Account) -> None:
    reserve(account)
    assert misses(profile("p5-odcr")) == []
    account.world.aws["DescribeCapacityReservations"] = refuse("InvalidCapacityReservationId.NotFound")
    (line,) = misses(profile("p5-odcr"))
    assert "is not known in us-east-1; correct nodes.capacity.id" in line


def test_block_must_agree_with_the_profiles_times(account: Account) -> None:
    found = profile("p5-capacity-block")
    capacity = found.nodes.capacity
    times = {"StartDate": capacity.start, "EndDate": capacity.end}
    block = {"ReservationType": "capacity-block", "State": "scheduled", "TotalInstanceCount": found.nodes.maximum}
    account.quotas["L-417A185B"] = 0.0  # blocks do not count against it
    reserve(account, **block, **times)
    assert misses(found) == []
    reserve(account, **block, **{**times, "EndDate": datetime(2031, 1, 1, tzinfo=UTC)})
    (line,) = misses(found)
    assert "set it to 2031-01-01T00:00:00+00:00" in line


def test_fsx_limits(account: Account) -> None:
    system = {
        "FileSystemType": "LUSTRE",
        "StorageCapacity": 100000,
        "LustreConfiguration": {"DeploymentType": "SCRATCH_2"},
    }
    account.world.aws["DescribeFileSystems"] = lambda query: {"FileSystems": [system]}
    (line,) = misses(profile())
    assert "FSx storage: 101200 of 100800" in line
    account.world.aws["DescribeFileSystems"] = lambda query: {"FileSystems": []}
    account.fsx.clear()
    assert len(misses(profile())) == 2, "limits that cannot be found are not taken for enough"


def test_ecr_limit_counts_one_more(account: Account) -> None:
    account.quotas["L-CFEB8E8D"] = 1.0
    assert misses(profile()) == []
    boto3.client("ecr").create_repository(repositoryName="another")
    (line,) = misses(profile())
    assert "ECR repositories: 2 of 1; ask for more (L-CFEB8E8D)" in line
    boto3.client("ecr").delete_repository(repositoryName="another")
    boto3.client("ecr").create_repository(repositoryName=profile().repository_name)
    assert misses(profile()) == []


def test_base_image_that_is_not_there(account: Account) -> None:
    account.images = []
    (line,) = misses(profile())
    assert "is not in its registry; set image.base_image" in line


def test_node_image_and_bootstrap_that_are_not_there(account: Account) -> None:
    account.world.aws["GetParameter"] = refuse("ParameterNotFound")
    bootstrap, image = misses(profile())
    assert "run: npx cdk bootstrap" in bootstrap
    assert "run: make ami PROFILE=p5" in image


def test_export_bucket(account: Account) -> None:
    found = profile(storage__export_bucket="results-of-mine")
    (line,) = misses(found)
    assert "results-of-mine does not exist; make it" in line
    boto3.client("s3").create_bucket(Bucket="results-of-mine")
    assert misses(found) == []


def test_another_account_and_a_network_of_ones_own(account: Account) -> None:
    changes = {
        "account": "999999999999",
        "network__vpc_id": "vpc-0123456789abcdef0",
        "network__gpu_subnet_id": "subnet-0123456789abcdef0",
        "network__second_subnet_id": "subnet-0123456789abcdef1",
    }
    lines = misses(profile(**changes))
    assert "the profile says 999999999999; log in there" in lines[0]
    assert sum("is not in vpc-0123456789abcdef0" in line for line in lines) == 2


def test_a_right_that_is_missing_is_said_and_the_rest_goes_on(account: Account) -> None:
    account.world.aws["ListServiceQuotas"] = refuse("AccessDeniedException", "not authorized")
    (line,) = misses(profile())
    assert "AWS does not say: AccessDeniedException: not authorized; ask for the right" in line


def test_command_line(account: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(boto3, "Session", lambda: session())
    assert preflight.main(["--profile", "p5"]) == 0
    assert "nothing is missing" in capsys.readouterr().out
    account.zones = []
    assert preflight.main(["--profile", "p5"]) == 1
    assert "MISS  offering" in capsys.readouterr().out
    assert preflight.main(["--profile", "absent"]) == 2
    assert "legal:" in capsys.readouterr().err


def test_each_line_is_one_line() -> None:
    assert str(Line(False, "name", "text")) == "MISS  name: text"
