"""Planning by name: a traced graph, a strategy and a mesh in, a plan out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from autopar.cost_model.collectives import wire_bytes
from autopar.cost_model.ops import count_flops, node_flops
from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.mesh import Mesh
from autopar.passes.decide import assign
from autopar.passes.pipeline import lowered, parameter_uses
from autopar.plan import Plan
from autopar.program import collectives_of
from autopar.strategies import canonical_name, named_plan, strategy_mesh


def plan_named(strategy: str, joint: JointGraph, sizes: Sequence[int], ranks_per_node: int) -> Plan:
    """The plan of one named strategy on a mesh of these sizes.

    Raises:
        InputError: if there is no such strategy.
        MeshError: if the strategy cannot use this mesh.
    """
    name = canonical_name(strategy)
    return named_on(name, joint, strategy_mesh(name, sizes, ranks_per_node))


def named_on(name: str, joint: JointGraph, mesh: Mesh) -> Plan:
    """The plan of a named strategy on a mesh with the axes that it needs; worked out once for each graph."""
    return joint.keep(
        ("named", name, mesh),
        lambda: named_plan(
            name,
            joint,
            analyse(joint),
            mesh,
            partial(parameter_uses, joint),
            partial(bytes_for_division, joint),
            partial(share_left_whole, joint),
        ),
    )


def bytes_for_division(joint: JointGraph, plan: Plan) -> float:
    """Bytes that one rank sends in a step, by the ring formulas, times the share of the step's FLOPs that is left to
    it, for the share that the last axis takes from it; infinite where it takes none."""
    graph, mesh = lowered(joint, plan), plan.mesh
    moved = math.fsum(wire_bytes(c.kind, mesh.size(c.axis), c.num_bytes) for c in collectives_of(graph))
    whole, local = count_flops(joint.module.graph), count_flops(graph)
    left = local * math.prod(mesh.sizes[:-1]) / whole if whole else 1.0
    return moved * left / (1 - left) if left < 1 else math.inf


def share_left_whole(joint: JointGraph, plan: Plan) -> float:
    """The share of a step's FLOPs in ops that the last axis does not cut, so that its ranks all do the same."""
    _, assignment = assign(joint, plan)
    flops = {node: (node_flops(node), decided.cuts[-1:]) for node, decided in assignment.nodes.items()}
    total = sum(count for count, _ in flops.values())
    return sum(count for count, cut in flops.values() if not any(cut)) / max(1, total)
