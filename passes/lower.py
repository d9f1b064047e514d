"""Lower reshards to collectives and local slices.

Preserves numerics up to the order in which a collective sums.  Which moves a reshard takes, `moves.py` says.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.local_ops import chunk_range, drop_padding, overlaps, pad_dim, take_chunk
from autopar.mesh import Mesh
from autopar.passes.localise_padding import drop_padding_of_outputs, valid_part, without_ones
from autopar.passes.moves import Step, is_same_cut, route
from autopar.passes.reshard import reshard
from autopar.placement import (
    DimCut,
    Partial,
    Placement,
    Replicate,
    Sharding,
    cut_along,
    is_sharded,
    is_uneven,
    local_shape,
    meta_value,
    replicated,
    shard,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def lower_reshards(module: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """Replace every reshard by the collectives and slices that carry it out."""
    graph = module.graph
    ranks = {n.meta["axis"]: n for n in graph.find_nodes(op="placeholder") if "axis" in n.meta}
    for node in graph.find_nodes(op="call_function", target=reshard):
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


class _Lowering:
    """Carries one reshard's value through its steps."""

    def __init__(self, graph: fx.Graph, node: fx.Node, mesh: Mesh, ranks: dict[str, fx.Node]) -> None:
        self.graph, self.node, self.mesh, self.ranks = graph, node, mesh, ranks
        self.value: fx.Node = node.args[0]  # type: ignore[assignment]
        self.state: list[Placement] = list(node.meta["source"])
        self.global_shape: tuple[int, ...] = node.meta["global_shape"]
        self.dtype = node.meta["val"].dtype
        self.padded: dict[int, Placement] = {}
        """Mesh axis -> the cut that it made here, with padding until all is done."""
        self.short: dict[int, Placement] = {}
        """Mesh axis -> the cut that it has just made, of which the last ranks have less or nothing."""
        self._lies: tuple[tuple[int, ...], Sharding] | None = None
        """Shape and sharding of what is being made, where they are not the reshard's and parts differ in size."""

    def apply(self, step: Step) -> None:
        axis, now, then = step
        self._pad(self.short)
        self.padded |= self.short
        self.short.clear()
        if self.mesh.sizes[axis] == 1:
            self.state[axis] = then  # alone on its axis, a rank holds the whole either way
        elif type(now) is Replicate:  # by type, as `is_sharded`
            self._slice(axis, then)
        elif type(now) is Partial and is_sharded(then):
            self._reduce_scatter(axis, now, then)
        elif type(now) is Partial:
            self._collective(c10d.all_reduce.default, (now.reduce_op,), axis, self.shape, self.shape)
        elif is_sharded(then) and is_same_cut(now, then):
            self._regrain(axis, now, then)
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
        self._pad({axis: now for axis, now in enumerate(self.state) if self._uneven(axis, now)})

    def _pad(self, made: dict[int, Placement]) -> None:
        for axis, placement in made.items():
            cut = self._cut(axis, placement)
            args = (self.value, cut.dim, self.shape[cut.dim], *without_ones(cut.split))
            self._emit(pad_dim, args, self.shape)
            self.value.meta["sharding"] = tuple(self.state)

    def drop_padding(self) -> None:
        """Give the parts that were cut here their true sizes."""
        for axis in self.padded:
            rank = self.ranks[self.mesh.names[axis]]
            args = valid_part(tuple(self.state), axis, self.global_shape, self.mesh, rank)
            self._emit(drop_padding, (self.value, *args), self.shape)
            self.value.meta["sharding"] = tuple(self.state)

    # -- bookkeeping

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.meta["val"].shape)

    def _emit(self, op: Any, args: tuple[Any, ...], shape: tuple[int, ...], **kwargs: Any) -> None:
        meta = {
            "val": meta_value(shape, self.dtype),
            "module": self.node.meta["module"],
            "backward": self.node.meta["backward"],
            "sharding": self._lies[1] if self._lies else None,
            "global_shape": self._lies[0] if self._lies else self.global_shape,
            "layout": True,
        }
        self.value = add_call(self.graph, op, args, kwargs, meta)

    def _lie(self, shape: tuple[int, ...], axis: int, dim: int, grain: int) -> None:
        """Say of the values that follow how `axis` cuts them, whatever the other axes do."""
        self._lies = shape, (*replicated(self.mesh)[:axis], shard(dim, grain=grain), *replicated(self.mesh)[axis + 1 :])

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
        self._start(op, args, axis, before, after)

    def _start(
        self, op: Any, args: tuple[Any, ...], axis: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> None:
        self._emit(op, (self.value, *args, self.mesh.names[axis]), after)
        self.value.meta["bytes"] = max(math.prod(before), math.prod(after)) * self.dtype.itemsize
        self.value.meta["layout"] = False
        self._emit(c10d.wait_tensor.default, (self.value,), after)

    def _cut(self, axis: int, placement: Placement) -> DimCut:
        """A cut along `axis`, beside those that the value has along the others."""
        return cut_along(axis, (*self.state[:axis], placement, *self.state[axis + 1 :]), self.mesh)

    def _uneven(self, axis: int, placement: Placement) -> bool:
        sharding = (*self.state[:axis], placement, *self.state[axis + 1 :])
        return is_uneven(sharding, axis, self.global_shape, self.mesh)

    # -- moves

    def _slice(self, axis: int, then: Placement) -> None:
        cut, n, shape = self._cut(axis, then), self.mesh.sizes[axis], self.shape
        dim, split, rank = cut.dim, cut.split, self.ranks[self.mesh.names[axis]]
        local = (*shape[:dim], self._padded_size(cut, n) // n, *shape[dim + 1 :])
        if self._uneven(axis, then):
            self._emit(take_chunk, (self.value, dim, n, rank, *without_ones(split, cut.grain)), local)
            self.short[axis] = then
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

    def _padded_size(self, cut: DimCut, n: int) -> int:
        """The size of a dim so padded that n ranks get equal parts of it."""
        unit = cut.split * cut.grain
        return -(-self.shape[cut.dim] // (unit * n)) * unit * n

    def _number(self, op: Any, *args: Any, value: Any = 0) -> fx.Node:
        meta = {
            "val": value,
            "module": self.node.meta["module"],
            "backward": self.node.meta["backward"],
            "sharding": None,
            "global_shape": None,
        }
        return add_call(self.graph, op, args, {}, meta)

    def _reduce_scatter(self, axis: int, now: Partial, then: Placement) -> None:
        cut, n, shape = self._cut(axis, then), self.mesh.sizes[axis], self.shape
        dim, split = cut.dim, cut.split
        uneven = self._uneven(axis, then)
        if uneven:
            padded = (*shape[:dim], self._padded_size(cut, n), *shape[dim + 1 :])
            self._emit(pad_dim, (self.value, dim, padded[dim], *without_ones(split)), padded)
        local = self._to_front(dim, split, n)
        front = self.shape
        self._collective(
            c10d.reduce_scatter_tensor.default, (now.reduce_op, n), axis, front, (front[0] // n, *front[1:])
        )
        self._reshape(*local)
        if uneven:
            self.padded[axis] = then

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
        cut, n, part = self._cut(axis, now), self.mesh.sizes[axis], self.shape
        dim, split = cut.dim, cut.split
        if not part:
            raise AssertionError("a scalar has no dim to gather")
        self._collective(c10d.all_gather_into_tensor.default, (n,), axis, part, (n * part[0], *part[1:]))
        self._from_front(dim, split, n, part)
        if self._uneven(axis, now):
            self._cut_off(dim, split, axis)

    def _cut_off(self, dim: int, split: int, axis: int) -> None:
        """Of a dim that was gathered with padding, or of each of the parts that it consists of, what is there."""
        shape = self.shape
        state = (*self.state[:axis], Replicate(), *self.state[axis + 1 :])
        size = local_shape(self.global_shape, state, self.mesh)[dim]
        if split > 1:
            self._reshape(*shape[:dim], split, shape[dim] // split, *shape[dim + 1 :])
        at, parts = (dim + 1, self.shape) if split > 1 else (dim, shape)
        kept = (*parts[:at], size // split, *parts[at + 1 :])
        self._emit(aten.slice.Tensor, (self.value, at, 0, kept[at]), kept)
        self._reshape(*shape[:dim], size, *shape[dim + 1 :])

    def _all_to_all(self, axis: int, now: Placement, then: Placement) -> None:
        n = self.mesh.sizes[axis]
        cut = self._cut(axis, then)
        part = self._to_front(cut.dim, cut.split, n)
        front = self.shape
        counts = [front[0] // n] * n
        self._collective(c10d.all_to_all_single.default, (counts, counts), axis, front, front)
        self.state[axis] = Replicate()
        cut = self._cut(axis, now)
        self._from_front(cut.dim, cut.split, n, part)

    def _regrain(self, axis: int, now: Placement, then: Placement) -> None:
        """Exchange what lies on other ranks when a dim is dealt out by another grain; parts keep their true sizes."""
        have, want, n = self._cut(axis, now), self._cut(axis, then), self.mesh.sizes[axis]
        rank, dim, split = self.ranks[self.mesh.names[axis]], have.dim, have.split
        if self._uneven(axis, now):
            args = valid_part(tuple(self.state), axis, self.global_shape, self.mesh, rank)
            self._emit(drop_padding, (self.value, *args), self.shape)
            self.value.meta["sharding"] = tuple(self.state)
        others = (*self.state[:axis], Replicate(), *self.state[axis + 1 :])
        size = local_shape(self.global_shape, others, self.mesh)[dim] // split
        sent, received = (
            self._number(overlaps, size, n, rank, *grains, value=overlaps(size, n, 0, *grains))
            for grains in ((have.grain, want.grain), (want.grain, have.grain))
        )
        shape, got = self.shape, chunk_range(size // want.grain, n, 0)[1] * want.grain
        before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        held = shape[dim] // split
        # On each rank this dim has another length, so that it is never named.
        self._lie((before, split, size, after), axis, 2, have.grain)
        self._emit(aten.reshape.default, (self.value, [before, split, -1, after]), (before, split, held, after))
        self._lie((size, before, split, after), axis, 0, have.grain)
        self._permute(2, 0, 1, 3)
        self._emit(aten.contiguous.default, (self.value,), self.shape)
        self._lie((size, before, split, after), axis, 0, want.grain)
        self._start(c10d.all_to_all_single.default, (received, sent), axis, self.shape, (got, before, split, after))
        self._lie((before, split, size, after), axis, 2, want.grain)
        self._permute(1, 2, 0, 3)
        self._lies = None
        local = (*shape[:dim], split * got, *shape[dim + 1 :])
        self._emit(aten.reshape.default, (self.value, [*local[:dim], -1, *local[dim + 1 :]]), local)
        if self._uneven(axis, then):
            self.short[axis] = then
