"""Process trees on Linux: who is whose child, how to end a tree, and how not to outlive a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def set_death_signal(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends ``number`` to this process when the thread that started it ends (prctl(2)).

    Kept over exec, not inherited by children. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))


def die_with_parent(parent_pid: int) -> None:
    """set_death_signal(), and ends at once where the parent is already gone."""
    set_death_signal()
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, so that kill_tree() finds them. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


@dataclass(frozen=True)
class _Stat:
    """Of /proc/<pid>/stat (proc(5))."""

    state: str
    parent: int
    session: int
    start_ticks: int
    """Since boot."""


def _stat(pid: int) -> _Stat | None:
    """None where the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def children_of(pid: int) -> list[int]:
    """Live and zombie children."""
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [child for child in pids if (stat := _stat(child)) is not None and stat.parent == pid]


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            parents.setdefault(stat.parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    stat = _stat(pid)
    return stat is not None and stat.state not in "ZX"


def started_wall(pid: int) -> float:
    """Seconds since the epoch at which the process was started. Raises ProcessLookupError."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"process {pid} is gone")
    uptime_s = float((_PROC / "uptime").read_text().split()[0])
    return time.time() - uptime_s + stat.start_ticks / os.sysconf("SC_CLK_TCK")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends the signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_below(pid: int, timeout_s: float = 10.0) -> None:
    """SIGKILL to everything below ``pid`` until nothing runs there; reaps what became this process's children.

    Raises TimeoutError naming what survived ``timeout_s`` seconds (a process in uninterruptible sleep).
    """
    deadline = time.monotonic() + timeout_s
    while running := [child for child in descendants(pid) if is_running(child)]:
        send(running, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} survive SIGKILL")
        time.sleep(0.01)
    if pid == os.getpid():
        reap()


def reap(*, adopted_only: bool = False) -> None:
    """Waits for this process's zombies.

    ``adopted_only``: those that a child started and left behind, told by their session, which is neither this
    process's nor their own; the others belong to whoever started them here.
    """
    own = os.getsid(0)
    for child in children_of(os.getpid()):
        stat = _stat(child)
        if stat is None or stat.state != "Z" or (adopted_only and stat.session in (own, child)):
            continue
        try:
            os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            continue


_FORK_SAFE = frozenset({"jemalloc_bg_thd"})
"""Threads of libraries that prepare for a fork themselves: jemalloc's (pyarrow brings it) starts anew in the child."""


def fork_hazards() -> list[str]:
    """Names of the threads, beside the calling one, that a fork would lose with whatever locks they hold."""
    own = str(threading.get_native_id())
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    names = [(task / "comm").read_text().strip() for task in tasks]
    return sorted(name for name in names if name not in _FORK_SAFE)
