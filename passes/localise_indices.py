"""Localise integers that count positions of the whole: indices into a table that is cut, and ends of groups of rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.mesh import Mesh
from autopar.passes.propagate import Cut
from autopar.placement import meta_value
from autopar.rules import Call, argument_names, tensor_inputs

aten = torch.ops.aten


def localise_lookup(
    graph: fx.Graph,
    node: fx.Node,
    index_position: int,
    cuts: list[tuple[int, Cut]],
    ranks: dict[str, fx.Node],
    mesh: Mesh,
) -> None:
    """Let each rank look up only what it holds: shift the indices, and mask those that other ranks hold.

    The masked results are zero, so that their sum over the ranks is the whole lookup.
    """
    index = tensor_inputs(node)[index_position]
    call = Call(node)
    backward = "grad_output" in call.args
    held = node.meta["val"].shape[0] if backward else _held(node, call)
    emit = Emitter(graph, node)
    with graph.inserting_before(node):
        block = rank_along(emit, [axis for axis, _ in cuts], ranks, mesh)
        local = emit(aten.sub.Tensor, (index, emit.number(operator.mul, block, held)), index)
        outside = emit(
            aten.logical_or.default,
            (
                emit(aten.lt.Scalar, (local, 0), index, torch.bool),
                emit(aten.ge.Scalar, (local, held), index, torch.bool),
            ),
            index,
            torch.bool,
        )
        if backward and call.args.get("padding_idx", -1) >= 0:
            padding = emit(aten.eq.Scalar, (index, call["padding_idx"]), index, torch.bool)
            outside = emit(aten.logical_or.default, (outside, padding), index, torch.bool)
        safe = emit(aten.masked_fill.Scalar, (local, outside, 0), index)
        if backward:
            gradient = call["grad_output"]
            mask = emit(aten.unsqueeze.default, (outside, -1), index, torch.bool, extra=1)
            masked = emit(aten.masked_fill.Scalar, (gradient, mask, 0), gradient)
            node.replace_input_with(gradient, masked)
        node.replace_input_with(index, safe)
    if "padding_idx" in call.args:
        set_arguments(node, call, padding_idx=-1)
    if not backward:
        _mask_result(graph, node, outside, emit)


def rank_along(emit: Emitter, axes: Sequence[int], ranks: dict[str, fx.Node], mesh: Mesh) -> Any:
    """Which of the consecutive ranges that these axes cut is this rank's."""
    block: Any = 0
    for axis in axes:
        block = emit.number(operator.add, emit.number(operator.mul, block, mesh.sizes[axis]), ranks[mesh.names[axis]])
    return block


def localise_groups(graph: fx.Graph, node: fx.Node, axes: Sequence[int], ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Let each rank's groups end where the whole's do, counted from its own first row and within its rows."""
    rule = node.meta["rule"]
    factor = next(node.meta["cuts"][axis].factor for axis in axes)
    operands = tensor_inputs(node)
    ends = operands[rule.groups[factor]]
    position, (dim, _) = next(
        (i, place) for i, dims in enumerate(rule.inputs) if (place := rule.occurrences(factor, dims)) is not None
    )
    held = int(operands[position].meta["val"].shape[dim])
    emit = Emitter(graph, node)
    with graph.inserting_before(node):
        start = emit.number(operator.mul, rank_along(emit, axes, ranks, mesh), held)
        shifted = emit(aten.sub.Tensor, (ends, start), ends)
        node.replace_input_with(ends, emit(aten.clamp.default, (shifted, 0, held), ends))


def _held(node: fx.Node, call: Call) -> int:
    table = call["weight"] if "weight" in call.args else call["self"]
    dim = 0 if "weight" in call.args else call.dim("dim", table.meta["val"].dim())
    return int(table.meta["val"].shape[dim])


def _mask_result(graph: fx.Graph, node: fx.Node, outside: fx.Node, emit: Emitter) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        mask = outside
        if node.meta["val"].dim() > outside.meta["val"].dim():
            mask = graph.call_function(aten.unsqueeze.default, (outside, -1))
            mask.meta = {
                **outside.meta,
                "val": outside.meta["val"].unsqueeze(-1),
                "global_shape": (*outside.meta["global_shape"], 1),
            }
    with graph.inserting_after(mask if mask is not outside else node):
        masked = graph.call_function(aten.masked_fill.Scalar, (node, mask, 0))
        masked.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, masked)


def set_arguments(node: fx.Node, call: Call, **changes: Any) -> None:
    """Change some of a call's arguments, by their names in the op's schema."""
    names = argument_names(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changes.items():
        position = names.index(name)
        if name in kwargs or position >= len(args):
            kwargs[name] = value
        else:
            args[position] = value
    node.args, node.kwargs = tuple(args), kwargs


class Emitter:
    """Creates nodes beside an op, with local metadata copied from a model node."""

    def __init__(self, graph: fx.Graph, owner: fx.Node) -> None:
        self.graph, self.owner = graph, owner

    def __call__(
        self, op: Any, args: tuple[Any, ...], like: fx.Node, dtype: torch.dtype | None = None, extra: int = 0
    ) -> fx.Node:
        """A call of `op` whose value is like that of `like`, of `dtype` and with `extra` more dims of size one."""
        value, ones = like.meta["val"], (1,) * extra
        meta = {
            "val": meta_value((*value.shape, *ones), dtype or value.dtype),
            "module": self.owner.meta["module"],
            "backward": self.owner.meta["backward"],
            "sharding": like.meta["sharding"],
            "global_shape": (*like.meta["global_shape"], *ones),
        }
        return add_call(self.graph, op, args, {}, meta)

    def number(self, op: Any, left: Any, right: Any) -> Any:
        """An integer computed from rank positions; constants fold."""
        if isinstance(left, int) and isinstance(right, int):
            return op(left, right)
        if op is operator.add and left == 0:
            return right
        meta = {
            "val": 0,
            "module": self.owner.meta["module"],
            "backward": self.owner.meta["backward"],
            "sharding": None,
            "global_shape": None,
        }
        return add_call(self.graph, op, (left, right), {}, meta)
