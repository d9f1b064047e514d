"""What functions make of selected rows that only look at them: views, indexing, and a second mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.selected_functions import place, row_by_row
from autopar.selected_rows import (
    HARMLESS,
    RowCall,
    SelectedRows,
    UnfollowedError,
    follows,
    joined_selection,
    num_dims,
    only_selection,
    per_row,
)
from autopar.selected_sizes import UnknownSize

# ---------------------------------------------------------------------------------------------------------------- views


@follows("index_select")
def _index_select(call: RowCall) -> Any:
    rows, dim, index = call.args if len(call.args) == 3 else (call.args[0], call.argument(1, "dim"), None)
    index = call.argument(2, "index") if index is None else index
    if not isinstance(rows, SelectedRows) or isinstance(index, SelectedRows) or not place(dim, rows.rows.ndim):
        raise UnfollowedError
    return rows.like(torch.index_select(rows.rows, dim, index))


@follows("cat", "concat", "concatenate", "stack", "hstack")
def _joined(call: RowCall) -> Any:
    ndims = {num_dims(t) for t in call.tensors}
    if len(ndims) != 1:
        raise UnfollowedError
    dim = int(ndims != {1}) if call.name == "hstack" else call.argument(1, "dim", 0)
    if place(dim, ndims.pop() + (call.name == "stack")):
        return row_by_row(call)
    if call.name == "stack":
        raise UnfollowedError
    return _one_after_another(call.tensors)


def _one_after_another(parts: Sequence[Tensor]) -> SelectedRows:
    """Rows that each have their selection, or all count."""
    joined = joined_selection([t.selection if isinstance(t, SelectedRows) else len(t) for t in parts], parts[0].device)
    return SelectedRows(torch.cat([t.filled() if isinstance(t, SelectedRows) else t for t in parts]), joined)


def _own(call: RowCall) -> SelectedRows:
    """The rows of which a function makes a view."""
    if len(call.tensors) != 1 or not isinstance(call.args[0], SelectedRows):
        raise UnfollowedError
    return call.args[0]


def _given(call: RowCall) -> tuple[Any, ...]:
    """Sizes or dims, which may come one by one or together."""
    given = (*call.args[1:], *call.kwargs.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


@follows("reshape", "view", "view_as", "reshape_as")
def _reshape(call: RowCall) -> Any:
    rows, shape = call.args[0], _given(call)
    if call.name.endswith("_as"):
        return _reshaped_as(rows, shape[0])
    if not isinstance(rows, SelectedRows) or not all(type(size) is int for size in shape[1:]):
        raise UnfollowedError
    if isinstance(shape[0], UnknownSize) and shape[0] == UnknownSize(rows.selection):
        return rows.like(rows.rows.reshape(len(rows.rows), *shape[1:]))
    if type(shape[0]) is not int or shape[0] != -1:
        raise UnfollowedError
    return _merged(rows, shape[1:])


def _reshaped_as(rows: Any, other: Any) -> SelectedRows:
    if not isinstance(rows, SelectedRows) or not isinstance(other, SelectedRows):
        raise UnfollowedError
    made = _merged(rows, other.rows.shape[1:])
    if made.selection is not other.selection:
        raise UnfollowedError("rows that different masks select")
    return made


def _merged(rows: SelectedRows, shape: Sequence[int]) -> SelectedRows:
    """Rows of another shape: each may become several, but several not one."""
    old, new = per_row(rows.rows), math.prod(shape)
    if new <= 0 or old % new:
        raise UnfollowedError(f"rows of {old} elements in the shape {[-1, *shape]}")
    return rows.like(rows.rows.reshape(-1, *shape), rows.selection.repeated(old // new))


@follows("flatten", "ravel")
def _flatten(call: RowCall) -> Any:
    rows = _own(call)
    start, end = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1)
    start, end = place(start, rows.rows.ndim), place(end, rows.rows.ndim)
    if start:
        return rows.like(rows.rows.flatten(start, end))
    return _merged(rows, rows.rows.shape[end + 1 :])


@follows("squeeze")
def _squeeze(call: RowCall) -> Any:
    rows, dim = _own(call), call.argument(1, "dim")
    if dim is not None:  # without one all but the rows: where they are a single one, nothing but their number differs
        given = [place(one, rows.rows.ndim) for one in (dim if isinstance(dim, (tuple, list)) else [dim])]
    else:
        given = list(range(1, rows.rows.ndim))
    if 0 in given:
        raise UnfollowedError
    return rows.like(rows.rows.squeeze(tuple(given)))


@follows("unsqueeze")
def _unsqueeze(call: RowCall) -> Any:
    rows, dim = _own(call), call.argument(1, "dim")
    if not place(dim, rows.rows.ndim + 1):
        raise UnfollowedError
    return rows.like(rows.rows.unsqueeze(dim))


@follows("transpose", "swapaxes", "swapdims", "mT.__get__")
def _transpose(call: RowCall) -> Any:
    rows = _own(call)
    dims = (-2, -1) if call.name == "mT.__get__" else call.args[1:] or tuple(call.kwargs.values())
    if 0 in (place(dim, rows.rows.ndim) for dim in dims):
        raise UnfollowedError
    return rows.like(rows.rows.transpose(*dims))


@follows("flip")
def _flip(call: RowCall) -> Any:
    rows, dims = _own(call), _given(call)
    if 0 in (place(dim, rows.rows.ndim) for dim in dims):
        raise UnfollowedError
    return rows.like(rows.rows.flip(dims))


@follows("permute")
def _permute(call: RowCall) -> Any:
    rows, dims = _own(call), _given(call)
    if place(dims[0], rows.rows.ndim):
        raise UnfollowedError
    return rows.like(rows.rows.permute(dims))


# ------------------------------------------------------------------------------------------------------------- indexing


@follows("__getitem__")
def _index(call: RowCall) -> Any:
    rows, index = call.args
    if not isinstance(rows, SelectedRows):
        return _looked_up(rows, index)
    if isinstance(index, SelectedRows):
        return _narrowed(rows, index)
    index = index if isinstance(index, tuple) else (index,)
    if index and index[0] is Ellipsis:
        num_given = sum(one is not None for one in index[1:])
        index = (*[slice(None)] * (rows.rows.ndim - num_given), *index[1:])
    if not index or not isinstance(index[0], slice) or index[0] != slice(None):
        raise UnfollowedError
    tensors = [one for one in index if isinstance(one, Tensor)]
    if not all(one is None or one is Ellipsis or isinstance(one, (int, slice, Tensor)) for one in index):
        raise UnfollowedError
    if len(tensors) > 1 or any(isinstance(t, SelectedRows) or t.dtype is torch.bool for t in tensors):
        raise UnfollowedError
    return rows.like(rows.rows[index])


def paired(rows: SelectedRows, index: Sequence[Any]) -> SelectedRows:
    """`x[mask, index]`: of each row the element that its number in `index` says."""
    places, *others = index
    if not isinstance(places, SelectedRows) or places.rows.ndim != 1 or places.dtype is torch.bool:
        raise UnfollowedError
    if not all(isinstance(one, slice) and one == slice(None) for one in others) or rows.rows.ndim < 2:
        raise UnfollowedError
    only_selection([rows, places])
    size = (len(rows.rows), 1, *rows.rows.shape[2:])
    chosen = places.filled(0).view(-1, *[1] * (rows.rows.ndim - 1)).expand(size)
    return SelectedRows(rows.filled().gather(1, chosen).squeeze(1), rows.selection)


def _narrowed(rows: SelectedRows, mask: SelectedRows) -> SelectedRows:
    """Rows, or parts of them, that a second mask selects among the selected ones."""
    if mask.dtype is not torch.bool or rows.rows.shape[: mask.rows.ndim] != mask.rows.shape:
        raise UnfollowedError
    only_selection([rows, mask])
    rows = _merged(rows, rows.rows.shape[mask.rows.ndim :])
    selection = rows.selection.narrowed(mask)
    return SelectedRows(SelectedRows(rows.rows, selection).filled(), selection, HARMLESS)


def _looked_up(table: Tensor, index: Any) -> SelectedRows:
    """Rows of a table, each by the number in a selected row."""
    if not isinstance(index, SelectedRows) or index.dtype is torch.bool:
        raise UnfollowedError
    return SelectedRows(table[index.filled(0)], index.selection)
