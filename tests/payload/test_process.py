"""Process trees: nothing outlives its parent, orphans are found, and a tree ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from payload import process

ROOT = Path(__file__).parents[2]
WAIT = "import time; time.sleep(600)"


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def python():
    started = []

    def start(code):
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        process.send([*process.descendants(child.pid), child.pid], signal.SIGKILL)
        child.wait()
        child.stdout.close()


def test_children_and_start_time(python):
    before = time.time()
    child = python(WAIT)
    assert child.pid in process.children_of(os.getpid())
    assert abs(process.started_wall(child.pid) - before) < 30
    assert process.is_running(child.pid)
    child.kill()
    until(lambda: not process.is_running(child.pid))
    child.wait()
    with pytest.raises(ProcessLookupError):
        process.started_wall(child.pid)


def test_death_signal_ends_a_child_with_its_parent(python):
    """A launcher that is SIGKILLed takes its workers along."""
    parent = python(
        "import os, sys, subprocess\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from payload import process\n"
        "parent = os.getpid()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    process.die_with_parent(parent)\n"
        "    print(os.getpid(), flush=True)\n"
        "    while True: __import__('time').sleep(1)\n"
        "os.waitpid(child, 0)\n"
    )
    child = int(parent.stdout.readline())
    assert process.is_running(child)
    parent.kill()
    parent.wait()
    until(lambda: not process.is_running(child))


def test_kill_below_finds_orphans_of_a_subreaper(python):
    """A process whose own parent is gone (NVRx's daemonised monitor) ends with the launcher all the same."""
    launcher = python(
        "import os, sys, signal, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from payload import process\n"
        "process.become_subreaper()\n"
        "said, say = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        print(os.getpid(), flush=True)\n"
        "        os.write(say, b'.')\n"
        "        while True: time.sleep(1)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while not process.children_of(os.getpid()): time.sleep(0.01)\n"
        "os.read(said, 1)\n"
        "process.kill_below(os.getpid())\n"
        "print(process.children_of(os.getpid()), flush=True)\n"
    )
    orphan = int(launcher.stdout.readline())
    assert launcher.stdout.readline().strip() == "[]"
    assert not process.is_running(orphan)


def test_only_adopted_zombies_are_reaped(python):
    """A child's exit code is its owner's; what a child left behind has no owner."""
    launcher = python(
        "import os, subprocess, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from payload import process\n"
        "process.become_subreaper()\n"
        "own = subprocess.Popen([sys.executable, '-S', '-c', 'raise SystemExit(5)'])\n"
        "worker = subprocess.Popen([sys.executable, '-S', '-c', 'raise SystemExit(6)'], start_new_session=True)\n"
        "leaver = os.fork()\n"
        "if leaver == 0:\n"
        "    os.setsid()\n"
        "    os.fork()\n"
        "    os._exit(0)\n"
        "os.waitpid(leaver, 0)\n"
        "while any(map(process.is_running, process.children_of(os.getpid()))): time.sleep(0.01)\n"
        "process.reap(adopted_only=True)\n"
        "print(sorted(process.children_of(os.getpid())) == sorted([own.pid, worker.pid]))\n"
        "print(own.wait(), worker.wait(), flush=True)\n"
    )
    assert launcher.stdout.read().split() == ["True", "5", "6"]
