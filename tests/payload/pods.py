"""Starts launchers as a Job's pods would: one process tree a pod, on this machine, and leaves none of them behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from payload import process
from payload.config import RunConfig
from payload.events import read_file

ROOT = Path(__file__).parents[2]
# A process of a loaded machine may get no time for seconds: only what a fault needs to be found is short.
FAST = {
    "timeouts.soft_s": 6.0,
    "timeouts.hard_s": 15.0,
    "timeouts.barrier_s": 120.0,
    "timeouts.completion_s": 120.0,
    "timeouts.heartbeat_s": 10.0,
    "timeouts.initial_heartbeat_s": 120.0,
    "timeouts.setup_s": 60.0,
    "timeouts.process_group_s": 60.0,
    "timeouts.join_s": 120.0,
    "timeouts.grace_s": 1.0,
    "timeouts.save_grace_s": 30.0,
    "training.warmup_steps": 1,
    "parallelism.device": "cpu",
    "recovery.warm_workers": False,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Pods:
    """The pods of one Job. As a context manager it kills all that is left."""

    def __init__(self, folder: Path, *, plan=(), nodes=2, ranks=1, steps=6, env=None, **fields):
        self.folder = folder
        overrides = {
            **FAST,
            "run_id": "tiny",
            "workdir": str(folder),
            "parallelism.num_nodes": nodes,
            "parallelism.ranks_per_node": ranks,
            "training.max_steps": steps,
            "training.global_batch_size": nodes * ranks,
            **fields,
        }
        self.config = RunConfig().with_overrides(overrides)
        self.folder.mkdir(exist_ok=True)
        self.config.run_dir.mkdir(parents=True)
        (self.config.run_dir / "plan.json").write_text(json.dumps(list(plan)))
        self.run_file = folder / "run.json"
        self.run_file.write_text(self.config.to_json())
        self.hosts = folder / "hosts"
        names = (f"tiny-{i}.tiny.test.svc" for i in range(nodes))
        self.hosts.write_text("".join(f"{name} 127.0.0.{i + 1}\n" for i, name in enumerate(names)))
        self.port = free_port()
        self.extra = dict(env or {})
        self.processes: dict[int, subprocess.Popen] = {}
        self._started = 0

    def start(self, *indices, module="payload.launcher", **extra):
        for index in indices or range(self.config.parallelism.num_nodes):
            self._started += 1
            temporary = self.folder / f"tmp{self._started}"
            temporary.mkdir()
            env = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("NVRX_EKS", "FT_", "TORCHELASTIC"))},
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)])),
                "NVRX_EKS_CONFIG": str(self.run_file),
                "JOB_COMPLETION_INDEX": str(index),
                "NVRX_EKS_COORDINATOR": "tiny-0.tiny.test.svc",
                "NVRX_EKS_PORT": str(self.port),
                "NVRX_EKS_HOSTS": str(self.hosts),
                "NVRX_EKS_WORKER": "tests.payload.tiny_worker",
                "POD_NAME": f"tiny-{index}",
                "POD_UID": f"uid-{self._started}",
                "NODE_NAME": f"node-{index}",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(temporary),
                **self.extra,
                **extra,
            }
            with (self.folder / f"pod{index}.log").open("ab") as log:
                self.processes[index] = subprocess.Popen(
                    [sys.executable, "-m", module], cwd=ROOT, env=env, stdout=log, stderr=log
                )
        return self

    def wait(self, *indices, timeout_s=200.0):
        """Exit codes of the pods, by index."""
        deadline = time.monotonic() + timeout_s
        wanted = indices or tuple(self.processes)
        try:
            return {i: self.processes[i].wait(max(0.1, deadline - time.monotonic())) for i in wanted}
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"pods still run after {timeout_s:g} s\n{self.logs()}") from error

    def kill(self, index):
        """A pod is lost: its whole tree, at once."""
        pid = self.processes[index].pid
        tree = [pid, *process.descendants(pid)]
        process.send(tree, signal.SIGKILL)
        self.processes[index].wait()

    def until(self, seen, what, timeout_s=200.0):
        """Waits until ``seen()`` is true; fails with the pods' logs."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            assert time.monotonic() < deadline, f"{what}: not seen within {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.05)

    def events(self, source, kind=None):
        path = self.config.events_dir / f"{source}.jsonl"
        found = read_file(path)[0] if path.exists() else ()
        return [event for event in found if kind in (None, event.kind)]

    def newest_step(self):
        return max((event["step"] for event in self.events("rank0", "step")), default=0)

    def logs(self):
        return "\n".join(f"--- {p.name}\n{p.read_text()[-6000:]}" for p in sorted(self.folder.glob("pod*.log")))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for running in self.processes.values():
            if running.poll() is None:
                process.send([*process.descendants(running.pid), running.pid], signal.SIGKILL)
                running.wait()


def left_behind(folder: Path) -> list[str]:
    """Processes that still belong to the pods started under ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in environment and process.is_running(int(entry.name)):
            found.append(f"{entry.name}: {command.replace(bytes(1), b' ').decode()}")
    return found
