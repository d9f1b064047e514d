"""Localise rows by group: a rank takes, multiplies and puts back the rows of its own groups, as many as there are.

Preserves numerics exactly but for the order in which rows are summed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar import grouped, sorted_rows  # noqa: F401  (register ops)
from autopar.graph import add_call
from autopar.mesh import Mesh
from autopar.passes.localise_indices import Emitter, rank_along, set_arguments
from autopar.passes.send_rows import Exchange
from autopar.placement import ByGroup, Sharding, is_sharded, local_shape, meta_value, shard
from autopar.rules import Call, tensor_inputs

aten, ours = torch.ops.aten, torch.ops.autopar


class OwnRows:
    """Gives the ops that move or multiply rows the order and ends of a rank's own; one pair for all that share them."""

    def __init__(self, graph: fx.Graph, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
        self.graph, self.ranks, self.mesh = graph, ranks, mesh
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def localise(self, node: fx.Node) -> None:
        """Let a call that is cut by groups work on this rank's rows; all other calls stay as they are."""
        if node.target is aten.sum.dim_IntList:
            self._sum_where_put(node)
        axes = [axis for axis, cut in enumerate(node.meta["cuts"]) if cut is not None and cut.by_group]
        if not axes or node.target not in _MOVES_AND_PRODUCTS:
            return
        call = Call(node)
        with self.graph.inserting_before(node):
            if node.target is ours.grouped_mm.default:
                node.replace_input_with(call["ends"], self._own_ends(node, call["ends"], axes))
            elif node.meta["cuts"][axes[0]].sent:
                self._send(node, call, axes[0])
            else:
                order = self._own_order(node, call["order"], call["ends"], axes)
                is_put = node.target is ours.put_rows.default
                places = {"num_places": int(node.meta["val"].shape[0])} if is_put else {}
                set_arguments(node, call, order=order, ends=None, **places)

    def _sum_where_put(self, node: fx.Node) -> None:
        """Rows that are put back and then summed, so many for each place, are summed where they are put: most of what
        would be written is zero here, as the rows are other ranks'."""
        if node.args[2:] or node.kwargs:
            return
        view, dims = node.args
        put = view.args[0] if view.target is aten.reshape.default else None  # type: ignore[union-attr]
        if not isinstance(put, fx.Node) or put.kwargs.get("num_places") is None or len(put.users) > 1:
            return
        shape = tuple(view.meta["val"].shape)  # type: ignore[union-attr]
        num_places, *rest = put.meta["val"].shape
        if dims != [1] or len(view.users) > 1 or shape[0] * shape[1] != num_places or [*shape[2:]] != rest:  # type: ignore[union-attr]
            return
        rows, order, copies, *_ = put.args
        node.target, node.args, node.kwargs = put.target, (rows, order, copies * shape[1]), {"num_places": shape[0]}

    def _send(self, node: fx.Node, call: Call, axis: int) -> None:
        """Let a rank take or put its own rows, by group, and exchange them with those of its groups."""
        n, ends, order = self.mesh.sizes[axis], call["ends"], call["order"]
        rank, (first, count) = self.ranks[self.mesh.names[axis]], self._own_groups(node, ends, [axis])
        backward = node.meta["backward"]  # numbers are worked out in each pass: only tensors need to be kept
        share = int(order.meta["val"].numel()) // n
        sent, received = (
            self._make((op, ends, axis, backward), node, op, (ends, n, rank), [share] * n, None, None)
            for op in (sorted_rows.rows_sent, sorted_rows.rows_received)
        )
        shape, sharding = _of_rows(order, [axis])
        value = meta_value(local_shape(shape, sharding, self.mesh), torch.int64)
        args = (ends, first, count, n)
        op = ours.arrival_order.default
        arrival = self._make((op, ends, axis), node, op, args, value, shape, sharding)
        order = self._local_order(node, call, axis)
        Exchange(self.graph, node, self.mesh.names[axis], sent, received, order, arrival).move()

    def _local_order(self, node: fx.Node, call: Call, axis: int) -> fx.Node:
        """The order of the rows that this rank has before they are sent: of all its blocks by group."""
        order, ends = call["order"], call["ends"]
        num_blocks, num_groups = int(order.meta["val"].shape[0]), int(ends.meta["val"].shape[1])
        if num_blocks == 1:
            return order  # type: ignore[no-any-return]
        emit = Emitter(self.graph, node)
        start = emit.number(operator.mul, self.ranks[self.mesh.names[axis]], num_blocks)
        own = (ends, 0, start, emit.number(operator.add, start, num_blocks))
        value = meta_value((num_blocks, num_groups), ends.meta["val"].dtype)
        mine = self._make((aten.slice.Tensor, ends, axis), node, aten.slice.Tensor, own, value, None, None)
        shape, sharding = _of_rows(order, [])
        value = meta_value((1, int(order.meta["val"].numel())), torch.int64)
        args = (order, mine, 0, num_groups)
        return self._make((order, mine), node, ours.own_order.default, args, value, shape, sharding)

    def _own_order(self, node: fx.Node, order: fx.Node, ends: fx.Node, axes: Sequence[int]) -> fx.Node:
        shape, sharding = _of_rows(order, axes)
        value = meta_value(local_shape(shape, sharding, self.mesh), torch.int64)
        args = (order, ends, *self._own_groups(node, ends, axes))
        return self._make((order, ends, *axes), node, ours.own_order.default, args, value, shape, sharding)

    def _own_ends(self, node: fx.Node, ends: fx.Node, axes: Sequence[int]) -> fx.Node:
        first, count = self._own_groups(node, ends, axes)
        value = meta_value((1, count), ends.meta["val"].dtype)
        return self._make((ends, *axes), node, ours.own_ends.default, (ends, first, count), value, None, None)

    def _own_groups(self, node: fx.Node, ends: fx.Node, axes: Sequence[int]) -> tuple[Any, int]:
        """The first of a rank's groups, and how many it has."""
        count = int(ends.meta["val"].shape[1])
        for axis in axes:
            count //= self.mesh.sizes[axis]
        emit = Emitter(self.graph, node)
        return emit.number(operator.mul, rank_along(emit, axes, self.ranks, self.mesh), count), count

    def _make(
        self,
        key: tuple[Any, ...],
        owner: fx.Node,
        op: Any,
        args: tuple[Any, ...],
        value: Any,
        shape: tuple[int, ...] | None,
        sharding: Sharding | None,
    ) -> fx.Node:
        """A node beside an op, or the one that was made for this key before."""
        if key not in self._made:
            meta = {
                "val": value,
                "module": owner.meta["module"],
                "backward": owner.meta["backward"],
                "sharding": sharding,
                "global_shape": shape,
            }
            self._made[key] = add_call(self.graph, op, args, {}, meta)
        return self._made[key]


def _of_rows(order: fx.Node, axes: Sequence[int]) -> tuple[tuple[int, int], Sharding]:
    """Shape and sharding of an order of one block, of rows that lie by group along some axes."""
    blocks: Sharding = order.meta["sharding"]
    placements = (ByGroup(1) if a in axes else shard(1) if is_sharded(p) else p for a, p in enumerate(blocks))
    return (1, order.meta["global_shape"][0] * order.meta["global_shape"][1]), tuple(placements)


_MOVES_AND_PRODUCTS = (ours.take_rows.default, ours.put_rows.default, ours.grouped_mm.default)


def open_size(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """How many rows a call has in this step, which has them by group: as many as one of its operands, or, if it makes a
    constant, as what that meets in its first reader."""
    readers = (operand for user in node.users for operand in tensor_inputs(user) if operand < node)
    operand, dim = next(
        (operand, placement.dim)
        for operand in (*tensor_inputs(node), *readers)
        for placement in operand.meta["sharding"]
        if isinstance(placement, ByGroup)
    )
    meta = {
        "val": int(operand.meta["val"].shape[dim]),
        "module": node.meta["module"],
        "backward": node.meta["backward"],
        "sharding": None,
        "global_shape": None,
    }
    with graph.inserting_before(node):
        return add_call(graph, aten.sym_size.int, (operand, dim), {}, meta)
