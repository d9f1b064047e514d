"""Partition: cut the joint graph into a forward and a backward graph.

Preserves numerics exactly.  What the backward needs from the forward is handed over as saved values.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar._compat import LazyGraphModule, QuickGraph
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind, copy_node
from autopar.placement import Sharding
from autopar.program import LocalGraph

_FORWARD_INPUTS = (InputKind.PARAM, InputKind.BUFFER, InputKind.INPUT, InputKind.RANK, InputKind.SEED)
_BACKWARD_INPUTS = (InputKind.TANGENT, InputKind.RANK)


def partition(joint: LocalGraph) -> tuple[LocalGraph, LocalGraph | None]:
    """The forward graph, and the backward graph if there are gradients to compute."""
    graph = joint.module.graph
    nodes = list(graph.nodes)
    specs = dict(zip(graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    values: Sequence[fx.Node | None] = graph.output_node().args[0]  # type: ignore[assignment]
    outputs = list(zip(joint.outputs, values, joint.output_shardings, strict=True))
    early = [o for o in outputs if o[0].kind is not OutputKind.GRADIENT]
    late = [o for o in outputs if o[0].kind is OutputKind.GRADIENT]
    if not late:
        return joint, None
    forward = _ancestors(nodes, [n for _, n, _ in early if n is not None], set())
    there = {*forward, *graph.find_nodes(op="get_attr"), *(n for n, s in specs.items() if s.kind in _FORWARD_INPUTS)}
    for node in nodes:
        if node.op != "call_function" or node in there or node.meta["backward"]:
            continue
        if there.issuperset(node.all_input_nodes):  # it reaches no tangent
            forward.add(node)
            there.add(node)
    needed = _ancestors(nodes, [n for _, n, _ in late if n is not None], forward)
    backward = {n for n in needed if n not in forward and n.op == "call_function"}
    read = dict.fromkeys(p for n in nodes if n in backward for p in n.all_input_nodes)
    read.update(dict.fromkeys(n for _, n, _ in late if n is not None))
    saved = [n for n in read if n not in backward and not _given_again(n, specs)]
    return _forward(joint, nodes, specs, forward, early, saved), _backward(joint, nodes, specs, backward, late, saved)


def _ancestors(nodes: Sequence[fx.Node], roots: Sequence[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
    """What some nodes are computed from, themselves included, seen back to what is given; `nodes` are all, in order."""
    found = set(roots)
    for node in reversed(nodes):
        if node in found and node not in given:
            found.update(node.all_input_nodes)
    return found


def _given_again(node: fx.Node, specs: dict[fx.Node, GraphInput]) -> bool:
    """Tangents and rank positions come to the backward graph by themselves."""
    return (node in specs and specs[node].kind in _BACKWARD_INPUTS) or node.op == "get_attr"


Output = tuple[GraphOutput, "fx.Node | None", "Sharding | None"]


def _forward(
    joint: LocalGraph,
    nodes: list[fx.Node],
    specs: dict[fx.Node, GraphInput],
    inside: set[fx.Node],
    early: list[Output],
    saved: list[fx.Node],
) -> LocalGraph:
    graph = QuickGraph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs, shardings = _copy_inputs(joint, graph, specs, _FORWARD_INPUTS, copies)
    _copy_calls(graph, nodes, inside, copies)
    results = [
        *((s, n, p) for s, n, p in early),
        *((GraphOutput(OutputKind.SAVED, n.name), n, n.meta["sharding"]) for n in saved),
    ]
    return _finish(joint, graph, copies, inputs, shardings, results)


def _backward(
    joint: LocalGraph,
    nodes: list[fx.Node],
    specs: dict[fx.Node, GraphInput],
    inside: set[fx.Node],
    late: list[Output],
    saved: list[fx.Node],
) -> LocalGraph:
    graph = QuickGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in saved:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    inputs, shardings = _copy_inputs(joint, graph, specs, _BACKWARD_INPUTS, copies)
    inputs = [*(GraphInput(InputKind.SAVED, node.name) for node in saved), *inputs]
    shardings = [*(node.meta["sharding"] for node in saved), *shardings]
    _copy_calls(graph, nodes, inside, copies)
    return _finish(joint, graph, copies, inputs, shardings, late)


def _copy_inputs(
    joint: LocalGraph,
    graph: fx.Graph,
    specs: dict[fx.Node, GraphInput],
    kinds: tuple[InputKind, ...],
    copies: dict[fx.Node, fx.Node],
) -> tuple[list[GraphInput], list[Sharding | None]]:
    """Copy the placeholders of these kinds; returns what they are and how they lie."""
    given = [(n, s) for n, s in zip(specs, joint.input_shardings, strict=True) if specs[n].kind in kinds]
    copies.update((node, copy_node(graph, node, copies.__getitem__)) for node, _ in given)
    return [specs[node] for node, _ in given], [sharding for _, sharding in given]


def _copy_calls(graph: fx.Graph, nodes: list[fx.Node], inside: set[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    for node in nodes:
        if node in copies:
            continue
        if node.op == "get_attr" or (node.op == "call_function" and node in inside):
            copies[node] = copy_node(graph, node, copies.__getitem__)


def _finish(
    joint: LocalGraph,
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    inputs: list[GraphInput],
    shardings: list[Sharding | None],
    results: list[Output],
) -> LocalGraph:
    graph.output(tuple(None if n is None else copies[n] for _, n, _ in results))
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)
    module = LazyGraphModule(joint.module, graph)
    return LocalGraph(
        module,
        tuple(inputs),
        tuple(s for s, _, _ in results),
        tuple(shardings),
        tuple(p for _, _, p in results),
    )
