"""What must be gone before what, and what breaks otherwise: the requirements that the templates are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.graph import Graph, Key
from tests.synth import Synthesis
from tests.teardown.cloud import MACHINERY


@dataclass(frozen=True)
class Pair:
    """``first`` is gone before ``second`` is touched; ``reason`` is a pattern of what the walk says otherwise."""

    name: str
    first: Key
    second: Key
    reason: str


def pairs(synthesis: Synthesis, graph: Graph) -> list[Pair]:
    """All required pairs of one application; those of parts that a profile does not have are left out."""
    stacks = synthesis.stacks
    training, gpu, storage, cluster = stacks.training, stacks.gpu_nodes, stacks.storage, stacks.cluster

    def at(part: str) -> Callable[[Any], Key]:
        return lambda construct: (part, synthesis.logical_id(construct))

    here, nodes, stored, eks = at("training"), at("gpu-nodes"), at("storage"), at("cluster")
    payload = training.payload
    job, volume, namespace = (here(item.resource) for item in (payload.job, payload.volume, payload.namespace))
    capacity, group = here(training.capacity.resource), nodes(gpu.asg)
    system = eks(cluster.system_nodes)
    found = [
        Pair("pods before claim and volume", job, volume, "others use it"),
        Pair("claim and volume before namespace", volume, namespace, "others use it"),
        Pair("pods before GPUs", job, capacity, "would lose its node"),
        Pair("claim and volume before GPUs", volume, capacity, "would lose its node|could not be unmounted"),
        Pair("GPUs before their group", capacity, group, "runs"),
        Pair("group before node access", group, nodes(gpu.access_entry), "neither join nor leave"),
        Pair("group before launch template", group, nodes(gpu.launch_template), "uses it"),
        Pair("pods before file system", job, stored(storage.file_system), "has it mounted"),
        Pair("volume before file system", volume, stored(storage.file_system), "mounted|points to it"),
        Pair("GPUs before file system", capacity, stored(storage.file_system), "mounted|points to it"),
        Pair(
            "file system before repository", stored(storage.file_system), stored(storage.repository), "before it|runs"
        ),
        Pair("pods before repository", job, stored(storage.repository), "runs its image"),
        Pair("volume before CSI driver", volume, eks(cluster.fsx_csi_addon), "could not be (unmounted|released)"),
        Pair("CSI driver before system nodes", eks(cluster.fsx_csi_addon), system, "runs there"),
        Pair("system nodes before cluster", system, eks(cluster.cluster), "part of it"),
        Pair("namespace before cluster", namespace, eks(cluster.cluster), "part of it|is in it"),
        Pair("group before cluster", group, eks(cluster.cluster), "part of it|nodes in it"),
    ]
    for entry in _needed(graph, job, "AWS::EKS::AccessEntry"):
        found += [
            Pair("Jobs before the handlers' access", job, entry, "401 Unauthorized"),
            Pair("volume before the handlers' access", volume, entry, "401 Unauthorized"),
            Pair("namespace before the handlers' access", namespace, entry, "401 Unauthorized"),
        ]
    for rule in _needed(graph, job, "AWS::EC2::SecurityGroupIngress"):
        found.append(Pair("namespace before the way to the API", namespace, rule, "does not answer"))
    for index, rule in enumerate(graph.of_type("AWS::EC2::SecurityGroupIngress")):
        if rule[0] == "storage":
            found.append(Pair(f"file system before rule {index}", stored(storage.file_system), rule, "answers through"))
        if rule[0] == "gpu-nodes":
            found.append(Pair(f"group before rule {index}", group, rule, "interfaces use it"))
    found += [Pair(f"{k[1]} before its {m[1]}", k, m, "nobody answers") for k, m in _machinery(graph, [job, capacity])]
    found += _plugins(synthesis, graph, job)
    if training.export:
        export = here(training.export.resource)
        found += [
            Pair("pods before export", job, export, "still writes"),
            Pair("export before claim", export, volume, "others use it|the claim is gone"),
            Pair("export before file system", export, stored(storage.file_system), "mounted|points to|not exported"),
            Pair("export before association", export, stored(storage.data_repository), "not exported"),
        ]
    if training.data_loss_guard:
        guard = here(training.data_loss_guard.resource)
        found.append(Pair("the user's word before Jobs end", guard, job, "ended already"))
    for subnet in graph.of_type("AWS::EC2::Subnet"):
        if "private" in subnet[1] and "1" in subnet[1]:
            for name, user in (
                ("nodes", group),
                ("file system", stored(storage.file_system)),
                ("cluster", eks(cluster.cluster)),
            ):
                found.append(Pair(f"{name} before {subnet[1]}", user, subnet, "interfaces in it"))
    return found


def _needed(graph: Graph, key: Key, kind: str) -> list[Key]:
    return sorted(needed for needed in graph.edges[key] if graph.types[needed] == kind)


def _machinery(graph: Graph, keys: list[Key]) -> list[tuple[Key, Key]]:
    """Custom resources with the functions behind them, their rights, and the state machine that calls them again."""
    found = []
    for key in keys:
        (entry,) = _needed(graph, key, "AWS::Lambda::Function")
        found += [(key, part) for kind in MACHINERY for part in _needed(graph, entry, kind)]
        found.append((key, entry))
    return found


def _plugins(synthesis: Synthesis, graph: Graph, job: Key) -> list[Pair]:
    entry = synthesis.stacks.cluster.cluster.node.find_child("ClusterAdminRoleAccess")
    access = ("cluster", synthesis.logical_id(entry))
    made = []
    for plugin in graph.of_type("Custom::AWSCDK-EKS-HelmChart"):
        made += [
            Pair(f"pods before {plugin[1]}", job, plugin, "would lose its devices"),
            Pair(f"{plugin[1]} before kubectl's access", plugin, access, "access entry is gone|lose its devices"),
        ]
    return made
