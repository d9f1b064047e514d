"""Ops that PyTorch takes apart while a model is traced into others that do not give the op's numbers, defined anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


def _multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """`aten.multilabel_margin_loss_forward`: a row's labels end at its first -1.  (PyTorch 2.13's definition takes the
    places after it for labels 0.)

    Args:
        self: scores, (classes,) or (rows, classes).
        target: labels, of the shape of `self`.
        reduction: of the rows: 0 none, 1 mean, 2 sum.

    Returns:
        The loss, and 1 where a class is one of its row's labels.
    """
    num_classes = self.shape[-1] if self.ndim else 1
    scores, labels = self.reshape(-1, num_classes), target.reshape(-1, num_classes)
    counts = (labels == -1).cumsum(1) == 0
    labels = torch.where(counts, labels, 0)
    is_label = torch.zeros_like(scores).scatter_add(1, labels, counts.to(scores.dtype)) > 0
    margins = (1 - scores.gather(1, labels).unsqueeze(2) + scores.unsqueeze(1)).clamp_min(0)
    loss = torch.where(counts.unsqueeze(2) & ~is_label.unsqueeze(1), margins, 0).sum((1, 2)) / num_classes
    if reduction == _MEAN:
        loss = loss.mean()
    elif reduction == _SUM or self.ndim < 2:
        loss = loss.sum()
    return loss, is_label.to(self.dtype).reshape(target.shape)


CORRECTIONS: dict[Any, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}
