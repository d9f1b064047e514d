"""Bounds on plans: none is above what the simulator says, and what they leave out is not the best."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.bounds import Bounds
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.cost_model.folded import Copies
from autopar.cost_model.optimizers import find_optimizer
from autopar.explain import CHOSEN
from autopar.graph import JointGraph
from autopar.layout_search import LayoutSearch
from autopar.layouts import MODES, find_layouts, storages
from autopar.mesh import parse_shape
from autopar.plan import Plan
from autopar.planner import plan_named
from autopar.strategies import STRATEGIES
from autopar.whole_plan import even_splits, stand_ins
from tests.tiny_models import TinyGpt

CLUSTERS = ("4xA100-80GB", "2x2 H100-80GB", "4 cpu", "2x2 cpu @ 100mbit")


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x).relu())).relu()
        return self.head(x.mean((2, 3))).square().mean()


def image() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Image(), (torch.empty(32, 3, 32, 32),)


def deep(layers: int = 9, width: int = 256) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.empty(32, 64, dtype=torch.long)
    return TinyGpt(vocab=512, width=width, heads=4, layers=layers, seq=64), (ids, ids)


@functools.cache
def traced(make: str, cluster: str) -> tuple[Compiler, JointGraph]:
    with torch.device("meta"):
        model, args = {"image": image, "deep": deep}[make]()
    # With casts of parameters and gradients, which each rank makes of what rests there.
    precision = "bf16" if "H100" in cluster else None
    compiler = Compiler(model, parse_shape("4"), Cluster.parse(cluster), precision=precision)
    return compiler, compiler.trace(args, {}, train=True, local=False, whole=False)


def bounds_of(compiler: Compiler, joint: JointGraph) -> Bounds:
    copies = Copies.of(stand_ins(joint.runs, even_splits(joint.runs)))
    return Bounds(joint, compiler.cluster, find_optimizer(compiler.optimizer), copies)


def plans(joint: JointGraph, ranks_per_node: int) -> list[Plan]:
    """The named strategies, and every layout with parameters at rest in every way."""
    found = [plan_named(name, joint, (4,), ranks_per_node) for name in STRATEGIES]
    for layout, mode in itertools.product(find_layouts(joint, (4,), ranks_per_node), MODES):
        found.append(layout.plan({path: modes[mode] for path, modes in storages(joint, layout).items()}, {}))
    return list({(p.mesh, p.factors, tuple(p.storage.items()), p.delay_reduction): p for p in found}.values())


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("make", ["image", "deep"])
def test_no_plan_undercuts_its_bounds(make: str, cluster: str) -> None:
    compiler, joint = traced(make, cluster)
    bounds, times = bounds_of(compiler, joint), []
    for plan in plans(joint, compiler.cluster.ranks_per_node)[:: 1 if make == "image" else 2]:
        simulation = compiler.price(joint, plan).simulation
        least_s = bounds.time_s(plan)
        assert 0 < least_s <= simulation.step_time_s, plan
        assert 0 < bounds.num_bytes(plan) <= simulation.memory.total, plan
        times.append(least_s / simulation.step_time_s)
    assert max(times) > 0.5  # they say something


class Parts(nn.Module):
    """Reads the halves of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weight.chunk(2)
        return (x @ first * (x @ second).sigmoid()).square().mean()


def test_a_parameter_in_parts() -> None:
    with torch.device("meta"):
        compiler = Compiler(Parts(), parse_shape("4"), Cluster.parse("4xA100-80GB"))
        joint = compiler.trace((torch.empty(8, 32),), {}, train=True, local=False)
    plan = plan_named("zero3", joint, (4,), 4)
    kept = replace(plan, storage={path: replace(rest, regather=False) for path, rest in plan.storage.items()})
    for one in (plan, kept):
        assert 0 < bounds_of(compiler, joint).num_bytes(one) <= compiler.price(joint, one).simulation.memory.total


def test_recomputing_takes_no_less_than_the_bound() -> None:
    compiler, joint = traced("deep", "4xA100-80GB")
    bounds, plan = bounds_of(compiler, joint), plan_named("zero3", joint, (4,), 4)
    for level in ("selective", "full"):
        again = replace(
            plan, recompute={unit[0]: level for run in joint.runs for unit in (run.units[i] for i in run.held)}
        )
        simulation = compiler.price(joint, again).simulation
        assert bounds.time_s(again) <= simulation.step_time_s
        assert bounds.num_bytes(again) <= simulation.memory.total


@pytest.mark.parametrize("cluster", ["4xA100-80GB", "2x2 cpu @ 100mbit"])
def test_no_plan_of_a_layout_undercuts_its_bound_within_a_budget(cluster: str) -> None:
    """Of plans with one way to rest and one level everywhere, and of some with two."""
    compiler, joint = traced("deep", cluster)
    bounds, price = bounds_of(compiler, joint), compiler._remembering(joint)
    for layout in find_layouts(joint, (4,), compiler.cluster.ranks_per_node)[::3]:
        search = LayoutSearch(joint, layout, price)
        uniform = [search.uniform(mode) for mode in search.modes]
        for option in search.choosable[::2]:
            search.simulate(option)
        search.run({part: search.choosable[i % 2 - 1] for i, part in enumerate(search.parts)})
        for simulation in [p.simulation for p in search.priced.values()]:
            budget = simulation.memory.total
            assert bounds.within_s(uniform, budget) <= simulation.step_time_s, (layout, budget)
        least = min(p.simulation.memory.total for p in search.priced.values())
        assert bounds.within_s(uniform, 10 * least) <= bounds.within_s(uniform, least // 2)
        assert bounds.within_s(uniform, 1) == float("inf")


def large(cluster: str, width: int = 1024, mem_gb: float | None = None) -> Compiler:
    with torch.device("meta"):
        model, args = deep(layers=9, width=width)
    compiler = Compiler(model, parse_shape("4"), Cluster.parse(cluster), mem_gb=mem_gb)
    compiler.trace(args, {}, train=True, local=False, whole=False)
    return compiler


@pytest.mark.parametrize("cluster", ["4xA100-80GB", "2x2 H100-80GB"])
def test_what_is_left_out_is_reported_by_its_bound_and_is_not_the_best(cluster: str) -> None:
    compiler = large(cluster)
    joint = compiler._traced[1]  # type: ignore[index]
    plan = compiler.plan(joint)
    assert plan.report is not None
    candidates = plan.report.candidates
    assert {c.strategy for c in candidates} >= set(STRATEGIES) - {plan.strategy}
    left_out = [c for c in candidates if c.is_bound]
    assert left_out
    everything = {p.plan.strategy: p.simulation for p in compiler.candidates(joint)}
    for one in left_out:
        simulation = everything[one.strategy]
        assert one.step_time_s <= simulation.step_time_s
        assert one.peak_bytes <= simulation.memory.total
        assert simulation.step_time_s >= plan.step_time_s
        assert one.verdict.startswith("at least")
        assert not one.modules
    assert next(c for c in candidates if c.verdict == CHOSEN).step_time_s == plan.step_time_s
    text = str(plan)
    assert "≥" in text
    explained = plan.explain("blocks.3")
    assert all(f"{c.strategy} on {c.mesh}: not simulated ({c.verdict})" in explained for c in left_out)


def test_what_cannot_fit_is_reported_by_the_memory_that_it_needs_at_least() -> None:
    compiler = large("4xA100-80GB", width=4096, mem_gb=20)
    joint = compiler._traced[1]  # type: ignore[index]
    plan = compiler.plan(joint)
    assert plan.report is not None
    over = [c for c in plan.report.candidates if c.is_bound and c.verdict.startswith("over the budget by at least")]
    assert {"replicate", "ddp"} <= {c.strategy for c in over}
    assert all(c.peak_bytes > 20 * 2**30 for c in over)
