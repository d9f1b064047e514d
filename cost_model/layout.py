"""How the tensors of a local program really lie in memory: strides, and which results share their input's.

The rewrite writes sizes only, and `aten.reshape` for every view, which copies where the strides demand it.  So the ops
that keep or change strides are replayed on the meta device; all others give a dense result.

Plans that are compared have most of their calls in common, and a deep model's layers have all: so what is known of a
call is kept for every call of the same op on the same layouts (`Known`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autopar._compat import OpOverload, shares_storage
from autopar.graph import InputKind, OutputKind
from autopar.local_ops import drop_padding, mask_padding, pad_dim, take_chunk
from autopar.placement import meta_value
from autopar.program import LocalGraph, LocalProgram

Fact = TypeVar("Fact")


@dataclass(eq=False)
class Known:
    """What is known of all calls of one op on operands that lie alike.

    Attributes:
        value: the result on the meta device, or a number.  Results that lie alike may be one object.
        is_view: whether it shares memory with an operand, so far as running the op on the meta device tells.
        facts: what else was worked out of such a call (see `Layouts.keep`).
        kept: the op, the operands' layouts and the result's value, which must live as long as they name such calls.
    """

    value: Any
    is_view: bool
    kept: tuple[Any, ...]
    facts: dict[Hashable, Any] = field(default_factory=dict)


class Layouts(dict[fx.Node, Any]):
    """For each node of a program its value on the meta device, or a number."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, Known] = {}

    def keep(self, node: fx.Node, name: Hashable, work: Callable[[fx.Node], Fact]) -> Fact:
        """What `work` gives for a call, which must depend on the op, its arguments and their layouts alone."""
        known = self.known
        if node not in known:
            return work(node)
        facts = known[node].facts
        if name not in facts:
            facts[name] = work(node)
        found: Fact = facts[name]
        return found


def layouts_of(program: LocalProgram) -> Layouts:
    """Values of every node of forward and backward, seen from the first rank."""
    layouts = Layouts()
    _replay(program.forward, layouts, {})
    if program.backward is not None:
        values = program.forward.module.graph.output_node().args[0]
        assert isinstance(values, (tuple, list))
        pairs = zip(program.forward.outputs, values, strict=True)
        saved = {spec.path: layouts[node] for spec, node in pairs if spec.kind is OutputKind.SAVED}
        _replay(program.backward, layouts, saved)
    return layouts


def is_view(node: fx.Node, base: fx.Node, layouts: Mapping[fx.Node, Any] | None) -> bool:
    """Whether the result of a reshape-like node shares memory with `base`.

    Without layouts the traced strides decide, which hold for a graph in the global view.
    """
    if layouts is not None:
        known = layouts.known.get(node) if isinstance(layouts, Layouts) else None
        return shares_storage(layouts[node], layouts[base]) if known is None else known.is_view
    before, after = base.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and before.is_contiguous()


def _replay(graph: LocalGraph, layouts: Layouts, saved: Mapping[str, Any]) -> None:
    specs = iter(graph.inputs)
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            layouts[node] = saved[spec.path] if spec.kind is InputKind.SAVED else _dense(node.meta.get("val"))
        elif node.op == "call_function":
            layouts.known[node] = known = _known(node, layouts)
            layouts[node] = known.value
        elif node.op != "output":
            layouts[node] = _dense(node.meta.get("val"))


_KNOWN: dict[Hashable, Known] = {}
_MAX_KNOWN = 1 << 16


def _known(node: fx.Node, layouts: Layouts) -> Known:
    """What is known of a call: what was found out of an earlier one that is like it, if there was one."""
    inputs = node.all_input_nodes
    operands = (*[layouts[n] for n in inputs], node.meta.get("val"))
    places = dict(zip(inputs, _places(len(inputs)), strict=True))
    # What lies alike is one object (see `_shared`), and so are values of one shape and dtype.
    lie = [_identity(value) if type(value) is tuple else id(value) for value in operands]
    kwargs = node.kwargs
    named = _frozen_part(kwargs, places) if kwargs else ()
    key = (id(node.target), *lie, *_frozen(node.args, places), named)
    known = _KNOWN.get(key)
    if known is None:
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        value = _result(node, layouts)
        tensors = [t for t in operands[:-1] if isinstance(t, torch.Tensor)]
        is_view = isinstance(value, torch.Tensor) and any(shares_storage(value, t) for t in tensors)
        known = _KNOWN[key] = Known(_shared(value), is_view, (node.target, *operands))
    return known


def _shared(value: Any) -> Any:
    """A value with one object for all tensors of its shape, strides and dtype."""
    if isinstance(value, torch.Tensor):
        return _strided(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_shared, value)) if isinstance(value, (tuple, list)) else value


@lru_cache(maxsize=1 << 14)
def _strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _identity(value: Any) -> Hashable:
    return tuple(map(_identity, value)) if isinstance(value, tuple) else id(value)


@cache
def _places(number: int) -> tuple[object, ...]:
    """What stands in a key for a call's first operand, its second, and so on."""
    return tuple(object() for _ in range(number))


def _frozen(arguments: Iterable[Any], places: Mapping[Any, object]) -> tuple[Hashable, ...]:
    """Arguments as a key."""
    return tuple([_frozen_part(a, places) if type(a) in _CONTAINERS else places.get(a, a) for a in arguments])


def _frozen_part(argument: Any, places: Mapping[Any, object]) -> Hashable:
    """An argument that holds others as a key."""
    if isinstance(argument, dict):
        return (*argument, *_frozen(argument.values(), places))
    if isinstance(argument, slice):
        return ("slice", *_frozen((argument.start, argument.stop, argument.step), places))
    return _frozen(argument, places)


_CONTAINERS = {tuple, list, dict, slice, immutable_list, immutable_dict}


def _result(node: fx.Node, layouts: Layouts) -> Any:
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload):
        is_number = not isinstance(value, (torch.Tensor, tuple, list))
        return _run(node, layouts) if is_number or target in _FUNCTIONS else _dense(value)
    if target is torch.ops._c10d_functional.wait_tensor.default:
        return layouts[node.all_input_nodes[0]]
    lay = _way(target)
    return _dense(value) if lay is None else lay(node, layouts)


@cache
def _way(op: OpOverload) -> Callable[[fx.Node, Layouts], Any] | None:
    """How to find out how the results of an op lie; None if they are dense."""
    schema = op._schema
    if torch.Tag.pointwise in op.tags or op in _POINTWISE:
        return _like_operands
    if str(schema.name).startswith(_CHANNELS_KEEPING):
        return _channels_like_operands
    is_view = any(r.alias_info for r in schema.returns)
    return _run if is_view or str(schema.name).startswith(_STRIDE_KEEPING) else None


def _like_operands(node: fx.Node, layouts: Layouts) -> Any:
    """A pointwise result lies as its first operand of the same shape that has no holes and no repeats; an op in place
    gives that operand itself."""
    value = node.meta.get("val")
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


def _channels_like_operands(node: fx.Node, layouts: Layouts) -> Any:
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

    return lay(node.meta.get("val"))


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
        return _shared(meta_value(tuple(value.shape), value.dtype))
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
