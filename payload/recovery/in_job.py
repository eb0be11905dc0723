"""In-job restart: heartbeats to NVRx's rank monitor, which kills a silent worker; ft_launcher restarts the group."""

from __future__ import annotations

import os
import threading

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient


class Heartbeat:
    """One connection to this rank's monitor, for the life of the process; it survives in-process restarts."""

    def __init__(self) -> None:
        """Connects. Raises RankMonitorClientError where no monitor runs: the agent is not ft_launcher's."""
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()
        # The monitor takes one connection a rank: a forked child (NVRx's in-process monitor) that kept it open after
        # this process's death would keep the next worker waiting.
        os.register_at_fork(after_in_child=self._drop)
        self._lock = threading.Lock()

    def send(self) -> None:
        """From any thread."""
        with self._lock:
            if self._client.is_initialized:
                self._client.send_heartbeat()

    def close(self) -> None:
        """The monitor no longer expects heartbeats; idempotent."""
        with self._lock:
            self._client.shutdown_workload_monitoring()

    def _drop(self) -> None:
        connection = self._client.rank_monitor_socket
        if connection is not None:
            # close() only: a shutdown would end the parent's connection too.
            connection.close()
            self._client.rank_monitor_socket = None
            self._client.is_initialized = False
