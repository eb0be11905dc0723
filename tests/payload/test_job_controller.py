"""The rules of the Job controller and the kubelet, with a clock and a kubelet that the test holds in its hand."""

from typing import Any

import pytest

from payload.config import RunConfig
from payload.job_controller import JobController, JobSpec, Pod, failure_action
from payload.manifests import LOCAL, job_of, render


class Cluster:
    """Steps through time; pods do nothing until the test ends their container."""

    def __init__(
        self,
        arm: str,
        *,
        num_nodes: int = 2,
        backoff_limit: int = 6,
        node_deletion_raw_s: float | None = 300,
        speedup: float = 1,
    ) -> None:
        given = RunConfig().with_overrides(
            {"recovery.arm": arm, "parallelism.device": "cpu", "parallelism.num_nodes": num_nodes}
        )
        job = job_of(render(given, LOCAL))
        job["spec"]["backoffLimit"] = backoff_limit
        self.now = 0.0
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.calls: list[tuple[str, int]] = []
        self.controller = JobController(
            JobSpec.of(job), self, self._record, speedup=speedup, node_deletion_raw_s=node_deletion_raw_s
        )
        self.controller.tick(self.now)

    def _record(self, kind: str, **fields: Any) -> None:
        self.events.append((self.now, kind, fields))

    def start_pod(self, pod: Pod) -> None:
        self.calls.append(("start_pod", pod.index))

    def start_container(self, pod: Pod) -> None:
        self.calls.append(("start_container", pod.index))

    def terminate(self, pod: Pod) -> None:
        self.calls.append(("terminate", pod.index))

    def kill(self, pod: Pod) -> None:
        self.calls.append(("kill", pod.index))

    def remove(self, pod: Pod) -> None:
        self.calls.append(("remove", pod.index))

    def ends(self, index: int, code: int) -> None:
        pod = self.controller.pods[index]
        self.controller.container_exited(pod.uid, code, 0, self.now)

    def pass_time(self, seconds: float) -> None:
        """To a moment just after ``seconds`` from now, stopping wherever something is due."""
        end = self.now + seconds
        while (due := self.controller.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.controller.tick(self.now)
        self.now = end
        self.controller.tick(self.now)

    def times(self, kind: str, **wanted: Any) -> list[float]:
        return [at for at, name, fields in self.events if name == kind and wanted.items() <= fields.items()]


def test_the_kubelet_restarts_at_once_then_after_10_20_40_up_to_300_s() -> None:
    cluster = Cluster("kubernetes", backoff_limit=100)
    waits = []
    for _ in range(9):
        cluster.ends(1, 1)
        ended = cluster.now
        cluster.pass_time(1000)
        waits.append(cluster.times("pod_start", index=1)[-1] - ended)
        cluster.now = cluster.times("pod_start", index=1)[-1] + 1
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    assert cluster.controller.backoff_raw_s == sum(waits)
    assert cluster.calls.count(("start_pod", 1)) == 1, "the pod stays, only its container is new"


def test_ten_quiet_minutes_reset_the_back_off() -> None:
    cluster = Cluster("kubernetes", backoff_limit=100)
    for _ in range(3):
        cluster.ends(0, 1)
        cluster.pass_time(50)
    cluster.pass_time(601)
    cluster.ends(0, 1)
    assert cluster.controller.next_deadline() == cluster.now


def test_a_fast_clock_does_not_shorten_the_ten_minutes_that_a_container_has_to_run() -> None:
    """Else the back-off that a comparison shows would hang on the speed of the machine."""
    cluster = Cluster("kubernetes", backoff_limit=100, speedup=50)
    for _ in range(3):
        cluster.pass_time(100)
        cluster.ends(0, 1)
    assert cluster.controller.next_deadline() == cluster.now + 20 / 50
    cluster.pass_time(1 + 581)
    cluster.ends(0, 1)
    assert cluster.controller.next_deadline() == cluster.now, "20 s of back-off and more than 580 s of its own"


def test_on_failure_restarts_of_all_pods_count_towards_the_limit() -> None:
    cluster = Cluster("kubernetes", backoff_limit=3)
    for index in (0, 1, 0):
        assert not cluster.controller.reason
        cluster.ends(index, 1)
        cluster.pass_time(100)
    assert cluster.controller.reason.startswith("BackoffLimitExceeded")
    assert ("terminate", 1) in cluster.calls
    cluster.ends(1, 143)
    assert cluster.controller.finished and not cluster.controller.succeeded


def test_never_replaces_the_pod_after_the_controllers_back_off() -> None:
    cluster = Cluster("layered")
    first = cluster.controller.pods[1]
    cluster.ends(1, 1)
    cluster.pass_time(9)
    assert 1 not in cluster.controller.pods
    cluster.pass_time(1)
    second = cluster.controller.pods[1]
    assert second.uid != first.uid and second.restart_count == 0 and second.node != first.node
    cluster.ends(1, 1)
    ended = cluster.now
    cluster.pass_time(100)
    assert cluster.times("pod_start", index=1)[-1] - ended == 20
    assert cluster.controller.num_replacements == 2 and cluster.controller.num_restarts == 0


def test_the_controllers_back_off_is_at_most_ten_minutes() -> None:
    cluster = Cluster("layered", backoff_limit=100)
    for _ in range(9):
        cluster.ends(0, 1)
        cluster.pass_time(600)
    cluster.ends(0, 1)
    assert cluster.controller.next_deadline() == cluster.now + 600


def test_failed_pods_beyond_the_limit_fail_the_job() -> None:
    cluster = Cluster("layered", backoff_limit=1)
    cluster.ends(0, 1)
    cluster.pass_time(100)
    assert not cluster.controller.reason
    cluster.ends(0, 1)
    assert cluster.controller.reason == "BackoffLimitExceeded: backoffLimit 1"


def test_f25_the_no_progress_code_fails_the_job_at_once() -> None:
    """F25 (job side): exit 42 is not retried, the other pods get their grace period."""
    cluster = Cluster("in-job")
    cluster.ends(0, 42)
    assert cluster.controller.reason.startswith("PodFailurePolicy") and ("terminate", 1) in cluster.calls
    cluster.ends(1, 143)
    assert cluster.controller.finished and not cluster.controller.succeeded
    assert cluster.controller.num_replacements == 0


def test_f31_disruptions_do_not_count_but_delay() -> None:
    """F31: lost pods are replaced for ever, each with the controller's back-off."""
    cluster = Cluster("layered", backoff_limit=0)
    for _ in range(5):
        cluster.controller.disrupt(1, cluster.now)
        assert 1 not in cluster.controller.pods
        cluster.pass_time(700)
        assert 1 in cluster.controller.pods
    assert not cluster.controller.reason
    assert cluster.calls.count(("kill", 1)) == 5
    cluster.ends(1, 1)
    assert cluster.controller.reason.startswith("BackoffLimitExceeded")


def test_without_a_policy_a_lost_pod_counts() -> None:
    cluster = Cluster("kubernetes", backoff_limit=1)
    for _ in range(2):
        cluster.controller.disrupt(0, cluster.now)
        cluster.pass_time(100)
    assert cluster.controller.reason.startswith("BackoffLimitExceeded")


def test_f30_a_lost_nodes_pod_is_replaced_only_when_its_node_object_is_gone() -> None:
    """F30: unreachable after 50 s, terminating after the toleration's 30 s, replaced after deletion at 300 s."""
    cluster = Cluster("layered")
    lost = cluster.controller.pods[1]
    cluster.controller.lose_node(1, cluster.now)
    cluster.ends(1, 137)
    assert cluster.times("container_exit") == [], "a dead node reports nothing"
    cluster.pass_time(79)
    assert lost.state == "lost"
    cluster.pass_time(2)
    assert lost.state == "terminating" and cluster.controller.pods[1] is lost
    cluster.pass_time(218)
    assert cluster.controller.pods[1] is lost
    cluster.pass_time(2)
    assert cluster.times("node_deleted") == [300]
    assert 1 not in cluster.controller.pods
    cluster.pass_time(10)
    assert cluster.controller.pods[1].node not in {"node-0", "node-1"}
    assert cluster.controller.num_counted_failures == 0


def test_without_deletion_a_lost_node_keeps_its_pod_for_ever() -> None:
    cluster = Cluster("layered", node_deletion_raw_s=None)
    lost = cluster.controller.pods[0]
    cluster.controller.lose_node(0, cluster.now)
    cluster.pass_time(100_000)
    assert cluster.controller.pods[0] is lost
    cluster.controller.delete_node(0, cluster.now)
    cluster.pass_time(100)
    assert cluster.controller.pods[0] is not lost


def test_a_deleted_pod_ends_gracefully_and_counts() -> None:
    cluster = Cluster("layered")
    cluster.controller.delete_pod(1, cluster.now)
    assert cluster.calls[-1] == ("terminate", 1)
    cluster.pass_time(25)
    assert cluster.controller.pods[1].state == "terminating", "no replacement before it is gone"
    cluster.ends(1, 143)
    assert cluster.controller.num_counted_failures == 1
    cluster.pass_time(10)
    assert cluster.controller.pods[1].state == "running"


def test_a_deleted_pod_that_ends_with_0_has_succeeded() -> None:
    cluster = Cluster("layered", num_nodes=1)
    cluster.controller.delete_pod(0, cluster.now)
    cluster.ends(0, 0)
    assert cluster.controller.finished and cluster.controller.succeeded


@pytest.mark.parametrize("arm", ["kubernetes", "layered"])
def test_the_job_succeeds_when_every_index_has(arm: str) -> None:
    cluster = Cluster(arm)
    cluster.ends(0, 0)
    assert not cluster.controller.finished
    cluster.ends(1, 1)
    cluster.pass_time(100)
    assert [call for call in cluster.calls if call == ("start_pod", 0)] == [("start_pod", 0)], "index 0 is done"
    cluster.ends(1, 0)
    assert cluster.controller.finished and cluster.controller.succeeded


def test_deletion_of_the_job_waits_for_running_pods_only() -> None:
    cluster = Cluster("kubernetes", num_nodes=4, node_deletion_raw_s=None)
    cluster.ends(0, 1)
    cluster.pass_time(1)
    cluster.ends(0, 1)  # in back-off
    cluster.controller.lose_node(1, cluster.now)
    cluster.controller.end("deleted", cluster.now)
    assert set(cluster.controller.pods) == {2, 3}
    cluster.ends(2, 143)
    cluster.ends(3, 0)
    assert cluster.controller.finished and not cluster.controller.succeeded


def test_the_clock_runs_as_many_times_as_fast_as_asked() -> None:
    job = job_of(render(RunConfig().with_overrides({"parallelism.device": "cpu"}), LOCAL))
    waited: list[dict[str, Any]] = []
    cluster = Cluster("layered")
    controller = JobController(
        JobSpec.of(job),
        cluster,
        lambda kind, **fields: waited.append(fields) if kind == "backoff" else None,
        speedup=10,
        node_deletion_raw_s=None,
    )
    controller.tick(0.0)
    controller.container_exited(controller.pods[0].uid, 1, 0, 5.0)
    assert controller.next_deadline() == 6.0
    controller.tick(6.0)
    assert waited == [{"index": 0, "layer": "job-controller", "raw_s": 10.0, "waited_s": 1.0}]


def test_the_first_matching_rule_decides() -> None:
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    fail = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    other = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}}
    assert failure_action((ignore, fail), 42, {"DisruptionTarget"}) == "Ignore"
    assert failure_action((fail, ignore), 42, {"DisruptionTarget"}) == "FailJob"
    assert failure_action((ignore, fail), 1, set()) == "Count"
    assert failure_action((other,), 3, set()) == "FailJob"
    assert failure_action((other,), 2, set()) == "Count"
    assert failure_action((other,), 0, set()) == "Count", "success is matched by no rule on exit codes"
    assert failure_action((other,), None, set()) == "Count"
