"""The prepared token file and the order in which its samples are trained on.

A data folder holds ``tokens.bin`` (one flat array) and ``meta.json``; prepare.py makes it and publishes it by one
rename. The order is a pure function of (seed, position in the run): nothing about it has to be saved but the number
of samples that the run has consumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from payload.config import ConfigError

TOKENS = "tokens.bin"
META = "meta.json"
IGNORED = -100
"""Label of a position that does not count in the loss (the default ignore_index of torch's cross entropy)."""

_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class TokenMeta:
    """What ``meta.json`` says of the token file."""

    source: str
    """``c4``, ``pydoc`` or the names of the text files."""
    tokenizer: str
    """``bytes`` or a hub id."""
    max_documents: int
    """Documents asked for; 0: all."""
    vocab_size: int
    dtype: str
    """``uint16`` or ``uint32``, little-endian."""
    num_documents: int
    num_tokens: int
    sha256: str
    """Of the token file."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def read_meta(folder: Path) -> TokenMeta | None:
    """None where the folder holds no prepared data. Raises ConfigError where it holds something else."""
    try:
        text = (folder / META).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        meta = TokenMeta(**json.loads(text))
        size_bytes = (folder / TOKENS).stat().st_size
        expected_bytes = meta.num_tokens * np.dtype(meta.dtype).itemsize
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"data.path: {folder} holds no valid token file: {error}; legal: what prepare-data made"
        ) from (error)
    if size_bytes != expected_bytes:
        raise ConfigError(
            f"data.path: {folder / TOKENS} has {size_bytes} bytes; legal: {expected_bytes}, as {META} says. "
            "Remove the folder and run prepare-data again"
        )
    return meta


class TokenDataset:
    """Packed samples of ``sequence_length`` tokens with the next token as label, memory-mapped.

    Documents follow one another without gaps, so only the last sample has padding; its labels there are IGNORED.
    """

    def __init__(self, folder: Path, sequence_length: int) -> None:
        """Raises ConfigError naming data.path."""
        meta = read_meta(folder)
        if meta is None:
            raise ConfigError(f"data.path: no prepared data in {folder}; legal: a folder made by prepare-data")
        if meta.num_tokens < 2:
            raise ConfigError(f"data.path: {folder} holds {meta.num_tokens} tokens; legal: 2 or more")
        self.meta = meta
        self.sequence_length = sequence_length
        dtype = np.dtype(meta.dtype).newbyteorder("<")
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(folder / TOKENS, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return -(-(self.meta.num_tokens - 1) // self.sequence_length)

    @property
    def fingerprint(self) -> int:
        return fingerprint(self.meta.sha256, str(self.sequence_length))

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = index * self.sequence_length
        window = np.asarray(self._tokens[first : first + self.sequence_length + 1], dtype=np.int64)
        num_real = len(window) - 1
        tokens = torch.zeros(self.sequence_length, dtype=torch.int64)
        labels = torch.full((self.sequence_length,), IGNORED, dtype=torch.int64)
        tokens[:num_real] = torch.from_numpy(window[:-1])
        labels[:num_real] = torch.from_numpy(window[1:])
        return {"tokens": tokens, "labels": labels}


def fingerprint(*parts: str) -> int:
    """A number of 63 bits that stands for ``parts``."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class SampleOrder:
    """The endless sequence of sample numbers: epoch after epoch, each in its own order.

    Position p of the run lies in epoch p // num_samples. The order of an epoch is a permutation keyed by (seed,
    epoch), computed for one position at a time: no memory, and no cost of starting in the middle.
    """

    seed: int
    num_samples: int

    def __call__(self, position: int) -> int:
        epoch, place = divmod(position, self.num_samples)
        return permuted(place, self.num_samples, fingerprint("order", str(self.seed), str(epoch)))


def permuted(place: int, size: int, key: int) -> int:
    """The image of ``place`` under a permutation of range(size) chosen by ``key``.

    A balanced Feistel network over the next even power of two, walked until it lands inside the range (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): fewer than four rounds of walking on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key + turn * 0x9E3779B97F4A7C15 + right) & mask)
        place = left << half_bits | right
        if place < size:
            return place


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def rank_positions(first: int, global_batch_size: int, rank: int, world_size: int) -> range:
    """The rank's share of the global batch that begins at position ``first`` of the run.

    The shares of all ranks, in rank order, are the global batch, whatever the world size; where it does not divide,
    they differ by one sample at most.
    """
    low = rank * global_batch_size // world_size
    high = (rank + 1) * global_batch_size // world_size
    return range(first + low, first + high)
