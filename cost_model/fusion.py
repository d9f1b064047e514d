"""What pointwise ops move when a compiler fuses them: each value that stays inside a kernel costs no memory traffic.

A chain of pointwise ops becomes one kernel, and a reduction or another op that reads it element by element ends it, as
Inductor does it.  Two ops are one kernel if one reads the other's result and no matmul, attention or collective must
run between them; the kernel reads what comes from outside once, and writes what somebody outside reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost_model.layout import Layouts
from autopar.cost_model.ops import aliased_input, is_free, node_bytes, node_flops, op_name, tensor_bytes


@dataclass(frozen=True)
class FusedOp:
    """What one node adds to its kernel.

    Attributes:
        moved_bytes: memory traffic that the node causes.
        is_kernel: whether a kernel starts with it.
        is_stored: whether its result is written to memory, because something outside of the kernel reads it.
        may_overwrite: whether it reads element by element, and so can write over what nobody reads after it.
    """

    moved_bytes: int
    is_kernel: bool
    is_stored: bool = True
    may_overwrite: bool = False


def fuse(graph: fx.Graph, layouts: Layouts | None = None) -> dict[fx.Node, FusedOp]:
    """The share of every op that does work in the kernels of a compiled graph; free nodes are left out."""
    stage: dict[fx.Node, int] = {}
    kernel: dict[fx.Node, _Kernel] = {}
    fused: dict[fx.Node, FusedOp] = {}
    for node in graph.nodes:
        sources = [_source(n, layouts) for n in node.all_input_nodes]
        # A node is as many stages deep as there are ops before it that end every kernel.
        stage[node] = max((stage[n] + _is_barrier(n, layouts) for n in sources), default=0)
        if is_free(node, layouts):
            continue
        if _kind(node) is None:
            fused[node] = FusedOp(node_bytes(node, layouts), True)
            continue
        joined = [n for n in sources if _kind(n) == "pointwise" and n in kernel and stage[n] == stage[node]]
        mine = kernel[joined[0]] if joined else _Kernel(node)
        for other in {id(k): k for k in (kernel[n] for n in joined)}.values():
            if other is not mine:  # two chains that meet here were one kernel all along
                mine.reads |= other.reads
                mine.members += other.members
                kernel.update(dict.fromkeys(other.members, mine))
                fused[other.first] = replace(fused[other.first], is_kernel=False)
        kernel[node] = mine
        mine.members.append(node)
        outside = set(sources) - set(joined) - mine.reads
        mine.reads |= outside
        fused[node] = FusedOp(sum(tensor_bytes(n.meta.get("val")) for n in outside), mine.first is node, False, True)
    for node in kernel:
        if _leaves(node, stage, kernel, layouts):
            one = fused[node]
            stored_bytes = one.moved_bytes + tensor_bytes(node.meta.get("val"))
            fused[node] = replace(one, moved_bytes=stored_bytes, is_stored=True)
    return fused


class _Kernel:
    """One kernel while it is put together: its first op, its ops, and what it reads from outside."""

    def __init__(self, first: fx.Node) -> None:
        self.first, self.members, self.reads = first, list[fx.Node](), set[fx.Node]()


def _source(node: fx.Node, layouts: Layouts | None) -> fx.Node:
    """The node whose memory a value lies in, seen through views."""
    while is_free(node, layouts) and (base := aliased_input(node, layouts)) is not None:
        node = base
    return node


def _kind(node: fx.Node) -> str | None:
    """`pointwise`, `reduction` for an op that can end a chain, or None for a kernel of its own."""
    if not isinstance(node.target, OpOverload) or node_flops(node):
        return None
    if torch.Tag.pointwise in node.target.tags or node.target in _POINTWISE:
        return "pointwise"
    return "reduction" if op_name(node) in _REDUCTIONS else None


def _is_barrier(node: fx.Node, layouts: Layouts | None) -> bool:
    return node.op == "call_function" and _kind(node) is None and _source(node, layouts) is node


def _leaves(node: fx.Node, stage: dict[fx.Node, int], kernel: dict[fx.Node, _Kernel], layouts: Layouts | None) -> bool:
    """Whether somebody outside its kernel reads a node's result; views of it count as itself."""
    seen = [node]
    for value in seen:
        for user in value.users:
            if user.op == "output":
                return True
            if is_free(user, layouts) and aliased_input(user, layouts) is value:
                seen.append(user)
            elif _kind(node) != "pointwise" or user not in kernel or stage[user] != stage[node]:
                return True
    return not node.users


_POINTWISE = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.where.self}

_REDUCTIONS = {
    f"aten::{name}"
    for name in (
        "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "any", "all", "argmax", "argmin",
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    )
}  # fmt: skip
"""Ops that read their input element by element, so that a chain can end in them."""
