"""Reshards lowered to collectives and slices: the value survives any move, by no more collectives than it takes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from one_op import parts_of
from torch import fx, nn

from autopar.errors import PlanError
from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.passes.localise import localise
from autopar.passes.lower import lower_reshards
from autopar.passes.moves import steps
from autopar.passes.propagate import Assignment, NodeSharding
from autopar.passes.reshard import insert_reshards
from autopar.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    cuts,
    is_sharded,
    is_uneven,
    local_shape,
    shard,
    shard_dim,
    shard_grain,
)
from autopar.plan import Plan
from autopar.program import Collective, LocalGraph, collectives_of
from autopar.runtime.lockstep import ExecutedCollective, run_lockstep
from autopar.runtime.sharding import unshard

R, P, S0, S1 = Replicate(), Partial("sum"), Shard(0), Shard(1)
ROW, GRID, OBLONG, CUBE = (Mesh(("a", "b", "c")[: len(sizes)], sizes) for sizes in [(4,), (2, 2), (2, 3), (2, 2, 2)])
SHAPE = (48, 24, 2)


def lowered(shape: tuple[int, ...], source: Sharding, target: Sharding, mesh: Mesh) -> LocalGraph:
    """The graph that moves its only input from one sharding to another."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.empty(shape, dtype=torch.float64, device="meta"), "module": "", "backward": False}
    graph.output((x,))
    inputs, outputs = (GraphInput(InputKind.INPUT, "x"),), (GraphOutput(OutputKind.OUTPUT, "x"),)
    joint = JointGraph(fx.GraphModule(nn.Module(), graph), inputs, outputs, {})
    assignment = Assignment({x: NodeSharding((), (source,))}, (target,))
    module = insert_reshards(joint, assignment, Plan("by hand", mesh, ((),) * mesh.num_axes, {}))
    module = lower_reshards(localise(module, mesh), mesh)
    module.graph.lint()
    ranks = tuple(GraphInput(InputKind.RANK, name) for name in mesh.names)
    return LocalGraph(module, (*inputs, *ranks), outputs, (source, *(None for _ in ranks)), (target,))


def move(shape: tuple[int, ...], source: Sharding, target: Sharding, mesh: Mesh) -> list[Collective]:
    """Move a tensor on all ranks, check what arrives, and return the collectives that it took."""
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    graph = lowered(shape, source, target, mesh)
    parts = parts_of(whole, source, mesh)
    run = run_lockstep(graph, mesh, [[parts[rank], *mesh.coordinate(rank)] for rank in range(mesh.num_ranks)])
    found = unshard([values[0] for values in run.outputs], target, mesh, shape)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    claimed = list(collectives_of(graph.module.graph))
    assert [ExecutedCollective(c.kind, c.axis, c.num_bytes) for c in claimed] == run.collectives
    (result,) = graph.module.graph.output_node().args[0]  # type: ignore[misc]
    assert result.meta["sharding"] == target
    return claimed


def is_legal(shape: tuple[int, ...], sharding: Sharding, mesh: Mesh) -> bool:
    """Whether the cuts have an order and divide the dims."""
    local = list(shape)
    try:
        for cut in cuts(sharding, mesh):
            parts = cut.split * mesh.sizes[cut.axis]
            if local[cut.dim] % parts:
                return False
            local[cut.dim] //= mesh.sizes[cut.axis]
    except PlanError:
        return False
    return True


def shardings(mesh: Mesh, splits: tuple[int, ...], partial: bool = False) -> list[Sharding]:
    """Every legal sharding of a tensor of `SHAPE` made of these placements."""
    placements: list[Placement] = [R, *([P] if partial else []), *(shard(d, k) for d in (0, 1) for k in splits)]
    return [s for s in itertools.product(placements, repeat=mesh.num_axes) if is_legal(SHAPE, s, mesh)]


def reaches(source: Sharding, target: Sharding) -> bool:
    """A value may stay partial, but not become so."""
    return all(a == b or not isinstance(b, Partial) for a, b in zip(source, target, strict=True))


def pairs(mesh: Mesh, splits: tuple[int, ...] = (1, 2, 4)) -> Iterator[tuple[Sharding, Sharding]]:
    sources = shardings(mesh, splits, partial=True)
    return ((a, b) for a, b in itertools.product(sources, sources) if reaches(a, b))


@pytest.mark.parametrize("mesh", [ROW, GRID, OBLONG, CUBE], ids=str)
def test_every_move_ends_where_it_should_through_legal_states(mesh: Mesh) -> None:
    moves = list(pairs(mesh, (1, 2) if mesh is CUBE else (1, 2, 4)))
    for source, target in random.Random(1).sample(moves, min(len(moves), 4000)):
        state = list(source)
        for axis, now, then in itertools.islice(steps(source, target, mesh), 20):
            assert state[axis] == now
            state[axis] = then
            assert is_legal(SHAPE, tuple(state), mesh), f"{source} -> {target} passes through {state}"
        assert tuple(state) == target, f"{source} -> {target} stops at {state}"


def grained(mesh: Mesh) -> list[Sharding]:
    """Shardings of a tensor of [36, 30]: whole, unreduced, cut as PyTorch does, and by grains that no axis divides."""
    placements = [R, P, S0, S1, shard(0, 2), shard(0, 3), shard(0, grain=12), shard(0, 3, 4), shard(0, 2, 6)]
    return [s for s in itertools.product(placements, repeat=mesh.num_axes) if fits((36, 30), s, mesh)]


def fits(shape: tuple[int, ...], sharding: Sharding, mesh: Mesh) -> bool:
    """Whether each dim that is cut by grains, or does not divide, is cut along one axis only."""
    try:
        local_shape(shape, sharding, mesh)
    except PlanError:
        return False
    once = [a for a in range(mesh.num_axes) if is_uneven(sharding, a, shape, mesh) or shard_grain(sharding[a]) > 1]
    dims = [shard_dim(p) for p in sharding if is_sharded(p)]
    return all(is_uneven(sharding, a, shape, mesh) and dims.count(shard_dim(sharding[a])) == 1 for a in once)


@pytest.mark.parametrize("mesh", [Mesh(("a",), (2,)), ROW, Mesh(("a",), (5,)), GRID, Mesh(("a", "b"), (2, 4))], ids=str)
def test_moves_between_grains_keep_the_value(mesh: Mesh) -> None:
    every = [(a, b) for a, b in itertools.product(grained(mesh), repeat=2) if reaches(a, b) and a != b]
    assert any(shard_grain(p) > 1 for source, _ in every for p in source)
    for source, target in random.Random(0).sample(every, min(200, len(every))):
        move((36, 30), source, target, mesh)


def test_other_grains_move_what_lies_elsewhere_only() -> None:
    """12 heads of 4 rows on 8 ranks: from 6 rows each to 2 heads each, which the last two ranks have none of."""
    mesh = Mesh(("tp",), (8,))
    for dim, split in ((0, 1), (1, 1), (0, 3)):
        shape = (48 * split, 5) if dim == 0 else (5, 48)
        there = move(shape, (shard(dim, split),), (shard(dim, split, 4),), mesh)
        back = move(shape, (shard(dim, split, 4),), (shard(dim, split),), mesh)
        assert [(c.kind, c.num_bytes) for c in (*there, *back)] == [("all_to_all", 8 * split * 5 * 8)] * 2


@pytest.mark.parametrize(("mesh", "num_moves"), [(ROW, 60), (GRID, 150), (OBLONG, 150), (CUBE, 150)], ids=str)
def test_random_moves_keep_the_value(mesh: Mesh, num_moves: int) -> None:
    every = list(pairs(mesh, (1, 2) if mesh is CUBE else (1, 2, 4)))
    for source, target in random.Random(0).sample(every, min(num_moves, len(every))):
        move(SHAPE, source, target, mesh)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("target", [(R, R), (S0, R), (R, S0), (S1, S0), (S0, S0), (shard(0, 4), S0)], ids=str)
def test_maxima_and_minima_combine(op: str, target: Sharding) -> None:
    graph = lowered(SHAPE, (Partial(op), Partial(op)), target, GRID)
    parts = list(torch.randn(4, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    run = run_lockstep(graph, GRID, [[parts[rank], *GRID.coordinate(rank)] for rank in range(4)])
    found = unshard([values[0] for values in run.outputs], target, GRID, SHAPE)
    assert torch.equal(found, torch.stack(parts).amax(0) if op == "max" else torch.stack(parts).amin(0))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("mesh", [ROW, Mesh(("a",), (3,))], ids=str)
def test_dims_that_do_not_divide(size: int, mesh: Mesh) -> None:
    for source, target in itertools.product([(R,), (P,), (S0,), (S1,)], [(R,), (S0,), (S1,)]):
        move((size, 5), source, target, mesh)


@pytest.mark.parametrize("inner", [R, P, S1, shard(1, 2)], ids=str)
@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_dim_that_does_not_divide_beside_another_axis(size: int, inner: Placement) -> None:
    mesh = Mesh(("a", "b"), (4, 2))
    cut = inner if is_sharded(inner) else R
    targets = [(S0, cut), (R, cut), (S0, R)]
    for source, target in itertools.product([(R, inner), (P, inner), (S0, inner), (S1, R)], targets):
        move((size, 8), source, target, mesh)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "expected"),
    [
        (ROW, (R,), (S0,), []),
        (ROW, (R,), (shard(0, 3),), []),
        (ROW, (P,), (R,), ["all_reduce"]),
        (ROW, (P,), (S0,), ["reduce_scatter"]),
        (ROW, (P,), (shard(1, 2),), ["reduce_scatter"]),
        (ROW, (S0,), (S1,), ["all_to_all"]),
        (ROW, (S0,), (R,), ["all_gather"]),
        (ROW, (shard(1, 2),), (R,), ["all_gather"]),
        (GRID, (R, R), (S0, S1), []),
        (GRID, (P, P), (R, R), ["all_reduce", "all_reduce"]),
        (GRID, (P, R), (S0, S1), ["reduce_scatter"]),
        (GRID, (P, P), (S0, S0), ["reduce_scatter", "reduce_scatter"]),
        (GRID, (S0, S0), (R, R), ["all_gather", "all_gather"]),
        (GRID, (S0, S0), (S0, R), ["all_gather"]),
        (GRID, (S0, S0), (S0, S1), ["all_to_all"]),
        (GRID, (S0, S1), (R, S1), ["all_gather"]),
        (GRID, (S0, R), (R, S0), ["all_gather"]),
        (GRID, (P, S0), (R, S1), ["all_reduce", "all_to_all"]),
        (GRID, (R, P), (S0, P), []),
        (CUBE, (S0, S0, P), (S0, S0, S1), ["reduce_scatter"]),
    ],
    ids=str,
)
def test_no_more_collectives_than_needed(mesh: Mesh, source: Sharding, target: Sharding, expected: list[str]) -> None:
    assert sorted(c.kind for c in move(SHAPE, source, target, mesh)) == expected


@pytest.mark.parametrize(
    ("source", "target"), [((S1,), (R,)), ((S0,), (R,)), ((S1,), (S0,)), ((shard(0, 2),), (R,))], ids=str
)
def test_what_is_gathered_is_dense(source: Sharding, target: Sharding) -> None:
    # Also where each rank brings one position: attention kernels, say, misread a last dim of another stride than 1.
    graph = lowered((8, 4), source, target, ROW)
    parts = parts_of(torch.randn(8, 4, dtype=torch.float64), source, ROW)
    run = run_lockstep(graph, ROW, [[part, rank] for rank, part in enumerate(parts)])
    assert all(values[0].is_contiguous() for values in run.outputs)


BYTES = math.prod(SHAPE) * 8


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((P, R), (R, S0), [BYTES // 2]),  # sliced first
        ((P, P), (S0, S0), [BYTES, BYTES // 2]),
        ((S0, S0), (R, R), [BYTES // 2, BYTES]),
        ((P, S0), (S1, R), [BYTES // 2, BYTES // 2]),  # reduced while small, gathered when cut
    ],
    ids=str,
)
def test_bytes_moved(source: Sharding, target: Sharding, expected: list[int]) -> None:
    assert [c.num_bytes for c in move(SHAPE, source, target, GRID)] == expected
