"""The event log of a run put in order: attempts and activities of each rank, and the signs of failure of all.

Times are seconds since the epoch on one axis. Within a process they follow its monotonic clock, anchored at the
wall clock of its first record, so that a step of the wall clock does not bend a duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from payload.events import Event, EventError, RunEvents

_STARTS = frozenset({"process_start", "launcher_start", "job_start"})
_DETECTIONS = {
    "rank": {"detected", "stopping", "process_end"},
    "pod": {"workers_failed", "launcher_end"},
    "job": {"container_exit", "node_lost", "pod_failed", "pod_deleted"},
}
_EXITS = {
    "rank": {"out", "process_end"},
    "pod": {"workers_failed", "launcher_end"},
    "job": {"container_exit", "pod_failed", "pod_deleted", "node_deleted"},
}
_STALLS = {"save": "blocking_s", "snapshot": "stall_s", "drain": "duration_s"}
_OVERLAP_S = 0.05
"""Records of one process may overlap by so much (rounding, threads); more is a broken log."""


@dataclass(frozen=True)
class Signal:
    """A record as a point on the common axis."""

    time: float
    event: Event

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def source(self) -> str:
        return self.event.source


@dataclass(frozen=True)
class Activity:
    """An interval that a rank recorded itself: step, save, snapshot or drain."""

    kind: str
    begin: float
    end: float
    step: int
    """0 for a drain."""
    data_s: float = 0.0
    """Of a step: waited for data, at its beginning."""
    loss: float = 0.0


@dataclass
class Attempt:
    """One entry of a rank into train()."""

    generation: str
    rank: int
    world_size: int
    process: int
    """Which process of the source, counted from 0."""
    begin: float
    group_ready: float | None = None
    model_ready: float | None = None
    state_ready: float | None = None
    state_step: int = 0
    tier: str = "none"
    load_s: float = 0.0
    size_bytes: int = 0
    last_step: int | None = None
    """Newest step done in this attempt."""
    activities: list[Activity] = field(default_factory=list)

    @property
    def steps(self) -> list[Activity]:
        return [activity for activity in self.activities if activity.kind == "step"]


@dataclass(frozen=True)
class RankTimeline:
    source: str
    processes: tuple[float, ...]
    """When each process of the rank was started."""
    attempts: tuple[Attempt, ...]
    signals: tuple[Signal, ...]
    train_end: Signal | None
    drained: float | None
    """When the last drain ended."""


@dataclass(frozen=True)
class RunTimeline:
    ranks: tuple[RankTimeline, ...]
    signals: tuple[Signal, ...]
    """All records of all sources but the steps, by time."""
    begin: float
    """Start of the first process of the run."""
    end: float
    """Durable completion, or the last record of a run that did not complete."""
    complete: bool

    @property
    def reference(self) -> RankTimeline:
        """Whose steps count: the lowest rank that finished, else the one that got farthest."""
        finished = [rank for rank in self.ranks if rank.train_end]
        return finished[0] if finished else max(self.ranks, key=_progress)

    def between(self, kinds: Iterable[str], begin: float, end: float) -> list[Signal]:
        wanted = set(kinds)
        return [signal for signal in self.signals if signal.kind in wanted and begin <= signal.time <= end]

    def detections(self, begin: float, end: float) -> list[Signal]:
        """Signs that somebody noticed a failure."""
        return [s for s in self.signals if begin <= s.time <= end and _is(s, _DETECTIONS) and not _good_end(s)]

    def exits(self, begin: float, end: float) -> list[Signal]:
        """Signs that a rank, or all ranks of a pod, left the failed attempt."""
        return [s for s in self.signals if begin <= s.time <= end and _is(s, _EXITS)]


def _progress(rank: RankTimeline) -> tuple[int, int]:
    """Newest step reached; of equal ones the lowest rank wins."""
    newest = max((step.step for attempt in rank.attempts for step in attempt.steps), default=-1)
    return newest, -int(rank.source.removeprefix("rank"))


def _is(signal: Signal, kinds: dict[str, set[str]]) -> bool:
    return signal.kind in kinds.get(signal.source.rstrip("0123456789"), ())


def _good_end(signal: Signal) -> bool:
    return signal.kind in ("process_end", "launcher_end", "container_exit") and signal.event["code"] == 0


def stamp(events: Sequence[Event]) -> tuple[Signal, ...]:
    """Puts one source's records on the common axis. A process begins with its start record."""
    anchors: dict[int, tuple[float, float]] = {}
    stamped = []
    for event in events:
        if event.kind in _STARTS or event.pid not in anchors:
            anchors[event.pid] = event.wall, event.mono
        wall, mono = anchors[event.pid]
        stamped.append(Signal(wall + event.mono - mono, event))
    return tuple(stamped)


def build(events: RunEvents) -> RunTimeline:
    """Raises EventError naming source and record where the log contradicts itself or lacks what it needs."""
    names = events.ranks()
    if not names:
        raise EventError("rank0: no events; legal: at least one rank's log")
    ranks = tuple(_rank(name, stamp(events.of(name))) for name in names)
    starts = [start for rank in ranks for start in rank.processes]
    every = [signal for rank in ranks for signal in rank.signals]
    for name in events.pods():
        signals = stamp(events.of(name))
        if not signals or signals[0].kind != "launcher_start":
            raise EventError(f"{name}: no launcher_start before its other records")
        starts.append(float(signals[0].event["started_wall"]))
        every += signals
    every += stamp(events.by_source.get("job", ()))
    every.sort(key=lambda signal: signal.time)
    begin, end, complete = min(starts), *_end(ranks, every)
    marks = tuple(signal for signal in every if signal.kind != "step")
    return RunTimeline(ranks, marks, begin, max(begin, end), complete)


def _end(ranks: Sequence[RankTimeline], every: Sequence[Signal]) -> tuple[float, bool]:
    finished = [rank for rank in ranks if rank.train_end]
    if not finished:
        return every[-1].time, False
    for rank in finished:
        if rank.drained is None:
            raise EventError(f"{rank.source}: train_end without a drain before it")
    return max(rank.drained for rank in finished if rank.drained is not None), True


def check_markers(run_dir: Path, timeline: RunTimeline) -> None:
    """Every fault that left its marker in ``faults/`` must be in the log. Raises EventError."""
    logged = {
        (int(signal.event["step"]), int(signal.event["rank"]), str(signal.event["type"]))
        for signal in timeline.signals
        if signal.kind == "fault"
    }
    folder = run_dir / "faults"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        _, step, rank, kind = path.name.split("-", 3)
        if (int(step), int(rank), kind) not in logged:
            raise EventError(f"fault of {kind} at step {step} on rank {rank} fired but no event fault is in the log")


def _rank(source: str, signals: tuple[Signal, ...]) -> RankTimeline:
    reader = _RankReader(source)
    for signal in signals:
        reader.take(signal)
    reader.finish()
    return RankTimeline(
        source, tuple(reader.processes), tuple(reader.attempts), signals, reader.train_end, reader.drained
    )


class _RankReader:
    """Groups one rank's records into attempts and checks that none is missing."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.processes: list[float] = []
        self.attempts: list[Attempt] = []
        self.train_end: Signal | None = None
        self.drained: float | None = None
        self._pid: int | None = None
        self._left: set[str] = set()
        """Which of ``detected`` and ``out`` came since the newest attempt."""

    def take(self, signal: Signal) -> None:
        kind, event = signal.kind, signal.event
        if kind == "process_start":
            self.processes.append(float(event["started_wall"]))
            self._pid = event.pid
        elif kind == "attempt":
            self._begin(signal)
        elif kind in ("group_ready", "model_ready", "state_ready"):
            self._ready(signal)
        elif kind in ("step", *_STALLS):
            self._act(signal)
        elif kind in ("detected", "out"):
            self._left.add(kind)
        elif kind == "train_end":
            self.train_end = signal

    def _begin(self, signal: Signal) -> None:
        event = signal.event
        if event.pid != self._pid:
            raise EventError(f"{self.source}: no process_start of process {event.pid} before its attempt")
        process = len(self.processes) - 1
        if self.attempts and self.attempts[-1].process == process:
            for kind in ("detected", "out"):
                if kind not in self._left:
                    before, after = self.attempts[-1].generation, event["generation"]
                    raise EventError(f"{self.source}: no {kind} between the attempts {before} and {after}")
        self._left.clear()
        self.attempts.append(
            Attempt(str(event["generation"]), int(event["rank"]), int(event["world_size"]), process, signal.time)
        )

    def _current(self, signal: Signal) -> Attempt:
        process = len(self.processes) - 1
        if not self.attempts or self.attempts[-1].process != process:
            raise EventError(f"{self.source}: {signal.kind} without an attempt before it")
        return self.attempts[-1]

    def _ready(self, signal: Signal) -> None:
        attempt, event = self._current(signal), signal.event
        if getattr(attempt, signal.kind) is not None or event.get("generation", attempt.generation) != (
            attempt.generation
        ):
            raise EventError(f"{self.source}: {signal.kind} of an attempt that is not in the log")
        setattr(attempt, signal.kind, signal.time)
        if signal.kind == "state_ready":
            attempt.state_step, attempt.tier = int(event["step"]), str(event["tier"])
            attempt.load_s, attempt.size_bytes = float(event["load_s"]), int(event["size_bytes"])

    def _act(self, signal: Signal) -> None:
        attempt, event = self._current(signal), signal.event
        for name in ("group_ready", "model_ready", "state_ready"):
            if getattr(attempt, name) is None:
                raise EventError(f"{self.source}: no {name} in attempt {attempt.generation} before its {signal.kind}")
        if signal.kind == "step":
            self._check_step(attempt, int(event["step"]))
            begin = signal.time - float(event["duration_s"])
            step, data_s, loss = int(event["step"]), float(event["data_s"]), float(event["loss"])
            activity = Activity("step", begin, signal.time, step, data_s, loss)
        else:
            begin = signal.time - float(event[_STALLS[signal.kind]])
            activity = Activity(signal.kind, begin, signal.time, int(event.get("step", 0)))
        if signal.kind == "drain":
            self.drained = signal.time
        _append(attempt, activity, self.source)

    def _check_step(self, attempt: Attempt, step: int) -> None:
        expected = (attempt.state_step if attempt.last_step is None else attempt.last_step) + 1
        attempt.last_step = step
        if step != expected:
            raise EventError(
                f"{self.source}: step {expected} missing in attempt {attempt.generation}: step {step} comes instead"
            )

    def finish(self) -> None:
        if self.attempts and not self.processes:
            raise EventError(f"{self.source}: no process_start")


def _append(attempt: Attempt, activity: Activity, source: str) -> None:
    """Keeps activities disjoint and in order; a stall inside a longer one is part of it."""
    activities = attempt.activities
    while (
        activities
        and activity.kind != "step"
        and activities[-1].kind != "step"
        and (activities[-1].begin >= activity.begin)
    ):
        activities.pop()
    floor = activities[-1].end if activities else (attempt.state_ready or attempt.begin)
    if activity.begin < floor:
        overlap_s = floor - activity.begin
        if overlap_s > _OVERLAP_S + 0.05 * (activity.end - activity.begin):
            what = f"{activity.kind} of step {activity.step}" if activity.step else activity.kind
            raise EventError(f"{source}: {what} begins {overlap_s:.3f} s before the record ahead of it ends")
        begin = min(floor, activity.end)
        activity = Activity(activity.kind, begin, activity.end, activity.step, activity.data_s, activity.loss)
    activities.append(activity)
