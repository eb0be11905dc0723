"""Profiles: every rule has a test that breaks it alone and reads the field and the legal values in the error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from payload.config import ConfigError, load_profile, merge
from stacks import config
from stacks.instances import CATALOGUE
from stacks.nodes import Taint
from stacks.profile import Profile
from tests.synth import VPC

P5: dict[str, Any] = tomllib.loads((config.PROFILES / "p5.toml").read_text())
BLOCK = {
    "nodes.capacity.kind": "capacity-block",
    "nodes.capacity.id": "cr-0123456789abcdef0",
    "nodes.capacity.start": "2027-01-11T11:30:00Z",
    "nodes.capacity.end": "2027-01-13T11:30:00Z",
}
AMI = "/aws/service/eks/optimized-ami/{}/amazon-linux-2023/x86_64/nvidia/{}/image_id"
IMAGE = "amazon-eks-node-al2023-x86_64-nvidia-1.35-v20260520"
G5 = {
    "nodes.instance_type": "g5.xlarge",
    "nodes.efa_layout": "none",
    "run.parallelism.ranks_per_node": 1,
}


def with_overrides(overrides: dict[str, Any]) -> Profile:
    return config.validate(merge(P5, overrides))


def shipped() -> list[str]:
    return config.names()


def test_eight_profiles_are_shipped() -> None:
    assert set(shipped()) == {"p5", "p5-8nodes", "p5-odcr", "p5-capacity-block", "p5e", "p5en", "p4de", "g5"}


@pytest.mark.parametrize("name", shipped())
def test_shipped_profile_is_legal_and_named_as_its_file(name: str) -> None:
    profile = config.load(name)
    assert profile.name == name
    assert load_profile(config.PROFILES / f"{name}.toml") == profile.run


@pytest.mark.parametrize(
    ("overrides", "field", "legal"),
    [
        ({"name": "P5"}, "name", "up to 20 of a-z"),
        ({"name": "a" * 21}, "name", "up to 20 of a-z"),
        ({"name": "p5-"}, "name", "up to 20 of a-z"),
        ({"name": "5p"}, "name", "beginning with a letter"),
        ({"region": "mars"}, "region", "an AWS region"),
        ({"availability_zone": "us-west-2a"}, "availability_zone", "a zone of us-east-1"),
        ({"availability_zone": "us-east-1"}, "availability_zone", "a zone of us-east-1"),
        ({"second_zone": "us-west-2a"}, "second_zone", "another zone of us-east-1"),
        ({"second_zone": "us-east-1a"}, "second_zone", "another zone of us-east-1"),
        ({"account": "1234"}, "account", "12 digits"),
        ({"tags.aws:x": "y"}, "tags.aws:x", "not beginning with aws:"),
        ({"tags": {"x": "y" * 257}}, "tags.x", "up to 256"),
        ({"tags": {"kubernetes.io/cluster/x": "owned"}}, "tags.kubernetes.io/cluster/x", "no tag of a cluster's"),
        ({"network.cidr": "10.0.0.0/8"}, "network.cidr", "/16 to /20"),
        ({"network.cidr": "10.0.0.1/16"}, "network.cidr", "an IPv4 block"),
        ({**VPC, "network.vpc_id": "vpc-1"}, "network.vpc_id", "vpc- and 8 or 17 hex digits"),
        ({**VPC, "network.vpc_id": ""}, "network.vpc_id", "all three or none"),
        ({**VPC, "network.gpu_subnet_id": ""}, "network.gpu_subnet_id", "all three or none"),
        ({**VPC, "network.second_subnet_id": ""}, "network.second_subnet_id", "all three or none"),
        (
            {**VPC, "network.second_subnet_id": VPC["network.gpu_subnet_id"]},
            "network.second_subnet_id",
            "another subnet than gpu_subnet_id",
        ),
        ({"cluster.kubernetes_version": "1.36"}, "cluster.kubernetes_version", "1.34, 1.35"),
        ({"cluster.kubernetes_version": "1.29"}, "cluster.kubernetes_version", "1.34, 1.35"),
        ({"cluster.endpoint": "public"}, "cluster.endpoint", "'public-and-private' or 'private'"),
        ({"cluster.public_cidrs": ["x"]}, "cluster.public_cidrs[0]", "an IPv4 block"),
        (
            {"cluster.endpoint": "private", "cluster.public_cidrs": ["10.1.0.0/16"]},
            "cluster.public_cidrs",
            "empty with a private endpoint",
        ),
        ({"cluster.service_cidr": "172.20.0.0/8"}, "cluster.service_cidr", "/12 to /24"),
        ({"cluster.service_cidr": "10.0.0.0/20"}, "cluster.service_cidr", "apart from network.cidr (10.0.0.0/16)"),
        ({"cluster.system_instance_type": "big"}, "cluster.system_instance_type", "an instance type"),
        ({"cluster.system_nodes": 1}, "cluster.system_nodes", "greater than or equal to 2"),
        ({"cluster.admin_role_arn": "me"}, "cluster.admin_role_arn", "arn:aws:iam::<account>:role/<name>"),
        ({"nodes.instance_type": "p9.48xlarge"}, "nodes.instance_type", "p5.48xlarge, p5e.48xlarge"),
        ({"nodes.count": 0}, "nodes.count", "greater than or equal to 1"),
        ({"nodes.count": 63, "nodes.spare": 2}, "nodes.count", "up to 64 together"),
        ({"nodes.spare": -1}, "nodes.spare", "greater than or equal to 0"),
        ({"nodes.efa_layout": "none"}, "nodes.efa_layout", "classic, modern"),
        ({"nodes.efa_layout": "wide"}, "nodes.efa_layout", "'classic', 'modern' or 'none'"),
        ({"nodes.instance_type": "p4de.24xlarge", "nodes.efa_layout": "modern"}, "nodes.efa_layout", "legal: classic"),
        ({**G5, "nodes.efa_layout": "classic"}, "nodes.efa_layout", "legal: none"),
        ({"nodes.ami": "ami-xyz"}, "nodes.ami", "make ami"),
        ({"nodes.ami": AMI.format("1.35", "recommended")}, "nodes.ami", "not recommended"),
        ({"nodes.ami": AMI.format("1.34", IMAGE)}, "nodes.ami", "an image of cluster.kubernetes_version (1.35)"),
        ({"nodes.root_volume_gib": 20}, "nodes.root_volume_gib", "greater than or equal to 100"),
        ({"nodes.labels": {"a b": "c"}}, "nodes.labels.a b", "a Kubernetes label key and value"),
        ({"nodes.labels": {"a": "c d"}}, "nodes.labels.a", "a Kubernetes label key and value"),
        ({"nodes.labels": {"kubernetes.io/role": "x"}}, "nodes.labels.kubernetes.io/role", "none of kubernetes.io"),
        ({"nodes.taints": [{"key": "a b"}]}, "nodes.taints.0.key", "a Kubernetes label key"),
        ({"nodes.taints": [{"key": "a", "value": "b c"}]}, "nodes.taints.0.value", "up to 63"),
        ({"nodes.taints": [{"key": "a", "effect": "Sometimes"}]}, "nodes.taints.0.effect", "'NoSchedule'"),
        ({"nodes.taints": [{"key": "a"}, {"key": "a", "value": "b"}]}, "nodes.taints", "one taint a key and effect"),
        ({"nodes.capacity.kind": "spot"}, "nodes.capacity.kind", "'capacity-block'"),
        ({"nodes.capacity.id": "cr-0123456789abcdef0"}, "nodes.capacity.id", "empty with kind on-demand"),
        ({"nodes.capacity.kind": "odcr"}, "nodes.capacity.id", "cr- and 17 hex digits with kind odcr"),
        ({**BLOCK, "nodes.capacity.id": ""}, "nodes.capacity.id", "cr- and 17 hex digits"),
        ({**BLOCK, "nodes.capacity.id": "cr-xyz"}, "nodes.capacity.id", "cr- and 17 hex digits"),
        ({**BLOCK, "nodes.capacity.start": None}, "nodes.capacity.start", "with kind capacity-block"),
        ({**BLOCK, "nodes.capacity.end": None}, "nodes.capacity.end", "with kind capacity-block"),
        ({**BLOCK, "nodes.capacity.end": "2027-01-13T11:30:00"}, "nodes.capacity.end", "its UTC offset"),
        ({"nodes.capacity.end": "2027-01-13T11:30:00Z"}, "nodes.capacity.end", "else absent"),
        ({**BLOCK, "nodes.capacity.end": "2027-01-11T12:30:00Z"}, "nodes.capacity.end", "1 to 182 days after start"),
        ({**BLOCK, "nodes.capacity.end": "2028-01-11T11:30:00Z"}, "nodes.capacity.end", "1 to 182 days after start"),
        ({**BLOCK, **G5}, "nodes.capacity.kind", "blocks are sold for p5.48xlarge"),
        ({**BLOCK, "nodes.placement_group": True}, "nodes.placement_group", "false with a reservation"),
        ({**BLOCK, "nodes.replace_on_change": True}, "nodes.replace_on_change", "false with a Capacity Block"),
        ({"storage.compression": "ZSTD"}, "storage.compression", "'NONE' or 'LZ4'"),
        ({"storage.export_bucket": "S3://x"}, "storage.export_bucket", "an S3 bucket's name"),
        ({"storage.export_prefix": "/runs/"}, "storage.export_prefix", "without slashes at its ends"),
        ({"image.variant": "cpu"}, "image.variant", "'deploy' or 'reproduce'"),
        ({"image.base_image": "pytorch"}, "image.base_image", "repository:tag"),
        ({"image.base_image": "pytorch:latest"}, "image.base_image", "another tag than latest"),
        ({"image.base_digest": "sha256:12"}, "image.base_digest", "64 hex digits"),
        ({"image.build_compute": "small"}, "image.build_compute", "'large', 'xlarge' or '2xlarge'"),
        ({"job.namespace": "kube-system"}, "job.namespace", "none of Kubernetes' own"),
        ({"job.namespace": "Training"}, "job.namespace", "up to 63 of a-z"),
        ({"job.namespace": "a" * 64}, "job.namespace", "up to 63 of a-z"),
        ({"job.on_change": "roll"}, "job.on_change", "'replace' or 'keep'"),
        ({"job.hf_token_secret_arn": "secret"}, "job.hf_token_secret_arn", "arn:aws:secretsmanager"),
        (
            {"job.hf_token_secret_arn": "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf"},
            "job.hf_token_secret_arn",
            "a secret in us-east-1",
        ),
        ({"job.cpus": 192}, "job.cpus", "0 (all) to 190"),
        ({"job.memory_gib": 1974}, "job.memory_gib", "0 (all) to 1973 on a p5.48xlarge"),
        ({"job.memory_gib": 100, "job.memory_volume_gib": 100}, "job.memory_volume_gib", "0 (half) to 99"),
        ({"job.max_hours": 0}, "job.max_hours", "greater than 0"),
        ({"idle_guard.minutes": 5}, "idle_guard.minutes", "0 (off) or 10 to 1440"),
        ({"idle_guard.minutes": 2000}, "idle_guard.minutes", "0 (off) or 10 to 1440"),
        ({"run.parallelism.num_nodes": 4}, "run.parallelism.num_nodes", "nodes.count (2)"),
        ({"run.parallelism.ranks_per_node": 4}, "run.parallelism.ranks_per_node", "the GPUs of a p5.48xlarge (8)"),
        ({"run.parallelism.device": "cpu"}, "run.parallelism.device", "cuda on GPU nodes"),
        ({"run.run_id": "Run 1"}, "run.run_id", "up to 40 of a-z"),
        ({"run.timeouts.soft_s": 90}, "run.timeouts", "soft_s < hard_s < barrier_s"),
        ({"region_": "x"}, "region_", "legal here: account, availability_zone"),
        ({"nodes.size": 1}, "nodes.size", "legal here: ami, capacity"),
        ({"nodes.taints": [{"key": "a", "kind": "b"}]}, "nodes.taints.0.kind", "legal here: effect, key, value"),
    ],
)
def test_refused_with_field_and_legal_values(overrides: dict[str, Any], field: str, legal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(overrides)
    lines = [line for line in str(refused.value).splitlines() if line.startswith(f"{field}: ")]
    assert lines, str(refused.value)
    assert any(legal in line for line in lines), lines


@pytest.mark.parametrize("size", [1200, 2400, 4800, 7200])
def test_scratch_2_sizes(size: int) -> None:
    """F40: legal sizes pass."""
    assert with_overrides({"storage.capacity_gib": size}).storage.capacity_gib == size


@pytest.mark.parametrize("size", [0, -2400, 1000, 3600, 6000])
def test_other_sizes_are_refused(size: int) -> None:
    """F40: others are refused at synthesis, naming the legal ones."""
    with pytest.raises(ConfigError, match=r"^storage\.capacity_gib: -?\d+; legal: 1200, 2400 or a multiple of 2400"):
        with_overrides({"storage.capacity_gib": size})


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides({"idle_guard.minutes": 3, "storage.capacity_gib": 5, "cluster.kubernetes_version": "1.2"})
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("table", ["nodes", "run", "name", "region", "second_zone"])
def test_missing_table_or_field(table: str) -> None:
    with pytest.raises(ConfigError, match=f"^{table}: missing"):
        config.validate({key: value for key, value in P5.items() if key != table})


def test_existing_vpc_and_capacity_block_are_legal() -> None:
    profile = with_overrides({**VPC, **BLOCK})
    last = profile.nodes.capacity.last_moment
    assert last is not None and last.isoformat() == "2027-01-13T10:55:00+00:00"


@pytest.mark.parametrize("ami", ["ami-0123456789abcdef0", AMI.format("1.35", IMAGE)])
def test_image_reference_is_plain(ami: str) -> None:
    reference = with_overrides({"nodes.ami": ami}).nodes.image_reference
    assert reference == (ami if ami.startswith("ami-") else f"resolve:ssm:{ami}")


def test_taint_and_toleration_agree() -> None:
    taint = Taint(key="team", value="llm", effect="NoExecute")
    assert taint.kubelet_flag == "team=llm:NoExecute"
    assert taint.toleration == {"key": "team", "operator": "Equal", "value": "llm", "effect": "NoExecute"}


@pytest.mark.parametrize("instance", CATALOGUE.values(), ids=CATALOGUE)
def test_default_pod_fits_its_node(instance: Any) -> None:
    layout = instance.efa_layouts[0]
    shape = {
        "nodes.instance_type": instance.name,
        "nodes.efa_layout": layout,
        "run.parallelism.ranks_per_node": instance.gpus,
    }
    profile = with_overrides(shape)
    assert 0 < profile.pod_memory_volume_gib < profile.pod_memory_gib < instance.memory_gib
    assert 0 < profile.pod_cpus < instance.vcpus
    assert (instance.hugepages_mib > instance.pod_hugepages_mib) == (instance.efa_cards > 0)


def test_profile_by_path_and_by_name(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((config.PROFILES / "p5.toml").read_text())
    assert config.load(str(path)) == config.load("p5")
    with pytest.raises(ConfigError, match=r"profile: 'p6'; legal: .*p5.*, or the path of a \.toml file"):
        config.load("p6")
    with pytest.raises(ConfigError, match="No such file"):
        config.load(str(tmp_path / "absent.toml"))


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text((config.PROFILES / "p5.toml").read_text().replace("1200", "1300"))
    with pytest.raises(ConfigError, match=r"^profile .*bad\.toml: storage\.capacity_gib: 1300"):
        config.load(str(path))
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        config.load(str(path))


class Node:
    def __init__(self, value: object) -> None:
        self.value = value

    def try_get_context(self, key: str) -> object:
        return self.value if key == "profile" else None


def test_context_chooses_the_profile() -> None:
    assert config.from_context(Node(None)).name == "p5"
    assert config.from_context(Node("g5")).name == "g5"


def test_nothing_changes_a_profile() -> None:
    profile = config.load("p5")
    with pytest.raises(ValueError, match="frozen"):
        profile.nodes.count = 3  # type: ignore[misc]
