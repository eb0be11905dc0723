"""The rules of the Job controller, the kubelet's restarts and the node life cycle, as a state machine.

Pure: it starts no process and reads no clock. A ``Kubelet`` does what it decides; the caller hands in what happened
and when. All waits of the cluster are given in raw seconds, as Kubernetes has them, and divided by ``speedup``: the
cluster's clock runs that many times as fast. What the processes themselves take (imports, steps, the grace period)
is real time.

Sources (Kubernetes 1.34): pkg/controller/job (job_controller.go, backoff_utils.go, pod_failure_policy.go),
pkg/kubelet/kuberuntime (doBackOff), pkg/controller/nodelifecycle, pkg/controller/podgc.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

BACKOFF_RAW_S = 10.0
"""First back-off of the kubelet and of the Job controller; both double it each time."""
CONTAINER_BACKOFF_MAX_RAW_S = 300.0
CONTAINER_RESET_RAW_S = 600.0
"""A container whose crash comes later than this after the last one starts over without back-off. Back-off counts as
it would have been on a cluster, the container's own time as it was."""
POD_BACKOFF_MAX_RAW_S = 600.0
NODE_GRACE_RAW_S = 50.0
"""Silence of a kubelet until its node counts as unreachable (node-monitor-grace-period)."""
UNREACHABLE = "node.kubernetes.io/unreachable"
DISRUPTION = "DisruptionTarget"

Emit = Callable[..., None]
State = Literal["running", "backoff", "terminating", "lost"]
"""``lost``: the node is silent, nothing is known of the pod. ``terminating``: deleted, not yet gone."""


@dataclass
class Pod:
    index: int
    uid: str
    name: str
    node: str
    state: State = "running"
    restart_count: int = 0
    conditions: set[str] = field(default_factory=set)
    exit_code: int | None = None
    """Of the last container that ended."""
    backoff_raw_s: float = 0.0
    """What the next crash will wait."""
    crashed_at: float | None = None
    waited_raw_s: float = 0.0
    """Back-off after the last crash."""


class Kubelet(Protocol):
    """Acts on pods; reports each end of a container by JobController.container_exited()."""

    def start_pod(self, pod: Pod) -> None: ...
    def start_container(self, pod: Pod) -> None: ...
    def terminate(self, pod: Pod) -> None:
        """SIGTERM to the container's first process, SIGKILL to all of them when the grace period is over."""
        ...

    def kill(self, pod: Pod) -> None:
        """SIGKILL to all processes of the pod."""
        ...

    def remove(self, pod: Pod) -> None:
        """Ends what is left of the pod; its memory volumes go with it."""
        ...


@dataclass(frozen=True)
class JobSpec:
    """What the controller reads of a Job."""

    name: str
    completions: int
    backoff_limit: int
    restarts_in_place: bool
    """restartPolicy OnFailure."""
    rules: tuple[Mapping[str, Any], ...]
    unreachable_raw_s: float
    """The pod's toleration of an unreachable node."""

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> JobSpec:
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        tolerated = [t["tolerationSeconds"] for t in pod.get("tolerations", []) if t.get("key") == UNREACHABLE]
        return cls(
            name=job["metadata"]["name"],
            completions=spec["completions"],
            backoff_limit=spec["backoffLimit"],
            restarts_in_place=pod["restartPolicy"] == "OnFailure",
            rules=tuple(spec.get("podFailurePolicy", {}).get("rules", ())),
            unreachable_raw_s=float(tolerated[0]) if tolerated else 300.0,
        )


def failure_action(rules: tuple[Mapping[str, Any], ...], code: int | None, conditions: set[str]) -> str:
    """``FailJob``, ``Ignore`` or ``Count``: the first rule that matches decides; none matching counts."""
    for rule in rules:
        if "onExitCodes" in rule and code:
            listed = code in rule["onExitCodes"]["values"]
            if listed == (rule["onExitCodes"]["operator"] == "In"):
                return str(rule["action"])
        if any(item["type"] in conditions for item in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


class JobController:
    """One Job from its creation to its end. Not thread-safe; every method takes the time in seconds."""

    def __init__(
        self, spec: JobSpec, kubelet: Kubelet, emit: Emit, *, speedup: float, node_deletion_raw_s: float | None
    ) -> None:
        """``node_deletion_raw_s``: from the loss of a node to the deletion of its object; None: never by itself."""
        self.spec = spec
        self._kubelet, self._emit, self._speedup = kubelet, emit, speedup
        self._node_deletion_raw_s = node_deletion_raw_s
        self.pods: dict[int, Pod] = {}
        self.reason = ""
        """Why the Job failed; empty while it has not."""
        self.num_restarts = 0
        self.num_replacements = 0
        self.num_counted_failures = 0
        self.backoff_raw_s = 0.0
        self.backoff_waited_s = 0.0
        self._succeeded: set[int] = set()
        self._started: set[int] = set()
        self._timers: list[tuple[float, Callable[[float], None], Pod | None]] = []
        self._failures_in_a_row = 0
        self._last_failure: float | None = None
        self._num_nodes = 0

    @property
    def finished(self) -> bool:
        return not self.pods and (bool(self.reason) or len(self._succeeded) == self.spec.completions)

    @property
    def succeeded(self) -> bool:
        return len(self._succeeded) == self.spec.completions and not self.reason

    def next_deadline(self) -> float | None:
        """When tick() has something to do at the latest."""
        pending = [self._creation_time()] if self._missing() else []
        return min([*(at for at, _, _ in self._timers), *pending], default=None)

    def tick(self, now: float) -> None:
        """Does what is due: creates missing pods, restarts containers, moves lost nodes on."""
        due = [timer for timer in self._timers if timer[0] <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for _, act, pod in due:
            if pod is None or self.pods.get(pod.index) is pod:
                act(now)
        if now >= self._creation_time():
            for index in self._missing():
                self._create(index, now)

    def container_exited(self, uid: str, code: int, signal: int, now: float) -> None:
        """``code`` as the kubelet reports it: 128 + signal for a death by signal."""
        pod = next((pod for pod in self.pods.values() if pod.uid == uid), None)
        if pod is None or pod.state == "lost" or (pod.state == "terminating" and "silent" in pod.conditions):
            return  # a dead node reports nothing
        pod.exit_code = code
        self._emit("container_exit", index=pod.index, code=code, signal=signal)
        if self.reason:
            self._drop(pod)
        elif code == 0:
            self._succeeded.add(pod.index)
            self._failures_in_a_row, self._last_failure = 0, None
            self._drop(pod)
        elif pod.state == "running" and self.spec.restarts_in_place:
            self._restart_later(pod, now)
        else:
            self._fail_pod(pod, now)

    def disrupt(self, index: int, now: float) -> None:
        """An eviction that leaves no time: all processes are killed, the pod is replaced."""
        if pod := self._alive(index):
            pod.conditions.add(DISRUPTION)
            pod.exit_code = 137
            self._kubelet.kill(pod)
            self._fail_pod(pod, now)

    def delete_pod(self, index: int, now: float) -> None:
        """As kubectl delete pod: graceful, and counted as a failure unless it ends with 0."""
        if pod := self._alive(index):
            self._emit("pod_deleted", index=index, reason="deleted by request")
            waiting, pod.state = pod.state == "backoff", "terminating"
            if waiting:
                self._fail_pod(pod, now)
            else:
                self._kubelet.terminate(pod)

    def lose_node(self, index: int, now: float) -> None:
        """The node and all on it is gone without a word; its pod stays until the node object is deleted."""
        pod = self._alive(index)
        if pod is None:
            return
        pod.state = "lost"
        pod.conditions.add("silent")
        self._kubelet.kill(pod)
        self._emit("node_lost", index=index, node=pod.node)

        def evict(_: float) -> None:
            pod.state = "terminating"
            self._emit("pod_deleted", index=index, reason="node unreachable; terminating until its object is deleted")

        self._after(NODE_GRACE_RAW_S + self.spec.unreachable_raw_s, now, evict, pod)
        if self._node_deletion_raw_s is not None:
            self._after(self._node_deletion_raw_s, now, lambda later: self.delete_node(index, later), pod)

    def delete_node(self, index: int, now: float) -> None:
        """The object of the lost node of this pod is deleted: the pod garbage collector fails the pod."""
        pod = self.pods.get(index)
        if pod is None or "silent" not in pod.conditions:
            return
        self._emit("node_deleted", index=index, node=pod.node)
        pod.conditions.add(DISRUPTION)
        if self.reason:
            self._drop(pod)
        else:
            self._fail_pod(pod, now)

    def end(self, reason: str, now: float) -> None:
        """The Job fails or is deleted: every pod gets its grace period; lost ones are given up."""
        self.reason = self.reason or reason
        for pod in list(self.pods.values()):
            if pod.state == "running":
                pod.state = "terminating"
                self._kubelet.terminate(pod)
            elif pod.state in ("backoff", "lost") or "silent" in pod.conditions:
                self._drop(pod)

    def _alive(self, index: int) -> Pod | None:
        pod = self.pods.get(index)
        return pod if pod is not None and pod.state in ("running", "backoff") else None

    def _missing(self) -> list[int]:
        if self.reason:
            return []
        return [i for i in range(self.spec.completions) if i not in self.pods and i not in self._succeeded]

    def _after(self, raw_s: float, now: float, act: Callable[[float], None], pod: Pod | None) -> None:
        self._timers.append((now + raw_s / self._speedup, act, pod))

    def _pod_backoff_raw_s(self) -> float:
        if not self._failures_in_a_row:
            return 0.0
        return min(POD_BACKOFF_MAX_RAW_S, BACKOFF_RAW_S * 2.0 ** (self._failures_in_a_row - 1))

    def _creation_time(self) -> float:
        return (self._last_failure or 0.0) + self._pod_backoff_raw_s() / self._speedup

    def _create(self, index: int, now: float) -> None:
        uid = str(uuid.uuid4())
        pod = Pod(index, uid, f"{self.spec.name}-{index}-{uid[:5]}", f"node-{self._num_nodes}")
        self._num_nodes += 1
        self.num_replacements += index in self._started
        self._started.add(index)
        if self._last_failure is not None:
            self._count_backoff(index, "job-controller", self._pod_backoff_raw_s(), now - self._last_failure)
        self.pods[index] = pod
        self._kubelet.start_pod(pod)
        self._emit("pod_start", index=index, uid=uid, node=pod.node, restart_count=0)

    def _restart_later(self, pod: Pod, now: float) -> None:
        """The kubelet restarts a first crash at once and lets later ones wait 10, 20, 40 ... 300 s."""
        quiet_raw_s = float("inf")
        if pod.crashed_at is not None:
            ran_s = now - pod.crashed_at - pod.waited_raw_s / self._speedup
            quiet_raw_s = pod.waited_raw_s + ran_s
        raw_s = 0.0 if quiet_raw_s > CONTAINER_RESET_RAW_S else pod.backoff_raw_s
        pod.backoff_raw_s = min(CONTAINER_BACKOFF_MAX_RAW_S, max(BACKOFF_RAW_S, raw_s * 2.0))
        pod.crashed_at, pod.waited_raw_s, pod.state = now, raw_s, "backoff"

        def restart(later: float) -> None:
            if raw_s:
                self._count_backoff(pod.index, "kubelet", raw_s, later - now)
            pod.restart_count += 1
            self.num_restarts += 1
            # Under OnFailure the controller adds up the restart counts of the pods.
            if sum(other.restart_count for other in self.pods.values()) >= max(1, self.spec.backoff_limit):
                self.end(self._limit_reason(), later)
                return
            pod.state = "running"
            self._kubelet.start_container(pod)
            self._emit("pod_start", index=pod.index, uid=pod.uid, node=pod.node, restart_count=pod.restart_count)

        self._after(raw_s, now, restart, pod)

    def _fail_pod(self, pod: Pod, now: float) -> None:
        action = failure_action(self.spec.rules, pod.exit_code, pod.conditions)
        self._emit("pod_failed", index=pod.index, code=pod.exit_code, action=action)
        self._drop(pod)
        # Ignored failures do not count towards the limit, but they do delay the replacement.
        self._failures_in_a_row += 1
        self._last_failure = now
        if action == "FailJob":
            self.end(f"PodFailurePolicy: pod {pod.index} ended with exit code {pod.exit_code}", now)
        elif action == "Count":
            self.num_counted_failures += 1
            if self.num_counted_failures > self.spec.backoff_limit:
                self.end(self._limit_reason(), now)

    def _limit_reason(self) -> str:
        return f"BackoffLimitExceeded: backoffLimit {self.spec.backoff_limit}"

    def _count_backoff(self, index: int, layer: str, raw_s: float, waited_s: float) -> None:
        self.backoff_raw_s += raw_s
        self.backoff_waited_s += waited_s
        self._emit("backoff", index=index, layer=layer, raw_s=raw_s, waited_s=waited_s)

    def _drop(self, pod: Pod) -> None:
        self.pods.pop(pod.index, None)
        self._kubelet.remove(pod)
