"""Memory of optimizers: the state that they keep per parameter, and the temporaries of their own step.

What is known by name is a table.  Any other `torch.optim.Optimizer` is stepped on small parameters and measured.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopar.cost_model.allocations import AllocationTracker
from autopar.errors import InputError


class Extent(enum.Enum):
    """How many elements a state tensor has, given its parameter."""

    ELEMENTS = "one per element"
    ROWS = "the parameter without its last dim"
    COLUMNS = "the parameter without its last dim but one"
    BLOCKS = "one per block of 256 elements"
    ONE = "one"

    def count(self, shape: Sequence[int]) -> int:
        """Elements for a parameter of `shape`."""
        numel = torch.Size(shape).numel()
        if self is Extent.ELEMENTS:
            return numel
        if self is Extent.BLOCKS:
            return -(-numel // QUANTISATION_BLOCK)
        if self is Extent.ONE:
            return 1
        return numel // max(1, shape[-1] if self is Extent.ROWS else shape[-2])


QUANTISATION_BLOCK = 256
"""Elements that share a scale in the 8-bit states of bitsandbytes and torchao."""

SMALLEST_QUANTISED = 4096
"""Parameters with fewer elements keep their state in float32 there."""


@dataclass(frozen=True)
class Slot:
    """One state tensor of a parameter.

    Attributes:
        extent: how many elements it has.
        itemsize: bytes of one; None: those of the parameter.
    """

    extent: Extent
    itemsize: int | None = None


@dataclass(frozen=True)
class Footprint:
    """What an optimizer takes for a parameter; ratios are relative to the parameter's bytes.

    Attributes:
        slots: its state.
        own: temporaries while the parameter is stepped.
        carried: what of them is still alive while the next parameter is stepped, in loops that leave a variable bound.
        together: temporaries that exist for all parameters at once, as with `foreach=True`.
    """

    slots: tuple[Slot, ...] = ()
    own: float = 0.0
    carried: float = 0.0
    together: float = 0.0


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer.

    Attributes:
        name: how it is called in texts.
        matrix: for parameters with two dims and more.
        vector: for those with fewer.
        small: for those with fewer than `SMALLEST_QUANTISED` elements, if they differ.
    """

    name: str
    matrix: Footprint
    vector: Footprint
    small: Footprint | None = None

    def footprint(self, param: torch.Tensor) -> Footprint:
        """What holds for one parameter."""
        if self.small is not None and param.numel() < SMALLEST_QUANTISED:
            return self.small
        return self.matrix if param.dim() >= 2 else self.vector

    def state_bytes(self, param: torch.Tensor, granularity: int = 1) -> int:
        """State of one parameter, each tensor rounded up to `granularity`."""
        sizes = (
            slot.extent.count(param.shape) * (slot.itemsize or param.element_size())
            for slot in self.footprint(param).slots
        )
        return sum(-(-size // granularity) * granularity for size in sizes)

    def step_bytes(self, params: Sequence[torch.Tensor], numbers: Iterable[float] = itertools.repeat(1)) -> int:
        """The most that the step's temporaries take, given the parameters in the order in which they are stepped, and
        how many such parameters each stands for."""
        together = peak = carried = 0.0
        for param, number in zip(params, numbers, strict=False):
            footprint, num_bytes = self.footprint(param), param.numel() * param.element_size()
            together += footprint.together * num_bytes * number
            peak = max(peak, carried + footprint.own * num_bytes)
            carried = footprint.carried * num_bytes
        return int(peak + together)


BuildOptimizer: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OptimizerLike: TypeAlias = str | torch.optim.Optimizer | BuildOptimizer | OptimizerMemory
"""A name in `OPTIMIZERS`; an instance, whose class and options count; a class or another function that makes an
optimizer of parameters, such as `functools.partial(torch.optim.SGD, momentum=0.9)`; or a record of your own."""


def find_optimizer(spec: OptimizerLike) -> OptimizerMemory:
    """The memory of an optimizer.

    Raises:
        InputError: if a name is not known, or an optimizer cannot be measured.
    """
    if isinstance(spec, OptimizerMemory):
        return spec
    if isinstance(spec, str):
        if spec.lower() not in OPTIMIZERS:
            raise InputError(
                f"unknown optimizer {spec!r}; known: {', '.join(OPTIMIZERS)}; or pass an optimizer or its class"
            )
        return OPTIMIZERS[spec.lower()]
    if isinstance(spec, torch.optim.Optimizer):
        return max((_measure(build) for build in _rebuilders(spec)), key=_state_of_matrix)
    if callable(spec):
        return _measure(spec)
    raise InputError(f"optimizer must be a name, a torch.optim.Optimizer or its class, got {spec!r}")


def _uniform(name: str, *slots: Slot, **ratios: float) -> OptimizerMemory:
    footprint = Footprint(slots, **ratios)
    return OptimizerMemory(name, footprint, footprint)


_MOMENT = Slot(Extent.ELEMENTS)
_COUNT = Slot(Extent.ONE, 4)
_ADAM = (_COUNT, _MOMENT, _MOMENT)
_ADAM_LOOP = Footprint(_ADAM, own=2, carried=1)
_ADAM_8BIT = Footprint(2 * (Slot(Extent.ELEMENTS, 1), Slot(Extent.BLOCKS, 4)))
_ADAM_32BIT = Footprint(2 * (Slot(Extent.ELEMENTS, 4),))

OPTIMIZERS = {
    memory.name: memory
    for memory in (
        _uniform("sgd"),
        _uniform("sgd_momentum", _MOMENT),
        OptimizerMemory("adam", _ADAM_LOOP, _ADAM_LOOP),
        OptimizerMemory("adamw", _ADAM_LOOP, _ADAM_LOOP),
        _uniform("adam_foreach", *_ADAM, together=1),
        _uniform("adamw_foreach", *_ADAM, together=1),
        _uniform("adam_fused", *_ADAM),
        _uniform("adamw_fused", *_ADAM),
        _uniform("adamw_master", *3 * (Slot(Extent.ELEMENTS, 4),)),
        OptimizerMemory(
            "adafactor",
            Footprint((_COUNT, Slot(Extent.ROWS), Slot(Extent.COLUMNS)), own=1, carried=1),
            Footprint((_COUNT, _MOMENT), own=2, carried=1),
        ),
        _uniform("adagrad", _COUNT, _MOMENT, own=1, carried=1),
        _uniform("rmsprop", _COUNT, _MOMENT, own=1, carried=1),
        _uniform("lion", _MOMENT, own=2, carried=1),
        OptimizerMemory("adam_8bit", _ADAM_8BIT, _ADAM_8BIT, _ADAM_32BIT),
        OptimizerMemory("adamw_8bit", _ADAM_8BIT, _ADAM_8BIT, _ADAM_32BIT),
        OptimizerMemory("muon", Footprint((_MOMENT,), own=3), _ADAM_LOOP),
    )
}
"""By name, each with the options that are its default.  Where PyTorch has the optimizer, these are what its step takes
on `DTensor` parameters, one by one unless `foreach` or `fused` says otherwise.

* `adam`: the square root of the second moment and its quotient at once; the quotient stays bound until the next.
* `adafactor`: N. Shazeer, M. Stern, "Adafactor", 2018: a matrix's second moment is kept as sums of rows and columns.
* `lion`: X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023: one moment; the interpolated moment and
  its sign at once.
* `adamw_master`: of 16-bit parameters: a float32 copy and two float32 moments, in one fused kernel, as in
  Megatron-LM and DeepSpeed (the last 12 of ZeRO's 16 bytes a parameter).
* `*_8bit`: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, as in bitsandbytes.
* `muon`: K. Jordan et al., "Muon", 2024.  It steps matrices only, the rest is AdamW's; temporaries are those of a
  square matrix, which has the most.
"""


# Measuring

_VECTOR = (24576,)
_MATRICES = ((128, 192), (160, 160))
"""The first has no two equal extents; the second is square, which costs most where a step multiplies matrices."""


def _measure(build: BuildOptimizer) -> OptimizerMemory:
    """Step an optimizer on small parameters and read off what it takes."""
    name = getattr(build, "__name__", str(build))
    try:
        matrix = _footprint(build, _MATRICES)
        try:
            vector = _footprint(build, (_VECTOR,))
        except ValueError:  # how Muon says that it takes matrices only: another optimizer must step the rest
            vector = OPTIMIZERS["adamw"].vector
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise InputError(
            f"cannot measure the memory of optimizer {name}, which fails on a small parameter "
            f"({type(error).__name__}: {error}): pass an instance with its options, or the name of one like it: "
            f"{', '.join(OPTIMIZERS)}"
        ) from error
    return OptimizerMemory(name, matrix, vector)


def _footprint(build: BuildOptimizer, shapes: Sequence[tuple[int, ...]]) -> Footprint:
    """State and temporaries for parameters of the same number of dims; the largest ratios of all shapes."""
    narrow, wide = (_step(build, shapes[0], 1, dtype)[1] for dtype in (torch.float32, torch.float64))
    slots = tuple(
        Slot(_extent(key, tensor, shapes[0]), tensor.element_size() if _keeps_dtype(tensor, wide[key]) else None)
        for key, tensor in narrow.items()
    )
    ratios = []
    for shape in shapes:
        one, two, three = (_step(build, shape, num, torch.float32)[0] for num in (1, 2, 3))
        together = three - two
        num_bytes = 4 * torch.Size(shape).numel()
        ratios.append([x / num_bytes for x in (one - together, two - one - together, together)])
    own, carried, together_ratio = (max(ratio) for ratio in zip(*ratios, strict=True))
    return Footprint(slots, own, max(0.0, carried), together_ratio)


def _step(
    build: BuildOptimizer, shape: tuple[int, ...], num_params: int, dtype: torch.dtype
) -> tuple[int, dict[str, torch.Tensor]]:
    """Peak bytes of the temporaries of a step that is not the first, and the first parameter's state."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu")) for _ in range(num_params)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = build(params)
    optimizer.step()
    with AllocationTracker() as tracker:
        optimizer.step()
    state = optimizer.state[params[0]]
    return tracker.peak_bytes, {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _keeps_dtype(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether a state tensor has a dtype of its own, rather than the parameter's."""
    return narrow.element_size() == wide.element_size()


def _extent(key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> Extent:
    extents = [Extent.ELEMENTS, Extent.ONE]
    if len(shape) > 1:
        extents += [Extent.ROWS, Extent.COLUMNS]
    for extent in extents:
        if tensor.numel() == extent.count(shape):
            return extent
    raise ValueError(f"state {key!r} of shape {list(tensor.shape)} for a parameter {list(shape)} follows no known rule")


def _rebuilders(optimizer: torch.optim.Optimizer) -> list[BuildOptimizer]:
    """Functions that make an optimizer of the same class, with the options of each of its parameter groups."""
    made: dict[str, BuildOptimizer] = {}
    accepted = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        options = {k: v for k, v in {**optimizer.defaults, **group}.items() if k in accepted and k != "params"}
        made.setdefault(repr(options), _Rebuild(type(optimizer), options))
    return list(made.values())


@dataclass(frozen=True)
class _Rebuild:
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]

    @property
    def __name__(self) -> str:
        return self.kind.__name__

    def __call__(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return self.kind(params, **self.options)


def _state_of_matrix(memory: OptimizerMemory) -> int:
    return memory.state_bytes(torch.empty(_MATRICES[0], device="meta"))
