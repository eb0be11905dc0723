"""What each rank does in the checkpoint tests; see tests/payload/test_checkpoint.py for what is claimed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from payload.checkpoint import folder as folder_module
from payload.checkpoint import loading, slots, stage
from payload.checkpoint import memory as memory_module
from payload.checkpoint.asynchronous import AsyncCheckpointer
from payload.checkpoint.base import CheckpointError
from payload.checkpoint.durable import SyncCheckpointer
from payload.checkpoint.folder import Manifest, SaveFolder
from payload.checkpoint.memory import MemoryTier
from payload.checkpoint.replica import ReplicaStore
from payload.checkpoint.slots import RunMemory
from payload.checkpoint.tiered import TieredCheckpointer
from payload.checkpoint.writer import AsyncWriter
from payload.config import ConfigError, RunConfig

LIMIT_S = 60.0
SHAPES = {"first.weight": (7, 13), "first.bias": (7,), "second.weight": (3, 7), "second.bias": (3,)}
"""Some dimensions are smaller than the number of ranks, so that some rank holds nothing of a tensor."""


class Events:
    """Takes the place of the event log."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.records.append((kind, fields))

    def texts(self) -> list[str]:
        return [str(fields["text"]) for kind, fields in self.records if kind == "warning"]

    def steps(self, kind: str) -> list[int]:
        return [int(fields["step"]) for found, fields in self.records if found == kind]


def start_writer() -> AsyncWriter:
    """A warm writer; the group is for NVRx, which asks for the rank."""
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/alone", rank=0, world_size=1)
        writer = AsyncWriter()
        writer.start()
        dist.destroy_process_group()
    return writer


class Context:
    def __init__(self, rank: int, size: int, folder: Path, writer: AsyncWriter | None) -> None:
        self.rank, self.size, self.folder, self.writer = rank, size, folder, writer
        self.events = Events()
        self._made: list[Any] = []
        self._groups = 0

    @contextmanager
    def group(self) -> Iterator[None]:
        warnings.simplefilter("error")
        self.join(self.size)
        try:
            yield
        finally:
            for made in self._made:
                made.close()
            if self.writer is not None:
                resume(self)
            if dist.is_initialized():
                dist.destroy_process_group()

    def join(self, size: int) -> None:
        """Collective over all ranks of the case: the default group is now that of the first ``size`` ranks."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._groups += 1
        if self.rank < size:
            meeting = f"file://{self.folder}/meeting-{self._groups}"
            dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=size)

    def config(self, **overrides: Any) -> RunConfig:
        values = {
            "workdir": str(self.folder),
            "run_id": "run",
            "training.global_batch_size": 12,
            "training.max_steps": 1000,
            "parallelism.num_nodes": 1,
            "parallelism.ranks_per_node": self.size,
            "parallelism.device": "cpu",
            "recovery.arm": "in-process",
            "timeouts.setup_s": LIMIT_S,
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
        return RunConfig().with_overrides(values)

    @property
    def root(self) -> Path:
        return self.config().checkpoint_dir

    def checkpointer(self, mode: str, *, size: int | None = None, **overrides: Any) -> Any:
        config = self.config(checkpoint__mode=mode, **overrides)
        made: Any
        if mode == "sync":
            made = SyncCheckpointer(config, self.events)
        else:
            made = AsyncCheckpointer(config, self.events, writer=self.writer)
        self._made.append(made)
        made.begin_attempt(self.rank, size or self.size)
        return made

    def agree(self, reason: str | None) -> list[str | None]:
        """What the loop's all-reduce does with poll()."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        return reasons


def make_state(step: int) -> dict[str, Any]:
    """Collective: every value follows from the step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, moments = {}, {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        model[name] = distribute_tensor(_values(step, number, shape), mesh, [Shard(0)])
        moments[name] = {"exp_avg": distribute_tensor(-_values(step, number, shape), mesh, [Shard(0)])}
    progress = {"step": torch.tensor(step), "position": torch.tensor(step * 12)}
    return {"model": model, "optimizer": moments, "progress": progress, "note": f"step {step}"}


def _values(step: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) / 7 + 1000 * step + 100000 * number).reshape(shape)


def overwrite(state: dict[str, Any], step: int) -> None:
    """Training goes on: the same tensors get the values of another step."""
    for name, value in stage.local_tensors(make_state(step)).items():
        stage.local_tensors(state)[name].copy_(value)


def assert_is(state: dict[str, Any], step: int) -> None:
    expected = dict(stage.flatten(make_state(step)))
    for name, value in stage.flatten(state):
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), expected[name].full_tensor()), name
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name]), name
        else:
            assert value == expected[name], name


def names(context: Context) -> list[str]:
    """What is visible in the folder."""
    dist.barrier()
    found = sorted(path.name for path in context.root.iterdir()) if context.root.exists() else []
    dist.barrier()
    return found


def load_is(context: Context, step: int, mode: str = "sync", **overrides: Any) -> list[str]:
    """A fresh checkpointer finds this step, whole; returns its warnings."""
    before = len(context.events.texts())
    checkpointer = context.checkpointer(mode, size=dist.get_world_size(), **overrides)
    state = make_state(0)
    loaded = checkpointer.load(state)
    assert loaded is not None
    assert loaded.step == step and loaded.tier == "durable", loaded
    assert_is(state, step)
    return context.events.texts()[before:]


def save_all(context: Context, steps: list[int], mode: str = "sync", **overrides: Any) -> Any:
    checkpointer = context.checkpointer(mode, **overrides)
    checkpointer.load(make_state(0))
    for step in steps:
        checkpointer.save(step, make_state(step))
        checkpointer.drain()
    return checkpointer


def stop(context: Context) -> None:
    """The disk is slow now: nothing is written."""
    assert context.writer is not None and context.writer.pid is not None
    os.kill(context.writer.pid, signal.SIGSTOP)


def resume(context: Context) -> None:
    assert context.writer is not None and context.writer.pid is not None
    os.kill(context.writer.pid, signal.SIGCONT)


def next_draft(context: Context, checkpointer: Any, step: int) -> Path:
    """Where the next save will be written."""
    attempt = checkpointer._attempt
    return SaveFolder(context.root).draft(step, f"{attempt.token}.{attempt.num_saves + 1}")


def round_trip(context: Context, mode: str) -> list[str]:
    checkpointer = context.checkpointer(mode)
    state = make_state(0)
    assert checkpointer.load(state) is None
    checkpointer.save(5, make_state(5))
    checkpointer.drain()
    assert checkpointer.poll() is None
    load_is(context, 5, mode)
    manifest = Manifest.read(context.root / "step-00000005")
    listed = {entry.name for entry in manifest.files} | {"manifest.json"}
    assert {path.name for path in (context.root / "step-00000005").iterdir()} == listed
    assert (manifest.world_size, manifest.mode) == (context.size, mode)
    assert context.events.steps("save_done") == [5]
    return names(context)


def snapshot(context: Context, mode: str) -> float:
    """F01."""
    checkpointer = context.checkpointer(mode)
    checkpointer.load(make_state(0))
    state = make_state(4)
    if mode != "sync":
        stop(context)
    started = time.monotonic()
    checkpointer.save(4, state)
    blocking_s = time.monotonic() - started
    for step in range(5, 10):
        overwrite(state, step)
        assert checkpointer.poll() is None
        checkpointer.publish_ready()
    if mode != "sync":
        assert not [name for name in names(context) if name.startswith("step-")]
        resume(context)
    checkpointer.drain()
    overwrite(state, 99)
    load_is(context, 4, mode)
    return blocking_s


def abandoned(context: Context, mode: str) -> list[str]:
    """F03."""
    checkpointer = context.checkpointer(mode)
    checkpointer.load(make_state(0))
    stop(context)
    checkpointer.save(10, make_state(10))
    checkpointer.abandon()
    context.join(context.size)
    checkpointer.begin_attempt(context.rank, context.size)
    assert checkpointer.load(make_state(0)) is None
    checkpointer.save(15, make_state(15))
    resume(context)
    checkpointer.drain()
    load_is(context, 15, mode)
    manifest = Manifest.read(context.root / "step-00000015")
    assert {path.name for path in (context.root / "step-00000015").iterdir()} == {
        *(entry.name for entry in manifest.files),
        "manifest.json",
    }
    return [name for name in names(context) if name.startswith("step-")]


def unmarked(context: Context) -> list[str]:
    """F04."""
    save_all(context, [10])
    if context.rank == 0:
        source = context.root / "step-00000010"
        for target in (context.root / "step-00000020", context.root / ".draft-00000020-dead"):
            target.mkdir()
            (target / "__0_0.distcp").write_bytes((source / "__0_0.distcp").read_bytes())
    dist.barrier()
    texts = load_is(context, 10, "async")
    save_all(context, [20], "async")
    load_is(context, 20)
    return [*texts, *names(context)]


def nothing_valid(context: Context) -> list[str]:
    """F05."""
    if context.rank == 0:
        context.root.mkdir(parents=True)
        (context.root / "global_step_7").mkdir()
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        context.checkpointer("sync").load(make_state(0))
    fresh = context.checkpointer("sync", checkpoint__fresh_start=True)
    assert fresh.load(make_state(0)) is None
    fresh.save(3, make_state(3))
    fresh.drain()
    load_is(context, 3)
    aside = [path for path in context.root.parent.iterdir() if path.name.startswith("checkpoints.aside")]
    assert [(path / "global_step_7").is_dir() for path in aside] == [True]
    return [str(caught.value)]


def killed_run(context: Context) -> int:
    """F05, first input: two saves, then the process is gone; the next one starts at the last."""
    save_all(context, [10, 20], "async")
    load_is(context, 20, "async")
    return 20


def damaged(context: Context, how: str, mode: str) -> list[str]:
    """F07."""
    save_all(context, [10, 20], mode)
    newest = context.root / "step-00000020"
    shard = newest / ("rank-1.pt" if mode == "async-local" else "__1_0.distcp")
    if context.rank == 0:
        size = shard.stat().st_size
        if how == "half":
            os.truncate(shard, size // 2)
        elif how == "empty":
            os.truncate(shard, 0)
        elif how == "index":
            (newest / ".metadata").unlink()
        else:
            with shard.open("r+b") as file:
                file.seek(size // 2)
                file.write(bytes(64 if size // 2 > 64 else size // 2))
    dist.barrier()
    texts = load_is(context, 10, mode)
    # It stays out of the way, and counts for nothing in the retention.
    save_all(context, [20], mode, checkpoint__keep=1)
    load_is(context, 20, mode)
    return texts


def all_damaged(context: Context) -> str:
    save_all(context, [10])
    if context.rank == 0:
        os.truncate(context.root / "step-00000010" / "__0_0.distcp", 10)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        context.checkpointer("sync").load(make_state(0))
    return str(caught.value)


def retention(context: Context, keep: int, mode: str) -> list[str]:
    """F08."""
    import threading

    shortest: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            # Visible is complete: one rename makes the one and the other, and one rename ends it.
            shortest.append(sum(path.name.startswith("step-") for path in context.root.iterdir()))

    checkpointer = context.checkpointer(mode, checkpoint__keep=keep)
    assert checkpointer.load(make_state(0)) is None
    checkpointer.save(1, make_state(1))
    checkpointer.drain()
    if context.rank == 0:
        (context.root / "notes-of-a-human").mkdir()
        (context.root / ".draft-00000000-dead").mkdir()
    watcher = threading.Thread(target=watch)
    if context.rank == 0:
        watcher.start()
    try:
        for step in range(2, 6):
            checkpointer.save(step, make_state(step))
            checkpointer.drain()
    finally:
        over.set()
        if context.rank == 0:
            watcher.join()
    assert min(shortest, default=1) >= 1
    load_is(context, 5, mode)
    return names(context)


def full_at_rename(context: Context, mode: str) -> list[str | None]:
    """F09."""
    checkpointer = save_all(context, [10], mode)
    original = os.rename

    def no_space(source: Any, target: Any) -> None:
        if "/step-" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        original(source, target)

    folder_module.os.rename = no_space  # type: ignore[attr-defined]
    try:
        checkpointer.save(20, make_state(20))
        reasons = until_reported(context, checkpointer)
    finally:
        folder_module.os.rename = original  # type: ignore[attr-defined]
    visible = [name for name in names(context) if name.startswith("step-")]
    assert visible == ["step-00000010"]
    checkpointer.save(20, make_state(20))
    checkpointer.drain()
    checkpointer.save(20, make_state(20))  # Over a finished step.
    checkpointer.drain()
    load_is(context, 20, mode)
    return reasons


def until_reported(context: Context, checkpointer: Any) -> list[str | None]:
    """Steps, until some rank's poll() has a reason; then all know at the same step."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        reasons = context.agree(checkpointer.poll())
        checkpointer.publish_ready()
        if any(reasons):
            return reasons
        time.sleep(0.02)
    raise AssertionError("no failure was reported")


def full_disk(context: Context, mode: str) -> list[str | None]:
    """F10: the second of two writer threads of rank 1 meets a full disk."""
    checkpointer = save_all(context, [10], mode)
    name = "rank-1.pt" if mode == "async-local" else "__1_1.distcp"
    draft = next_draft(context, checkpointer, 20)
    if context.rank == 1:
        draft.mkdir()
        (draft / name).symlink_to("/dev/full")
    dist.barrier()
    checkpointer.save(20, make_state(20))
    reasons = until_reported(context, checkpointer)
    assert [name for name in names(context) if name.startswith("step-")] == ["step-00000010"]
    checkpointer.save(30, make_state(30))
    checkpointer.drain()
    load_is(context, 30, mode)
    assert [name for name in names(context) if name.startswith(".")] == []
    return reasons


def slow_last_save(context: Context, mode: str) -> float:
    """F12 (i): the only save is the last thing that a run does."""
    import threading

    checkpointer = context.checkpointer(mode)
    checkpointer.load(make_state(0))
    stop(context)
    checkpointer.save(7, make_state(7))
    timer = threading.Timer(1.0, resume, (context,))
    timer.start()
    waited_s: float = checkpointer.drain()
    timer.join()
    load_is(context, 7, mode)
    return waited_s


def failing_last_save(context: Context, mode: str) -> str:
    """F12 (ii)."""
    checkpointer = context.checkpointer(mode)
    checkpointer.load(make_state(0))
    draft = next_draft(context, checkpointer, 7)
    name = "rank-0.pt" if mode == "async-local" else "__0_0.distcp"
    if context.rank == 0:
        draft.mkdir(parents=True)
        (draft / name).symlink_to("/dev/full")
    dist.barrier()
    checkpointer.save(7, make_state(7))
    with pytest.raises(CheckpointError) as caught:
        checkpointer.drain()
    assert not [name for name in names(context) if name.startswith("step-")]
    return str(caught.value)


def reshard(context: Context, mode: str) -> None:
    """F19: saved by 2, loaded by 1, 3 and 4."""
    context.join(2)
    if context.rank < 2:
        checkpointer = context.checkpointer(mode, size=2)
        checkpointer.load(make_state(0))
        checkpointer.save(6, make_state(6))
        checkpointer.drain()
    for size in (1, 3, 4):
        context.join(4)
        context.join(size)
        if context.rank < size:
            load_is(context, 6)
    context.join(4)


def wrong_world(context: Context) -> list[str]:
    context.join(2)
    if context.rank < 2:
        checkpointer = context.checkpointer("async-local", size=2)
        checkpointer.load(make_state(0))
        checkpointer.save(6, make_state(6))
        checkpointer.drain()
    context.join(3)
    with pytest.raises(CheckpointError) as caught:
        context.checkpointer("sync", size=3).load(make_state(0))
    return [str(caught.value)]


def failing_reader(context: Context) -> str:
    """F23: rank 2 cannot read."""
    save_all(context, [10])
    original = loading.read_sharded

    def fails(path: Path, state: Any, rank: int) -> None:
        if rank == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path / "__2_0.distcp"))
        original(path, state, rank)

    loading.read_sharded = fails
    try:
        with pytest.raises(CheckpointError) as caught:
            context.checkpointer("sync").load(make_state(0))
    finally:
        loading.read_sharded = original
    return str(caught.value)


def slow_reader(context: Context) -> str:
    """F23: rank 1 takes longer than it may."""
    save_all(context, [10])
    original, over = loading.read_sharded, context.folder / "rank-0-has-given-up"

    def slow(path: Path, state: Any, rank: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while rank == 1 and not over.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        original(path, state, rank)

    loading.read_sharded = slow
    try:
        with pytest.raises((CheckpointError, RuntimeError)) as caught:
            context.checkpointer("sync", timeouts__setup_s=5.0).load(make_state(0))
    finally:
        loading.read_sharded = original
    if context.rank == 0:
        over.touch()
    dist.destroy_process_group()  # Wakes a peer that is still waiting for this one.
    return str(caught.value)


def dead_writer(context: Context) -> list[str | None]:
    config = context.config(checkpoint__mode="async")
    checkpointer = AsyncCheckpointer(config, context.events)  # type: ignore[arg-type]
    try:
        checkpointer.begin_attempt(context.rank, context.size)
        pid = checkpointer._writer.pid
        assert pid is not None
        checkpointer.load(make_state(0))
        if context.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        checkpointer.save(10, make_state(10))
        if context.rank == 1:
            os.kill(pid, signal.SIGKILL)
        reasons = until_reported(context, checkpointer)
        checkpointer.save(20, make_state(20))
        checkpointer.drain()
        load_is(context, 20)
    finally:
        checkpointer.close()
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise AssertionError("the writer outlived its checkpointer")
    return reasons


def tiered(context: Context, *, stager_interval: int = 1, **overrides: Any) -> Any:
    """Both tiers over the warm writer."""
    config = context.config(
        checkpoint__mode="async",
        checkpoint__memory_interval=stager_interval,
        checkpoint__memory_dir=str(context.folder / f"pod{context.rank}"),
        **overrides,
    )
    (context.folder / f"pod{context.rank}").mkdir(exist_ok=True)
    memory = MemoryTier(config, torch.device("cpu"))
    durable = AsyncCheckpointer(config, context.events, stager=memory, writer=context.writer)  # type: ignore[arg-type]
    parallelism = config.parallelism if config.checkpoint.replicate else None
    made = TieredCheckpointer(durable, memory, context.events, parallelism=parallelism)  # type: ignore[arg-type]
    context._made.append(made)
    made.begin_attempt(context.rank, dist.get_world_size())
    return made


def snapshots(context: Context, checkpointer: Any, steps: list[int]) -> dict[str, Any]:
    """The steps of a run: a collective, then a snapshot of what the update has left."""
    state = make_state(0)
    for step in steps:
        assert context.agree(checkpointer.poll()) == [None] * dist.get_world_size()
        overwrite(state, step)
        state["note"] = f"step {step}"
        checkpointer.snapshot(step, state)
    return state


def settled(checkpointer: Any) -> Any:
    """The newest snapshot is published."""
    checkpointer._memory._settle()
    return checkpointer


def restored(context: Context, checkpointer: Any) -> tuple[int, str]:
    state = make_state(0)
    loaded = checkpointer.load(state)
    assert loaded is not None
    assert_is(state, loaded.step)
    assert loaded.size_bytes > 0
    return loaded.step, loaded.tier


def same_process(context: Context) -> tuple[int, str]:
    """An in-process restart."""
    checkpointer = tiered(context)
    assert checkpointer.load(make_state(0)) is None
    state = snapshots(context, checkpointer, [1, 2, 3, 4, 5])
    overwrite(state, 99)  # Step 6 had begun.
    checkpointer.abandon()
    context.join(context.size)
    checkpointer.begin_attempt(context.rank, context.size)
    found = restored(context, checkpointer)
    snapshots(context, checkpointer, [6, 7])
    return found


def new_process(context: Context) -> tuple[int, str]:
    """A worker died: another object maps what the first one left. Between two objects nothing is shared but files."""
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    snapshots(context, checkpointer, [1, 2, 3])
    settled(checkpointer)
    return restored(context, tiered(context))


def apart(context: Context) -> tuple[int, str]:
    """Rank 1 died between the copy and its publication: rank 0 is one snapshot ahead."""
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    snapshots(context, checkpointer, [1, 2, 3, 4])
    settled(checkpointer)
    if context.rank == 1:
        slot = checkpointer._memory._slot_of(4)
        slot.invalidate()
    found = restored(context, tiered(context))
    # The other history is gone, on the rank that was ahead too.
    assert tiered(context)._memory._memory.root.exists()
    headers = [slot.header() for slot in checkpointer._memory._slots]
    assert sorted(header.step for header in headers if header) == [2, 3]
    return found


def half_written(context: Context) -> tuple[int, str]:
    """Killed in the middle of a copy: the slot has no header, however its bytes look."""
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    snapshots(context, checkpointer, [1, 2, 3])
    settled(checkpointer)
    memory = checkpointer._memory
    if context.rank == 1:
        slot = memory._free_slot()
        slot.invalidate()
        slot.slab.bytes_at(0, 40).fill_(7)
    return restored(context, tiered(context))


def corrupted(context: Context, all_slots: bool) -> tuple[int, str, list[str]]:
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    state = snapshots(context, checkpointer, [1, 2])
    checkpointer.save(2, state)
    checkpointer.drain()
    snapshots(context, checkpointer, [3, 4])
    settled(checkpointer)
    if context.rank == 1:
        for step in (2, 3, 4) if all_slots else (4,):
            checkpointer._memory._slot_of(step).slab.bytes_at(8, 4).fill_(255)
    step, tier = restored(context, tiered(context))
    return step, tier, context.events.texts()


def lost_pod(context: Context) -> tuple[int, str]:
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    state = snapshots(context, checkpointer, [1, 2])
    checkpointer.save(2, state)
    checkpointer.drain()
    snapshots(context, checkpointer, [3, 4])
    settled(checkpointer)
    checkpointer.close()
    if context.rank == 1:
        shutil.rmtree(context.folder / "pod1")
    return restored(context, tiered(context))


def stage_once(context: Context) -> list[int]:
    """The durable save is of the snapshot's step, although training and snapshots have gone on."""
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    state = snapshots(context, checkpointer, [1, 2])
    stop(context)
    checkpointer.save(2, state)
    overwrite(state, 3)
    for step in range(3, 12):
        assert context.agree(checkpointer.poll()) == [None] * context.size
        overwrite(state, step)
        checkpointer.snapshot(step, state)
        checkpointer.publish_ready()
    held = sorted(settled(checkpointer)._memory.steps())
    resume(context)
    checkpointer.drain()
    load_is_without_note(context, 2)
    snapshots(context, checkpointer, [12, 13, 14])
    return held


def load_is_without_note(context: Context, step: int) -> None:
    checkpointer = context.checkpointer("sync")
    state = make_state(0)
    loaded = checkpointer.load(state)
    assert loaded is not None and loaded.step == step
    state["note"] = f"step {step}"
    assert_is(state, step)


def lapped(context: Context) -> list[int]:
    """Publishing takes longer than k steps: training waits, and never overwrites what the ranks have in common."""
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    original = memory_module.checksums

    def slow(*arguments: Any) -> tuple[str, ...]:
        time.sleep(0.1)
        return original(*arguments)

    memory_module.checksums = slow
    fewest = []
    try:
        for step in range(1, 8):
            snapshots(context, checkpointer, [step])
            every: list[set[int]] = [set()] * context.size
            dist.all_gather_object(every, checkpointer._memory.steps())
            if step > 2:
                fewest.append(max(set.intersection(*every), default=0) - step)
    finally:
        memory_module.checksums = original
    return fewest


def leftovers(context: Context) -> list[str]:
    """Of another run that is over, and of one that is alive."""
    base = context.folder / f"pod{context.rank}" / "snapshots"
    (base / "over" / "rank0").mkdir(parents=True)
    (base / "over" / "lock").touch()
    alive = RunMemory(base.parent, "alive")
    checkpointer = tiered(context)
    checkpointer.load(make_state(0))
    found = sorted(path.name for path in base.iterdir())
    alive.close()
    return found


def no_room(context: Context) -> str:
    original = slots.os.statvfs
    small = os.statvfs_result((4096, 4096, 1, 0, 0, 0, 0, 0, 0, 255, 0))
    if context.rank == 1:
        slots.os.statvfs = lambda _: small  # type: ignore[attr-defined,assignment]
    try:
        with pytest.raises(ConfigError) as caught:
            tiered(context).load(make_state(0))
    finally:
        slots.os.statvfs = original  # type: ignore[attr-defined]
    return str(caught.value)


def without_snapshot(context: Context) -> tuple[int, str]:
    """The last step of a run need not be a multiple of the interval."""
    checkpointer = tiered(context, stager_interval=5)
    checkpointer.load(make_state(0))
    snapshots(context, checkpointer, [5])
    checkpointer.save(7, make_state(7))
    checkpointer.drain()
    load_is(context, 7)
    return restored(context, tiered(context))


REPLICATE = {"checkpoint__replicate": True, "parallelism__num_nodes": 2, "parallelism__ranks_per_node": 1}


def await_replica(checkpointer: Any, rank: int, step: int) -> None:
    store = ReplicaStore(checkpointer._memory.folder())
    deadline = time.monotonic() + LIMIT_S
    while step not in store.headers(2).get(rank, ()):
        assert time.monotonic() < deadline, store.headers(2)
        time.sleep(0.01)


def replica(context: Context) -> tuple[int, str]:
    """Pod 1 is lost with its memory; the one in its place fetches what pod 0 holds for it."""
    checkpointer = tiered(context, **REPLICATE)
    assert checkpointer.load(make_state(0)) is None
    state = snapshots(context, checkpointer, [1, 2])
    checkpointer.save(2, state)
    checkpointer.drain()
    snapshots(context, checkpointer, [3, 4])
    await_replica(checkpointer, 1 - context.rank, 4)
    dist.barrier()
    checkpointer.abandon()
    checkpointer.close()
    if context.rank == 1:
        shutil.rmtree(context.folder / "pod1")
    context.join(context.size)
    again = tiered(context, **REPLICATE)
    found = restored(context, again)
    # The new pod's snapshots are sent on, and it holds those of the other again.
    snapshots(context, again, [5, 6])
    await_replica(again, 1 - context.rank, 6)
    dist.barrier()
    return found


def damaged_replica(context: Context) -> tuple[int, str]:
    checkpointer = tiered(context, **REPLICATE)
    checkpointer.load(make_state(0))
    state = snapshots(context, checkpointer, [1, 2])
    checkpointer.save(2, state)
    checkpointer.drain()
    snapshots(context, checkpointer, [3])
    await_replica(checkpointer, 1 - context.rank, 3)
    dist.barrier()
    checkpointer.close()
    if context.rank == 1:
        shutil.rmtree(context.folder / "pod1")
    else:
        for path in checkpointer._memory.folder().glob("replica1/slot?"):
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    return restored(context, tiered(context, **REPLICATE))


def stranger(context: Context) -> list[str]:
    """Whoever does not know the attempt's secret gets nothing and can leave nothing."""
    checkpointer = tiered(context, **REPLICATE)
    checkpointer.load(make_state(0))
    snapshots(context, checkpointer, [1])
    settled(checkpointer)
    replicator = checkpointer._replicator
    await_replica(checkpointer, 1 - context.rank, 1)
    address = replicator._addresses[context.rank]
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as connection:
        message = json.dumps({"secret": "guessed", "do": "fetch", "rank": 1 - context.rank, "step": 1}).encode()
        connection.sendall(len(message).to_bytes(8, "big") + message)
        answer = connection.recv(8)
    dist.barrier()
    return [answer.decode()]
