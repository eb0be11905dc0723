"""Commands of the local cluster: run and render, and what the demo shares with them."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import yaml

from payload import settings
from payload.config import RunConfig
from payload.goodput import analyse
from payload.live import LiveView
from payload.local import JobResult, LocalCluster, on_host, run_config
from payload.manifests import Manifest, render, render_prepare_data
from payload.report import print_comparison
from payload.settings import Settings

EXIT_FAILED = 1


def render_command(argv: Sequence[str]) -> int:
    """Prints the run's objects as YAML, ready for kubectl apply -f -."""
    parser = settings.parser("render", "prints ConfigMap, Service and Job of a run as YAML")
    parser.add_argument("--data", action="store_true", help="the Job that prepares the data instead")
    given = parser.parse_args(argv)
    found = settings.read(given)
    objects = (render_prepare_data if given.data else render)(found.config, found.deployment)
    sys.stdout.write(to_yaml(objects))
    return 0


def to_yaml(objects: Sequence[Manifest]) -> str:
    """One document an object; text of several lines as a block."""
    return yaml.dump_all(objects, Dumper=_BlockDumper, sort_keys=False)


class _BlockDumper(yaml.SafeDumper):
    """Shows the run config as a person would write it."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _text)


def run_command(argv: Sequence[str]) -> int:
    """One run on the local cluster, as its manifest says."""
    found = settings.arguments(argv, settings.parser("run", "trains on this machine, one process tree a pod"))
    config = found.config
    if not found.run_id_given:
        config = fresh(config, "run")
    cluster = LocalCluster(found.root)
    prepare(found, cluster)
    result = watch(found, config, cluster)
    run_dir = on_host(config, cluster, found.deployment).run_dir
    sys.stdout.write(f"run {config.run_id}: {describe(result)}\n")
    if result.succeeded:
        print_comparison([analyse(run_dir)], equal={}, title=f"Run {config.run_id}")
    sys.stdout.write(f"its files: {run_dir}\n")
    return 0 if result.succeeded else EXIT_FAILED


def fresh(config: RunConfig, name: str) -> RunConfig:
    """A run of its own: ``<name>-<day>-<time>``."""
    return config.with_overrides({"run_id": f"{name}-{time.strftime('%m%d-%H%M%S')}"})


def prepare(found: Settings, cluster: LocalCluster) -> None:
    """Runs the Job that prepares the data, English text that Python ships, unless it is there.

    Raises RuntimeError naming the log where the Job fails.
    """
    if (on_host(found.config, cluster, found.deployment).data_dir / "meta.json").exists():
        return
    objects = render_prepare_data(found.config, found.deployment, ["--source", "pydoc"])
    result = cluster.run(objects, speedup=found.speedup)
    if not result.succeeded:
        raise RuntimeError(f"preparing the data failed: {result.reason}\n{last_log(result.logs)}")


def watch(found: Settings, config: RunConfig, cluster: LocalCluster, title: str = "") -> JobResult:
    """Runs with a live view. The first Ctrl-C or SIGTERM deletes the Job gracefully, the second one kills it.

    Raises KeyboardInterrupt after either.
    """
    with LiveView(on_host(config, cluster, found.deployment), title or config.run_id) as view, stopping(cluster):
        return run_config(
            config,
            cluster,
            deployment=found.deployment,
            speedup=found.speedup,
            on_event=view.job_event,
            on_poll=view.poll,
        )


@contextmanager
def stopping(cluster: LocalCluster) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM ask for the Job's deletion; KeyboardInterrupt follows when it is done.

    A second signal raises it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        cluster.request("job-delete")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


def describe(result: JobResult) -> str:
    """One line, or with the end of a failed container's output."""
    counts = (
        f"{result.num_container_restarts} container restarts, {result.num_pod_replacements} pod replacements, "
        f"{result.duration_s:.1f} s"
    )
    if result.succeeded:
        return f"complete ({counts})"
    return f"failed: {result.reason} ({counts})\n{last_log(result.logs)}"


def last_log(folder: Path, num_lines: int = 15) -> str:
    """The end of the container output written last, under its path."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return f"{folder}: no output"
    lines = logs[-1].read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join([f"{logs[-1]}:", *(f"  {line}" for line in lines)])
