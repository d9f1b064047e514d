"""Find out whether an integer tensor counts, group by group, rows whose ids are known: where grouped products end."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules import Call, is_look

aten = torch.ops.aten

MAX_BINS = 2048
"""`histc` divides in float32: with as many bins and fewer, an integer lands in its own beyond doubt."""

_EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}
"""Dtypes that hold the ids of `MAX_BINS` groups as they are."""


def counted_groups(ends: fx.Node, ids: fx.Node, sort: fx.Node) -> int | None:
    """How many groups there are, if `ends` says of each where it ends among the sorted ids.

    Args:
        ends: what a grouped product takes as the ends of its groups.
        ids: the ids, one for each row: the group that it goes to.
        sort: the sort of `ids`.

    Returns:
        None if that is not what the ends are, or an id may be none of the groups.
    """
    ends = _uncast(ends)
    if ends.target is not aten.cumsum.default or ends.meta["val"].dim() != 1:
        return None
    counts = _uncast(ends.args[0])  # type: ignore[arg-type]
    formula = _COUNTS.get(counts.target)
    base = _all_of(ids)

    def has_ids(node: fx.Node) -> bool:
        """Whether a value has all ids, in any order and shape."""
        found = _all_of(node)
        is_sorted = found.target is operator.getitem and found.args[0] is sort and found.args[1] == 0
        return bool((found is base or is_sorted) and node.meta["val"].numel() == ids.meta["val"].numel())

    num_groups = ends.meta["val"].numel()
    is_count = formula is not None and formula(Call(counts), has_ids)
    return num_groups if is_count and _is_below(base, num_groups) else None


def _uncast(node: fx.Node) -> fx.Node:
    """What a value was before casts to dtypes that hold it."""
    while node.target in (aten._to_copy.default, aten.clone.default) and node.meta["val"].dtype in _EXACT:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _all_of(node: fx.Node) -> fx.Node:
    """What a value was before casts and views that keep all its elements."""
    while True:
        before = _uncast(node)
        if before is node and is_look(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.meta["val"].numel() == node.meta["val"].numel() and 0 not in _steps(node):
                before = source
        if before is node:
            return node
        node = before


def _steps(node: fx.Node) -> tuple[int, ...]:
    """Steps in memory along the dims that have more than one position."""
    value = node.meta["val"]
    return tuple(step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1)


def _is_below(ids: fx.Node, num_groups: int) -> bool:
    """Whether ids count positions in a dim of so many: they are what a choice among them returned."""
    if ids.target is not operator.getitem or ids.args[1] != 1:
        return False
    choice = ids.args[0]
    assert isinstance(choice, fx.Node)
    if choice.target not in _CHOICES:
        return False
    call = Call(choice)
    shape = call.shape("self")
    return bool(shape) and shape[call.dim("dim", len(shape))] <= num_groups


_CHOICES = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim}


# ---- ways to count ----

_HasIds = Callable[[fx.Node], bool]


def _by_histogram(call: Call, has_ids: _HasIds) -> bool:
    """Bins of width one around the integers from 0."""
    bins = call["bins"]
    return 2 <= bins <= MAX_BINS and (call["min"], call["max"]) == (0, bins - 1) and has_ids(call["self"])


def _by_comparison(call: Call, has_ids: _HasIds) -> bool:
    """The sum, over all dims but the groups', of whether an id equals a group's number."""
    equal = _uncast_mask(call["self"])
    if equal.target is not aten.eq.Tensor or call["keepdim"]:
        return False
    rank = equal.meta["val"].dim()
    summed = {dim % rank for dim in call["dim"] or range(rank)}
    left = [dim for dim in range(rank) if dim not in summed]
    pairs = [equal.args, equal.args[::-1]]
    return len(left) == 1 and any(has_ids(ids) and _numbers(groups, left[0], rank) for ids, groups in pairs)  # type: ignore[arg-type]


def _uncast_mask(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is aten._to_copy.default else node  # type: ignore[return-value]


def _numbers(node: fx.Node, dim: int, rank: int) -> bool:
    """Whether a value, broadcast to `rank` dims, is 0, 1, 2, ... along `dim` and the same along others."""
    shape = (1,) * (rank - node.meta["val"].dim()) + tuple(node.meta["val"].shape)
    return counts_up(_all_of(node)) and all((size != 1) == (i == dim) for i, size in enumerate(shape))


def counts_up(node: fx.Node) -> bool:
    """Whether a value is the constant 0, 1, 2, ..."""
    if node.target is aten.arange.default:
        return True
    if node.target not in (aten.arange.start, aten.arange.start_step):
        return False
    start, _, step = (*node.args, 1)[:3]
    return (start, step) == (0, 1)


def _by_adding(call: Call, has_ids: _HasIds) -> bool:
    """Ones, each added to zeros at its id."""
    index = call["indices"] if "indices" in call.args else [call["index"]]
    ones = next(call[name] for name in ("src", "source", "values") if name in call.args)
    added = call.args.get("accumulate", True) and call.args.get("alpha", 1) == 1
    return (
        len(call.out_shape) == len(index) == 1
        and added
        and is_constant(call["self"], 0)
        and is_constant(ones, 1)
        and has_ids(index[0])
    )


def is_constant(node: object, value: float | None = None) -> bool:
    """Whether a value is one number everywhere, any or a given one."""
    if not isinstance(node, fx.Node) or node.target is not aten.full.default:
        return False
    return value is None or bool(node.args[1] == value)


_COUNTS: dict[Any, Callable[[Call, _HasIds], bool]] = {
    aten.histc.default: _by_histogram,
    aten.sum.dim_IntList: _by_comparison,
    **dict.fromkeys((aten.scatter_add.default, aten.index_add.default, aten.index_put.default), _by_adding),
}
