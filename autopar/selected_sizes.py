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

    Tensors can be divided by it and multiplied with it.  Whatever else is done with it reads the number, as `.item()`
    does; PyTorch's own code takes it for none.
    """

    def __init__(self, selection: Selection, times: int = 1) -> None:
        self.selection, self.times = selection, times

    @property
    def count(self) -> Tensor:
        """The number, () integers."""
        return self.selection.count * self.times

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and other > 0:
            return UnknownSize(self.selection, self.times * other)
        return self._applied(operator.mul, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._applied(operator.truediv, other)

    def _applied(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """What a tensor becomes with it, in that tensor's dtype.  Of two numbers, a tensor would not be as precise."""
        if not isinstance(other, Tensor):
            return function(number(other), number(self))
        wide = other.float() if other.dtype in (torch.float16, torch.bfloat16) else other
        made = function(wide, self.count)
        return made if wide is other else made.to(other.dtype)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, UnknownSize) and (other.selection, other.times) == (self.selection, self.times):
            return True
        return number(self) == number(other)

    __rmul__ = __mul__


def number(size: Any) -> Any:
    """An unknown size as the number that `.item()` gives; anything else as it is."""
    return size.count.item() if isinstance(size, UnknownSize) else size


def _reading(function: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Any]:
    def method(*operands: Any) -> Any:
        given = [number(one) for one in operands]
        return function(*reversed(given) if is_reflected else given)

    return method


for _name in ("add", "floordiv", "ge", "gt", "le", "lt", "mod", "ne", "pow", "sub", "truediv"):
    setattr(UnknownSize, f"__{_name}__", _reading(getattr(operator, _name)))
for _name in ("add", "floordiv", "mod", "pow", "sub"):
    setattr(UnknownSize, f"__r{_name}__", _reading(getattr(operator, _name), is_reflected=True))
for _name, _conversion in (("bool", bool), ("float", float), ("index", operator.index), ("int", int)):
    setattr(UnknownSize, f"__{_name}__", _reading(_conversion))


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


@follows("__len__")
def _len(call: RowCall) -> Any:
    return UnknownSize(call.args[0].selection)


@follows("numel", "nelement")
def _numel(call: RowCall) -> Any:
    rows = call.args[0]
    return UnknownSize(rows.selection, per_row(rows.rows))
