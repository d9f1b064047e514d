"""Rules of ops that only move data: views, permutations, slices, joins.

A view's rule is its dimension map: both shapes are walked from the outermost dim and cut into the same factors.
A slice, split or join at multiples of g reads the dim as (chunks, g): the chunks stay whole and g may be cut, so
that a fused QKV splits locally and a rotary half-swap keeps its halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.rules import Call, Dims, OpRule, build, derives

aten = torch.ops.aten


def names(count: int, prefix: str = "d") -> list[str]:
    """`count` fresh factor names."""
    return [f"{prefix}{i}" for i in range(count)]


def match_view(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, frozenset[str]]:
    """The dimension map of a view: factors of each dim on both sides, and those that cannot be cut.

    Row-major order makes the match exact: equal products from the outermost dim name the same elements.  Sizes that do
    not divide one another, such as (6, 4) -> (8, 3), leave one factor that fills the whole group and stays whole.
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    a = [[i, size] for i, size in enumerate(source) if size != 1]
    b = [[i, size] for i, size in enumerate(target) if size != 1]
    whole: set[str] = set()
    count = 0
    while a and b:
        name = f"v{count}"
        count += 1
        (i, m), (j, n) = a[0], b[0]
        common = math.gcd(m, n)
        if common in (m, n):
            left[i].append(name)
            right[j].append(name)
            for queue, size in ((a, m), (b, n)):
                queue[0][1] = size // common
                if queue[0][1] == 1:
                    queue.pop(0)
            continue
        # Neither size divides the other: take dims from both sides until the products agree; each dim of the group
        # becomes a factor of its own that stays whole.
        product_a, product_b = m, n
        taken_a, taken_b = [a.pop(0)], [b.pop(0)]
        while product_a != product_b:
            queue, taken = (a, taken_a) if product_a < product_b else (b, taken_b)
            taken.append(queue.pop(0))
            if queue is a:
                product_a *= taken[-1][1]
            else:
                product_b *= taken[-1][1]
        for side, taken, tag in ((left, taken_a, "l"), (right, taken_b, "r")):
            for index, _ in taken:
                fresh = f"{name}{tag}{index}"
                side[index].append(fresh)
                whole.add(fresh)
    return tuple(map(tuple, left)), tuple(map(tuple, right)), frozenset(whole)


@derives(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.flatten, aten.unflatten)
def view(call: Call) -> OpRule:
    """A change of shape."""
    if 0 in call.out_shape:
        return opaque(call)
    left, right, whole = match_view(call.shape("self"), call.out_shape)
    return build(call, {"self": left}, [right], whole=whole, linear=[["self"]])


def opaque(call: Call) -> OpRule:
    """No factor at all: inputs and outputs whole."""
    outs: list[Dims] = [tuple(() for _ in v.shape) if isinstance(v, torch.Tensor) else () for v in call.outputs]
    return build(call, {}, outs)


def _permuted(call: Call, order: Sequence[int]) -> OpRule:
    source = names(len(call.shape("self")))
    return build(call, {"self": tuple((f,) for f in source)}, [tuple((source[i],) for i in order)], linear=[["self"]])


@derives(aten.t)
def t(call: Call) -> OpRule:
    """Matrix transpose."""
    return _permuted(call, list(reversed(range(len(call.shape("self"))))))


@derives(aten.transpose.int)
def transpose(call: Call) -> OpRule:
    """Exchange of two dims."""
    rank = len(call.shape("self"))
    order = list(range(rank))
    if rank:
        i, j = call.dim("dim0", rank), call.dim("dim1", rank)
        order[i], order[j] = order[j], order[i]
    return _permuted(call, order)


@derives(aten.permute)
def permute(call: Call) -> OpRule:
    """Any order of dims."""
    rank = len(call.shape("self"))
    return _permuted(call, [int(d) % rank for d in call["dims"]])


@derives(aten.unsqueeze, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def reshape_ones(call: Call) -> OpRule:
    """Dims of size one come or go."""
    source, target = call.shape("self"), call.out_shape
    kept = [f"d{i}" for i, size in enumerate(source) if size != 1]
    queue = list(kept)
    left = tuple((f"d{i}",) if size != 1 else () for i, size in enumerate(source))
    right = tuple((queue.pop(0),) if size != 1 else () for size in target)
    return build(call, {"self": left}, [right], linear=[["self"]])


@derives(aten.expand)
def expand(call: Call) -> OpRule:
    """Broadcast: a new or stretched dim is a factor that only the output has."""
    source, target = call.shape("self"), call.out_shape
    offset = len(target) - len(source)
    out = names(len(target))
    left = tuple((out[i + offset],) if size == target[i + offset] else () for i, size in enumerate(source))
    return build(call, {"self": left}, [tuple((f,) for f in out)], linear=[["self"]])


def cut_dim(size: int, *positions: int) -> int:
    """The largest g such that the dim can be read as (size / g, g) with every position at a multiple of g."""
    return math.gcd(size, *positions)


def _chunked(call: Call, dim: int, grain: int, parts: Sequence[int]) -> OpRule:
    """`self` is cut along `dim` into outputs of these sizes, all multiples of `grain`."""
    grain = 1 if 0 in parts else grain  # an empty part has no positions to share out
    base = names(len(call.shape("self")))
    outer = [f"c{i}" for i in range(len(parts))]
    left = tuple(("c", "g") if i == dim else (f,) for i, f in enumerate(base))
    rights = [tuple((outer[p], "g") if i == dim else (f,) for i, f in enumerate(base)) for p in range(len(parts))]
    whole = ["c", *outer, *(["g"] if grain == 1 else [])]
    return build(call, {"self": left}, rights, known={"g": grain}, whole=whole, linear=[["self"]])


@derives(aten.slice.Tensor)
def slice_(call: Call) -> OpRule:
    """A range of one dim."""
    shape = call.shape("self")
    dim, size = call.dim("dim", len(shape)), shape[call.dim("dim", len(shape))]
    start, end, step = _slice_range(call, size)
    if (start, end, step) == (0, size, 1):
        factors = tuple((f,) for f in names(len(shape)))
        return build(call, {"self": factors}, [factors], linear=[["self"]])
    return _chunked(call, dim, cut_dim(size, start, end) if step == 1 else 1, [call.out_shape[dim]])


def _slice_range(call: Call, size: int) -> tuple[int, int, int]:
    start = call["start"] if call["start"] is not None else 0
    end = call["end"] if call["end"] is not None else size
    start = max(0, start + size) if start < 0 else min(start, size)
    end = max(0, end + size) if end < 0 else min(end, size)
    return int(start), int(max(start, end)), int(call["step"])


@derives(aten.slice_backward)
def slice_backward(call: Call) -> OpRule:
    """The transpose of a slice: zeros around the gradient."""
    sizes = [int(s) for s in call["input_sizes"]]
    dim = call.dim("dim", len(sizes))
    start, end = min(int(call["start"]), sizes[dim]), min(int(call["end"]), sizes[dim])
    grain = cut_dim(sizes[dim], start, end) if int(call["step"]) == 1 else 1
    return _grown(call, "grad_output", dim, grain if call.shape("grad_output")[dim] else 1)


def _grown(call: Call, source: str, dim: int, grain: int) -> OpRule:
    """The output is longer than the input along `dim`; both are multiples of `grain`."""
    base = names(len(call.out_shape))
    left = tuple(("c", "g") if i == dim else (f,) for i, f in enumerate(base))
    right = tuple(("e", "g") if i == dim else (f,) for i, f in enumerate(base))
    whole = ["c", "e", *(["g"] if grain == 1 else [])]
    return build(call, {source: left}, [right], known={"g": grain}, whole=whole, linear=[[source]])


@derives(aten.split.Tensor, aten.split_with_sizes)
def split(call: Call) -> OpRule:
    """Consecutive parts of one dim."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    parts = [int(v.shape[dim]) for v in call.outputs if isinstance(v, torch.Tensor)]
    return _chunked(call, dim, cut_dim(shape[dim], *parts), parts)


@derives(aten.unbind.int, aten.select.int)
def select(call: Call) -> OpRule:
    """One or all positions of a dim, which disappears."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    base = names(len(shape))
    right = tuple((f,) for i, f in enumerate(base) if i != dim)
    left = tuple((f,) for f in base)
    return build(call, {"self": left}, [right] * len(call.outputs), whole=[base[dim]], linear=[["self"]])


@derives(aten.select_backward)
def select_backward(call: Call) -> OpRule:
    """The transpose of a select."""
    rank = len(call.out_shape)
    dim = call.dim("dim", rank)
    base = names(rank)
    left = tuple((f,) for i, f in enumerate(base) if i != dim)
    return build(call, {"grad_output": left}, [tuple((f,) for f in base)], whole=[base[dim]], linear=[["grad_output"]])


@derives(aten.cat)
def cat(call: Call) -> OpRule:
    """Join along a dim: read every piece as (chunks, g)."""
    shapes = [tuple(node.meta["val"].shape) for _, node in call.named]
    rank = len(call.out_shape)
    dim = call.dim("dim", rank)
    # Empty pieces add nothing and have no positions to share out; by an old convention they may be 1-D.
    lengths = [0 if len(shape) != rank else shape[dim] for shape in shapes]
    grain = cut_dim(*lengths) or 1
    base = names(rank)
    lefts: list[Dims] = []
    whole = ["c", *(["g"] if grain == 1 else [])]
    for index, (shape, length) in enumerate(zip(shapes, lengths, strict=True)):
        along = (f"c{index}", "g") if length else ()
        piece: Dims = tuple(along if i == dim else (f,) for i, f in enumerate(base))
        lefts.append(piece if len(shape) == rank else ((),))
        whole += [f"c{index}"] if length else []
    right = tuple(("c", "g") if i == dim else (f,) for i, f in enumerate(base))
    return build(call, {"tensors": lefts}, [right], known={"g": grain}, whole=whole, linear=[["tensors"]])


@derives(aten.stack)
def stack(call: Call) -> OpRule:
    """Join along a new dim."""
    rank = len(call.out_shape)
    dim = call.dim("dim", rank)
    base = names(rank)
    left = tuple((f,) for i, f in enumerate(base) if i != dim)
    return build(call, {"tensors": [left] * len(call.named)}, [tuple((f,) for f in base)], whole=[base[dim]],
                 linear=[["tensors"]])  # fmt: skip


@derives(aten.constant_pad_nd)
def constant_pad_nd(call: Call) -> OpRule:
    """Padding: a padded dim stays whole."""
    pads = [int(p) for p in call["pad"]]
    rank = len(call.out_shape)
    padded = {rank - 1 - i // 2 for i, p in enumerate(pads) if p}
    base = names(rank)
    left = tuple((f"p{i}",) if i in padded else (f,) for i, f in enumerate(base))
    right = tuple((f"q{i}",) if i in padded else (f,) for i, f in enumerate(base))
    whole = [f"{side}{i}" for i in padded for side in "pq"]
    return build(call, {"self": left}, [right], whole=whole)
