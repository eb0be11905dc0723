"""One feature alone, in a script that has its own loop: docs/adopt.md.

Where the rest of this package is told by its launcher and a RunConfig, a script of one's own is told by whatever agent
started it (torchrun, ft_launcher); these functions make the one out of the other.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from payload import checkpoint, environment, recovery
from payload.budget import NoProgress, RestartBudget
from payload.checkpoint.base import Checkpointer
from payload.config import EXIT_NO_PROGRESS, RunConfig
from payload.events import EventLog
from payload.recovery.attempt import connect_store
from payload.recovery.base import TrainFunction

log = logging.getLogger(__name__)

_POLL_S = 0.05


def checkpointer(workdir: str, run_id: str, settings: Mapping[str, Any] | None = None) -> Checkpointer:
    """The checkpointer of this run, for the default process group, which has to be there.

    Args:
        workdir: folder that all ranks share; the saves are in ``<workdir>/runs/<run_id>/checkpoints``.
        settings: dotted fields of RunConfig, as ``{"checkpoint.mode": "async-local", "checkpoint.keep": 3}``.

    Raises ConfigError.
    """
    world_size = dist.get_world_size()
    config = _config(workdir, run_id, world_size, 1, settings)
    events = EventLog.for_rank(config.events_dir, dist.get_rank())
    device = torch.device(config.parallelism.device)
    saver = checkpoint.build(config, events, device=device)
    saver.begin_attempt(dist.get_rank(), world_size)
    return saver


def in_process(train: TrainFunction, workdir: str, run_id: str, settings: Mapping[str, Any] | None = None) -> None:
    """Runs ``train``, and enters it again in the same processes after an exception or hang of any rank.

    Collective, before any process group; from a script that torchrun started. ``train`` makes the group, from the
    attempt's store, rank and world size.

    The loop's steps are unknown here, so only ``recovery.max_restarts`` bounds the restarts, all starts under one
    ``run_id`` together; ``recovery.max_no_progress`` has no effect.

    Args:
        workdir: folder that all ranks share; events and the counted restarts go to ``<workdir>/runs/<run_id>``.
        settings: dotted fields of RunConfig, as ``{"timeouts.soft_s": 60, "timeouts.hard_s": 90}``.

    Raises:
        ConfigError: a setting is not legal, a variable of the agent is missing, or its store is not for workers.
        SystemExit: this layer gives up; with EXIT_NO_PROGRESS where no restart is left.
    """
    told = environment.agent_environment()
    config = _config(workdir, run_id, told.num_nodes, told.ranks_per_node, settings)
    worker = told.worker(config)
    events = EventLog.for_rank(config.events_dir, worker.rank)
    store = PrefixStore(f"{config.run_id}/starts", connect_store(worker))
    try:
        cycle = number_start(
            store,
            worker.rank,
            worker.world_size,
            lambda: RestartBudget(config).begin_cycle("launcher"),
            limit_s=config.timeouts.join_s,
        )
    except NoProgress as error:
        log.error("rank %d: %s", worker.rank, error)
        raise SystemExit(EXIT_NO_PROGRESS) from error
    recovery.build(config, dataclasses.replace(worker, cycle=cycle), events).run(train)
    events.close()


def _config(
    workdir: str, run_id: str, num_nodes: int, ranks_per_node: int, settings: Mapping[str, Any] | None
) -> RunConfig:
    """Defaults, but for what the script itself shows. Raises ConfigError."""
    shown = {
        "run_id": run_id,
        "workdir": workdir,
        "parallelism.num_nodes": num_nodes,
        "parallelism.ranks_per_node": ranks_per_node,
        "parallelism.device": "cuda" if torch.cuda.is_available() else "cpu",
        # The script's own matter; only its legality is looked at.
        "training.global_batch_size": num_nodes * ranks_per_node,
        "recovery.arm": "in-process",
    }
    config = RunConfig().with_overrides({**shown, **(settings or {})})
    return config.with_overrides({"recovery.max_no_progress": config.recovery.max_restarts + 1})


def number_start(store: Store, rank: int, world_size: int, begin: Callable[[], int], *, limit_s: float) -> int:
    """Collective: what ``begin`` returns on rank 0, the same on all ranks.

    No variable that agents set tells one start of the workers from the next on all nodes alike, and the store still
    holds what earlier starts wrote. So every process takes part under a token of its own, and rank 0 answers tokens:
    only the rank 0 that lives can do that.

    Raises:
        TimeoutError: rank 0 did not answer within ``limit_s`` seconds.
        RuntimeError: on rank 0, for a rank that did not come within the store's own timeout.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        number = begin()
        store.set("first", token)
        for peer in range(1, world_size):
            answer = store.get(f"{token}/{peer}").decode()
            store.set(f"{token}/{peer}/{answer}", str(number))
        return number
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if store.check(["first"]):
            first = store.get("first").decode()
            store.set(f"{first}/{rank}", token)
            if store.check([f"{first}/{rank}/{token}"]):
                return int(store.get(f"{first}/{rank}/{token}"))
        time.sleep(_POLL_S)
    raise TimeoutError(f"rank {rank}: no answer of rank 0 after {limit_s:g} s")
