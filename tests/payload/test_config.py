"""RunConfig: what is legal, what is refused and how, and the way through JSON and the command line."""

from pathlib import Path
from typing import Any

import pytest

from payload.config import FLAGS, ConfigError, FaultSpec, RunConfig, load_profile, merge, parse_value


def test_survives_json_unchanged() -> None:
    config = RunConfig().with_overrides(
        {"faults.schedule": [{"step": 3, "rank": 1, "type": "hang"}], "training.learning_rate": 3e-4}
    )
    assert RunConfig.from_json(config.to_json()) == config
    assert config.faults.schedule == (FaultSpec(step=3, rank=1, type="hang"),)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"training.max_stepz": 5}, "training.max_stepz: unknown field; legal here: beta1,"),
        ({"faults.schedule": [{"step": 1, "rank": 1, "type": "hang", "at": 1}]}, "at: unknown field; legal here: rank"),
        ({"typo": 1}, "typo: unknown field; legal here: checkpoint,"),
        ({"training.max_steps": 0}, "training.max_steps: 0; legal: greater than or equal to 1"),
        ({"training.max_steps": "many"}, "training.max_steps: 'many'; legal: a valid integer"),
        ({"recovery.arm": "torchft"}, "recovery.arm: 'torchft'; legal: 'kubernetes', 'in-process', 'in-job' or"),
        ({"faults.types": ["oom"]}, "faults.types.0: 'oom'; legal: 'exception', 'hang'"),
        ({"faults.types": []}, "faults.types: empty; legal: exception,"),
        ({"faults.types": ["hang"], "faults.type_weights": [1, 2]}, "faults.type_weights: 2 weights for 1 types"),
        ({"faults.type_weights": [0]}, "faults.type_weights: all zero"),
        ({"faults.count": 1, "faults.mtbf_s": 5}, "faults.schedule: give one of count, mtbf_s and schedule"),
        ({"faults.count": 91}, "faults.count: 91; legal: 0 to 90"),
        (
            {"faults.schedule": [{"step": 101, "rank": 1, "type": "hang"}]},
            "faults.schedule[0].step: 101; legal: 1 to 100",
        ),
        ({"faults.schedule": [{"step": 1, "rank": 4, "type": "hang"}]}, "faults.schedule[0].rank: 4; legal: 0 to 3"),
        ({"run_id": "Run_1"}, "run_id: 'Run_1'; legal: up to 40"),
        ({"run_id": "a" * 41}, "legal: up to 40"),
        ({"workdir": "fsx"}, "workdir: 'fsx'; legal: an absolute path"),
        ({"timeouts.soft_s": 60}, "legal: soft_s < hard_s < barrier_s"),
        ({"timeouts.hard_s": 120}, "legal: soft_s < hard_s < barrier_s"),
        ({"timeouts.heartbeat_s": 30}, "timeouts.heartbeat_s: 30; legal: more than soft_s (30) in the layered arm"),
        ({"timeouts.initial_heartbeat_s": 80}, "timeouts.initial_heartbeat_s: 80; legal: at least heartbeat_s (90)"),
        ({"training.global_batch_size": 6}, "training.global_batch_size: 6; legal: a multiple of the world size (4)"),
        ({"training.warmup_steps": 100}, "training.warmup_steps: 100; legal: less than max_steps (100)"),
        ({"recovery.min_world_size": 5}, "recovery.min_world_size: 5; legal: 0 (all) to 4"),
        ({"checkpoint.memory_interval": 7}, "checkpoint.interval: 50; legal: a multiple of checkpoint.memory_interval"),
        ({"checkpoint.replicate": True}, "checkpoint.replicate: true; legal: true only with memory_interval > 0"),
        (
            {"parallelism.num_nodes": 1, "parallelism.ranks_per_node": 1, "faults.count": 1},
            "faults.include_rank0: false; legal: true in a world of one rank",
        ),
    ],
)
def test_refuses_with_one_line_that_names_field_and_legal_values(overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig().with_overrides(overrides)
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_names_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig().with_overrides({"run_id": "", "workdir": "x"})
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == ["run_id", "workdir"]


def test_the_articles_flags_reach_their_fields() -> None:
    flags = {"fault_count": "5", "fault_seed": "42", "fault_types": "exception,hang", "fault_type_weights": "0.6,0.4"}
    flags |= {"max_steps": "2000", "checkpoint_interval": "500"}
    config = RunConfig().with_overrides({FLAGS[name]: parse_value(FLAGS[name], text) for name, text in flags.items()})
    assert config.faults.count == 5 and config.faults.seed == 42
    assert config.faults.types == ("exception", "hang") and config.faults.type_weights == (0.6, 0.4)
    assert config.training.max_steps == 2000 and config.checkpoint.interval == 500


def test_every_flag_names_a_field() -> None:
    fields = RunConfig().model_dump(mode="json")
    for flag, dotted in FLAGS.items():
        section = fields
        for part in dotted.split("."):
            assert part in section, f"--{flag} names {dotted}"
            section = section[part]


def test_a_key_does_not_lead_through_a_plain_value() -> None:
    with pytest.raises(ConfigError, match=r"run_id\.x: run_id is not a section"):
        merge(RunConfig().model_dump(mode="json"), {"run_id.x": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run = [", "not TOML"),
        ("[other]\n", "no [run] table"),
        ("[run]\nrun_id = 'A'\n", "run.run_id: 'A'; legal:"),
        ("[run.training]\nsteps = 1\n", "run.training.steps: unknown field"),
    ],
)
def test_a_bad_profile_names_file_and_field(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_profile(path)
    assert str(path) in str(refused.value) and expected in str(refused.value)


def test_a_missing_profile_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="run config: not"):
        RunConfig.from_json(text)
