"""TrainingPayload: everything in the cluster that a run needs, and the run itself, in the order to make and end it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct, IDependable

from payload import volumes
from payload.config import RunConfig
from payload.manifests import (
    COMPONENT_LABEL,
    NAME,
    NAME_LABEL,
    RUN_LABEL,
    TRAINING,
    Deployment,
    job_of,
    render,
    render_prepare_data,
)
from stacks.constructs.kubernetes_objects import JobGate, KubernetesObjects, KubernetesProvider, OnChange

JOB_SELECTOR = {NAME_LABEL: NAME}
"""Labels of every Job of ours, by whomever submitted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LustreVolume:
    """The file system that becomes the pods' volume; all but the size may be tokens."""

    capacity_gib: int
    file_system_id: str
    dns_name: str
    mount_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuGroup:
    """What ``submit`` scales up again after the idle guard; plain values."""

    auto_scaling_group_name: str
    region: str
    num_nodes: int
    """0: others decide (a Capacity Block's schedule)."""


class TrainingPayload(Construct):
    """Namespace, service account, volume, claim, the data's Job, the training Job with Service and ConfigMap.

    Made in that order, each verified, and removed in the reverse one: all Jobs with our labels and their pods, then
    claim, volume and namespace. Every object's properties hold plain values but for the image, and the volume's handle,
    DNS name and mount name; so the Job's name changes with the run's spec and with nothing else.

    Attributes: ``namespace``, ``volume``, ``data`` (or None), ``job``, ``settings``: KubernetesObjects;
    ``identity``: the Pod Identity association, or None; ``job_name``, a plain value.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        provider: KubernetesProvider,
        config: RunConfig,
        deployment: Deployment,
        volume: LustreVolume,
        volume_name: str,
        image_ready: IDependable,
        needs: Sequence[IDependable],
        prepare_data: Sequence[str] = (),
        on_change: OnChange = "replace",
        token_secret_arn: str = "",
        gpu_group: GpuGroup,
        after_pods: Construct | None = None,
    ) -> None:
        """``image_ready``: pods find the image from then on. ``needs``: what must be there before the first object and
        outlive the last (nodes, drivers). ``prepare_data``: options of prepare-data; empty: no such Job.
        ``token_secret_arn``: a secret that the pods may read; empty: none. ``after_pods``: a resource whose deletion
        comes after that of all pods and before that of the claim (an export).

        Raises ConfigError for a value that Kubernetes would refuse.
        """
        super().__init__(scope, id)
        self._provider, self._deployment = provider, deployment
        self.namespace = self._objects("Namespace", self._namespace_objects())
        for need in needs:
            self.namespace.resource.node.add_dependency(need)
        self.volume = self._objects("Volume", self._volume_objects(volume, volume_name))
        self.volume.resource.node.add_dependency(self.namespace.resource)
        self.identity = self._identity(token_secret_arn) if token_secret_arn else None
        before_pods: list[IDependable] = [self.volume.resource, image_ready]
        if after_pods:
            after_pods.node.add_dependency(self.volume.resource)
            before_pods.append(after_pods)
        if self.identity:
            before_pods.append(self.identity)
        self.data = self._prepare(config, prepare_data, before_pods)
        rendered = render(config, deployment)
        self.job_name = str(job_of(rendered)["metadata"]["name"])
        self.job = self._objects("Job", rendered, jobs=self._gate(config, on_change))
        for dependency in [*before_pods, *([self.data.resource] if self.data else [])]:
            self.job.resource.node.add_dependency(dependency)
        self.settings = self._objects("Settings", [self._settings(gpu_group)])
        self.settings.resource.node.add_dependency(self.namespace.resource, image_ready)

    def _objects(self, id: str, items: Sequence[dict[str, Any]], jobs: JobGate | None = None) -> KubernetesObjects:
        return KubernetesObjects(self, id, provider=self._provider, objects=items, jobs=jobs)

    def _gate(self, config: RunConfig, on_change: OnChange) -> JobGate:
        """On delete every Job of ours ends; a changed spec ends the Jobs of its own run only."""
        return JobGate(
            namespace=self._deployment.namespace,
            selector=JOB_SELECTOR,
            replaces={**JOB_SELECTOR, COMPONENT_LABEL: TRAINING, RUN_LABEL: config.run_id},
            on_change=on_change,
        )

    def _namespace_objects(self) -> list[dict[str, Any]]:
        deployment = self._deployment
        found = [volumes.namespace(deployment.namespace, deployment.pod_security)]
        if deployment.service_account:
            found.append(volumes.service_account(deployment.service_account, deployment.namespace))
        return found

    def _volume_objects(self, volume: LustreVolume, name: str) -> list[dict[str, Any]]:
        claim, namespace = self._deployment.volume_claim, self._deployment.namespace
        return [
            volumes.persistent_volume(
                name,
                claim=claim,
                namespace=namespace,
                capacity_gib=volume.capacity_gib,
                volume_handle=volume.file_system_id,
                dns_name=volume.dns_name,
                mount_name=volume.mount_name,
            ),
            volumes.static_claim(claim, namespace=namespace, volume=name, capacity_gib=volume.capacity_gib),
        ]

    def _identity(self, secret_arn: str) -> eks.CfnPodIdentityAssociation:
        """The token stays in Secrets Manager; pods read it by the identity of their service account, and keep it in
        the memory of their processes. It is in no manifest, so not in etcd either."""
        role = iam.Role(
            self,
            "PodRole",
            assumed_by=iam.SessionTagsPrincipal(iam.ServicePrincipal("pods.eks.amazonaws.com")),
            description="Training pods: read the Hugging Face token",
        )
        policy = iam.Policy(
            self,
            "ReadToken",
            statements=[iam.PolicyStatement(actions=["secretsmanager:GetSecretValue"], resources=[secret_arn])],
        )
        policy.attach_to_role(role)
        association = eks.CfnPodIdentityAssociation(
            self,
            "PodIdentity",
            cluster_name=self._provider.cluster.cluster_name,
            namespace=self._deployment.namespace,
            service_account=self._deployment.service_account,
            role_arn=role.role_arn,
        )
        association.node.add_dependency(policy, self.namespace.resource)
        return association

    def _prepare(
        self, config: RunConfig, arguments: Sequence[str], before: Sequence[IDependable]
    ) -> KubernetesObjects | None:
        """Not waited for: it needs a node as the run does, which may come days later. Launchers wait for the data."""
        if not arguments or config.model.task:
            return None
        data = self._objects("Data", render_prepare_data(config, self._deployment, arguments))
        for dependency in before:
            data.resource.node.add_dependency(dependency)
        return data

    def _settings(self, group: GpuGroup) -> dict[str, Any]:
        """For ``python -m payload submit``, which knows the cluster but no stack."""
        facts = {
            "deployment": dataclasses.asdict(dataclasses.replace(self._deployment, image="")),
            "gpu_group": dataclasses.asdict(group),
        }
        text = json.dumps(facts, sort_keys=True)
        return volumes.settings(self._deployment.namespace, image=self._deployment.image, deployment=text)
