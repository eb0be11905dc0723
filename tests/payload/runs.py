"""Whole runs for tests: two pods of one rank, few steps, through the manifest and the local cluster."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload import result
from payload.config import RunConfig
from payload.deployment import LOCAL
from payload.events import Event, RunEvents, read_events
from payload.local import JobResult, LocalCluster, on_host, run_config

SPEEDUP = 50.0
TIMEOUT_S = 240.0
BASE: dict[str, Any] = {
    "run_id": "test",
    "parallelism.device": "cpu",
    "parallelism.num_nodes": 2,
    "parallelism.ranks_per_node": 1,
    "training.max_steps": 25,
    "training.warmup_steps": 5,
    "training.global_batch_size": 4,
    "training.min_step_s": 0.05,
    "data.sequence_length": 32,
    "checkpoint.interval": 5,
    "checkpoint.memory_interval": 0,
    "timeouts.soft_s": 8.0,
    "timeouts.hard_s": 30.0,
    "timeouts.barrier_s": 100.0,
    "timeouts.completion_s": 100.0,
    "timeouts.heartbeat_s": 16.0,
    "timeouts.initial_heartbeat_s": 120.0,
    "timeouts.setup_s": 90.0,
    "timeouts.process_group_s": 30.0,
    "timeouts.join_s": 120.0,
    "timeouts.grace_s": 1.0,
    "timeouts.save_grace_s": 60.0,
}
"""Timeouts that a loaded machine keeps: waiting longer than needed only costs time where a fault needs the timeout."""


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    config: RunConfig
    """Its paths are folders of this machine."""
    job: JobResult
    events: RunEvents

    @property
    def sha256(self) -> str:
        """Of the final weights; empty where the run did not finish."""
        values = result.read(self.config)
        return str(values["sha256"]) if values and values["succeeded"] else ""

    def of(self, kind: str) -> list[Event]:
        """The events of a kind from all sources, by time."""
        found = [event for events in self.events.by_source.values() for event in events if event.kind == kind]
        return sorted(found, key=lambda event: event.wall)

    def faults(self) -> list[tuple[int, int, str]]:
        """Step, rank and type of each fault that fired, by time."""
        return [(event["step"], event["rank"], event["type"]) for event in self.of("fault")]

    def losses(self) -> dict[int, set[float]]:
        """Every loss that rank 0 reported for a step; one value a step where replays are exact."""
        found: dict[int, set[float]] = {}
        for event in self.events.of("rank0"):
            if event.kind == "step":
                found.setdefault(event["step"], set()).add(event["loss"])
        return found

    def output(self) -> str:
        """What the containers wrote; for messages of failed assertions."""
        logs = sorted(self.job.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"== {path.name}\n" + path.read_text(errors="replace")[-3000:] for path in logs)

    def check(self, reference: Run | None = None) -> Run:
        """Asserts that the run succeeded, and that its losses and weights are the reference's bit by bit."""
        assert self.job.succeeded, f"{self.job.reason}\n{self.output()}"
        assert self.sha256, self.output()
        if reference is not None:
            assert self.losses() == reference.losses()
            assert self.sha256 == reference.sha256
        return self


def make_config(**overrides: Any) -> RunConfig:
    """BASE with dotted overrides: ``make_config(**{"recovery.arm": "in-job"})``."""
    return RunConfig().with_overrides({**BASE, **overrides})


def run_job(
    tmp_path: Path,
    data: Path,
    *,
    speedup: float = SPEEDUP,
    watch: Callable[[LocalCluster, Path], Callable[[], None]] | None = None,
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
    node_deletion_raw_s: float | None = 100.0,
    timeout_s: float = TIMEOUT_S,
    **overrides: Any,
) -> Run:
    """Runs BASE with ``overrides`` to its end; nothing of it is left but the files in ``tmp_path``.

    Args:
        data: prepared token file (fixture ``token_folder``), copied in.
        watch: makes a poll from the cluster and the run's event folder, called about 20 times a second.
        env: set in every container.
        command: of the container, in place of the launcher.
    """
    cluster = LocalCluster(tmp_path / "cluster", env=env, node_deletion_raw_s=node_deletion_raw_s)
    config = make_config(**overrides)
    host = on_host(config, cluster, LOCAL)
    if not host.data_dir.exists():
        host.data_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(data, host.data_dir)
    poll = watch(cluster, host.events_dir) if watch is not None else None
    deployment = LOCAL if command is None else dataclasses.replace(LOCAL, command=tuple(command))
    job = run_config(config, cluster, deployment=deployment, speedup=speedup, on_poll=poll, timeout_s=timeout_s)
    return Run(host, job, read_events(host.events_dir))


def at_step(step: int, act: Callable[[LocalCluster], None]) -> Callable[[LocalCluster, Path], Callable[[], None]]:
    """For ``watch``: acts once, when rank 0 has done ``step``."""

    def watch(cluster: LocalCluster, events_dir: Path) -> Callable[[], None]:
        done: list[bool] = []

        def poll() -> None:
            path = events_dir / "rank0.jsonl"
            if done or not path.exists():
                return
            if any(event.kind == "step" and event["step"] >= step for event in read_events(events_dir).of("rank0")):
                done.append(True)
                act(cluster)

        return poll

    return watch
