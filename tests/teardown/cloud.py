"""A deployed application in this process: the synthesized templates over moto, the stub API and the real handlers.

Deleting a resource does what AWS would: a custom resource runs its own handler, found through the template, and the
rest is checked against what still stands on it. ``Violation`` is what a wrong order breaks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import boto3

from stacks.handlers import gpu_capacity
from tests.graph import Graph, Key
from tests.stacks.handler_world import World, make_group
from tests.synth import Synthesis

MACHINERY = ("AWS::Lambda::Function", "AWS::IAM::Role", "AWS::IAM::Policy", "AWS::StepFunctions::StateMachine")
"""Without these a custom resource gets no answer."""
BASE_DIGEST = "sha256:" + "ab" * 32
IMAGE_DIGEST = "sha256:" + "cd" * 32


class Violation(Exception):
    """AWS would refuse this deletion, or something would be lost by it."""


class Cloud:
    """``present`` holds what is deployed. Everything else is in ``world``."""

    def __init__(self, synthesis: Synthesis, graph: Graph, world: World) -> None:
        self.synthesis, self.graph, self.world = synthesis, graph, world
        self.present: set[Key] = set()
        self.deleted: list[Key] = []
        self.export_lifecycle = "SUCCEEDED"
        self.allow_data_loss = True
        """As deployed; the profiles' default is false."""
        self.tasks: list[dict[str, Any]] = []
        world.aws.update(
            {
                "BatchGetImage": lambda query: {"images": [{"imageId": {"imageDigest": BASE_DIGEST}}]},
                "DescribeImages": lambda query: {"imageDetails": [{"imageDigest": IMAGE_DIGEST}]},
                "ListBuildsForProject": lambda query: {"ids": []},
                "DescribeFileSystems": lambda query: {"FileSystems": [{}]},
                "DescribeDataRepositoryTasks": lambda query: {"DataRepositoryTasks": self.tasks},
                "CreateDataRepositoryTask": self._start_export,
            }
        )

    def _start_export(self, query: dict[str, Any]) -> dict[str, Any]:
        task = {
            "TaskId": "task-1",
            "Type": "EXPORT_TO_REPOSITORY",
            "Lifecycle": self.export_lifecycle,
            "CreationTime": datetime.fromtimestamp(self.world.time_s, UTC),
            "FailureDetails": {"Message": "the bucket is gone"},
        }
        self.tasks.append(task)
        return {}

    # -- the templates

    def resource(self, key: Key) -> dict[str, Any]:
        found = self.synthesis.templates[key[0]]["Resources"][key[1]]
        assert isinstance(found, dict)
        return found

    def properties(self, key: Key) -> dict[str, Any]:
        """With references resolved to made-up but stable values."""
        found = self._resolve(key[0], self.resource(key).get("Properties", {}))
        assert isinstance(found, dict)
        if "AllowDataLoss" in found:
            found["AllowDataLoss"] = str(self.allow_data_loss).lower()
        return found

    def _resolve(self, part: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._resolve(part, item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, inner),) = value.items()
            if name == "Ref":
                return self._name((part, inner))
            if name == "Fn::GetAtt":
                return f"{inner[0]}.{inner[1]}"
            if name == "Fn::ImportValue":
                return self._resolve(*self.exports[inner])
            if name == "Fn::Join":
                return inner[0].join(str(self._resolve(part, item)) for item in inner[1])
        return {key: self._resolve(part, item) for key, item in value.items()}

    @functools.cached_property
    def exports(self) -> dict[str, tuple[str, Any]]:
        return {
            output["Export"]["Name"]: (part, output["Value"])
            for part, template in self.synthesis.templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    def _name(self, key: Key) -> str:
        """Physical id: the name that the template gives, else the logical id."""
        if key not in self.graph.types:
            return key[1]
        fields = {"AWS::EKS::Cluster": "Name", "AWS::AutoScaling::AutoScalingGroup": "AutoScalingGroupName"}
        field = fields.get(self.graph.types[key])
        return str(self.resource(key)["Properties"][field]) if field else key[1]

    def entry(self, key: Key) -> Key | None:
        """The function that CloudFormation calls for a custom resource; None for one of another stack."""
        token = self.resource(key)["Properties"]["ServiceToken"]
        return (key[0], token["Fn::GetAtt"][0]) if "Fn::GetAtt" in token else None

    def handler(self, key: Key) -> ModuleType | None:
        """The module behind a custom resource of ours, by way of its provider's functions; None for CDK's own."""
        entry = self.entry(key)
        if not entry:
            return None
        variables = self.resource(entry)["Properties"]["Environment"]["Variables"]
        function = (key[0], variables["USER_ON_EVENT_FUNCTION_ARN"]["Fn::GetAtt"][0])
        package, module, name = str(self.resource(function)["Properties"]["Handler"]).split(".")
        assert (package, name) == ("handlers", "on_event")
        return importlib.import_module(f"stacks.handlers.{module}")

    # -- deploy

    def deploy(self, order: list[Key]) -> None:
        """``order``: of creation. Custom resources of ours are made by their handlers."""
        for key in order:
            kind = self.graph.types[key]
            self.present.add(key)
            if kind == "AWS::EKS::Cluster":
                boto3.client("eks").create_cluster(
                    name=self._name(key),
                    roleArn="arn:aws:iam::123456789012:role/c",
                    resourcesVpcConfig={"subnetIds": ["subnet-1"]},
                )
            elif kind == "AWS::AutoScaling::AutoScalingGroup":
                make_group(self._name(key), max_size=int(self.properties(key)["MaxSize"]))
            elif kind.startswith("Custom::") and self.handler(key):
                self._request("Create", key)

    def _request(self, kind: str, key: Key) -> None:
        module = self.handler(key)
        assert module
        self.world.run(module, self.world.request(kind, self.properties(key)), poll_s=60.0)

    # -- what stands

    def of_type(self, kind: str, part: str = "") -> list[Key]:
        return sorted(key for key in self.present if self.graph.types[key] == kind and part in ("", key[0]))

    def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.world.kube.of_kind("Pod")]

    def volumes(self) -> list[str]:
        return [
            item["metadata"]["name"]
            for kind in ("PersistentVolume", "PersistentVolumeClaim")
            for item in self.world.kube.of_kind(kind)
        ]

    def instances(self) -> list[str]:
        groups = boto3.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        return [str(instance["InstanceId"]) for group in groups for instance in group["Instances"]]

    def cluster_access(self, key: Key) -> list[Key]:
        """Access entries that a resource depends on."""
        return [needed for needed in self.graph.edges[key] if self.graph.types[needed] == "AWS::EKS::AccessEntry"]

    # -- delete

    def delete(self, key: Key) -> None:
        """Raises Violation, or what the resource's handler raises; then the resource stays."""
        kind = self.graph.types[key]
        for reason in self._against(key, kind):
            raise Violation(f"{kind} {key[1]}: {reason}")
        if kind.startswith("Custom::"):
            self._run(key)
        elif kind == "AWS::EKS::Cluster":
            boto3.client("eks").delete_cluster(name=self._name(key))
        elif kind == "AWS::AutoScaling::AutoScalingGroup":
            boto3.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=self._name(key))
        elif kind == "AWS::EKS::AccessEntry" and key[0] == "training":
            self.world.kube.unauthorized |= any(key in self.cluster_access(other) for other in self._ours())
        elif kind == "AWS::EC2::SecurityGroupIngress" and key[0] == "training":
            self.world.kube.down = True
        self.present.discard(key)
        self.deleted.append(key)

    def _ours(self) -> list[Key]:
        return [key for key in self.graph.types if self.graph.types[key] == "Custom::KubernetesObjects"]

    def _run(self, key: Key) -> None:
        entry = self.entry(key)
        needed = sorted(self._closure(entry)) if entry else []
        missing = [part for part in needed if self.graph.types[part] in MACHINERY and part not in self.present]
        if missing:
            raise Violation(f"nobody answers for {key[1]}: {missing[0][1]} is gone")
        if self.handler(key):
            self._request("Delete", key)

    def _closure(self, key: Key) -> set[Key]:
        """The function and all that it needs in its stack."""
        found, waiting = {key}, [key]
        while waiting:
            for needed in self.graph.edges[waiting.pop()]:
                if needed not in found and needed[0] == key[0]:
                    found.add(needed)
                    waiting.append(needed)
        return found

    def _against(self, key: Key, kind: str) -> Iterator[str]:
        """What forbids the deletion of a resource of this kind now."""
        rule: dict[str, Callable[[Key], Iterator[str]]] = {
            "Custom::DataLossGuard": self._guard,
            "Custom::FileSystemExport": self._export,
            "Custom::GpuCapacity": self._nodes_leave,
            "Custom::AWSCDK-EKS-HelmChart": self._plugin,
            "AWS::AutoScaling::AutoScalingGroup": self._group,
            "AWS::EC2::LaunchTemplate": self._template,
            "AWS::IAM::InstanceProfile": self._template,
            "AWS::EKS::AccessEntry": self._entry,
            "AWS::FSx::FileSystem": self._file_system,
            "AWS::FSx::DataRepositoryAssociation": self._association,
            "AWS::EC2::SecurityGroupIngress": self._rule,
            "AWS::EC2::SecurityGroup": self._rule,
            "AWS::ECR::Repository": self._repository,
            "AWS::EKS::Addon": self._addon,
            "AWS::EKS::Nodegroup": self._system_nodes,
            "AWS::EKS::Cluster": self._cluster,
            "AWS::EC2::Subnet": self._network,
            "AWS::EC2::VPC": self._network,
            "AWS::EC2::NatGateway": self._network,
        }
        yield from rule[kind](key) if kind in rule else ()

    def _guard(self, key: Key) -> Iterator[str]:
        if not self.world.kube.of_kind("Job"):
            yield "asked when the Job is ended already"

    def _export(self, key: Key) -> Iterator[str]:
        yield from (f"pod {name} still writes" for name in self.pods())
        if not self.volumes():
            yield "the claim is gone before the export"

    def _nodes_leave(self, key: Key) -> Iterator[str]:
        yield from (f"pod {name} would lose its node" for name in self.pods())
        yield from (f"{name} could not be unmounted" for name in self.volumes())

    def _plugin(self, key: Key) -> Iterator[str]:
        yield from (f"pod {name} would lose its devices" for name in self.pods())
        handlers = self.synthesis.stacks.cluster.cluster.node.find_child("ClusterAdminRoleAccess")
        if ("cluster", self.synthesis.logical_id(handlers)) not in self.present:
            yield "kubectl's access entry is gone"
        if not self.of_type("AWS::EKS::Cluster"):
            yield "its cluster is gone"

    def _group(self, key: Key) -> Iterator[str]:
        yield from (f"instance {name} runs" for name in self.instances())

    def _template(self, key: Key) -> Iterator[str]:
        if key[0] == "gpu-nodes" and self.of_type("AWS::AutoScaling::AutoScalingGroup"):
            yield "the Auto Scaling group uses it"

    def _entry(self, key: Key) -> Iterator[str]:
        if key[0] == "gpu-nodes" and self.of_type("AWS::AutoScaling::AutoScalingGroup"):
            yield "nodes could neither join nor leave"

    def _file_system(self, key: Key) -> Iterator[str]:
        yield from (f"pod {name} has it mounted" for name in self.pods())
        yield from (f"{name} points to it" for name in self.volumes())
        yield from (f"instance {name} has it mounted" for name in self.instances())
        yield from (f"{other[1]} has not exported" for other in self.of_type("Custom::FileSystemExport"))

    def _association(self, key: Key) -> Iterator[str]:
        yield from (f"{other[1]} has not exported" for other in self.of_type("Custom::FileSystemExport"))

    def _rule(self, key: Key) -> Iterator[str]:
        if key[0] == "storage" and self.of_type("AWS::FSx::FileSystem"):
            yield "the file system answers through it"
        if key[0] == "gpu-nodes" and self.of_type("AWS::AutoScaling::AutoScalingGroup"):
            yield "the nodes' interfaces use it"

    def _repository(self, key: Key) -> Iterator[str]:
        yield from (f"pod {name} runs its image" for name in self.pods())
        yield from (f"{other[1]} goes before it" for other in self.of_type("AWS::FSx::FileSystem"))

    def _addon(self, key: Key) -> Iterator[str]:
        name = self.properties(key)["AddonName"]
        if name == "aws-fsx-csi-driver":
            yield from (f"pod {pod} could not be unmounted" for pod in self.pods())
            yield from (f"{volume} could not be released" for volume in self.volumes())

    def _system_nodes(self, key: Key) -> Iterator[str]:
        yield from (f"addon {other[1]} runs there" for other in self.of_type("AWS::EKS::Addon"))
        yield from (f"{other[1]} runs there" for other in self.of_type("Custom::AWSCDK-EKS-HelmChart"))

    def _cluster(self, key: Key) -> Iterator[str]:
        for kind in ("AWS::EKS::Nodegroup", "AWS::EKS::Addon", "AWS::EKS::AccessEntry"):
            yield from (f"{other[1]} is part of it" for other in self.of_type(kind))
        yield from (f"{other[1]} has nodes in it" for other in self.of_type("AWS::AutoScaling::AutoScalingGroup"))
        yield from (f"{item} is in it" for item in self.world.kube.objects)

    def _network(self, key: Key) -> Iterator[str]:
        for kind in ("AWS::EKS::Cluster", "AWS::FSx::FileSystem", "AWS::AutoScaling::AutoScalingGroup"):
            yield from (f"{other[1]} has interfaces in it" for other in self.of_type(kind))
        for function in self.of_type("AWS::Lambda::Function"):
            if "VpcConfig" in self.resource(function)["Properties"]:
                yield f"{function[1]} has interfaces in it"

    def capacity(self) -> dict[str, Any] | None:
        """The group as the handler sees it."""
        (key,) = self.graph.of_type("AWS::AutoScaling::AutoScalingGroup")
        return gpu_capacity.group(self._name(key))
