"""The comparison of runs as a table in the terminal, and ``python -m payload report RUN_DIR...``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from payload import settings
from payload.buckets import BUCKETS
from payload.calibration import Calibration, calibrate
from payload.config import ConfigError, TimeoutConfig, load_profile
from payload.events import EventError
from payload.goodput import RecoveryStatistics, RunReport, analyse
from payload.published import MARK
from payload.simulate import scenario_of_report, simulate
from payload.summary import write_summaries

_WIDTH = 120
"""Of the table where the output is no terminal."""


@dataclass(frozen=True)
class Row:
    section: str
    label: str
    cells: tuple[str, ...]
    published: bool = False
    """By the article's formula: shown for comparison only."""


def percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Three significant digits at most; milliseconds below 0.1 s."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0 s"
    if abs(value) < 0.1:
        return f"{1000 * value:.0f} ms" if abs(value) >= 0.01 else f"{1000 * value:.1f} ms"
    return f"{value:.0f} s" if abs(value) >= 100 else f"{value:.1f} s" if abs(value) >= 10 else f"{value:.2f} s"


def label(report: RunReport) -> str:
    """The arm, and whether it took snapshots; or the run where it left no result."""
    return f"{report.arm}{' + memory' if report.snapshots else ''}" if report.arm else report.run_id


def equality(reports: Sequence[RunReport], reference: RunReport) -> dict[str, bool]:
    """Run id -> whether the final state is bit for bit that of ``reference``; incomplete runs are not equal."""
    return {report.run_id: bool(report.sha256) and report.sha256 == reference.sha256 for report in reports}


def rows(reports: Sequence[RunReport], equal: Mapping[str, bool]) -> list[Row]:
    """Every line of the comparison; one cell a run."""

    def row(section: str, name: str, cell: Callable[[RunReport], str], published: bool = False) -> Row:
        return Row(section, name, tuple(cell(report) for report in reports), published)

    return [
        row("goodput", "training goodput", lambda r: percent(r.training_goodput)),
        row("goodput", "infrastructure goodput (strict)", lambda r: percent(r.infrastructure_goodput)),
        row("goodput", f"infrastructure goodput, {MARK}", lambda r: percent(r.published_infrastructure_goodput), True),
        row("goodput", f"training goodput, {MARK}", lambda r: percent(r.published_training_goodput), True),
        row("goodput", "checkpoint efficiency, with drain", lambda r: percent(r.checkpoint_efficiency)),
        row("goodput", "checkpoint efficiency, without", lambda r: percent(r.checkpoint_efficiency_without_drain)),
        *_recovery_rows(reports),
        row("restarts", "in-process restarts", lambda r: str(r.restarts.in_process)),
        row("restarts", "worker restarts (in-job)", lambda r: str(r.restarts.workers)),
        row("restarts", "container restarts", lambda r: str(r.restarts.containers)),
        row("restarts", "pod replacements", lambda r: str(r.restarts.pods)),
        row("restarts", "replayed steps", lambda r: str(r.num_replayed_steps)),
        row("restarts", "back-off, raw / compressed", _backoff),
        row("run", "T, first process to durable", lambda r: seconds(r.duration_s)),
        row("run", "step, mean", lambda r: f"{1000 * r.step_s:.0f} ms"),
        row("run", "unexplained time (other)", lambda r: f"{100 * r.buckets['other'] / r.duration_s:.2f} %"),
        row("run", "complete", lambda r: f"yes, {r.final_step} steps" if r.complete else f"no, {r.final_step} steps"),
        row("run", "final weights equal", lambda r: _yes_no(equal.get(r.run_id))),
    ]


def _recovery_rows(reports: Sequence[RunReport]) -> list[Row]:
    statistics = [report.recovery_statistics() for report in reports]
    made = []
    for kind in dict.fromkeys(kind for found in statistics for kind in found):
        several = [found.get(kind) for found in statistics]
        numbers = {s.num for s in several if s}
        # The arms of a comparison have the same faults: their number is then said once.
        common = f" x{next(iter(numbers))}" if len(numbers) == 1 else ""
        made.append(Row("recovery", f"{kind}{common}, mean / max", tuple(_spans(s, not common) for s in several)))
        short = tuple(seconds(s.published_mean_s) if s else "-" for s in several)
        made.append(Row("recovery", f"{kind}, mean, {MARK}", short, True))
    return made


def _spans(statistics: RecoveryStatistics | None, with_number: bool) -> str:
    if statistics is None:
        return "-"
    s = statistics
    number = f" x{s.num}" if with_number else ""
    lost = f", {s.num_unrecovered} not recovered" if s.num_unrecovered else ""
    return f"{seconds(s.mean_s)} / {seconds(s.max_s)}{number}{lost}"


def _backoff(report: RunReport) -> str:
    return f"{seconds(report.restarts.backoff_raw_s)} / {seconds(report.restarts.backoff_waited_s)}"


def _yes_no(value: bool | None) -> str:
    return "not compared" if value is None else "yes" if value else "no"


def versions(reports: Sequence[RunReport]) -> str:
    """What really ran; where runs differ, each version with its runs."""
    found: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        for package, version in report.versions.items():
            found.setdefault(package, {}).setdefault(version, []).append(label(report))
    parts = []
    for package, by_version in found.items():
        if len(by_version) == 1:
            parts.append(f"{package} {next(iter(by_version))}")
        else:
            parts.append(", ".join(f"{package} {v} ({', '.join(runs)})" for v, runs in by_version.items()))
    return "; ".join(parts) or "not recorded"


def comparison_table(reports: Sequence[RunReport], equal: Mapping[str, bool], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", row_styles=None)
    table.add_column("")
    for report in reports:
        table.add_column(label(report), justify="right")
    section = ""
    for row in rows(reports, equal):
        if section and row.section != section:
            table.add_section()
        section = row.section
        style = "dim italic" if row.published else "bold" if row.label in ("training goodput",) else ""
        table.add_row(row.label, *(_coloured(row.label, cell) for cell in row.cells), style=style)
    return table


def _coloured(name: str, cell: str) -> str:
    if name != "final weights equal" or cell == "not compared":
        return cell
    return f"[green]{cell}[/green]" if cell == "yes" else f"[bold red]{cell}[/bold red]"


def print_comparison(
    reports: Sequence[RunReport],
    *,
    equal: Mapping[str, bool],
    title: str = "Comparison",
    console: Console | None = None,
) -> None:
    """Prints the table, what is incomplete, and the versions that ran.

    Args:
        equal: run id -> whether the final weights equal those of the run without faults.
    """
    console = console or default_console()
    console.print(comparison_table(reports, equal, title))
    for report in reports:
        if not report.complete:
            console.print(f"{label(report)}: partial report: {report.note}", style="yellow", markup=False)
        if report.num_torn:
            console.print(f"{label(report)}: {report.num_torn} records were cut off by a kill", markup=False)
    console.print(f"versions: {versions(reports)}", style="dim", markup=False, highlight=False)


def default_console() -> Console:
    """As wide as the terminal; of a fixed width where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def print_buckets(
    reports: Sequence[RunReport],
    *,
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    console: Console | None = None,
) -> None:
    """Where the time went, in seconds and as a share of T.

    Args:
        predicted: run id -> seconds of each bucket, shown beside the measured ones.
    """
    console = console or default_console()
    table = Table(title="Where the time went", title_justify="left", header_style="bold")
    table.add_column("bucket")
    columns: list[Mapping[str, float]] = []
    for report in reports:
        table.add_column(label(report), justify="right")
        columns.append(report.buckets)
        if predicted and report.run_id in predicted:
            table.add_column("predicted", justify="right", style="italic")
            columns.append(predicted[report.run_id])
    totals = [sum(column.values()) for column in columns]

    def cell(duration_s: float, total_s: float) -> str:
        return f"{duration_s:.2f} s {100 * duration_s / total_s:5.1f} %"

    for bucket in BUCKETS:
        if any(column[bucket] for column in columns):
            table.add_row(bucket, *(cell(c[bucket], total) for c, total in zip(columns, totals, strict=True)))
    table.add_section()
    table.add_row("sum = T", *(cell(total, total) for total in totals))
    console.print(table)


def predict(
    reports: Sequence[RunReport], calibration: Calibration, timeouts: TimeoutConfig | None
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """What the planner expects of each run, its own faults given.

    Returns run id -> seconds of each bucket, and a line for each run that it cannot speak of.
    """
    found, problems = {}, []
    for report in reports:
        try:
            scenario = scenario_of_report(report, timeouts)
            found[report.run_id] = simulate(scenario, calibration).buckets
        except ConfigError as error:
            problems.append(f"{label(report)}: no prediction: {error}")
    return found, problems


def choose_reference(reports: Sequence[RunReport]) -> RunReport | None:
    """The first complete run without a failure: the others' final weights are compared with its."""
    return next((report for report in reports if report.complete and not report.recoveries), None)


def cli(argv: Sequence[str]) -> int:
    """``report RUN_DIR... [--html FILE] [--json FILE] [--calibrate RUN_DIR ...]``.

    Returns the exit code: 0, or 1 where a log is not usable. Raises ConfigError.
    """
    parser = settings.LineParser(prog="python -m payload report", description="Compares runs by their event logs.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="folder of a run: <workdir>/runs/<run_id>")
    parser.add_argument("--html", type=Path, help="also write one self-contained page")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    parser.add_argument("--calibrate", nargs="+", type=Path, default=[], help="runs to predict the others from")
    parser.add_argument("--profile", help="profile whose time limits the runs had; for faults not in the calibration")
    given = parser.parse_args(argv)
    try:
        reports = [_analyse(run_dir) for run_dir in given.run_dir]
        measured = [_analyse(run_dir) for run_dir in given.calibrate]
    except EventError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    console = default_console()
    reference = choose_reference(reports)
    equal = equality(reports, reference) if reference else {}
    predicted: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    if measured:
        timeouts = load_profile(settings.profile_path(given.profile)).timeouts if given.profile else None
        predicted, problems = predict(reports, calibrate(measured), timeouts)
    print_comparison(reports, equal=equal, console=console)
    print_buckets(reports, predicted=predicted, console=console)
    for problem in problems:
        console.print(problem, style="yellow", markup=False)
    if given.json:
        write_summaries(given.json, reports)
    if given.html:
        from payload.html_report import write_html

        write_html(given.html, reports, equal=equal, reference=reference, predicted=predicted)
        console.print(f"page: {given.html}", markup=False, soft_wrap=True)
    return 0


def _analyse(run_dir: Path) -> RunReport:
    """Raises EventError naming the folder."""
    try:
        return analyse(run_dir)
    except EventError as error:
        raise EventError(f"{run_dir}: {error}") from error
