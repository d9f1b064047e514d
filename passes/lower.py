"""Lower reshards to collectives and local slices.

Preserves numerics up to the order in which a collective sums.  A reshard is lowered one mesh axis at a time, by the
first of these that is possible:

1. replicate -> shard: slice locally, which is free and makes everything after it smaller;
2. partial -> shard: reduce-scatter;
3. partial -> replicate: all-reduce;
4. shard -> another dim: all-to-all, or a gather and a slice where a dim does not divide;
5. shard -> replicate: all-gather.

Of several axes the innermost, whose link is the fastest, takes first what makes a value smaller and last what makes it
larger.  A dim cut by several axes with the same split nests them in mesh order, so the innermost must be gathered first
and cut last; where that forbids every step, the innermost axis in the way is gathered and cut again later.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.local_ops import drop_padding, pad_dim, take_chunk
from autopar.mesh import Mesh
from autopar.passes.localise_padding import drop_padding_of_outputs
from autopar.passes.reshard import is_reshard
from autopar.placement import (
    Partial,
    Placement,
    Replicate,
    Sharding,
    cuts,
    is_sharded,
    is_uneven,
    meta_value,
    shard_dim,
    shard_split,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def lower_reshards(module: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """Replace every reshard by the collectives and slices that carry it out."""
    graph = module.graph
    ranks = {n.meta["axis"]: n for n in graph.find_nodes(op="placeholder") if "axis" in n.meta}
    for node in [n for n in graph.nodes if is_reshard(n)]:
        with graph.inserting_before(node):
            lowering = _Lowering(graph, node, mesh, ranks)
            lowering.pad_uneven()
            for step in route(node.meta["source"], node.meta["sharding"], node.meta["global_shape"], mesh):
                lowering.apply(step)
            lowering.drop_padding()
        node.replace_all_uses_with(lowering.value)
        graph.erase_node(node)
    drop_padding_of_outputs(graph, ranks, mesh)
    return module


Step = tuple[int, Placement, Placement]
"""One move: mesh axis, placement before, placement after."""


@functools.lru_cache(maxsize=4096)
def route(source: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The moves that take `source` to `target`, with uneven cuts gathered first and made last, unless they stay: in
    between, every rank's part has the same size."""
    axes = range(mesh.num_axes)
    moves = [source[a] != target[a] for a in axes]
    gathered = tuple(Replicate() if moves[a] and is_uneven(source, a, shape, mesh) else source[a] for a in axes)
    waiting = tuple(p if isinstance(p, Partial) else Replicate() for p in gathered)
    last = tuple(waiting[a] if moves[a] and is_uneven(target, a, shape, mesh) else target[a] for a in axes)
    stops = [source, gathered, last, target]
    return tuple(step for before, after in itertools.pairwise(stops) for step in steps(before, after, mesh))


def steps(source: Sharding, target: Sharding, mesh: Mesh) -> Iterator[Step]:
    """The moves that take `source` to `target`, one mesh axis at a time."""
    state = list(source)

    def free(axis: int, placement: Placement) -> bool:
        """Whether no inner axis nests inside this cut of the dim."""
        return not any(state[inner] == placement for inner in range(axis + 1, mesh.num_axes))

    def next_inside(axis: int, placement: Placement) -> bool:
        """Whether the outer axes that make the same cut are those that are to make it in the end."""
        return all((state[outer] == placement) == (target[outer] == placement) for outer in range(axis))

    def legal(axis: int) -> bool:
        now, then = state[axis], target[axis]
        if is_sharded(now) and not free(axis, now):
            return False
        after = (*state[:axis], then, *state[axis + 1 :])
        return not is_sharded(then) or (free(axis, then) and next_inside(axis, then) and _in_order(after, mesh))

    outward = range(mesh.num_axes)[::-1]
    orders: tuple[tuple[Callable[[Placement, Placement], bool], range], ...] = (
        (lambda now, then: isinstance(now, Replicate) and is_sharded(then), outward),
        (lambda now, then: isinstance(now, Partial) and is_sharded(then), outward),
        (lambda now, then: isinstance(now, Partial) and isinstance(then, Replicate), outward),
        (lambda now, then: is_sharded(now) and is_sharded(then) and shard_dim(now) != shard_dim(then), outward),
        (lambda now, then: is_sharded(now) and isinstance(then, Replicate), outward[::-1]),
    )
    while tuple(state) != target:
        moves = ((a, target[a]) for kind, axes in orders for a in axes if kind(state[a], target[a]) and legal(a))
        move = next(moves, None)
        if move is None:
            blocked = {p for a in outward if state[a] != target[a] for p in (state[a], target[a]) if is_sharded(p)}
            inner = max(a for a in range(mesh.num_axes) if state[a] in blocked)
            move = (inner, Replicate())
        axis, then = move
        assert not isinstance(then, Partial), f"cannot make {state[axis]} partial"
        yield axis, state[axis], then
        state[axis] = then


def _in_order(state: Sharding, mesh: Mesh) -> bool:
    """Whether the cuts of each dim nest: a split counts whole parts that the axes with a smaller split make."""
    made = [(shard_dim(p), shard_split(p), n) for p, n in zip(state, mesh.sizes, strict=True) if is_sharded(p)]
    return all(split % math.prod(n for d, s, n in made if d == dim and s < split) == 0 for dim, split, _ in made)


class _Lowering:
    """Carries one reshard's value through its steps."""

    def __init__(self, graph: fx.Graph, node: fx.Node, mesh: Mesh, ranks: dict[str, fx.Node]) -> None:
        self.graph, self.node, self.mesh, self.ranks = graph, node, mesh, ranks
        self.value: fx.Node = node.args[0]  # type: ignore[assignment]
        self.state: list[Placement] = list(node.meta["source"])
        self.global_shape: tuple[int, ...] = node.meta["global_shape"]
        self.dtype = node.meta["val"].dtype
        self.padded: dict[int, int] = {}
        """Mesh axis -> the dim that it cut here, with padding until all is done."""
        self.short: dict[int, int] = {}
        """Mesh axis -> the dim that it has just cut, of which the last ranks have less or nothing."""

    def apply(self, step: Step) -> None:
        axis, now, then = step
        self._pad(self.short)
        self.padded |= self.short
        self.short.clear()
        if self.mesh.sizes[axis] == 1:
            self.state[axis] = then  # alone on its axis, a rank holds the whole either way
        elif isinstance(now, Replicate):
            self._slice(axis, then)
        elif isinstance(now, Partial) and is_sharded(then):
            self._reduce_scatter(axis, now, then)
        elif isinstance(now, Partial):
            self._collective(c10d.all_reduce.default, (now.reduce_op,), axis, self.shape, self.shape)
        elif is_sharded(then) and (self._uneven(axis, now) or self._uneven(axis, then)):
            self._all_gather(axis, now)
            self.state[axis] = Replicate()
            self._slice(axis, then)
        elif is_sharded(then):
            self._all_to_all(axis, now, then)
        else:
            self._all_gather(axis, now)
        self.state[axis] = then
        if self.value is not self.node.args[0]:
            self.value.meta["sharding"] = tuple(self.state)

    def pad_uneven(self) -> None:
        """Bring uneven parts to one size, so that every rank's part has the shape that the graph says."""
        self._pad({axis: shard_dim(now) for axis, now in enumerate(self.state) if self._uneven(axis, now)})

    def _pad(self, dims: dict[int, int]) -> None:
        for dim in dims.values():
            self._emit(pad_dim, (self.value, dim, self.shape[dim]), self.shape)
            self.value.meta["sharding"] = tuple(self.state)

    def drop_padding(self) -> None:
        """Give the parts that were cut here their true sizes."""
        for axis, dim in self.padded.items():
            n, rank = self.mesh.sizes[axis], self.ranks[self.mesh.names[axis]]
            self._emit(drop_padding, (self.value, dim, self.global_shape[dim], n, rank), self.shape)
            self.value.meta["sharding"] = tuple(self.state)

    # -- bookkeeping

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.value.meta["val"].shape)

    def _emit(self, op: Any, args: tuple[Any, ...], shape: tuple[int, ...], **kwargs: Any) -> None:
        meta = {
            "val": meta_value(shape, self.dtype),
            "module": self.node.meta["module"],
            "backward": self.node.meta["backward"],
            "sharding": None,
            "global_shape": self.global_shape,
            "layout": True,
        }
        self.value = add_call(self.graph, op, args, kwargs, meta)

    def _reshape(self, *shape: int) -> None:
        if self.shape != shape:
            self._emit(aten.reshape.default, (self.value, list(shape)), shape)

    def _permute(self, *order: int) -> None:
        if order != tuple(sorted(order)):
            self._emit(aten.permute.default, (self.value, list(order)), tuple(self.shape[i] for i in order))

    def _collective(
        self, op: Any, args: tuple[Any, ...], axis: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> None:
        if op is not c10d.all_reduce.default:  # which copies its input; the others insist on a dense one
            self._emit(aten.contiguous.default, (self.value,), before)
        self._emit(op, (self.value, *args, self.mesh.names[axis]), after)
        self.value.meta["bytes"] = max(math.prod(before), math.prod(after)) * self.dtype.itemsize
        self.value.meta["layout"] = False
        self._emit(c10d.wait_tensor.default, (self.value,), after)

    def _split(self, axis: int, placement: Placement) -> tuple[int, int]:
        """Dim and local split of a cut along `axis`, beside those that the value has along the others."""
        sharding = (*self.state[:axis], placement, *self.state[axis + 1 :])
        (made,) = (cut for cut in cuts(sharding, self.mesh) if cut.axis == axis)
        return made.dim, made.split

    def _uneven(self, axis: int, placement: Placement) -> bool:
        sharding = (*self.state[:axis], placement, *self.state[axis + 1 :])
        return is_uneven(sharding, axis, self.global_shape, self.mesh)

    # -- moves

    def _slice(self, axis: int, then: Placement) -> None:
        dim, split = self._split(axis, then)
        n, rank, shape = self.mesh.sizes[axis], self.ranks[self.mesh.names[axis]], self.shape
        local = (*shape[:dim], -(-shape[dim] // n), *shape[dim + 1 :])
        if self._uneven(axis, then):
            self._emit(take_chunk, (self.value, dim, n, rank), local)
            self.short[axis] = dim
        elif split == 1:
            start = self._number(operator.mul, rank, local[dim])
            self._emit(
                aten.slice.Tensor, (self.value, dim, start, self._number(operator.add, start, local[dim])), local
            )
        else:
            inner = shape[dim] // (split * n)
            self._reshape(*shape[:dim], split, n, inner, *shape[dim + 1 :])
            self._emit(aten.select.int, (self.value, dim + 1, rank), (*shape[:dim], split, inner, *shape[dim + 1 :]))
            self._reshape(*local)

    def _number(self, op: Any, left: Any, right: Any) -> fx.Node:
        meta = {
            "val": 0,
            "module": self.node.meta["module"],
            "backward": self.node.meta["backward"],
            "sharding": None,
            "global_shape": None,
        }
        return add_call(self.graph, op, (left, right), {}, meta)

    def _reduce_scatter(self, axis: int, now: Partial, then: Placement) -> None:
        dim, split = self._split(axis, then)
        n, shape = self.mesh.sizes[axis], self.shape
        uneven = self._uneven(axis, then)
        if uneven:
            padded = (*shape[:dim], -(-shape[dim] // n) * n, *shape[dim + 1 :])
            self._emit(pad_dim, (self.value, dim, padded[dim]), padded)
            shape = padded
        local = self._to_front(dim, split, n)
        front = self.shape
        self._collective(
            c10d.reduce_scatter_tensor.default, (now.reduce_op, n), axis, front, (front[0] // n, *front[1:])
        )
        self._reshape(*local)
        if uneven:
            self.padded[axis] = dim

    def _to_front(self, dim: int, split: int, n: int) -> tuple[int, ...]:
        """Bring the n parts of a cut to the front of dim 0; returns the shape of one part in its proper layout."""
        shape = self.shape
        local = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])
        if dim == 0 and split == 1:
            return local
        before, inner, after = math.prod(shape[:dim]), shape[dim] // (split * n), math.prod(shape[dim + 1 :])
        self._reshape(before, split, n, inner, after)
        self._permute(2, 0, 1, 3, 4)
        self._reshape(n * before, split, inner, after)
        return local

    def _from_front(self, dim: int, split: int, n: int, part: tuple[int, ...]) -> None:
        """Inverse: n parts of shape `part` lie one after another along dim 0; join them along `dim`."""
        if dim == 0 and split == 1:
            self._reshape(n * part[0], *part[1:])
            return
        before, inner, after = math.prod(part[:dim]), part[dim] // split, math.prod(part[dim + 1 :])
        self._reshape(n, before, split, inner, after)
        self._permute(1, 2, 0, 3, 4)
        # Dense, as the traced value is: a reshape alone may give a view, and attention kernels want the last dim's
        # stride 1.
        self._emit(aten.contiguous.default, (self.value,), self.shape)
        self._reshape(*part[:dim], part[dim] * n, *part[dim + 1 :])

    def _all_gather(self, axis: int, now: Placement) -> None:
        dim, split = self._split(axis, now)
        n, part = self.mesh.sizes[axis], self.shape
        uneven = self._uneven(axis, now)
        if not part:
            raise AssertionError("a scalar has no dim to gather")
        self._collective(c10d.all_gather_into_tensor.default, (n,), axis, part, (n * part[0], *part[1:]))
        self._from_front(dim, split, n, part)
        if uneven:
            whole = (*part[:dim], self.global_shape[dim], *part[dim + 1 :])
            self._emit(aten.slice.Tensor, (self.value, dim, 0, whole[dim]), whole)

    def _all_to_all(self, axis: int, now: Placement, then: Placement) -> None:
        n = self.mesh.sizes[axis]
        dim, split = self._split(axis, then)
        part = self._to_front(dim, split, n)
        front = self.shape
        counts = [front[0] // n] * n
        self._collective(c10d.all_to_all_single.default, (counts, counts), axis, front, front)
        self.state[axis] = Replicate()
        dim, split = self._split(axis, now)
        self._from_front(dim, split, n, part)
