"""The sandbox of one local pod: starts its container, passes signals on, and leaves nothing behind.

Run by the local kubelet as ``python -m payload.sandbox FOLDER...`` in a session of its own. Commands come in on stdin
and reports go out on stdout, one JSON object a line. It is the subreaper of all that the container starts. When its
stdin closes, which happens however the kubelet's process ends, it kills the container's tree, removes the folders and
ends. Standard library only: it starts in some tens of milliseconds.

Commands: {"do": "start", "argv", "env", "cwd", "log"}, {"do": "signal", "number"}, {"do": "kill"}.
Reports: {"code", "signal"} once for each container that ended, when none of its processes is left.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from payload.process import become_subreaper, descendants, die_with_parent, kill_below, send

START_ERROR = 128
"""Exit code that the kubelet gives a container whose command does not start."""


class Sandbox:
    """At most one container at a time."""

    def __init__(self) -> None:
        self._container: subprocess.Popen[bytes] | None = None

    def obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "start":
            self._start(command)
        elif command["do"] == "kill":
            # Not waited for here: the container's exit status belongs to reap().
            send(descendants(os.getpid()), signal.SIGKILL)
        elif self._container is not None:
            self._container.send_signal(command["number"])

    def _start(self, command: dict[str, Any]) -> None:
        """A command that cannot be started is a container that ended with START_ERROR."""
        parent = os.getpid()
        with Path(command["log"]).open("ab") as log:
            try:
                self._container = subprocess.Popen(
                    command["argv"],
                    env=command["env"],
                    cwd=command["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(parent),
                )
            except OSError as error:
                log.write(f"cannot start {command['argv']}: {error}\n".encode())
                _report(START_ERROR, 0)

    def reap(self) -> None:
        """Waits for what ended; once the container's first process has, kills the rest of its tree and reports it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._container is None or pid != self._container.pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            self._container.returncode = code  # waited for behind Popen's back
            self._container = None
            kill_below(os.getpid())
            _report(code if code >= 0 else 128 - code, -min(code, 0))


def _report(code: int, number: int) -> None:
    os.write(sys.stdout.fileno(), json.dumps({"code": code, "signal": number}).encode() + b"\n")


def main(folders: list[str]) -> None:
    become_subreaper()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    sandbox = Sandbox()
    try:
        _serve(sandbox, wake_read)
    finally:
        kill_below(os.getpid())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _serve(sandbox: Sandbox, wake: int) -> None:
    """Until stdin closes."""
    stdin, pending = sys.stdin.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wake in ready:
                os.read(wake, 4096)
                sandbox.reap()
            if stdin in ready:
                data = os.read(stdin, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    sandbox.obey(json.loads(line))


if __name__ == "__main__":
    main(sys.argv[1:])
