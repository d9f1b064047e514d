"""Defer: take the reductions of gradients out of the backward pass, so that they can be made once for many.

Preserves numerics up to rounding: a reduction is linear, so it may be made of a sum.  A backward pass without
reductions gives each rank's own gradients, of whole parameters where those rest cut; a second graph reduces what has
been summed of them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar._compat import LazyGraphModule, QuickGraph
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind, copy_node, drop_unread
from autopar.program import DeferredBackward, LocalGraph, collective_kind

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def defer_reductions(backward: LocalGraph) -> DeferredBackward:
    """The backward graph in two: up to the collectives whose results only the output reads, and from there."""
    late = _late(backward.module.graph)
    waiting = list(dict.fromkeys(read for node in late for read in node.all_input_nodes if read not in late))
    waiting = [node for node in waiting if not isinstance(node.meta["val"], int)]  # positions can be had again
    return DeferredBackward(_compute(backward, late, waiting), _reduce(backward, late, waiting))


def _late(graph: fx.Graph) -> set[fx.Node]:
    """The collectives that sum or move gradients on their way to the output, and what follows them."""
    output = graph.output_node()
    movable: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads_out = node.users and all(user is output or user in movable for user in node.users)
        if node.op == "call_function" and leads_out and _is_linear(node):
            movable.add(node)
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node in movable and (collective_kind(node) is not None or any(n in late for n in node.all_input_nodes)):
            late.add(node)
    return late


def _is_linear(node: fx.Node) -> bool:
    """Whether a step on a gradient's way to the output may be made on a sum of gradients as well."""
    kind = collective_kind(node)
    if kind in ("all_reduce", "reduce_scatter"):
        return node.args[1] == "sum"
    return kind is not None or node.target is _WAIT or bool(node.meta.get("layout"))


def _compute(backward: LocalGraph, late: set[fx.Node], waiting: list[fx.Node]) -> LocalGraph:
    """What the backward pass does before; returns the gradients that need no reduction, then what waits for one."""
    graph = QuickGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in backward.module.graph.nodes:
        if node.op != "output" and node not in late:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    gradients = _returned(backward)
    graph.output((*(None if n is None or n in late else copies[n] for n in gradients), *(copies[n] for n in waiting)))
    drop_unread(graph)
    unreduced = tuple(GraphOutput(OutputKind.SAVED, node.name) for node in waiting)
    shardings = (*backward.output_shardings, *(None for _ in waiting))
    module = LazyGraphModule(backward.module, graph)
    return LocalGraph(module, backward.inputs, (*backward.outputs, *unreduced), backward.input_shardings, shardings)


def _reduce(backward: LocalGraph, late: set[fx.Node], waiting: list[fx.Node]) -> LocalGraph:
    """What is left to do, from the sums of what waits to the gradients; None for those that need no reduction."""
    graph = QuickGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in waiting:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    inputs = [GraphInput(InputKind.SAVED, node.name) for node in waiting]
    placeholders = backward.module.graph.find_nodes(op="placeholder")
    for spec, node in zip(backward.inputs, placeholders, strict=True):
        if spec.kind is InputKind.RANK:
            inputs.append(spec)
            copies[node] = copy_node(graph, node, copies.__getitem__)
    for node in backward.module.graph.nodes:
        if node in late or node.target in (operator.mul, operator.add):
            copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[n] if n in late else None for n in _returned(backward)))
    drop_unread(graph)
    module = LazyGraphModule(backward.module, graph)
    return LocalGraph(module, tuple(inputs), backward.outputs, (None,) * len(inputs), backward.output_shardings)


def _returned(graph: LocalGraph) -> list[fx.Node | None]:
    return list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
