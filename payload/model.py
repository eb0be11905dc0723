"""Causal language models of Hugging Face transformers, by name.

Parameters are built on the meta device, sharded, and then filled shard by shard: no rank ever holds a whole large
model. transformers is imported as narrowly as the name allows, because its import is a part of every cold restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from payload.config import ConfigError, RunConfig
from payload.data import IGNORED, TokenDataset
from payload.parallel import local_part
from payload.task import Batch, Task

_INIT_STD = 0.02
"""Standard deviation of random weights (initializer_range of the LLaMA configs)."""
_ROWS_PER_SEED = 256
"""Rows of a matrix that are drawn from one seed: a rank draws only the blocks that its shard touches."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    },
    # The published config of LLaMA-3.1-8B.
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
"""Named shapes with random weights; embeddings and output are not tied."""


def preload(name: str) -> None:
    """Does the imports of build_model(), so that a process can be forked from one that has done them."""
    if name in SHAPES:
        import transformers.models.llama.modeling_llama
    else:
        import transformers  # noqa: F401


class CausalLM(Task):
    """Next-token prediction on the prepared token file."""

    deferred = True

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError where the name is not legal."""
        self._config = config
        self._name = config.model.name
        self._shape = shape_of(self._name)

    def build_dataset(self) -> TokenDataset:
        """Raises ConfigError too where the model does not fit the data."""
        dataset, shape = TokenDataset(self._config.data_dir, self._config.data.sequence_length), self._shape
        if dataset.meta.vocab_size > shape.vocab_size:
            raise ConfigError(
                f"model.name: {self._name} has {shape.vocab_size} token ids, the data in data.path "
                f"{dataset.meta.vocab_size}; legal: a model with at least as many"
            )
        longest = getattr(shape, "max_position_embeddings", None)
        if longest is not None and dataset.sequence_length > longest:
            raise ConfigError(
                f"data.sequence_length: {dataset.sequence_length}; legal: 1 to {longest} for {self._name}"
            )
        return dataset

    def build_model(self) -> nn.Module:
        with _parameters_on_meta():
            return _from_shape(self._name, self._shape)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        # Padding only ever follows the real tokens of a sample, so the causal mask alone hides it from them.
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        loss_sum = each.double().sum()  # In fp32 the sum would depend on how the batch is split over ranks.
        return loss_sum, (labels != IGNORED).sum()

    def initialise(self, model: nn.Module) -> None:
        if self._name in SHAPES:
            draw_weights(model, self._config.model.seed)
        else:
            _copy_weights(model, self._name)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Fills matrices with normal noise, norm weights with ones and biases with zeros, each rank its own part.

    Not collective. Values depend on (seed, name of the parameter, row) only, so they are the same for every world
    size, device and way of sharding.
    """
    for name, parameter in model.named_parameters():
        local, first_row = local_part(parameter)
        if parameter.ndim < 2:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        last_row = first_row + local.shape[0]
        for block in range(first_row // _ROWS_PER_SEED, -(-last_row // _ROWS_PER_SEED)):
            start = block * _ROWS_PER_SEED
            num_rows = min(_ROWS_PER_SEED, parameter.shape[0] - start)
            generator = torch.Generator().manual_seed(_seed_of(seed, name, block))
            rows = torch.randn(num_rows, *parameter.shape[1:], generator=generator) * _INIT_STD
            low, high = max(start, first_row), min(start + num_rows, last_row)
            local[low - first_row : high - first_row].copy_(rows[low - start : high - start])


def _seed_of(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"weights:{seed}:{name}:{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _copy_weights(model: nn.Module, name: str) -> None:
    """Collective: rank 0 reads the published weights and broadcasts them, one parameter at a time."""
    source = _hub_weights(name) if dist.get_rank() == 0 else {}
    for key, parameter in model.named_parameters():
        local, first_row = local_part(parameter)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        if dist.get_rank() == 0:
            whole.copy_(source.pop(key))
        dist.broadcast(whole, src=0)
        local.copy_(whole[first_row : first_row + local.shape[0]] if whole.ndim else whole)


def shape_of(name: str) -> Any:
    """The Hugging Face config of a named shape, a hub id or a local folder. Raises ConfigError."""
    if name in SHAPES:
        from transformers.models.llama.configuration_llama import LlamaConfig

        return LlamaConfig(**SHAPES[name], tie_word_embeddings=False, attn_implementation="sdpa")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _unknown(name, error) from error


def _from_shape(name: str, shape: Any) -> nn.Module:
    if name in SHAPES:
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM(shape)
        return model
    from transformers import AutoModelForCausalLM

    try:
        built: nn.Module = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    except ValueError as error:
        raise _unknown(name, error) from error
    return built


def _hub_weights(name: str) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    try:
        reference = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except (OSError, ValueError) as error:
        raise _unknown(name, error) from error
    return dict(reference.named_parameters())


def _unknown(name: str, error: Exception) -> ConfigError:
    legal = f"{', '.join(SHAPES)}, a hub id, or a folder with config.json and weights of a causal LM"
    return ConfigError(f"model.name: {name!r}: {' '.join(str(error).split())}; legal: {legal}")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside live on the meta device; buffers are real.

    torch.device("meta") would lose the buffers that only constructors compute (rotary frequencies).
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    # Assigned to the class, because constructors of any library have to meet it.
    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
