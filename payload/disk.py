"""How fast a folder's disk is, measured without the page cache: what saves and loads are compared with."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second over ``size_bytes``."""

    size_bytes: int
    write: float
    """One stream, fsync included."""
    read: float
    """One stream, with the page cache dropped before."""


def measure(folder: Path, size_bytes: int) -> DiskSpeed:
    """Writes and reads one file of random bytes in ``folder``, and removes it. Raises OSError where it does not fit."""
    path = folder / f".disk-{os.getpid()}"
    size_bytes = max(_CHUNK_BYTES, size_bytes // _CHUNK_BYTES * _CHUNK_BYTES)
    try:
        return DiskSpeed(size_bytes, _write(path, size_bytes), _read(path, size_bytes))
    finally:
        path.unlink(missing_ok=True)


def drop_cache(path: Path) -> None:
    """Drops the file's pages from the page cache; they must have been written back before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _write(path: Path, size_bytes: int) -> float:
    chunk = os.urandom(_CHUNK_BYTES)
    started = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(size_bytes // _CHUNK_BYTES):
            done = 0
            while done < _CHUNK_BYTES:
                done += os.write(descriptor, memoryview(chunk)[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size_bytes / (time.monotonic() - started)


def _read(path: Path, size_bytes: int) -> float:
    drop_cache(path)
    buffer = mmap.mmap(-1, _CHUNK_BYTES)
    started = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)
        buffer.close()
    return size_bytes / (time.monotonic() - started)
