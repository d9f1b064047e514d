"""Words for how a parameter lies: `column`, `row`, `vocab`, `experts`, `replicate`, `shard(0)@dp`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.factors import Factor, FactorAnalysis, analyse, ranked, source_of
from autopar.graph import JointGraph
from autopar.placement import Placement, Replicate, describe_placement, is_sharded, shard_dim, shard_split
from autopar.plan import Plan
from autopar.rules import tensor_inputs

aten = torch.ops.aten


def describe_params(joint: JointGraph, plan: Plan) -> dict[str, str]:
    """For each parameter, its placements in words.

    Along an axis that cuts the parameter as it is *used*, the word says what is cut: `column` the output of its matrix
    product, `row` the contracted side, `vocab` the rows of a lookup table, `experts` the groups of a grouped product,
    which are cut with their rows.  An axis that cuts it only for storage is
    written `shard(dim)@axis`.  `column (2 of 3)` has 3 heads that 2 ranks cannot share evenly: the first has 2.
    """
    analysis = analyse(joint)
    batch_only = [all(ref.label == "batch" for ref in refs) for refs in plan.factors]
    wanted = [ranked(analysis, refs) for refs in plan.factors]
    out = {}
    for path, node in joint.param_nodes().items():
        words = []
        for axis, placement in enumerate(plan.storage[path].sharding):
            if isinstance(placement, Replicate):
                continue
            name = plan.mesh.names[axis]
            used = not batch_only[axis]
            word = _role(analysis, node, placement, wanted[axis]) if used else describe_placement(placement)
            words.append(f"{word}{_dealt_out(analysis, node, placement, plan, axis)}@{name}")
        out[path] = ", ".join(words) or "replicate"
    return out


def _dealt_out(analysis: FactorAnalysis, node: fx.Node, placement: Placement, plan: Plan, axis: int) -> str:
    """How much of a factor that does not divide the first rank has, if the factor is one of several in its dim."""
    parts = analysis.dim_factors(node, shard_dim(placement)) if is_sharded(placement) else []
    n, split, wanted = plan.mesh.sizes[axis], 1, ranked(analysis, plan.factors[axis])
    for factor in parts if len(parts) > 1 else ():
        if factor in wanted and factor.size % n and split == shard_split(placement):
            return f" ({-(-factor.size // n)} of {factor.size})"
        split *= factor.size
    return ""


def _role(analysis: FactorAnalysis, node: fx.Node, placement: Placement, wanted: Mapping[Factor, int]) -> str:
    """What the cut dim is to the op that the parameter feeds, seen through views."""
    if not is_sharded(placement):
        return describe_placement(placement)
    factors = analysis.dim_factors(node, shard_dim(placement))
    seen = [node]
    for value in seen:
        for user in value.users:
            rule = analysis.rules.get(user)
            if user.op != "call_function" or user.meta["backward"] or rule is None:
                continue
            operand = tensor_inputs(user).index(value)
            names = {
                n
                for dims in (rule.inputs[operand],)
                for group in dims
                for n in group
                if any(f is g for f in factors for g in analysis.rule_factors(user, n))
            }
            if names & set(rule.lookup):
                return "vocab"
            if names & {rows.groups for rows in rule.rows.values()} and any(factor in wanted for factor in factors):
                return "experts"
            if user.target in _PRODUCTS and names:
                in_output = any(n in group for n in names for group in rule.outputs[0])
                return "column" if in_output else "row"
            if len(tensor_inputs(user)) == 1 and source_of(user)[0] is user:
                seen.append(user)
    return describe_placement(placement)


_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
