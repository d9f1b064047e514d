"""Rules of ops that compute: pointwise, reductions, matrix products, normalisations, lookups, constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules import Call, Dims, OpRule, build, derives, overloads_of, written
from autopar.rules_view import names

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------- pointwise

_JOINTLY_LINEAR = {
    aten.add.Tensor: ("self", "other"),
    aten.sub.Tensor: ("self", "other"),
    aten.complex.default: ("real", "imag"),
}
_LINEAR_IN_EACH = {aten.mul.Tensor: ("self", "other"), aten.div.Tensor: ("self",)}
_LINEAR = {
    aten.neg.default,
    aten._neg_view.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.positive.default,
}


@derives(
    aten.clone,
    aten._to_copy,
    aten.detach,
    aten.alias,
    aten.copy.default,
    aten.contiguous,
    aten.lift_fresh_copy,
    aten.threshold_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.where.self,
    aten.masked_fill,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.native_dropout_backward,
    aten.softplus_backward,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten._conj,
    aten._neg_view,
    aten.complex.default,
    aten.polar.default,
    aten._conj_physical,
    aten.resolve_conj,
    aten.fill.Tensor,
    aten.fill.Scalar,
    aten.floor_divide,
)
def pointwise(call: Call) -> OpRule:
    """Every output element depends on the inputs' elements at the same (broadcast) position."""
    shape = call.out_shape
    out = names(len(shape))
    inputs: dict[str, list[Dims]] = {}
    for name, node in call.named:
        source = tuple(node.meta["val"].shape)
        offset = len(shape) - len(source)
        dims = tuple(
            (out[i + offset],) if size == shape[i + offset] and size != 1 else () for i, size in enumerate(source)
        )
        inputs.setdefault(name, []).append(dims)
    result = tuple((f,) if size != 1 else () for f, size in zip(out, shape, strict=True))
    even = out if call.op in _DIVISIONS and not call.outputs[0].dtype.is_floating_point else []  # type: ignore[union-attr]
    return build(call, inputs, [result] * len(call.outputs), linear=_linear_sets(call), even=even)


_DIVISIONS = {op for packet in (aten.floor_divide, aten.remainder, aten.fmod, aten.div) for op in overloads_of(packet)}
"""Fail for integers if padding divides them."""


def _linear_sets(call: Call) -> list[tuple[str, ...]]:
    tensors = {name for name, _ in call.named}
    joint = _JOINTLY_LINEAR.get(call.op)
    if joint:
        # Adding a constant is not linear: each of n partial sums would add it.
        return [joint] if set(joint) <= tensors else []
    each = _LINEAR_IN_EACH.get(call.op)
    if each:
        return [(name,) for name in each if name in tensors]
    return [("self",)] if call.op in _LINEAR or (call.op is aten._to_copy.default and _is_widening(call)) else []


def _is_widening(call: Call) -> bool:
    """Whether a cast goes from a floating dtype to itself or a wider one, where it rounds nothing and so is linear."""
    before, after = call["self"].meta["val"], call.node.meta["val"]
    widens = before.dtype == after.dtype or before.element_size() < after.element_size()
    return bool(before.is_floating_point() and after.is_floating_point() and widens)


# --------------------------------------------------------------------------------------------------------- reductions

_REDUCTIONS = {
    "sum": (aten.sum.default, aten.sum.dim_IntList),
    "max": (aten.amax, aten.max.default),
    "min": (aten.amin, aten.min.default),
}


@derives(*(op for ops in _REDUCTIONS.values() for op in ops))
def reduction(call: Call) -> OpRule:
    """A reduction over some dims, each of which may be cut: the results combine."""
    rank = len(call.shape("self"))
    dims = call.args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {int(d) % max(rank, 1) for d in dims} if dims else set(range(rank))
    keep = bool(call.args.get("keepdim"))
    base = names(rank)
    out = tuple(() if i in reduced else (f,) for i, f in enumerate(base) if keep or i not in reduced)
    kind = next(kind for kind, ops in _REDUCTIONS.items() if any(call.op in overloads_of(op) for op in ops))
    linear = [["self"]] if kind == "sum" else []
    return build(
        call, {"self": tuple((f,) for f in base)}, [out], reduce={base[i]: kind for i in reduced}, linear=linear
    )


@derives(
    aten._softmax,
    aten._log_softmax,
    aten._safe_softmax,
    aten.cumsum,
    aten.logcumsumexp,
    aten.cumprod,
    aten.prod.dim_int,
    aten.argmax,
    aten.argmin,
)
def along_dim(call: Call) -> OpRule:
    """Every slice along `dim` is handled by itself; `dim` stays whole."""
    rank = len(call.shape("self"))
    if call.args.get("dim") is None:
        return build(call, {}, [tuple(() for _ in call.out_shape)])
    dim = call.dim("dim", rank)
    base = names(rank)
    source = tuple((f,) for f in base)
    kept = len(call.out_shape) == rank and call.out_shape[dim : dim + 1] == call.shape("self")[dim : dim + 1]
    out = (
        source
        if kept
        else tuple(() if i == dim else (f,) for i, f in enumerate(base) if i != dim or len(call.out_shape) == rank)
    )
    linear = [["self"]] if call.op is aten.cumsum.default else []
    return build(call, {"self": source}, [out], whole=base[dim : dim + 1], linear=linear)


@derives(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: Call) -> OpRule:
    """As the softmax: the normalised dim stays whole."""
    base = names(len(call.out_shape))
    dims = tuple((f,) for f in base)
    whole = base[call.dim("dim", len(base)) :][:1]
    return build(call, {"grad_output": dims, "output": dims}, [dims], whole=whole)


@derives(aten.tril, aten.triu)
def triangle(call: Call) -> OpRule:
    """The last two dims are compared with one another."""
    base = names(len(call.out_shape))
    dims = tuple((f,) for f in base)
    return build(call, {"self": dims}, [dims], whole=base[-2:], linear=[["self"]])


# ---------------------------------------------------------------------------------------------------- matrix products

derives(aten.mm)(written("m k, k n -> m n", linear=[[0], [1]]))
derives(aten.bmm)(written("b m k, b k n -> b m n", linear=[[0], [1]]))
derives(aten.mv)(written("m k, k -> m", linear=[[0], [1]]))


@derives(aten.addmm, aten.baddbmm)
def addmm(call: Call) -> OpRule:
    """A product with a bias.  The contracted factor stays whole: cut, every rank would add the bias.  (The rewrite
    first
    takes the op apart where a plan cuts it.)"""
    batched = "batch1" in call.args
    left, right = ("batch1", "batch2") if batched else ("mat1", "mat2")
    lead: Dims = (("b",),) if batched else ()
    out: Dims = (*lead, ("m",), ("n",))
    bias = call.shape("self")
    offset = len(out) - len(bias)
    shape = call.out_shape
    bias_dims = tuple(out[i + offset] if size == shape[i + offset] else () for i, size in enumerate(bias))
    inputs: dict[str, Dims | list[Dims]] = {
        "self": bias_dims,
        left: (*lead, ("m",), ("k",)),
        right: (*lead, ("k",), ("n",)),
    }
    return build(call, inputs, [out], whole=["k"])


# ------------------------------------------------------------------------------------------------------ normalisation


@derives(aten.native_layer_norm, aten._fused_rms_norm)
def layer_norm(call: Call) -> OpRule:
    """The normalised dims stay whole; statistics keep the leading dims."""
    rank = len(call.shape("input"))
    normal = len(call["normalized_shape"])
    base = names(rank)
    tail = tuple((f,) for f in base[rank - normal :])
    lead = tuple((f,) for f in base[: rank - normal])
    statistics = (*lead, *(() for _ in range(normal)))
    inputs = call.own({"input": (*lead, *tail), "weight": tail, "bias": tail})
    return build(call, inputs, [(*lead, *tail), *[statistics] * (len(call.outputs) - 1)], whole=base[rank - normal :])


@derives(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def layer_norm_backward(call: Call) -> OpRule:
    """The gradients of weight and bias sum over the leading dims."""
    rank = len(call.shape("input"))
    normal = len(call["normalized_shape"])
    base = names(rank)
    tail = tuple((f,) for f in base[rank - normal :])
    full = tuple((f,) for f in base)
    statistics = (*full[: rank - normal], *(() for _ in range(normal)))
    by_name = dict.fromkeys(("grad_out", "input"), full) | dict.fromkeys(("mean", "rstd"), statistics)
    inputs = call.own(by_name | dict.fromkeys(("weight", "bias"), tail))
    outs: list[Dims] = [full, *[tail] * (len(call.outputs) - 1)]
    outs = [dims if isinstance(v, torch.Tensor) else () for dims, v in zip(outs, call.outputs, strict=True)]
    return build(call, inputs, outs, whole=base[rank - normal :])


# ------------------------------------------------------------------------------------------------------------ lookups


@derives(aten.embedding)
def embedding(call: Call) -> OpRule:
    """Rows of a table: with the table cut by rows, each rank finds its own and the sum is the answer."""
    index = tuple((f,) for f in names(len(call.shape("indices")), "i"))
    return build(
        call,
        {"weight": (("v",), ("h",)), "indices": index},
        [(*index, ("h",))],
        lookup={"v": "indices"},
        linear=[["weight"]],
        even=names(len(index), "i"),
    )


@derives(aten.embedding_dense_backward)
def embedding_backward(call: Call) -> OpRule:
    """Each row of the table's gradient sums the positions that used it."""
    index = tuple((f,) for f in names(len(call.shape("indices")), "i"))
    # Scaling by frequency counts each row's uses over all the indices.
    whole = ["v", *names(len(index), "i")] if call["scale_grad_by_freq"] else []
    return build(
        call,
        {"grad_output": (*index, ("h",)), "indices": index},
        [(("v",), ("h",))],
        lookup={"v": "indices"},
        whole=whole,
        linear=[["grad_output"]],
        even=names(len(index), "i"),
    )


@derives(aten.gather)
def gather(call: Call) -> OpRule:
    """One element per index along `dim`; a cut dim is looked up like an embedding table.

    Another dim in which the index is shorter stays whole: it uses the first positions of the source.
    """
    source, index = call.shape("self"), call.shape("index")
    rank = len(source)
    dim = call.dim("dim", rank)
    base = names(rank)
    left = tuple(("v",) if i == dim else (f,) if source[i] == index[i] else () for i, f in enumerate(base))
    right = tuple(("j",) if i == dim else (f,) for i, f in enumerate(base))
    whole = [f for i, f in enumerate(base) if i != dim and source[i] != index[i]]
    return build(
        call,
        {"self": left, "index": right},
        [right],
        lookup={"v": "index"},
        whole=whole,
        linear=[["self"]],
        even=[name for (name,) in right],
    )


@derives(aten.index.Tensor)
def index(call: Call) -> OpRule:
    """Advanced indexing: indexed dims stay whole; index tensors broadcast to factors of their own."""
    indices = list(call["indices"])
    source = call.shape("self")
    used = [i for i, node in enumerate(indices) if node is not None]
    vals = [indices[i].meta["val"] for i in used]
    if any(v.dtype == torch.bool for v in vals):
        return build(call, {}, [tuple(() for _ in call.out_shape)])
    block, terms = index_block(vals)
    adjacent = used == list(range(used[0], used[-1] + 1))
    free = [i for i in range(len(source)) if i not in used]
    left = tuple((f"d{i}",) if i in free else () for i in range(len(source)))
    before = [i for i in free if adjacent and i < used[0]]
    after = [i for i in free if i not in before]
    right = (*((f"d{i}",) for i in before), *block, *((f"d{i}",) for i in after))
    return build(call, {"self": left, "indices": terms}, [right], linear=[["self"]], even=names(len(block), "i"))


def index_block(indices: Sequence[torch.Tensor]) -> tuple[Dims, list[Dims]]:
    """Dims of the shape to which index tensors broadcast, and of each of them."""
    broadcast = torch.broadcast_shapes(*(v.shape for v in indices))  # type: ignore[no-untyped-call]
    width = len(broadcast)
    block: Dims = tuple((f,) if n != 1 else () for f, n in zip(names(width, "i"), broadcast, strict=True))
    terms: list[Dims] = [
        tuple(block[width - v.dim() + i] if n == broadcast[width - v.dim() + i] else () for i, n in enumerate(v.shape))
        for v in indices
    ]
    return block, terms


# ---------------------------------------------------------------------------------------------------------- constants


@derives(aten.full, aten.zeros, aten.ones, aten.empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def constant(call: Call) -> OpRule:
    """One value everywhere: every dim of the output may be cut."""
    return build(call, {}, [tuple((f,) for f in names(len(call.out_shape)))])


@derives(aten.arange, aten.scalar_tensor, aten.eye, aten.linspace)
def factory(call: Call) -> OpRule:
    """Values that depend on the position: computed whole, which costs nothing, and sliced where needed."""
    out = names(len(call.out_shape))
    return build(call, {}, [tuple((f,) for f in out)], whole=out)
