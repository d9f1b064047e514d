"""Propagate: carry a plan's factors to every op.

For each op and mesh axis this decides which factor of the op's rule is cut, and so how each input must lie and how each
output lies.  It changes nothing; the next pass inserts a reshard wherever a value lies otherwise than an op needs it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.factors import Factor, FactorAnalysis, expert_anchors, may_be_padded, ranked, source_of
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.passes.by_group import groups_to_keep_whole, rows_by_group, rows_of
from autopar.placement import (
    ByGroup,
    Partial,
    Placement,
    Replicate,
    Sharding,
    is_sharded,
    one_object,
    replicated,
    shard,
)
from autopar.plan import SENT, Plan
from autopar.rules import OpRule, is_look_or_cast


@dataclass(frozen=True)
class Cut:
    """One factor of an op's rule cut along one mesh axis: `factor` is read as (split, n, rest).

    `grain` is 0 if the axis divides n; else the n positions are dealt out as `torch.chunk` does, and it is the size of
    the rest.  With `by_group` the factor is rows, and each rank has those of its own groups (`placement.ByGroup`);
    with `sent`, those that others took from their parts of a table, or will put back to them.
    """

    factor: str
    split: int
    grain: int = 0
    by_group: bool = False
    sent: bool = False


@dataclass(frozen=True)
class NodeSharding:
    """How one op runs.

    Attributes:
        inputs: sharding that each tensor input must have, in the order of `tensor_inputs`.
        outputs: sharding of each output.
        cuts: what is cut along each mesh axis.
        rule: the rule by which it is cut; None if the op has none.
        is_unreduced: whether a result is a sum that is yet to be reduced.
    """

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    cuts: tuple[Cut | None, ...] = ()
    rule: OpRule | None = None
    is_unreduced: bool = False


@dataclass(frozen=True)
class Assignment:
    """The decision for every node, and the shardings in which the graph's outputs are wanted."""

    nodes: dict[fx.Node, NodeSharding]
    wanted: tuple[Sharding | None, ...]

    def of(self, node: fx.Node, output: int = 0) -> Sharding:
        """Sharding of a value."""
        if node.target is operator.getitem:
            node, output = source_of(node, output)
        return self.nodes[node].outputs[output]


OpShardings = Mapping[fx.Node, NodeSharding]
"""The decision for every call of a graph."""


def propagate_ops(joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> OpShardings:
    """Decide every op of `joint`, which depends on the plan's factors and the sizes of its mesh alone.

    Raises:
        PlanError: if the plan names a factor that does not exist.
    """
    return _Ops(joint, analysis, plan).run()


def propagate_edges(joint: JointGraph, analysis: FactorAnalysis, plan: Plan, ops: OpShardings) -> Assignment:
    """Decide how the graph's inputs come in and its outputs are wanted, given how its ops run.

    Raises:
        PlanError: if the plan lacks a parameter of the graph.
    """
    return _Edges(joint, analysis, plan).run(ops)


class _Edges:
    def __init__(self, joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> None:
        self.joint, self.analysis, self.plan, self.mesh = joint, analysis, plan, plan.mesh
        self.batch = batch_factor(joint, analysis)

    def run(self, ops: OpShardings) -> Assignment:
        nodes = dict(ops)
        for spec, node in zip(self.joint.inputs, self.joint.placeholders, strict=True):
            nodes[node] = NodeSharding((), (self._input(spec),))
        for node in self.joint.module.graph.find_nodes(op="get_attr"):
            nodes[node] = NodeSharding((), (replicated(self.mesh),))
        wanted = tuple(
            None if node is None else self._output(spec.kind, spec.path, node)
            for spec, node in zip(self.joint.outputs, self.joint.output_values, strict=True)
        )
        return Assignment(nodes, wanted)

    def _input(self, spec: GraphInput) -> Sharding:
        if spec.kind is InputKind.PARAM:
            return self._at_rest(spec.path)
        if spec.kind is InputKind.INPUT and spec.path in self.joint.batch_dims:
            return (shard(self.joint.batch_dims[spec.path]),) * self.mesh.num_axes
        if spec.kind is InputKind.TANGENT:
            names = [o.path for o in self.joint.outputs if o.kind is OutputKind.OUTPUT]
            output = self.joint.output_values[names.index(spec.path)]
            return self._rows(output) if output is not None else replicated(self.mesh)
        return replicated(self.mesh)

    def _output(self, kind: OutputKind, path: str, node: fx.Node) -> Sharding:
        if kind is OutputKind.GRADIENT:
            return self._at_rest(path)
        return self._rows(node) if kind is OutputKind.OUTPUT else replicated(self.mesh)

    def _at_rest(self, path: str) -> Sharding:
        storage = self.plan.storage.get(path)
        if storage is None:
            raise PlanError(f"the plan says nothing about parameter {path!r}; it was made for another model")
        return storage.sharding

    def _rows(self, node: fx.Node) -> Sharding:
        """This rank's rows of an output that carries the batch; whole otherwise."""
        dim = batch_dim(self.analysis, self.batch, node)
        shape = node.meta["val"].shape
        if dim is None and self.analysis.replicated and self.batch and len(shape) and shape[0] == self.batch.size:
            dim = 0  # an op without a rule hides where its rows come from: go by the size, as for inputs
        if dim is None or node.meta["val"].shape[dim] % self.mesh.num_ranks:
            return replicated(self.mesh)
        return (shard(dim),) * self.mesh.num_axes


class _Ops:
    def __init__(self, joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> None:
        self.joint, self.analysis, self.mesh = joint, analysis, plan.mesh
        self.nodes: dict[fx.Node, NodeSharding] = {}
        self.wanted = [ranked(analysis, refs) for refs in plan.factors]
        self.experts = [expert_anchors(analysis, refs) for refs in plan.factors]
        self.padded = [may_be_padded(analysis, refs) for refs in plan.factors]
        self.whole = replicated(plan.mesh)
        self.unreduced: set[fx.Node] = set()
        self.resting = resting_gradients(joint)
        self.by_group = rows_by_group(analysis, self.wanted, plan.mesh)
        self.sent = [{analysis.find(ref) for ref in refs if ref.label == SENT} for refs in plan.factors]

    def run(self) -> OpShardings:
        self._decide()
        while any(self.by_group):
            inputs, outputs = ({n: getattr(d, side) for n, d in self.nodes.items()} for side in ("inputs", "outputs"))
            whole = groups_to_keep_whole(self.analysis, self.by_group, inputs, outputs)
            if not whole:
                break
            for axis, groups in whole:
                del self.wanted[axis][groups]
                self.by_group[axis] = {r: g for r, g in self.by_group[axis].items() if g is not groups}
            self._decide()
        return self.nodes

    def _decide(self) -> None:
        self.nodes.clear()
        self.unreduced.clear()
        for node, operands in self.analysis.operands.items():
            decided = self.nodes[node] = self._call(node, operands)
            if decided.is_unreduced:
                self.unreduced.add(node)

    def _call(self, node: fx.Node, operands: Sequence[fx.Node]) -> NodeSharding:
        rule = self.analysis.rules.get(node)
        cuts: list[Cut | None] = []
        passing: list[frozenset[int]] = []
        if rule is not None:
            may_pass = self.unreduced and any(source_of(n)[0] in self.unreduced for n in operands)
            for axis in range(len(self.whole)):
                if self.by_group[axis] and (rows := rows_of(self.analysis, node, self.by_group[axis])):
                    passing.append(frozenset())
                    cuts.append(self._rows_by_group(node, rule, rows, axis, cuts))
                    continue
                partial = self._passes_partial(node, rule, axis) if may_pass else frozenset()
                passing.append(partial)
                cuts.append(None if partial else self._choose(node, rule, axis, cuts))
        if rule is None or not (any(cuts) or any(passing)):
            num_outputs = len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else 1
            inputs, outputs = (self.whole,) * len(operands), (self.whole,) * num_outputs
            return NodeSharding(inputs, outputs, (None,) * len(self.whole), rule)
        return _sharding(rule, tuple(cuts), tuple(passing))

    def _passes_partial(self, node: fx.Node, rule: OpRule, axis: int) -> frozenset[int]:
        """The inputs whose unreduced sums flow through this op, so that they are reduced later, once.

        Only where it saves a collective or costs nothing: the op does not grow the value, and nobody else reads it
        (another reader would need its own reduction); nor does it read anything else, but for positions by which it
        sums to half and less.  The one exception is a gradient that is cast to the wider dtype
        in which it rests: it is summed over the ranks in that, as it will be summed over steps.
        """
        operands = self.analysis.operands[node]
        unreduced = frozenset(i for i, n in enumerate(operands) if self._is_unreduced(n, axis))
        if not unreduced or unreduced not in rule.linear or not isinstance(node.meta["val"], torch.Tensor):
            return frozenset()
        if any(len(n.users) > 1 for i, n in enumerate(operands) if i in unreduced):
            return frozenset()
        before, after = operands[0].meta["val"].dtype, node.meta["val"].dtype
        if before != after and not self._is_widened_to_rest(node, before):
            return frozenset()
        largest = max(operands[i].meta["val"].numel() for i in unreduced)
        others = [n.meta["val"].dtype for i, n in enumerate(operands) if i not in unreduced]
        if others and (any(d.is_floating_point for d in others) or 2 * node.meta["val"].numel() > largest):
            return frozenset()
        return unreduced if node.meta["val"].numel() <= largest else frozenset()

    def _is_widened_to_rest(self, node: fx.Node, before: torch.dtype) -> bool:
        return node in self.resting and node.meta["val"].dtype.itemsize > before.itemsize

    def _is_unreduced(self, node: fx.Node, axis: int) -> bool:
        source, index = source_of(node)
        return source in self.unreduced and self.nodes[source].outputs[index][axis] == UNREDUCED

    def _choose(self, node: fx.Node, rule: OpRule, axis: int, earlier: Sequence[Cut | None]) -> Cut | None:
        """The most wanted factor of this op that can be cut along `axis`."""
        wanted = self.wanted[axis]
        best: tuple[int, Cut] | None = None
        for name, split, factor in self.analysis.parts(node) if wanted else ():
            if factor in wanted and name not in rule.whole and (best is None or wanted[factor] < best[0]):
                cut = self._cut(rule, even_cut(name, split), factor, axis, earlier)
                if cut is None:
                    continue
                if factor in self.experts[axis] and not self._stays_with_experts(node, rule, cut, factor, axis):
                    continue
                best = (wanted[factor], cut)
        return best[1] if best else None

    def _rows_by_group(
        self, node: fx.Node, rule: OpRule, rows: list[tuple[str, Factor]], axis: int, earlier: Sequence[Cut | None]
    ) -> Cut | None:
        """The cut that leaves a rank the rows of its own groups; None if the op cannot run so."""
        (name, factor), *others = rows
        if others or not rule.may_part_rows(name):
            return None
        groups = self.by_group[axis][factor]
        moves = name in rule.rows and not rule.rows[name].groups
        if moves and groups in self.sent[axis] and sum(factor in cut for cut in self.by_group) == 1:
            # Blocks must lie one after another along this axis, so that none inside it may cut them again.
            blocks = self.analysis.rule_factors(node, rule.blocks_of(name))
            inside = any(block in wanted for block in blocks for wanted in self.wanted[axis + 1 :])
            if len(blocks) == 1 and blocks[0] in self.wanted[axis] and not inside:
                cut = self._cut(rule, even_cut(rule.blocks_of(name), 1), blocks[0], axis, earlier)
                return Cut(name, 1, by_group=True, sent=cut is not None and not cut.grain)
        return Cut(name, 1, by_group=True)

    def _stays_with_experts(self, node: fx.Node, rule: OpRule, cut: Cut, factor: Factor, axis: int) -> bool:
        """Whether an op reads the experts' own parameters, or what already lies cut among experts, and keeps it so.

        A product does so for its experts' rows alone: where one operand has no experts, the rows come back first.
        """
        has = [rule.occurrences(cut.factor, dims) is not None for dims in rule.inputs]
        if not any(rule.occurrences(cut.factor, dims) for dims in rule.outputs) or (rule.contracts and not all(has)):
            return False
        return any(
            self._lies_with_experts(source_of(operand), input_placement(rule, dims, cut), factor, axis)
            for operand, dims, theirs in zip(self.analysis.operands[node], rule.inputs, has, strict=True)
            if theirs
        )

    def _lies_with_experts(self, value: tuple[fx.Node, int], placed: Placement, factor: Factor, axis: int) -> bool:
        source, index = value
        if source in self.experts[axis][factor]:
            return True
        return source in self.nodes and self.nodes[source].outputs[index][axis] == placed

    def _cut(self, rule: OpRule, cut: Cut, factor: Factor, axis: int, earlier: Sequence[Cut | None]) -> Cut | None:
        """The cut if it gives equal parts, or the one that gives parts which may be padded; None if neither may be."""
        if cut.split != 1 and rule.is_range(cut.factor):
            return None  # a lookup needs one consecutive range of the table per rank
        beside: list[Cut] = []
        num_parts = self.mesh.sizes[axis]
        if any(earlier):
            beside = [c for c in earlier if c is not None and (c.factor, cut.factor) in rule.together]
            num_parts *= math.prod(n for c, n in zip(earlier, self.mesh.sizes, strict=False) if c == cut)
            if any(c.grain for c in beside):
                return None  # parts of different sizes are not cut again
        if factor.size % num_parts == 0:
            return cut
        grain = rule.sizes[cut.factor] // (cut.split * factor.size)
        if factor not in self.padded[axis] or not rule.may_be_uneven(cut.factor, cut.split, grain):
            return None
        if not all(_is_outside(rule, c, cut) for c in beside):
            return None
        return Cut(cut.factor, cut.split, grain)


@lru_cache(maxsize=4096)
def even_cut(factor: str, split: int) -> Cut:
    """A cut into equal parts; equal ones are one object."""
    return Cut(factor, split)


def _sharding(rule: OpRule, cuts: tuple[Cut | None, ...], passing: tuple[frozenset[int], ...]) -> NodeSharding:
    """How an op runs of which this is cut along each axis, with the inputs whose unreduced sums flow through it."""
    key = (cuts, passing)
    if key not in rule.known:
        axes = range(len(cuts))
        inputs = tuple(
            one_object(tuple(UNREDUCED if i in passing[a] else input_placement(rule, dims, cuts[a]) for a in axes))
            for i, dims in enumerate(rule.inputs)
        )
        outputs = tuple(
            one_object(tuple(UNREDUCED if passing[a] else output_placement(rule, dims, cuts[a]) for a in axes))
            for dims in rule.outputs
        )
        is_unreduced = any(UNREDUCED in sharding for sharding in outputs)
        rule.known[key] = NodeSharding(inputs, outputs, cuts, rule, is_unreduced)
    found: NodeSharding = rule.known[key]
    return found


def _is_outside(rule: OpRule, one: Cut, other: Cut) -> bool:
    """Whether a cut is made outside of another in each dim that they share."""
    if one.factor == other.factor:
        return one.split < other.split
    groups = (group for dims in (*rule.inputs, *rule.outputs) for group in dims)
    shared = (group for group in groups if one.factor in group and other.factor in group)
    return all(group.index(one.factor) < group.index(other.factor) for group in shared)


def resting_gradients(joint: JointGraph) -> set[fx.Node]:
    """The parameters' gradients as the graph returns them, and the casts, views and sums on the way there."""
    pairs = zip(joint.outputs, joint.output_values, strict=True)
    found = {value: None for spec, value in pairs if spec.kind is OutputKind.GRADIENT and value is not None}
    stack = list(found)
    while stack:
        node = stack.pop()
        if is_look_or_cast(node) or node.target is torch.ops.aten.add.Tensor:
            stack += [n for n in node.all_input_nodes if n not in found]
            found.update(dict.fromkeys(node.all_input_nodes))
    return set(found)


UNREDUCED = Partial("sum")


def input_placement(rule: OpRule, dims: tuple[tuple[str, ...], ...], cut: Cut | None) -> Placement:
    """How an input must lie along an axis on which `cut` is cut."""
    place = rule.occurrences(cut.factor, dims) if cut else None
    if cut is None or (place is None and not cut.by_group):
        return Replicate()
    if cut.by_group:
        beside = rule.occurrences(rule.rows[cut.factor].groups, dims) if cut.factor in rule.rows else None
        if cut.sent and not place and not rule.occurrences(rule.rows[cut.factor].ends, dims):
            beside = rule.occurrences(rule.blocks_of(cut.factor), dims)
        return ByGroup(place[0]) if place else shard(beside[0]) if beside else Replicate()
    assert place is not None
    dim, outer = place
    return shard(dim, outer * cut.split, rule.inside(cut.factor, dims) * cut.grain or 1)


def output_placement(rule: OpRule, dims: tuple[tuple[str, ...], ...], cut: Cut | None) -> Placement:
    """How an output lies: cut, or partial where only inputs have the factor."""
    placed = input_placement(rule, dims, cut)
    if cut is None or is_sharded(placed):
        return placed
    if any(rule.occurrences(cut.factor, term) for term in rule.inputs):
        return Partial(rule.reduce.get(cut.factor, "sum"))
    return Replicate()


def batch_factor(joint: JointGraph, analysis: FactorAnalysis) -> Factor | None:
    """The class of the batch dim, by the input contract."""
    for path, dim in joint.batch_dims.items():
        node = analysis.anchors.get(f"input:{path}")
        if node is not None:
            parts = analysis.dim_factors(node, dim)
            return parts[0] if parts else None
    return None


def batch_dim(analysis: FactorAnalysis, batch: Factor | None, node: fx.Node) -> int | None:
    """The dim of a value whose outermost factor is the batch."""
    if batch is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    for dim in range(node.meta["val"].dim()):
        parts = analysis.dim_factors(node, dim)
        if parts and parts[0] is batch:
            return dim
    return None


__all__ = ["Assignment", "Cut", "Mesh", "NodeSharding", "batch_dim", "batch_factor", "propagate_edges", "propagate_ops"]
