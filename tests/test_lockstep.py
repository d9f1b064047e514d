"""The lockstep executor, and cutting and joining of tensors, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.errors import PlanError, VerificationError
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.mesh import Mesh
from autopar.placement import Partial, Replicate, Shard, Sharding, shard
from autopar.program import LocalGraph, collectives_of
from autopar.runtime.lockstep import ExecutedCollective, run_lockstep
from autopar.runtime.sharding import shard_tensor, unshard

C10D = torch.ops._c10d_functional
GRID = Mesh(("dp", "tp"), (2, 2))
ROW = Mesh(("dp",), (4,))


def graph_of(num_inputs: int, body: Callable[..., Any]) -> LocalGraph:
    """A graph written by hand: `body(call, *placeholders)` adds nodes with `call(target, *args)`."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(num_inputs)]
    outputs = body(lambda target, *args: graph.call_function(target, args), *placeholders)
    graph.output(tuple(outputs))
    for node in graph.nodes:
        node.meta.update(module="block.mlp", backward=False, bytes=0)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return LocalGraph(
        module,
        tuple(GraphInput(InputKind.INPUT, str(i)) for i in range(num_inputs)),
        tuple(GraphOutput(OutputKind.OUTPUT, str(i)) for i in range(len(outputs))),
        (None,) * num_inputs,
        (None,) * len(outputs),
    )


def run_one(
    body: Callable[..., Any], inputs: Sequence[Tensor], mesh: Mesh
) -> tuple[list[Tensor], list[ExecutedCollective]]:
    """Run a graph of one input and one output."""
    result = run_lockstep(
        graph_of(1, lambda call, x: [call(C10D.wait_tensor.default, body(call, x))]), mesh, [[x] for x in inputs]
    )
    return [values[0] for values in result.outputs], result.collectives


SHARDINGS: list[Sharding] = [
    (Replicate(), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(0), Shard(0)),
    (shard(0, 3), Replicate()),
    (Replicate(), shard(0, 6)),
    (shard(0, 3), shard(0, 3)),
    (shard(0, 2), Shard(0)),
    (Shard(0), shard(0, 2)),
    (Shard(0), shard(0, 6)),
    (shard(0, 6), shard(0, 2)),
    (Partial("sum"), Shard(0)),
    (shard(0, 2), Partial("sum")),
]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_parts_join_to_the_whole(sharding: Sharding) -> None:
    full = torch.randn(24, 5, dtype=torch.float64)
    locals_ = [shard_tensor(full, sharding, GRID, rank) for rank in range(4)]
    assert torch.equal(unshard(locals_, sharding, GRID, full.shape), full)


@pytest.mark.parametrize("size", range(10))
def test_uneven_dims_are_cut_as_chunk_does(size: int) -> None:
    full = torch.arange(size * 3.0).reshape(size, 3)
    locals_ = [shard_tensor(full, (Shard(0),), ROW, rank) for rank in range(4)]
    for rank, piece in enumerate(full.chunk(4)):
        assert torch.equal(locals_[rank], piece)
    assert torch.equal(unshard(locals_, (Shard(0),), ROW, full.shape), full)


def test_split_is_read_in_the_global_dim() -> None:
    full = torch.arange(24)
    outer, inner = 2, 3  # dim = (outer 2·2, inner 3·2): axis dp cuts the outer factor, tp the inner one
    sharding = (Shard(0), shard(0, 4))
    whole = full.reshape(outer, 2, 2, inner)
    for rank in range(4):
        dp, tp = GRID.coordinate(rank)
        assert torch.equal(shard_tensor(full, sharding, GRID, rank), whole[dp, :, tp].reshape(-1))
    swapped = (shard(0, 4), Shard(0))
    for rank in range(4):
        dp, tp = GRID.coordinate(rank)
        assert torch.equal(shard_tensor(full, swapped, GRID, rank), whole[tp, :, dp].reshape(-1))


def test_splits_without_an_order_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the split 3 of axis 'tp' on dim 0 must be a multiple of 2"):
        shard_tensor(torch.zeros(24), (Shard(0), shard(0, 3)), GRID, 0)


def test_differing_replicas_are_refused() -> None:
    copies = [torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(3) + 1e-3]
    with pytest.raises(VerificationError, match=r"positions 0 and 1 of axis 'tp' should hold equal copies.*0\.001"):
        unshard(copies, (Partial("max"), Replicate()), GRID, (3,))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_all_reduce(op: str, axis: str) -> None:
    xs = [torch.randn(3, 2, dtype=torch.float64) for _ in range(4)]
    outputs, executed = run_one(lambda call, x: call(C10D.all_reduce.default, x, op, axis), xs, GRID)
    reduce = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}[op]
    for group in GRID.groups(axis):
        for rank in group:
            torch.testing.assert_close(
                outputs[rank], reduce(torch.stack([xs[r] for r in group]), 0), rtol=0, atol=1e-14
            )
    assert executed == [ExecutedCollective("all_reduce", axis, 3 * 2 * 8)]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_all_gather_and_reduce_scatter(axis: str) -> None:
    xs = [torch.randn(4, 2, dtype=torch.float64) for _ in range(4)]
    gathered, gathers = run_one(lambda call, x: call(C10D.all_gather_into_tensor.default, x, 2, axis), xs, GRID)
    scattered, scatters = run_one(lambda call, x: call(C10D.reduce_scatter_tensor.default, x, "sum", 2, axis), xs, GRID)
    for group in GRID.groups(axis):
        for position, rank in enumerate(group):
            assert torch.equal(gathered[rank], torch.cat([xs[r] for r in group]))
            assert torch.equal(scattered[rank], sum(xs[r] for r in group).chunk(2)[position])  # type: ignore[union-attr]
    assert gathers == [ExecutedCollective("all_gather", axis, 8 * 2 * 8)]
    assert scatters == [ExecutedCollective("reduce_scatter", axis, 4 * 2 * 8)]


def test_all_to_all_transposes_blocks() -> None:
    xs = [torch.arange(8) + 100 * rank for rank in range(4)]
    outputs, _ = run_one(lambda call, x: call(C10D.all_to_all_single.default, x, [2] * 4, [2] * 4, "dp"), xs, ROW)
    for rank in range(4):
        assert torch.equal(outputs[rank], torch.cat([xs[r][2 * rank : 2 * rank + 2] for r in range(4)]))


def test_column_row_parallel_mlp() -> None:
    x, up, down = (torch.randn(*s, dtype=torch.float64) for s in [(8, 4), (4, 6), (6, 4)])

    def body(call: Any, x: Any, up: Any, down: Any) -> Any:
        hidden = call(torch.ops.aten.relu.default, call(torch.ops.aten.mm.default, x, up))
        partial = call(torch.ops.aten.mm.default, hidden, down)
        return [call(C10D.wait_tensor.default, call(C10D.all_reduce.default, partial, "sum", "tp"))]

    shardings: list[Sharding] = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Replicate(), Shard(0))]
    inputs = [
        [shard_tensor(t, s, GRID, rank) for t, s in zip((x, up, down), shardings, strict=True)] for rank in range(4)
    ]
    result = run_lockstep(graph_of(3, body), GRID, inputs)
    joined = unshard([values[0] for values in result.outputs], shardings[0], GRID, (8, 4))
    torch.testing.assert_close(joined, (x @ up).relu() @ down, rtol=0, atol=1e-12)


def test_bytes_claimed_equal_bytes_run() -> None:
    def body(call: Any, x: Any) -> Any:
        gathered = call(C10D.wait_tensor.default, call(C10D.all_gather_into_tensor.default, x, 4, "dp"))
        return [call(C10D.wait_tensor.default, call(C10D.reduce_scatter_tensor.default, gathered, "sum", 4, "dp"))]

    graph = graph_of(1, body)
    for node in graph.module.graph.nodes:
        node.meta["bytes"] = 8 * 2 * 8
    result = run_lockstep(graph, ROW, [[torch.randn(2, 2, dtype=torch.float64)] for _ in range(4)])
    claimed = [ExecutedCollective(c.kind, c.axis, c.num_bytes) for c in collectives_of(graph.module.graph)]
    assert result.collectives == claimed


def test_wrong_shape_claim_is_found() -> None:
    graph = graph_of(1, lambda call, x: [call(torch.ops.aten.neg.default, x)])
    graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)[0].meta["val"] = torch.empty(
        3, 3
    )
    xs = [[torch.ones(2, 3)] for _ in range(4)]
    with pytest.raises(
        VerificationError, match=r"node 'neg_default' \(module 'block.mlp'\) on rank 0: .*f32\[3, 3\].*f32\[2, 3\]"
    ):
        run_lockstep(graph, ROW, xs)
    run_lockstep(graph, ROW, xs, check_shapes=False)


def test_uneven_part_is_a_legal_shape() -> None:
    graph = graph_of(1, lambda call, x: [call(torch.ops.aten.neg.default, x)])
    full = torch.randn(7, 2)
    for node in graph.module.graph.nodes:
        node.meta.update(val=torch.empty(2, 2), global_shape=(7, 2), sharding=(Shard(0),))
    result = run_lockstep(graph, ROW, [[shard_tensor(full, (Shard(0),), ROW, rank)] for rank in range(4)])
    assert torch.equal(unshard([values[0] for values in result.outputs], (Shard(0),), ROW, full.shape), -full)


def test_failing_node_is_named() -> None:
    graph = graph_of(1, lambda call, x: [call(torch.ops.aten.view.default, x, [5])])
    with pytest.raises(
        VerificationError, match=r"(?s)node 'view_default' \(module 'block.mlp'\) failed: .*f32\[2, 2\]"
    ):
        run_lockstep(graph, ROW, [[torch.ones(2, 2)] for _ in range(4)])


def test_ranks_that_bring_different_shapes_are_refused() -> None:
    graph = graph_of(1, lambda call, x: [call(C10D.all_reduce.default, x, "sum", "dp")])
    with pytest.raises(VerificationError, match="ranks bring different tensors to one collective"):
        run_lockstep(graph, ROW, [[torch.ones(2 + rank // 3)] for rank in range(4)])
