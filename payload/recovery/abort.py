"""Getting every rank out of a broken attempt: wakes blocked collectives and destroys all process groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def open_sockets() -> set[str]:
    """Identities of this process's open sockets."""
    return set(_sockets().values())


def _sockets() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # closed meanwhile, as is the descriptor of this listing
            continue
        if target.startswith("socket:"):
            found[int(entry.name)] = target
    return found


def shut_down_gloo(keep: Collection[str], store_port: int) -> int:
    """Shuts down the TCP connections of gloo, so that blocked collectives raise; returns how many.

    torch 2.13 has no other way: abort() and shutdown() of ProcessGroupGloo leave a blocked collective blocked.

    Args:
        keep: sockets that were open before the attempt began (``open_sockets``); left alone.
        store_port: connections to and from this port are the stores'; left alone.
    """
    count = 0
    for descriptor, identity in _sockets().items():
        if identity in keep:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
                if tcp and store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # closed meanwhile, or a listening socket without a peer
            continue
    return count


def leave_groups(keep: Collection[str], store_port: int) -> None:
    """From any thread: every collective of this process ends with an error and all groups are gone."""
    if not dist.is_initialized():
        return
    shut_down_gloo(keep, store_port)
    if torch.cuda.is_available():
        _abort_nccl()
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort_nccl() -> None:
    for group in list(distributed_c10d._world.pg_names):
        backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, dist.ProcessGroupNCCL):
            backend.abort()


def dump_trace(path: Path) -> bool:
    """Writes the flight recorder's trace (JSON) where torch and the backend keep one; False where there is none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return False
    trace = dump()
    data = trace if isinstance(trace, bytes) else str(trace).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True
