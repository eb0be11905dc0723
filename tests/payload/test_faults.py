"""Planned faults: the drawn schedule, and each kind fired once a run."""

import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from payload import faults
from payload.config import ConfigError, FaultSpec, RunConfig
from payload.events import EventLog, read_file

ARTICLE = {"count": 5, "seed": 42, "types": ["exception", "hang"], "type_weights": [0.6, 0.4]}


def config(nodes: int = 2, ranks: int = 8, steps: int = 2000, workdir: str = "/w", **section: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "workdir": workdir,
            "training": {"max_steps": steps, "global_batch_size": nodes * ranks, "min_step_s": 0.4},
            "parallelism": {"num_nodes": nodes, "ranks_per_node": ranks, "device": "cpu"},
            "faults": section,
        }
    )


def plan(run: RunConfig) -> list[tuple[int, int, str]]:
    return [(spec.step, spec.rank, spec.type) for spec in faults.schedule(run)]


def test_the_article_s_schedule_bit_for_bit() -> None:
    assert plan(config(**ARTICLE)) == [
        (62, 4, "exception"),
        (239, 12, "exception"),
        (574, 12, "hang"),
        (1320, 2, "exception"),
        (1529, 1, "exception"),
    ]


def test_same_seed_same_plan_and_another_seed_another() -> None:
    """F27."""
    assert plan(config(**ARTICLE)) == plan(config(**ARTICLE))
    assert plan(config(**ARTICLE)) != plan(config(**{**ARTICLE, "seed": 43}))


def test_the_draw_leaves_the_process_s_random_state_alone() -> None:
    before = random.getstate()
    faults.schedule(config(**ARTICLE))
    assert random.getstate() == before


def test_rank_0_is_hit_only_when_asked_for() -> None:
    """F27: the article's generator never hits rank 0."""
    drawn = {rank for seed in range(40) for _, rank, _ in plan(config(2, 2, count=5, seed=seed))}
    assert drawn == {1, 2, 3}
    drawn = {rank for seed in range(40) for _, rank, _ in plan(config(2, 2, count=5, seed=seed, include_rank0=True))}
    assert drawn == {0, 1, 2, 3}


def test_a_world_of_one_rank_is_refused_or_hits_rank_0() -> None:
    """F27: N=1 breaks the draw of the public test case."""
    with pytest.raises(ConfigError, match="include_rank0"):
        config(1, 1, count=1)
    assert [rank for _, rank, _ in plan(config(1, 1, count=3, include_rank0=True))] == [0, 0, 0]


def test_an_explicit_schedule_is_taken_by_step() -> None:
    given = [{"step": 9, "rank": 0, "type": "sigkill"}, {"step": 5, "rank": 3, "type": "hang"}]
    assert plan(config(schedule=given)) == [(5, 3, "hang"), (9, 0, "sigkill")]


def test_no_faults() -> None:
    assert plan(config()) == []


def test_stochastic_mode_depends_on_the_seed_alone_and_has_the_rate_asked_for() -> None:
    run = config(steps=100_000, mtbf_s=40.0, types=["exception", "sigkill"], after_step=100)
    assert plan(run) == plan(run) != plan(run.with_overrides({"faults.seed": 7}))
    drawn = plan(run)
    # 99,900 steps at 1 - exp(-0.01): 994 expected, standard deviation 31.
    assert 994 - 5 * 31 < len(drawn) < 994 + 5 * 31
    assert min(step for step, _, _ in drawn) > 100
    assert set(Counter(kind for _, _, kind in drawn)) == {"exception", "sigkill"}


def test_stochastic_mode_needs_a_step_time() -> None:
    with pytest.raises(ConfigError, match="min_step_s"):
        faults.schedule(config(mtbf_s=40.0).with_overrides({"training.min_step_s": 0.0}))


def test_a_comparison_holds_one_schedule() -> None:
    a = config(**ARTICLE).with_overrides({"run_id": "a", "recovery.arm": "kubernetes"})
    b = config(**ARTICLE).with_overrides({"run_id": "b", "recovery.arm": "in-process"})
    assert len(faults.assert_same_schedule([a, b])) == 5
    # The public comparison: one arm without hangs.
    c = b.with_overrides({"run_id": "c", "faults.types": ["exception"], "faults.type_weights": []})
    with pytest.raises(ConfigError, match=r"run c differs from that of a: fault 2 is exception .* against hang"):
        faults.assert_same_schedule([a, b, c])
    with pytest.raises(ConfigError, match=r"run b differs from that of a"):
        faults.assert_same_schedule([a, b.with_overrides({"faults.count": 4})])
    with pytest.raises(ConfigError, match="no run"):
        faults.assert_same_schedule([])


def one(kind: str, tmp_path: Path, *, rank: int = 1) -> RunConfig:
    return config(2, 2, 20, str(tmp_path), schedule=[{"step": 5, "rank": rank, "type": kind}])


def injector(run: RunConfig, rank: int = 1, runner_dir: Path | None = None) -> faults.Injector:
    return faults.Injector(run, rank, EventLog.for_rank(run.events_dir, rank), runner_dir)


def test_an_exception_fires_on_its_rank_at_its_step_once_a_run(tmp_path: Path) -> None:
    """F27: in process, and after any restart of the process."""
    run = one("exception", tmp_path)
    other = injector(run, rank=2)
    target = injector(run)
    for step in range(1, 21):
        other.fire(step)
    for step in (1, 4, 6, 20):
        target.fire(step)
    with pytest.raises(faults.InjectedFault, match="exception at step 5 on rank 1"):
        target.fire(5)
    target.fire(5)
    injector(run).fire(5)  # a new process of the rank
    assert [path.name for path in run.faults_dir.iterdir()] == ["0-5-1-exception"]
    events, _ = read_file(run.events_dir / "rank1.jsonl")
    assert [(event.kind, event["step"], event["type"], event["rank"]) for event in events] == [
        ("fault", 5, "exception", 1)
    ]


def test_the_rank_of_the_attempt_counts(tmp_path: Path) -> None:
    target = injector(one("exception", tmp_path), rank=3)
    target.fire(5)
    target.rank = 1
    with pytest.raises(faults.InjectedFault):
        target.fire(5)


def test_two_faults_of_one_step_fire_one_a_visit(tmp_path: Path) -> None:
    spec = {"step": 5, "rank": 1, "type": "exception"}
    target = injector(config(2, 2, 20, str(tmp_path), schedule=[spec, spec]))
    for _ in range(2):
        with pytest.raises(faults.InjectedFault):
            target.fire(5)
    target.fire(5)


class _Interrupt(BaseException):
    pass


def test_a_hang_lets_an_exception_into_its_thread(tmp_path: Path) -> None:
    target = injector(one("hang", tmp_path))
    ended = threading.Event()

    def work() -> None:
        try:
            target.fire(5)
        except _Interrupt:
            ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ident = thread.ident or 0
    pause = threading.Event()
    while not ((frame := sys._current_frames().get(ident)) and frame.f_code.co_name == "_hang"):
        pause.wait(0.01)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Interrupt))
    assert ended.wait(60)
    thread.join()


def in_child(work: Callable[[], None]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def wait_for_marker(run: RunConfig) -> None:
    event = threading.Event()
    while not (run.faults_dir.exists() and any(run.faults_dir.iterdir())):
        event.wait(0.01)


def test_sigkill_kills_the_process(tmp_path: Path) -> None:
    run = one("sigkill", tmp_path)
    child = in_child(lambda: injector(run).fire(5))
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(run.faults_dir.iterdir())) == 1


def test_hang_stop_stops_the_process(tmp_path: Path) -> None:
    run = one("hang-stop", tmp_path)
    child = in_child(lambda: injector(run).fire(5))
    assert child.pid is not None
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(child.pid, signal.SIGCONT)
    child.join()
    assert child.exitcode == 0


def test_hang_c_lets_no_signal_handler_in(tmp_path: Path) -> None:
    run = one("hang-c", tmp_path)

    def work() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
        injector(run).fire(5)

    child = in_child(work)
    try:
        wait_for_marker(run)
        _wait_for_futex(child.pid or 0)
        child.terminate()
        child.join(0.5)
        assert child.is_alive()
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL


def _wait_for_futex(pid: int) -> None:
    """Until the process sleeps in the mutex: a signal before that is handled in Python."""
    calm, event = 0, threading.Event()
    while calm < 20:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        calm = calm + 1 if state == "S" else 0
        event.wait(0.02)


@pytest.mark.parametrize("kind", ["pod-loss", "node-loss"])
def test_the_runner_is_asked_for_the_loss_of_a_pod(tmp_path: Path, kind: str) -> None:
    run, runner_dir = one(kind, tmp_path, rank=3), tmp_path / "runner"
    runner_dir.mkdir()
    child = in_child(lambda: injector(run, 3, runner_dir).fire(5))
    event = threading.Event()
    while not (found := [path for path in runner_dir.iterdir() if not path.name.startswith(".")]):
        event.wait(0.01)
    assert child.is_alive()
    child.kill()
    child.join()
    (request,) = found
    assert request.name.startswith(f"{kind}-") and request.suffix == ".json"
    assert json.loads(request.read_text()) == {"index": 1}


def test_what_cannot_be_produced_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="node-loss"):
        injector(one("node-loss", tmp_path))
    with pytest.raises(ConfigError, match="no launcher runs"):
        injector(one("pod-loss", tmp_path))


LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
print(child.pid, flush=True)
time.sleep(600)
"""
WORKER = """
import sys
from pathlib import Path
from payload import faults
from payload.config import RunConfig
from payload.events import EventLog
run = RunConfig.from_json(Path({path!r}).read_text())
faults.Injector(run, 1, EventLog.for_rank(run.events_dir, 1), None).fire(5)
"""


def test_without_a_runner_pod_loss_kills_the_launcher(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(one("pod-loss", tmp_path).to_json())
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "payload.launcher", WORKER.format(path=str(path))],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    try:
        assert launcher.wait() == -signal.SIGKILL
        os.kill(worker, 0)  # hangs until the container ends
    finally:
        os.kill(worker, signal.SIGKILL)
        launcher.kill()
        launcher.stdout.close()


def test_specs_are_plain_config() -> None:
    assert all(isinstance(spec, FaultSpec) for spec in faults.schedule(config(**ARTICLE)))
