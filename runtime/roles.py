"""Which position of a local graph's flat inputs and outputs means what, read off once when a program is bound."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import InputError
from autopar.graph import InputKind, OutputKind
from autopar.placement import Sharding, is_sharded
from autopar.program import LocalGraph


@dataclass(frozen=True)
class ForwardRoles:
    """Positions in the forward graph's flat result."""

    outputs: tuple[int, ...]
    mutations: tuple[tuple[int, str], ...]
    saved: tuple[int, ...]
    saved_paths: tuple[str, ...]
    clones: tuple[int, ...]
    """Outputs that are memory of a parameter, buffer or input, and saved values of a buffer that is about to change."""

    @classmethod
    def of(cls, graph: LocalGraph) -> ForwardRoles:
        """Read the roles off a forward graph."""
        nodes = _returned(graph)
        specs = list(enumerate(graph.outputs))
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        kinds = dict(zip(placeholders, graph.inputs, strict=True))
        mutated = {spec.path for _, spec in specs if spec.kind is OutputKind.MUTATION}
        clones = []
        for i, spec in specs:
            owner = kinds.get(_memory_of(nodes[i]))
            if owner is None or owner.kind in (InputKind.RANK, InputKind.SEED):
                continue
            changes = owner.kind is InputKind.BUFFER and owner.path in mutated
            if spec.kind is OutputKind.OUTPUT or (spec.kind is OutputKind.SAVED and changes):
                clones.append(i)
        saved = [(i, spec.path) for i, spec in specs if spec.kind is OutputKind.SAVED]
        return cls(
            tuple(i for i, spec in specs if spec.kind is OutputKind.OUTPUT),
            tuple((i, spec.path) for i, spec in specs if spec.kind is OutputKind.MUTATION),
            tuple(i for i, _ in saved),
            tuple(path for _, path in saved),
            tuple(clones),
        )


@dataclass(frozen=True)
class GradientRoles:
    """Positions in the backward graph's inputs and flat result."""

    of_parameter: dict[str, int]
    """By each of its names."""
    of_input: dict[str, int]
    tangent_sources: dict[int, tuple[int, int, Tensor]]
    """For each tangent's position among the backward inputs: which output it is of, what to divide it by, its shape."""
    undifferentiable: list[int]
    clones: frozenset[int]
    """Gradients whose memory belongs to an input of the graph or is that of another gradient too."""

    @classmethod
    def of(
        cls, backward: LocalGraph, forward: LocalGraph, parameters: Mapping[str, Tensor], num_ranks: int
    ) -> GradientRoles:
        """Read the roles off a backward graph and the forward graph that it belongs to."""
        of_parameter: dict[str, int] = {}
        of_input: dict[str, int] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        nodes, clones, owned = _returned(backward), set(), set()
        trained = {s.path for s in forward.inputs if s.kind is InputKind.PARAM}
        for index, spec in enumerate(backward.outputs):
            if spec.kind is not OutputKind.GRADIENT or nodes[index] is None:
                continue
            # A parameter and an input may share a name; the parameter's gradient comes first.
            if spec.path in trained and spec.path not in of_parameter:
                of_parameter |= dict.fromkeys(names[id(parameters[spec.path])], index)
            else:
                of_input[spec.path] = index
            part = _part_of_buffer(nodes[index])
            if _memory_of(part).op == "placeholder" or part in owned:
                clones.add(index)
            owned.add(part)
        outputs = [
            (spec.path, sharding)
            for spec, sharding in zip(forward.outputs, forward.output_shardings, strict=True)
            if spec.kind is OutputKind.OUTPUT
        ]
        sources = dict(_tangent_sources(backward, outputs, num_ranks))
        differentiable = {output for output, _, _ in sources.values()}
        undifferentiable = [i for i in range(len(outputs)) if i not in differentiable]
        return cls(of_parameter, of_input, sources, undifferentiable, frozenset(clones))

    def position(self, kind: InputKind, path: str) -> int | None:
        """Position of a gradient in the backward graph's result, if it is computed."""
        return self.of_parameter.get(path) if kind is InputKind.PARAM else self.of_input[path]

    def tangent(self, index: int, tangents: Sequence[Tensor | None]) -> Tensor:
        """The value of the tangent at `index` of the backward inputs."""
        output, divisor, like = self.tangent_sources[index]
        tangent = tangents[output]
        if tangent is None:
            device = next((t.device for t in tangents if t is not None), torch.device("cpu"))
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        return (tangent if divisor == 1 else tangent / divisor).contiguous()

    def require(self, input_paths: Sequence[str]) -> None:
        """Refuse inputs that want a gradient which the graph does not compute."""
        for path in input_paths:
            if path not in self.of_input:
                raise InputError(
                    f"input {path!r} requires grad, but the compiled program gives no gradient for it: detach it, or "
                    "make it a parameter of the model"
                )


def _tangent_sources(
    backward: LocalGraph, outputs: list[tuple[str, Sharding | None]], num_ranks: int
) -> Iterator[tuple[int, tuple[int, int, Tensor]]]:
    position = {path: i for i, (path, _) in enumerate(outputs)}
    placeholders = backward.module.graph.find_nodes(op="placeholder")
    for index, (spec, node) in enumerate(zip(backward.inputs, placeholders, strict=True)):
        if spec.kind is InputKind.TANGENT:
            output = position[spec.path]
            # Each rank takes a mean over its own rows, so the gradient of the mean over all rows is their average.
            sharding = outputs[output][1] or ()
            yield index, (output, num_ranks if any(map(is_sharded, sharding)) else 1, node.meta["val"])


def _returned(graph: LocalGraph) -> list[Any]:
    return list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]


def _memory_of(node: Any) -> Any:
    """The node whose result holds the memory that this one returns: follows views and waits."""
    while isinstance(node, fx.Node) and _is_view(node):
        node = node.args[0]
    return node


def _part_of_buffer(node: fx.Node) -> fx.Node:
    """As `_memory_of`, but no further than to a part of a buffer in which several values travelled together: such parts
    do not overlap."""
    while _is_view(node) and not (node.target is torch.ops.aten.slice.Tensor and node.meta.get("layout")):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:  # one of several results: a view only if all of them are
        return _is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    # A plain function has no schema: it may return its argument or a view of it.
    return schema is None or any(result.alias_info is not None for result in schema.returns)
