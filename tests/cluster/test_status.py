"""status, logs and results against a kubectl of our own, on event logs in real files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from payload.cli import main
from payload.cluster import run_state, status
from payload.config import RunConfig, load_profile
from payload.events import EventLog
from payload.manifests import COMPONENT_LABEL, JOB_LABEL, Deployment, job_of, render
from payload.settings import PROFILES
from tests.cluster.conftest import FakeCluster

KIND = ["--profile", "kind", "--run-id", "watched"]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_profile(PROFILES / "kind.toml").with_overrides({"run_id": "watched", "workdir": str(tmp_path / "fsx")})


@pytest.fixture
def submitted(cluster: FakeCluster, config: RunConfig, tmp_path: Path) -> FakeCluster:
    """The run is submitted; what is executed in its pods sees the config that the pods got."""
    assert main(["submit", *KIND, "--workdir", config.workdir, "--prepare-data", ""]) == 0
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    root = str(Path(__file__).parents[2])
    cluster.set(exec_env={"NVRX_EKS_CONFIG": str(path), "PYTHONPATH": root})
    return cluster


def steps(config: RunConfig, last: int, *, rank: int = 0, saved: tuple[int, ...] = ()) -> None:
    """A rank's log as the loop writes it, up to a step."""
    log = EventLog.for_rank(config.events_dir, rank)
    log.emit("process_start", started_wall=time.time(), warm=False)
    log.emit("imports_done")
    log.emit("attempt", generation=0, world_size=2, rank=rank)
    log.emit("group_ready")
    log.emit("model_ready")
    log.emit("state_ready", step=0, tier="none", load_s=0.0, size_bytes=0)
    for step in range(1, last + 1):
        log.emit("step", step=step, duration_s=0.001, data_s=0.0, loss=2.0 / step, lr=1e-3, generation=0)
        if step in saved:
            log.emit("save", step=step, mode="async", blocking_s=0.0)
            log.emit("save_done", step=step, write_s=0.0)
    log.close()


def test_state_of_a_run_that_has_not_begun(config: RunConfig) -> None:
    found = run_state.read_state(config)
    assert (found.step, found.goodput, found.last_save, found.restarts_left) == (0, None, 0, 20)
    assert "last save: none yet" in found.lines()[1]


def test_state_from_the_logs(config: RunConfig) -> None:
    """A save counts when every rank has reported it; a torn last line loses only itself."""
    steps(config, 7, rank=0, saved=(2, 4, 6))
    steps(config, 7, rank=1, saved=(2, 4))
    with (config.events_dir / "rank1.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    config.restarts_dir.mkdir(parents=True)
    (config.restarts_dir / "restart-0.1.json").write_text('{"layer": "in-process", "step": 3}')
    found = run_state.read_state(config)
    assert (found.step, found.last_save, found.num_restarts, found.restarts_left) == (7, 4, 1, 19)
    assert found.loss == pytest.approx(2.0 / 7)
    assert found.goodput is not None and 0 < found.goodput <= 1
    assert not found.succeeded


def test_state_of_a_run_that_ended(config: RunConfig) -> None:
    steps(config, 3)
    (config.run_dir / "stop.json").write_text('{"reason": "no step newer than 3"}')
    assert "the run stopped itself: no step newer than 3" in "\n".join(run_state.read_state(config).lines())
    (config.run_dir / "result.json").write_text('{"succeeded": true}')
    assert run_state.read_state(config).succeeded


def test_status_shows_job_pods_and_run(
    submitted: FakeCluster, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        steps(config, 5, rank=rank, saved=(4,))
    capsys.readouterr()
    assert main(["status", *KIND]) == 0
    text = capsys.readouterr().out
    (name,) = submitted.names("job")
    assert f"Job {name}: running" in text
    assert f"pod 0 {name}-0-abcde: Running on node-0, 0 container restarts" in text
    assert "run watched: step 5 of 200" in text and "last save: step 4" in text and "restarts left: 20 of 20" in text
    assert main(["status", *KIND, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["run"]["step"] == 5 and values["run"]["restarts_left"] == 20


def test_status_names_an_unfit_node_and_what_to_do(submitted: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 43 of a launcher leads to the node's replacement, also from a container that was started again."""
    state = submitted.read()
    for item in state["objects"].values():
        if item["kind"] == "Pod":
            ended = {"terminated": {"exitCode": 43}}
            item["status"]["containerStatuses"] = [{"restartCount": 1, "state": {"running": {}}, "lastState": ended}]
    submitted.write(state)
    assert main(["status", *KIND]) == 0
    assert "node node-0 is unfit (exit code 43): python -m payload node replace node-0" in capsys.readouterr().out


def test_wait_returns_at_the_first_step(
    submitted: FakeCluster,
    config: RunConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what it waits for, and goes on as soon as a step is logged: here while it sleeps for the first time."""
    capsys.readouterr()
    sleeps: list[float] = []

    def sleep(duration_s: float) -> None:
        sleeps.append(duration_s)
        for rank in (0, 1):
            steps(config, 1, rank=rank)

    monkeypatch.setattr(status, "sleep", sleep)
    assert main(["status", *KIND, "--wait", "--timeout", "100"]) == 0
    assert len(sleeps) == 1
    text = capsys.readouterr().out
    assert "waiting: pods run; no step yet" in text and "step 1 of 200" in text


def test_wait_is_bounded_and_names_what_is_missing(submitted: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    state = submitted.read()
    for item in state["objects"].values():
        if item["kind"] == "Pod":
            message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
            unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
            item["status"] = {"phase": "Pending", "conditions": [unscheduled]}
    submitted.write(state)
    assert main(["status", *KIND, "--wait", "--timeout", "1"]) == 1
    assert "2 Insufficient nvidia.com/gpu" in capsys.readouterr().err


def test_status_of_a_finished_job_reads_through_a_pod_of_its_own(
    submitted: FakeCluster, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pod asks for no GPU, is found by teardown's labels, takes no part in the Service, and is removed."""
    for rank in (0, 1):
        steps(config, 5, rank=rank)
    (name,) = submitted.names("job")
    submitted.finish(name, "Failed")
    capsys.readouterr()
    assert main(["status", *KIND]) == 1
    text = capsys.readouterr().out
    assert "failed" in text and "as asked" in text and "step 5 of 200" in text
    assert f"{name}-reader" not in submitted.names("pod")
    assert [call[1:3] for call in submitted.calls("delete")] == [["pod", f"{name}-reader"]]
    assert main(["status", *KIND, "--no-reader"]) == 1
    assert "cannot be read while no pod runs" in capsys.readouterr().out


def test_reader_pod_meets_the_namespaces_level() -> None:
    from payload.cluster.reader import reader_pod

    config = load_profile(PROFILES / "p5.toml")
    deployment = Deployment(image="i", num_gpus=8, num_efa=32, hugepages_2mi_mib=5120, memory_mib=8192, cpu="4")
    job = job_of(render(config, deployment))
    pod = reader_pod(job)
    assert pod["spec"]["containers"][0]["resources"] == {}
    assert pod["spec"]["securityContext"] == job["spec"]["template"]["spec"]["securityContext"]
    assert JOB_LABEL not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"][COMPONENT_LABEL] == "reader"
    assert "resources" in job["spec"]["template"]["spec"]["containers"][0], "the Job itself is untouched"
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]


def test_results_are_copied_without_the_checkpoints(submitted: FakeCluster, config: RunConfig, tmp_path: Path) -> None:
    steps(config, 3)
    (config.checkpoint_dir / "step-2").mkdir(parents=True)
    (config.checkpoint_dir / "step-2" / "shard").write_bytes(b"x" * 1000)
    out = tmp_path / "out"
    assert main(["results", *KIND, "--out", str(out)]) == 0
    assert (out / "watched" / "events" / "rank0.jsonl").read_bytes() == (config.events_dir / "rank0.jsonl").read_bytes()
    assert not (out / "watched" / "checkpoints").exists()
    assert main(["results", *KIND, "--out", str(out), "--checkpoints"]) == 0
    assert (out / "watched" / "checkpoints" / "step-2" / "shard").exists()


def test_results_can_still_be_had_after_the_job_was_deleted(
    submitted: FakeCluster, config: RunConfig, tmp_path: Path
) -> None:
    """The run's files stay; what was made to reach them does not."""
    steps(config, 3)
    assert main(["delete", *KIND]) == 0
    assert main(["results", *KIND, "--workdir", config.workdir, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "watched" / "events" / "rank0.jsonl").exists()
    assert submitted.names("configmap") == submitted.names("pod") == submitted.names("job") == []


def test_results_of_a_run_without_files_are_an_error(
    submitted: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", *KIND, "--out", str(tmp_path / "out")]) == 1
    assert "watched" in capsys.readouterr().err


def test_logs_of_one_pod_and_of_all(submitted: FakeCluster, capfd: pytest.CaptureFixture[str]) -> None:
    (name,) = submitted.names("job")
    assert main(["logs", *KIND, "--tail", "5"]) == 0
    assert f"output of {name}-0-abcde --tail=5" in capfd.readouterr().out
    assert main(["logs", *KIND, "--pod", "7"]) == 1
    assert "no pod of index 7" in capfd.readouterr().err
    assert main(["logs", *KIND, "--follow", "--previous"]) == 0
    assert "--follow" in capfd.readouterr().out
