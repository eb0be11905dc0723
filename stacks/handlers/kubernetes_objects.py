"""Applies, verifies, deletes and awaits Kubernetes objects (constructs/kubernetes_objects.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from . import kube, pods, waiting
from .kube import Client, Object, Ref
from .waiting import Answer, Event, Failed

AUTHORIZATION_DELAY_S = 180.0
"""A new access entry is honoured by the API only after a while."""


def on_event(event: Event, context: object) -> Answer:
    cluster = event["ResourceProperties"]["ClusterName"]
    return waiting.began(event, f"{cluster}/{event['LogicalResourceId']}")


def is_complete(event: Event, context: object) -> Answer:
    """Raises Failed with what blocks and how to look at it; nothing is ever forced."""
    deleting = event["RequestType"] == "Delete"
    try:
        client = kube.connect(event["ResourceProperties"]["ClusterName"])
        return _delete(client, event) if deleting else _apply(client, event)
    except kube.NoCluster as error:
        if deleting:
            return waiting.done(Message=f"cluster {error} no longer exists, and its objects with it")
        raise Failed(f"cluster {error} does not exist") from error
    except kube.Unreachable as error:
        raise Failed(f"{error}. Nothing was changed; repair the way to the API and run the command again") from error
    except kube.ApiError as error:
        if error.status in (401, 403) and waiting.waited_s(event) < AUTHORIZATION_DELAY_S:
            return waiting.pending(str(error))
        raise Failed(str(error)) from error


def _objects(properties: Event) -> list[Object]:
    items: list[Object] = json.loads(properties["Objects"])
    return items


def _delete(client: Client, event: Event) -> Answer:
    properties = event["ResourceProperties"]
    blocking = ""
    if "Jobs" in properties:
        gate = json.loads(properties["Jobs"])
        blocking = pods.end_jobs(client, gate["namespace"], gate["selector"])
    blocking = blocking or _remove(client, event, reversed(_objects(properties)))
    if not blocking:
        return waiting.done(Message="verified: all objects are gone")
    if waiting.waited_s(event) < waiting.limit_s(event, "DeleteSeconds"):
        return waiting.pending(blocking)
    raise Failed(
        f"still there after {waiting.waited_s(event):.0f} s: {blocking}. Nothing was forced; "
        "resolve what blocks and run the command again"
    )


def _remove(client: Client, event: Event, items: Iterable[Object]) -> str:
    """Deletes one after the other, each gone before the next; what it waits for, '' when all are gone."""
    for item in items:
        ref = Ref.of(item)
        found = client.get(ref)
        if found is None:
            continue
        if not found["metadata"].get("deletionTimestamp"):
            users = pods.users(client, ref)
            if users:
                return _in_use(event, ref, users)
            client.delete(ref)
            found = client.get(ref)
        if found is not None:
            return pods.describe(found, pods.users(client, ref))
    return ""


def _in_use(event: Event, ref: Ref, users: list[Object]) -> str:
    """Those that use it may go by themselves, for a while; the object itself is not touched before."""
    named = "; ".join(pods.describe(user) for user in users)
    if waiting.waited_s(event) < waiting.limit_s(event, "ForeignSeconds"):
        return f"{ref} is in use by {named}"
    raise Failed(
        f"{ref} was not deleted, as others use it: {named}. They are not of this stack: end them, "
        "then run the command again"
    )


def _apply(client: Client, event: Event) -> Answer:
    properties = event["ResourceProperties"]
    items = _objects(properties)
    names = {ref.name for ref in map(Ref.of, items) if ref.kind == "Job"}
    blocking = ""
    if "Jobs" in properties:
        gate = json.loads(properties["Jobs"])
        older = pods.unfinished(client, gate["namespace"], gate["replaces"], names)
        if older and gate["onChange"] == "keep":
            return waiting.done(Message=f"kept: {', '.join(older)} goes on; the changed Job was not applied")
        blocking = pods.end_jobs(client, gate["namespace"], gate["replaces"], names)
    blocking = blocking or _put(client, items, properties["Wait"])
    if not blocking and event["RequestType"] == "Update":
        blocking = _remove(client, event, _dropped(event))
    if not blocking:
        return waiting.done(Message=f"applied: {', '.join(str(Ref.of(item)) for item in items)}")
    if waiting.waited_s(event) < waiting.limit_s(event, "CreateSeconds"):
        return waiting.pending(blocking)
    raise Failed(f"not as asked after {waiting.waited_s(event):.0f} s: {blocking}")


def _dropped(event: Event) -> list[Object]:
    """What the resource held before this update and holds no longer; Jobs are the gate's where there is one."""
    properties = event["ResourceProperties"]
    kept = {Ref.of(item) for item in _objects(properties)}
    before = reversed(_objects(event["OldResourceProperties"]))
    return [
        item for item in before if Ref.of(item) not in kept and not (item["kind"] == "Job" and "Jobs" in properties)
    ]


def _put(client: Client, items: list[Object], wait: str) -> str:
    for item in items:
        ref = Ref.of(item)
        found = client.get(ref)
        if found is not None and _released(found):
            client.delete(ref)
            found = client.get(ref)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            return f"an older {pods.describe(found)}"
        found = client.apply(item)
        reason = _not_ready(found, wait)
        if reason:
            return f"{ref}: {reason}; look: {ref.command}"
    return ""


def _released(found: Object) -> bool:
    """A volume whose claim went in a teardown that did not end: it binds to no new claim. It is only an entry (Retain),
    so it is made anew."""
    retained = found["kind"] == "PersistentVolume" and found["spec"].get("persistentVolumeReclaimPolicy") == "Retain"
    return retained and (found.get("status") or {}).get("phase") == "Released"


READY_PHASES = {
    "Namespace": ("Active",),
    "PersistentVolume": ("Available", "Bound"),
    "PersistentVolumeClaim": ("Bound",),
}


def _not_ready(found: Object, wait: str) -> str:
    """Why it is not what the resource waits for; '' when it is. Raises Failed for a Job that failed."""
    kind, status = found["kind"], found.get("status") or {}
    if wait == "none":
        return ""
    if kind in READY_PHASES and status.get("phase") not in READY_PHASES[kind]:
        return f"phase {status.get('phase')}, not {' or '.join(READY_PHASES[kind])}"
    if kind != "Job" or wait != "complete":
        return ""
    condition = pods.finished(found)
    if condition == "Failed":
        ref = Ref.of(found)
        raise Failed(f"{ref} failed; look: kubectl logs -n {ref.namespace} job/{ref.name} --tail=50")
    return "" if condition else "not complete yet"
