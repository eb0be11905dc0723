"""One rank of the all-reduce that ``preflight-nodes`` times; started by torchrun, as an ordinary rank would be."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from payload.cluster.node_check import BANDWIDTH
from payload.environment import local_rank

_SIZES = {"cuda": 1 << 30, "cpu": 1 << 22}
"""Bytes a rank: large enough that latency does not count."""
_WARMUP, _ROUNDS = 5, 10


def bus_bandwidth(device: torch.device) -> float:
    """GB/s as NCCL's own tests count it: bytes * 2 (n - 1) / n / seconds. Collective."""
    tensor = torch.ones(_SIZES[device.type] // 4, device=device)
    for _ in range(_WARMUP):
        dist.all_reduce(tensor)
        tensor.fill_(1.0)
    _finish(device)
    begin = time.monotonic()
    for _ in range(_ROUNDS):
        dist.all_reduce(tensor)
    _finish(device)
    seconds = (time.monotonic() - begin) / _ROUNDS
    world = dist.get_world_size()
    return tensor.nbytes * 2 * (world - 1) / world / seconds / 1e9


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def main(kind: str) -> None:
    device = torch.device(kind, local_rank()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rate = bus_bandwidth(device)
    if dist.get_rank() == 0:
        sys.stdout.write(f"all-reduce over {dist.get_world_size()} ranks: {BANDWIDTH}{rate:.2f}\n")
    dist.destroy_process_group()
    sys.stdout.flush()
    # torch's exit handlers may abort once groups were torn down.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
