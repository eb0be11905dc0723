"""In-process restart with NVRx's inprocess.Wrapper: train() is entered again in the same process, on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import CallWrapper
from nvidia_resiliency_ext.inprocess.exception import RestartAbort
from nvidia_resiliency_ext.inprocess.progress_watchdog import Timestamp
from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin
from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch._C._distributed_c10d import TCPStore

from payload.budget import NoProgress, RestartBudget
from payload.config import EXIT_NO_PROGRESS
from payload.environment import WorkerEnvironment
from payload.events import EventLog
from payload.recovery.abort import dump_trace, leave_groups, open_sockets
from payload.recovery.attempt import WorkerAttempt, connect_store
from payload.recovery.base import TrainFunction

log = logging.getLogger(__name__)

_LAST_CALL_S = 0.05
_KILL_GRACE_S = 0.5
_HEARTBEAT_S = 1.0


class AgentStore(TorchPrefixStore, StoreMixin):  # type: ignore[misc]
    """The Wrapper's store: a corner of the store in pod 0's launcher, so that rank 0 may die."""

    def __init__(self, host: str, port: int, prefix: str, timeout_s: float) -> None:
        connection = TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        TorchPrefixStore.__init__(self, prefix, connection)


_raw_initial_ranks = StoreMixin.get_initial_ranks


def _initial_ranks(store: StoreMixin, ranks: Iterable[int]) -> list[int]:
    """As numbers: NVRx writes them back as they come, and bytes in a barrier's key break it for every rank."""
    return [int(rank) for rank in _raw_initial_ranks(store, ranks)]


# Used when a rank falls silent (its node is gone); the same in 0.4.1, 0.6.0 and 0.7.0.
StoreMixin.get_initial_ranks = _initial_ranks


class LiftedTimestamp(Timestamp):  # type: ignore[misc]
    """Marks of progress that only move forward.

    NVRx's watchdog writes the time at which the main thread last ran Python code; while that thread is inside one
    long C call this is an old time, which would undo what wait() writes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get(name)
        self.__dict__[name] = value if old is None or value is None else max(old, value)


class InProcessArm:
    """Enters train() again after exceptions, hangs and communication errors; the world may shrink if it may."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        events: EventLog,
        *,
        pings: tuple[Callable[[], None], ...] = (),
        nested: bool = False,
    ) -> None:
        """``nested``: reports its restarts to the launcher's agent around it (NVRx nested restarter)."""
        self._environment = environment
        self._config = environment.config
        self._events = events
        self._budget = RestartBudget(environment.config)
        self._pings = pings
        self._nested = nested
        self._store = connect_store(environment)
        self._attempt: WorkerAttempt | None = None
        self._keep: set[str] = set()
        self._detected = -1
        """Iteration whose failure this rank has reported."""

    def run(self, train: TrainFunction) -> None:
        def enter(call: CallWrapper = None) -> None:
            self._enter(train, call)

        # Found by NVRx through the annotation, which `from __future__ import annotations` turned into text.
        enter.__annotations__["call"] = CallWrapper
        try:
            self._wrapper()(enter)()
        except RestartAbort as error:
            log.error("rank %d: in-process restart gives up: %s", self._environment.rank, error)
            raise SystemExit(1) from error

    def _enter(self, train: TrainFunction, call: CallWrapper) -> None:
        state = call.state
        self._keep = open_sockets()
        self._attempt = attempt = WorkerAttempt(
            self._environment,
            self._store,
            rank=state.active_rank,
            world_size=state.active_world_size,
            iteration=state.iteration,
            pings=(lambda: _ping(call), *self._pings),
            ping_interval_s=min(1.0, self._config.timeouts.soft_s / 4),
        )
        try:
            train(attempt)
        except Exception as error:
            self._report(state.iteration, "exception", repr(error)[:300])
            raise

    def _report(self, iteration: int, how: str, reason: str) -> None:
        if self._detected < iteration:
            self._detected = iteration
            generation = f"{self._environment.cycle}.{iteration}"
            self._events.emit("detected", how=how, reason=reason, generation=generation)

    def begin(self, state: Any) -> None:
        """At the start of each iteration, on all ranks: spends the budget. Raises SystemExit when it is gone."""
        if state.iteration == 0:
            return
        try:
            self._budget.spend("in-process", f"{self._environment.cycle}.{state.iteration}")
        except NoProgress as error:
            log.error("rank %d: %s", self._environment.rank, error)
            raise SystemExit(EXIT_NO_PROGRESS) from error

    def abort(self, state: Any) -> None:
        """From NVRx's monitor thread, once a failure is known: gets this rank out of the attempt."""
        if self._detected < state.iteration:
            self._report(state.iteration, *self._interruptions(state.iteration))
        try:
            if self._attempt is not None:
                self._attempt.run_abort_hooks()
        finally:
            self._keep_trace(state.iteration)
            leave_groups(self._keep, self._environment.store_port)
            self._events.emit("out", generation=f"{self._environment.cycle}.{state.iteration}")

    def _interruptions(self, iteration: int) -> tuple[str, str]:
        """How a failure that did not begin on this rank was found, and what NVRx recorded of it."""
        store = PrefixStore(iteration, AgentStore(**self._store_arguments()))
        records = store.get_interruption_records()
        timed_out = any("TIMEOUT" in record.interruption.name for record in records)
        text = ", ".join(f"rank {record.rank}: {record.interruption.name.lower()}" for record in records)
        return ("timeout" if timed_out else "peer"), text

    def _store_arguments(self) -> dict[str, Any]:
        environment = self._environment
        return {
            "host": environment.store_host,
            "port": environment.store_port,
            "prefix": f"{self._config.run_id}/wrapper/{environment.cycle}",
            "timeout_s": self._config.timeouts.barrier_s,
        }

    def _keep_trace(self, iteration: int) -> None:
        name = f"rank{self._environment.rank}-{self._environment.cycle}.{iteration}.json"
        dump_trace(self._config.run_dir / "traces" / name)

    def _wrapper(self) -> inprocess.Wrapper:
        timeouts, recovery = self._config.timeouts, self._config.recovery
        poll = timedelta(seconds=timeouts.poll_s)
        smallest = recovery.min_world_size or self._environment.world_size
        retry = inprocess.initialize.RetryController(recovery.max_restarts + 1, smallest, smallest)
        abort: list[Any] = [_Abort(self)]
        # The budget is not spent on a world that is too small to go on with: the launcher's restart will be.
        initialize: list[Any] = [retry, _Begin(self)]
        extra: dict[str, Any] = {}
        if self._nested:
            nested = inprocess.nested_restarter
            initialize.append(nested.NestedRestarterHandlingCompleted())
            abort.append(nested.NestedRestarterHandlingStarting())
            extra = {"completion": nested.NestedRestarterFinalized(), "terminate": nested.NestedRestarterAborted()}
        wrapper = inprocess.Wrapper(
            store_factory=AgentStore,
            store_kwargs=self._store_arguments(),
            # Composed callbacks run from the last to the first.
            initialize=inprocess.Compose(*reversed(initialize)),
            abort=inprocess.Compose(*reversed(abort)),
            health_check=inprocess.Compose(*self._health_checks()),
            # Survivors move up in rank order, so ranks stay contiguous.
            rank_assignment=inprocess.Compose(
                inprocess.rank_assignment.ActivateAllRanks(), inprocess.rank_assignment.ShiftRanks()
            ),
            monitor_thread_interval=poll,
            monitor_process_interval=poll,
            progress_watchdog_interval=poll,
            heartbeat_interval=timedelta(seconds=min(_HEARTBEAT_S, timeouts.hard_s / 4)),
            soft_timeout=timedelta(seconds=timeouts.soft_s),
            hard_timeout=timedelta(seconds=timeouts.hard_s),
            heartbeat_timeout=timedelta(seconds=timeouts.hard_s),
            barrier_timeout=timedelta(seconds=timeouts.barrier_s),
            completion_timeout=timedelta(seconds=timeouts.completion_s),
            last_call_wait=timedelta(seconds=_LAST_CALL_S),
            termination_grace_time=timedelta(seconds=min(timeouts.grace_s, _KILL_GRACE_S)),
            **extra,
        )
        if self._config.parallelism.device == "cpu" and hasattr(wrapper, "restart_health_check"):
            # From 0.6 on NVRx adds checks of GPU, NVLink and NIC, which fail where there is no NVML.
            wrapper.restart_health_check = wrapper.health_check
        return wrapper

    def _health_checks(self) -> list[Any]:
        limit = self._config.recovery.max_rank_faults
        checks: list[Any] = [inprocess.health_check.FaultCounter(limit or None)]
        if self._config.parallelism.device == "cuda":
            return [*checks, inprocess.health_check.CudaHealthCheck()]
        if self._environment.rank == 0:
            self._events.emit("warning", text="health checks of GPU, NVLink and NIC are off: the device is cpu")
        return checks


class _Begin(inprocess.initialize.Initialize):  # type: ignore[misc]
    def __init__(self, arm: InProcessArm) -> None:
        self._arm = arm

    def __call__(self, state: Any) -> Any:
        self._arm.begin(state)
        return state


class _Abort(inprocess.abort.Abort):  # type: ignore[misc]
    def __init__(self, arm: InProcessArm) -> None:
        self._arm = arm

    def __call__(self, state: Any) -> Any:
        self._arm.abort(state)
        return state


def _ping(call: CallWrapper) -> None:
    """From the main thread or from wait(): marks progress, also where the main thread is inside a C call."""
    watchdog = call.progress_watchdog
    now = time.monotonic()
    if not isinstance(watchdog.timestamp, LiftedTimestamp):
        watchdog.timestamp = LiftedTimestamp(auto=now, manual=now)
    watchdog.timestamp.auto = now
    call.ping()
