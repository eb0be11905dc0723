"""The only training loop.

train() is entered once an attempt, by whatever recovery arm; it does not know which. What outlives an attempt within
a worker process is in the Session.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from payload import parallel, result
from payload.checkpoint.base import CheckpointError
from payload.config import RunConfig
from payload.data import SampleOrder, rank_positions
from payload.optim import (
    build_optimizer,
    clip_factor,
    learning_rate,
    local_gradients,
    local_square_sum,
    scale_gradients,
)
from payload.recovery.base import Attempt
from payload.session import Session
from payload.state import RunState, digest, seed_step
from payload.task import collate

__all__ = ["Session", "TrainingError", "train"]


class TrainingError(RuntimeError):
    """The training itself went wrong (a loss that is no number); the text names the step."""


@dataclass
class _Program:
    """Everything that one attempt steps with."""

    config: RunConfig
    attempt: Attempt
    session: Session
    model: nn.Module
    optimizer: torch.optim.AdamW
    state: RunState
    order: SampleOrder

    @property
    def step(self) -> int:
        return int(self.state.step)


@dataclass(frozen=True)
class _Agreed:
    """The result of the one all-reduce of a step; equal on all ranks."""

    loss_sum: float
    num_tokens: float
    square_sum: float
    """Of the reduced, not yet scaled gradients."""
    num_stopping: int
    num_failed_saves: int


def train(config: RunConfig, attempt: Attempt, session: Session) -> None:
    """Trains to ``max_steps``, or to an agreed stop, from the newest complete save. Collective.

    Returns when the run is durable (``session.stopped`` tells which end it was). Raises what a fault, a peer's death
    or a failed save raises; the process group is then left to the recovery arm.
    """
    if result.is_finished(config):
        return
    session.events.emit("attempt", generation=attempt.generation, world_size=attempt.world_size, rank=attempt.rank)
    try:
        program = _prepare(config, attempt, session)
        _run_steps(program)
        _finish(program)
    except CheckpointError as error:
        if attempt.rank == 0:
            result.write_failure(config, str(error))
        raise
    parallel.leave_group()


def _prepare(config: RunConfig, attempt: Attempt, session: Session) -> _Program:
    events, device = session.events, session.device
    parallel.release(device)
    attempt.on_abort(session.checkpointer.abandon)
    with attempt.wait("joining the process group"):
        parallel.join_group(config, attempt, device)
    events.emit("group_ready", generation=attempt.generation)
    with attempt.wait("building the model"):
        model, optimizer = _build(config, session, device)
    events.emit("model_ready", num_parameters=sum(p.numel() for p in model.parameters()))
    order = SampleOrder(config.data.seed, len(session.dataset))
    program = _Program(config, attempt, session, model, optimizer, RunState(model, optimizer), order)
    with attempt.wait("loading the state"):
        _load(program)
    return program


def _build(config: RunConfig, session: Session, device: torch.device) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(config.model.seed)
    model = session.task.build_model()
    model.train()
    model = parallel.distribute(config, session.task, model, device)
    return model, build_optimizer(model, config.training)


def _load(program: _Program) -> None:
    """Collective: the newest complete save, or the initial weights where there is none."""
    attempt, session = program.attempt, program.session
    state, data = program.state, session.dataset.fingerprint
    started = time.monotonic()
    session.checkpointer.begin_attempt(attempt.rank, attempt.world_size)
    loaded = session.checkpointer.load(state.state_dict())
    if loaded is None:
        if session.task.deferred:
            session.task.initialise(program.model)
        state.data.fill_(data)
    else:
        state.check_loaded(loaded.step, data)
        _warn_of_other_batch(program)
    session.events.emit(
        "state_ready",
        step=program.step,
        tier=loaded.tier if loaded else "none",
        load_s=time.monotonic() - started,
        size_bytes=loaded.size_bytes if loaded else 0,
        position=int(state.position),
        generation=attempt.generation,
    )


def _warn_of_other_batch(program: _Program) -> None:
    step, position = program.step, int(program.state.position)
    batch = program.config.training.global_batch_size
    if position != step * batch:
        text = f"{position} samples in {step} steps were not steps of {batch}: global_batch_size was changed"
        program.session.events.emit("warning", text=text)


def _run_steps(program: _Program) -> None:
    config, attempt, session = program.config, program.attempt, program.session
    injector = session.injector(attempt.rank)
    while program.step < config.training.max_steps and not session.stopped:
        attempt.ping()
        injector.fire(program.step + 1)
        agreed = _step(program)
        if agreed.num_failed_saves:
            raise CheckpointError(f"save failed on {agreed.num_failed_saves} rank(s), found after step {program.step}")
        session.checkpointer.publish_ready()
        last = program.step == config.training.max_steps
        if agreed.num_stopping and not last:
            session.stopped = True
            session.events.emit("stopping", step=program.step)
        memory_interval = config.checkpoint.memory_interval
        if memory_interval and program.step % memory_interval == 0:
            _snapshot(program)
        if last or session.stopped or program.step % config.checkpoint.interval == 0:
            _save(program)


def _snapshot(program: _Program) -> None:
    session, step, started = program.session, program.step, time.monotonic()
    session.checkpointer.snapshot(step, program.state.state_dict())
    session.events.emit("snapshot", step=step, stall_s=time.monotonic() - started)


def _save(program: _Program) -> None:
    session, step, started = program.session, program.step, time.monotonic()
    with program.attempt.wait("saving"):
        session.checkpointer.save(step, program.state.state_dict())
    blocking_s = time.monotonic() - started  # All that the loop waits, the collection of the state included.
    session.events.emit("save", step=step, mode=program.config.checkpoint.mode, blocking_s=blocking_s)


def _step(program: _Program) -> _Agreed:
    """One optimizer step of the whole world, timed and recorded."""
    config, attempt, session = program.config, program.attempt, program.session
    started = time.monotonic()
    step = program.step + 1
    seed_step(config.model.seed, step, attempt.rank)
    first, batch_size = int(program.state.position), config.training.global_batch_size
    positions = rank_positions(first, batch_size, attempt.rank, attempt.world_size)
    batch = collate((session.dataset[program.order(p)] for p in positions), session.device)
    data_s = time.monotonic() - started
    loss_sum, num_tokens = session.task.loss(program.model, batch)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    gradients = local_gradients(program.model.parameters())
    agreed = _agree(program, gradients, loss_sum.detach(), num_tokens.detach())
    rate = _update(program, gradients, agreed, step)
    program.state.advance(batch_size)
    loss = agreed.loss_sum / agreed.num_tokens
    duration_s = _pad(started, config.training.min_step_s)
    if attempt.rank == 0:
        session.speak(f"step {step} of {config.training.max_steps}, loss {loss:.4f}, {duration_s:.3f} s")
    session.events.emit(
        "step",
        step=step,
        duration_s=duration_s,
        data_s=data_s,
        loss=loss,
        lr=rate,
        generation=attempt.generation,
    )
    return agreed


def _agree(program: _Program, gradients: list[Tensor], loss_sum: Tensor, num_tokens: Tensor) -> _Agreed:
    """Collective: one small all-reduce carries all that ranks have to agree on in a step."""
    session = program.session
    reason = session.checkpointer.poll()
    if reason is not None:
        session.events.emit("save_failed", step=program.step, reason=reason)
    squares = local_square_sum(gradients, session.device, parallel.num_copies(program.config))
    flags = torch.tensor([session.stop_requested, reason is not None], dtype=torch.float64, device=session.device)
    packet = torch.cat([torch.stack([loss_sum.double(), num_tokens.double(), squares]), flags])
    dist.all_reduce(packet)
    loss, tokens, square_sum, stopping, failed = packet.tolist()
    return _Agreed(loss, tokens, square_sum, int(stopping), int(failed))


def _update(program: _Program, gradients: list[Tensor], agreed: _Agreed, step: int) -> float:
    """Scales, clips and applies the gradients; returns the learning rate. Raises TrainingError."""
    if agreed.num_tokens <= 0:
        raise TrainingError(f"step {step}: nothing in the global batch counts in the loss")
    norm = math.sqrt(agreed.square_sum) / agreed.num_tokens
    if not math.isfinite(agreed.loss_sum) or not math.isfinite(norm):
        raise TrainingError(f"step {step}: loss {agreed.loss_sum / agreed.num_tokens}, gradient norm {norm}")
    training = program.config.training
    scale_gradients(gradients, clip_factor(norm, training.gradient_clip) / agreed.num_tokens)
    rate = learning_rate(training, step)
    for group in program.optimizer.param_groups:
        group["lr"] = rate
    program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=True)
    return rate


def _pad(started: float, min_step_s: float) -> float:
    """Waits until the step has lasted ``min_step_s``; returns how long it lasted, in seconds."""
    left_s = started + min_step_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
    return time.monotonic() - started


def _finish(program: _Program) -> None:
    """Collective: waits for the last save; then, unless stopped early, records the end of the run."""
    config, attempt, session = program.config, program.attempt, program.session
    with attempt.wait("waiting for the last save"):
        duration_s = session.checkpointer.drain()
    session.events.emit("drain", duration_s=duration_s)
    if session.stopped:
        return
    with attempt.wait("hashing the final state"):
        sha256 = digest(program.state.state_dict(), session.device)
    session.events.emit("train_end", step=program.step, sha256=sha256, world_size=attempt.world_size)
    if attempt.rank == 0:
        result.write_success(config, program.step, sha256, _what_ran(program))
    dist.barrier()  # Nobody leaves before the result is there.


def _what_ran(program: _Program) -> dict[str, Any]:
    session = program.session
    return {
        "world_size": program.attempt.world_size,
        "generation": program.attempt.generation,
        "device": session.device.type,
        "backend": dist.get_backend(),
        "strategy": program.config.parallelism.strategy,
        "task": type(session.task).__name__,
        "checkpointer": type(session.checkpointer).__name__,
        "position": int(program.state.position),
    }
