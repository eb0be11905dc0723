"""``python -m payload demo``: break the same training in the same ways under every arm, and compare what is left.

Table 1: the article's five faults (exceptions and hangs, drawn by its generator through its flags) on all four arms.
Table 2: SIGKILL of ranks, rank 0 included, on the arms that survive it with all ranks. Each run's final weights are
compared, bit by bit, with those of a run without faults. Table 3: what snapshots in node memory save.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from payload import settings
from payload.commands import EXIT_FAILED, describe, fresh, prepare, watch
from payload.config import ARMS, FLAGS, RunConfig, parse_value
from payload.faults import assert_same_schedule
from payload.goodput import RunReport, analyse
from payload.html_report import write_html
from payload.local import LocalCluster, on_host
from payload.report import default_console, equality, print_comparison
from payload.settings import Settings

ARTICLE_FLAGS = {
    "fault_count": "5",
    "fault_seed": "42",
    "fault_types": "exception,hang",
    "fault_type_weights": "0.6,0.4",
}
"""As the article gives them on the command line."""
KILL_ARMS = ("kubernetes", "in-job", "layered")


@dataclass(frozen=True)
class Comparison:
    title: str
    configs: tuple[RunConfig, ...]


def main(argv: Sequence[str]) -> int:
    """0 when every run completed with the final weights of the run without faults, 1 otherwise."""
    parser = settings.parser("demo", "trains, breaks, recovers and reports, every arm on this machine")
    parser.add_argument("--tables", default="1,2,3", help="which comparisons, comma-separated (default 1,2,3)")
    given = parser.parse_args(argv)
    _refuse_fault_flags(given, parser)
    wanted = set(given.tables.split(","))
    if not wanted <= {"1", "2", "3"}:
        parser.error(f"--tables: {given.tables!r}; legal: 1, 2 and 3, comma-separated")
    found = settings.read(given)
    console = default_console()
    base = fresh(found.config, "demo")
    comparisons = [item for number, item in enumerate(plan(base), start=1) if str(number) in wanted]
    for item in comparisons:
        assert_same_schedule(item.configs)
    cluster = LocalCluster(found.root)
    started = time.monotonic()
    prepare(found, cluster)
    console.print(f"set-up: data prepared in {time.monotonic() - started:.1f} s", highlight=False)
    return _run(found, cluster, base, comparisons, console)


def plan(base: RunConfig) -> list[Comparison]:
    """The runs of all tables; a run's id is the base's and what is special about it."""
    article = {FLAGS[name]: parse_value(FLAGS[name], text) for name, text in ARTICLE_FLAGS.items()}
    steps = base.training.max_steps
    plain = base.with_overrides({"checkpoint.memory_interval": 0})
    by_arm = {arm: _variant(plain, "t1", arm, article) for arm in ARMS}
    layered, with_memory = by_arm["layered"], _variant(base, "t3", "layered", article)
    kills = {
        "faults.schedule": [
            {"step": max(1, steps // 3), "rank": base.world_size - 1, "type": "sigkill"},
            {"step": max(1, 2 * steps // 3), "rank": 0, "type": "sigkill"},
        ]
    }
    flags = " ".join(f"--{name}={text}" for name, text in ARTICLE_FLAGS.items())
    return [
        Comparison(f"Table 1: {flags}", tuple(by_arm.values())),
        Comparison(
            "Table 2: SIGKILL of the last rank, then of rank 0",
            tuple(_variant(plain, "t2", arm, kills) for arm in KILL_ARMS),
        ),
        Comparison("Table 3: without and with snapshots in node memory", (layered, with_memory)),
    ]


def _variant(base: RunConfig, name: str, arm: str, faults: Mapping[str, Any]) -> RunConfig:
    return base.with_overrides({"run_id": f"{base.run_id}-{name}-{arm}", "recovery.arm": arm, **faults})


def _refuse_fault_flags(given: argparse.Namespace, parser: settings.LineParser) -> None:
    for name in (*ARTICLE_FLAGS, "arm", "run_id"):
        if getattr(given, name) is not None:
            parser.error(f"--{name}: the demo sets it; legal with the command run")


def _run(
    found: Settings, cluster: LocalCluster, base: RunConfig, comparisons: Sequence[Comparison], console: Console
) -> int:
    started = time.monotonic()
    reference = _one(found, cluster, base.with_overrides({"run_id": f"{base.run_id}-reference"}), "no fault", console)
    if reference is None:
        return EXIT_FAILED
    failed = False
    known: dict[str, RunReport | None] = {}
    for comparison in comparisons:
        for config in comparison.configs:
            if config.run_id not in known:
                title = f"{_short(config)} {config.recovery.arm}"
                known[config.run_id] = _one(found, cluster, config, title, console)
        ended = [known[config.run_id] for config in comparison.configs]
        reports = [report for report in ended if report is not None]
        equal = equality(reports, reference)
        failed = failed or None in ended or not all(equal.values())
        console.print()
        print_comparison(reports, equal=equal, title=comparison.title, console=console)
        page = found.root / "reports" / f"{base.run_id}-{_short(comparison.configs[-1])}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        write_html(page, [reference, *reports], equal=equal, reference=reference)
        console.print(f"page: {page}\n", highlight=False, soft_wrap=True)
    console.print(f"demo: {time.monotonic() - started:.0f} s without set-up", highlight=False)
    if failed:
        sys.stderr.write("demo: a run failed, or its final weights differ from those of the run without faults\n")
    return EXIT_FAILED if failed else 0


def _short(config: RunConfig) -> str:
    """``t1``, ``t2``: which table the run belongs to."""
    return config.run_id.removesuffix(f"-{config.recovery.arm}").rpartition("-")[2]


def _one(found: Settings, cluster: LocalCluster, config: RunConfig, title: str, console: Console) -> RunReport | None:
    """Runs it and says how it ended; None where it failed."""
    result = watch(found, config, cluster, title)
    console.print(f"{title}: {describe(result)}", highlight=False, markup=False)
    return analyse(on_host(config, cluster, found.deployment).run_dir) if result.succeeded else None
