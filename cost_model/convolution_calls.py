"""A call of a convolution, and how large its tensors are as kernels on a CPU copy them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar._compat import has_avx512, onednn_computes

_NARROW_BLOCK, WIDE_BLOCK = 8, 16

PLAIN_CHANNELS = 3
"""An image of so many channels is read as it is."""

_PAGE_BYTES = 4096

_PRODUCT_BYTES = 40
"""Of one product in a list that a kernel is given."""

_SMALL_IMAGE, _SMALL_FILTER = 20480, 3
"""Elements up to which a single image is left to PyTorch's own kernels, if the filters are no wider than that."""

_MANY_IMAGES = 16
"""Fewer are left to them if filters see one position at a time, and a single thread computes."""


def channel_block() -> int:
    """Channels in a block of oneDNN's formats, on this machine."""
    return WIDE_BLOCK if has_avx512() else _NARROW_BLOCK


@dataclass(frozen=True)
class Convolution:
    """A convolution, or one of its gradients; sizes are in bytes.

    Attributes:
        image, filters: its operands, as they lie in memory.
        result: what it gives, or the gradient of that.
        stride, padding, dilation: one number for each dim, or one for all.
        groups: into which channels are parted.
    """

    image: torch.Tensor
    filters: torch.Tensor
    result: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def kernel(self) -> Sequence[int]:
        """Positions of the filters along each dim."""
        return self.filters.shape[2:]

    @property
    def is_channels_last(self) -> bool:
        """Whether image or filters have their channels last, and so all will."""
        return _has_channels_last(self.image) or _has_channels_last(self.filters)

    @property
    def is_strided(self) -> bool:
        """Whether filters skip positions."""
        return max(self.stride) > 1

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has one filter of its own."""
        return self.groups > 1 and self.groups == self.image.shape[1] == len(self.filters)

    @property
    def is_unusual(self) -> bool:
        """Whether a kernel for images in blocks may refuse it."""
        return self.groups > 1 or max(self.dilation) > 1 or self.image.dim() > 4

    @property
    def is_beyond(self) -> bool:
        """Whether filters are larger than the image."""
        return any(width > size for width, size in zip(self.kernel, self.image.shape[2:], strict=True))

    @property
    def refuses_blocks(self) -> bool:
        """Whether no kernel for images in narrow blocks gives the filters' gradient."""
        return channel_block() == _NARROW_BLOCK and self.image.dim() == 4 and self.kernel[0] > self.image.shape[2]

    @property
    def is_single_product(self) -> bool:
        """Whether filters see each position of the image alone, and all of them."""
        return math.prod(self.kernel) == 1 and max(self.padding) == 0 and not self.is_strided

    @property
    def is_left_to_pytorch(self) -> bool:
        """Whether it is too small for oneDNN, or of a dtype that oneDNN does not compute here."""
        if not onednn_computes(self.image.dtype):
            return True
        if self.is_single_product and max(self.dilation) == 1 and torch.get_num_threads() == 1:
            return len(self.image) < _MANY_IMAGES
        small = self.groups == 1 and (min(self.kernel[-2:]) <= _SMALL_FILTER or self.image.dim() == 3)
        return small and len(self.image) == 1 and self.image.numel() <= _SMALL_IMAGE

    def is_plain(self, filter_gradient: bool = False) -> bool:
        """Whether kernels read an image of few channels as it is."""
        channels = self.image.shape[1]
        few = channels <= PLAIN_CHANNELS
        if filter_gradient and channel_block() == _NARROW_BLOCK:
            few = channels == PLAIN_CHANNELS
        return few and self.groups == 1 and math.prod(self.kernel) > 1

    def copies(self) -> int:
        """Image and result, and filters if these are not dense, where they do not lie as is wanted."""
        lies = _has_channels_last if self.is_channels_last else torch.Tensor.is_contiguous
        filters = 0 if self.filters.is_contiguous() or self.is_channels_last else num_bytes(self.filters)
        return filters + sum(num_bytes(t) for t in (self.image, self.result) if not lies(t))

    def filter_copy(self) -> int:
        """Filters with their channels last, where the image has them so, and that is another order."""
        return num_bytes(self.filters) if self.is_channels_last and math.prod(self.kernel) > 1 else 0

    def image_in_blocks(self) -> int:
        """The image with its channels in whole blocks."""
        return in_blocks(self.image, 1)

    def result_in_blocks(self) -> int:
        """The result with its channels in whole blocks."""
        return in_blocks(self.result, 1)

    def filters_in_blocks(self, filter_gradient: bool = False) -> int:
        """With groups, or for an image that is read as it is, the filters' second dim is not padded."""
        alone = self.groups > 1 or self.is_plain(filter_gradient)
        return in_blocks(self.filters, *((0,) if alone else (0, 1)))

    def filters_in_group_blocks(self) -> int:
        """Both dims in whole blocks within each group."""
        return self.groups * in_blocks(self.filters[: len(self.filters) // self.groups], 0, 1)

    def unfolded(self) -> int:
        """What the filters of one group see of one image, of one depth, for each thread."""
        if math.prod(self.kernel) == 1 and not self.is_strided:
            return 0
        positions = math.prod(self.result.shape[-2:] if self.image.dim() > 4 else self.result.shape[2:])
        size = math.prod(self.filters.shape[1:]) * positions * self.image.element_size()
        return (size + 128) * torch.get_num_threads()

    def thinned_out(self) -> int:
        """Where filters are a single position and read with a stride: what they read of one image, per thread."""
        if math.prod(self.kernel) > 1 or not self.is_strided:
            return 0
        stride = self.stride
        seen = len(self.image) * (math.prod(stride) if len(stride) > 1 else stride[0] ** (self.image.dim() - 2))
        return (self.image_in_blocks() // max(1, seen) + WIDE_BLOCK**2) * torch.get_num_threads()

    def products(self) -> int:
        """Per thread, the list of products that a channels-last kernel is given."""
        return self._product_list() * torch.get_num_threads() + _PAGE_BYTES

    def _product_list(self) -> int:
        """A product for each position of the filters, and as many more as fill pages."""
        pages = in_pages(_PRODUCT_BYTES * math.prod(self.kernel))
        return -(-pages // _PRODUCT_BYTES) * _PRODUCT_BYTES

    def strided_scratch(self) -> int:
        """What the gradient of a strided convolution's image takes beside copies: per thread a padded copy of one
        image's gradient, and of a row of the image if that is not a multiple of the stride."""
        size, width, stride = self.image.element_size(), self.image.shape[-1], self.stride[-1]
        need = self._product_list() + in_pages(math.prod(self.image.shape[2:]) * self.groups)
        need += size * in_pages(self._padded_positions() * self.result.shape[1])
        if width % stride:
            need += size * in_pages((width + stride) * stride * self.image.shape[1]) + _PAGE_BYTES
        return need * torch.get_num_threads() + 3 * _PAGE_BYTES

    def _padded_positions(self) -> int:
        """Positions of the result with as many around them as filters over the image's ends would see."""
        num = 1
        for i, (size, given, width) in enumerate(
            zip(self.image.shape[2:], self.result.shape[2:], self.kernel, strict=True)
        ):
            step, before = self.stride[min(i, len(self.stride) - 1)], self.padding[min(i, len(self.padding) - 1)]
            after = (given - 1) * step + width - size - before
            num *= given + max(0, width - 1 - before) // step + max(0, width - 1 - after) // step
        return num


def num_bytes(tensor: torch.Tensor) -> int:
    """Of a tensor's elements."""
    return int(tensor.numel()) * tensor.element_size()


def in_blocks(tensor: torch.Tensor, *dims: int) -> int:
    """Bytes of a tensor with some dims padded to whole blocks."""
    block = channel_block()
    shape = [-(-n // block) * block if dim in dims else n for dim, n in enumerate(tensor.shape)]
    return math.prod(shape) * tensor.element_size()


def in_pages(num: int) -> int:
    """Rounded up to a multiple of a page's bytes."""
    return -(-num // _PAGE_BYTES) * _PAGE_BYTES


def _has_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=formats[tensor.dim()])
