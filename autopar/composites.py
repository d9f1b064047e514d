"""Ops that have no rule of their own, as functions of ops that have one.

PyTorch's own definitions serve where they lead to ops with rules; the others are here.  An op without either runs whole
on every rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import OpOverload, registered_decomposition
from autopar.ctc import DEFINITIONS as CTC
from autopar.grouped import DEFINITIONS as GROUPED
from autopar.masked_scatter import DEFINITIONS as MASKED_SCATTER
from autopar.rules import Call, has_rule, overloads_of

aten = torch.ops.aten

Definition = Callable[..., Any]


def definition_of(node: fx.Node) -> Definition | None:
    """What takes the place of a call, called with the same arguments; None for a call that stays."""
    op = node.target
    if not isinstance(op, OpOverload):
        return None
    name = str(op._schema.name)
    if name in GROUPED:
        return GROUPED[name](Call(node))
    if op in _DEFINITIONS:
        return _DEFINITIONS[op](Call(node))
    if has_rule(op) or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    return registered_decomposition(op)


def leads_on(nodes: Iterable[fx.Node]) -> bool:
    """Whether all ops of a definition have a rule or a definition themselves, and none writes in place or reads memory
    by strides, which a shard's do not match."""
    return all(_leads_on(node) for node in nodes if node.op == "call_function")


def _leads_on(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload):
        return op is operator.getitem
    return not op._schema.is_mutable and (has_rule(op) or op in _MEANS or definition_of(node) is not None)


_MEANS = {aten.mean.default, aten.mean.dim}
"""Normalised by themselves, into sums."""


# ----------------------------------------------------------------------------------------------------------- statistics


def _count(x: Tensor, dim: list[int] | None) -> int:
    return math.prod(x.shape[d] for d in dim) if dim else x.numel()


def _var(
    self: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """`aten.var.correction`: squared distances from the mean over the global count."""
    return _var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(
    self: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = dim or list(range(self.ndim))
    mean = self.mean(dims, keepdim=True)
    centred = self - mean
    total = (centred * centred.conj() if self.is_complex() else centred * centred).sum(dims, keepdim=True)
    variance = total / max(0, _count(self, dim) - (1 if correction is None else correction))
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def _std_mean(
    self: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _var_mean(self, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def _std(
    self: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var(self, dim, correction=correction, keepdim=keepdim).sqrt()


def _aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = list(range(self.ndim)) if dim is None else [dim]
    return self.amin(dims, keepdim), self.amax(dims, keepdim)


# ---------------------------------------------------------------------------------------------------------- weight norm


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`aten._weight_norm_interface`: `v` brought to the length `g` along all dims but `dim`."""
    lengths = (v * v).sum(_others(v, dim), keepdim=True).sqrt()
    return v * (g / lengths), lengths


def _weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    along = (grad_w * saved_v).sum(_others(saved_v, dim), keepdim=True)
    scale = saved_g / saved_norms
    return scale * (grad_w - saved_v * (along / (saved_norms * saved_norms))), along / saved_norms


def _others(v: Tensor, dim: int) -> list[int]:
    return [d for d in range(v.ndim) if d != dim % v.ndim]


# ------------------------------------------------------------------------------------------------------- embedding bags


def _embedding_bag(call: Call) -> Definition | None:
    """`aten._embedding_bag` of bags of one length, which is what a matrix of indices becomes, by sum or mean."""
    length = _bag_length(call)
    if length is None or call["mode"] not in (_SUM, _MEAN):
        return None

    def bag(weight: Tensor, indices: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, ...]:
        rows = aten.embedding(weight, indices.view(-1, length)).sum(1)
        rows = rows / length if call["mode"] == _MEAN else rows
        empty = indices.new_empty((0,))
        return rows, empty, offsets.new_full(offsets.shape, length), empty

    return bag


def _embedding_bag_backward(call: Call) -> Definition | None:
    length = _bag_length(call)
    if length is None or call["mode"] not in (_SUM, _MEAN) or call["sparse"]:
        return None

    def backward(grad: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        grad = grad / length if call["mode"] == _MEAN else grad
        spread = grad.unsqueeze(1).expand(-1, length, -1)
        return aten.embedding_dense_backward(  # type: ignore[no-any-return]
            spread, indices.view(-1, length), call["num_weights"], -1, call["scale_grad_by_freq"]
        )

    return backward


_SUM, _MEAN = 0, 1


def _bag_length(call: Call) -> int | None:
    """The length of all bags; None if it is not one that the graph knows, or bags have weights, padding or a last
    offset of their own."""
    made, total = call["offsets"], call.shape("indices")[0] if len(call.shape("indices")) == 1 else 0
    if made.target is not aten.arange.start_step or call["per_sample_weights"] is not None or call["padding_idx"] >= 0:
        return None
    start, end, length = (*made.args, 1)[:3]
    regular = start == 0 and end == total and length > 0 and total % length == 0
    return int(length) if regular and not call.args.get("include_last_offset") else None


# ----------------------------------------------------------------------------------------------------------- the others


def _trilinear(
    i1: Tensor, i2: Tensor, i3: Tensor, expand1: list[int], expand2: list[int], expand3: list[int], sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """`aten._trilinear`, which `nn.Bilinear` is: dims of one, a product, and a sum."""
    for dims, position in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for dim in dims:
            if position == 0:
                i1 = i1.unsqueeze(dim)
            elif position == 1:
                i2 = i2.unsqueeze(dim)
            else:
                i3 = i3.unsqueeze(dim)
    return (i1 * i2 * i3).sum(sumdim)


def _put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`aten.put`: writing by positions in all elements."""
    written: Tensor = aten.index_put.default(self.reshape(-1), [index], source, accumulate)
    return written.view(self.shape)


def _as_strided(call: Call) -> Definition | None:
    """`aten.as_strided` as a lookup: by positions in the tensor's elements, which a shard has, and not in memory."""
    order = _memory_order(call["self"].meta["val"])
    if order is None:
        return None
    if _is_all(call):
        return lambda self, size, *_: self.permute(order).reshape(size)

    def strided(self: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
        places = _places(size, stride, storage_offset or 0, self.device)
        return aten.index.Tensor(self.permute(order).reshape(-1), [places])  # type: ignore[no-any-return]

    return strided


def _as_strided_scatter(call: Call) -> Definition | None:
    order = _memory_order(call["self"].meta["val"])
    if order is None:
        return None
    back = [order.index(dim) for dim in range(len(order))]
    if _is_all(call):
        return lambda self, src, *_: src.reshape([self.shape[d] for d in order]).permute(back)

    def scatter(
        self: Tensor, src: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
    ) -> Tensor:
        places, ordered = _places(size, stride, storage_offset or 0, self.device), self.permute(order)
        written: Tensor = aten.index_put.default(ordered.reshape(-1), [places], src)
        return written.view(ordered.shape).permute(back)

    return scatter


def _is_all(call: Call) -> bool:
    """Whether a look by strides sees every element once, in the order in memory: it is another shape of the tensor."""
    size, stride = call["size"], call["stride"]
    steps = [math.prod(size[i + 1 :]) for i in range(len(size))]
    dense = all(n == 1 or given == step for n, given, step in zip(size, stride, steps, strict=True))
    return dense and not call["storage_offset"] and math.prod(size) == call["self"].meta["val"].numel()


def _memory_order(value: Tensor) -> list[int] | None:
    """The dims from the outermost in memory; None if the elements are not one dense block."""
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda d: (-strides[d], d))
    steps = [math.prod(value.shape[d] for d in order[i + 1 :]) for i in range(value.ndim)]
    dense = all(value.shape[d] == 1 or strides[d] == step for d, step in zip(order, steps, strict=True))
    return order if dense else None


def _places(size: list[int], stride: list[int], offset: int, device: torch.device) -> Tensor:
    places = torch.full([1] * len(size), offset, dtype=torch.int64, device=device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [-1 if d == dim else 1 for d in range(len(size))]
        places = places + (torch.arange(length, device=device) * step).view(shape)
    return places


# ----------------------------------------------------------------------------------------------------------- constants


def _constant(call: Call) -> Definition:
    """One value everywhere, as `aten.full`: it reads no tensor, not even for its shape, so that each reader can have it
    as it needs it."""
    name = str(call.op._schema.name)
    value = call["fill_value"] if "full" in name else float("ones" in name)
    made = call.node.meta["val"]
    return lambda *_, **__: torch.full(tuple(made.shape), value, dtype=made.dtype, device=made.device)


_CONSTANTS = (
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.empty.memory_format, aten.empty_strided, aten.new_empty_strided, aten.zeros, aten.ones,
    aten._efficientzerotensor,
)  # fmt: skip


def _always(definition: Definition) -> Callable[[Call], Definition]:
    return lambda call: definition


_DEFINITIONS: dict[Any, Callable[[Call], Definition | None]] = {
    **CTC,
    **MASKED_SCATTER,
    **{op: _constant for packet in _CONSTANTS for op in overloads_of(packet) if not op._schema.is_mutable},
    aten.var.correction: _always(_var),
    aten.std.correction: _always(_std),
    aten.var_mean.correction: _always(_var_mean),
    aten.std_mean.correction: _always(_std_mean),
    aten.aminmax.default: _always(_aminmax),
    aten._weight_norm_interface.default: _always(_weight_norm),
    aten._weight_norm_interface_backward.default: _always(_weight_norm_backward),
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_dense_backward.default: _embedding_bag_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._trilinear.default: _always(_trilinear),
    aten.put.default: _always(_put),
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
