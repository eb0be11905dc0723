"""Order of creation and deletion, walked in the templates: what needs what, and outlives it."""

from __future__ import annotations

import itertools

import pytest

from tests.graph import Graph, Key
from tests.synth import PARTS, PROFILES, Synthesis, synthesis, variant

KUBECTL = {"Custom::AWSCDK-EKS-HelmChart", "Custom::AWSCDK-EKS-KubernetesResource", "Custom::KubernetesObjects"}


@pytest.fixture(params=[*PROFILES, "guest"])
def graph(request: pytest.FixtureRequest) -> Graph:
    return Graph(variant("guest") if request.param == "guest" else synthesis(str(request.param)))


def key(graph: Graph, part: str, construct: object) -> Key:
    return part, graph.synthesis.logical_id(construct)


def test_one_linear_chain(graph: Graph) -> None:
    for part, earlier in zip(PARTS[1:], PARTS, strict=False):
        assert earlier in graph.synthesis.stack_dependencies[part]
        assert graph.stacks_before(part) == set(PARTS[: PARTS.index(part)])


def test_references_across_stacks_are_strong(graph: Graph) -> None:
    """An export that is imported cannot be deleted; weak references would let the cluster go under its users."""
    text = str(graph.synthesis.templates)
    assert "Fn::ImportValue" in text
    assert "Fn::GetStackOutput" not in text
    assert "AWS::SSM::Parameter::Value<List<String>>" not in text


def test_no_cycle(graph: Graph) -> None:
    state: dict[Key, str] = {}

    def visit(start: Key) -> None:
        waiting = [(start, iter(sorted(graph.edges[start])))]
        state[start] = "open"
        while waiting:
            node, following = waiting[-1]
            for target in following:
                assert state.get(target) != "open", f"{node} and {target} need each other"
                if target not in state:
                    state[target] = "open"
                    waiting.append((target, iter(sorted(graph.edges[target]))))
                    break
            else:
                state[node] = "done"
                waiting.pop()

    for node in sorted(graph.types):
        if node not in state:
            visit(node)


def test_nodes_need_what_they_join_and_mount_through(graph: Graph) -> None:
    """F42: nodes go before the access entry, the rules of their interfaces, the CSI driver and the cluster."""
    stacks = graph.synthesis.stacks
    asg = key(graph, "gpu-nodes", stacks.gpu_nodes.asg)
    for construct in (stacks.gpu_nodes.access_entry, stacks.gpu_nodes.node_role, stacks.gpu_nodes.launch_template):
        assert graph.needs(asg, key(graph, "gpu-nodes", construct), across_stacks=False)
    if stacks.gpu_nodes.efa_security_group:
        for kind in ("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress"):
            (rule,) = [found for found in graph.of_type(kind) if found[0] == "gpu-nodes"]
            assert graph.needs(asg, rule, across_stacks=False)
    assert graph.needs(asg, key(graph, "cluster", stacks.cluster.cluster), across_stacks=False)
    assert graph.needs(asg, key(graph, "cluster", stacks.cluster.fsx_csi_addon))
    assert graph.needs(asg, key(graph, "storage", stacks.storage.file_system))


def test_capacity_goes_before_the_nodes_group(graph: Graph) -> None:
    """F42: the resource that sets the nodes to zero, and waits, is deleted before the group and all it needs."""
    (capacity,) = graph.of_type("Custom::GpuCapacity")
    stacks = graph.synthesis.stacks
    assert capacity[0] == "training"
    earlier = [key(graph, "gpu-nodes", construct) for construct in (stacks.gpu_nodes.asg, *stacks.gpu_nodes.plugins)]
    earlier += [
        key(graph, "storage", stacks.storage.file_system),
        key(graph, "cluster", stacks.cluster.fsx_csi_addon),
        key(graph, "cluster", stacks.cluster.cluster),
    ]
    assert [target for target in earlier if not graph.needs(capacity, target)] == []


def test_job_to_cluster_in_the_order_that_finalizers_need(graph: Graph) -> None:
    """F42: Job, claim and volume, namespace, GPUs to zero, CSI driver, cluster: each goes before the next."""
    stacks = graph.synthesis.stacks
    payload = stacks.training.payload
    inside = [payload.job, payload.volume, payload.namespace, stacks.training.capacity]
    order = [key(graph, "training", construct.resource) for construct in inside]
    if stacks.training.export:
        order.insert(1, key(graph, "training", stacks.training.export.resource))
    for later, earlier in itertools.pairwise(order):
        assert graph.needs(later, earlier, across_stacks=False), (later, earlier)
    beyond = [
        ("gpu-nodes", stacks.gpu_nodes.asg),
        ("storage", stacks.storage.file_system),
        ("cluster", stacks.cluster.fsx_csi_addon),
        ("cluster", stacks.cluster.cluster),
    ]
    order = [order[-1], *(key(graph, part, construct) for part, construct in beyond)]
    for later, earlier in itertools.pairwise(order):
        assert graph.needs(later, earlier), (later, earlier)


def test_handlers_keep_their_access_until_they_are_done(graph: Graph) -> None:
    """F43: the entry of the functions that apply and delete objects outlives every such resource."""
    kubernetes = graph.synthesis.stacks.training.kubernetes
    entry = key(graph, "training", kubernetes.access_entry)
    resources = graph.of_type("Custom::KubernetesObjects")
    assert len(resources) >= 4
    assert [found for found in resources if not graph.needs(found, entry, across_stacks=False)] == []


def test_file_system_goes_before_its_groups_and_subnet(graph: Graph) -> None:
    """F42: the file system needs its groups in its own stack, and its subnet in the network."""
    stacks = graph.synthesis.stacks
    file_system = key(graph, "storage", stacks.storage.file_system)
    for group in (stacks.storage.file_system_security_group, stacks.storage.client_security_group):
        assert graph.needs(file_system, key(graph, "storage", group), across_stacks=False)
    for subnet in graph.of_type("AWS::EC2::Subnet"):
        assert graph.needs(file_system, subnet)


def test_csi_addon_needs_system_nodes_and_pod_identity(graph: Graph) -> None:
    """F39: the driver is there before anything mounts, and has its identity when it starts."""
    stacks = graph.synthesis.stacks
    addon = key(graph, "cluster", stacks.cluster.fsx_csi_addon)
    for construct in (stacks.cluster.pod_identity_addon, stacks.cluster.system_nodes, stacks.cluster.cluster):
        assert graph.needs(addon, key(graph, "cluster", construct), across_stacks=False)


def test_every_call_to_the_api_has_its_access_entry(graph: Graph) -> None:
    """F43: the kubectl role's entry is there before, and outlives, every chart and manifest."""
    callers = [found for found, kind in graph.types.items() if kind in KUBECTL]
    assert callers
    handler_entries = [
        found
        for found in graph.of_type("AWS::EKS::AccessEntry")
        if found[0] == "cluster" and "Kubectl" in str(graph.synthesis.templates["cluster"]["Resources"][found[1]])
    ]
    assert len(handler_entries) == 1
    charts = [found for found in callers if graph.types[found].startswith("Custom::AWSCDK-EKS")]
    assert [found for found in charts if not graph.needs(found, handler_entries[0])] == []


def test_node_entry_outlives_the_nodes(graph: Graph) -> None:
    """F43: nodes can leave the cluster in order, as their role's entry goes after the group and the capacity."""
    entry = key(graph, "gpu-nodes", graph.synthesis.stacks.gpu_nodes.access_entry)
    (group,) = graph.of_type("AWS::AutoScaling::AutoScalingGroup")
    (capacity,) = graph.of_type("Custom::GpuCapacity")
    assert graph.needs(group, entry, across_stacks=False)
    assert graph.needs(capacity, entry)


def test_functions_in_the_vpc_go_before_it(graph: Graph) -> None:
    """Their network interfaces would block the deletion of subnets and groups."""
    stacks = graph.synthesis.stacks
    for part, id, function in graph.synthesis.all_of_type("AWS::Lambda::Function"):
        if "VpcConfig" not in function["Properties"]:
            continue
        for subnet in graph.of_type("AWS::EC2::Subnet"):
            assert graph.needs((part, id), subnet)
        assert part == "cluster" or graph.needs((part, id), key(graph, "cluster", stacks.cluster.cluster))


def test_nothing_outlives_the_stacks(each: Synthesis) -> None:
    kept = {"Retain", "RetainExceptOnCreate", "Snapshot"}
    left = [
        id
        for template in each.templates.values()
        for id, resource in template["Resources"].items()
        if resource.get("DeletionPolicy") in kept
    ]
    assert left == []


def test_graph_sees_a_missing_edge(p5: Synthesis) -> None:
    """The walk must be able to fail: without its edges the group needs nothing of the cluster's."""
    graph = Graph(p5)
    asg = key(graph, "gpu-nodes", p5.stacks.gpu_nodes.asg)
    entry = key(graph, "gpu-nodes", p5.stacks.gpu_nodes.access_entry)
    assert graph.needs(asg, entry, across_stacks=False)
    graph.edges[asg].discard(entry)
    assert not graph.needs(asg, entry, across_stacks=False)
