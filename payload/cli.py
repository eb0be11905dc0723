"""``python -m payload COMMAND``: the registry of commands, and those of the local cluster."""

from __future__ import annotations

import importlib
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
from payload.config import EXIT_BAD_CONFIG, ConfigError, RunConfig
from payload.live import LiveView
from payload.local import JobResult, LocalCluster, on_host, run_config
from payload.manifests import Manifest, render, render_prepare_data
from payload.settings import Settings

COMMANDS: dict[str, str] = {
    "demo": "payload.demo:main",
    "run": "payload.cli:run_command",
    "render": "payload.cli:render_command",
    "prepare-data": "payload.prepare:main",
    "report": "payload.report:cli",
    "plan": "payload.plan:cli",
    "audit": "payload.audit:cli",
    "bench": "payload.bench:main",
    "bench-table": "payload.bench_table:main",
    "submit": "payload.cluster.submit:submit",
    "status": "payload.cluster.status:status",
    "logs": "payload.cluster.status:logs",
    "results": "payload.cluster.status:results",
    "delete": "payload.cluster.submit:delete",
    "capacity": "payload.cluster.scaling:capacity",
    "node": "payload.cluster.scaling:node",
    "preflight-nodes": "payload.cluster.preflight:preflight",
    "run-state": "payload.cluster.run_state:main",
}
"""Name -> ``module:function``, which takes the arguments after the name and returns the exit code. Imported when
called, so that a command costs only its own imports."""

EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, 1 when a run failed, 2 when the user's input was refused (one line a problem on stderr)."""
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        print(f"usage: python -m payload COMMAND ...\ncommands: {', '.join(COMMANDS)}; each takes --help")
        return 0 if name else EXIT_BAD_CONFIG
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command {name!r}; legal: {', '.join(COMMANDS)}")
        module, _, function = COMMANDS[name].partition(":")
        return int(getattr(importlib.import_module(module), function)(list(argv[1:])))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_CONFIG


def render_command(argv: Sequence[str]) -> int:
    """Prints the run's objects as YAML, ready for kubectl apply -f -."""
    parser = settings.parser("render", "prints ConfigMap, Service and Job of a run as YAML")
    parser.add_argument("--data", action="store_true", help="the Job that prepares the data instead")
    given = parser.parse_args(argv)
    found = settings.read(given)
    objects = (render_prepare_data if given.data else render)(found.config, found.deployment)
    print(to_yaml(objects), end="")
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
    print(f"run {config.run_id}: {describe(result)}")
    print(f"its files: {on_host(config, cluster, found.deployment).run_dir}")
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
    """Runs with a live view. The first Ctrl-C or SIGTERM deletes the Job gracefully, the second one kills it."""
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
    """While inside, SIGINT and SIGTERM ask for the Job's deletion; a second one raises KeyboardInterrupt."""
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
