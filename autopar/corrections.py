"""Ops and functions, defined anew, that PyTorch takes apart into others that do not give their numbers while a model is
traced, or that read values to check them.

A value that is refused otherwise (a singular matrix, a negative weight) gives NaN, on every rank in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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


def _valid(is_valid: Tensor, result: Tensor, num_dims: int = 0) -> Tensor:
    """`result` where a condition holds for all of its last `num_dims` dims; NaN elsewhere, also in gradients."""
    counts = is_valid.to(result.dtype)
    factor = counts / counts  # no constant NaN, which a search for the first NaN would take for it
    return result * factor.reshape(*factor.shape, *[1] * num_dims)


def _inverse(A: Tensor) -> Tensor:  # noqa: N803  (PyTorch's name for it)
    """`aten.linalg_inv`: (…, n, n)."""
    inverse, info = torch.linalg.inv_ex(A)
    return _valid(info == 0, inverse, 2)


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:  # noqa: N803
    """`aten.linalg_solve`: (…, n, n) and right-hand sides (…, n, k); or (…, n), one for each matrix, or (n,)."""
    is_vector = B.ndim == 1 or B.shape == A.shape[:-1]
    if not is_vector:  # of one batch, so that a cut of it cuts both
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])  # type: ignore[no-untyped-call]
        A, B = A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])  # noqa: N806
    result, info = torch.linalg.solve_ex(A, B, left=left)
    return _valid(info == 0, result, 1 if is_vector else 2)


def _cholesky(self: Tensor, *, upper: bool = False) -> Tensor:
    """`aten.linalg_cholesky`: (…, n, n)."""
    factor, info = torch.linalg.cholesky_ex(self, upper=upper)
    return _valid(info == 0, factor, 2)


def _lu_factor(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:  # noqa: N803
    """`aten.linalg_lu_factor`: (…, m, n), and the rows that were exchanged, (…, min(m, n))."""
    factors, pivots, info = torch.linalg.lu_factor_ex(A, pivot=pivot)
    return _valid(info == 0, factors, 2), pivots


def _ldl_factor(self: Tensor, *, hermitian: bool = False) -> tuple[Tensor, Tensor]:
    """`aten.linalg_ldl_factor`: (…, n, n), and the rows that were exchanged, (…, n)."""
    factors, pivots, info = torch.linalg.ldl_factor_ex(self, hermitian=hermitian)
    return _valid(info == 0, factors, 2), pivots


def _tensor_inverse(self: Tensor, ind: int = 2) -> Tensor:
    """`aten.linalg_tensorinv`: the inverse of the matrix whose rows are the first `ind` dims."""
    rows, columns = self.shape[:ind], self.shape[ind:]
    if ind <= 0 or math.prod(rows) != math.prod(columns):
        raise ValueError(f"tensorinv(): a tensor of shape {tuple(self.shape)} is no square matrix with ind={ind}")
    inverse: Tensor = torch.linalg.inv(self.reshape(math.prod(rows), -1))
    return inverse.reshape(*columns, *rows)


def _cov(
    self: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`aten.cov` of (variables, observations) or (observations,), which `aten.corrcoef` calls too."""
    rows = self if self.ndim == 2 else self.reshape(1, -1)
    weights = _observation_weights(rows, fweights, aweights)
    if weights is None:
        count = torch.full((), float(rows.shape[1]), dtype=rows.real.dtype, device=rows.device)
        centred = rows - rows.sum(1, keepdim=True) / count
        weighted, freedom = centred, count - correction
    else:
        count = weights.sum()
        centred = rows - (rows * weights).sum(1, keepdim=True) / count
        weighted, freedom = centred * weights, count - correction
        if aweights is not None and correction != 0:
            freedom = count - correction * (weights * aweights).sum() / count
    products = centred @ weighted.t().conj()
    return (products / freedom.clamp_min(0)).squeeze()


def _observation_weights(rows: Tensor, fweights: Tensor | None, aweights: Tensor | None) -> Tensor | None:
    """How often each observation counts, (observations,)."""
    weights = None
    for given, kind in ((fweights, "fweights"), (aweights, "aweights")):
        if given is None:
            continue
        if given.ndim > 1 or given.numel() != rows.shape[1]:
            raise ValueError(f"cov(): {kind} of shape {tuple(given.shape)} for {rows.shape[1]} observations")
        valid = _valid(given >= 0, given.to(rows.real.dtype))
        weights = valid if weights is None else weights * valid
    return weights


def _rrelu(
    self: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """`aten.rrelu`, which draws a slope for every element, whatever its sign."""
    if generator is not None:
        raise TypeError("rrelu with a generator of its own is not traced: leave the generator out")
    slope = torch.empty_like(self).uniform_(lower, upper) if training else (lower + upper) / 2
    return torch.where(self > 0, self, self * slope)


def _rrelu_in_place(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return self.copy_(_rrelu(self, *args, **kwargs))


CORRECTIONS: dict[Any, Callable[..., Any]] = {
    aten.cov.default: _cov,
    aten.linalg_cholesky.default: _cholesky,
    aten.linalg_inv.default: _inverse,
    aten.linalg_ldl_factor.default: _ldl_factor,
    aten.linalg_lu_factor.default: _lu_factor,
    aten.linalg_solve.default: _solve,
    aten.linalg_tensorinv.default: _tensor_inverse,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.rrelu.default: _rrelu,
    aten.rrelu_.default: _rrelu_in_place,
}
"""By op."""


def _gaussian_nll_loss(
    input: Tensor,  # noqa: A002  (its name in PyTorch)
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.ndim != input.ndim or any(v not in (1, n) for v, n in zip(var.shape, input.shape, strict=True)):
        raise ValueError("var is of incorrect size")
    is_valid, var = var >= 0, var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * _valid(is_valid, var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.gaussian_nll_loss: _gaussian_nll_loss}
"""By function of PyTorch's that is written in Python."""
