"""Runs a rendered Job on this machine: the Job controller, the kubelets and the nodes are here, the pods are processes.

What runs is the manifest, field by field; one that is not implemented is refused (payload/local_fields.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.config import ConfigError, RunConfig
from payload.deployment import LOCAL, Deployment
from payload.events import EventLog
from payload.job_controller import JobController, JobSpec
from payload.kubelet import SHM, LocalKubelet
from payload.local_fields import refuse_unknown
from payload.manifests import job_of, render, validate

POLL_S = 0.05
NODE_DELETION_RAW_S = 300.0
"""From the loss of a node to the end of its object: the cloud has to find the instance dead and to terminate it."""
MAX_PODS = 250
REQUESTS = ("pod-loss", "node-loss", "node-delete", "pod-delete", "job-delete")

OnEvent = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class JobResult:
    succeeded: bool
    reason: str
    """Why it failed; empty on success."""
    num_container_restarts: int
    num_pod_replacements: int
    backoff_raw_s: float
    """Back-off that a cluster would have waited, over all pods."""
    backoff_waited_s: float
    """Back-off that was waited here."""
    duration_s: float
    logs: Path
    """Folder of the containers' output, a file a start."""


class LocalCluster:
    """One Job at a time. All that it starts ends with run(), however that ends."""

    def __init__(
        self,
        root: Path,
        *,
        env: Mapping[str, str] | None = None,
        memory_root: Path = SHM,
        node_deletion_raw_s: float | None = NODE_DELETION_RAW_S,
    ) -> None:
        """
        Args:
            root: durable folder; claims lie in ``volumes/<claim>``, output in ``logs/<job>``.
            env: set in every container, over what the manifest says.
            memory_root: where memory volumes are made.
            node_deletion_raw_s: raw seconds until the object of a lost node is deleted; None: on request only.
        """
        self.root = root.resolve()
        self._env = dict(env or {})
        self._memory_root = memory_root
        self._node_deletion_raw_s = node_deletion_raw_s
        self._requests: Path | None = None

    def claim_folder(self, claim: str) -> Path:
        """Where the claim lies on this machine."""
        return self.root / "volumes" / claim

    def request(self, what: str, index: int = 0) -> None:
        """Asks the running Job for one of REQUESTS; from any thread or signal handler, acted on within POLL_S.

        Raises RuntimeError when no Job runs.
        """
        if self._requests is None:
            raise RuntimeError("no Job is running")
        drop_request(self._requests, what, index)

    def run(
        self,
        manifests: Sequence[Mapping[str, Any]],
        *,
        speedup: float = 1.0,
        on_event: OnEvent | None = None,
        on_poll: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> JobResult:
        """Runs the Job to its end.

        Args:
            speedup: how many times as fast the cluster's clock runs (job_controller.py).
            on_event: called with kind and fields of each job event.
            on_poll: called about every POLL_S.
            timeout_s: longest run.

        Raises:
            ConfigError: a field that the API refuses, or that is not implemented here.
            TimeoutError: the Job did not end within ``timeout_s``; it was killed.
        """
        job = self._accept(manifests, speedup)
        maps = {item["metadata"]["name"]: item.get("data", {}) for item in manifests if item["kind"] == "ConfigMap"}
        base = Path(tempfile.mkdtemp(prefix=f"nvrx-{os.getpid()}-"))
        kubelet = None
        try:
            kubelet = LocalKubelet(job, maps, self.root, base, self._env, self._memory_root)
            self._requests = kubelet.requests
            return self._loop(job, kubelet, speedup, on_event or _ignore, on_poll, timeout_s)
        finally:
            self._requests = None
            if kubelet is not None:
                kubelet.close()
            shutil.rmtree(base, ignore_errors=True)

    def _accept(self, manifests: Sequence[Mapping[str, Any]], speedup: float) -> Mapping[str, Any]:
        for item in manifests:
            refuse_unknown(item)
        job = job_of([dict(item) for item in manifests])
        validate(job)
        if job["spec"]["completions"] > MAX_PODS:
            raise ConfigError(f"completions: {job['spec']['completions']}; legal here: up to {MAX_PODS}")
        if speedup < 1:
            raise ConfigError(f"speedup: {speedup:g}; legal: 1 or more")
        return job

    def _loop(
        self,
        job: Mapping[str, Any],
        kubelet: LocalKubelet,
        speedup: float,
        on_event: OnEvent,
        on_poll: Callable[[], None] | None,
        timeout_s: float | None,
    ) -> JobResult:
        def emit(kind: str, **fields: Any) -> None:
            on_event(kind, fields)

        started = time.monotonic()
        controller = JobController(
            JobSpec.of(job), kubelet, emit, speedup=speedup, node_deletion_raw_s=self._node_deletion_raw_s
        )
        emit("job_start", job=job["metadata"]["name"], speedup=speedup)
        while not controller.finished:
            now = time.monotonic()
            if timeout_s is not None and now - started > timeout_s:
                raise TimeoutError(f"Job {job['metadata']['name']} did not end within {timeout_s:g} s; {kubelet.logs}")
            controller.tick(now)
            for done in kubelet.wait(self._pause_s(controller, now)):
                controller.container_exited(done.uid, done.code, done.signal, time.monotonic())
            self._act_on_requests(controller, kubelet.requests)
            if on_poll is not None:
                on_poll()
        emit("job_end", succeeded=controller.succeeded, reason=controller.reason)
        return JobResult(
            succeeded=controller.succeeded,
            reason=controller.reason,
            num_container_restarts=controller.num_restarts,
            num_pod_replacements=controller.num_replacements,
            backoff_raw_s=controller.backoff_raw_s,
            backoff_waited_s=controller.backoff_waited_s,
            duration_s=time.monotonic() - started,
            logs=kubelet.logs,
        )

    def _pause_s(self, controller: JobController, now: float) -> float:
        deadline = controller.next_deadline()
        return POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - now))

    def _act_on_requests(self, controller: JobController, folder: Path) -> None:
        for path in sorted(folder.glob("[!.]*.json")):
            what = next((name for name in REQUESTS if path.name.startswith(name + "-")), None)
            if what is None:
                raise ConfigError(f"request {path.name}; legal: {', '.join(REQUESTS)}")
            index = json.loads(path.read_text())["index"]
            path.unlink()
            now = time.monotonic()
            if what == "job-delete":
                controller.end("deleted by request", now)
                continue
            act = {
                "pod-loss": controller.disrupt,
                "node-loss": controller.lose_node,
                "node-delete": controller.delete_node,
                "pod-delete": controller.delete_pod,
            }[what]
            act(index, now)


def drop_request(folder: Path, what: str, index: int) -> None:
    """Writes a request file, complete or not at all."""
    name = f"{what}-{uuid.uuid4()}"
    draft = folder / f"{name}.new"
    draft.write_text(json.dumps({"index": index}))
    draft.rename(folder / f"{name}.json")


def on_host(config: RunConfig, cluster: LocalCluster, deployment: Deployment = LOCAL) -> RunConfig:
    """The config as the pods of the local cluster see it: its paths are folders of this machine."""
    folder = cluster.claim_folder(deployment.volume_claim)
    overrides = {"workdir": str(folder)}
    if config.data.path:
        overrides["data.path"] = str(folder) + config.data.path[len(config.workdir.rstrip("/")) :]
    return config.with_overrides(overrides)


def run_config(
    config: RunConfig,
    cluster: LocalCluster,
    *,
    deployment: Deployment = LOCAL,
    speedup: float = 1.0,
    on_event: OnEvent | None = None,
    on_poll: Callable[[], None] | None = None,
    timeout_s: float | None = None,
) -> JobResult:
    """Renders the run, runs it, and keeps the job's events beside those of its ranks (``events/job.jsonl``)."""
    events_dir = on_host(config, cluster, deployment).events_dir
    events_dir.mkdir(parents=True, exist_ok=True)
    log = EventLog(events_dir / "job.jsonl", "job")

    def record(kind: str, fields: Mapping[str, Any]) -> None:
        log.emit(kind, **fields)
        if on_event is not None:
            on_event(kind, fields)

    try:
        return cluster.run(
            render(config, deployment), speedup=speedup, on_event=record, on_poll=on_poll, timeout_s=timeout_s
        )
    finally:
        log.close()


def _ignore(kind: str, fields: Mapping[str, Any]) -> None:
    """No listener."""
