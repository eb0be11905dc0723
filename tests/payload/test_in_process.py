"""The in-process arm on gloo: exceptions, hangs and lost ranks, in launched pods of one rank each."""

import json

import pytest

from tests.payload.pods import Pods, left_behind

pytestmark = pytest.mark.launched


def recovery_s(pods, rank, before, after):
    """From the fault of one generation to the first step of the next, on that rank."""
    fault = next(e for e in pods.events(f"rank{rank}", "fault") if e["generation"] == before)
    first = next(e for e in pods.events(f"rank{rank}", "step") if e["generation"] == after)
    return first.wall - fault.wall


@pytest.mark.timeout(400)
def test_exceptions_and_a_hang_are_recovered_in_the_same_processes(tmp_path):
    """Also: a C call longer than the soft timeout inside wait() is no hang, hooks run, traces are kept."""
    plan = [
        {"step": 3, "rank": 1, "type": "exception"},
        {"step": 5, "rank": 0, "type": "exception"},
        {"step": 7, "rank": 1, "type": "hang"},
    ]
    fields = {"recovery.arm": "in-process", "training.min_step_s": 0.02}
    with Pods(tmp_path, plan=plan, steps=9, env={"TINY_BLOCK_S": "8"}, **fields) as pods:
        assert pods.start().wait() == {0: 0, 1: 0}, pods.logs()
    assert left_behind(tmp_path) == []
    for rank in (0, 1):
        source = f"rank{rank}"
        assert len(pods.events(source, "process_start")) == 1
        assert [e["generation"] for e in pods.events(source, "attempt")] == ["0.0", "0.1", "0.2", "0.3"]
        assert [e["world_size"] for e in pods.events(source, "attempt")] == [2] * 4
        assert [e["step"] for e in pods.events(source, "step")] == list(range(1, 10)), "nothing lost, nothing twice"
        detected, out = pods.events(source, "detected"), pods.events(source, "out")
        assert [e["generation"] for e in detected] == [e["generation"] for e in out] == ["0.0", "0.1", "0.2"]
        assert all(first.wall <= second.wall for first, second in zip(detected, out, strict=True))
    how = [e["how"] for e in pods.events("rank1", "detected")]
    assert how[0] == "exception" and "injected" in pods.events("rank1", "detected")[0]["reason"]
    found = [pods.events(f"rank{rank}", "detected")[2]["how"] for rank in (0, 1)]
    assert "timeout" in found, "the first rank to leave wakes the other one with a broken connection"
    soft_s = pods.config.timeouts.soft_s
    assert recovery_s(pods, 1, "0.0", "0.1") < 20
    assert soft_s <= recovery_s(pods, 1, "0.2", "0.3") < soft_s + 20
    assert (pods.config.run_dir / "aborted").read_text() == "0.2"
    traces = sorted(p.name for p in (pods.config.run_dir / "traces").iterdir())
    assert traces == [f"rank{rank}-0.{iteration}.json" for rank in (0, 1) for iteration in (0, 1, 2)]
    trace = json.loads((pods.config.run_dir / "traces" / "rank0-0.0.json").read_text())
    assert trace["entries"], "the recorder kept the collectives"
    restarts = sorted(p.name for p in pods.config.restarts_dir.glob("restart-*"))
    assert restarts == [f"restart-0.{i}.json" for i in (1, 2, 3)], "each restart is counted once, not once a rank"


@pytest.mark.timeout(400)
def test_the_world_shrinks_if_it_may(tmp_path):
    """A C call that never returns is ended by the hard timeout; the other pod goes on in a smaller world."""
    plan = [{"step": 3, "rank": 1, "type": "hang-c"}]
    fields = {"recovery.arm": "in-process", "recovery.min_world_size": 1, "timeouts.hard_s": 8.0}
    with Pods(tmp_path, plan=plan, **fields) as pods:
        assert pods.start().wait() == {0: 0, 1: 1}, pods.logs()
    assert [(e["generation"], e["world_size"]) for e in pods.events("rank0", "attempt")] == [("0.0", 2), ("0.1", 1)]
    assert [e["step"] for e in pods.events("rank0", "step")] == list(range(1, 7))
    assert list(pods.events("pod1", "workers_failed")[0]["codes"]) == ["1"]
    assert left_behind(tmp_path) == []


@pytest.mark.timeout(400)
def test_a_lost_rank_ends_the_pods_where_all_are_needed(tmp_path):
    plan = [{"step": 3, "rank": 1, "type": "sigkill"}]
    with Pods(tmp_path, plan=plan, **{"recovery.arm": "in-process"}) as pods:
        assert pods.start().wait() == {0: 1, 1: 1}, pods.logs()
        assert pods.newest_step() == 2, "no rank trains alone"
        assert not list(pods.config.restarts_dir.glob("restart-*")), "no restart was made"
        assert pods.start().wait() == {0: 0, 1: 0}, pods.logs()
    assert [e["generation"] for e in pods.events("rank1", "attempt")] == ["0.0", "1.0"]
    assert left_behind(tmp_path) == []
