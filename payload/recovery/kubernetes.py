"""The baseline: a failure ends the process, torchrun, and the container; the kubelet starts it again."""

from __future__ import annotations

from collections.abc import Callable

from payload.environment import WorkerEnvironment
from payload.events import EventLog
from payload.recovery.attempt import WorkerAttempt, connect_store
from payload.recovery.base import TrainFunction


class SingleEntryArm:
    """Enters train() once a process. A hang ends when the process group's timeout makes a collective raise."""

    def __init__(
        self, environment: WorkerEnvironment, events: EventLog, pings: tuple[Callable[[], None], ...] = ()
    ) -> None:
        self._environment = environment
        self._events = events
        self._pings = pings

    def run(self, train: TrainFunction) -> None:
        environment = self._environment
        attempt = WorkerAttempt(
            environment,
            connect_store(environment),
            rank=environment.rank,
            world_size=environment.world_size,
            iteration=0,
            pings=self._pings,
        )
        try:
            train(attempt)
        except Exception as error:
            self._events.emit("detected", how="exception", reason=repr(error)[:300], generation=attempt.generation)
            attempt.run_abort_hooks()
            raise
