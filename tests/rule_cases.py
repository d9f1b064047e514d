"""Calls that stand for the ops whose rules autopar derives: at least one for every op, several where arguments matter.

Cut dims have sizes such as 2, 3, 6 and 12, which two or three ranks divide, and up to one position a rank; whole dims
have others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar import randomness  # noqa: F401  (registers an op and its rule)
from autopar._compat import tree_flatten, tree_unflatten

aten = torch.ops.aten
F64 = torch.float64


@dataclass(frozen=True)
class Random:
    """A random tensor to be: normal floats, integers below `below`, or booleans."""

    shape: tuple[int, ...]
    below: int = 0
    dtype: torch.dtype = F64

    def make(self, generator: torch.Generator) -> Tensor:
        if self.dtype is torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.4
        if self.below:
            return torch.randint(self.below, self.shape, generator=generator, dtype=self.dtype)
        return torch.randn(self.shape, generator=generator, dtype=self.dtype)


def f(*shape: int) -> Random:
    """Normal float64."""
    return Random(shape)


def i(*shape: int, below: int) -> Random:
    """Integers from 0 up to `below`."""
    return Random(shape, below, torch.int64)


def b(*shape: int) -> Random:
    """Booleans."""
    return Random(shape, dtype=torch.bool)


@dataclass(frozen=True)
class Zeros:
    """A constant of the graph, by which a rule knows that there is nothing in it yet."""

    shape: tuple[int, ...]


def zeros(*shape: int) -> Zeros:
    """Float64 zeros that the graph makes."""
    return Zeros(shape)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        values: whether the result's values are defined; an `empty` has a shape alone.
        cut: whether there is anything to cut; False for a call that must run whole.
        stand_in: a definition in plain PyTorch, for an op without a CPU kernel.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True
    cut: bool = True
    stand_in: Callable[..., Any] | None = None

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with random tensors, the same at every call."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        leaves, spec = tree_flatten((list(self.args), self.kwargs))
        return tree_unflatten([x.make(generator) if isinstance(x, Random) else x for x in leaves], spec)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        words = [_word(a) for a in self.args] + [f"{k}={_word(v)}" for k, v in self.kwargs.items()]
        return f"{str(self.op).removeprefix('aten.')}({', '.join(words)})"


def _word(value: Any) -> str:
    if isinstance(value, Zeros):
        return "zeros" + "x".join(map(str, value.shape))
    if isinstance(value, Random):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, list):
        return f"[{' '.join(map(_word, value))}]"
    return str(value).removeprefix("torch.")


def case(op: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs)


def whole(op: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs, cut=False)


def shape_only(op: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs, values=False)


MAX = 2**63 - 1  # the end of a slice without an end

VIEWS = [
    case(aten.view.default, f(4, 6), [24]),
    case(aten.view.default, f(24), [2, 12]),
    case(aten.view.default, f(6, 12), [6, 3, 4]),
    case(aten.view.default, f(2, 3, 12), [6, 12]),
    case(aten.view.default, f(2, 12), [4, 6]),
    case(aten.view.default, f(2, 1, 12), [1, 2, 2, 6, 1]),
    case(aten.view.default, f(2, 6, 4), [2, 8, 3]),
    case(aten.view.default, f(6, 12), [-1, 4]),
    whole(aten.view.default, f(6, 4), [8, 3]),
    whole(aten.view.default, f(0, 6), [6, 0]),
    whole(aten.view.default, f(1), []),
    case(aten._unsafe_view.default, f(6, 2, 4), [12, 4]),
    case(aten.reshape.default, f(12, 3), [2, 6, 3]),
    case(aten._reshape_alias.default, f(12, 4), [6, 2, 4], [8, 4, 1]),
    case(aten.flatten.using_ints, f(2, 6, 3), 0, 1),
    case(aten.flatten.using_ints, f(2, 6, 3), -2),
    case(aten.unflatten.int, f(12, 3), 0, [2, 6]),
    case(aten.unflatten.int, f(3, 12), -1, [6, -1]),
    case(aten.t.default, f(4, 6)),
    case(aten.t.default, f(6)),
    case(aten.transpose.int, f(2, 6, 3), 0, -1),
    case(aten.permute.default, f(2, 6, 3), [-1, 0, 1]),
    case(aten.unsqueeze.default, f(2, 3), -1),
    case(aten.unsqueeze.default, f(6, 3), 1),
    case(aten.squeeze.default, f(2, 1, 3, 1)),
    case(aten.squeeze.dim, f(6, 1, 2), 1),
    case(aten.squeeze.dim, f(2, 3), 0),
    case(aten.squeeze.dims, f(3, 1, 2, 1), [0, -1]),
    case(aten.expand.default, f(6, 1), [6, 4]),
    case(aten.expand.default, f(1, 6, 1), [2, 3, 6, 4]),
    case(aten.expand.default, f(6, 2), [3, -1, 2]),
]

SLICES = [
    case(aten.slice.Tensor, f(6, 12), 1, 0, 4),
    case(aten.slice.Tensor, f(6, 12), 1, 4, 10),
    case(aten.slice.Tensor, f(12, 3), 0, -6),
    case(aten.slice.Tensor, f(12, 3), -2, -8, MAX),
    case(aten.slice.Tensor, f(12, 3), 0, 0, MAX),
    case(aten.slice.Tensor, f(12, 3)),
    case(aten.slice.Tensor, f(12, 3), 0, 0, MAX, 2),
    case(aten.slice.Tensor, f(12, 7), 1, 1, 7),
    case(aten.slice.Tensor, f(6, 4), 0, -99, 99),
    case(aten.slice.Tensor, f(6, 12), 1, 6, 6),
    case(aten.slice_backward.default, f(6, 4), [6, 12], 1, 0, 4, 1),
    case(aten.slice_backward.default, f(6, 8), [6, 12], -1, 4, MAX, 1),
    case(aten.slice_backward.default, f(6, 3), [12, 3], 0, -6, MAX, 1),
    case(aten.slice_backward.default, f(6, 3), [12, 3], 0, 0, MAX, 2),
    case(aten.slice_backward.default, f(12, 3), [12, 3], 0, 0, MAX, 1),
    case(aten.split.Tensor, f(2, 12), 4, 1),
    case(aten.split.Tensor, f(12, 3), 5),
    case(aten.split_with_sizes.default, f(3, 12), [2, 6, 4], -1),
    case(aten.split_with_sizes.default, f(24, 3), [6, 0, 18]),
    case(aten.unbind.int, f(6, 3, 2), 1),
    case(aten.unbind.int, f(3, 6)),
    case(aten.select.int, f(6, 5, 2), 1, -2),
    case(aten.select.int, f(5, 6), 0, 3),
    case(aten.select_backward.default, f(6, 2), [6, 5, 2], 1, -2),
    case(aten.select_backward.default, f(6), [5, 6], 0, 3),
    case(aten.cat.default, [f(6, 4), f(6, 8)], 1),
    case(aten.cat.default, [f(12, 3), f(6, 3), f(6, 3)]),
    case(aten.cat.default, [f(3, 4), f(3, 7)], -1),
    case(aten.cat.default, [f(12, 3), f(0, 3)], 0),
    case(aten.cat.default, [f(12, 3), f(0)]),
    case(aten.cat.default, [f(2, 0, 3), f(2, 6, 3), f(2, 12, 3)], -2),
    case(aten.cat.default, [f(0, 6), f(0, 6)], 0),
    case(aten.stack.default, [f(6, 2), f(6, 2), f(6, 2)], -1),
    case(aten.stack.default, [f(6, 2), f(6, 2)]),
    case(aten.constant_pad_nd.default, f(6, 4), [1, 2], 0.5),
    case(aten.constant_pad_nd.default, f(2, 5, 6), [0, 0, -1, 3]),
    case(aten.constant_pad_nd.default, f(6, 12), [0, 0]),
]

POINTWISE = [
    case(aten.add.Tensor, f(6, 4), f(6, 4), alpha=2),
    case(aten.add.Tensor, f(2, 6, 3), f(6, 1)),
    case(aten.add.Tensor, f(6, 3), 2.0),
    case(aten.add.Tensor, f(1, 6), f(3, 1)),
    case(aten.sub.Tensor, f(6), f(2, 6)),
    case(aten.sub.Tensor, f(6, 2), f()),
    case(aten.mul.Tensor, f(6, 2), f(2)),
    case(aten.mul.Tensor, f(6, 2), i(6, 2, below=5)),
    case(aten.div.Tensor, f(6, 2), f(6, 1)),
    case(aten.div.Tensor_mode, f(6, 2), f(6, 1), rounding_mode="floor"),
    case(aten.neg.default, f(3, 2)),
    case(aten.mul.Scalar, f(6, 2), 3),
    case(aten.div.Scalar, f(6, 2), 3),
    case(aten.positive.default, f(6)),
    case(aten.pow.Tensor_Scalar, f(6, 2), 3),
    case(aten.maximum.default, f(6, 2), f(2)),
    case(aten.frexp.Tensor, f(6, 2)),
    case(aten.clone.default, f(6, 2), memory_format=torch.contiguous_format),
    case(aten._to_copy.default, f(6, 2), dtype=torch.float32),
    case(aten._to_copy.default, f(6, 2), dtype=torch.float64),
    case(aten.detach.default, f(6, 2)),
    case(aten.alias.default, f(6, 2)),
    case(aten.copy.default, f(6, 4), f(4)),
    case(aten.contiguous.default, f(6, 2)),
    case(aten.lift_fresh_copy.default, f(6, 2)),
    case(aten.threshold_backward.default, f(6, 2), f(6, 2), 0.1),
    case(aten.gelu_backward.default, f(6, 2), f(6, 2), approximate="tanh"),
    case(aten.silu_backward.default, f(6, 2), f(6, 2)),
    case(aten.tanh_backward.default, f(6, 2), f(6, 2)),
    case(aten.sigmoid_backward.default, f(6, 2), f(6, 2)),
    case(aten.where.self, b(6, 1), f(6, 4), f()),
    case(aten.where.self, b(4), f(6, 1), f(6, 4)),
    case(aten.masked_fill.Scalar, f(2, 6, 4), b(6, 1), -7.0),
    case(aten.masked_fill.Tensor, f(6, 4), b(6, 4), f()),
    case(aten.zeros_like.default, f(6, 2)),
    case(aten.ones_like.default, f(6, 2)),
    case(aten.full_like.default, f(6, 2), 3),
    shape_only(aten.empty_like.default, f(6, 2)),
    case(aten.native_dropout_backward.default, f(6, 2), b(6, 2), 1.25),
]

REDUCTIONS = [
    case(aten.sum.default, f(6, 4)),
    case(aten.sum.default, b(6, 4)),
    case(aten.sum.dim_IntList, f(2, 6, 3), [-1]),
    case(aten.sum.dim_IntList, f(2, 6, 3), [0, 2], True),
    case(aten.sum.dim_IntList, f(6, 4), None),
    case(aten.sum.dim_IntList, f(6, 4), []),
    case(aten.sum.dim_IntList, i(6, 4, below=9), [1], dtype=F64),
    case(aten.amax.default, f(6, 4), [1]),
    case(aten.amax.default, f(2, 6, 3), [-3, -1], True),
    case(aten.amax.default, f(6, 4)),
    case(aten.amin.default, f(6, 4), [0]),
    case(aten.max.default, f(6, 4)),
    case(aten.min.default, i(6, 4, below=50)),
    case(aten._softmax.default, f(6, 5), -1, False),
    case(aten._log_softmax.default, f(6, 5, 2), 1, False),
    case(aten._safe_softmax.default, f(6, 5), 1),
    case(aten._softmax_backward_data.default, f(6, 5), f(6, 5), -1, F64),
    case(aten._log_softmax_backward_data.default, f(6, 5, 2), f(6, 5, 2), 1, F64),
    case(aten.cumsum.default, f(6, 5), 1),
    case(aten.cumsum.default, f(5, 6), -2),
    case(aten.cumsum.default, b(6, 5), 1, dtype=torch.int64),
    case(aten.cumprod.default, f(6, 5), 1),
    case(aten.prod.dim_int, f(6, 5), 1),
    case(aten.prod.dim_int, f(5, 6), 0, True),
    case(aten.logcumsumexp.default, f(6, 5), 1),
    case(aten.argmax.default, f(6, 5), 1),
    case(aten.argmax.default, f(6, 5), -1, True),
    case(aten.argmax.default, f(5, 6, 2), 0),
    whole(aten.argmax.default, f(6, 4)),
    case(aten.argmin.default, f(6, 5), 1),
    case(aten.tril.default, f(6, 5, 4)),
    case(aten.triu.default, f(2, 3, 5, 4), 1),
]

PRODUCTS = [
    case(aten.mm.default, f(4, 6), f(6, 3)),
    case(aten.bmm.default, f(6, 2, 4), f(6, 4, 3)),
    case(aten.mv.default, f(4, 6), f(6)),
    case(aten.addmm.default, f(6), f(4, 5), f(5, 6)),
    case(aten.addmm.default, f(4, 1), f(4, 5), f(5, 6), beta=2, alpha=3),
    case(aten.addmm.default, f(), f(4, 5), f(5, 6)),
    case(aten.baddbmm.default, f(6, 3, 4), f(6, 3, 5), f(6, 5, 4), beta=2),
    case(aten.baddbmm.default, f(1, 4), f(6, 3, 5), f(6, 5, 4)),
]


def _rms_norm_backward(
    grad: Tensor, x: Tensor, normal: list[int], rstd: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """The CPU has no kernel of its own; this one, like CUDA's, takes the statistics to be dense."""
    rstd = rstd.as_strided(rstd.shape, torch.empty(rstd.shape, device="meta").stride())
    normal_x, scaled = x * rstd, grad * weight
    d_x = rstd * (scaled - normal_x * (scaled * normal_x).mean(-1, keepdim=True))
    d_weight = (grad * normal_x).flatten(0, -2).sum(0)
    return (d_x if wanted[0] else None, d_weight if wanted[1] else None)


NORMS = [
    case(aten.native_layer_norm.default, f(2, 6, 5), [5], f(5), f(5), 1e-5),
    case(aten.native_layer_norm.default, f(6, 4, 5), [4, 5], None, None, 1e-5),
    case(aten.native_layer_norm.default, f(6, 5), [5], f(5), None, 1e-5),
    case(
        aten.native_layer_norm_backward.default,
        f(2, 6, 5),
        f(2, 6, 5),
        [5],
        f(2, 6, 1),
        f(2, 6, 1),
        f(5),
        f(5),
        [True] * 3,
    ),
    case(
        aten.native_layer_norm_backward.default,
        f(6, 5),
        f(6, 5),
        [5],
        f(6, 1),
        f(6, 1),
        f(5),
        f(5),
        [True, False, True],
    ),
    case(
        aten.native_layer_norm_backward.default,
        f(6, 4, 5),
        f(6, 4, 5),
        [4, 5],
        f(6, 1, 1),
        f(6, 1, 1),
        None,
        None,
        [True, False, False],
    ),
    case(aten._fused_rms_norm.default, f(2, 6, 5), [5], f(5), 1e-5),
    case(aten._fused_rms_norm.default, f(6, 5), [5], None, None),
    Case(
        aten._fused_rms_norm_backward.default,
        (f(2, 6, 5), f(2, 6, 5), [5], f(2, 6, 1), f(5), [True, True]),
        stand_in=_rms_norm_backward,
    ),
    Case(
        aten._fused_rms_norm_backward.default,
        (f(6, 5), f(6, 5), [5], f(6, 1), f(5), [True, False]),
        stand_in=_rms_norm_backward,
    ),
]

LOOKUPS = [
    case(aten.embedding.default, f(12, 4), i(6, 3, below=12)),
    case(aten.embedding.default, f(12, 4), i(6, below=12), 5),
    case(aten.embedding.default, f(6, 2), i(below=6)),
    case(aten.embedding_dense_backward.default, f(6, 3, 4), i(6, 3, below=12), 12, -1, False),
    case(aten.embedding_dense_backward.default, f(24, 4), i(24, below=6), 6, 4, False),
    case(aten.embedding_dense_backward.default, f(24, 4), i(24, below=6), 6, 0, False),
    case(aten.embedding_dense_backward.default, f(24, 4), i(24, below=7), 7, -1, True),
    case(aten.gather.default, f(6, 12), 1, i(6, 4, below=12)),
    case(aten.gather.default, f(12, 3), -2, i(4, 3, below=12)),
    case(aten.gather.default, f(6, 4), 0, i(3, 2, below=6)),
    case(aten.gather.default, f(12), 0, i(6, below=12)),
    case(aten.index.Tensor, f(7, 6), [i(4, below=7)]),
    case(aten.index.Tensor, f(6, 7, 4), [None, i(2, 3, below=7)]),
    case(aten.index.Tensor, f(7, 5, 6), [i(4, 1, below=7), i(3, below=5)]),
    case(aten.index.Tensor, f(7, 6, 5), [i(4, below=7), None, i(4, below=5)]),
    case(aten.index.Tensor, f(2, 7, 5, 6), [None, i(4, below=7), i(below=5)]),
    whole(aten.index.Tensor, f(6, 4), [b(6)]),
]

CONSTANTS = [
    case(aten.full.default, [6, 2], 3.5, dtype=F64),
    case(aten.zeros.default, [6, 2], dtype=F64),
    case(aten.ones.default, [6, 1, 3]),
    shape_only(aten.empty.memory_format, [6, 2], dtype=F64),
    case(aten.new_zeros.default, f(5), [6, 2]),
    case(aten.new_ones.default, f(5), [6, 2], dtype=torch.bool),
    case(aten.new_full.default, f(5), [6, 2], 3),
    shape_only(aten.new_empty.default, f(5), [6, 2]),
    case(torch.ops.autopar.uniform.default, [6, 2, 4], [], 7, 3, torch.device("cpu")),
    whole(aten.arange.default, 6),
    whole(aten.arange.start, 2, 8),
    whole(aten.arange.start_step, 2, 14, 2),
    whole(aten.scalar_tensor.default, 3.0, dtype=F64),
    whole(aten.eye.default, 6),
    whole(aten.eye.m, 6, 4),
    whole(aten.linspace.default, 0, 1, 6),
    whole(aten.linspace.Tensor_Tensor, f(), f(), 6),
    whole(aten.linspace.Tensor_Scalar, f(), 1, 6),
    whole(aten.linspace.Scalar_Tensor, 0, f(), 6),
]


# ---- attention: the CPU's kernel runs, the others have the same rules and are defined below ----


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores if bias is None else scores + bias


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, _grouped(query, key), bias, causal, scale)
    return scores.softmax(-1) @ _grouped(query, value), scores.logsumexp(-1)


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide_key, wide_value = _grouped(query, key), _grouped(query, value)
    weights = (_scores(query, wide_key, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    d_scores = weights * (grad @ wide_value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    factor = scale or 1 / math.sqrt(query.shape[-1])

    def grouped_sum(wide: Tensor, like: Tensor) -> Tensor:
        return wide.unflatten(1, (like.shape[1], -1)).sum(2)

    d_key = grouped_sum(d_scores.transpose(-1, -2) @ query * factor, key)
    return d_scores @ wide_key * factor, d_key, grouped_sum(weights.transpose(-1, -2) @ grad, value), d_scores


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, *_: Any, scale: Any = None) -> Any:
    out, lse = _attend(query, key, value, None, causal, scale)
    state = torch.zeros((2,), dtype=torch.int64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, torch.zeros(()), torch.zeros(0)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, lse: bool, dropout: float, causal: bool, *, scale: Any = None
) -> Any:
    out, log_sum = _attend(query, key, value, bias, causal, scale)
    padded = torch.nn.functional.pad(log_sum, (0, -log_sum.shape[-1] % 32))
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, lse: bool, dropout: float, causal: bool, *_: Any
) -> Any:
    out, log_sum = _attend(query, key, value, bias, causal, None)
    seed = torch.zeros((), dtype=torch.int64)
    return out, log_sum.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, seed.clone(), None


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> Any:
    return _attend_backward(grad, q, k, v, out, lse, None, rest[5], scale)[:3]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> Any:
    results = _attend_backward(grad, q, k, v, out, lse[..., : q.shape[2]], bias, rest[4], scale)
    return tuple(value if wanted else None for value, wanted in zip(results, rest[3], strict=True))


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None
) -> Any:
    return _attend_backward(grad, q, k, v, out, lse.squeeze(-1), rest[2], rest[8], scale)[:3]


def _attention_cases() -> list[Case]:
    q, kv, two, lse = f(2, 6, 5, 4), f(2, 6, 7, 4), f(2, 2, 7, 4), f(2, 6, 5)
    square, seed = f(2, 6, 5, 4), i(below=9)
    cpu, cpu_backward = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    masks = [f(5, 7), f(2, 1, 5, 7), f(1, 6, 5, 7), f(2, 6, 5, 7), f(2, 6, 1, 1)]
    forward = [
        case(cpu, q, kv, kv),
        case(cpu, square, square, square, 0.0, True),
        case(cpu, q, kv, kv, scale=0.3),
        case(cpu, f(6, 4, 5, 4), f(6, 2, 7, 4), f(6, 2, 7, 4)),
        case(cpu, q, f(2, 1, 7, 4), f(2, 1, 7, 4)),
        *(case(cpu, q, kv, kv, attn_mask=mask) for mask in masks),
        case(cpu, q, two, two, attn_mask=masks[2]),
    ]
    backward = [
        case(cpu_backward, q, q, kv, kv, q, lse, 0.0, False),
        case(cpu_backward, square, square, square, square, square, lse, 0.0, True, scale=0.3),
        case(cpu_backward, q, q, two, two, q, lse, 0.0, False),
        *(case(cpu_backward, q, q, kv, kv, q, lse, 0.0, False, attn_mask=mask) for mask in masks),
    ]
    return [
        *forward,
        *backward,
        *(
            Case(op, args, kwargs, stand_in=run)
            for op, args, kwargs, run in [
                (aten._scaled_dot_product_flash_attention.default, (q, kv, kv, 0.0, False), {}, _flash),
                (
                    aten._scaled_dot_product_flash_attention.default,
                    (square, square, square, 0.0, True),
                    {"scale": 0.3},
                    _flash,
                ),
                (
                    aten._scaled_dot_product_efficient_attention.default,
                    (q, kv, kv, None, True, 0.0, False),
                    {},
                    _efficient,
                ),
                (
                    aten._scaled_dot_product_efficient_attention.default,
                    (q, kv, kv, f(2, 6, 5, 7), True, 0.0, False),
                    {},
                    _efficient,
                ),
                (
                    aten._scaled_dot_product_cudnn_attention.default,
                    (q, kv, kv, f(2, 1, 5, 7), True, 0.0, False),
                    {},
                    _cudnn,
                ),
                (
                    aten._scaled_dot_product_flash_attention_backward.default,
                    (q, q, kv, kv, q, lse, None, None, 5, 7, 0.0, False, seed, seed),
                    {},
                    _flash_backward,
                ),
                (
                    aten._scaled_dot_product_efficient_attention_backward.default,
                    (q, q, kv, kv, f(2, 6, 5, 7), q, f(2, 6, 32), seed, seed, 0.0, [True] * 4, False),
                    {},
                    _efficient_backward,
                ),
                (
                    aten._scaled_dot_product_efficient_attention_backward.default,
                    (q, q, kv, kv, None, q, f(2, 6, 32), seed, seed, 0.0, [True, True, True, False], True),
                    {},
                    _efficient_backward,
                ),
                (
                    aten._scaled_dot_product_cudnn_attention_backward.default,
                    (q, q, kv, kv, q, f(2, 6, 5, 1), seed, seed, f(2, 1, 5, 7), None, None, 5, 7, 0.0, False),
                    {},
                    _cudnn_backward,
                ),
            ]
        ),
    ]


WIDENED = [
    Case(op, (*args, F64), stand_in=run)
    for op, args, run in [
        (aten.mm.dtype, (f(4, 6), f(6, 3)), lambda a, b, dtype: (a @ b).to(dtype)),
        (aten.bmm.dtype, (f(6, 2, 4), f(6, 4, 3)), lambda a, b, dtype: (a @ b).to(dtype)),
        (aten.addmm.dtype, (f(6), f(4, 5), f(5, 6)), lambda c, a, b, dtype: (c + a @ b).to(dtype)),
        (aten.baddbmm.dtype, (f(6, 3, 4), f(6, 3, 5), f(6, 5, 4)), lambda c, a, b, dtype: (c + a @ b).to(dtype)),
    ]
]
"""Products with a result of another dtype, which only CUDA has."""

CASES = [
    *VIEWS,
    *SLICES,
    *POINTWISE,
    *REDUCTIONS,
    *PRODUCTS,
    *WIDENED,
    *NORMS,
    *LOOKUPS,
    *CONSTANTS,
    *_attention_cases(),
]
