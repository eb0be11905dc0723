"""Runs in the pods of ``preflight-nodes``, one a node: EFA, NCCL's choice of it, all-reduce, and the shared volume.

Each pod checks its node and then runs one torchrun agent over all nodes. What was measured, and what is wrong, is one
line each on stdout; the exit code is 0 when nothing is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.environment import PodEnvironment, snapshot

EXIT_UNFIT = 1
BANDWIDTH = "bandwidth_gb_s="
_WRITE_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 22
_BANDWIDTH_S = 600.0
_CHOSEN = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.MULTILINE)
"""The second form is that of NCCL 2.27 and later."""


@dataclass(frozen=True)
class Thresholds:
    """What a node must reach; 0 switches a check off."""

    num_efa: int
    """EFA devices that libfabric must offer."""
    bus_gb_s: float
    """Bus bandwidth of an all-reduce over all ranks, in 1e9 bytes a second."""
    write_mb_s: float
    """Of one writer on the shared volume, in 1e6 bytes a second."""


def efa_problems(fi_info: str, num_efa: int) -> Iterator[str]:
    """``fi_info``: what ``fi_info -p efa -t FI_EP_RDM`` printed."""
    domains = set(re.findall(r"domain:\s*(\S+)", fi_info))
    if len(domains) < num_efa:
        yield f"fi_info shows {len(domains)} EFA devices; legal: {num_efa}"


def memlock_problems(soft: int, num_efa: int) -> Iterator[str]:
    """EFA pins the memory that it reads and writes."""
    if num_efa and soft != resource.RLIM_INFINITY:
        yield f"memlock limit {soft} bytes; legal: unlimited (the node's containerd sets it)"


def nccl_problems(log: str, num_efa: int) -> Iterator[str]:
    """``log``: the output of ranks that ran with NCCL_DEBUG=INFO."""
    chosen = set(_CHOSEN.findall(log))
    if num_efa and chosen != {"AWS Libfabric"}:
        yield f"NCCL uses {', '.join(sorted(chosen)) or 'no network that it names'}; legal: AWS Libfabric"


def bandwidth_problems(log: str, bus_gb_s: float) -> Iterator[str]:
    """The line that rank 0 printed."""
    match = re.search(rf"{BANDWIDTH}([0-9.]+)", log)
    if not match:
        yield "the all-reduce did not end"
    elif float(match[1]) < bus_gb_s:
        yield f"all-reduce reached {float(match[1]):.1f} GB/s; legal: {bus_gb_s:g} or more"


def write_rate(folder: Path, name: str) -> float:
    """MB/s of one sequential, synced write."""
    block = os.urandom(_BLOCK_BYTES)
    path = folder / f".preflight-{name}"
    begin = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(_WRITE_BYTES // _BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return _WRITE_BYTES / 1e6 / (time.monotonic() - begin)


def write_problems(rate_mb_s: float, limit_mb_s: float) -> Iterator[str]:
    if rate_mb_s < limit_mb_s:
        yield f"shared volume took {rate_mb_s:.0f} MB/s; legal: {limit_mb_s:g} or more"


def torchrun_command(pod: PodEnvironment) -> list[str]:
    """One agent a node; pod 0's address is its stable name."""
    shape = pod.config.parallelism
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={shape.num_nodes}",
        f"--nproc-per-node={shape.ranks_per_node}",
        f"--node-rank={pod.index}",
        f"--master-addr={pod.coordinator}",
        f"--master-port={pod.port}",
        *("-m", "payload.cluster.bandwidth", shape.device),
    ]


def run_bandwidth(pod: PodEnvironment) -> str:
    """Output of the agent and its ranks."""
    values = {**snapshot(), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    try:
        done = subprocess.run(
            torchrun_command(pod), env=values, capture_output=True, text=True, timeout=_BANDWIDTH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
    return done.stdout + done.stderr


def check(pod: PodEnvironment, limits: Thresholds) -> list[str]:
    """What is wrong with this node and its place among the others; prints what it measured."""
    found: list[str] = []
    if limits.num_efa:
        done = subprocess.run(["fi_info", "-p", "efa", "-t", "FI_EP_RDM"], capture_output=True, text=True, check=False)
        found += efa_problems(done.stdout, limits.num_efa)
    found += memlock_problems(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], limits.num_efa)
    rate = write_rate(Path(pod.config.workdir), pod.pod_name)
    sys.stdout.write(f"node {pod.node_name}: shared volume {rate:.0f} MB/s\n")
    found += write_problems(rate, limits.write_mb_s)
    log = run_bandwidth(pod)
    found += nccl_problems(log, limits.num_efa)
    if pod.index == 0:
        found += bandwidth_problems(log, limits.bus_gb_s)
        sys.stdout.write("".join(f"{line}\n" for line in log.splitlines() if BANDWIDTH in line))
    if found:
        sys.stdout.write(log[-8000:])
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m payload.cluster.node_check", description=__doc__.splitlines()[0])
    parser.add_argument("--num-efa", type=int, required=True)
    parser.add_argument("--bus-gb-s", type=float, required=True)
    parser.add_argument("--write-mb-s", type=float, required=True)
    given = parser.parse_args(argv)
    pod = PodEnvironment.read()
    found = check(pod, Thresholds(given.num_efa, given.bus_gb_s, given.write_mb_s))
    for line in found:
        sys.stdout.write(f"node {pod.node_name}: unfit: {line}\n")
    if not found:
        sys.stdout.write(f"node {pod.node_name}: fit\n")
    return EXIT_UNFIT if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
