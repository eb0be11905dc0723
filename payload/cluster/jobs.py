"""Jobs of ours on a cluster: which there are, how they are, and their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from payload.cluster.kubectl import ClusterError, Kubectl, condition, wait_until
from payload.config import EXIT_UNFIT_NODE
from payload.manifests import COMPONENT_LABEL, JOB_LABEL, NAME, NAME_LABEL, RUN_LABEL, TRAINING, Manifest

OURS = {NAME_LABEL: NAME}
DONE = ("Complete", "Failed")
POLL_S = 2.0


def training_jobs(kubectl: Kubectl, run_id: str = "") -> list[Manifest]:
    """Newest first; of one run, or of all."""
    labels = {**OURS, COMPONENT_LABEL: TRAINING, **({RUN_LABEL: run_id} if run_id else {})}
    found = kubectl.list("job", labels)
    return sorted(found, key=lambda job: str(job["metadata"].get("creationTimestamp", "")), reverse=True)


def newest(kubectl: Kubectl, run_id: str = "") -> Manifest:
    """The Job to look at: the newest that still runs, else the newest. Raises ClusterError where there is none."""
    found = training_jobs(kubectl, run_id)
    running = [job for job in found if not condition(job, *DONE)]
    if not found:
        of = f" of run {run_id}" if run_id else ""
        raise ClusterError(f"namespace {kubectl.namespace}: no training Job{of}; python -m payload submit makes one")
    return (running or found)[0]


def name_of(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


def pods_of(kubectl: Kubectl, job: str) -> list[Manifest]:
    """In the order of their completion index; several of one index while one is being replaced."""
    found = kubectl.list("pod", {JOB_LABEL: job})
    return sorted(found, key=lambda pod: (int(index_of(pod) or 0), str(pod["metadata"].get("creationTimestamp", ""))))


def index_of(pod: Mapping[str, Any]) -> str:
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get("batch.kubernetes.io/job-completion-index", ""))


def describe_job(job: Mapping[str, Any]) -> str:
    """One line."""
    status = job.get("status") or {}
    done = condition(job, *DONE)
    counts = f"{status.get('active', 0)} active, {status.get('failed', 0)} failed pods"
    if job["metadata"].get("deletionTimestamp"):
        return f"Job {name_of(job)}: ending ({counts})"
    reasons = [c for c in status.get("conditions") or [] if c["type"] == "Failed" and c["status"] == "True"]
    why = f": {reasons[0].get('message') or reasons[0].get('reason')}" if reasons else ""
    return f"Job {name_of(job)}: {done.lower() or 'running'} ({counts}){why}"


def describe_pod(pod: Mapping[str, Any]) -> str:
    """One line: index, place, phase, restarts, and what it waits for."""
    status, meta = pod.get("status") or {}, pod["metadata"]
    phase = "Terminating" if meta.get("deletionTimestamp") else status.get("phase", "Unknown")
    containers = status.get("containerStatuses") or []
    restarts = sum(int(c.get("restartCount", 0)) for c in containers)
    node = pod["spec"].get("nodeName") or "no node yet"
    line = f"  pod {index_of(pod) or '?'} {meta['name']}: {phase} on {node}, {restarts} container restarts"
    why = _waits_for(status)
    return f"{line}; {why}" if why else line


def unfit_nodes(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Nodes whose launcher gave up on them (exit code 43): workers keep failing there alone."""
    found = []
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            ends = [container.get(state, {}).get("terminated") or {} for state in ("state", "lastState")]
            if any(end.get("exitCode") == EXIT_UNFIT_NODE for end in ends) and pod["spec"].get("nodeName"):
                found.append(str(pod["spec"]["nodeName"]))
    return sorted(set(found))


def _waits_for(status: Mapping[str, Any]) -> str:
    waiting = [c["state"]["waiting"] for c in status.get("containerStatuses") or [] if "waiting" in c.get("state", {})]
    if waiting:
        return f"{waiting[0].get('reason', '')} {waiting[0].get('message', '')}".strip()
    for found in status.get("conditions") or []:
        if found["type"] == "PodScheduled" and found["status"] == "False":
            return f"not scheduled: {found.get('message', found.get('reason', ''))}"
    return ""


def end(kubectl: Kubectl, jobs: Sequence[str], *, timeout_s: float) -> None:
    """Deletes the Jobs with their Service and ConfigMap, and returns when their pods are gone.

    Pods get SIGTERM and their grace: the run saves once more. Raises ClusterError naming what is left.
    """
    for job in jobs:
        kubectl.delete("job", job)

    def left() -> str:
        pods = [pod for job in jobs for pod in pods_of(kubectl, job)]
        still = [job for job in jobs if kubectl.find("job", job) is not None]
        lines = [*(f"Job {job}" for job in still), *(describe_pod(pod).strip() for pod in pods)]
        return "; ".join(lines)

    wait_until(left, timeout_s=timeout_s, poll_s=POLL_S, what=f"end of {', '.join(jobs)}")
    for job in jobs:
        kubectl.delete("service", job)
        kubectl.delete("configmap", job)
