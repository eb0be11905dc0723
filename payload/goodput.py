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

from payload import counts, published, timeline
from payload.buckets import Piece, check_sum, cut, totals
from payload.counts import Gap, Restarts, Save
from payload.events import EventError, read_events
from payload.recovery_marks import Recovery, find_recoveries
from payload.timeline import RunTimeline


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
    num_pods: int
    """Launchers in the log; 0 where none ran."""
    world_size: int
    """At the beginning."""
    saves: tuple[Save, ...]
    snapshots: tuple[tuple[int, float], ...]
    """Step and stall of each snapshot in node memory."""
    reference: str
    """The rank that the buckets are those of."""
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

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of the reference rank."""
        return next(rank.pieces for rank in self.ranks if rank.source == self.reference)

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
        restarts=counts.restarts(run),
        versions=result.get("versions", {}),
        begin=run.begin,
        num_pods=len(events.pods()),
        world_size=rank.attempts[0].world_size if rank.attempts else 0,
        saves=counts.saves(rank),
        snapshots=tuple(
            (int(s.event["step"]), float(s.event["stall_s"])) for s in rank.signals if s.kind == "snapshot"
        ),
        reference=rank.source,
        ranks=tuple(RankPieces(r.source, pieces if r is rank else cut(run, r)) for r in run.ranks),
        gaps=counts.gaps(pieces),
        num_torn=events.num_torn,
        **counts.steps(rank),
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
