"""The rows that a boolean mask selects, as all rows and which of them count.

How many rows a mask selects is known only when the program runs, and no graph of known shapes holds them.  What a model
makes of them mostly treats each row by itself and then sums over them, so that all rows can be computed, and those that
are not selected be left out of the sum.  `SelectedRows` stands for the selected ones while a model is traced.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from autopar._compat import tree_leaves, tree_map_only, wrapper_like

HARMLESS = 1
"""What rows that are not selected are overwritten with before a function reads them: for most functions it is far from
where they, or their derivatives, are infinite or not defined."""


class UnfollowedError(Exception):
    """Something is asked of selected rows that cannot be had from all rows.

    Attributes:
        what: the function that asks it, or how they are used.
    """

    def __init__(self, what: str = "") -> None:
        super().__init__(what)
        self.what = what


class Selection:
    """Which of some rows count.

    Attributes:
        mask: (rows,) booleans.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._made: dict[Any, tuple[Selection, Any]] = {}

    @functools.cached_property
    def count(self) -> Tensor:
        """How many rows count, () integers."""
        return self.mask.sum()

    def over(self, ndim: int) -> Tensor:
        """The mask, to be broadcast along the later of `ndim` dims."""
        return self.mask.view(-1, *[1] * (ndim - 1))

    def repeated(self, times: int) -> Selection:
        """Each row so many times, one after another."""
        if times == 1:
            return self
        return self._once(times, lambda: self.over(2).expand(-1, times).reshape(-1))

    def narrowed(self, mask: SelectedRows) -> Selection:
        """Of these rows those where `mask`, as many booleans, holds."""
        return self._once(id(mask.rows), lambda: self.mask & mask.rows.reshape(-1), mask.rows)

    def _once(self, key: Any, make: Callable[[], Tensor], kept: Any = None) -> Selection:
        if key not in self._made:
            self._made[key] = Selection(make()), kept  # what is kept has an id that nothing else gets
        return self._made[key][0]


class SelectedRows(Tensor):
    """Selected rows: a tensor of which every row is there, and only those that count have a meaning.

    Attributes:
        rows: all rows, along dim 0.
        selection: those that count.
        filler: the number that all others hold; None if they hold anything.
        is_aliased: others may have their memory, so that they do not change in place.
    """

    rows: Tensor
    selection: Selection
    filler: int | None
    is_aliased: bool

    @staticmethod
    def __new__(cls, rows: Tensor, selection: Selection, filler: int | None = None) -> SelectedRows:
        """Wraps rows; PyTorch's own code never sees more of them than a dtype and a device."""
        made: SelectedRows = wrapper_like(cls, rows)
        made.rows, made.selection, made.filler, made.is_aliased = rows, selection, filler, False
        return made

    def filled(self, value: int = HARMLESS) -> Tensor:
        """All rows, with `value` where they do not count.  No gradient passes there."""
        if self.filler == value:
            return self.rows
        number = bool(value) if self.rows.dtype is torch.bool else value
        return torch.where(self.selection.over(self.rows.ndim), self.rows, number)

    def like(self, rows: Tensor, selection: Selection | None = None) -> SelectedRows:
        """The same values in another shape or dtype."""
        made = SelectedRows(rows, selection or self.selection, self.filler)
        made.is_aliased = self.is_aliased = True
        return made

    def view(self, *size: Any, **named: Any) -> Any:
        """As a tensor's: sizes may be unknown ones, which PyTorch's own method would not hand on."""
        return follow(Tensor.view, (self, *size), named)

    def __iter__(self) -> Iterator[Tensor]:
        """Rows one by one are not known."""
        raise UnfollowedError("torch.Tensor.__iter__")

    def reshape(self, *size: Any, **named: Any) -> Any:
        """As `view`."""
        return follow(Tensor.reshape, (self, *size), named)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function of PyTorch's makes of selected rows."""
        return follow(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An op that is not called by a function of PyTorch's."""
        raise UnfollowedError(str(func))


@dataclass
class RowCall:
    """A call of a function of PyTorch's with selected rows.

    Attributes:
        func, args, kwargs: the call.
        name: the function's own name, `linalg.norm` or `add`.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All that the call reads."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    @functools.cached_property
    def selected(self) -> list[SelectedRows]:
        """Those of them that are selected rows."""
        return [one for one in self.tensors if isinstance(one, SelectedRows)]

    @functools.cached_property
    def selection(self) -> Selection:
        """What selects all of them."""
        return only_selection(self.selected)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its position and name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def run(self, convert: Callable[[Tensor], Any], **instead: Any) -> Any:
        """Call the function with what `convert` makes of each tensor, and with other arguments by name."""
        args, kwargs = tree_map_only(Tensor, convert, (self.args, dict(self.kwargs)))
        return self.func(*args, **{**kwargs, **instead})

    def each_row(self, convert: Callable[[Tensor], Any], shares: bool = False) -> Any:
        """What the function, which treats each row by itself, makes of rows.

        Args:
            convert: what it reads for each tensor.
            shares: it may give what it was given.
        """
        selection = self.selection

        def selected(rows: Tensor) -> SelectedRows:
            if rows.ndim == 0 or len(rows) != len(selection.mask):
                raise UnfollowedError
            made = SelectedRows(rows, selection)
            made.is_aliased = shares
            return made

        if shares:
            for one in self.selected:
                one.is_aliased = True
        return tree_map_only(Tensor, selected, self.run(convert))


def only_selection(selected: Iterable[SelectedRows]) -> Selection:
    """What selects all of these rows.

    Raises:
        UnfollowedError: if that is not one and the same.
    """
    found = {id(one.selection): one.selection for one in selected}
    if len(found) != 1:
        raise UnfollowedError("rows that different masks select")
    return next(iter(found.values()))


def joined_selection(parts: Sequence[Selection | int], device: torch.device) -> Selection:
    """What selects rows one after another, which are selected by each of `parts`, or are so many and all count."""
    first = next(one for one in parts if isinstance(one, Selection))

    def mask() -> Tensor:
        whole = [one.mask if isinstance(one, Selection) else torch.full((one,), True, device=device) for one in parts]
        return torch.cat(whole)

    key = tuple(id(one) if isinstance(one, Selection) else f"{one} rows" for one in parts)
    return first._once(key, mask, parts)


Follower = Callable[[RowCall], Any]
_Function = TypeVar("_Function", bound=Follower)
FOLLOWERS: dict[str, Follower] = {}
"""What functions make of selected rows, by their names."""
BY_KIND: list[Callable[[str], Follower | None]] = []
"""The same for functions of a kind."""


def follows(*names: str) -> Callable[[_Function], _Function]:
    """Says what the functions of these names make of selected rows."""

    def register(function: _Function) -> _Function:
        FOLLOWERS.update(dict.fromkeys(names, function))
        return function

    return register


def follow(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function makes of selected rows.

    Raises:
        UnfollowedError: if it asks for more than is known of them.
    """
    full_name = resolve_name(func) or getattr(func, "__name__", repr(func))
    name, full_name = short_name(full_name), full_name.removesuffix(".__get__")
    follower = FOLLOWERS.get(name) or next((found for kind in BY_KIND if (found := kind(name))), None)
    if follower is None or kwargs.get("out") is not None or in_custom_function():
        raise UnfollowedError(full_name)
    kwargs = {_ALIASES.get(key, key): value for key, value in kwargs.items()}
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    try:
        return follower(RowCall(func, args, kwargs, name))
    except UnfollowedError as error:
        what = f"{full_name} of {error.what}" if error.what and error.what != full_name else full_name
        raise UnfollowedError(what) from None


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""Numpy's names of arguments, and those that PyTorch's functions know them by."""
_NAMESPACES = ("torch.nn.functional.", "torch.Tensor.", "torch.")
_OPERATORS = {
    "add", "and", "eq", "floordiv", "ge", "gt", "le", "lt", "matmul", "mod", "mul", "ne", "or", "pow", "sub", "truediv",
    "xor",
}  # fmt: skip
_RENAMED = {"floordiv": "floor_divide", "truediv": "div", "mod": "remainder"}


@functools.cache
def short_name(full_name: str) -> str:
    """The name of a function without what it is in; an operator's is that of the function that does the same."""
    space = next((space for space in _NAMESPACES if full_name.startswith(space)), None)
    if space is None:
        return full_name
    name = full_name.removeprefix(space)
    operator = name.strip("_") if name.startswith("__") else ""
    operator = operator if operator in _OPERATORS else operator.removeprefix("r")
    if operator not in _OPERATORS or name == "__rmatmul__":
        return name
    return _RENAMED.get(operator, f"bitwise_{operator}" if operator in ("and", "or", "xor") else operator)


def in_custom_function() -> bool:
    """Whether it is the forward of a `torch.autograd.Function` that runs: its gradients are its own."""
    forwards = {getattr(one.forward, "__code__", None) for one in _below(torch.autograd.Function)}
    return any(frame.f_code in forwards for frame in _callers())


def _below(base: type[Any]) -> Iterator[Any]:
    """A class's subclasses, and theirs."""
    for one in base.__subclasses__():
        yield one
        yield from _below(one)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def num_dims(tensor: Tensor) -> int:
    """How many dims a tensor has, that of the rows included."""
    return tensor.rows.ndim if isinstance(tensor, SelectedRows) else tensor.ndim


def per_row(rows: Tensor) -> int:
    """How many elements each row has."""
    return math.prod(rows.shape[1:])
