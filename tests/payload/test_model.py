"""Models by name: their shapes, their first weights and their loss."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from payload import parallel
from payload.config import ConfigError, RunConfig
from payload.data import IGNORED
from payload.model import SHAPES, CausalLM, _from_shape, _parameters_on_meta, draw_weights, shape_of
from payload.optim import build_optimizer
from payload.parallel import distribute, join_group, leave_group, whole
from payload.state import RunState, digest
from tests.payload.training_support import (
    PlainAttempt,
    losses,
    prepare_text,
    run_config,
    run_world,
    train_alone,
)

CPU = torch.device("cpu")


def number_of_parameters(name: str) -> int:
    with _parameters_on_meta():
        model: nn.Module = _from_shape(name, shape_of(name))
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


def llama_parameters(hidden: int, inner: int, layers: int, kv_share: int, vocab: int) -> int:
    attention = 2 * hidden * hidden + 2 * hidden * hidden // kv_share
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + 2 * vocab * hidden


def test_the_named_shapes_are_those_of_the_article() -> None:
    """8,030,261,248 is what the published LLaMA-3.1-8B has."""
    assert number_of_parameters("llama-8b") == 8_030_261_248 == llama_parameters(4096, 14336, 32, 4, 128256)
    assert number_of_parameters("llama-1b") == llama_parameters(2048, 8192, 16, 4, 32000)


def test_rotary_frequencies_survive_the_meta_device() -> None:
    with _parameters_on_meta():
        model = _from_shape("llama-tiny", shape_of("llama-tiny"))
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.model.rotary_emb.inv_freq[0] == 1.0
    assert nn.Linear(2, 2).weight.is_meta is False, "the context must not leak"


def built(config: RunConfig, attempt: PlainAttempt) -> nn.Module:
    """The model as an attempt builds it, in a group that the caller leaves."""
    join_group(config, attempt, CPU)
    task = CausalLM(config)
    model = distribute(config, task, task.build_model(), CPU)
    task.initialise(model)
    return model


def digest_of(config: RunConfig, attempt: PlainAttempt) -> str:
    model = built(config, attempt)
    state = RunState(model, build_optimizer(model, config.training))
    try:
        return digest(state.state_dict(), CPU)
    finally:
        leave_group()


def write_digest(config: RunConfig, rank: int, world_size: int, store: Any) -> None:
    digest = digest_of(config, PlainAttempt(store, rank, world_size))
    (Path(config.workdir) / f"digest-{rank}").write_text(digest)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_first_weights_do_not_depend_on_the_world(tmp_path: Path, strategy: str) -> None:
    """A world of 3 cuts matrices of 64 and 320 rows unevenly, and blocks of rows in the middle."""
    config = run_config(tmp_path, parallelism__strategy=strategy)
    prepare_text(config)
    alone = digest_of(config, PlainAttempt(dist.HashStore()))
    other_seed = digest_of(config.with_overrides({"model.seed": 1}), PlainAttempt(dist.HashStore()))
    assert alone != other_seed
    run_world(tmp_path / "world", 3, partial(write_digest, config))
    assert [(tmp_path / f"digest-{rank}").read_text() for rank in range(3)] == [alone] * 3


def test_a_matrix_is_drawn_block_by_block() -> None:
    """Rows beyond the first block differ from it, and norms begin at one."""
    model = nn.Sequential(nn.Linear(4, 600, bias=True), nn.LayerNorm(4))
    draw_weights(model, seed=3)
    rows = model[0].weight.detach()
    assert len({tuple(row.tolist()) for row in rows}) == 600
    assert 0.015 < rows.std() < 0.025
    assert torch.equal(model[0].bias.detach(), torch.zeros(600))
    assert torch.equal(model[1].weight.detach(), torch.ones(4))


@pytest.mark.parametrize(
    ("precision", "parameters", "moments"),
    [("fp32", torch.float32, torch.float32), ("bf16", torch.bfloat16, torch.bfloat16),
     ("mixed", torch.float32, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_precisions(
    tmp_path: Path, strategy: str, precision: str, parameters: torch.dtype, moments: torch.dtype
) -> None:
    """Types of weights and moments, and the type that is computed with, seen in a layer's input."""
    config = run_config(tmp_path, model__precision=precision, parallelism__strategy=strategy)
    prepare_text(config)
    model = built(config, PlainAttempt(dist.HashStore()))
    try:
        seen: list[torch.dtype] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))  # type: ignore[union-attr]
        sample = CausalLM(config).build_dataset()[0]
        batch = {name: tensor.unsqueeze(0) for name, tensor in sample.items()}
        loss_sum, _ = CausalLM(config).loss(model, batch)
        loss_sum.backward()
        optimizer = build_optimizer(model, config.training)
        assert {p.dtype for p in model.parameters()} == {parameters}
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {moments}
        assert seen == [torch.float32 if precision == "fp32" else torch.bfloat16]
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    finally:
        leave_group()


def test_padding_does_not_count_in_the_loss(tmp_path: Path) -> None:
    """A sample padded to twice its length has the loss, the count and the gradients of the bare one."""
    config = run_config(tmp_path)
    prepare_text(config)
    model = _from_shape("llama-tiny", shape_of("llama-tiny"))
    draw_weights(model, 0)
    tokens = torch.arange(10, 18).unsqueeze(0)
    labels = tokens + 1
    padded_tokens = torch.cat([tokens, torch.zeros(1, 8, dtype=torch.int64)], dim=1)
    padded_labels = torch.cat([labels, torch.full((1, 8), IGNORED)], dim=1)
    results = []
    for x, y in ((tokens, labels), (padded_tokens, padded_labels)):
        model.zero_grad()
        loss_sum, count = CausalLM(config).loss(model, {"tokens": x, "labels": y})
        loss_sum.backward()
        results.append((loss_sum.item(), count.item(), model.lm_head.weight.grad.clone()))
    (bare_loss, bare_count, bare_gradient), (loss, count, gradient) = results
    assert count == bare_count == 8
    assert loss == pytest.approx(bare_loss, rel=1e-6)
    torch.testing.assert_close(gradient, bare_gradient)


def tiny_gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    shape = GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.1)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    return folder


def compare_weights(config: RunConfig, rank: int, world_size: int, store: Any) -> None:
    """This rank's model has the names, ties and values of what transformers loads."""
    from transformers import GPT2LMHeadModel

    model: Any = built(config, PlainAttempt(store, rank, world_size))
    assert model.lm_head.weight is model.transformer.wte.weight, "the tie is gone"
    reference = dict(GPT2LMHeadModel.from_pretrained(config.model.name).named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(reference)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), reference[name].detach()), name


def test_a_local_folder_brings_its_weights(tmp_path: Path) -> None:
    """Another architecture than LLaMA, with tied embeddings and dropout, read by rank 0 of two."""
    config = run_config(tmp_path, model__name=str(tiny_gpt2(tmp_path / "gpt2")))
    prepare_text(config)
    run_world(tmp_path / "world", 2, partial(compare_weights, config))


def test_a_folder_model_trains(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__name=str(tiny_gpt2(tmp_path / "gpt2")))
    prepare_text(config)
    train_alone(config)
    assert losses(config)[8] < losses(config)[1] - 0.3


def test_an_unknown_name_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "no-model").mkdir()
    config = run_config(tmp_path, model__name=str(tmp_path / "no-model"))
    with pytest.raises(ConfigError, match=r"model\.name: .*no-model.*legal: llama-tiny, llama-1b, llama-8b, a hub id"):
        CausalLM(config).build_dataset()


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path)
    prepare_text(config)
    monkeypatch.setitem(SHAPES, "llama-tiny", {**SHAPES["llama-tiny"], "vocab_size": 256})
    with pytest.raises(ConfigError, match=r"model\.name: llama-tiny has 256 token ids, the data .* 257"):
        CausalLM(config).build_dataset()


def test_a_sequence_that_is_too_long_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, data__sequence_length=4096)
    prepare_text(config)
    with pytest.raises(ConfigError, match=r"data\.sequence_length: 4096; legal: 1 to 2048"):
        CausalLM(config).build_dataset()


def test_a_device_that_is_not_there_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"parallelism\.device: cuda"):
        parallel.device_of(RunConfig(), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"parallelism\.ranks_per_node: local rank 1.* 1 CUDA devices"):
        parallel.device_of(RunConfig(), 1)
