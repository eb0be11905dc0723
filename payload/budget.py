"""One restart budget for the whole run, kept in files beside its checkpoints and spent by every layer.

``restarts/`` holds one file a start of the worker group (``cycle-<n>.json``), one a restart by whatever layer
(``restart-<cycle>.<iteration>.json``) and one a failure and node (``failure-<cycle>-<pod>.json``). A file is linked
into place complete and never changed, so every rank that reads the folder comes to the same verdict.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.config import RunConfig

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
_MAX_LOGS = 16


class NoProgress(RuntimeError):
    """The run has to end with EXIT_NO_PROGRESS; the text says why and after how many tries."""


@dataclass(frozen=True)
class Restart:
    cycle: int
    iteration: int
    layer: str
    """``in-process``, ``launcher`` or ``container``."""
    step: int
    """Newest step that any rank had completed."""


class RestartBudget:
    """Used by launchers and ranks; every method may be called by all of them at once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._dir = config.restarts_dir
        self._marker = config.run_dir / "stop.json"

    def begin_cycle(self, layer: str) -> int:
        """Numbers a start of the worker group; one agent a start calls it. All but the first spend a restart.

        Raises NoProgress.
        """
        cycle = 0
        while not _publish(self._dir / f"cycle-{cycle}.json", {"layer": layer, "wall": time.time()}):
            cycle += 1
        if cycle:
            self.spend(layer, f"{cycle}.0")
        return cycle

    def spend(self, layer: str, generation: str, step: int | None = None) -> None:
        """Counts the restart that begins ``generation``; once, however many ranks call it.

        Args:
            step: newest completed step; read from the event logs by default.

        Raises:
            NoProgress: after too many restarts, or too many in a row without a newer step. The stop marker is set.
        """
        step = self.newest_step() if step is None else step
        _publish(self._dir / f"restart-{generation}.json", {"layer": layer, "step": step, "wall": time.time()})
        cycle, iteration = (int(part) for part in generation.split("."))
        made = [r for r in self.restarts() if (r.cycle, r.iteration) <= (cycle, iteration)]
        best, idle = 0, 0
        for restart in made:
            idle = idle + 1 if restart.step <= best else 0
            best = max(best, restart.step)
        limits = self._config.recovery
        log.warning(
            "restart %d of %d (%s, generation %s): newest step %d, restarts in a row without a newer one: %d of %d",
            len(made), limits.max_restarts, layer, generation, best, idle, limits.max_no_progress,
        )  # fmt: skip
        if idle >= limits.max_no_progress:
            self.stop(f"no step newer than {best} after {idle} restarts in a row; {len(made) + 1} tries in all")
        elif len(made) > limits.max_restarts:
            self.stop(f"all {limits.max_restarts} restarts are spent; {len(made)} tries in all, newest step {best}")

    def stop(self, reason: str) -> None:
        """Marks the run as ended: any later start of a pod exits at once. Raises NoProgress."""
        _publish(self._marker, {"reason": reason, "wall": time.time()})
        raise NoProgress(reason)

    def stopped(self) -> str | None:
        """The reason in the stop marker, if it is set."""
        try:
            return str(json.loads(self._marker.read_text())["reason"])
        except FileNotFoundError:
            return None

    def restarts(self) -> list[Restart]:
        """In the order of their generations."""
        found = []
        for path in self._dir.glob("restart-*.json"):
            cycle, iteration = (int(part) for part in path.stem.removeprefix("restart-").split("."))
            record = json.loads(path.read_text())
            found.append(Restart(cycle, iteration, record["layer"], record["step"]))
        return sorted(found, key=lambda r: (r.cycle, r.iteration))

    def newest_step(self) -> int:
        """The newest completed step in the ranks' event logs; 0 where there is none.

        All ranks complete the same steps, so the logs of a few ranks do.
        """
        logs = sorted(self._config.events_dir.glob("rank*.jsonl"), key=lambda p: (len(p.name), p.name))[:_MAX_LOGS]
        return max((_last_step(path) for path in logs), default=0)

    def record_failure(self, cycle: int, index: int, node: str, wall: float, *, planned: bool) -> None:
        """One node's view of how a cycle ended: when (seconds since the epoch) its first worker failed.

        ``planned``: an injected fault was among what happened, so that no node is to blame.
        """
        _publish(self._dir / f"failure-{cycle}-{index}.json", {"node": node, "wall": wall, "planned": planned})

    def blamed_in_a_row(self, node: str) -> int:
        """How many of the newest failures, without a gap, began on ``node``.

        A failure that not every node has recorded (a pod was lost with its launcher) is nobody's, as is a planned one.
        """
        culprits = []
        for cycle in sorted({int(p.stem.split("-")[1]) for p in self._dir.glob("failure-*-*.json")}, reverse=True):
            records = [json.loads(p.read_text()) for p in self._dir.glob(f"failure-{cycle}-*.json")]
            counts = len(records) == self._config.parallelism.num_nodes and not any(r["planned"] for r in records)
            first = min(records, key=lambda r: float(r["wall"]))["node"]
            culprits.append(first if counts and not self._excused(cycle, node) else "")
        streak = 0
        while streak < len(culprits) and culprits[streak] == node:
            streak += 1
        return streak

    def excuse(self, cycle: int, node: str) -> None:
        """Failures up to ``cycle`` no longer count against ``node``: its pod was given up for them."""
        _publish(self._dir / f"excused-{cycle}-{node}.json", {"wall": time.time()})

    def newest_failure(self) -> int:
        """The newest cycle with a recorded failure; -1 where there is none."""
        return max((int(p.stem.split("-")[1]) for p in self._dir.glob("failure-*-*.json")), default=-1)

    def _excused(self, cycle: int, node: str) -> bool:
        found = [int(p.name.split("-")[1]) for p in self._dir.glob(f"excused-*-{node}.json")]
        return cycle <= max(found, default=-1)


def _publish(path: Path, record: dict[str, Any]) -> bool:
    """Creates the file complete or not at all; False where it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with draft.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def tail(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind (empty: any) near the end of an event log; none where there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        if kind.encode() not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # the first line is cut, and a killed writer may leave a torn one
            continue
        if isinstance(record, dict) and (not kind or record.get("kind") == kind):
            found.append(record)
    return found


def _last_step(path: Path) -> int:
    return max((int(record["step"]) for record in tail(path, "step")), default=0)
