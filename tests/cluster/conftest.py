"""A cluster behind a kubectl of our own: tests/cluster/fake_kubectl.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from payload.cluster import jobs, preflight, scaling, status

FAKE = Path(__file__).with_name("fake_kubectl.py")


class FakeCluster:
    """What the fake keeps; objects are keyed ``kind/namespace/name``, lower case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write({"objects": {}, "count": 0})

    def read(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self._path.read_text())
        return values

    def write(self, state: dict[str, Any]) -> None:
        self._path.write_text(json.dumps(state))

    def set(self, **fields: Any) -> None:
        self.write({**self.read(), **fields})

    def put(self, *items: dict[str, Any]) -> None:
        state = self.read()
        for item in items:
            meta = item["metadata"]
            state["objects"][f"{item['kind'].lower()}/{meta.get('namespace', '')}/{meta['name']}"] = item
        self.write(state)

    def names(self, kind: str) -> list[str]:
        return [name.split("/")[2] for name in self.read()["objects"] if name.startswith(f"{kind}/")]

    def object(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = [
            item
            for place, item in self.read()["objects"].items()
            if place.startswith(f"{kind}/") and place.endswith(f"/{name}")
        ]
        return dict(found)

    def finish(self, job: str, condition: str = "Complete") -> None:
        state = self.read()
        for place, item in state["objects"].items():
            if place.endswith(f"/{job}") and place.startswith("job/"):
                item["status"] = {"conditions": [{"type": condition, "status": "True", "message": "as asked"}]}
            if item["metadata"].get("owner") == job:
                item["status"]["phase"] = "Succeeded" if condition == "Complete" else "Failed"
        self.write(state)

    def calls(self, verb: str) -> list[list[str]]:
        """Arguments of every call of the verb, without kubectl's own options before it."""
        found = []
        for line in Path(f"{self._path}.calls").read_text().splitlines():
            rest = [item for item in json.loads(line) if not item.startswith(("--context", "--namespace"))]
            if rest[0] == verb:
                found.append(rest)
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Empty, and first on the PATH; waits are short."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_KUBECTL", str(tmp_path / "cluster.json"))
    for module, name in ((jobs, "POLL_S"), (scaling, "POLL_S"), (preflight, "POLL_S"), (status, "WAIT_POLL_S")):
        monkeypatch.setattr(module, name, 0.01)
    return FakeCluster(tmp_path / "cluster.json")
