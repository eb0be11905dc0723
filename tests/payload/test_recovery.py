"""The pieces of the arms: which arm is built, what an Attempt does, and how a rank gets out of a broken attempt."""

import socket
import threading
import time
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from payload import recovery
from payload.config import ConfigError, RunConfig
from payload.environment import WorkerEnvironment
from payload.events import EventLog
from payload.recovery import attempt as attempt_module
from payload.recovery.abort import dump_trace, open_sockets, shut_down_gloo
from payload.recovery.attempt import WorkerAttempt
from payload.recovery.in_process import InProcessArm, LiftedTimestamp, _initial_ranks
from payload.recovery.kubernetes import SingleEntryArm


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_module, "connect_store", lambda environment: HashStore())
    config = RunConfig().with_overrides({"workdir": str(tmp_path), "timeouts.setup_s": 5.0})
    return WorkerEnvironment(config, 1, 4, 1, 0, 3, "127.0.0.1", 29400, "node", None, False)


def attempt(environment, **fields):
    return WorkerAttempt(environment, HashStore(), rank=1, world_size=4, iteration=2, **fields)


def with_fields(environment, **fields):
    return replace(environment, config=environment.config.with_overrides(fields))


def test_attempts_of_a_run_never_share_keys(environment):
    """F21: keyed by run, cycle and iteration, never by a counter of one node."""
    first, again = attempt(environment), attempt(environment)
    assert first.generation == again.generation == "3.2"
    base = HashStore()
    stores = [
        WorkerAttempt(replace(environment, cycle=cycle), base, rank=0, world_size=4, iteration=iteration).store
        for cycle, iteration in [(3, 2), (3, 3), (4, 2)]
    ]
    for number, store in enumerate(stores):
        assert store.add("key", 1) == 1, f"store {number} begins empty"


def test_wait_pings_while_it_lasts_and_no_longer_than_allowed(environment):
    pings = []
    lasting = attempt(environment, pings=(lambda: pings.append(time.monotonic()),), ping_interval_s=0.01)
    with lasting.wait("building"):
        deadline = time.monotonic() + 60
        while len(pings) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(pings) >= 5
    assert not [t for t in threading.enumerate() if t.name == "wait-building"]
    after = len(pings)
    lasting.ping()
    assert len(pings) == after + 1
    short = with_fields(environment, **{"timeouts.setup_s": 0.05})
    pings.clear()
    limited = attempt(short, pings=(lambda: pings.append(time.monotonic()),), ping_interval_s=0.01)
    with limited.wait("hanging"):
        (thread,) = [t for t in threading.enumerate() if t.name == "wait-hanging"]
        thread.join(60)
        assert not thread.is_alive(), "a block that outlasts setup_s is a hang like any other"


def test_wait_ends_its_thread_when_the_block_raises(environment):
    failing = attempt(environment, pings=(lambda: None,), ping_interval_s=0.01)
    with pytest.raises(ValueError, match="inside"), failing.wait("failing"):
        raise ValueError("inside")
    assert not [t for t in threading.enumerate() if t.name == "wait-failing"]


def test_abort_hooks_run_once_newest_first(environment):
    ran = []
    abandoned = attempt(environment)
    abandoned.on_abort(lambda: ran.append("first"))
    abandoned.on_abort(lambda: ran.append("second"))
    abandoned.run_abort_hooks()
    abandoned.run_abort_hooks()
    assert ran == ["second", "first"]


def test_baseline_reports_and_passes_on_what_train_raises(environment, monkeypatch, tmp_path):
    monkeypatch.setattr("payload.recovery.kubernetes.connect_store", lambda environment: HashStore())
    events = EventLog(tmp_path / "rank1.jsonl", "rank1")
    hooks, seen = [], []

    def train(attempt):
        seen.append((attempt.rank, attempt.world_size, attempt.local_rank, attempt.generation))
        attempt.on_abort(lambda: hooks.append("ran"))
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        SingleEntryArm(environment, events).run(train)
    events.close()
    assert seen == [(1, 4, 1, "3.0")] and hooks == ["ran"]
    assert '"kind":"detected"' in (tmp_path / "rank1.jsonl").read_text()


def test_the_arm_asked_for_is_the_arm_built(environment, monkeypatch):
    monkeypatch.setattr("payload.recovery.in_process.connect_store", lambda environment: HashStore())
    built = recovery.build(environment.config.with_overrides({"recovery.arm": "kubernetes"}), environment, EventLog)
    assert isinstance(built, SingleEntryArm)
    built = recovery.build(environment.config.with_overrides({"recovery.arm": "in-process"}), environment, EventLog)
    assert isinstance(built, InProcessArm)


@pytest.mark.parametrize("arm", ["in-process", "in-job", "layered"])
def test_a_missing_library_is_an_error_and_no_other_arm(environment, monkeypatch, arm):
    """F14's kind: what was asked for and cannot run fails at start."""

    def missing(config, environment, events):
        raise ImportError("No module named 'nvidia_resiliency_ext'")

    monkeypatch.setattr(recovery, "_nvrx_arm", missing)
    config = environment.config.with_overrides({"recovery.arm": arm})
    with pytest.raises(ConfigError, match=f"recovery.arm: '{arm}' needs nvidia-resiliency-ext"):
        recovery.build(config, environment, EventLog)


def test_progress_never_moves_back():
    """The watchdog's stale time of the main thread must not undo what wait() wrote."""
    stamp = LiftedTimestamp(auto=10.0, manual=5.0)
    stamp.auto = 7.0
    stamp.manual = 6.0
    assert (stamp.auto, stamp.manual) == (10.0, 6.0)
    stamp.auto = 12.0
    assert stamp.auto == 12.0


def test_ranks_that_fall_silent_are_numbers():
    """NVRx writes what the store returns into a barrier that every rank parses."""
    from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin

    assert StoreMixin.get_initial_ranks is _initial_ranks
    store = PrefixStore("prefix", HashStore())
    store.set_initial_rank(0, 7)
    assert store.get_initial_ranks([0]) == [7]


def test_only_the_sockets_of_the_attempt_are_shut_down():
    """Connections from before the attempt and those of the store go on; blocked readers of the others wake."""
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as peer:
        pairs = []

        def connect(server):
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            pairs.append((near, far))
            return near, far

        try:
            before = connect(peer)
            keep = open_sockets()
            to_store, gloo = connect(store), connect(peer)
            woken = []
            thread = threading.Thread(target=lambda: woken.append(gloo[0].recv(1)))
            thread.start()
            assert shut_down_gloo(keep, store.getsockname()[1]) == 2
            thread.join(60)
            assert woken == [b""]
            for near, far in (before, to_store):
                near.sendall(b"x")
                assert far.recv(1) == b"x"
        finally:
            for near, far in pairs:
                near.close()
                far.close()


def test_trace_is_written_or_said_to_be_missing(tmp_path, monkeypatch):
    assert dump_trace(tmp_path / "traces" / "rank0-0.0.json")
    import torch

    monkeypatch.setattr(torch._C, "_distributed_c10d", object())
    assert not dump_trace(tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()
