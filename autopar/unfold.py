"""The whole graph of a model out of a folded one, which holds four of each run of alike units.

The nodes of the two inner units follow each other, first in the order of the units, in the backward pass the other way
round, and correspond one to one: where a node of the one reads a node of its own unit, of the unit before or of the
unit after, the other's does the same, and what else they read is shared by all.  Copies of these nodes, put between
them and linked in the same way, are the nodes of the units that are left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule, QuickGraph, tree_flatten
from autopar.captured import placeholder_name
from autopar.errors import FoldError
from autopar.graph import GraphInput, GraphOutput, JointGraph, Run, copy_node
from autopar.randomness import number_draws, without_salt
from autopar.units import Spec, Units


def unfold(joint: JointGraph) -> JointGraph:
    """The graph that tracing the whole model gives, node for node; names of nodes may differ.

    Args:
        joint: a folded graph, as it was traced or after `normalise` and `replace_random_ops`.  It stays as it is, and
            shares its nodes' values with the result.

    Raises:
        FoldError: if the inner units of a run do not correspond.
    """
    if not joint.runs:
        return joint
    inputs, outputs, tied = whole_names(joint)
    runs = [_Correspondence(joint, run) for run in joint.runs]
    graph = _Writer(joint, runs).write(inputs, outputs)
    number_draws(graph)
    module = LazyGraphModule(joint.module, graph)
    return replace(joint, module=module, inputs=inputs, outputs=outputs, tied=tied, runs=(), derived={})


def whole_names(joint: JointGraph) -> tuple[tuple[GraphInput, ...], tuple[GraphOutput, ...], dict[str, str]]:
    """Inputs, outputs and tied names of the whole graph that a folded one stands for."""
    inputs, outputs, tied = joint.inputs, joint.outputs, dict(joint.tied)
    for units in map(Units, joint.runs):
        inputs, outputs = units.with_copies(inputs), units.with_copies(outputs)
        tied.update(units.renamed(tied))
    return inputs, outputs, tied


def check_unfolds(joint: JointGraph) -> None:
    """That `unfold` can be called of a graph.

    Raises:
        FoldError: if not.
    """
    for run in joint.runs:
        _Correspondence(joint, run)


# ---------------------------------------------------------------------------------------------- correspondence


@dataclass(frozen=True)
class _Band:
    """Nodes of the inner units that follow each other.

    Attributes:
        start: position of the first.
        size: of each unit.
        ascending: whether the near unit's come first.
    """

    start: int
    size: int
    ascending: bool

    def positions(self) -> tuple[range, range]:
        """Positions of the nodes of the near and of the far unit."""
        parts = range(self.start, self.start + self.size), range(self.start + self.size, self.start + 2 * self.size)
        return parts if self.ascending else (parts[1], parts[0])


class _Correspondence:
    """Which nodes of the inner units of a run correspond.

    Attributes:
        units: names in the run.
        bands: where the nodes lie.
        far_of: node of the near unit -> node of the far one; and back, `near_of`.
        after: node that the far unit reads of the unit after it -> what the near unit reads there, of the far one.
    """

    def __init__(self, joint: JointGraph, run: Run) -> None:
        self.units = Units(run)
        self.nodes = list(joint.module.graph.nodes)
        self.bands = self._find_bands()
        self.far_of = self._placeholders(joint)
        for band in self.bands:
            near, far = band.positions()
            self.far_of.update((self.nodes[a], self.nodes[b]) for a, b in zip(near, far, strict=True))
        self.near_of = {far: near for near, far in self.far_of.items()}
        self.after: dict[fx.Node, fx.Node] = {}
        self._shared: set[fx.Node] = set()
        self._before: dict[fx.Node, fx.Node] = {}
        for near_node, far_node in self.far_of.items():
            self._check(near_node, far_node)
        self._check_outputs(joint)
        if conflict := self._shared & self.after.keys():
            raise self._refusal(next(iter(conflict)), "is shared by all units and is of one of them")

    def _find_bands(self) -> tuple[_Band, ...]:
        """Where nodes of one inner unit follow those of the other; every node of theirs must lie in one of these."""
        units = [self.units.unit(n.meta["module"]) if n.op == "call_function" else None for n in self.nodes]
        owned = [(at, unit) for at, unit in enumerate(units) if unit is not None]
        starts = [next(group) for _, group in itertools.groupby(owned, key=lambda pair: pair[1])]
        inner = (self.units.near, self.units.far)
        bands = [
            _Band(at, next_at - at, ascending=unit < next_unit)
            for (at, unit), (next_at, next_unit) in itertools.pairwise(starts)
            if {unit, next_unit} == set(inner)
        ]
        inside = {at for band in bands for part in band.positions() for at in part}
        missed = next((at for at, unit in owned if unit in inner and at not in inside), None)
        if missed is not None:
            raise self._refusal(self.nodes[missed], "lies apart from the unit's other nodes")
        if len(inside) < sum(2 * band.size for band in bands) or max(inside, default=0) >= len(self.nodes):
            raise self._refusal(self.nodes[-1], "ends a unit too early")
        return tuple(bands)

    def _placeholders(self, joint: JointGraph) -> dict[fx.Node, fx.Node]:
        """The near unit's parameters and buffers -> the far one's."""
        by_spec = dict(zip(joint.inputs, joint.placeholders, strict=True))
        units = self.units
        return {
            node: by_spec[replace(spec, path=units.counterpart(spec.path, units.far))]
            for spec, node in by_spec.items()
            if units.unit(spec.path) == units.near
        }

    def _check(self, near: fx.Node, far: fx.Node) -> None:
        """That two nodes do the same with what corresponds."""
        units = self.units
        if near.op == "placeholder":
            return
        if (near.op, near.target) != (far.op, far.target) or near.meta["backward"] != far.meta["backward"]:
            raise self._refusal(far, f"is not what {near} is")
        if units.relative(near.meta["module"], units.near) != units.relative(far.meta["module"], units.far):
            raise self._refusal(far, f"belongs to {far.meta['module']}, and {near} to {near.meta['module']}")
        if _described(near.meta["val"]) != _described(far.meta["val"]):
            raise self._refusal(far, f"has another shape than {near}")
        left, left_tree = tree_flatten(without_salt(near))
        right, right_tree = tree_flatten(without_salt(far))
        if left_tree != right_tree or not all(map(self._related, left, right)):
            raise self._refusal(far, f"reads what does not correspond to what {near} reads")

    def _related(self, left: Any, right: Any) -> bool:
        """Whether the near unit reads `left` where the far one reads `right`; notes how that is to be copied."""
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return type(left) is type(right) and bool(left == right)
        if left in self.far_of:
            return self.far_of[left] is right
        if left in self.near_of:  # of the unit after
            ours = right in self.far_of or right in self.near_of
            return not ours and self.after.setdefault(right, left) is left
        if right in self.far_of:  # of the unit before
            return self._before.setdefault(right, left) is left
        self._shared.add(right)
        return left is right

    def _check_outputs(self, joint: JointGraph) -> None:
        by_spec = dict(zip(joint.outputs, joint.output_values, strict=True))
        units = self.units
        for spec, value in by_spec.items():
            if units.unit(spec.path) == units.near:
                other = by_spec.get(replace(spec, path=units.counterpart(spec.path, units.far)))
                if (None if value is None else self.far_of.get(value, spec)) is not other:
                    raise FoldError(f"{spec.kind.value} {spec.path} and that of unit {units.far} do not correspond")

    def _refusal(self, node: fx.Node, why: str) -> FoldError:
        near, far = (" and ".join(self.units.run.units[i]) for i in (self.units.near, self.units.far))
        return FoldError(f"{near} is not to {far} as nodes: {node} {why}; trace the whole model (fold=False)")


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    return [_described(v) for v in value] if isinstance(value, (tuple, list)) else value


# ----------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes the whole graph."""

    def __init__(self, joint: JointGraph, runs: Sequence[_Correspondence]) -> None:
        self.joint, self.runs = joint, runs
        self.graph = QuickGraph()
        self.held: dict[fx.Node, fx.Node] = {}  # node of the folded graph -> its counterpart
        # For each run and unit between the near and the far one, themselves included: node of the far unit ->
        # counterpart.
        self.units: list[dict[int, dict[fx.Node, fx.Node]]] = [
            {unit: {} for unit in range(run.units.near, run.units.far + 1)} for run in runs
        ]

    def write(self, inputs: tuple[GraphInput, ...], outputs: tuple[GraphOutput, ...]) -> fx.Graph:
        """The graph with these inputs and outputs."""
        self._placeholders(inputs)
        nodes = list(self.joint.module.graph.nodes)
        at_position = {
            band.start + band.size: (index, band) for index, run in enumerate(self.runs) for band in run.bands
        }
        inner = {node: index for index, run in enumerate(self.runs) for node in (*run.far_of, *run.near_of)}
        for position, node in enumerate(nodes):
            if position in at_position:
                self._copies(*at_position[position])
            if node.op in {"placeholder", "output"}:
                continue
            if node in inner:
                self._inner(inner[node], node)
            else:
                self.held[node] = copy_node(self.graph, node, self.held.__getitem__)
        self._output(outputs)
        return self.graph

    def _placeholders(self, inputs: Sequence[GraphInput]) -> None:
        by_spec = dict(zip(self.joint.inputs, self.joint.placeholders, strict=True))
        for spec in inputs:
            if spec in by_spec:
                node = by_spec[spec]
                self._keep(node, copy_node(self.graph, node, self.held.__getitem__))
            else:
                index, unit, original = self._original(spec)
                new = self.graph.placeholder(placeholder_name(spec))
                new.meta = self._meta(index, unit, by_spec[original])
                self.units[index][unit][by_spec[original]] = new

    def _original(self, spec: Spec) -> tuple[int, int, Spec]:
        """Run and unit of an input or output of a copy, and what corresponds to it in the far unit."""
        for index, run in enumerate(self.runs):
            unit = run.units.unit(spec.path)
            if unit is not None:
                return index, unit, replace(spec, path=run.units.counterpart(spec.path, run.units.far))
        raise AssertionError(f"{spec} is of no run")

    def _keep(self, node: fx.Node, new: fx.Node) -> None:
        """Note the counterpart of a node of the folded graph."""
        self.held[node] = new
        for run, units in zip(self.runs, self.units, strict=True):
            if node in run.far_of:
                units[run.units.near][run.far_of[node]] = new
            elif node in run.near_of:
                units[run.units.far][node] = new

    def _meta(self, index: int, unit: int, node: fx.Node) -> dict[str, Any]:
        """The metadata that a node of the far unit has in `unit`."""
        units = self.runs[index].units
        return {**node.meta, "module": units.moved(node.meta["module"], units.far, unit)}

    def _copies(self, index: int, band: _Band) -> None:
        """Write the copies of a band's nodes, before the later of its units."""
        run, nodes = self.runs[index], self.runs[index].nodes
        template = [nodes[at] for at in band.positions()[1]]
        for unit in run.units.copies if band.ascending else reversed(run.units.copies):
            change = functools.partial(self._counterpart, index, unit)
            written = self.units[index][unit]
            for node in template:
                written[node] = copy_node(self.graph, node, change, self._meta(index, unit, node))

    def _counterpart(self, index: int, unit: int, read: fx.Node) -> fx.Node:
        """What a node of `unit` reads where that of the far unit reads `read`."""
        run, units = self.runs[index], self.units[index]
        if read in run.near_of:
            return units[unit][read]
        if read in run.far_of:
            return units[unit - 1][run.far_of[read]]
        if read in run.after and unit < run.units.far:
            return units[unit + 1][run.after[read]]
        return self.held[read]

    def _inner(self, index: int, node: fx.Node) -> None:
        """Write a node of one of the inner units."""
        run = self.runs[index]
        units = run.units
        if node in run.near_of:
            change = functools.partial(self._counterpart, index, units.far)
            new = copy_node(self.graph, node, change, self._meta(index, units.far, node))
        else:
            following = self.units[index][units.near + 1]
            new = copy_node(self.graph, node, lambda read: following.get(read) or self.held[read])
            new.meta["module"] = units.moved(node.meta["module"], units.near, units.near)
        self._keep(node, new)

    def _output(self, outputs: Sequence[GraphOutput]) -> None:
        by_spec = dict(zip(self.joint.outputs, self.joint.output_values, strict=True))
        values: list[fx.Node | None] = []
        for spec in outputs:
            if spec in by_spec:
                value = by_spec[spec]
                values.append(None if value is None else self.held[value])
            else:
                index, unit, original = self._original(spec)
                value = by_spec[original]
                values.append(None if value is None else self.units[index][unit][value])
        self.graph.output(tuple(values))
        self.graph.output_node().meta = dict(self.joint.module.graph.output_node().meta)
