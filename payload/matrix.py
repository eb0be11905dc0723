"""A matrix of runs: named cases, each a change of one config, run one after the other and kept as JSON.

Interrupted, a matrix goes on where it was: a case whose summary is there is not run again.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.commands import describe, watch
from payload.config import RunConfig
from payload.events import read_events
from payload.goodput import RunReport, analyse
from payload.local import LocalCluster, on_host
from payload.settings import Settings
from payload.summary import summary

Summary = dict[str, Any]


class CaseFailed(RuntimeError):
    """A run of the matrix did not complete; the text names the case and the end of its log."""


@dataclass(frozen=True)
class Case:
    name: str
    """Of the file that its summary is kept in, and the end of its run id."""
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrix:
    """Where the runs of one command lie."""

    found: Settings
    cluster: LocalCluster
    folder: Path
    console: Console

    def run(self, cases: Sequence[Case]) -> dict[str, Summary]:
        """The summaries by case. Raises CaseFailed for the first run that does not complete."""
        return {case.name: self._one(case) for case in cases}

    def config(self, case: Case) -> RunConfig:
        run_id = f"{self.folder.name}-{case.name}".lower()
        return self.found.config.with_overrides({**case.overrides, "run_id": run_id})

    def _one(self, case: Case) -> Summary:
        path = self.folder / f"{case.name}.json"
        if path.exists():
            kept: Summary = json.loads(path.read_text())
            self.console.print(f"{case.name}: kept from {path}", highlight=False)
            return kept
        config = self.config(case)
        ended = watch(self.found, config, self.cluster, case.name)
        self.console.print(f"{case.name}: {describe(ended)}", highlight=False)
        if not ended.succeeded:
            raise CaseFailed(f"{case.name}: {describe(ended)}")
        made = summarise(on_host(config, self.cluster, self.found.deployment), case.overrides)
        write_json(path, made)
        return made


def summarise(config: RunConfig, overrides: Mapping[str, Any]) -> Summary:
    """All that the tables take from a finished run; ``config`` with paths of this machine."""
    report = analyse(config.run_dir)
    return {
        **summary(report),
        "overrides": dict(overrides),
        "training_goodput_from_first_step": from_first_step(report),
        "snapshots_s": [stall_s for _, stall_s in report.snapshots],
        "restores": _restores(config),
        "size_bytes": newest_save_bytes(config.checkpoint_dir),
    }


def from_first_step(report: RunReport) -> float:
    """Training goodput from the beginning of the first step on: start-up left out of T."""
    return report.buckets["useful"] / (report.duration_s - report.buckets["start-up"])


def _restores(config: RunConfig) -> list[Summary]:
    """Every load of every rank that read something."""
    events = read_events(config.events_dir)
    return [
        {"tier": event["tier"], "load_s": event["load_s"], "size_bytes": event["size_bytes"]}
        for source in events.ranks()
        for event in events.of(source)
        if event.kind == "state_ready" and event["size_bytes"]
    ]


def newest_save_bytes(folder: Path) -> int:
    """Bytes of the newest complete save over all ranks; 0 where there is none."""
    saves = sorted(folder.glob("step-*"))
    return sum(path.stat().st_size for path in saves[-1].iterdir()) if saves else 0


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Atomic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    draft.replace(path)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    page_bytes, num_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return {
        "num_cpus": os.cpu_count(),
        "memory_gib": round(page_bytes * num_pages / 2**30),
        "kernel": platform.release(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Names by nvidia-smi; empty where the machine has no such command."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except FileNotFoundError:
        return []
    return printed.split("\n")[:-1]
