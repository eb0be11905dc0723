"""Copies of a rank's shards in memory that other processes can map by name: what a save writes from.

The bytes of all local tensors lie one behind the other in one file without a disk. The copy is the only thing that
training waits for; the writer process maps the same memory instead of receiving tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from payload.checkpoint.base import CheckpointError, StateDict

_ALIGN_BYTES = 64
"""A cache line; also a multiple of every element size."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's local part lies in the copy."""

    name: str
    """Keys of the nested state joined by dots: torch DCP's own naming."""
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    places: tuple[Place, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        places, offset = [], 0
        for name, tensor in tensors.items():
            place = Place(name, offset, tensor.dtype, tuple(tensor.shape))
            places.append(place)
            offset += -(-place.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(tuple(places), max(offset, _ALIGN_BYTES))

    @property
    def digest(self) -> str:
        """Two copies are exchangeable when this is equal."""
        text = "\n".join(f"{p.name} {p.offset_bytes} {p.dtype} {p.shape}" for p in self.places)
        return xxhash.xxh3_128_hexdigest(text.encode())


def flatten(state: StateDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf under its dotted name, in the order of the dict. Raises CheckpointError for a list of tensors."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(entry, Tensor) for entry in value):
            raise CheckpointError(f"state: {name} is a list of tensors; legal: dicts of tensors and plain values")
        else:
            yield name, value


def local_tensors(state: StateDict) -> dict[str, Tensor]:
    """The local part of every tensor; memory is shared with the state."""
    found: dict[str, Tensor] = {}
    for name, value in flatten(state):
        if isinstance(value, Tensor):
            if name in found:
                raise CheckpointError(f"state: two tensors are called {name}")
            found[name] = value.to_local().detach() if isinstance(value, DTensor) else value.detach()
    return found


def plain_values(state: StateDict) -> dict[str, Any]:
    return {name: value for name, value in flatten(state) if not isinstance(value, Tensor)}


def set_plain_values(state: StateDict, values: Mapping[str, Any]) -> None:
    """Replaces leaves in place; what the state does not hold is ignored."""

    def walk(section: StateDict, prefix: str) -> None:
        for key, value in section.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                walk(value, f"{name}.")
            elif not isinstance(value, Tensor) and name in values:
                section[key] = values[name]

    walk(state, "")


class Slab:
    """A stretch of shared memory with a path; freed when the last process that maps it lets go of it."""

    def __init__(self, descriptor: int, size_bytes: int, path: Path, *, private: bool = False) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes
        self.path = path
        """For other processes of the same user on this node."""
        # A reader maps privately, so that it needs no right to write; pages that nobody writes stay shared.
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._map = mmap.mmap(descriptor, size_bytes, access=access)

    @classmethod
    def anonymous(cls, size_bytes: int) -> Slab:
        """Counted as memory of this process's container; bound to no mount and its limit. Raises OSError."""
        descriptor = os.memfd_create("checkpoint-stage", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        return cls(descriptor, size_bytes, Path(f"/proc/{os.getpid()}/fd/{descriptor}"))

    @classmethod
    def map(cls, path: Path, *, private: bool) -> Slab:
        """Maps what another process made. Raises OSError."""
        descriptor = os.open(path, (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
        return cls(descriptor, os.fstat(descriptor).st_size, path, private=private)

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes, offset=offset_bytes)

    def tensor(self, place: Place) -> Tensor:
        """The memory itself, with a storage of just this size: torch.save then writes no more than this."""
        if place.size_bytes == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        count = place.size_bytes // place.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.offset_bytes)
        return flat.reshape(place.shape)

    def close(self) -> None:
        """Idempotent. Tensors made from it stay valid: the mapping goes with the last of them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Staged:
    """A copy of this rank's part of the state at one step, in shared memory."""

    path: Path
    layout: Layout
    plain: Mapping[str, Any]


class Stager(Protocol):
    """Where an async save takes its data from."""

    def stage(self, step: int, state: StateDict) -> Staged:
        """The copy of this step; it stays as it is until release(). May still be under way."""
        ...

    def is_ready(self, step: int) -> bool:
        """The copy is whole. Never blocks."""
        ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class SlabStager:
    """A buffer of its own; training waits for the copy."""

    def __init__(self) -> None:
        self._slab: Slab | None = None

    def stage(self, step: int, state: StateDict) -> Staged:
        tensors = local_tensors(state)
        layout = Layout.of(tensors)
        if self._slab is None or self._slab.size_bytes < layout.size_bytes:
            self.close()
            self._slab = Slab.anonymous(layout.size_bytes)
        slab = self._slab
        copy_in(tensors, {place.name: slab.tensor(place) for place in layout.places})
        return Staged(slab.path, layout, plain_values(state))

    def is_ready(self, step: int) -> bool:
        return True

    def release(self) -> None:
        pass

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
            self._slab = None


def copy_in(tensors: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
    """Copies the live tensors into the views, on whatever device they are; returns when the copy is whole."""
    on_device = False
    for name, view in views.items():
        source = tensors[name]
        on_device |= source.is_cuda
        view.copy_(source, non_blocking=source.is_cuda)
    if on_device:
        torch.cuda.current_stream().synchronize()
