"""The custom resource constructs: bounded, with no more rights than they need, and what they refuse."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from aws_cdk import App, Duration, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_eks_v2 as eks

from stacks.constructs.export import DataLossGuard, FileSystemExport
from stacks.constructs.gpu_capacity import GpuCapacity
from stacks.constructs.idle_guard import IdleGuard
from stacks.constructs.image_build import ImageBuild
from stacks.constructs.kubernetes_objects import JobGate, KubernetesObjects, KubernetesProvider
from stacks.constructs.provider import HANDLERS, handler_network

GROUP = "nvrx-test-gpu"
LABELS = {"app.kubernetes.io/name": "nvrx-eks"}
DIGEST = "ubuntu@sha256:" + "ab" * 32
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "training"}}
HOUR_S = 3600
pytestmark = pytest.mark.timeout(300)


class Parts:
    """A stack with a cluster known by its attributes, in a VPC known by its."""

    def __init__(self, app: App | None = None) -> None:
        self.stack = Stack(app or App(), "Test")
        self.vpc = ec2.Vpc.from_vpc_attributes(
            self.stack, "Vpc", vpc_id="vpc-1", availability_zones=["us-east-1a"], private_subnet_ids=["subnet-1"]
        )
        self.cluster = cast(
            eks.ICluster,
            eks.Cluster.from_cluster_attributes(
                self.stack, "Cluster", cluster_name="test", cluster_security_group_id="sg-1", vpc=self.vpc
            ),
        )
        self.repository = ecr.Repository(self.stack, "Repository")


@functools.cache
def synthesized() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The template of all constructs in a private network, and the files of each asset."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as context:
        (Path(context) / "Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
        app = App(outdir=folder)
        parts = Parts(app)
        stack = parts.stack
        subnets = parts.vpc.private_subnets
        network = handler_network(stack, "Network", cluster=parts.cluster, vpc=parts.vpc, subnets=subnets)
        provider = KubernetesProvider(stack, "Kubernetes", cluster=parts.cluster, network=network)
        gate = JobGate(namespace="training", selector=LABELS)
        KubernetesObjects(stack, "Objects", provider=provider, objects=[NAMESPACE], jobs=gate)
        GpuCapacity(stack, "Capacity", auto_scaling_group_name=GROUP, num_nodes=2)
        FileSystemExport(stack, "Export", file_system_id="fs-1", paths=["runs"])
        DataLossGuard(stack, "Guard", allow_data_loss=False)
        guard: dict[str, Any] = {"namespace": "training", "selector": LABELS, "idle_minutes": 30, "network": network}
        IdleGuard(stack, "Idle", cluster=parts.cluster, auto_scaling_group_name=GROUP, **guard)
        base = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.9"
        ImageBuild(
            stack, "Image", repository=parts.repository, context=Path(context), base_image=base, dockerfile="Dockerfile"
        )
        app.synth()
        files = {
            str(path.relative_to(folder)): sorted(str(item.relative_to(path)) for item in path.rglob("*.*"))
            for path in Path(folder).glob("asset.*")
            if path.is_dir()
        }
        template: dict[str, Any] = json.loads((Path(folder) / "Test.template.json").read_text())
    return template, files


def of_type(kind: str) -> dict[str, dict[str, Any]]:
    resources = synthesized()[0]["Resources"]
    return {id: item for id, item in resources.items() if item["Type"] == kind}


def custom() -> dict[str, dict[str, Any]]:
    resources = synthesized()[0]["Resources"]
    return {id: item for id, item in resources.items() if item["Type"].startswith("Custom::")}


def handlers() -> dict[str, dict[str, Any]]:
    found = of_type("AWS::Lambda::Function")
    return {id: item for id, item in found.items() if item["Properties"]["Handler"].startswith("handlers.")}


def test_every_wait_ends_with_a_reason_before_its_provider_and_its_stack_do() -> None:
    assert len(custom()) == 5
    for item in custom().values():
        found = item["Properties"]
        waits = [int(value) for key, value in found.items() if key.endswith("Seconds")]
        assert int(found["ServiceTimeout"]) <= HOUR_S
        assert all(0 < wait <= 3300 for wait in waits)
    for machine in of_type("AWS::StepFunctions::StateMachine").values():
        text = json.dumps(machine["Properties"]["DefinitionString"]).replace("\\", "")
        (interval,) = {int(part.split(",")[0]) for part in text.split('"IntervalSeconds":')[1:]}
        (attempts,) = {int(part.split(",")[0]) for part in text.split('"MaxAttempts":')[1:]}
        assert 3300 < interval * attempts <= HOUR_S


def test_handlers_are_named_as_they_are() -> None:
    assert len(handlers()) == 11
    for item in handlers().values():
        _, module, name = item["Properties"]["Handler"].split(".")
        assert callable(getattr(importlib.import_module(f"stacks.handlers.{module}"), name))
        assert item["Properties"]["Runtime"] == "python3.13"
        assert item["Properties"]["Timeout"] >= 180, "retries of the API client may take 100 s, AWS's as long"


def test_only_what_talks_to_the_private_api_is_in_the_vpc() -> None:
    inside = {id: item for id, item in handlers().items() if "VpcConfig" in item["Properties"]}
    assert {item["Properties"]["Handler"].split(".")[1] for item in inside.values()} == {
        "kubernetes_objects",
        "idle_guard",
    }
    assert len(inside) == 2
    (rule,) = of_type("AWS::EC2::SecurityGroupIngress").values()
    assert (rule["Properties"]["GroupId"], rule["Properties"]["FromPort"]) == ("sg-1", 443)


def test_the_functions_code_is_the_handlers_and_nothing_else() -> None:
    expected = sorted(f"handlers/{path.name}" for path in HANDLERS.glob("*.py"))
    assert expected in list(synthesized()[1].values())


def test_handlers_import_boto3_and_the_standard_library_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"boto3", "botocore"}
    for path in HANDLERS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_handlers_roles_name_actions_and_write_to_what_they_name() -> None:
    roles = [key for item in handlers().values() for key in [item["Properties"]["Role"]["Fn::GetAtt"][0]]]
    checked = 0
    for policy in of_type("AWS::IAM::Policy").values():
        if policy["Properties"]["Roles"][0]["Ref"] not in roles:
            continue
        for statement in policy["Properties"]["PolicyDocument"]["Statement"]:
            actions, resources = statement["Action"], statement["Resource"]
            actions = actions if isinstance(actions, list) else [actions]
            assert not [action for action in actions if "*" in action]
            if resources == "*":
                assert all(action.split(":")[1].startswith("Describe") for action in actions)
            checked += 1
    assert checked >= 12


def test_access_to_the_cluster_is_as_narrow_as_eks_offers() -> None:
    found = {}
    for item in of_type("AWS::EKS::AccessEntry").values():
        (policy,) = item["Properties"]["AccessPolicies"]
        name = json.dumps(policy["PolicyArn"]).split("/")[-1].split('"')[0]
        found[name] = policy["AccessScope"]
    assert found == {
        "AmazonEKSClusterAdminPolicy": {"Type": "cluster"},
        "AmazonEKSViewPolicy": {"Type": "namespace", "Namespaces": ["training"]},
    }


def test_callers_of_the_api_depend_on_their_access_and_their_way_in() -> None:
    """F43: what they call with must outlive them."""
    entries = set(of_type("AWS::EKS::AccessEntry"))
    (rule,) = of_type("AWS::EC2::SecurityGroupIngress")
    callers = [*of_type("Custom::KubernetesObjects").values(), *of_type("AWS::Events::Rule").values()]
    assert len(callers) == 2
    for item in callers:
        assert entries & set(item["DependsOn"])
        assert rule in item["DependsOn"]


def test_nothing_of_the_handlers_outlives_the_stack() -> None:
    for id, item in of_type("AWS::Logs::LogGroup").items():
        build = id.startswith("ImageLogs")  # read after a roll-back; the stacks' base class decides there
        assert build or item["DeletionPolicy"] == "Delete", id


def test_the_build_is_bounded_and_takes_its_base_by_digest() -> None:
    (project,) = of_type("AWS::CodeBuild::Project").values()
    assert project["Properties"]["TimeoutInMinutes"] == 50
    commands = json.dumps(project["Properties"]["Source"]["BuildSpec"])
    assert "BASE_IMAGE" in commands
    assert "docker push" in commands


# -- what they refuse


def test_kubernetes_objects_refuse_what_the_handler_cannot_do() -> None:
    parts = Parts()
    provider = KubernetesProvider(parts.stack, "Kubernetes", cluster=parts.cluster)

    def make(id: str, **options: Any) -> None:
        KubernetesObjects(parts.stack, id, provider=provider, **{"objects": [NAMESPACE], **options})

    with pytest.raises(ValueError, match=r"legal: objects with apiVersion, kind and metadata\.name"):
        make("NoName", objects=[{"apiVersion": "v1", "kind": "Namespace", "metadata": {}}])
    with pytest.raises(ValueError, match=r"kind: 'Unheard'; legal: .*Job"):
        make("Kind", objects=[{"apiVersion": "v1", "kind": "Unheard", "metadata": {"name": "a"}}])
    with pytest.raises(ValueError, match="every Job would be deleted"):
        make("Gate", jobs=JobGate(namespace="training", selector={}))
    with pytest.raises(ValueError, match="delete_timeout: 3600 s; legal: 1 to 3300 s"):
        make("Long", delete_timeout=Duration.minutes(60))
    pod = {"terminationGracePeriodSeconds": 2400}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"template": {"spec": pod}}}
    with pytest.raises(ValueError, match=r"create_timeout: 1800 s; legal: more than .* grace \(2400 s\)"):
        make("Grace", objects=[job])


def test_capacity_and_idle_guard_refuse_senseless_numbers() -> None:
    parts = Parts()
    with pytest.raises(ValueError, match="num_nodes: -1; legal: 0 or more"):
        GpuCapacity(parts.stack, "Capacity", auto_scaling_group_name=GROUP, num_nodes=-1)
    with pytest.raises(ValueError, match="idle_minutes: 5; legal: 10 or more"):
        IdleGuard(
            parts.stack,
            "Idle",
            cluster=parts.cluster,
            auto_scaling_group_name=GROUP,
            namespace="training",
            selector=LABELS,
            idle_minutes=5,
        )


@pytest.mark.parametrize("base", ["ubuntu:24.04", "ubuntu", "763104351884.dkr.ecr.us-east-1.amazonaws.com/base"])
def test_a_base_without_a_digest_to_be_found_is_refused(base: str, tmp_path: Path) -> None:
    parts = Parts()
    with pytest.raises(ValueError, match=r"base_image: .*; legal: name@sha256"):
        ImageBuild(parts.stack, "Image", repository=parts.repository, context=tmp_path, base_image=base)


def test_build_arguments_that_a_shell_would_read_are_refused(tmp_path: Path) -> None:
    parts = Parts()
    with pytest.raises(ValueError, match=r"build_args\.VARIANT"):
        ImageBuild(
            parts.stack,
            "Image",
            repository=parts.repository,
            context=tmp_path,
            base_image=DIGEST,
            build_args={"VARIANT": "a; rm"},
        )


def test_the_context_hash_follows_files_and_arguments_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "notes.md").write_text("left out\n")

    def context_hash(**options: Any) -> str:
        parts = Parts()
        made: dict[str, Any] = {"context": tmp_path, "base_image": DIGEST, "exclude": ["*.md"], **options}
        return ImageBuild(parts.stack, "Image", repository=parts.repository, **made).context_hash

    first = context_hash()
    (tmp_path / "notes.md").write_text("changed\n")
    assert context_hash() == first
    assert context_hash(build_args={"VARIANT": "cpu"}) != first
    assert context_hash(dockerfile="other/Dockerfile") != first
    (tmp_path / "Dockerfile").write_text("FROM scratch\nRUN true\n")
    assert context_hash() != first
