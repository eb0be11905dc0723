"""preflight-nodes: the Job it makes, what a node's findings mean, and one real all-reduce on the CPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from payload.cli import main
from payload.cluster import node_check, preflight
from payload.cluster.kubectl import Kubectl
from payload.cluster.target import Target
from payload.config import load_profile
from payload.environment import PodEnvironment
from payload.manifest_rules import validate
from payload.manifests import COMPONENT_LABEL, job_of, render
from payload.settings import PROFILES
from tests.cluster.conftest import FakeCluster
from tests.cluster.test_submit import GPU

KIND = ["--profile", "kind"]
FI_INFO = "\n".join(
    f"provider: efa\n    fabric: efa\n    domain: rdmap{n}s0-rdm\n    version: 201.0" for n in range(32)
)


def test_the_jobs_pods_are_the_runs_own_but_for_the_command() -> None:
    config = load_profile(PROFILES / "p5.toml")
    target = Target(Kubectl(namespace="training"), config, GPU, None, False)
    found = preflight.objects(target, 128.0, 100.0)
    job, own = job_of(found), job_of(render(config, GPU))
    validate(job)
    name = job["metadata"]["name"]
    assert name.startswith("check-p5-1-")
    assert own["metadata"]["name"] not in str(found), "service, config and selectors carry the new name as well"
    container = job["spec"]["template"]["spec"]["containers"][0]
    own_container = own["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][2:] == [
        "payload.cluster.node_check",
        "--num-efa=32",
        "--bus-gb-s=128",
        "--write-mb-s=100",
    ]
    assert container["resources"] == own_container["resources"]
    assert job["spec"]["backoffLimit"] == 0 and "podFailurePolicy" not in job["spec"]
    assert job["metadata"]["labels"][COMPONENT_LABEL] == "preflight"


def test_it_prints_what_the_nodes_say_and_leaves_nothing(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending, code in (("Complete", 0), ("Failed", 1)):
        cluster.set(job_ends=ending)
        assert main(["preflight-nodes", *KIND]) == code
        assert "output of check-kind-" in capsys.readouterr().out
        assert cluster.names("job") == cluster.names("pod") == cluster.names("configmap") == []


def test_it_does_not_disturb_a_run(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *KIND]) == 0
    assert main(["preflight-nodes", *KIND]) == 1
    assert "runs on these nodes; delete it first" in capsys.readouterr().err


def test_efa_devices_are_counted() -> None:
    assert list(node_check.efa_problems(FI_INFO, 32)) == []
    assert list(node_check.efa_problems(FI_INFO, 33)) == ["fi_info shows 32 EFA devices; legal: 33"]
    assert list(node_check.efa_problems("fi_getinfo: -61 (No data available)", 4))


def test_a_socket_fallback_is_unfit() -> None:
    """F37: NCCL must have chosen EFA."""
    line = "node:1:2 [0] NCCL INFO Using network {}"
    assert list(node_check.nccl_problems(line.format("AWS Libfabric"), 32)) == []
    newer = "n:1:2 [0] NCCL INFO Assigned NET plugin AWS Libfabric to comm\n" + line.format("AWS Libfabric")
    assert list(node_check.nccl_problems(newer, 32)) == []
    (found,) = node_check.nccl_problems(line.format("Socket"), 32)
    assert "NCCL uses Socket; legal: AWS Libfabric" in found
    assert list(node_check.nccl_problems("", 32)), "silence is no proof"
    assert list(node_check.nccl_problems(line.format("Socket"), 0)) == [], "an instance without EFA uses sockets"


def test_limits() -> None:
    """F49: EFA needs to lock memory."""
    assert list(node_check.memlock_problems(65536, 32)) and not list(node_check.memlock_problems(65536, 0))
    assert list(node_check.memlock_problems(resource.RLIM_INFINITY, 32)) == []
    assert list(node_check.bandwidth_problems("all-reduce over 16 ranks: bandwidth_gb_s=90.50", 128)) == [
        "all-reduce reached 90.5 GB/s; legal: 128 or more"
    ]
    assert list(node_check.bandwidth_problems("", 0)) == ["the all-reduce did not end"]
    assert list(node_check.write_problems(99, 100)) == ["shared volume took 99 MB/s; legal: 100 or more"]


@pytest.mark.timeout(240)
def test_two_ranks_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real thing, with gloo: torchrun, two ranks, a write to the volume."""
    from torch.distributed.run import get_args_parser

    config = load_profile(PROFILES / "kind.toml").with_overrides({"workdir": str(tmp_path)})
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    values = {
        "NVRX_EKS_CONFIG": str(path),
        "JOB_COMPLETION_INDEX": "0",
        "NVRX_EKS_COORDINATOR": "127.0.0.1",
        "NVRX_EKS_PORT": "29400",
        "POD_NAME": "pod-0",
        "POD_UID": "u",
        "NODE_NAME": "node-0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])]),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    command = node_check.torchrun_command
    monkeypatch.setattr(node_check, "torchrun_command", lambda pod: _alone(command(pod)))
    monkeypatch.setattr(node_check, "_WRITE_BYTES", 1 << 23)
    parsed = get_args_parser().parse_args(command(PodEnvironment.read())[3:])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank, parsed.master_addr) == ("1", "2", 0, "127.0.0.1")
    code = node_check.main(["--num-efa=0", "--bus-gb-s=0.0001", "--write-mb-s=0.0001"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "all-reduce over 2 ranks: bandwidth_gb_s=" in text and "node node-0: fit" in text
    assert list(tmp_path.glob(".preflight-*")) == []


def _alone(command: list[str]) -> list[str]:
    """The same on a port that torchrun finds: a static rendezvous needs to be told one."""
    meeting = ("--node-rank", "--master-addr", "--master-port", "--nnodes")
    kept = [part for part in command if not part.startswith(meeting)]
    return [*kept[:3], "--standalone", *kept[3:]]
