"""The files of one rank's snapshots in node memory.

``<memory_dir>/snapshots/<run_id>/rank<k>/slot<i>`` holds the bytes, ``slot<i>.json`` says what they are. A slot counts
only while its header is there: the header is removed before the bytes change and appears by a rename once they are
whole, so a half-written slot is never read, whoever is killed when.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from payload.checkpoint.stage import Slab

NUM_SLOTS = 4
"""Three rotate, as ranks may be one snapshot apart when one dies; one may be leased to the durable writer."""
_CHUNK_BYTES = 64 << 20
_LOCK = "lock"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class NoRoom(ValueError):
    """The memory volume is too small for the snapshots; the text has the figures."""


@dataclass(frozen=True)
class Header:
    step: int
    rank: int
    world_size: int
    layout: str
    """Layout.digest: whose tensors, where."""
    size_bytes: int
    checksums: tuple[str, ...]
    """xxh3_128 of each 64 MiB."""
    plain: str
    """Pickled values that are no tensors, hexadecimal."""

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """None where there is none, or something else."""
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
            return cls(**{**values, "checksums": tuple(values["checksums"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None


def checksums(slab: Slab, size_bytes: int) -> tuple[str, ...]:
    """In parallel: xxhash lets go of the interpreter's lock."""

    def one(offset: int) -> str:
        length = min(_CHUNK_BYTES, size_bytes - offset)
        return xxhash.xxh3_128_hexdigest(slab.bytes_at(offset, length).numpy().data)

    offsets = range(0, size_bytes, _CHUNK_BYTES)
    if len(offsets) == 1:
        return (one(0),)
    with ThreadPoolExecutor(min(8, len(offsets))) as pool:
        return tuple(pool.map(one, offsets))


class Slot:
    """One slot of this rank, mapped."""

    def __init__(self, folder: Path, index: int, size_bytes: int) -> None:
        """Keeps what is there if it has this size. Raises OSError (disk full: no room)."""
        self.index = index
        path = folder / f"slot{index}"
        self._header = folder / f"slot{index}.json"
        if not path.exists() or path.stat().st_size != size_bytes:
            self._header.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                # All pages now: a full volume is an error here instead of a SIGBUS in the middle of a copy.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        self.slab = Slab.map(path, private=False)

    def header(self) -> Header | None:
        return Header.read(self._header)

    def invalidate(self) -> None:
        self._header.unlink(missing_ok=True)

    def publish(self, header: Header) -> None:
        draft = self._header.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(header)))
        draft.rename(self._header)

    def is_whole(self, header: Header) -> bool:
        return checksums(self.slab, header.size_bytes) == header.checksums


class RunMemory:
    """The folder of a run in the memory volume, locked against removal while this process lives."""

    def __init__(self, memory_dir: Path, run_id: str) -> None:
        """Removes what other runs left. Raises OSError."""
        base = memory_dir / "snapshots"
        self.root = base / run_id
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        for other in base.iterdir():
            if other.name != run_id:
                _remove_unused(other)

    def rank_folder(self, rank: int) -> Path:
        path = self.root / f"rank{rank}"
        path.mkdir(exist_ok=True)
        return path

    def check_room(self, size_bytes: int, num_slots: int, ranks_per_node: int) -> None:
        """``size_bytes``: of one snapshot of one rank. Raises NoRoom."""
        needed = num_slots * size_bytes * ranks_per_node
        volume = os.statvfs(self.root)
        present = sum(path.stat().st_blocks * 512 for path in self.root.glob("r*/slot*"))
        room = volume.f_bavail * volume.f_frsize + present
        figures = f"the snapshots of {ranks_per_node} ranks need {needed} bytes ({num_slots} slots of {size_bytes})"
        if needed > room:
            raise NoRoom(f"{self.root}: room for {room} bytes, {figures}")
        limit = _cgroup_limit()
        if limit is not None and needed > limit:
            raise NoRoom(f"memory limit of the container: {limit} bytes, {figures}")

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _cgroup_limit() -> int | None:
    try:
        text = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # cgroup v1, or none
        return None
    return int(text) if text.isdigit() else None


def _remove_unused(run: Path) -> None:
    """Unless a process of that run lives."""
    try:
        descriptor = os.open(run / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Just being made, or not ours.
    except NotADirectoryError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(run, ignore_errors=True)  # Another rank of this pod may be doing the same.
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
