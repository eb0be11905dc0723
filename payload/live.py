"""The live view of a run on this machine: progress bar, loss and goodput so far, faults and recoveries as they come.

Reads the run's event files while they grow. On a terminal it draws one line; else it stays silent but for faults,
restarts and replacements.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from payload.config import RunConfig

READ_EVERY_S = 0.25


class Tail:
    """The new whole records of a growing event file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Records written since the last call; a line without an end waits for the next, a torn one is left out."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
        return records


class LiveView:
    """Context manager around one run; ``config`` is the one on this machine (local.on_host)."""

    def __init__(self, config: RunConfig, title: str, console: Console | None = None) -> None:
        self._config = config
        self._title = title
        self._console = console or Console()
        self._tails = {
            source: Tail(config.events_dir / f"{source}.jsonl")
            for source in (f"rank{rank}" for rank in range(config.world_size))
        }
        self._surviving_s: dict[int, float] = {}
        self._started: float | None = None
        self._loss = float("nan")
        self._status = "starting"
        self._next_read = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            auto_refresh=False,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> LiveView:
        self._progress.start()
        self._task = self._progress.add_task(self._title, total=self._config.training.max_steps, line="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def step(self) -> int:
        """Newest step done by rank 0, 0 before the first."""
        return max(self._surviving_s, default=0)

    @property
    def goodput(self) -> float:
        """Surviving step time of rank 0 over the time since its first process began; 0 before that."""
        if self._started is None:
            return 0.0
        return sum(self._surviving_s.values()) / max(1e-9, time.time() - self._started)

    def poll(self) -> None:
        """Called often; reads and draws a few times a second."""
        now = time.monotonic()
        if now < self._next_read:
            return
        self._next_read = now + READ_EVERY_S
        for source, tail in self._tails.items():
            for record in tail.read():
                self._take(source, record)
        if self._task is not None:
            line = f"goodput {self.goodput:6.1%}  loss {self._loss:.3f}  {self._status}"
            self._progress.update(self._task, completed=self.step, line=line, refresh=True)

    def job_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """The job's events, as the local cluster reports them."""
        if kind == "pod_start" and fields["restart_count"]:
            self._say(f"pod {fields['index']}: container restart {fields['restart_count']}")
        elif kind == "pod_failed":
            self._say(f"pod {fields['index']} failed (exit code {fields['code']}), to be replaced")
        elif kind == "node_lost":
            self._say(f"{fields['node']} lost with pod {fields['index']}")

    def _take(self, source: str, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "fault":
            self._say(f"fault: {record['type']} on rank {record['rank']} at step {record['step']}")
            self._status = f"recovering from {record['type']}"
        if source != "rank0":
            return
        if kind == "process_start" and self._started is None:
            self._started = float(record["started_wall"])
        elif kind == "step":
            step = int(record["step"])
            # Steps after this one were lost and are done again.
            self._surviving_s = {done: s for done, s in self._surviving_s.items() if done < step}
            self._surviving_s[step] = float(record["duration_s"])
            self._loss = float(record["loss"])
            self._status = "training"

    def _say(self, text: str) -> None:
        self._progress.console.print(f"  {self._title}: {text}", highlight=False)
