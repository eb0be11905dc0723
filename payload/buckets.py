"""Where the time of a run went: one rank's timeline cut into disjoint pieces that leave nothing out.

Every instant from the start of the run's first process to durable completion lies in exactly one bucket, so the
buckets add up to T. ``other`` is no remainder: it holds the intervals between two records of the rank that no
record explains, each of which is known by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from payload.events import EventError
from payload.timeline import Activity, Attempt, RankTimeline, RunTimeline, Signal

BUCKETS: dict[str, str] = {
    "useful": "last execution of each step",
    "replayed": "executions of steps that were done again later",
    "checkpoint stall": "training blocked by a save or a snapshot",
    "detect": "fault (else the last sign of life) to the first detection anywhere",
    "teardown": "detection until the last rank is out",
    "rendezvous": "until all ranks agree on the next attempt, back-off included",
    "rebuild": "processes, imports, communicator and model",
    "load": "state and data position",
    "warm-up": "state ready to the begin of the first step",
    "start-up": "first process to the first state ready",
    "data stall": "steps waiting for their batch",
    "drain": "waiting for the last save to be durable",
    "other": "between two records, explained by none",
}
_SKEW_S = 0.05
"""Clocks of two processes may differ by so much."""


@dataclass(frozen=True)
class Piece:
    begin: float
    end: float
    bucket: str
    step: int = 0
    """Of a step; else 0."""

    @property
    def duration_s(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Failure:
    """What ended an attempt. Times on the common axis, in order."""

    faults: tuple[Signal, ...]
    """Planned faults behind it; empty for any other failure."""
    begin: float
    detected: float
    out: float
    agreed: float
    stopped: bool
    """SIGTERM, not a failure."""


def find_failure(run: RunTimeline, attempt: Attempt, following: Attempt, idle_from: float) -> Failure:
    """What ended ``attempt`` of a rank, which then entered ``following``.

    Args:
        idle_from: end of the rank's last activity in ``attempt``.

    Raises:
        EventError: nothing says how the failure was noticed, or that the ranks left.
    """
    until = following.begin
    faults = tuple(run.between({"fault"}, attempt.begin, until))
    begin = faults[0].time if faults else idle_from
    where = f"between the attempts {attempt.generation} and {following.generation}"
    noticed = run.detections(begin - _SKEW_S, until) or run.between({"launcher_start"}, begin, until)
    if not noticed:
        raise EventError(f"no detected, workers_failed or container_exit {where}")
    detected = max(begin, noticed[0].time)
    agreed = _agreement(run, attempt, following, detected)
    out = [signal.time for signal in run.exits(detected - _SKEW_S, agreed)]
    if not out and noticed[0].kind != "launcher_start":
        raise EventError(f"no out, workers_failed or container_exit {where}")
    last_out = max(out, default=detected)
    stopped = not faults and bool(run.between({"stopping"}, attempt.begin, until))
    # Nobody knows when a failure that was not planned began: since the rank's last sign of life at the earliest.
    begin = detected if stopped else begin
    return Failure(faults, begin, detected, max(detected, last_out), max(last_out, agreed), stopped)


def _agreement(run: RunTimeline, attempt: Attempt, following: Attempt, detected: float) -> float:
    """In one process the entry into the next attempt; over processes the last pod's rendezvous."""
    if attempt.process == following.process:
        return following.begin
    met = run.between({"rendezvous"}, detected, following.begin)
    has_pods = any(signal.source.startswith("pod") for signal in run.signals)
    if has_pods and not met:
        raise EventError(f"no rendezvous before attempt {following.generation}")
    return met[-1].time if met else following.begin


def surviving(rank: RankTimeline) -> dict[int, tuple[int, Activity]]:
    """Step -> the attempt (by its place) and the activity of its last execution."""
    return {step.step: (place, step) for place, attempt in enumerate(rank.attempts) for step in attempt.steps}


class _Pen:
    """Paints onwards from where it stands; never back, never past the end."""

    def __init__(self, begin: float, end: float) -> None:
        self.at = begin
        self._end = end
        self.pieces: list[Piece] = []

    def to(self, time: float, bucket: str, step: int = 0) -> None:
        time = min(time, self._end)
        if time > self.at:
            self.pieces.append(Piece(self.at, time, bucket, step))
            self.at = time


def cut(run: RunTimeline, rank: RankTimeline) -> tuple[Piece, ...]:
    """The rank's pieces from ``run.begin`` to ``run.end``, each beginning where the one before ends."""
    pen = _Pen(run.begin, run.end)
    last = {step: place for step, (place, _) in surviving(rank).items()}
    attempts = rank.attempts
    for place, attempt in enumerate(attempts):
        if place == 0:
            pen.to(attempt.begin, "start-up")
        pending = _paint_build(pen, attempt, first=place == 0)
        for activity in attempt.activities:
            pen.to(activity.begin, pending)
            pending = "other"
            _paint_activity(pen, activity, survives=last.get(activity.step) == place)
        if place + 1 < len(attempts):
            _paint_failure(pen, find_failure(run, attempt, attempts[place + 1], pen.at), attempts[place + 1], pending)
        else:
            _paint_end(pen, run, rank, attempt, pending)
    if not attempts:
        pen.to(run.end, "start-up")
    return tuple(pen.pieces)


def _paint_build(pen: _Pen, attempt: Attempt, *, first: bool) -> str:
    """Paints the phases that ended; returns the bucket of the one that had not."""
    pending = "start-up" if first else "rebuild"
    if attempt.model_ready is not None:
        pen.to(attempt.model_ready, pending)
        pending = "start-up" if first else "load"
    if attempt.state_ready is not None:
        pen.to(attempt.state_ready, pending)
        pending = "warm-up"
    return pending


def _paint_activity(pen: _Pen, activity: Activity, *, survives: bool) -> None:
    if activity.kind == "step":
        pen.to(min(pen.at + activity.data_s, activity.end), "data stall")
        pen.to(activity.end, "useful" if survives else "replayed", activity.step)
    else:
        pen.to(activity.end, "drain" if activity.kind == "drain" else "checkpoint stall")


def _paint_failure(pen: _Pen, failure: Failure, following: Attempt, pending: str) -> None:
    pen.to(failure.begin, pending)
    pen.to(failure.detected, "detect")
    pen.to(failure.out, "teardown")
    pen.to(failure.agreed, "rendezvous")
    pen.to(following.begin, "rebuild")


def _paint_end(pen: _Pen, run: RunTimeline, rank: RankTimeline, attempt: Attempt, pending: str) -> None:
    """After the last activity: other ranks still draining, or a run that ended in a failure."""
    if run.complete and attempt.activities:
        pen.to(run.end, "drain" if attempt.activities[-1].kind == "drain" else "other")
        return
    faults = run.between({"fault"}, attempt.begin, run.end)
    begin = max(pen.at, faults[0].time) if faults else pen.at
    noticed = run.detections(begin - _SKEW_S, run.end)
    if not faults and not noticed:
        pen.to(run.end, pending)
        return
    stopped = bool(run.between({"stopping"}, attempt.begin, run.end)) and bool(noticed)
    pen.to(noticed[0].time if stopped and not faults else begin, pending)
    pen.to(noticed[0].time if noticed else run.end, "detect")
    out = run.exits(pen.at - _SKEW_S, run.end)
    pen.to(out[-1].time if out else run.end, "teardown")
    pen.to(run.end, "rendezvous")


def totals(pieces: Sequence[Piece]) -> dict[str, float]:
    """Seconds of each bucket, all of BUCKETS, in their order."""
    sums = dict.fromkeys(BUCKETS, 0.0)
    for piece in pieces:
        sums[piece.bucket] += piece.duration_s
    return sums


def check_sum(buckets: Mapping[str, float], duration_s: float) -> None:
    """Raises EventError where the buckets do not add up to T within 1e-6 s."""
    total = sum(buckets.values())
    if abs(total - duration_s) > 1e-6:
        raise EventError(f"buckets: they add up to {total:.9f} s of {duration_s:.9f} s")
