"""The figures of a run as plain values: what is kept of a run when its log is gone, and what a program reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from payload.goodput import RunReport
from payload.recovery_marks import Recovery

SCHEMA = 1
"""Raised when a field changes its meaning."""


def summary(report: RunReport) -> dict[str, Any]:
    """JSON-ready: fractions of 1 and seconds; None for what is not known. No path, no host, no wall time."""
    return {
        "schema": SCHEMA,
        "run_id": report.run_id,
        "arm": report.arm,
        "checkpoint_mode": report.checkpoint_mode,
        "complete": report.complete,
        "note": report.note,
        "world_size": report.world_size,
        "num_pods": report.num_pods,
        "duration_s": report.duration_s,
        "queued_s": report.queued_s,
        "training_goodput": report.training_goodput,
        "infrastructure_goodput": report.infrastructure_goodput,
        "checkpoint_efficiency": report.checkpoint_efficiency,
        "checkpoint_efficiency_without_drain": report.checkpoint_efficiency_without_drain,
        "ettr": report.ettr,
        "published_formula": {
            "training_goodput": report.published_training_goodput,
            "infrastructure_goodput": report.published_infrastructure_goodput,
            "checkpoint_efficiency": report.published_checkpoint_efficiency,
        },
        "buckets_s": dict(report.buckets),
        "final_step": report.final_step,
        "step_s": report.step_s,
        "num_replayed_steps": report.num_replayed_steps,
        "recoveries": [_recovery(recovery) for recovery in report.recoveries],
        "restarts": asdict(report.restarts),
        "saves": [{"step": s.step, "blocking_s": s.blocking_s, "write_s": s.write_s} for s in report.saves],
        "sha256": report.sha256,
        "versions": dict(report.versions),
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "type": recovery.type,
        "step": recovery.step,
        "rank": recovery.rank,
        "resumed_step": recovery.resumed_step,
        "tier": recovery.tier,
        "recovery_s": recovery.recovery_s,
        "caught_up_s": recovery.caught_up_s,
        "published_s": recovery.published_s,
        "phases_s": recovery.phases_s,
    }


def write_summaries(path: Path, reports: Sequence[RunReport]) -> None:
    """A JSON list, one object a run; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps([summary(report) for report in reports], indent=1, sort_keys=True) + "\n")
    draft.replace(path)
