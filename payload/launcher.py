"""Entry point of the container: who am I, where is pod 0, and which agent runs the workers.

Exit codes: 0 the run is complete, 2 the configuration was refused, 42 no progress or no budget left, 43 failures
keep beginning on this node, 143 the pod was told to stop, 1 anything else (the pod or container is started again).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

from payload import environment, process, startup
from payload.agent import Observer, Refused, Stopped, UnfitNode, WorkersFailed, no_action, run_torchrun, worker_command
from payload.budget import NoProgress, RestartBudget
from payload.config import EXIT_BAD_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED, EXIT_UNFIT_NODE, ConfigError
from payload.environment import PodEnvironment
from payload.events import EventLog
from payload.fork_server import ForkServer
from payload.meeting import Meeting, MeetingError

log = logging.getLogger(__name__)

EXIT_FAILED = 1
_LOOK_S = 0.5
_LAST_WORD_S = 2.0
_DEFAULTS = {
    # NVRx polls stores with short timeouts, and torch would warn of each.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Entries of the flight recorder, whose trace is kept when an attempt is abandoned.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}
"""Environment of the workers where the pod does not set it."""


class Launcher:
    """One life of a container."""

    def __init__(self, pod: PodEnvironment) -> None:
        self._pod = pod
        self._events = EventLog(pod.config.events_dir / f"pod{pod.index}.jsonl", f"pod{pod.index}")
        self._budget = RestartBudget(pod.config)
        self._observer = Observer(pod, self._events, self._budget)
        self._meeting = Meeting(pod)
        self._server: ForkServer | None = None
        self._ending = threading.Lock()
        self._meets = False
        self._deadline = float("inf")

    def run(self) -> int:
        """Runs the pod's workers to their end; returns the exit code. Ends the whole process tree below."""
        pid = os.getpid()
        self._events.emit("launcher_start", started_wall=process.started_wall(pid), index=self._pod.index)
        reason = self._budget.stopped()
        if reason is not None:
            return self._end(EXIT_NO_PROGRESS, f"the run has stopped itself: {reason}")
        self._catch_signals()
        environment.set_defaults(_DEFAULTS)
        code, why = self._work()
        if code not in (0, EXIT_UNFIT_NODE) and self._budget.stopped() is not None:
            code = EXIT_NO_PROGRESS
        return self._end(code, why)

    def _work(self) -> tuple[int, str]:
        try:
            startup.prepare(self._pod)
            if self._pod.config.recovery.warm_workers:
                self._server = ForkServer.start(self._pod)
                self._observer.command = worker_command(self._pod, self._server.address)
            self._run_agent()
        except NoProgress as error:
            return EXIT_NO_PROGRESS, str(error)
        except UnfitNode as error:
            return EXIT_UNFIT_NODE, str(error)
        except (Refused, ConfigError) as error:
            return EXIT_BAD_CONFIG, str(error)
        except Stopped as error:
            return EXIT_STOPPED, str(error)
        except (WorkersFailed, MeetingError, startup.NotReady) as error:
            return (EXIT_STOPPED if self._observer.stopping else EXIT_FAILED), str(error)
        return 0, "complete"

    def _run_agent(self) -> None:
        restarts_alone = self._pod.config.recovery.arm in ("in-job", "layered")
        self._meeting.open(alone=not restarts_alone)
        self._events.emit("resolved", host=self._meeting.host)
        self._meeting.watch(self._lost, alone=not restarts_alone)
        self._meets = True
        environment.export(
            {
                environment.STORE: f"{self._meeting.host}:{self._meeting.port}",
            }
        )
        if restarts_alone:
            from payload.recovery.ft_launcher import run_ft_launcher

            run_ft_launcher(self._pod, self._meeting, self._observer)
        else:
            run_torchrun(self._pod, self._meeting, self._observer)

    def _lost(self, reason: str) -> None:
        """The session is over. What the workers hold cannot be used any more: end at once."""
        if not self._observer.succeeded:
            self._observer.stopped_workers()
            self._end_now(EXIT_STOPPED if self._observer.stopping else EXIT_FAILED, reason)

    def _catch_signals(self) -> None:
        """SIGTERM goes to a thread: the main thread may be inside a long C call, and the agents would raise."""
        from torch.distributed.elastic.multiprocessing import api

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, no_action)
        signal.signal(signal.SIGINT, no_action)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        # The agents set this handler for the signals above whenever they start workers.
        api._terminate_process_handler = no_action
        threading.Thread(target=self._supervise, args=(reader,), name="supervisor", daemon=True).start()

    def _supervise(self, reader: int) -> None:
        while True:
            ready, _, _ = select.select([reader], [], [], _LOOK_S)
            if ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(reader, 64)):
                self._stop()
            if time.monotonic() > self._deadline:
                self._end_now(EXIT_STOPPED, f"workers did not end within {self._pod.config.timeouts.save_grace_s:g} s")
            self._look_at_server()
            process.reap(adopted_only=True)
            if self._meets and self._meeting.silent() and not self._observer.succeeded:
                self._end_now(EXIT_FAILED, "the store of pod 0's launcher does not answer")

    def _look_at_server(self) -> None:
        """Without the fork server the run goes on; workers start cold."""
        if self._server is None or self._ending.locked():
            return
        code = self._server.ended()
        if code is not None:
            self._server = None
            text = f"the fork server ended with code {code}: workers of pod {self._pod.index} start cold"
            log.warning("%s", text)
            self._events.emit("warning", text=text)

    def _stop(self) -> None:
        """SIGTERM: the workers agree on a step, save once more and leave; then this launcher does."""
        if self._observer.stopping:
            return
        self._observer.stopping = True
        self._deadline = time.monotonic() + self._pod.config.timeouts.save_grace_s
        running = [pid for pid in self._observer.pids if process.is_running(pid)]
        log.warning("SIGTERM: passed on to %d workers", len(running))
        process.send(running, signal.SIGTERM)
        if not running and not self._observer.succeeded:
            self._end_now(EXIT_STOPPED, "SIGTERM while no worker was running")

    def _end(self, code: int, reason: str) -> int:
        """Leaves nothing behind; the first caller wins, a second one waits for the process to end."""
        self._ending.acquire()
        if code == 0:
            log.info("pod %d: %s", self._pod.index, reason)
        else:
            log.error("pod %d ends with code %d: %s", self._pod.index, code, reason)
        self._let_monitors_speak()
        process.kill_below(os.getpid())
        self._events.emit("launcher_end", code=code, reason=reason)
        return code

    def _let_monitors_speak(self) -> None:
        """NVRx's monitor of a dead rank still tells the other pods that the rank is gone; without its word they wait
        for the heartbeat timeout."""
        if self._pod.config.recovery.arm != "in-process" or self._observer.succeeded:
            return
        server = self._server.pid if self._server is not None else 0
        deadline = time.monotonic() + _LAST_WORD_S
        while time.monotonic() < deadline and set(process.descendants(os.getpid())) - {server}:
            process.reap(adopted_only=True)
            time.sleep(0.05)

    def _end_now(self, code: int, reason: str) -> NoReturn:
        self._end(code, reason)
        _flush()
        os._exit(code)


def _forget_signals() -> None:
    """A forked child (a rank monitor) is ended by SIGTERM as usual, and must not tell our supervisor."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    process.set_death_signal()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def main() -> int:
    """Returns the container's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    try:
        pod = PodEnvironment.read()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_BAD_CONFIG
    process.become_subreaper()
    return Launcher(pod).run()


if __name__ == "__main__":
    exit_code = main()
    _flush()
    # The agents leave threads, and torch's exit handlers may abort once groups were torn down.
    os._exit(exit_code)
