"""Regather: drop a gathered parameter after the forward and gather it again for the backward (ZeRO-3, FSDP).

Preserves numerics exactly: the same values are computed twice.  Ops that only look at the gathered parameter
(a transpose, a cast) are repeated with it.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import GraphInput, InputKind
from autopar.passes.reshard import is_reshard
from autopar.plan import Plan
from autopar.rules import is_look_or_cast, tensor_inputs


def regather(module: fx.GraphModule, inputs: tuple[GraphInput, ...], plan: Plan) -> fx.GraphModule:
    """Give the backward pass gathered copies of its own, for every parameter whose storage says so.

    All but the one that the forward pass uses last: the backward pass starts with it, so dropping it would only gather
    it again at once.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    chains = []
    for spec, node in zip(inputs, placeholders, strict=True):
        if spec.kind is InputKind.PARAM and plan.storage[spec.path].regather:
            narrowed = [
                n for n in node.users if n.target is torch.ops.aten._to_copy.default
            ]  # cast before they are gathered
            readers = [u for value in (node, *narrowed) for u in value.users]
            chains += [_looks(n) for n in readers if is_reshard(n) and not n.meta["backward"]]
    repeated = [chain for chain in chains if _uses(chain, backward=True)]
    last_use = [max((order[u] for u, _ in _uses(c, backward=False)), default=0) for c in repeated]
    for chain, use in zip(repeated, last_use, strict=True):
        if use < max(last_use):
            _repeat_in_backward(module.graph, chain, order)
    return module


def _looks(gathered: fx.Node) -> list[fx.Node]:
    """A gathered parameter and the forward nodes that only look at it."""
    chain = [gathered]
    for node in chain:
        chain += [u for u in node.users if not u.meta.get("backward") and is_look_or_cast(u)]
    return chain


def _uses(chain: list[fx.Node], backward: bool) -> list[tuple[fx.Node, fx.Node]]:
    """Calls of one pass that read a node of the chain, with the node."""
    return [
        (user, node)
        for node in chain
        for user in node.users
        if user.op == "call_function" and user.meta["backward"] is backward and user not in chain
    ]


def _repeat_in_backward(graph: fx.Graph, chain: list[fx.Node], order: dict[fx.Node, int]) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    for user, node in sorted(_uses(chain, backward=True), key=lambda pair: order[pair[0]]):
        with graph.inserting_before(user):
            replacement = _copied(graph, node, copies)
        user.replace_input_with(node, replacement)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy of a node, made with the copies of all between it and the parameter."""
    if node.op == "placeholder":
        return node
    if node not in copies:
        source = _copied(graph, tensor_inputs(node)[0], copies)
        new = graph.node_copy(node, lambda n: source if isinstance(n, fx.Node) else n)
        new.meta = {**node.meta, "backward": True}
        copies[node] = new
    return copies[node]
