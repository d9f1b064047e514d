"""Which moves take a value from one sharding to another.

A reshard is made one mesh axis at a time, by the first of these that is possible:

1. replicate -> shard: slice locally, which is free and makes everything after it smaller;
2. partial -> shard: reduce-scatter;
3. partial -> replicate: all-reduce;
4. shard -> another dim: all-to-all, or a gather and a slice where a dim does not divide; shard -> the same dim by other
   grains: an all-to-all of what lies elsewhere;
5. shard -> replicate: all-gather.

Of several axes the innermost, whose link is the fastest, takes first what makes a value smaller and last what makes it
larger.  A dim cut by several axes with the same split nests them in mesh order, so the innermost must be gathered first
and cut last; where that forbids every step, the innermost axis in the way is gathered and cut again later.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

from autopar.mesh import Mesh
from autopar.placement import (
    Partial,
    Placement,
    Replicate,
    Sharding,
    is_sharded,
    is_uneven,
    shard_dim,
    shard_grain,
    shard_split,
)

Step = tuple[int, Placement, Placement]
"""One move: mesh axis, placement before, placement after."""


@functools.lru_cache(maxsize=4096)
def route(source: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The moves that take `source` to `target`, with uneven cuts gathered first and made last, unless they stay: in
    between, every rank's part has the same size.  What a parameter's parts lack of whole grains comes before all else
    and goes after it, while the parts are smallest."""
    axes = range(mesh.num_axes)
    regrained = [_is_regrained(a, source, target) for a in axes]
    start = tuple(target[a] if regrained[a] and shard_grain(target[a]) > 1 else source[a] for a in axes)
    end = tuple(source[a] if regrained[a] and start[a] == source[a] else target[a] for a in axes)
    moves = [start[a] != end[a] for a in axes]
    gathered = tuple(Replicate() if moves[a] and is_uneven(start, a, shape, mesh) else start[a] for a in axes)
    waiting = tuple(p if isinstance(p, Partial) else Replicate() for p in gathered)
    last = tuple(waiting[a] if moves[a] and is_uneven(end, a, shape, mesh) else end[a] for a in axes)
    stops = [source, start, gathered, last, end, target]
    return tuple(step for before, after in itertools.pairwise(stops) for step in steps(before, after, mesh))


def _is_regrained(axis: int, source: Sharding, target: Sharding) -> bool:
    """Whether an axis cuts one dim alone, before and after, and only the grain changes."""
    now, then = source[axis], target[axis]
    if not (is_sharded(now) and is_sharded(then)) or now == then or not is_same_cut(now, then):
        return False
    others = (p for sharding in (source, target) for a, p in enumerate(sharding) if a != axis)
    return not any(is_sharded(p) and shard_dim(p) == shard_dim(now) for p in others)


def is_same_cut(now: Placement, then: Placement) -> bool:
    """Whether two placements cut the same factor of a dim, though perhaps by other grains."""
    return shard_dim(now) == shard_dim(then) and shard_split(now) == shard_split(then)


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
        (lambda now, then: is_sharded(now) and is_sharded(then) and _is_direct(now, then), outward),
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


def _is_direct(now: Placement, then: Placement) -> bool:
    """Whether one collective takes a cut to another: of another dim, or of the same parts by other grains."""
    return shard_dim(now) != shard_dim(then) or (is_same_cut(now, then) and now != then)


def _in_order(state: Sharding, mesh: Mesh) -> bool:
    """Whether the cuts of each dim nest: a split counts whole parts that the axes with a smaller split make."""
    made = [(shard_dim(p), shard_split(p), n) for p, n in zip(state, mesh.sizes, strict=True) if is_sharded(p)]
    return all(split % math.prod(n for d, s, n in made if d == dim and s < split) == 0 for dim, split, _ in made)
