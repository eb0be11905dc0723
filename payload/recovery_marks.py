"""The marks of each recovery: t0 fault ... t8 the step before the fault regained.

t0, t1 (detected) and t2 (all ranks out) are the earliest or last word of any rank, launcher or of the Job; t3
(rendezvous agreed) to t6 (state and data ready) are those of the last rank to get there in the attempt that went
on; t7 (first step done) and t8 are the reference rank's, whose steps count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from payload.buckets import Failure, find_failure
from payload.timeline import Attempt, RankTimeline, RunTimeline

MARKS = (
    "fault",
    "detected",
    "all ranks out",
    "rendezvous agreed",
    "communicator ready",
    "model ready",
    "state ready",
    "first step done",
    "caught up",
)
PHASES = ("detect", "teardown", "rendezvous", "communicator", "model", "load", "first step", "catch up")
"""Phase i lies between the marks i and i + 1."""


@dataclass(frozen=True)
class Recovery:
    type: str
    """The planned fault's; ``unplanned`` for any other failure, whose t0 is the reference rank's last sign of life
    before it (early by up to a step); ``stop`` for SIGTERM, whose t0 is t1."""
    step: int
    """At whose beginning the fault fired; for an unplanned one the step that could not be done."""
    rank: int | None
    marks: tuple[float | None, ...]
    """t0 .. t8 on the common axis; None for what did not happen any more."""
    resumed_step: int | None = None
    """Step of the state that was loaded."""
    tier: str | None = None
    """Where it was loaded from."""
    same_process: bool | None = None
    """The reference rank kept its process."""

    def _span(self, end: int, begin: int = 0) -> float | None:
        first, last = self.marks[begin], self.marks[end]
        return None if first is None or last is None else last - first

    @property
    def recovery_s(self) -> float | None:
        """t7 - t0: fault to the first step done."""
        return self._span(7)

    @property
    def caught_up_s(self) -> float | None:
        """t8 - t0."""
        return self._span(8)

    @property
    def published_s(self) -> float | None:
        """t6 - t0: what the article calls recovery time; the first step and the replay are left out."""
        return self._span(6)

    @property
    def phases_s(self) -> dict[str, float | None]:
        return {name: self._span(i + 1, i) for i, name in enumerate(PHASES)}


def find_recoveries(run: RunTimeline) -> tuple[Recovery, ...]:
    """By time. Raises EventError where the log lacks a mark of a recovery that took place."""
    rank = run.reference
    failures = [
        find_failure(run, before, after, idle_from(before))
        for before, after in zip(rank.attempts, rank.attempts[1:], strict=False)
    ]
    recoveries = [r for place in range(len(failures)) for r in _of_failure(run, rank, failures, place)]
    if rank.attempts and not run.complete:
        recoveries += _unfinished(run, rank.attempts[-1])
    return tuple(recoveries)


def idle_from(attempt: Attempt) -> float:
    """The last that the attempt got done, by its own records."""
    if attempt.activities:
        return attempt.activities[-1].end
    return attempt.state_ready or attempt.model_ready or attempt.group_ready or attempt.begin


def _of_failure(run: RunTimeline, rank: RankTimeline, failures: Sequence[Failure], place: int) -> list[Recovery]:
    attempts, failure = rank.attempts, failures[place]
    going_on = next((i for i in range(place + 1, len(attempts)) if attempts[i].last_step is not None), None)
    next_step = _newest_step(attempts[: place + 1]) + 1
    found = []
    origins: list[tuple[str, int, int | None, float]] = [
        (str(f.event["type"]), int(f.event["step"]), int(f.event["rank"]), f.time) for f in failure.faults
    ]
    kind = "stop" if failure.stopped else "unplanned"
    for name, step, hit, begin in origins or [(kind, next_step, None, failure.begin)]:
        detected = max(begin, failure.detected)
        marks: list[float | None] = [begin, detected, max(detected, failure.out)]
        if going_on is None:
            found.append(Recovery(name, step, hit, (*marks, *[None] * 6)))
            continue
        marks += _ready_marks(run, attempts[going_on], failures[going_on - 1])
        marks += _step_marks(attempts, going_on, step)
        resumed = attempts[going_on]
        same = attempts[place].process == resumed.process
        found.append(Recovery(name, step, hit, _in_order(marks), resumed.state_step, resumed.tier, same))
    return found


def _newest_step(attempts: Iterable[Attempt]) -> int:
    return max((max(attempt.state_step, attempt.last_step or 0) for attempt in attempts), default=0)


def _ready_marks(run: RunTimeline, resumed: Attempt, failure: Failure) -> list[float | None]:
    """t3 .. t6: those of the last rank in the attempt that went on."""
    same = [a for rank in run.ranks for a in rank.attempts if a.generation == resumed.generation]

    def last(read: Callable[[Attempt], float | None]) -> float | None:
        return max((time for attempt in same if (time := read(attempt)) is not None), default=None)

    entered = last(lambda attempt: attempt.begin)
    agreed = entered if failure.agreed == resumed.begin else failure.agreed
    ready = [last(lambda a: a.group_ready), last(lambda a: a.model_ready), last(lambda a: a.state_ready)]
    return [agreed, *ready]


def _step_marks(attempts: Sequence[Attempt], going_on: int, fault_step: int) -> list[float | None]:
    """t7 and t8 on the reference rank."""
    first = attempts[going_on].steps[0].end
    if attempts[going_on].state_step >= fault_step - 1:
        return [first, first]
    again = (step.end for attempt in attempts[going_on:] for step in attempt.steps if step.step == fault_step - 1)
    return [first, next(again, None)]


def _in_order(marks: Sequence[float | None]) -> tuple[float | None, ...]:
    """Clocks of hosts differ by a little: no mark lies before the one ahead of it."""
    ordered: list[float | None] = []
    floor = float("-inf")
    for mark in marks:
        floor = floor if mark is None else max(floor, mark)
        ordered.append(None if mark is None else floor)
    return tuple(ordered)


def _unfinished(run: RunTimeline, last: Attempt) -> list[Recovery]:
    """Faults that the run did not recover from."""
    found = []
    for fault in run.between({"fault"}, last.begin, run.end):
        noticed = [signal.time for signal in run.detections(fault.time, run.end)]
        marks = (fault.time, min(noticed, default=None), *[None] * 7)
        event = fault.event
        found.append(Recovery(str(event["type"]), int(event["step"]), int(event["rank"]), marks))
    return found
