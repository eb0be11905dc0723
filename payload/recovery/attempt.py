"""The Attempt that every arm gives to train(), and the store behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from payload.environment import WorkerEnvironment


def connect_store(environment: WorkerEnvironment) -> TCPStore:
    """A connection to the store in pod 0's launcher. Raises RuntimeError when it is not reached in time."""
    timeout = timedelta(seconds=environment.config.timeouts.join_s)
    return TCPStore(environment.store_host, environment.store_port, wait_for_workers=False, timeout=timeout)


class WorkerAttempt:
    """Implements payload.recovery.base.Attempt."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        store: TCPStore,
        *,
        rank: int,
        world_size: int,
        iteration: int,
        pings: tuple[Callable[[], None], ...] = (),
        ping_interval_s: float = 1.0,
    ) -> None:
        """``pings`` are called by ping(), and every ``ping_interval_s`` seconds by a thread while wait() lasts."""
        self.rank = rank
        self.world_size = world_size
        self.local_rank = environment.local_rank
        self.generation = f"{environment.cycle}.{iteration}"
        self.store: Store = PrefixStore(f"{environment.config.run_id}/{self.generation}", store)
        self._pings = pings
        self._interval_s = ping_interval_s
        self._setup_s = environment.config.timeouts.setup_s
        self._hooks: list[Callable[[], None]] = []

    def ping(self) -> None:
        for ping in self._pings:
            ping()

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Pings from a thread while the block lasts, for ``timeouts.setup_s`` seconds at most."""
        if not self._pings:
            yield
            return
        done = threading.Event()
        deadline = time.monotonic() + self._setup_s

        def keep_pinging() -> None:
            while not done.wait(self._interval_s) and time.monotonic() < deadline:
                self.ping()

        self.ping()
        thread = threading.Thread(target=keep_pinging, name=f"wait-{what}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.ping()

    def on_abort(self, hook: Callable[[], None]) -> None:
        self._hooks.append(hook)

    def run_abort_hooks(self) -> None:
        """Each hook once, newest first."""
        while self._hooks:
            self._hooks.pop()()
