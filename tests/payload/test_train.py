"""The loop: what it records, and that no restart changes what it computes."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.regression_task import RegressionTask
from payload import parallel, result
from payload.checkpoint.base import CheckpointError
from payload.config import RunConfig
from payload.optim import learning_rate
from payload.state import rng_digest
from payload.train import TrainingError, train
from tests.payload.training_support import (
    PlainAttempt,
    events_of,
    losses,
    prepare_text,
    run_config,
    run_world,
    session_of,
    steps_of,
    train_alone,
    train_world,
)

DROPOUT = "examples.regression_task:build"
"""A model with dropout: it shows whether randomness is exact."""
NO_DROPOUT = "tests.payload.test_train:build_odd"


class OddTask(RegressionTask):
    """F19: the shapes 7 x 13 x 3 (one smaller than the number of ranks), no dropout, every row known."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3), nn.Tanh(), nn.Linear(3, 1))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return [model[0], model[2]]


def build_odd(config: RunConfig) -> OddTask:
    return OddTask(config)


class Faults:
    """Does something at the start of a step, once a key: what faults.Injector does by its markers."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self.actions = dict(actions)

    def __call__(self, _rank: int) -> "Faults":
        return self

    def fire(self, step: int) -> None:
        action = self.actions.pop(step, None)
        if action is not None:
            action()


class Crash(RuntimeError):
    pass


def crash() -> None:
    # Whatever a dying attempt has drawn must not shift what the next one draws.
    torch.rand(17)
    raise Crash


def sha256_of(config: RunConfig) -> str:
    values = result.read(config)
    assert values is not None and values["succeeded"]
    return str(values["sha256"])


def test_one_run_from_start_to_end(tmp_path: Path) -> None:
    """Eight steps, saves at 3, 6 and 8: the records, the pings, the lifted blocks, and the result."""
    config = run_config(tmp_path)
    prepare_text(config)
    session = session_of(config)
    attempt = train_alone(config, session)
    assert session.checkpointer.calls == ["begin_attempt", "save 3", "save 6", "save 8", "drain"]  # type: ignore[attr-defined]
    assert attempt.num_pings == 8
    assert attempt.hooks == [session.checkpointer.abandon]
    blocks = {"joining the process group", "building the model", "loading the state", "saving"}
    assert blocks < set(attempt.waits)
    assert [event["step"] for event in steps_of(config)] == list(range(1, 9))
    for event in steps_of(config):
        assert event["duration_s"] > event["data_s"] > 0
        assert event["lr"] == learning_rate(config.training, event["step"])
        assert event["generation"] == "0.0"
    assert [event["step"] for event in events_of(config, "save")] == [3, 6, 8]
    (ready,) = events_of(config, "state_ready")
    assert (ready["step"], ready["tier"]) == (0, "none")
    (end,) = events_of(config, "train_end")
    values = result.read(config)
    assert values is not None
    assert (values["succeeded"], values["step"]) == (True, 8)
    assert (end["sha256"], end["step"], end["world_size"]) == (values["sha256"], 8, 1)
    assert values["ran"]["backend"] == "gloo"
    assert (
        values["versions"]["torch"] == torch.__version__.split("+")[0]
        or values["versions"]["torch"] == torch.__version__
    )
    assert values["asked"]["checkpoint_mode"] == "sync"
    assert not dist.is_initialized()
    assert losses(config)[8] < losses(config)[1]
    session.events.close()


@pytest.mark.parametrize("task", [DROPOUT, ""])
def test_three_restarts_change_nothing(tmp_path: Path, task: str) -> None:
    """F15, F18: crashes in warm-up, right after a save, and far from one; in one process, with one session.

    Loss, learning rate and final state are those of the straight run, bit for bit.
    """
    straight = run_config(tmp_path, run_id="straight", model__task=task, training__warmup_steps=4)
    broken = straight.with_overrides({"run_id": "broken"})
    if not task:
        prepare_text(straight)
    train_alone(straight)
    session = session_of(broken, injector=Faults({2: crash, 4: crash, 6: crash}))
    for number in range(3):
        with pytest.raises(Crash):
            train_alone(broken, session, f"0.{number}")
    train_alone(broken, session, "0.3")
    session.events.close()
    assert losses(broken) == losses(straight)
    assert [e["step"] for e in steps_of(broken)] == [1, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert [e["step"] for e in events_of(broken, "state_ready")] == [0, 0, 3, 3]
    for event in steps_of(broken):
        assert event["lr"] == learning_rate(straight.training, event["step"])
        assert event["loss"] == losses(straight)[event["step"]], "a replayed step differs from the first time"
    assert sha256_of(broken) == sha256_of(straight)


def train_past_a_crash(base: RunConfig, run_id: str, crashes: bool, rank: int, world_size: int, store: Any) -> None:
    """One process entered twice where it crashes; keeps a hash of the RNG as step 8 begins."""
    config = base.with_overrides({"run_id": run_id})
    hash_file = Path(config.workdir) / f"rng-{run_id}-{rank}"
    actions: dict[int, Callable[[], None]] = {8: lambda: hash_file.write_text(rng_digest()) and None}
    session = session_of(config, rank, Faults({5: crash, **actions} if crashes else actions))
    for number in range(1 + crashes):
        attempt = PlainAttempt(dist.PrefixStore(str(number), store), rank, world_size, f"0.{number}")
        if crashes and number == 0:
            with pytest.raises(Crash):
                train(config, attempt, session)
            parallel.leave_group()
        else:
            train(config, attempt, session)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_restart_of_three_ranks_changes_nothing(tmp_path: Path, strategy: str) -> None:
    """F15: with dropout, in worlds of three; each rank has its own randomness, the same with and without a crash."""
    base = run_config(
        tmp_path, model__task=DROPOUT, parallelism__strategy=strategy, training__global_batch_size=12,
    )  # fmt: skip
    for run_id, crashes in (("straight", False), ("broken", True)):
        run_world(tmp_path / f"world-{run_id}", 3, partial(train_past_a_crash, base, run_id, crashes))
    straight, broken = (base.with_overrides({"run_id": run_id}) for run_id in ("straight", "broken"))
    for rank in range(3):
        assert losses(broken, rank) == losses(straight, rank) == losses(straight, 0)
        assert (tmp_path / f"rng-broken-{rank}").read_text() == (tmp_path / f"rng-straight-{rank}").read_text()
    assert len({(tmp_path / f"rng-straight-{rank}").read_text() for rank in range(3)}) == 3
    assert sha256_of(broken) == sha256_of(straight)


def train_until_asked_to_stop(config: RunConfig, rank: int, world_size: int, store: Any) -> None:
    """Rank 1 alone is asked, at the start of step 4."""
    session = session_of(config, rank)
    session.injector = Faults({4: session.request_stop} if rank == 1 else {})
    train(config, PlainAttempt(store, rank, world_size), session)
    assert session.stopped
    assert session.checkpointer.calls == ["begin_attempt", "save 4", "drain"]  # type: ignore[attr-defined]


@pytest.mark.timeout(300)
def test_another_world_goes_on_with_the_same_batch(tmp_path: Path) -> None:
    """F19: saved by 2 ranks after step 4, loaded by 1, 3 and 4: the next losses agree within 1e-6.

    Rank 1 alone is asked to stop, so this is the stop agreement too: both ranks stop after the same step.
    """
    base = run_config(tmp_path, model__task=NO_DROPOUT, checkpoint__interval=100)
    two = base.with_overrides({"run_id": "two"})
    run_world(tmp_path / "world-two", 2, partial(train_until_asked_to_stop, two))
    assert (
        [e["step"] for e in events_of(two, "stopping", 0)] == [4] == [e["step"] for e in events_of(two, "stopping", 1)]
    )
    assert result.read(two) is None, "a stopped run is not finished"
    for world_size in (1, 3, 4):
        shutil.copytree(two.run_dir, two.run_dir.with_name(f"to-{world_size}"))
    train_world(two, 2, tmp_path / "world-same")
    reference = losses(two)
    assert sorted(reference) == list(range(1, 9))
    for world_size in (1, 3, 4):
        config = base.with_overrides({"run_id": f"to-{world_size}"})
        train_world(config, world_size, tmp_path / f"world-{world_size}")
        ready = events_of(config, "state_ready")[-1]
        assert (ready["step"], ready["position"]) == (4, 16), "the data position is kept"
        for step in range(5, 9):
            assert losses(config)[step] == pytest.approx(reference[step], abs=1e-6), (world_size, step)


def test_the_world_size_does_not_change_a_language_models_losses(tmp_path: Path) -> None:
    """Padding lies on one rank only, a batch of 4 goes to 3 ranks; the loss is the mean over all real tokens."""
    config = run_config(tmp_path, training__learning_rate=1e-3)
    prepare_text(config)
    train_alone(config)
    three = config.with_overrides({"run_id": "three"})
    train_world(three, 3, tmp_path / "world")
    for step, loss in losses(config).items():
        assert losses(three)[step] == pytest.approx(loss, rel=1e-6)


def test_sigterm_on_the_last_step_ends_the_run_as_usual(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__task=DROPOUT)
    session = session_of(config)
    session.injector = Faults({8: session.request_stop})
    train_alone(config, session)
    session.events.close()
    assert not session.stopped
    assert sha256_of(config)


def train_into_a_failed_save(config: RunConfig, rank: int, world_size: int, store: Any) -> None:
    """Rank 1's checkpointer reports a failure from step 5 on."""
    session = session_of(config, rank)

    def fail() -> None:
        session.checkpointer.failure = "disk full"  # type: ignore[attr-defined]

    session.injector = Faults({5: fail} if rank == 1 else {})
    with pytest.raises(CheckpointError, match="save failed on 1 rank"):
        train(config, PlainAttempt(store, rank, world_size), session)


def test_a_failed_save_on_one_rank_stops_all_and_is_in_the_result(tmp_path: Path) -> None:
    """F12: the reason is in the event log of the rank and the failure in the result file."""
    config = run_config(tmp_path, model__task=DROPOUT)
    run_world(tmp_path / "world", 2, partial(train_into_a_failed_save, config))
    assert [e["step"] for e in steps_of(config, 0)] == [1, 2, 3, 4, 5] == [e["step"] for e in steps_of(config, 1)]
    assert [e["reason"] for e in events_of(config, "save_failed", 1)] == ["disk full"]
    values = result.read(config)
    assert values is not None and not values["succeeded"] and "save failed on 1 rank" in values["reason"]
    train_alone(config)
    assert sha256_of(config), "a restart overwrites the failure"


def test_a_last_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    """F12: the only save is the last step's; its writer fails while the run waits for it."""
    config = run_config(tmp_path, model__task=DROPOUT, checkpoint__interval=100)
    session = session_of(config)
    session.checkpointer.drain_error = CheckpointError("rank 0, step 8: no space left")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError):
        train_alone(config, session)
    session.events.close()
    values = result.read(config)
    assert values is not None and not values["succeeded"]
    assert values["reason"] == "rank 0, step 8: no space left"
    assert not result.is_finished(config)


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__task=DROPOUT)
    train_alone(config)
    before = result.result_path(config).read_bytes()
    session = session_of(config)
    attempt = train_alone(config, session)
    session.events.close()
    assert session.checkpointer.calls == []  # type: ignore[attr-defined]
    assert attempt.num_pings == 0
    assert result.result_path(config).read_bytes() == before
    assert len(steps_of(config)) == 8
    longer = config.with_overrides({"training.max_steps": 10})
    train_alone(longer)
    assert [e["step"] for e in steps_of(config)] == list(range(1, 11))


def test_a_run_that_lost_only_its_result_is_not_trained_again(tmp_path: Path) -> None:
    """Killed between the last save and the result: the next start hashes the loaded state and saves nothing."""
    config = run_config(tmp_path, model__task=DROPOUT)
    train_alone(config)
    sha256 = sha256_of(config)
    result.result_path(config).unlink()
    session = session_of(config)
    train_alone(config, session)
    session.events.close()
    assert session.checkpointer.calls == ["begin_attempt", "drain"]  # type: ignore[attr-defined]
    assert sha256_of(config) == sha256
    assert len(steps_of(config)) == 8


def test_other_data_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__task=DROPOUT, training__max_steps=4)
    train_alone(config)
    other = config.with_overrides({"training.max_steps": 8, "data.seed": 1})
    with pytest.raises(CheckpointError, match="belongs to other data"):
        train_alone(other)


def test_another_batch_size_keeps_the_data_position_and_is_said(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__task=DROPOUT, training__max_steps=4)
    train_alone(config)
    train_alone(config.with_overrides({"training.max_steps": 8, "training.global_batch_size": 2}))
    assert events_of(config, "state_ready")[-1]["position"] == 16
    (warning,) = events_of(config, "warning")
    assert "16 samples in 4 steps were not steps of 2" in warning["text"]
    values = result.read(config)
    assert values is not None and values["ran"]["position"] == 16 + 4 * 2


class PoisonedTask(RegressionTask):
    """From the third entry into loss() on, the loss is no number."""

    num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        self.num_calls += 1
        return (loss_sum * math.nan if self.num_calls == 3 else loss_sum), count


def build_poisoned(config: RunConfig) -> PoisonedTask:
    return PoisonedTask(config)


class EmptyTask(RegressionTask):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        return loss_sum * 0, count * 0


def build_empty(config: RunConfig) -> EmptyTask:
    return EmptyTask(config)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("build_poisoned", "step 3: loss nan"), ("build_empty", "step 1: nothing in the global batch counts")],
)
def test_a_loss_that_is_no_number_never_reaches_the_weights(tmp_path: Path, name: str, complaint: str) -> None:
    config = run_config(tmp_path, model__task=f"tests.payload.test_train:{name}", checkpoint__interval=1)
    with pytest.raises(TrainingError, match=complaint):
        train_alone(config)


def test_a_step_is_stretched_to_its_least_length(tmp_path: Path) -> None:
    config = run_config(tmp_path, model__task=DROPOUT, training__min_step_s=0.05, training__max_steps=3)
    train_alone(config)
    assert min(event["duration_s"] for event in steps_of(config)) >= 0.05


def test_the_result_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it writes: the earlier result stays."""
    config = run_config(tmp_path)
    result.write_failure(config, "first")
    monkeypatch.setattr("os.fsync", lambda _descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        result.write_success(config, 8, "0" * 64, {})
    assert json.loads(result.result_path(config).read_text())["reason"] == "first"
