"""What handler tests stand on: moto's AWS, the stub Kubernetes API, a clock that nobody waits for."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from stacks.handlers import kube, waiting
from tests.stacks.kube_stub import StubApi

CLUSTER = "train"
POLL_S = 10.0
FRAMEWORK_S = 3540.0
"""constructs/provider.py PROVIDER_TIMEOUT."""
START = datetime(2026, 6, 1, 12, 0, tzinfo=UTC).timestamp()


class NeverEnded(AssertionError):
    """The provider framework would have given up: the handler gave no reason in time."""


class World:
    """One region, one cluster. ``aws`` replaces operations that moto lacks, or makes them fail."""

    def __init__(self) -> None:
        self.time_s = START
        self.kube = StubApi(lambda: self.time_s)
        self.aws: dict[str, Callable[[dict[str, Any]], Any]] = {
            "DescribeScalingActivities": self._activities,
            "DescribeStacks": lambda query: {"Stacks": [{"StackStatus": self.stack_status}]},
        }
        self.stack_status = "DELETE_IN_PROGRESS"
        self.calls: list[str] = []
        self.activities: list[dict[str, Any]] = []
        self._num_requests = 0

    def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s

    def _activities(self, query: dict[str, Any]) -> dict[str, Any]:
        return {"Activities": self.activities}

    # -- the provider framework

    def request(self, kind: str, properties: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
        """CloudFormation's event; every value is text, as CloudFormation makes it."""
        self._num_requests += 1
        event: dict[str, Any] = {
            "RequestType": kind,
            "RequestId": f"request-{self._num_requests}",
            "LogicalResourceId": "Resource",
            "StackId": "arn:aws:cloudformation:us-east-1:123456789012:stack/training/1",
            "ResourceProperties": _texts(properties),
        }
        if kind != "Create":
            event["PhysicalResourceId"] = "to-be-overwritten"
        if old is not None:
            event["OldResourceProperties"] = _texts(old)
        return event

    def begin(self, module: ModuleType, event: dict[str, Any]) -> dict[str, Any]:
        """on_event, and the event that every is_complete then gets."""
        answer = json.loads(json.dumps(module.on_event(event, None) or {}))
        assert answer["PhysicalResourceId"]
        assert event["RequestType"] != "Delete" or answer["PhysicalResourceId"] == event["PhysicalResourceId"]
        return {**event, **answer}

    def step(self, module: ModuleType, event: dict[str, Any]) -> dict[str, Any] | None:
        """One is_complete; its attributes when complete, else None."""
        answer = json.loads(json.dumps(module.is_complete(event, None)))
        if answer["IsComplete"]:
            return dict(answer.get("Data", {}))
        assert "Data" not in answer, "the framework refuses Data before the end"
        return None

    def run(self, module: ModuleType, event: dict[str, Any], poll_s: float = POLL_S) -> dict[str, Any]:
        """The whole request, as the framework would do it. Raises what the handler raises, and NeverEnded."""
        event = self.begin(module, event)
        ends = self.time_s + FRAMEWORK_S
        while self.time_s < ends:
            data = self.step(module, event)
            if data is not None:
                assert len(json.dumps(data)) < 3500, "CloudFormation takes 4096 bytes"
                return data
            self.time_s += poll_s
        raise NeverEnded(event["RequestType"])


def _texts(properties: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, list) else str(value) for key, value in properties.items()}


def refuse(code: str, message: str = "no") -> Callable[[dict[str, Any]], Any]:
    """For ``World.aws``: the operation answers with this error."""

    def fail(query: dict[str, Any]) -> Any:
        raise ClientError({"Error": {"Code": code, "Message": message}}, "Operation")

    return fail


@functools.cache
def session() -> boto3.Session:
    """One for all tests, and the handlers' clients with it: reading the service models takes half a second."""
    waiting.client.cache_clear()
    return boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-east-1")


def handler_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """For a fixture: ``yield from handler_world(monkeypatch)``."""
    for key, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_SESSION_TOKEN": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    world = World()
    with mock_aws():
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", session())
        monkeypatch.setattr(waiting, "session", session)
        original = botocore.client.BaseClient._make_api_call

        def call(self: Any, operation: str, query: dict[str, Any]) -> Any:
            world.calls.append(operation)
            if operation in world.aws:
                return world.aws[operation](query)
            answer = original(self, operation, query)
            if operation == "DescribeCluster":  # moto makes up characters, which need not be base64 of text
                answer["cluster"]["certificateAuthority"]["data"] = base64.b64encode(b"certificate").decode()
            return answer

        monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
        monkeypatch.setattr(waiting, "now", lambda: world.time_s)
        monkeypatch.setattr(waiting, "sleep", world.sleep)
        monkeypatch.setattr(kube, "send", world.kube.send)
        # Loads the list of partitions again for every cluster.
        monkeypatch.setattr("moto.eks.models.validate_role_arn", lambda arn: None)
        yield world


def make_cluster(name: str = CLUSTER) -> None:
    boto3.client("eks").create_cluster(
        name=name,
        roleArn="arn:aws:iam::123456789012:role/cluster",
        resourcesVpcConfig={"subnetIds": ["subnet-1"]},
    )


def make_group(name: str = "gpus", *, max_size: int = 4) -> None:
    """An Auto Scaling group with no instances."""
    ec2 = boto3.client("ec2")
    subnet = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"][0]
    ec2.create_launch_template(
        LaunchTemplateName=f"{name}-template",
        LaunchTemplateData={"InstanceType": "p5.48xlarge", "ImageId": "ami-12345678"},
    )
    boto3.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate={"LaunchTemplateName": f"{name}-template", "Version": "1"},
        MinSize=0,
        MaxSize=max_size,
        VPCZoneIdentifier=subnet["SubnetId"],
    )
