"""Pad the parts of a factor that does not divide, so that every rank runs the same ops on the same shapes.

Preserves numerics exactly.  A part is padded where an op reads it, and what an op computes from padding is padding
again, of any value.  It does no harm where positions do not meet; where an op sums over the factor, or takes its
maximum, the padding is overwritten first with what changes nothing.  What rests, and what leaves the graph, has its
true size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.local_ops import chunk_range, drop_padding, mask_padding, pad_dim, take_chunk
from autopar.mesh import Mesh
from autopar.passes.localise_indices import Emitter
from autopar.passes.propagate import Cut
from autopar.passes.reshard import is_reshard
from autopar.placement import Sharding, cut_along, is_uneven, size_before
from autopar.rules import OpRule, is_tensor_node, tensor_inputs


def pad_operands(graph: fx.Graph, node: fx.Node, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Pad, and where it matters overwrite, the operands of an op that is cut along a factor that does not divide."""
    rule: OpRule | None = node.meta["rule"]
    for axis, cut in enumerate(node.meta["cuts"]):
        if rule is not None and cut is not None and cut.grain:
            _pad_along(graph, node, rule, cut, axis, ranks, mesh)


def _pad_along(
    graph: fx.Graph, node: fx.Node, rule: OpRule, cut: Cut, axis: int, ranks: dict[str, fx.Node], mesh: Mesh
) -> None:
    factor, emit, operands = cut.factor, Emitter(graph, node), []
    n = mesh.sizes[axis]
    if factor in rule.lookup and chunk_range(rule.sizes[factor], n, n - 1)[1]:
        return  # indices point at what is there, and the rewrite masks those that point elsewhere
    values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    results = [dims for dims, value in zip(rule.outputs, values, strict=True) if isinstance(value, torch.Tensor)]
    is_reduced = any(rule.occurrences(factor, dims) is None for dims in results)
    with graph.inserting_before(node):
        for operand, dims in zip(tensor_inputs(node), rule.inputs, strict=True):
            place = rule.occurrences(factor, dims)
            if place is None:
                operands.append(operand)
                continue
            dim, value = place[0], operand
            made = cut_along(axis, operand.meta["sharding"], mesh)
            if not _is_padded(operand):
                args = (value, dim, int(operand.meta["val"].shape[dim]), *without_ones(made.split))
                value = emit(pad_dim, args, operand)
            if is_reduced:
                size = rule.sizes[factor] // cut.split * rule.inside(factor, dims)
                where = (dim, size, n, ranks[mesh.names[axis]], rule.reduce.get(factor, "sum"))
                value = emit(mask_padding, (value, *where, *without_ones(made.split, made.grain)), operand)
            operands.append(value)
    padded = iter(operands)
    node.args, node.kwargs = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda n: next(padded) if is_tensor_node(n) else n
    )


def _is_padded(operand: fx.Node) -> bool:
    """Whether an op made the value, from operands that were padded; along another axis it may be only padded here."""
    return not (operand.op == "placeholder" or is_reshard(operand) or operand.target in (pad_dim, mask_padding))


def without_ones(split: int, grain: int = 1) -> tuple[int, ...]:
    """The last arguments of the functions of `local_ops`, as far as they differ from their defaults."""
    return (split, grain) if grain > 1 else (split,) if split > 1 else ()


def valid_part(sharding: Sharding, axis: int, shape: tuple[int, ...], mesh: Mesh, rank: fx.Node) -> tuple[Any, ...]:
    """The arguments of `drop_padding` after the first, for a value of global `shape` that an axis cuts unevenly."""
    made = cut_along(axis, sharding, mesh)
    size = size_before(axis, sharding, shape, mesh) // made.split
    return made.dim, size, mesh.sizes[axis], rank, *without_ones(made.split, made.grain)


def drop_padding_of_outputs(graph: fx.Graph, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Give the uneven values that leave the graph their true size."""
    output = graph.output_node()
    for value in dict.fromkeys(output.all_input_nodes):
        shape, sharding = value.meta["global_shape"], value.meta["sharding"]
        if shape is None or sharding is None or value.op == "placeholder":
            continue
        uneven = [axis for axis in range(mesh.num_axes) if is_uneven(sharding, axis, shape, mesh)]
        if len(uneven) == 1 and value.target in (drop_padding, take_chunk):
            continue  # what made it cut this axis; of several it cut the last
        kept = value
        for axis in uneven:
            args = valid_part(sharding, axis, shape, mesh, ranks[mesh.names[axis]])
            with graph.inserting_before(output):
                kept = add_call(graph, drop_padding, (kept, *args), {}, dict(value.meta))
        if kept is not value:
            output.replace_input_with(value, kept)
