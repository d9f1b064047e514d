"""Tensors that are the same memory by several names, and what becomes of the others when one is written to.

What writes in place is written in a graph as an op that gives a new tensor.  If that was a view, its new values go back
into what it is a view of, and all other names of the memory are views to be made anew when they are read.  So does
PyTorch's functionalization (`torch.func.functionalize`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._compat import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """A call that gives a view, `op(source, *args)`."""

    source: Tensor
    op: OpOverload
    args: tuple[Any, ...]

    def put_back(self, value: Any) -> tuple[OpOverload, tuple[Any, ...]] | None:
        """The call that gives `source` where the view has become `value`, of which the first two arguments may be
        `source` and `value`; None if that is `value` itself."""
        return _INVERSES[self.op](self, value)


class Views:
    """Which tensors are views of which, by their ids."""

    def __init__(self) -> None:
        self._made: dict[int, View] = {}
        self._names: dict[int, set[int]] = {}  # by each tensor, all that may be the same memory
        self._opaque: set[int] = set()  # views that are not known to be made by one invertible call

    def note(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]) -> None:
        """An op was called that gives views."""
        given = [one for one in (*args, *results) if isinstance(one, Tensor)]
        names = {id(t) for t in given}.union(*(self._names.get(id(t), ()) for t in given))
        self._names.update(dict.fromkeys(names, names))
        if op in _INVERSES and not kwargs and len(given) == 2:
            self._made[id(results[0])] = View(args[0], op, args[1:])
        else:
            self._opaque |= {id(t) for t in results if isinstance(t, Tensor)}

    def names(self, tensor: Tensor) -> set[int]:
        """All that may be the same memory as this, itself among them."""
        return self._names.get(id(tensor), {id(tensor)})

    def made(self, tensor: Tensor) -> View | None:
        """The call that made this, if it is a view that is made by one invertible call."""
        return self._made.get(id(tensor))

    def upwards(self, tensor: Tensor) -> list[View] | None:
        """The calls that made this, from its own to that on the tensor which is no view; None if that is not known."""
        found = []
        while (view := self.made(tensor)) is not None:
            found.append(view)
            tensor = view.source
        return None if id(tensor) in self._opaque else found


@functools.cache
def gives_views(op: OpOverload) -> bool:
    """Whether what an op gives may share memory with what it reads."""
    return any(one.alias_info is not None for one in op._schema.returns)


def _same(view: View, value: Any) -> None:
    return None


def _reshaped(view: View, value: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.view.default, (value, list(view.source.shape))


def _permuted(view: View, value: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    (order,) = view.args
    ndim = view.source.dim()
    return aten.permute.default, (value, sorted(range(ndim), key=lambda i: order[i] % ndim))


_Inverse = Callable[[View, Any], tuple[OpOverload, tuple[Any, ...]] | None]

_INVERSES: dict[OpOverload, _Inverse] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
    aten.permute.default: _permuted,
    aten.select.int: lambda view, value: (aten.select_scatter.default, (view.source, value, *view.args)),
    aten.slice.Tensor: lambda view, value: (aten.slice_scatter.default, (view.source, value, *view.args)),
    aten.t.default: lambda _, value: (aten.t.default, (value,)),
    aten.transpose.int: lambda view, value: (aten.transpose.int, (value, *view.args)),
    aten.unsqueeze.default: lambda view, value: (aten.squeeze.dim, (value, *view.args)),
    aten.view.default: _reshaped,
}
"""How views are put back, by what makes them."""
