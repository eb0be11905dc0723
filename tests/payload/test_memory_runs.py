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
    assert {event["step"] for event in run.of("save_done")} == {12, 24, 25}
    assert len(run.of("snapshot")) >= 2 * 12
