"""What lookups, products and layers make of selected rows, each of which they treat by itself."""

from __future__ import annotations

import functools
from typing import Any

from autopar.selected_functions import every_row, row_by_row
from autopar.selected_rows import HARMLESS, RowCall, SelectedRows, UnfollowedError, follows, num_dims, only_selection


@follows("embedding")
def _embedding(call: RowCall) -> Any:
    if call.argument(3, "max_norm") is not None or call.argument(5, "scale_grad_by_freq", False):
        raise UnfollowedError
    return call.each_row(_first_selected(call, 0))


@follows("one_hot")
def _one_hot(call: RowCall) -> Any:
    if call.argument(1, "num_classes", -1) == -1:
        raise UnfollowedError
    return call.each_row(lambda t: every_row(t).filled(0))


def _first_selected(call: RowCall, filler: int = HARMLESS) -> Any:
    """What to read where the first tensor is of selected rows, and all rows share the others."""
    if not isinstance(call.tensors[0], SelectedRows) or len(call.selected) > 1:
        raise UnfollowedError
    return lambda t: t.filled(filler) if isinstance(t, SelectedRows) else t


@follows("linear")
def _linear(call: RowCall) -> Any:
    return _layer(call, 2)


@follows("matmul", "mm", "spmm", "bmm")  # torch.mm goes by both names
def _matmul(call: RowCall) -> Any:
    left, right = call.argument(0, "input"), call.argument(1, "other" if call.name == "matmul" else "mat2")
    is_selected, ndims = [isinstance(t, SelectedRows) for t in (left, right)], [num_dims(left), num_dims(right)]
    if is_selected == [True, False] and ndims[0] > 1 and ndims[1] < 3:
        return _layer(call, 2)
    if is_selected == [True, True] and ndims[0] == ndims[1] > 2:
        return call.each_row(lambda t: every_row(t).filled())
    if is_selected == [False, True] and ndims[0] < 3 <= ndims[1]:
        return call.each_row(lambda t: t.filled() if isinstance(t, SelectedRows) else t)
    raise UnfollowedError


@follows("addmm")
def _addmm(call: RowCall) -> Any:
    bias, left, right = (call.argument(i, name) for i, name in enumerate(("input", "mat1", "mat2")))
    if not isinstance(left, SelectedRows) or isinstance(right, SelectedRows) or num_dims(bias) != 1:
        raise UnfollowedError
    return call.each_row(lambda t: t.filled() if isinstance(t, SelectedRows) else t)


@follows("einsum")
def _einsum(call: RowCall) -> Any:
    equation, operands = call.args[0], call.tensors
    if not isinstance(equation, str):
        raise UnfollowedError
    read, arrow, given = equation.replace(" ", "").partition("->")
    terms = read.split(",")
    letters = {term[:1] for term, t in zip(terms, operands, strict=True) if isinstance(t, SelectedRows)}
    row = letters.pop()
    counts = [(term.count(row), int(isinstance(t, SelectedRows))) for term, t in zip(terms, operands, strict=True)]
    if letters or not arrow or "." in equation or any(found != expected for found, expected in counts):
        raise UnfollowedError
    if given.startswith(row):
        return call.each_row(lambda t: t.filled() if isinstance(t, SelectedRows) else t)
    if row in given:
        raise UnfollowedError
    only_selection(call.selected)
    first = call.selected[0]
    return call.run(lambda t: t.filled(0 if t is first else HARMLESS) if isinstance(t, SelectedRows) else t)


_LAYERS = {
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_max_pool2d": 4, "avg_pool1d": 3, "avg_pool2d": 4,
    "conv1d": 3, "conv2d": 4, "conv3d": 5, "conv_transpose1d": 3, "conv_transpose2d": 4, "group_norm": 2,
    "interpolate": 3, "max_pool1d": 3, "max_pool2d": 4, "prelu": 2,
}  # fmt: skip
"""Layers that treat each row by itself, and how many dims their input has at least with its rows."""


def _layer(call: RowCall, least: int) -> Any:
    if num_dims(call.tensors[0]) < least:
        raise UnfollowedError
    return call.each_row(_first_selected(call))


for _name, _least in _LAYERS.items():
    follows(_name)(functools.partial(_layer, least=_least))


@follows("layer_norm", "rms_norm")
def _norm(call: RowCall) -> Any:
    eps = call.argument(4 if call.name == "layer_norm" else 3, "eps", None)
    if eps == 0:  # all elements of a row that does not count are alike
        raise UnfollowedError
    return _layer(call, len(call.argument(1, "normalized_shape")) + 1)


@follows("batch_norm")
def _batch_norm(call: RowCall) -> Any:
    if call.argument(5, "training", False):
        raise UnfollowedError
    return _layer(call, 2)


@follows("scaled_dot_product_attention")
def _attention(call: RowCall) -> Any:
    parts = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    mask = call.argument(3, "attn_mask")
    is_shared = mask is None or isinstance(mask, SelectedRows) or mask.ndim < num_dims(parts[0]) or mask.shape[0] == 1
    if not is_shared or len({num_dims(every_row(part)) for part in parts}) != 1 or num_dims(parts[0]) < 3:
        raise UnfollowedError
    return call.each_row(lambda t: t.filled() if isinstance(t, SelectedRows) else t)


@follows("pad")
def _pad(call: RowCall) -> Any:
    if len(call.argument(1, "pad")) >= 2 * num_dims(call.tensors[0]):
        raise UnfollowedError
    return row_by_row(call)
