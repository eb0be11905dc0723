"""Snapshots in a whole run: what each layer comes back from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.payload.runs import Run, run_job

pytestmark = pytest.mark.launched


@pytest.mark.timeout(400)
def test_layered_comes_back_from_memory(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """An exception and a SIGKILL cost no step that had a snapshot, and the end is that of the run without faults."""
    run = run_job(
        tmp_path,
        token_folder,
        **{
            "recovery.arm": "layered",
            "checkpoint.mode": "async",
            "checkpoint.interval": 12,
            "checkpoint.memory_interval": 2,
            "faults.schedule": [
                {"step": 8, "rank": 1, "type": "exception"},
                {"step": 16, "rank": 0, "type": "sigkill"},
            ],
        },
    ).check(reference_run)
    ready = [(event["step"], event["tier"]) for event in run.of("state_ready") if event["tier"] != "none"]
    assert ready == [(6, "memory")] * 2 + [(14, "memory")] * 2
    saved = {event["step"] for event in run.of("save_done")}
    assert {24, 25} <= saved <= {12, 24, 25}  # That of 12 is dropped where the fault came first.
    assert len(run.of("snapshot")) >= 2 * 12


@pytest.mark.timeout(400)
def test_lost_pod_comes_back_from_its_replica(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """There is no durable save to come back from: the survivor has its memory, the new pod what the survivor holds."""
    run = run_job(
        tmp_path,
        token_folder,
        **{
            "recovery.arm": "layered",
            "checkpoint.mode": "async",
            "checkpoint.interval": 100,
            "checkpoint.memory_interval": 2,
            "checkpoint.replicate": True,
            "training.min_step_s": 0.2,
            "faults.schedule": [{"step": 16, "rank": 1, "type": "pod-loss"}],
        },
    ).check(reference_run)
    ready = {event.source: (event["step"], event["tier"]) for event in run.of("state_ready") if event["step"]}
    assert {source: tier for source, (_, tier) in ready.items()} == {"rank0": "memory", "rank1": "replica"}
    assert len({step for step, _ in ready.values()}) == 1
