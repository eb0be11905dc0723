"""The durable tier: a save is complete on all ranks or invisible, whatever goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from payload import checkpoint
from payload.checkpoint import stage
from payload.checkpoint.base import CheckpointError
from payload.config import ConfigError, RunConfig
from tests.payload.checkpoint_world import World, world

MODES = ["sync", "async", "async-local"]
ASYNC = ["async", "async-local"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("checkpoint"), size=4, num_writers=2) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_save_is_found_whole(ranks: World, mode: str) -> None:
    assert ranks.run("round_trip", mode) == [["step-00000005"]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_save_holds_the_state_of_its_step(ranks: World, mode: str) -> None:
    """F01: what training does while the save is being written does not get into it."""
    ranks.run("snapshot", mode)


@pytest.mark.parametrize("mode", ASYNC)
def test_abandoned_save_never_appears(ranks: World, mode: str) -> None:
    """F03: neither by itself nor in the next attempt's save."""
    assert ranks.run("abandoned", mode) == [["step-00000015"]] * 2


def test_folder_without_manifest_is_named_and_skipped(ranks: World) -> None:
    """F04."""
    first, second = ranks.run("unmarked")
    assert first[:2] == [
        "checkpoint skipped: .draft-00000020-dead: a save that was never completed, removed",
        "checkpoint skipped: step-00000020: no manifest.json, so it was never completed",
    ]
    assert first[2:] == second == ["step-00000010", "step-00000020", "step-00000020.1"]


def test_resumes_from_the_last_complete_save(ranks: World) -> None:
    """F05: async saves are found by the next process."""
    assert ranks.run("killed_run") == [20, 20]


def test_content_without_a_valid_save_needs_fresh_start(ranks: World) -> None:
    """F05: never a silent start at step 0; the old content is kept."""
    for texts in ranks.run("nothing_valid"):
        assert "runs/run/checkpoints is not empty but holds no valid save" in texts[0]
        assert "fresh_start" in texts[0]


@pytest.mark.parametrize(
    ("mode", "how", "said"),
    [
        ("sync", "half", "bytes instead of"),
        ("sync", "empty", "0 bytes instead of"),
        ("sync", "index", ".metadata: missing"),
        ("sync", "overwritten", "content does not match its checksum"),
        ("async-local", "half", "bytes instead of"),
        ("async-local", "overwritten", "content does not match its checksum"),
    ],
)
def test_damaged_save_is_named_and_the_one_before_is_used(ranks: World, mode: str, how: str, said: str) -> None:
    """F07."""
    first, second = ranks.run("damaged", how, mode)
    assert len(first) == 1 and second == []
    assert "checkpoint skipped: step-00000020/" in first[0] and said in first[0]
    shard = {"sync": "__1_0.distcp", "async-local": "rank-1.pt"}[mode]
    assert how == "index" or shard in first[0]


def test_run_with_only_damaged_saves_does_not_start_over(ranks: World) -> None:
    for text in ranks.run("all_damaged"):
        assert "step-00000010: damaged" in text


@pytest.mark.parametrize(("keep", "mode"), [(1, "sync"), (2, "sync"), (1, "async"), (2, "async")])
def test_retention_always_leaves_a_complete_save(ranks: World, keep: int, mode: str) -> None:
    """F08: at every instant; what it does not know stays, what a killed save left goes."""
    kept = [f"step-0000000{step}" for step in range(6 - keep, 6)]
    assert ranks.run("retention", keep, mode) == [["notes-of-a-human", *kept]] * 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_at_the_rename(ranks: World, mode: str) -> None:
    """F09: reported, nothing published, and the step can be saved again, even over a finished one."""
    for reasons in ranks.run("full_at_rename", mode):
        assert any(reason and "No space left on device" in reason for reason in reasons)


@pytest.mark.parametrize("mode", ASYNC)
def test_full_disk_in_a_writer_thread(ranks: World, mode: str) -> None:
    """F10."""
    for reasons in ranks.run("full_disk", mode):
        assert reasons[0] is None
        assert "save of step 20 failed" in str(reasons[1]) and "No space left on device" in str(reasons[1])


def test_last_save_is_waited_for(ranks: World) -> None:
    """F12 (i)."""
    assert min(ranks.run("slow_last_save", "async")) > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_failure_of_the_last_save_is_an_error_on_all_ranks(ranks: World, mode: str) -> None:
    """F12 (ii)."""
    for text in ranks.run("failing_last_save", mode):
        assert "save of step 7 failed" in text and "No space left on device" in text and "rank 0" in text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_other_world_sizes_load_it(ranks: World, mode: str) -> None:
    """F19: also where a dimension is smaller than the number of ranks."""
    ranks.run("reshard", mode, size=4)


def test_local_layout_refuses_another_world_size(ranks: World) -> None:
    for (text,) in ranks.run("wrong_world", size=3):
        assert "saved by 2 ranks in mode async-local, cannot be loaded by 3" in text


def test_failing_reader_is_an_error_on_all_ranks(ranks: World) -> None:
    """F23: never taken for 'nothing was saved'."""
    for text in ranks.run("failing_reader", size=3):
        assert "rank 2" in text and "step-00000010" in text and "Input/output error" in text


def test_slow_reader_is_named_within_the_limit(ranks: World) -> None:
    """F23."""
    first, _, _ = ranks.run("slow_reader", size=3)
    assert "reading" in first and "step-00000010" in first and "anks 1 failed to pass" in first


def test_dead_writer_is_an_error_not_a_hang(ranks: World) -> None:
    for reasons in ranks.run("dead_writer"):
        assert reasons[0] is None and "died (exit code -9)" in str(reasons[1])


def test_state_of_lists_of_tensors_is_refused() -> None:
    """torch DCP would flatten them under names of its own."""
    with pytest.raises(CheckpointError, match=r"state: a\.b is a list of tensors; legal: dicts"):
        stage.local_tensors({"a": {"b": [torch.zeros(1)]}})


def test_async_mode_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: never a silent sync."""
    for name in ("asynchronous", "job", "planning", "writer"):
        monkeypatch.delitem(sys.modules, f"payload.checkpoint.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    for name in [name for name in sys.modules if name.startswith("nvidia_resiliency_ext.checkpointing")]:
        monkeypatch.setitem(sys.modules, name, None)
    config = RunConfig().with_overrides({"checkpoint.mode": "async"})
    with pytest.raises(ConfigError, match=r"checkpoint.mode: async, which needs nvidia-resiliency-ext .*legal here"):
        checkpoint.build(config, None, device=torch.device("cpu"))  # type: ignore[arg-type]
