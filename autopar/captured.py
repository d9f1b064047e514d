"""From a captured graph to a `JointGraph`: inputs and outputs named, owners assigned, what cannot be run refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar._compat import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    LazyGraphModule,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from autopar.errors import TraceError
from autopar.flat_module import FlatModule
from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.ownership import assign_owners, traced_module
from autopar.signature import undivided_kind

ASSERTIONS = {
    torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_tensor_metadata.default,
}  # fmt: skip
"""Checks of values and of metadata, which give nothing."""

ACTING = (
    "which acts by something else than its result, so that it can be neither moved nor repeated: put it under"
    " `if not torch.compiler.is_compiling():`"
)
"""What is wrong with an op that a model calls for its effects, and the way out."""


@dataclass(frozen=True)
class Captured:
    """A joint graph as it was captured.

    Attributes:
        module: the graph; its result is one tuple.
        inputs: what each placeholder is.
        outputs: what each result is; None: something that nobody asked for.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput | None, ...]


def captured_by_aot(module: fx.GraphModule, flat: FlatModule) -> Captured:
    """What AOTAutograd's descriptors say of its graph."""
    _refuse_effects(module.graph)
    inputs = tuple(_graph_input(node.meta["desc"], flat) for node in module.graph.find_nodes(op="placeholder"))
    output_node = module.graph.output_node()
    descriptions = output_node.meta["desc"]
    outputs = tuple(None if desc is None else _graph_output(desc, flat) for desc in descriptions)
    pairs = zip(output_node.args[0], descriptions, strict=True)  # type: ignore[arg-type]
    output_node.args = (tuple(copied(n) if isinstance(desc, PlainAOTOutput) else n for n, desc in pairs),)
    return Captured(module, inputs, outputs)


def joint_graph(captured: Captured, flat: FlatModule, batch_dims: Mapping[str, int]) -> JointGraph:
    """Name inputs and outputs, drop what is not asked for, and assign owners."""
    assert flat.output_tree is not None
    graph, inputs = captured.module.graph, captured.inputs
    placeholders = _named_placeholders(graph, inputs)
    trains = any(spec.kind is InputKind.TANGENT for spec in inputs)

    _drop_profiler_marks(graph)
    output_node = graph.output_node()
    returned: dict[GraphOutput, fx.Node | None] = {}
    for value, spec in zip(output_node.args[0], captured.outputs, strict=True):  # type: ignore[arg-type]
        if spec is not None:
            _refuse_sparse(spec, value)
            returned[spec] = value
    outputs = [GraphOutput(OutputKind.OUTPUT, path) for path in flat.output_tree.paths]
    outputs += [spec for spec in returned if spec.kind is OutputKind.MUTATION]
    if trains:
        outputs += [GraphOutput(OutputKind.GRADIENT, n) for n, p in flat.state.parameters.items() if p.requires_grad]
    values = [returned.get(spec) for spec in outputs]
    output_node.args = (tuple(values),)
    output_node.meta = {}
    _inline_scalar_constants(captured.module)
    graph.eliminate_dead_code()

    for node, source in zip(placeholders, inputs, strict=True):
        node.meta["module"] = _owner(source)
    pairs = [(spec, value) for spec, value in zip(outputs, values, strict=True) if value is not None]
    assign_owners(
        graph,
        tangents=[node for node, spec in zip(placeholders, inputs, strict=True) if spec.kind is InputKind.TANGENT],
        forward_values=[value for spec, value in pairs if spec.kind is not OutputKind.GRADIENT],
        gradients={value: _owner(spec) for spec, value in pairs if spec.kind is OutputKind.GRADIENT},
    )
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in ("val", "module", "backward") if key in node.meta}
    graph.set_codegen(fx.graph.CodeGen())  # plain positional arguments
    graph.lint()
    return JointGraph(
        module=LazyGraphModule(captured.module, graph), inputs=inputs, outputs=tuple(outputs),
        batch_dims=dict(batch_dims), tied=dict(flat.state.tied), trains=trains, output_tree=flat.output_tree,
    )  # fmt: skip


def _drop_profiler_marks(graph: fx.Graph) -> None:
    """Leave out what `torch.profiler.record_function` records: it has no part in the numbers."""
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", None) == "profiler":
            graph.erase_node(node)


def _refuse_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if str(node.target) == "with_effects":
            raise TraceError(f"module {traced_module(node) or '(root)'} calls {node.args[1]}, {ACTING}")


def _refuse_sparse(spec: GraphOutput, value: object) -> None:
    result = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(result, torch.Tensor) and (kind := undivided_kind(result)):
        what = f"the gradient of {spec.path}" if spec.kind is OutputKind.GRADIENT else f"{spec.kind.value} {spec.path}"
        raise TraceError(
            f"{what} is a {kind} tensor, and only dense ones are exchanged between ranks: use "
            "nn.Embedding(sparse=False), or return to_dense() of it"
        )


def _named_placeholders(graph: fx.Graph, inputs: Sequence[GraphInput]) -> list[fx.Node]:
    """Put placeholders named for what they are (`param_head_weight`) in the place of the graph's."""
    named: list[fx.Node] = []
    taken: set[str] = set()
    for node, spec in zip(list(graph.find_nodes(op="placeholder")), inputs, strict=True):
        base = name = placeholder_name(spec)
        while name in taken:
            name = f"{base}_{len(taken)}"
        taken.add(name)
        with graph.inserting_before(node):
            named.append(graph.placeholder(name))
        named[-1].meta = dict(node.meta)
        node.replace_all_uses_with(named[-1])
        graph.erase_node(node)
    return named


def placeholder_name(spec: GraphInput) -> str:
    """What the placeholder of an input is called, but for a number where two would be called the same."""
    return re.sub(r"\W", "_", f"{spec.kind.value}_{spec.path}").rstrip("_")


def _owner(spec: GraphInput | GraphOutput) -> str:
    """Path of the module that holds the parameter or buffer; the root for what none holds."""
    held = {InputKind.PARAM, InputKind.BUFFER, OutputKind.GRADIENT}
    return spec.path.rpartition(".")[0] if spec.kind in held else ""


def _graph_input(desc: AOTInput, flat: FlatModule) -> GraphInput:
    if isinstance(desc, PlainAOTInput):
        return flat.inputs[desc.idx]
    if isinstance(desc, TangentAOTInput):
        if isinstance(desc.output, PlainAOTOutput):
            return GraphInput(InputKind.TANGENT, flat.outputs[desc.output.idx].path)
        if isinstance(desc.output, InputMutationAOTOutput):
            name = _mutated_buffer(desc.output, flat)
            raise TraceError(f"the model gives buffer {name} a value that requires grad: detach() the value first")
    raise TraceError(f"the traced graph has an input of a kind that autopar does not know: {desc}")


def _graph_output(desc: AOTOutput, flat: FlatModule) -> GraphOutput:
    if isinstance(desc, PlainAOTOutput):
        return flat.outputs[desc.idx]
    if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
        return GraphOutput(OutputKind.GRADIENT, flat.inputs[desc.grad_of.idx].path)
    if isinstance(desc, InputMutationAOTOutput):
        return GraphOutput(OutputKind.MUTATION, _mutated_buffer(desc, flat))
    raise TraceError(f"the traced graph has an output of a kind that autopar does not know: {desc}")


class ChangedError(TraceError):
    """The model changes an input or a parameter in place.

    Attributes:
        changed: which.
    """

    def __init__(self, changed: GraphInput, place: str = "") -> None:
        self.changed = changed
        is_input, at = changed.kind is InputKind.INPUT, f", in {place}" if place else ""
        super().__init__(
            f"the model changes its {'input' if is_input else 'parameter'} {changed.path} in place{at}: let it change a"
            " copy (x = x.clone()), or keep what changes in a buffer"
            f"{'' if is_input else ', or change it after the step of the optimizer, outside of forward'}"
        )


def _mutated_buffer(desc: InputMutationAOTOutput, flat: FlatModule) -> str:
    mutated = _graph_input(desc.mutated_input, flat)
    if mutated.kind is InputKind.BUFFER:
        return mutated.path
    raise ChangedError(mutated)


def copied(copy: fx.Node) -> fx.Node:
    """What `FlatModule` made a copy of to return it; the copy itself if that shares memory with an input."""
    assert copy.target is torch.ops.aten.clone.default
    source = copy.args[0]
    root = source
    while isinstance(root, fx.Node) and getattr(root.target, "is_view", False):
        root = root.args[0]
    assert isinstance(source, fx.Node)
    assert isinstance(root, fx.Node)
    return copy if root.op == "placeholder" else source


def _inline_scalar_constants(captured: fx.GraphModule) -> None:
    """Make a 0-dim constant tensor that a module holds on to (`torch.tensor(0.5)`) a node that creates it."""
    graph = captured.graph
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(captured, node.target)
        if not isinstance(value, torch.Tensor) or value.ndim or value.device.type == "meta":
            continue
        with graph.inserting_before(node):
            scalar = graph.call_function(
                torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        scalar.meta = dict(node.meta)
        node.replace_all_uses_with(scalar)
        graph.erase_node(node)


def pairs_selected(node: fx.Node) -> bool:
    """Whether a call reads at what a mask selects together with other positions, one for each: as many as there are of
    these, by its shape, whatever the mask selects."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [one.meta["val"] for one in node.args[1] if isinstance(one, fx.Node)]  # type: ignore[union-attr]
    return len(indices) > 1 and any(index.dtype is torch.bool for index in indices)


def has_symbol(value: object) -> bool:
    """Whether a traced value is, or has in its shape, a number known only when the program runs."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(has_symbol(v) for v in value)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
