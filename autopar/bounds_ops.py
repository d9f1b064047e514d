"""What the ops of a graph take at least on one rank, and what they keep for the backward pass, from what is decided of
each op alone.

A rank runs the ops of a pass one after another, each at one rank's sizes; and a value that is summed over ranks, or
dealt out anew, is not read before that is done.  Such a collective starts just before its result is read, so computing
waits for it, but for what the pass `overlap` moves behind its start: in the backward pass, what no such collective
needs of the ops since the one before.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import fx

from autopar._compat import OpOverload, QuickGraph
from autopar.cluster import Cluster, Link, axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.folded import Copies
from autopar.cost_model.ops import compute_time, is_free, moved_parts, node_flops, read_bytes, tensor_bytes
from autopar.factors import source_of
from autopar.graph import JointGraph
from autopar.mesh import Mesh
from autopar.passes import coalesce
from autopar.passes.moves import route
from autopar.passes.propagate import NodeSharding, OpShardings, resting_gradients
from autopar.passes.reshard import gathers, is_pointwise, is_relayout, is_spread
from autopar.placement import (
    ByGroup,
    Partial,
    Placement,
    Replicate,
    Sharding,
    is_sharded,
    is_uneven,
    local_shape,
    meta_value,
)
from autopar.rules import is_look, is_look_or_cast, tensor_inputs

Seconds = Mapping[str, float]
"""Of collectives, by the link that carries them."""


def add_to(total: dict[str, float], more: Seconds, times: float = 1) -> None:
    """Add so many times as much to a total."""
    for link, seconds in more.items():
        total[link] = total.get(link, 0.0) + times * seconds


@dataclass(frozen=True)
class Work:
    """What the ops of both passes take at least; pairs are of the forward and of the backward pass.

    Attributes:
        computing_s: seconds of all ops.
        waiting_s: seconds that computing waits for collectives between ops.
        moving_s: seconds of these collectives, by link.
        before_s: of each op the seconds of the ops before it in its pass.
        saved: for each op of the forward pass whose results the backward pass reads, their bytes and the op's seconds;
            those first that take the fewest seconds a byte.
    """

    computing_s: tuple[float, float]
    waiting_s: tuple[float, float]
    moving_s: tuple[Seconds, Seconds]
    before_s: Mapping[fx.Node, float]
    saved: tuple[tuple[float, float], ...]

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        sizes, seconds = zip(*self.saved, strict=True) if self.saved else ((), ())
        return list(itertools.accumulate(sizes, initial=0.0)), list(itertools.accumulate(seconds, initial=0.0))

    @property
    def saved_bytes(self) -> float:
        """What is kept for the backward pass if nothing is computed again."""
        return self._sums[0][-1]

    def recomputing_s(self, num_bytes: float) -> float:
        """Seconds that it takes at least to keep so many bytes less: an op whose results are not kept runs again."""
        sizes, seconds = self._sums
        if num_bytes <= 0 or not self.saved:
            return 0.0
        i = min(bisect.bisect_left(sizes, num_bytes), len(sizes) - 1)
        share = min(1.0, (num_bytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1]))
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])


@dataclass(frozen=True)
class _Moved:
    """What an op moves in the global view: bytes of each result, so many times, and of each operand that it reads."""

    written: tuple[int, ...]
    times: int
    read: tuple[tuple[fx.Node, int], ...]
    has_flops: bool


@dataclass
class OpTimes:
    """Seconds of ops on a device at one rank's sizes; equal calls are worked out once."""

    cluster: Cluster
    _known: dict[object, float] = field(default_factory=dict)

    def at_least_s(self, node: fx.Node, moved: _Moved, decided: NodeSharding, mesh: Mesh) -> float:
        """Seconds that one rank works on an op at least."""
        device = self.cluster.device
        parts = {operand: part(s, mesh) for operand, s in zip(tensor_inputs(node), decided.inputs, strict=True)}
        num_bytes = sum(size * part(s, mesh) for size, s in zip(moved.written, decided.outputs, strict=True))
        num_bytes = moved.times * num_bytes + sum(size * parts.get(operand, 0.0) for operand, size in moved.read)
        busy_s = num_bytes / device.memory_bandwidth_bytes_s
        if moved.has_flops:
            busy_s = max(busy_s, self._computing_s(node, decided, mesh))
        return busy_s + device.kernel_start_s + (0.0 if device.is_queued else device.kernel_launch_s)

    def _computing_s(self, node: fx.Node, decided: NodeSharding, mesh: Mesh) -> float:
        """Seconds of an op's arithmetic at one rank's sizes."""
        if node.target is torch.ops.autopar.grouped_mm.default:  # its groups are other ones in the program
            parts = math.prod(n for n, cut in zip(mesh.sizes, decided.cuts, strict=True) if cut is not None)
            return node_flops(node) / parts / max(self.cluster.device.flops.values())
        operands = tensor_inputs(node)
        values = [local_value(n.meta["val"], s, mesh) for n, s in zip(operands, decided.inputs, strict=True)]
        given, result = node.meta["val"], None
        if isinstance(given, torch.Tensor):
            result = local_value(given, decided.outputs[0], mesh)
        args, kwargs = node.args, node.kwargs
        shapes = tuple((tuple(v.shape), v.dtype) for v in values)
        places = {operand: i for i, operand in enumerate(operands)}
        key = (node.target, shapes, repr(fx.map_arg((args, dict(kwargs)), lambda n: f"%{places.get(n, n.name)}")))
        if key not in self._known:
            graph = QuickGraph()
            stand_ins: dict[fx.Node, fx.Node] = {}
            for operand, value in zip(operands, values, strict=True):
                stand_ins[operand] = graph.placeholder("x")
                stand_ins[operand].meta["val"] = value
            args, kwargs = fx.map_arg((args, dict(kwargs)), lambda n: stand_ins.get(n))
            call = graph.create_node("call_function", node.target, args, kwargs)
            call.meta["val"] = result
            self._known[key] = compute_time(call, self.cluster.device)
        return self._known[key]


class WorkOf:
    """Works out `Work` for a graph whose ops are decided."""

    def __init__(self, joint: JointGraph, mesh: Mesh, ops: OpShardings, times: OpTimes, copies: Copies) -> None:
        self.joint, self.mesh, self.ops, self.times, self.copies = joint, mesh, ops, times, copies
        self.moved = joint.keep("moved", lambda: _moved_in(joint))
        self.anywhere = where_parameters_rest(joint)
        self.links = {name: axis_link(times.cluster, mesh, name) for name in mesh.names}
        self.move_times: dict[object, Seconds] = {}

    def run(self) -> Work:
        """The work of both passes."""
        sums, waiting = [0.0, 0.0], [0.0, 0.0]
        moving: tuple[dict[str, float], dict[str, float]] = ({}, {})
        seconds_of: dict[fx.Node, float] = {}
        before: dict[fx.Node, float] = {}
        moves = self._all_moves()
        needed = _needed([operand for read in moves.values() for operand in read])
        hiding_s = 0.0
        for node, decided in self.ops.items():
            backward, number = int(node.meta["backward"]), self.copies.number(node.meta["module"])
            for by_link in moves.get(node, {}).values():
                add_to(moving[backward], by_link, number)
                waiting[backward] += max(0.0, number * sum(by_link.values()) - hiding_s)
                hiding_s = 0.0
            moved = self.moved.get(node)
            seconds = 0.0 if moved is None else number * self.times.at_least_s(node, moved, decided, self.mesh)
            before[node], seconds_of[node] = sums[backward], seconds
            sums[backward] += seconds
            if backward and node not in needed:
                hiding_s += seconds
        return Work((sums[0], sums[1]), (waiting[0], waiting[1]), moving, before, self._saved(seconds_of))

    def _all_moves(self) -> dict[fx.Node, dict[fx.Node, Seconds]]:
        """For each op what has to move just before it, since it is the first to read it so, and for how long."""
        done: set[tuple[fx.Node, Sharding]] = set()
        found: dict[fx.Node, dict[fx.Node, Seconds]] = {}
        for node, decided in self.ops.items():
            if node in self.anywhere:
                continue
            for operand, wanted in zip(tensor_inputs(node), decided.inputs, strict=True):
                if operand.op != "call_function" or operand in self.anywhere or (operand, wanted) in done:
                    continue
                if by_link := self._moves(operand, wanted):
                    done.add((operand, wanted))
                    found.setdefault(node, {})[operand] = by_link
        return found

    def _saved(self, seconds_of: Mapping[fx.Node, float]) -> tuple[tuple[float, float], ...]:
        found = []
        for node, readers in self.joint.keep("kept", lambda: _kept_values(self.joint)).items():
            source, output = source_of(node)
            share = self._share_kept(node, self.ops[source].outputs[output], readers)
            size = tensor_bytes(node.meta["val"]) * share * self.copies.number(source.meta["module"])
            if size:
                found.append((size, seconds_of.get(source, 0.0), source))
        several = Counter(source for _, _, source in found)
        saved = [(size, seconds / several[source]) for size, seconds, source in found]
        return tuple(sorted(saved, key=lambda one: one[1] / one[0]))

    def _share_kept(self, value: fx.Node, given: Sharding, readers: Sequence[tuple[fx.Node, int]]) -> float:
        """The share of a value that one rank keeps for the backward pass at least: as the value is given, and as both
        passes need it, if that is more of it."""
        rests = part(given, self.mesh)
        if any(isinstance(p, (ByGroup, Partial)) for p in given):
            return 0.0
        read: tuple[set[float], set[float]] = (set(), set())
        for reader, place in readers:
            wanted = self.ops[reader].inputs[place]
            if any(isinstance(p, (ByGroup, Partial)) for p in wanted):
                return 0.0
            read[reader.meta["backward"]].add(part(wanted, self.mesh))
        more = {share for share in read[True] if share > rests}
        if more and (is_relayout(value) or is_spread(value) or is_pointwise(value)):
            return 0.0  # it may be made again, of what it is made of
        kept = [share for share in more if share in read[False]]
        as_given = [min(share, rests) for share in read[True] if share not in kept]
        return sum(kept) + max(as_given, default=0.0)

    def _moves(self, value: fx.Node, wanted: Sharding) -> Seconds:
        """Seconds before a value that an op gives is there as another needs it, by link."""
        source, output = source_of(value)
        given = self.ops[source].outputs[output]
        if given is wanted or given == wanted:
            return {}
        if any(isinstance(p, ByGroup) for p in (*given, *wanted)):
            return {}  # how many rows go where only the step knows
        if gathers(given, wanted) and (is_relayout(source) or is_spread(source) or is_pointwise(source)):
            return {}  # less may be gathered, and earlier
        tensor = value.meta["val"]
        key = (tuple(tensor.shape), tensor.dtype, given, wanted)
        if key not in self.move_times:
            self.move_times[key] = self._route(tensor, given, wanted)
        return self.move_times[key]

    def _route(self, tensor: torch.Tensor, given: Sharding, wanted: Sharding) -> Seconds:
        state = list(given)
        found: dict[str, float] = {}
        shape = tuple(tensor.shape)
        for axis, now, then in route(given, wanted, shape, self.mesh):
            before = tensor.nbytes * part(tuple(state), self.mesh)
            uneven = any(is_uneven((*state[:axis], p, *state[axis + 1 :]), axis, shape, self.mesh) for p in (now, then))
            state[axis] = then
            after = tensor.nbytes * part(tuple(state), self.mesh)
            kind = _kind(now, then)
            if kind is not None and not uneven:
                link, size = self.links[self.mesh.names[axis]], self.mesh.sizes[axis]
                add_to(found, {link.name: travelling_s(kind, size, max(before, after), link, coalesce.SMALL_BYTES)})
        return found


def travelling_s(kind: str, num_ranks: int, num_bytes: float, link: Link, small: int) -> float:
    """Seconds of a collective; of one with no more than `small` bytes, which may travel with others, its share of those
    of a full bucket."""
    full = coalesce.BUCKET_BYTES
    if num_bytes <= small:
        return collective_time(kind, num_ranks, full, link) * num_bytes / full
    return collective_time(kind, num_ranks, int(num_bytes), link)


def _needed(values: list[fx.Node]) -> set[fx.Node]:
    """These values of the backward pass and all that they are computed from there."""
    found: set[fx.Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function" and node.meta["backward"]:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _kind(now: Placement, then: Placement) -> str | None:
    """The collective that a move takes along its axis; None if it only slices."""
    if isinstance(now, Partial):
        return "reduce_scatter" if is_sharded(then) else "all_reduce"
    if isinstance(now, Replicate):
        return None
    return "all_to_all" if is_sharded(then) else "all_gather"


@lru_cache(maxsize=4096)
def part(sharding: Sharding, mesh: Mesh) -> float:
    """The share of a tensor that one rank has, about."""
    return 1 / math.prod(n for p, n in zip(sharding, mesh.sizes, strict=True) if is_sharded(p))


def local_value(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """A value of one rank's shape."""
    return meta_value(local_shape(tuple(value.shape), sharding, mesh), value.dtype)


def _moved_in(joint: JointGraph) -> dict[fx.Node, _Moved]:
    """What the ops of a graph move that are there however it is cut and parameters rest; looks are left out."""
    found: dict[fx.Node, _Moved] = {}
    anywhere = where_parameters_rest(joint)
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or node in anywhere or is_look(node) or is_free(node):
            continue
        if not isinstance(node.target, OpOverload) or node.target is torch.ops.aten.full.default:
            continue
        times, read = moved_parts(node)
        value = node.meta["val"]
        written = value if isinstance(value, (tuple, list)) else (value,)
        reads = tuple((n, read_bytes(n.meta.get("val"))) for n in dict.fromkeys(read))
        found[node] = _Moved(tuple(map(tensor_bytes, written)), times, reads, node_flops(node) > 0)
    return found


def _kept_values(joint: JointGraph) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
    """The tensors that ops of the forward pass make and those of the backward pass read, also through views: each with
    its readers in both, and which of their operands it is."""
    moved = joint.keep("moved", lambda: _moved_in(joint))
    found: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or is_look(node) or node.target is operator.getitem:
            continue
        for place, operand in enumerate(tensor_inputs(node)):
            base = operand
            while is_look(base):
                base = tensor_inputs(base)[0]
            if base.op == "call_function" and not base.meta["backward"] and source_of(base)[0] in moved:
                found.setdefault(base, []).append((node, place))
    return {value: readers for value, readers in found.items() if any(n.meta["backward"] for n, _ in readers)}


def where_parameters_rest(joint: JointGraph) -> set[fx.Node]:
    """The ops on parameters and on complete gradients alone, such as casts: each rank may run them on what rests
    there, however else they are cut; found once for a graph."""
    return joint.keep("anywhere", lambda: _on_what_rests(joint))


def _on_what_rests(joint: JointGraph) -> set[fx.Node]:
    params = set(joint.param_nodes().values())
    sums = torch.ops.aten.add.Tensor
    found = {n for n in resting_gradients(joint) if is_look_or_cast(n) or n.target is sums}
    for node in joint.module.graph.nodes:
        reads = node.all_input_nodes
        if node.op == "call_function" and reads and all(used in params or used in found for used in reads):
            found.add(node)
    return found
