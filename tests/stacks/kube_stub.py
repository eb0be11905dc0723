"""A Kubernetes API in this process: finalizers, graceful deletion, Jobs that make pods, claims held by pods.

``StubApi.handle`` answers requests; ``StubApi.send`` has the signature of ``stacks.handlers.kube.send``, and
``serve`` puts it behind a real HTTP port.  Controllers run at each request, by the clock that the test gives.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from stacks.handlers.kube import KINDS, Ref

Object = dict[str, Any]
PLURALS = {(version, plural): kind for kind, (version, plural, _) in KINDS.items()}
PVC_PROTECTION = "kubernetes.io/pvc-protection"
PV_PROTECTION = "kubernetes.io/pv-protection"
TRACKING = "batch.kubernetes.io/job-tracking"
FOREGROUND = "foregroundDeletion"


class StubApi:
    """State and faults are plain attributes, for tests to set."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.objects: dict[Ref, Object] = {}
        self.bound: dict[str, Ref] = {}
        """Volume -> its claim."""
        self.deleted_at: dict[Ref, float] = {}
        self.log: list[tuple[str, Ref]] = []
        """(verb, object) of each accepted write, and ("gone", object)."""
        self.requests: list[tuple[str, str]] = []
        self.grace_s = 20.0
        """What a pod takes from SIGTERM to its end."""
        self.stuck: set[str] = set()
        """Names of pods that never end: an unmount that hangs, a kubelet that is silent."""
        self.answers: list[tuple[int, dict[str, str]]] = []
        """Statuses (and headers) for the next requests, instead of an answer."""
        self.down = False
        self.unauthorized = False
        self.page_size = 500

    # -- what tests look at and put in

    def put(self, item: Mapping[str, Any]) -> Object:
        """As another client would create it."""
        return self._apply(json.loads(json.dumps(item)))

    def has(self, kind: str, name: str, namespace: str = "") -> bool:
        self.reconcile()
        return Ref(kind, namespace, name) in self.objects

    def of_kind(self, kind: str) -> list[Object]:
        self.reconcile()
        return [item for ref, item in self.objects.items() if ref.kind == kind]

    def finish(self, job: str, condition: str = "Complete") -> None:
        """The Job ends; its pods stay, as they do."""
        for ref, item in self.objects.items():
            if ref.kind == "Job" and ref.name == job:
                item["status"]["conditions"] = [{"type": condition, "status": "True"}]
        for pod in self.of_kind("Pod"):
            if any(owner["name"] == job for owner in pod["metadata"].get("ownerReferences", [])):
                pod["status"]["phase"] = "Succeeded" if condition == "Complete" else "Failed"
                pod["metadata"]["finalizers"] = []

    # -- requests

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, ca_data: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self.down:
            raise ConnectionRefusedError(111, "Connection refused")
        split = urlsplit(url)
        status, extra, answer = self.handle(method, split.path, dict(parse_qsl(split.query)), headers, body or b"")
        return status, extra, json.dumps(answer).encode()

    def handle(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], Object]:
        self.requests.append((method, path))
        if self.answers:
            status, extra = self.answers.pop(0)
            return status, extra, _status(status, "Made", "as the test asked")
        if self.unauthorized or not headers.get("Authorization", "").startswith("Bearer k8s-aws-v1."):
            return 401, {}, _status(401, "Unauthorized", "Unauthorized")
        self.reconcile()
        kind, namespace, name = _parse(path)
        if not name:
            return 200, {}, self._list(kind, namespace, query)
        ref = Ref(kind, namespace, name)
        if method == "PATCH":
            return self._patch(ref, query, headers, body)
        if ref not in self.objects:
            return 404, {}, _status(404, "NotFound", f"{ref} not found")
        if method == "DELETE":
            self._delete(ref, json.loads(body or b"{}").get("propagationPolicy", "Background"))
            self.reconcile()
            return 200, {}, self.objects.get(ref, _status(200, "", "deleted"))
        return 200, {}, self.objects[ref]

    def _list(self, kind: str, namespace: str, query: Mapping[str, str]) -> Object:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        found = [
            {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
            for ref, item in sorted(self.objects.items(), key=lambda pair: str(pair[0]))
            if ref.kind == kind
            and (not namespace or ref.namespace == namespace)
            and wanted.items() <= item["metadata"].get("labels", {}).items()
        ]
        start, size = int(query.get("continue", "0")), min(self.page_size, int(query.get("limit", "500")))
        rest = {"continue": str(start + size)} if len(found) > start + size else {}
        return {"kind": f"{kind}List", "metadata": rest, "items": found[start : start + size]}

    def _patch(
        self, ref: Ref, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], Object]:
        item = json.loads(body)
        if "apply-patch" not in headers.get("Content-Type", "") or "fieldManager" not in query:
            return 415, {}, _status(415, "UnsupportedMediaType", "server-side apply only")
        before = self.objects.get(ref)
        if ref.namespace and Ref("Namespace", "", ref.namespace) not in self.objects:
            return 404, {}, _status(404, "NotFound", f'namespaces "{ref.namespace}" not found')
        if before and ref.kind == "Job" and before["spec"]["template"] != item["spec"]["template"]:
            return 422, {}, _status(422, "Invalid", "spec.template: field is immutable")
        return 200 if before else 201, {}, self._apply(item)

    # -- the API server and its controllers

    def _apply(self, item: Object) -> Object:
        ref = Ref.of(item)
        before = self.objects.get(ref)
        self.log.append(("apply", ref))
        if before:
            meta = {**before["metadata"], **item["metadata"]}
            before.update({**item, "metadata": meta, "status": before.get("status", {})})
            return before
        item.setdefault("metadata", {}).setdefault("labels", {})
        if ref.namespace:
            item["metadata"]["namespace"] = ref.namespace
        item.setdefault("status", {})
        self.objects[ref] = item
        phases = {"Namespace": "Active", "PersistentVolume": "Available", "PersistentVolumeClaim": "Pending"}
        if ref.kind in phases:
            item["status"] = {"phase": phases[ref.kind]}
        guards = {"PersistentVolume": [PV_PROTECTION], "PersistentVolumeClaim": [PVC_PROTECTION]}
        if ref.kind in guards:
            item["metadata"]["finalizers"] = guards[ref.kind]
        if ref.kind == "Pod":
            item["status"].setdefault("phase", "Running")
            item["spec"].setdefault("nodeName", "node-1")
        if ref.kind == "Job":
            self._make_pods(ref, item)
        self.reconcile()
        return self.objects[ref]

    def _make_pods(self, ref: Ref, job: Object) -> None:
        template = job["spec"]["template"]
        for index in range(0 if job["spec"].get("suspend") else job["spec"].get("parallelism", 1)):
            labels = {**template["metadata"].get("labels", {}), "batch.kubernetes.io/job-name": ref.name}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{ref.name}-{index}",
                    "namespace": ref.namespace,
                    "labels": labels,
                    "finalizers": [TRACKING],
                    "ownerReferences": [{"kind": "Job", "name": ref.name, "controller": True}],
                },
                "spec": json.loads(json.dumps(template["spec"])),
                "status": {"phase": "Running"},
            }
            pod["spec"]["nodeName"] = f"node-{index + 1}"
            self.objects[Ref.of(pod)] = pod

    def _delete(self, ref: Ref, policy: str) -> None:
        item = self.objects[ref]
        if "deletionTimestamp" in item["metadata"]:
            return
        self.log.append(("delete", ref))
        item["metadata"]["deletionTimestamp"] = datetime.fromtimestamp(self.clock(), UTC).strftime("%FT%TZ")
        self.deleted_at[ref] = self.clock()
        if ref.kind == "Job" and policy == "Foreground":
            item["metadata"].setdefault("finalizers", []).append(FOREGROUND)

    def reconcile(self) -> None:
        """Controllers, until nothing changes."""
        while self._bind() or self._cascade() or self._release() or self._collect():
            pass

    def _bind(self) -> bool:
        changed = False
        for ref, item in self.objects.items():
            volume = (
                self.objects.get(Ref("PersistentVolume", "", item["spec"].get("volumeName", "")))
                if ref.kind == "PersistentVolumeClaim"
                else None
            )
            if volume and item["status"]["phase"] == "Pending" and volume["status"]["phase"] == "Available":
                item["status"]["phase"] = volume["status"]["phase"] = "Bound"
                self.bound[volume["metadata"]["name"]] = ref
                changed = True
            if ref.kind == "PersistentVolume" and self.bound.get(ref.name, ref) not in self.objects:
                item["status"]["phase"] = "Released"
        return changed

    def _cascade(self) -> bool:
        """Dependents of what is being deleted: a Job's pods, a namespace's content."""
        deleting = {ref for ref, item in self.objects.items() if "deletionTimestamp" in item["metadata"]}
        spaces = {ref.name for ref in deleting if ref.kind == "Namespace"}
        jobs = {(ref.namespace, ref.name) for ref in deleting if ref.kind == "Job"}
        changed = False
        for ref, item in list(self.objects.items()):
            owners = {(ref.namespace, owner["name"]) for owner in item["metadata"].get("ownerReferences", [])}
            if ref not in deleting and (ref.namespace in spaces or owners & jobs):
                self._delete(ref, "Foreground")
                changed = True
        return changed

    def _release(self) -> bool:
        """Takes finalizers away whose condition has come."""
        changed = False
        for ref, item in self.objects.items():
            finalizers = item["metadata"].get("finalizers", [])
            if "deletionTimestamp" not in item["metadata"]:
                continue
            free = {
                PVC_PROTECTION: not any(ref.name in _claims(pod) for pod in self._pods(ref.namespace)),
                PV_PROTECTION: self.bound.get(ref.name) not in self.objects,
                TRACKING: ref.kind == "Pod" and self._ended(ref),
                FOREGROUND: not any(_owned(pod, ref.name) for pod in self._pods(ref.namespace)),
            }
            kept = [name for name in finalizers if not free.get(name, False)]
            if kept != finalizers:
                item["metadata"]["finalizers"] = kept
                changed = True
        return changed

    def _collect(self) -> bool:
        changed = False
        for ref, item in list(self.objects.items()):
            if "deletionTimestamp" not in item["metadata"] or item["metadata"].get("finalizers"):
                continue
            if ref.kind == "Pod" and not self._ended(ref):
                continue
            if ref.kind == "Namespace" and any(other.namespace == ref.name for other in self.objects):
                continue
            del self.objects[ref]
            if ref.kind == "PersistentVolume":
                self.bound.pop(ref.name, None)
            self.log.append(("gone", ref))
            changed = True
        return changed

    def _ended(self, ref: Ref) -> bool:
        return ref.name not in self.stuck and self.clock() >= self.deleted_at[ref] + self.grace_s

    def _pods(self, namespace: str) -> list[Object]:
        return [item for ref, item in self.objects.items() if ref.kind == "Pod" and ref.namespace == namespace]


def _claims(pod: Object) -> set[str]:
    volumes = pod["spec"].get("volumes", [])
    return {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}


def _owned(pod: Object, job: str) -> bool:
    return any(owner["name"] == job for owner in pod["metadata"].get("ownerReferences", []))


def _parse(path: str) -> tuple[str, str, str]:
    """Kind, namespace and name of a URL path."""
    parts = path.strip("/").split("/")
    version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    return PLURALS[(version, rest[0])], namespace, rest[1] if len(rest) > 1 else ""


def _status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}


@contextmanager
def serve(api: StubApi) -> Iterator[str]:
    """The stub on a free port of this host; yields its URL. Server and threads end with the block."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = dict(parse_qsl(split.query))
            status, extra, answer = api.handle(self.command, split.path, query, dict(self.headers), body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **extra}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PATCH = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
