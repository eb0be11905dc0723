"""prepare-data: what it makes, and that nothing half-made is ever taken for data."""

import multiprocessing
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from payload import prepare as module
from payload.config import ConfigError
from payload.data import META, TOKENS, TokenDataset, read_meta
from payload.prepare import ByteTokenizer, Request, main, prepare


def text_file(folder: Path, text: str = "One line.\nAnother one, w\u00e4ith an umlaut.\n") -> Path:
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def forked(target: Any, *args: Any) -> BaseProcess:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=target, args=args)
        process.start()
    return process


def drafts(folder: Path) -> list[Path]:
    return sorted(folder.parent.glob(f".{folder.name}.*"))


def test_bytes_of_a_file_come_back_as_text(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    meta = prepare(Request(str(path)), tmp_path / "data")
    content = path.read_bytes()
    assert (meta.num_tokens, meta.num_documents, meta.vocab_size) == (len(content) + 1, 1, 257)
    data = TokenDataset(tmp_path / "data", len(content))
    assert bytes(data[0]["tokens"].tolist()) == content
    assert data[0]["labels"][-1] == ByteTokenizer.end_of_text


def test_documents_are_separated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    prepare(Request(f"{tmp_path}/a.txt,{tmp_path}/b.txt"), tmp_path / "data")
    assert TokenDataset(tmp_path / "data", 4)[0]["tokens"].tolist() == [97, 98, 256, 99]


def test_pydoc_is_english_and_the_same_each_time(tmp_path: Path) -> None:
    first = prepare(Request("pydoc"), tmp_path / "a")
    second = prepare(Request("pydoc"), tmp_path / "b")
    assert first == second
    assert first.num_tokens > 300_000
    text = bytes(t for t in TokenDataset(tmp_path / "a", 20_000)[1]["tokens"].tolist() if t < 256).decode(
        "utf-8", "replace"
    )
    assert text.count(" the ") > 50


def test_a_folder_that_is_made_is_left_alone(tmp_path: Path) -> None:
    request = Request(str(text_file(tmp_path)))
    prepare(request, tmp_path / "data")
    before = (tmp_path / "data" / TOKENS).stat().st_mtime_ns
    text_file(tmp_path, "quite another text")
    prepare(request, tmp_path / "data")
    assert (tmp_path / "data" / TOKENS).stat().st_mtime_ns == before


def test_a_folder_of_another_request_is_refused(tmp_path: Path) -> None:
    prepare(Request(str(text_file(tmp_path))), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"--out: .*legal: a new folder"):
        prepare(Request("pydoc"), tmp_path / "data")


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("my only copy")
    with pytest.raises(ConfigError, match=r"--out: .*holds no prepared data"):
        prepare(Request(str(text_file(tmp_path))), tmp_path / "data")
    assert (tmp_path / "data" / "thesis.txt").read_text() == "my only copy"
    assert drafts(tmp_path / "data") == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    prepare(Request(str(text_file(tmp_path))), tmp_path / "data")
    assert read_meta(tmp_path / "data") is not None


@pytest.mark.parametrize("name", ["absent.txt", "binary"])
def test_an_unreadable_source_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"--source: .*{name}.*legal: c4, pydoc, or UTF-8 text files"):
        prepare(Request(str(tmp_path / name)), tmp_path / "data")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["binary"]


def test_several_pods_at_once_make_one_folder(tmp_path: Path) -> None:
    request, folder = Request(str(text_file(tmp_path, "word " * 50_000))), tmp_path / "data"
    processes = [forked(prepare, request, folder) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(p.name for p in folder.iterdir()) == [META, TOKENS]
    assert drafts(folder) == []


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at the worst moment: all tokens are written, the description is not."""
    request, folder = Request(str(text_file(tmp_path))), tmp_path / "data"

    def die(_meta: Any) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("payload.data.TokenMeta.to_json", die)
        victim = forked(prepare, request, folder)
        victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert read_meta(folder) is None
    (left,) = drafts(folder)
    assert prepare(request, folder).num_documents == 1
    assert left.exists(), "it might have belonged to a live pod"

    for path in [*left.iterdir(), left]:
        os.utime(path, (0, 0))
    module._remove_stale(folder)
    assert not left.exists()


def test_c4_is_streamed_and_cut_at_the_samples_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the hub's stream has no end: reading it whole would never come back."""
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        asked.append((args, kwargs))
        number = 0
        while True:
            number += 1
            yield {"text": f"Document {number}."}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert main(["--samples", "5", "--out", str(tmp_path / "data")]) == 0
    assert asked == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
    meta = read_meta(tmp_path / "data")
    assert meta is not None and meta.num_documents == 5


def test_c4_is_100000_samples_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []

    def record(request: Request, _folder: Path) -> Any:
        requests.append(request)
        return types.SimpleNamespace(num_documents=0, num_tokens=0, tokenizer="")

    monkeypatch.setattr(module, "prepare", record)
    main(["--out", str(tmp_path)])
    main(["--out", str(tmp_path), "--source", "pydoc"])
    assert requests == [Request("c4", "bytes", 100_000), Request("pydoc", "bytes", 0)]


def test_a_tokenizer_folder_as_saved_for_the_hub(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(
        tmp_path / "tok"
    )
    meta = prepare(Request(str(text_file(tmp_path, "one two three one")), str(tmp_path / "tok")), tmp_path / "data")
    assert (meta.vocab_size, meta.dtype) == (4, "uint16")
    assert TokenDataset(tmp_path / "data", 4)[0]["tokens"].tolist() == [2, 3, 0, 2]
    assert TokenDataset(tmp_path / "data", 4)[0]["labels"].tolist() == [3, 0, 2, 1]


def test_an_unknown_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer: .*empty.*legal: bytes, a hub id"):
        prepare(Request("pydoc", str(tmp_path / "empty")), tmp_path / "data")


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--source: .*gave no text"):
        prepare(Request(str(text_file(tmp_path, ""))), tmp_path / "data")
