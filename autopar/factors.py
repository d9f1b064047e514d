"""Factor analysis: which dims of which tensors are the same factor, across the whole graph.

Every rule says that some dims of one op are the same.  Union-find carries that through the graph, cutting a dim into
smaller factors where a view, a split or a join does (768 = 12 heads · 64).  What is left is a handful of factor
classes a block: heads, head_dim, ffn of its own, and batch, sequence, hidden and vocabulary shared by all.

Classes say *what could be cut together*.  They guide the choice; whether an op may be cut is decided op by op.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.graph import InputKind, JointGraph, OutputKind, Run
from autopar.plan import EXPERTS, SENT, FactorRef
from autopar.regions import region_of
from autopar.rules import OpRule, rule_for, tensor_inputs


@dataclass(eq=False)
class Factor:
    """A node of the union-find forest: merged into `parent`, or cut into `parts`, or a factor class of its own."""

    size: int
    parent: Factor | None = None
    parts: tuple[Factor, Factor] | None = None


def root(factor: Factor) -> Factor:
    """The representative of a factor's class (which may since have been cut into parts)."""
    while factor.parent is not None:
        if factor.parent.parent is not None:
            factor.parent = factor.parent.parent
        factor = factor.parent
    return factor


def leaves(factors: Iterable[Factor]) -> list[Factor]:
    """The uncut factors, outermost first, without those of size one."""
    out: list[Factor] = []
    for factor in factors:
        found = factor if factor.parent is None else root(factor)
        if found.parts:
            out += leaves(found.parts)
        elif found.size != 1:
            out.append(found)
    return out


def unify(left: Iterable[Factor], right: Iterable[Factor]) -> bool:
    """Declare two lists of factors the same, outermost first, cutting where one divides the other.

    Returns False, leaving the rest as it is, where sizes do not divide: such dims are not the same factor.
    """
    a, b = deque(leaves(left)), deque(leaves(right))
    while a and b:
        x, y = a.popleft(), b.popleft()
        if x is y:
            continue
        if x.size == y.size:
            y.parent = x
        elif x.size % y.size == 0:
            _cut(x, y.size)
            b.appendleft(y)
            a.extendleft(reversed(leaves([x])))
        elif y.size % x.size == 0:
            _cut(y, x.size)
            a.appendleft(x)
            b.extendleft(reversed(leaves([y])))
        else:
            return False
        if a and b:  # a factor cut or merged above may stand again further down either list
            a, b = deque(leaves(a)), deque(leaves(b))
    return not a and not b


def _unify_two(left: Factor, right: Factor) -> None:
    """As `unify` of one factor with another, which is nearly always a matter of two equal uncut ones."""
    x, y = left if left.parent is None else root(left), right if right.parent is None else root(right)
    if x.size != y.size or x.parts or y.parts:
        unify([x], [y])
    elif x is not y and x.size != 1:
        y.parent = x


def _cut(factor: Factor, outer: int) -> None:
    factor.parts = (Factor(outer), Factor(factor.size // outer))


@dataclass
class FactorAnalysis:
    """What the analysis knows about one graph.

    Attributes:
        rules: the rule of every call that has one.
        dims: for each tensor node, the factor of each dim; for a node with several outputs, per output.
        bound: for each call, the factor that stands for each name in its rule.
        replicated: calls without a rule; they run whole.
        anchors: the node of each parameter, buffer and input, by its name in a `FactorRef`.
        operands: the tensor inputs of each call.
    """

    rules: dict[fx.Node, OpRule] = field(default_factory=dict)
    dims: dict[tuple[fx.Node, int], tuple[Factor, ...]] = field(default_factory=dict)
    bound: dict[fx.Node, dict[str, Factor]] = field(default_factory=dict)
    replicated: list[fx.Node] = field(default_factory=list)
    anchors: dict[str, fx.Node] = field(default_factory=dict)
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _parts: dict[fx.Node, tuple[tuple[str, int, Factor], ...]] = field(default_factory=dict, repr=False)

    def dim_factors(self, node: fx.Node, dim: int, output: int = 0) -> list[Factor]:
        """The uncut factors of one dim, outermost first."""
        source, index = source_of(node, output)
        return leaves([self.dims[source, index][dim]])

    def rule_factors(self, node: fx.Node, name: str) -> list[Factor]:
        """The uncut factors that a name of a call's rule stands for."""
        return leaves([self.bound[node][name]])

    def parts(self, node: fx.Node) -> tuple[tuple[str, int, Factor], ...]:
        """What a call's dims consist of: each uncut factor, with the name in its rule that stands for it, and the
        product of the sizes of those outside it under that name."""
        if node not in self._parts:
            found = []
            for name in self.rules[node].factors:
                split = 1
                for factor in self.rule_factors(node, name):
                    found.append((name, split, factor))
                    split *= factor.size
            self._parts[node] = tuple(found)
        return self._parts[node]

    @cached_property
    def groups_of_rows(self) -> dict[Factor, Factor]:
        """For each factor of rows that lie in groups, the groups' factor."""
        found = {}
        for node, rule in self.rules.items():
            for name, rows in rule.rows.items():
                one, groups = self.rule_factors(node, name), self.rule_factors(node, rows.ends)
                if len(one) == len(groups) == 1:
                    found[one[0]] = groups[0]
        return found

    def find(self, ref: FactorRef) -> Factor | None:
        """The factor class that a plan's reference names; None if the anchor does not occur in this graph.

        Raises:
            PlanError: if the anchor has no such dim or part.
        """
        node = self.anchors.get(ref.anchor)
        if node is None:
            return None
        shape = node.meta["val"].shape
        parts = self.dim_factors(node, ref.dim) if 0 <= ref.dim < len(shape) else []
        if ref.part >= len(parts):
            if 0 <= ref.dim < len(shape) and shape[ref.dim] == 1:
                return None
            raise PlanError(
                f"the plan cuts part {ref.part} of dim {ref.dim} of {ref.anchor!r}, which has shape {list(shape)} "
                f"and {len(parts)} factors there; make a new plan for this model"
            )
        return parts[ref.part]


def ranked(analysis: FactorAnalysis, refs: Iterable[FactorRef]) -> dict[Factor, int]:
    """The place of each factor in an order of preference; references that name one factor count once.

    Raises:
        PlanError: as `FactorAnalysis.find` does.
    """
    places: dict[Factor, int] = {}
    for factor in map(analysis.find, refs):
        if factor is not None:
            places.setdefault(factor, len(places))
    return places


def may_be_padded(analysis: FactorAnalysis, refs: Iterable[FactorRef]) -> set[Factor]:
    """Those of a plan's factors that may be cut where they do not divide: all but the batch, of which every rank brings
    as many rows by contract, so that only a part of it that a view makes can fail to divide."""
    names = [ref for ref in refs if ref.label != "batch"]
    return {factor for factor in map(analysis.find, names) if factor is not None}


def expert_anchors(analysis: FactorAnalysis, refs: Iterable[FactorRef]) -> dict[Factor, set[fx.Node]]:
    """The factors that a plan cuts among experts alone, and the parameters by which it names them."""
    found: dict[Factor, set[fx.Node]] = {}
    for ref in refs:
        factor = analysis.find(ref) if ref.label in (EXPERTS, SENT) else None
        if factor is not None:
            found.setdefault(factor, set()).add(analysis.anchors[ref.anchor])
    return found


def source_of(node: fx.Node, output: int = 0) -> tuple[fx.Node, int]:
    """The node and output index that really hold a value, seen through `getitem`."""
    if node.target is operator.getitem:
        return source_of(node.args[0], int(node.args[1]))  # type: ignore[arg-type]
    return node, output


def analyse(joint: JointGraph) -> FactorAnalysis:
    """The factor analysis of a normalised joint graph, made once and kept with it."""
    return joint.keep("analyse", lambda: _analyse(joint) if joint.folded is None else _unfolded(joint, joint.folded))


def _analyse(joint: JointGraph) -> FactorAnalysis:
    found = FactorAnalysis()
    for node in joint.module.graph.nodes:
        if node.op == "output" or source_of(node)[0] is not node:
            continue
        for index, value in enumerate(_values(node)):
            if isinstance(value, torch.Tensor):
                found.dims[node, index] = tuple(Factor(int(size)) for size in value.shape)
        if node.op == "call_function":
            if "rule" not in node.meta:
                node.meta["rule"] = rule_for(node)
            rule = node.meta["rule"]
            found.operands[node] = tensor_inputs(node)
            if rule is None:
                found.replicated.append(node)
            else:
                found.rules[node] = rule
                _apply(found, node, rule)
    _name_anchors(found, joint)
    _join_gradients(found, joint)
    _join_written_rows(found, joint)
    return found


def _values(node: fx.Node) -> Iterator[object]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (tuple, list)) else (value,)


def _apply(found: FactorAnalysis, node: fx.Node, rule: OpRule) -> None:
    bound = {name: Factor(size) for name, size in rule.sizes.items()}
    found.bound[node] = bound
    operands = [(source_of(n), dims) for n, dims in zip(found.operands[node], rule.inputs, strict=True)]
    operands += [((node, i), dims) for i, dims in enumerate(rule.outputs) if (node, i) in found.dims]
    for key, dims in operands:
        for factor, names in zip(found.dims[key], dims, strict=True):
            if len(names) == 1:
                _unify_two(factor, bound[names[0]])
            elif names:
                unify([factor], [bound[name] for name in names])
    for rows in rule.rows.values():
        if rows.groups:
            _unify_two(bound[rows.groups], bound[rows.ends])


def _join_gradients(found: FactorAnalysis, joint: JointGraph) -> None:
    """A gradient has the factors of its parameter, also where no op connects the two (a lookup table's)."""
    params = joint.param_nodes()
    for spec, node in zip(joint.outputs, joint.output_values, strict=True):
        if spec.kind is OutputKind.GRADIENT and node is not None and spec.path in params:
            for ours, theirs in zip(found.dims[params[spec.path], 0], found.dims[source_of(node)], strict=True):
                unify([ours], [theirs])


def _join_written_rows(found: FactorAnalysis, joint: JointGraph) -> None:
    """Rows that are written into a constant where an index says, such as messages summed at the nodes of a graph, are
    rows of the batch if there are as many and nothing else says what they are: it goes by the size, as for inputs."""
    batch = next(iter(joint.batch_dims.items()), None)
    if batch is None or not (rows := found.dim_factors(found.anchors[f"input:{batch[0]}"], batch[1])):
        return
    named = {f for node in found.anchors.values() for f in leaves(found.dims.get((node, 0), ()))}
    for node, rule in found.rules.items():
        if found.operands[node] and found.operands[node][0].target is torch.ops.aten.full.default:
            for name in rule.whole.intersection(name for dims in rule.outputs[:1] for group in dims for name in group):
                written = found.rule_factors(node, name)
                if len(written) == 1 and written[0].size == rows[0].size and written[0] not in named:
                    unify(rows[:1], written)


def _name_anchors(found: FactorAnalysis, joint: JointGraph) -> None:
    batch: Factor | None = None
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind in (InputKind.PARAM, InputKind.BUFFER):
            found.anchors[spec.path] = node
        elif spec.kind is InputKind.INPUT:
            found.anchors[f"input:{spec.path}"] = node
            if spec.path in joint.batch_dims and isinstance(node.meta.get("val"), torch.Tensor):
                # All batched inputs have one batch, by contract, whether or not the model ever combines them.
                factor = found.dims[node, 0][joint.batch_dims[spec.path]]
                if batch is not None:
                    unify([batch], [factor])
                batch = batch or factor


def _unfolded(joint: JointGraph, folded: JointGraph) -> FactorAnalysis:
    """The analysis of a graph that was unfolded, by that of the folded one: a copy of a unit has the unit's factors,
    but for those that occur in that unit alone, of which it has its own."""
    known, found = analyse(folded), FactorAnalysis()
    held = {node.meta["held"]: node for node in folded.module.graph.nodes}
    paths, held_paths = _paths(joint), _paths(folded)
    units = {block: (i, unit) for i, run in enumerate(folded.runs) for unit in run.units for block in unit}
    own = _own_factors(known, held_paths, folded.runs)
    copies: dict[object, _CopiedFactors] = {}
    outputs: dict[fx.Node, list[int]] = {}
    for node, index in known.dims:
        outputs.setdefault(node, []).append(index)
    for node in joint.module.graph.nodes:
        original = held[node.meta["held"]]
        same = paths[node] == held_paths[original]
        unit = None if same else units[region_of(paths[node], units) or ""]
        if unit not in copies:
            copies[unit] = _CopiedFactors(own if unit else ())
        factor_of = copies[unit]
        for index in outputs.get(original, ()):
            found.dims[node, index] = tuple(map(factor_of, known.dims[original, index]))
        if original in known.operands:
            found.operands[node] = tensor_inputs(node)
            if original in known.rules:
                found.rules[node] = known.rules[original]
                found.bound[node] = {name: factor_of(factor) for name, factor in known.bound[original].items()}
            else:
                found.replicated.append(node)
    _name_anchors(found, joint)
    return found


def _paths(joint: JointGraph) -> dict[fx.Node, str]:
    """Where each node belongs: its module, or for an input the tensor's name."""
    paths = {node: str(node.meta.get("module", "")) for node in joint.module.graph.nodes}
    return {**paths, **{node: spec.path for spec, node in zip(joint.inputs, joint.placeholders, strict=True)}}


def _own_factors(known: FactorAnalysis, paths: Mapping[fx.Node, str], runs: Sequence[Run]) -> set[Factor]:
    """The factors that occur in none but one of the units that copies are made of."""
    far = {block: (i, run.held[2]) for i, run in enumerate(runs) for block in run.units[run.held[2]]}
    places: dict[Factor, object] = {}
    factors = [(node, factor) for (node, _), dims in known.dims.items() for factor in dims]
    factors += [(node, factor) for node, bound in known.bound.items() for factor in bound.values()]
    for node, factor in factors:
        block = region_of(paths[node], {*far, ""})
        unit = far.get(block) if block else None
        for leaf in leaves([factor]):
            if places.setdefault(leaf, unit) != unit:
                places[leaf] = None
    return {factor for factor, unit in places.items() if unit is not None}


class _CopiedFactors(dict[Factor, Factor]):
    """For each factor what it is in one copy of a unit."""

    def __init__(self, own: Iterable[Factor]) -> None:
        self.own = {factor: Factor(factor.size) for factor in own}

    def __call__(self, factor: Factor) -> Factor:
        if factor not in self:
            parts = leaves([factor])
            self[factor] = factor if self.own.keys().isdisjoint(parts) else self._joined(parts)
        return self[factor]

    def _joined(self, parts: list[Factor]) -> Factor:
        first = self.own.get(parts[0], parts[0])
        if len(parts) == 1:
            return first
        rest = self._joined(parts[1:])
        return Factor(first.size * rest.size, parts=(first, rest))
