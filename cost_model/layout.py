"""How the tensors of a local program really lie in memory: strides, and which results share their input's.

The rewrite writes sizes only, and `aten.reshape` for every view, which copies where the strides demand it.  So the ops
that keep or change strides are replayed on the meta device; all others give a dense result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload, shares_storage
from autopar.graph import InputKind, OutputKind
from autopar.local_ops import drop_padding, mask_padding, pad_dim, take_chunk
from autopar.program import LocalGraph, LocalProgram

Layouts = Mapping[fx.Node, Any]
"""For each node of a program its value on the meta device, or a number."""


def layouts_of(program: LocalProgram) -> Layouts:
    """Values of every node of forward and backward, seen from the first rank."""
    layouts: dict[fx.Node, Any] = {}
    _replay(program.forward, layouts, {})
    if program.backward is not None:
        values = program.forward.module.graph.output_node().args[0]
        assert isinstance(values, (tuple, list))
        pairs = zip(program.forward.outputs, values, strict=True)
        saved = {spec.path: layouts[node] for spec, node in pairs if spec.kind is OutputKind.SAVED}
        _replay(program.backward, layouts, saved)
    return layouts


def is_view(node: fx.Node, base: fx.Node, layouts: Layouts | None) -> bool:
    """Whether the result of a reshape-like node shares memory with `base`.

    Without layouts the traced strides decide, which hold for a graph in the global view.
    """
    if layouts is not None:
        return shares_storage(layouts[node], layouts[base])
    before, after = base.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and before.is_contiguous()


def _replay(graph: LocalGraph, layouts: dict[fx.Node, Any], saved: Mapping[str, Any]) -> None:
    specs = iter(graph.inputs)
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            layouts[node] = saved[spec.path] if spec.kind is InputKind.SAVED else _dense(node.meta.get("val"))
        elif node.op == "call_function":
            layouts[node] = _result(node, layouts)
        elif node.op != "output":
            layouts[node] = _dense(node.meta.get("val"))


def _result(node: fx.Node, layouts: Layouts) -> Any:
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload):
        is_number = not isinstance(value, (torch.Tensor, tuple, list))
        return _run(node, layouts) if is_number or target in _FUNCTIONS else _dense(value)
    if target is torch.ops._c10d_functional.wait_tensor.default:
        return layouts[node.all_input_nodes[0]]
    if _is_pointwise(target):
        return _like_operands(node, value, layouts)
    if str(target._schema.name).startswith(_CHANNELS_KEEPING):
        return _channels_like_operands(node, value, layouts)
    return _run(node, layouts) if _keeps_strides(target) else _dense(value)


@cache
def _is_pointwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or op in _POINTWISE


@cache
def _keeps_strides(op: OpOverload) -> bool:
    schema = op._schema
    return any(r.alias_info for r in schema.returns) or str(schema.name).startswith(_STRIDE_KEEPING)


def _like_operands(node: fx.Node, value: Any, layouts: Layouts) -> Any:
    """A pointwise result lies as its first operand of the same shape that has no holes and no repeats; an op in place
    gives that operand itself."""
    if not isinstance(value, torch.Tensor) or node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return _dense(value)
    assert isinstance(node.target, OpOverload)
    if node.target._schema.is_mutable and isinstance(node.args[0], fx.Node):
        return layouts[node.args[0]]
    for operand in node.all_input_nodes:
        layout = layouts[operand]
        if isinstance(layout, torch.Tensor) and layout.shape == value.shape and _fills_its_memory(layout):
            return torch.empty_strided(value.shape, layout.stride(), dtype=value.dtype, device="meta")
    return _dense(value)


def _channels_like_operands(node: fx.Node, value: Any, layouts: Layouts) -> Any:
    """Images and filters lie channels-last in the result if one does among the operands; all else is dense."""
    operands = (layouts[operand] for operand in node.all_input_nodes)
    last = any(
        isinstance(t, torch.Tensor)
        and t.dim() == 4
        and t.is_contiguous(memory_format=torch.channels_last)
        and not t.is_contiguous()
        for t in operands
    )

    def lay(result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return tuple(map(lay, result))
        dense = _dense(result)
        if last and isinstance(dense, torch.Tensor) and dense.dim() == 4:
            return dense.to(memory_format=torch.channels_last)
        return dense

    return lay(value)


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _run(node: fx.Node, layouts: Layouts) -> Any:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), layouts.__getitem__)
    assert callable(node.target)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    value = node.target(*args, **kwargs)
    expected = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert value.shape == expected.shape, (
            f"{node.format_node()} gives {tuple(value.shape)}, its metadata say {tuple(expected.shape)}"
        )
    return value


def _dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(_dense(v) for v in value) if isinstance(value, (tuple, list)) else value


_FUNCTIONS = {operator.getitem, take_chunk, drop_padding, mask_padding, pad_dim}

_POINTWISE = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}
"""Pointwise for strides, whatever their tags are."""

_STRIDE_KEEPING = (
    "aten::_unsafe_view", "aten::_scaled_dot_product", "aten::scaled_dot_product_attention",
)  # fmt: skip

_CHANNELS_KEEPING = (
    "aten::convolution", "aten::native_batch_norm", "aten::_native_batch_norm", "aten::max_pool2d", "aten::avg_pool2d",
    "aten::_adaptive_avg_pool2d", "aten::upsample_",
)  # fmt: skip
"""Kernels that follow the memory format of images."""
