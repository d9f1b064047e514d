"""Coalesce: let small collectives travel together, since what they cost is their start.

Preserves numerics up to the order in which a collective sums.  A model has a bias or a norm for each large matrix, and
each would be a message of its own.  Collectives of one pass that agree in kind, axis, dtype and reduction become one
over a flat buffer, as long as none has to be known before the last of them can start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.placement import meta_value
from autopar.program import COLLECTIVE_KINDS, collective_kind, collective_nodes, is_collective_step
from autopar.rules import is_look_or_cast

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

SMALL_BYTES = 128 * 2**10
"""What is small where somebody waits.  Below this a GPU link is still waiting for the start (20 µs at 5 GB/s) when the
bytes are through, and Ethernet is busy with headers."""

BUCKET_BYTES = 8 * 2**20
"""How much of the parameters, and of their gradients, travels together.  Gloo sends at least two pieces per rank and
collective, and pieces of up to 1 MiB, each with a handshake; NCCL reaches most of its bandwidth here."""

FIRST_BUCKET_BYTES = 2**20
"""How much of the first ones, so that computing does not wait for many, nor the links."""


def coalesce(module: fx.GraphModule) -> fx.GraphModule:
    """Merge small collectives.

    Parameters and gradients, which can be early or late, fill buckets of up to `BUCKET_BYTES`.  What somebody waits for
    mostly finds no partner; where it does, a bucket holds no more than the largest single collective of its kind and
    pass.
    """
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    collectives = collective_nodes(graph, *_KINDS)
    largest: dict[tuple[str, bool], int] = {}
    for node, kind in collectives:
        group = (kind, node.meta["backward"])
        largest[group] = max(largest.get(group, 0), int(node.meta["bytes"]))
    buckets: list[_Bucket] = []
    open_buckets: dict[tuple[Any, ...], _Bucket] = {}
    for node, kind in collectives:
        backward = node.meta["backward"]
        before = steps_before(node) if kind == "all_gather" else None
        after = steps_after(node) if before is None else None
        early, late = before is not None, after is not None
        limit = BUCKET_BYTES if early or late else largest[kind, backward]
        if int(node.meta["bytes"]) > (limit // 2 if early or late else min(limit // 2, SMALL_BYTES)):
            continue
        # Collectives that follow each other fill different buckets, or two buckets could wait for each other.
        stage = sum(collective_kind(step) is not None for step in before or after or ())
        key = (node.target, node.args[1:], node.meta["val"].dtype, backward, early, late, stage)
        bucket = open_buckets.get(key)
        if bucket is None or not bucket.takes(node, order):
            is_first = bucket is None and (early or late)
            bucket = open_buckets[key] = _Bucket(early, late, min(limit, FIRST_BUCKET_BYTES) if is_first else limit)
            buckets.append(bucket)
        bucket.add(node, order)
    for bucket in buckets:
        if len(bucket.members) > 1:
            _merge(graph, bucket)
    return module


_KINDS = {"all_reduce", "all_gather", "reduce_scatter"}


@dataclass
class _Bucket:
    """Collectives to be merged, in program order.

    Attributes:
        early: whether they start where the first of them stood, or else as late as possible.
        late: whether nobody waits for them but the graph's output.
        limit: how many bytes it may hold.
        members: the collectives.
        num_bytes: of all.
        reader: the first reader of any result, if somebody waits.
    """

    early: bool
    late: bool
    limit: int
    members: list[fx.Node] = field(default_factory=list)
    num_bytes: int = 0
    reader: fx.Node | None = None

    def takes(self, node: fx.Node, order: dict[fx.Node, int]) -> bool:
        """Whether `node` may join: the buffer stays small, and nobody has read a result before it could start."""
        if self.num_bytes + int(node.meta["bytes"]) > self.limit:
            return False
        if self.early or self.reader is None or order[node] < order[self.reader]:
            return True
        computes = not self.reader.meta.get("layout") and collective_kind(self.reader) is None
        return computes and all(order[value] < order[self.reader] for value in node.all_input_nodes)

    def add(self, node: fx.Node, order: dict[fx.Node, int]) -> None:
        self.members.append(node)
        self.num_bytes += int(node.meta["bytes"])
        if not self.late:
            readers = [*_readers(wait_of(node)), *([self.reader] if self.reader else [])]
            self.reader = min(readers, key=order.__getitem__, default=None)

    def place(self) -> fx.Node:
        """The node before which the merged collective starts."""
        if self.early:
            return min(self.members)
        readers = [] if self.late else [reader for m in self.members for reader in _readers(wait_of(m))]
        return min([max(self.members), *readers])


def wait_of(collective: fx.Node) -> fx.Node:
    """The node that waits for a collective."""
    for user in collective.users:
        if user.target is WAIT:
            return user
    raise AssertionError(f"nobody waits for {collective}")


def _readers(value: fx.Node) -> Iterable[fx.Node]:
    """Who needs a result: its users, seen through layout steps, which can move."""
    for user in value.users:
        if user.meta.get("layout") and not _starts_collective(user):
            yield from _readers(user)
        else:
            yield user


def layout_after(value: fx.Node) -> set[fx.Node]:
    """The layout steps that bring the result of a collective into place, without those that prepare the next one."""
    found: set[fx.Node] = set()
    for user in value.users:
        if user.meta.get("layout") and not _starts_collective(user):
            found |= {user} | layout_after(user)
    return found


def _starts_collective(step: fx.Node) -> bool:
    return any(collective_kind(u) or (u.meta.get("layout") and _starts_collective(u)) for u in step.users)


def steps_before(collective: fx.Node) -> set[fx.Node] | None:
    """What lies between the graph's inputs and a collective, if that is only layout steps, with the positions that they
    slice at, and gathers along other axes: it can start at any time.  None if anything else lies between."""
    steps: set[fx.Node] = set()
    stack = list(collective.all_input_nodes)
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or node in steps:
            continue
        moves = _only_moves(node) and collective_kind(node) in (None, "all_gather")
        if not (moves or isinstance(node.meta.get("val"), int)):
            return None
        steps.add(node)
        stack += node.all_input_nodes
    return steps


def steps_after(collective: fx.Node) -> set[fx.Node] | None:
    """What lies between a collective and the graph's output, if that is only layout steps, views, casts and collectives
    along other axes: it need not be waited for before.  None if anything else reads its result."""
    steps: set[fx.Node] = set()
    stack = list(collective.users)
    while stack:
        node = stack.pop()
        if node.op == "output" or node in steps:
            continue
        if not (_only_moves(node) or is_look_or_cast(node)):
            return None
        steps.add(node)
        stack += node.users
    return steps


def _only_moves(node: fx.Node) -> bool:
    """Whether a node belongs to a collective and computes nothing of the model."""
    return bool(node.meta.get("layout")) or is_collective_step(node)


def _merge(graph: fx.Graph, bucket: _Bucket) -> None:
    place = bucket.place()
    if bucket.early:
        for node in sorted(set().union(*(steps_before(member) or () for member in bucket.members))):
            if place < node:
                place.prepend(node)
    with graph.inserting_before(place):
        results = _Flat(graph, bucket.members).run()
    for member, result in zip(bucket.members, results, strict=True):
        # Steps that stood before the place now start from a slice that comes after them.
        steps = (steps_after(member) or set()) if bucket.late else layout_after(wait_of(member))
        for step in sorted((step for step in steps if step < results[0]), reverse=True):
            results[-1].append(step)
        wait_of(member).replace_all_uses_with(result)
    for member in bucket.members:
        graph.erase_node(wait_of(member))
        graph.erase_node(member)


class _Flat:
    """One collective over a flat buffer in the place of several.

    The buffer is read as (ranks, what each rank has of every member): for a reduce-scatter the parts that go to each
    rank lie together, for a gather those that come from each.  An all-reduce has one part.
    """

    def __init__(self, graph: fx.Graph, members: list[fx.Node]) -> None:
        self.graph, self.members = graph, members
        self.kind = COLLECTIVE_KINDS[members[0].target]  # type: ignore[index]
        self.dtype = members[0].meta["val"].dtype
        self.meta = {
            "module": _common_module([m.meta["module"] for m in members]),
            "backward": members[0].meta["backward"],
            "sharding": None,
            "global_shape": None,
            "layout": True,
        }

    def run(self) -> list[fx.Node]:
        """Emit the collective; returns one node for each member's result."""
        inputs = [m.args[0] for m in self.members]
        shapes = [tuple(n.meta["val"].shape) for n in inputs]  # type: ignore[union-attr]
        num_parts = self._num_ranks() if self.kind == "reduce_scatter" else 1
        widths = [math.prod(shape) // num_parts for shape in shapes]
        rows = [
            self._emit(aten.reshape.default, (value, [num_parts, width]), (num_parts, width))
            for value, width in zip(inputs, widths, strict=True)
        ]
        total = sum(widths)
        buffer = self._emit(aten.cat.default, (rows, 1), (num_parts, total))
        received = self._num_ranks() if self.kind == "all_gather" else 1
        target, rest = self.members[0].target, self.members[0].args[1:]
        sent = self._emit(target, (buffer, *rest), (received, total))
        sent.meta.update(layout=False, bytes=sum(int(m.meta["bytes"]) for m in self.members))
        done = self._emit(WAIT, (sent,), (received, total))
        done.meta["layout"] = False
        results, start = [], 0
        for member, width in zip(self.members, widths, strict=True):
            piece = self._emit(aten.slice.Tensor, (done, 1, start, start + width), (received, width))
            shape = tuple(member.meta["val"].shape)
            result = self._emit(aten.reshape.default, (piece, list(shape)), shape)
            result.meta.update({k: wait_of(member).meta[k] for k in ("module", "sharding", "global_shape")})
            results.append(result)
            start += width
        return results

    def _num_ranks(self) -> int:
        """Ranks of the group: the argument before its name."""
        return int(self.members[0].args[-2])  # type: ignore[arg-type]

    def _emit(self, op: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> fx.Node:
        return add_call(self.graph, op, args, {}, {**self.meta, "val": meta_value(shape, self.dtype)})


def _common_module(paths: list[str]) -> str:
    """The innermost module that holds all of these."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
