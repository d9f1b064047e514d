"""Placements and shardings.

A *placement* says how one tensor lies along one mesh axis, with PyTorch's own types: `Replicate()`, `Shard(dim)`,
`Partial(op)`.  A *sharding* is one placement per mesh axis.  A dim that fuses several factors, such as a fused QKV
weight (3 · heads · head_dim), may be cut along an inner one: `shard(dim, split=3)` reads the dim as (3, n, rest)
and cuts the middle.  PyTorch's name for it is `_StridedShard(dim, split_factor=3)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar._compat import StridedShard
from autopar.mesh import Mesh

Sharding = tuple[Placement, ...]

__all__ = [
    "Partial", "Placement", "Replicate", "Shard", "Sharding", "StridedShard", "describe_placement", "describe_sharding",
    "is_sharded", "local_shape", "parse_placement", "replicated", "shard", "shard_dim", "shard_split",
]  # fmt: skip


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


def local_shape(
    shape: Sequence[int], sharding: Sharding, mesh: Mesh, coordinate: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Shape of one rank's part of a tensor of global `shape`.

    A dim that does not divide is cut as `torch.chunk` does: every rank gets ceil(size / n), the last ones less or
    nothing.  Without a `coordinate`, the size of the first rank's part (the largest) is returned.
    """
    local = list(shape)
    for axis, placement in enumerate(sharding):
        if is_sharded(placement):
            dim, n = shard_dim(placement), mesh.sizes[axis]
            chunk = -(-local[dim] // n)
            position = coordinate[axis] if coordinate is not None else 0
            local[dim] = max(0, min(chunk, local[dim] - position * chunk))
    return tuple(local)


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
        if split.isdigit() and int(split) > 0:
            return shard(int(args[0]), int(split))
    raise ValueError(f"not a placement: {text!r}")
