"""The rank's side of the writer process: NVRx's async calls queue with its persistent worker, started ahead.

Jobs carry names of shared memory, never tensors, so the worker needs no device and no tensor travels through a queue.
Reports come on a socket of their own and name the job, so a job of an abandoned attempt cannot be taken for another.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt import core
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from payload.checkpoint.job import Job, adopt, write_local, write_sharded
from payload.process import fork_hazards

_JOIN_S = 10.0
"""A killed process is waited for this long."""


@dataclass(frozen=True)
class Report:
    ticket: str
    reason: str
    """Empty: written."""
    write_s: float


class AsyncWriter:
    """One writer process at a time; outlives attempts."""

    def __init__(self) -> None:
        self._queue: Any = None
        self._front: Any = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = f"\0nvrx-eks-writer-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind(self.address)

    def start(self) -> None:
        """Starts the worker, unless a live one is there.

        A process that still has one thread and no device is forked, and its worker is ready at once; later the worker
        is spawned, and does its imports while training goes on. The calling thread has to outlive the worker (it is
        the one whose death the kernel reports to it).
        """
        if self._queue is not None and self.death() is None:
            return
        self._discard()
        options: dict[str, Any] = {"persistent": True}
        if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters:
            options["cpu_shm_mode"] = True  # Else the worker opens the device, which it never uses.
        self._queue = AsyncCallsQueue(**options)
        # For the local layout; its own queue, which is idle, would open the device.
        self._front = TorchAsyncCheckpoint(persistent_queue=True)
        self._front._async_calls_queue = self._queue
        TorchAsyncCheckpoint.async_fn = write_local
        self._queue._get_async_caller().rank = 0  # For its log lines; NVRx would ask a group that is not there yet.
        with _forking_where_sound():
            self._schedule(adopt, os.getpid())

    def restart(self) -> None:
        """Ends a worker that does not answer, with whatever it has, and starts another."""
        self._discard()
        self.start()

    def _schedule(self, function: Callable[..., None], argument: object) -> None:
        # The kwargs are given because NVRx 0.4.1 shares one default dict between requests.
        self._queue.schedule_async_request(AsyncRequest(function, (argument,), [], {}))

    def submit(self, job: Job) -> None:
        """Never waits for the worker."""
        if not job.places:
            self._schedule(write_sharded, job)
        else:
            with _without_device():
                self._front.async_save({"job": job})

    @property
    def pid(self) -> int | None:
        return self._queue.persistent_caller.process.pid if self._queue is not None else None

    def death(self) -> str | None:
        """Why no more reports will come, None while the worker lives or was never started."""
        if self._queue is None:
            return None
        process = self._queue.persistent_caller.process
        if process.is_alive():
            return None
        return f"the writer process {process.pid} died (exit code {process.exitcode})"

    def reports(self) -> Iterator[Report]:
        """What has come since the last call; never blocks."""
        if self._queue is not None and self.death() is None:
            self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            yield Report(**json.loads(data))

    def _discard(self) -> None:
        """Ends the worker without any of NVRx's own waiting, some of it collective."""
        if self._queue is None:
            return
        caller = self._queue.persistent_caller
        process, caller.process = caller.process, None
        process.kill()
        process.join(_JOIN_S)
        for channel in (caller.queue, caller.preload_q, caller.comp_q):
            channel.close()
            channel.join_thread()  # Ends at once: nobody reads any more.
        self._queue.async_calls.clear()
        self._queue.persistent_caller = None
        self._queue = self._front = None
        del caller, process, channel
        gc.collect()  # The queues' semaphores are unlinked now, and not reported as leaked at exit.

    def close(self) -> None:
        """Idempotent. A job that is still being written is lost."""
        self._discard()
        self._socket.close()


@contextmanager
def _forking_where_sound() -> Iterator[None]:
    """NVRx always spawns; inside, it forks if nothing here would break by it."""
    if fork_hazards() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    original = core.mp.get_context
    core.mp.get_context = lambda _method=None: original("fork")
    try:
        yield
    finally:
        core.mp.get_context = original


@contextmanager
def _without_device() -> Iterator[None]:
    """TorchAsyncCheckpoint waits for the device even where there is none (all versions up to 0.7)."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *_: None
    try:
        yield
    finally:
        torch.cuda.synchronize = original
