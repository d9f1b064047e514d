"""What it takes at least to bring parameters to where they are used and their gradients to where they rest, and what
rests, from what is decided of each op alone.

Buckets make messages of up to `BUCKET_BYTES`, so what is smaller costs its share of a full one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.bounds_ops import Seconds, Work, add_to, local_value, travelling_s, where_parameters_rest
from autopar.cluster import Cluster, axis_link
from autopar.cost_model.folded import Copies
from autopar.cost_model.ops import tensor_bytes
from autopar.cost_model.optimizers import OptimizerMemory
from autopar.factors import source_of
from autopar.graph import JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.passes import coalesce
from autopar.passes.propagate import OpShardings
from autopar.placement import ByGroup, Partial, Sharding, is_sharded
from autopar.plan import Plan
from autopar.rules import is_look_or_cast, tensor_inputs


@dataclass(frozen=True)
class Rest:
    """What a way for parameters to rest takes at least, on one rank.

    Attributes:
        moving_s: seconds of gathers and reductions in the forward and in the backward pass, by link.
        waiting_s: seconds of each pass that computing waits: before the first layers have their parameters, and for the
            last gradients.
        late_s: seconds of reductions, by link, that start when all is computed.
        params: bytes of parameters.
        grads: of their gradients.
        state: of the optimizer's state.
        kept: of gathered copies that are kept for the backward pass.
    """

    moving_s: tuple[Seconds, Seconds]
    waiting_s: tuple[float, float]
    late_s: Seconds
    params: float
    grads: float
    state: float
    kept: float


@dataclass(frozen=True)
class _Read:
    """An op that reads a parameter: its place among all ops, and the seconds of those
    before it in its pass; how many bytes, and along which axes only a share."""

    backward: bool
    place: int
    before_s: float
    num_bytes: float
    axes: frozenset[int]


@dataclass(frozen=True)
class _Used:
    """How a parameter is used: who reads it, and where the forward pass does so last; and the bytes of its gradient, if
    it has one, the seconds of the ops after it is made, and the axes along which it has yet to be summed."""

    value: torch.Tensor
    number: int
    reads: tuple[_Read, ...]
    last_read: int
    grad_bytes: float | None
    after_s: float
    unreduced: frozenset[int]


class Travels:
    """The ways of parameters and gradients in a graph whose ops are decided."""

    def __init__(
        self, joint: JointGraph, mesh: Mesh, ops: OpShardings, cluster: Cluster, copies: Copies, work: Work
    ) -> None:
        self.mesh, self.ops, self.work = mesh, ops, work
        self.anywhere = where_parameters_rest(joint)
        self.links = [axis_link(cluster, mesh, name) for name in mesh.names]
        producers = joint.keep("producers", lambda: _producers(joint))
        self.order = joint.keep("positions", lambda: {node: i for i, node in enumerate(joint.module.graph.nodes)})
        self.used: dict[str, _Used] = {}
        for path, node in joint.param_nodes().items():
            grad_bytes, after_s, unreduced = self._gradient(node.meta["val"].numel(), producers.get(path))
            number = copies.number(path.rpartition(".")[0])
            reads = tuple(self._reads(node))
            last_read = max((read.place for read in reads if not read.backward), default=-1)
            self.used[path] = _Used(node.meta["val"], number, reads, last_read, grad_bytes, after_s, unreduced)

    def rest(self, plan: Plan, optimizer: OptimizerMemory) -> Rest:
        """What a plan's way to rest takes."""
        moving: tuple[dict[str, float], dict[str, float]] = ({}, {})
        late: dict[str, float] = {}
        gathers: list[tuple[float, Seconds]] = []
        reductions: list[tuple[float, Seconds]] = []
        params = grads = state = kept = 0.0
        stays = self._still_gathered(plan)
        for path, used in self.used.items():
            storage = plan.storage[path]
            rests = local_value(used.value, storage.sharding, self.mesh)
            size = tensor_bytes(rests)
            params += used.number * size
            if used.grad_bytes is not None:
                grads += used.number * size
                state += used.number * optimizer.state_bytes(rests)
            cut = _axes(storage.sharding)
            for backward in (False, True) if storage.regather and used.last_read != stays else (False,):
                before_s, by_link = self._gather_s(used, backward, cut)
                add_to(moving[backward], by_link, used.number)
                if by_link and not backward:
                    gathers.append((before_s, by_link))
            if not storage.regather:
                again = max((read.num_bytes for read in used.reads if read.backward), default=0.0)
                kept += used.number * max(0.0, again - size)
            if by_link := self._reduction_s(used, cut):
                add_to(late if plan.delay_reduction else moving[True], by_link, used.number)
                reductions.append((used.after_s, by_link))
        waiting_s = (_waiting_s(gathers), 0.0 if plan.delay_reduction else _waiting_s(reductions))
        return Rest(moving, waiting_s, late, params, grads, state, kept)

    def _still_gathered(self, plan: Plan) -> int:
        """Where the forward pass reads a parameter last: the one that is there as the backward pass begins."""
        again = (
            used.last_read
            for path, used in self.used.items()
            if plan.storage[path].regather and any(read.backward for read in used.reads)
        )
        return max(again, default=-1)

    def _gather_s(self, used: _Used, backward: bool, cut: frozenset[int]) -> tuple[float, Seconds]:
        """Seconds of the ops before the first reader of a parameter in one pass; and seconds to gather it, by link, for
        the reader that takes the most."""
        found: list[Seconds] = [{}]
        before_s = [0.0]
        for read in used.reads:
            if read.backward is backward and (axes := cut - read.axes):
                found.append(self._along("all_gather", axes, read.num_bytes))
                before_s.append(read.before_s)
        return max(before_s), max(found, key=lambda one: sum(one.values()))

    def _reduction_s(self, used: _Used, cut: frozenset[int]) -> Seconds:
        """Seconds to sum a gradient, by link: what rests cut is scattered first, the innermost axis before others."""
        if used.grad_bytes is None or not used.unreduced:
            return {}
        summed = self._along("reduce_scatter", used.unreduced & cut, used.grad_bytes)
        left = used.grad_bytes
        for axis in used.unreduced & cut:
            left /= self.mesh.sizes[axis]
        for axis in used.unreduced - cut:
            add_to(summed, {self.links[axis].name: self._seconds("all_reduce", axis, left)})
        return summed

    def _along(self, kind: str, axes: frozenset[int], num_bytes: float) -> dict[str, float]:
        """Seconds of collectives along several axes: the innermost carries all, each other what is left of it."""
        found: dict[str, float] = {}
        for axis in sorted(axes, reverse=True):
            add_to(found, {self.links[axis].name: self._seconds(kind, axis, num_bytes)})
            num_bytes /= self.mesh.sizes[axis]
        return found

    def _seconds(self, kind: str, axis: int, num_bytes: float) -> float:
        return travelling_s(kind, self.mesh.sizes[axis], num_bytes, self.links[axis], coalesce.BUCKET_BYTES)

    def _reads(self, param: fx.Node) -> list[_Read]:
        """The ops that read a parameter, seen through what each rank may do with what rests there."""
        found = []
        stack = [(param, int(param.meta["val"].element_size()), frozenset[int]())]
        while stack:
            node, itemsize, axes = stack.pop()
            for user in node.users:
                if user.op != "call_function":
                    continue
                if user.target is operator.getitem:
                    stack.append((user, itemsize, axes))
                    continue
                places = [i for i, operand in enumerate(tensor_inputs(user)) if operand is node]
                shared = axes.union(*(_axes(self.ops[user].inputs[i]) for i in places))
                if user in self.anywhere:
                    value = user.meta["val"]
                    narrower = int(value.element_size()) if isinstance(value, torch.Tensor) else itemsize
                    stack.append((user, min(itemsize, narrower), shared))
                    continue
                parts = 1
                for axis in shared:
                    parts *= self.mesh.sizes[axis]
                numel: int = min(int(param.meta["val"].numel()), int(node.meta["val"].numel()))
                found.append(
                    _Read(
                        bool(user.meta["backward"]),
                        self.order[user],
                        self.work.before_s[user],
                        numel * itemsize / parts,
                        shared,
                    )
                )
        return found

    def _gradient(
        self, numel: int, producers: Sequence[tuple[fx.Node, int]] | None
    ) -> tuple[float | None, float, frozenset[int]]:
        """Bytes of a gradient on one rank, the seconds of the ops after the last that makes a part of it, and the axes
        along which it has yet to be summed."""
        if producers is None:
            return None, 0.0, frozenset()
        total_s = self.work.computing_s[1]
        unreduced, sizes, after_s = frozenset[int](), [], total_s
        for node, itemsize in producers:
            if node.op != "call_function":
                continue
            source, output = source_of(node)
            given = self.ops[source].outputs[output]
            if any(isinstance(p, ByGroup) for p in given):
                return 0.0, 0.0, frozenset()
            after_s = min(after_s, total_s - self.work.before_s.get(source, 0.0))
            unreduced |= {axis for axis, p in enumerate(given) if isinstance(p, Partial)}
            size = float(numel * itemsize)
            for axis in _axes(given):
                size /= self.mesh.sizes[axis]
            sizes.append(size)
        return min(sizes, default=0.0), after_s, unreduced


def _waiting_s(moves: Sequence[tuple[float, Seconds]]) -> float:
    """Seconds that computing waits for the first of some gathers, of each of which the seconds of the ops before its
    reader are known; or, since time runs either way, for the last of some reductions.  Of a parameter or gradient, what
    goes along one link comes after what goes along another; of several, each link has to carry all."""
    waiting_s = 0.0
    links: dict[str, float] = {}
    for meanwhile_s, by_link in sorted(moves, key=lambda move: move[0]):
        add_to(links, by_link)
        waiting_s = max(waiting_s, sum(by_link.values()) - meanwhile_s, max(links.values()) - meanwhile_s)
    return waiting_s


def _axes(sharding: Sharding) -> frozenset[int]:
    return frozenset(axis for axis, p in enumerate(sharding) if is_sharded(p))


def _producers(joint: JointGraph) -> dict[str, list[tuple[fx.Node, int]]]:
    """For each trained parameter the values that its gradient is summed from, seen through casts, views and sums, each
    with the fewest bytes that an element has on the way."""
    found: dict[str, list[tuple[fx.Node, int]]] = {}
    for spec, value in zip(joint.outputs, joint.output_values, strict=True):
        if spec.kind is not OutputKind.GRADIENT or value is None:
            continue
        stack, made = [(value, int(value.meta["val"].element_size()))], []
        while stack:
            node, itemsize = stack.pop()
            itemsize = min(itemsize, int(node.meta["val"].element_size()))
            if is_look_or_cast(node) or node.target is torch.ops.aten.add.Tensor:
                stack += [(n, itemsize) for n in node.all_input_nodes]
            else:
                made.append((node, itemsize))
        found[spec.path] = made
    return found
