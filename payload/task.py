"""What is trained: the seam by which a user's own model, dataset and loss come in (``--task package.module:build``).

See docs/task.md. The training loop knows a Task only; the causal language models of ``model.py`` are one.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from payload.config import ConfigError, RunConfig

Batch = Mapping[str, Tensor]
"""Tensors of one rank's samples, stacked in a new first dimension, on the rank's device."""


class Dataset(Protocol):
    """A fixed list of samples, the same on every rank; must not depend on rank or world size."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]:
        """Tensors by name, on the CPU; a name has the same shape and dtype in every sample."""
        ...

    @property
    def fingerprint(self) -> int:
        """Identifies the content (0 .. 2**63 - 1): a run that is resumed on other data is refused."""
        ...


class Task(ABC):
    """A model, its dataset and its loss. Built once a worker process; build_model() runs once an attempt."""

    deferred: bool = False
    """Whether build_model() runs with parameters on the meta device, filled by initialise() afterwards."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The whole model in fp32, on the CPU. Torch's RNG has been seeded, equally on all ranks."""

    @abstractmethod
    def build_dataset(self) -> Dataset:
        """Opens the samples. Raises ConfigError naming the field where they are not there."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the loss over what counts in ``batch``, and how much counts (both scalars).

        The loop divides by the count over all ranks. Padding is in neither. Random draws (dropout) come from
        torch's RNG, seeded for this step and rank.
        """

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        """The units of sharding under FSDP2; by default the members of every outermost nn.ModuleList."""
        for child in model.children():
            yield from child if isinstance(child, nn.ModuleList) else self.layers(child)

    def initialise(self, model: nn.Module) -> None:
        """Only where ``deferred``: fills the parameters (sharded, on the device) of a run that has no checkpoint.

        Collective. Equal for every world size.
        """
        raise NotImplementedError(f"{type(self).__name__} is deferred and has no initialise()")


def load_task(config: RunConfig) -> Task:
    """The task that ``model.task`` names, or the causal LM that ``model.name`` names. Raises ConfigError."""
    if not config.model.task:
        from payload.model import CausalLM

        return CausalLM(config)
    task = _builder(config.model.task)(config)
    if not isinstance(task, Task):
        raise ConfigError(f"model.task: {config.model.task} returned {type(task).__name__}; legal: a payload.task.Task")
    return task


def _builder(path: str) -> Callable[[RunConfig], object]:
    module_name, _, name = path.partition(":")
    legal = "package.module:build, importable, a function of the RunConfig"
    if not module_name or not name:
        raise ConfigError(f"model.task: {path!r}; legal: {legal}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # The user's module is there, but what it imports is not: their traceback says more.
        raise ConfigError(f"model.task: no module {error.name!r} for {path!r}; legal: {legal}") from error
    builder = getattr(module, name, None)
    if not callable(builder):
        raise ConfigError(f"model.task: {module_name} has no function {name!r}; legal: {legal}")
    result: Callable[[RunConfig], object] = builder
    return result


def collate(samples: Iterable[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Stacks samples by name and moves them to the device."""
    rows = list(samples)
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
