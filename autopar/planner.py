"""Planning: a traced graph and a mesh in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.passes.pipeline import parameter_uses, rewrite
from autopar.plan import Plan
from autopar.strategies import canonical_name, named_plan, strategy_mesh


def plan_named(strategy: str, joint: JointGraph, sizes: Sequence[int], ranks_per_node: int) -> Plan:
    """The plan of one named strategy on a mesh of these sizes.

    Raises:
        InputError: if there is no such strategy.
        MeshError: if the strategy cannot use this mesh.
    """
    name = canonical_name(strategy)
    mesh = strategy_mesh(name, sizes, ranks_per_node)
    return named_plan(
        name, joint, analyse(joint), mesh, lambda p: parameter_uses(joint, p), lambda p: moved_bytes(joint, p)
    )


def moved_bytes(joint: JointGraph, plan: Plan) -> float:
    """Bytes that one rank sends in a step, by the ring formulas (DESIGN: n-1 over n of the tensor, twice for an
    all-reduce)."""
    total = 0.0
    for c in rewrite(joint, plan).collectives():
        n = plan.mesh.size(c.axis)
        total += (2 if c.kind == "all_reduce" else 1) * (n - 1) / n * c.num_bytes
    return total
