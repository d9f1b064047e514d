"""What convolutions of oneDNN's take for themselves on CPUs with AVX-512, at most.

There, it computes on copies of image, filters and result whose channels are padded to blocks of 16; an image of at most
three channels is read as it is.  The rules were read off the allocator with PyTorch 2.13: kernels that need less are
not told apart, but for a few that need more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.cost_model.convolution_calls import PLAIN_CHANNELS, WIDE_BLOCK, in_blocks, num_bytes

_WIDEST_FILTER, _WIDEST_GROUPED_FILTER = 14, 3
"""Wider filters' gradients are matmuls on an unfolded image, summed in buffers of the filters' size."""

_CHANNELS_LAST_BUFFERS = 257
"""So many of those where a wide filter has a group for each channel and the image has its channels last."""

_SCRATCH_BYTES = 2**16
"""Per thread, where the gradient of the image of a strided convolution is computed."""


def forward_workspace(result: Any, args: list[Any]) -> int:
    """Workspace of `aten.convolution(image, filters, bias, stride, padding, dilation, transposed, …, groups)`."""
    image, filters, stride, transposed = args[0], args[1], args[3], args[6]
    padded_result = in_blocks(result, 1)
    computing = _image(image) + _filters(filters, args[8], image) + padded_result - num_bytes(result)
    if transposed:
        computing += padded_result
    return max(computing + _thinned_out(image, filters, stride), padded_result)


def backward_workspace(result: Any, args: list[Any]) -> int:
    """Workspace of `aten.convolution_backward(gradient, image, filters, …, groups, output_mask)`: that of the image's
    gradient or of the filters', whichever is larger."""
    gradient, image, filters, stride, transposed, groups, mask = (*args[:3], args[4], args[7], args[9], args[10])
    needs = [0]
    if mask[0]:
        needs.append(_image_gradient(gradient, image, filters, stride, groups))
    if mask[1]:
        needs.append(_filter_gradient(gradient, image, filters, stride, groups))
    if transposed:
        needs.append(in_blocks(gradient, 1) + in_blocks(image, 1) + in_blocks(filters, 0, 1))
    return max(needs) + int(4 * gradient.shape[1] * gradient.element_size())  # the bias's gradient


def _image_gradient(
    gradient: torch.Tensor, image: torch.Tensor, filters: torch.Tensor, stride: Sequence[int], groups: int
) -> int:
    padded = in_blocks(image, 1)
    need = in_blocks(filters, *((0, 1) if groups == 1 else (0,))) + in_blocks(gradient, 1) + padded - num_bytes(image)
    if max(stride) > 1:
        return max(need + padded + _SCRATCH_BYTES * torch.get_num_threads(), 2 * padded)
    return max(need, padded)


def _filter_gradient(
    gradient: torch.Tensor, image: torch.Tensor, filters: torch.Tensor, stride: Sequence[int], groups: int
) -> int:
    if max(filters.shape[2:]) > (_WIDEST_FILTER if groups == 1 else _WIDEST_GROUPED_FILTER):
        if groups == image.shape[1] and not image.is_contiguous():
            return _CHANNELS_LAST_BUFFERS * num_bytes(filters)
        unfolded = math.prod(filters.shape[1:]) * math.prod(gradient.shape[2:]) * image.element_size()
        return 4 * num_bytes(filters) + unfolded + in_blocks(gradient, 1)
    padded = _filters(filters, groups, image)
    need = _image(image) + in_blocks(gradient, 1) + padded - num_bytes(filters)
    return max(need + _thinned_out(image, filters, stride), padded)


def _thinned_out(image: torch.Tensor, filters: torch.Tensor, stride: Sequence[int]) -> int:
    """Where filters are a single position and read with a stride: what they read of one image, per thread."""
    if math.prod(filters.shape[2:]) > 1 or max(stride) == 1:
        return 0
    positions = len(image) * (math.prod(stride) if len(stride) > 1 else stride[0] ** (image.dim() - 2))
    return (_image(image) // max(1, positions) + WIDE_BLOCK**2) * torch.get_num_threads()


def _image(image: torch.Tensor) -> int:
    return 0 if image.shape[1] <= PLAIN_CHANNELS else in_blocks(image, 1)


def _filters(filters: torch.Tensor, groups: int, image: torch.Tensor) -> int:
    """With groups, or with few channels, the filters' second dim is not padded."""
    return in_blocks(filters, *((0, 1) if groups == 1 and image.shape[1] > PLAIN_CHANNELS else (0,)))
