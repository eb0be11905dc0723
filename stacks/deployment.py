"""What a profile's nodes offer a pod and what the pod asks of them, as the Deployment that the manifest is made of."""

from __future__ import annotations

from pathlib import Path

from payload.manifests import Deployment, Toleration
from stacks import config, image_context, nccl
from stacks.nodes import Taint
from stacks.profile import Profile

SERVICE_ACCOUNT = "training"


def deployment(profile: Profile, *, image: str, image_id: str) -> Deployment:
    """``image`` may be a CDK token, everything else is plain."""
    instance, job = profile.nodes.instance, profile.job
    # A Job may wait for days until its block starts; there the block's end bounds the cost.
    block = profile.nodes.capacity.kind == "capacity-block"
    return Deployment(
        image=image,
        image_id=image_id,
        namespace=job.namespace,
        service_account=SERVICE_ACCOUNT,
        volume_claim=profile.volume_name,
        node_selector=tuple(sorted(profile.node_labels.items())),
        tolerations=tuple(_toleration(taint) for taint in profile.nodes.taints),
        cpu=str(profile.pod_cpus),
        memory_mib=profile.pod_memory_gib * 1024,
        num_gpus=instance.gpus,
        num_efa=instance.efa_cards,
        hugepages_2mi_mib=instance.pod_hugepages_mib,
        shm_mib=profile.pod_memory_volume_gib * 1024,
        env=tuple(sorted(nccl.environment(instance).items())),
        token_secret=job.hf_token_secret_arn,
        await_data=bool(job.prepare_data),
        max_s=0 if block else int(job.max_hours * 3600),
    )


def _toleration(taint: Taint) -> Toleration:
    return Toleration(key=taint.key, value=taint.value, effect=taint.effect)


def deployment_of(path: Path) -> Deployment:
    """For ``python -m payload render``: the image by the repository's name, as its digest is known to the stack only.

    The Job's name is the one that the stack gives it. Raises ConfigError.
    """
    profile = config.load_file(path)
    found = image_context.image_id(profile)
    return deployment(profile, image=f"{profile.repository_name}:{found[:16]}", image_id=found)
