"""``python -m payload plan [RUN_DIR...]``: what a run will lose, and what to change, before GPU hours are spent.

Without folders: the published failure rates and designs only. With folders of measured runs: their phases, the best
interval of each tier, the expected goodput and cost of the configured run, what stands in the way of a goal, and the
exact fault schedule played through for many seeds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from payload import settings
from payload.calibration import Calibration, calibrate, expected_phases, layer_of
from payload.config import ConfigError, RunConfig
from payload.events import EventError
from payload.goodput import analyse
from payload.plan_model import (
    MEASURED_MTTF_1024_H,
    PUBLISHED_TIERS,
    RATES,
    Constraint,
    FailureRate,
    Tier,
    best_interval_s,
    binding_constraint,
    sizes_table,
    training_goodput,
)
from payload.report import default_console, percent, seconds
from payload.simulate import Prediction, over_seeds, scenario_of, simulate

PRICE_PER_GPU_H = 55.04 / 8
"""US dollars: p5.48xlarge on demand in us-east-1, 2026-11; other regions and agreements differ."""
CAVEATS = (
    "First order: one failure at a time; below about 50 % the figures are rough.",
    "The rates are those of hardware under other people's jobs; software failures, maintenance and waiting for a "
    "replacement come on top.",
    f"Measured: jobs of 1,024 GPUs on RSC-1 failed every {MEASURED_MTTF_1024_H:g} h, sooner than the rates say.",
    "The stalls and recovery times of the designs are assumptions, not measurements; calibrate with a run of your own.",
)


def cli(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 where a log is not usable. Raises ConfigError."""
    parser = _parser()
    given = parser.parse_args(argv)
    console = default_console()
    rate = _rate(given.rate)
    if given.run_dir:
        config, speedup = _config(given)
        calibration = _calibration(given.run_dir)
        num_gpus = given.gpus or config.world_size
        failures_per_s = 1 / given.mtbf_s if given.mtbf_s else rate.per_gpu_h * num_gpus / 3600.0
        _print_calibration(console, calibration)
        _print_tiers(console, config, calibration, failures_per_s, num_gpus)
        _print_run(console, config, calibration, given, speedup)
        if given.goal is not None:
            console.print(f"goal: {goal_of(given.goal, config, calibration, failures_per_s)}", highlight=False)
    elif given.goal is not None:
        raise ConfigError("--goal: needs the folder of a measured run; legal: plan RUN_DIR... --goal 0.95")
    print_sizes(console, rate)
    return 0


def _parser() -> settings.LineParser:
    parser = settings.parser("plan", "predicts the training goodput of a run and says what limits it")
    parser.add_argument("run_dir", nargs="*", type=Path, help="measured runs: <workdir>/runs/<run_id>")
    parser.add_argument("--rate", default="llama3", help=f"{', '.join(RATES)}, or failures per GPU-hour")
    parser.add_argument("--mtbf-s", type=float, default=0.0, help="mean time between failures of the job instead")
    parser.add_argument(
        "--gpus", type=int, default=0, help="size of the job for --rate (default: the run's world size)"
    )
    parser.add_argument("--goal", type=float, help="training goodput asked for, such as 0.95")
    parser.add_argument("--seeds", type=int, default=20, help="fault schedules to play through")
    parser.add_argument("--queue-s", type=float, default=0.0, help="wait for the job's first process")
    parser.add_argument(
        "--price", type=float, default=PRICE_PER_GPU_H, help=f"US dollars a GPU-hour (default: {PRICE_PER_GPU_H:g})"
    )
    return parser


def _rate(text: str) -> FailureRate:
    if text in RATES:
        return RATES[text]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"--rate: {text!r}; legal: {', '.join(RATES)}, or failures per GPU-hour, above 0")
    return FailureRate("given", value, "as given")


def _config(given: argparse.Namespace) -> tuple[RunConfig, float]:
    if given.seeds < 1:
        raise ConfigError(f"--seeds: {given.seeds}; legal: 1 or more")
    if given.mtbf_s < 0 or given.gpus < 0 or given.queue_s < 0 or given.price < 0:
        raise ConfigError("--mtbf-s, --gpus, --queue-s, --price: legal: 0 or more")
    found = settings.read(given)
    return found.config, found.speedup


def _calibration(run_dirs: Sequence[Path]) -> Calibration:
    reports = []
    for run_dir in run_dirs:
        try:
            reports.append(analyse(run_dir))
        except EventError as error:
            raise ConfigError(f"{run_dir}: {error}; legal: folders of complete runs") from error
    return calibrate(reports)


def tiers_of(config: RunConfig, calibration: Calibration) -> list[Tier]:
    """The tiers that the calibration can speak of, each with the mean recovery of the run's fault types."""
    recovery_s = sum(seconds * share for seconds, share in recovery_parts(config, calibration).values())
    tiers = [
        Tier("durable, sync", calibration.write_s, 0.0, recovery_s),
        Tier("durable, async", calibration.stall_s, calibration.write_s, recovery_s),
    ]
    if calibration.snapshot_stall_s is not None:
        tiers.append(Tier("node memory", calibration.snapshot_stall_s, 0.0, recovery_s))
    return tiers


def recovery_parts(config: RunConfig, calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Cost -> (seconds where it occurs, share of the failures in which it does), for the run's mix of types.

    Detection is told apart by fault type, the other phases by the layer that restarts.
    """
    faults = config.faults
    weights = faults.type_weights or (1.0,) * len(faults.types)
    parts: dict[str, tuple[float, float]] = {}
    for kind, weight in zip(faults.types, weights, strict=True):
        share = weight / sum(weights)
        phases = expected_phases(calibration, config.recovery.arm, kind, config.timeouts)
        layer = layer_of(config.recovery.arm, kind)
        for bucket, duration_s in phases.by_bucket().items():
            name = f"{kind} detection" if bucket == "detect" else f"{bucket} ({layer} restart)"
            known_s, known_share = parts.get(name, (0.0, 0.0))
            total = known_share + share
            mean_s = (known_s * known_share + duration_s * share) / total if total else duration_s
            parts[name] = mean_s, total
    return parts


def goal_of(goal: float, config: RunConfig, calibration: Calibration, failures_per_s: float) -> Constraint:
    """Whether the goal can be met with the durable tier of the run's mode at the best interval. Raises ConfigError."""
    if not 0 < goal < 1:
        raise ConfigError(f"--goal: {goal:g}; legal: a fraction between 0 and 1")
    tier = _tier_of(config, calibration)
    return binding_constraint(goal, tier, recovery_parts(config, calibration), failures_per_s)


def _tier_of(config: RunConfig, calibration: Calibration) -> Tier:
    """The tier that a failure of this run is recovered from."""
    tiers = {tier.name: tier for tier in tiers_of(config, calibration)}
    if config.checkpoint.memory_interval and "node memory" in tiers:
        return tiers["node memory"]
    return tiers["durable, sync" if config.checkpoint.mode == "sync" else "durable, async"]


def _print_calibration(console: Console, calibration: Calibration) -> None:
    table = Table(title="Measured", title_justify="left", header_style="bold")
    table.add_column("recovery")
    for bucket in ("detect", "teardown", "rendezvous", "rebuild", "load", "warm-up", "sum"):
        table.add_column(bucket, justify="right")
    for (layer, kind), phases in calibration.phases.items():
        cells = (seconds(value) for value in (*phases.by_bucket().values(), phases.total_s))
        table.add_row(f"{kind}, {layer} restart", *cells)
    console.print(table)
    snapshot = calibration.snapshot_stall_s
    memory = "" if snapshot is None else f", snapshot in memory {1000 * snapshot:.1f} ms"
    console.print(
        f"step {1000 * calibration.cycle_s:.0f} ms, save blocks {1000 * calibration.stall_s:.0f} ms, written after "
        f"{seconds(calibration.write_s)}{memory}, start-up {seconds(calibration.start_up_s)}",
        highlight=False,
    )


def _print_tiers(
    console: Console, config: RunConfig, calibration: Calibration, failures_per_s: float, num_gpus: int
) -> None:
    mttf = seconds(1 / failures_per_s) if failures_per_s else "never"
    title = f"Best interval: {num_gpus} GPUs, a failure every {mttf}, recovery by the {config.recovery.arm} arm"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("tier", "stall", "write", "best interval", "steps", "training goodput"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in tiers_of(config, calibration):
        between_s = max(best_interval_s(tier, failures_per_s), calibration.cycle_s)
        table.add_row(
            tier.name,
            seconds(tier.stall_s),
            seconds(tier.write_s),
            seconds(between_s),
            f"{math.ceil(between_s / calibration.cycle_s)}",
            percent(training_goodput(tier, between_s, failures_per_s)),
        )
    console.print(table)


def _print_run(
    console: Console, config: RunConfig, calibration: Calibration, given: argparse.Namespace, speedup: float
) -> None:
    prediction = simulate(scenario_of(config, speedup=speedup), calibration)
    useful_s = prediction.buckets["useful"]
    dollars = cost(prediction, given.gpus or config.world_size, given.price)
    console.print(
        f"run {config.run_id}: {config.training.max_steps} steps, interval {config.checkpoint.interval}, "
        f"{len(prediction.recoveries)} faults of seed {config.faults.seed}: T {seconds(prediction.duration_s)}, "
        f"training goodput {percent(prediction.training_goodput)}, "
        f"ETTR {percent(useful_s / (prediction.duration_s + given.queue_s))} with {seconds(given.queue_s)} queued, "
        f"final drain {seconds(prediction.buckets['drain'])}, {dollars:,.2f} USD at {given.price:.2f} USD a GPU-hour",
        highlight=False,
    )
    if config.faults.count or config.faults.mtbf_s:
        found = over_seeds(config, calibration, range(given.seeds), speedup=speedup)
        console.print(
            f"{found.num} seeds: training goodput {percent(found.mean)} on average, "
            f"{percent(found.low)} to {percent(found.high)}",
            highlight=False,
        )


def cost(prediction: Prediction, num_gpus: int, price_per_gpu_h: float) -> float:
    """US dollars for T."""
    return prediction.duration_s / 3600.0 * num_gpus * price_per_gpu_h


def print_sizes(console: Console, rate: FailureRate) -> None:
    """Expected training goodput of the published designs from 16 to 100,000 GPUs, with the caveats."""
    table = Table(title=f"By size, at the rate of {rate.source}", title_justify="left", header_style="bold")
    table.add_column("GPUs", justify="right")
    table.add_column("MTTF", justify="right")
    for tier in PUBLISHED_TIERS:
        table.add_column(f"{tier.name}\nc {seconds(tier.stall_s)}, R {seconds(tier.recovery_s)}", justify="right")
    for row in sizes_table(rate, PUBLISHED_TIERS):
        table.add_row(f"{row.num_gpus:,}", f"{row.mttf_h:,.1f} h", *(f"{100 * g:.2f} %" for g in row.goodput))
    console.print(table)
    for caveat in CAVEATS:
        console.print(f"- {caveat}", style="dim", highlight=False)
