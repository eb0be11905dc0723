"""Agreement between the ranks of one attempt: outcomes travel over a gloo group of their own, on CPU, with a bound.

A group apart from the training's, for two reasons: on GPUs no control data has to pass through the device, and its
timeout is the bound of a load or save instead of that of a collective.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from payload.checkpoint.base import CheckpointError

log = logging.getLogger(__name__)
T = TypeVar("T")

_SPEAK_EVERY_S = 30.0
"""Interval of the line that says what is being waited for."""


class Peers:
    """Made collectively, once an attempt. Dies with the attempt's groups; nothing has to be closed."""

    def __init__(self, rank: int, world_size: int, limit_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._limit = timedelta(seconds=limit_s)
        self.group: dist.ProcessGroup | None = None
        """None in a world of one."""
        if world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=self._limit)

    def gather(self, value: T, doing: str) -> list[T]:
        """Collective: everyone's value, by rank.

        Raises CheckpointError, within the limit, where a rank does not come; on rank 0 it names that rank.
        """
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with self._bounded(doing):
            # The only collective that tells who is missing; all_gather would wait for it as long without a word.
            dist.monitored_barrier(self.group, timeout=self._limit, wait_all_ranks=True)
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def on_first(self, action: Callable[[], T], doing: str) -> T:
        """Collective: rank 0 acts, all get the result. Raises CheckpointError on all where the action failed."""
        outcome: tuple[str | None, T | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (None, action())
            except (OSError, CheckpointError) as error:
                outcome = (str(error), None)
        if self.group is not None:
            box = [outcome]
            with self._bounded(doing):
                dist.broadcast_object_list(box, src=0, group=self.group)
            outcome = box[0]
        reason, result = outcome
        if reason is not None:
            raise CheckpointError(f"rank 0: {doing}: {reason}")
        return result  # type: ignore[return-value]

    @contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        started = time.monotonic()
        done = threading.Event()
        speaker = threading.Thread(target=_speak, args=(done, self.rank, doing), daemon=True, name="checkpoint-wait")
        speaker.start()
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            if waited_s < 0.9 * self._limit.total_seconds():
                raise  # A peer died: nothing that a checkpoint has to explain.
            text = f"rank {self.rank}: {doing}: other ranks not there after {waited_s:.0f} s: {error}"
            log.error(text)
            raise CheckpointError(text) from error
        finally:
            done.set()


def _speak(done: threading.Event, rank: int, doing: str) -> None:
    waited_s = 0.0
    while not done.wait(_SPEAK_EVERY_S):
        waited_s += _SPEAK_EVERY_S
        log.warning("rank %d: %s: waiting for other ranks since %.0f s", rank, doing, waited_s)
