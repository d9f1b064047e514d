"""What several micro-steps can do once: gather parameters that stay gathered, and reduce their gradients' sum."""

from __future__ import annotations

from torch import fx

from autopar.cost_model.liveness import placeholders
from autopar.graph import InputKind
from autopar.program import LocalGraph, collectives_of


def collectives_once(graph: LocalGraph, is_backward: bool) -> frozenset[str]:
    """Names of a graph's collectives that one micro-step of several can do for all.

    In the forward pass it is those that depend on parameters alone, as where ZeRO-1 and ZeRO-2 gather them; in the
    backward pass those that only bring gradients to the output, as `no_sync` of PyTorch's data parallelism leaves out.
    """
    names = {node.name for node in (_leading_out(graph) if is_backward else _made_of_parameters(graph))}
    return frozenset(c.node for c in collectives_of(graph.module.graph) if c.node in names)


def _made_of_parameters(graph: LocalGraph) -> set[fx.Node]:
    made = {node for spec, node in placeholders(graph) if spec.kind in (InputKind.PARAM, InputKind.RANK)}
    for node in graph.module.graph.nodes:
        if node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def _leading_out(graph: LocalGraph) -> set[fx.Node]:
    leading: set[fx.Node] = set()
    for node in reversed(graph.module.graph.nodes):
        if node.users and all(user.op == "output" or user in leading for user in node.users):
            leading.add(node)
    return leading
