"""The durable checkpoint protocol: sync, async and async-local look the same to the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

StateDict = dict[str, Any]
"""Nested dict of tensors (DTensor under FSDP2) and plain values; tensors are loaded in place."""


@dataclass(frozen=True)
class Loaded:
    step: int
    """The step that the state belongs to: training goes on with step + 1."""
    tier: str
    """``memory``, ``replica`` or ``durable``."""
    size_bytes: int
    """Bytes that this rank read."""


class Checkpointer(Protocol):
    """Lives as long as the worker process; attempts come and go.

    Every method marked *collective* is called by all ranks of the current attempt in the same order.
    """

    def begin_attempt(self, rank: int, world_size: int) -> None:
        """Forgets what an abandoned attempt left in flight, without collectives; keeps the warm writer."""
        ...

    def load(self, state: StateDict) -> Loaded | None:
        """Collective. Fills ``state`` in place from the newest step that all ranks can read.

        Returns None only when no save was ever completed. Raises CheckpointError when files are there but
        none is valid (unless fresh_start), or when reading fails on any rank.
        """
        ...

    def save(self, step: int, state: StateDict) -> float:
        """Collective. Starts (async) or does (sync) a save; returns this rank's blocking time in seconds."""
        ...

    def snapshot(self, step: int, state: StateDict) -> float:
        """Not collective; every ``memory_interval`` steps where that is set: a copy in node memory.

        Called before a save of the same step, which then takes its data from it. Returns the time that training was
        held up, in seconds. Raises CheckpointError where the snapshot before failed or does not end.
        """
        ...

    def poll(self) -> str | None:
        """Not collective, once a step, between backward and update.

        Returns the reason of a failed save or snapshot or of a dead writer on this rank, else None.

        The loop reduces it over ranks, so that all raise at the same step.
        """
        ...

    def publish_ready(self) -> None:
        """Collective, once a step: finishes saves whose files all ranks have written."""
        ...

    def drain(self) -> float:
        """Collective, at the end: waits for the last save; returns seconds. Raises CheckpointError if it failed."""
        ...

    def abandon(self) -> None:
        """From the abort path, another thread: no collectives, bounded; an in-flight save is never published late."""
        ...

    def close(self) -> None:
        """Ends the writer process and its threads; idempotent."""
        ...


class CheckpointError(RuntimeError):
    """A save or load failed; the text names rank, step and path."""
