"""Calls of image ops; see `rule_cases`."""

from __future__ import annotations

from typing import Any

import torch
from rule_cases import Case, Random, case, f, i

aten = torch.ops.aten


def conv(
    x: Random, w: Random, bias: Random | None, stride: int = 1, pad: int = 1, groups: int = 1, transposed: bool = False
) -> Case:
    num = len(w.shape) - 2
    ones = [1] * num
    return case(aten.convolution.default, x, w, bias, [stride] * num, [pad] * num, ones, transposed, [0] * num, groups)


def conv_backward(
    grad: Random, x: Random, w: Random, bias_sizes: list[int] | None, mask: list[bool], stride: int = 1, pad: int = 1,
    groups: int = 1, transposed: bool = False,
) -> Case:  # fmt: skip
    num = len(w.shape) - 2
    ones = [1] * num
    rest: tuple[Any, ...] = ([stride] * num, [pad] * num, ones, transposed, [0] * num, groups, mask)
    return case(aten.convolution_backward.default, grad, x, w, bias_sizes, *rest)


IMAGES = [
    conv(f(6, 4, 5, 7), f(6, 4, 3, 3), None),
    conv(f(6, 4, 5, 7), f(6, 4, 3, 3), f(6), stride=2),
    conv(f(6, 4, 7), f(12, 4, 3), f(12)),
    conv(f(6, 4, 5, 5, 5), f(6, 4, 3, 3, 3), None),
    conv(f(6, 4, 5, 7), f(4, 6, 3, 3), f(6), stride=2, transposed=True),
    conv(f(6, 4, 5, 7), f(6, 2, 3, 3), f(6), groups=2),
    conv(f(6, 4, 5, 7), f(4, 1, 3, 3), None, groups=4),
    conv_backward(f(6, 12, 5, 7), f(6, 4, 5, 7), f(12, 4, 3, 3), [12], [True, True, True]),
    conv_backward(f(6, 12, 5, 7), f(6, 4, 5, 7), f(12, 4, 3, 3), None, [True, True, False]),
    conv_backward(f(6, 12, 3, 4), f(6, 4, 5, 7), f(12, 4, 3, 3), [12], [False, True, True], stride=2),
    conv_backward(f(6, 6, 5), f(6, 4, 5), f(6, 4, 3), None, [True, False, False]),
    conv_backward(f(6, 6, 9, 13), f(6, 4, 5, 7), f(4, 6, 3, 3), [6], [True, True, True], stride=2, transposed=True),
    conv_backward(f(6, 6, 5, 7), f(6, 4, 5, 7), f(6, 2, 3, 3), [6], [True, True, True], groups=2),
    case(aten.max_pool2d_with_indices.default, f(6, 4, 5, 7), [2, 2], [1, 2]),
    case(aten.max_pool2d_with_indices.default, f(6, 5, 7), [3, 3], [2, 2], [1, 1]),
    case(aten.max_pool3d_with_indices.default, f(2, 6, 5, 5, 5), [2, 2, 2]),
    case(
        aten.max_pool2d_with_indices_backward.default,
        f(6, 4, 2, 3), f(6, 4, 5, 7), [2, 2], [2, 2], [0, 0], [1, 1], False, i(6, 4, 2, 3, below=35),
    ),
    case(
        aten.max_pool3d_with_indices_backward.default,
        f(6, 4, 2, 2, 2), f(6, 4, 5, 5, 5), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False,
        i(6, 4, 2, 2, 2, below=125),
    ),
    case(aten.avg_pool1d.default, f(6, 4, 5), [2]),
    case(aten.avg_pool2d.default, f(6, 4, 5, 7), [2, 2]),
    case(aten.avg_pool3d.default, f(6, 4, 5, 5, 5), [2, 2, 2]),
    case(aten.avg_pool2d_backward.default, f(6, 4, 2, 3), f(6, 4, 5, 7), [2, 2], [2, 2], [0, 0], False, True, None),
    case(
        aten.avg_pool3d_backward.default,
        f(6, 4, 2, 2, 2), f(6, 4, 5, 5, 5), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None,
    ),
    case(aten._adaptive_avg_pool2d.default, f(6, 4, 5, 7), [3, 3]),
    case(aten._adaptive_avg_pool3d.default, f(6, 4, 5, 5, 5), [3, 3, 3]),
    case(aten._adaptive_avg_pool2d_backward.default, f(6, 4, 3, 3), f(6, 4, 5, 7)),
    case(aten._adaptive_avg_pool3d_backward.default, f(6, 4, 3, 3, 3), f(6, 4, 5, 5, 5)),
    case(aten.adaptive_max_pool2d.default, f(6, 4, 5, 7), [3, 3]),
    case(aten.adaptive_max_pool3d.default, f(6, 4, 5, 5, 5), [3, 3, 3]),
    case(aten.adaptive_max_pool2d_backward.default, f(6, 4, 3, 3), f(6, 4, 5, 7), i(6, 4, 3, 3, below=35)),
    case(aten.adaptive_max_pool3d_backward.default, f(6, 4, 3, 3, 3), f(6, 4, 5, 5, 5), i(6, 4, 3, 3, 3, below=125)),
    case(aten.reflection_pad1d.default, f(6, 4, 5), [1, 2]),
    case(aten.reflection_pad2d.default, f(6, 4, 5, 7), [1, 2, 1, 1]),
    case(aten.reflection_pad3d.default, f(6, 4, 5, 5, 5), [1, 1, 1, 1, 1, 1]),
    case(aten.replication_pad1d.default, f(6, 4, 5), [1, 2]),
    case(aten.replication_pad2d.default, f(6, 4, 5, 7), [1, 2, 1, 1]),
    case(aten.replication_pad3d.default, f(6, 4, 5, 5, 5), [1, 1, 1, 1, 1, 1]),
    case(aten.reflection_pad1d_backward.default, f(6, 4, 8), f(6, 4, 5), [1, 2]),
    case(aten.reflection_pad2d_backward.default, f(6, 4, 7, 10), f(6, 4, 5, 7), [1, 2, 1, 1]),
    case(aten.replication_pad1d_backward.default, f(6, 4, 8), f(6, 4, 5), [1, 2]),
    case(aten.replication_pad2d_backward.default, f(6, 4, 7, 10), f(6, 4, 5, 7), [1, 2, 1, 1]),
    case(aten.upsample_nearest1d.default, f(6, 4, 5), [11]),
    case(aten.upsample_nearest2d.default, f(6, 4, 5, 7), [11, 13]),
    case(aten.upsample_nearest3d.default, f(6, 4, 5, 5, 5), [7, 7, 7]),
    case(aten.upsample_bilinear2d.default, f(6, 4, 5, 7), [11, 13], False),
    case(aten.upsample_bicubic2d.default, f(6, 4, 5, 7), [11, 13], True),
    case(aten.upsample_nearest1d_backward.default, f(6, 4, 11), [11], [6, 4, 5]),
    case(aten.upsample_nearest2d_backward.default, f(6, 4, 11, 13), [11, 13], [6, 4, 5, 7]),
    case(aten.upsample_nearest3d_backward.default, f(6, 4, 7, 7, 7), [7, 7, 7], [6, 4, 5, 5, 5]),
    case(aten.upsample_bilinear2d_backward.default, f(6, 4, 11, 13), [11, 13], [6, 4, 5, 7], False),
    case(aten.upsample_bicubic2d_backward.default, f(6, 4, 11, 13), [11, 13], [6, 4, 5, 7], True),
    case(aten.upsample_linear1d.default, f(6, 4, 5), [11], False),
    case(aten.upsample_trilinear3d.default, f(6, 4, 3, 3, 3), [5, 5, 5], False),
    case(aten.upsample_linear1d_backward.default, f(6, 4, 11), [11], [6, 4, 5], False),
    case(aten.upsample_trilinear3d_backward.default, f(6, 4, 5, 5, 5), [5, 5, 5], [6, 4, 3, 3, 3], False),
    case(aten.reflection_pad3d_backward.default, f(6, 4, 7, 7, 7), f(6, 4, 5, 5, 5), [1, 1, 1, 1, 1, 1]),
    case(aten.replication_pad3d_backward.default, f(6, 4, 7, 7, 7), f(6, 4, 5, 5, 5), [1, 1, 1, 1, 1, 1]),
    case(aten.grid_sampler_2d.default, f(6, 4, 5, 7), f(6, 2, 3, 2), 0, 0, False),
    case(aten.grid_sampler_3d.default, f(6, 4, 5, 5, 5), f(6, 2, 3, 2, 3), 0, 0, False),
    case(
        aten.grid_sampler_2d_backward.default,
        f(6, 4, 2, 3), f(6, 4, 5, 7), f(6, 2, 3, 2), 0, 0, False, [True, True],
    ),
    case(
        aten.grid_sampler_3d_backward.default,
        f(6, 4, 2, 3, 2), f(6, 4, 5, 5, 5), f(6, 2, 3, 2, 3), 0, 0, False, [False, True],
    ),
    case(aten.im2col.default, f(6, 4, 5, 7), [3, 2], [1, 1], [1, 0], [1, 1]),
    case(aten.col2im.default, f(6, 24, 30), [5, 7], [3, 2], [1, 1], [1, 0], [1, 1]),
    case(aten.pixel_shuffle.default, f(6, 8, 6, 4), 2),
    case(aten.pixel_unshuffle.default, f(6, 4, 12, 8), 2),
    case(aten.native_group_norm.default, f(6, 4, 5, 7), f(4), f(4), 6, 4, 35, 2, 1e-5),
    case(aten.native_group_norm.default, f(6, 4, 5), None, None, 6, 4, 5, 4, 1e-5),
    case(
        aten.native_group_norm_backward.default,
        f(6, 4, 5, 7), f(6, 4, 5, 7), f(6, 2), f(6, 2), f(4), 6, 4, 35, 2, [True, True, True],
    ),
    case(
        aten.native_group_norm_backward.default,
        f(6, 4, 5), f(6, 4, 5), f(6, 2), f(6, 2), None, 6, 4, 5, 2, [True, False, False],
    ),
]  # fmt: skip
