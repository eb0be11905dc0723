"""The in-job and layered arms: ft_launcher restarts workers, pods are replaced, and no node trains alone."""

import os
import signal
from pathlib import Path

import pytest

from tests.payload.pods import Pods, left_behind

pytestmark = pytest.mark.launched


def generations(pods, rank):
    return [event["generation"] for event in pods.events(f"rank{rank}", "attempt")]


@pytest.mark.timeout(480)
def test_crash_kill_and_hang_restart_the_workers_of_all_pods(tmp_path):
    """Warm workers; rank 0 is killed too; then the fork server itself, after which workers start cold."""
    plan = [
        {"step": 3, "rank": 1, "type": "exception"},
        {"step": 5, "rank": 0, "type": "sigkill"},
        {"step": 7, "rank": 1, "type": "hang"},
    ]
    fields = {"recovery.arm": "in-job", "recovery.warm_workers": True, "training.min_step_s": 0.02}
    with Pods(tmp_path, plan=[*plan, {"step": 9, "rank": 0, "type": "wait"}], steps=10, **fields) as pods:
        pods.start()
        pods.until(lambda: pods.events("rank0", "waiting"), "the step at which the fork server is killed")
        server = parent_of(pods.events("rank0", "process_start")[-1].pid)
        os.kill(server, signal.SIGKILL)
        assert pods.wait() == {0: 0, 1: 0}, pods.logs()
    assert left_behind(tmp_path) == []
    for rank in (0, 1):
        assert generations(pods, rank) == ["0.0", "1.0", "2.0", "3.0", "4.0"]
        assert [e["step"] for e in pods.events(f"rank{rank}", "step")] == list(range(1, 11))
    warm = [e["warm"] for e in pods.events("rank0", "process_start")]
    assert warm == [True] * 4 + [False]
    assert [e["warm"] for e in pods.events("rank1", "process_start")] == [True] * 5
    assert "workers of pod 0 start cold" in pods.events("pod0", "warning")[0]["text"]
    assert [e["cycle"] for e in pods.events("pod1", "workers_start")] == [0, 1, 2, 3, 4]
    codes = {e["cycle"]: e["codes"] for e in pods.events("pod0", "workers_failed")}
    assert codes[1] == {"0": -9}, "the agent sees the signal that killed the worker, not its client's"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.timeout(480)
def test_replaced_pods_join_the_run_again(tmp_path):
    """F21: pod 1 is lost twice, with its launcher; all ranks agree on each generation. In-process first, layered.

    F24: pod 0 is lost at last, and the store with it; the other launcher ends by itself and a fresh pair resumes.
    """
    plan = [{"step": 3, "rank": 0, "type": "exception"}]
    fields = {"recovery.arm": "layered", "training.min_step_s": 0.1}
    with Pods(tmp_path, plan=plan, steps=45, **fields) as pods:
        pods.start()
        for step in (6, 20):
            pods.until(lambda step=step: pods.newest_step() >= step, f"step {step}")
            pods.kill(1)
            pods.start(1)
        pods.until(lambda: pods.newest_step() >= 30, "step 30")
        pods.kill(0)
        assert pods.wait(1) == {1: 1}, pods.logs()
        pods.start()
        assert pods.wait(0, 1) == {0: 0, 1: 0}, pods.logs()
    assert left_behind(tmp_path) == []
    assert generations(pods, 0)[:2] == ["0.0", "0.1"]
    assert {e["world_size"] for rank in (0, 1) for e in pods.events(f"rank{rank}", "attempt")} == {2}
    done = [(e["step"], e["generation"]) for e in pods.events("rank0", "step")]
    assert [step for step, _ in done] == sorted(step for step, _ in done)
    assert done[-1][0] == 45
    other = {event["generation"] for event in pods.events("rank1", "step")}
    assert {generation for _, generation in done} == other, "no rank took a step in a generation of its own"


@pytest.mark.timeout(400)
def test_a_node_where_failures_keep_beginning_is_given_up(tmp_path):
    plan = [{"step": 3, "rank": 1, "type": "exception", "always": True}]
    fields = {"recovery.arm": "in-job", "recovery.max_node_faults": 2, "recovery.max_no_progress": 9}
    with Pods(tmp_path, plan=plan, **{**fields, "recovery.warm_workers": True}) as pods:
        assert pods.start().wait(1) == {1: 43}, pods.logs()
    assert len(generations(pods, 1)) == 2
    assert pods.events("pod1", "launcher_end")[0]["reason"] == "the last 2 failures began on node node-1"


@pytest.mark.timeout(400)
def test_one_pod_that_is_told_to_stop_is_waited_for(tmp_path):
    """SIGTERM of one pod (its node is drained): all save after the same step, that pod leaves, the other waits."""
    fields = {"recovery.arm": "layered", "recovery.warm_workers": True, "training.min_step_s": 0.05}
    with Pods(tmp_path, steps=40, **fields) as pods:
        pods.start()
        pods.until(lambda: pods.newest_step() >= 3, "step 3")
        pods.processes[1].send_signal(signal.SIGTERM)
        assert pods.wait(1) == {1: 143}, pods.logs()
        stops = [pods.events(f"rank{rank}", "stopping")[-1]["step"] for rank in (0, 1)]
        assert stops[0] == stops[1] and pods.processes[0].poll() is None
        assert pods.start(1).wait(0, 1) == {0: 0, 1: 0}, pods.logs()
    assert left_behind(tmp_path) == []
    assert generations(pods, 0) == generations(pods, 1) == ["0.0", "1.0"]
    assert [e["step"] for e in pods.events("rank0", "step")] == list(range(1, 41))
