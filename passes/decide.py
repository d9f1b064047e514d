"""Decide: which ops a plan takes apart, and how each runs.

What is decided depends on what the plan cuts and on the sizes of its mesh, so it is kept with the graph for all plans
that have these in common.  A graph that was unfolded is decided as the folded one, which takes no longer for more
layers: the units that are left out of that run as its inner ones do.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from dataclasses import replace

from autopar.factors import analyse
from autopar.graph import JointGraph, Run
from autopar.passes.decompose import cut_whole, decompose
from autopar.passes.propagate import Assignment, NodeSharding, OpShardings, propagate_edges, propagate_ops
from autopar.plan import Plan
from autopar.regions import region_of
from autopar.whole_plan import folded_factors


def assign(joint: JointGraph, plan: Plan) -> tuple[JointGraph, Assignment]:
    """The graph, with the ops taken apart that the plan cuts along a factor which they need whole, and the decision for
    each of its nodes.

    Raises:
        PlanError: if the plan does not belong to this graph.
    """
    joint, ops = decided(joint, plan)
    # How the ops run follows from what is cut; how parameters rest matters at the graph's edges alone.
    return joint, propagate_edges(joint, analyse(joint), plan, ops)


def decided(joint: JointGraph, plan: Plan) -> tuple[JointGraph, OpShardings]:
    """`assign` without the graph's edges: it depends on the plan's factors and the sizes of its mesh alone."""
    key = (plan.factors, plan.mesh.sizes)
    return joint.keep(("decide", *key), lambda: _decided_as_folded(joint, plan) or _decided_alone(joint, plan))


def _decided_alone(joint: JointGraph, plan: Plan) -> tuple[JointGraph, OpShardings]:
    analysis = analyse(joint)
    nodes = cut_whole(joint, analysis, plan)
    if nodes:
        joint = joint.keep(("decompose", nodes), lambda: decompose(joint, nodes))
        analysis = analyse(joint)
    return joint, propagate_ops(joint, analysis, plan)


def _decided_as_folded(joint: JointGraph, plan: Plan) -> tuple[JointGraph, OpShardings] | None:
    """The decisions for the folded graph, for all copies; None if that cannot be known to give the same.

    It gives the same if the plan cuts all copies of a unit alike, and the two inner units of each run are decided
    alike: what one of them decides follows from its neighbours' decisions, so the next copy decides so, too.
    """
    folded = joint.folded
    factors = None if folded is None else folded_factors(plan.factors, folded.runs)
    if folded is None or factors is None:
        return None
    held, ops = decided(folded, replace(plan, factors=factors))
    held = held if held is folded else replace(held, runs=folded.runs)  # may be known of one that has other copies
    if not all(_inner_units_agree(held, run, ops) for run in held.runs):
        return None
    if held is not folded:
        marks = (node.meta["held"] for node in held.module.graph.nodes)
        taken = {mark[0] for mark in marks if isinstance(mark, tuple)}
        apart = tuple(node for node in joint.module.graph.nodes if node.meta["held"] in taken)
        whole = joint
        joint = joint.keep(("decompose", apart), lambda: decompose(whole, apart, held))
    by_mark: dict[Hashable, NodeSharding] = {node.meta["held"]: decided for node, decided in ops.items()}
    calls = (n for n in joint.module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
    return joint, {node: by_mark[node.meta["held"]] for node in calls}


def _inner_units_agree(held: JointGraph, run: Run, ops: OpShardings) -> bool:
    """Whether the calls of the two inner units, which follow each other in one order, are decided alike."""
    near, far = (_calls_of(held, set(run.units[i]), ops) for i in run.held[1:3])
    return near == far


def _calls_of(held: JointGraph, blocks: Collection[str], ops: OpShardings) -> list[object]:
    found: list[object] = []
    regions = {*blocks, ""}
    for node in held.module.graph.nodes:
        if node in ops and region_of(node.meta["module"], regions) != "":
            decided = ops[node]
            found.append((node.target, decided.inputs, decided.outputs, decided.cuts))
    return found


__all__ = ["assign", "decided"]
