"""The node-memory tier: whoever dies when, all ranks find one whole snapshot in common, or the durable save."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.payload.checkpoint_world import World, world


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("memory"), size=2, num_writers=2) as made:
        yield made


def test_in_process_restart_finds_the_newest_snapshot(ranks: World) -> None:
    assert ranks.run("same_process") == [(5, "memory")] * 2


def test_new_process_maps_what_the_dead_one_left(ranks: World) -> None:
    assert ranks.run("new_process") == [(3, "memory")] * 2


def test_ranks_a_snapshot_apart_agree_on_the_older(ranks: World) -> None:
    """Dead between copy and publication; the rank that was ahead forgets the other history."""
    assert ranks.run("apart") == [(3, "memory")] * 2


def test_half_written_slot_is_never_read(ranks: World) -> None:
    assert ranks.run("half_written") == [(3, "memory")] * 2


def test_corrupted_slot_is_found_by_its_checksum(ranks: World) -> None:
    (step, tier, texts), (*other, _) = ranks.run("corrupted", False)
    assert (step, tier) == (3, "memory") == tuple(other)
    assert texts == ["skipped: snapshot of step 4 of rank 1: content does not match its checksum"]


def test_durable_save_is_used_where_memory_is_damaged(ranks: World) -> None:
    (step, tier, texts), (*other, _) = ranks.run("corrupted", True)
    assert (step, tier) == (2, "durable") == tuple(other)
    assert len(texts) == 3


def test_pod_that_lost_its_memory_makes_all_take_the_durable_save(ranks: World) -> None:
    assert ranks.run("lost_pod") == [(2, "durable")] * 2


def test_durable_save_takes_the_snapshot(ranks: World) -> None:
    """Stage once: the slot is leased while others rotate."""
    assert ranks.run("stage_once") == [[2, 9, 10, 11]] * 2


def test_lapping_waits_and_keeps_a_common_snapshot(ranks: World) -> None:
    """A slot is reused only when every rank has published a newer step."""
    for behind in ranks.run("lapped"):
        assert min(behind) >= -2


def test_leftovers_of_other_runs_are_removed(ranks: World) -> None:
    """But not those of a run that is alive."""
    assert ranks.run("leftovers") == [["alive", "run"]] * 2


def test_too_small_a_volume_is_refused_at_start_on_all_ranks(ranks: World) -> None:
    for text in ranks.run("no_room"):
        assert "checkpoint.memory_dir: rank 1" in text and "4 slots of" in text and "legal:" in text


def test_save_of_a_step_without_snapshot_makes_one(ranks: World) -> None:
    assert ranks.run("without_snapshot") == [(7, "memory")] * 2


def test_lost_pod_comes_back_from_its_replica(ranks: World) -> None:
    """No read of the durable save, and not one step more than the newest snapshot is lost."""
    assert ranks.run("replica") == [(4, "memory"), (4, "replica")]


def test_damaged_replica_is_found_by_its_checksum(ranks: World) -> None:
    assert ranks.run("damaged_replica") == [(2, "durable")] * 2


def test_replica_of_a_stranger_is_refused(ranks: World) -> None:
    assert ranks.run("stranger") == [[""]] * 2
