"""Cutting a whole tensor into the ranks' parts, and putting the parts together again.

How a sharding reads as a sequence of cuts, `autopar.placement.cuts` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import PlanError, VerificationError
from autopar.local_ops import parted, take_chunk
from autopar.mesh import Mesh
from autopar.placement import (
    DimCut,
    Partial,
    Placement,
    Replicate,
    Sharding,
    at_rest,
    cuts,
    describe_sharding,
    is_sharded,
    shard,
    shard_dim,
    shard_split,
)


def device_placements(sharding: Sharding, mesh: Mesh) -> tuple[Placement, ...]:
    """The same layout as PyTorch's `DTensor` spells it.

    DTensor applies placements from left to right, so a split counts what is left of the outer factor after the axes
    before it in the mesh, not the whole factor.

    Raises:
        PlanError: if DTensor cannot read the layout back (`full_tensor` fails or gives wrong values, as of torch
            2.13): a dim cut by several axes can have one split only, and if the axis with the split is not the last
            of them, the split must equal the number of parts that the later ones make.
    """
    if sharding != at_rest(sharding):
        raise PlanError(
            f"PyTorch's DTensor cannot hold a tensor that lies as {describe_sharding(sharding, mesh)}: a factor that "
            "the ranks do not divide is cut inside a program only; store it as "
            f"{describe_sharding(at_rest(sharding), mesh)}"
        )
    local_splits = {cut.axis: cut.split for cut in cuts(sharding, mesh)}
    out = list(sharding)
    for axis, placement in enumerate(sharding):
        if not is_sharded(placement):
            continue
        dim = shard_dim(placement)
        same_dim = [a for a in local_splits if shard_dim(sharding[a]) == dim]
        outer = math.prod(
            mesh.sizes[a] for a in same_dim if a < axis and shard_split(sharding[a]) < shard_split(placement)
        )
        out[axis] = shard(dim, shard_split(placement) // outer)
        later = math.prod(mesh.sizes[a] for a in same_dim if a > axis)
        splits = [a for a in same_dim if a <= axis and shard_split(out[a]) > 1]
        if len(splits) > 1 or (splits and axis != max(same_dim) and shard_split(out[axis]) not in (1, later)):
            raise PlanError(
                f"PyTorch's DTensor cannot hold a tensor that lies as {describe_sharding(sharding, mesh)} on mesh "
                f"{mesh}: several axes cut dim {dim} and their splits do not nest; store it with another dim cut, or "
                f"whole along axis {mesh.names[axis]!r}"
            )
    return tuple(out)


def shard_tensor(full: Tensor, sharding: Sharding, mesh: Mesh, rank: int) -> Tensor:
    """The part of `full` that `rank` holds: a view where possible.

    A dim that does not divide is cut as `torch.chunk` does, so the last ranks get less or nothing.  Of a `Partial`
    sum the first rank of the axis gets the value and the others zeros.
    """
    coordinate = mesh.coordinate(rank)
    local = full
    for cut in cuts(sharding, mesh):
        local = _piece(local, cut, mesh.sizes[cut.axis], coordinate[cut.axis])
    for axis, placement in enumerate(sharding):
        if isinstance(placement, Partial) and placement.reduce_op == "sum" and coordinate[axis] > 0:
            local = torch.zeros_like(local)
    return local


def unshard(locals_: Sequence[Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """Put the parts of all ranks (in rank order) together to the whole tensor of `shape`; inverse of `shard_tensor`.

    Raises:
        VerificationError: if the parts do not make up `shape`, or ranks that should hold equal copies do not
            (beyond the rounding of the dtype).
    """
    if len(locals_) != mesh.num_ranks:
        raise VerificationError(f"mesh {mesh} has {mesh.num_ranks} ranks, but {len(locals_)} parts were given")
    parts = {mesh.coordinate(rank): local for rank, local in enumerate(locals_)}
    for axis, placement in enumerate(sharding):
        if isinstance(placement, (Partial, Replicate)):
            parts = {at: _combine(group, placement, mesh.names[axis]) for at, group in _groups(parts, axis).items()}
    for cut in reversed(cuts(sharding, mesh)):
        parts = {at: _join(group, cut) for at, group in _groups(parts, cut.axis).items()}
    (whole,) = parts.values()
    if tuple(whole.shape) != tuple(shape):
        raise VerificationError(
            f"the parts of a tensor that lies as {describe_sharding(sharding, mesh)} on mesh {mesh} join to shape "
            f"{list(whole.shape)}, expected {list(shape)}"
        )
    return whole


def _piece(tensor: Tensor, cut: DimCut, num_parts: int, position: int) -> Tensor:
    size = tensor.shape[cut.dim]
    if size % (cut.split * cut.grain):
        raise PlanError(
            f"dim {cut.dim} of {list(tensor.shape)} cannot be read as ({cut.split}, …, {cut.grain}): {size} does not "
            "divide"
        )
    return take_chunk(tensor, cut.dim, num_parts, position, cut.split, cut.grain)


def _join(pieces: list[Tensor], cut: DimCut) -> Tensor:
    if cut.split == 1:
        return torch.cat(pieces, cut.dim)
    parts = [parted(piece, cut.dim, cut.split) for piece in pieces]
    return torch.cat(parts, cut.dim + 1).flatten(cut.dim, cut.dim + 1)


def _groups(parts: dict[tuple[int, ...], Tensor], axis: int) -> dict[tuple[int, ...], list[Tensor]]:
    """Parts that differ only in their position along `axis`, in order; keyed by the position with that axis at 0."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for coordinate in sorted(parts):
        groups.setdefault((*coordinate[:axis], 0, *coordinate[axis + 1 :]), []).append(parts[coordinate])
    return groups


def _combine(copies: list[Tensor], placement: Placement, axis: str) -> Tensor:
    if isinstance(placement, Partial):
        return reduce_tensors(copies, placement.reduce_op)
    for position, copy in enumerate(copies[1:], start=1):
        if not _same(copies[0], copy):
            raise VerificationError(
                f"ranks at positions 0 and {position} of axis {axis!r} should hold equal copies but do not: "
                f"shapes {list(copies[0].shape)} and {list(copy.shape)}{_difference(copies[0], copy)}; "
                "a reduction over this axis is missing or a rank computed something else"
            )
    return copies[0]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()) or a.numel() == 0:
        return torch.equal(a, b)
    scale = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    # Copies come from the same operations on equal inputs; only the order of a sum may differ.
    return torch.allclose(a, b, rtol=0.0, atol=1000 * torch.finfo(a.dtype).eps * scale, equal_nan=True)


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype is torch.bool:
        return ""
    return f", largest difference {(a - b).abs().max().item():.3g}"


def reduce_tensors(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduce equal-shaped tensors with the reduction named `op` of a collective: `sum`, `avg`, `max`, `min`, `product`.

    Returns a new tensor, reduced in order.
    """
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("sum", "avg"):
            total += tensor
        elif op in ("max", "min"):
            total = torch.maximum(total, tensor) if op == "max" else torch.minimum(total, tensor)
        elif op == "product":
            total *= tensor
        else:
            raise VerificationError(f"unknown reduction {op!r}")
    return total / len(tensors) if op == "avg" else total
