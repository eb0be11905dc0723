"""Where the launchers of a Job meet: the store in pod 0's launcher, found by pod 0's name.

The store outlives every worker and dies with pod 0's launcher. One life of it is a session: a launcher that loses
the store ends, and a fresh set of launchers starts the next session.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from payload.environment import PodEnvironment

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_PROBE_S = 3.0
_WATCH_S = 0.5
_SILENT_S = 30.0
"""A store that has not answered for so long is gone, although its connection is not closed (a dead node)."""
_LOST = "nvrx-eks/lost"


class MeetingError(RuntimeError):
    """The launchers did not meet; the text names what was not reached."""


def resolve(name: str, hosts_file: Path | None) -> str:
    """The address of a pod: from the hosts file where there is one, else from DNS. Raises OSError."""
    if hosts_file is not None:
        for line in hosts_file.read_text().splitlines():
            fields = line.split()
            if len(fields) == 2 and fields[0] == name:
                return fields[1]
    return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


class Meeting:
    """This launcher's connection to the session's store."""

    def __init__(self, pod: PodEnvironment) -> None:
        self._pod = pod
        self._join_s = pod.config.timeouts.join_s
        self.host = ""
        """Address of pod 0."""
        self.local_address = ""
        """Address by which other pods reach this one."""
        self.store: TCPStore
        self.seen = time.monotonic()
        """When the store last answered the watch."""

    @property
    def port(self) -> int:
        return self._pod.port

    def open(self, *, alone: bool) -> None:
        """Opens (pod 0) or finds the store, within ``timeouts.join_s`` seconds.

        Args:
            alone: a session takes one launcher of each index. Where an earlier one has been in it, the session
                is told that it has lost a pod, and the next one is waited for.

        Raises:
            MeetingError: naming what could not be resolved or reached.
        """
        deadline = time.monotonic() + self._join_s
        if self._pod.index == 0:
            self.store = self._host()
        while True:
            self._find(deadline)
            count = self.store.add(f"nvrx-eks/pod/{self._pod.index}", 1)
            if count == 1 or not alone:
                break
            log.warning("pod %d has been in this session before: waiting for the next", self._pod.index)
            self.store.set(_LOST, str(self._pod.index))
            self._wait_for_end(deadline)
        self.local_address = self._own_address()

    def _host(self) -> TCPStore:
        try:
            # multi_tenant: the agent's rendezvous in this process shares the server.
            return TCPStore(
                "0.0.0.0", self.port, is_master=True, wait_for_workers=False, multi_tenant=True,
                timeout=timedelta(seconds=self._join_s),
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            raise MeetingError(f"pod 0 cannot listen on port {self.port}: {error}") from error

    def _find(self, deadline: float) -> None:
        """Resolves pod 0's name anew on each try: a name may come late, and may first lead to a dead pod."""
        name, why = self._pod.coordinator, "not tried"
        while True:
            try:
                address = resolve(name, self._pod.hosts_file)
                socket.create_connection((address, self.port), timeout=_PROBE_S).close()
                if self._pod.index:
                    self.store = self.connect(address)
            except (OSError, RuntimeError) as error:
                why = str(error)
            else:
                self.host = address
                return
            if time.monotonic() > deadline:
                raise MeetingError(f"{name}:{self.port} not reached within {self._join_s:g} s: {why}")
            time.sleep(_RETRY_S)

    def connect(self, address: str = "") -> TCPStore:
        """One more connection to the store. Raises RuntimeError."""
        return TCPStore(
            address or self.host, self.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=self._join_s),
        )  # fmt: skip

    def _wait_for_end(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                self.store.check([_LOST])
            except RuntimeError:
                return
            time.sleep(_RETRY_S)
        raise MeetingError(f"the session of an earlier launcher did not end within {self._join_s:g} s")

    def _own_address(self) -> str:
        """From the hosts file, else the address that this pod reaches pod 0 from."""
        if self._pod.index == 0:
            return self.host
        if self._pod.hosts_file is not None:
            first, dot, rest = self._pod.coordinator.partition(".")
            own = f"{first.rpartition('-')[0]}-{self._pod.index}{dot}{rest}"
            return resolve(own, self._pod.hosts_file)
        with socket.create_connection((self.host, self.port), timeout=_PROBE_S) as probe:
            return str(probe.getsockname()[0])

    def watch(self, on_lost: Callable[[str], None], *, alone: bool) -> None:
        """Starts a thread that calls ``on_lost(reason)`` once when the session is over."""
        connection = self.connect()
        self.seen = time.monotonic()

        def run() -> None:
            while True:
                try:
                    lost = connection.check([_LOST])
                except RuntimeError as error:
                    return on_lost(f"the store of pod 0's launcher is gone: {str(error).splitlines()[0]}")
                self.seen = time.monotonic()
                if alone and lost:
                    return on_lost("a pod of this session was replaced")
                time.sleep(_WATCH_S)

        threading.Thread(target=run, name="session-watch", daemon=True).start()

    def silent(self) -> bool:
        """Whether the watch has had no answer for too long."""
        return time.monotonic() - self.seen > _SILENT_S
