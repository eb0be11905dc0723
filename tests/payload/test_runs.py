"""Whole runs: real launchers, agents and workers, broken in every way, end with the weights of the run without faults.

Each launched run serves as many claims as it can; the reference run is shared (conftest.py).
"""

from pathlib import Path
from typing import Any

import pytest

from payload.local import LocalCluster
from tests.payload.runs import Run, at_step, run_job

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]


def faults(*planned: tuple[int, int, str]) -> dict[str, Any]:
    """(step, rank, type) of each."""
    return {"faults.schedule": [{"step": step, "rank": rank, "type": kind} for step, rank, kind in planned]}


def worker_starts(run: Run, rank: int = 0) -> int:
    return sum(event.kind == "process_start" for event in run.events.of(f"rank{rank}"))


def test_kubernetes_survives_exception_and_sigkill_of_rank_0(
    tmp_path: Path, token_folder: Path, reference_run: Run
) -> None:
    """F27, F28: each fault fires once, whatever restarts; every replayed step has the loss it had before."""
    planned = [(8, 1, "exception"), (14, 0, "sigkill")]
    run = run_job(tmp_path, token_folder, **{"recovery.arm": "kubernetes", **faults(*planned)}).check(reference_run)
    assert run.faults() == planned
    assert run.job.num_container_restarts == 4 and run.job.num_pod_replacements == 0
    assert worker_starts(run) == 3
    assert run.job.backoff_raw_s == 20.0, "both kubelets restart a first crash at once, a second one after 10 s"


def test_in_process_survives_exception_and_hang_without_a_new_process(
    tmp_path: Path, token_folder: Path, reference_run: Run
) -> None:
    planned = [(8, 1, "exception"), (14, 0, "hang")]
    run = run_job(tmp_path, token_folder, **{"recovery.arm": "in-process", **faults(*planned)}).check(reference_run)
    assert run.faults() == planned
    assert run.job.num_container_restarts == run.job.num_pod_replacements == 0
    assert worker_starts(run, 0) == worker_starts(run, 1) == 1


def test_in_job_survives_sigkill_of_rank_0_and_a_stopped_process(
    tmp_path: Path, token_folder: Path, reference_run: Run
) -> None:
    """F04: a kill one step after the save of step 10 began: it is there whole afterwards, or not at all."""
    planned = [(11, 0, "sigkill"), (17, 1, "hang-stop")]
    overrides = {"recovery.arm": "in-job", "checkpoint.mode": "async", **faults(*planned)}
    run = run_job(tmp_path, token_folder, **overrides).check(reference_run)
    assert run.faults() == planned
    resumed = [event["step"] for event in run.events.of("rank0") if event.kind == "state_ready"]
    begun = [event["step"] for event in run.events.of("rank0") if event.kind == "save"]
    assert resumed[0] == 0 and resumed[1] in (5, 10) and resumed[2] in (10, 15)
    assert begun[:2] == [5, 10] and (resumed[1] == 10 or begun.count(10) == 2), "an unfinished save is made again"
    assert run.job.num_container_restarts == run.job.num_pod_replacements == 0
    assert worker_starts(run) == 3


def test_layered_takes_each_fault_at_its_layer(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """Exception and hang inside the process, SIGKILL by the launcher: one new process a rank in all."""
    planned = [(7, 1, "exception"), (12, 0, "sigkill"), (18, 1, "hang")]
    run = run_job(tmp_path, token_folder, **{"recovery.arm": "layered", **faults(*planned)}).check(reference_run)
    assert run.faults() == planned
    assert run.job.num_container_restarts == run.job.num_pod_replacements == 0
    assert worker_starts(run, 0) == worker_starts(run, 1) == 2


def test_f24_loss_of_a_pod_and_of_pod_0(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """F24: pod 0 takes the store with it, and all launchers with that; fresh pods resume from the last save."""
    planned = [(8, 1, "pod-loss"), (14, 0, "pod-loss")]
    run = run_job(tmp_path, token_folder, **{"recovery.arm": "layered", **faults(*planned)}).check(reference_run)
    assert run.faults() == planned
    assert run.job.num_container_restarts == 0 and run.job.num_pod_replacements >= 2
    assert {event["index"] for event in run.of("pod_failed")} == {0, 1}


def test_loss_of_a_node(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """The pod stays terminating until its node object is deleted; its replacement runs on another node."""
    run = run_job(tmp_path, token_folder, **{"recovery.arm": "in-job", **faults((8, 1, "node-loss"))})
    run.check(reference_run)
    starts = [event for event in run.of("pod_start") if event["index"] == 1]
    (deleted,) = run.of("node_deleted")
    assert len(starts) == 2 and starts[0]["node"] != starts[1]["node"]
    assert starts[1].wall > deleted.wall > run.of("node_lost")[0].wall


@pytest.mark.parametrize("arm", ["kubernetes", "layered"])
def test_a_deleted_job_saves_once_more_and_resumes(
    tmp_path: Path, token_folder: Path, reference_run: Run, arm: str
) -> None:
    """SIGTERM: every rank stops after the same step and saves it; the next Job of the run goes on there."""

    def delete(cluster: LocalCluster) -> None:
        cluster.request("job-delete")

    overrides = {"recovery.arm": arm, "training.min_step_s": 0.1}
    first = run_job(tmp_path, token_folder, watch=at_step(7, delete), **overrides)
    assert not first.job.succeeded and first.job.reason == "deleted by request"
    assert {event["code"] for event in first.of("container_exit")} == {143}, first.output()
    stopped = {event["step"] for event in first.of("stopping")}
    assert len(stopped) == 1, "all ranks after the same step"
    second = run_job(tmp_path, token_folder, **overrides).check()
    ready = [event["step"] for event in second.of("state_ready")]
    assert ready[-1] == stopped.pop(), "nothing is done again"
    assert second.sha256 == reference_run.sha256


def test_a_deleted_pod_saves_and_is_replaced(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    def delete(cluster: LocalCluster) -> None:
        cluster.request("pod-delete", 1)

    overrides = {"recovery.arm": "in-job", "training.min_step_s": 0.1}
    run = run_job(tmp_path, token_folder, watch=at_step(7, delete), **overrides).check(reference_run)
    assert run.job.num_pod_replacements >= 1
    assert len({event["step"] for event in run.of("stopping")}) == 1


def test_state_follows_the_rank_and_not_the_pod(tmp_path: Path, token_folder: Path, reference_run: Run) -> None:
    """From the second start on the pods change their indices: each finds the memory that the other rank left."""
    swap = tmp_path / "swap.py"
    swap.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "mark = Path(os.environ['TMPDIR'], 'started')\n"
        "if mark.exists():\n"
        "    os.environ['JOB_COMPLETION_INDEX'] = str(1 - int(os.environ['JOB_COMPLETION_INDEX']))\n"
        "mark.touch()\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'payload.launcher'])\n"
    )
    run = run_job(
        tmp_path,
        token_folder,
        command=["python", str(swap)],
        **{"recovery.arm": "kubernetes", "checkpoint.memory_interval": 1, **faults((8, 1, "exception"))},
    ).check(reference_run)
    assert worker_starts(run, 0) == worker_starts(run, 1) == 2
