"""Sums of one-hot values.

The gradient of a loss by class is one number per row, at the target's class.  Its sum over the classes is that number:
known wherever the target is, and nothing is left to reduce when the classes are cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.writer import Writer

aten = torch.ops.aten


def sum_of_one_hot(value: fx.Node, dim: int, write: Writer) -> fx.Node | None:
    """The sum of `value` along `dim`, which stays with size 1, if it is `where(classes == index & ..., number, 0)`.

    Here `classes` counts along `dim` from zero, and index, number and the other conditions do not change along it.
    None if it is anything else.  An index outside of the classes hits none.
    """
    rank, size = value.meta["val"].ndim, value.meta["val"].shape[dim]
    source = value.args[0] if value.target is aten._to_copy.default else value
    if not isinstance(source, fx.Node) or source.target is not aten.where.self:
        return None
    condition, number, otherwise = source.args
    conditions = list(_all_of(condition))
    indices = {part: index for part in conditions if (index := _hit_index(part, dim % rank, rank, size)) is not None}
    hits, rest = list(indices.values()), [part for part in conditions if part not in indices]
    if len(hits) != 1 or not isinstance(number, fx.Node) or not _is_zero(otherwise):
        return None
    parts = (*hits, *rest, number)
    if not all(_is_same_along(part, dim % rank, rank) for part in parts):
        return None
    if max(part.meta["val"].ndim for part in parts) < rank:
        return None  # the sum would have fewer dims
    found = write(aten.bitwise_and.Tensor, write(aten.ge.Scalar, hits[0], 0), write(aten.lt.Scalar, hits[0], size))
    for part in rest:
        found = write(aten.bitwise_and.Tensor, found, part)
    total = write(aten.where.self, found, number, otherwise)
    dtype = value.meta["val"].dtype
    return total if total.meta["val"].dtype == dtype else write(aten._to_copy.default, total, dtype=dtype)


def _all_of(condition: object) -> Iterator[fx.Node]:
    """The conditions of which this is the conjunction."""
    if isinstance(condition, fx.Node):
        if condition.target is aten.bitwise_and.Tensor:
            for part in condition.args:
                yield from _all_of(part)
        else:
            yield condition


def _hit_index(condition: fx.Node, dim: int, rank: int, size: int) -> fx.Node | None:
    """The index that a condition compares with the positions along `dim`."""
    if condition.target is not aten.eq.Tensor:
        return None
    for classes, index in (condition.args, condition.args[::-1]):
        if isinstance(index, fx.Node) and _counts_along(classes, dim, rank, size) and _is_same_along(index, dim, rank):
            return index
    return None


def _counts_along(value: object, dim: int, rank: int, size: int) -> bool:
    """Whether this is 0, 1, 2, ... along `dim` and the same along all others."""
    if not isinstance(value, fx.Node):
        return False
    shape = tuple(value.meta["val"].shape)
    if (1,) * (rank - len(shape)) + shape != tuple(size if d == dim else 1 for d in range(rank)):
        return False
    while value.target in _RESHAPES and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value.target is aten.arange.default and value.args == (size,)


_RESHAPES = {aten.view.default, aten.reshape.default, aten.unsqueeze.default}


def _is_same_along(value: object, dim: int, rank: int) -> bool:
    """Whether a value that is broadcast to `rank` dims is the same at all positions along `dim`."""
    if not isinstance(value, fx.Node):
        return False
    shape = value.meta["val"].shape
    place = dim - (rank - len(shape))
    return place < 0 or shape[place] == 1


def _is_zero(value: object) -> bool:
    if not isinstance(value, fx.Node):
        return False
    is_constant = value.target in {aten.scalar_tensor.default, aten.full.default}
    return is_constant and value.args[-1] in (0, False)
