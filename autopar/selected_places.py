"""Where a mask holds: `torch.where(mask)` and `nonzero`, what is looked up there, and what is put back there.

All places of the mask are there, and those where it holds count.  What a tensor of the mask's shape has at them is that
tensor itself, so that no row is looked up in another's place and the batch stays cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.selected_rows import Place, RowCall, SelectedRows, Selection, UnfollowedError, follows, only_selection


def places_of(selection: Selection, shape: tuple[int, ...]) -> tuple[SelectedRows, ...]:
    """For each dim of a mask of this shape the positions at which the mask holds, (rows,) integers."""
    found = []
    for dim, size in enumerate(shape):
        positions = torch.arange(size, device=selection.mask.device).view(-1, *[1] * (len(shape) - dim - 1))
        rows = SelectedRows(positions.expand(shape).reshape(-1), selection)
        rows.place = Place(shape, dim)
        found.append(rows)
    return tuple(found)


def _by_dim(places: Sequence[SelectedRows]) -> list[Place]:
    """Which dims of a mask these positions are of; none if they are not all known to be of one mask's, each once."""
    found = [one.place for one in places if one.place is not None]
    alike = {(place.shape, one.selection) for place, one in zip(found, places, strict=False)}
    is_known = len(found) == len(places) and len(alike) == 1 and len({place.dim for place in found}) == len(found)
    return found if is_known else []


def looked_up(table: Tensor, index: Any) -> SelectedRows:
    """`table[index]` for positions in selected rows, with any look at the later dims behind them."""
    index = index if isinstance(index, tuple) else (index,)
    num_places = next((i for i, one in enumerate(index) if not isinstance(one, SelectedRows)), len(index))
    places, rest = index[:num_places], index[num_places:]
    is_plain = all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in rest)
    is_row_wise = len(index) == 1 or all(one.rows.ndim == 1 for one in places)
    if not is_plain or not is_row_wise or any(one.dtype is torch.bool for one in places):
        raise UnfollowedError
    selection = only_selection(places)
    rows = _at_places(table, _by_dim(places))
    if rows is None:
        rows = table[tuple(one.filled(0) for one in places)]
    later = (slice(None), *rest)
    return SelectedRows(rows[later], selection)


def _at_places(table: Tensor, places: Sequence[Place]) -> Tensor | None:
    """What a table has at all positions along these dims; None if they are none of the table's."""
    if not places or any(table.shape[i] != one.shape[one.dim] for i, one in enumerate(places[: table.ndim])):
        return None
    if len(places) > table.ndim:
        return None
    shape, inner = places[0].shape, table.shape[len(places) :]
    order = sorted(range(len(places)), key=lambda i: places[i].dim)
    table = table.permute(*order, *range(len(places), table.ndim))
    given = {one.dim for one in places}
    spread = table.reshape(*(size if dim in given else 1 for dim, size in enumerate(shape)), *inner)
    return spread.expand(*shape, *inner).reshape(math.prod(shape), *inner)


@follows("index_add", "index_add_")
def _index_add(call: RowCall) -> Any:
    """Rows that are summed into a tensor, each at its position."""
    table, dim, index, source = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    alpha = call.argument(4, "alpha", 1)
    if isinstance(table, SelectedRows) or not isinstance(index, SelectedRows) or not isinstance(source, SelectedRows):
        raise UnfollowedError("selected rows and others")
    only_selection([index, source])
    if dim % table.ndim or source.rows.shape[1:] != table.shape[1:]:
        raise UnfollowedError
    rows, place = source.filled(0) * alpha, index.place
    if place is None or place.shape[place.dim] != table.shape[0]:
        return call.func(table, dim, index.filled(0), rows)
    others = [one for one in range(len(place.shape)) if one != place.dim]
    summed = rows.reshape(*place.shape, *rows.shape[1:])
    summed = (summed.sum(others) if others else summed).to(table.dtype)
    return table.add_(summed) if call.name.endswith("_") else table + summed


def put(table: Tensor, index: SelectedRows, value: SelectedRows) -> None:
    """`table[index] = value`: of several rows for one position the last one, as on one device.

    Raises:
        UnfollowedError: if they are not the positions of one mask along a dim as long as the table.
    """
    only_selection([index, value])
    place, rows = index.place, value.rows
    if place is None or place.shape[place.dim] != table.shape[0] or rows.shape[1:] != table.shape[1:]:
        raise UnfollowedError
    mask = value.selection.mask.reshape(place.shape).movedim(place.dim, 0).reshape(len(table), -1)
    rows = rows.reshape(*place.shape, *rows.shape[1:]).movedim(place.dim, 0).reshape(*mask.shape, *rows.shape[1:])
    after = mask.to(torch.int64).flip(1).cumsum(1).flip(1)
    is_last = (mask & (after == 1)).view(*mask.shape, *[1] * (rows.ndim - 2))
    last = torch.where(is_last, rows, 0).sum(1)
    is_any = mask.any(1).view(-1, *[1] * (rows.ndim - 2))
    table.copy_(torch.where(is_any, last.to(table.dtype), table))
