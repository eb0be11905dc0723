"""What the writer process does: writes one rank's part of a save from shared memory, and reports.

Runs in the worker of NVRx's async queue. Every failure is reported, none ends the process; the report goes by datagram,
as a full disk must not keep the news of it from getting through.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import queue
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from payload.checkpoint.folder import describe_file
from payload.checkpoint.names import local_name
from payload.checkpoint.parts import Part
from payload.checkpoint.stage import Place, Slab
from payload.process import die_with_parent

_MAX_REASON = 4000
"""Characters; a datagram has a limit."""


@dataclass(frozen=True)
class Job:
    ticket: str
    """Names this save of this attempt; the report carries it."""
    address: str
    """Abstract address of the datagram socket that takes the report."""
    draft: Path
    rank: int
    slab: Path
    """The copy to write from."""
    items: tuple[tuple[WriteItem, Place | bytes], ...] = ()
    """``dcp`` layout: what this rank writes, and where it lies."""
    num_files: int = 1
    places: tuple[Place, ...] = ()
    """``local`` layout."""
    plain: bytes = b""
    """``local`` layout: the pickled values that are no tensors."""


def adopt(parent_pid: int) -> None:
    """The first job of every worker: it must not outlive the rank that it writes for."""
    die_with_parent(parent_pid)
    torch.set_num_threads(1)


def write_sharded(job: Job) -> None:
    _reported(job, _write_buckets)


def write_local(request: dict[str, Job]) -> None:
    """In the form that TorchAsyncCheckpoint passes its state on."""
    _reported(request["job"], _write_one_file)


def _reported(job: Job, write: Any) -> None:
    started, reason = time.monotonic(), ""
    try:
        job.draft.mkdir(parents=True, exist_ok=True)
        results = write(job)
        names = sorted({result.storage_data.relative_path for result in results}) or [local_name(job.rank)]
        if not job.places and not job.items:
            names = []
        part = Part(tuple(describe_file(job.draft / name, job.rank) for name in names), tuple(results))
        part.leave(job.draft, job.rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, the rank must hear of it
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    report = {"ticket": job.ticket, "reason": reason, "write_s": time.monotonic() - started}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(json.dumps(report).encode(), job.address)


def _write_buckets(job: Job) -> list[WriteResult]:
    """By NVRx's parallel writer: processes before 0.6, threads since."""
    if not job.items:
        return []
    slab = Slab.map(job.slab, private=True)
    buckets = []
    for number, items in enumerate(split(job.items, job.num_files)):
        texts = [(item, BytesIO(data)) for item, data in items if isinstance(data, bytes)]
        tensors = [(item, slab.tensor(p)) for item, p in items if isinstance(p, Place)]
        name = f"__{job.rank}_{number}.distcp"
        buckets.append((str(job.draft / name), name, (texts, tensors)))
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
    transforms = [FileSystemWriterAsync(job.draft).transforms]
    threaded = getattr(FileSystemWriterAsync, "write_preloaded_data_multithread", None)
    if threaded is not None:
        threaded(transforms, False, open, job.rank, buckets, outcome)
    else:
        FileSystemWriterAsync.write_preloaded_data_multiproc(transforms, False, job.rank, buckets, outcome)
    slab.close()
    multiprocessing.active_children()  # Reaps the processes of NVRx before 0.6, which forgets them after a failure.
    written = outcome.get_nowait()
    if isinstance(written, BaseException):
        raise written
    if len(written) != len(buckets):
        raise RuntimeError(f"{len(written)} of {len(buckets)} files written")
    return [result for results in written.values() for result in results]


def split(
    items: Sequence[tuple[WriteItem, Place | bytes]], num_files: int
) -> list[list[tuple[WriteItem, Place | bytes]]]:
    """Into at most ``num_files`` parts of about the same number of bytes; none is empty."""
    parts: list[list[tuple[WriteItem, Place | bytes]]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files

    def size_bytes(data: Place | bytes) -> int:
        return len(data) if isinstance(data, bytes) else data.size_bytes

    for item, data in sorted(items, key=lambda pair: size_bytes(pair[1]), reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append((item, data))
        sizes[smallest] += size_bytes(data) + 1
    return [part for part in parts if part]


def _write_one_file(job: Job) -> list[WriteResult]:
    slab = Slab.map(job.slab, private=True)
    content = {
        "tensors": {place.name: slab.tensor(place) for place in job.places},
        "plain": pickle.loads(job.plain),
    }
    with (job.draft / local_name(job.rank)).open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    slab.close()
    return []
