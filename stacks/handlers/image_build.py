"""Starts a CodeBuild build of the training image and follows it (constructs/image_build.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError

from . import waiting
from .waiting import Answer, Event, Failed

STARTS = 300.0
"""Seconds a build may take to leave the queue, on top of its own time."""


QUOTED_LINES, QUOTED_CHARACTERS = 15, 800
"""Of the log's end, in the reason of a failure; CloudFormation shows about a thousand characters."""


def on_event(event: Event, context: object) -> Answer:
    """Create and update start the build where the tag is not there yet; delete stops what runs."""
    properties = event["ResourceProperties"]
    answer = waiting.began(event, f"image/{properties['RepositoryName']}")
    if event["RequestType"] == "Delete":
        _stop(properties["ProjectName"], "")
        return answer
    base = _base_digest(properties)
    tag = tag_of(properties["ContextHash"], base)
    # A roll-back arrives as an update to the former values: what was started for the newer ones ends.
    _stop(properties["ProjectName"], tag)
    if _digest(properties["RepositoryName"], tag):
        return {**answer, "Tag": tag}
    image = properties["BaseImage"]
    pinned = image if "@" in image else f"{image.rpartition(':')[0]}@{base}"
    variables = {"TAG": tag, "BASE_IMAGE": pinned}
    build = waiting.client("codebuild").start_build(
        projectName=properties["ProjectName"],
        idempotencyToken=event["RequestId"],  # a repeated call starts no second build
        environmentVariablesOverride=[{"name": k, "value": v, "type": "PLAINTEXT"} for k, v in variables.items()],
    )["build"]
    return {**answer, "Tag": tag, "BuildId": build["id"]}


def is_complete(event: Event, context: object) -> Answer:
    """Raises Failed with the failed phase and the place of the log."""
    properties = event["ResourceProperties"]
    if event["RequestType"] == "Delete":
        running = [build["id"] for build in _running(properties["ProjectName"])]
        if running and waiting.waited_s(event) < STARTS:
            return waiting.pending(f"stopping {', '.join(running)}")
        if running:
            raise Failed(f"{', '.join(running)} did not stop; look: aws codebuild batch-get-builds --ids {running[0]}")
        return waiting.done()
    tag = event["Tag"]
    digest = _digest(properties["RepositoryName"], tag)
    if digest:
        return waiting.done(Tag=tag, Digest=digest)
    if "BuildId" not in event:
        raise Failed(f"{properties['RepositoryName']}:{tag} vanished from the repository; run the command again")
    build = waiting.client("codebuild").batch_get_builds(ids=[event["BuildId"]])["builds"][0]
    if build["buildStatus"] == "SUCCEEDED":
        raise Failed(f"build {build['id']} succeeded, but pushed no {tag}; {_log(build)}")
    if build["buildStatus"] != "IN_PROGRESS":
        raise Failed(f"build {build['id']} {build['buildStatus'].lower()}: {_phase(build)}; {_log(build)}")
    if waiting.waited_s(event) < waiting.limit_s(event, "BuildSeconds") + STARTS:
        return waiting.pending(f"build {build['id']}: {build.get('currentPhase', 'queued')}")
    waiting.client("codebuild").stop_build(id=build["id"])
    raise Failed(f"build {build['id']} was stopped after {waiting.waited_s(event):.0f} s; {_log(build)}")


def tag_of(context_hash: str, base_digest: str) -> str:
    """Of what the image is made: its context, and the base it stands on."""
    return f"{context_hash[:16]}-{base_digest.removeprefix('sha256:')[:12]}"


def _base_digest(properties: Event) -> str:
    """Given, or looked up in the registry of the base image. Raises Failed when it is not there."""
    if properties.get("BaseDigest"):
        return str(properties["BaseDigest"])
    try:
        images = waiting.client("ecr", properties["BaseRegion"]).batch_get_image(
            registryId=properties["BaseRegistry"],
            repositoryName=properties["BaseRepository"],
            imageIds=[{"imageTag": properties["BaseTag"]}],
        )["images"]
    except ClientError as error:
        raise Failed(f"base image {properties['BaseImage']}: {waiting.code(error)}: {waiting.text(error)}") from error
    if not images:
        raise Failed(f"base image {properties['BaseImage']}: no such tag in its registry")
    return str(images[0]["imageId"]["imageDigest"])


def _digest(repository: str, tag: str) -> str:
    """The digest under the tag, '' when the tag is not there."""
    try:
        found = waiting.client("ecr").describe_images(repositoryName=repository, imageIds=[{"imageTag": tag}])
    except ClientError as error:
        if waiting.code(error) == "ImageNotFoundException":
            return ""
        raise
    return str(found["imageDetails"][0]["imageDigest"])


def _running(project: str) -> Iterator[dict[str, Any]]:
    """Builds in progress among the newest hundred; none when the project is gone."""
    codebuild = waiting.client("codebuild")
    try:
        ids = codebuild.list_builds_for_project(projectName=project, sortOrder="DESCENDING")["ids"]
    except ClientError as error:
        if waiting.code(error) != "ResourceNotFoundException":
            raise
        return
    if ids:
        builds = codebuild.batch_get_builds(ids=ids[:100])["builds"]
        yield from (build for build in builds if build["buildStatus"] == "IN_PROGRESS")


def _stop(project: str, but_tag: str) -> None:
    """Stops the running builds, but those of one tag."""
    for build in _running(project):
        variables = build.get("environment", {}).get("environmentVariables", [])
        if not but_tag or {"name": "TAG", "value": but_tag} not in [
            {"name": item["name"], "value": item["value"]} for item in variables
        ]:
            waiting.client("codebuild").stop_build(id=build["id"])


def _phase(build: dict[str, Any]) -> str:
    """The failed phase in CodeBuild's words."""
    failed = [
        phase for phase in build.get("phases", []) if phase.get("phaseStatus") in ("FAILED", "TIMED_OUT", "FAULT")
    ]
    said = [context.get("message", "") for phase in failed for context in phase.get("contexts", [])]
    names = ", ".join(phase["phaseType"] for phase in failed)
    return f"{names or 'no phase is marked failed'} {' '.join(said)[:500]}".strip()


def _log(build: dict[str, Any]) -> str:
    """Where the log is, and how it ends: a roll-back deletes it."""
    logs = build.get("logs") or {}
    group, stream = logs.get("groupName"), logs.get("streamName")
    if not (group and stream):
        return "no log was written"
    try:
        events = waiting.client("logs").get_log_events(
            logGroupName=group, logStreamName=stream, limit=QUOTED_LINES, startFromHead=False
        )["events"]
    except ClientError as error:
        return f"log {group} {stream} cannot be read: {waiting.text(error)}"
    end = " | ".join(event["message"].strip() for event in events)
    return f"log: aws logs tail {group} --log-stream-names {stream} --since 2h; its end: {end[-QUOTED_CHARACTERS:]}"
