"""The handlers of the image build, the export and the data-loss guard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest

from stacks.handlers import data_loss_guard, export, image_build
from stacks.handlers.waiting import Failed
from tests.stacks.handler_world import World, handler_world, refuse

REPOSITORY = "nvrx-eks/p5"
BASE_DIGEST = "sha256:" + "ab" * 32
CONTEXT = "0123456789abcdef" * 4
TAG = "0123456789abcdef-abababababab"
BUILD = {
    "ProjectName": "image",
    "RepositoryName": REPOSITORY,
    "ContextHash": CONTEXT,
    "BaseImage": f"ubuntu@{BASE_DIGEST}",
    "BaseDigest": BASE_DIGEST,
    "BuildSeconds": 3000,
}


class Builds:
    """CodeBuild: builds that run until the test says otherwise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.builds: list[dict[str, Any]] = []
        world.aws["StartBuild"] = self._start
        world.aws["StopBuild"] = self._stop
        world.aws["BatchGetBuilds"] = lambda query: {"builds": [b for b in self.builds if b["id"] in query["ids"]]}
        world.aws["ListBuildsForProject"] = lambda query: {"ids": [b["id"] for b in reversed(self.builds)]}
        world.aws["GetLogEvents"] = lambda query: {"events": [{"message": "step 9\n"}, {"message": "no space left\n"}]}

    def _start(self, query: dict[str, Any]) -> dict[str, Any]:
        for build in self.builds:
            if build["token"] == query["idempotencyToken"]:
                return {"build": build}
        build = {
            "id": f"image:{len(self.builds)}",
            "token": query["idempotencyToken"],
            "buildStatus": "IN_PROGRESS",
            "environment": {"environmentVariables": query["environmentVariablesOverride"]},
            "logs": {"groupName": "image-logs", "streamName": "one"},
            "phases": [],
        }
        self.builds.append(build)
        return {"build": build}

    def _stop(self, query: dict[str, Any]) -> dict[str, Any]:
        next(b for b in self.builds if b["id"] == query["id"])["buildStatus"] = "STOPPED"
        return {}

    def fail(self) -> None:
        context = {"statusCode": "COMMAND_EXECUTION_ERROR", "message": "docker build: exit status 1"}
        self.builds[-1]["phases"] = [{"phaseType": "BUILD", "phaseStatus": "FAILED", "contexts": [context]}]
        self.builds[-1]["buildStatus"] = "FAILED"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for world in handler_world(monkeypatch):
        boto3.client("ecr").create_repository(repositoryName=REPOSITORY)
        yield world


@pytest.fixture
def builds(world: World) -> Builds:
    return Builds(world)


def push(tag: str = TAG, repository: str = REPOSITORY) -> str:
    media = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = {"schemaVersion": 2, "mediaType": media, "config": {"digest": tag}, "layers": []}
    ecr = boto3.client("ecr")
    pushed = ecr.put_image(repositoryName=repository, imageManifest=json.dumps(manifest), imageTag=tag)
    return str(pushed["image"]["imageId"]["imageDigest"])


def test_builds_once_and_gives_the_digest(world: World, builds: Builds) -> None:
    event = world.begin(image_build, world.request("Create", BUILD))
    assert world.step(image_build, event) is None
    digest = push()
    builds.builds[0]["buildStatus"] = "SUCCEEDED"
    assert world.step(image_build, event) == {"Tag": TAG, "Digest": digest}
    variables = builds.builds[0]["environment"]["environmentVariables"]
    assert {item["name"]: item["value"] for item in variables} == {"TAG": TAG, "BASE_IMAGE": f"ubuntu@{BASE_DIGEST}"}


def test_an_existing_tag_is_success_without_a_build(world: World, builds: Builds) -> None:
    digest = push()
    assert world.run(image_build, world.request("Create", BUILD))["Digest"] == digest
    assert builds.builds == []


def test_a_repeated_event_starts_no_second_build(world: World, builds: Builds) -> None:
    request = world.request("Create", BUILD)
    first, second = world.begin(image_build, request), world.begin(image_build, request)
    assert first["BuildId"] == second["BuildId"]
    assert len(builds.builds) == 1


def test_a_failed_build_points_to_phase_and_log(world: World, builds: Builds) -> None:
    event = world.begin(image_build, world.request("Create", BUILD))
    builds.fail()
    with pytest.raises(
        Failed, match=r"failed: BUILD docker build: exit status 1; log: aws logs tail image-logs.*no space left"
    ):
        world.step(image_build, event)


def test_a_build_that_lost_the_race_for_the_tag_is_success(world: World, builds: Builds) -> None:
    event = world.begin(image_build, world.request("Create", BUILD))
    push()
    builds.fail()
    assert world.step(image_build, event) is not None


def test_success_without_a_pushed_tag_is_an_error(world: World, builds: Builds) -> None:
    event = world.begin(image_build, world.request("Create", BUILD))
    builds.builds[0]["buildStatus"] = "SUCCEEDED"
    with pytest.raises(Failed, match=f"pushed no {TAG}"):
        world.step(image_build, event)


def test_a_build_without_end_is_stopped_in_time(world: World, builds: Builds) -> None:
    with pytest.raises(Failed, match="was stopped after"):
        world.run(image_build, world.request("Create", BUILD), poll_s=30.0)
    assert builds.builds[0]["buildStatus"] == "STOPPED"


def test_delete_stops_what_runs(world: World, builds: Builds) -> None:
    world.begin(image_build, world.request("Create", BUILD))
    world.run(image_build, world.request("Delete", BUILD))
    assert builds.builds[0]["buildStatus"] == "STOPPED"
    world.run(image_build, world.request("Delete", BUILD))


def test_delete_without_project_is_success(world: World) -> None:
    world.aws["ListBuildsForProject"] = refuse("ResourceNotFoundException")
    world.run(image_build, world.request("Delete", BUILD))


def test_a_roll_back_of_an_update_stops_the_newer_build(world: World, builds: Builds) -> None:
    digest = push()
    newer = {**BUILD, "ContextHash": "f" * 64}
    world.begin(image_build, world.request("Update", newer, BUILD))
    assert world.run(image_build, world.request("Update", BUILD, newer))["Digest"] == digest
    assert [build["buildStatus"] for build in builds.builds] == ["STOPPED"]


def test_the_digest_of_a_tagged_base_is_looked_up(world: World, builds: Builds) -> None:
    boto3.client("ecr").create_repository(repositoryName="pytorch-training")
    digest = push("2.9", "pytorch-training")
    registry = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    base = {
        "BaseImage": f"{registry}/pytorch-training:2.9",
        "BaseDigest": "",
        "BaseRegistry": "123456789012",
        "BaseRegion": "us-east-1",
        "BaseRepository": "pytorch-training",
        "BaseTag": "2.9",
    }
    event = world.begin(image_build, world.request("Create", {**BUILD, **base}))
    assert event["Tag"] == image_build.tag_of(CONTEXT, digest)
    variables = builds.builds[0]["environment"]["environmentVariables"]
    assert {"name": "BASE_IMAGE", "value": f"{registry}/pytorch-training@{digest}", "type": "PLAINTEXT"} in variables
    with pytest.raises(Failed, match="no such tag"):
        world.begin(image_build, world.request("Create", {**BUILD, **base, "BaseTag": "absent"}))


# -- export

FILE_SYSTEM = "fs-0123456789abcdef0"
EXPORT = {"FileSystemId": FILE_SYSTEM, "Paths": ["runs"], "DeleteSeconds": 3000}


class Tasks:
    """FSx's data repository tasks, which moto lacks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tasks: list[dict[str, Any]] = []
        world.aws["DescribeFileSystems"] = lambda query: {"FileSystems": [{"FileSystemId": FILE_SYSTEM}]}
        world.aws["DescribeDataRepositoryTasks"] = lambda query: {"DataRepositoryTasks": self.tasks}
        world.aws["CreateDataRepositoryTask"] = self._create

    def _create(self, query: dict[str, Any]) -> dict[str, Any]:
        assert query["Type"] == "EXPORT_TO_REPOSITORY"
        assert query["Paths"] == ["runs"]
        self.add(query["ClientRequestToken"])
        return {"DataRepositoryTask": self.tasks[-1]}

    def add(self, token: str, lifecycle: str = "EXECUTING") -> None:
        task = {
            "TaskId": f"task-{len(self.tasks)}",
            "Type": "EXPORT_TO_REPOSITORY",
            "Lifecycle": lifecycle,
            "CreationTime": datetime.fromtimestamp(self.world.time_s, UTC),
            "Status": {"TotalCount": 9, "SucceededCount": 3, "FailedCount": 0},
            "token": token,
        }
        self.tasks.append(task)


@pytest.fixture
def tasks(world: World) -> Tasks:
    return Tasks(world)


def test_export_is_started_once_and_awaited(world: World, tasks: Tasks) -> None:
    event = world.begin(export, world.request("Delete", EXPORT))
    for _ in range(3):
        assert world.step(export, event) is None
    assert len(tasks.tasks) == 1
    tasks.tasks[0]["Lifecycle"] = "SUCCEEDED"
    assert world.step(export, event) is not None


def test_create_and_update_export_nothing(world: World, tasks: Tasks) -> None:
    world.run(export, world.request("Create", EXPORT))
    world.run(export, world.request("Update", EXPORT, EXPORT))
    assert tasks.tasks == []


def test_an_older_export_is_not_enough(world: World, tasks: Tasks) -> None:
    """What was written after it would be lost."""
    tasks.add("earlier", "SUCCEEDED")
    world.time_s += 3600
    event = world.begin(export, world.request("Delete", EXPORT))
    assert world.step(export, event) is None
    assert len(tasks.tasks) == 2


def test_a_task_that_runs_already_is_awaited_first(world: World, tasks: Tasks) -> None:
    tasks.add("earlier")
    world.time_s += 3600
    event = world.begin(export, world.request("Delete", EXPORT))
    assert world.step(export, event) is None
    assert len(tasks.tasks) == 1
    tasks.tasks[0]["Lifecycle"] = "SUCCEEDED"
    assert world.step(export, event) is None
    assert len(tasks.tasks) == 2


@pytest.mark.parametrize(("lifecycle", "failed"), [("FAILED", 0), ("SUCCEEDED", 2), ("CANCELED", 0)])
def test_a_failed_export_stops_the_teardown(world: World, tasks: Tasks, lifecycle: str, failed: int) -> None:
    event = world.begin(export, world.request("Delete", EXPORT))
    world.step(export, event)
    tasks.tasks[0].update({"Lifecycle": lifecycle, "FailureDetails": {"Message": "access to the bucket was denied"}})
    tasks.tasks[0]["Status"]["FailedCount"] = failed
    with pytest.raises(Failed, match=r"access to the bucket was denied\. Nothing was deleted; look: aws fsx"):
        world.step(export, event)


def test_a_second_destroy_exports_again(world: World, tasks: Tasks) -> None:
    test_a_failed_export_stops_the_teardown(world, tasks, "FAILED", 0)
    world.time_s += 600
    event = world.begin(export, world.request("Delete", EXPORT))
    assert world.step(export, event) is None
    tasks.tasks[1]["Lifecycle"] = "SUCCEEDED"
    assert world.step(export, event) is not None


def test_an_export_without_end_is_an_error_in_time(world: World, tasks: Tasks) -> None:
    with pytest.raises(Failed, match=r"still EXECUTING after 3\d\d\d s \(3 of 9 files\)"):
        world.run(export, world.request("Delete", EXPORT), poll_s=30.0)


def test_an_export_that_cannot_start_is_an_error(world: World, tasks: Tasks) -> None:
    world.aws["CreateDataRepositoryTask"] = refuse("BadRequest", "no data repository association")
    with pytest.raises(Failed, match="no data repository association"):
        world.run(export, world.request("Delete", EXPORT))


def test_a_file_system_that_is_gone_is_success(world: World, tasks: Tasks) -> None:
    world.aws["DescribeFileSystems"] = refuse("FileSystemNotFound")
    world.run(export, world.request("Delete", EXPORT))


STAYS = ["ROLLBACK_IN_PROGRESS", "UPDATE_ROLLBACK_IN_PROGRESS", "UPDATE_COMPLETE_CLEANUP_IN_PROGRESS"]


@pytest.mark.parametrize("status", STAYS)
def test_a_stack_that_stays_exports_nothing(world: World, tasks: Tasks, status: str) -> None:
    world.stack_status = status
    world.run(export, world.request("Delete", EXPORT))
    assert tasks.tasks == []


# -- data-loss guard


def test_destroying_what_is_exported_nowhere_is_refused(world: World) -> None:
    world.run(data_loss_guard, world.request("Create", {"AllowDataLoss": "false"}))
    with pytest.raises(Failed, match=r"storage\.allow_data_loss = true"):
        world.run(data_loss_guard, world.request("Delete", {"AllowDataLoss": "false"}))


def test_allowed_loss_passes(world: World) -> None:
    world.run(data_loss_guard, world.request("Delete", {"AllowDataLoss": "true"}))


@pytest.mark.parametrize("status", STAYS)
def test_a_stack_that_stays_loses_nothing(world: World, status: str) -> None:
    world.stack_status = status
    world.run(data_loss_guard, world.request("Delete", {"AllowDataLoss": "false"}))
