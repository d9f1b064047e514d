"""What one ATen node costs: FLOPs, bytes moved, and the time of the two.

Shapes are those of `node.meta["val"]`, so the same functions price a global graph and a local one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cluster import Device
from autopar.cost_model.efficiency import attention_blocks, attention_time, matmul_time
from autopar.cost_model.layout import Layouts, is_view
from autopar.local_ops import drop_padding, mask_padding, pad_dim, take_chunk
from autopar.opaque import find_call
from autopar.program import COLLECTIVE_KINDS


def tensor_bytes(value: object) -> int:
    """Bytes of a traced value: a tensor's elements, the sum over a tuple's, nothing for the rest."""
    if isinstance(value, torch.Tensor):
        return int(value.nbytes)
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
    if layouts is None:
        return _aliased_input(node, None)
    place = layouts.keep(node, "aliased", lambda node: _place_of(node, _aliased_input(node, layouts)))
    return None if place is None else node.all_input_nodes[place]


def _place_of(node: fx.Node, operand: fx.Node | None) -> int | None:
    return None if operand is None else node.all_input_nodes.index(operand)


def _aliased_input(node: fx.Node, layouts: Layouts | None) -> fx.Node | None:
    target = node.target
    if not isinstance(target, OpOverload):
        base = _as_node(node.args[0]) if target in _SHARING_FUNCTIONS or target is pad_dim else None
        if target is pad_dim:
            return base if base is not None and _shape(base) == _shape(node) else None
        # What is taken from each part of a dim does not lie together.
        return None if target is take_chunk and node.args[4:5] > (1,) else base
    shared = _shared_argument(target)
    if shared is None:
        return None
    position, name, may_copy = shared
    base = _as_node(node.args[position] if position < len(node.args) else node.kwargs.get(name))
    return None if may_copy and base is not None and not is_view(node, base, layouts) else base


@cache
def _shared_argument(op: OpOverload) -> tuple[int, str, bool] | None:
    """The position and name of the argument whose memory an op's result shares, and whether that depends on how it
    lies; None if the result has memory of its own."""
    schema = op._schema
    if str(schema.name) in _SHARING_OPS:
        return 0, str(schema.arguments[0].name), False
    if not any(result.alias_info for result in schema.returns):
        return None
    position, argument = next((i, a) for i, a in enumerate(schema.arguments) if a.alias_info)
    return position, str(argument.name), str(schema.name) in _MAYBE_COPYING_OPS


def is_free(node: fx.Node, layouts: Layouts | None = None) -> bool:
    """Whether a node does no work of its own: inputs and outputs, views, arithmetic on sizes and ranks, allocation
    without filling, and collectives, which `autopar.cost_model.collectives` prices."""
    if node.op != "call_function":
        return True
    return _is_free(node, None) if layouts is None else layouts.keep(node, "free", lambda n: _is_free(n, layouts))


def _is_free(node: fx.Node, layouts: Layouts | None) -> bool:
    if isinstance(node.target, OpOverload):
        is_known = _is_always_free(node.target)
        if is_known is not None:
            return is_known
    return aliased_input(node, layouts) is not None or not _holds_tensor(node.meta.get("val"))


@cache
def _is_always_free(op: OpOverload) -> bool | None:
    """Whether an op does no work of its own; None if that depends on the call."""
    if op in COLLECTIVE_KINDS or str(op._schema.name) in _ALLOCATIONS:
        return True
    return False if op._schema.is_mutable else None


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of matmuls, convolutions and attention, a multiply-add being two; 0 for other ops.

    Attention counts the whole score matrix, causal or not.
    """
    return sum(count * math.prod(map(int, dims)) for count, dims in flop_terms(node, lambda n: n.meta["val"].shape))


def flop_terms(node: fx.Node, dims: Callable[[fx.Node], Sequence[Any]]) -> list[tuple[int, tuple[Any, ...]]]:
    """The FLOPs of a node as a sum of products: a count and the dims that it is multiplied by.

    `dims` gives the dims of a value: its shape, or symbols in its place.
    """
    formula = _FLOPS.get(op_name(node)) if node.op == "call_function" else None
    return formula(node, dims) if formula else []


def node_bytes(node: fx.Node, layouts: Layouts | None = None) -> int:
    """Bytes that a node reads and writes: its inputs and outputs once each.

    A dim that an input only repeats (`expand`) is read once, and a lookup reads the rows that it returns.
    """
    if is_free(node, layouts):
        return 0
    if layouts is None:
        return _node_bytes(node, None)
    return layouts.keep(node, "moved", lambda node: _node_bytes(node, layouts))


def _node_bytes(node: fx.Node, layouts: Layouts | None) -> int:
    times, read = moved_parts(node)
    inputs = (n.meta.get("val") if layouts is None else layouts[n] for n in read)
    return times * tensor_bytes(node.meta.get("val")) + sum(map(read_bytes, inputs))


def moved_parts(node: fx.Node) -> tuple[int, list[fx.Node]]:
    """How often a node moves its own result, and the inputs that it reads besides."""
    if op_name(node) in _LOOKUPS:
        return 2, node.all_input_nodes[1:]
    # What is summed into, or written in part, is filled with zeros first.
    is_filled = op_name(node) == "autopar::put_rows" and (node.args[2] != 1 or "num_places" in node.kwargs)
    return (2 if is_filled else 1), node.all_input_nodes


def op_time(
    node: fx.Node,
    device: Device,
    allow_tf32: bool = False,
    layouts: Layouts | None = None,
    moved_bytes: int | None = None,
) -> float:
    """Seconds that the device works on one node: the longer of computing and moving memory, and the kernel's start.

    On a device without a queue, the host's time to launch it too.  `moved_bytes` replaces what the node moves alone,
    where it is part of a fused kernel (see `autopar.cost_model.fusion`).
    """
    if layouts is None or moved_bytes is not None:
        return _op_time(node, device, allow_tf32, layouts, moved_bytes)
    return layouts.keep(
        node, ("alone", device, allow_tf32), lambda node: _op_time(node, device, allow_tf32, layouts, None)
    )


def _op_time(
    node: fx.Node, device: Device, allow_tf32: bool, layouts: Layouts | None, moved_bytes: int | None
) -> float:
    if is_free(node, layouts):
        return 0.0
    moved = node_bytes(node, layouts) if moved_bytes is None else moved_bytes
    launch_s = 0.0 if device.is_queued else device.kernel_launch_s
    if layouts is None:
        computing_s = compute_time(node, device, allow_tf32)
    else:
        computing_s = layouts.keep(node, (device, allow_tf32), lambda node: compute_time(node, device, allow_tf32))
    busy_s = max(computing_s, moved / device.memory_bandwidth_bytes_s)
    return busy_s + device.kernel_start_s + launch_s


def compute_time(node: fx.Node, device: Device, allow_tf32: bool = False) -> float:
    """Seconds of a node's arithmetic, by its shape and dtype; 0 for nodes that `node_flops` does not count."""
    name = op_name(node) if node.op == "call_function" else ""
    if name not in _FLOPS:
        return 0.0
    rate = matmul_rate(node, allow_tf32)
    if name in _CONTRACTIONS:
        return matmul_time(*_contraction_shape(node, _CONTRACTIONS[name]), rate, device)
    if name == "autopar::grouped_mm":
        return matmul_time(*_grouped_shape(node), rate, device)
    if name in _ATTENTION_BACKWARD or name in _ATTENTION_FORWARD:
        is_backward = name in _ATTENTION_BACKWARD
        query = _value(node, int(is_backward))
        blocks = attention_blocks(math.prod(query.shape[:-3]), int(query.shape[-3]), int(query.shape[-2]))
        return attention_time(node_flops(node), blocks, _is_causal(node), is_backward, rate, device)
    return node_flops(node) / device.flops[rate]


def matmul_rate(node: fx.Node, allow_tf32: bool = False) -> str:
    """Which of `Device.flops` a node computes at; float32 matmuls use TF32 only where that is allowed."""
    values = (n.meta.get("val") for n in node.all_input_nodes)
    dtypes = (v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype in _RATES)
    rate = _RATES[next(dtypes, torch.float32)]
    return "tf32" if rate == "fp32" and allow_tf32 else rate


def count_flops(graph: fx.Graph) -> int:
    """FLOPs of all nodes of a graph."""
    return sum(node_flops(node) for node in graph.nodes)


_SHARING_OPS = {"aten::_unsafe_view", "_c10d_functional::wait_tensor"}
"""Share their input's memory though their schema does not say so."""

_SHARING_FUNCTIONS = {operator.getitem, take_chunk, drop_padding, mask_padding}
"""`mask_padding` copies on the last rank alone, which has less of everything else."""

_MAYBE_COPYING_OPS = {"aten::reshape", "aten::contiguous", "aten::to", "aten::flatten"}
"""Views according to their schema, copies when the layout or the dtype demands it."""

_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}

_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index", "autopar::take_rows"}

_RATES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.complex64: "fp32", torch.complex128: "fp64",
}  # fmt: skip


def _as_node(value: object) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _operand(node: fx.Node, position: int) -> fx.Node:
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of {node.format_node()} is not a tensor"
    return argument


def _value(node: fx.Node, position: int) -> torch.Tensor:
    value = _operand(node, position).meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _holds_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)))


def read_bytes(value: object) -> int:
    """Bytes of what is distinct in a traced value: a dim that it only repeats (`expand`) counts once."""
    if isinstance(value, torch.Tensor):
        steps = zip(value.shape, value.stride(), strict=True)
        distinct = math.prod(int(size) for size, stride in steps if stride != 0) if value.numel() else 0
        return distinct * value.element_size()
    return sum(read_bytes(v) for v in value) if isinstance(value, (tuple, list)) else 0


Dims = Callable[[fx.Node], Sequence[Any]]
Terms = list[tuple[int, tuple[Any, ...]]]


def _contraction(left: int) -> Callable[[fx.Node, Dims], Terms]:
    """FLOPs of a product whose operand `left` has the summed dim last."""
    return lambda node, dims: [(2, (*dims(node), dims(_operand(node, left))[-1]))]


def _contraction_shape(node: fx.Node, left: int) -> tuple[int, int, int, int, int]:
    """Batch, m, n, k and bytes an element of a product; a weight without batch dims meets all rows at once."""
    operand, other = _value(node, left), _value(node, left + 1)
    k, total = int(operand.shape[-1]), int(node.meta["val"].numel())
    batch = math.prod(operand.shape[:-2]) if operand.dim() > 2 and other.dim() > 2 else 1
    m = max(1, int(operand.numel()) // max(1, k * batch))
    return batch, m, total // max(1, batch * m), k, operand.element_size()


def _grouped_product(node: fx.Node, dims: Dims) -> Terms:
    """Each row meets its group's matrix, or each pair of columns meets in its group's rows."""
    return [(2, (*dims(_operand(node, 0)), dims(node)[-1]))]


def _grouped_shape(node: fx.Node) -> tuple[int, int, int, int, int]:
    """As `_contraction_shape`, for groups of one size: what they will be is known only while running."""
    left, right, ends = (_value(node, i) for i in range(3))
    groups = int(ends.numel())
    m, k, n = int(left.shape[0]), int(left.shape[1]), int(right.shape[-1])
    if right.dim() == 2:
        return groups, m, n, -(-k // groups), left.element_size()
    return groups, -(-m // groups), n, k, left.element_size()


def _opaque(node: fx.Node, dims: Dims) -> Terms:
    """Of a module that runs whole; how many rows it selects is assumed."""
    return [(find_call(str(node.args[-1])).forward.flops, ())]


def _opaque_backward(node: fx.Node, dims: Dims) -> Terms:
    return [(find_call(str(node.args[-1])).backward.flops, ())]


def _convolution(node: fx.Node, dims: Dims) -> Terms:
    """Each position of the output (of the input, when transposed) meets one filter of `weight[0]`'s size."""
    positions = dims(_operand(node, 0)) if node.args[6] else dims(node)
    return [(2, (*positions, *dims(_operand(node, 1))[1:]))]


def _convolution_backward(node: fx.Node, dims: Dims) -> Terms:
    mask = node.args[10]
    assert isinstance(mask, (list, tuple))
    positions = dims(_operand(node, 1 if node.args[7] else 0))
    return [(2 * sum(bool(wanted) for wanted in mask[:2]), (*positions, *dims(_operand(node, 2))[1:]))]


def _attention(node: fx.Node, dims: Dims) -> Terms:
    query, key, value = (dims(_operand(node, i)) for i in range(3))
    scores = (*query[:-1], key[-2])
    return [(2, (*scores, query[-1])), (2, (*scores, value[-1]))]


def _attention_backward(node: fx.Node, dims: Dims) -> Terms:
    """The scores again, gradients of probabilities and values, gradients of queries and keys: five products."""
    query, key, value = (dims(_operand(node, i)) for i in range(1, 4))
    scores = (*query[:-1], key[-2])
    return [(6, (*scores, query[-1])), (4, (*scores, value[-1]))]


def _is_causal(node: fx.Node) -> bool:
    """What the call says for the schema's argument `is_causal`."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "is_causal":
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return False


_FUSED_ATTENTION = tuple(
    f"aten::_scaled_dot_product_{variant}"
    for variant in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)  # fmt: skip
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _FUSED_ATTENTION)

_ATTENTION_FORWARD = frozenset((*_FUSED_ATTENTION, "aten::scaled_dot_product_attention"))

_CONTRACTIONS = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::matmul", "aten::linear", "aten::mv", "aten::dot", "aten::_scaled_mm"), 0
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation"), 1),
}
"""Products, and which argument is the operand that has the summed dim last."""

_FLOPS: dict[str, Callable[[fx.Node, Dims], Terms]] = {
    **{name: _contraction(left) for name, left in _CONTRACTIONS.items()},
    "autopar::grouped_mm": _grouped_product,
    "autopar::run_opaque": _opaque,
    "autopar::run_opaque_backward": _opaque_backward,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **dict.fromkeys(_ATTENTION_FORWARD, _attention),
    **dict.fromkeys(_ATTENTION_BACKWARD, _attention_backward),
}
