"""Reads the shared volume through a pod: one of the run's own, or a small one made for that and removed."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from payload.cluster import jobs
from payload.cluster.kubectl import ClusterError, Kubectl, wait_until
from payload.cluster.run_state import RunState
from payload.manifests import COMPONENT_LABEL, JOB_LABEL, Manifest

READER = "reader"
READER_S = 1800
"""The pod ends by itself after so long, whatever becomes of the command."""
START_S = 600.0
"""It may have to pull the image first."""


def running_pod(kubectl: Kubectl, job: str) -> str:
    """Name of a pod of the Job that commands can run in; '' when there is none."""
    for pod in jobs.pods_of(kubectl, job):
        if (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp"):
            return jobs.name_of(pod)
    return ""


def reader_pod(job: Manifest) -> Manifest:
    """A pod that mounts what the Job's pods mount, asks for no GPU, and only waits.

    It has our labels without the Job's own, so that teardown finds it and no Service takes it for a worker.
    """
    pod = copy.deepcopy(job["spec"]["template"]["spec"])
    container = pod["containers"][0]
    container["command"] = ["python", "-c", f"import time; time.sleep({READER_S})"]
    container["resources"] = {}
    for field in ("affinity", "subdomain"):
        pod.pop(field, None)
    pod.update(restartPolicy="Never", terminationGracePeriodSeconds=1, activeDeadlineSeconds=READER_S)
    # Its memory volume would be charged to no limit.
    pod["volumes"] = [v if "emptyDir" not in v else {"name": v["name"], "emptyDir": {}} for v in pod["volumes"]]
    labels = {key: value for key, value in job["metadata"]["labels"].items() if key != JOB_LABEL}
    metadata = {
        "name": f"{jobs.name_of(job)}-{READER}",
        "namespace": job["metadata"]["namespace"],
        "labels": {**labels, COMPONENT_LABEL: READER},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


@contextmanager
def somewhere(kubectl: Kubectl, job: Manifest, *, may_make: bool) -> Iterator[str]:
    """Name of a pod that has the volume mounted. With ``may_make`` one is made where none runs, and removed again.

    Raises ClusterError where there is none.
    """
    found = running_pod(kubectl, jobs.name_of(job))
    if found:
        yield found
        return
    if not may_make:
        raise ClusterError(f"Job {jobs.name_of(job)}: no pod runs")
    pod = reader_pod(job)
    name = jobs.name_of(pod)
    try:
        kubectl.apply([pod])

        def missing() -> str:
            now = kubectl.find("pod", name)
            phase = (now or {}).get("status", {}).get("phase", "absent")
            if phase in ("Failed", "Succeeded"):
                raise ClusterError(f"pod {name}: {phase}; look: kubectl describe pod {name} -n {kubectl.namespace}")
            return "" if phase == "Running" else f"phase {phase}"

        wait_until(missing, timeout_s=START_S, poll_s=jobs.POLL_S, what=f"pod {name}")
        yield name
    finally:
        kubectl.delete("pod", name)


def state(kubectl: Kubectl, pod: str, run_id: str) -> RunState:
    """The run's state, read inside the pod. Raises ClusterError."""
    text = kubectl.run("exec", pod, "--", "python", "-m", "payload", "run-state", run_id)
    try:
        return RunState(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ClusterError(f"pod {pod}: run-state answered {text[:200]!r} ({error})") from error


def fetch(kubectl: Kubectl, pod: str, run_dir: str, target: Path, *, checkpoints: bool) -> int:
    """Copies the run's folder below ``target``; without ``checkpoints``, its small files only. Number of files."""
    path = PurePosixPath(run_dir)
    leave = [] if checkpoints else [f"--exclude={path.name}/checkpoints"]
    target.mkdir(parents=True, exist_ok=True)
    num = 0

    def unpack(stream: IO[bytes]) -> None:
        nonlocal num
        with tarfile.open(mode="r|", fileobj=stream) as archive:
            for member in archive:
                archive.extract(member, target, filter="data")
                num += member.isfile()

    try:
        kubectl.pipe("exec", pod, "--", "tar", "-C", str(path.parent), *leave, "-cf", "-", path.name, consume=unpack)
    except tarfile.TarError as error:
        raise ClusterError(f"pod {pod}: {run_dir}: {error}; is there such a run?") from error
    return num
