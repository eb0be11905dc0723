"""prepare-data: text to a packed token file, published by one rename.

Everything is written to a folder of its own next to the target and renamed at the end, so a killed preparation
leaves nothing that is taken for complete, and of several pods that prepare at once one wins and the others find the
work done. Memory is bounded: documents are streamed, tokenised and appended.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from payload import environment, startup
from payload.config import ConfigError
from payload.data import META, TOKENS, TokenMeta, read_meta

BYTES = "bytes"
"""Name of the built-in tokenizer."""
_END_OF_TEXT = 256
_CHUNK_CHARS = 1 << 20
"""Text files are tokenised in pieces of about so many characters, cut at line ends."""
_STALE_S = 24 * 3600.0
"""An unfinished folder without a write for so long belongs to a dead process."""


class Tokenizer(Protocol):
    vocab_size: int
    """Number of token ids, the end-of-text one included."""
    end_of_text: int
    """Id put after every document."""

    def encode(self, text: str) -> Sequence[int]: ...


class ByteTokenizer:
    """UTF-8 bytes are the tokens; 256 ends a document."""

    vocab_size = _END_OF_TEXT + 1
    end_of_text = _END_OF_TEXT

    def encode(self, text: str) -> Sequence[int]:
        return text.encode()


class HubTokenizer:
    """A tokenizer of the Hugging Face hub, or of a local folder."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError where it cannot be had or has no end-of-text token."""
        from transformers import AutoTokenizer

        legal = f"{BYTES}, a hub id, or a folder that holds a tokenizer"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--tokenizer: {name!r}: {reason}; legal: {legal}") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"--tokenizer: {name!r} has no end-of-text token; legal: a tokenizer with one")
        self.end_of_text = int(self._tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


@dataclass(frozen=True)
class Request:
    """What data is asked for; a folder that was made for another request is not replaced."""

    source: str
    """``c4``, ``pydoc``, or text files separated by commas."""
    tokenizer: str = BYTES
    max_documents: int = 0
    """0: all."""


def prepare(request: Request, folder: Path) -> TokenMeta:
    """Makes ``folder`` or finds it made. Safe to call twice, and from several processes and hosts at once.

    Raises ConfigError where the folder holds other data, or the source or tokenizer cannot be had.
    """
    existing = read_meta(folder)
    if existing is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        draft.mkdir()
        try:
            _write(request, draft)
            existing = _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    found = Request(existing.source, existing.tokenizer, existing.max_documents)
    if found != request:
        raise ConfigError(f"--out: {folder} holds {found}; legal: a new folder, or one made by {request}")
    return existing


def _publish(draft: Path, folder: Path) -> TokenMeta:
    """Renames the complete draft to its place, or takes what another process has published first."""
    _sync(draft)
    try:
        draft.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        if not folder.is_dir():
            raise
        published = read_meta(folder)
        if published is None:
            raise ConfigError(f"--out: {folder} exists and holds no prepared data; legal: a new or empty folder") from (
                error
            )
    published = read_meta(folder)
    assert published is not None
    return published


def _write(request: Request, draft: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if request.tokenizer == BYTES else HubTokenizer(request.tokenizer)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    sha256, num_documents, num_tokens = hashlib.sha256(), 0, 0
    with (draft / TOKENS).open("wb") as file:
        for pieces in _documents(request):
            num_documents += 1
            for ids in [*map(tokenizer.encode, pieces), [tokenizer.end_of_text]]:
                content = np.array(list(ids), dtype=dtype).tobytes()
                file.write(content)
                sha256.update(content)
                num_tokens += len(ids)
        file.flush()
        os.fsync(file.fileno())
    if num_tokens < 2:
        raise ConfigError(f"--source: {request.source} gave no text")
    meta = TokenMeta(
        source=request.source,
        tokenizer=request.tokenizer,
        max_documents=request.max_documents,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_documents=num_documents,
        num_tokens=num_tokens,
        sha256=sha256.hexdigest(),
    )
    with (draft / META).open("w") as text:
        text.write(meta.to_json())
        text.flush()
        os.fsync(text.fileno())


def _documents(request: Request) -> Iterator[Iterable[str]]:
    """Each document as pieces of text, at most ``max_documents``."""
    if request.source == "c4":
        documents: Iterator[Iterable[str]] = _c4()
    elif request.source == "pydoc":
        documents = _pydoc()
    else:
        documents = _files(request.source.split(","))
    for number, document in enumerate(documents):
        if request.max_documents and number == request.max_documents:
            return
        yield document


def _c4() -> Iterator[Iterable[str]]:
    """The English part of C4, streamed from the hub."""
    from datasets import load_dataset

    for row in load_dataset("allenai/c4", "en", split="train", streaming=True):
        yield [row["text"]]


def _pydoc() -> Iterator[Iterable[str]]:
    """The language reference that Python ships for its help(): real English, no download."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield [topics[name]]


def _files(names: Iterable[str]) -> Iterator[Iterable[str]]:
    """One document a file. Raises ConfigError naming the file that cannot be read."""
    for name in names:
        yield _pieces(Path(name))


def _pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_CHUNK_CHARS):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--source: {path}: {error}; legal: c4, pydoc, or UTF-8 text files") from error


def _remove_stale(folder: Path) -> None:
    """Removes what killed preparations of this folder left behind a day or longer ago."""
    for draft in folder.parent.glob(f".{folder.name}.*"):
        try:
            newest = max(path.stat().st_mtime for path in [draft, *draft.iterdir()])
        except (FileNotFoundError, NotADirectoryError):
            continue  # Another process has just finished or removed it, or it is a user's file.
        if time.time() - newest > _STALE_S:
            shutil.rmtree(draft, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: Sequence[str]) -> int:
    """``prepare-data``: returns the exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m payload prepare-data", description=__doc__.split("\n")[0])
    parser.add_argument("--source", nargs="+", default=["c4"], help="c4, pydoc, or text files (default: c4)")
    parser.add_argument("--tokenizer", default=BYTES, help=f"{BYTES} or a hub id (default: {BYTES})")
    parser.add_argument("--samples", type=int, default=None, help="documents; 0: all (default: 100000 of c4, else all)")
    parser.add_argument("--out", type=Path, required=True, help="data folder (data.path of the run)")
    given = parser.parse_args(argv)
    source = ",".join(given.source)
    samples = given.samples if given.samples is not None else (100_000 if source == "c4" else 0)
    if samples < 0:
        raise ConfigError(f"--samples: {samples}; legal: 0 (all) or more")
    startup.load_token(environment.token_secret())
    meta = prepare(Request(source, given.tokenizer, samples), given.out)
    sys.stdout.write(f"{given.out}: {meta.num_documents} documents, {meta.num_tokens} tokens ({meta.tokenizer})\n")
    return 0
