"""submit and delete against a kubectl of our own."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest

from payload import volumes
from payload.cli import main
from payload.cluster import jobs, scaling
from payload.cluster.target import from_settings
from payload.config import ARMS, load_profile
from payload.deployment import Deployment, Toleration, load_deployment
from payload.manifests import COMPONENT_LABEL, RUN_LABEL, job_of, render, render_prepare_data
from payload.settings import PROFILES, STACK_DEPLOYMENT
from tests.cluster.conftest import FakeCluster

KIND = ["--profile", "kind"]
GROUP = {"auto_scaling_group_name": "nvrx-p5-gpu", "region": "us-east-1", "num_nodes": 2}
GPU = Deployment(
    image="repository@sha256:0",
    image_id="image",
    namespace="training",
    service_account="training",
    volume_claim="nvrx-p5-fsx",
    node_selector=(("nvrx-eks/profile", "p5"),),
    tolerations=(Toleration(key="nvidia.com/gpu", value="true", effect="NoSchedule"),),
    num_gpus=8,
    num_efa=32,
    env=(("NCCL_NET", "AWS Libfabric"),),
    await_data=True,
)


def settings_of(deployment: Deployment = GPU) -> dict[str, object]:
    """What TrainingPayload leaves in the cluster; tests/stacks holds the two together."""
    facts = {"deployment": dataclasses.asdict(dataclasses.replace(deployment, image="")), "gpu_group": GROUP}
    return volumes.settings(deployment.namespace, image=deployment.image, deployment=json.dumps(facts))


def scaled(monkeypatch: pytest.MonkeyPatch, desired: int, maximum: int = 3) -> list[int]:
    """The numbers that the Auto Scaling group is set to."""
    asked: list[int] = []

    class Scaling:
        def describe_auto_scaling_groups(self, AutoScalingGroupNames: list[str]) -> dict[str, object]:
            assert AutoScalingGroupNames == [GROUP["auto_scaling_group_name"]]
            return {"AutoScalingGroups": [{"DesiredCapacity": desired, "MaxSize": maximum, "Instances": []}]}

        def set_desired_capacity(
            self, AutoScalingGroupName: str, DesiredCapacity: int, HonorCooldown: bool
        ) -> dict[str, object]:
            asked.append(DesiredCapacity)
            return {}

        def describe_scaling_activities(self, AutoScalingGroupName: str, MaxRecords: int) -> dict[str, object]:
            return {
                "Activities": [{"StatusCode": "Failed", "Description": "d", "StatusMessage": "no capacity in zone"}]
            }

    monkeypatch.setattr(scaling, "client", lambda group: Scaling())
    return asked


def test_a_bare_cluster_gets_everything_that_a_run_needs(cluster: FakeCluster, capsys: pytest.CaptureFixture) -> None:
    assert main(["submit", *KIND, "--arm", "in-job", "--max-steps", "20"]) == 0
    assert cluster.names("namespace") == ["nvrx-eks"]
    assert cluster.object("namespace", "nvrx-eks")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == (
        "restricted"
    )
    assert cluster.object("persistentvolumeclaim", "nvrx-eks")["spec"]["accessModes"] == ["ReadWriteOnce"]
    (training,) = [n for n in cluster.names("job") if "-d-" not in n]
    (data,) = [n for n in cluster.names("job") if "-d-" in n]
    run = json.loads(cluster.object("configmap", training)["data"]["run.json"])
    assert run["recovery"]["arm"] == "in-job" and run["training"]["max_steps"] == 20
    command = cluster.object("job", data)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--source", "pydoc"]
    assert f"submitted: Job {training}" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["1.34", "1.35", "1.36"])
def test_all_that_a_bare_cluster_gets_is_valid(version: str) -> None:
    """The arms' own objects, the data's Job, and what comes before them."""
    path = PROFILES / "kind.toml"
    where = load_deployment(path, tomllib.loads(path.read_text())["deployment"])
    for arm in ARMS:
        config = load_profile(path).with_overrides({"recovery.arm": arm})
        data = render_prepare_data(config, where, ["--source", "pydoc"])
        for item in [*volumes.prerequisites(where, "10Gi"), *data, *render(config, where)]:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_profile_in_the_docs_reaches_a_gpu_cluster_of_others(cluster: FakeCluster, tmp_path: Path) -> None:
    """No stack, no device of ours: the claim is the user's, and the pods ask for what the profile says."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    profile = tmp_path / "my-cluster.toml"
    profile.write_text(text.split("```toml\n")[1].split("```")[0])
    cluster.put(
        {"kind": "Namespace", "metadata": {"name": "research"}},
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared", "namespace": "research"}},
    )
    assert main(["submit", "--profile", str(profile), "--prepare-data", ""]) == 0
    (name,) = cluster.names("job")
    pod = cluster.object("job", name)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert {"name": "NCCL_NET", "value": "AWS Libfabric"} in pod["containers"][0]["env"]


def test_what_is_there_already_stays(cluster: FakeCluster) -> None:
    """An existing namespace and claim are used as they are, whoever made them."""
    cluster.put(
        {"kind": "Namespace", "metadata": {"name": "nvrx-eks", "labels": {"mine": "yes"}}},
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "nvrx-eks", "namespace": "nvrx-eks"}, "spec": {"s": 1}},
    )
    assert main(["submit", *KIND]) == 0
    assert cluster.object("namespace", "nvrx-eks")["metadata"]["labels"] == {"mine": "yes"}
    assert cluster.object("persistentvolumeclaim", "nvrx-eks")["spec"] == {"s": 1}


def test_a_changed_run_replaces_the_running_job_after_its_pods_are_gone(cluster: FakeCluster) -> None:
    """F45: another spec is another Job; the older one ends first, as both would write into the run's folder."""
    assert main(["submit", *KIND, "--prepare-data", ""]) == 0
    (first,) = cluster.names("job")
    assert main(["submit", *KIND, "--prepare-data", "", "--max-steps", "500"]) == 0
    (second,) = cluster.names("job")
    assert first != second
    verbs = [call for call in (line for line in cluster.calls("delete") if line[1] == "job")]
    assert verbs[0][2] == first and "--cascade=foreground" in verbs[0]
    assert not [pod for pod in cluster.names("pod") if pod.startswith(first)]
    assert cluster.names("configmap") == [second]


def test_the_same_run_again_changes_nothing(cluster: FakeCluster) -> None:
    assert main(["submit", *KIND]) == 0
    before = cluster.names("job")
    assert main(["submit", *KIND]) == 0
    assert cluster.names("job") == before
    assert cluster.calls("delete") == []


def test_a_finished_job_of_the_same_name_starts_again(cluster: FakeCluster) -> None:
    assert main(["submit", *KIND, "--prepare-data", ""]) == 0
    (name,) = cluster.names("job")
    cluster.finish(name, "Failed")
    assert main(["submit", *KIND, "--prepare-data", ""]) == 0
    assert cluster.object("job", name)["status"] == {}


def test_keep_refuses_while_the_run_runs(cluster: FakeCluster, capsys: pytest.CaptureFixture) -> None:
    assert main(["submit", *KIND]) == 0
    assert main(["submit", *KIND, "--on-change", "keep", "--max-steps", "500"]) == 2
    assert "legal: replace, or another --run-id" in capsys.readouterr().err
    assert main(["submit", *KIND, "--on-change", "keep", "--run-id", "other"]) == 0


def test_jobs_that_do_not_end_are_named(cluster: FakeCluster, capsys: pytest.CaptureFixture) -> None:
    """F42: a bound, the object, and no force."""
    assert main(["submit", *KIND, "--prepare-data", ""]) == 0
    (name,) = cluster.names("job")
    cluster.set(stuck=[name])
    assert main(["delete", *KIND, "--timeout", "1"]) == 1
    error = capsys.readouterr().err
    assert f"Job {name}" in error and f"{name}-0-abcde: Terminating on node-0" in error
    assert not [call for call in cluster.calls("delete") if any("force" in word or "grace" in word for word in call)]
    cluster.set(stuck=[])
    assert main(["delete", *KIND]) == 0
    assert cluster.names("job") == [] and cluster.names("configmap") == []


def test_delete_of_nothing_is_an_error(cluster: FakeCluster, capsys: pytest.CaptureFixture) -> None:
    assert main(["delete", *KIND]) == 1
    assert "no Job of run kind" in capsys.readouterr().err


def test_an_api_that_cannot_be_reached_is_an_error(cluster: FakeCluster, capsys: pytest.CaptureFixture) -> None:
    cluster.set(unreachable=True)
    assert main(["delete", *KIND]) == 1
    assert "The connection to the server was refused" in capsys.readouterr().err


def test_no_kubectl_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", *KIND]) == 1
    assert capsys.readouterr().err.startswith("kubectl: not found; legal: kubectl on the PATH")


@pytest.fixture
def by_stacks(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster that the stacks made; the profile's own Deployment is not needed for more than its namespace."""
    assert STACK_DEPLOYMENT.startswith("stacks.")
    cluster.put(settings_of())
    return cluster


def test_submit_takes_image_and_nodes_from_the_cluster(
    by_stacks: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And scales the GPUs up again, spares included, after the idle guard has set them to zero."""
    asked = scaled(monkeypatch, desired=0)
    assert main(["submit", "--profile", "p5", "--arm", "in-process"]) == 0
    assert asked == [2]
    (name,) = by_stacks.names("job")
    container = by_stacks.object("job", name)["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "repository@sha256:0"
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert by_stacks.names("persistentvolumeclaim") == [] and by_stacks.names("namespace") == []
    config = load_profile(PROFILES / "p5.toml").with_overrides({"recovery.arm": "in-process"})
    assert name == jobs.name_of(job_of(render(config, GPU)))


def test_submit_never_scales_down_and_no_further_than_the_group(
    by_stacks: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert scaled(monkeypatch, desired=3) == []
    asked = scaled(monkeypatch, desired=3)
    assert main(["submit", "--profile", "p5"]) == 0
    assert asked == []
    assert main(["submit", "--profile", "p5", "--nodes", "4", "--batch-size", "64", "--run-id", "big"]) == 2
    assert "parallelism.num_nodes: 4; legal: up to 3" in capsys.readouterr().err


def test_another_image_is_another_job(by_stacks: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """F45: equal input, equal name; another image, another name."""
    scaled(monkeypatch, desired=2)
    assert main(["submit", "--profile", "p5"]) == 0
    assert main(["submit", "--profile", "p5", "--image", "mine:1", "--run-id", "two"]) == 0
    assert main(["submit", "--profile", "p5", "--image", "mine:2", "--run-id", "two"]) == 0
    names = by_stacks.names("job")
    assert len(names) == 2, "the second image replaced the first one's Job"
    job = by_stacks.object("job", next(name for name in names if "-two-" in name))
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:2"


def test_settings_of_another_release_are_refused() -> None:
    good = settings_of()["data"]
    assert isinstance(good, dict)
    assert from_settings(good)[0] == GPU
    bad = {**good, "deployment.json": good["deployment.json"].replace("num_efa", "num_fish")}
    with pytest.raises(Exception, match="deploy the stacks again"):
        from_settings(bad)


def test_labels_are_those_that_teardown_looks_for(cluster: FakeCluster) -> None:
    """A Job submitted by hand is found by the stack's gate: our name on the Job and on its pods."""
    assert main(["submit", *KIND]) == 0
    for name in cluster.names("job"):
        job = cluster.object("job", name)
        for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
            assert jobs.OURS.items() <= labels.items()
            assert labels[RUN_LABEL] == "kind"
            assert labels[COMPONENT_LABEL] == ("prepare-data" if "-d-" in name else "training")
