"""Random ops as functions of uniform numbers.

What each draws has the distribution that PyTorch documents for it; the uniform numbers are `autopar.randomness`'s.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.rules import Call, is_tensor_node
from autopar.writer import Writer

aten = torch.ops.aten

BITS = 24
"""Random bits of a uniform number."""


class Draw(Writer):
    """Writes the replacement of one random op."""

    def __init__(self, node: fx.Node, seed: fx.Node) -> None:
        super().__init__(node)
        self.seed = seed
        first = node.meta["val"]
        self.like: torch.Tensor = first[0] if isinstance(first, (tuple, list)) else first

    def uniform(self, shape: Sequence[int] | None = None) -> fx.Node:
        """Fresh float32 numbers in [0, 1), of the shape of the op's first output if none is given."""
        shape = list(self.like.shape if shape is None else shape)
        args: tuple[Any, ...] = (shape, [], self.seed, 0, self.like.device)
        with self.like.fake_mode:  # type: ignore[attr-defined]
            drawn = torch.empty(shape, dtype=torch.float32, device=self.like.device)
        return self.place(torch.ops.autopar.uniform.default, args, {}, drawn)

    def finer(self) -> fx.Node:
        """Fresh float64 numbers in [0, 1) of twice as many bits."""
        fine, coarse = (self.cast(self.uniform(), torch.float64) for _ in range(2))
        return self(aten.add.Tensor, coarse, self(aten.mul.Scalar, fine, 2.0**-BITS))

    def exponential(self, shape: Sequence[int] | None = None) -> fx.Node:
        """Fresh float32 numbers of the exponential distribution with mean 1, never 0: their logarithm is asked for."""
        logarithm = self(aten.log.default, self(aten.rsub.Scalar, self.uniform(shape), 1))
        return self(aten.clamp_min.default, self(aten.neg.default, logarithm), 2.0 ** -(BITS + 1))

    def normal(self) -> fx.Node:
        """Fresh float32 numbers of the standard normal distribution: Box and Muller's transform; 1 - u is never 0."""
        radius = self(aten.log.default, self(aten.rsub.Scalar, self.uniform(), 1))
        radius = self(aten.sqrt.default, self(aten.mul.Scalar, radius, -2.0))
        angle = self(aten.cos.default, self(aten.mul.Scalar, self.uniform(), 2 * math.pi))
        return self(aten.mul.Tensor, radius, angle)

    def item(self, results: fx.Node, index: int) -> fx.Node:
        """One of the results of a call that gives several."""
        return self.place(operator.getitem, (results, index), {}, results.meta["val"][index])

    def scaled(self, value: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """`value * scale + shift`, in the dtype of the op's result; either may be a tensor or a number."""
        value = self.cast(value)
        value = self(aten.mul.Tensor if is_tensor_node(scale) else aten.mul.Scalar, value, scale)
        return self(aten.add.Tensor if is_tensor_node(shift) else aten.add.Scalar, value, shift)

    def cast(self, value: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """To a dtype, that of the op's result if none is given."""
        dtype = dtype or self.like.dtype
        return value if value.meta["val"].dtype == dtype else self(aten._to_copy.default, value, dtype=dtype)


def _dropout(call: Call, draw: Draw) -> tuple[fx.Node, ...]:
    p = float(call["p"])
    value = call["input"]
    if call["train"] is False or p == 0:
        ones = draw(aten.ones_like.default, value, dtype=torch.bool)
        return value, ones
    mask = draw(aten.ge.Scalar, draw.uniform(), p)
    kept = draw(aten.mul.Tensor, value, mask)
    return draw(aten.mul.Scalar, kept, 0.0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(call: Call, draw: Draw) -> fx.Node:
    p = call.args.get("p", call["self"])
    return draw.cast(draw(aten.lt.Tensor if is_tensor_node(p) else aten.lt.Scalar, draw.uniform(), p))


def _rand(call: Call, draw: Draw) -> fx.Node:
    return draw.cast(draw.uniform())


def _uniform(call: Call, draw: Draw) -> fx.Node:
    return draw.scaled(draw.uniform(), call["to"] - call["from"], call["from"])


def _randn(call: Call, draw: Draw) -> fx.Node:
    return draw.cast(draw.normal())


def _normal(call: Call, draw: Draw) -> fx.Node:
    return draw.scaled(draw.normal(), call["std"], call["mean"])


def _exponential(call: Call, draw: Draw) -> fx.Node:
    return draw.scaled(draw.exponential(), 1 / call["lambd"], 0)


def _randint(call: Call, draw: Draw) -> fx.Node:
    low = call.args.get("low", 0)
    number = draw(aten.floor.default, draw(aten.mul.Scalar, draw.finer(), call["high"] - low))
    return draw.cast(draw(aten.add.Scalar, number, low))


def _randperm(call: Call, draw: Draw) -> fx.Node:
    """The order of uniform numbers."""
    return draw.cast(draw.item(draw(aten.sort.stable, draw.finer(), stable=True), 1))


def _multinomial(call: Call, draw: Draw) -> fx.Node:
    """With replacement where the running sum of the weights passes a uniform share of all.  Without, the first of a
    race in which each takes an exponential time divided by its weight (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006)."""
    weights, num_samples = call["self"], call["num_samples"]
    shape = weights.meta["val"].shape
    if num_samples > 1 and call["replacement"]:
        sums = draw(aten.cumsum.default, weights, -1)
        total = draw(aten.slice.Tensor, sums, -1, shape[-1] - 1)
        sought = draw(aten.mul.Tensor, draw.cast(draw.uniform(), weights.meta["val"].dtype), total)
        return draw(aten.clamp_max.default, draw(aten.searchsorted.Tensor, sums, sought, right=True), shape[-1] - 1)
    times = draw(aten.div.Tensor, draw.exponential(shape), weights)
    return draw.item(draw(aten.topk.default, times, num_samples, -1, False), 1)


DRAWN = (
    "rand", "randn", "bernoulli", "uniform_", "normal", "exponential_", "randint", "randperm", "multinomial",
)  # fmt: skip
"""What is drawn here, in words for users."""

REPLACEMENTS: dict[Any, Callable[[Call, Draw], fx.Node | tuple[fx.Node, ...]]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.bernoulli.default: _bernoulli,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform.default: _uniform,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.exponential.default: _exponential,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.randperm.default: _randperm,
    aten.multinomial.default: _multinomial,
}
