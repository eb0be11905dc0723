"""Snapshots in node memory: what a restarted rank comes back from, and what the durable writer reads.

Why three rotating slots are enough without any message between ranks. A rank begins a snapshot only when its previous
one is published. Ranks meet in a collective in every step, so when a rank begins snapshot j, all ranks have finished
the call of j-1 and hence published j-2. The slots of j-2 and j-1 are kept while j is written: at whatever moment a
rank dies, all ranks hold j-2 or something newer in common. The fourth slot is for the durable writer, which may hold
one for minutes. Memory of a node: 4 x the bytes of a rank's state x ranks a node; with replicas 7 x, as one more slot
is being sent, and two hold the snapshots of a peer.

On CUDA the copy runs on a side stream. What the optimizer changes is safe until its next step, before which guard()
makes the training's stream wait for the copy; whatever else may change earlier (buffers) is copied on that stream.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from payload.checkpoint.base import CheckpointError, StateDict
from payload.checkpoint.replica import NUM_REPLICA_SLOTS
from payload.checkpoint.slots import NUM_SLOTS, Header, NoRoom, RunMemory, Slot, checksums
from payload.checkpoint.stage import Layout, Slab, Staged, copy_in, local_tensors, plain_values, set_plain_values
from payload.config import ConfigError, RunConfig

_ABANDON_S = 10.0
"""How long the copy of an abandoned attempt is waited for."""
_NUM_KEPT = 2
"""Published snapshots that are never overwritten."""


@dataclass
class _Copy:
    """A snapshot that is being made."""

    step: int
    slot: Slot
    event: torch.cuda.Event | None
    """On CUDA: the copy is whole."""
    failure: str = ""
    dropped: bool = False
    """Of an abandoned attempt, and not whole in time."""
    thread: threading.Thread = field(init=False)


class MemoryTier:
    """Outlives attempts; the slots outlive the process."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Raises ConfigError where the memory volume cannot be used."""
        self._config = config
        self._device = device
        try:
            self._memory = RunMemory(Path(config.checkpoint.memory_dir), config.run_id)
        except OSError as error:
            raise ConfigError(f"checkpoint.memory_dir: {error}; legal: a folder that can be written") from error
        self._rank, self._world_size = 0, 1
        self._layout: Layout | None = None
        self._place = (-1, 0)
        self._slots: list[Slot] = []
        self._headers: dict[int, Header] = {}
        """Slot index -> what is published there."""
        self._leased: int | None = None
        self._sending: int | None = None
        """Slot that is being sent to another pod."""
        replicate = config.checkpoint.replicate
        self._num_slots = NUM_SLOTS + (1 if replicate else 0)
        self._num_slots_of_peers = NUM_REPLICA_SLOTS if replicate else 0
        self.on_published: Callable[[], None] = lambda: None
        """Called from another thread."""
        self._copy: _Copy | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin_attempt(self, rank: int, world_size: int) -> None:
        """A copy that an abandoned attempt had begun is published, if it is whole soon, as it is that step's state."""
        self._rank, self._world_size = rank, world_size
        self.release()
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.thread.join(_ABANDON_S)
            copy.dropped = True

    def prepare(self, state: StateDict) -> str:
        """Maps, or makes, this rank's slots for this state; returns why not, where it cannot."""
        layout = Layout.of(local_tensors(state))
        self._layout = layout
        place = (self._rank, layout.size_bytes)
        try:
            if place != self._place:
                self._unmap()
                num_slots = self._num_slots + self._num_slots_of_peers
                self._memory.check_room(layout.size_bytes, num_slots, self._config.parallelism.ranks_per_node)
                folder = self._memory.rank_folder(self._rank)
                self._slots = [Slot(folder, index, layout.size_bytes) for index in range(self._num_slots)]
                self._pin()
                self._place = place
        except (NoRoom, OSError) as error:
            return f"{error}; legal: a larger memory volume, or checkpoint.memory_interval 0"
        self._sending = None
        self.look()
        return ""

    def look(self) -> None:
        """Takes in what the files say."""
        found = ((slot.index, slot.header()) for slot in self._slots)
        self._headers = {index: header for index, header in found if header is not None and self._fits(header)}

    def _fits(self, header: Header) -> bool:
        assert self._layout is not None
        wanted = (self._rank, self._world_size, self._layout.digest, self._layout.size_bytes)
        return (header.rank, header.world_size, header.layout, header.size_bytes) == wanted

    def steps(self) -> set[int]:
        """What could be restored here; not verified yet."""
        return {header.step for header in list(self._headers.values())}

    def restore(self, step: int, state: StateDict) -> str:
        """Fills the state in place; returns why not, where the slot is damaged."""
        index = next(index for index, header in self._headers.items() if header.step == step)
        header, slot = self._headers[index], self._slots[index]
        if not slot.is_whole(header):
            slot.invalidate()
            del self._headers[index]
            return f"snapshot of step {step} of rank {self._rank}: content does not match its checksum"
        views = self._views(slot)
        for name, tensor in local_tensors(state).items():
            tensor.copy_(views[name], non_blocking=tensor.is_cuda)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        set_plain_values(state, pickle.loads(bytes.fromhex(header.plain)))
        return ""

    def forget_after(self, step: int) -> None:
        """Training goes on from this step: what was ahead of it is another history."""
        for index, header in list(self._headers.items()):
            if header.step > step:
                self._slots[index].invalidate()
                del self._headers[index]

    def snapshot(self, step: int, state: StateDict) -> float:
        """Begins a copy of the state; returns how long training was held up, in seconds.

        Raises CheckpointError where the previous one is not published after ``timeouts.setup_s``.
        """
        started = time.monotonic()
        self._settle()
        slot = self._free_slot()
        slot.invalidate()
        self._headers.pop(slot.index, None)
        copy = _Copy(step, slot, self._copy_to(slot, local_tensors(state), state))
        plain = pickle.dumps(plain_values(state)).hex()
        copy.thread = threading.Thread(target=self._publish, args=(copy, plain), daemon=True, name="snapshot")
        self._copy = copy
        copy.thread.start()
        return time.monotonic() - started

    def _settle(self) -> None:
        """The copy that was begun last is published; training waits here only when it laps it."""
        copy = self._copy
        if copy is None:
            return
        copy.thread.join(self._config.timeouts.setup_s)
        if copy.thread.is_alive():
            raise CheckpointError(f"rank {self._rank}: snapshot of step {copy.step} is not published")
        self._copy = None
        if copy.failure:
            raise CheckpointError(f"rank {self._rank}: snapshot of step {copy.step}: {copy.failure}")

    def to_send(self) -> tuple[Header, Slab] | None:
        """The newest published snapshot; its slot is not reused before the next call."""
        published = list(self._headers.items())
        if not published:
            return None
        index, header = max(published, key=lambda pair: pair[1].step)
        self._sending = index
        return header, self._slots[index].slab

    def _free_slot(self) -> Slot:
        newest = sorted(self._headers, key=lambda index: self._headers[index].step, reverse=True)
        kept = {*newest[:_NUM_KEPT], self._leased, self._sending}
        return next(slot for slot in self._slots if slot.index not in kept)

    def _copy_to(self, slot: Slot, tensors: Mapping[str, Tensor], state: StateDict) -> torch.cuda.Event | None:
        views = self._views(slot)
        if self._device.type != "cuda":
            copy_in(tensors, views)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        later = _changed_by_optimizer(state, tensors)
        for name, view in views.items():
            if name not in later:
                view.copy_(tensors[name], non_blocking=tensors[name].is_cuda)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name in later:
                views[name].copy_(tensors[name], non_blocking=True)
                tensors[name].record_stream(self._stream)  # An abandoned model's memory is not reused meanwhile.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def _publish(self, copy: _Copy, plain: str) -> None:
        layout = self._layout
        assert layout is not None
        try:
            if copy.event is not None:
                copy.event.synchronize()
            sums = checksums(copy.slot.slab, layout.size_bytes)
            header = Header(copy.step, self._rank, self._world_size, layout.digest, layout.size_bytes, sums, plain)
            if copy.dropped:
                return
            copy.slot.publish(header)
            self._headers[copy.slot.index] = header
            self.on_published()
        except Exception as error:  # noqa: BLE001 - handed to failure() and the next snapshot
            copy.failure = f"{type(error).__name__}: {error}"

    def guard(self) -> None:
        """Before each optimizer step: it may not change what is still being copied. Holds up the device only."""
        if self._copy is not None and self._copy.event is not None:
            torch.cuda.current_stream().wait_event(self._copy.event)

    def failure(self) -> str | None:
        copy = self._copy
        if copy is None or copy.thread.is_alive() or not copy.failure:
            return None
        self._copy = None
        return f"snapshot of step {copy.step} failed: {copy.failure}"

    def stage(self, step: int, state: StateDict) -> Staged:
        """The snapshot of this step, made now if there is none; it stays until release()."""
        if (self._copy is None or self._copy.step != step) and step not in self.steps():
            self.snapshot(step, state)
        slot = self._slot_of(step)
        self._leased = slot.index
        assert self._layout is not None
        return Staged(slot.slab.path, self._layout, plain_values(state))

    def folder(self) -> Path:
        """Of this logical rank, in the memory volume."""
        return self._memory.rank_folder(self._rank)

    def free_slot(self) -> Slot:
        """To receive a snapshot into; look() afterwards."""
        return self._free_slot()

    def _slot_of(self, step: int) -> Slot:
        if self._copy is not None and self._copy.step == step:
            return self._copy.slot
        return next(self._slots[index] for index, header in list(self._headers.items()) if header.step == step)

    def is_ready(self, step: int) -> bool:
        return step in self.steps()

    def release(self) -> None:
        self._leased = None

    def _views(self, slot: Slot) -> dict[str, Tensor]:
        assert self._layout is not None
        return {place.name: slot.slab.tensor(place) for place in self._layout.places}

    def _pin(self) -> None:
        if self._device.type != "cuda":
            return
        for slot in self._slots:
            whole = slot.slab.bytes_at(0, slot.slab.size_bytes)
            code = _cuda_runtime().cudaHostRegister(whole.data_ptr(), slot.slab.size_bytes, 0)
            if int(code) != 0:
                raise OSError(f"cudaHostRegister of {slot.slab.size_bytes} bytes: error {int(code)}")

    def _unmap(self) -> None:
        for slot in self._slots:
            if self._device.type == "cuda":
                _cuda_runtime().cudaHostUnregister(slot.slab.bytes_at(0, slot.slab.size_bytes).data_ptr())
            slot.slab.close()
        self._slots, self._headers, self._place = [], {}, (-1, 0)

    def close(self) -> None:
        """The slots stay for the next process. Idempotent."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.thread.join(self._config.timeouts.grace_s)
        self._unmap()
        self._memory.close()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _changed_by_optimizer(state: StateDict, tensors: Mapping[str, Tensor]) -> Collection[str]:
    """Names of the tensors on the device that only an optimizer step changes: moments, and parameters that have any."""
    moments = state.get("optimizer", {})
    assert isinstance(moments, dict)
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_cuda and (name.startswith("optimizer.") or name.removeprefix("model.") in moments)
    ]
