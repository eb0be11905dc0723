"""The recovery arms: each runs train() in a worker process and enters it again where it can."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from payload.config import ConfigError, RunConfig
from payload.environment import WorkerEnvironment
from payload.events import EventLog
from payload.recovery.base import RecoveryArm, TrainFunction
from payload.recovery.kubernetes import SingleEntryArm


def build(config: RunConfig, environment: WorkerEnvironment, events: EventLog) -> RecoveryArm:
    """The arm that ``config.recovery.arm`` asks for, and no other.

    Raises:
        ConfigError: it needs a library that is not installed.
    """
    arm = config.recovery.arm
    if arm == "kubernetes":
        return SingleEntryArm(environment, events)
    try:
        return _nvrx_arm(config, environment, events)
    except ImportError as error:
        raise _missing(arm, error) from error


def _missing(arm: str, error: ImportError) -> ConfigError:
    return ConfigError(f"recovery.arm: {arm!r} needs nvidia-resiliency-ext: {error}")


def _nvrx_arm(config: RunConfig, environment: WorkerEnvironment, events: EventLog) -> RecoveryArm:
    arm = config.recovery.arm
    if arm == "in-job":
        return _Monitored(lambda ping: SingleEntryArm(environment, events, (ping,)))
    from payload.recovery.in_process import InProcessArm

    if arm == "in-process":
        return InProcessArm(environment, events)
    return _Monitored(lambda ping: InProcessArm(environment, events, pings=(ping,), nested=True))


def preload(config: RunConfig) -> None:
    """The imports of the arm, for a process that forks workers. Raises ConfigError as build() does."""
    arm = config.recovery.arm
    try:
        if arm in ("in-job", "layered"):
            importlib.import_module("payload.recovery.in_job")
        if arm in ("in-process", "layered"):
            importlib.import_module("payload.recovery.in_process")
    except ImportError as error:
        raise _missing(arm, error) from error


class _Monitored:
    """An arm whose attempts also send heartbeats to the launcher's rank monitor."""

    def __init__(self, make: Callable[[Callable[[], None]], RecoveryArm]) -> None:
        from payload.recovery.in_job import Heartbeat

        self._heartbeat = Heartbeat()
        self._arm = make(self._heartbeat.send)

    def run(self, train: TrainFunction) -> None:
        # After a failure the connection stays: its end together with the process tells the monitor.
        self._arm.run(train)
        self._heartbeat.close()
