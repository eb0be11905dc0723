"""Kubernetes objects as a custom resource that applies, verifies, deletes and waits.

CDK's KubernetesManifest neither waits for a deletion nor reports its failure, so DependsOn on it proves
nothing. Here a resource is complete only when the API server shows what was asked for, and deleted only when
the API server shows that it is gone. Finalizers are never removed by us: a deletion that does not end in time
fails with the object, its finalizers and the command to look at it; the next ``cdk destroy`` goes on there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aws_cdk import Duration, Stack
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.provider import HandlerNetwork, WaitingProvider, describe_cluster, grant_cluster, seconds
from stacks.handlers.kube import Ref

Wait = Literal["none", "ready", "complete"]
OnChange = Literal["replace", "keep"]


class KubernetesProvider(Construct):
    """The functions behind KubernetesObjects, and their access entries. One a stack is enough.

    Attributes: ``cluster``, ``service_token``, ``functions``, ``access_entries``.
    """

    def __init__(
        self, scope: Construct, id: str, *, cluster: eks.ICluster, network: HandlerNetwork | None = None
    ) -> None:
        """``network`` is needed when the API endpoint is private."""
        super().__init__(scope, id)
        self.cluster = cluster
        statements: list[iam.PolicyStatement] = [describe_cluster(cluster)]
        provider = WaitingProvider(
            self,
            "Waiting",
            module="kubernetes_objects",
            statements=statements,
            query_interval=Duration.seconds(10),
            network=network,
        )
        self.waiting = provider
        self.service_token = provider.service_token
        self.functions = provider.functions
        # Namespaces and persistent volumes belong to no namespace: of the access policies that EKS offers,
        # only this one may write them. Only is_complete talks to the API.
        self.access_entry = grant_cluster(
            self, "Access", cluster=cluster, function=provider.functions[1], policy="AmazonEKSClusterAdminPolicy"
        )
        self.dependencies = [self.access_entry, *([network.rule] if network else [])]


@dataclass(frozen=True)
class JobGate:
    """Which Jobs a resource answers for beyond the one it applies."""

    namespace: str
    selector: Mapping[str, str]
    """Labels of every Job (and its pods) that must be gone when the resource is deleted, by whomever submitted."""
    replaces: Mapping[str, str] | None = None
    """Labels of the unfinished Jobs that end (SIGTERM, save, pods gone) before a Job of another name is applied.
    None: ``selector``. Finished Jobs stay until the resource is deleted."""
    on_change: OnChange = "replace"
    """``keep``: an unfinished Job of another name is left to run, and the new one is not applied."""


class KubernetesObjects(Construct):
    """Objects applied in order (server-side apply), deleted in reverse, each verified.

    On delete a PersistentVolumeClaim is touched only when no pod mounts it: pods of others are named in the
    error. With ``jobs`` all Jobs of the selector are deleted first and their pods awaited.

    Attributes: ``resource`` (depend on it), ``message`` (what happened, for an output).
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        provider: KubernetesProvider,
        objects: Sequence[Mapping[str, Any]],
        wait: Wait = "ready",
        jobs: JobGate | None = None,
        create_timeout: Duration | None = None,
        delete_timeout: Duration | None = None,
        foreign_grace: Duration | None = None,
    ) -> None:
        """``wait``: ``none``; ``ready``: namespaces active, volumes available, claims bound; ``complete``: Jobs
        complete as well. ``create_timeout``: 30 minutes; ``delete_timeout``: 45 minutes, and longer than the
        pods' termination grace; ``foreign_grace``: how long pods that mount a claim may go on after the delete
        began, 10 minutes. Objects may hold CDK tokens in their values.

        Raises ValueError for an object without apiVersion, kind or name, for a kind that the handler does not know
        (handlers/kube.py KINDS), for a gate without labels, and for timeouts beyond 55 minutes.
        """
        super().__init__(scope, id)
        for item in objects:
            if not (item.get("apiVersion") and item.get("kind") and item.get("metadata", {}).get("name")):
                raise ValueError(f"objects: {item!r}; legal: objects with apiVersion, kind and metadata.name")
            Ref.of(item)
        create_timeout = create_timeout or Duration.minutes(30)
        delete_timeout = delete_timeout or Duration.minutes(45)
        for name, timeout in (("create_timeout", create_timeout), ("delete_timeout", delete_timeout)):
            longest = max((_grace_s(item) for item in objects), default=0)
            if timeout.to_seconds() <= longest:
                raise ValueError(
                    f"{name}: {timeout.to_seconds():g} s; legal: more than the pods' termination grace ({longest} s)"
                )
        properties: dict[str, Any] = {
            "ClusterName": provider.cluster.cluster_name,
            # One JSON text: CloudFormation turns numbers and booleans of a property tree into strings.
            "Objects": Stack.of(self).to_json_string(list(objects)),
            "Wait": wait,
            "CreateSeconds": seconds("create_timeout", create_timeout),
            "DeleteSeconds": seconds("delete_timeout", delete_timeout),
            "ForeignSeconds": seconds("foreign_grace", foreign_grace or Duration.minutes(10)),
        }
        if jobs:
            if not jobs.selector:
                raise ValueError("jobs.selector: empty; legal: at least one label, or every Job would be deleted")
            gate = {
                "namespace": jobs.namespace,
                "selector": dict(jobs.selector),
                "replaces": dict(jobs.replaces or jobs.selector),
                "onChange": jobs.on_change,
            }
            properties["Jobs"] = Stack.of(self).to_json_string(gate)
        self.resource = provider.waiting.resource(
            self, "Resource", resource_type="Custom::KubernetesObjects", properties=properties
        )
        for dependency in provider.dependencies:
            self.resource.node.add_dependency(dependency)
        self.message = self.resource.get_att_string("Message")


def _grace_s(item: Mapping[str, Any]) -> int:
    """What the pods of a Job may take from SIGTERM to their end; 0 for other objects."""
    if item["kind"] != "Job":
        return 0
    return int(item["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30))
