"""Overlap: compute weights' gradients while the backward pass waits for a collective.

Preserves numerics exactly.  The backward pass of a product is two products: the gradient of its input, which the layer
before needs, and the gradient of its weight, which nobody reads before the optimizer.  Where the first is summed over
ranks, or what it reads is gathered, the second can run meanwhile.  (Megatron-LM does so for one linear layer at a time:
`linear_with_grad_accumulation_and_async_allreduce` in `megatron/core/tensor_parallel/layers.py`.)

The order depends on the graph alone, so it is the same on all ranks.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.coalesce import WAIT, steps_after, steps_before
from autopar.program import LocalProgram, collective_axis, collective_kind, collective_nodes
from autopar.rules import is_look

MOST_HELD = 2
"""What runs later may keep so many times the collective's bytes that would be free by then."""


def overlap(module: fx.GraphModule) -> fx.GraphModule:
    """Move what no later collective needs to just after the start of the next one that computing waits for.

    Of what lies between two such collectives the last is moved first, as long as all that is moved keeps no more than
    `MOST_HELD` times the collective's bytes alive.
    """
    graph, awaited = module.graph, _awaited(module.graph)
    if not awaited:
        return module
    free = _needed_by_none(graph, awaited)
    between: list[fx.Node] = []
    for node in list(graph.nodes):
        if node in awaited:
            _move_behind(node, between, free)
            between = []
        elif node in free:
            between.append(node)
    return module


def hidden_axes(program: LocalProgram) -> set[str]:
    """The axes along which collectives run that the pass hides, or would hide."""
    return {collective_axis(collective) for collective in _awaited(program.joint.module.graph)}


def _awaited(graph: fx.Graph) -> set[fx.Node]:
    """The collectives that the backward pass waits for before it goes on."""
    collectives = [c for c, _ in collective_nodes(graph) if c.meta["backward"]]
    return {c for c in collectives if steps_before(c) is None and steps_after(c) is None}


def _needed_by_none(graph: fx.Graph, awaited: set[fx.Node]) -> set[fx.Node]:
    """The calls of the backward pass without which each of these collectives can start."""
    free: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        computes = node.op == "call_function" and node.meta["backward"] and node not in awaited
        if computes and all(user in free or user.op == "output" for user in node.users):
            free.add(node)
    return free


def _move_behind(collective: fx.Node, between: list[fx.Node], free: set[fx.Node]) -> None:
    """Move of these calls, which come before a collective, those that may run after its start."""
    moved: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    room = MOST_HELD * int(collective.meta["bytes"])
    for node in reversed(between):
        if collective_kind(node) and free.isdisjoint(node.all_input_nodes):
            continue  # brings what a product reads: the sooner the better
        read = {_base(operand) for operand in node.all_input_nodes if operand not in free} - kept
        room -= sum(int(value.meta["val"].nbytes) for value in read if _ends_before(value, collective))
        if room < 0:
            break
        kept |= read
        moved.add(node)
    place = collective.next
    for node in between:
        if node in moved:
            place.prepend(node)


def _base(value: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while is_look(value) or value.target is WAIT:
        value = value.all_input_nodes[0]
    return value


def _ends_before(value: fx.Node, collective: fx.Node) -> bool:
    """Whether a value is computed, and nothing reads it or a view of it after a collective has started."""
    if not isinstance(value.meta.get("val"), torch.Tensor) or value.op == "placeholder":
        return False
    return all(user < collective and (not is_look(user) or _ends_before(user, collective)) for user in value.users)
