"""Who writes what in the DCP layout: planned once, ahead of the first save, and kept over in-process restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from payload.checkpoint.base import CheckpointError, StateDict
from payload.checkpoint.peers import Peers
from payload.checkpoint.stage import Layout, Place, local_tensors


class _PlanOnly(FileSystemWriterAsync):  # type: ignore[misc]
    """Keeps the plan, and leaves the tensors where they are: their copies are in shared memory."""

    plan: SavePlan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.plan = plan


@dataclass(frozen=True)
class Plan:
    """Holds for all saves of the same structure by the same ranks."""

    key: tuple[int, int, str]
    """Rank, world size, digest of the layout."""
    items: tuple[WriteItem, ...]
    metadata: Metadata | None
    """On rank 0: DCP's index but for the places in files."""

    def sources(self, places: Mapping[str, Place], plain: Mapping[str, Any]) -> tuple[tuple[WriteItem, Any], ...]:
        """Each item with the place of its tensor in the copy, or its pickled value."""
        return tuple((item, _source(item, places, plain)) for item in self.items)


def plan_saves(state: StateDict, root: Path, peers: Peers, known: Plan | None) -> Plan:
    """Collective. ``known``: of an earlier attempt, good again if every rank still has its own.

    Raises CheckpointError on all ranks.
    """
    key = (peers.rank, peers.world_size, Layout.of(local_tensors(state)).digest)
    good = known is not None and known.key == key
    if all(peers.gather(good, "planning saves")):
        assert known is not None
        return known
    writer, planner = _PlanOnly(root), DefaultSavePlanner()
    try:
        _, metadata, _ = save_state_dict_async_plan(state, writer, peers.group, planner=planner)
    except CheckpointException as error:
        raise CheckpointError(f"planning saves into {root}: {error}") from error
    return Plan(key, tuple(writer.plan.items), metadata)


def _source(item: WriteItem, places: Mapping[str, Place], plain: Mapping[str, Any]) -> Place | bytes:
    """An item is always the whole of a rank's local tensor."""
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        stream = BytesIO()
        torch.save(plain[name], stream)
        return stream.getvalue()
    place = places[name]
    assert item.tensor_data is not None
    if tuple(item.tensor_data.chunk.sizes) != place.shape:
        raise CheckpointError(f"{name}: planned as {tuple(item.tensor_data.chunk.sizes)}, held as {place.shape}")
    return place
