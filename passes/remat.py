"""Remat: compute values again in the backward pass instead of keeping them from the forward (activation checkpointing).

Preserves numerics exactly: the same ops run on the same values, and random ops are functions of the step's seed.

For each region that the plan says it of, a minimum cut through the region's forward ops finds the fewest bytes from
which all that the backward pass reads can be computed again.  What may be computed again depends on the level:

* `selective`: all but matrix products, attention and convolutions, and what collectives bring;
* `full`: everything, collectives included.

The cut is that of the minimum-cut partitioner of PyTorch's AOTAutograd, with regions and levels in place of its
heuristics.  Gathered parameters are not counted: how long they are kept is a matter of storage (see `regather`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar._compat import OpOverload
from autopar.errors import PlanError
from autopar.graph import GraphInput, InputKind
from autopar.mesh import Mesh
from autopar.passes.reshard import communicates, is_reshard
from autopar.placement import is_sharded
from autopar.plan import RECOMPUTE_LEVELS, Plan
from autopar.regions import region_of
from autopar.rules import is_look_or_cast


def remat(module: fx.GraphModule, inputs: Sequence[GraphInput], plan: Plan) -> fx.GraphModule:
    """Carry out the plan's recomputation: what is computed again runs just before its first reader in the backward.

    Raises:
        PlanError: if the plan names a level that does not exist.
    """
    for region, level in plan.recompute.items():
        if level not in RECOMPUTE_LEVELS:
            known = ", ".join(RECOMPUTE_LEVELS)
            raise PlanError(f"the plan recomputes {region or '(root)'!r} at level {level!r}; the levels are {known}")
    given = parameter_looks(module.graph, inputs) if plan.recompute else ()
    for region, nodes in forward_nodes(module.graph, plan.recompute).items():
        chosen = choose_saved(nodes, given, plan.recompute[region], plan.mesh)
        _repeat_in_backward(module.graph, chosen)
    return module


def forward_nodes(graph: fx.Graph, regions: Collection[str]) -> dict[str, list[fx.Node]]:
    """The forward calls of each region, in order; regions that run nothing are left out."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes if regions else ():
        if node.op == "call_function" and not node.meta["backward"]:
            region = region_of(node.meta["module"], regions)
            if region is not None:
                found.setdefault(region, []).append(node)
    return found


def parameter_looks(graph: fx.Graph, inputs: Sequence[GraphInput]) -> set[fx.Node]:
    """Parameters, buffers and inputs of the graph, gathered or not, and what only looks at them."""
    held = (InputKind.PARAM, InputKind.BUFFER, InputKind.INPUT)
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    found = {node for node, spec in placeholders if spec.kind in held}
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and (is_reshard(node) or is_look_or_cast(node))
            and node.all_input_nodes[0] in found
        ):
            found.add(node)
    return found


@dataclass(frozen=True)
class Recomputation:
    """What a region keeps for the backward pass, and what runs again there.

    Attributes:
        saved: values kept, the region's inputs among them.
        repeated: forward calls that the backward pass repeats, in order.
    """

    saved: tuple[fx.Node, ...]
    repeated: tuple[fx.Node, ...]


def choose_saved(nodes: Sequence[fx.Node], given: Collection[fx.Node], level: str, mesh: Mesh) -> Recomputation:
    """The fewest bytes from which all that the backward pass reads of a region can be computed again.

    Args:
        nodes: the region's forward calls, in order.
        given: values that are there in the backward pass anyway.
        level: a recomputation level of a plan.
        mesh: the mesh of the nodes' shardings.
    """
    inside = {node for node in nodes if node not in given}
    wanted = [n for n in nodes if n in inside and any(u.op == "call_function" and u.meta["backward"] for u in n.users)]
    kept = {n for n in inside if level != "full" and _is_expensive(n)}
    saved = _minimum_cut(inside, wanted, kept, given, mesh)
    needed: set[fx.Node] = set()
    stack = [n for n in wanted if n not in saved]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [n for n in node.all_input_nodes if n in inside and n not in saved]
    return Recomputation(tuple(sorted(saved)), tuple(n for n in nodes if n in needed))


def _is_expensive(node: fx.Node) -> bool:
    """Whether computing a value again costs more than memory traffic: a product, attention, a collective."""
    op = node.target
    if any(cut is not None and cut.sent for cut in node.meta.get("cuts", ())):
        return True
    if not isinstance(op, OpOverload):
        return is_reshard(node) and communicates(node)
    return op.overloadpacket in flop_registry or "scaled_dot_product" in op._schema.name


def _minimum_cut(
    inside: Collection[fx.Node],
    wanted: Sequence[fx.Node],
    kept: Collection[fx.Node],
    given: Collection[fx.Node],
    mesh: Mesh,
) -> set[fx.Node]:
    """The cheapest set of values that parts `wanted` from the region's inputs and the values that may not be computed
    again; of several, the one nearest to what is wanted, which leaves the least to repeat.

    Each value is an edge, from its outer to its inner end, whose capacity is its size.  The flow runs backwards, from
    wanted values to inputs, since the cut that is found is the one nearest to the source.
    """
    edges: dict[tuple[object, object], float] = {(_SOURCE, (node, 0)): math.inf for node in wanted}
    for node in inside:
        # An op's several results are picked apart by getitem, and it is those that are kept.
        several = not isinstance(node.meta["val"], torch.Tensor)
        edges[(node, 0), (node, 1)] = math.inf if several else _local_bytes(node, mesh)
        if node in kept:
            edges[(node, 1), _SINK] = math.inf
            continue
        for read in node.all_input_nodes:
            if read not in given:
                edges[(node, 1), (read, 0)] = math.inf
                if read not in inside:
                    edges[(read, 0), (read, 1)] = _local_bytes(read, mesh)
                    edges[(read, 1), _SINK] = math.inf
    near = _reached(edges)
    return {ends[0] for ends in near if isinstance(ends, tuple) and ends[1] == 0 and (ends[0], 1) not in near}


_SOURCE, _SINK = "wanted values", "inputs"


def _reached(edges: dict[tuple[object, object], float]) -> set[object]:
    """What a maximum flow leaves within reach of the source.

    SciPy's flows are 32-bit numbers, so sizes are scaled: the cut is the smallest up to 1e-9 of all bytes.
    """
    number: dict[object, int] = {_SOURCE: 0, _SINK: 1}
    for ends in edges:
        for end in ends:
            number.setdefault(end, len(number))
    unit = max(1.0, sum(size for size in edges.values() if size < math.inf) / 2**29)
    sizes = [_UNLIMITED if size == math.inf else round(size / unit) for size in edges.values()]
    starts, ends_at = zip(*((number[a], number[b]) for a, b in edges), strict=True) if edges else ((), ())
    shape = (len(number), len(number))
    capacity = csr_array((np.array(sizes, dtype=np.int32), (starts, ends_at)), shape=shape)
    left = capacity - maximum_flow(capacity, 0, 1).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    return {end for end, i in number.items() if i in reached}


_UNLIMITED = 2**30


def _local_bytes(node: fx.Node, mesh: Mesh) -> float:
    """Bytes of one rank's part of a value."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return 0
    parts = math.prod(n for p, n in zip(node.meta["sharding"], mesh.sizes, strict=True) if is_sharded(p))
    return value.numel() * value.element_size() / parts


def _repeat_in_backward(graph: fx.Graph, chosen: Recomputation) -> None:
    repeated = set(chosen.repeated)
    copies: dict[fx.Node, fx.Node] = {}
    reads = {(user, node) for node in chosen.repeated for user in node.users if user.meta.get("backward")}
    for user, node in sorted(reads):
        with graph.inserting_before(user):
            user.replace_input_with(node, _copied(graph, node, repeated, copies))


def _copied(graph: fx.Graph, node: fx.Node, repeated: Collection[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy of a forward call for the backward pass, made with the copies of what it reads."""
    if node not in repeated:
        return node
    if node not in copies:
        stack = [node]
        while stack:
            waiting = [n for n in stack[-1].all_input_nodes if n in repeated and n not in copies]
            if waiting:
                stack += waiting
                continue
            last = stack.pop()
            if last not in copies:
                copies[last] = graph.node_copy(last, lambda n: copies.get(n, n))
                copies[last].meta = {**last.meta, "backward": True}
    return copies[node]
