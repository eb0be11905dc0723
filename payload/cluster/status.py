"""status, logs and results: what a run is doing, from its Job, its pods and its own event logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from payload.cluster import jobs, reader
from payload.cluster.kubectl import ClusterError, Kubectl, condition
from payload.cluster.run_state import RunState
from payload.cluster.target import EXIT_FAILED, Target, as_json, command, number, parser, read, say
from payload.config import EXIT_UNFIT_NODE, RunConfig
from payload.manifests import CONFIG_KEY, RUN_LABEL, Manifest, render

WAIT_POLL_S = 5.0


@command
def status(argv: Sequence[str]) -> int:
    """Exit code 0, 1 when the Job failed or ``--wait`` saw no step in time."""
    made = parser("status", "shows step, goodput, last save and restarts left of a run")
    made.add_argument("--wait", action="store_true", help="until the first step is done, or the Job ended")
    made.add_argument("--timeout", default="3600", help="of --wait, in seconds (default: 3600)")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--no-reader", action="store_true", help="make no pod to read the files when none runs")
    given = made.parse_args(argv)
    timeout_s = number(given.timeout, "--timeout", 1)
    target = read(given)
    run_id = target.config.run_id if target.run_id_given else ""
    if given.wait:
        wait(target.kubectl, run_id, timeout_s=timeout_s)
    job = jobs.newest(target.kubectl, run_id)
    found = _state(target, job, may_make=not given.no_reader)
    pods = jobs.pods_of(target.kubectl, jobs.name_of(job))
    if given.json:
        values = dataclasses.asdict(found) | {"restarts_left": found.restarts_left} if found else None
        say(as_json({"job": jobs.describe_job(job), "pods": [jobs.describe_pod(p) for p in pods], "run": values}))
    else:
        lines = found.lines() if found else ["run: its files cannot be read while no pod runs (--no-reader)"]
        for node in jobs.unfit_nodes(pods):
            lines.append(f"  node {node} is unfit (exit code {EXIT_UNFIT_NODE}): python -m payload node replace {node}")
        for line in (jobs.describe_job(job), *(jobs.describe_pod(pod) for pod in pods), *lines):
            say(line)
    return EXIT_FAILED if condition(job, "Failed") else 0


def wait(kubectl: Kubectl, run_id: str, *, timeout_s: float) -> None:
    """Returns at the first completed step, or when the Job has ended; says what it waits for when that changes.

    Raises ClusterError after ``timeout_s``.
    """
    deadline, said = monotonic() + timeout_s, ""
    while True:
        job = jobs.newest(kubectl, run_id)
        if condition(job, *jobs.DONE):
            return
        missing = _before_first_step(kubectl, job)
        if not missing:
            return
        if missing != said:
            say(f"waiting: {missing}")
            said = missing
        if monotonic() >= deadline:
            raise ClusterError(f"Job {jobs.name_of(job)}: no step within {timeout_s:g} s: {missing}")
        sleep(WAIT_POLL_S)


def _before_first_step(kubectl: Kubectl, job: Manifest) -> str:
    name = jobs.name_of(job)
    pod = reader.running_pod(kubectl, name)
    if not pod:
        pods = jobs.pods_of(kubectl, name)
        return "; ".join(jobs.describe_pod(item).strip() for item in pods) or f"Job {name} has no pod yet"
    try:
        found = reader.state(kubectl, pod, run_id_of(job))
    except ClusterError as error:
        # Between the look and the call the container may have gone.
        return str(error)
    return "" if found.step else "pods run; no step yet"


def _state(target: Target, job: Manifest, *, may_make: bool) -> RunState | None:
    if not may_make and not reader.running_pod(target.kubectl, jobs.name_of(job)):
        return None
    with reader.somewhere(target.kubectl, job, may_make=may_make) as pod:
        return reader.state(target.kubectl, pod, run_id_of(job))


def run_id_of(job: Manifest) -> str:
    return str(job["metadata"]["labels"][RUN_LABEL])


@command
def logs(argv: Sequence[str]) -> int:
    """The containers' output; kubectl's exit code."""
    made = parser("logs", "prints what the run's containers wrote")
    made.add_argument("--pod", default="", metavar="INDEX", help="of this completion index only")
    made.add_argument("--follow", action="store_true", help="goes on until Ctrl-C")
    made.add_argument("--previous", action="store_true", help="of the container before the last restart")
    made.add_argument("--tail", default="100", help="lines a pod (default: 100)")
    given = made.parse_args(argv)
    tail = int(number(given.tail, "--tail", 0))
    target = read(given)
    job = jobs.newest(target.kubectl, target.config.run_id if target.run_id_given else "")
    pods = jobs.pods_of(target.kubectl, jobs.name_of(job))
    chosen = [jobs.name_of(pod) for pod in pods if given.pod in ("", jobs.index_of(pod))]
    if not chosen:
        raise ClusterError(f"Job {jobs.name_of(job)}: no pod{f' of index {given.pod}' if given.pod else ''}")
    options = [f"--tail={tail}", *(["--previous"] if given.previous else [])]
    if given.follow:
        label = f"--selector=job-name={jobs.name_of(job)}" if len(chosen) > 1 else chosen[0]
        prefix = ["--prefix", f"--max-log-requests={len(chosen)}"] if len(chosen) > 1 else []
        return target.kubectl.stream("logs", label, "--follow", *prefix, *options)
    codes = []
    for pod in chosen:
        say(f"--- {pod}")
        codes.append(target.kubectl.stream("logs", pod, *options))
    return max(codes)


@command
def results(argv: Sequence[str]) -> int:
    """Copies a run's files here: event logs, result, restarts; with --checkpoints all of it."""
    made = parser("results", "copies a run's files to this machine, for report and plan")
    made.add_argument("--out", default="results", help="folder here (default: results)")
    made.add_argument("--checkpoints", action="store_true", help="the checkpoints too: large")
    given = made.parse_args(argv)
    target = read(given)
    with _some_job(target) as job:
        config = _config_of(target, job)
        with reader.somewhere(target.kubectl, job, may_make=True) as pod:
            num = reader.fetch(target.kubectl, pod, str(config.run_dir), Path(given.out), checkpoints=given.checkpoints)
    folder = Path(given.out) / config.run_id
    say(f"{num} files in {folder}; next: python -m payload report {folder}")
    return 0


@contextmanager
def _some_job(target: Target) -> Iterator[Manifest]:
    """The run's Job; after its deletion the one that the profile describes, with its ConfigMap for the time."""
    if jobs.training_jobs(target.kubectl, target.config.run_id if target.run_id_given else ""):
        yield jobs.newest(target.kubectl, target.config.run_id if target.run_id_given else "")
        return
    config_map, _, job = render(target.config, target.deployment)
    target.kubectl.apply([config_map])
    try:
        yield job
    finally:
        target.kubectl.delete("configmap", jobs.name_of(config_map))


def _config_of(target: Target, job: Manifest) -> RunConfig:
    """What the Job's pods were told."""
    found = target.kubectl.find("configmap", jobs.name_of(job))
    if found is None:
        raise ClusterError(f"ConfigMap {jobs.name_of(job)}: gone; the run's folder is not known")
    return RunConfig.from_json(found["data"][CONFIG_KEY])
