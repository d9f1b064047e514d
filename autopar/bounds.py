"""What no program of a plan undercuts, from what is decided of each op alone, in a tenth of the time that rewriting and
simulating the plan takes.

Time: a rank runs the ops of a pass one after another, each at one rank's sizes; and a value that is summed over ranks,
or dealt out anew, is not read before that is done.  So a pass takes at least as long as all its ops together, and at
least as long as the longest chain of ops and of such collectives.  What a schedule may hide, the gathers of parameters
and the reductions of their gradients, is left out, and so is whatever else the rewrite adds.

Memory: what rests, with the gradients, and the gathered copies that are kept for the backward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import fx

from autopar._compat import OpOverload, QuickGraph
from autopar.cluster import Cluster, axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.folded import Copies
from autopar.cost_model.ops import compute_time, is_free, moved_parts, node_flops, read_bytes, tensor_bytes
from autopar.cost_model.optimizers import OptimizerMemory
from autopar.cost_model.simulate import CONTENTION
from autopar.factors import source_of
from autopar.graph import JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.passes.decide import decided
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
from autopar.plan import FactorRef, Plan
from autopar.rules import is_look, is_look_or_cast, tensor_inputs


@dataclass(frozen=True)
class _Moved:
    """What an op moves in the global view: bytes of each result, so many times, and of each operand that it reads."""

    written: tuple[int, ...]
    times: int
    read: tuple[tuple[fx.Node, int], ...]
    has_flops: bool


@dataclass
class Bounds:
    """Bounds on the plans of one graph.

    Attributes:
        joint: the graph, whole or folded.
        cluster: what it runs on.
        optimizer: whose state rests.
        copies: how many units each unit of a folded graph stands for.
    """

    joint: JointGraph
    cluster: Cluster
    optimizer: OptimizerMemory
    copies: Copies
    _times: dict[object, float] = field(default_factory=dict)
    _op_times: dict[object, float] = field(default_factory=dict)

    def time_s(self, mesh: Mesh, factors: tuple[tuple[FactorRef, ...], ...]) -> float:
        """Seconds of a step that no plan which cuts these factors on this mesh undercuts."""
        key = mesh, factors
        if key not in self._times:
            plan = Plan("", mesh, factors, {})
            joint, ops = decided(self.joint, plan)
            slowed_s = CONTENTION[self.cluster.backend] * self._synchronising_s(plan)
            self._times[key] = _Chains(self, joint, mesh, ops).run() + slowed_s
        return self._times[key]

    def _synchronising_s(self, plan: Plan) -> float:
        """Seconds that the links need at least to sum the gradients over the ranks that have other rows."""
        mesh, joint = plan.mesh, self.joint
        trained, _ = joint.keep("trained", lambda: _trained_and_saved(joint))
        size = 0.0
        for path, node in joint.param_nodes().items():
            if node in trained:
                value = node.meta["val"]
                size += self.copies.number(path.rpartition(".")[0]) * value.numel() * min(2, value.element_size())
        size /= _num_parts(plan)
        seconds = 0.0
        for axis in reversed(range(mesh.num_axes)):
            if plan.factors[axis] and not _cuts_parameters(plan.factors[axis]):
                n, link = mesh.sizes[axis], axis_link(self.cluster, mesh, mesh.names[axis])
                # All at once, or in parts that are gathered before they are used again.
                both_s = sum(collective_time(kind, n, int(size), link) for kind in ("reduce_scatter", "all_gather"))
                seconds += min(both_s, collective_time("all_reduce", n, int(size), link))
                size /= n
        return seconds

    def num_bytes(self, plan: Plan) -> int:
        """Bytes of one rank that no program of the plan undercuts at its peak."""
        total, num_parts = 0.0, _num_parts(plan)
        trained, saved = self.joint.keep("trained", lambda: _trained_and_saved(self.joint))
        for path, node in self.joint.param_nodes().items():
            value, storage = node.meta["val"], plan.storage[path]
            rests = _local(value, storage.sharding, plan.mesh)
            size = float(tensor_bytes(rests))
            if node in trained:
                size += tensor_bytes(rests) + self.optimizer.state_bytes(rests)
            if node in saved and not storage.regather:
                size += max(0.0, value.numel() / num_parts - rests.numel()) * min(saved[node], value.element_size())
            total += self.copies.number(path.rpartition(".")[0]) * size
        return round(total)

    def op_s(self, node: fx.Node, moved: _Moved, decided: NodeSharding, mesh: Mesh) -> float:
        """Seconds that one rank works on an op at least."""
        device = self.cluster.device
        parts = {operand: _part(s, mesh) for operand, s in zip(tensor_inputs(node), decided.inputs, strict=True)}
        num_bytes = sum(size * _part(s, mesh) for size, s in zip(moved.written, decided.outputs, strict=True))
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
        values = [_local(n.meta["val"], s, mesh) for n, s in zip(operands, decided.inputs, strict=True)]
        given, result = node.meta["val"], None
        if isinstance(given, torch.Tensor):
            result = _local(given, decided.outputs[0], mesh)
        args, kwargs = node.args, node.kwargs
        shapes = tuple((tuple(v.shape), v.dtype) for v in values)
        places = {operand: i for i, operand in enumerate(operands)}
        key = (node.target, shapes, repr(fx.map_arg((args, dict(kwargs)), lambda n: f"%{places.get(n, n.name)}")))
        if key not in self._op_times:
            graph = QuickGraph()
            stand_ins: dict[fx.Node, fx.Node] = {}
            for operand, value in zip(operands, values, strict=True):
                stand_ins[operand] = graph.placeholder("x")
                stand_ins[operand].meta["val"] = value
            args, kwargs = fx.map_arg((args, dict(kwargs)), lambda n: stand_ins.get(n))
            call = graph.create_node("call_function", node.target, args, kwargs)
            call.meta["val"] = result
            self._op_times[key] = compute_time(call, self.cluster.device)
        return self._op_times[key]


class _Chains:
    """The longest chain of ops and collectives in each pass of a graph, and the sum of its ops."""

    def __init__(self, bounds: Bounds, joint: JointGraph, mesh: Mesh, ops: OpShardings) -> None:
        self.bounds, self.joint, self.mesh, self.ops = bounds, joint, mesh, ops
        self.moved = joint.keep("moved", lambda: _moved_in(joint))
        self.anywhere = joint.keep("anywhere", lambda: _where_parameters_rest(joint))
        self.links = {name: axis_link(bounds.cluster, mesh, name) for name in mesh.names}
        self.move_times: dict[object, float] = {}

    def run(self) -> float:
        """Seconds of both passes."""
        ends: dict[fx.Node, float] = {}
        moved_to: set[tuple[fx.Node, Sharding]] = set()
        sums, longest = [0.0, 0.0], [0.0, 0.0]
        contention = CONTENTION[self.bounds.cluster.backend]
        for node in self.joint.module.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                ends[node] = ends[source_of(node)[0]]
                continue
            backward, decided = int(node.meta["backward"]), self.ops[node]
            number = self.bounds.copies.number(node.meta["module"])
            start = 0.0
            for operand, wanted in zip(tensor_inputs(node), decided.inputs, strict=True):
                if operand in ends:
                    is_free = operand in self.anywhere or node in self.anywhere
                    moving_s = 0.0 if is_free else number * self._moving_s(operand, wanted)
                    if operand.meta["backward"] == node.meta["backward"]:
                        start = max(start, ends[operand] + moving_s)
                    if moving_s and (operand, wanted) not in moved_to:
                        moved_to.add((operand, wanted))
                        sums[backward] += contention * moving_s  # what is hidden slows down what hides it
            moved = self.moved.get(node)
            seconds = 0.0 if moved is None else number * self.bounds.op_s(node, moved, decided, self.mesh)
            ends[node] = start + seconds
            sums[backward] += seconds
            longest[backward] = max(longest[backward], ends[node])
        return sum(map(max, sums, longest))

    def _moving_s(self, value: fx.Node, wanted: Sharding) -> float:
        """Seconds before a value that an op gives is there as another needs it."""
        source, output = source_of(value)
        given = self.ops[source].outputs[output]
        if given is wanted or given == wanted:
            return 0.0
        if any(isinstance(p, ByGroup) for p in (*given, *wanted)):
            return 0.0  # how many rows go where only the step knows
        if gathers(given, wanted) and (is_relayout(source) or is_spread(source) or is_pointwise(source)):
            return 0.0  # less may be gathered, and earlier
        tensor = value.meta["val"]
        key = (tuple(tensor.shape), tensor.dtype, given, wanted)
        if key not in self.move_times:
            self.move_times[key] = self._route_s(tensor, given, wanted)
        return self.move_times[key]

    def _route_s(self, tensor: torch.Tensor, given: Sharding, wanted: Sharding) -> float:
        state, seconds = list(given), 0.0
        shape = tuple(tensor.shape)
        for axis, now, then in route(given, wanted, shape, self.mesh):
            before = tensor.nbytes * _part(tuple(state), self.mesh)
            uneven = any(is_uneven((*state[:axis], p, *state[axis + 1 :]), axis, shape, self.mesh) for p in (now, then))
            state[axis] = then
            after = tensor.nbytes * _part(tuple(state), self.mesh)
            kind = _kind(now, then)
            if kind is not None and not uneven:
                name, size = self.mesh.names[axis], self.mesh.sizes[axis]
                seconds += collective_time(kind, size, int(max(before, after)), self.links[name])
        return seconds


def _cuts_parameters(refs: Sequence[FactorRef]) -> bool:
    return any(ref.label != "batch" for ref in refs)


def _num_parts(plan: Plan) -> int:
    """Into how many parts a parameter is cut at most where it is used."""
    return math.prod(n for n, refs in zip(plan.mesh.sizes, plan.factors, strict=True) if _cuts_parameters(refs))


def _kind(now: Placement, then: Placement) -> str | None:
    """The collective that a move takes along its axis; None if it only slices."""
    if isinstance(now, Partial):
        return "reduce_scatter" if is_sharded(then) else "all_reduce"
    if isinstance(now, Replicate):
        return None
    return "all_to_all" if is_sharded(then) else "all_gather"


@lru_cache(maxsize=4096)
def _part(sharding: Sharding, mesh: Mesh) -> float:
    """The share of a tensor that one rank has, about."""
    return 1 / math.prod(n for p, n in zip(sharding, mesh.sizes, strict=True) if is_sharded(p))


def _local(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    return meta_value(local_shape(tuple(value.shape), sharding, mesh), value.dtype)


def _moved_in(joint: JointGraph) -> dict[fx.Node, _Moved]:
    """What the ops of a graph move that are there however it is cut and parameters rest; looks are left out."""
    found: dict[fx.Node, _Moved] = {}
    anywhere = joint.keep("anywhere", lambda: _where_parameters_rest(joint))
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


def _where_parameters_rest(joint: JointGraph) -> set[fx.Node]:
    """The ops on parameters and on complete gradients alone, such as casts: each rank may run them on what rests
    there, however else they are cut."""
    params = set(joint.param_nodes().values())
    sums = torch.ops.aten.add.Tensor
    found = {n for n in resting_gradients(joint) if is_look_or_cast(n) or n.target is sums}
    for node in joint.module.graph.nodes:
        reads = node.all_input_nodes
        if node.op == "call_function" and reads and all(used in params or used in found for used in reads):
            found.add(node)
    return found


def _trained_and_saved(joint: JointGraph) -> tuple[set[fx.Node], dict[fx.Node, int]]:
    """The parameters that get gradients, and those that the backward pass reads, with the bytes of an element there."""
    params = joint.param_nodes()
    trained = {params[spec.path] for spec in joint.outputs if spec.kind is OutputKind.GRADIENT and spec.path in params}
    saved: dict[fx.Node, int] = {}
    for param in params.values():
        readers = _readers(param)
        if readers and any(backward for backward, _ in readers):
            saved[param] = min(itemsize for _, itemsize in readers)
    return trained, saved


def _readers(param: fx.Node) -> list[tuple[bool, int]]:
    """Of each op that reads a parameter: whether it is in the backward pass, and the bytes of an element it reads."""
    found, stack = [], [(param, int(param.meta["val"].element_size()))]
    while stack:
        node, itemsize = stack.pop()
        for user in node.users:
            if user.op != "call_function":
                continue
            value = user.meta["val"]
            if user.target is operator.getitem or is_look_or_cast(user):
                stack.append((user, int(value.element_size()) if isinstance(value, torch.Tensor) else itemsize))
            else:
                found.append((bool(user.meta["backward"]), itemsize))
    return found
