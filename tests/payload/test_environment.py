"""The environment of pods and workers: what is read, and the one error for what is missing or wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload import environment
from payload.config import ConfigError, RunConfig
from payload.environment import PodEnvironment, WorkerEnvironment

CONFIG = RunConfig().with_overrides({"run_id": "env", "workdir": "/work-dir"})


@pytest.fixture
def pod(tmp_path):
    (tmp_path / "run.json").write_text(CONFIG.to_json())
    return {
        "NVRX_EKS_CONFIG": str(tmp_path / "run.json"),
        "JOB_COMPLETION_INDEX": "1",
        "NVRX_EKS_COORDINATOR": "job-0.job.default.svc",
        "NVRX_EKS_PORT": "29400",
        "POD_NAME": "job-1-abcde",
        "POD_UID": "uid",
        "NODE_NAME": "node-1",
    }


@pytest.fixture
def worker(pod):
    return {
        **pod,
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "NVRX_EKS_CYCLE": "7",
        "NVRX_EKS_STORE": "10.0.0.1:29400",
    }


def test_pod_is_read_whole(pod):
    read = PodEnvironment.read({**pod, "NVRX_EKS_HOSTS": "/h", "NVRX_EKS_RUNNER": "/r"})
    assert read.config == CONFIG
    assert (read.index, read.coordinator, read.port) == (1, "job-0.job.default.svc", 29400)
    assert (read.pod_name, read.pod_uid, read.node_name) == ("job-1-abcde", "uid", "node-1")
    assert (read.hosts_file, read.runner_dir) == (Path("/h"), Path("/r"))
    on_a_cluster = PodEnvironment.read(pod)
    assert on_a_cluster.hosts_file is None and on_a_cluster.runner_dir is None
    assert on_a_cluster.worker_module == "payload.worker"


def test_worker_is_read_whole(worker):
    read = WorkerEnvironment.read(worker)
    assert (read.rank, read.world_size, read.local_rank, read.pod_index, read.cycle) == (3, 4, 1, 1, 7)
    assert (read.store_host, read.store_port, read.node_name, read.warm) == ("10.0.0.1", 29400, "node-1", False)
    assert WorkerEnvironment.read({**worker, "NVRX_EKS_WARM": "1"}).warm


@pytest.mark.parametrize("kind", [PodEnvironment, WorkerEnvironment])
def test_each_missing_variable_is_named(kind, worker):
    needed = set(worker)
    if kind is PodEnvironment:
        needed -= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NVRX_EKS_CYCLE", "NVRX_EKS_STORE"}
    else:
        needed -= {"NVRX_EKS_COORDINATOR", "NVRX_EKS_PORT", "POD_NAME", "POD_UID"}
    for name in needed:
        for value in (None, ""):
            values = {k: v for k, v in worker.items() if k != name}
            if value is not None:
                values[name] = value
            with pytest.raises(ConfigError, match=rf"^{name}: not set; legal: "):
                kind.read(values)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("JOB_COMPLETION_INDEX", "2", "0 to 1"),
        ("JOB_COMPLETION_INDEX", "-1", "0 to 1"),
        ("JOB_COMPLETION_INDEX", "one", "0 to 1"),
        ("NVRX_EKS_PORT", "65536", "1 to 65535"),
        ("RANK", "4", "0 to 3"),
        ("WORLD_SIZE", "5", "1 to 4"),
        ("LOCAL_RANK", "2", "0 to 1"),
        ("NVRX_EKS_CYCLE", "1.5", "0 to"),
        ("NVRX_EKS_STORE", "10.0.0.1", "host:port"),
    ],
)
def test_each_bad_value_is_named_with_what_is_legal(worker, name, value, legal):
    kind = PodEnvironment if name == "NVRX_EKS_PORT" else WorkerEnvironment
    with pytest.raises(ConfigError, match=rf"^{name}: '{value}'; legal: {legal}"):
        kind.read({**worker, name: value})


def test_unreadable_or_wrong_config_is_one_error(pod, tmp_path):
    with pytest.raises(ConfigError, match=r"NVRX_EKS_CONFIG: .*absent\.json"):
        PodEnvironment.read({**pod, "NVRX_EKS_CONFIG": str(tmp_path / "absent.json")})
    (tmp_path / "run.json").write_text('{"run_id": "UPPER"}')
    with pytest.raises(ConfigError, match="run_id: 'UPPER'"):
        PodEnvironment.read(pod)


def test_launcher_refuses_its_environment_with_its_own_code():
    values = {k: v for k, v in os.environ.items() if not k.startswith("NVRX_EKS")}
    done = subprocess.run(
        [sys.executable, "-m", "payload.launcher"],
        cwd=Path(__file__).parents[2],
        env=values,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "NVRX_EKS_CONFIG: not set" in done.stderr and "Traceback" not in done.stderr


def test_export_defaults_and_replace(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environment.export({"A": "1"})
    environment.set_defaults({"A": "2", "B": "2"})
    assert (os.environ["A"], os.environ["B"]) == ("1", "2")
    environment.replace({"C": "3"})
    assert environment.snapshot() == {"C": "3"}
