"""The part of a tensor that a rank holds as slices of the whole, which is how checkpoints name values.

PyTorch's distributed checkpoints record one slice for each rank and `DTensor`.  A dim cut at an inner factor (the heads
of a fused QKV) is several slices, so what a rank holds is listed here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.mesh import Mesh
from autopar.placement import Placement, Sharding, is_sharded, replicated, shard, shard_dim, shard_split
from autopar.runtime.sharding import shard_tensor

ONE = Mesh(("ranks",), (1,))


class Slices:
    """A rank's part of one tensor, in the terms of `torch.distributed.checkpoint`'s planners.

    Args:
        local: the part; loading writes into it.
        shape: of the whole tensor.
        sharding, mesh, rank: how the part lies; by default it is the whole.
    """

    def __init__(
        self, local: Tensor, shape: Sequence[int], sharding: Sharding | None = None, mesh: Mesh = ONE, rank: int = 0
    ) -> None:
        self.local, self.shape = local.detach(), torch.Size(shape)
        sharding = replicated(mesh) if sharding is None else sharding
        runs = [_runs(size, dim, sharding, mesh, rank) for dim, size in enumerate(shape)]
        self._parts: dict[torch.Size, tuple[tuple[int, int, int], ...]] = {}
        """Offset of each slice in the whole -> for each dim its start in the whole, its start in the part, its size."""
        for slices in itertools.product(*runs):
            self._parts[torch.Size(start for start, _, _ in slices)] = slices

    def copied(self) -> Slices:
        """The same slices of a copy in the host's memory."""
        other = copy.copy(self)
        other.local = self.local.to("cpu", copy=True)
        return other

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    def part(self, offset: torch.Size | None) -> Tensor:
        """The slice that begins at `offset` of the whole: a view of the local part."""
        view = self.local
        for dim, (_, start, size) in enumerate(self._parts[offset or torch.Size([0] * len(self.shape))]):
            view = view.narrow(dim, start, size)
        return view

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Where each slice is in the whole, and the view of the local part that holds it."""
        for offset, slices in self._parts.items():
            yield tuple(slice(start, start + size) for start, _, size in slices), self.part(offset)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """What a save planner asks."""
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What a load planner asks."""
        return [
            ChunkStorageMetadata(offsets=offset, sizes=torch.Size(size for _, _, size in slices))
            for offset, slices in self._parts.items()
        ]


def _runs(size: int, dim: int, sharding: Sharding, mesh: Mesh, rank: int) -> list[tuple[int, int, int]]:
    """The stretches of one dim that a rank holds: start in the whole, start in the part, size."""
    if not any(is_sharded(p) and shard_dim(p) == dim for p in sharding):
        return [(0, 0, size)]
    of_dim = tuple(_only(p, dim) for p in sharding)
    held = shard_tensor(torch.arange(size), of_dim, mesh, rank)
    if not len(held):
        return []
    breaks = (held.diff() != 1).nonzero().flatten().add(1).tolist()
    edges = [0, *breaks, len(held)]
    return [(int(held[start]), start, end - start) for start, end in itertools.pairwise(edges)]


def _only(placement: Placement, dim: int) -> Placement:
    """The same cut of a tensor that has only this dim."""
    cuts_it = is_sharded(placement) and shard_dim(placement) == dim
    return shard(0, shard_split(placement)) if cuts_it else replicated(ONE)[0]
