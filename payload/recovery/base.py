"""What a recovery arm gives to train(), and what it needs from it.

train() never asks which arm it runs under: it gets an Attempt, does its work, and returns or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch._C._distributed_c10d import Store


class Attempt(Protocol):
    """One entry into train(), seen from one rank. Made by the arm, one for every (re)start."""

    rank: int
    """Logical rank of this attempt, 0 .. world_size - 1; all state is keyed by it."""
    world_size: int
    local_rank: int
    """Index of the device on this node."""
    generation: str
    """``<cycle>.<iteration>``: the same on all ranks, different for every entry of the run."""
    store: Store
    """Prefixed with the generation; lives in the launcher, so it outlives any rank."""

    def ping(self) -> None:
        """Progress: once a step. Feeds the in-process watchdog and the in-job heartbeat; never blocks."""
        ...

    def wait(self, what: str) -> AbstractContextManager[None]:
        """Lifts the soft timeout for a legitimate long block (build, load, save), up to ``timeouts.setup_s``."""
        ...

    def on_abort(self, hook: Callable[[], None]) -> None:
        """Registers work to do when this attempt is abandoned, from another thread: no collectives, bounded."""
        ...


TrainFunction = Callable[[Attempt], None]


class RecoveryArm(Protocol):
    """Runs train() in this worker process until it returns, restarting it where the arm can."""

    def run(self, train: TrainFunction) -> None:
        """Returns when the run is complete on all ranks.

        Raises:
            SystemExit: with the container's exit code when this layer gives up.
            Exception: what train() raised, when the next layer (launcher, kubelet) has to restart the process.
        """
        ...
