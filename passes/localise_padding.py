"""Pad the parts of a factor that does not divide, so that every rank runs the same ops on the same shapes.

Preserves numerics exactly.  A part is padded where an op reads it, and what an op computes from padding is padding
again, of any value.  It does no harm where positions do not meet; where an op sums over the factor, or takes its
maximum, the padding is overwritten first with what changes nothing.  What rests, and what leaves the graph, has its
true size.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import add_call
from autopar.local_ops import chunk_range, drop_padding, mask_padding, pad_dim, take_chunk
from autopar.mesh import Mesh
from autopar.passes.localise_indices import Emitter
from autopar.passes.propagate import Cut
from autopar.passes.reshard import is_reshard
from autopar.placement import is_uneven, shard_dim
from autopar.rules import OpRule, is_tensor_node, tensor_inputs


def pad_operands(graph: fx.Graph, node: fx.Node, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Pad, and where it matters overwrite, the operands of an op that is cut along a factor that does not divide."""
    rule: OpRule | None = node.meta["rule"]
    for axis, cut in enumerate(node.meta["cuts"]):
        if rule is not None and cut is not None and rule.sizes[cut.factor] % mesh.sizes[axis]:
            _pad_along(graph, node, rule, cut, axis, ranks, mesh)


def _pad_along(
    graph: fx.Graph, node: fx.Node, rule: OpRule, cut: Cut, axis: int, ranks: dict[str, fx.Node], mesh: Mesh
) -> None:
    factor, emit, operands = cut.factor, Emitter(graph, node), []
    size, n = rule.sizes[factor], mesh.sizes[axis]
    if factor in rule.lookup and chunk_range(size, n, n - 1)[1]:
        return  # indices point at what is there, and the rewrite masks those that point elsewhere
    values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    made = [dims for dims, value in zip(rule.outputs, values, strict=True) if isinstance(value, torch.Tensor)]
    is_reduced = any(rule.occurrences(factor, dims) is None for dims in made)
    with graph.inserting_before(node):
        for operand, dims in zip(tensor_inputs(node), rule.inputs, strict=True):
            place = rule.occurrences(factor, dims)
            if place is None:
                operands.append(operand)
                continue
            dim, value = place[0], operand
            if operand.op == "placeholder" or is_reshard(operand):  # else it was padded before
                value = emit(pad_dim, (value, dim, int(operand.meta["val"].shape[dim])), operand)
            if is_reduced:
                where = (dim, size, n, ranks[mesh.names[axis]])
                value = emit(mask_padding, (value, *where, rule.reduce.get(factor, "sum")), operand)
            operands.append(value)
    padded = iter(operands)
    node.args, node.kwargs = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda n: next(padded) if is_tensor_node(n) else n
    )


def drop_padding_of_outputs(graph: fx.Graph, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Give the uneven values that leave the graph their true size."""
    output = graph.output_node()
    for value in dict.fromkeys(output.all_input_nodes):
        shape, sharding = value.meta["global_shape"], value.meta["sharding"]
        if shape is None or sharding is None or value.op == "placeholder" or value.target in (drop_padding, take_chunk):
            continue
        kept = value
        for axis, placement in enumerate(sharding):
            if is_uneven(sharding, axis, shape, mesh):
                dim, rank = shard_dim(placement), ranks[mesh.names[axis]]
                with graph.inserting_before(output):
                    kept = add_call(
                        graph, drop_padding, (kept, dim, shape[dim], mesh.sizes[axis], rank), {}, dict(value.meta)
                    )
        if kept is not value:
            output.replace_input_with(value, kept)
