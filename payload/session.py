"""What survives in-process restarts within one worker process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from payload import parallel
from payload.checkpoint.base import Checkpointer
from payload.config import RunConfig
from payload.task import Dataset, Task, load_task

if TYPE_CHECKING:
    from payload.environment import WorkerEnvironment
    from payload.events import EventLog

log = logging.getLogger(__name__)

_SPEAK_EVERY_S = 10.0
"""Least time between two lines of rank 0 in the container's log."""


class Injector(Protocol):
    """faults.Injector, as the loop sees it."""

    def fire(self, step: int) -> None:
        """Fires what is planned for the start of this step on this rank; may never return."""
        ...


class Session:
    """What survives in-process restarts: event log, checkpointer with its warm writer, task and data mapping."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        environment: WorkerEnvironment,
        *,
        checkpointer: Checkpointer | None = None,
        injector: Callable[[int], Injector] | None = None,
    ) -> None:
        """Args:
            checkpointer: instead of the one that the config asks for.
            injector: logical rank -> its injector, instead of the planned faults.

        Raises ConfigError where device, task or data are not as the config says.
        """
        self.config = config
        self.events = events
        self.device = parallel.device_of(config, environment.local_rank)
        self.task: Task = load_task(config)
        self.dataset: Dataset = self.task.build_dataset()
        self.stop_requested = False
        """Set by SIGTERM; the ranks agree on it after each step."""
        self.stopped = False
        """The run was stopped and saved before its last step."""
        self._spoken = -_SPEAK_EVERY_S
        self.injector: Callable[[int], Injector] = injector or self._planned_faults(environment)
        self.checkpointer: Checkpointer = checkpointer or self._configured_checkpointer()

    def _planned_faults(self, environment: WorkerEnvironment) -> Callable[[int], Injector]:
        from payload import faults

        planned = faults.Injector(self.config, environment.rank, self.events, environment.runner_dir)

        def of_rank(rank: int) -> Injector:
            planned.rank = rank
            return planned

        return of_rank

    def _configured_checkpointer(self) -> Checkpointer:
        from payload import checkpoint

        built: Checkpointer = checkpoint.build(self.config, self.events, device=self.device)
        return built

    def request_stop(self) -> None:
        """From the SIGTERM handler: only sets a flag."""
        self.stop_requested = True

    def speak(self, text: str) -> None:
        """A line in the container's log, unless the last one is less than ten seconds old."""
        if time.monotonic() - self._spoken >= _SPEAK_EVERY_S:
            self._spoken = time.monotonic()
            log.info(text)

    def close(self) -> None:
        self.checkpointer.close()
