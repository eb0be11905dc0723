"""submit and delete: a run becomes a Job, and ends."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from payload import volumes
from payload.cluster import jobs, scaling
from payload.cluster.kubectl import ClusterError, condition
from payload.cluster.target import Target, command, number, parser, read, say
from payload.config import ConfigError
from payload.manifests import Manifest, job_of, render, render_prepare_data


@command
def submit(argv: Sequence[str]) -> int:
    """Applies the run's objects. A running Job of the same run is replaced: it saves, its pods go, the new one goes
    on from that save. On a cluster without our stacks, namespace, claim and data are made as well."""
    made = parser("submit", "starts a run on a cluster, with any arm and any override")
    made.add_argument("--on-change", choices=("replace", "keep"), default="replace", help="if the run is running")
    made.add_argument("--storage", default="10Gi", help="size of a claim that is made here (default: 10Gi)")
    made.add_argument("--prepare-data", default=None, metavar="OPTIONS", help="of prepare-data; '' : no such Job")
    made.add_argument("--no-scale", action="store_true", help="leave the number of GPU nodes as it is")
    given = made.parse_args(argv)
    target = read(given)
    objects = render(target.config, target.deployment)
    name = jobs.name_of(job_of(objects))
    _make_room(target, name, given.on_change)
    if not target.by_stacks:
        _prerequisites(target, given.storage)
    if target.group is not None and not given.no_scale:
        scaling.scale_up(target.group, target.config.parallelism.num_nodes)
    data = _data(target, given.prepare_data)
    target.kubectl.apply([*data, *objects])
    say(f"submitted: Job {name} in namespace {target.kubectl.namespace}")
    say(f"watch: python -m payload status --wait --profile {given.profile} --run-id {target.config.run_id}")
    return 0


def _make_room(target: Target, name: str, on_change: str) -> None:
    """Ends unfinished Jobs of the same run, which would write into the same folder."""
    found = jobs.training_jobs(target.kubectl, target.config.run_id)
    older = [jobs.name_of(job) for job in found if not condition(job, *jobs.DONE) and jobs.name_of(job) != name]
    same = [job for job in found if jobs.name_of(job) == name]
    if older and on_change == "keep":
        raise ConfigError(f"--on-change: keep, and {', '.join(older)} still runs; legal: replace, or another --run-id")
    ended = [jobs.name_of(job) for job in same if condition(job, *jobs.DONE)]
    if older:
        say(f"ending {', '.join(older)}: it saves once more, then its pods go")
    # A finished Job of this very name would not start again.
    if older or ended:
        jobs.end(target.kubectl, [*older, *ended], timeout_s=target.config.timeouts.save_grace_s + 300)


def _prerequisites(target: Target, storage: str) -> None:
    """What is there stays as it is."""
    for item in volumes.prerequisites(target.deployment, storage):
        kind, _, name = volumes.identity(item)
        if target.kubectl.find(kind.lower(), name) is None:
            target.kubectl.apply([item])
            say(f"made: {kind} {name}")


def _data(target: Target, options: str | None) -> list[Manifest]:
    """The stacks prepare data themselves; elsewhere it is text that Python ships."""
    if options is None:
        options = "" if target.by_stacks else "--source pydoc"
    if not options or target.config.model.task:
        return []
    # The Job that prepares must not wait for itself.
    plain = dataclasses.replace(target.deployment, await_data=False)
    return render_prepare_data(target.config, plain, shlex.split(options))


@command
def delete(argv: Sequence[str]) -> int:
    """Ends a run's Jobs and returns when their pods are gone; the run's files stay, so submit goes on from there."""
    made = parser("delete", "ends a run: SIGTERM, one more save, pods gone; its files stay")
    made.add_argument("--all", action="store_true", help="every run in the namespace")
    made.add_argument("--timeout", default="900", help="seconds until it is an error (default: 900)")
    given = made.parse_args(argv)
    timeout_s = number(given.timeout, "--timeout", 1)
    target = read(given)
    found = [jobs.name_of(job) for job in jobs.training_jobs(target.kubectl, "" if given.all else target.config.run_id)]
    if not found:
        of = "training Job" if given.all else f"Job of run {target.config.run_id}"
        raise ClusterError(f"namespace {target.kubectl.namespace}: no {of}")
    say(f"ending {', '.join(found)}")
    jobs.end(target.kubectl, found, timeout_s=timeout_s)
    say("gone: Jobs and pods; the run's files stay")
    return 0
