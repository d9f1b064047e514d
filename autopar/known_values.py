"""Values that follow from constants alone, which a model may read while it is traced.

A fake tensor has no values, so that a model that compares its mask with a causal one, or asks for the largest of some
positions, cannot be traced; but a mask made of shapes alone has the same values whatever the batch holds.  Such tensors
are computed beside the fake ones.  What depends on an input, a parameter or a random number stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar._compat import is_only_acting, lists_by_items, real_tensors, tree_map
from autopar.captured import ASSERTIONS
from autopar.corrections import FUNCTIONS

MAX_ELEMENTS = 2**20
"""Larger tensors stay unknown, so that tracing computes next to nothing."""

_FACTORIES = {
    torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.tril_indices,
    torch.triu_indices, torch.zeros,
}  # fmt: skip
_LIKE = {
    torch.full_like, torch.ones_like, torch.zeros_like, torch.Tensor.new_full, torch.Tensor.new_ones,
    torch.Tensor.new_zeros,
}  # fmt: skip
_READS = {
    torch.Tensor.__bool__, torch.Tensor.__contains__, torch.Tensor.__float__, torch.Tensor.__format__,
    torch.Tensor.__index__, torch.Tensor.__int__, torch.Tensor.allclose, torch.Tensor.equal, torch.Tensor.is_nonzero,
    torch.Tensor.item, torch.Tensor.tolist, torch.allclose, torch.equal, torch.is_nonzero,
}  # fmt: skip
_OTHER_READS = {
    torch.Tensor.__array__, torch.Tensor.__complex__, torch.Tensor.__iter__, torch.Tensor.__repr__, torch.Tensor.numpy,
}  # fmt: skip


class ActingError(Exception):
    """A model calls an op, named here, that acts by something else than its result.  AOTAutograd may leave it out."""


class KnownValues(TorchFunctionMode):
    """While it is active, reading a tensor that follows from constants alone gives its value, and an op that neither
    gives nor changes anything is an `ActingError`."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()

    def __enter__(self) -> KnownValues:
        self._lists = lists_by_items()
        self._lists.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._lists.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and all(t in self._values for t in _tensors((args, kwargs))):
            with real_tensors():
                positional, named = tree_map(self._value_or_like, (args, dict(kwargs)))
                return func(*positional, **named)
        if func is torch.Tensor.__iter__ and args[0] in self._values and args[0].dim():
            return iter(self.__torch_function__(torch.Tensor.unbind, types, (args[0], 0)))
        result = FUNCTIONS.get(func, func)(*args, **kwargs)
        if result is None and is_only_acting(func, ASSERTIONS):
            raise ActingError(str(func))
        made = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        if any(t.is_meta for t in made):  # PyTorch's own, which works shapes out
            return result
        if made or _changes(func, kwargs):
            self._follow(func, args, kwargs, result, made)
        return result

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, made: list[torch.Tensor]
    ) -> None:
        # Nearly every call reads something that is not known, mostly its first argument.
        is_unknown = args and isinstance(args[0], torch.Tensor) and args[0] not in self._values
        if is_unknown and func not in _LIKE and not _changes(func, kwargs):
            return
        given = list(_tensors((args, kwargs)))
        is_known = all(t in self._values for t in given) if given else func in _FACTORIES
        is_known = is_known or func in _LIKE
        if is_known and all(t.numel() <= MAX_ELEMENTS for t in made):
            values = list(_tensors(self._compute(func, args, kwargs)))
            if [v.shape for v in values] == [t.shape for t in made]:
                self._values.update(zip(made, values, strict=True))
                return
        if _changes(func, kwargs):
            self._forget([*given, *made])

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives on real tensors; None if it draws random numbers."""
        with real_tensors(), torch.no_grad():
            positional, named = tree_map(self._value_or_like, (args, dict(kwargs)))
            if "device" in named:
                named["device"] = "cpu"
            state = torch.get_rng_state()
            try:
                result = func(*positional, **named)
            except RuntimeError:  # values on two devices, or an op that this one lacks: they stay unknown
                return None
            if torch.equal(state, torch.get_rng_state()):
                return result
            torch.set_rng_state(state)
        return None

    def _value_or_like(self, value: Any) -> Any:
        """The value of a known tensor; of another, whose shape and dtype alone are asked for, something like it."""
        if not isinstance(value, torch.Tensor) or value in self._values:
            return self._values[value] if isinstance(value, torch.Tensor) else value
        return torch.empty(value.shape, dtype=value.dtype)

    def _forget(self, changed: Iterable[torch.Tensor]) -> None:
        """Something unknown was written into these: they are unknown, and so is all that shares their memory."""
        written = {self._values[t].untyped_storage().data_ptr() for t in changed if t in self._values}
        for tensor in [t for t, v in self._values.items() if v.untyped_storage().data_ptr() in written]:
            del self._values[tensor]


def reads_values(func: Any) -> bool:
    """Whether a function is one by which Python code looks at a tensor's values."""
    return func in _READS or func in _OTHER_READS


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes into its first argument, or into `out`."""
    return _writes(getattr(func, "__name__", "")) or ("out" in kwargs and kwargs["out"] is not None)


@cache
def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITES


_OPERATORS = ["add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"]
_WRITES = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    # Every call of the model passes here, and most arguments are a tensor or a number: a pytree takes longer.
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
