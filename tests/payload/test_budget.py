"""One restart budget for the run, whoever spends it."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from payload.budget import NoProgress, RestartBudget, tail
from payload.config import RunConfig
from payload.events import EventLog


@pytest.fixture
def config(tmp_path):
    return RunConfig().with_overrides(
        {"run_id": "b", "workdir": str(tmp_path), "recovery.max_restarts": 4, "recovery.max_no_progress": 2}
    )


def steps(config, rank, *done):
    log = EventLog(config.events_dir / f"rank{rank}.jsonl", f"rank{rank}")
    for step in done:
        log.emit("step", step=step)
    log.close()


def test_newest_step_is_read_from_torn_and_long_logs(config):
    budget = RestartBudget(config)
    assert budget.newest_step() == 0
    steps(config, 0, *range(1, 3000))
    steps(config, 1, 3000)
    with (config.events_dir / "rank1.jsonl").open("a") as file:
        file.write('{"kind":"step","step":99')
    assert budget.newest_step() == 3000
    assert tail(config.events_dir / "rank9.jsonl", "step") == []


def test_layers_share_one_counter(config, caplog):
    """F25: the limit is the run's, not each layer's; the number of tries is printed."""
    budget = RestartBudget(config)
    assert budget.begin_cycle("container") == 0
    assert budget.restarts() == []
    budget.spend("in-process", "0.1", 10)
    budget.spend("in-process", "0.2", 20)
    steps(config, 0, 30)
    assert RestartBudget(config).begin_cycle("launcher") == 1
    with caplog.at_level(logging.WARNING):
        budget.spend("in-process", "1.1", 40)
    assert "restart 4 of 4" in caplog.text
    with pytest.raises(NoProgress, match=r"all 4 restarts are spent; 5 tries.*newest step 50"):
        budget.spend("in-process", "1.2", 50)
    assert budget.stopped() == "all 4 restarts are spent; 5 tries in all, newest step 50"
    layers = [(r.cycle, r.iteration, r.layer) for r in budget.restarts()]
    assert layers[:4] == [(0, 1, "in-process"), (0, 2, "in-process"), (1, 0, "launcher"), (1, 1, "in-process")]


def test_restarts_without_a_newer_step_stop_the_run(config):
    """F25: always dying at step 3 is found after max_no_progress restarts, whatever layer makes them."""
    budget = RestartBudget(config)
    assert budget.begin_cycle("container") == 0
    steps(config, 0, 1, 2)
    assert budget.begin_cycle("container") == 1
    budget.spend("in-process", "1.1")
    with pytest.raises(NoProgress, match="no step newer than 2 after 2 restarts in a row; 4 tries in all"):
        budget.begin_cycle("container")
    assert "no step newer than 2" in budget.stopped()


def test_a_newer_step_starts_the_count_again(config):
    budget = RestartBudget(config)
    for generation, step in [("0.1", 5), ("0.2", 5), ("0.3", 6), ("0.4", 6)]:
        budget.spend("in-process", generation, step)
    assert budget.stopped() is None


def test_replayed_steps_are_no_progress(config):
    budget = RestartBudget(config)
    budget.spend("in-process", "0.1", 50)
    budget.spend("in-process", "0.2", 20)
    with pytest.raises(NoProgress, match="no step newer than 50"):
        budget.spend("in-process", "0.3", 40)


def test_all_ranks_come_to_the_same_verdict_and_count_once(config):
    """Every rank spends the restart that it makes with the others; they see different newest steps."""
    budget = RestartBudget(config)
    budget.spend("in-process", "0.1", 7)

    def spend(rank):
        try:
            RestartBudget(config).spend("in-process", "0.2", rank % 3 + 6)
        except NoProgress:
            return "stop"
        return "go"

    with ThreadPoolExecutor(8) as ranks:
        assert len(set(ranks.map(spend, range(16)))) == 1
    assert len(budget.restarts()) == 2
    assert not [p for p in config.restarts_dir.iterdir() if p.name.startswith(".")]


def test_cycles_are_never_given_twice(config):
    with ThreadPoolExecutor(8) as agents:
        budgets = [RestartBudget(config.with_overrides({"recovery.max_restarts": 50, "recovery.max_no_progress": 50}))]
        cycles = list(agents.map(lambda _: budgets[0].begin_cycle("launcher"), range(20)))
    assert sorted(cycles) == list(range(20))


def test_the_first_reason_to_stop_stays(config):
    budget = RestartBudget(config)
    for reason in ("first", "second"):
        with pytest.raises(NoProgress, match=reason):
            budget.stop(reason)
    assert json.loads((config.run_dir / "stop.json").read_text())["reason"] == "first"


def failure(budget, cycle, first, planned=False, nodes=(0, 1)):
    for node in nodes:
        wall = 100.0 * cycle + (node != first)
        budget.record_failure(cycle, node, f"node-{node}", wall, planned=planned)


def test_failures_are_blamed_on_the_node_where_they_began(config):
    budget = RestartBudget(config)
    assert budget.blamed_in_a_row("node-1") == 0 and budget.newest_failure() == -1
    for cycle, first in enumerate([1, 0, 1, 1]):
        failure(budget, cycle, first)
    assert budget.blamed_in_a_row("node-1") == 2
    assert budget.blamed_in_a_row("node-0") == 0
    assert budget.newest_failure() == 3


def test_lost_pods_and_planned_faults_are_nobodys_fault(config):
    budget = RestartBudget(config)
    failure(budget, 0, 1)
    failure(budget, 1, 1, planned=True)
    assert budget.blamed_in_a_row("node-1") == 0
    failure(budget, 2, 1)
    assert budget.blamed_in_a_row("node-1") == 1
    failure(budget, 3, 1, nodes=(1,))
    assert budget.blamed_in_a_row("node-1") == 0


def test_a_node_given_up_starts_afresh(config):
    budget = RestartBudget(config)
    failure(budget, 0, 1)
    failure(budget, 1, 1)
    budget.excuse(1, "node-1")
    assert budget.blamed_in_a_row("node-1") == 0
    failure(budget, 2, 1)
    assert budget.blamed_in_a_row("node-1") == 1
