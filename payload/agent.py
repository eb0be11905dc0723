"""The elastic agent in the launcher's process: what it runs, and what we see of it.

Both agents (torchrun's here, ft_launcher's in recovery/ft_launcher.py) share their interface; ``observed`` adds the
same hooks to each: number the start of the worker group, note who failed first, and stop where a restart is no use.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.launcher import api

from payload import environment
from payload.budget import NoProgress, RestartBudget, tail
from payload.config import EXIT_BAD_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED
from payload.environment import PodEnvironment
from payload.events import EventLog
from payload.meeting import Meeting

log = logging.getLogger(__name__)

_CYCLE_KEY = "nvrx-eks/cycle"
_STOP = -1
_EXIT_BARRIER_S = 10.0


class WorkersFailed(RuntimeError):
    """The agent gave up; the text holds the exit codes of this pod's workers."""


class Refused(RuntimeError):
    """A worker refused its configuration: no restart helps."""


class Stopped(RuntimeError):
    """The pod was told to stop; its workers have saved and left."""


class UnfitNode(RuntimeError):
    """The newest failures all began on this node."""


class Observer:
    """What the hooks know and do; one a launcher."""

    def __init__(self, pod: PodEnvironment, events: EventLog, budget: RestartBudget) -> None:
        self.pod = pod
        self.events = events
        self.budget = budget
        self.cycle = -1
        self.pids: tuple[int, ...] = ()
        """Processes that the agent started in this cycle."""
        self.stopping = False
        """SIGTERM has come."""
        self.succeeded = False
        self.command: tuple[str, ...] = worker_command(pod)
        """What the agent starts for each rank."""
        self.ending: Exception | None = None
        """Why this launcher ends, whatever its agent makes of it."""
        self.reason = ""
        """Of the newest failure of this pod's workers."""
        self._reported = -1
        self._started = 0.0
        """When the workers of this cycle were started, in seconds since the epoch."""

    def before_start(self, store: Store, group_rank: int) -> None:
        """All nodes have met: agree on the number of this start. Raises NoProgress, UnfitNode or Stopped."""
        if self.stopping:
            raise Stopped("SIGTERM before the workers were started")
        self.events.emit("rendezvous", cycle=self.cycle + 1, group_rank=group_rank)
        self._check_node()
        if group_rank == 0:
            layer = "container" if self.cycle < 0 else "launcher"
            try:
                self.cycle = self.budget.begin_cycle(layer)
            except NoProgress:
                store.set(_CYCLE_KEY, str(_STOP))
                raise
            store.set(_CYCLE_KEY, str(self.cycle))
        else:
            self.cycle = int(store.get(_CYCLE_KEY))
        if self.cycle == _STOP:
            raise NoProgress(self.budget.stopped() or "pod 0 ended the run")
        environment.export({environment.CYCLE: str(self.cycle)})

    def _check_node(self) -> None:
        limit, node = self.pod.config.recovery.max_node_faults, self.pod.node_name
        if limit and self.budget.blamed_in_a_row(node) >= limit:
            self.budget.excuse(self.budget.newest_failure(), node)
            raise UnfitNode(f"the last {limit} failures began on node {node}")

    def started(self, pids: dict[int, Any]) -> None:
        self._started = time.time()
        self.pids = tuple(int(pid) for pid in pids.values())
        self.events.emit("workers_start", cycle=self.cycle, pids=list(self.pids))

    def looked(self, result: Any) -> None:
        """After each look at the workers. Raises where a restart of the workers is of no use."""
        if result.state.name == "SUCCEEDED":
            self.succeeded = True
        failures = getattr(result, "failures", None)
        if not failures or self._reported == self.cycle:
            return
        self._reported = self.cycle
        codes = {str(rank): int(failure.exitcode) for rank, failure in failures.items()}
        self.reason = reason = "; ".join(f"rank {rank}: {_meaning(code)}" for rank, code in codes.items())
        self.events.emit("workers_failed", cycle=self.cycle, reason=reason, codes=codes)
        log.warning("workers of cycle %d failed: %s", self.cycle, reason)
        if self.stopping:
            raise Stopped(reason)
        if EXIT_NO_PROGRESS in codes.values():
            raise NoProgress(self.budget.stopped() or reason)
        if EXIT_BAD_CONFIG in codes.values():
            raise Refused(reason)
        if EXIT_STOPPED not in codes.values():
            self._record_failure(self._failed_at(codes))

    def stopped_workers(self) -> None:
        """The workers of this pod are being stopped for a failure that they may not have had themselves."""
        if self.cycle >= 0 and self._reported < self.cycle and not self.stopping and not self.succeeded:
            self._reported = self.cycle
            self._record_failure(time.time())

    def _record_failure(self, wall: float) -> None:
        """Planned faults say nothing about the node that they hit."""
        logs = self.pod.config.events_dir.glob("rank*.jsonl")
        planned = any(record["wall"] > self._started for path in logs for record in tail(path, "fault")[-1:])
        self.budget.record_failure(self.cycle, self.pod.index, self.pod.node_name, wall, planned=planned)

    def _failed_at(self, codes: dict[str, int]) -> float:
        """When the first worker of this pod failed.

        A worker that raised has said so. One that was killed has not, but its last word came before that, and so
        before its peers, on this node or another, found it missing.
        """
        walls = []
        for rank, code in codes.items():
            records = tail(self.pod.config.events_dir / f"rank{rank}.jsonl", "" if code < 0 else "detected")
            walls += [float(record["wall"]) for record in records[-1:]]
        return min((wall for wall in walls if wall > self._started), default=time.time())

    def grace_s(self, codes: list[int | None]) -> float:
        """How long the other workers of this pod may still run once one has ended."""
        timeouts = self.pod.config.timeouts
        return timeouts.save_grace_s if self.stopping or EXIT_STOPPED in codes else timeouts.grace_s


def _meaning(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def observed(base: type[Any], observer: Observer, leave: type[Exception]) -> type[Any]:
    """A subclass of a LocalElasticAgent, torch's or NVRx's, that reports to ``observer``.

    ``leave``: the agent's SignalException. It leaves the rendezvous open, where any other error would close it for
    good: when this pod alone goes, the others wait for the one that replaces it.
    """

    @contextmanager
    def reporting() -> Iterator[None]:
        try:
            yield
        except (Stopped, UnfitNode) as end:
            observer.ending = end
            raise leave(str(end), signal.SIGTERM) from end
        except (NoProgress, Refused) as end:
            observer.ending = end
            raise

    class Observed(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # The workers have waited for one another; an agent that is missing now was lost before.
            self._exit_barrier_timeout: float = _EXIT_BARRIER_S

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            with reporting():
                observer.before_start(worker_group.store, worker_group.group_rank)
            pids: dict[int, Any] = super()._start_workers(worker_group)
            context = self._pcontext
            close = context.close

            def bounded(death_sig: Any = None, timeout: float = 30) -> None:
                codes = [handler.proc.poll() for handler in context.subprocess_handlers.values()]
                close(death_sig, int(max(1, observer.grace_s(codes))))

            context.close = bounded
            observer.started(pids)
            return pids

        def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
            observer.stopped_workers()
            super()._stop_workers(worker_group, *args, **kwargs)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            with reporting():
                observer.looked(result)
            return result

    return Observed


def worker_command(pod: PodEnvironment, *server: str) -> tuple[str, ...]:
    """What the agent starts for each rank: the client of the fork server, which without one becomes the worker."""
    client = Path(__file__).with_name("fork_client.py")
    return (sys.executable, "-S", "-E", str(client), pod.worker_module, str(os.getpid()), *server)


def run_torchrun(pod: PodEnvironment, meeting: Meeting, observer: Observer) -> None:
    """Runs torchrun's agent until the workers of this pod have ended; no restarts of its own.

    The rendezvous is the static one: it takes the completion index as node rank, where c10d would sort by address.

    Raises:
        WorkersFailed, and what the observer raises.
    """
    timeouts, parallelism = pod.config.timeouts, pod.config.parallelism
    config = api.LaunchConfig(
        min_nodes=parallelism.num_nodes,
        max_nodes=parallelism.num_nodes,
        nproc_per_node=parallelism.ranks_per_node,
        run_id=pod.config.run_id,
        rdzv_backend="static",
        rdzv_endpoint=f"{meeting.host}:{meeting.port}",
        rdzv_configs={"rank": pod.index, "timeout": int(timeouts.join_s)},
        max_restarts=0,
        monitor_interval=timeouts.poll_s,
        local_addr=meeting.local_address,
    )
    command, *arguments = observer.command
    run_agent(api, observer, lambda: api.elastic_launch(config, command)(*arguments))


def no_action(signum: int, frame: FrameType | None) -> None:
    """Signal handler of the launcher, whose supervisor reads the wake-up pipe; the agents' own would raise."""


def run_agent(module: Any, observer: Observer, launch: Callable[[], object]) -> None:
    """Runs ``launch`` with the agent class of ``module`` observed. Raises WorkersFailed for the agent's own error."""
    base = module.LocalElasticAgent
    module.LocalElasticAgent = observed(base, observer, module.SignalException)
    try:
        launch()
    except Exception as error:
        raise observer.ending or WorkersFailed(observer.reason or str(error)) from error
    finally:
        module.LocalElasticAgent = base
    if observer.ending is not None:
        raise observer.ending
    if not observer.succeeded:
        raise WorkersFailed("the agent ended before its workers had succeeded")
