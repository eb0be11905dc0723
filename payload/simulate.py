"""A run played through step by step on a clock of its own: the exact fault schedule, before GPU hours are spent.

The rules are those of the training loop: one durable write in flight, a save counts once its files are written, also
while a fault is not yet detected, an abandoned one never does, the last step is always saved, and a fault fires once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from payload import faults
from payload.buckets import BUCKETS
from payload.calibration import Calibration, Phases, expected_phases, layer_of
from payload.config import RunConfig, TimeoutConfig
from payload.goodput import RunReport
from payload.job_controller import BACKOFF_RAW_S, CONTAINER_BACKOFF_MAX_RAW_S, CONTAINER_RESET_RAW_S


@dataclass(frozen=True)
class Scenario:
    arm: str
    mode: str
    """``sync``, ``async`` or ``async-local``."""
    num_steps: int
    interval: int
    memory_interval: int
    """0: no snapshots."""
    replicate: bool
    faults: tuple[tuple[int, str], ...]
    """Step at whose beginning it fires, and type."""
    timeouts: TimeoutConfig | None
    speedup: float = 1.0
    """Of the local runner's clock."""


@dataclass(frozen=True)
class Prediction:
    duration_s: float
    buckets: dict[str, float]
    num_replayed_steps: int
    recoveries: tuple[tuple[str, Phases], ...]

    @property
    def training_goodput(self) -> float:
        return self.buckets["useful"] / self.duration_s

    @property
    def infrastructure_goodput(self) -> float:
        return (self.buckets["useful"] + self.buckets["replayed"]) / self.duration_s


def scenario_of(config: RunConfig, *, speedup: float = 1.0) -> Scenario:
    """What the config asks for, its drawn faults included."""
    return Scenario(
        arm=config.recovery.arm,
        mode=config.checkpoint.mode,
        num_steps=config.training.max_steps,
        interval=config.checkpoint.interval,
        memory_interval=config.checkpoint.memory_interval,
        replicate=config.checkpoint.replicate,
        faults=tuple((spec.step, spec.type) for spec in faults.schedule(config)),
        timeouts=config.timeouts,
        speedup=speedup,
    )


def scenario_of_report(report: RunReport, timeouts: TimeoutConfig | None = None) -> Scenario:
    """What a run turned out to be, for a prediction beside its measurement."""
    return Scenario(
        arm=report.arm,
        mode=report.checkpoint_mode,
        num_steps=report.final_step,
        interval=_interval([save.step for save in report.saves], report.final_step),
        memory_interval=_interval([step for step, _ in report.snapshots], 0),
        replicate=False,
        faults=tuple((r.step, r.type) for r in report.recoveries if r.rank is not None),
        timeouts=timeouts,
        speedup=_speedup(report),
    )


def _interval(steps: Sequence[int], otherwise: int) -> int:
    """Steps between saves: the first one's step, as saves fall on multiples."""
    return min(steps, default=otherwise)


def _speedup(report: RunReport) -> float:
    restarts = report.restarts
    return restarts.backoff_raw_s / restarts.backoff_waited_s if restarts.backoff_waited_s else 1.0


def simulate(scenario: Scenario, calibration: Calibration) -> Prediction:
    """Raises ConfigError where the calibration lacks a layer's recovery or the snapshots' stall."""
    return _Run(scenario, calibration).play()


class _Run:
    def __init__(self, scenario: Scenario, calibration: Calibration) -> None:
        self._scenario, self._c = scenario, calibration
        self._is_sync = scenario.mode == "sync"
        self._snapshot_s = 0.0
        if scenario.memory_interval:
            # Where no run took snapshots of its own, a snapshot's stall is that of a save.
            stall_s = calibration.snapshot_stall_s
            self._snapshot_s = calibration.stall_s if stall_s is None else stall_s
        self._now = 0.0
        self._sums = dict.fromkeys(BUCKETS, 0.0)
        self._newest = 0
        """Newest step ever done."""
        self._committed = 0
        self._in_flight: tuple[int, float] | None = None
        """Step of the save that is being written, and when it is done."""
        self._snapshot = 0
        self._crashed_at: float | None = None
        self._backoff_raw_s = self._waited_raw_s = 0.0

    def play(self) -> Prediction:
        scenario, c = self._scenario, self._c
        waiting = list(scenario.faults)
        recoveries: list[tuple[str, Phases]] = []
        num_replayed = 0
        self._spend("start-up", c.start_up_s)
        self._spend("warm-up", c.warm_up_s)
        step = 0
        while step < scenario.num_steps:
            due = next((fault for fault in waiting if fault[0] == step + 1), None)
            if due is not None:
                waiting.remove(due)
                recoveries.append((due[1], self._recover(due[1])))
                step = self._resume(due[1])
                continue
            step += 1
            num_replayed += step <= self._newest
            self._do_step(step)
        self._drain()
        # Each step was spent as useful; the replays among them were done twice.
        again_s = num_replayed * c.step_s
        self._sums["useful"] -= again_s
        self._sums["replayed"] += again_s
        return Prediction(self._now, self._sums, num_replayed, tuple(recoveries))

    def _spend(self, bucket: str, duration_s: float) -> None:
        self._sums[bucket] += duration_s
        self._now += duration_s

    def _do_step(self, step: int) -> None:
        scenario, c = self._scenario, self._c
        self._spend("data stall", c.data_s)
        self._spend("useful", c.step_s)
        self._spend("other", c.between_s)
        self._newest = max(self._newest, step)
        self._commit()
        if scenario.memory_interval and step % scenario.memory_interval == 0:
            self._spend("checkpoint stall", self._snapshot_s)
            self._snapshot = step
        if step % scenario.interval == 0 or step == scenario.num_steps:
            self._save(step)

    def _commit(self) -> None:
        if self._in_flight is not None and self._in_flight[1] <= self._now:
            self._committed, self._in_flight = self._in_flight[0], None

    def _save(self, step: int) -> None:
        c = self._c
        if self._is_sync:
            self._spend("checkpoint stall", c.stall_s)
            self._committed = step
            return
        if self._in_flight is not None:
            self._spend("checkpoint stall", max(0.0, self._in_flight[1] - self._now))
            self._commit()
        self._in_flight = step, self._now + max(c.write_s, c.stall_s)
        self._spend("checkpoint stall", c.stall_s)

    def _recover(self, fault_type: str) -> Phases:
        scenario = self._scenario
        phases = expected_phases(self._c, scenario.arm, fault_type, scenario.timeouts)
        if layer_of(scenario.arm, fault_type) == "container":
            phases = replace(phases, rendezvous_s=phases.rendezvous_s + self._backoff_s())
        for bucket, duration_s in phases.by_bucket().items():
            self._spend(bucket, duration_s)
            if bucket == "detect":
                self._commit()
        return phases

    def _backoff_s(self) -> float:
        """As job_controller.py: back-off counts in raw seconds, the container's own time as it was."""
        speedup, waited_raw_s = self._scenario.speedup, self._waited_raw_s
        quiet_raw_s = math.inf
        if self._crashed_at is not None:
            quiet_raw_s = self._now - self._crashed_at - waited_raw_s / speedup + waited_raw_s
        raw_s = 0.0 if quiet_raw_s > CONTAINER_RESET_RAW_S else self._backoff_raw_s
        self._backoff_raw_s = min(CONTAINER_BACKOFF_MAX_RAW_S, max(BACKOFF_RAW_S, 2 * raw_s))
        self._crashed_at, self._waited_raw_s = self._now, raw_s
        return raw_s / speedup

    def _resume(self, fault_type: str) -> int:
        """The step to go on from; what was in flight is lost."""
        self._in_flight = None
        lost = layer_of(self._scenario.arm, fault_type) == "pod" and not self._scenario.replicate
        if lost:
            self._snapshot = 0
        return max(self._committed, self._snapshot)

    def _drain(self) -> None:
        if self._in_flight is not None:
            self._spend("drain", max(0.0, self._in_flight[1] - self._now))
            self._committed, self._in_flight = self._in_flight[0], None


@dataclass(frozen=True)
class Range:
    """Training goodput over seeds."""

    num: int
    mean: float
    low: float
    high: float


def over_seeds(config: RunConfig, calibration: Calibration, seeds: Iterable[int], *, speedup: float = 1.0) -> Range:
    """The same run with the faults of each seed."""
    found = [
        simulate(scenario_of(config.with_overrides({"faults.seed": seed}), speedup=speedup), calibration)
        for seed in seeds
    ]
    goodput = [prediction.training_goodput for prediction in found]
    return Range(len(goodput), fmean(goodput), min(goodput), max(goodput))
