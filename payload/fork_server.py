"""One process a pod that has done a worker's imports and forks workers, so that a start costs no imports.

The agent starts fork_client.py for each rank. The client hands its standard streams to this server and then stands
for the worker: signals go through it to the worker, and it ends as the worker ends. Nothing is orphaned:

- the worker ends: its process group is killed, and its status goes to the client;
- the client ends (the agent killed it): its worker's process group is killed;
- this server ends: the kernel kills its workers (death signal), whose clients see the connection close;
- the launcher ends: the kernel kills this server and the clients.

The server never touches CUDA, and never forks once it has a second thread.
"""

from __future__ import annotations

import array
import gc
import importlib
import logging
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from payload import environment, process
from payload.config import RunConfig
from payload.environment import PodEnvironment

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 256
_NUM_STREAMS = 3
_BACKLOG = 64


class ForkServer:
    """The launcher's handle on its fork server."""

    def __init__(self, child: subprocess.Popen[bytes], address: str) -> None:
        self._child = child
        self.address = address
        """For the clients' command line."""

    @classmethod
    def start(cls, pod: PodEnvironment) -> ForkServer:
        """Starts the server, which accepts clients at once and answers when its imports are done."""
        # An abstract socket leaves no file behind, however this ends.
        address = f"@nvrx-eks-{pod.pod_uid}-{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener:
            listener.bind(socket_name(address))
            listener.listen(_BACKLOG)
            number = listener.fileno()
            command = [sys.executable, "-u", "-m", __name__, str(number), pod.worker_module, str(os.getpid())]
            # CUDA must not be initialised by the question whether it is there.
            extra = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            values = {**environment.snapshot(), **extra}
            child = subprocess.Popen(command, env=values, pass_fds=[number], start_new_session=True)
        return cls(child, address)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ended(self) -> int | None:
        """Its exit code (negative: a signal), once it has ended: from then on workers start cold."""
        return self._child.poll()


def socket_name(address: str) -> str:
    """``@name`` stands for an abstract socket."""
    return "\0" + address[1:] if address.startswith("@") else address


@dataclass(frozen=True)
class _Worker:
    pid: int
    descriptor: int
    """pidfd: readable when the worker has ended."""
    client: socket.socket


class Server:
    """The loop of the server process; one thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._workers: dict[int, _Worker] = {}

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        pid, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            client.close()
            return
        streams = array.array("i")
        size = _NUM_STREAMS * streams.itemsize
        message, ancillary, _, _ = client.recvmsg(_MAX_MESSAGE_BYTES, socket.CMSG_SPACE(size))
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                streams.frombytes(data[:size])
        try:
            if len(streams) == _NUM_STREAMS:
                self._fork(client, pid, message.decode(), streams.tolist())
            else:
                client.close()
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self, client: socket.socket, client_pid: int, module: str, streams: list[int]) -> None:
        try:
            values = _environment_of(client_pid)
            folder = Path(f"/proc/{client_pid}/cwd").readlink()
        except (FileNotFoundError, ProcessLookupError):  # killed meanwhile
            client.close()
            return
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._close_all(client)
            _become_worker(server_pid, module, values, folder, streams)
        worker = _Worker(pid, os.pidfd_open(pid), client)
        self._workers[client.fileno()] = worker
        self._selector.register(client, selectors.EVENT_READ, self._client_ended)
        self._selector.register(worker.descriptor, selectors.EVENT_READ, self._worker_ended)
        try:
            client.send(str(pid).encode())
        except OSError:
            self._kill(worker)

    def _close_all(self, client: socket.socket) -> None:
        """In the child: nothing of the server's may stay open."""
        client.close()
        self._listener.close()
        self._selector.close()
        for worker in self._workers.values():
            worker.client.close()
            os.close(worker.descriptor)

    def _client_ended(self, client: socket.socket) -> None:
        """Clients say nothing after their first message: this is the end of the connection."""
        self._selector.unregister(client)
        self._kill(self._workers[client.fileno()])

    @staticmethod
    def _kill(worker: _Worker) -> None:
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet the leader of its group
            process.send([worker.pid], signal.SIGKILL)

    def _worker_ended(self, descriptor: int) -> None:
        (worker,) = (w for w in self._workers.values() if w.descriptor == descriptor)
        _, status = os.waitpid(worker.pid, 0)
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except ProcessLookupError:  # it left no child in its group
            pass
        self._selector.unregister(descriptor)
        os.close(descriptor)
        number = worker.client.fileno()
        if number in self._selector.get_map():
            self._selector.unregister(worker.client)
            try:
                worker.client.send(str(status).encode())
            except OSError:
                log.warning("worker %d has ended, and its client before it", worker.pid)
        del self._workers[number]
        worker.client.close()


def _environment_of(pid: int) -> dict[str, str]:
    """What the process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _become_worker(server_pid: int, module: str, values: dict[str, str], folder: Path, streams: list[int]) -> NoReturn:
    """In the child: takes the client's place, as if the agent had started the module itself."""
    code = 1
    try:
        process.die_with_parent(server_pid)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        environment.replace({**values, environment.WARM: "1"})
        os.chdir(folder)
        random.seed()
        sys.argv = [module]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception:  # noqa: BLE001 - the end of the process: printed, and turned into its exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload(module: str, config: RunConfig) -> None:
    """A worker module's imports. Raises RuntimeError where they leave a thread or CUDA behind."""
    importlib.import_module(module).preload(config)
    hazards = process.fork_hazards()
    if hazards:
        raise RuntimeError(f"the imports of {module} started threads that a fork would break: {', '.join(hazards)}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"the imports of {module} initialised CUDA: a fork could not use it")


def main() -> NoReturn:
    """Runs as ``python -m payload.fork_server LISTENER MODULE LAUNCHER_PID``."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    number, module, launcher = sys.argv[1:]
    process.die_with_parent(int(launcher))
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    preload(module, PodEnvironment.read().config)
    # What is there now stays: no collection in a worker touches, and so copies, these pages.
    gc.collect()
    gc.freeze()
    Server(listener).run()


if __name__ == "__main__":
    main()
