"""A user's own task: how it is named, and the example of docs/task.md trained for real."""

import sys
from pathlib import Path

import pytest
import torch

from examples.regression_task import Network, RegressionTask
from payload.config import ConfigError, RunConfig
from payload.task import collate, load_task
from tests.payload.training_support import losses, run_config, train_alone


def with_task(name: str) -> RunConfig:
    return RunConfig().with_overrides({"model.task": name})


def test_the_example_is_loaded_by_name() -> None:
    task = load_task(with_task("examples.regression_task:build"))
    assert isinstance(task, RegressionTask)
    assert len(list(task.layers(task.build_model()))) == 3


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("examples.regression_task", "legal: package.module:build"),
        (":build", "legal: package.module:build"),
        ("examples.absent:build", "no module 'examples.absent'"),
        ("absent_package.task:build", "no module 'absent_package'"),
        ("examples.regression_task:absent", "has no function 'absent'"),
        ("examples.regression_task:Block", "returned Block; legal: a payload.task.Task"),
    ],
)
def test_a_wrong_name_is_explained(name: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.regression_task.Block.__init__", lambda _self, _config: None)
    with pytest.raises(ConfigError, match=f"model.task: .*{complaint}"):
        load_task(with_task(name))


def test_an_import_that_fails_inside_the_users_module_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_task.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        load_task(with_task("broken_task:build"))
    sys.modules.pop("broken_task", None)


def test_default_layers_are_the_members_of_the_outermost_lists() -> None:
    class Plain(RegressionTask):
        layers = load_task.__globals__["Task"].layers

    model = torch.nn.Sequential(Network(), torch.nn.Linear(1, 1))
    assert list(Plain(RunConfig()).layers(model)) == list(model[0].blocks)


def test_collate_stacks_by_name() -> None:
    batch = collate(({"x": torch.full((2,), i)} for i in range(3)), torch.device("cpu"))
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_the_example_trains_without_any_token_file(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, model__task="examples.regression_task:build", training__max_steps=60, training__global_batch_size=16
    )
    train_alone(config)
    loss = losses(config)
    assert sum(loss[step] for step in range(51, 61)) < 0.8 * sum(loss[step] for step in range(1, 11))
