"""Placements and shardings.

A *placement* says how one tensor lies along one mesh axis, with PyTorch's own types: `Replicate()`, `Shard(dim)`,
`Partial(op)`.  A *sharding* is one placement per mesh axis.  A dim that fuses several factors, such as a fused QKV
weight (3 · heads · head_dim), may be cut along an inner one: `shard(dim, split=3)` reads the dim as (3, n, rest)
and cuts the middle.  PyTorch's name for it is `_StridedShard(dim, split_factor=3)`.

Where the factor does not divide (3 heads of 64 on 2 ranks), its positions are dealt out whole: `shard(dim, grain=64)`
cuts 192 as 128 | 64.  PyTorch has no such placement, so it occurs inside a program only, not in what rests; nor has it
one for rows of which each rank has those of its own groups, as many as there are in that step: `ByGroup`.
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
    "ROWS_MARGIN",
    "ByGroup",
    "DimCut",
    "GrainShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "StridedShard",
    "at_rest",
    "cut_along",
    "cuts",
    "describe_placement",
    "describe_sharding",
    "is_sharded",
    "is_uneven",
    "local_shape",
    "meta_value",
    "one_object",
    "parse_placement",
    "replicated",
    "shard",
    "shard_dim",
    "shard_grain",
    "shard_split",
    "size_before",
]  # fmt: skip


_MAX_DIMS = 64
"""PyTorch's tensors have no more."""


@dataclass(frozen=True)
class GrainShard(Placement):
    """Cut `dim`, read as (split, n, grain), along n, which the ranks need not divide: each gets ceil(n / ranks)
    positions of `grain` consecutive entries, the last ones fewer or none."""

    dim: int
    split: int
    grain: int

    def __reduce__(self) -> tuple[type[GrainShard], tuple[int, int, int]]:
        return GrainShard, (self.dim, self.split, self.grain)


ROWS_MARGIN = 1.25
"""How many rows a rank is priced for that has some of the groups, over its even share.  The slowest rank and the
fullest count; routers are trained to balance, and a step that is further off takes more time and memory than predicted.
"""


@dataclass(frozen=True)
class ByGroup(Placement):
    """Rows along `dim` that belong to groups, of which each rank has those of its own groups.

    How many they are is known only in the step, and their order is what the ops that read them agree on
    (`autopar.sorted_rows`), so that no reshard leads there or away.  Shapes are those of `ROWS_MARGIN`.
    """

    dim: int

    def __reduce__(self) -> tuple[type[ByGroup], tuple[int]]:
        return ByGroup, (self.dim,)


@lru_cache(maxsize=1024)
def shard(dim: int, split: int = 1, grain: int = 1) -> Placement:
    """Cut `dim`, read as (split, n, rest), along its middle part; `split=1` is a plain contiguous shard.

    A `grain` above 1 says that n does not divide and what the size of the rest is, which must stay together.
    """
    if grain > 1:
        return GrainShard(dim, split, grain)
    return Shard(dim) if split == 1 else StridedShard(dim, split_factor=split)


def is_sharded(placement: Placement) -> bool:
    """Whether the placement cuts a dim."""
    return type(placement) in _SHARDED


_SHARDED = {Shard, StridedShard, GrainShard, ByGroup}
"""By type: `isinstance` of PyTorch's placements runs Python for each that a placement is not of."""


def shard_dim(placement: Placement) -> int:
    """The dim that a sharded placement cuts."""
    assert isinstance(placement, (Shard, StridedShard, GrainShard, ByGroup))
    return int(placement.dim)


def shard_split(placement: Placement) -> int:
    """The product of the factors that lie outside the cut one in the same dim; 1 for a plain shard."""
    if isinstance(placement, GrainShard):
        return placement.split
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def shard_grain(placement: Placement) -> int:
    """How many consecutive entries of the dim stay together; 1 unless the cut factor does not divide."""
    return placement.grain if isinstance(placement, GrainShard) else 1


def at_rest(sharding: Sharding) -> Sharding:
    """The nearest sharding that PyTorch's `DTensor` has a name for: with the same dims cut, but not by grains."""
    return tuple(shard(p.dim, p.split) if isinstance(p, GrainShard) else p for p in sharding)


def replicated(mesh: Mesh) -> Sharding:
    """Whole on every rank."""
    return one_object((Replicate(),) * mesh.num_axes)


@lru_cache(maxsize=4096)
def one_object(sharding: Sharding) -> Sharding:
    """A sharding that nearly always is one object for all that are equal, so that comparing it takes no time."""
    return sharding


@dataclass(frozen=True)
class DimCut:
    """One step of cutting: along mesh axis number `axis`, read tensor dim `dim` as (split, n, grain) and chunk the n
    positions in the middle as `torch.chunk` does."""

    axis: int
    dim: int
    split: int
    grain: int = 1


@lru_cache(maxsize=4096)
def cuts(sharding: Sharding, mesh: Mesh) -> tuple[DimCut, ...]:
    """The cuts that lead from the whole tensor to one rank's part, in the order in which they apply.

    A placement's split counts the parts of the whole dim that lie outside the cut factor.  When several mesh axes cut
    one dim, the axis with the smaller split holds the more major factor and is applied first; axes with equal splits
    cut the same factor and nest in mesh order, the outer axis first.  A cut made after more major ones sees a dim whose
    outer factor is already smaller, so its split shrinks by the sizes of those axes.

    Raises:
        PlanError: if two axes cut the same dim in a way that has no order: the split of the inner one is not a
            multiple of the number of parts that the outer ones make, or the outer one does not divide.
    """
    wanted = [
        (shard_dim(p), shard_split(p), axis)
        for axis, p in enumerate(sharding)
        if is_sharded(p) and type(p) is not ByGroup
    ]
    out: list[DimCut] = []
    for dim, split, axis in sorted(wanted):
        outer = math.prod(mesh.sizes[a] for d, s, a in wanted if d == dim and s < split)
        if out and out[-1].dim == dim and out[-1].grain > 1:
            raise PlanError(
                f"sharding {describe_sharding(sharding, mesh)} on mesh {mesh}: axis {mesh.names[out[-1].axis]!r} makes "
                f"parts of different sizes of dim {dim}, which axis {mesh.names[axis]!r} cannot cut again; cut another "
                "dim"
            )
        if split % outer:
            raise PlanError(
                f"sharding {describe_sharding(sharding, mesh)} on mesh {mesh}: the split {split} of axis "
                f"{mesh.names[axis]!r} on dim {dim} must be a multiple of {outer}, the number of parts that the axes "
                "with a smaller split make of that dim; cut another dim or another factor"
            )
        out.append(DimCut(axis, dim, split // outer, shard_grain(sharding[axis])))
    return tuple(out)


def cut_along(axis: int, sharding: Sharding, mesh: Mesh) -> DimCut:
    """The cut that a sharding makes along one axis, which must cut a dim."""
    return next(cut for cut in cuts(sharding, mesh) if cut.axis == axis)


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
        inner, rest = divmod(local[cut.dim], cut.split * cut.grain)
        if rest:
            whole = f"split {cut.split}" + (f" times the grain {cut.grain}" if cut.grain > 1 else "")
            raise PlanError(
                f"dim {cut.dim} of {list(shape)} cannot be cut as {describe_sharding(sharding, mesh)} on mesh {mesh}: "
                f"its {local[cut.dim]} positions are no multiple of the {whole}; cut another factor"
            )
        chunk = -(-inner // mesh.sizes[cut.axis])
        position = coordinate[cut.axis] if coordinate is not None else 0
        local[cut.dim] = cut.split * max(0, min(chunk, inner - position * chunk)) * cut.grain
    for dim in {p.dim for p in sharding if type(p) is ByGroup}:
        parts = math.prod(n for p, n in zip(sharding, mesh.sizes, strict=True) if p == ByGroup(dim))
        local[dim] = min(local[dim], math.ceil(local[dim] * ROWS_MARGIN / parts))
    return tuple(local)


def size_before(axis: int, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> int:
    """What the dim that an axis cuts measures before that: on the first rank, after the cuts that the others make of it
    earlier.  Later ones are made inside its parts."""
    order = [made.axis for made in cuts(sharding, mesh)]
    earlier = order[: order.index(axis)]
    rest = tuple(p if a in earlier else Replicate() for a, p in enumerate(sharding))
    return local_shape(shape, rest, mesh)[shard_dim(sharding[axis])]


def is_uneven(sharding: Sharding, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether an axis cuts a dim that it does not divide."""
    if not is_sharded(sharding[axis]) or type(sharding[axis]) is ByGroup:
        return False
    return _divides_unevenly(sharding, axis, shape, mesh)


@lru_cache(maxsize=4096)
def _divides_unevenly(sharding: Sharding, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    sharding = tuple(Replicate() if isinstance(p, ByGroup) else p for p in sharding)
    made = cut_along(axis, sharding, mesh)
    return bool(size_before(axis, sharding, shape, mesh) // (made.split * made.grain) % mesh.sizes[axis])


def describe_placement(placement: Placement) -> str:
    """A placement in words: `replicate`, `shard(0)`, `shard(0, split=3)`, `partial(sum)`, which `parse_placement` reads
    back, and inside programs `shard(0, split=3, grain=64)` and `by_group(0)`."""
    if isinstance(placement, ByGroup):
        return f"by_group({placement.dim})"
    if is_sharded(placement):
        named = {"split": shard_split(placement), "grain": shard_grain(placement)}
        words = [f"{name}={value}" for name, value in named.items() if value > 1]
        return f"shard({', '.join([str(shard_dim(placement)), *words])})"
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
    """Inverse of `describe_placement`, for what may rest.

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
