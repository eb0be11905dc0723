"""What the planner takes from measured runs: the time of a step, a save, and each phase of a recovery by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median

from payload.config import ConfigError, TimeoutConfig
from payload.goodput import RunReport
from payload.recovery_marks import Recovery

_HANGS = frozenset({"hang", "hang-c", "hang-stop"})
_PHASES = ("detect", "teardown", "rendezvous", "rebuild", "load", "warm-up")

LAYERS: dict[str, dict[str, str]] = {
    "kubernetes": dict.fromkeys(("exception", "hang", "hang-c", "hang-stop", "sigkill"), "container"),
    "in-process": {
        **dict.fromkeys(("exception", "hang"), "process"),
        **dict.fromkeys(("hang-c", "hang-stop", "sigkill"), "container"),
    },
    "in-job": dict.fromkeys(("exception", "hang", "hang-c", "hang-stop", "sigkill"), "worker"),
    "layered": {
        **dict.fromkeys(("exception", "hang"), "process"),
        **dict.fromkeys(("hang-c", "hang-stop", "sigkill"), "worker"),
    },
}
"""Arm -> fault type -> the layer that restarts; pod and node loss are the Job controller's in every arm."""


def layer_of(arm: str, fault_type: str) -> str:
    """``process``, ``worker``, ``container`` or ``pod``. Raises ConfigError for an unknown arm or type."""
    if arm not in LAYERS:
        raise ConfigError(f"recovery.arm: {arm!r}; legal: {', '.join(LAYERS)}")
    if fault_type in ("pod-loss", "node-loss"):
        return "pod"
    if fault_type not in LAYERS[arm]:
        raise ConfigError(f"faults.types: {fault_type!r}; legal: {', '.join(LAYERS[arm])}, pod-loss, node-loss")
    return LAYERS[arm][fault_type]


@dataclass(frozen=True)
class Phases:
    """One recovery by bucket, fault to the begin of the first step; seconds."""

    detect_s: float
    teardown_s: float
    rendezvous_s: float
    """Without back-off."""
    rebuild_s: float
    load_s: float
    warm_up_s: float

    @property
    def total_s(self) -> float:
        return sum(self.by_bucket().values())

    def by_bucket(self) -> dict[str, float]:
        return {name: getattr(self, field.name) for name, field in zip(_PHASES, fields(self), strict=True)}


@dataclass(frozen=True)
class Calibration:
    """Means over the runs; seconds."""

    step_s: float
    """Without the wait for data."""
    data_s: float
    """Wait for data, of each step."""
    between_s: float
    """Between two steps that nothing explains, of each step."""
    start_up_s: float
    warm_up_s: float
    """Of the first attempt."""
    stall_s: float
    """Blocked by one durable save that had to wait for none before it."""
    write_s: float
    """Begin of a durable save until its files are written."""
    snapshot_stall_s: float | None
    """None where no run took snapshots in memory."""
    phases: dict[tuple[str, str], Phases]
    """(layer, fault type) -> its mean recovery."""

    @property
    def cycle_s(self) -> float:
        """From one step to the next."""
        return self.step_s + self.data_s + self.between_s


def calibrate(reports: Sequence[RunReport]) -> Calibration:
    """Raises ConfigError naming what the runs do not hold."""
    usable = [report for report in reports if report.complete]
    if not usable:
        raise ConfigError("calibration: no complete run; legal: at least one")
    num_steps = sum(report.num_steps + report.num_replayed_steps for report in usable)

    def per_step(*buckets: str) -> float:
        return sum(report.buckets[bucket] for report in usable for bucket in buckets) / num_steps

    stalls = [stall_s for report in usable for stall_s in _free_stalls(report)]
    if not stalls:
        raise ConfigError("calibration: no durable save that waited for none before it; legal: a run with one")
    writes = [save.write_s for report in usable for save in report.saves if save.write_s is not None]
    snapshots = [stall_s for report in usable for _, stall_s in report.snapshots]
    return Calibration(
        step_s=per_step("useful", "replayed"),
        data_s=per_step("data stall"),
        between_s=per_step("other"),
        start_up_s=fmean(report.buckets["start-up"] for report in usable),
        warm_up_s=fmean(_first_warm_up_s(report) for report in usable),
        stall_s=median(stalls),
        write_s=fmean(writes) if writes else median(stalls),
        snapshot_stall_s=fmean(snapshots) if snapshots else None,
        phases=_phases(usable),
    )


def _free_stalls(report: RunReport) -> list[float]:
    """Blocking times of the saves that found no write in flight; all of them where nothing is written later."""
    free, busy_until = [], 0.0
    for save in report.saves:
        if save.begin >= busy_until:
            free.append(save.blocking_s)
        busy_until = save.begin + (save.write_s or save.blocking_s)
    return free


def _first_warm_up_s(report: RunReport) -> float:
    return next((piece.duration_s for piece in report.pieces if piece.bucket == "warm-up"), 0.0)


def _phases(reports: Sequence[RunReport]) -> dict[tuple[str, str], Phases]:
    found: dict[tuple[str, str], list[Phases]] = {}
    for report in reports:
        wait_s = _backoff_of_one_s(report)
        for recovery in report.recoveries:
            if recovery.type in ("stop", "unplanned") or recovery.recovery_s is None:
                continue
            layer = layer_of(report.arm, recovery.type)
            phases = _measured(report, recovery)
            if layer == "container":
                phases = replace(phases, rendezvous_s=max(0.0, phases.rendezvous_s - wait_s))
            found.setdefault((layer, recovery.type), []).append(phases)
    return {key: _mean(several) for key, several in found.items()}


def _backoff_of_one_s(report: RunReport) -> float:
    """Back-off waited in one recovery of the containers; the log counts each pod's."""
    num_pods = max(1, report.num_pods)
    times = sum(layer_of(report.arm, r.type) == "container" for r in report.recoveries if r.rank is not None)
    return report.restarts.backoff_waited_s / num_pods / times if times else 0.0


def _measured(report: RunReport, recovery: Recovery) -> Phases:
    begin, end = recovery.marks[0], recovery.marks[7]
    assert begin is not None and end is not None
    sums = dict.fromkeys(_PHASES, 0.0)
    for piece in report.pieces:
        inside_s = min(piece.end, end) - max(piece.begin, begin)
        if inside_s > 0 and piece.bucket in sums:
            sums[piece.bucket] += inside_s
    return Phases(*sums.values())


def _mean(several: Sequence[Phases]) -> Phases:
    return Phases(*(fmean(getattr(phases, field.name) for phases in several) for field in fields(Phases)))


def expected_phases(calibration: Calibration, arm: str, fault_type: str, timeouts: TimeoutConfig | None) -> Phases:
    """Measured where that fault was; else the layer's other recoveries with this fault's detection.

    Raises ConfigError where no recovery of the layer was measured, or a hang's time limits are not known.
    """
    layer = layer_of(arm, fault_type)
    if (layer, fault_type) in calibration.phases:
        return calibration.phases[layer, fault_type]
    others = [phases for (other, _), phases in calibration.phases.items() if other == layer]
    if not others:
        types = ", ".join(kind for kind in LAYERS[arm] if LAYERS[arm][kind] == layer) or "pod-loss"
        raise ConfigError(
            f"calibration: no recovery of the {layer} layer measured; legal: a run of arm {arm} with a fault of {types}"
        )
    mean = _mean(others)
    return replace(mean, detect_s=_detection_s(calibration, arm, fault_type, timeouts))


def _detection_s(calibration: Calibration, arm: str, fault_type: str, timeouts: TimeoutConfig | None) -> float:
    if fault_type in _HANGS:
        if timeouts is None:
            raise ConfigError(f"calibration: detection of {fault_type} not measured; legal: with the run's timeouts")
        limits = {
            "kubernetes": timeouts.process_group_s,
            "in-job": min(timeouts.heartbeat_s, timeouts.process_group_s),
        }
        return limits.get(arm, timeouts.soft_s)
    prompt = [phases.detect_s for (_, kind), phases in calibration.phases.items() if kind not in _HANGS]
    if prompt:
        return fmean(prompt)
    return timeouts.poll_s if timeouts else 0.0
