"""Warm workers: what the agent sees of a forked worker is what it would see of a started one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from payload import environment, fork_client, process
from payload.config import RunConfig
from payload.environment import PodEnvironment
from payload.fork_server import ForkServer, socket_name

ROOT = Path(__file__).parents[2]
MODULE = "tests.payload.fork_module"


def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """Starts fork servers and clients, and ends them."""
    started = []

    class Pod:
        def server(self, run_id="warm"):
            (tmp_path / "run.json").write_text(RunConfig().with_overrides({"run_id": run_id}).to_json())
            values = {
                "NVRX_EKS_CONFIG": str(tmp_path / "run.json"),
                "JOB_COMPLETION_INDEX": "0",
                "NVRX_EKS_COORDINATOR": "c",
                "NVRX_EKS_PORT": "1",
                "POD_NAME": "p",
                "POD_UID": "uid",
                "NODE_NAME": "n",
                "NVRX_EKS_WORKER": MODULE,
                "PYTHONPATH": str(ROOT),
            }
            for name, value in values.items():
                monkeypatch.setenv(name, value)
            monkeypatch.delenv(environment.WARM, raising=False)
            server = ForkServer.start(PodEnvironment.read())
            started.append(server._child)
            return server

        def client(self, server, do):
            command = [sys.executable, "-S", "-E", fork_client.__file__, MODULE, str(os.getpid()), server.address]
            client = subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "DO": do},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.append(client)
            return client

    yield Pod()
    for child in started:
        process.send([*process.descendants(child.pid), child.pid], signal.SIGKILL)
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        child.wait()


def test_the_client_stands_for_the_worker(pod, tmp_path):
    """Exit codes, streams, folder and environment pass through; many workers at once."""
    server = pod.server()
    clients = [pod.client(server, "report") for _ in range(4)]
    pids = set()
    for client in clients:
        out, err = client.communicate(timeout=60)
        warm, preloaded, folder, name, pid = out.split()
        assert (warm, preloaded, folder, name) == ("1", "warm", str(tmp_path), "__main__")
        assert err == "to stderr\n" and client.returncode == 7
        pids.add(int(pid))
    assert len(pids) == 4 and not pids & {client.pid for client in clients}
    failing = pod.client(server, "raise")
    assert "RuntimeError: from the worker" in failing.communicate(timeout=60)[1]
    assert failing.returncode == 1
    assert pod.client(server, "die").wait(60) == -signal.SIGSEGV
    assert server.ended() is None


def test_signals_and_deaths_pass_in_both_directions(pod):
    server = pod.server()
    stopped = pod.client(server, "term")
    worker, child = map(int, stopped.stdout.readline().split())
    assert process.children_of(server.pid) == [worker], "the worker is a child of the server"
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 143
    until(lambda: not process.is_running(child), "what a worker leaves in its group ends with it")

    killed = pod.client(server, "wait")
    worker, child = map(int, killed.stdout.readline().split())
    os.kill(worker, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    until(lambda: not process.is_running(child), "what a killed worker leaves in its group ends with it")

    client = pod.client(server, "wait")
    worker, child = map(int, client.stdout.readline().split())
    os.kill(worker, signal.SIGSTOP)
    client.kill()
    client.wait(60)
    until(lambda: not process.is_running(worker), "a worker ends with its client, also when stopped")
    until(lambda: not process.is_running(child), "its children too")
    assert server.ended() is None


def test_without_a_server_workers_start_cold(pod, tmp_path):
    server = pod.server()
    client = pod.client(server, "wait")
    worker, child = map(int, client.stdout.readline().split())
    os.kill(server.pid, signal.SIGKILL)
    assert client.wait(60) == -signal.SIGKILL
    until(lambda: not process.is_running(worker), "workers end with the server that forked them")
    until(lambda: not process.is_running(child), "and so does what they had started")
    until(lambda: server.ended() == -signal.SIGKILL, "the launcher sees that its server ended")
    cold = pod.client(server, "report")
    warm, preloaded, folder, name, pid = cold.communicate(timeout=60)[0].split()
    assert (warm, preloaded, folder, name) == ("0", "nothing", str(tmp_path), "__main__")
    assert cold.returncode == 7 and int(pid) == cold.pid, "the client became the worker"


def test_a_module_that_starts_threads_is_not_forked(pod):
    """A fork copies one thread only; a lock that another one held stays locked for ever."""
    server = pod.server("threads")
    early = pod.client(server, "report")
    assert early.communicate(timeout=60)[0].split()[0] == "0", "one that waited for the imports starts cold"
    assert early.returncode == 7
    until(lambda: server.ended() == 1, "the server refuses")


def test_nobody_but_a_client_is_served(pod):
    server = pod.server()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(socket_name(server.address))
        stranger.sendall(MODULE.encode())
        assert stranger.recv(64) == b"", "no streams, no worker"
    assert pod.client(server, "report").wait(60) == 7


def test_the_server_ends_with_the_launcher(pod, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from payload.environment import PodEnvironment\n"
        "from payload.fork_server import ForkServer\n"
        "print(ForkServer.start(PodEnvironment.read()).pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    pod.server()  # sets the environment
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    until(lambda: not process.is_running(server), "no server outlives its launcher")
