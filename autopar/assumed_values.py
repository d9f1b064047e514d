"""Run code that reads values of tensors on fake tensors, which have none, by assuming what is read.

Under an `Assumption` a condition holds or not, a number is so large, and a selection takes all elements, one or none.
What the code gives under several of them shows what does not depend on values: shapes, dtypes, and what is no tensor.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from autopar._compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    has_effects,
    real_tensors,
    storage_id,
    tree_leaves,
)
from autopar.captured import ASSERTIONS
from autopar.exclusive_masks import ExclusiveMasks

aten = torch.ops.aten
MAX_READS = 300
"""A line that reads more values is taken for that of a loop which an assumption never ends."""


MAX_OPS = 20_000
"""So many ops are called before a run is given up."""


class EndlessError(Exception):
    """Code goes on for as long as what is assumed holds."""


class AssumptionError(Exception):
    """Code does, while values are assumed, what it may not; or an assumption cannot be made for an op."""


class RandomError(AssumptionError):
    """Code draws random numbers: its op's name."""


class HiddenTensorError(AssumptionError):
    """Code reads a tensor that it was not given."""


class WriteError(AssumptionError):
    """Code changes a tensor that it was given: its place among these."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _reading_line() -> object:
    """The line of code that is running, outside of PyTorch and of this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame and (frame.f_code, frame.f_lineno)


_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Assumption:
    """What is read: whether conditions hold, a number, and how many of `n` elements a selection takes.

    With `shared`, masks that are known to exclude each other select an even share of their elements each; with `late`,
    the first number is 0 and the first condition is another than all that follow, as that of a loop that ends.
    """

    truth: bool
    number: int
    rows: Callable[[int], int]
    shared: bool = False
    late: bool = False


def _all(n: int) -> int:
    return n


def _none(n: int) -> int:
    return 0


def _one(n: int) -> int:
    return min(n, 1)


ASSUMPTIONS = (
    Assumption(True, 1, _all), Assumption(False, 1, _all), Assumption(False, 0, _none), Assumption(True, 1, _one),
    Assumption(False, 1, _one),
)  # fmt: skip
"""A condition may guard the work (`if any selected`) or leave it out (`if none: continue`), so both take all rows."""


def even_assumptions(given: Sequence[Tensor]) -> tuple[Assumption, ...]:
    """What is likely where the work on the rows of some tensors is dealt out: all is done, each by one.

    A number is an index, or no smaller than any dim, so that one slice of so many rows has all and the next ones none.
    """
    most = max((size for tensor in given for size in tensor.shape), default=1)
    pairs = itertools.product((1, most), (True, False))
    dealt = [Assumption(truth, number, _all, shared=True) for number, truth in pairs]
    return (*dealt, Assumption(False, most, _all, shared=True, late=True))


class AssumedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, what is read of fake tensors is what `assumption` says.

    Attributes:
        masks: how much masks select.
        answers: what was read, in order.
        num_reads: how often something was read.
        flops: floating-point operations of products, convolutions and attention.
        peak_bytes: the most bytes of tensors that were made here and alive at once.
    """

    def __init__(self, assumption: Assumption, given: Sequence[Tensor], masks: ExclusiveMasks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._assumption, self.masks = assumption, masks
        self._given = {storage_id(tensor): position for position, tensor in enumerate(given)}
        self._made: dict[int, list[int]] = {}  # by storage: its bytes, and how many tensors look at it
        self._alive = 0
        self._reads: Counter[object] = Counter()
        self.answers: list[object] = []
        self.num_reads = self.flops = self.peak_bytes = self._num_ops = self._num_numbers = self._num_conditions = 0

    @contextmanager
    def active(self) -> Iterator[AssumedValues]:
        """This, and arrays of numpy too."""
        with _Functions(self), self:
            yield self

    def read(self, dtype: torch.dtype) -> Any:
        """A value of a tensor of a dtype."""
        self._count()
        if dtype is torch.bool:
            truth = self._assumption.truth != (self._assumption.late and not self._num_conditions)
            self._num_conditions += 1
            self.answers.append(truth)
            return truth
        number = 0 if self._assumption.late and not self._num_numbers else self._assumption.number
        self._num_numbers += 1
        self.answers.append(float(number))
        if dtype.is_complex:
            return complex(number)
        return float(number) if dtype.is_floating_point else number

    def array(self, tensor: Tensor) -> Any:
        """An array of numpy like a tensor, with its values."""
        first, rest = self.read(tensor.dtype), self.read(tensor.dtype)
        with real_tensors():
            made = torch.full(tensor.shape, rest, dtype=tensor.dtype)
            made.view(-1)[:1] = first
            return made.numpy()

    def _count(self) -> None:
        self.num_reads += 1
        place = _reading_line()
        self._reads[place] += 1
        if self._reads[place] > MAX_READS:
            raise EndlessError(f"it reads values more than {MAX_READS} times in one line")

    def rows(self, n: int, mask: Tensor | None = None) -> int:
        """How many of `n` elements are selected, by a mask if there is one."""
        self._count()
        selected = self._assumption.rows(n)
        self.answers.append(("rows", selected))
        return math.ceil(selected * self.masks.of(mask)) if self._assumption.shared and mask is not None else selected

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._num_ops += 1
        if self._num_ops > MAX_OPS:
            raise EndlessError(f"it calls more than {MAX_OPS} ops")
        self._check(func, args, kwargs)
        instead = _INSTEAD.get(func)
        result = func(*args, **kwargs) if instead is None else instead(self, func, *args, **kwargs)
        if (formula := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        self._follow(tree_leaves(result))
        self.masks.follow(func, args, result)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(func, OpOverload) or func.namespace in ("profiler", "prim") or func in ASSERTIONS:
            return
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs):
            raise RandomError(str(func))
        if has_effects(func):
            raise AssumptionError(f"it calls {func}, which acts by something else than its result")
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, torch.Tensor):
                continue
            hidden = not self._is_seen(storage_id(tensor)) if isinstance(tensor, FakeTensor) else tensor.requires_grad
            if hidden:
                raise HiddenTensorError(
                    "it reads a tensor that is neither an argument nor a parameter or buffer of its own"
                )
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self._check_written(tree_leaves(value))
        if func._schema.name in _BATCH_NORMS and args[3] is not None and args[5]:  # whose schemas do not say so
            self._check_written([args[3]])

    def _is_seen(self, storage: int) -> bool:
        return storage in self._given or storage in self._made

    def _check_written(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and storage_id(value) in self._given:
                raise WriteError(self._given[storage_id(value)])

    def _follow(self, results: Iterable[Any]) -> None:
        """Count a result's memory until nothing looks at it any more."""
        for tensor in results:
            if not isinstance(tensor, FakeTensor) or (key := storage_id(tensor)) in self._given:
                continue
            entry = self._made.get(key)
            if entry is None:
                entry = self._made[key] = [tensor.untyped_storage().nbytes(), 0]
                self._alive += entry[0]
                self.peak_bytes = max(self.peak_bytes, self._alive)
            entry[1] += 1
            weakref.finalize(tensor, self._forget, key, entry)

    def _forget(self, key: int, entry: list[int]) -> None:
        entry[1] -= 1
        if entry[1] == 0 and self._made.get(key) is entry:
            del self._made[key]
            self.masks.forget(key)
            self._alive -= entry[0]


_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


def _draws_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of attention, which is tagged random for its dropout, has none."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            default = argument.default_value if argument.has_default_value() else None
            given = args[position] if position < len(args) else kwargs.get(argument.name, default)
            return bool(given == 0)
    return False


class _Functions(TorchFunctionMode):
    """Gives assumed values where an array of numpy is asked for, which fake tensors have none of; sees one-hot
    encodings."""

    def __init__(self, values: AssumedValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and isinstance(args[0], FakeTensor):
            return self._values.array(args[0])
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.one_hot:
            self._values.masks.mark(result, 1 / max(1, result.shape[-1]))
        return result


# ---- ops whose results depend on values ----


def _scalar(values: AssumedValues, func: Any, tensor: Tensor) -> Any:
    constant = getattr(tensor, "constant", None)  # a fake tensor made of a number knows it
    return values.read(tensor.dtype) if constant is None else func(tensor)


def _equal(values: AssumedValues, func: Any, *tensors: Tensor) -> Any:
    return values.read(torch.bool)


def _nonzero(values: AssumedValues, func: Any, tensor: Tensor) -> Tensor:
    return tensor.new_empty((values.rows(tensor.numel(), tensor), tensor.dim()), dtype=torch.int64)


def _masked_select(values: AssumedValues, func: Any, tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty((values.rows(torch.logical_and(tensor, mask).numel(), mask),))


def _index(values: AssumedValues, func: Any, tensor: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> Any:
    """By numbers, also where a mask says which."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += _nonzero(values, func, index).unbind(1)
        else:
            found.append(index)
    return func(tensor, found, *rest)


def _unique(values: AssumedValues, func: Any, tensor: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
    """Of all elements, or of the entries of a dim."""
    if func in (aten.unique_dim.default, aten.unique_dim_consecutive.default):
        dim, size = rest[0], tensor.shape[rest[0]]
        rows = max(min(size, 1), values.rows(size))
        shape = [rows if d == dim % tensor.dim() else n for d, n in enumerate(tensor.shape)]
        return tensor.new_empty(shape), *(tensor.new_empty((n,), dtype=torch.int64) for n in (size, rows))
    rows = max(min(tensor.numel(), 1), values.rows(tensor.numel()))
    inverse, counts = tensor.new_empty(tensor.shape, dtype=torch.int64), tensor.new_empty((rows,), dtype=torch.int64)
    return tensor.new_empty((rows,)), inverse, counts


def _repeat(values: AssumedValues, func: Any, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    size = values.rows(repeats.numel()) if output_size is None else output_size
    return repeats.new_empty((size,), dtype=torch.int64)


def _bincount(
    values: AssumedValues, func: Any, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """As many bins as are asked for at least, which whoever asks knows to be enough."""
    size = minlength or int(values.read(torch.int64)) + 1
    if weights is None:
        return tensor.new_empty((size,), dtype=torch.int64)
    return weights.new_empty((size,), dtype=weights.dtype if weights.is_floating_point() else torch.float64)


def _split(values: AssumedValues, func: Any, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """In sizes that add up, as those do that are counted."""
    left, fitting = tensor.shape[dim], []
    for size in sizes:
        fitting.append(min(int(size), left))
        left -= fitting[-1]
    if sizes and values.num_reads:
        fitting[-1] += left
    return func(tensor, fitting if values.num_reads else sizes, dim)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.index_put.default: _index,
    aten.index_put_.default: _index,
    aten._index_put_impl_.default: _index,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim_consecutive.default: _unique,
    aten.repeat_interleave.Tensor: _repeat,
    aten.bincount.default: _bincount,
    aten.split_with_sizes.default: _split,
}
