"""All figures of a run, computed from its event log after the fact.

T runs from the start of the run's first process to durable completion, the final drain included. Time is told apart
on the timeline of the reference rank (rank 0 where it finished), since a step is done by all ranks at once; faults,
detections, departures and the marks t3 to t6 are taken from all ranks, launchers (``pod<i>``) and the Job
(``job.jsonl``). Wall clock across processes, monotonic clock within one. A log that lacks a record raises EventError
naming it: nothing is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from payload import published, timeline
from payload.buckets import Piece, check_sum, cut, surviving, totals
from payload.events import EventError, read_events
from payload.recovery_marks import Recovery, find_recoveries
from payload.timeline import RankTimeline, RunTimeline


@dataclass(frozen=True)
class Gap:
    """Time between two records of the reference rank that nothing explains."""

    duration_s: float
    after_step: int
    """The newest step done before it."""


@dataclass(frozen=True)
class RecoveryStatistics:
    """Of the recoveries of one fault type; seconds."""

    num: int
    num_unrecovered: int
    mean_s: float
    max_s: float
    caught_up_mean_s: float
    published_mean_s: float


@dataclass(frozen=True)
class RankPieces:
    source: str
    pieces: tuple[Piece, ...]


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


@dataclass(frozen=True)
class RunReport:
    """Figures of one run. Fractions of 1, seconds."""

    run_id: str
    arm: str
    """Empty where the run left no result."""
    checkpoint_mode: str
    complete: bool
    note: str
    """What is missing in a partial report; empty for a complete one."""
    duration_s: float
    """T."""
    queued_s: float | None
    """Submission to the first process; None where nobody recorded the submission."""
    buckets: Mapping[str, float]
    final_step: int
    num_steps: int
    """Steps whose last execution is in the log."""
    num_replayed_steps: int
    training_wall_s: float
    """By process, state ready to last step; downtime inside a process included. Published formula only."""
    recoveries: tuple[Recovery, ...]
    restarts: Restarts
    losses: tuple[tuple[int, float], ...]
    """Step and loss of its last execution."""
    replays: tuple[tuple[int, float], ...]
    """Step and loss of the executions that were done again."""
    sha256: str
    """Of the final state; empty for a partial report."""
    versions: Mapping[str, str]
    """What really ran."""
    begin: float
    """Wall time of T's beginning."""
    ranks: tuple[RankPieces, ...] = field(repr=False)
    gaps: tuple[Gap, ...] = field(repr=False)
    """What ``other`` consists of, longest first."""
    num_torn: int = 0

    @property
    def training_goodput(self) -> float:
        """Surviving step time / T, without the wait for data."""
        return self.buckets["useful"] / self.duration_s

    @property
    def infrastructure_goodput(self) -> float:
        """Strict: all step time, replays included / T."""
        return (self.buckets["useful"] + self.buckets["replayed"]) / self.duration_s

    @property
    def published_infrastructure_goodput(self) -> float:
        """Comparison only."""
        spans = [r.published_s for r in self.recoveries if r.published_s is not None]
        return published.infrastructure_goodput(spans, self.duration_s)

    @property
    def published_training_goodput(self) -> float:
        """Comparison only."""
        return published.training_goodput(self.final_step, self.training_wall_s, self.duration_s)

    @property
    def checkpoint_efficiency(self) -> float:
        """1 - blocking time / T, the final drain counted as blocking."""
        return 1.0 - (self.buckets["checkpoint stall"] + self.buckets["drain"]) / self.duration_s

    @property
    def checkpoint_efficiency_without_drain(self) -> float:
        """The same, the drain left out of both."""
        return 1.0 - self.buckets["checkpoint stall"] / (self.duration_s - self.buckets["drain"])

    @property
    def published_checkpoint_efficiency(self) -> float:
        """Comparison only: the drain left out of the blocking time alone."""
        return published.checkpoint_efficiency(self.buckets["checkpoint stall"], self.duration_s)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: surviving step time / (T + time queued); None where that is not known."""
        return None if self.queued_s is None else self.buckets["useful"] / (self.duration_s + self.queued_s)

    @property
    def step_s(self) -> float:
        """Mean of the surviving steps: the speed of the run, whatever was replayed."""
        return self.buckets["useful"] / self.num_steps if self.num_steps else 0.0

    def recovery_statistics(self) -> dict[str, RecoveryStatistics]:
        """By fault type, in the order of their first occurrence."""
        kinds = dict.fromkeys(recovery.type for recovery in self.recoveries)
        return {kind: _statistics([r for r in self.recoveries if r.type == kind]) for kind in kinds}


def _statistics(recoveries: list[Recovery]) -> RecoveryStatistics:
    done = [r for r in recoveries if r.recovery_s is not None]
    times = [r.recovery_s for r in done if r.recovery_s is not None]
    caught_up = [r.caught_up_s for r in done if r.caught_up_s is not None]
    short = [r.published_s for r in done if r.published_s is not None]
    nan = float("nan")
    return RecoveryStatistics(
        num=len(recoveries),
        num_unrecovered=len(recoveries) - len(done),
        mean_s=fmean(times) if times else nan,
        max_s=max(times, default=nan),
        caught_up_mean_s=fmean(caught_up) if caught_up else nan,
        published_mean_s=fmean(short) if short else nan,
    )


def analyse(run_dir: Path) -> RunReport:
    """The report of the run in ``run_dir`` (``events/``, ``faults/``, ``result.json``).

    A run that did not finish yields a partial report: ``complete`` is false and ``note`` says why.

    Raises:
        EventError: the log contradicts itself or lacks a record that a figure needs.
    """
    run_dir = Path(run_dir)
    events = read_events(run_dir / "events")
    run = timeline.build(events)
    timeline.check_markers(run_dir, run)
    result = _result(run_dir)
    if result.get("succeeded") and not run.complete:
        raise EventError(f"{run_dir.name}: the result says succeeded but no rank has train_end")
    rank = run.reference
    pieces = cut(run, rank)
    buckets = totals(pieces)
    duration_s = run.end - run.begin
    check_sum(buckets, duration_s)
    asked = result.get("asked", {})
    return RunReport(
        run_id=str(asked.get("run_id", run_dir.name)),
        arm=str(asked.get("arm", "")),
        checkpoint_mode=str(asked.get("checkpoint_mode", "")),
        complete=run.complete,
        note=_note(run, result),
        duration_s=duration_s,
        queued_s=_queued_s(run),
        buckets=buckets,
        recoveries=find_recoveries(run),
        restarts=_restarts(run),
        versions=result.get("versions", {}),
        begin=run.begin,
        ranks=tuple(RankPieces(r.source, pieces if r is rank else cut(run, r)) for r in run.ranks),
        gaps=_gaps(pieces),
        num_torn=events.num_torn,
        **_steps(rank),
    )


def _result(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "result.json"
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _note(run: RunTimeline, result: Mapping[str, Any]) -> str:
    if run.complete:
        return ""
    stops = [signal for signal in run.signals if signal.kind == "job_end" and not signal.event["succeeded"]]
    why = str(stops[-1].event["reason"]) if stops else str(result.get("reason", ""))
    return "no rank has train_end; figures up to the last record" + (f"; {why}" if why else "")


def _queued_s(run: RunTimeline) -> float | None:
    submitted = [signal.time for signal in run.signals if signal.kind == "job_start"]
    return max(0.0, run.begin - submitted[0]) if submitted else None


def _steps(rank: RankTimeline) -> dict[str, Any]:
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


def _training_wall_s(rank: RankTimeline) -> float:
    total = 0.0
    for process in range(len(rank.processes)):
        mine = [attempt for attempt in rank.attempts if attempt.process == process and attempt.last_step is not None]
        if mine:
            begin = mine[0].state_ready
            assert begin is not None
            total += mine[-1].steps[-1].end - begin
    return total


def _gaps(pieces: tuple[Piece, ...]) -> tuple[Gap, ...]:
    found, newest = [], 0
    for piece in pieces:
        newest = piece.step or newest
        if piece.bucket == "other":
            found.append(Gap(piece.duration_s, newest))
    return tuple(sorted(found, key=lambda gap: -gap.duration_s))


def _restarts(run: RunTimeline) -> Restarts:
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
