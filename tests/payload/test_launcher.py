"""The container's entry point: finding pod 0, exit codes, SIGTERM, and the loss of the store."""

import json
import signal
import socket
import threading

import pytest

from payload import meeting as meeting_module
from payload.environment import PodEnvironment
from payload.meeting import Meeting, MeetingError, resolve
from tests.payload.pods import Pods, left_behind


def pod_environment(tmp_path, index=0, port=None, **fields):
    pods = Pods(tmp_path, **fields)
    return PodEnvironment.read(
        {
            "NVRX_EKS_CONFIG": str(pods.run_file),
            "JOB_COMPLETION_INDEX": str(index),
            "NVRX_EKS_COORDINATOR": "tiny-0.tiny.test.svc",
            "NVRX_EKS_PORT": str(port or pods.port),
            "POD_NAME": "tiny",
            "POD_UID": "uid",
            "NODE_NAME": "node",
        }
    )


def test_hosts_file_comes_before_dns(tmp_path):
    (tmp_path / "hosts").write_text("other 10.0.0.9\ntiny-0.tiny.test.svc 10.0.0.1\n")
    assert resolve("tiny-0.tiny.test.svc", tmp_path / "hosts") == "10.0.0.1"
    assert resolve("127.0.0.1", tmp_path / "hosts") == "127.0.0.1"


def test_name_that_comes_late_and_leads_to_a_dead_pod_first(tmp_path, monkeypatch):
    """F33: resolved anew on each try, until a store answers there."""
    host = Meeting(pod_environment(tmp_path / "host"))
    monkeypatch.setattr(meeting_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(meeting_module, "resolve", lambda name, hosts: "127.0.0.1")
    host.open(alone=True)
    answers = ["unknown", "unknown", "dead", "dead", "127.0.0.1"]
    dialled = []
    dial = socket.create_connection

    def stub_resolver(name, hosts):
        assert name == "tiny-0.tiny.test.svc"
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        return answer

    def stub_connection(address, timeout):
        dialled.append(address[0])
        if address[0] == "dead":
            raise TimeoutError("timed out")
        return dial(address, timeout)

    monkeypatch.setattr(meeting_module, "resolve", stub_resolver)
    monkeypatch.setattr(meeting_module.socket, "create_connection", stub_connection)
    other = Meeting(pod_environment(tmp_path / "other", index=1, port=host.port))
    other.open(alone=True)
    assert dialled[:3] == ["dead", "dead", "127.0.0.1"]
    host.store.set("key", "value")
    assert other.store.get("key") == b"value"
    assert other.local_address == "127.0.0.1"


def test_name_that_never_resolves_is_an_error_at_the_limit(tmp_path, monkeypatch):
    """F33: bounded by timeouts.join_s, and the error names the name."""

    def unknown(name, hosts):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(meeting_module, "resolve", unknown)
    pod = pod_environment(tmp_path, index=1, **{"timeouts.join_s": 0.5})
    with pytest.raises(MeetingError, match=r"tiny-0\.tiny\.test\.svc:\d+ not reached within 0\.5 s: .*Name or service"):
        Meeting(pod).open(alone=True)


def test_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeetingError, match=f"cannot listen on port {port}"):
            Meeting(pod_environment(tmp_path, port=port)).open(alone=True)


def test_a_second_launcher_of_an_index_waits_for_the_next_session(tmp_path, monkeypatch):
    """A restarted container must not join the workers of the session that it was lost from; the others are told."""
    monkeypatch.setattr(meeting_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(meeting_module, "_WATCH_S", 0.01)
    monkeypatch.setattr(meeting_module, "resolve", lambda name, hosts: "127.0.0.1")
    host = Meeting(pod_environment(tmp_path / "host"))
    host.open(alone=True)
    told = threading.Event()
    host.watch(lambda reason: told.set(), alone=True)
    first = Meeting(pod_environment(tmp_path / "first", index=1, port=host.port))
    first.open(alone=True)
    assert not told.is_set()
    restarts = Meeting(pod_environment(tmp_path / "again", index=1, port=host.port, **{"timeouts.join_s": 1.0}))
    with pytest.raises(MeetingError, match="did not end within 1 s"):
        restarts.open(alone=True)
    assert told.wait(30)
    in_job = Meeting(pod_environment(tmp_path / "in-job", index=1, port=host.port))
    in_job.open(alone=False)


@pytest.mark.launched
@pytest.mark.timeout(480)
def test_baseline_container_restarts_pod_loss_and_stop(tmp_path):
    """One run through all that ends a pod of the baseline; this test plays the kubelet.

    F24: with pod 0 the store is lost; the other launcher ends non-zero by itself, and a fresh pair resumes.
    """
    plan = [{"step": 3, "rank": 1, "type": "exception"}]
    with Pods(tmp_path, plan=plan, steps=10_000, **{"recovery.arm": "kubernetes", "training.min_step_s": 0.05}) as pods:
        assert pods.start().wait() == {0: 1, 1: 1}, pods.logs()
        assert pods.newest_step() == 2
        pods.start()
        pods.until(lambda: pods.newest_step() >= 5, "steps after the restart")
        pods.kill(0)
        assert pods.wait(1) == {1: 1}, pods.logs()
        reached = pods.newest_step()
        pods.start()
        pods.until(lambda: pods.newest_step() >= reached + 3, "steps after the loss of pod 0")
        pods.processes[1].send_signal(signal.SIGTERM)
        assert pods.wait()[1] == 143, pods.logs()
        stops = [pods.events(f"rank{rank}", "stopping")[-1]["step"] for rank in (0, 1)]
        assert stops[0] == stops[1] == pods.newest_step(), "all ranks stop after the same step"
        assert pods.processes[0].returncode != 0
    assert left_behind(tmp_path) == []
    for rank in (0, 1):
        assert [e["generation"] for e in pods.events(f"rank{rank}", "attempt")] == ["0.0", "1.0", "2.0"]
        starts = [e["code"] for e in pods.events(f"rank{rank}", "process_end")]
        assert starts[0] == 1 and starts[-1] == 143
    kinds = [event.kind for event in pods.events("pod0")][:6]
    assert kinds == ["launcher_start", "resolved", "rendezvous", "workers_start", "workers_failed", "launcher_end"]
    assert [r["layer"] for r in restarts(pods)] == ["container", "container"]


@pytest.mark.launched
@pytest.mark.timeout(400)
def test_no_progress_ends_the_run_and_every_later_start(tmp_path):
    """F25: its own exit code on all pods, tries printed, and the marker that stops the baseline's kubelet."""
    plan = [{"step": 3, "rank": 1, "type": "exception", "always": True}]
    fields = {"recovery.arm": "in-process", "recovery.max_no_progress": 2}
    with Pods(tmp_path, plan=plan, **fields) as pods:
        assert pods.start().wait() == {0: 42, 1: 42}, pods.logs()
        assert "no step newer than 2 after 2 restarts in a row; 4 tries in all" in pods.logs()
        reason = json.loads((pods.config.run_dir / "stop.json").read_text())["reason"]
        assert reason.startswith("no step newer than 2")
        before = len(pods.events("pod1", "workers_start"))
        assert pods.start(1).wait(1) == {1: 42}
        assert len(pods.events("pod1", "workers_start")) == before, "no worker was started"
    assert left_behind(tmp_path) == []
    assert [e["generation"] for e in pods.events("rank0", "attempt")] == ["0.0", "0.1", "0.2"]


@pytest.mark.launched
@pytest.mark.timeout(400)
def test_refused_configuration_and_killed_launcher(tmp_path):
    """A worker that refuses its configuration is not restarted; a SIGKILLed launcher leaves nothing behind."""
    plan = [{"step": 1, "rank": 1, "type": "leave"}, {"step": 2, "rank": 1, "type": "hang"}]
    fields = {"recovery.arm": "in-job", "recovery.warm_workers": True, "timeouts.heartbeat_s": 50.0}
    with Pods(tmp_path, plan=plan, env={"TINY_CODE": "2"}, **fields) as pods:
        assert pods.start().wait(1) == {1: 2}, pods.logs()
        pods.kill(0)
        pods.start()
        pods.until(lambda: pods.newest_step() >= 1, "a step")
        for index in (0, 1):
            pods.processes[index].kill()
            pods.processes[index].wait()
        pods.until(lambda: not left_behind(tmp_path), "the end of what the launchers had started", timeout_s=30)


def restarts(pods):
    return [json.loads(path.read_text()) for path in sorted(pods.config.restarts_dir.glob("restart-*"))]
