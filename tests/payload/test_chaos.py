"""Long schedules of mixed faults on two pods of two ranks: ``make chaos``, about half an hour."""

from pathlib import Path
from typing import Any

import pytest

from payload.faults import schedule
from tests.payload.runs import Run, run_job

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

SOFT = ["exception", "hang"]
HARD = ["exception", "hang", "hang-c", "hang-stop", "sigkill", "pod-loss"]
TYPES = {"kubernetes": [*SOFT, "sigkill", "pod-loss"], "in-process": SOFT, "in-job": HARD, "layered": HARD}
LONG: dict[str, Any] = {
    "parallelism.ranks_per_node": 2,
    "training.max_steps": 60,
    "recovery.max_restarts": 60,
    "recovery.max_node_faults": 0,
}


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Run:
    overrides = {**LONG, "recovery.arm": "kubernetes", "checkpoint.mode": "sync"}
    return run_job(tmp_path_factory.mktemp("long"), token_folder, **overrides).check()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("arm", list(TYPES))
def test_ends_bit_equal(tmp_path: Path, token_folder: Path, long_reference: Run, arm: str, seed: int) -> None:
    """Six faults drawn from all types that the arm survives with all its ranks; memory tier on."""
    overrides = {
        **LONG,
        "recovery.arm": arm,
        "checkpoint.interval": 10,
        "checkpoint.memory_interval": 5,
        "faults.count": 6,
        "faults.seed": seed,
        "faults.types": TYPES[arm],
        "faults.include_rank0": True,
    }
    run = run_job(tmp_path, token_folder, timeout_s=1200, **overrides).check(long_reference)
    planned = [(spec.step, spec.rank, spec.type) for spec in schedule(run.config)]
    assert run.faults() == planned
