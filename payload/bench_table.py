"""``python -m payload bench-table FILE...``: the tables of docs/performance.md, from files that bench wrote."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from payload.bench import cells
from payload.recovery_marks import PHASES

GB = 1e9
_PLACE = re.compile(r"(<!-- results: ([^>]+) -->)\n.*?(<!-- end -->)", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m payload bench-table", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="of one machine; their cases go into one table")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="fill the places of a page that name their files")
    given = parser.parse_args(argv)
    if bool(given.files) == bool(given.update):
        parser.error("give either files or --update PAGE")
    if given.update:
        given.update.write_text(filled(given.update.read_text(), given.update.parent))
    else:
        sys.stdout.write(of_files(given.files))
    return 0


def filled(page: str, folder: Path) -> str:
    """The page with the text between ``<!-- results: FILE... -->`` and ``<!-- end -->`` made anew.

    Args:
        folder: that the files are named from.
    """

    def fill(place: re.Match[str]) -> str:
        return f"{place[1]}\n{of_files([folder / name for name in place[2].split()])}{place[3]}"

    return _PLACE.sub(fill, page)


def of_files(paths: Sequence[Path]) -> str:
    return tables(merged([json.loads(path.read_text()) for path in paths]))


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cases of all files under the facts of the first."""
    return {**results[0], "cases": {name: case for result in results for name, case in result["cases"].items()}}


def tables(results: dict[str, Any]) -> str:
    """Machine, recoveries by phase, saves and loads, and the article's schedule where it was run."""
    cases = results["cases"]
    parts = [_machine(results)]
    if any(summary["recoveries"] for summary in cases.values()):
        parts.append(_recoveries(cases))
    parts += [_checkpoints(results), _goodput(cases)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(results: dict[str, Any]) -> str:
    about, first = results["machine"], next(iter(results["cases"].values()))
    gpus = ", ".join(f"{about['gpus'].count(name)} x {name}" for name in dict.fromkeys(about["gpus"]))
    processor = f"{about['num_cpus']} cores, {about['memory_gib']} GiB"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first["versions"].items()))
    return "\n".join(
        [
            f"- machine: {gpus + ', ' if gpus else ''}{processor}",
            f"- model: {results['model']}, {results['precision']}, {first['world_size']} ranks on {results['device']}, "
            f"step {_ms(first['step_s'])}",
            f"- versions: {versions}",
            f"- command: `{results['command']}`",
        ]
    )


def _recoveries(cases: dict[str, Any]) -> str:
    header = ["arm", "fault", "n", "fault to first step: median (min .. max)", *PHASES[:-1], "loaded from"]
    rows = []
    for name, summary in cases.items():
        for (kind, first), recoveries in cells(summary).items():
            times = [r["recovery_s"] for r in recoveries if r["recovery_s"] is not None]
            spread = f"{median(times):.2f} s ({min(times):.2f} .. {max(times):.2f})" if times else "none recovered"
            phases = [_median_s(r["phases_s"][phase] for r in recoveries) for phase in PHASES[:-1]]
            tiers = ", ".join(dict.fromkeys(str(r["tier"]) for r in recoveries))
            where = f"{kind}, rank 0" if first else kind
            rows.append([name, where, str(len(recoveries)), spread, *phases, tiers])
    return _table(header, rows)


def _checkpoints(results: dict[str, Any]) -> str:
    rows = []
    for name, summary in results["cases"].items():
        saves, later = summary["saves"], summary["saves"][1:] or summary["saves"]
        rates = [summary["size_bytes"] / s["write_s"] / GB for s in saves if s["write_s"]]
        loads = [r["size_bytes"] / r["load_s"] / GB for r in summary["restores"] if r["tier"] == "durable"]
        rows.append(
            [
                name,
                summary["checkpoint_mode"],
                f"{summary['size_bytes'] / GB:.3f} GB",
                _ms(max(s["blocking_s"] for s in saves)),
                _ms(median(s["blocking_s"] for s in later)),
                f"{median(rates):.2f} GB/s" if rates else "-",
                f"{median(loads):.2f} GB/s a rank" if loads else "-",
                _ms(median(summary["snapshots_s"])) if summary["snapshots_s"] else "-",
            ]
        )
    header = ["case", "mode", "a save", "longest blocking", "median blocking, later saves", "write", "load", "snapshot"]
    speed = results["disk"]
    raw = f"{speed['write'] / GB:.2f} GB/s written with fsync, {speed['read'] / GB:.2f} GB/s read past the page cache"
    return f"{_table(header, rows)}\n\nThe disk itself, one stream of {speed['size_bytes'] / GB:.3f} GB: {raw}."


def _goodput(cases: dict[str, Any]) -> str:
    if "article" not in cases:
        return ""
    run, reference = cases["article"], cases.get("reference")
    same = "not compared" if reference is None else "yes" if run["sha256"] == reference["sha256"] else "no"
    rows = [
        ["steps", str(run["final_step"])],
        ["training goodput from the first step on", f"{run['training_goodput_from_first_step']:.1%}"],
        ["training goodput with start-up", f"{run['training_goodput']:.1%}"],
        ["replayed steps", str(run["num_replayed_steps"])],
        ["final weights equal those without faults", same],
    ]
    return _table(["the article's schedule, layered", ""], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median_s(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f}" if known else "-"


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.1f} ms" if value_s < 1 else f"{value_s:.2f} s"
