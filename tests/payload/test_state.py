"""The exact state: keyed randomness, the schedule, and the hash of the end."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from payload.checkpoint.base import CheckpointError
from payload.config import TrainingConfig
from payload.optim import (
    MOMENTS,
    build_optimizer,
    clip_factor,
    learning_rate,
    local_gradients,
    local_square_sum,
    scale_gradients,
)
from payload.parallel import join_group, leave_group
from payload.state import RunState, digest, rng_digest, seed_step
from tests.payload.training_support import PlainAttempt, run_config

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_step_draws_the_same_whatever_ran_before() -> None:
    """F15: nothing that a loader or a restart draws in between may shift the numbers of a step."""
    seed_step(0, 12, 1)
    straight, straight_rng = draws(), rng_digest()
    torch.rand(1000)
    np.random.rand(5)
    random.random()
    seed_step(0, 12, 1)
    assert draws() == straight
    assert rng_digest() == straight_rng


def test_ranks_steps_and_seeds_have_their_own_randomness() -> None:
    """F15: all ranks on rank 0's generator would go unnoticed by the loss alone."""
    seen = set()
    for seed, step, rank in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 11, 0), (0, 1, 10)]:
        seed_step(seed, step, rank)
        seen.add((*draws(), rng_digest()))
    assert len(seen) == 6


def test_the_learning_rate_of_each_step() -> None:
    """F18: warm-up from the first step, the full rate at its end, a tenth at the last step."""
    config = TrainingConfig(max_steps=100, warmup_steps=10, learning_rate=2.0)
    assert [learning_rate(config, step) for step in (1, 5, 10)] == [0.2, 1.0, 2.0]
    assert learning_rate(config, 55) == pytest.approx(1.1)
    assert learning_rate(config, 100) == pytest.approx(0.2)
    rates = [learning_rate(config, step) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(TrainingConfig(max_steps=5, warmup_steps=0, learning_rate=2.0), 1) < 2.0


def test_the_optimizer_is_torchs_own() -> None:
    """With state made in advance and the step set from outside, AdamW takes the steps that it takes by itself."""
    config = TrainingConfig(learning_rate=0.1)
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    mine = build_optimizer(ours, config)
    reference = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        x = torch.randn(4, 3)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    assert mine.state[ours.weight]["step"] == 3


def test_clipping_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model, reference = nn.Linear(5, 4), nn.Linear(5, 4)
    reference.load_state_dict(model.state_dict())
    for each in (model, reference):
        each(torch.ones(2, 5)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    square_sum = local_square_sum(local_gradients(model.parameters()), CPU, 1).item()
    assert square_sum**0.5 == pytest.approx(norm, rel=1e-6)
    assert local_square_sum(local_gradients(model.parameters()), CPU, 4).item() == pytest.approx(square_sum / 4)
    scale_gradients(local_gradients(model.parameters()), clip_factor(norm, 1.0))
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(50.0, 0.0) == 1.0, "0 switches clipping off"


def test_norms_of_bf16_gradients_are_not_rounded_to_bf16() -> None:
    gradient = torch.ones(257, dtype=torch.bfloat16)
    assert local_square_sum([gradient], CPU, 1).item() == pytest.approx(257.0, rel=1e-6)


def run_state() -> RunState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return RunState(model, build_optimizer(model, TrainingConfig()))


def test_the_state_is_complete_and_live() -> None:
    """Every parameter with both moments, and the three integers; the tensors are the run's own, not copies."""
    state = run_state()
    values = state.state_dict()
    assert set(values) == {"model", "optimizer", "progress"}
    assert set(values["model"]) == set(values["optimizer"]) == {"weight", "bias"}
    assert all(set(moments) == set(MOMENTS) for moments in values["optimizer"].values())
    values["model"]["weight"].fill_(7.0)
    values["progress"]["step"].fill_(9)
    assert state.model.weight[0, 0] == 7.0  # type: ignore[index]
    assert int(state.step) == 9


def test_bias_correction_goes_on_from_the_step_of_the_run() -> None:
    """F18: the optimizer's own counter is the global step after a load."""
    state = run_state()
    state.step.fill_(41)
    state.data.fill_(5)
    state.check_loaded(41, data=5)
    assert {float(values["step"]) for values in state.optimizer.state.values()} == {41.0}


def test_a_save_of_another_step_or_other_data_is_refused() -> None:
    state = run_state()
    state.step.fill_(40)
    state.data.fill_(5)
    with pytest.raises(CheckpointError, match="the save of step 41 holds the state of step 40"):
        state.check_loaded(41, data=5)
    with pytest.raises(CheckpointError, match="other data"):
        state.check_loaded(40, data=6)


def test_the_hash_sees_every_tensor(tmp_path: Path) -> None:
    join_group(run_config(tmp_path), PlainAttempt(dist.HashStore()), CPU)
    try:
        state = run_state()
        seen = {digest(state.state_dict(), CPU)}
        changes: list[Any] = [
            state.model.bias,
            state.optimizer.state[state.model.weight]["exp_avg"],  # type: ignore[index]
            state.optimizer.state[state.model.weight]["exp_avg_sq"],  # type: ignore[index]
            state.step,
            state.position,
        ]
        for number, tensor in enumerate(changes):
            with torch.no_grad():
                tensor.view(-1)[-1] += 1
            seen.add(digest(state.state_dict(), CPU))
            assert len(seen) == number + 2
    finally:
        leave_group()
