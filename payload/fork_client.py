"""The process that the agent starts for each rank: it stands for a worker forked by the fork server.

Runs as ``python -S -E fork_client.py MODULE LAUNCHER_PID [SOCKET]`` and imports next to nothing, so that it is up
within some 30 ms. It hands its standard streams to the fork server, passes on signals, and ends as the worker ends.
Without a server it becomes the worker itself (a cold start).
"""

import array
import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def _die_with_launcher(launcher: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(137)


def _exec_worker(module: str) -> None:
    os.execv(sys.executable, [sys.executable, "-u", "-m", module])


def _connect(path: str) -> socket.socket | None:
    """None where no server listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError:
        connection.close()
        return None
    return connection


def _stand_for_worker(connection: socket.socket, module: str) -> int | None:
    """The worker's exit status as waitpid(2) gives it; None where the server ended before it had forked."""
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg([module.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    answer = connection.recv(64)
    if not answer:
        return None
    worker = int(answer)

    def pass_on(number: int, frame: object) -> None:
        try:
            os.kill(worker, number)
        except ProcessLookupError:
            return

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    status = connection.recv(64)
    if status:
        return int(status)
    # A server that dies takes its workers along (death signal), but not what they had started.
    try:
        os.killpg(worker, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return int(signal.SIGKILL)


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    module, launcher, *server = sys.argv[1:]
    _die_with_launcher(int(launcher))
    connection = _connect(server[0]) if server else None
    status = None
    if connection is not None:
        try:
            status = _stand_for_worker(connection, module)
        except OSError:
            status = None
    if status is None:
        _exec_worker(module)
    else:
        _end_like(status)


if __name__ == "__main__":
    main()
