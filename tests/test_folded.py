"""Prices of folded graphs beside those of the whole model's, and the plans that they stand for."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.compiler import NEAR, Compiler
from autopar.cost_model.folded import Copies
from autopar.cost_model.simulate import Simulation, simulate
from autopar.errors import InfeasibleBudgetError
from autopar.graph import JointGraph, mark_held
from autopar.normalise import normalise
from autopar.passes import coalesce
from autopar.passes.pipeline import rewrite
from autopar.plan import RECOMPUTE_LEVELS, Plan
from autopar.planner import plan_named
from autopar.randomness import replace_random_ops
from autopar.strategies import STRATEGIES
from autopar.trace import trace
from autopar.unfold import unfold
from autopar.whole_plan import Sample, Split, even_splits, folded_factors, inner_alike, stand_ins, whole_plan
from tests.tiny_models import TinyGpt

LAYERS = 9
"""Units are larger than a bucket of parameters, as they are in models that need planning."""
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Perceptron(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(1024, 4096) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def hugging_face(kind: str, **fields: Any) -> Call:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=2048, use_cache=False, **fields)
    ids = torch.empty(16, 128, dtype=torch.long)
    return transformers.AutoModelForCausalLM.from_config(config), (), {"input_ids": ids, "labels": ids}


def _gpt(dropout: float, vocab: int = 512) -> Call:
    ids = torch.empty(16, 64, dtype=torch.long)
    return TinyGpt(vocab=vocab, width=1024, heads=8, layers=LAYERS, seq=64, dropout=dropout), (ids, ids), {}


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}

MODELS: dict[str, Callable[[], Call]] = {
    "perceptron": lambda: (Perceptron(), (torch.empty(256, 1024),), {}),
    "gpt": lambda: _gpt(0.0),
    "gpt with dropout": lambda: _gpt(0.1),
    "gpt2": lambda: hugging_face("gpt2", n_embd=1024, n_head=8, n_layer=8, n_positions=128),
    "llama": lambda: hugging_face("llama", num_hidden_layers=10, **_LLAMA),
    "qwen3": lambda: hugging_face("qwen3", num_hidden_layers=8, head_dim=128, **_LLAMA),
}


@functools.cache
def graphs(name: str) -> tuple[JointGraph, JointGraph]:
    """The whole graph and the folded one."""
    return traced(MODELS[name])


def traced(build: Callable[[], Call]) -> tuple[JointGraph, JointGraph]:
    with torch.device("meta"):
        model, args, kwargs = build()
    whole, folded = (replace_random_ops(normalise(trace(model, args, kwargs, fold=fold))) for fold in (False, True))
    assert folded.runs
    assert not whole.runs
    mark_held(folded)
    return whole, folded


def prices(
    whole: JointGraph, folded: JointGraph, plan: Plan, splits: tuple[Split, ...], cluster: Cluster
) -> tuple[Simulation, Simulation]:
    """The whole program's, and what the folded one's is said to be as a whole."""
    full = simulate(rewrite(whole, whole_plan(plan, folded.runs, splits), check=False), cluster)
    return full, simulate(rewrite(folded, plan, check=False), cluster, copies=Copies.of(stand_ins(folded.runs, splits)))


def check(full: Simulation, priced: Simulation, time_within: float, peak_within: float) -> None:
    assert priced.collective_bytes == full.collective_bytes
    for kind in ("params", "optimizer"):
        assert held_at_end(priced, kind) == held_at_end(full, kind), kind
    # One bucket of small gradients may be several in the whole program, each rounded up by the allocator.
    assert held_at_end(priced, "grads") == pytest.approx(held_at_end(full, "grads"), rel=1e-3, abs=2048)
    assert priced.step_time_s == pytest.approx(full.step_time_s, rel=time_within)
    assert priced.memory.total == pytest.approx(full.memory.total, rel=peak_within)


def held_at_end(simulation: Simulation, kind: str) -> int:
    return sum(live.num_bytes for live in simulation.live_at_end if live.kind == kind)


def slow(names: Iterable[str], *longest: str) -> list[Any]:
    """Cases, of which some are for whoever has time: others are of their kind."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in longest else []) for name in names]


@pytest.mark.parametrize("name", slow(MODELS, "gpt", "qwen3"))
def test_strategies_cost_on_the_folded_graph_what_they_cost_on_the_whole_one(name: str) -> None:
    whole, folded = graphs(name)
    splits = even_splits(folded.runs)
    cluster = Cluster.parse("8xA100-80GB")
    for strategy in STRATEGIES:
        plan = plan_named(strategy, folded, (8,), 8)
        assert whole_plan(plan, folded.runs, splits) == plan_named(strategy, whole, (8,), 8)
        # Buckets of small collectives are made of other members there, which matters where gathers are awaited.
        check(*prices(whole, folded, plan, splits, cluster), 0.01 if len(plan.mesh.sizes) > 1 else 0.004, 0.005)


def test_a_slow_network_is_nearly_as_slow_on_the_folded_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "BUCKET_BYTES", 2**21)  # less than a unit has, as in large models
    whole, folded = graphs("perceptron")
    for strategy in STRATEGIES:
        plan = plan_named(strategy, folded, (2, 4), 4)
        check(*prices(whole, folded, plan, ((3, 4),), Cluster.parse("2x4 cpu @ 100mbit")), 0.01, 0.025)


def test_what_links_do_ahead_of_the_ends_they_do_once() -> None:
    """While a wide head computes, the layers beside it are gathered; those further in have no such help."""
    whole, folded = traced(lambda: _gpt(0.0, vocab=16384))
    for strategy, sizes, cluster in (("zero3", (2,), "2x1 cpu @ 100mbit"), ("fsdp+tp", (2, 4), "2x4 cpu @ 100mbit")):
        plan = plan_named(strategy, folded, sizes, sizes[-1])
        check(*prices(whole, folded, plan, even_splits(folded.runs), Cluster.parse(cluster)), 0.001, 0.025)


@pytest.mark.parametrize("name", ["perceptron", "gpt with dropout", "llama"])
def test_units_may_take_two_options_in_any_numbers(name: str) -> None:
    """The first units recompute as one, the others as another level says."""
    whole, folded = graphs(name)
    cluster = Cluster.parse("8xA100-80GB")
    draw = random.Random(name)
    (run,) = folded.runs
    inner = len(run.units) - 2
    for strategy in ("zero2", "zero3", "tp"):
        plan = plan_named(strategy, folded, (8,), 8)
        before, after = draw.sample((None, *RECOMPUTE_LEVELS), 2)
        levels = zip(run.held, (before, before, after, after), strict=True)
        plan = replace(plan, recompute={run.units[held][0]: level for held, level in levels if level})
        first = draw.randint(1, inner - 1)
        check(*prices(whole, folded, plan, ((first, inner - first),), cluster), 0.02, 0.015)


DEEP: dict[str, Callable[[], Call]] = {
    "perceptron": lambda: (Perceptron(24), (torch.empty(256, 1024),), {}),
    "gpt2": lambda: hugging_face("gpt2", n_embd=1024, n_head=8, n_layer=20, n_positions=128),
    "llama": lambda: hugging_face("llama", num_hidden_layers=20, **_LLAMA),
}


@pytest.mark.parametrize("name", slow(DEEP, "llama"))
def test_a_sample_of_units_costs_what_the_whole_program_costs(name: str) -> None:
    with torch.device("meta"):
        model, args, kwargs = DEEP[name]()
    folded = replace_random_ops(normalise(trace(model, args, kwargs, fold=True)))
    mark_held(folded)
    whole = replace(unfold(folded), folded=folded)
    (run,) = folded.runs
    inner, draw = len(run.units) - 2, random.Random(name)
    for cluster, mesh in (("2x4 A100-80GB", (2, 4)), ("8 cpu @ 100mbit", (8,))):
        for strategy in ("ddp", "zero1", "zero3", "fsdp+tp" if len(mesh) > 1 else "tp"):
            plan = plan_named(strategy, folded, mesh, mesh[-1])
            before, after = draw.choices((None, *RECOMPUTE_LEVELS), k=2)
            levels = zip(run.held, (before, before, after, after), strict=True)
            plan = replace(plan, recompute={run.units[held][0]: level for held, level in levels if level})
            first = draw.randint(1, inner - 1)
            split = ((first, inner - first),)
            sample = Sample.of(plan, folded.runs, split)
            assert [unit for units in sample.standing.values() for unit in units] == list(run.units)
            assert len(sample.standing) <= (8 if before == after else 14)
            some = replace(folded, runs=sample.runs)
            program = rewrite(
                replace(unfold(some), folded=some), whole_plan(plan, sample.runs, sample.splits), check=False
            )
            full = simulate(rewrite(whole, whole_plan(plan, folded.runs, split), check=False), Cluster.parse(cluster))
            # Buckets of small collectives have other members, and are awaited elsewhere: what products for weights
            # keep alive until then is a bucket of 8 MiB more or less.
            check(full, simulate(program, Cluster.parse(cluster), copies=Copies.of(sample.standing)), 0.01, 0.004)


@pytest.mark.parametrize("name", slow(["gpt2", "llama"], "llama"))
def test_an_unfolded_graph_is_decided_and_rewritten_as_the_folded_one(name: str) -> None:
    """And a plan that does not cut all copies of a unit alike, by itself."""
    _, folded = graphs(name)
    linked = replace(unfold(folded), folded=folded)
    alone = replace(linked, folded=None, derived={})
    for strategy in ("zero3", "tp", "tp+sp", "fsdp+tp"):
        plan = plan_named(strategy, alone, (2, 4), 4)
        assert plan_named(strategy, linked, (2, 4), 4) == plan
        copy = f"{folded.runs[0].units[3][0]}."
        uneven = tuple(tuple(ref for ref in refs if not ref.anchor.startswith(copy)) for refs in plan.factors)
        for one in dict.fromkeys((plan.factors, uneven)):
            assert (folded_factors(one, folded.runs) is None) == (one != plan.factors)
            programs = [rewrite(joint, replace(plan, factors=one), check=False) for joint in (linked, alone)]
            assert programs[0].fingerprint() == programs[1].fingerprint(), (strategy, one)


@pytest.mark.parametrize("budget", [None, 0.45])
def test_a_sample_of_units_has_the_last_word_on_a_plan(budget: float | None) -> None:
    with torch.device("meta"):
        model, args, kwargs = MODELS["perceptron"]()
    compiler = Compiler(model, (4,), Cluster.parse("4 cpu"), budget)
    whole = compiler.trace(args, kwargs, train=True, local=False)
    plan = compiler.plan(whole)
    assert not whole.runs
    assert set(plan.storage) == set(whole.param_nodes())
    assert plan.step_time_s == pytest.approx(compiler.price(whole, plan).simulation.step_time_s, rel=1e-3)
    assert plan.peak_bytes == compiler.price(whole, plan).simulation.memory.total
    folded = compiler.trace(args, kwargs, train=True, local=False, whole=False)
    assert folded.runs
    offline = compiler.plan(folded)
    assert (offline.storage, offline.factors, offline.recompute) == (plan.storage, plan.factors, plan.recompute)
    assert offline.step_time_s == plan.step_time_s
    assert plan.report is not None
    assert offline.report is not None
    assert [row.module for row in offline.report.rows] == [row.module for row in plan.report.rows]
    assert "blocks.4" in offline.explain("blocks.4")


def test_all_units_have_it_where_the_peak_of_some_is_near_the_budget() -> None:
    """Gradients that are summed over micro-steps wait in buckets, which hold others where there are fewer units."""
    with torch.device("meta"):
        model, ids = TinyGpt(vocab=8000, width=1024, layers=12), torch.zeros(8, 16, dtype=torch.long)
    cluster = Cluster.parse("2x4 A100-80GB @ 10gbit")
    compiler = Compiler(model, (2, 4), cluster, strategy="hsdp", precision="bf16", accumulate=3)
    folded = compiler.trace((ids, ids), {}, train=True, local=False, whole=False)
    assert folded.runs
    plan = compiler.plan_within(folded, cluster.device.memory_bytes)
    peak = compiler.price(compiler.unfolded(folded), plan).simulation.memory.total
    assert abs(peak - plan.peak_bytes) <= NEAR * plan.peak_bytes
    assert compiler.plan_within(folded, peak).peak_bytes <= peak
    for budget in (peak - 1, min(peak, plan.peak_bytes) - 1):
        with pytest.raises(InfeasibleBudgetError):
            compiler.plan_within(folded, budget)


def test_a_point_whose_units_take_two_options_is_reported_with_all_of_them() -> None:
    """It was priced with more units than the folded graph has, and its report is of these."""
    with torch.device("meta"):
        model, args, kwargs = MODELS["perceptron"]()
    compiler = Compiler(model, (4,), Cluster.parse("4 cpu"))
    folded = compiler.trace(args, kwargs, train=True, local=False, whole=False)
    mixed = [p for p in compiler.candidates(folded) if not all(inner_alike(p.plan, run) for run in folded.runs)]
    assert mixed
    for priced in mixed[:3]:
        plan = compiler._report(compiler._as_searched(folded, priced), [], priced.simulation.memory.total)
        assert plan.report is not None
        assert plan.peak_bytes == priced.simulation.memory.total
        counts: Counter[str] = Counter()
        for row in plan.report.rows:
            if row.module.startswith("blocks."):
                counts[row.module.partition(".")[2].partition(".")[2]] += row.count
        assert set(counts.values()) == {len(folded.runs[0].units)}


def test_an_inner_unit_stands_for_at_least_itself() -> None:
    _, folded = graphs("perceptron")
    for split in ((0, 7), (7, 0), (3, 3)):
        with pytest.raises(AssertionError, match="a split of 7 inner units"):
            Copies.of(stand_ins(folded.runs, (split,)))
