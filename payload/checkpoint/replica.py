"""Copies of snapshots in the next pod's memory, so that a lost pod costs no read of the durable save.

Plain TCP between the rank processes, not a process group: an in-process restart destroys all groups, and a copy that
is under way has nothing to do with the attempt that made it. The files on the receiving side outlive its process like
a rank's own slots. Each attempt makes new sockets (an abort closes every TCP connection of the one before) and a new
secret, agreed over the control group; whoever does not have it is not listened to.

The newest published snapshot is sent whenever the last transfer is over, so a pod that is lost costs the steps since
then. Two slots a peer: one is whole while the other is being received.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from payload.checkpoint.peers import Peers
from payload.checkpoint.slots import Header, Slot
from payload.checkpoint.stage import Slab

log = logging.getLogger(__name__)

NUM_REPLICA_SLOTS = 2
_TIMEOUT_S = 60.0
"""Of one send or receive; also how long a lost peer goes unnoticed."""
_MAX_HEADER_BYTES = 64 << 20


class TransferError(OSError):
    """The peer closed the connection, or sent something else."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int


def own_host() -> str:
    """The address of the default route's interface, which peers in the cluster reach; no packet is sent.

    Where there is no route, only this machine can be meant.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(8, "big") + data)


def _receive_exactly(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if count == 0:
            raise TransferError("the peer closed the connection")
        done += count


def _receive_message(connection: socket.socket) -> dict[str, Any]:
    size = bytearray(8)
    _receive_exactly(connection, memoryview(size))
    length = int.from_bytes(size, "big")
    if length > _MAX_HEADER_BYTES:
        raise TransferError(f"a message of {length} bytes")
    data = bytearray(length)
    _receive_exactly(connection, memoryview(data))
    message = json.loads(data)
    if not isinstance(message, dict):
        raise TransferError("not a message")
    return message


def _header(values: dict[str, Any]) -> Header:
    return Header(**{**values, "checksums": tuple(values["checksums"])})


def _memory(slab: Slab, size_bytes: int) -> memoryview:
    return memoryview(slab.bytes_at(0, size_bytes).numpy().data).cast("B")


class ReplicaStore:
    """Snapshots of other ranks, in this rank's memory folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def _place(self, rank: int) -> Path:
        path = self._folder / f"replica{rank}"
        path.mkdir(exist_ok=True)
        return path

    def headers(self, world_size: int) -> dict[int, set[int]]:
        """Rank -> steps that are held for it; not verified."""
        found: dict[int, set[int]] = {}
        for path in self._folder.glob("replica*/slot*.json"):
            header = Header.read(path)
            if header is not None and header.world_size == world_size:
                found.setdefault(header.rank, set()).add(header.step)
        return found

    def forget_after(self, step: int) -> None:
        """Training goes on from this step: what was ahead of it is another history."""
        for path in self._folder.glob("replica*/slot*.json"):
            header = Header.read(path)
            if header is not None and header.step > step:
                path.unlink(missing_ok=True)

    def open(self, rank: int, step: int) -> tuple[Header, Slab] | None:
        for path in self._place(rank).glob("slot*.json"):
            header = Header.read(path)
            if header is not None and header.step == step:
                return header, Slab.map(path.with_suffix(""), private=True)
        return None

    def receive(self, header: Header, connection: socket.socket) -> bool:
        """Into the older slot; whether what came is whole."""
        with self._lock:
            slots = [Slot(self._place(header.rank), index, header.size_bytes) for index in range(NUM_REPLICA_SLOTS)]
            held = [slot.header() for slot in slots]  # None: received in part only, or never.
            steps = [header.step if header is not None else -1 for header in held]
            slot = slots[steps.index(min(steps))]
            try:
                slot.invalidate()
                _receive_exactly(connection, _memory(slot.slab, header.size_bytes))
                whole = slot.is_whole(header)
                if whole:
                    slot.publish(header)
                return whole
            finally:
                for each in slots:
                    each.slab.close()


class Replicator:
    """The connections of one attempt."""

    def __init__(
        self, peers: Peers, ranks_per_node: int, store: ReplicaStore, newest: Callable[[], tuple[Header, Slab] | None]
    ) -> None:
        """Collective. ``newest``: the newest published snapshot of this rank, safe from reuse until the next call."""
        self._store, self._newest = store, newest
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._server = socket.create_server(("0.0.0.0", 0), backlog=2 * peers.world_size)
        self._secret: str = peers.on_first(lambda: secrets.token_hex(16), "agreeing on a secret")
        mine = Address(own_host(), self._server.getsockname()[1])
        self._addresses = peers.gather(mine, "gathering the addresses of replicas")
        self._target = (peers.rank + ranks_per_node) % peers.world_size
        self._connections: set[socket.socket] = set()
        for name, target in (("replica-server", self._serve), ("replica-sender", self._send_newest)):
            threading.Thread(target=target, daemon=True, name=name).start()

    def wake(self) -> None:
        """A snapshot was published."""
        self._wake.set()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # close(), or the abort of the attempt
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True, name="replica-peer").start()

    def _answer(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            with connection:
                connection.settimeout(_TIMEOUT_S)
                hello = _receive_message(connection)
                if not hmac.compare_digest(str(hello.get("secret", "")), self._secret):
                    return
                if hello["do"] == "fetch":
                    self._give(connection, hello["rank"], hello["step"])
                    return
                connection.settimeout(None)  # The next snapshot comes when it comes.
                while not self._closed.is_set():
                    header = _header(_receive_message(connection))
                    connection.settimeout(_TIMEOUT_S)
                    _send_message(connection, {"whole": self._store.receive(header, connection)})
                    connection.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not self._closed.is_set():
                log.info("replica connection ended: %s", error)
        finally:
            self._connections.discard(connection)

    def _give(self, connection: socket.socket, rank: int, step: int) -> None:
        found = self._store.open(rank, step)
        if found is None:
            _send_message(connection, {"missing": True})
            return
        header, slab = found
        _send_message(connection, asdict(header))
        connection.sendall(_memory(slab, header.size_bytes))
        slab.close()

    def _connect(self, peer: int, **hello: Any) -> socket.socket:
        address = self._addresses[peer]
        connection = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
        self._connections.add(connection)
        _send_message(connection, {"secret": self._secret, **hello})
        return connection

    def _send_newest(self) -> None:
        sent = -1
        try:
            with self._connect(self._target, do="store") as connection:
                while True:
                    self._wake.wait()
                    self._wake.clear()
                    if self._closed.is_set():
                        return
                    found = self._newest()
                    if found is None or found[0].step == sent:
                        continue
                    header, slab = found
                    _send_message(connection, asdict(header))
                    connection.sendall(_memory(slab, header.size_bytes))
                    # What was overwritten on the way fails the checksum there, and the next one is sent.
                    if _receive_message(connection).get("whole"):
                        sent = header.step
        except (OSError, ValueError) as error:
            if not self._closed.is_set():
                log.warning("no more replicas to rank %d in this attempt: %s", self._target, error)

    def fetch(self, holder: int, rank: int, step: int, slot: Slot) -> bool:
        """Fills an own slot from what ``holder`` holds; whether it came whole. Bounded."""
        try:
            with self._connect(holder, do="fetch", rank=rank, step=step) as connection:
                message = _receive_message(connection)
                if "missing" in message:
                    return False
                header = _header(message)
                if header.size_bytes != slot.slab.size_bytes:
                    return False
                slot.invalidate()
                _receive_exactly(connection, _memory(slot.slab, header.size_bytes))
                if not slot.is_whole(header):
                    return False
                slot.publish(header)
                return True
        except (OSError, ValueError, TypeError) as error:
            log.warning("replica of rank %d, step %d, from rank %d: %s", rank, step, holder, error)
            return False

    def close(self) -> None:
        """From any thread; does not wait for a transfer. Idempotent."""
        self._closed.set()
        self._wake.set()
        for blocked in (self._server, *self._connections):
            with suppress(OSError):  # Closed meanwhile.
                blocked.shutdown(socket.SHUT_RDWR)
        self._server.close()
