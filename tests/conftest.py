"""Every test leaves the machine as it found it: no process, no thread, no folder of the local cluster."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

GRACE_S = 10.0
"""How long what a test started may take to be gone once the test has ended."""
LASTING = ("jsii", "resource_tracker", "forkserver")
"""Part of the command of processes that a library starts once and keeps until the interpreter ends."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fails a test that leaves a process, a thread that is no daemon, or a folder of its local cluster."""
    before = {*_processes(), *_threads()}
    yield
    deadline = time.monotonic() + GRACE_S
    while (names := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    names += [f"folder {path}" for path in _folders()]
    assert not names, "left behind: " + "; ".join(names)


def _left(before: set[psutil.Process | threading.Thread]) -> list[str]:
    """What has come since and may not stay."""
    return [name for item in {*_processes(), *_threads()} - before if (name := _describe(item))]


def _processes() -> set[psutil.Process | threading.Thread]:
    """Children at any depth; what is dead but not waited for counts too."""
    return set(psutil.Process().children(recursive=True))


def _threads() -> set[psutil.Process | threading.Thread]:
    """Those that keep an interpreter from ending."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _folders() -> list[Path]:
    """Named by the process that runs the cluster (payload/local.py), as others may be at work on the machine."""
    pattern = f"nvrx-{os.getpid()}-*"
    return [path for root in (tempfile.gettempdir(), "/dev/shm") for path in Path(root).glob(pattern)]


def _describe(item: psutil.Process | threading.Thread) -> str:
    """Empty for what may stay, or has just gone."""
    if isinstance(item, threading.Thread):
        return f"thread {item.name}"
    try:
        command = " ".join(item.cmdline())
        return "" if any(word in command for word in LASTING) else f"process {item.pid}: {command or item.status()}"
    except psutil.Error:
        return ""
