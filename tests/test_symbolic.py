"""Costs as expressions: exact at the traced sizes, right at others, and the size at which two plans cost the same."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.cost_model.collectives import wire_bytes
from autopar.cost_model.layout import layouts_of
from autopar.cost_model.ops import node_bytes, node_flops, tensor_bytes
from autopar.cost_model.products import constant, exactly, product, symbol, to_sympy, total
from autopar.cost_model.simulate import simulate
from autopar.cost_model.symbolic import saved_blocks, symbolic_cost
from autopar.errors import InputError
from autopar.graph import JointGraph
from autopar.passes.pipeline import rewrite
from autopar.plan import Plan
from autopar.plan_file import plan_from_json, plan_to_json
from autopar.planner import plan_named
from autopar.program import LocalProgram
from tests.tiny_models import TinyGpt, token_batch

STRATEGIES = ("replicate", "ddp", "zero1", "zero3", "hsdp", "tp", "tp+sp", "fsdp+tp")


@functools.cache
def traced(batch: int = 8, seq: int = 10) -> JointGraph:
    compiler = Compiler(TinyGpt(vocab=40, width=24, heads=4, layers=2), (4,), Cluster.parse("4 cpu"))
    return compiler.trace(token_batch(batch, seq=seq, vocab=40), {}, True, local=False)


@functools.cache
def program_of(strategy: str, batch: int = 8, seq: int = 10) -> LocalProgram:
    joint = traced(batch, seq)
    return rewrite(joint, plan_named(strategy, joint, (4,), 2))


def counts(program: LocalProgram) -> dict[str, float]:
    """What the numeric cost model counts."""
    layouts = layouts_of(program)
    nodes = [node for graph in program.graphs for node in graph.module.graph.nodes]
    sent = dict.fromkeys(program.mesh.names, 0.0)
    for c in program.collectives():
        sent[c.axis] += wire_bytes(c.kind, program.mesh.size(c.axis), c.num_bytes)
    return {
        "flops": sum(map(node_flops, nodes)),
        "moved": sum(node_bytes(node, layouts) for node in nodes),
        "saved": sum(tensor_bytes(node.meta["val"]) for node in saved_blocks(program, layouts)),
        **sent,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exact_at_the_traced_sizes(strategy: str) -> None:
    program = program_of(strategy)
    cost = symbolic_cost(traced(), program, Cluster.parse("4 cpu"))
    known = counts(program)
    assert cost.at(cost.flops) == known["flops"] > 0
    assert cost.at(cost.moved_bytes) == known["moved"] > 0
    assert cost.at(cost.saved_bytes) == known["saved"] > 0
    assert set(cost.wire_bytes) == set(program.mesh.names)
    for axis, sent in cost.wire_bytes.items():
        assert float(cost.at(sent)) == pytest.approx(known[axis], rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_time_is_the_simulators_without_overlap(strategy: str, fused: bool) -> None:
    program, cluster = program_of(strategy), Cluster.parse("4 cpu")
    cost, simulation = symbolic_cost(traced(), program, cluster, fused=fused), simulate(program, cluster, fused=fused)
    expected = simulation.compute_s + simulation.collective_s
    assert cost.time_along("batch")(8) == pytest.approx(expected, rel=1e-12)
    assert float(cost.at(cost.time_s)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
def test_right_at_other_sizes(strategy: str) -> None:
    """The expressions of one trace are the counts of another."""
    cost = symbolic_cost(traced(), program_of(strategy), Cluster.parse("4 cpu"))
    known = counts(program_of(strategy, batch=16, seq=14))
    changed = functools.partial(cost.at, batch=16, seq=14)
    assert changed(cost.flops) == known["flops"]
    assert changed(cost.saved_bytes) == pytest.approx(known["saved"], rel=0.02)
    assert float(changed(cost.moved_bytes)) == pytest.approx(known["moved"], rel=0.02)
    for axis, sent in cost.wire_bytes.items():
        assert float(changed(sent)) == pytest.approx(known[axis], rel=0.02)


def test_sizes_have_the_names_that_people_use() -> None:
    cost = symbolic_cost(traced(), program_of("ddp"), Cluster.parse("4 cpu"))
    sizes = {"batch": 8, "seq": 10, "vocab": 40, "positions": 16, "hidden": 24, "heads": 4, "head_dim": 6, "ffn": 96}
    assert {name: cost.values.get(name) for name in sizes} == sizes
    assert cost.values["ranks_dp"] == 4
    batch, seq, hidden, ffn, vocab, heads, head_dim, ranks = (
        sympy.Symbol(name, positive=True)
        for name in ("batch", "seq", "hidden", "ffn", "vocab", "heads", "head_dim", "ranks_dp")
    )
    width = heads * head_dim
    # Two layers, forward and twice that in backward; attention: two products forward, five backward.
    dense = 6 * batch * seq * (2 * (4 * width * hidden + 2 * ffn * hidden) + vocab * hidden)
    assert sympy.expand(cost.flops - (dense + 2 * 14 * batch * seq**2 * width) / ranks) == 0


class Untied(nn.Module):
    """A head of its own, whose vocabulary only the targets share with the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 24), nn.Linear(24, 40, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten())


def test_a_heads_vocabulary_is_the_tables() -> None:
    compiler = Compiler(Untied(), (4,), Cluster.parse("4 cpu"), strategy="ddp")
    plan = compiler.plan(compiler.trace(token_batch(8, seq=10, vocab=40), {}, True, local=False))
    assert plan.cost is not None
    cost = plan.cost.symbolic()
    batch, seq, vocab, hidden, ranks = (
        sympy.Symbol(name, positive=True) for name in ("batch", "seq", "vocab", "hidden", "ranks_dp")
    )
    assert sympy.expand(cost.flops - 6 * batch * seq * vocab * hidden / ranks) == 0


def test_tensor_parallel_traffic_grows_with_the_batch_and_data_parallel_traffic_does_not() -> None:
    batch = sympy.Symbol("batch", positive=True)
    for strategy, degree in (("ddp", 0), ("zero3", 0), ("tp", 1)):
        cost = symbolic_cost(traced(), program_of(strategy), Cluster.parse("4 cpu"))
        (sent,) = cost.wire_bytes.values()
        assert sympy.degree(sent, batch) == degree


class Wide(nn.Module):
    """A wide pair of layers, for which tensor parallelism pays at small batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@functools.cache
def wide_plan(strategy: str, cluster: str = "4 cpu") -> Plan:
    compiler = Compiler(Wide(), (4,), Cluster.parse(cluster), strategy=strategy)
    return compiler.plan(compiler.trace((torch.randn(64, 256),), {}, True, local=False))


def test_break_even() -> None:
    tensor, data = wide_plan("tp"), wide_plan("ddp")
    batch = autopar.break_even(tensor, data, "batch")
    assert batch is not None
    assert 64 < batch < 1e5
    assert autopar.break_even(data, tensor, "batch") == pytest.approx(batch, rel=1e-9)
    times = [plan.cost.symbolic().time_along("batch") for plan in (tensor, data) if plan.cost is not None]
    assert times[0](batch) == pytest.approx(times[1](batch), rel=1e-9)
    assert times[0](batch / 2) < times[1](batch / 2)
    assert times[0](batch * 2) > times[1](batch * 2)


def test_break_even_meets_the_simulator() -> None:
    """Where the expressions cross, so do two simulations without overlap."""
    batch = autopar.break_even(wide_plan("tp"), wide_plan("ddp"), "batch")
    assert batch is not None

    def faster(rows: int) -> str:
        cluster, seconds = Cluster.parse("4 cpu"), {}
        for strategy in ("tp", "ddp"):
            compiler = Compiler(Wide(), (4,), cluster, strategy=strategy)
            joint = compiler.trace((torch.randn(rows, 256),), {}, True, local=False)
            simulation = simulate(rewrite(joint, plan_named(strategy, joint, (4,), 4)), cluster)
            seconds[strategy] = simulation.compute_s + simulation.collective_s
        return min(seconds, key=seconds.__getitem__)

    assert faster(4 * int(batch / 4 / 1.1)) == "tp"
    assert faster(4 * int(batch / 4 * 1.1)) == "ddp"


def test_no_break_even() -> None:
    assert autopar.break_even(wide_plan("ddp"), wide_plan("ddp"), "batch") is None
    # Both divide the batch, and ZeRO-1 takes two collectives where DDP takes one, whatever the batch.
    assert autopar.break_even(wide_plan("ddp"), wide_plan("zero1"), "batch") is None


def test_break_even_needs_costs_and_known_symbols() -> None:
    plan = wide_plan("ddp")
    with pytest.raises(InputError, match=r"the cost has no symbol 'sequence'; it has batch, .*ranks_dp"):
        autopar.break_even(plan, plan, "sequence")
    loaded = plan_from_json(plan_to_json(plan))
    assert loaded == plan
    assert loaded.cost is None
    with pytest.raises(InputError, match="the 'ddp' plan has no cost: it was loaded or written by hand"):
        autopar.break_even(plan, loaded, "batch")


def test_a_cost_is_not_part_of_a_plans_value() -> None:
    plan = wide_plan("ddp")
    assert plan.cost is not None
    assert replace(plan, cost=None) == plan
    assert "cost" not in repr(plan).split("report=")[0]
    assert plan.cost.symbolic() is plan.cost.symbolic()
    assert copy.deepcopy(plan).cost is plan.cost
    copied = pickle.loads(pickle.dumps(plan.cost))
    assert copied.symbolic().flops == plan.cost.symbolic().flops


def test_unknown_symbol() -> None:
    cost = symbolic_cost(traced(), program_of("ddp"), Cluster.parse("4 cpu"))
    with pytest.raises(InputError, match="the cost has no symbol 'depth'"):
        cost.at(cost.flops, depth=3)


def test_products_by_hand() -> None:
    a, b = symbol("a"), symbol("b")
    assert (a * b / b) == a
    assert product([a, a, constant(6)]).times(2).at({"a": 3}) == 12 * 9
    terms = total([a * b, b * a, a.times(-1)])
    assert to_sympy(terms) == 2 * sympy.Symbol("a", positive=True) * sympy.Symbol("b", positive=True) - sympy.Symbol(
        "a", positive=True
    )
    assert exactly(terms, {"a": 2, "b": 3}, 10) == terms
    assert to_sympy(exactly(terms, {"a": 2, "b": 3}, 5)).subs({"a": 2}) is not None
    assert exactly((), {}, 7) == total([constant(7)])
