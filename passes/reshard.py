"""Insert reshards: every place where a value lies otherwise than an op needs it becomes an explicit `reshard` node.

Preserves numerics exactly: shapes are still global, and a reshard of a global value is the identity.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar import sorted_rows  # noqa: F401  (registers ops)
from autopar._compat import LazyGraphModule, OpOverload, QuickGraph
from autopar.factors import analyse, source_of
from autopar.graph import JointGraph, OutputKind, add_call, copy_node
from autopar.passes.propagate import Assignment, batch_dim, batch_factor, resting_gradients
from autopar.placement import Partial, Replicate, Sharding, describe_sharding, is_sharded, meta_value, one_object
from autopar.plan import Plan
from autopar.rules import is_look, is_look_or_cast, is_tensor_node, tensor_inputs


def reshard(value: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Move a value from one sharding to another.  Only a marker: a later pass lowers it to collectives."""
    raise AssertionError(f"a reshard {source} -> {target} was not lowered")


def is_reshard(node: fx.Node) -> bool:
    """Whether a node is a reshard."""
    return node.op == "call_function" and node.target is reshard


def communicates(node: fx.Node) -> bool:
    """Whether a reshard sends anything, rather than only slicing what is whole."""
    moves = zip(node.meta["source"], node.meta["sharding"], strict=True)
    return any(now != then and type(now) is not Replicate for now, then in moves)


def insert_reshards(joint: JointGraph, assignment: Assignment, plan: Plan) -> fx.GraphModule:
    """Copy the joint graph with a reshard at every mismatch.

    Each node of the copy has `meta["sharding"]` (a tuple of them for several outputs) and, for calls, `meta["cuts"]`
    and `meta["rule"]`.
    A reshard that several ops need is made once, just before the first of them; the reduction of a gradient is made
    where the gradient is complete, or after the whole backward pass if the plan delays it.
    """
    return _Insertion(joint, assignment, plan).run()


class _Insertion:
    def __init__(self, joint: JointGraph, assignment: Assignment, plan: Plan) -> None:
        self.joint, self.assignment, self.plan = joint, assignment, plan
        self.analysis = analyse(joint)
        self.batch = batch_factor(joint, self.analysis)
        pairs = zip(joint.outputs, joint.output_values, strict=True)
        self.gradients = {n for spec, n in pairs if spec.kind is OutputKind.GRADIENT and n is not None}
        self.widest = max((n.meta["val"].dtype for n in self.gradients), key=_width, default=torch.bool)
        self.graph = QuickGraph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.resharded: dict[tuple[fx.Node, Sharding], fx.Node] = {}

    def run(self) -> fx.GraphModule:
        complete = self._gradients_to_reduce()
        delays = self.plan.delay_reduction
        order = self.joint.keep(("order", delays), lambda: tuple(self._in_order()))
        for node in order:
            self.copies[node] = self._copy(node)
            if node in complete:
                self._reshard(node, complete[node], node)
        wanted = zip(self.joint.output_values, self.assignment.wanted, strict=True)
        values = tuple(None if n is None or s is None else self._reshard(n, s, n) for n, s in wanted)
        self.graph.output(values)
        return LazyGraphModule(self.joint.module, self.graph)

    def _in_order(self) -> Iterator[fx.Node]:
        """All nodes but the output, each after what it reads.

        Tracing casts all parameters before the layers run, and all gradients after them.  There, every parameter would
        be gathered before the first layer, and every gradient wait for all others: what a parameter goes through comes
        just before its first reader, what a gradient goes through on its way to rest when it can.
        """
        late, early = self._looks_at_parameters(), self._rests_of_gradients()
        done: set[fx.Node] = set()
        pending = [node for node in reversed(self.joint.module.graph.nodes) if node.op != "output"]
        while pending or late:
            if not pending or (pending[-1].op == "call_function" and pending[-1].meta["backward"]):
                pending += reversed(late)  # what the forward pass does not read
                late = {}
            node = pending.pop()
            if node in done or node in late:
                continue
            if missing := [used for used in node.all_input_nodes if used not in done]:
                late = {look: None for look in late if look not in missing}
                pending += [node, *missing]
                continue
            done.add(node)
            yield node
            pending += [n for n in node.users if n in early and done.issuperset(n.all_input_nodes)]

    def _looks_at_parameters(self) -> dict[fx.Node, None]:
        """Casts and views of parameters in the forward pass, in the graph's order."""
        found: dict[fx.Node, None] = {}
        parameters = set(self.joint.param_nodes().values())
        for node in self.joint.module.graph.nodes:
            looks = is_look_or_cast(node) and not node.meta["backward"]
            if looks and all(used in parameters or used in found for used in node.all_input_nodes):
                found[node] = None
        return found

    def _rests_of_gradients(self) -> set[fx.Node]:
        """What makes of complete gradients those that rest; none if the plan delays their reduction anyway."""
        resting = set() if self.plan.delay_reduction else resting_gradients(self.joint)
        sums = torch.ops.aten.add.Tensor
        return {n for n in resting if n.meta["backward"] and (is_look_or_cast(n) or n.target is sums)}

    def _gradients_to_reduce(self) -> dict[fx.Node, Sharding]:
        if self.plan.delay_reduction:
            return {}
        pairs = zip(self.joint.outputs, self.joint.output_values, self.assignment.wanted, strict=True)
        return {n: s for spec, n, s in pairs if spec.kind is OutputKind.GRADIENT and n is not None and s is not None}

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or node.target is operator.getitem:
            new = copy_node(self.graph, node, self.copies.__getitem__)
            new.meta["sharding"] = self.assignment.of(node)
            return new
        decided = self.assignment.nodes[node]
        needs = iter(decided.inputs)

        def bring(arg: fx.Node) -> fx.Node:
            is_tensor = isinstance(arg.meta.get("val"), torch.Tensor)
            return self._reshard(arg, next(needs), node) if is_tensor else self.copies[arg]

        new = copy_node(self.graph, node, bring)
        several = isinstance(node.meta["val"], (tuple, list))
        new.meta["sharding"] = decided.outputs if several else decided.outputs[0]
        new.meta["cuts"], new.meta["rule"] = decided.cuts, decided.rule
        return new

    def _reshard(self, value: fx.Node, target: Sharding, reader: fx.Node) -> fx.Node:
        source = self.assignment.of(value)
        if source is target or source == target:
            return self.copies[value]
        found = self.resharded.get((value, target))
        if found is None:
            found = self.resharded[value, target] = self._made_to_lie(value, source, target, reader)
        return found

    def _made_to_lie(self, value: fx.Node, source: Sharding, target: Sharding, reader: fx.Node) -> fx.Node:
        """A value that lies otherwise than its reader needs it, as it needs it."""
        if value.target is torch.ops.aten.full.default:
            return self._made_so(value, target, reader)
        if reader is not value and self._is_better_repeated(value, target):
            return self._repeat_on_whole(value, target, reader)
        mesh = self.plan.mesh
        words = describe_sharding(source, mesh), describe_sharding(target, mesh)
        # A reduction belongs to the op that leaves its result unreduced, any other reshard to its reader.
        owner = value if Partial in map(type, source) else reader
        meta = {
            "val": value.meta["val"],
            "module": owner.meta["module"],
            "backward": reader.meta["backward"],
            "source": source,
            "sharding": target,
        }
        dtype = self._summed_in(value) if owner is value else value.meta["val"].dtype
        operand = self._cast(self.copies[value], dtype, {**meta, "sharding": source})
        meta["val"] = operand.meta["val"]
        moved = add_call(self.graph, reshard, (operand, *words), {}, meta)
        return self._cast(moved, value.meta["val"].dtype, meta)

    def _made_so(self, value: fx.Node, target: Sharding, reader: fx.Node) -> fx.Node:
        """A constant as its reader needs it: made anew, which moves nothing."""
        meta = {**value.meta, "module": reader.meta["module"], "backward": reader.meta["backward"], "sharding": target}
        meta |= {"cuts": (None,) * self.plan.mesh.num_axes, "rule": self.assignment.nodes[value].rule}
        return add_call(self.graph, value.target, value.args, dict(value.kwargs), meta)

    def _summed_in(self, value: fx.Node) -> torch.dtype:
        """The dtype in which an unreduced value is summed: its own, or that in which it will rest if it no longer
        carries the batch, so that it is a gradient in the making, and rests in a wider one.

        Most such gradients are cast before they are summed (see `propagate`).  This is for those that something still
        happens to, such as the backward of a lookup whose rows are the same for the whole batch.
        """
        narrow: torch.dtype = value.meta["val"].dtype
        if not narrow.is_floating_point or not value.meta["backward"] or self.widest.itemsize <= narrow.itemsize:
            return narrow
        if batch_dim(self.analysis, self.batch, value) is not None:
            return narrow
        reached, stack = {value}, [value]
        while stack:
            new = set(stack.pop().users) - reached
            reached |= new
            stack += new
        rests: list[torch.dtype] = [node.meta["val"].dtype for node in reached & self.gradients]
        return max([narrow, *rests], key=_width)

    def _cast(self, copy: fx.Node, dtype: torch.dtype, meta: dict[str, Any]) -> fx.Node:
        """A copied node in another dtype, if it has not got it already."""
        value = copy.meta["val"]
        if value.dtype == dtype:
            return copy
        meta = {**meta, "val": meta_value(tuple(value.shape), dtype), "cuts": (), "rule": None}
        return add_call(self.graph, torch.ops.aten._to_copy.default, (copy,), {"dtype": dtype}, meta)

    def _is_better_repeated(self, value: fx.Node, target: Sharding) -> bool:
        """Whether to gather what a call reads rather than its result: of a view, whose source others may share, and of
        cheap calls that read a quarter less and more than what they give."""
        if not self._may_repeat(value, target):
            return False
        # Positions and masks are small, and mostly shared as they are.
        floats = bool(value.meta["val"].is_floating_point())
        given = value.meta["val"].nbytes
        return is_relayout(value) or (floats and 4 * self._bytes_read(value, target, set()) <= 3 * given)

    def _may_repeat(self, value: fx.Node, target: Sharding) -> bool:
        decided = self.assignment.nodes[source_of(value)[0]]
        cheap = is_relayout(value) or is_spread(value) or is_pointwise(value)
        return cheap and decided.rule is not None and gathers(self.assignment.of(value), target)

    def _bytes_read(self, value: fx.Node, target: Sharding, seen: set[tuple[fx.Node, Sharding]]) -> int:
        """Bytes to gather for a call to be repeated, those that its operands read where they are repeated, too."""
        total = 0
        for operand, wanted in zip(tensor_inputs(value), self._wanted_whole(value, target), strict=True):
            key = (operand, wanted)
            is_there = self.assignment.of(operand) == wanted or key in self.resharded or key in seen
            if not is_there and operand.target is not torch.ops.aten.full.default:
                seen.add(key)
                own = operand.meta["val"].nbytes
                repeats = len(seen) < _MOST_REPEATED and self._may_repeat(operand, wanted)
                total += min(own, self._bytes_read(operand, wanted, seen)) if repeats else own
        return total

    def _wanted_whole(self, value: fx.Node, target: Sharding) -> list[Sharding]:
        """How a call needs its operands to give its result as `target` has it, which is cut along fewer axes."""
        kept = self._kept_axes(value, target)
        return [
            one_object(tuple([p if same else Replicate() for p, same in zip(needed, kept, strict=True)]))
            for needed in self.assignment.nodes[value].inputs
        ]

    def _kept_axes(self, value: fx.Node, target: Sharding) -> list[bool]:
        """For each axis, whether a value lies as `target` has it."""
        return [now == then for now, then in zip(self.assignment.of(value), target, strict=True)]

    def _repeat_on_whole(self, value: fx.Node, target: Sharding, reader: fx.Node) -> fx.Node:
        """Gather what a call reads and call it again, so that less is gathered, or one gather serves all views."""
        decided = self.assignment.nodes[value]
        needs = iter(self._wanted_whole(value, target))
        args, kwargs = fx.map_arg(
            (value.args, value.kwargs),
            lambda n: self._reshard(n, next(needs), reader) if is_tensor_node(n) else self.copies[n],
        )
        kept = self._kept_axes(value, target)
        cuts = tuple(cut if same else None for cut, same in zip(decided.cuts, kept, strict=True))
        meta = {**value.meta, "backward": reader.meta["backward"], "sharding": target, "cuts": cuts}
        return add_call(self.graph, value.target, args, kwargs, {**meta, "rule": decided.rule})


_MOST_REPEATED = 16
"""How many values to look at before a gather stays where it is."""


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def gathers(source: Sharding, target: Sharding) -> bool:
    """Whether a reshard only makes cut axes whole."""
    return all(
        now == then or (is_sharded(now) and type(then) is Replicate) for now, then in zip(source, target, strict=True)
    )


def is_relayout(node: fx.Node) -> bool:
    """Whether a call shows all of its one input's elements in another shape or order."""
    if not is_look(node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    return bool(node.meta["val"].numel() == tensor_inputs(node)[0].meta["val"].numel())


def is_spread(node: fx.Node) -> bool:
    """Whether a call repeats elements, or rows, of what it reads."""
    return node.target in (torch.ops.aten.expand.default, torch.ops.autopar.take_rows.default)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call makes each element of its one result of those at the same place."""
    op = node.target
    tagged = isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags and not op._schema.is_mutable
    return tagged and isinstance(node.meta["val"], torch.Tensor)
