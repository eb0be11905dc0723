"""docs/adopt.md: every block of it runs, in a small script of its own, with the fault that it is for."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from payload import adopt, process
from payload.config import ConfigError
from payload.environment import agent_environment

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
STEPS = 8
MODULES = {"torchrun": "torch.distributed.run", "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher"}

OWN = """
import os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = Path(sys.argv[1])
FAULT = sys.argv[2]
STEPS, SAVE_EVERY = 8, 2
torch.set_num_threads(1)


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_step(model, optimizer, step):
    rank = dist.get_rank()
    with (HERE / f"steps{rank}").open("a") as log:
        log.write(f"{os.getpid()} {step}\\n")
    if FAULT != "none" and step == 5 and rank == 1 and not (HERE / "fired").exists():
        (HERE / "fired").touch()
        if FAULT == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("injected")
    torch.manual_seed(step)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(model, optimizer):
    weights = [p.to_local() for p in model.parameters()]
    states = [optimizer.state[p] for p in model.parameters()]
    moments = [s[name].to_local() for s in states for name in ("exp_avg", "exp_avg_sq")]
    return [t.detach() for t in (*weights, *moments, *(s["step"] for s in states))]


def save(model, optimizer, step):
    torch.save(local(model, optimizer), HERE / f"save{step}-{dist.get_rank()}")
    dist.barrier()
    if dist.get_rank() == 0:
        (HERE / "draft").write_text(str(step))
        (HERE / "draft").replace(HERE / "newest")


def load(model, optimizer):
    newest = [int((HERE / "newest").read_text()) if (HERE / "newest").exists() else 0]
    dist.broadcast_object_list(newest, src=0)
    if newest[0]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # Makes the moments that are filled below.
        optimizer.zero_grad()
        saved = torch.load(HERE / f"save{newest[0]}-{dist.get_rank()}")
        for live, old in zip(local(model, optimizer), saved, strict=True):
            live.copy_(old)
    return newest[0]


def leave(code=0):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


def block(section: str, language: str) -> str:
    """The one fenced block of this language in a section of docs/adopt.md."""
    text = (ROOT / "docs" / "adopt.md").read_text()
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    return str(found)


def launch(folder: Path, section: str, script: str, fault: str) -> str:
    """Runs the script under the section's own command with two ranks; returns its output."""
    path, output = folder / "train.py", folder / "output"
    path.write_text(script.replace('"/fsx"', repr(str(folder))))
    launcher, *options = shlex.split(block(section, "bash"))
    assert options.pop() == "train.py" and "--nproc-per-node=8" in options
    options[options.index("--nproc-per-node=8")] = "--nproc-per-node=2"
    command = [sys.executable, "-m", MODULES[launcher], *options, str(path), str(folder), fault]
    (folder / "tmp").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NVRX_EKS", "FT_", "TORCHELASTIC", "MASTER_"))}
    env = {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)])),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
    }
    with output.open("ab") as log:
        running = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        code = running.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"still runs after {TIMEOUT_S:g} s\n{output.read_text()[-8000:]}") from error
    finally:
        process.send([*process.descendants(running.pid), running.pid], signal.SIGKILL)
        running.wait()
    assert code == 0, output.read_text()[-8000:]
    return output.read_text()


def straight() -> list[torch.Tensor]:
    """Weight and bias after all steps without a fault. Both ranks see the same samples, so one process does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def check_weights(parts: list[list[torch.Tensor]]) -> None:
    """``parts``: weight and bias of each rank."""
    for index, wanted in enumerate(straight()):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), wanted, rtol=1e-5, atol=1e-6)


def steps(folder: Path, rank: int) -> tuple[list[int], list[int]]:
    """The pids, without repetition, and the steps of a rank, in order."""
    lines = [line.split() for line in (folder / f"steps{rank}").read_text().splitlines()]
    return list(dict.fromkeys(int(pid) for pid, _ in lines)), [int(step) for _, step in lines]


@pytest.mark.timeout(300)
def test_async_saves_alone(tmp_path: Path) -> None:
    """The block runs to step 4 and then, on a new model, from its last save to step 8: as if never interrupted.

    The second time it loads what was saved asynchronously, and saves in mode sync: one start of a writer is enough.
    """
    text = block("Asynchronous checkpoints", "python")
    again = text.replace('"my-run")', '"my-run", {"checkpoint.mode": "sync"})')
    assert again != text
    parts = [
        OWN,
        "def first(STEPS):\n    model, optimizer = build()",
        textwrap.indent(text, "    "),
        "def second(STEPS):\n    model, optimizer = build()",
        textwrap.indent(again, "    "),
        "    return local(model, optimizer)\n",
        'if __name__ == "__main__":',
        '    dist.init_process_group("gloo")',
        "    first(4)",
        "    torch.save(second(8), HERE / f'end-{dist.get_rank()}')",
        "    dist.barrier()",
        "    leave()",
    ]
    launch(tmp_path, "Asynchronous checkpoints", "\n".join(parts), "none")
    assert [steps(tmp_path, rank)[1] for rank in (0, 1)] == [list(range(STEPS))] * 2
    check_weights([torch.load(tmp_path / f"end-{rank}") for rank in (0, 1)])
    saves = sorted(path.name for path in (tmp_path / "runs/my-run/checkpoints").iterdir())
    assert saves == ["step-00000006", "step-00000008"]


@pytest.mark.timeout(300)
def test_restart_in_the_same_process(tmp_path: Path) -> None:
    """Rank 1 raises in step 5: both ranks go on from the save of step 4 in the processes that they had."""
    launch(tmp_path, "In-process restart", OWN + block("In-process restart", "python"), "exception")
    for rank in (0, 1):
        pids, made = steps(tmp_path, rank)
        assert len(pids) == 1
        assert made in ([*range(6), *range(4, 8)], [*range(5), *range(4, 8)])
    check_weights([torch.load(tmp_path / f"save{STEPS}-{rank}") for rank in (0, 1)])


@pytest.mark.timeout(300)
def test_restart_by_the_launcher(tmp_path: Path) -> None:
    """Rank 1 is killed in step 5: ft_launcher starts both again, from the save of step 4."""
    launch(tmp_path, "In-job restart", OWN + block("In-job restart", "python") + "leave()\n", "sigkill")
    for rank in (0, 1):
        pids, made = steps(tmp_path, rank)
        assert len(pids) == 2
        assert made in ([*range(6), *range(4, 8)], [*range(5), *range(4, 8)])
    check_weights([torch.load(tmp_path / f"save{STEPS}-{rank}") for rank in (0, 1)])


def test_a_start_is_told_from_the_one_before() -> None:
    """The store still holds the keys of an earlier start whose rank 0 is gone: nobody takes its number."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    for number in (0, 1):
        numbers: dict[int, int] = {}

        def take_part(rank: int, number: int = number, numbers: dict[int, int] = numbers) -> None:
            numbers[rank] = adopt.number_start(store, rank, 3, lambda: number, limit_s=60)

        peers = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in (1, 2)]
        for peer in peers:
            peer.start()
        take_part(0)
        for peer in peers:
            peer.join(60)
        assert numbers == {0: number, 1: number, 2: number}


def test_an_agent_without_a_store_for_workers_is_refused() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    with pytest.raises(ConfigError, match=r"TORCHELASTIC_USE_AGENT_STORE.*legal: True"):
        agent_environment({**told, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    told["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert agent_environment(told).num_nodes == 2
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        agent_environment({**told, "LOCAL_RANK": "2"})
