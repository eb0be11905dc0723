"""Exports a Lustre file system to its data repository before it is deleted (constructs/export.py)."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from . import waiting
from .waiting import Answer, Event, Failed

RUNNING = ("PENDING", "EXECUTING", "CANCELING")
CLOCK_SKEW_S = 120.0


def on_event(event: Event, context: object) -> Answer:
    return waiting.began(event, f"export/{event['ResourceProperties']['FileSystemId']}")


def is_complete(event: Event, context: object) -> Answer:
    """Raises Failed when the task failed or missed files: nothing may be deleted after that."""
    if event["RequestType"] != "Delete":
        return waiting.done(Message="nothing to export yet")
    if not waiting.destroying(event):
        return waiting.done(Message="the stack stays, and the file system with it")
    file_system = event["ResourceProperties"]["FileSystemId"]
    try:
        tasks = _tasks(file_system)
    except ClientError as error:
        if waiting.code(error) != "FileSystemNotFound":
            raise
        return waiting.done(Message=f"file system {file_system} no longer exists")
    running = [task for task in tasks if task["Lifecycle"] in RUNNING]
    if running:
        return _wait(event, running[0])
    ours = [task for task in tasks if _after(event, task)]
    if not ours:
        return _start(event, file_system)
    return _result(ours[0])


def _tasks(file_system: str) -> list[dict[str, Any]]:
    """Export tasks, the newest first. Raises ClientError FileSystemNotFound when the file system is gone."""
    fsx = waiting.client("fsx")
    fsx.describe_file_systems(FileSystemIds=[file_system])
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {"Filters": [{"Name": "file-system-id", "Values": [file_system]}]}
    while True:
        page = fsx.describe_data_repository_tasks(**query)
        found += page["DataRepositoryTasks"]
        if not page.get("NextToken"):
            break
        query["NextToken"] = page["NextToken"]
    exports = [task for task in found if task["Type"] == "EXPORT_TO_REPOSITORY"]
    return sorted(exports, key=lambda task: str(task["CreationTime"]), reverse=True)


def _after(event: Event, task: dict[str, Any]) -> bool:
    """Whether the task was made for this deletion; an older one may have missed the last files."""
    return bool(task["CreationTime"].timestamp() >= float(event["StartedAt"]) - CLOCK_SKEW_S)


def _start(event: Event, file_system: str) -> Answer:
    try:
        waiting.client("fsx").create_data_repository_task(
            Type="EXPORT_TO_REPOSITORY",
            FileSystemId=file_system,
            Paths=event["ResourceProperties"].get("Paths") or [],
            Report={"Enabled": False},
            ClientRequestToken=event["RequestId"],  # a repeated call starts no second task
        )
    except ClientError as error:
        if waiting.code(error) == "DataRepositoryTaskExecuting":
            return waiting.pending("another task of the file system runs")
        raise Failed(
            f"export of {file_system} cannot start: {waiting.code(error)}: {waiting.text(error)}. Nothing was deleted"
        ) from error
    return waiting.pending("the export began")


def _wait(event: Event, task: dict[str, Any]) -> Answer:
    status = task.get("Status") or {}
    counts = f"{status.get('SucceededCount', 0)} of {status.get('TotalCount', '?')} files"
    if waiting.waited_s(event) < waiting.limit_s(event, "DeleteSeconds"):
        return waiting.pending(f"export {task['TaskId']} is {task['Lifecycle']}: {counts}")
    raise Failed(
        f"export {task['TaskId']} is still {task['Lifecycle']} after {waiting.waited_s(event):.0f} s ({counts}). "
        "It goes on; nothing was deleted. Run the command again when it has ended"
    )


def _result(task: dict[str, Any]) -> Answer:
    failed = (task.get("Status") or {}).get("FailedCount", 0)
    if task["Lifecycle"] == "SUCCEEDED" and not failed:
        return waiting.done(Message=f"export {task['TaskId']} succeeded")
    reason = (task.get("FailureDetails") or {}).get("Message", "no reason given")
    raise Failed(
        f"export {task['TaskId']} {task['Lifecycle'].lower()}, {failed} files failed: {reason}. Nothing was deleted; "
        f"look: aws fsx describe-data-repository-tasks --task-ids {task['TaskId']}"
    )
