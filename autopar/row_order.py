"""Sort rows within each row of the batch where the order of a whole sort is nobody's business.

Mixtures of experts sort the ids of all tokens, read rows in that order, multiply them group by group, and put them
back.  As it stands in the graph every token's place depends on all others.  But a row is the same row wherever it
stands: sorted within each row of the batch instead, every result is what it was, and the batch may be cut.

This holds if nothing but the rows' order changes, which is proved on the graph: from the sort on, each op either reads
or writes rows at their sorted places, or treats each row by itself, or sums over them all.  An op treats rows by
themselves if its rule lets their dim be cut, down to single rows.  Where anything else reads what is sorted, it all
stays as it was.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import sorted_rows  # noqa: F401  (registers ops)
from autopar._compat import OpOverload, detect_fake_mode, tree_leaves
from autopar.factors import source_of
from autopar.graph import InputKind, JointGraph, add_call
from autopar.group_counts import counted_groups, counts_up, is_constant
from autopar.row_wise import rows_through, unrepeated
from autopar.rules import Call, is_look, tensor_inputs

aten, ours = torch.ops.aten, torch.ops.autopar


@dataclass(frozen=True)
class _Rows:
    """A value that has, along a dim, rows in the order of the sort."""

    dim: int


@dataclass(frozen=True)
class _Positions:
    """For each place in the order, along dim 0, the row that stands there, divided by `copies`."""

    copies: int


@dataclass(frozen=True)
class _Places:
    """For each row, along dim 0, its place in the order."""


_Kind = _Rows | _Positions | _Places


class _Open(Exception):  # noqa: N818  (no error: the sort stays as it is)
    """Something depends on the order of the sort."""


def sort_within_rows(joint: JointGraph) -> None:
    """Replace the sorts of all tokens by sorts within each row of the batch, where that changes no result."""
    num_rows = _batch_size(joint)
    graph = joint.module.graph
    found = [node for node in graph.nodes if node.target in _SORTS]
    places = {node: i for i, node in enumerate(graph.nodes)} if found else {}
    for node in found:
        if node.users and num_rows > 1 and _is_sort_of_all(node, num_rows):
            region = _Region(node, num_rows)
            try:
                region.follow(places)
            except _Open:
                continue
            region.rewrite()
    if found:
        graph.eliminate_dead_code()


def _batch_size(joint: JointGraph) -> int:
    """Rows of the batch; 0 if the graph has none."""
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind is InputKind.INPUT and spec.path in joint.batch_dims:
            return int(node.meta["val"].shape[joint.batch_dims[spec.path]])
    return 0


_SORTS = {aten.sort.default, aten.sort.stable}


def _is_sort_of_all(node: fx.Node, num_rows: int) -> bool:
    """Whether this sorts one long row of integers, ascending, of which each row of the batch has as many."""
    call = Call(node)
    value = call["self"].meta["val"]
    whole = value.dim() == 1 and not value.dtype.is_floating_point and not call["descending"]
    return whole and value.numel() > 0 and value.numel() % num_rows == 0


class _Region:
    """What depends on one sort, followed from the sort to where its order no longer matters."""

    def __init__(self, sort: fx.Node, num_rows: int) -> None:
        self.sort, self.num_rows = sort, num_rows
        self.ids: fx.Node = Call(sort)["self"]
        self.length = int(self.ids.meta["val"].numel())
        self.kinds: dict[tuple[fx.Node, int], _Kind] = {(sort, 0): _Rows(0), (sort, 1): _Positions(1)}
        self.sorted = {sort}
        """The nodes among them."""
        self.moves: list[tuple[fx.Node, Any, fx.Node, int]] = []
        """Nodes to replace: each by an op that moves rows of a value, and how many rows share a place."""
        self.products: list[tuple[fx.Node, int]] = []
        """Grouped products, and how many groups each has."""

    # ------------------------------------------------------------------------------------------------------- the proof

    def follow(self, places: dict[fx.Node, int]) -> None:
        """Find out what every op that reads something sorted makes of it.

        Raises:
            _Open: if an op depends on the order.
        """
        pending = [(places[user], user) for user in self.sort.users]
        heapq.heapify(pending)
        seen = set()
        while pending:
            _, node = heapq.heappop(pending)
            if node in seen:
                continue
            seen.add(node)
            if node.target is not operator.getitem:
                self._classify(node)
            if source_of(node)[0] in self.sorted:
                for user in node.users:
                    heapq.heappush(pending, (places[user], user))
        if not self.moves:
            raise _Open

    def _mark(self, node: fx.Node, output: int, kind: _Kind) -> None:
        self.kinds[node, output] = kind
        self.sorted.add(node)

    def _kind(self, node: object) -> _Kind | None:
        return self.kinds.get(source_of(node)) if isinstance(node, fx.Node) else None

    def _classify(self, node: fx.Node) -> None:
        if not isinstance(node.target, OpOverload):
            raise _Open
        call = Call(node)
        if not any(self._kind(operand) for operand in tensor_inputs(node)):
            return  # a reader of another of a node's results
        special: Callable[[Call], bool] | None = getattr(self, _SPECIAL.get(node.target, ""), None)
        if not (special and special(call)) and not self._stays_positions(call):
            self._by_rows(call)

    def _divide(self, call: Call) -> bool:
        """Positions of rows become positions of what each stands for so many times."""
        copies, rounding = call["other"], call.args.get("rounding_mode", "floor")
        whole = isinstance(copies, int) and copies > 0 and rounding in ("floor", "trunc")
        if self._kind(call["self"]) != _Positions(1) or not whole or (self.length // self.num_rows) % copies:
            return False
        self._mark(call.node, 0, _Positions(copies))
        return True

    def _stays_positions(self, call: Call) -> bool:
        """Positions with more dims, along which they are the same."""
        if not is_look(call.node) or not isinstance(kind := self._kind(call.node.args[0]), _Positions):
            return False
        before, after = (tuple(n.meta["val"].shape) for n in (call.node.args[0], call.node))  # type: ignore[union-attr]
        widened = call.node.target is aten.expand.default and before[1:] == (1,) * len(after[1:])
        if after[0] != self.length or not (widened or math.prod(after) == self.length == math.prod(before)):
            return False
        self._mark(call.node, 0, kind)
        return True

    def _index(self, call: Call) -> tuple[fx.Node | None, _Positions | _Places | None]:
        """The one index of a call, if it is positions or places."""
        indices = call["indices"] if "indices" in call.args else [call["index"]]
        kind = self._kind(indices[0])
        return (indices[0], kind) if len(indices) == 1 and isinstance(kind, _Positions | _Places) else (None, None)

    def _read(self, call: Call) -> bool:
        """Rows of a table at positions, or sorted rows back at their places."""
        table, (index, kind) = call["self"], self._index(call)
        if index is None or kind is None:
            return False
        given, shape = tuple(index.meta["val"].shape), tuple(table.meta["val"].shape)
        rows = self.length // (kind.copies if isinstance(kind, _Positions) else 1)
        expected = (self.length, *(shape[1:] if call.op is aten.gather.default else ()))
        if call.args.get("dim", 0) != 0 or given != expected or shape[0] != rows:
            raise _Open
        if isinstance(kind, _Positions):
            self._take(call.node, table, kind.copies)
        else:
            self._put(call.node, table, 1)
        return True

    def _write(self, call: Call) -> bool:
        """Sorted rows at their positions, rows at their places, or which place each row has."""
        given = call.args
        values = next(given[name] for name in ("values", "source", "src") if name in given)
        index, kind = self._index(call)
        if index is None or kind is None:
            return False
        copies = kind.copies if isinstance(kind, _Positions) else 1
        shape = (self.length, *call.out_shape[1:])
        expected = shape if call.op is aten.scatter_add.default else shape[:1]
        summed = given.get("accumulate", True) and given.get("alpha", 1) == 1 and is_constant(call["self"], 0)
        written = not given.get("accumulate", True) and copies == 1 and self._kind(call["self"]) is None
        fits = call.out_shape[0] * copies == self.length and tuple(values.meta["val"].shape) == shape
        fits = fits and tuple(index.meta["val"].shape) == expected and given.get("dim", 0) == 0
        if not fits or not (summed or written):
            raise _Open
        if isinstance(kind, _Places):
            self._take(call.node, values, 1)
        elif copies == 1 and len(shape) == 1 and counts_up(values):
            self._mark(call.node, 0, _Places())
        else:
            self._put(call.node, values, copies)
        return True

    def _take(self, node: fx.Node, table: fx.Node, copies: int) -> None:
        if self._kind(table) is not None:
            raise _Open  # sorted already: this is another order
        single, times = unrepeated(table) if copies == 1 else (table, 1)
        if (self.length // self.num_rows) % times:
            single, times = table, 1
        self.moves.append((node, ours.take_rows.default, single, copies * times))
        self._mark(node, 0, _Rows(0))

    def _put(self, node: fx.Node, rows: fx.Node, copies: int) -> None:
        if self._kind(rows) != _Rows(0):
            raise _Open
        self.moves.append((node, ours.put_rows.default, rows, copies))

    def _invert(self, call: Call) -> bool:
        """Sorting the positions gives the places; what is sorted then, nobody may read."""
        if self._kind(call["self"]) != _Positions(1) or len(call.out_shape) != 1 or call["descending"]:
            return False
        if any(user.args[1] == 0 for user in call.node.users):
            raise _Open
        self._mark(call.node, 1, _Places())
        return True

    def _multiply(self, call: Call) -> bool:
        """A product of groups of sorted rows, if its groups are those of the ids that were sorted."""
        a, b = self._kind(call["a"]), self._kind(call["b"])
        num_groups = counted_groups(call["ends"], self.ids, self.sort)
        if num_groups is None or self._kind(call["ends"]) is not None:
            raise _Open
        if (a, b) == (_Rows(0), None) and len(call.shape("b")) == 3:
            self._mark(call.node, 0, _Rows(0))
        elif (a, b) != (_Rows(1), _Rows(0)):
            raise _Open
        self.products.append((call.node, num_groups))
        return True

    def _count(self, call: Call) -> bool:
        """How many there are of each value: the same in any order."""
        return isinstance(self._kind(call["self"]), _Rows)

    def _by_rows(self, call: Call) -> None:
        """An op that makes of each row what it makes of it anywhere."""
        kinds = [self._kind(operand) for operand in tensor_inputs(call.node)]
        if any(isinstance(kind, _Positions | _Places) for kind in kinds):
            raise _Open
        found = rows_through(call.node, [kind.dim if isinstance(kind, _Rows) else None for kind in kinds])
        if found is None:
            raise _Open
        for output, dim in enumerate(found):
            if dim is not None:
                self._mark(call.node, output, _Rows(dim))

    # ----------------------------------------------------------------------------------------------------- the rewrite

    def rewrite(self) -> None:
        """Sort within each row of the batch, and let everything that was followed read that order."""
        graph = self.sort.graph
        with graph.inserting_before(self.sort):
            by_row = _emit(aten.view.default, (self.ids, [self.num_rows, -1]), self.sort)
            pair = _emit(aten.sort.stable, (by_row,), self.sort, stable=True, dim=1)
            ids, order = (_emit(operator.getitem, (pair, i), self.sort) for i in range(2))
            ends = {
                count: _emit(ours.group_ends.default, (ids, count), self.sort)
                for count in dict.fromkeys(count for _, count in self.products)
            }
            # Groups may be cut if they are the same for all products.
            known = next(iter(ends.values())) if len(ends) == 1 else None
            flat = _emit(ours.take_rows.default, (self.ids, order, 1, known), self.sort)
        for user in list(self.sort.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(flat)
        for product, count in self.products:
            product.replace_input_with(Call(product)["ends"], ends[count])
        moved: dict[fx.Node, fx.Node] = {}
        for node, op, source, copies in self.moves:
            shape = (source.meta["val"].shape[0], *node.meta["val"].shape[1:])
            with graph.inserting_before(node):
                given = moved.get(source, source)
                if source.meta["val"].dim() > len(shape):
                    given = _emit(aten.view.default, (given, list(shape)), node)
                moved[node] = _emit(op, (given, order, copies, known), node)
            node.replace_all_uses_with(moved[node])


_SPECIAL = {
    **dict.fromkeys((aten.floor_divide.default, aten.div.Scalar_mode, aten.div.Tensor_mode), "_divide"),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default, aten.gather.default), "_read"),
    **dict.fromkeys((aten.index_put.default, aten.index_add.default, aten.scatter_add.default), "_write"),
    **dict.fromkeys(_SORTS, "_invert"),
    ours.grouped_mm.default: "_multiply",
    aten.histc.default: "_count",
}
"""Ops that have a meaning for an order besides that of their rule."""


def _emit(op: Any, args: tuple[Any, ...], owner: fx.Node, **kwargs: Any) -> fx.Node:
    """A call in the place and pass of a node, with its fake value."""
    given = fx.map_arg(args, lambda n: n.meta["val"])
    mode = detect_fake_mode(tree_leaves(owner.meta["val"]))
    assert mode is not None, f"{owner} has no fake value to work with"
    with mode, torch.no_grad():
        value = op(*given, **kwargs)
    meta = {"val": value, "module": owner.meta["module"], "backward": owner.meta["backward"]}
    return add_call(owner.graph, op, args, kwargs, meta)
