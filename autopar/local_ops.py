"""Small functions that a local graph calls where PyTorch has no op: parts whose size depends on the rank.

What does not divide is cut as `torch.chunk` does: each rank holds ceil(size / n) positions of the dim, the last ones
fewer or none, and pads them where it computes.  Everything here is plain tensor code; the exported program imports
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


def mask_padding(value: torch.Tensor, dim: int, size: int, num_chunks: int, index: int, reduce: str) -> torch.Tensor:
    """A padded chunk of a dim whose global length is `size`, the padding such as changes no sum, maximum or minimum."""
    length = chunk_range(size, num_chunks, index)[1]
    missing = value.shape[dim] - length
    if missing == 0:
        return value
    masked = value.clone()
    masked.narrow(dim, length, missing).fill_(_neutral(value.dtype, reduce))
    return masked


def _neutral(dtype: torch.dtype, reduce: str) -> float:
    if reduce == "sum":
        return 0
    if dtype.is_floating_point:
        return float("-inf") if reduce == "max" else float("inf")
    if dtype is torch.bool:
        return reduce == "min"
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "max" else limits.max


def take_chunk(value: torch.Tensor, dim: int, num_chunks: int, index: int) -> torch.Tensor:
    """This rank's chunk of a whole tensor."""
    start, length = chunk_range(value.shape[dim], num_chunks, index)
    return value.narrow(dim, start, length)


def drop_padding(value: torch.Tensor, dim: int, size: int, num_chunks: int, index: int) -> torch.Tensor:
    """The valid part of a padded chunk of a dim whose global length is `size`."""
    return value.narrow(dim, 0, chunk_range(size, num_chunks, index)[1])
