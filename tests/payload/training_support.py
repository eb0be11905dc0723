"""What the tests of the training part share: a tiny run, a minimal checkpointer, and worlds of several ranks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from payload import parallel
from payload.checkpoint.base import Loaded, StateDict
from payload.config import RunConfig
from payload.events import Event, EventLog, read_events
from payload.prepare import Request, prepare
from payload.train import Session, train

WORLD_LIMIT_S = 90.0
"""A world that takes longer hangs."""

TEXT = "The quick brown fox jumps over the lazy dog, again and again, until nobody looks any more. " * 12


def run_config(folder: Path, **overrides: Any) -> RunConfig:
    """A run of 8 steps of 4 samples of 16 bytes in a world of one CPU rank; keys with __ for dots."""
    base = {
        "workdir": str(folder),
        "run_id": "test",
        "training": {"max_steps": 8, "global_batch_size": 4, "warmup_steps": 2, "learning_rate": 0.01},
        "data": {"sequence_length": 16},
        "parallelism": {"num_nodes": 1, "ranks_per_node": 1, "device": "cpu"},
        "checkpoint": {"mode": "sync", "interval": 3},
    }
    return RunConfig.from_dict(base).with_overrides({key.replace("__", "."): v for key, v in overrides.items()})


def prepare_text(config: RunConfig) -> None:
    path = Path(config.workdir) / "text.txt"
    path.write_text(TEXT)
    prepare(Request(str(path)), config.data_dir)


class SimpleCheckpointer:
    """Synchronous DCP saves; a step counts when ``complete-<step>`` is there. No checksums, no retention."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self.failure: str | None = None
        self.drain_error: Exception | None = None

    def begin_attempt(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.calls.append("begin_attempt")

    def load(self, state: StateDict) -> Loaded | None:
        steps = [int(path.name.removeprefix("complete-")) for path in self.folder.glob("complete-*")]
        if not steps:
            return None
        dcp.load(state, checkpoint_id=str(self.folder / str(max(steps))))
        return Loaded(max(steps), "durable", 1)

    def save(self, step: int, state: StateDict) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=str(self.folder / str(step)))
        if self.rank == 0:
            (self.folder / f"complete-{step}").touch()
        dist.barrier()
        self.calls.append(f"save {step}")
        return 0.0

    def poll(self) -> str | None:
        return self.failure

    def publish_ready(self) -> None:
        return None

    def drain(self) -> float:
        if self.drain_error is not None:
            raise self.drain_error
        self.calls.append("drain")
        return 0.0

    def abandon(self) -> None:
        self.calls.append("abandon")

    def close(self) -> None:
        self.calls.append("close")


class PlainAttempt:
    """An entry without any recovery."""

    def __init__(self, store: Any, rank: int = 0, world_size: int = 1, generation: str = "0.0") -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank
        self.generation = generation
        self.num_pings = 0
        self.waits: list[str] = []
        self.hooks: list[Callable[[], None]] = []

    def ping(self) -> None:
        self.num_pings += 1

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        self.waits.append(what)
        yield

    def on_abort(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)


class NoFaults:
    def fire(self, step: int) -> None:
        return None


def session_of(config: RunConfig, rank: int = 0, injector: Any = None) -> Session:
    folder = config.checkpoint_dir
    folder.mkdir(parents=True, exist_ok=True)
    environment: Any = SimpleNamespace(local_rank=rank, runner_dir=None)
    return Session(
        config,
        EventLog.for_rank(config.events_dir, rank),
        environment,
        checkpointer=SimpleCheckpointer(folder),
        injector=injector or (lambda _rank: NoFaults()),
    )


def train_alone(config: RunConfig, session: Session | None = None, generation: str = "0.0") -> PlainAttempt:
    """train() in this process, as a world of one; the group is left behind by no outcome."""
    own = session or session_of(config)
    attempt = PlainAttempt(dist.HashStore(), generation=generation)
    try:
        train(config, attempt, own)
    finally:
        parallel.leave_group()
        if session is None:
            own.events.close()
    return attempt


def steps_of(config: RunConfig, rank: int = 0) -> list[Event]:
    return [event for event in read_events(config.events_dir).of(f"rank{rank}") if event.kind == "step"]


def losses(config: RunConfig, rank: int = 0) -> dict[int, float]:
    """The last loss recorded for each step."""
    return {event["step"]: event["loss"] for event in steps_of(config, rank)}


def events_of(config: RunConfig, kind: str, rank: int = 0) -> list[Event]:
    return [event for event in read_events(config.events_dir).of(f"rank{rank}") if event.kind == kind]


def run_world(folder: Path, world_size: int, body: Callable[[int, int, Any], None]) -> None:
    """Runs ``body(rank, world_size, store)`` on as many processes; raises where one fails or hangs.

    ``body`` is a function of a module, or a partial of one. The processes are forked from a server that has done the
    imports and has neither threads nor process groups: forked from here, they would inherit both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    ranks = [context.Process(target=_rank, args=(folder, rank, world_size, body)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + WORLD_LIMIT_S
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
            process.close()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(errors)


def _rank(folder: Path, rank: int, world_size: int, body: Callable[[int, int, Any], None]) -> None:
    code = 1
    try:
        body(rank, world_size, dist.FileStore(str(folder / "store"), world_size))
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and the test shows it
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def train_world(config: RunConfig, world_size: int, rendezvous: Path) -> None:
    """train() on ``world_size`` ranks, each a process."""
    run_world(rendezvous, world_size, functools.partial(_train, config))


def _train(config: RunConfig, rank: int, world_size: int, store: Any) -> None:
    train(config, PlainAttempt(store, rank, world_size), session_of(config, rank))


def prepare_torch() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parallel.make_deterministic()


prepare_torch()
assert torch.get_num_threads() == 1
