"""The protocol of the waiting handlers, and the clock that tests replace.

``on_event`` only names the resource and notes when the work began; ``is_complete`` does the work, a little at a
time, from what it finds.  So a call that is repeated, or that starts where another was killed, is the same as
any other call, and a failed creation still has a physical id under which CloudFormation deletes it.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

Event = Mapping[str, Any]
Answer = dict[str, Any]

log = logging.getLogger("handlers")
log.setLevel(logging.INFO)


class Failed(RuntimeError):
    """The reason that CloudFormation shows: what is wrong, and what to do."""


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def sleep(duration_s: float) -> None:
    time.sleep(duration_s)


@functools.cache
def session() -> boto3.Session:
    """One a process: a function that is invoked again finds it, and its clients, ready."""
    return boto3.Session()


@functools.cache
def client(service: str, region: str | None = None) -> Any:
    """A boto3 client with short timeouts that retries throttled calls itself."""
    retries: Any = {"mode": "standard", "total_max_attempts": 6}
    config = Config(retries=retries, connect_timeout=5, read_timeout=10)
    return session().client(service, region_name=region, config=config)  # type: ignore[call-overload]


def code(error: ClientError) -> str:
    return str(error.response["Error"]["Code"])


def text(error: ClientError) -> str:
    return str(error.response["Error"].get("Message", ""))


def began(event: Event, physical_id: str) -> Answer:
    """What ``on_event`` answers; the provider framework hands it on to every ``is_complete``."""
    log.info(json.dumps({"request": event["RequestType"], "resource": event.get("PhysicalResourceId", physical_id)}))
    name = event["PhysicalResourceId"] if event["RequestType"] == "Delete" else physical_id
    return {"PhysicalResourceId": name, "StartedAt": now()}


def waited_s(event: Event) -> float:
    """Seconds since ``on_event``."""
    return now() - float(event["StartedAt"])


def limit_s(event: Event, field: str) -> float:
    """A wait from the resource's properties; CloudFormation hands numbers over as text."""
    return float(event["ResourceProperties"][field])


def destroying(event: Event) -> bool:
    """Whether the whole stack is being deleted; not so in a roll-back, nor where an update drops the resource."""
    stacks = client("cloudformation").describe_stacks(StackName=event["StackId"])["Stacks"]
    return str(stacks[0]["StackStatus"]).startswith("DELETE")


def done(**data: str) -> Answer:
    """The work is done; ``data`` becomes the resource's attributes."""
    log.info(json.dumps({"complete": True, **data}))
    return {"IsComplete": True, "Data": data}


def pending(reason: str) -> Answer:
    """Not yet; the framework forbids attributes here."""
    log.info(json.dumps({"complete": False, "waiting": reason}))
    return {"IsComplete": False}
