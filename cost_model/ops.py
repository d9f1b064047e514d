"""What one ATen node costs: FLOPs, bytes moved, and the roofline time of the two.

Shapes are those of `node.meta["val"]`, so the same functions price a global graph and a local one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cluster import Device
from autopar.cost_model.layout import Layouts, is_view
from autopar.local_ops import drop_padding, pad_dim, take_chunk
from autopar.program import COLLECTIVE_KINDS


def tensor_bytes(value: object) -> int:
    """Bytes of a traced value: a tensor's elements, the sum over a tuple's, nothing for the rest."""
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    return sum(tensor_bytes(v) for v in value) if isinstance(value, (tuple, list)) else 0


def op_name(node: fx.Node) -> str:
    """Name of the op that a node calls, without the overload, such as `aten::mm`; empty for other calls."""
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


def aliased_input(node: fx.Node, layouts: Layouts | None = None) -> fx.Node | None:
    """The input whose memory the node's result shares: of a view, an in-place op, `getitem` or `wait_tensor`.

    `layouts` tells where a reshape is a view in a local graph (see `autopar.cost_model.layout`).
    """
    if node.op != "call_function":
        return None
    name = op_name(node)
    if name in _SHARING_OPS or node.target in _SHARING_FUNCTIONS:
        return _as_node(node.args[0])
    if node.target is pad_dim:
        base = _as_node(node.args[0])
        return base if base is not None and _shape(base) == _shape(node) else None
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if not any(result.alias_info for result in schema.returns):
        return None
    position, argument = next((i, a) for i, a in enumerate(schema.arguments) if a.alias_info)
    base = _as_node(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    if name in _MAYBE_COPYING_OPS and base is not None and not is_view(node, base, layouts):
        return None
    return base


def is_free(node: fx.Node, layouts: Layouts | None = None) -> bool:
    """Whether a node does no work of its own: inputs and outputs, views, arithmetic on sizes and ranks, allocation
    without filling, and collectives, which `autopar.cost_model.collectives` prices."""
    if node.op != "call_function" or node.target in COLLECTIVE_KINDS or op_name(node) in _ALLOCATIONS:
        return True
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        return False
    return aliased_input(node, layouts) is not None or not _holds_tensor(node.meta.get("val"))


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of matmuls, convolutions and attention, a multiply-add being two; 0 for other ops.

    Attention counts the whole score matrix, causal or not.
    """
    formula = _FLOPS.get(op_name(node)) if node.op == "call_function" else None
    return formula(node) if formula else 0


def node_bytes(node: fx.Node, layouts: Layouts | None = None) -> int:
    """Bytes that a node reads and writes: its inputs and outputs once each.

    A dim that an input only repeats (`expand`) is read once, and a lookup reads the rows that it returns.
    """
    if is_free(node, layouts):
        return 0
    inputs = [n.meta.get("val") if layouts is None else layouts[n] for n in node.all_input_nodes]
    written = tensor_bytes(node.meta.get("val"))
    if op_name(node) in _LOOKUPS:
        return 2 * written + sum(map(_read_bytes, inputs[1:]))
    return written + sum(map(_read_bytes, inputs))


def op_time(node: fx.Node, device: Device, allow_tf32: bool = False, layouts: Layouts | None = None) -> float:
    """Roofline seconds of one node: the longer of computing and moving memory, and the launch."""
    if is_free(node, layouts):
        return 0.0
    compute_s = node_flops(node) / peak_flops(node, device, allow_tf32)
    return max(compute_s, node_bytes(node, layouts) / device.memory_bandwidth_bytes_s) + device.kernel_launch_s


def peak_flops(node: fx.Node, device: Device, allow_tf32: bool = False) -> float:
    """The device's rate for the dtype that a node computes in; float32 matmuls use TF32 only where that is allowed."""
    values = (n.meta.get("val") for n in node.all_input_nodes)
    dtypes = (v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype in _RATES)
    rate = _RATES[next(dtypes, torch.float32)]
    return device.flops["tf32" if rate == "fp32" and allow_tf32 else rate]


def count_flops(graph: fx.Graph) -> int:
    """FLOPs of all nodes of a graph."""
    return sum(node_flops(node) for node in graph.nodes)


_SHARING_OPS = {"aten::_unsafe_view", "_c10d_functional::wait_tensor"}
"""Share their input's memory though their schema does not say so."""

_SHARING_FUNCTIONS = {operator.getitem, take_chunk, drop_padding}

_MAYBE_COPYING_OPS = {"aten::reshape", "aten::contiguous", "aten::to", "aten::flatten"}
"""Views according to their schema, copies when the layout or the dtype demands it."""

_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}

_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}

_RATES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.complex64: "fp32", torch.complex128: "fp64",
}  # fmt: skip


def _as_node(value: object) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _value(node: fx.Node, position: int) -> torch.Tensor:
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of {node.format_node()} is not a tensor"
    value = argument.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _holds_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)))


def _read_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        steps = zip(value.shape, value.stride(), strict=True)
        distinct = math.prod(int(size) for size, stride in steps if stride != 0) if value.numel() else 0
        return distinct * value.element_size()
    return sum(_read_bytes(v) for v in value) if isinstance(value, (tuple, list)) else 0


def _contraction(left: int) -> Callable[[fx.Node], int]:
    """FLOPs of a product whose operand `left` has the summed dim last."""

    def formula(node: fx.Node) -> int:
        output = node.meta["val"]
        return 2 * int(output.numel()) * int(_value(node, left).shape[-1])

    return formula


def _convolution_flops(inputs: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, transposed: bool) -> int:
    """Each position of the output (of the input, when transposed) meets one filter of `weight[0]`'s size."""
    positions = inputs if transposed else outputs
    filter_size = int(weight.numel()) // max(1, int(weight.shape[0]))
    return 2 * int(positions.numel()) * filter_size


def _convolution(node: fx.Node) -> int:
    return _convolution_flops(_value(node, 0), _value(node, 1), node.meta["val"], bool(node.args[6]))


def _convolution_backward(node: fx.Node) -> int:
    one = _convolution_flops(_value(node, 1), _value(node, 2), _value(node, 0), bool(node.args[7]))
    mask = node.args[10]
    assert isinstance(mask, (list, tuple))
    return one * sum(bool(wanted) for wanted in mask[:2])


def _attention(node: fx.Node) -> int:
    query, key, value = (_value(node, i) for i in range(3))
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * int(scores) * int(query.shape[-1] + value.shape[-1])


def _attention_backward(node: fx.Node) -> int:
    """The scores again, gradients of probabilities and values, gradients of queries and keys: five products."""
    query, key, value = (_value(node, i) for i in range(1, 4))
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * int(scores) * int(3 * query.shape[-1] + 2 * value.shape[-1])


_FUSED_ATTENTION = tuple(
    f"aten::_scaled_dot_product_{variant}"
    for variant in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)  # fmt: skip
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _FUSED_ATTENTION)

_FLOPS: dict[str, Callable[[fx.Node], int]] = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::matmul", "aten::linear", "aten::mv", "aten::dot", "aten::_scaled_mm"),
        _contraction(0),
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation"), _contraction(1)),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **dict.fromkeys((*_FUSED_ATTENTION, "aten::scaled_dot_product_attention"), _attention),
    **dict.fromkeys(_ATTENTION_BACKWARD, _attention_backward),
}
