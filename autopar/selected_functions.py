"""What functions make of selected rows that treat each by itself: pointwise ones, and those along later dims."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from autopar.selected_rows import (
    BY_KIND,
    HARMLESS,
    Follower,
    RowCall,
    SelectedRows,
    Selection,
    UnfollowedError,
    follows,
    num_dims,
)

# ------------------------------------------------------------------------------------------------------------ metadata


@follows(
    "device.__get__", "dim", "dtype.__get__", "element_size", "get_device", "is_complex", "is_cpu.__get__",
    "is_cuda.__get__", "is_floating_point", "is_meta.__get__", "is_sparse.__get__", "itemsize.__get__",
    "layout.__get__", "ndim.__get__", "ndimension", "requires_grad.__get__",
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
)  # fmt: skip
def _asked(call: RowCall) -> Any:
    if not isinstance(call.args[0], SelectedRows) or len(call.tensors) > 1:
        raise UnfollowedError
    return call.func(call.args[0].rows, *call.args[1:], **call.kwargs)


@follows(
    "bfloat16", "bool", "clone", "contiguous", "cpu", "cuda", "data.__get__", "detach", "double", "float", "half",
    "int", "long", "short", "to", "type", "type_as",
)  # fmt: skip
def _same(call: RowCall) -> Any:
    rows = call.args[0]
    made = call.run(lambda t: t.rows if isinstance(t, SelectedRows) else t)
    if not isinstance(rows, SelectedRows) or not isinstance(made, Tensor):  # which gets the dtype of these
        return made
    return SelectedRows(made, rows.selection, rows.filler) if call.name == "clone" else rows.like(made)


@follows("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "bernoulli")
def _like(call: RowCall) -> Any:
    return call.each_row(lambda t: every_row(t).filled())


def every_row(tensor: Tensor) -> SelectedRows:
    """A tensor that a function reads row by row.

    Raises:
        UnfollowedError: if it is not known to have a row for each that is selected.
    """
    if not isinstance(tensor, SelectedRows):
        raise UnfollowedError(f"selected rows and a tensor of shape {list(tensor.shape)}")
    return tensor


# ----------------------------------------------------------------------------------------------------------- pointwise


def pointwise(call: RowCall) -> Any:
    """A function that computes each element of the result from those at its place."""
    if _bound(call).get("inplace"):
        return _written(call, RowCall(call.func, (), {**_bound(call), "inplace": False}, call.name))
    convert = broadcast(call)
    if call.name == "where" and len(call.args) + len(call.kwargs) != 3:
        raise UnfollowedError
    result = call.each_row(convert, shares=call.name in _IDENTITIES)
    shapes = (t.rows.shape if isinstance(t, SelectedRows) else t.shape for t in call.tensors)
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if not isinstance(result, SelectedRows) or result.rows.shape != shape:
        raise UnfollowedError
    return result


def broadcast(call: RowCall) -> Any:
    """What to read for each tensor of a pointwise function, if each row of the result is of one row of each.

    Raises:
        UnfollowedError: if it is not.
    """
    selection, ndim = call.selection, max(t.rows.ndim if isinstance(t, SelectedRows) else t.ndim for t in call.tensors)
    is_safe = call.name in ("add", "sub", "rsub", "mul") or not torch.is_grad_enabled()

    def convert(tensor: Tensor) -> Tensor:
        if isinstance(tensor, SelectedRows):
            if tensor.rows.ndim != ndim:
                raise UnfollowedError(f"rows of {tensor.rows.ndim - 1} dims and others of {ndim - 1}")
            return tensor.filled()
        if tensor.ndim == ndim and tensor.shape[0] != 1:
            every_row(tensor)
        if is_safe or not tensor.requires_grad:
            return tensor
        return _one_per_row(tensor, selection, ndim, call)

    return convert


def _one_per_row(tensor: Tensor, selection: Selection, ndim: int, call: RowCall) -> Tensor:
    """A tensor that all rows share, repeated for each, so that no infinite derivative reaches it from one that does not
    count."""
    if not tensor.ndim:  # which has no say in the dtype as long as it has no dim
        for other in call.selected:
            tensor = tensor.to(torch.result_type(other.rows, tensor))
    return torch.where(selection.over(ndim), tensor, 1)


@functools.cache
def _is_pointwise(name: str) -> bool:
    if name in _POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name.replace(".", "_"), None)
    overloads = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in one.tags and not one._schema.is_mutable for one in overloads)


_POINTWISE = {
    "__invert__", "absolute", "alpha_dropout", "divide", "dropout", "floor_divide", "greater", "greater_equal",
    "hardswish", "isclose", "isreal", "less", "less_equal", "logsigmoid", "multiply", "negative", "not_equal",
    "softsign", "special.expit", "subtract", "tanhshrink",
}  # fmt: skip
"""Those that PyTorch does not tag so."""

_IDENTITIES = {"alpha_dropout", "dropout", "positive"}
"""Those that may return what they are given."""


def _of_kind(name: str) -> Follower | None:
    if name.endswith("_") and not name.startswith("_"):
        return _in_place if hasattr(Tensor, name[:-1]) and _of_kind(name[:-1]) else None
    return pointwise if _is_pointwise(name) and name != "equal" else None


BY_KIND.append(_of_kind)


def _in_place(call: RowCall) -> Any:
    """`x.add_(y)` and `x += y`."""
    name = call.name.removesuffix("_")
    return _written(call, RowCall(getattr(Tensor, name), call.args, call.kwargs, name))


def _written(call: RowCall, functional: RowCall) -> SelectedRows:
    """Let the rows be what a function makes of them: only where they have no other name yet."""
    rows = call.args[0]
    if not isinstance(rows, SelectedRows) or rows.is_aliased:
        raise UnfollowedError
    made = pointwise(functional)
    if made.rows.shape != rows.rows.shape:
        raise UnfollowedError
    rows.rows, rows.filler = made.rows.to(rows.dtype), None
    return rows


def _bound(call: RowCall) -> dict[str, Any]:
    if getattr(call.func, "__module__", "") != torch.nn.functional.__name__:
        return {}
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# --------------------------------------------------------------------------------------------------- along later dims

DIMS: dict[str, tuple[int, Any]] = {
    "argsort": (1, -1), "chunk": (2, 0), "cosine_similarity": (2, 1), "cummax": (1, None), "cummin": (1, None),
    "cumprod": (1, None), "cumsum": (1, None), "diff": (2, -1), "gather": (1, None), "glu": (1, -1),
    "kthvalue": (2, -1), "linalg.cross": (2, -1), "log_softmax": (1, None), "logcumsumexp": (1, None),
    "narrow": (1, None), "normalize": (2, 1), "select": (1, None), "softmax": (1, None), "softmin": (1, None),
    "sort": (1, -1), "split": (2, 0), "split_with_sizes": (2, 0), "take_along_dim": (2, None), "topk": (2, -1),
    "unbind": (1, 0), "unflatten": (1, None),
}  # fmt: skip
"""Where functions have the dims along which they work, and which these are where none are given."""


def along(call: RowCall) -> Any:
    """A function that works along later dims."""
    dims = dims_of(call)
    if dims is None or 0 in dims or len({num_dims(t) for t in call.tensors}) != 1:
        raise UnfollowedError
    return row_by_row(call)


def row_by_row(call: RowCall) -> Any:
    """A function that treats each row of all that it reads by itself."""
    # An index is harmless where it is 0, and other integers are no worse for it.
    return call.each_row(lambda t: every_row(t).filled(HARMLESS if t.is_floating_point() else 0), shares=True)


def dims_of(call: RowCall) -> list[int] | None:
    """Along which dims a function works, counted from the first; None: along all."""
    position, default = DIMS[call.name]
    ndim = num_dims(call.tensors[0])
    given = call.argument(position, "dim", default)
    if given is None:
        return None
    return [place(dim, ndim) for dim in (given if isinstance(given, (tuple, list)) else [given])]


def place(dim: Any, ndim: int) -> int:
    """A dim counted from the first."""
    if type(dim) is not int or not -ndim <= dim < ndim:
        raise UnfollowedError
    return dim % ndim


for _name in DIMS:
    follows(_name)(along)
