"""The local cluster with real processes: what a container sees, how pods end, and that nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from payload.config import ConfigError, RunConfig
from payload.kubelet import free_port
from payload.local import LocalCluster, run_config
from payload.manifests import LOCAL, job_of, render

CHECKOUT = Path(__file__).parents[2]
SPEEDUP = 1000.0
Objects = list[dict[str, Any]]

COUNT_STARTS = """
import json, os, sys
from pathlib import Path
config = json.loads(Path(os.environ["NVRX_EKS_CONFIG"]).read_text())
starts = Path(config["workdir"]) / f"starts{os.environ['JOB_COMPLETION_INDEX']}"
with starts.open("a") as file:
    file.write(os.environ["POD_UID"] + "\\n")
start = len(starts.read_text().splitlines())
memory = Path(config["checkpoint"]["memory_dir"])
"""
WAIT = "\nimport time\nwhile True: time.sleep(0.02)\n"


def objects_for(tmp_path: Path, arm: str, script: str, *, num_nodes: int = 2, **overrides: Any) -> Objects:
    """The rendered run with a script in the launcher's place."""
    path = tmp_path / "container.py"
    path.write_text(COUNT_STARTS + script)
    config = RunConfig().with_overrides(
        {
            "recovery.arm": arm,
            "parallelism.device": "cpu",
            "parallelism.num_nodes": num_nodes,
            "timeouts.save_grace_s": 60,
            **overrides,
        }
    )
    objects = render(config, LOCAL)
    job_of(objects)["spec"]["template"]["spec"]["containers"][0]["command"] = ["python", str(path)]
    return objects


class Recorder:
    """Job events, and a reaction to them."""

    def __init__(self, react: Callable[[str, Mapping[str, Any]], None] | None = None) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._react = react

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, dict(fields)))
        if self._react is not None:
            self._react(kind, fields)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


def shared(cluster: LocalCluster) -> Path:
    return cluster.claim_folder(LOCAL.volume_claim)


def once(exists: Path, act: Callable[[], None]) -> Callable[[], None]:
    """A poll that acts a single time, when the file is there."""
    done: list[bool] = []

    def poll() -> None:
        if exists.exists() and not done:
            done.append(True)
            act()

    return poll


def test_a_container_sees_what_the_manifest_says(tmp_path: Path) -> None:
    script = """
hosts = Path(os.environ["NVRX_EKS_HOSTS"]).read_text()
seen = {"env": dict(os.environ), "config": config, "hosts": hosts, "cwd": os.getcwd()}
(memory / "x").write_text("x"); Path(os.environ["TMPDIR"], "x").write_text("x")
(Path(config["workdir"]) / f"seen{os.environ['JOB_COMPLETION_INDEX']}").write_text(json.dumps(seen))
"""
    cluster = LocalCluster(tmp_path / "root", env={"EXTRA": "1"}, memory_root=tmp_path)
    objects = objects_for(tmp_path, "layered", script)
    recorder = Recorder()
    result = cluster.run(objects, speedup=SPEEDUP, on_event=recorder, timeout_s=60)
    assert result.succeeded and result.reason == ""
    name = job_of(objects)["metadata"]["name"]
    for index in (0, 1):
        seen = json.loads((shared(cluster) / f"seen{index}").read_text())
        env = seen["env"]
        started = next(fields for fields in recorder.of("pod_start") if fields["index"] == index)
        assert env["JOB_COMPLETION_INDEX"] == str(index) and env["POD_UID"] == started["uid"]
        assert env["POD_NAME"].startswith(f"{name}-{index}-") and env["NODE_NAME"] == started["node"]
        assert env["NVRX_EKS_COORDINATOR"] == f"{name}-0.{name}.nvrx-eks.svc"
        assert f"{name}-{index}.{name}.nvrx-eks.svc 127.0.0.{index + 1}\n" in seen["hosts"], "its own name at least"
        assert env["NVRX_EKS_PORT"] != "29400" and env["OMP_NUM_THREADS"] == "1" and env["EXTRA"] == "1"
        assert "PYTEST_CURRENT_TEST" not in env, "nothing of this process's environment gets in"
        assert seen["config"]["workdir"] == str(shared(cluster))
        assert seen["config"]["checkpoint"]["memory_dir"].startswith(str(tmp_path))
        assert not Path(seen["config"]["checkpoint"]["memory_dir"]).exists(), "memory lives as long as the pod"
        assert not Path(env["TMPDIR"]).exists()
    ports = {json.loads((shared(cluster) / f"seen{i}").read_text())["env"]["NVRX_EKS_PORT"] for i in (0, 1)}
    assert len(ports) == 1
    assert recorder.events[0][0] == "job_start"
    assert recorder.events[-1] == ("job_end", {"succeeded": True, "reason": ""})


def test_on_failure_restarts_the_container_in_its_pod_and_memory_stays(tmp_path: Path) -> None:
    script = """
mark = memory / "mark"
if start < 4:
    mark.write_text(str(start)); print("crash", start); sys.exit(7)
assert mark.read_text() == "3"
"""
    cluster = LocalCluster(tmp_path / "root")
    recorder = Recorder()
    result = cluster.run(
        objects_for(tmp_path, "kubernetes", script, num_nodes=1), speedup=SPEEDUP, on_event=recorder, timeout_s=60
    )
    assert result.succeeded
    assert (result.num_container_restarts, result.num_pod_replacements, result.backoff_raw_s) == (3, 0, 30.0)
    assert [fields["raw_s"] for fields in recorder.of("backoff")] == [10.0, 20.0]
    assert [fields["restart_count"] for fields in recorder.of("pod_start")] == [0, 1, 2, 3]
    assert len({fields["uid"] for fields in recorder.of("pod_start")}) == 1
    assert [fields["code"] for fields in recorder.of("container_exit")] == [7, 7, 7, 0]
    assert "crash 1" in "".join(path.read_text() for path in result.logs.iterdir())


def test_never_replaces_the_pod_and_its_memory(tmp_path: Path) -> None:
    script = """
mark = memory / "mark"
assert not mark.exists()
mark.write_text("x")
if start == 1: sys.exit(1)
"""
    cluster = LocalCluster(tmp_path / "root")
    result = cluster.run(objects_for(tmp_path, "layered", script, num_nodes=1), speedup=SPEEDUP, timeout_s=60)
    assert result.succeeded and (result.num_container_restarts, result.num_pod_replacements) == (0, 1)
    uids = (shared(cluster) / "starts0").read_text().split()
    assert len(uids) == len(set(uids)) == 2


def test_f25_exit_42_fails_the_job_and_ends_the_others(tmp_path: Path) -> None:
    """F25 (job side): no retry; the survivor gets SIGTERM, and SIGKILL when its grace period is over."""
    script = """
import signal, time
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    while not (Path(config["workdir"]) / "deaf").exists(): time.sleep(0.01)
    sys.exit(42)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(Path(config["workdir"]) / "deaf").write_text("")
while True: time.sleep(0.02)
"""
    cluster = LocalCluster(tmp_path / "root")
    recorder = Recorder()
    objects = objects_for(tmp_path, "layered", script, **{"timeouts.save_grace_s": 1})
    result = cluster.run(objects, speedup=SPEEDUP, on_event=recorder, timeout_s=60)
    assert not result.succeeded and result.reason.startswith("PodFailurePolicy")
    ends = {fields["index"]: (fields["code"], fields["signal"]) for fields in recorder.of("container_exit")}
    assert ends == {0: (42, 0), 1: (137, 9)}


def test_the_first_process_takes_its_whole_tree_along(tmp_path: Path) -> None:
    """Even what left its session and its parent: as the end of process 1 ends a container."""
    script = """
import subprocess
if start == 1:
    orphan = Path(config["workdir"]) / "orphan"
    code = ("import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'],"
            f" start_new_session=True); open({str(orphan)!r}, 'w').write(str(p.pid))")
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    sys.exit(1)
assert not Path("/proc", (Path(config["workdir"]) / "orphan").read_text().strip()).exists()
"""
    cluster = LocalCluster(tmp_path / "root")
    result = cluster.run(objects_for(tmp_path, "kubernetes", script, num_nodes=1), speedup=SPEEDUP, timeout_s=60)
    assert result.succeeded and result.num_container_restarts == 1


def test_requested_losses_replace_pods_and_free_nothing_too_early(tmp_path: Path) -> None:
    """F30 (runner side): pod 1 is lost, then its node; never do two of its pods live at once."""
    script = """
import time
if start > 1:
    before = Path(config["workdir"]) / f"pid{os.environ['JOB_COMPLETION_INDEX']}-{start - 1}"
    assert not Path("/proc", before.read_text()).exists()
(Path(config["workdir"]) / f"pid{os.environ['JOB_COMPLETION_INDEX']}-{start}").write_text(str(os.getpid()))
done = Path(config["workdir"]) / "pid1-3"
while not done.exists(): time.sleep(0.01)
"""
    cluster = LocalCluster(tmp_path / "root")
    recorder = Recorder()
    first = once(shared(cluster) / "pid1-1", lambda: cluster.request("pod-loss", 1))
    second = once(shared(cluster) / "pid1-2", lambda: cluster.request("node-loss", 1))

    def poll() -> None:
        first()
        second()

    result = cluster.run(
        objects_for(tmp_path, "layered", script), speedup=SPEEDUP, on_event=recorder, on_poll=poll, timeout_s=60
    )
    assert result.succeeded and result.num_pod_replacements == 2
    kinds = [kind for kind, fields in recorder.events if fields.get("index") == 1 and kind != "backoff"]
    assert kinds == [
        *("pod_start", "pod_failed", "pod_start"),
        *("node_lost", "pod_deleted", "node_deleted", "pod_failed", "pod_start", "container_exit"),
    ]
    assert len({fields["node"] for fields in recorder.of("pod_start")}) == 4


@pytest.mark.parametrize(("what", "replaced"), [("pod-delete", 1), ("job-delete", 0)])
def test_deletion_is_graceful(tmp_path: Path, what: str, replaced: int) -> None:
    script = """
import signal, time
def leave(*_):
    (Path(config["workdir"]) / "saved").write_text(""); sys.exit(143)
signal.signal(signal.SIGTERM, leave)
if start > 1: sys.exit(0)
(Path(config["workdir"]) / "ready").write_text("")
while True: time.sleep(0.02)
"""
    cluster = LocalCluster(tmp_path / "root")
    recorder = Recorder()
    poll = once(shared(cluster) / "ready", lambda: cluster.request(what, 0))
    objects = objects_for(tmp_path, "layered", script, num_nodes=1)
    result = cluster.run(objects, speedup=SPEEDUP, on_event=recorder, on_poll=poll, timeout_s=60)
    assert (shared(cluster) / "saved").exists()
    assert recorder.of("container_exit")[0] == {"index": 0, "code": 143, "signal": 0}
    assert result.num_pod_replacements == replaced and result.succeeded == bool(replaced)


def test_a_job_that_does_not_end_is_killed(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "root")
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        cluster.run(objects_for(tmp_path, "layered", WAIT), timeout_s=1)


def test_an_error_in_a_callback_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    cluster = LocalCluster(tmp_path / "root")
    with pytest.raises(OSError, match="disk full"):
        cluster.run(objects_for(tmp_path, "layered", WAIT), on_poll=fail)
    with pytest.raises(RuntimeError, match="no Job is running"):
        cluster.request("pod-loss", 0)


def test_sigkill_of_the_runner_leaves_nothing(tmp_path: Path) -> None:
    """The sandboxes see their stdin close: processes and folders of every pod go, in real memory too."""
    objects = objects_for(tmp_path, "layered", "(memory / 'x').write_text('x')" + WAIT)
    (tmp_path / "objects.json").write_text(json.dumps(objects))
    runner = tmp_path / "runner.py"
    runner.write_text(
        "import json, sys; from pathlib import Path; from payload.local import LocalCluster\n"
        "folder = Path(sys.argv[1])\n"
        "LocalCluster(folder / 'root').run(json.loads((folder / 'objects.json').read_text()))\n"
    )
    process = subprocess.Popen([sys.executable, str(runner), str(tmp_path)], env={"PYTHONPATH": str(CHECKOUT)})
    deadline = time.monotonic() + 60
    starts = [tmp_path / "root" / "volumes" / "fsx" / f"starts{index}" for index in (0, 1)]
    while not all(path.exists() for path in starts):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4, "two sandboxes, two containers"
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert list(Path("/dev/shm").glob(f"nvrx-{process.pid}-*")) == []
    leftover = [path for path in Path(os.environ.get("TMPDIR", "/tmp")).glob(f"nvrx-{process.pid}-*")]
    assert [path for folder in leftover for path in folder.glob("[0-9]-*")] == [], "folders of pods"
    for folder in leftover:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def test_job_events_lie_beside_those_of_the_ranks(tmp_path: Path) -> None:
    """The real entrypoint, which refuses its environment at once."""
    cluster = LocalCluster(tmp_path / "root", env={"NVRX_EKS_COORDINATOR": ""})
    config = RunConfig().with_overrides({"parallelism.device": "cpu", "parallelism.num_nodes": 1})

    def stop(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "container_exit":
            cluster.request("job-delete")

    result = run_config(config, cluster, on_event=stop, timeout_s=100)
    assert not result.succeeded and result.reason == "deleted by request"
    log = shared(cluster) / "runs" / "local" / "events" / "job.jsonl"
    kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()]
    assert kinds[:2] == ["job_start", "pod_start"] and kinds[-1] == "job_end"
    ends = [json.loads(line) for line in log.read_text().splitlines() if "container_exit" in line]
    assert {end["code"] for end in ends} == {2}
    assert "NVRX_EKS_COORDINATOR: not set" in next(result.logs.iterdir()).read_text()


def test_a_command_that_does_not_start_is_a_failed_container(tmp_path: Path) -> None:
    objects = objects_for(tmp_path, "layered", "", num_nodes=1)
    job_of(objects)["spec"]["backoffLimit"] = 0
    job_of(objects)["spec"]["template"]["spec"]["containers"][0]["command"] = ["/none/at/all"]
    recorder = Recorder()
    result = LocalCluster(tmp_path / "root").run(objects, speedup=SPEEDUP, on_event=recorder, timeout_s=60)
    assert result.reason.startswith("BackoffLimitExceeded")
    assert recorder.of("container_exit") == [{"index": 0, "code": 128, "signal": 0}]
    assert "cannot start ['/none/at/all']" in next(result.logs.iterdir()).read_text()


REFUSED: list[tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = [
    (lambda spec, pod: pod.update(hostNetwork=True), "spec.template.spec.hostNetwork: not implemented"),
    (lambda spec, pod: pod.update(initContainers=[]), "spec.template.spec.initContainers: not implemented"),
    (lambda spec, pod: spec.update(suspend=True), "spec.suspend: not implemented"),
    (lambda spec, pod: spec.update(activeDeadlineSeconds=5), "spec.activeDeadlineSeconds: not implemented"),
    (lambda spec, pod: spec.update(completionMode="NonIndexed"), "'NonIndexed'; the local runner implements Indexed"),
    (lambda spec, pod: spec.pop("backoffLimit"), "spec.backoffLimit: missing"),
    (lambda spec, pod: pod.update(restartPolicy="Always"), "'Always'; the local runner implements Never, OnFailure"),
    (lambda spec, pod: pod["containers"].append(pod["containers"][0]), "implements exactly one"),
    (
        lambda spec, pod: pod["containers"][0].update(livenessProbe={}),
        "spec.template.spec.containers[0].livenessProbe: not implemented",
    ),
    (
        lambda spec, pod: pod["containers"][0]["env"][0].update(valueFrom={"secretKeyRef": {}}),
        "env[0].valueFrom.secretKeyRef: not implemented",
    ),
    (
        lambda spec, pod: pod["containers"][0]["env"].append(
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
        ),
        "'status.hostIP'; the local runner implements metadata.name",
    ),
    (lambda spec, pod: pod["volumes"].append({"name": "n", "nfs": {}}), "volumes[4].nfs: not implemented"),
    (
        lambda spec, pod: spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0].update(type="Ready"),
        "'Ready'; the local runner implements DisruptionTarget",
    ),
]


@pytest.mark.parametrize(("mutate", "expected"), REFUSED, ids=[expected for _, expected in REFUSED])
def test_refuses_what_it_does_not_implement(
    tmp_path: Path, mutate: Callable[[dict[str, Any], dict[str, Any]], object], expected: str
) -> None:
    objects = objects_for(tmp_path, "layered", "")
    spec = job_of(objects)["spec"]
    mutate(spec, spec["template"]["spec"])
    with pytest.raises(ConfigError) as refused:
        LocalCluster(tmp_path / "root").run(objects)
    assert expected in str(refused.value)
    assert all(job_of(objects)["metadata"]["name"] in line for line in str(refused.value).splitlines())


def test_refuses_objects_of_other_kinds(tmp_path: Path) -> None:
    objects = [*objects_for(tmp_path, "layered", ""), {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}]
    with pytest.raises(ConfigError, match="kind: Secret; the local runner implements ConfigMap, Service and Job"):
        LocalCluster(tmp_path / "root").run(objects)


def test_ports_lie_outside_those_of_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if high - low > 50_000:
        pytest.skip("the kernel gives nearly all ports to outgoing connections here")
    assert all(not low <= free_port() <= high for _ in range(20))
