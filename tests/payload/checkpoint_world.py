"""Ranks for the checkpoint tests: processes that are started once, and run one case after another.

A case is a function of tests/payload/checkpoint_cases.py; every rank of it runs in its own process, over gloo. What it
returns, or the traceback of what it raised, comes back by rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from payload.process import die_with_parent
from tests.payload import checkpoint_cases

CASE_LIMIT_S = 90.0
"""A case that takes longer hangs."""


class CaseFailed(AssertionError):
    """The tracebacks of a case, by rank."""


class World:
    """``size`` processes; a case runs on the first few of them."""

    def __init__(self, folder: Path, size: int, num_writers: int) -> None:
        """The first ``num_writers`` ranks get a warm writer process."""
        self._folder = folder
        self._number = 0
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        # Forked, as importing torch takes seconds; nothing here has started a thread yet.
        context = multiprocessing.get_context("fork")
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank < num_writers, os.getpid()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on threads of others
                process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)
        try:
            for link in self._links:
                assert link.poll(CASE_LIMIT_S), "a rank did not start"
                link.recv()
        except BaseException:
            self.close()
            raise

    def run(self, case: str, *arguments: Any, size: int = 2) -> list[Any]:
        """What the case returned on each rank. Raises CaseFailed; a case that hangs ends the world."""
        self._number += 1
        folder = self._folder / f"{self._number}"
        folder.mkdir(parents=True)
        for rank, link in enumerate(self._links[:size]):
            link.send((case, arguments, rank, size, folder))
        missing = set(self._links[:size])
        outcomes: dict[Connection, tuple[bool, Any]] = {}
        while missing:
            ready = wait(list(missing), CASE_LIMIT_S)
            if not ready:
                self.close()
                raise CaseFailed(f"{case}: ranks {[self._links.index(link) for link in missing]} hang")
            for link in ready:
                assert isinstance(link, Connection)
                outcomes[link] = link.recv()
                missing.discard(link)
        ordered = [outcomes[link] for link in self._links[:size]]
        failures = [f"rank {rank}: {text}" for rank, (passed, text) in enumerate(ordered) if not passed]
        if failures:
            raise CaseFailed("\n".join(failures))
        return [value for _, value in ordered]

    def close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.send(None)
            link.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def world(folder: Path, size: int, num_writers: int) -> Iterator[World]:
    made = World(folder, size, num_writers)
    try:
        yield made
    finally:
        made.close()


def _serve(link: Connection, with_writer: bool, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    sys.modules["__main__"] = types.ModuleType("__main__")  # Spawned writers would import pytest's.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = checkpoint_cases.start_writer() if with_writer else None
    link.send("ready")
    try:
        while True:
            request = link.recv()
            if request is None:
                break
            case, arguments, rank, size, folder = request
            link.send(_run(case, arguments, checkpoint_cases.Context(rank, size, folder, writer)))
    except (EOFError, OSError):
        pass  # The test is over.
    if writer is not None:
        writer.close()
    os._exit(0)


def _run(case: str, arguments: tuple[Any, ...], context: Any) -> tuple[bool, Any]:
    try:
        with context.group():
            return True, getattr(checkpoint_cases, case)(context, *arguments)
    except BaseException:  # noqa: BLE001 - a case's failure belongs to the test, not to the process
        return False, traceback.format_exc()
