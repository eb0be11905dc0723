"""The command line: what it takes, how it refuses, what render prints; the demo's plan and the live view."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from payload import cli, commands, settings
from payload.config import ARMS, ConfigError, RunConfig
from payload.faults import assert_same_schedule, schedule
from payload.live import LiveView, Tail
from payload.local import JobResult
from payload.manifests import CONFIG_KEY

CHECKOUT = Path(__file__).parents[2]
ARTICLE = ["--fault_count=5", "--fault_seed=42", "--fault_types=exception,hang", "--fault_type_weights=0.6,0.4"]


def parsed(*argv: str) -> settings.Settings:
    return settings.arguments(argv, settings.parser("test", "test"))


def test_the_articles_flags_work_verbatim() -> None:
    config = parsed(*ARTICLE, "--max_steps=2000", "--checkpoint_interval", "500").config
    assert (config.faults.count, config.faults.seed) == (5, 42)
    assert config.faults.types == ("exception", "hang") and config.faults.type_weights == (0.6, 0.4)
    assert (config.training.max_steps, config.checkpoint.interval) == (2000, 500)


def test_dashes_switches_and_set() -> None:
    config = parsed("--fault-count=3", "--fresh-start", "--set", "timeouts.soft_s=2.5", "--arm", "in-job").config
    assert config.faults.count == 3 and config.checkpoint.fresh_start is True
    assert config.timeouts.soft_s == 2.5 and config.recovery.arm == "in-job"
    assert parsed("--fault_include_rank0=false").config.faults.include_rank0 is False


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["nonsense"], "command 'nonsense'; legal: demo, run"),
        (["render", "--profile", "none"], "--profile: 'none'; legal: "),
        (["render", "--profile", "./none.toml"], "none.toml: No such file"),
        (["render", "--max_step=5"], "unrecognized arguments: --max_step=5"),
        (["render", "--set", "x"], "--set: 'x'; legal: FIELD=VALUE"),
        (["render", "--set", "training.steps=5"], "training.steps: unknown field"),
        (["render", "--fault_types=oom"], "faults.types.0: 'oom'; legal: 'exception'"),
        (["run", "--max_steps=0"], "training.max_steps: 0; legal"),
        (["demo", "--arm=layered"], "--arm: the demo sets it"),
        (["demo", "--tables=4"], "--tables: '4'; legal"),
    ],
)
def test_refuses_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert expected in err and len(err.splitlines()) == 1 and out == ""


def test_the_package_runs_as_a_module() -> None:
    """Both problems, one line each, and the exit code of the process."""
    done = subprocess.run(
        [sys.executable, "-m", "payload", "render", "--max_steps=0", "--fault_count=-1"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["training.max_steps", "faults.count"]


@pytest.mark.parametrize("profile", ["local", "kind", "p5"])
def test_render_prints_what_kubectl_applies(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    assert cli.main(["render", "--profile", profile, *ARTICLE]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [item["kind"] for item in objects] == ["ConfigMap", "Service", "Job"]
    config = RunConfig.from_json(objects[0]["data"][CONFIG_KEY])
    assert config == parsed("--profile", profile, *ARTICLE).config
    assert cli.main(["render", "--profile", profile, "--data"]) == 0
    job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][:4] == [
        "python",
        "-m",
        "payload",
        "prepare-data",
    ]


def test_every_command_exists_and_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in cli.COMMANDS)
    assert cli.main([]) == 2
    for target in cli.COMMANDS.values():
        module, _, function = target.partition(":")
        assert (CHECKOUT / (module.replace(".", "/") + ".py")).exists() and function


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[local]\nspeed = 1\n", "local.speed: unknown field; legal here: root, shm_mib, speedup"),
        ("[local]\nspeedup = 0\n", "local.speedup: 0; legal: a number from 1 on"),
        ("[local]\nroot = ''\n", "local.root: ''; legal: a folder"),
        ("[deployment]\nnamespace = 'x'\n", "deployment.image: missing"),
        ("[deployment]\nimage = 'x'\ngpus = 1\n", "deployment.gpus: unknown field; legal here: "),
        ("[deployment]\nimage = 'x'\nshm_mib = '1'\n", "deployment.shm_mib: '1'; legal: a value of type int"),
        ("[deployment]\nimage = 'x'\n[[deployment.tolerations]]\nk = 1\n", "deployment.tolerations: "),
    ],
)
def test_a_profiles_own_tables_are_checked(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nrun_id = 'x'\n" + text)
    with pytest.raises(ConfigError) as refused:
        parsed("--profile", str(path))
    assert expected in str(refused.value) and str(path) in str(refused.value)


def test_the_demo_gives_all_arms_of_a_table_the_same_faults() -> None:
    from payload.demo import KILL_ARMS, plan

    first, second, third = plan(parsed().config)
    assert [config.recovery.arm for config in first.configs] == list(ARMS)
    drawn = assert_same_schedule(first.configs)
    assert len(drawn) == 5 and {spec.type for spec in drawn} == {"exception", "hang"}
    assert drawn == schedule(parsed(*ARTICLE).config), "through the article's flags"
    assert [config.recovery.arm for config in second.configs] == list(KILL_ARMS)
    kills = assert_same_schedule(second.configs)
    assert {spec.type for spec in kills} == {"sigkill"} and 0 in {spec.rank for spec in kills}
    run_ids = [config.run_id for item in (first, second) for config in item.configs]
    assert len(set(run_ids)) == 7
    without, with_memory = third.configs
    assert without in first.configs and assert_same_schedule(third.configs) == drawn
    assert (without.checkpoint.memory_interval, with_memory.checkpoint.memory_interval) == (0, 5)


def record(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, **fields}) + "\n"


def test_a_tail_gives_whole_records_once(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text(record("a") + '{"kind": "b"')
    assert [item["kind"] for item in tail.read()] == ["a"]
    with path.open("a") as file:
        file.write("}\n{torn\n" + record("c"))
    assert [item["kind"] for item in tail.read()] == ["b", "c"]


def test_the_live_view_counts_only_surviving_steps(tmp_path: Path) -> None:
    config = RunConfig().with_overrides({"workdir": str(tmp_path), "parallelism.device": "cpu"})
    config.events_dir.mkdir(parents=True)
    lines = [record("process_start", started_wall=time.time() - 1000.0)]
    lines += [record("step", step=step, duration_s=100.0, loss=1.0) for step in (1, 2, 3, 4, 3)]
    (config.events_dir / "rank0.jsonl").write_text("".join(lines))
    (config.events_dir / "rank1.jsonl").write_text(record("fault", step=5, rank=1, type="hang"))
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with LiveView(config, "run", console) as view:
        view.poll()
        view.job_event("pod_start", {"index": 1, "restart_count": 2})
        view.job_event("pod_start", {"index": 1, "restart_count": 0})
        assert view.step == 3
        assert 0.25 < view.goodput < 0.31, "three steps of 100 s in a little more than 1000 s"
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "  run: fault: hang on rank 1 at step 5",
        "  run: pod 1: container restart 2",
    ]


class Asked:
    """Stands for a cluster with a Job that runs."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def request(self, what: str, index: int = 0) -> None:
        self.requests.append(what)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_deletes_the_job_and_ends_the_command_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked, after = Asked(), []
    with pytest.raises(KeyboardInterrupt), commands.stopping(asked):  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
        after.append("the job ended")
    assert asked.requests == ["job-delete"] and after == ["the job ended"]
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait() -> None:
    asked, after = Asked(), []
    with pytest.raises(KeyboardInterrupt), commands.stopping(asked):  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        after.append("not reached")
    assert asked.requests == ["job-delete"] and after == []


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_command", interrupted)
    assert cli.main(["run"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_failed_run_shows_the_end_of_the_last_output(tmp_path: Path) -> None:
    (tmp_path / "pod0-a-0.log").write_text("first\n" * 50 + "Traceback: the reason\n")
    result = JobResult(False, "BackoffLimitExceeded", 2, 1, 0.0, 0.0, 3.0, tmp_path)
    text = commands.describe(result)
    assert text.startswith("failed: BackoffLimitExceeded (2 container restarts, 1 pod replacements, 3.0 s)")
    assert text.endswith("  Traceback: the reason") and len(text.splitlines()) < 20
