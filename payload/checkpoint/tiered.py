"""Both tiers as one checkpointer: snapshots in node memory above the durable saves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from payload.checkpoint.base import Loaded, StateDict
from payload.checkpoint.durable import DurableCheckpointer
from payload.checkpoint.memory import MemoryTier
from payload.checkpoint.peers import Peers
from payload.checkpoint.replica import ReplicaStore, Replicator
from payload.checkpoint.stage import local_tensors
from payload.config import ConfigError, ParallelismConfig

if TYPE_CHECKING:
    from payload.events import EventLog

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class TieredCheckpointer:
    """Loads from the fastest tier that has the newest step on all ranks."""

    def __init__(
        self,
        durable: DurableCheckpointer,
        memory: MemoryTier,
        events: EventLog,
        *,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        """``parallelism``: with replicas in the next pod's memory."""
        self._durable = durable
        self._memory = memory
        self._events = events
        self._parallelism = parallelism
        """None: no replicas."""
        self._replicator: Replicator | None = None
        self._fetched = False

    def begin_attempt(self, rank: int, world_size: int) -> None:
        self._durable.begin_attempt(rank, world_size)
        self._memory.begin_attempt(rank, world_size)

    def load(self, state: StateDict) -> Loaded | None:
        peers = self._durable.peers()
        self._prepare(state, peers)
        durable_step = self._durable.newest_step()
        self._fetched = False
        store = self._replicate(peers)
        if store is not None:
            self._fetch_missing(peers, store, durable_step)
        loaded = self._load_newest(state, peers, durable_step)
        if store is not None:
            store.forget_after(loaded.step if loaded else 0)
        self._durable.prepare_saves(state)
        return loaded

    def _load_newest(self, state: StateDict, peers: Peers, durable_step: int) -> Loaded | None:
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
        return Loaded(
            step,
            "replica" if self._fetched else "memory",
            sum(tensor.nbytes for tensor in local_tensors(state).values()),
        )

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

    def _replicate(self, peers: Peers) -> ReplicaStore | None:
        """Collective: begins to send snapshots to the next pod, where there is one."""
        self._stop_replicating()
        if self._parallelism is None or peers.world_size <= self._parallelism.ranks_per_node:
            return None
        store = ReplicaStore(self._memory.folder())
        replicator = Replicator(peers, self._parallelism.ranks_per_node, store, self._memory.to_send)
        self._replicator = replicator
        self._memory.on_published = replicator.wake
        return store

    def _fetch_missing(self, peers: Peers, store: ReplicaStore, at_least: int) -> None:
        """Collective: whoever lost its snapshots gets the newest that exist for all ranks somewhere."""
        assert self._replicator is not None
        mine = (self._memory.steps(), store.headers(peers.world_size))
        held = peers.gather(mine, "looking for replicas")
        ranks = range(peers.world_size)

        def holders(rank: int, step: int) -> list[int]:
            return [holder for holder in ranks if step in held[holder][1].get(rank, ())]

        steps = {step for own, replicas in held for step in own.union(*replicas.values()) if step >= at_least}
        complete = [step for step in steps if all(step in held[rank][0] or holders(rank, step) for rank in ranks)]
        if complete and (step := max(complete)) not in held[peers.rank][0]:
            slot = self._memory.free_slot()
            sources = holders(peers.rank, step)
            self._fetched = any(self._replicator.fetch(holder, peers.rank, step, slot) for holder in sources)
            self._memory.look()
        # Nobody may stop answering before all have fetched.
        peers.gather(None, "fetching replicas")

    def _stop_replicating(self) -> None:
        self._memory.on_published = _nothing
        if self._replicator is not None:
            self._replicator.close()
            self._replicator = None

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
        if self._replicator is not None:
            self._replicator.close()

    def close(self) -> None:
        self._stop_replicating()
        self._durable.close()
        self._memory.close()
