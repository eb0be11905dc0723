"""kubectl as a subprocess: it has the user's contexts, plug-ins and proxies, and needs no client library."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from payload.manifests import Manifest

CALL_S = 120.0
"""A call that does not stream ends within this."""
_REQUEST_TIMEOUT = "--request-timeout=30s"


class ClusterError(RuntimeError):
    """The cluster, or the way to it, did not do what was asked; the text says what to look at."""


class Kubectl:
    """One context and namespace."""

    def __init__(self, *, namespace: str, context: str = "") -> None:
        """``context`` empty: the current one."""
        self.namespace = namespace
        self._context = [f"--context={context}"] if context else []

    def command(self, *arguments: str) -> list[str]:
        return ["kubectl", *self._context, f"--namespace={self.namespace}", *arguments]

    def run(self, *arguments: str, content: str | None = None, timeout_s: float = CALL_S) -> str:
        """The call's stdout. Raises ClusterError with kubectl's own words."""
        command = self.command(*arguments)
        try:
            done = subprocess.run(
                command, input=content, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except FileNotFoundError as error:
            raise ClusterError("kubectl: not found; legal: kubectl on the PATH, within one minor of the cluster") from (
                error
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from error
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {' '.join(done.stderr.split()) or f'code {done.returncode}'}")
        return done.stdout

    def stream(self, *arguments: str) -> int:
        """Runs with this process's stdout; returns kubectl's exit code."""
        try:
            return subprocess.run(self.command(*arguments), check=False).returncode
        except FileNotFoundError as error:
            raise ClusterError("kubectl: not found; legal: kubectl on the PATH") from error

    def pipe(self, *arguments: str, consume: Callable[[IO[bytes]], None]) -> None:
        """Gives the call's stdout to ``consume`` as it comes. Raises ClusterError."""
        command = self.command(*arguments)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                consume(process.stdout)
            finally:
                process.stdout.close()
                text = process.stderr.read().decode(errors="replace")
        if process.returncode:
            raise ClusterError(f"{' '.join(command)}: {' '.join(text.split())}")

    def find(self, kind: str, name: str) -> Manifest | None:
        """The object, or None."""
        text = self.run("get", kind, name, "--ignore-not-found", "--output=json", _REQUEST_TIMEOUT)
        return dict(json.loads(text)) if text.strip() else None

    def list(self, kind: str, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        chosen = [f"--selector={selector}"] if selector else []
        items = json.loads(self.run("get", kind, *chosen, "--output=json", _REQUEST_TIMEOUT))["items"]
        return [dict(item) for item in items]

    def apply(self, objects: Sequence[Manifest]) -> None:
        """Server-side, so that what others set stays theirs."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.run("apply", "--server-side", "--field-manager=nvrx-eks", "--filename=-", content=content)

    def delete(self, kind: str, name: str) -> None:
        """Begins the deletion, what the object owns first; pods get their grace. Gone already is fine."""
        self.run("delete", kind, name, "--ignore-not-found", "--wait=false", "--cascade=foreground")


def wait_until(done: Callable[[], str], *, timeout_s: float, poll_s: float, what: str) -> None:
    """Calls ``done`` until it returns '', which else says what is missing. Raises ClusterError with that text."""
    deadline = time.monotonic() + timeout_s
    while missing := done():
        if time.monotonic() >= deadline:
            raise ClusterError(f"{what}: not within {timeout_s:g} s: {missing}")
        time.sleep(poll_s)


def condition(item: Mapping[str, Any], *types: str) -> str:
    """The first of the types that holds for a Job, pod or node; '' when none does."""
    found = (item.get("status") or {}).get("conditions") or []
    return next((str(c["type"]) for c in found if c["type"] in types and c["status"] == "True"), "")
