"""The event log: append-only JSON lines, from which every figure is computed afterwards.

One file a source: ``events/rank<k>.jsonl`` (k: the global rank at the start of the process),
``events/pod<i>.jsonl``, ``events/job.jsonl``. Several processes may append to one file: each record is one
``write`` to a descriptor opened with O_APPEND. Every record holds ``kind``, ``wall`` (seconds since the
epoch, comparable across processes and hosts), ``mono`` (seconds, comparable within one process only),
``pid`` and ``source``; the rest depends on the kind.

A process may be killed in the middle of a write. A record is one JSON object, no proper prefix of which is
JSON, so a torn record is recognised and loses only itself: a log that opens behind one starts a new line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_COMMON = ("kind", "wall", "mono", "pid", "source")


class EventError(ValueError):
    """The log does not hold what an analysis needs; the text names the source and the missing kind."""


@dataclass(frozen=True)
class Event:
    kind: str
    wall: float
    """Seconds since the epoch."""
    mono: float
    """Seconds of the monotonic clock of the host."""
    pid: int
    source: str
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, name: str) -> Any:
        """A field of this kind. Raises EventError naming source, kind and field where it is missing."""
        try:
            return self.fields[name]
        except KeyError:
            raise EventError(f"{self.source}: event {self.kind} has no field {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class EventLog:
    """Appends to one source's file. Safe over fork and from several threads and processes.

    ``path`` is the file; its folder is made. Raises OSError where it cannot be written.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.path = Path(path)
        self.source = source
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":
            # The previous process of this source was killed in the middle of a record.
            os.write(self._descriptor, b"\n")

    @classmethod
    def for_rank(cls, events_dir: Path, rank: int) -> EventLog:
        return cls(events_dir / f"rank{rank}.jsonl", f"rank{rank}")

    @classmethod
    def for_pod(cls, events_dir: Path, index: int) -> EventLog:
        return cls(events_dir / f"pod{index}.jsonl", f"pod{index}")

    @classmethod
    def for_job(cls, events_dir: Path) -> EventLog:
        return cls(events_dir / "job.jsonl", "job")

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Writes one record at once.

        Raises:
            ValueError: a field has the name of a common one.
            OSError: the record was not written, or only in part (disk full).
        """
        for name in _COMMON:
            if name in fields:
                raise ValueError(f"{name}: reserved; legal: any field but {', '.join(_COMMON)}")
        record = {
            "kind": kind,
            "wall": time.time(),
            "mono": time.monotonic(),
            "pid": os.getpid(),
            "source": self.source,
            **fields,
        }
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes of an event were written")

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class RunEvents:
    """All records of a run, those of each source in the order written."""

    by_source: Mapping[str, tuple[Event, ...]]
    num_torn: int
    """Lines that are no whole record: a process was killed while it wrote."""

    def of(self, source: str) -> tuple[Event, ...]:
        """Raises EventError where the source left no file."""
        if source not in self.by_source:
            known = ", ".join(sorted(self.by_source)) or "none"
            raise EventError(f"{source}: no events; sources found: {known}")
        return self.by_source[source]

    def ranks(self) -> tuple[str, ...]:
        """Sources of ranks, by number."""
        return self._numbered("rank")

    def pods(self) -> tuple[str, ...]:
        return self._numbered("pod")

    def _numbered(self, prefix: str) -> tuple[str, ...]:
        numbers = (name.removeprefix(prefix) for name in self.by_source if name.startswith(prefix))
        return tuple(f"{prefix}{number}" for number in sorted(int(text) for text in numbers if text.isdigit()))


def read_file(path: Path) -> tuple[tuple[Event, ...], int]:
    """The whole records of one file, and the number of lines that are none."""
    events, num_torn = [], 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        event = _parse(line)
        if event is None:
            num_torn += 1
        else:
            events.append(event)
    return tuple(events), num_torn


def _parse(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
    except ValueError:  # also a character cut in half
        return None
    if not isinstance(record, dict) or any(name not in record for name in _COMMON):
        return None
    common = {name: record.pop(name) for name in _COMMON}
    return Event(**common, fields=MappingProxyType(record))


def read_events(events_dir: Path) -> RunEvents:
    """Every ``*.jsonl`` of the folder. Raises EventError where there is none."""
    by_source: dict[str, tuple[Event, ...]] = {}
    num_torn = 0
    for path in sorted(Path(events_dir).glob("*.jsonl")):
        by_source[path.stem], torn = read_file(path)
        num_torn += torn
    if not by_source:
        raise EventError(f"{events_dir}: no event log (*.jsonl)")
    return RunEvents(MappingProxyType(by_source), num_torn)
