"""Where a run is, read from its own files; runs where they are mounted (a pod), prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from payload.config import ConfigError, RunConfig
from payload.environment import run_config
from payload.events import Event, EventError, read_events


@dataclasses.dataclass(frozen=True)
class RunState:
    """What ``status`` shows of a run."""

    run_id: str
    step: int
    """Newest completed; 0: none yet."""
    max_steps: int
    loss: float | None
    step_age_s: float | None
    """Since the newest step was logged; None: no step yet."""
    goodput: float | None
    """Training goodput so far; None while the log is too short for a figure."""
    last_save: int
    """Newest step that every rank has saved durably; 0: none."""
    num_restarts: int
    max_restarts: int
    stopped: str
    """Why the run stopped itself; empty: it did not."""
    succeeded: bool
    """Its result says so."""

    @property
    def restarts_left(self) -> int:
        return max(0, self.max_restarts - self.num_restarts)

    def lines(self) -> list[str]:
        """For people."""
        goodput = "not known yet" if self.goodput is None else f"{self.goodput:.1%}"
        age = "" if self.step_age_s is None else f", {self.step_age_s:.0f} s ago"
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        found = [
            f"run {self.run_id}: step {self.step} of {self.max_steps}{loss}{age}",
            f"  training goodput {goodput}; last save: {f'step {self.last_save}' if self.last_save else 'none yet'}",
            f"  restarts left: {self.restarts_left} of {self.max_restarts}",
        ]
        if self.stopped:
            found.append(f"  the run stopped itself: {self.stopped}")
        if self.succeeded:
            found.append("  the run is complete")
        return found


def read_state(config: RunConfig, *, now: float | None = None) -> RunState:
    """From the event logs, the restart files and the markers; a run without any is at step 0."""
    steps, last_save = _steps(config)
    newest = max(steps, key=lambda event: int(event["step"]), default=None)
    stop, result = _json(config.run_dir / "stop.json"), _json(config.run_dir / "result.json")
    wall = time.time() if now is None else now
    return RunState(
        run_id=config.run_id,
        step=int(newest["step"]) if newest else 0,
        max_steps=config.training.max_steps,
        loss=float(newest["loss"]) if newest else None,
        step_age_s=max(0.0, wall - max(event.wall for event in steps)) if steps else None,
        goodput=_goodput(config.run_dir),
        last_save=last_save,
        num_restarts=len(list(config.restarts_dir.glob("restart-*.json"))),
        max_restarts=config.recovery.max_restarts,
        stopped=str(stop.get("reason", "")),
        succeeded=bool(result.get("succeeded", False)),
    )


def _steps(config: RunConfig) -> tuple[list[Event], int]:
    """The steps of all ranks, and the newest save of which every rank that ever saved has reported the end."""
    try:
        events = read_events(config.events_dir)
    except EventError:
        return [], 0
    steps = [event for rank in events.ranks() for event in events.of(rank) if event.kind == "step"]
    saved = [{int(event["step"]) for event in events.of(rank) if event.kind == "save_done"} for rank in events.ranks()]
    saved = [numbers for numbers in saved if numbers]
    return steps, max(set.intersection(*saved), default=0) if saved else 0


def _goodput(run_dir: Path) -> float | None:
    """A log may end in the middle of anything; a figure that it cannot give yet is no error here."""
    from payload import goodput

    try:
        return goodput.analyse(run_dir).training_goodput
    except (EventError, ZeroDivisionError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return dict(values)


def main(argv: Sequence[str]) -> int:
    """``run-state [RUN_ID]``: prints the state of the pod's run, or of another run beside it."""
    if len(argv) > 1:
        raise ConfigError(f"run-state: {' '.join(argv)!r}; legal: at most a run id")
    config = run_config()
    if argv:
        config = config.with_overrides({"run_id": argv[0]})
    sys.stdout.write(json.dumps(dataclasses.asdict(read_state(config))) + "\n")
    return 0
