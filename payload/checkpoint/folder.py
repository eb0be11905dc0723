"""A run's checkpoint folder: what is a complete save, how one becomes visible, and what may be deleted.

A save is written into a hidden draft folder. Its manifest lists every file with size and checksum; it is written last,
and one rename of the draft then makes the save visible, whole. A folder without a manifest is no save.

    checkpoints/
      step-00000020/        a complete save; step-00000020.1 where the step was saved again
        manifest.json  .metadata  __0_0.distcp  __1_0.distcp ...
      .draft-00000030-<token>/   being written, or left by a killed run
      .trash-<token>-.../        being deleted
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_SAVE = re.compile(r"step-(\d+)(?:\.(\d+))?")
_DRAFT = ".draft-"
_TRASH = ".trash-"
_CHUNK_BYTES = 8 << 20


class Damaged(ValueError):
    """A save is not what its manifest says; the text names the file."""


@dataclass(frozen=True)
class FileEntry:
    name: str
    size_bytes: int
    checksum: str
    """xxh3_128, hexadecimal: guards against damage, not against forgery."""
    rank: int
    """Who wrote it."""


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    layout: str
    """``dcp``: torch's distributed layout, any world size reads it. ``local``: one file a rank."""
    mode: str
    saved_wall: float
    files: tuple[FileEntry, ...]

    def to_json(self) -> str:
        body = asdict(self)
        return json.dumps({**body, "checksum": _digest(body)}, indent=1, sort_keys=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises Damaged where the manifest is missing or not what was written."""
        try:
            values: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
            checksum = values.pop("checksum")
            files = tuple(FileEntry(**entry) for entry in values.pop("files"))
            manifest = cls(**values, files=files)
        except FileNotFoundError:
            raise Damaged(f"{folder.name}: no {MANIFEST}, so it was never completed") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Damaged(f"{folder.name}/{MANIFEST}: damaged") from None
        if checksum != _digest(asdict(manifest)):
            raise Damaged(f"{folder.name}/{MANIFEST}: damaged")
        return manifest


@dataclass(frozen=True)
class Scan:
    """What the folder held at one moment."""

    saves: tuple[str, ...]
    """Names of complete saves, newest first."""
    rejected: tuple[str, ...]
    """One line for each folder that is named like a save but is none."""
    num_other: int
    """Entries that are neither saves nor this program's drafts."""


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def describe_file(path: Path, rank: int) -> FileEntry:
    """Reads the file. Raises OSError."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileEntry(path.name, size_bytes, digest.hexdigest(), rank)


def verify(folder: Path, entry: FileEntry) -> None:
    """Raises Damaged naming the file, or OSError where it cannot be read."""
    path = folder / entry.name
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise Damaged(f"{folder.name}/{entry.name}: {size_bytes} bytes instead of {entry.size_bytes}")
        if describe_file(path, entry.rank).checksum != entry.checksum:
            raise Damaged(f"{folder.name}/{entry.name}: content does not match its checksum")
    except FileNotFoundError:
        raise Damaged(f"{folder.name}/{entry.name}: missing") from None


def step_of(name: str) -> int:
    match = _SAVE.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _newest_first(names: Iterable[str]) -> list[str]:
    def order(name: str) -> tuple[int, int]:
        match = _SAVE.fullmatch(name)
        assert match is not None
        return int(match[1]), int(match[2] or 0)

    return sorted(names, key=order, reverse=True)


class SaveFolder:
    """All changes are made by rank 0; every rank reads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def scan(self) -> Scan:
        """Raises OSError where the folder exists and cannot be listed."""
        saves, rejected, num_other = [], [], 0
        for name in self._names():
            if name.startswith((_DRAFT, _TRASH)):
                continue
            if _SAVE.fullmatch(name) and (self.root / name).is_dir():
                try:
                    Manifest.read(self.root / name)
                    saves.append(name)
                except Damaged as reason:
                    rejected.append(str(reason))
            num_other += 1
        return Scan(tuple(_newest_first(saves)), tuple(rejected), num_other - len(saves))

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return []

    def draft(self, step: int, token: str) -> Path:
        """Where the save of this step and attempt is written; not made."""
        return self.root / f"{_DRAFT}{step:08d}-{token}"

    def discard(self, draft: Path) -> None:
        """A draft that will never be complete; its space is free again."""
        self._delete(draft.name)

    def publish(self, draft: Path, manifest: Manifest) -> str:
        """Makes a draft, all of whose files are written, a complete save; returns its name. Raises OSError."""
        with (draft / MANIFEST).open("w") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        _sync(draft)
        number = 0
        name = f"step-{manifest.step:08d}"
        while (self.root / name).exists():
            number += 1
            name = f"step-{manifest.step:08d}.{number}"
        os.rename(draft, self.root / name)  # noqa: PTH104 - the one place where a save becomes visible
        _sync(self.root)
        return name

    def retain(self, keep: int, newest: str, damaged: Collection[str]) -> None:
        """Leaves ``newest`` and the saves of the ``keep`` - 1 steps before it; what has an unknown name stays.

        ``damaged``: names that were found unreadable; they count for nothing and go once a save as new is there.
        """
        step = step_of(newest)
        older = [name for name in self.scan().saves if step_of(name) <= step and name != newest]
        kept, steps = {newest}, {step}
        for name in older:
            if name not in damaged and step_of(name) not in steps and len(steps) < keep:
                kept.add(name)
                steps.add(step_of(name))
        for name in older:
            if name not in kept:
                self._delete(name)

    def sweep(self, older_than: int | None = None) -> list[str]:
        """Deletes trash and drafts; with ``older_than``, only drafts of steps before that one.

        Returns the names of the drafts.
        """
        drafts = []
        for name in self._names():
            if name.startswith(_DRAFT):
                number = name.removeprefix(_DRAFT).partition("-")[0]
                if older_than is None or (number.isdigit() and int(number) < older_than):
                    drafts.append(name)
                    self._delete(name)
            elif name.startswith(_TRASH):
                _remove(self.root / name)
        return drafts

    def _delete(self, name: str) -> None:
        # Out of sight first: a half-deleted folder must never look like a save.
        trash = self.root / f"{_TRASH}{secrets.token_hex(4)}-{name}"
        try:
            os.rename(self.root / name, trash)  # noqa: PTH104
        except FileNotFoundError:
            return
        _remove(trash)

    def move_aside(self) -> Path:
        """Moves everything into a new folder beside this one; returns it. Raises OSError."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        aside = self.root.with_name(f"{self.root.name}.aside-{stamp}-{secrets.token_hex(2)}")
        os.rename(self.root, aside)  # noqa: PTH104
        return aside


def _remove(path: Path) -> None:
    """What cannot be deleted now (a writer of an abandoned save is still at it) goes with the next sweep."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s: not deleted yet: %s", path, error)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
