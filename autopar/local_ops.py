"""Small functions that a local graph calls where PyTorch has no op: parts whose size depends on the rank.

Only parameters at rest, and their gradients, may be cut unevenly, as `torch.chunk` does: each rank holds ceil(size / n)
positions of the dim, the last ones fewer or none.  Everything here is plain tensor code; the exported program imports
it.
"""

from __future__ import annotations

import torch

HASHED_AT_ONCE = 2**20
"""Elements that random ops hash at once: bounds their integer temporaries to 8 MiB each."""


def chunk_range(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Start and length of a chunk of a dim of `size`, cut as `torch.chunk` does."""
    chunk = -(-size // num_chunks)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def pad_dim(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Zeros appended along `dim` up to `length`."""
    missing = length - value.shape[dim]
    if missing == 0:
        return value
    pads = [0, 0] * (value.dim() - 1 - dim) + [0, missing]
    return torch.nn.functional.pad(value, pads)


def take_chunk(value: torch.Tensor, dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """This rank's chunk of a whole tensor."""
    start, length = chunk_range(value.shape[dim], num_chunks, index)
    return value.narrow(dim, start, length)


def drop_padding(value: torch.Tensor, dim: int, size: int, num_chunks: int, index: int) -> torch.Tensor:
    """The valid part of a padded chunk of a dim whose global length is `size`."""
    return value.narrow(dim, 0, chunk_range(size, num_chunks, index)[1])
