"""Placements and shardings.

A *placement* says how one tensor lies along one mesh axis, with PyTorch's own types: `Replicate()`, `Shard(dim)`,
`Partial(op)`.  A *sharding* is one placement per mesh axis.  A dim that fuses several factors, such as a fused QKV
weight (3 · heads · head_dim), may be cut along an inner one: `shard(dim, split=3)` reads the dim as (3, n, rest)
and cuts the middle.  PyTorch's name for it is `_StridedShard(dim, split_factor=3)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar._compat import StridedShard
from autopar.errors import PlanError
from autopar.mesh import Mesh

Sharding = tuple[Placement, ...]

__all__ = [
    "DimCut", "Partial", "Placement", "Replicate", "Shard", "Sharding", "StridedShard", "cuts", "describe_placement",
    "describe_sharding", "is_sharded", "is_uneven", "local_shape", "meta_value", "parse_placement", "replicated",
    "shard", "shard_dim", "shard_split",
]  # fmt: skip


_MAX_DIMS = 64
"""PyTorch's tensors have no more."""


@lru_cache(maxsize=1024)
def shard(dim: int, split: int = 1) -> Placement:
    """Cut `dim`, read as (split, n, rest), along its middle part; `split=1` is a plain contiguous shard."""
    return Shard(dim) if split == 1 else StridedShard(dim, split_factor=split)


def is_sharded(placement: Placement) -> bool:
    """Whether the placement cuts a dim."""
    return isinstance(placement, (Shard, StridedShard))


def shard_dim(placement: Placement) -> int:
    """The dim that a sharded placement cuts."""
    assert isinstance(placement, (Shard, StridedShard))
    return int(placement.dim)


def shard_split(placement: Placement) -> int:
    """The product of the factors that lie outside the cut one in the same dim; 1 for a plain shard."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def replicated(mesh: Mesh) -> Sharding:
    """Whole on every rank."""
    return (Replicate(),) * mesh.num_axes


@dataclass(frozen=True)
class DimCut:
    """One step of cutting: along mesh axis number `axis`, read tensor dim `dim` as (split, rest) and chunk the rest."""

    axis: int
    dim: int
    split: int


@lru_cache(maxsize=4096)
def cuts(sharding: Sharding, mesh: Mesh) -> tuple[DimCut, ...]:
    """The cuts that lead from the whole tensor to one rank's part, in the order in which they apply.

    A placement's split counts the parts of the whole dim that lie outside the cut factor.  When several mesh axes cut
    one dim, the axis with the smaller split holds the more major factor and is applied first; axes with equal splits
    cut the same factor and nest in mesh order, the outer axis first.  A cut made after more major ones sees a dim whose
    outer factor is already smaller, so its split shrinks by the sizes of those axes.

    Raises:
        PlanError: if two axes cut the same dim in a way that has no order: the split of the inner one is not a
            multiple of the number of parts that the outer ones make.
    """
    wanted = [(shard_dim(p), shard_split(p), axis) for axis, p in enumerate(sharding) if is_sharded(p)]
    out = []
    for dim, split, axis in sorted(wanted):
        outer = math.prod(mesh.sizes[a] for d, s, a in wanted if d == dim and s < split)
        if split % outer:
            raise PlanError(
                f"sharding {describe_sharding(sharding, mesh)} on mesh {mesh}: the split {split} of axis "
                f"{mesh.names[axis]!r} on dim {dim} must be a multiple of {outer}, the number of parts that the axes "
                "with a smaller split make of that dim; cut another dim or another factor"
            )
        out.append(DimCut(axis, dim, split // outer))
    return tuple(out)


@lru_cache(maxsize=4096)
def meta_value(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor on `meta` that says no more than shape and dtype.  Equal ones are one object, for `node.meta` to
    share: making one costs more than all else that a pass does to a node."""
    return torch.empty(shape, dtype=dtype, device="meta")


@lru_cache(maxsize=65536)
def local_shape(
    shape: tuple[int, ...], sharding: Sharding, mesh: Mesh, coordinate: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Shape of one rank's part of a tensor of global `shape`.

    A factor that does not divide is cut as `torch.chunk` does: every rank gets ceil(size / n), the last ones less or
    nothing.  Without a `coordinate`, the size of the first rank's part (the largest) is returned.

    Raises:
        PlanError: as `cuts` does, and if a dim cannot be read as a cut's split demands.
    """
    local = list(shape)
    for cut in cuts(sharding, mesh):
        inner, rest = divmod(local[cut.dim], cut.split)
        if rest:
            raise PlanError(
                f"dim {cut.dim} of {list(shape)} cannot be cut as {describe_sharding(sharding, mesh)} on mesh {mesh}: "
                f"its {local[cut.dim]} positions are no multiple of the split {cut.split}; cut another factor"
            )
        chunk = -(-inner // mesh.sizes[cut.axis])
        position = coordinate[cut.axis] if coordinate is not None else 0
        local[cut.dim] = cut.split * max(0, min(chunk, inner - position * chunk))
    return tuple(local)


def is_uneven(sharding: Sharding, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether an axis cuts a dim that it does not divide."""
    placement = sharding[axis]
    if not is_sharded(placement):
        return False
    rest = (*sharding[:axis], Replicate(), *sharding[axis + 1 :])
    return bool(local_shape(shape, rest, mesh)[shard_dim(placement)] % mesh.sizes[axis])


def describe_placement(placement: Placement) -> str:
    """A placement in words that `parse_placement` reads back: `replicate`, `shard(0)`, `shard(0, split=3)`,
    `partial(sum)`."""
    if is_sharded(placement):
        split = shard_split(placement)
        return f"shard({shard_dim(placement)})" if split == 1 else f"shard({shard_dim(placement)}, split={split})"
    return f"partial({placement.reduce_op})" if isinstance(placement, Partial) else "replicate"


def describe_sharding(sharding: Sharding, mesh: Mesh) -> str:
    """A sharding in words, such as `shard(0)@dp`; axes along which the tensor is whole are left out."""
    parts = [
        f"{describe_placement(p)}@{name}"
        for p, name in zip(sharding, mesh.names, strict=True)
        if not isinstance(p, Replicate)
    ]
    return ", ".join(parts) or "replicate"


def parse_placement(text: str) -> Placement:
    """Inverse of `describe_placement`.

    Raises:
        ValueError: if the text is not a placement.
    """
    word, _, rest = text.strip().partition("(")
    args = [part.strip() for part in rest.rstrip(")").split(",")] if rest else []
    if word == "replicate" and not args:
        return Replicate()
    if word == "partial" and len(args) == 1 and args[0] in {"sum", "max", "min"}:
        return Partial(args[0])
    if word == "shard" and 1 <= len(args) <= 2 and args[0].isdigit():
        split = args[1].removeprefix("split=") if len(args) == 2 else "1"
        if split.isdigit() and 0 < int(split) < 2**63 and int(args[0]) < _MAX_DIMS:
            return shard(int(args[0]), int(split))
    raise ValueError(f"not a placement: {text!r}")
