"""What of a schedule a plan decides: how far ahead parameters are gathered, and what hides collectives."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from autopar.cluster import Cluster
from autopar.compiler import DEEP_PREFETCH, Compiler
from autopar.graph import JointGraph
from autopar.layout_search import LayoutSearch, Option
from autopar.layouts import find_layouts
from autopar.models import find_model
from autopar.passes.pipeline import prefetched, rewrite
from autopar.plan import Plan
from autopar.planner import plan_named
from autopar.signature import split_call
from autopar.whole_plan import even_splits

CLUSTER = Cluster.parse("2x8 A100-80GB @ 400gbit")


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    call = find_model("llama3-8b", 16, dtype=torch.bfloat16, num_layers=6)
    compiler = Compiler(call.model, (2, 8), CLUSTER)
    args, kwargs = split_call(call.example_inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiler.trace(args, kwargs, train=True, whole=False)
    return compiler


@pytest.fixture(scope="module")
def joint(compiler: Compiler) -> JointGraph:
    assert compiler._traced is not None
    return compiler._traced[1]


def spread(joint: JointGraph, what: str) -> Plan:
    """The plan that cuts the layers' `what`, and lets parameters rest cut along both axes."""
    layout = next(one for one in find_layouts(joint, (2, 8), 8) if what in one.name)
    search = LayoutSearch(joint, layout, lambda plan, splits: pytest.fail("nothing is priced"))
    return search.plan(dict.fromkeys(search.parts, Option("spread", None)))


@pytest.mark.parametrize("name", ["zero3", "fsdp+tp", "spread"])
def test_a_greater_depth_gives_what_the_passes_would(joint: JointGraph, name: str) -> None:
    plan = spread(joint, "in groups") if name == "spread" else plan_named(name, joint, (2, 8), 8)
    before = rewrite(joint, plan, check=False)
    deep = rewrite(joint, replace(plan, prefetch=8), check=False)
    assert list(before.lines()) != list(deep.lines())
    again = prefetched(before, 8)
    assert again is not None
    assert list(again.lines()) == list(deep.lines())
    assert prefetched(again, 8) is None


def test_gathers_start_ahead_where_that_saves_time(compiler: Compiler, joint: JointGraph) -> None:
    plan = plan_named("zero3", joint, (2, 8), 8)
    scheduled = compiler.scheduled(joint, plan, even_splits(joint.runs))
    assert scheduled.plan == replace(plan, prefetch=DEEP_PREFETCH)
    assert scheduled.simulation == compiler.price(joint, scheduled.plan).simulation
    before = compiler.price(joint, plan).simulation
    assert scheduled.simulation.step_time_s < before.step_time_s
    assert scheduled.simulation.memory.total <= before.memory.total


def test_they_do_not_where_they_hold_up_what_is_waited_for(compiler: Compiler, joint: JointGraph) -> None:
    plan = spread(joint, "q_proj")
    before = compiler.price(joint, plan).simulation
    assert compiler.price(joint, replace(plan, prefetch=DEEP_PREFETCH)).simulation.step_time_s > before.step_time_s
    scheduled = compiler.scheduled(joint, plan, even_splits(joint.runs))
    assert (scheduled.plan, scheduled.simulation) == (plan, before)


def test_gradients_are_computed_as_soon_as_they_can_be_where_links_take_longer() -> None:
    call = find_model("llama3-8b", 4, seq=512, dtype=torch.float32, num_layers=2)
    compiler = Compiler(call.model, (2, 2), Cluster.parse("2x2 cpu @ 100mbit"))
    args, kwargs = split_call(call.example_inputs)
    joint = compiler.trace(args, kwargs, train=True)
    layouts = [one for one in find_layouts(joint, (2, 2), 2) if one.mesh.num_axes == 2]
    layout = next(one for one in layouts if one.name == "tensor, batch between")
    search = LayoutSearch(joint, layout, lambda plan, splits: pytest.fail("nothing is priced"))
    plan = search.uniform("kept")
    before = compiler.price(joint, plan).simulation
    scheduled = compiler.scheduled(joint, plan, ())
    assert not scheduled.plan.overlap
    assert scheduled.simulation == compiler.price(joint, scheduled.plan).simulation
    assert scheduled.simulation.step_time_s < before.step_time_s
    assert scheduled.simulation.memory.total <= before.memory.total


def test_a_plan_that_the_user_brings_stays_as_it_is(compiler: Compiler, joint: JointGraph) -> None:
    plan = plan_named("zero3", joint, (2, 8), 8)
    given = compiler.given(joint, plan)
    assert given.prefetch == plan.prefetch
    planned = Compiler(compiler.model, (2, 8), CLUSTER, strategy="zero3").plan_within(
        joint, CLUSTER.device.memory_bytes
    )
    assert planned.prefetch == DEEP_PREFETCH
    assert planned.step_time_s < given.step_time_s
