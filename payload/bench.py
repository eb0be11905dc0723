"""``python -m payload bench recovery|article``: the recovery and checkpoint figures of this machine.

``recovery`` runs each arm that recovers without the kubelet over the same list of faults (exception, hang and SIGKILL,
of rank 0 and of the last rank, each ``--repeats`` times) and each checkpoint mode without faults, and measures the
disk with as many bytes as one save has. ``article`` runs the layered arm over the article's own schedule. Summaries are
kept a case a file, and one JSON file holds them all; ``bench-table`` makes the tables of docs/performance.md from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from payload import disk, settings
from payload.commands import EXIT_FAILED, prepare
from payload.config import RunConfig
from payload.local import LocalCluster
from payload.matrix import Case, CaseFailed, Matrix, Summary, machine, write_json
from payload.report import default_console
from payload.settings import CHECKOUT, Settings

KINDS = ("recovery", "article")
RESTARTING = ("in-job", "layered")
"""Arms that bring back a rank whose process was killed; in-process alone shrinks the world or gives up."""
FIRST_FAULT_STEP = 12
_PATHS = ("--out", "--folder")
ARTICLE: Mapping[str, Any] = {
    "faults.count": 5,
    "faults.seed": 42,
    "faults.types": ["exception", "hang"],
    "faults.type_weights": [0.6, 0.4],
}


def main(argv: Sequence[str]) -> int:
    """0 when every run completed, 1 when one did not. What was kept so far is used when called again."""
    parser = settings.parser("bench", "measures recoveries, checkpoints and the disk")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--repeats", type=int, default=5, help="faults a cell (default 5)")
    parser.add_argument("--spacing", type=int, default=10, help="steps between two faults (default 10)")
    parser.add_argument("--only", default="", help="cases to run, comma-separated (default all)")
    parser.add_argument("--folder", default="", help="where summaries are kept (default .demo/bench-<kind>-<profile>)")
    parser.add_argument("--out", required=True, help="the JSON file of all summaries")
    given = parser.parse_args(argv)
    if given.repeats < 1 or given.spacing < 1:
        parser.error("--repeats, --spacing: legal: from 1 on")
    found = settings.read(given)
    cases = recovery_cases(found.config, given.repeats, given.spacing) if given.kind == "recovery" else article_cases()
    names = [case.name for case in cases]
    wanted = given.only.split(",") if given.only else names
    if not set(wanted) <= set(names):
        parser.error(f"--only: {given.only!r}; legal: {', '.join(names)}")
    chosen = [case for case in cases if case.name in wanted]
    folder = Path(given.folder) if given.folder else CHECKOUT / ".demo" / f"bench-{given.kind}-{found.profile.stem}"
    console = default_console()
    command = f"python -m payload bench {' '.join(_without_paths(argv))}"
    try:
        write_json(Path(given.out), measure(found, chosen, folder, console, command))
    except CaseFailed as error:
        sys.stderr.write(f"bench: {error}\n")
        return EXIT_FAILED
    console.print(f"summaries: {given.out}", highlight=False)
    return 0


def _without_paths(argv: Sequence[str]) -> list[str]:
    """The arguments that the figures depend on."""
    kept, skip = [], False
    for word in argv:
        if not skip and not word.startswith(_PATHS):
            kept.append(word)
        skip = not skip and word in _PATHS
    return kept


def measure(found: Settings, cases: Sequence[Case], folder: Path, console: Console, command: str) -> dict[str, Any]:
    """Runs the cases, then measures the disk under the run folder. Raises CaseFailed."""
    cluster = LocalCluster(found.root)
    prepare(found, cluster)
    summaries = Matrix(found, cluster, folder, console).run(cases)
    size_bytes = max(summary["size_bytes"] for summary in summaries.values())
    speed = disk.measure(cluster.claim_folder(found.deployment.volume_claim), size_bytes)
    return {
        "command": command,
        "machine": machine(),
        "model": found.config.model.name,
        "precision": found.config.model.precision,
        "device": found.config.parallelism.device,
        "disk": asdict(speed),
        "cases": summaries,
    }


def recovery_cases(config: RunConfig, repeats: int, spacing: int) -> list[Case]:
    """One run an arm with all its faults, and one a checkpoint mode without faults."""
    cases = []
    for arm in ("in-process", *RESTARTING):
        faults = fault_list(config, arm, repeats, spacing)
        cases.append(
            Case(
                arm,
                {
                    "recovery.arm": arm,
                    "recovery.max_restarts": len(faults) + 5,
                    "recovery.max_node_faults": 0,
                    "training.max_steps": faults[-1]["step"] + spacing,
                    "faults.schedule": faults,
                },
            )
        )
    interval = config.checkpoint.interval
    for mode in ("sync", "async", "async-local"):
        overrides = {"checkpoint.mode": mode, "training.max_steps": 6 * interval}
        cases.append(Case(f"save-{mode}", overrides))
    return cases


def fault_list(config: RunConfig, arm: str, repeats: int, spacing: int) -> list[dict[str, Any]]:
    """The faults of one run, as faults.schedule: every kind in turn, ``repeats`` times over."""
    last = config.world_size - 1
    kinds = [("exception", 0), ("exception", last), ("hang", last)]
    if arm in RESTARTING:
        kinds += [("sigkill", 0), ("sigkill", last)]
    kinds = list(dict.fromkeys(kinds))
    return [
        {"step": FIRST_FAULT_STEP + number * spacing, "rank": rank, "type": kind}
        for number, (kind, rank) in enumerate(kinds * repeats)
    ]


def article_cases() -> list[Case]:
    """The article's schedule in the layered arm, and the run without faults that its end is compared with."""
    return [
        Case("reference", {"recovery.arm": "layered"}),
        Case("article", {"recovery.arm": "layered", **ARTICLE}),
    ]


def cells(summary: Summary) -> dict[tuple[str, bool], list[Summary]]:
    """Recoveries by fault type and whether rank 0 was hit."""
    found: dict[tuple[str, bool], list[Summary]] = {}
    for recovery in summary["recoveries"]:
        found.setdefault((recovery["type"], recovery["rank"] == 0), []).append(recovery)
    return found
