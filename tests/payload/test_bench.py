"""The benchmark's plan, its resumption, and the tables made from its file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from payload import bench, bench_table, disk, matrix, settings
from payload.config import RunConfig
from payload.local import JobResult, LocalCluster
from payload.recovery_marks import PHASES

CONFIG = RunConfig().with_overrides({"faults.schedule": []})


def recovery(kind: str, rank: int, seconds: float) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0.125)
    return {"type": kind, "rank": rank, "recovery_s": seconds, "phases_s": phases, "tier": "memory"}


def summary(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "checkpoint_mode": "async",
        "world_size": 4,
        "final_step": 60,
        "step_s": 0.1,
        "recoveries": [],
        "saves": [{"blocking_s": 2.0, "write_s": 0.5}, {"blocking_s": 0.01, "write_s": 0.5}],
        "snapshots_s": [],
        "restores": [],
        "size_bytes": 10**9,
        "training_goodput": 0.5,
        "training_goodput_from_first_step": 0.75,
        "num_replayed_steps": 7,
        "sha256": "a",
        "versions": {"torch": "2.13.0"},
    }
    return values | changes


def results(**cases: Any) -> dict[str, Any]:
    return {
        "command": "python -m payload bench recovery",
        "machine": {"num_cpus": 2, "memory_gib": 24, "kernel": "6", "gpus": []},
        "model": "llama-tiny",
        "precision": "fp32",
        "device": "cpu",
        "disk": {"size_bytes": 10**9, "write": 2e9, "read": 4e9},
        "cases": cases,
    }


def test_every_cell_has_as_many_faults_as_asked() -> None:
    faults = bench.fault_list(CONFIG, "layered", repeats=3, spacing=10)
    cells = [(fault["type"], fault["rank"]) for fault in faults]
    assert set(cells) == {("exception", 0), ("exception", 3), ("hang", 3), ("sigkill", 0), ("sigkill", 3)}
    assert all(cells.count(cell) == 3 for cell in cells)
    assert [fault["step"] for fault in faults] == list(range(12, 12 + 150, 10))


def test_in_process_alone_gets_no_sigkill() -> None:
    assert {fault["type"] for fault in bench.fault_list(CONFIG, "in-process", 1, 5)} == {"exception", "hang"}


def test_a_world_of_one_rank_has_each_cell_once() -> None:
    alone = CONFIG.with_overrides({"parallelism.num_nodes": 1, "parallelism.ranks_per_node": 1})
    faults = bench.fault_list(alone, "layered", repeats=1, spacing=5)
    assert [(fault["type"], fault["rank"]) for fault in faults] == [("exception", 0), ("hang", 0), ("sigkill", 0)]


def test_the_cases_are_legal_configs() -> None:
    for case in [*bench.recovery_cases(CONFIG, 5, 10), *bench.article_cases()]:
        assert CONFIG.with_overrides(case.overrides)


def test_the_table_holds_median_and_range_of_each_cell() -> None:
    times = [1.0, 3.0, 2.0]
    run = summary(recoveries=[recovery("exception", 0, t) for t in times] + [recovery("hang", 3, 4.0)])
    text = bench_table.tables(results(layered=run))
    assert "| layered | exception, rank 0 | 3 | 2.00 s (1.00 .. 3.00) | 0.12 |" in text
    assert "| layered | hang | 1 | 4.00 s (4.00 .. 4.00) |" in text
    assert "| layered | async | 1.000 GB | 2.00 s | 10.0 ms | 2.00 GB/s | - | - |" in text
    assert "2.00 GB/s written with fsync, 4.00 GB/s read" in text


@pytest.mark.parametrize(("sha256", "same"), [("a", "yes"), ("b", "no")])
def test_the_articles_schedule_is_compared_with_its_reference(sha256: str, same: str) -> None:
    text = bench_table.tables(results(reference=summary(), article=summary(sha256=sha256)))
    assert f"| final weights equal those without faults | {same} |" in text
    assert "| training goodput from the first step on | 75.0% |" in text


def test_a_matrix_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def watch(found: settings.Settings, config: RunConfig, cluster: LocalCluster, title: str) -> JobResult:
        ran.append(title)
        return JobResult(title != "bad", "why", 0, 0, 0.0, 0.0, 1.0, tmp_path)

    monkeypatch.setattr(matrix, "watch", watch)
    monkeypatch.setattr(matrix, "summarise", lambda config, overrides: {"name": config.run_id})
    found = settings.arguments([], settings.parser("bench", ""))
    runs = matrix.Matrix(replace(found, root=tmp_path), LocalCluster(tmp_path), tmp_path / "kept", Console(quiet=True))
    with pytest.raises(matrix.CaseFailed, match="bad: failed: why"):
        runs.run([matrix.Case("one"), matrix.Case("bad"), matrix.Case("three")])
    assert runs.run([matrix.Case("one"), matrix.Case("three")])["one"] == {"name": "kept-one"}
    assert ran == ["one", "bad", "three"]
    assert json.loads((tmp_path / "kept" / "three.json").read_text()) == {"name": "kept-three"}


def test_the_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    speed = disk.measure(tmp_path, 1)
    assert speed.size_bytes == 16 << 20 and speed.write > 0 and speed.read > 0
    assert list(tmp_path.iterdir()) == []


def test_the_recorded_command_holds_no_path_of_the_machine() -> None:
    argv = ["recovery", "--out", "/a/b.json", "--repeats", "3", "--folder=/tmp/x", "--only", "layered"]
    assert bench._without_paths(argv) == ["recovery", "--repeats", "3", "--only", "layered"]


def test_the_page_holds_the_tables_of_its_files() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "performance.md").read_text()
    assert page.count("<!-- results:") == page.count("<!-- end -->") >= 1
    assert bench_table.filled(page, docs) == page
