"""What functions make of selected rows that reduce over them: sums, means, norms, and losses."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from autopar.selected_functions import DIMS, along, broadcast, dims_of, pointwise, row_by_row
from autopar.selected_rows import RowCall, SelectedRows, UnfollowedError, follows, num_dims

# ----------------------------------------------------------------------------------------------------------- reductions

DIMS.update({
    "all": (1, None), "amax": (1, None), "amin": (1, None), "any": (1, None), "argmax": (1, None), "argmin": (1, None),
    "count_nonzero": (1, None), "linalg.norm": (2, None), "linalg.vector_norm": (2, None), "logsumexp": (1, None),
    "max": (1, None), "mean": (1, None), "median": (1, None), "min": (1, None), "nansum": (1, None), "norm": (2, None),
    "prod": (1, None), "std": (1, None), "sum": (1, None), "var": (1, None),
})  # fmt: skip


def _is_over_rows(call: RowCall) -> bool:
    dims = dims_of(call)
    return dims is None or not dims or 0 in dims


def _only(call: RowCall) -> SelectedRows:
    if len(call.tensors) != 1 or not isinstance(call.args[0], SelectedRows):
        raise UnfollowedError
    return call.args[0]


_NEUTRAL = {"all": 1, "any": 0, "count_nonzero": 0, "nansum": 0, "prod": 1, "sum": 0}
"""What changes nothing of a reduction's result."""


def _reduced(call: RowCall) -> Any:
    if not _is_over_rows(call):
        return row_by_row(call)
    return call.func(_only(call).filled(_NEUTRAL[call.name]), *call.args[1:], **call.kwargs)


for _name in _NEUTRAL:
    follows(_name)(_reduced)


@follows("norm", "linalg.norm", "linalg.vector_norm")
def _norm(call: RowCall) -> Any:
    if not _is_over_rows(call):
        return row_by_row(call)
    order = call.argument(1, "p" if call.name == "norm" else "ord", None)
    is_flat = call.name != "linalg.norm" or order is None
    if not is_flat or (isinstance(order, (int, float)) and order < 0) or dims_of(call) not in (None, [0]):
        raise UnfollowedError
    return call.func(_only(call).filled(0), *call.args[1:], **call.kwargs)


@follows("mean")
def _mean(call: RowCall) -> Any:
    if not _is_over_rows(call):
        return row_by_row(call)
    dtype, keepdim = call.kwargs.get("dtype"), call.argument(2, "keepdim", False)
    return mean(_only(call), dims_of(call), keepdim, dtype)


def mean(values: SelectedRows, dims: list[int] | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over rows that count, and over other dims; NaN of none."""
    dtype, count = dtype or values.dtype, how_many(values, dims)
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return (values.filled(0).sum(dims or list(range(values.rows.ndim)), keepdim, dtype=wide) / count).to(dtype)


def how_many(values: SelectedRows, dims: list[int] | None) -> Tensor:
    """How many elements are reduced over the rows and the other of these dims, () integers; None: over all dims."""
    reduced = dims or range(values.rows.ndim)
    return values.selection.count * math.prod(values.rows.shape[dim] for dim in reduced if dim)


@follows("amax", "amin", "max", "min")
def _extreme(call: RowCall) -> Any:
    if isinstance(call.argument(1, "other"), Tensor):
        return pointwise(call)
    if not _is_over_rows(call):
        return row_by_row(call)
    rows = _only(call)
    if not rows.rows.is_floating_point() or (call.name in ("max", "min") and len(call.args) + len(call.kwargs) > 1):
        raise UnfollowedError  # of no integers there is nothing to give, and positions among the selected are not known
    lowest = -math.inf if call.name in ("amax", "max") else math.inf
    value = torch.where(rows.selection.over(rows.rows.ndim), rows.rows, lowest)
    found = call.func(value, *call.args[1:], **call.kwargs)
    return torch.where(rows.selection.count > 0, found, math.nan)  # where the function refuses to


follows("argmax", "argmin", "logsumexp", "median")(along)


@follows("std", "var")
def _spread(call: RowCall) -> Any:
    """Around the mean of the rows that count."""
    if isinstance(call.argument(1, "dim"), bool) or len(call.args) > 2:  # `unbiased`, which may stand there
        raise UnfollowedError
    if not _is_over_rows(call):
        return row_by_row(call)
    rows, dims, keepdim = _only(call), dims_of(call), call.kwargs.get("keepdim", False)
    correction = call.kwargs.get("correction", 1) if call.kwargs.get("unbiased", True) else 0
    values = rows.filled()
    squares = SelectedRows((values - mean(rows, dims, keepdim=True)).square(), rows.selection).filled(0)
    freedom = (how_many(rows, dims) - correction).clamp(min=0)
    variance = squares.sum(dims or list(range(values.ndim)), keepdim) / freedom
    if call.name != "std":
        return variance
    is_none = variance == 0  # where PyTorch lets no gradient pass, which would be infinite
    return torch.where(is_none, 0, torch.where(is_none, 1, variance).sqrt())


# --------------------------------------------------------------------------------------------------------------- losses


def _arguments(call: RowCall) -> dict[str, Any]:
    """A loss's arguments by name.

    Raises:
        UnfollowedError: if it is called in a way that PyTorch has given up, or weighs its mean.
    """
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    if found.get("size_average") is not None or found.get("reduce") is not None:
        raise UnfollowedError
    if call.name in ("huber_loss", "l1_loss", "mse_loss") and found["weight"] is not None:
        raise UnfollowedError
    return found


def _loss(call: RowCall) -> Any:
    """A loss that is one number for each element or row, before it is summed."""
    given = _arguments(call)
    reduction = given.pop("reduction")
    losses = RowCall(call.func, (), {**given, "reduction": "none"}, call.name)
    if call.name in _ELEMENTWISE:
        values = losses.each_row(broadcast(losses))
    else:
        alike = {
            num_dims(given[name]) for name in ("input1", "input2", "anchor", "positive", "negative") if name in given
        }
        if len(alike) > 1:
            raise UnfollowedError
        values = row_by_row(losses)
    return _summed(values, reduction)


def _summed(values: SelectedRows, reduction: str) -> Tensor:
    if reduction == "mean":
        return mean(values)
    if reduction == "batchmean":
        return values.filled(0).sum() / values.selection.count
    if reduction not in ("sum", "none"):
        raise UnfollowedError
    return values if reduction == "none" else values.filled(0).sum()


_ELEMENTWISE = {
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "huber_loss", "kl_div",
    "l1_loss", "margin_ranking_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
}  # fmt: skip
_ROW_WISE = {
    "cosine_embedding_loss", "gaussian_nll_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "triplet_margin_loss",
}  # fmt: skip
_ALIKE = {"anchor", "input1", "input2", "negative", "positive"}
"""Their arguments that have as many dims as each other."""

for _name in _ELEMENTWISE | _ROW_WISE:
    follows(_name)(_loss)


@follows("cross_entropy", "nll_loss")
def _classes(call: RowCall) -> Any:
    """Classes that are to be left out are what these losses know already."""
    given = _arguments(call)
    scores, target, weight = given["input"], given["target"], given["weight"]
    if not isinstance(scores, SelectedRows) or not isinstance(target, SelectedRows) or isinstance(weight, SelectedRows):
        raise UnfollowedError("selected rows and others")
    selection = call.selection
    given["input"] = scores.filled()
    if target.rows.is_floating_point():
        given["target"], reduction = target.filled(), given.pop("reduction")
        losses = call.func(**given, reduction="none")
        return _summed(SelectedRows(losses, selection), reduction)
    if scores.rows.ndim < 2 or target.rows.ndim != scores.rows.ndim - 1:
        raise UnfollowedError
    over = selection.over(target.rows.ndim)
    given["target"] = torch.where(over, target.rows, given["ignore_index"])
    losses = call.func(**given)
    return SelectedRows(losses, selection) if given["reduction"] == "none" else losses
