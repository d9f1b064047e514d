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


def overlaps(size: int, num_chunks: int, index: int, grain: int, other_grain: int) -> list[int]:
    """How much of chunk `index` of a dim of `size`, cut by `grain`, lies in each chunk of it cut by `other_grain`."""
    start, length = (n * grain for n in chunk_range(size // grain, num_chunks, index))
    others = (chunk_range(size // other_grain, num_chunks, other) for other in range(num_chunks))
    bounds = ((first * other_grain, (first + count) * other_grain) for first, count in others)
    return [max(0, min(start + length, end) - max(start, begin)) for begin, end in bounds]


def pad_dim(value: torch.Tensor, dim: int, length: int, split: int = 1) -> torch.Tensor:
    """Zeros appended along `dim`, or to each of the `split` parts that it consists of, up to `length` in all."""
    missing = (length - value.shape[dim]) // split
    if missing == 0:
        return value
    if split > 1:
        return pad_dim(parted(value, dim, split), dim + 1, length // split).flatten(dim, dim + 1)
    pads = [0, 0] * (value.dim() - 1 - dim) + [0, missing]
    return torch.nn.functional.pad(value, pads)


def mask_padding(
    value: torch.Tensor, dim: int, size: int, num_chunks: int, index: int, reduce: str, split: int = 1, grain: int = 1
) -> torch.Tensor:
    """A padded chunk of a dim whose global length is `size`, the padding such as changes no sum, maximum or minimum.

    With `split` the dim consists of so many such chunks; `grain` consecutive entries of it stay together.
    """
    length = chunk_range(size // grain, num_chunks, index)[1] * grain
    missing = value.shape[dim] // split - length
    if missing == 0:
        return value
    masked = value.clone(memory_format=torch.contiguous_format if split > 1 else torch.preserve_format)
    parts, place = (parted(masked, dim, split), dim + 1) if split > 1 else (masked, dim)
    parts.narrow(place, length, missing).fill_(_neutral(value.dtype, reduce))
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


def take_chunk(
    value: torch.Tensor, dim: int, num_chunks: int, index: int, split: int = 1, grain: int = 1
) -> torch.Tensor:
    """This rank's chunk of a whole tensor, or of each of the `split` parts of its dim, by grains."""
    start, length = chunk_range(value.shape[dim] // (split * grain), num_chunks, index)
    if split > 1:
        return parted(value, dim, split).narrow(dim + 1, start * grain, length * grain).flatten(dim, dim + 1)
    return value.narrow(dim, start * grain, length * grain)


def drop_padding(
    value: torch.Tensor, dim: int, size: int, num_chunks: int, index: int, split: int = 1, grain: int = 1
) -> torch.Tensor:
    """The valid part of a padded chunk of a dim whose global length is `size`; `split` and `grain` as in
    `mask_padding`."""
    length = chunk_range(size // grain, num_chunks, index)[1] * grain
    if split > 1 and value.shape[dim] > split * length:
        return parted(value, dim, split).narrow(dim + 1, 0, length).flatten(dim, dim + 1)
    return value.narrow(dim, 0, split * length)


def parted(value: torch.Tensor, dim: int, split: int) -> torch.Tensor:
    """The tensor with its dim read as (split, rest); a view of a dense one."""
    shape = value.shape
    return value.reshape(*shape[:dim], split, shape[dim] // split, *shape[dim + 1 :])
