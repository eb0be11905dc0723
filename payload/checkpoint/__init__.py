"""Checkpoints: the durable tier (sync, async, async-local) and the node-memory tier above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from payload.checkpoint.base import Checkpointer
from payload.checkpoint.durable import DurableCheckpointer, SyncCheckpointer
from payload.checkpoint.memory import MemoryTier
from payload.checkpoint.tiered import TieredCheckpointer
from payload.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from payload.checkpoint.asynchronous import AsyncCheckpointer
    from payload.events import EventLog


def preload(config: RunConfig) -> None:
    """The imports of build(), without its effects: what a process does ahead that later forks workers."""
    if config.checkpoint.mode != "sync":
        _import_async(config)


def _import_async(config: RunConfig) -> type[AsyncCheckpointer]:
    try:
        from payload.checkpoint.asynchronous import AsyncCheckpointer
    except ImportError as error:
        raise ConfigError(
            f"checkpoint.mode: {config.checkpoint.mode}, which needs nvidia-resiliency-ext ({error}); legal here: sync"
        ) from error
    return AsyncCheckpointer


def build(config: RunConfig, events: EventLog, *, device: torch.device) -> Checkpointer:
    """The checkpointer that the config asks for, never another one.

    Raises ConfigError where the mode needs a library that is not there.
    """
    memory = MemoryTier(config, device) if config.checkpoint.memory_interval else None
    durable = _durable(config, events, memory)
    if memory is None:
        return durable
    parallelism = config.parallelism if config.checkpoint.replicate else None
    return TieredCheckpointer(durable, memory, events, parallelism=parallelism)


def _durable(config: RunConfig, events: EventLog, memory: MemoryTier | None) -> DurableCheckpointer:
    if config.checkpoint.mode == "sync":
        return SyncCheckpointer(config, events)
    return _import_async(config)(config, events, stager=memory)
