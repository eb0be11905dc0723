"""What is counted in a run's log: steps, saves, restarts of each layer, and the gaps that nothing explains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from payload.buckets import Piece, surviving
from payload.timeline import RankTimeline, RunTimeline


@dataclass(frozen=True)
class Gap:
    """Time between two records of the reference rank that nothing explains."""

    duration_s: float
    after_step: int
    """The newest step done before it."""


@dataclass(frozen=True)
class Save:
    """One durable save on the reference rank."""

    step: int
    begin: float
    """When it began to block, on the run's axis."""
    blocking_s: float
    write_s: float | None
    """Until all its files were written; None where it was never finished."""


@dataclass(frozen=True)
class Restarts:
    """How often each layer started something again."""

    in_process: int
    """Entries into train() in a process that had been in it before, on the reference rank."""
    workers: int
    """Starts of the worker group by a launcher that had started it before: in-job restarts."""
    containers: int
    pods: int
    """Replacements of a pod."""
    backoff_raw_s: float
    """Back-off that a cluster would have waited, over all pods."""
    backoff_waited_s: float
    """Back-off waited here, on the local runner's compressed clock."""


def steps(rank: RankTimeline) -> dict[str, Any]:
    last = surviving(rank)
    executed = [(place, step) for place, attempt in enumerate(rank.attempts) for step in attempt.steps]
    again = [step for place, step in executed if last[step.step][0] != place]
    return {
        "final_step": max(last, default=0),
        "num_steps": len(last),
        "num_replayed_steps": len(again),
        "training_wall_s": _training_wall_s(rank),
        "losses": tuple((number, last[number][1].loss) for number in sorted(last)),
        "replays": tuple((step.step, step.loss) for step in again),
        "sha256": str(rank.train_end.event["sha256"]) if rank.train_end else "",
    }


def saves(rank: RankTimeline) -> tuple[Save, ...]:
    """A synchronous save is written before it is over, an asynchronous one after it."""
    found: list[Save] = []
    written: dict[int, float] = {}
    for signal in rank.signals:
        event = signal.event
        if signal.kind == "save":
            step, blocking_s = int(event["step"]), float(event["blocking_s"])
            found.append(Save(step, signal.time - blocking_s, blocking_s, written.pop(step, None)))
        elif signal.kind == "save_done":
            step, write_s = int(event["step"]), float(event["write_s"])
            place = next((i for i in reversed(range(len(found))) if found[i].step == step), None)
            if place is None or found[place].write_s is not None:
                written[step] = write_s
            else:
                found[place] = replace(found[place], write_s=write_s)
    return tuple(found)


def _training_wall_s(rank: RankTimeline) -> float:
    total = 0.0
    for process in range(len(rank.processes)):
        mine = [attempt for attempt in rank.attempts if attempt.process == process and attempt.last_step is not None]
        if mine:
            begin = mine[0].state_ready
            assert begin is not None
            total += mine[-1].steps[-1].end - begin
    return total


def gaps(pieces: tuple[Piece, ...]) -> tuple[Gap, ...]:
    found, newest = [], 0
    for piece in pieces:
        newest = piece.step or newest
        if piece.bucket == "other":
            found.append(Gap(piece.duration_s, newest))
    return tuple(sorted(found, key=lambda gap: -gap.duration_s))


def restarts(run: RunTimeline) -> Restarts:
    rank = run.reference
    entered = [attempt.process for attempt in rank.attempts]
    lives = [s for s in run.signals if s.kind == "launcher_start"]
    starts = [s for s in run.signals if s.kind == "pod_start"]
    waits = [s.event for s in run.signals if s.kind == "backoff"]
    if starts:
        containers = sum(s.event["restart_count"] > 0 for s in starts)
        pods = len(starts) - containers - len({s.event["index"] for s in starts})
    else:
        # No record of the Job (a cluster): each further life of a launcher is a container's restart.
        containers, pods = len(lives) - len({s.source for s in lives}), 0
    return Restarts(
        in_process=len(entered) - len(set(entered)),
        workers=len(_cycles_of_living_launchers(run)),
        containers=containers,
        pods=pods,
        backoff_raw_s=sum(float(event["raw_s"]) for event in waits),
        backoff_waited_s=sum(float(event["waited_s"]) for event in waits),
    )


def _cycles_of_living_launchers(run: RunTimeline) -> set[int]:
    """Starts of the worker group by a launcher that had started it before."""
    again: set[int] = set()
    started: dict[str, int] = {}
    for signal in run.signals:
        if signal.kind == "launcher_start":
            started[signal.source] = 0
        elif signal.kind == "workers_start":
            started[signal.source] = started.get(signal.source, 0) + 1
            if started[signal.source] > 1:
                again.add(int(signal.event["cycle"]))
    return again
