"""Planned faults: which step, rank and kind, drawn before the run and fired once in it.

``schedule`` is a function of the config alone, so every rank knows the whole list and all arms of a
comparison get the same one. ``Injector`` fires a rank's share of it from inside the training loop.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from payload.config import ConfigError, FaultSpec, FaultType, RunConfig
from payload.events import EventLog

_HANG_POLL_S = 0.05
_NODE_FAULTS = ("pod-loss", "node-loss")
_LAUNCHER_MODULE = b"payload.launcher"


class InjectedFault(RuntimeError):
    """The planned fault of type ``exception``."""


def schedule(config: RunConfig) -> tuple[FaultSpec, ...]:
    """The run's faults, by step; the order numbers them.

    With ``count``: steps are sampled first, then rank and type of each in step order (the generator of the
    public test case, number for number). With ``mtbf_s``: every eligible step fails with the probability
    1 - exp(-min_step_s / mtbf_s), so that the list depends on the seed and not on the speed of the machine.

    Raises ConfigError where no rank can be hit, or where ``mtbf_s`` has no step time to go by.
    """
    faults = config.faults
    if faults.schedule:
        return tuple(sorted(faults.schedule, key=lambda spec: (spec.step, spec.rank)))
    if not faults.count and not faults.mtbf_s:
        return ()
    first_rank = 0 if faults.include_rank0 else 1
    if first_rank >= config.world_size:
        raise ConfigError("faults.include_rank0: false; legal: true in a world of one rank")
    rng = random.Random(faults.seed)
    eligible = list(range(faults.after_step + 1, config.training.max_steps + 1))
    if faults.count:
        steps = sorted(rng.sample(eligible, faults.count))
    else:
        steps = _stochastic_steps(rng, eligible, config.training.min_step_s, faults.mtbf_s)
    return tuple(_draw(rng, step, first_rank, config) for step in steps)


def _stochastic_steps(rng: random.Random, eligible: Sequence[int], step_s: float, mtbf_s: float) -> list[int]:
    if not step_s:
        raise ConfigError(
            "training.min_step_s: 0; legal with faults.mtbf_s: the step time in seconds, by which time becomes steps"
        )
    probability = -math.expm1(-step_s / mtbf_s)
    return [step for step in eligible if rng.random() < probability]


def _draw(rng: random.Random, step: int, first_rank: int, config: RunConfig) -> FaultSpec:
    faults = config.faults
    rank = rng.randint(first_rank, config.world_size - 1)
    weights = faults.type_weights or None
    kind: FaultType = rng.choices(faults.types, weights=weights, k=1)[0]
    return FaultSpec(step=step, rank=rank, type=kind)


def assert_same_schedule(configs: Sequence[RunConfig]) -> tuple[FaultSpec, ...]:
    """The one schedule of all runs of a comparison.

    Raises ConfigError naming the first run that differs and where.
    """
    if not configs:
        raise ConfigError("comparison: no run; legal: at least one")
    first = schedule(configs[0])
    for other in configs[1:]:
        drawn = schedule(other)
        if drawn != first:
            at = next((i for i, (a, b) in enumerate(zip(first, drawn, strict=False)) if a != b), None)
            what = (
                f"{len(drawn)} faults against {len(first)}"
                if at is None
                else f"fault {at} is {_describe(drawn[at])} against {_describe(first[at])}"
            )
            raise ConfigError(
                f"faults: the schedule of run {other.run_id} differs from that of {configs[0].run_id}: {what}; "
                "legal: one schedule for all runs of a comparison"
            )
    return first


def _describe(spec: FaultSpec) -> str:
    return f"{spec.type} at step {spec.step} on rank {spec.rank}"


class Injector:
    """Fires the faults of one rank, each once a run whatever restarts in between.

    A marker ``<faults_dir>/<number>-<step>-<rank>-<type>`` is made before the fault fires; who finds it there
    already does nothing. Lives as long as the worker process.

    Args:
        rank: logical rank; set ``rank`` anew at each attempt.
        runner_dir: where the local runner takes requests for the loss of a pod or node; None on a cluster.

    Raises:
        ConfigError: the schedule holds a fault that cannot be produced here.
    """

    def __init__(self, config: RunConfig, rank: int, events: EventLog, runner_dir: Path | None) -> None:
        self.rank = rank
        self.schedule = schedule(config)
        self._faults_dir = config.faults_dir
        self._ranks_per_node = config.parallelism.ranks_per_node
        self._events = events
        self._runner_dir = runner_dir
        self._actions: dict[FaultType, Callable[[FaultSpec], None]] = {
            "exception": _raise,
            "hang": _hang,
            "hang-c": _hang_c,
            "hang-stop": _hang_stop,
            "sigkill": _sigkill,
            "pod-loss": self._pod_loss,
            "node-loss": self._node_loss,
        }
        self._check()

    def _check(self) -> None:
        types = {spec.type for spec in self.schedule}
        if self._runner_dir is not None:
            return
        if "node-loss" in types:
            raise ConfigError("faults: node-loss; legal here: every type but node-loss, which needs the local runner")
        if "pod-loss" in types:
            _launcher_pid()

    def fire(self, step: int) -> None:
        """At the start of ``step``, before its first collective. Returns where nothing is due.

        Raises InjectedFault for type ``exception``; the other types do not return (or return once a stopped
        process is continued).
        """
        for number, spec in enumerate(self.schedule):
            if spec.step == step and spec.rank == self.rank and self._claim(number, spec):
                self._events.emit("fault", step=step, type=spec.type, rank=spec.rank, number=number)
                self._actions[spec.type](spec)

    def _claim(self, number: int, spec: FaultSpec) -> bool:
        """True once a run. On disk before it returns: what follows may take the node down."""
        self._faults_dir.mkdir(parents=True, exist_ok=True)
        marker = self._faults_dir / f"{number}-{spec.step}-{spec.rank}-{spec.type}"
        try:
            descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        folder = os.open(self._faults_dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def _pod_loss(self, spec: FaultSpec) -> None:
        if self._runner_dir is None:
            os.kill(_launcher_pid(), signal.SIGKILL)
        else:
            self._request(spec)
        _hang(spec)

    def _node_loss(self, spec: FaultSpec) -> None:
        self._request(spec)
        _hang(spec)

    def _request(self, spec: FaultSpec) -> None:
        """Drops the request file; whole at once, as the runner may look at any time."""
        assert self._runner_dir is not None and spec.type in _NODE_FAULTS
        name = f"{spec.type}-{uuid.uuid4().hex}.json"
        hidden = self._runner_dir / f".{name}"
        hidden.write_text(json.dumps({"index": spec.rank // self._ranks_per_node}))
        hidden.rename(self._runner_dir / name)


def _raise(spec: FaultSpec) -> None:
    raise InjectedFault(f"planned fault: {_describe(spec)}")


def _hang(spec: FaultSpec) -> None:
    """Endless, in Python: an exception raised into this thread ends it at the next turn."""
    while True:
        time.sleep(_HANG_POLL_S)


def _hang_c(spec: FaultSpec) -> None:
    """Endless, in one C call with the interpreter's lock released: a thread that waits for its own mutex.

    Neither an exception raised into the thread nor a signal handler ends it, as inside a stuck collective.
    """
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # pthread_mutex_t is 40 bytes; all zero is PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _hang_stop(spec: FaultSpec) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sigkill(spec: FaultSpec) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _launcher_pid() -> int:
    """The ancestor that runs the launcher.

    Raises ConfigError where there is none, or where it is process 1 of the container, to which the kernel
    lets nobody inside deliver SIGKILL.
    """
    pid = os.getppid()
    while pid > 0 and _LAUNCHER_MODULE not in _of_process(pid, "cmdline").split(b"\0"):
        fields = _of_process(pid, "stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if fields else 0
    if pid <= 1:
        why = "the launcher is process 1, which nothing in its container can kill" if pid == 1 else "no launcher runs"
        raise ConfigError(f"faults: pod-loss: {why}; legal: the local runner, or a pod with shareProcessNamespace")
    return pid


def _of_process(pid: int, name: str) -> bytes:
    """A file of /proc; empty where the process is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
