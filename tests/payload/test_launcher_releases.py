"""The command line of ft_launcher, read by the parser of each release that we name.

The installed release is used as it is. The others are downloaded once into .nvrx; without a package index this fails.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload.environment import PodEnvironment
from payload.recovery.ft_launcher import ft_arguments
from tests import nvrx
from tests.payload.pods import FAST

ROOT = Path(__file__).parents[2]
PARSE = """
import json, sys
from payload.environment import PodEnvironment
from payload.recovery.ft_launcher import ft_arguments
from nvidia_resiliency_ext.fault_tolerance import launcher
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
found = []
for index in (0, 1, 2, 3):
    values = json.loads(sys.argv[1]) | {"JOB_COMPLETION_INDEX": str(index)}
    pod = PodEnvironment.read(values)
    parser = launcher.get_args_parser()
    options = ft_arguments(pod, "10.0.0.1", f"10.0.0.{index + 1}", parser)
    parsed = parser.parse_args([*options, "--no-python", "python", "client.py", "module"])
    config = FaultToleranceConfig.from_args(parsed)
    found.append({
        "nnodes": parsed.nnodes, "nproc": parsed.nproc_per_node, "endpoint": parsed.rdzv_endpoint,
        "conf": parsed.rdzv_conf, "restarts": parsed.max_restarts, "command": parsed.training_script,
        "arguments": parsed.training_script_args, "monitor_interval": parsed.monitor_interval,
        "local_addr": parsed.local_addr, "heartbeat": config.rank_heartbeat_timeout,
        "initial": config.initial_rank_heartbeat_timeout, "check": config.workload_check_interval,
    })
print(json.dumps(found))
"""


def values(tmp_path, nodes):
    from payload.config import RunConfig

    fields = {"parallelism.num_nodes": nodes, "training.global_batch_size": 2 * nodes, "recovery.arm": "in-job"}
    config = RunConfig().with_overrides({**FAST, **fields, "workdir": str(tmp_path)})
    (tmp_path / "run.json").write_text(config.to_json())
    return {
        "NVRX_EKS_CONFIG": str(tmp_path / "run.json"),
        "JOB_COMPLETION_INDEX": "0",
        "NVRX_EKS_COORDINATOR": "job-0.job.ns.svc",
        "NVRX_EKS_PORT": "29400",
        "POD_NAME": "job-0",
        "POD_UID": "uid",
        "NODE_NAME": "node",
    }


def parsed_by(tmp_path, site):
    path = os.pathsep.join([*([str(site)] if site else []), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, json.dumps(values(tmp_path, 4))],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", ["installed", "0.6.0", "0.7.0"])
def test_command_line_of_each_release_nvrx(tmp_path, release):
    """F48: an option that a release refuses fails here, not in the pod. F34: one host, one endpoint, one index each."""
    pods = parsed_by(tmp_path, None if release == "installed" else nvrx.prepare(release))
    assert [pod["conf"].split(",")[0] for pod in pods] == ["is_host=true", *["is_host=false"] * 3]
    assert {pod["endpoint"] for pod in pods} == {"10.0.0.1:29400"}
    assert [pod["local_addr"] for pod in pods] == [f"10.0.0.{i}" for i in (1, 2, 3, 4)]
    for pod in pods:
        assert pod["nnodes"] == "4:4", "no node may train alone"
        assert (pod["nproc"], pod["restarts"]) == ("2", 20)
        assert (pod["heartbeat"], pod["initial"]) == (
            FAST["timeouts.heartbeat_s"],
            FAST["timeouts.initial_heartbeat_s"],
        )
        assert pod["check"] == 0.5 and pod["monitor_interval"] == 0.1
        assert "last_call_timeout=1" in pod["conf"] and "join_timeout=120" in pod["conf"]
        assert (pod["command"], pod["arguments"]) == ("python", ["client.py", "module"])


def test_options_that_a_release_lacks_are_left_out(tmp_path):
    pod = PodEnvironment.read(values(tmp_path, 2))
    parser = argparse.ArgumentParser()
    bare = ft_arguments(pod, "10.0.0.1", "10.0.0.1", parser)
    parser.add_argument("--ft-restart-policy")
    parser.add_argument("--ft-enable-nic-monitor")
    full = ft_arguments(pod, "10.0.0.1", "10.0.0.1", parser)
    assert sorted(set(full) - set(bare)) == ["--ft-enable-nic-monitor=false", "--ft-restart-policy=any-failed"]


def test_two_nodes_have_one_host_too(tmp_path):
    """F34: index from JOB_COMPLETION_INDEX alone."""
    hosts = []
    for index in (0, 1):
        pod = PodEnvironment.read({**values(tmp_path, 2), "JOB_COMPLETION_INDEX": str(index)})
        options = ft_arguments(pod, "10.0.0.1", "10.0.0.1", argparse.ArgumentParser())
        hosts.append(next(o for o in options if o.startswith("--rdzv-conf=")).split("=", 1)[1].split(",")[0])
    assert hosts == ["is_host=true", "is_host=false"]


def test_an_unreachable_index_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrx, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in [name for name in os.environ if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(nvrx.NotAvailable, match="is the package index reachable"):
        nvrx.prepare("0.7.0")
    assert not (tmp_path / "0.7.0").exists()
