"""Lifting: a program of lower precision in float64, with every cast in its place.

A mixed-precision program cannot be compared with the single device closely: both round.  The same graph with float64 in
the place of every floating dtype does the same reshards, casts (which then copy) and reductions, and can.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from autopar._compat import QuickGraph, tree_leaves, tree_map
from autopar.graph import JointGraph
from autopar.opaque import OpaqueName
from autopar.placement import meta_value
from autopar.program import LocalGraph, LocalProgram
from autopar.single_device import Float64Throughout

aten = torch.ops.aten

_LIFTED = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip

_WIDENING = {aten._softmax.default, aten._log_softmax.default}
"""Ops whose last argument says that they widen their input themselves, which those of float64 cannot."""


def lift_joint(joint: JointGraph) -> JointGraph:
    """A copy of a traced graph that computes in float64 on the CPU."""
    return replace(joint, module=_lift(joint.module), folded=None, derived={})


def lift_program(program: LocalProgram) -> LocalProgram:
    """A copy of a rewritten program that computes in float64 on the CPU."""

    def lift(graph: LocalGraph) -> LocalGraph:
        return replace(graph, module=_lift(graph.module))

    backward = None if program.backward is None else lift(program.backward)
    return replace(program, forward=lift(program.forward), backward=backward)


def _lift(module: fx.GraphModule) -> fx.GraphModule:
    graph, held = QuickGraph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for old, node in copies.items():
        node.args, node.kwargs = tree_map(_lift_argument, (node.args, node.kwargs))
        if node.target in _WIDENING:
            node.args = (*node.args[:2], False)
        elif node.op == "get_attr":
            value = attrgetter(str(old.target))(module)
            held.register_buffer(node.name, value.to("cpu", _LIFTED.get(value.dtype, value.dtype)))
            node.target = node.name
        lifted = tree_map(_lift_value, old.meta.get("val"))
        if _sets_its_dtype(old):
            _cast_after(graph, node, lifted)
        else:
            node.meta["val"] = lifted
        if "bytes" in node.meta:
            num_elements = old.meta["bytes"] // old.meta["val"].element_size()
            node.meta["bytes"] = num_elements * lifted.element_size()
    return fx.GraphModule(held, graph)


def _sets_its_dtype(node: fx.Node) -> bool:
    """Whether a call gives one dtype in every graph, as neither its inputs nor its arguments say another."""
    reads_numbers = all(isinstance(read.meta.get("val"), int) for read in node.all_input_nodes)
    named = any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((node.args, node.kwargs)))
    return node.op == "call_function" and reads_numbers and not named


def _cast_after(graph: fx.Graph, node: fx.Node, lifted: Any) -> None:
    if isinstance(lifted, torch.Tensor) and lifted.dtype != node.meta["val"].dtype:
        with graph.inserting_after(node):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": lifted.dtype})
        cast.meta = {**node.meta, "val": lifted}
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _lift_argument(argument: Any) -> Any:
    if isinstance(argument, OpaqueName):
        return argument.call.lifted(Float64Throughout(), lambda dtype: _LIFTED.get(dtype, dtype))
    if isinstance(argument, torch.dtype):
        return _LIFTED.get(argument, argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _lift_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _LIFTED:
        return meta_value(tuple(value.shape), _LIFTED[value.dtype])
    return value
