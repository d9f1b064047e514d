"""The named strategies: meshes, what they cut, and the words for it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Mlp, TinyGpt, token_batch

import autopar
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.describe import describe_params
from autopar.graph import JointGraph
from autopar.normalise import normalise
from autopar.planner import plan_named
from autopar.strategies import STRATEGIES, canonical_name, strategy_mesh
from autopar.trace import trace


@pytest.fixture(scope="module")
def gpt() -> JointGraph:
    return normalise(trace(TinyGpt(), token_batch(8), {}))


@pytest.mark.parametrize(
    ("strategy", "sizes", "ranks_per_node", "expected"),
    [
        ("ddp", (4,), 4, "dp=4"),
        ("zero3", (2, 4), 4, "dp=8"),
        ("tp", (2, 2), 4, "tp=4"),
        ("fsdp+tp", (2, 4), 4, "dp=2×tp=4"),
        ("fsdp+tp", (16,), 8, "dp=2×tp=8"),
        ("hsdp", (16,), 16, "dp=4×fsdp=4"),
        ("hsdp", (2, 2, 3), 12, "dp=4×fsdp=3"),
        ("fsdp+tp", (6,), 6, "dp=3×tp=2"),
    ],
)
def test_meshes(strategy: str, sizes: tuple[int, ...], ranks_per_node: int, expected: str) -> None:
    assert str(strategy_mesh(strategy, sizes, ranks_per_node)) == expected


def test_a_prime_number_of_ranks_has_no_two_axes() -> None:
    with pytest.raises(
        autopar.MeshError, match=r"hsdp needs two mesh axes, and 5 ranks do not factor; use zero3 or tp"
    ):
        strategy_mesh("hsdp", (5,), 5)


def test_names() -> None:
    assert canonical_name("fsdp") == "zero3"
    with pytest.raises(autopar.InputError, match=r"no strategy 'megatron'; choose one of auto, replicate"):
        canonical_name("megatron")


def test_tensor_parallelism_finds_megatrons_cut_from_the_rules(gpt: JointGraph) -> None:
    words = describe_params(gpt, plan_named("tp", gpt, (4,), 4))
    block = {name.removeprefix("blocks.1."): word for name, word in words.items() if name.startswith("blocks.1.")}
    assert block == {
        "norm1.weight": "replicate", "norm1.bias": "replicate", "norm2.weight": "replicate", "norm2.bias": "replicate",
        "qkv.weight": "column@tp", "qkv.bias": "column@tp", "out.weight": "row@tp", "out.bias": "replicate",
        "up.weight": "column@tp", "up.bias": "column@tp", "down.weight": "row@tp", "down.bias": "replicate",
    }  # fmt: skip
    assert words["tokens.weight"] == "vocab@tp"
    assert words["norm.weight"] == "replicate"


def test_sharding_for_storage_is_written_with_its_axis(gpt: JointGraph) -> None:
    words = describe_params(gpt, plan_named("fsdp+tp", gpt, (2, 2), 4))
    assert words["blocks.0.up.weight"] == "shard(1)@dp, column@tp"
    words = describe_params(gpt, plan_named("zero3", gpt, (4,), 4))
    assert words["blocks.0.up.weight"] == "shard(0)@dp"


def test_auto_takes_the_fastest_candidate_that_fits_and_says_why_others_lost() -> None:
    model, inputs = TinyGpt(), token_batch(2)
    compiler = Compiler(model, (4,), Cluster.parse("4 cpu"), None)
    joint = compiler.trace(inputs, {}, train=True)
    plan = compiler.plan(joint)
    report = plan.report
    assert report is not None
    assert {c.strategy for c in report.candidates} == {*STRATEGIES, "auto"}
    assert plan.strategy == min(report.candidates, key=lambda c: c.step_time_s).strategy
    assert all(c.verdict for c in report.candidates)
    assert plan.graph_fingerprint == joint.fingerprint()
    # A budget that the fastest does not fit: the next that does, and never over the budget.
    peaks = sorted(p.simulation.memory.total for p in compiler.candidates(joint))
    previous = float("inf")
    for peak in peaks:
        compiler.mem_gb = peak / 2**30
        chosen = compiler.plan(joint).report
        assert chosen is not None
        assert chosen.memory.total <= peak
        assert chosen.step_time_s <= previous
        previous = chosen.step_time_s
    compiler.mem_gb = (peaks[0] - 1) / 2**30
    with pytest.raises(autopar.InfeasibleBudgetError) as caught:
        compiler.plan(joint)
    compiler.mem_gb = caught.value.smallest_feasible_gb
    assert compiler.plan(joint).report


def test_a_model_without_a_sequence_has_no_sequence_to_cut() -> None:
    joint = normalise(trace(Mlp(), (torch.randn(8, 12),), {}))
    plain, with_sequence = (plan_named(s, joint, (4,), 4) for s in ("tp", "tp+sp"))
    assert plain.factors == with_sequence.factors


def test_tensor_parallelism_sees_parameters_through_the_casts_of_autocast() -> None:
    model, inputs = TinyGpt(), token_batch(8)
    compiler = Compiler(model, (4,), Cluster.parse("4 cpu"), None)
    plain = plan_named("tp", compiler.trace(inputs, {}, train=True), (4,), 4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = plan_named("tp", compiler.trace(inputs, {}, train=True), (4,), 4)
    assert any(plain.factors)
    assert cast.factors == plain.factors
