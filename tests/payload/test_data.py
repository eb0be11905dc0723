"""The token file and the order of samples."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from payload.config import ConfigError
from payload.data import IGNORED, META, TOKENS, SampleOrder, TokenDataset, TokenMeta, rank_positions, read_meta


def write_tokens(folder: Path, tokens: list[int], dtype: str = "uint16") -> Path:
    folder.mkdir(parents=True)
    np.array(tokens, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / TOKENS)
    meta = TokenMeta("files", "bytes", 0, 70000, dtype, 1, len(tokens), "0" * 64)
    (folder / META).write_text(meta.to_json())
    return folder


def test_samples_are_packed_and_labels_are_the_next_tokens(tmp_path: Path) -> None:
    data = TokenDataset(write_tokens(tmp_path / "d", list(range(10, 20))), sequence_length=4)
    assert len(data) == 3
    assert data[0]["tokens"].tolist() == [10, 11, 12, 13]
    assert data[0]["labels"].tolist() == [11, 12, 13, 14]
    assert data[1]["tokens"].tolist() == [14, 15, 16, 17]
    every_label = torch.cat([data[i]["labels"] for i in range(3)])
    assert every_label[every_label != IGNORED].tolist() == list(range(11, 20)), "each token is predicted once"


def test_the_last_sample_is_padded_and_the_padding_ignored(tmp_path: Path) -> None:
    data = TokenDataset(write_tokens(tmp_path / "d", list(range(10, 17))), sequence_length=4)
    assert data[1]["tokens"].tolist() == [14, 15, 0, 0]
    assert data[1]["labels"].tolist() == [15, 16, IGNORED, IGNORED]
    with pytest.raises(IndexError):
        data[2]


def test_wide_token_ids_are_kept(tmp_path: Path) -> None:
    data = TokenDataset(write_tokens(tmp_path / "d", [1, 69_999, 2], "uint32"), sequence_length=2)
    assert data[0]["labels"].tolist() == [69_999, 2]


def test_fingerprint_tells_lengths_apart(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", list(range(30)))
    prints = {TokenDataset(folder, length).fingerprint for length in (4, 4, 8)}
    assert len(prints) == 2
    assert all(0 <= value < 2**63 for value in prints)


def test_missing_data_names_the_field_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: no prepared data in .*prepare-data"):
        TokenDataset(tmp_path / "absent", 4)


def test_a_cut_token_file_is_refused(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "d", list(range(10)))
    (folder / TOKENS).write_bytes((folder / TOKENS).read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data\.path: .* 19 bytes; legal: 20"):
        read_meta(folder)


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"source": "files"})])
def test_a_broken_description_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_tokens(tmp_path / "d", list(range(10)))
    (folder / META).write_text(text)
    with pytest.raises(ConfigError, match=r"data\.path"):
        read_meta(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1000])
def test_every_epoch_is_a_permutation(size: int) -> None:
    order = SampleOrder(seed=0, num_samples=size)
    for epoch in range(3):
        assert sorted(order(epoch * size + i) for i in range(size)) == list(range(size))


def test_epochs_and_seeds_have_their_own_order() -> None:
    """F16: an order that is that of epoch 0 for ever would pass for a shuffle."""
    first = [SampleOrder(0, 100)(i) for i in range(100)]
    second = [SampleOrder(0, 100)(100 + i) for i in range(100)]
    other = [SampleOrder(1, 100)(i) for i in range(100)]
    assert first != second and first != other and second != other
    assert first != list(range(100))


def test_the_order_is_well_mixed() -> None:
    """Each of 8 samples comes first about equally often over 4000 epochs (500 times, standard deviation 21)."""
    counts = Counter(SampleOrder(0, 8)(epoch * 8) for epoch in range(4000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 650 and min(counts.values()) > 350


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_ranks_share_the_same_global_batch_in_any_world(world_size: int) -> None:
    shares = [rank_positions(40, 8, rank, world_size) for rank in range(world_size)]
    assert [p for share in shares for p in share] == list(range(40, 48))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_resumed_run_sees_the_samples_of_the_straight_one() -> None:
    """F16: 32 samples, 2 ranks, global batch 4, so 8 steps an epoch; stopped after step 12, in epoch 1."""
    order, batch = SampleOrder(0, 32), 4

    def ids(first_step: int, last_step: int) -> list[int]:
        return [
            order(p)
            for step in range(first_step, last_step + 1)
            for rank in range(2)
            for p in rank_positions((step - 1) * batch, batch, rank, 2)
        ]

    straight = ids(1, 24)
    assert ids(1, 12) + ids(13, 24) == straight
    for epoch in range(3):
        assert sorted(straight[32 * epoch : 32 * (epoch + 1)]) == list(range(32))
