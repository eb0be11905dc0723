"""AdamW, its schedule as a function of the step, and clipping without a collective of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from payload.config import TrainingConfig
from payload.parallel import local_tensor

_FINAL_SHARE = 0.1
"""The cosine ends at this share of the learning rate."""
_NORM_EPS = 1e-6
"""Keeps the clipping factor finite (the constant of torch.nn.utils.clip_grad_norm_)."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, next to the step, which is that of the run."""


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with its state in place from the start, so that a load can fill it. No decay of vectors (norms, biases)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.device.type == "cuda" for p in parameters)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=fused,
        foreach=not fused,  # The same numbers as one by one, with a third of the bookkeeping of sharded tensors.
    )
    for parameter in parameters:
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        for name in MOMENTS:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    return optimizer


def set_step(optimizer: torch.optim.AdamW, step: int) -> None:
    """Bias correction counts the steps of the run; it is restored from there, not saved twice."""
    for state in optimizer.state.values():
        state["step"].fill_(float(step))


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Of the 1-based ``step``: linear warm-up, then a half cosine that ends at a tenth in ``max_steps``.

    A pure function of the step: after a restart there is nothing to restore or to step twice.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / (config.max_steps - config.warmup_steps))
    return config.learning_rate * (_FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of each gradient that there is, memory shared with it; empty parts left out."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    return [gradient for gradient in gradients if gradient.numel()]


def local_square_sum(gradients: list[Tensor], device: torch.device, num_copies: int) -> Tensor:
    """Sum of the squares of this rank's gradients, so that adding it over ranks gives the squared norm (fp64 scalar).

    Args:
        num_copies: ranks that hold the same gradients (DDP: all of them; sharded: 1).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The dtype is that of the accumulation: without it, bf16 norms would be rounded to bf16.
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    return torch.stack(norms).double().square().sum() / num_copies


def clip_factor(norm: float, largest: float) -> float:
    """What scales a gradient of ``norm`` down to ``largest``; 1 where it is smaller or ``largest`` is 0."""
    return min(1.0, largest / (norm + _NORM_EPS)) if largest else 1.0


def scale_gradients(gradients: list[Tensor], factor: float) -> None:
    if gradients:
        torch._foreach_mul_(gradients, factor)
