"""The life of a worker process: what it records, and with which code it ends."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from payload import checkpoint, parallel, recovery, worker
from payload.config import EXIT_BAD_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED, ConfigError, RunConfig
from payload.environment import WorkerEnvironment
from payload.events import read_events
from tests.payload.training_support import PlainAttempt, SimpleCheckpointer, events_of, run_config, steps_of

TASK = "examples.regression_task:build"


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def environment_of(config: RunConfig, warm: bool = False) -> WorkerEnvironment:
    return WorkerEnvironment(
        config=config, rank=0, world_size=1, local_rank=0, pod_index=0, cycle=3, store_host="127.0.0.1",
        store_port=1, node_name="node", runner_dir=None, warm=warm,
    )  # fmt: skip


class OneEntry:
    """An arm that enters train() once, in a world of one; ``before`` runs first."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before

    def run(self, train: Callable[[Any], None]) -> None:
        self.before()
        try:
            train(PlainAttempt(dist.HashStore(), generation="3.0"))
        finally:
            parallel.leave_group()


def run_worker(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None
) -> tuple[int, list[SimpleCheckpointer]]:
    made: list[SimpleCheckpointer] = []

    def build(config: RunConfig, _events: Any, *, device: Any) -> SimpleCheckpointer:
        assert device.type == "cpu"
        config.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        made.append(SimpleCheckpointer(config.checkpoint_dir))
        return made[-1]

    monkeypatch.setattr(checkpoint, "build", build, raising=False)
    monkeypatch.setattr(recovery, "build", lambda *_args: OneEntry(before))
    return worker.run(environment_of(config)), made


def kinds(config: RunConfig) -> list[str]:
    return [event.kind for event in read_events(config.events_dir).of("rank0")]


def test_a_whole_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, model__task=TASK)
    code, (checkpointer,) = run_worker(config, monkeypatch)
    assert code == 0
    found = kinds(config)
    assert found[:6] == ["process_start", "imports_done", "attempt", "group_ready", "model_ready", "state_ready"]
    assert found[-4:] == ["save", "drain", "train_end", "process_end"]
    assert checkpointer.calls[-1] == "close"
    (start,) = events_of(config, "process_start")
    assert (start["warm"], start["cycle"]) == (False, 3)
    assert start["started_wall"] < start.wall
    assert events_of(config, "process_end")[0]["code"] == 0
    code, made = run_worker(config, monkeypatch)
    assert (code, made) == (0, []), "a finished run is not even set up"


def test_planned_faults_fire_from_inside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The injector that the config asks for: once, and the next start goes on past the step."""
    fault = {"step": 5, "rank": 0, "type": "exception"}
    config = run_config(tmp_path, model__task=TASK, faults__schedule=[fault])
    code, (checkpointer,) = run_worker(config, monkeypatch)
    assert code == 1
    assert checkpointer.calls[-1] == "close"
    assert events_of(config, "process_end")[0]["code"] == 1
    code, _ = run_worker(config, monkeypatch)
    assert code == 0
    assert [event["step"] for event in events_of(config, "fault")] == [5]
    assert [event["step"] for event in steps_of(config)] == [1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_sigterm_saves_and_leaves_with_143(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal, before the first step is done: one step, one save, and the next start goes on from there."""
    config = run_config(tmp_path, model__task=TASK)
    code, (checkpointer,) = run_worker(config, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert code == EXIT_STOPPED == 143
    assert checkpointer.calls == ["begin_attempt", "save 1", "drain", "close"]
    assert [event["step"] for event in events_of(config, "stopping")] == [1]
    assert run_worker(config, monkeypatch)[0] == 0
    assert [event["step"] for event in steps_of(config)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("anything"), 1), (SystemExit(EXIT_NO_PROGRESS), EXIT_NO_PROGRESS), (SystemExit("text"), 1)],
)
def test_what_the_arm_raises_becomes_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    config = run_config(tmp_path, model__task=TASK)

    def fail() -> None:
        raise error

    assert run_worker(config, monkeypatch, fail)[0] == code
    assert events_of(config, "process_end")[0]["code"] == code


def test_a_refused_config_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = run_config(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.path: no prepared data"):
        run_worker(config, monkeypatch)
    assert events_of(config, "process_end")[0]["code"] == EXIT_BAD_CONFIG
    codes: list[int] = []
    monkeypatch.setattr(WorkerEnvironment, "read", classmethod(lambda cls: environment_of(config)))
    monkeypatch.setattr(os, "_exit", codes.append)
    worker.main()
    assert codes == [EXIT_BAD_CONFIG]
    assert "data.path: no prepared data" in capsys.readouterr().err
