"""Memory that convolutions take for themselves on a CPU.

PyTorch leaves them to oneDNN, but for some small ones and some dtypes.  oneDNN has kernels of several kinds, and which
of them it takes depends on the call and on the CPU's instructions:

* *blocked*: image, filters and result are copied with their channels padded to blocks;
* *channels-last*: filters are copied in blocks, image and result only if they do not lie so already;
* *unfolded*: a product with what the filters see of one image.

So what is returned is an upper bound: the most that any kernel needs which the call may get on a CPU like the one that
plans.  The rules were read off the allocator with PyTorch 2.13 on a CPU with AVX2.  With AVX-512, for which they follow
oneDNN's source alone, they never give less than coarser rules that were read off there (`wide_convolutions`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.cost_model import wide_convolutions
from autopar.cost_model.convolution_calls import WIDE_BLOCK, Convolution, channel_block, in_blocks, in_pages, num_bytes

_WIDEST_FILTER, _WIDEST_GROUPED_FILTER = 14, 3
"""The gradients of wider filters are products with an unfolded image."""

_WIDEST_PADDED_FILTER = 7
"""Wider filters on a padded image may be applied by such products, too."""

_WIDEST_WRITTEN_BLOCK = 32
"""Channels-last kernels copy filters in blocks of the channels that they write: of so many or fewer, or of more that
divide them."""

_MEETING_PAGES = 4
"""By which the threads meet that sum a gradient of the filters; and as many for that of the bias."""


def forward_workspace(result: Any, args: list[Any]) -> int:
    """Workspace of `aten.convolution(image, filters, bias, stride, padding, dilation, transposed, …, groups)`."""
    image, filters, _, stride, padding, dilation, transposed, _, groups = args
    call = Convolution(image, filters, result, stride, padding, dilation, groups)
    if transposed:
        need = call.image_in_blocks() + call.filters_in_blocks() + 2 * call.result_in_blocks() - num_bytes(result)
    elif call.is_left_to_pytorch:
        need = _own_forward(call)
    else:
        need = max(_forward_kernels(call))
        if channel_block() == WIDE_BLOCK:
            need = max(need, wide_convolutions.forward_workspace(result, args))
    return call.copies() + need


def backward_workspace(result: Any, args: list[Any]) -> int:
    """Workspace of `aten.convolution_backward(gradient, image, filters, …, groups, output_mask)`: that of the image's
    gradient, which comes first, or of the filters', whichever is larger."""
    gradient, image, filters, _, stride, padding, dilation, transposed, _, groups, mask = args
    call = Convolution(image, filters, gradient, stride, padding, dilation, groups)
    bias = int(4 * gradient.shape[1] * gradient.element_size())
    if transposed:
        return call.copies() + call.result_in_blocks() + call.image_in_blocks() + in_blocks(filters, 0, 1) + bias
    if call.is_left_to_pytorch:
        return call.copies() + _own_backward(call, mask)
    needs = [0]
    if mask[0]:
        later = num_bytes(filters) if mask[1] else 0  # the filters' gradient, which does not exist yet
        needs.append(max(_image_gradient_kernels(call)) - later)
    if mask[1]:
        sums = _thread_sums(bias) if mask[2] else 0
        needs.append(max(_filter_gradient_kernels(call)) + bias + sums)
    if channel_block() == WIDE_BLOCK:
        needs.append(wide_convolutions.backward_workspace(result, args))
    return call.copies() + max(needs)


# What each kernel of oneDNN needs that a call may get


def _forward_kernels(call: Convolution) -> list[int]:
    unfolded = [call.unfolded()] if call.is_unusual or max(call.kernel) > _WIDEST_PADDED_FILTER else []
    if call.is_channels_last:
        filters = max(_filters_in_written_blocks(call, 0), in_blocks(call.filters, 0))
        return [*unfolded, call.filter_copy() + filters + call.products()]
    result = call.result_in_blocks()
    image = 0 if call.is_plain() else call.image_in_blocks()
    blocked = image + call.filters_in_blocks() + result - num_bytes(call.result) + call.thinned_out()
    copied = result * (2 if call.image.dim() > 4 and call.groups > 1 else 1)
    return [*unfolded, blocked, copied]


def _image_gradient_kernels(call: Convolution) -> list[int]:
    unfolded = [call.unfolded()] if call.is_unusual or max(call.kernel) > _WIDEST_PADDED_FILTER else []
    if call.is_channels_last:
        filters = _filters_in_written_blocks(call, 1)
        if call.groups > 1 and not (call.is_depthwise and max(call.dilation) == 1):
            filters = max(filters, call.filters_in_group_blocks())
        scratch = call.strided_scratch() if call.is_strided else call.products() + 128
        return [*unfolded, call.filter_copy() + filters + scratch]
    image = call.image_in_blocks()
    filters = in_blocks(call.filters, *((0, 1) if call.groups == 1 else (0,)))
    kernels = [*unfolded, image, filters + call.result_in_blocks() + image - num_bytes(call.image)]
    if call.is_strided:  # with channels last, and copied from there
        filters = _filters_in_written_blocks(call, 1)
        kernels += [num_bytes(call.result) + filters + call.strided_scratch(), 2 * num_bytes(call.image)]
    return kernels


def _filter_gradient_kernels(call: Convolution) -> list[int]:
    filters, threads = num_bytes(call.filters), torch.get_num_threads()
    widest = _WIDEST_FILTER if call.groups == 1 else _WIDEST_GROUPED_FILTER
    is_wide = max(call.kernel) > widest
    unfolded = [4 * filters * threads + call.unfolded() + 256] if call.is_unusual or is_wide or call.is_beyond else []
    if call.is_channels_last:
        by_group = call.groups > 1 and not (call.is_depthwise and not is_wide)
        blocks = call.filters_in_group_blocks() if by_group else call.filters_in_blocks(filter_gradient=True)
        blocks += _thread_sums(blocks)
        turned = num_bytes(call.image[:1]) + 128
        needs = [need + turned for need in unfolded]
        if not call.refuses_blocks:
            needs.append(blocks + call.thinned_out())
        return [call.filter_copy() + filters + need for need in needs]
    if is_wide or call.refuses_blocks:
        return [need + call.result_in_blocks() for need in unfolded]
    image = 0 if call.is_plain(filter_gradient=True) else call.image_in_blocks()
    blocks = call.filters_in_blocks(filter_gradient=True)
    image += _thread_sums(blocks)
    return [*unfolded, blocks, image + call.result_in_blocks() + blocks - filters + call.thinned_out()]


def _thread_sums(size: int) -> int:
    """Where several threads sum a gradient of so many bytes: each one's sum, and what they meet by."""
    threads = torch.get_num_threads()
    return threads * size + in_pages(1) * _MEETING_PAGES if threads > 1 else 0


def _filters_in_written_blocks(call: Convolution, dim: int) -> int:
    """Filters in blocks of the channels that a channels-last kernel writes, which are their dim 0 or 1."""
    written = len(call.filters) // call.groups if dim == 0 else call.filters.shape[1]
    blocks = range(channel_block(), _WIDEST_WRITTEN_BLOCK + 1, channel_block())
    if written <= _WIDEST_WRITTEN_BLOCK:
        padded = min(block for block in blocks if block >= written)
    else:
        padded = max(-(-written // block) * block for block in blocks[-2:])
    return num_bytes(call.filters) // written * padded


# PyTorch's own kernels


def _own_forward(call: Convolution) -> int:
    need = _own_unfolded(call)
    if _runs_by_group(call):
        need = max(need + num_bytes(call.image) // call.groups, num_bytes(call.result))
    return need + call.filter_copy()


def _own_backward(call: Convolution, mask: Sequence[bool]) -> int:
    image, filters = mask[0] * num_bytes(call.image), mask[1] * num_bytes(call.filters)
    folds_at_once = not mask[1] and call.image.dim() < 5 and max(call.dilation) == 1
    need = 0 if folds_at_once else _own_unfolded(call, image_gradient=mask[0])
    if _runs_by_group(call):
        need = max(need + (num_bytes(call.image) + num_bytes(call.result)) // call.groups, image + filters)
    return need + call.filter_copy()


def _runs_by_group(call: Convolution) -> bool:
    """Whether they run for each group on copies of its channels, and what they give is joined."""
    return call.groups > 1 and (call.image.dim() < 5 or max(call.dilation) > 1)


def _own_unfolded(call: Convolution, image_gradient: bool = False) -> int:
    """What the filters see of all images, or of one if it is dilated; of all groups, unless they are run one by one."""
    is_dilated = max(call.dilation) > 1
    unfolds_all = call.image.dim() > 4 and (image_gradient or call.groups > 1)
    if call.is_single_product and not is_dilated and not unfolds_all:
        return 0
    size = math.prod(call.filters.shape[1:]) * math.prod(call.result.shape[2:]) * call.image.element_size()
    return size * (1 if is_dilated else len(call.image)) * (1 if _runs_by_group(call) else call.groups)
