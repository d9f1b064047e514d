"""The sizes of selected rows: how many there are is a tensor, which stands where a number would."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.selected_rows import RowCall, Selection, UnfollowedError, follows, per_row


class UnknownSize:
    """How many rows are selected, times a number, where a program asks for a size.

    Tensors can be divided by it and multiplied with it.  Whatever needs a number raises an `UnfollowedError`, and
    PyTorch's own code takes it for none.
    """

    def __init__(self, selection: Selection, times: int = 1) -> None:
        self.selection, self.times = selection, times

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and other > 0:
            return UnknownSize(self.selection, self.times * other)
        return self._applied(operator.mul, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._applied(operator.truediv, other)

    def _applied(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """What a tensor becomes with it, in that tensor's dtype.  Of two numbers, a tensor would not be as precise."""
        if not isinstance(other, Tensor):
            _read()
        wide = other.float() if other.dtype in (torch.float16, torch.bfloat16) else other
        made = function(wide, self.selection.count * self.times)
        return made if wide is other else made.to(other.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnknownSize) or other.selection is not self.selection:
            _read()
        return bool(self.times == other.times)  # type: ignore[attr-defined]

    __rmul__ = __mul__


def _read(*_: Any) -> Any:
    raise UnfollowedError("the number of selected rows")


for _name in (
    "add", "bool", "float", "floordiv", "format", "ge", "gt", "hash", "index", "int", "le", "lt", "mod", "pow", "radd",
    "repr", "rfloordiv", "rmod", "round", "rpow", "rsub", "str", "sub", "truediv", "trunc",
):  # fmt: skip
    setattr(UnknownSize, f"__{_name}__", _read)


def is_unfollowed(error: BaseException | None) -> bool:
    """Whether an exception was raised because selected rows cannot be followed."""
    return isinstance(error, UnfollowedError) or (isinstance(error, TypeError) and UnknownSize.__name__ in str(error))


class _Shape(tuple[Any, ...]):
    """The sizes of selected rows."""

    __slots__ = ()

    def numel(self) -> Any:
        """How many elements are selected."""
        size = self[0]
        for other in self[1:]:
            size = size * other
        return size


@follows("shape.__get__", "size")
def _shape(call: RowCall) -> Any:
    rows, dim = call.args[0], call.argument(1, "dim")
    shape = _Shape((UnknownSize(rows.selection), *rows.rows.shape[1:]))
    return shape if dim is None else shape[dim]


@follows("numel", "nelement")
def _numel(call: RowCall) -> Any:
    rows = call.args[0]
    return UnknownSize(rows.selection, per_row(rows.rows))
