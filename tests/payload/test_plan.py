"""The planner: its formulas at their limits, and predictions beside measured runs."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from payload import plan
from payload.calibration import LAYERS, Calibration, Phases, calibrate, expected_phases, layer_of
from payload.cli import COMMANDS
from payload.config import ARMS, FAULT_TYPES, ConfigError, RunConfig, TimeoutConfig
from payload.goodput import RunReport, analyse
from payload.plan_model import (
    LLAMA_3,
    PUBLISHED_TIERS,
    RSC_1,
    RSC_2,
    Tier,
    async_gap_s,
    async_goodput,
    best_goodput,
    best_interval_s,
    binding_constraint,
    sizes_table,
    sync_goodput,
    training_goodput,
)
from payload.simulate import Scenario, over_seeds, scenario_of, scenario_of_report, simulate
from tests.payload.run_builder import RunBuilder, kubernetes_run, straight_run

TIMEOUTS = TimeoutConfig(soft_s=5, hard_s=10, barrier_s=60)


def one_exception(run_dir: Path) -> RunBuilder:
    """20 steps, saves at 5, 10, 15, 20, one exception at 13."""
    run = RunBuilder(run_dir)
    run.begin()
    for last in (5, 10):
        run.steps(last - 4, last)
        run.save(last)
    run.steps(11, 12)
    run.fault("exception", 1, 13)
    run.leave_in_process(detect_s=0.1)
    run.enter(10)
    run.steps(11, 15)
    run.save(15)
    run.steps(16, 20)
    run.save(20)
    run.finish(20, drain_s=1.75)
    return run


def held_out(run_dir: Path) -> RunBuilder:
    """20 steps, an exception at 9 (back to 5) and a hang at 19 (back to 15)."""
    run = RunBuilder(run_dir)
    run.begin()
    run.steps(1, 5)
    run.save(5)
    run.steps(6, 8)
    run.fault("exception", 2, 9)
    run.leave_in_process(detect_s=0.1)
    run.enter(5)
    run.steps(6, 10)
    run.save(10)
    run.steps(11, 15)
    run.save(15)
    run.steps(16, 18)
    run.fault("hang", 1, 19)
    run.leave_in_process(detect_s=5.2)
    run.enter(15)
    run.steps(16, 20)
    run.save(20)
    run.finish(20, drain_s=1.75)
    return run


def reports(tmp_path: Path, *scripts: Callable[[Path], RunBuilder]) -> list[RunReport]:
    return [analyse(script(tmp_path / script.__name__).write()) for script in scripts]


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    """From one run without faults and one with a single fault."""
    return calibrate(reports(tmp_path, straight_run, one_exception))


# The formulas.


def test_without_failures_only_the_stall_is_lost() -> None:
    tier = Tier("t", 1.0, 275.0, 60.0)
    assert training_goodput(tier, 1000.0, 0.0) == pytest.approx(1000 / 1001)
    assert best_interval_s(tier, 0.0) == math.inf
    assert best_goodput(tier, 0.0) == 1.0


def test_the_best_interval_is_young_and_daly_s() -> None:
    tier, rate = Tier("t", 10.0, 0.0, 60.0), 1e-4
    best_s = best_interval_s(tier, rate)
    assert best_s == pytest.approx(math.sqrt(2 * 10.0 / rate))
    best = training_goodput(tier, best_s, rate)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert training_goodput(tier, factor * best_s, rate) < best
    assert best_interval_s(Tier("t", 10.0, 900.0, 60.0), rate) == 900.0  # one write in flight


def test_sync_and_async_without_failures() -> None:
    assert sync_goodput(418.0, 275.0) == pytest.approx(0.603, abs=5e-4)
    assert async_gap_s(418.0, 275.0, 2.0) == 420.0
    assert async_gap_s(41.8, 275.0, 2.0) == 277.0
    assert async_goodput(275.0, 275.0, 0.0) == 1.0
    assert async_goodput(41.8, 275.0, 0.0) == pytest.approx(0.152, abs=5e-4)


def test_published_failure_rates() -> None:
    """Meta: 1.8 h at 16,384 GPUs by the rate of RSC-1; Llama 3: 50,700 GPU-hours."""
    assert RSC_1.mttf_h(16_384) == pytest.approx(1.8, abs=0.05)
    assert 1 / LLAMA_3.per_gpu_h == pytest.approx(50_700, rel=0.001)
    assert RSC_2.mttf_h(16_384) == pytest.approx(5.0, abs=0.1)


def test_the_table_over_sizes() -> None:
    published = {
        1_024: (93.8, 99.4, 99.8, 99.97),
        16_384: (72.3, 94.6, 99.1, 99.8),
        100_000: (39.4, 75.3, 96.3, 98.9),
    }
    for row in sizes_table(LLAMA_3, PUBLISHED_TIERS, tuple(published)):
        assert [100 * value for value in row.goodput] == pytest.approx(published[row.num_gpus], abs=0.06)
    goodput = [row.goodput for row in sizes_table(LLAMA_3, PUBLISHED_TIERS)]
    assert goodput == sorted(goodput, reverse=True)
    assert all(list(row) == sorted(row) for row in goodput)


def test_the_binding_constraint_is_named_with_what_would_do() -> None:
    tier = Tier("t", 0.1, 1.0, 0.0)
    parts = {"hang detection": (60.0, 0.4), "exception detection": (0.1, 0.6), "rebuild": (2.0, 1.0)}
    rate = 1 / 300
    found = binding_constraint(0.95, tier, parts, rate)
    assert not found.reachable
    assert str(found).startswith("95 % unreachable: hang detection 60 s")
    assert found.needed_s is not None and 0 < found.needed_s < 60
    enough = {**parts, "hang detection": (found.needed_s - 0.01, 0.4)}
    assert binding_constraint(0.95, tier, enough, rate).reachable
    too_much = {**parts, "hang detection": (found.needed_s + 0.1, 0.4)}
    assert not binding_constraint(0.95, tier, too_much, rate).reachable


def test_a_goal_that_no_single_cost_can_meet() -> None:
    found = binding_constraint(0.9999, Tier("t", 1.0, 10.0, 0.0), {"rebuild": (30.0, 1.0)}, 1 / 300)
    assert found.needed_s is None and "0 s of it would not be enough" in str(found)
    assert "reachable: " in str(binding_constraint(0.1, Tier("t", 1.0, 10.0, 0.0), {}, 1 / 300))
    with pytest.raises(ValueError, match=r"goal: 1\.5; legal: a fraction"):
        binding_constraint(1.5, Tier("t", 1.0, 10.0, 0.0), {}, 1 / 300)


# Layers.


def test_every_arm_says_who_recovers_from_every_fault() -> None:
    assert set(LAYERS) == set(ARMS)
    for arm in ARMS:
        for kind in FAULT_TYPES:
            assert layer_of(arm, kind) in ("process", "worker", "container", "pod")
    with pytest.raises(ConfigError, match=r"recovery\.arm: 'x'"):
        layer_of("x", "hang")
    with pytest.raises(ConfigError, match=r"faults\.types: 'x'"):
        layer_of("in-job", "x")


# Calibration.


def test_calibration_takes_the_phases_apart(calibration: Calibration) -> None:
    assert calibration.step_s == pytest.approx(0.875, abs=1e-5)
    assert calibration.data_s == pytest.approx(0.125, abs=1e-5)
    assert calibration.stall_s == pytest.approx(0.75) and calibration.write_s == pytest.approx(2.5)
    assert calibration.start_up_s == pytest.approx(4.9, abs=1e-5)
    assert calibration.snapshot_stall_s is None
    assert list(calibration.phases) == [("process", "exception")]
    phases = calibration.phases["process", "exception"].by_bucket()
    expected = {"detect": 0.1, "teardown": 0.6, "rendezvous": 0.2, "rebuild": 0.7, "load": 0.5, "warm-up": 0.25}
    assert phases == pytest.approx(expected, abs=1e-5)


def test_a_hang_that_was_not_measured_is_found_at_its_time_limit(calibration: Calibration) -> None:
    hang = expected_phases(calibration, "in-process", "hang", TIMEOUTS)
    assert hang.detect_s == 5.0 and hang.teardown_s == pytest.approx(0.6, abs=1e-5)
    with pytest.raises(ConfigError, match="timeouts"):
        expected_phases(calibration, "in-process", "hang", None)


def test_a_layer_that_was_not_measured_is_refused(calibration: Calibration) -> None:
    with pytest.raises(ConfigError, match="no recovery of the worker layer measured; legal: a run of arm in-job"):
        expected_phases(calibration, "in-job", "sigkill", TIMEOUTS)
    with pytest.raises(ConfigError, match="pod layer"):
        expected_phases(calibration, "layered", "node-loss", TIMEOUTS)


def test_calibration_needs_a_complete_run_with_a_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete run"):
        calibrate([])
    run = RunBuilder(tmp_path / "r")
    run.begin()
    run.steps(1, 3)
    run.finish(3)
    with pytest.raises(ConfigError, match="no durable save"):
        calibrate([analyse(run.write())])


def test_saves_that_waited_for_the_writer_do_not_count_as_stall(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "r")
    run.begin()
    run.steps(1, 1)
    run.save(1, blocking_s=0.5, write_s=4.0)
    run.steps(2, 2)
    run.save(2, blocking_s=3.0, write_s=4.0)
    run.steps(3, 10)
    run.save(10, blocking_s=0.5, write_s=4.0)
    run.finish(10)
    assert calibrate([analyse(run.write())]).stall_s == pytest.approx(0.5)


def test_back_off_is_not_part_of_the_measured_rendezvous(tmp_path: Path) -> None:
    (measured,) = reports(tmp_path, kubernetes_run)
    phases = calibrate([measured]).phases
    # 0.5 s of waiting in two recoveries are half of that each.
    assert phases["container", "hang"].rendezvous_s == pytest.approx(0.5 + 0.25 + 1.5 - 0.25, abs=0.3)


# The simulation.

PHASES = Phases(1.0, 0.5, 0.25, 2.0, 1.0, 0.25)
IDEAL = Calibration(1.0, 0.0, 0.0, 10.0, 0.0, 0.5, 3.0, None, {("process", "exception"): PHASES})


def scenario(**changes: object) -> Scenario:
    fields: dict[str, object] = {
        "arm": "in-process",
        "mode": "async",
        "num_steps": 100,
        "interval": 10,
        "memory_interval": 0,
        "replicate": False,
        "faults": (),
        "timeouts": TIMEOUTS,
    }
    return Scenario(**{**fields, **changes})  # type: ignore[arg-type]


def test_simulated_buckets_add_up() -> None:
    made = simulate(scenario(faults=((15, "exception"), (77, "exception"))), IDEAL)
    assert sum(made.buckets.values()) == pytest.approx(made.duration_s, abs=1e-6)
    assert made.buckets["useful"] == pytest.approx(100.0)
    assert made.infrastructure_goodput > made.training_goodput


def test_a_run_without_faults() -> None:
    made = simulate(scenario(), IDEAL)
    assert made.buckets["checkpoint stall"] == pytest.approx(10 * 0.5)
    assert made.buckets["drain"] == pytest.approx(2.5)
    assert made.duration_s == pytest.approx(10 + 100 + 5 + 2.5)
    assert made.num_replayed_steps == 0


def test_a_save_counts_only_once_it_is_written() -> None:
    """Written 3 s after step 10: a fault at step 12 goes back to 0, one at 15 to step 10."""
    assert simulate(scenario(faults=((12, "exception"),)), IDEAL).num_replayed_steps == 11
    assert simulate(scenario(faults=((15, "exception"),)), IDEAL).num_replayed_steps == 4
    assert simulate(scenario(mode="sync", faults=((12, "exception"),)), IDEAL).num_replayed_steps == 1


def test_a_write_goes_on_until_the_fault_is_detected() -> None:
    slow = {("process", "hang"): Phases(5.0, 0.5, 0.25, 2.0, 1.0, 0.25)}
    c = Calibration(1.0, 0.0, 0.0, 10.0, 0.0, 0.5, 3.0, None, slow)
    assert simulate(scenario(faults=((12, "hang"),)), c).num_replayed_steps == 1


def test_one_write_in_flight_sets_the_gap() -> None:
    slow = Calibration(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 25.0, None, {})
    made = simulate(scenario(num_steps=1000), slow)
    # Per gap max(10, 25) s; the first save waits for none.
    assert made.duration_s == pytest.approx(10 + 100 * 25)
    quick = simulate(scenario(num_steps=1000, interval=25), slow)
    assert quick.duration_s == pytest.approx(1000 + 25)


def test_snapshots_survive_what_their_memory_survives() -> None:
    phases = {("process", "exception"): PHASES, ("pod", "pod-loss"): PHASES}
    c = Calibration(1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 3.0, 0.01, phases)
    assert simulate(scenario(memory_interval=2, faults=((20, "exception"),)), c).num_replayed_steps == 1
    lost = scenario(arm="layered", memory_interval=2, faults=((20, "pod-loss"),))
    assert simulate(lost, c).num_replayed_steps == 9
    kept = scenario(arm="layered", memory_interval=2, replicate=True, faults=((20, "pod-loss"),))
    assert simulate(kept, c).num_replayed_steps == 1


def test_the_kubelet_s_back_off() -> None:
    c = Calibration(1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 3.0, None, {("container", "exception"): PHASES})
    faults = tuple((step, "exception") for step in (15, 35, 55, 75))
    made = simulate(scenario(arm="kubernetes", faults=faults), c)
    waits = [phases.rendezvous_s - PHASES.rendezvous_s for _, phases in made.recoveries]
    assert waits == [0.0, 10.0, 20.0, 40.0]
    quick = simulate(scenario(arm="kubernetes", faults=faults, speedup=10.0), c)
    assert [phases.rendezvous_s - PHASES.rendezvous_s for _, phases in quick.recoveries] == [0.0, 1.0, 2.0, 4.0]
    rare = simulate(scenario(arm="kubernetes", num_steps=2000, faults=((15, "exception"), (1500, "exception"))), c)
    assert rare.recoveries[1][1] == PHASES  # forgotten after ten minutes


def test_two_faults_of_one_step() -> None:
    made = simulate(scenario(faults=((15, "exception"), (15, "exception"))), IDEAL)
    assert len(made.recoveries) == 2
    assert made.num_replayed_steps == 8  # the second one fires once step 15 is reached again


# Predicted beside measured.


def test_a_held_out_schedule_and_fault_type_within_two_points(calibration: Calibration, tmp_path: Path) -> None:
    """Calibrated on no fault and one exception; held out: an exception elsewhere and a hang."""
    (measured,) = reports(tmp_path, held_out)
    predicted = simulate(scenario_of_report(measured, TIMEOUTS), calibration)
    assert abs(predicted.training_goodput - measured.training_goodput) < 0.02
    assert predicted.num_replayed_steps == measured.num_replayed_steps
    for bucket in ("detect", "teardown", "rendezvous", "rebuild", "load", "warm-up", "checkpoint stall", "replayed"):
        assert predicted.buckets[bucket] == pytest.approx(measured.buckets[bucket], rel=0.15), bucket


def test_the_run_of_the_calibration_is_met(calibration: Calibration, tmp_path: Path) -> None:
    for measured in reports(tmp_path / "again", straight_run, one_exception):
        predicted = simulate(scenario_of_report(measured), calibration)
        assert predicted.duration_s == pytest.approx(measured.duration_s, rel=0.01)


def config(**overrides: object) -> RunConfig:
    base = RunConfig.from_dict({"training": {"max_steps": 200, "min_step_s": 1.0}, "recovery": {"arm": "in-process"}})
    return base.with_overrides({"checkpoint.interval": 10, "timeouts.soft_s": 5.0, **overrides})


def test_many_seeds_give_a_range() -> None:
    drawn = config(**{"faults.count": 5})
    found = over_seeds(drawn, IDEAL, range(10))
    assert found.num == 10 and found.low < found.mean < found.high < 1
    assert over_seeds(drawn, IDEAL, range(10)) == found
    assert len(scenario_of(drawn).faults) == 5


def test_the_simulation_agrees_with_the_formula() -> None:
    """Random faults at a low rate on a long run: first order and the played run differ by less than a point."""
    run = config(
        **{"training.max_steps": 40_000, "checkpoint.interval": 40, "faults.mtbf_s": 800.0, "training.warmup_steps": 0}
    )
    c = Calibration(1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0, None, {("process", "exception"): PHASES})
    played = simulate(scenario_of(run), c)
    tier = Tier("t", 1.0, 5.0, PHASES.total_s)
    assert played.training_goodput == pytest.approx(training_goodput(tier, 40.0, 1 / 800), abs=0.01)


# The command.


def test_tiers_and_constraint_of_a_configured_run(calibration: Calibration) -> None:
    run = config(**{"faults.count": 5, "faults.types": ["exception", "hang"], "faults.type_weights": [0.6, 0.4]})
    parts = plan.recovery_parts(run, calibration)
    assert parts["hang detection"] == (5.0, 0.4)
    assert parts["rebuild (process restart)"] == (pytest.approx(0.7, abs=1e-5), pytest.approx(1.0))
    names = [tier.name for tier in plan.tiers_of(run, calibration)]
    assert names == ["durable, sync", "durable, async"]
    text = str(plan.goal_of(0.99, run, calibration, 1 / 100))
    assert text.startswith("99 % unreachable: ")
    with pytest.raises(ConfigError, match="--goal: 7"):
        plan.goal_of(7, run, calibration, 1 / 100)


def test_dollars() -> None:
    made = simulate(scenario(), IDEAL)
    assert plan.cost(made, 16, 5.0) == pytest.approx(made.duration_s / 3600 * 80)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS["plan"] == "payload.plan:cli" and COMMANDS["audit"] == "payload.audit:cli"
    folders = [str(script(tmp_path / script.__name__).write()) for script in (straight_run, one_exception)]
    flags = ["--fault-count=5", "--fault-types=exception,hang", "--arm=in-process", "--goal=0.95", "--seeds=3"]
    assert plan.cli([*folders, *flags]) == 0
    out = capsys.readouterr().out
    for text in ("Best interval", "3 seeds", "goal: 95 %", "USD", "100,000", "MTTF", "assumptions, not measurements"):
        assert text in out, text


def test_the_command_without_a_run_prints_sizes_and_caveats(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.cli(["--rate", "rsc1"]) == 0
    out = capsys.readouterr().out
    assert "16,384" in out and "1.8 h" in out
    assert all(" ".join(caveat.split()[:5]) in out for caveat in plan.CAVEATS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "--rate: 'fast'; legal: llama3, rsc1, rsc2"),
        (["--goal", "0.9"], "--goal: needs the folder"),
        (["/nowhere/run"], "no event log"),
        (["/nowhere/run", "--seeds", "0"], "--seeds: 0; legal: 1 or more"),
        (["/nowhere/run", "--gpus", "-1"], "legal: 0 or more"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan.cli(arguments)
    assert message in str(raised.value)
