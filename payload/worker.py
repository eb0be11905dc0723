"""One training process of one rank: ``python -m payload.worker``, started by the agent or forked from a warm process.

Ends by os._exit: after gloo groups were torn down, the interpreter's own exit can abort the process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from payload import result
from payload.config import EXIT_BAD_CONFIG, EXIT_STOPPED, ConfigError, RunConfig
from payload.environment import WorkerEnvironment
from payload.events import EventLog
from payload.process import started_wall


def preload(config: RunConfig) -> None:
    """All imports of a worker, without touching CUDA or starting a thread: what a warm parent does before it forks."""
    for name in ("checkpoint", "faults", "recovery", "train"):
        importlib.import_module(f"payload.{name}")
    importlib.import_module("payload.checkpoint").preload(config)
    importlib.import_module("payload.recovery").preload(config)
    if config.checkpoint.mode != "sync":
        # Without NVRx, checkpoint.build() says what is missing.
        with contextlib.suppress(ImportError):
            importlib.import_module("payload.checkpoint.asynchronous")
    if not config.model.task:
        importlib.import_module("payload.model").preload(config.model.name)


def main() -> NoReturn:
    """Runs the worker that the environment describes and ends the process with its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("payload").setLevel(logging.INFO)
    code = 1
    try:
        code = run(WorkerEnvironment.read())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        code = EXIT_BAD_CONFIG
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(environment: WorkerEnvironment) -> int:
    """The whole life of the worker but its end; returns the exit code. Raises ConfigError."""
    config = environment.config
    events = EventLog.for_rank(config.events_dir, environment.rank)
    started = started_wall(os.getpid())
    events.emit("process_start", started_wall=started, warm=environment.warm, cycle=environment.cycle)
    code = 1
    try:
        code = _run(environment, events)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except ConfigError:
        code = EXIT_BAD_CONFIG
        raise
    except Exception:  # noqa: BLE001 - the end of the process: recorded, printed, and turned into its exit code
        traceback.print_exc()
    finally:
        events.emit("process_end", code=code)
        events.close()
    return code


def _run(environment: WorkerEnvironment, events: EventLog) -> int:
    config = environment.config
    if result.is_finished(config):
        return 0
    preload(config)
    events.emit("imports_done")
    from payload import parallel, recovery
    from payload.train import Session, train

    parallel.make_deterministic()
    session = Session(config, events, environment)
    try:
        _stop_on_sigterm(session.request_stop)
        recovery.build(config, environment, events).run(lambda attempt: train(config, attempt, session))
    finally:
        session.close()
    return EXIT_STOPPED if session.stopped else 0


def _stop_on_sigterm(request: Callable[[], None]) -> None:
    """SIGTERM only asks: the loop finishes its step, saves and leaves. Main thread only."""

    def ask(_number: int, _frame: FrameType | None) -> None:
        request()

    signal.signal(signal.SIGTERM, ask)


if __name__ == "__main__":
    main()
