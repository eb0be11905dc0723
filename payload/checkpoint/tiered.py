"""Both tiers as one checkpointer: snapshots in node memory above the durable saves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from payload.checkpoint.base import Loaded, StateDict
from payload.checkpoint.durable import DurableCheckpointer
from payload.checkpoint.memory import MemoryTier
from payload.checkpoint.peers import Peers
from payload.checkpoint.stage import local_tensors
from payload.config import ConfigError

if TYPE_CHECKING:
    from payload.events import EventLog

log = logging.getLogger(__name__)


class TieredCheckpointer:
    """Loads from the fastest tier that has the newest step on all ranks."""

    def __init__(self, durable: DurableCheckpointer, memory: MemoryTier, events: EventLog) -> None:
        self._durable = durable
        self._memory = memory
        self._events = events

    def begin_attempt(self, rank: int, world_size: int) -> None:
        self._durable.begin_attempt(rank, world_size)
        self._memory.begin_attempt(rank, world_size)

    def load(self, state: StateDict) -> Loaded | None:
        peers = self._durable.peers()
        self._prepare(state, peers)
        durable_step = self._durable.newest_step()
        step = self._restore(state, peers, durable_step)
        if step is not None:
            return self._from_memory(step, state)
        loaded = self._durable.load(state)
        if loaded is not None and (newer := self._restore(state, peers, loaded.step + 1)) is not None:
            # The newest save was damaged, and there is a snapshot between it and the one before.
            return self._from_memory(newer, state)
        self._memory.forget_after(loaded.step if loaded else 0)
        return loaded

    def _from_memory(self, step: int, state: StateDict) -> Loaded:
        self._memory.forget_after(step)
        return Loaded(step, "memory", sum(tensor.nbytes for tensor in local_tensors(state).values()))

    def _prepare(self, state: StateDict, peers: Peers) -> None:
        reasons = peers.gather(self._memory.prepare(state), "preparing the memory tier")
        for rank, reason in enumerate(reasons):
            if reason:
                raise ConfigError(f"checkpoint.memory_dir: rank {rank}: {reason}")

    def _restore(self, state: StateDict, peers: Peers, at_least: int) -> int | None:
        """Collective: the step that all ranks restored from memory, None where no common one is as new."""
        while True:
            steps = peers.gather(self._memory.steps(), "looking for snapshots")
            common = {step for step in set.intersection(*steps) if step >= at_least}
            if not common:
                return None
            step = max(common)
            damages = peers.gather(self._memory.restore(step, state), f"restoring the snapshots of step {step}")
            damages = [text for text in damages if text]
            if not damages:
                return step
            if peers.rank == 0:
                for text in damages:
                    log.warning("skipped: %s", text)
                    self._events.emit("warning", text=f"skipped: {text}")

    def snapshot(self, step: int, state: StateDict) -> float:
        return self._memory.snapshot(step, state)

    def save(self, step: int, state: StateDict) -> float:
        return self._durable.save(step, state)

    def poll(self) -> str | None:
        self._memory.guard()
        return self._memory.failure() or self._durable.poll()

    def publish_ready(self) -> None:
        self._durable.publish_ready()

    def drain(self) -> float:
        return self._durable.drain()

    def abandon(self) -> None:
        self._durable.abandon()

    def close(self) -> None:
        self._durable.close()
        self._memory.close()
