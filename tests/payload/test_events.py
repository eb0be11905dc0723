"""The event log: one line a record, whatever kills the writer."""

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from payload.events import Event, EventError, EventLog, read_events, read_file


def test_round_trip(tmp_path: Path) -> None:
    log = EventLog.for_rank(tmp_path, 3)
    log.emit("step", step=7, loss=1.5)
    log.close()
    (event,) = read_events(tmp_path).of("rank3")
    assert (event.kind, event.source, event.pid, event["step"], event["loss"]) == ("step", "rank3", os.getpid(), 7, 1.5)
    assert event.wall > 1e9 and event.mono > 0


def test_every_cut_of_the_last_record_loses_only_it(tmp_path: Path) -> None:
    """F28."""
    path = tmp_path / "rank0.jsonl"
    log = EventLog(path, "rank0")
    log.emit("step", step=1, text="e\u00e9")
    log.emit("step", step=2, text="e\u00e9")
    log.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole) - 1):
        path.write_bytes(whole[:length])
        events, num_torn = read_file(path)
        assert [event["step"] for event in events] == [1]
        assert num_torn == (length > first)


def test_a_log_opened_behind_a_torn_record_loses_no_other(tmp_path: Path) -> None:
    """F28: the next process of the rank appends to the file that its predecessor left half written."""
    path = tmp_path / "rank0.jsonl"
    first = EventLog(path, "rank0")
    first.emit("step", step=1)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","wall":1.0,"mo')
    second = EventLog(path, "rank0")
    second.emit("step", step=2)
    second.close()
    read = read_events(tmp_path)
    assert [event["step"] for event in read.of("rank0")] == [1, 2]
    assert read.num_torn == 1


def _write_many(path: Path, number: int) -> None:
    log = EventLog(path, "rank0")
    for i in range(200):
        log.emit("step", writer=number, i=i, padding="x" * 300)
    log.close()


def test_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    context = multiprocessing.get_context("fork")
    threads = [threading.Thread(target=_write_many, args=(path, number)) for number in range(2)]
    processes = [context.Process(target=_write_many, args=(path, number)) for number in range(2, 4)]
    for worker in processes + threads:
        worker.start()
    for worker in processes + threads:
        worker.join()
    events, num_torn = read_file(path)
    assert num_torn == 0
    for number in range(4):
        assert [event["i"] for event in events if event["writer"] == number] == list(range(200))


def test_reserved_fields_are_refused(tmp_path: Path) -> None:
    log = EventLog.for_job(tmp_path)
    with pytest.raises(ValueError, match="wall: reserved"):
        log.emit("job_start", wall=1.0)
    log.close()
    log.close()
    assert (tmp_path / "job.jsonl").read_bytes() == b""


def test_a_short_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog.for_pod(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr("payload.events.os.write", lambda descriptor, data: 3)
        with pytest.raises(OSError, match="only 3 of"):
            log.emit("launcher_start")
    log.close()


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="no event log"):
        read_events(tmp_path)
    log = EventLog.for_rank(tmp_path, 10)
    log.emit("step", step=1)
    log.close()
    EventLog.for_rank(tmp_path, 2).close()
    read = read_events(tmp_path)
    assert read.ranks() == ("rank2", "rank10") and read.pods() == ()
    with pytest.raises(EventError, match=r"job: no events; sources found: rank10, rank2"):
        read.of("job")
    with pytest.raises(EventError, match="rank10: event step has no field 'loss'"):
        read.of("rank10")[0]["loss"]


def test_lines_that_are_no_record_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    path.write_text(json.dumps([1]) + "\n" + json.dumps({"kind": "x"}) + "\n\n")
    assert read_file(path) == ((), 2)


def test_get_has_a_default() -> None:
    assert Event("step", 0.0, 0.0, 1, "rank0").get("loss", 2) == 2
