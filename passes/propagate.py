"""Propagate: carry a plan's factors to every op.

For each op and mesh axis this decides which factor of the op's rule is cut, and so how each input must lie and how each
output lies.  It changes nothing; the next pass inserts a reshard wherever a value lies otherwise than an op needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.factors import Factor, FactorAnalysis, source_of
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.placement import Partial, Placement, Replicate, Sharding, is_sharded, replicated, shard
from autopar.plan import Plan
from autopar.rules import OpRule, tensor_inputs


@dataclass(frozen=True)
class Cut:
    """One factor of an op's rule cut along one mesh axis: `factor` is read as (split, n, rest)."""

    factor: str
    split: int


@dataclass(frozen=True)
class NodeSharding:
    """How one op runs.

    Attributes:
        inputs: sharding that each tensor input must have, in the order of `tensor_inputs`.
        outputs: sharding of each output.
        cuts: what is cut along each mesh axis.
        rule: the rule by which it is cut; None if the op has none.
    """

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    cuts: tuple[Cut | None, ...] = ()
    rule: OpRule | None = None


@dataclass(frozen=True)
class Assignment:
    """The decision for every node, and the shardings in which the graph's outputs are wanted."""

    nodes: dict[fx.Node, NodeSharding]
    wanted: tuple[Sharding | None, ...]

    def of(self, node: fx.Node, output: int = 0) -> Sharding:
        """Sharding of a value."""
        source, index = source_of(node, output)
        return self.nodes[source].outputs[index]


def propagate(joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> Assignment:
    """Decide every op of `joint` under `plan`.

    Raises:
        PlanError: if the plan lacks a parameter of the graph, or names a factor that does not exist.
    """
    return _Propagation(joint, analysis, plan).run()


class _Propagation:
    def __init__(self, joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> None:
        self.joint, self.analysis, self.plan, self.mesh = joint, analysis, plan, plan.mesh
        self.nodes: dict[fx.Node, NodeSharding] = {}
        self.classes = [[f for f in map(analysis.find, refs) if f is not None] for refs in plan.factors]
        self.batch = batch_factor(joint, analysis)

    def run(self) -> Assignment:
        placeholders = dict(zip(self.joint.placeholders, self.joint.inputs, strict=True))
        for node in self.joint.module.graph.nodes:
            if node.op == "placeholder":
                self.nodes[node] = NodeSharding((), (self._input(node, placeholders[node]),))
            elif node.op == "get_attr":
                self.nodes[node] = NodeSharding((), (replicated(self.mesh),))
            elif node.op == "call_function" and source_of(node)[0] is node:
                self.nodes[node] = self._call(node)
        wanted = tuple(
            None if node is None else self._output(spec.kind, spec.path, node)
            for spec, node in zip(self.joint.outputs, self.joint.output_values, strict=True)
        )
        return Assignment(self.nodes, wanted)

    # -- the graph's edges

    def _input(self, node: fx.Node, spec: GraphInput) -> Sharding:
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

    # -- ops

    def _call(self, node: fx.Node) -> NodeSharding:
        whole = replicated(self.mesh)
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        rule = self.analysis.rules.get(node)
        if rule is None:
            return NodeSharding(
                (whole,) * len(tensor_inputs(node)), (whole,) * len(values), (None,) * self.mesh.num_axes
            )
        cuts: list[Cut | None] = []
        passing: list[frozenset[int]] = []
        for axis in range(self.mesh.num_axes):
            partial = self._passes_partial(node, rule, axis)
            passing.append(partial)
            cuts.append(None if partial else self._choose(node, rule, axis, cuts))
        inputs = tuple(
            tuple(
                Partial("sum") if i in passing[axis] else input_placement(rule, dims, cuts[axis])
                for axis in range(self.mesh.num_axes)
            )
            for i, dims in enumerate(rule.inputs)
        )
        outputs = tuple(
            tuple(
                Partial("sum") if passing[axis] else output_placement(rule, dims, cuts[axis])
                for axis in range(self.mesh.num_axes)
            )
            for dims in rule.outputs
        )
        return NodeSharding(inputs, outputs, tuple(cuts), rule)

    def _passes_partial(self, node: fx.Node, rule: OpRule, axis: int) -> frozenset[int]:
        """The inputs whose unreduced sums flow through this op, so that they are reduced later, once.

        Only where it saves a collective or costs nothing: the op does not grow the value, and nobody else reads it
        (another reader would need its own reduction).
        """
        operands = tensor_inputs(node)
        unreduced = frozenset(i for i, n in enumerate(operands) if self._value(n)[axis] == Partial("sum"))
        if not unreduced or unreduced not in rule.linear or not isinstance(node.meta["val"], torch.Tensor):
            return frozenset()
        if any(len(n.users) > 1 for i, n in enumerate(operands) if i in unreduced):
            return frozenset()
        if len(operands) > len(unreduced) or node.meta["val"].dtype != operands[0].meta["val"].dtype:
            return frozenset()
        largest = max(operands[i].meta["val"].numel() for i in unreduced)
        return unreduced if node.meta["val"].numel() <= largest else frozenset()

    def _value(self, node: fx.Node) -> Sharding:
        source, index = source_of(node)
        return self.nodes[source].outputs[index]

    def _choose(self, node: fx.Node, rule: OpRule, axis: int, earlier: Sequence[Cut | None]) -> Cut | None:
        """The most wanted factor of this op that can be cut along `axis`."""
        wanted = self.classes[axis]
        best: tuple[int, Cut] | None = None
        for name in rule.factors if wanted else ():
            if name in rule.whole:
                continue
            split = 1
            for factor in self.analysis.rule_factors(node, name):
                position = _position(wanted, factor)
                cut = Cut(name, split)
                if position is not None and (best is None or position < best[0]) and self._divides(
                    rule, cut, factor.size, axis, earlier
                ):  # fmt: skip
                    best = (position, cut)
                split *= factor.size
        return best[1] if best else None

    def _divides(self, rule: OpRule, cut: Cut, size: int, axis: int, earlier: Sequence[Cut | None]) -> bool:
        if cut.factor in rule.lookup and cut.split != 1:
            return False  # a lookup needs one consecutive range of the table per rank
        taken = math.prod(n for c, n in zip(earlier, self.mesh.sizes, strict=False) if c == cut)
        return size % (taken * self.mesh.sizes[axis]) == 0


def _position(wanted: Sequence[Factor], factor: Factor) -> int | None:
    return next((i for i, f in enumerate(wanted) if f is factor), None)


def input_placement(rule: OpRule, dims: tuple[tuple[str, ...], ...], cut: Cut | None) -> Placement:
    """How an input must lie along an axis on which `cut` is cut."""
    place = rule.occurrences(cut.factor, dims) if cut else None
    if cut is None or place is None:
        return Replicate()
    return shard(place[0], place[1] * cut.split)


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


__all__ = ["Assignment", "Cut", "Mesh", "NodeSharding", "batch_dim", "batch_factor", "propagate"]
