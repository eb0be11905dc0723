"""A task that is no language model: a residual network with dropout fits a curve.

    python -m payload demo --task examples.regression_task:build

The number of rows is no multiple of the batch, and some targets are missing: they are padding to the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from payload.config import RunConfig
from payload.data import fingerprint
from payload.task import Batch, Dataset, Task

NUM_ROWS = 150
NUM_INPUTS = 7
WIDTH = 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(NUM_INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


class Curve:
    """Rows of a smooth function, every tenth without a target."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._inputs = torch.randn(NUM_ROWS, NUM_INPUTS, generator=generator)
        self._targets = torch.sin(self._inputs.sum(dim=1))
        self._known = torch.arange(NUM_ROWS) % 10 != 0
        self.fingerprint = fingerprint("curve", str(seed))

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]:
        return {"x": self._inputs[index], "y": self._targets[index], "known": self._known[index]}


class RegressionTask(Task):
    def __init__(self, config: RunConfig) -> None:
        self._seed = config.data.seed

    def build_model(self) -> nn.Module:
        return Network()

    def build_dataset(self) -> Dataset:
        return Curve(self._seed)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        known = batch["known"]
        squares = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
        return (squares * known).sum(), known.sum()

    def layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, Network)
        return model.blocks


def build(config: RunConfig) -> RegressionTask:
    return RegressionTask(config)
