"""Finds the newest save that all ranks can read, and reads it in place.

Three outcomes that must never be taken for one another: nothing was ever saved (None), a save is damaged (named, and
the one before is tried), reading failed (an error on all ranks).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from payload.checkpoint.base import CheckpointError, StateDict
from payload.checkpoint.folder import Damaged, FileEntry, Manifest, SaveFolder, Scan, verify
from payload.checkpoint.names import local_name
from payload.checkpoint.peers import Peers
from payload.checkpoint.stage import local_tensors, set_plain_values

if TYPE_CHECKING:
    from payload.events import EventLog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Outcome:
    """What one rank found in one save; at most one of the texts is set."""

    damage: str = ""
    failure: str = ""


class Loader:
    """Remembers what it found damaged."""

    def __init__(self, folder: SaveFolder, events: EventLog, *, fresh_start: bool) -> None:
        self._folder = folder
        self._events = events
        self._fresh_start = fresh_start
        self.damaged: set[str] = set()
        """Names of saves that some rank could not verify."""

    def load(self, state: StateDict, peers: Peers) -> Manifest | None:
        """Collective. Fills the state; None when nothing was ever saved. Raises CheckpointError on all ranks."""
        root = self._folder.root
        scan: Scan = peers.on_first(self._first_look, f"listing {root}")
        for name in scan.saves:
            manifest = self._agree(name, peers)
            if manifest is not None:
                _read(self._folder.root / name, manifest, state, peers)
                return manifest
        if scan.num_other or scan.saves:
            self._nothing_valid(scan, peers)
        return None

    def newest_step(self, peers: Peers) -> int:
        """Collective: the newest step that is named as complete, 0 where there is none; nothing is verified."""
        scan: Scan = peers.on_first(self._folder.scan, f"listing {self._folder.root}")
        steps = [Manifest.read(self._folder.root / name).step for name in scan.saves if name not in self.damaged]
        return max(steps, default=0)

    def _first_look(self) -> Scan:
        for name in self._folder.sweep():
            self._warn(f"checkpoint skipped: {name}: a save that was never completed, removed")
        scan = self._folder.scan()
        for reason in scan.rejected:
            self._warn(f"checkpoint skipped: {reason}")
        return scan

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._events.emit("warning", text=text)

    def _agree(self, name: str, peers: Peers) -> Manifest | None:
        """Collective: the manifest of a save that all ranks found whole, else None."""
        path = self._folder.root / name
        manifest, outcome = None, _Outcome()
        try:
            manifest = Manifest.read(path)
            for entry in _share(manifest, peers):
                verify(path, entry)
        except Damaged as damage:
            outcome = _Outcome(damage=str(damage))
        except OSError as error:
            outcome = _Outcome(failure=str(error))
        outcomes = peers.gather(outcome, f"verifying {path}")
        _raise_failures(outcomes, f"reading {path}")
        damages = [f"{o.damage} (rank {rank})" for rank, o in enumerate(outcomes) if o.damage]
        if not damages:
            return manifest
        self.damaged.add(name)
        if peers.rank == 0:
            self._warn(f"checkpoint skipped: {'; '.join(damages)}")
        return None

    def _nothing_valid(self, scan: Scan, peers: Peers) -> None:
        root = self._folder.root
        if self._fresh_start:
            aside = peers.on_first(self._folder.move_aside, f"moving {root} aside")
            if peers.rank == 0:
                self._warn(f"{root} holds no valid save; moved to {aside}, starting at step 0")
            return
        found = "; ".join([*scan.rejected, *(f"{name}: damaged" for name in scan.saves)]) or "files of unknown names"
        raise CheckpointError(
            f"{root} is not empty but holds no valid save ({found}); restore one, or start at step 0 "
            "with checkpoint.fresh_start=true, which moves the content aside"
        )


def _share(manifest: Manifest, peers: Peers) -> list[FileEntry]:
    """Each rank verifies what it is about to read, as far as the world size is the same; together, everything."""
    return [entry for entry in manifest.files if entry.rank % peers.world_size == peers.rank]


def _raise_failures(outcomes: list[_Outcome], doing: str) -> None:
    failures = [f"rank {rank}: {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.failure]
    if failures:
        raise CheckpointError(f"{doing} failed: {'; '.join(failures)}")


def _read(path: Path, manifest: Manifest, state: StateDict, peers: Peers) -> None:
    """Collective in its outcome only: every rank reads by itself, so that no one waits inside for another."""
    if manifest.layout == "local" and manifest.world_size != peers.world_size:
        raise CheckpointError(
            f"{path}: saved by {manifest.world_size} ranks in mode async-local, cannot be loaded by "
            f"{peers.world_size}; legal: the same world size, or a save of mode async or sync"
        )
    reader: Callable[[Path, StateDict, int], None] = read_local if manifest.layout == "local" else read_sharded
    failure = ""
    try:
        reader(path, state, peers.rank)
    except Exception as error:  # noqa: BLE001 - gathered, and raised on all ranks
        failure = f"{type(error).__name__}: {error}"
    outcomes = peers.gather(_Outcome(failure=failure), f"reading {path}")
    _raise_failures(outcomes, f"reading {path}")


def read_sharded(path: Path, state: StateDict, rank: int) -> None:
    """DCP's reader without its collectives. Raises what reading raises."""
    reader, planner = FileSystemReader(path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=rank == 0)
    reader.set_up_storage_reader(metadata, rank == 0)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def read_local(path: Path, state: StateDict, rank: int) -> None:
    """This rank's own file. Raises ValueError where it does not fit the state."""
    content = torch.load(path / local_name(rank), map_location="cpu", weights_only=True, mmap=True)
    saved = content["tensors"]
    for name, tensor in local_tensors(state).items():
        if name not in saved:
            raise ValueError(f"{name}: not in the save")
        if saved[name].shape != tensor.shape:
            raise ValueError(f"{name}: shape {tuple(saved[name].shape)} in the save, {tuple(tensor.shape)} here")
        tensor.copy_(saved[name])
    set_plain_values(state, content["plain"])
