"""The exact state of a run: what is saved, how randomness is keyed, and the hash of the end.

Parameters, buffers and Adam's moments are stored under the names of the task's own model, so a save does not tell
how many ranks or which strategy wrote it. Step, data position and the data's fingerprint are three integers. The
learning rate is a function of the step, and randomness of (seed, step, logical rank): neither is stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from payload.checkpoint.base import CheckpointError, StateDict
from payload.data import fingerprint
from payload.optim import MOMENTS, set_step
from payload.parallel import whole


def _integer(value: int = 0) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


@dataclass(frozen=True)
class RunState:
    """A view of the live tensors of one attempt; loading writes into them."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    step: Tensor = field(default_factory=_integer)
    """Last completed step."""
    position: Tensor = field(default_factory=_integer)
    """Samples that the run has consumed."""
    data: Tensor = field(default_factory=_integer)
    """Fingerprint of the dataset."""

    def state_dict(self) -> StateDict:
        """The live tensors themselves, no copies."""
        moments = {
            name: {moment: self.optimizer.state[parameter][moment] for moment in MOMENTS}
            for name, parameter in self.model.named_parameters()
            if parameter in self.optimizer.state
        }
        return {
            "model": {name: tensor.detach() for name, tensor in self.model.state_dict().items()},
            "optimizer": moments,
            "progress": {"step": self.step, "position": self.position, "data": self.data},
        }

    def advance(self, num_samples: int) -> None:
        self.step.add_(1)
        self.position.add_(num_samples)

    def check_loaded(self, step: int, data: int) -> None:
        """After a load: takes over the step count. Raises CheckpointError where the save does not fit the run."""
        if int(self.step) != step:
            raise CheckpointError(f"the save of step {step} holds the state of step {int(self.step)}")
        if int(self.data) != data:
            raise CheckpointError(
                f"the save of step {step} belongs to other data (fingerprint {int(self.data)}, now {data}); "
                "give the data folder and sequence length of the run, or another run_id"
            )
        set_step(self.optimizer, step)


def seed_step(seed: int, step: int, rank: int) -> int:
    """Seeds torch (all devices), NumPy and random for one step of one logical rank; returns the key.

    A replayed step draws the same numbers whatever ran before it in the process.
    """
    key = fingerprint("step", str(seed), str(step), str(rank))
    torch.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)
    return key


def rng_digest() -> str:
    """Hash of torch's CPU generator, to compare ranks and runs."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


def digest(state: StateDict, device: torch.device) -> str:
    """Collective: sha256 over name, type, shape and content of every tensor; the same on all ranks.

    One tensor at a time is gathered, so memory grows by the largest one only. Independent of world size and
    strategy, as names and whole tensors are.
    """
    result = hashlib.sha256()
    for name, tensor in _flat(state, ""):
        content = whole(tensor)
        if dist.get_rank() == 0:
            result.update(f"{name}:{content.dtype}:{tuple(content.shape)}\n".encode())
            result.update(content.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    agreed = torch.tensor(list(result.digest()), dtype=torch.uint8, device=device)
    dist.broadcast(agreed, src=0)
    return bytes(agreed.tolist()).hex()


def _flat(values: StateDict, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key in sorted(values):
        value = values[key]
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value
