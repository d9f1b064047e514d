"""Batch norm in the global view: statistics of the whole batch, as sums, whatever the batch is cut into.

With `momentum=None` the running statistics are the mean over all batches.  PyTorch's module makes a Python number of
how many there were, which tracing has not got; while a model is traced, a forward that keeps it a tensor takes its
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar._compat import BatchNorm

aten = torch.ops.aten

Forward = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _reduced(x: Tensor) -> tuple[list[int], list[int], int]:
    """The dims that statistics are taken over, the shape that brings them back, and how many elements there are."""
    dims = [0, *range(2, x.ndim)]
    return dims, [1, -1, *[1] * (x.ndim - 2)], math.prod(x.shape[d] for d in dims)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Forward:  # fmt: skip
    """As `aten._native_batch_norm_legit_functional`: output, mean, reciprocal deviation, new running statistics."""
    dims, shape, count = _reduced(x)
    wide = _wide(x)
    if training:
        mean = wide.sum(dims) / count
        centred = wide - mean.view(shape)
        variance = (centred * centred).sum(dims) / count
        new_mean, new_var = running_mean, running_var
        if running_mean is not None and running_var is not None:
            unbiased = variance * (count / max(1, count - 1))
            new_mean = (momentum * mean + (1 - momentum) * running_mean).to(running_mean.dtype)
            new_var = (momentum * unbiased + (1 - momentum) * running_var).to(running_var.dtype)
        scale = torch.rsqrt(variance + eps)
        saved = (mean, scale)
    else:
        assert running_mean is not None
        assert running_var is not None
        centred = wide - _wide(running_mean).view(shape)
        scale = torch.rsqrt(_wide(running_var) + eps)
        new_mean, new_var = running_mean, running_var
        saved = (wide.new_zeros((0,)), wide.new_zeros((0,)))
    result = centred * scale.view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(x.dtype), *saved, new_mean, new_var


def batch_norm_without_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `aten._native_batch_norm_legit_no_training`."""
    return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def batch_norm_without_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `aten._native_batch_norm_legit.no_stats`: the batch's own statistics, always."""
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]


def batch_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """As `aten.native_batch_norm_backward`.

    S. Ioffe, C. Szegedy, "Batch Normalization", 2015, section 3, in the form with normalised inputs.
    """
    dims, shape, count = _reduced(x)
    grad = _wide(grad_out)
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, scale = save_mean, save_invstd
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, scale = _wide(running_mean), torch.rsqrt(_wide(running_var) + eps)
    normal = (_wide(x) - mean.view(shape)) * scale.view(shape)
    total, weighted = grad.sum(dims), (grad * normal).sum(dims)
    for_input = for_weight = for_bias = None
    if output_mask[0]:
        factor = scale if weight is None else scale * weight
        inner = grad - (total.view(shape) + normal * weighted.view(shape)) / count if train else grad
        for_input = (inner * factor.view(shape)).to(x.dtype)
    if output_mask[1]:
        for_weight = weighted if weight is None else weighted.to(weight.dtype)
    if output_mask[2]:
        for_bias = total if weight is None else total.to(weight.dtype)
    return for_input, for_weight, for_bias


def averages_batches(module: nn.Module) -> bool:
    """Whether a call of a module, as it is now, averages statistics over all batches by PyTorch's own forward."""
    if not isinstance(module, BatchNorm) or type(module).forward is not BatchNorm.forward:
        return False
    counts = module.training and module.track_running_stats and module.num_batches_tracked is not None
    return counts and module.momentum is None and "forward" not in vars(module)


def averaging_forward(module: nn.Module, x: Tensor) -> Tensor:
    """What PyTorch's forward does where `averages_batches`, without reading the number of batches."""
    assert isinstance(module, BatchNorm)
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert count is not None
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    count.add_(1)
    ours, theirs = torch.zeros_like(mean), torch.zeros_like(variance)  # overwritten by those of the batch
    result = F.batch_norm(x, ours, theirs, module.weight, module.bias, True, 1.0, module.eps)
    share = 1 / count.to(mean.dtype)
    for running, new in ((mean, ours), (variance, theirs)):
        running.copy_(share * new + (1 - share) * running)
    return result


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm_without_training,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
