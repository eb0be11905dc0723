"""The durable tier: what sync and async saving share, and the synchronous one."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from payload.checkpoint.base import Checkpointer, CheckpointError, Loaded, StateDict
from payload.checkpoint.folder import FileEntry, Manifest, SaveFolder, describe_file
from payload.checkpoint.loading import Loader
from payload.checkpoint.peers import Peers
from payload.checkpoint.stage import local_tensors
from payload.config import RunConfig

if TYPE_CHECKING:
    from pathlib import Path

    from payload.events import EventLog


@dataclass
class Attempt:
    """The state of one attempt; an abandoned one is dropped whole."""

    rank: int
    world_size: int
    peers: Peers | None = None
    token: str = ""
    """Part of the drafts' names: attempts never write into one another's."""
    num_saves: int = 0
    """The same on all ranks; a save that is repeated gets a draft of its own too."""
    failures: deque[str] = field(default_factory=deque)
    """Of saves, not yet reported by poll()."""


class DurableCheckpointer(Checkpointer, Protocol):
    """What the memory tier needs beyond a Checkpointer."""

    def peers(self) -> Peers: ...

    def newest_step(self) -> int: ...

    def prepare_saves(self, state: StateDict) -> None: ...


class Durable:
    """Base of the durable checkpointers: attempts, and loading."""

    mode = ""

    def __init__(self, config: RunConfig, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._folder = SaveFolder(config.checkpoint_dir)
        self._loader = Loader(self._folder, events, fresh_start=config.checkpoint.fresh_start)
        self._attempt: Attempt | None = None

    @property
    def _limit_s(self) -> float:
        return self._config.timeouts.setup_s

    def begin_attempt(self, rank: int, world_size: int) -> None:
        self.abandon()
        self._attempt = Attempt(rank, world_size)

    def _joined(self) -> tuple[Attempt, Peers]:
        """Collective the first time in an attempt."""
        attempt = self._attempt
        if attempt is None:
            raise CheckpointError("begin_attempt() comes first")
        if attempt.peers is None:
            peers = Peers(attempt.rank, attempt.world_size, self._limit_s)
            attempt.token = peers.on_first(lambda: secrets.token_hex(4), "beginning an attempt")
            attempt.peers = peers
        return attempt, attempt.peers

    def peers(self) -> Peers:
        """Collective the first time in an attempt."""
        return self._joined()[1]

    def newest_step(self) -> int:
        """Collective: of the saves that look complete; 0 where there is none."""
        return self._loader.newest_step(self.peers())

    def prepare_saves(self, state: StateDict) -> None:
        """Collective; part of load(), for a state that another tier has loaded."""

    def snapshot(self, step: int, state: StateDict) -> float:
        raise CheckpointError("no memory tier; legal: checkpoint.memory_interval of at least 1")

    def load(self, state: StateDict) -> Loaded | None:
        _, peers = self._joined()
        loaded = self._load(state, peers)
        self.prepare_saves(state)
        return loaded

    def _load(self, state: StateDict, peers: Peers) -> Loaded | None:
        manifest = self._loader.load(state, peers)
        if manifest is None:
            return None
        size_bytes = sum(tensor.nbytes for tensor in local_tensors(state).values())
        return Loaded(manifest.step, "durable", size_bytes)

    def poll(self) -> str | None:
        attempt = self._attempt
        return attempt.failures.popleft() if attempt is not None and attempt.failures else None

    def publish_ready(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        self.abandon()

    def _draft(self, step: int, attempt: Attempt) -> Path:
        """Another one at every call; the same on all ranks."""
        attempt.num_saves += 1
        return self._folder.draft(step, f"{attempt.token}.{attempt.num_saves}")

    def _manifest(self, step: int, world_size: int, layout: str, files: tuple[FileEntry, ...] = ()) -> Manifest:
        return Manifest(step, world_size, layout, self.mode, time.time(), files)


class SyncCheckpointer(Durable):
    """torch DCP: training waits until the save is complete on all ranks."""

    mode = "sync"

    def save(self, step: int, state: StateDict) -> float:
        started = time.monotonic()
        attempt, peers = self._joined()
        draft = self._draft(step, attempt)
        reason, files = self._write(draft, state, peers)
        outcomes = peers.gather((reason, files), f"saving step {step}")
        reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(outcomes) if reason]
        if reasons:
            attempt.failures.append(f"save of step {step} failed: {'; '.join(reasons)}")
            if peers.rank == 0:
                self._folder.discard(draft)
            return time.monotonic() - started
        entries = tuple(entry for _, files in outcomes for entry in files)
        manifest = self._manifest(step, peers.world_size, "dcp", entries)
        try:
            peers.on_first(lambda: self._publish(draft, manifest), f"publishing step {step}")
        except CheckpointError as error:
            attempt.failures.append(f"save of step {step} failed: {error}")
        else:
            self._events.emit("save_done", step=step, write_s=time.monotonic() - started)
        return time.monotonic() - started

    def _write(self, draft: Path, state: StateDict, peers: Peers) -> tuple[str, list[FileEntry]]:
        """Collective: this rank's files, or why there are none."""
        assert dist.is_initialized()
        try:
            draft.mkdir(parents=True, exist_ok=True)
            # One thread: an error in any other is lost, and the save passes for complete (pytorch/pytorch#191391).
            writer = FileSystemWriter(draft, thread_count=1)
            state_dict_saver.save(state, storage_writer=writer, process_group=peers.group)
            names = sorted(path.name for path in draft.glob(f"__{peers.rank}_*"))
            if peers.rank == 0:
                names.append(".metadata")
            return "", [describe_file(draft / name, peers.rank) for name in names]
        except (CheckpointException, OSError) as error:
            return f"{type(error).__name__}: {error}", []

    def _publish(self, draft: Path, manifest: Manifest) -> None:
        name = self._folder.publish(draft, manifest)
        self._folder.retain(self._config.checkpoint.keep, name, self._loader.damaged)
        self._folder.sweep(older_than=manifest.step)

    def drain(self) -> float:
        """Nothing is in flight; only a failure may not have been reported yet. Raises CheckpointError."""
        reason = self.poll()
        if reason is not None:
            raise CheckpointError(reason)
        return 0.0
