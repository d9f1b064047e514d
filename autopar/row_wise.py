"""What ops make of rows: where they go through an op that treats each by itself, and which of them are copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.group_counts import is_constant
from autopar.rules import rule_for, tensor_inputs

aten = torch.ops.aten


def rows_through(node: fx.Node, given: Sequence[int | None]) -> list[int | None] | None:
    """Where an op has the rows of its inputs in its outputs, if it treats each row by itself or sums over them all.

    Args:
        node: a call of an op.
        given: for each tensor that it reads, the dim of the rows; None if it has none.

    Returns:
        For each output the dim of the rows, None if it has none.  None instead of a list if the op may depend on the
        order of the rows.
    """
    op, rule = node.target, rule_for(node)
    if rule is None or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:  # type: ignore[union-attr]
        return None
    # What may be cut, down to single rows, is made row by row: the rules are proved by cutting.
    groups = {dims[dim] for dims, dim in zip(rule.inputs, given, strict=True) if dim is not None}
    factor = next(iter(groups))[0] if len(groups) == 1 and len(next(iter(groups))) == 1 else None
    if factor is None or factor in rule.whole or rule.is_range(factor):
        return None
    for operand, dims, dim in zip(tensor_inputs(node), rule.inputs, given, strict=True):
        if dim is None and any(factor in group for group in dims) and not is_constant(operand):
            return None  # rows that have another order meet these
    found: list[int | None] = []
    for dims in rule.outputs:
        places = [dim for dim, group in enumerate(dims) if factor in group]
        if any(len(dims[dim]) > 1 for dim in places):
            return None
        found.append(places[0] if places else None)
    return found


def unrepeated(table: fx.Node) -> tuple[fx.Node, int]:
    """Of a table that has each row so many times, one after another, the rows that are repeated, with a dim of size one
    after that of the rows, and how many times; otherwise the table, once."""
    node = table
    while node.target in (aten.clone.default, aten.view.default, aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    shape = tuple(table.meta["val"].shape)
    if node.target is aten.expand.default:
        single, wide = node.args[0], tuple(node.meta["val"].shape)
        before = tuple(single.meta["val"].shape)  # type: ignore[union-attr]
        if len(wide) > 1 and wide[0] * wide[1] == shape[0] and wide[2:] == shape[1:]:
            is_plain = before == (wide[0], 1, *wide[2:])
            return (single, wide[1]) if is_plain else (table, 1)  # type: ignore[return-value]
    return table, 1
