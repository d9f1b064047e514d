"""Memory that an op takes for itself while it runs, on top of its operands and its result.

Rules follow PyTorch's kernels (2.13).  Ops that are not here take nothing, or little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload, onednn_computes
from autopar.cost_model.convolution_calls import channel_block
from autopar.cost_model.convolutions import backward_workspace, forward_workspace
from autopar.cost_model.layout import Layouts
from autopar.cost_model.ops import op_name, tensor_bytes
from autopar.local_ops import HASHED_AT_ONCE
from autopar.opaque import find_call


def workspace_bytes(node: fx.Node, layouts: Layouts, device_kind: str) -> int:
    """Bytes that a node takes while it runs, on a device of the kind `cuda` or `cpu`."""
    key = (device_kind, machine_traits(device_kind))
    return layouts.keep(node, key, lambda node: _workspace_bytes(node, layouts, device_kind))


def machine_traits(device_kind: str) -> tuple[object, ...]:
    """What workspaces depend on beside the call.  CPUs are taken to be like the one that plans: threads, and oneDNN's
    blocks and dtypes."""
    if device_kind != "cpu":
        return ()
    return torch.get_num_threads(), channel_block(), onednn_computes(torch.bfloat16), onednn_computes(torch.float16)


def _workspace_bytes(node: fx.Node, layouts: Layouts, device_kind: str) -> int:
    name = op_name(node)
    if not name:
        return 0
    is_cpu = device_kind == "cpu"
    rules = _CPU_RULES if is_cpu else _RULES
    if not is_cpu and name not in _WANT_DENSE and name not in _MATMULS and name not in rules:
        return 0
    operands = [layouts[n] for n in node.all_input_nodes if isinstance(layouts[n], torch.Tensor)]
    total = 0
    if name in _WANT_DENSE:
        total += sum(tensor_bytes(t) for t in operands if not t.is_contiguous())
    if name in _MATMULS:
        total += sum(tensor_bytes(t) for t in operands if not _fits_blas(t))
    if rule := rules.get(name):
        total += rule(node.meta["val"], [layouts[a] if isinstance(a, fx.Node) else a for a in node.args])
    if is_cpu and _casts(node, name):
        total += _cast_bytes(node, operands)
    return total


_WANT_DENSE = frozenset(
    f"aten::{name}"
    for name in (
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm_backward", "_softmax", "_log_softmax", "_safe_softmax"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "embedding", "embedding_dense_backward"),
        "roll",
    )
)
"""Copy operands that are not contiguous."""

_MATMULS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"))


def _fits_blas(matrix: torch.Tensor) -> bool:
    """Whether BLAS can read a matrix in place: one of its last two dims has stride 1 and the other does not overlap."""
    if matrix.dim() < 2:
        return matrix.dim() == 0 or matrix.stride(0) != 0
    (rows, columns), (step, stride) = matrix.shape[-2:], matrix.stride()[-2:]
    by_row = stride == 1 and step >= max(1, columns)
    by_column = step == 1 and stride >= max(1, rows)
    return by_row or by_column or matrix.is_contiguous()


# Casts: on a CPU, operands of another dtype than the one in which an op computes are converted as a whole.


def _casts(node: fx.Node, name: str) -> bool:
    assert isinstance(node.target, OpOverload)
    return name in _CASTING_REDUCTIONS or (torch.Tag.pointwise in node.target.tags and name not in _MIXED)


_CASTING_REDUCTIONS = {"aten::sum", "aten::mean", "aten::prod", "aten::cumsum", "aten::cumprod"}
_MIXED = {"aten::_to_copy", "aten::where", "aten::masked_fill", "aten::clone", "aten::copy", "aten::fill"}
"""Pointwise, and take operands of different dtypes as they are."""

_NUMBER_BYTES = 16
"""A Python number among the operands becomes a tensor of 8 bytes, and is cast once more."""


def _cast_bytes(node: fx.Node, operands: list[torch.Tensor]) -> int:
    result = node.meta.get("val")
    numbers = _NUMBER_BYTES * sum(isinstance(argument, (int, float)) for argument in node.args)
    dtypes = [t.dtype for t in operands if t.dim()] or [t.dtype for t in operands]
    if not isinstance(result, torch.Tensor) or not dtypes:
        return numbers
    common = functools.reduce(torch.promote_types, dtypes)
    if result.dtype.is_floating_point and not common.is_floating_point and not common.is_complex:
        common = result.dtype
    if op_name(node) in _CASTING_REDUCTIONS:
        common = result.dtype
    return numbers + sum(common.itemsize * t.numel() for t in operands if t.dtype != common)


# Single ops

_Rule = Callable[[Any, list[Any]], int]
"""Workspace given the traced result and the arguments, tensors as they lie in memory."""


def _uniform(result: Any, args: list[Any]) -> int:
    """Two int64 numbers for each element that is hashed at once, and the positions along each dim."""
    shape = result.shape
    row = math.prod(shape[1:])
    hashed = min(shape[0], max(1, HASHED_AT_ONCE // max(1, row))) * row if shape else 1
    return int(8 * (2 * hashed + 3 * sum(shape)))


def _moved_rows(result: Any, args: list[Any]) -> int:
    """Which row of the table each sorted row belongs to: of the order divided, and of all blocks in one."""
    return 2 * tensor_bytes(args[1])


def _attention_backward(result: Any, args: list[Any]) -> int:
    """Fused attention's backward sums the gradient of a 16-bit query in float32."""
    query = args[1]
    return 4 * int(query.numel()) if query.element_size() < 4 else 0


def _attention_block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the block of scores that one thread of the CPU kernel works on."""
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[-2])


def _cpu_attention(result: Any, args: list[Any]) -> int:
    """Per thread a block of scores, maxima and sums of its rows, and its rows of the result, in float32 or wider."""
    query, key = args[:2]
    rows, columns = _attention_block(query, key)
    itemsize = max(4, query.element_size())
    return int(torch.get_num_threads() * itemsize * (rows * columns + 2 * rows + rows * query.shape[-1]))


def _cpu_attention_backward(result: Any, args: list[Any]) -> int:
    """Per thread two blocks of scores and sums of their rows; and one copy of the query's size."""
    query, key = args[1:3]
    rows, columns = _attention_block(query, key)
    itemsize = max(4, query.element_size())
    return int(itemsize * (torch.get_num_threads() * (2 * rows * columns + rows) + query.numel()))


def _cpu_layer_norm_backward(result: Any, args: list[Any]) -> int:
    """Per thread, sums for the gradients of weight and bias."""
    return int(2 * torch.get_num_threads() * math.prod(args[2]) * args[0].element_size())


def _roll(result: Any, args: list[Any]) -> int:
    """One dim after the other."""
    return tensor_bytes(result) if isinstance(args[1], (list, tuple)) and len(args[1]) > 1 else 0


def _one_more(result: Any, args: list[Any]) -> int:
    """A tensor of the size of the first argument."""
    return tensor_bytes(args[0]) + _NUMBER_BYTES


def _safe_softmax(result: Any, args: list[Any]) -> int:
    """Which scores are minus infinity, and which rows are so throughout."""
    scores = args[0]
    return int(scores.numel() + scores.numel() // max(1, scores.shape[-1]) + _NUMBER_BYTES)


def _opaque(result: Any, args: list[Any]) -> int:
    """What a module takes that runs whole, with as many rows selected as there are."""
    return find_call(args[-1]).forward.num_bytes


def _opaque_backward(result: Any, args: list[Any]) -> int:
    return find_call(args[-1]).backward.num_bytes


_FUSED_BACKWARD = tuple(
    f"aten::_scaled_dot_product_{variant}_backward"
    for variant in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
)

_RULES: dict[str, _Rule] = {
    "autopar::uniform": _uniform,
    "autopar::run_opaque": _opaque,
    "autopar::run_opaque_backward": _opaque_backward,
    **dict.fromkeys(("autopar::take_rows", "autopar::put_rows"), _moved_rows),
    "aten::roll": _roll,
    "aten::_safe_softmax": _safe_softmax,
    **dict.fromkeys(_FUSED_BACKWARD, _attention_backward),
}

_CPU_RULES: dict[str, _Rule] = {
    **_RULES,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "aten::convolution": forward_workspace,
    "aten::convolution_backward": backward_workspace,
    "aten::native_layer_norm_backward": _cpu_layer_norm_backward,
    "aten::native_batch_norm_backward": _one_more,
}
