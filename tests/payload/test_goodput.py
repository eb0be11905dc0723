"""Figures of a run from its event log: exact on scripted logs, and an error where a record is missing."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from payload import published
from payload.buckets import BUCKETS, totals
from payload.events import EventError
from payload.goodput import RunReport, analyse
from payload.recovery_marks import MARKS, PHASES
from tests.payload.run_builder import Record, RunBuilder, in_job_run, in_process_run, kubernetes_run

SCRIPTS = [in_process_run, kubernetes_run, in_job_run]
TOLERANCE = 1e-5  # a time since the epoch has 2.4e-7 s of resolution


def report_of(script: Callable[[Path], RunBuilder], tmp_path: Path) -> RunReport:
    return analyse(script(tmp_path / script.__name__.replace("_", "-")).write())


@pytest.mark.parametrize("script", SCRIPTS)
def test_buckets_are_disjoint_and_sum_to_t(script: Callable[[Path], RunBuilder], tmp_path: Path) -> None:
    report = report_of(script, tmp_path)
    assert tuple(report.buckets) == tuple(BUCKETS)
    assert abs(sum(report.buckets.values()) - report.duration_s) <= 1e-6
    for rank in report.ranks:
        ends = [piece.end for piece in rank.pieces]
        assert [piece.begin for piece in rank.pieces[1:]] == ends[:-1]
        assert ends[-1] - rank.pieces[0].begin == report.duration_s
        assert abs(sum(totals(rank.pieces).values()) - report.duration_s) <= 1e-6


def test_every_bucket_of_an_in_process_run(tmp_path: Path) -> None:
    report = report_of(in_process_run, tmp_path)
    expected = {
        "useful": 20 * 0.875,
        "replayed": 2 * 0.875,
        "data stall": 22 * 0.125,
        "checkpoint stall": 4 * 0.75,
        "detect": 0.1 + 5.0,
        "teardown": 2 * 0.6,
        "rendezvous": 2 * 0.2,
        "rebuild": 2 * 0.7,
        "load": 2 * 0.5,
        "warm-up": 3 * 0.25,
        "start-up": 0.5 + 1.0 + 0.2 + 2.0 + 1.2,
        "drain": 2.0,
        "other": 22 * 0.01,
    }
    assert report.buckets == pytest.approx(expected, abs=TOLERANCE)
    total_s = sum(expected.values())
    assert report.duration_s == pytest.approx(total_s, abs=TOLERANCE)
    assert report.training_goodput == pytest.approx(17.5 / total_s)
    assert report.infrastructure_goodput == pytest.approx(19.25 / total_s)
    assert report.checkpoint_efficiency == pytest.approx(1 - 5.0 / total_s)
    assert report.checkpoint_efficiency_without_drain == pytest.approx(1 - 3.0 / (total_s - 2.0))
    assert report.published_checkpoint_efficiency == pytest.approx(1 - 3.0 / total_s)
    assert report.ettr == pytest.approx(17.5 / (total_s + 3.0))
    assert report.step_s == pytest.approx(0.875)


def test_every_mark_of_a_recovery(tmp_path: Path) -> None:
    exception, hang = report_of(in_process_run, tmp_path).recoveries
    assert (exception.type, exception.step, exception.rank) == ("exception", 8, 2)
    assert (exception.resumed_step, exception.tier, exception.same_process) == (5, "durable", True)
    begin = exception.marks[0]
    assert begin is not None
    # t8: step 7 regained, that is two steps after the state of step 5.
    expected = [0.0, 0.1, 0.7, 0.9, 1.2, 1.6, 2.1, 3.35, 4.36]
    assert len(expected) == len(MARKS) == len(PHASES) + 1
    assert [mark - begin for mark in exception.marks if mark is not None] == pytest.approx(expected, abs=TOLERANCE)
    assert exception.recovery_s == pytest.approx(3.35, abs=TOLERANCE)
    assert exception.published_s == pytest.approx(2.1, abs=TOLERANCE)
    assert exception.phases_s["catch up"] == pytest.approx(1.01, abs=TOLERANCE)
    # Nothing to replay: caught up with the first step.
    assert hang.recovery_s == hang.caught_up_s == pytest.approx(8.25, abs=TOLERANCE)


def test_recoveries_are_told_apart_by_type_with_their_maximum(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    statistics = analyse(run.write()).recovery_statistics()
    assert list(statistics) == ["exception", "hang"]
    assert statistics["hang"].num == 1 and statistics["hang"].num_unrecovered == 0
    run = RunBuilder(tmp_path / "two")
    run.begin()
    run.steps(1, 2)
    for detect_s, step in ((0.5, 3), (2.5, 4)):
        run.fault("exception", 1, step)
        run.leave_in_process(detect_s)
        run.enter(2)
        run.steps(3, 3)
    run.steps(4, 5)
    run.finish(5)
    two = analyse(run.write()).recovery_statistics()["exception"]
    assert (two.num, two.max_s - two.mean_s) == (2, pytest.approx(1.0, abs=TOLERANCE))


def test_the_published_formulas_flatter(tmp_path: Path) -> None:
    """The article's training goodput counts replays and downtime of a process as training."""
    report = report_of(in_process_run, tmp_path)
    spans = [recovery.published_s or 0.0 for recovery in report.recoveries]
    assert report.published_infrastructure_goodput == pytest.approx(1 - sum(spans) / report.duration_s)
    assert report.published_training_goodput > 1.5 * report.training_goodput
    assert report.published_training_goodput == pytest.approx(
        published.training_goodput(20, report.training_wall_s, report.duration_s)
    )


def test_the_baseline(tmp_path: Path) -> None:
    report = report_of(kubernetes_run, tmp_path)
    exception, hang = report.recoveries
    assert exception.same_process is False
    assert (hang.recovery_s or 0) > 30.0
    assert (report.restarts.containers, report.restarts.pods) == (4, 0)
    assert (report.restarts.in_process, report.restarts.workers) == (0, 0)
    assert (report.restarts.backoff_raw_s, report.restarts.backoff_waited_s) == (20.0, 1.0)
    assert report.num_replayed_steps == 2


def test_a_worker_restart(tmp_path: Path) -> None:
    """SIGKILL of rank 0: it says nothing itself, and its log goes on in another process."""
    report = report_of(in_job_run, tmp_path)
    assert (report.restarts.workers, report.restarts.containers, report.restarts.in_process) == (1, 0, 0)
    (recovery,) = report.recoveries
    assert recovery.phases_s["detect"] == pytest.approx(0.5, abs=TOLERANCE)
    assert recovery.phases_s["teardown"] == pytest.approx(1.0, abs=TOLERANCE)  # until the second pod's workers ended
    assert recovery.recovery_s == pytest.approx(9.15, abs=TOLERANCE)


def test_replayed_steps_are_counted_once_and_speed_is_that_of_the_run(tmp_path: Path) -> None:
    """F28: 20 steps, SIGKILL at the start of 13 after the save of 10: two steps lost."""
    report = report_of(in_job_run, tmp_path)
    straight = RunBuilder(tmp_path / "straight")
    straight.begin()
    straight.steps(1, 20)
    straight.finish(20)
    reference = analyse(straight.write())
    assert report.num_replayed_steps == 2
    assert [step for step, _ in report.replays] == [11, 12]
    assert report.num_steps == report.final_step == 20
    assert report.step_s == pytest.approx(reference.step_s, rel=0.25)
    assert report.training_goodput < reference.training_goodput <= 1
    assert report.losses == reference.losses


def test_pod_replacements_are_told_from_container_restarts(tmp_path: Path) -> None:
    run = in_job_run(tmp_path / "r")
    run.new_process("job")
    run.emit("job", "pod_start", index=1, uid="other", node="n2", restart_count=0)
    restarts = analyse(run.write()).restarts
    assert (restarts.containers, restarts.pods) == (0, 1)


def test_the_loss_of_a_node(tmp_path: Path) -> None:
    """Pod 1's node goes silent; its pod is replaced once the node's object is deleted; pod 0's launcher goes on."""
    run = RunBuilder(tmp_path / "r", arm="layered")
    run.begin()
    run.steps(1, 4)
    run.save(4)
    run.steps(5, 6)
    run.fault("node-loss", 3, 7)
    run.now += 1.0
    run.emit("job", "node_lost", index=1, node="n")
    for source in ("rank0", "rank1"):
        run.emit(source, "detected", how="exception", reason="connection closed", generation=run.generation)
    run.now += 0.5
    run.emit("pod0", "workers_failed", cycle=0, reason="exit code 1", codes={"0": 1, "1": 1})
    run.now += 3.0
    run.emit("job", "node_deleted", index=1, node="n")
    run.new_process("pod1")
    run.emit("job", "pod_start", index=1, uid="new", node="n2", restart_count=0)
    started = run.now
    run.now += 0.5
    run.emit("pod1", "launcher_start", started_wall=started, index=1)
    run.start_workers(meet_s=1.0)
    run.enter(4)
    run.steps(5, 8)
    run.finish(8)
    report = analyse(run.write())
    (recovery,) = report.recoveries
    assert recovery.phases_s["detect"] == pytest.approx(1.0, abs=TOLERANCE)
    assert recovery.phases_s["teardown"] == pytest.approx(3.5, abs=TOLERANCE)
    assert recovery.phases_s["rendezvous"] == pytest.approx(1.5, abs=TOLERANCE)
    restarts = report.restarts
    assert (restarts.pods, restarts.containers, restarts.workers) == (1, 0, 1)
    assert report.num_replayed_steps == 2


@pytest.mark.parametrize("seed", range(12))
def test_any_run_adds_up(seed: int, tmp_path: Path) -> None:
    """Faults of both layers at random places, also during recovery, one after the other."""
    rng = random.Random(seed)
    run = RunBuilder(tmp_path / "r", num_ranks=rng.choice([2, 4]))
    run.begin()
    step = saved = 0
    num_faults = 0
    while step < 25:
        if rng.random() < 0.2 and num_faults < 6:
            num_faults += 1
            kind = rng.choice(["exception", "sigkill"])
            run.fault(kind, rng.randrange(run.num_ranks), step + 1)
            if kind == "exception":
                run.leave_in_process(rng.uniform(0.0, 3.0), rng.uniform(0.1, 1.0), rng.uniform(0.0, 1.0))
            else:
                run.kill_workers(rng.uniform(0.0, 3.0))
                run.start_workers(rng.uniform(0.1, 2.0), imports_s=rng.uniform(0.1, 5.0))
            run.enter(saved)
            step = saved
            continue
        step += 1
        run.steps(step, step, rng.uniform(0.1, 2.0), 0.05, rng.uniform(0.0, 0.1))
        if rng.random() < 0.25:
            run.save(step, rng.uniform(0.01, 1.0))
            saved = step
    run.finish(25, rng.uniform(0.0, 3.0))
    report = analyse(run.write())
    assert abs(sum(report.buckets.values()) - report.duration_s) <= 1e-6
    assert len(report.recoveries) == num_faults
    assert all(recovery.recovery_s is not None for recovery in report.recoveries)
    for recovery in report.recoveries:
        marks = [mark for mark in recovery.marks if mark is not None]
        assert marks == sorted(marks)
    assert 0 < report.training_goodput <= report.infrastructure_goodput < 1
    assert report.num_steps == 25


def test_without_the_job_s_log_the_launchers_are_counted(tmp_path: Path) -> None:
    """On a cluster nobody writes job.jsonl."""
    run = kubernetes_run(tmp_path / "r")
    report = analyse(run.write(lambda record: record["source"] == "job"))
    assert report.restarts.containers == 4
    assert report.queued_s is None and report.ettr is None
    assert report.num_replayed_steps == 2


def test_a_step_of_the_wall_clock_bends_no_duration(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    straight = analyse(run.write())
    steps = [record for record in run.records if record["kind"] == "step"]
    for record in steps[len(steps) // 3 :]:
        record["wall"] += 3600.0
    assert analyse(run.write()).buckets == pytest.approx(dict(straight.buckets), abs=TOLERANCE)


def test_a_fault_during_recovery(tmp_path: Path) -> None:
    """The second fault hits before the first step: both recoveries end with that step, and time is counted once."""
    run = RunBuilder(tmp_path / "r")
    run.begin()
    run.steps(1, 3)
    run.fault("exception", 1, 4)
    run.leave_in_process(0.1)
    run.enter(2)
    run.fault("exception", 2, 3)
    run.leave_in_process(0.2)
    run.enter(2)
    run.steps(3, 6)
    run.finish(6)
    report = analyse(run.write())
    first, second = report.recoveries
    assert first.marks[7] == second.marks[7] is not None
    assert report.buckets["detect"] == pytest.approx(0.3, abs=TOLERANCE)
    assert report.restarts.in_process == 2
    assert first.marks[2] is not None and second.marks[0] is not None and first.marks[2] < second.marks[0]


def test_a_failure_that_nobody_planned(tmp_path: Path) -> None:
    run = in_job_run(tmp_path / "r")
    for path in (run.run_dir / "faults").iterdir():
        path.unlink()
    report = analyse(run.write(lambda record: record["kind"] == "fault"))
    (recovery,) = report.recoveries
    assert (recovery.type, recovery.step, recovery.rank) == ("unplanned", 13, None)
    # Since the end of step 12: when it really began nobody knows.
    assert recovery.phases_s["detect"] == pytest.approx(0.5 + 0.01, abs=TOLERANCE)
    assert report.buckets["detect"] == pytest.approx(0.51, abs=TOLERANCE)


def test_a_stop_is_no_failure(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "r", arm="in-job")
    run.begin()
    run.steps(1, 3)
    run.every("stopping", step=3)
    run.save(3)
    run.every("drain", duration_s=0.0)
    run.restart_containers(0.1, 0.0, 0.0, 0)
    run.start_workers()
    run.enter(3)
    run.steps(4, 6)
    run.finish(6)
    report = analyse(run.write())
    (recovery,) = report.recoveries
    assert recovery.type == "stop" and recovery.marks[0] == recovery.marks[1]
    assert report.buckets["detect"] == 0.0


def test_snapshots_inside_a_save_count_once(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "r")
    run.begin()
    run.steps(1, 2)
    run.now += 0.25
    run.every("snapshot", step=2, stall_s=0.2)
    run.now += 0.25
    run.every("save", step=2, mode="async", blocking_s=0.5)
    run.steps(3, 3)
    run.now += 0.125
    run.every("snapshot", step=3, stall_s=0.125)
    run.steps(4, 4)
    run.finish(4)
    report = analyse(run.write())
    assert report.buckets["checkpoint stall"] == pytest.approx(0.625, abs=TOLERANCE)
    assert report.buckets["other"] == pytest.approx(0.04, abs=TOLERANCE)


def test_an_unfinished_run_yields_a_partial_report(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    cut = next(i for i, record in enumerate(run.records) if record.get("type") == "hang") + 1
    del run.records[cut:]
    run.emit("job", "job_end", succeeded=False, reason="BackoffLimitExceeded: backoffLimit 6")
    report = analyse(run.write(result=False))
    assert not report.complete
    assert "no rank has train_end" in report.note and "BackoffLimitExceeded" in report.note
    assert abs(sum(report.buckets.values()) - report.duration_s) <= 1e-6
    assert (report.final_step, report.num_steps) == (15, 15)
    assert [recovery.recovery_s is None for recovery in report.recoveries] == [False, True]
    assert report.recovery_statistics()["hang"].num_unrecovered == 1
    assert math.isnan(report.recovery_statistics()["hang"].mean_s)
    assert (report.arm, report.sha256) == ("", "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_cut_anywhere_still_adds_up(script: Callable[[Path], RunBuilder], tmp_path: Path) -> None:
    """F28: whatever a kill leaves of the log; a record may be missing then, which is said."""
    run = script(tmp_path / "r")
    whole, num_reports = list(run.records), 0
    for count in range(30, len(whole), 7):
        run.records = whole[:count]
        for path in (run.run_dir / "faults").iterdir():
            path.unlink()
        try:
            report = analyse(run.write(result=False))
        except EventError as error:
            # The ranks' records of one instant are cut in the middle.
            assert str(error)
            continue
        num_reports += 1
        assert abs(sum(report.buckets.values()) - report.duration_s) <= 1e-6
        assert 0 <= report.training_goodput <= report.infrastructure_goodput <= 1
    assert num_reports > 20


def nth(kind: str, n: int, source: str = "") -> Callable[[Record], bool]:
    """Names the n-th record of this kind (of this source)."""
    seen = [0]

    def drop(record: Record) -> bool:
        if record["kind"] == kind and (not source or record["source"] == source):
            seen[0] += 1
            return seen[0] == n
        return False

    return drop


NEEDED = [
    (in_process_run, nth("step", 6, "rank0"), "rank0: step 6 missing in attempt 0.0"),
    (in_process_run, nth("step", 8, "rank3"), "rank3: step 6 missing in attempt 0.1: step 7 comes instead"),
    (in_process_run, nth("process_start", 1, "rank0"), "rank0: no process_start"),
    (in_process_run, nth("attempt", 1, "rank0"), "rank0: group_ready without an attempt"),
    (in_process_run, nth("attempt", 2, "rank1"), "rank1: group_ready of an attempt that is not in the log"),
    (in_process_run, nth("group_ready", 2, "rank0"), "rank0: no group_ready in attempt 0.1"),
    (in_process_run, nth("model_ready", 1, "rank2"), "rank2: no model_ready in attempt 0.0"),
    (in_process_run, nth("state_ready", 3, "rank0"), "rank0: no state_ready in attempt 0.2"),
    (in_process_run, nth("detected", 1, "rank0"), "rank0: no detected between the attempts 0.0 and 0.1"),
    (in_process_run, nth("out", 2, "rank3"), "rank3: no out between the attempts 0.1 and 0.2"),
    (in_process_run, nth("fault", 1), "fault of exception at step 8 on rank 2 fired but"),
    (in_process_run, nth("drain", 1, "rank0"), "rank0: train_end without a drain"),
    (in_process_run, nth("launcher_start", 1), "pod0: no launcher_start"),
    (kubernetes_run, lambda r: r["kind"] == "rendezvous" and r["cycle"] == 1, "no rendezvous before attempt 1.0"),
    (kubernetes_run, lambda r: r["kind"] == "process_start" and r["source"] == "rank0", "rank0: no process_start"),
    (
        in_job_run,
        lambda r: r["kind"] == "workers_failed",
        "no detected, workers_failed or container_exit between the attempts 0.0 and 1.0",
    ),
    (in_job_run, lambda r: r["kind"] == "train_end", "the result says succeeded but no rank has train_end"),
]


@pytest.mark.parametrize(("script", "drop", "message"), NEEDED)
def test_a_missing_record_is_named(
    script: Callable[[Path], RunBuilder], drop: Callable[[Record], bool], message: str, tmp_path: Path
) -> None:
    run = script(tmp_path / "r")
    analyse(run.write())
    with pytest.raises(EventError) as raised:
        analyse(run.write(drop))
    assert message in str(raised.value)


def test_a_missing_save_shows_up_as_a_gap_with_its_place(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    whole = analyse(run.write())
    report = analyse(run.write(nth("save", 2, "rank0")))
    assert report.buckets["other"] - whole.buckets["other"] == pytest.approx(0.75, abs=TOLERANCE)
    assert report.gaps[0].after_step == 10
    assert report.gaps[0].duration_s == pytest.approx(0.76, abs=TOLERANCE)


def test_overlapping_records_are_refused(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    next(r for r in run.records if r["kind"] == "save" and r["source"] == "rank0")["blocking_s"] = 1.5
    with pytest.raises(EventError, match=r"rank0: save of step 5 begins 0\.7\d\d s before"):
        analyse(run.write())


def test_the_newest_rank_that_finished_counts_when_rank_0_is_gone(tmp_path: Path) -> None:
    """A world that shrank."""
    run = in_process_run(tmp_path / "r")
    last = run.generation
    report = analyse(run.write(lambda r: (r["source"] == "rank0" and r.get("generation") == last) or _ends(r, "rank0")))
    assert report.complete and report.num_steps == 20


def _ends(record: Record, source: str) -> bool:
    kinds = ("model_ready", "save", "drain", "train_end", "process_end")
    return record["source"] == source and record["kind"] in kinds and record["wall"] > 1_700_000_031.0


def test_the_result_names_arm_and_versions(tmp_path: Path) -> None:
    report = report_of(in_process_run, tmp_path)
    assert (report.run_id, report.arm, report.checkpoint_mode) == ("in-process-run", "in-process", "async")
    assert report.versions["nvidia-resiliency-ext"] == "0.4.1"


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="no event log"):
        analyse(tmp_path)


def test_torn_lines_are_counted_in_the_report(tmp_path: Path) -> None:
    """F28."""
    run_dir = in_process_run(tmp_path / "r").write()
    path = run_dir / "events" / "rank3.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps({"kind": "warning"}).encode()[:-3])
    assert analyse(run_dir).num_torn == 1
