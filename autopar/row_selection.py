"""Selections by boolean masks, which become all rows and which of them count while a model is traced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

import autopar.selected_layers
import autopar.selected_reductions
import autopar.selected_views  # noqa: F401  (all say what functions make of selected rows)
from autopar._compat import tree_flatten, version_of
from autopar.selected_rows import (
    HARMLESS,
    SelectedRows,
    Selection,
    UnfollowedError,
    follow,
    in_custom_function,
)
from autopar.selected_views import paired


class SelectsRows(TorchFunctionMode):
    """While it is active, `x[mask]` and `x.masked_select(mask)` are `SelectedRows`, and what is called with them is
    followed.

    Two masks are one if they are the same tensor, or were computed from the same tensors in the same way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._selections: dict[Hashable, Selection] = {}
        self._numbers: Any = WeakTensorKeyDictionary()
        self._kinds: dict[Hashable, int] = {}
        self._rows: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have one id

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__setitem__ and self._write(*args):
            return None
        if func in _SELECTIONS and len(args) == 2 and not kwargs:
            result: Any = self._select(func, *args)
            if result is not None:
                return self._noted(func, args, kwargs, result) if result.dtype in _DISCRETE else result
        result = follow(func, args, kwargs) if SelectedRows in types else func(*args, **kwargs)
        if isinstance(result, Tensor) and getattr(func, "__name__", "") in _REPEATABLE and result.dtype in _DISCRETE:
            return self._noted(func, args, kwargs, result)
        return result

    # ------------------------------------------------------------------------------------------------------- selecting

    def _select(self, func: Any, x: Tensor, index: Any) -> SelectedRows | None:
        """What is selected; None if that is not by a mask over the first dims, or not to be followed."""
        rest: Sequence[Any] = ()
        if isinstance(x, SelectedRows):
            return None
        if func is torch.Tensor.__getitem__:
            mask, *rest = index if isinstance(index, tuple) and index else (index,)
            if mask is Ellipsis and rest and isinstance(rest[0], Tensor) and rest[0].ndim == x.ndim:
                mask, *rest = rest
            if not _is_mask(mask) or mask.shape != x.shape[: mask.ndim]:
                return None
        else:
            mask = index
            if not _is_mask(mask):
                return None
            x = x.expand(torch.broadcast_shapes(x.shape, mask.shape))  # type: ignore[no-untyped-call]
        if in_custom_function() or any(_pairs_rows(one) for one in rest):
            return None
        num_dims = mask.ndim if func is torch.Tensor.__getitem__ else x.ndim
        selection = self._selection(mask, tuple(x.shape[:num_dims]))
        rows = SelectedRows(x.reshape(len(selection.mask), *x.shape[num_dims:]), selection).filled()
        selected = SelectedRows(rows, selection, HARMLESS)
        if not rest:
            return selected
        if any(isinstance(one, SelectedRows) for one in rest):
            return paired(selected, rest)
        found: SelectedRows = follow(torch.Tensor.__getitem__, (selected, (slice(None), *rest)), {})
        return found

    def _selection(self, mask: Tensor, shape: tuple[int, ...]) -> Selection:
        """What selects the elements of a tensor of this shape where the mask holds."""
        key = (self._number(mask), shape)
        if key not in self._selections:
            # A copy, since the mask may be written to later.
            self._selections[key] = Selection(mask.expand(shape).reshape(-1).clone())
        return self._selections[key]

    def _write(self, x: Tensor, index: Any, value: Any) -> bool:
        """`x[mask] = value`, of rows that the same mask selects or of what all of them get; whether it was that."""
        if isinstance(x, SelectedRows) or not _is_mask(index) or index.shape != x.shape[: index.ndim]:
            return False
        shape, inner = tuple(index.shape), x.shape[index.ndim :]
        if isinstance(value, SelectedRows):
            if self._selection(index, shape) is not value.selection:
                raise UnfollowedError("torch.Tensor.__setitem__ of rows that different masks select")
            if value.rows.shape[1:] != inner:
                raise UnfollowedError("torch.Tensor.__setitem__")
            value = value.rows.reshape(x.shape)
        elif not isinstance(value, Tensor) or value.ndim > len(inner):
            return False
        over = index.view(*shape, *[1] * len(inner))
        x.copy_(torch.where(over, value.to(x.dtype), x))
        return True

    # ---------------------------------------------------------------------------------------------- where masks are one

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
        """Remember how a tensor of booleans or integers was computed.  Selected rows of them are the first that were
        computed so."""
        leaves, tree = tree_flatten((args, kwargs))
        if any(isinstance(one, slice) and _has_tensor(one) for one in leaves):
            return result
        parts = tuple(self._number(one) if isinstance(one, Tensor) else repr(one) for one in leaves)
        kind = self._kind((func, str(tree), parts))
        if not isinstance(result, SelectedRows):
            self._numbers[result] = (kind, version_of(result))
            return result
        result.rows = self._rows.setdefault(kind, result.rows)
        return result

    def _number(self, tensor: Tensor) -> int:
        """A number that tensors of the same values share, as far as is known."""
        if isinstance(tensor, SelectedRows):
            tensor = tensor.rows  # which are others after a write
        kind, version = self._numbers.get(tensor, (None, None))
        if kind is not None and version == version_of(tensor):
            return int(kind)
        self._alive.append(tensor)
        return self._kind((id(tensor), version_of(tensor)))

    def _kind(self, key: Hashable) -> int:
        return self._kinds.setdefault(key, len(self._kinds))


_SELECTIONS = {torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select}
_DISCRETE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_REPEATABLE = {
    "__and__", "__eq__", "__ge__", "__getitem__", "__gt__", "__invert__", "__le__", "__lt__", "__ne__", "__or__",
    "__xor__", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "contiguous", "eq", "expand", "flatten", "ge", "gt",
    "int", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "ne",
    "reshape", "squeeze", "to", "transpose", "unsqueeze", "view",
}  # fmt: skip
"""Functions that give the same of the same."""


def _pairs_rows(index: Any) -> bool:
    """Whether an index beside a mask goes with the rows that are selected, one for each, and is of all of them."""
    return isinstance(index, Tensor) and not isinstance(index, SelectedRows) and index.ndim > 0


def _is_mask(index: Any) -> bool:
    is_plain = isinstance(index, Tensor) and not isinstance(index, SelectedRows)
    return is_plain and index.dtype is torch.bool and index.ndim > 0


def _has_tensor(index: slice) -> bool:
    return any(isinstance(one, Tensor) for one in (index.start, index.stop, index.step))


def refuse_selected(outputs: Sequence[Tensor]) -> None:
    """Raise if the model gives selected rows."""
    if any(isinstance(one, SelectedRows) for one in outputs):
        raise UnfollowedError("what the model returns")
