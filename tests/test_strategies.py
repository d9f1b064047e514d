"""The named strategies: meshes, what they cut, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from programs import subject
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.describe import describe_params
from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.normalise import normalise
from autopar.placement import shard
from autopar.planner import plan_named, share_left_whole
from autopar.strategies import STRATEGIES, canonical_name, strategy_mesh, tensor_parallel_factors
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


class Patches(nn.Module):
    """Attention with fewer key heads than ranks, a product between two norms, and patches: what Megatron-LM's pairs
    leave whole."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.query, self.key_value, self.out = (nn.Linear(width, n) for n in (width, 2 * width // heads, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.up, self.down, self.square = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        query = self.query(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (half.unsqueeze(1) for half in self.key_value(y).chunk(2, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key.expand_as(query), value.expand_as(query))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(self.up(self.norm2(x)).relu())
        x = self.norm3(self.square(x)).mean(1)
        return torch.nn.functional.cross_entropy(self.head(x), label)


@pytest.mark.parametrize(("strategy", "sizes"), [("tp", (4,)), ("tp+sp", (4,)), ("fsdp+tp", (2, 2))])
def test_what_tensor_parallelism_would_leave_whole_is_cut_by_the_batch(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = subject(Patches(), torch.randn(8, 3, 8, 8), torch.arange(8))
    plan = ours.plan(strategy, *sizes)
    assert [ref.label for ref in plan.factors[-1]].index("batch") == len(plan.factors[-1]) - 1 > 0
    assert share_left_whole(ours.joint, plan) == 0
    assert share_left_whole(ours.joint, replace(plan, factors=(*plan.factors[:-1], plan.factors[-1][:-1]))) > 0.1
    report = ours.compare(ours.program(plan), plan, num_steps=2)
    assert report.ok, report
    words = describe_params(ours.joint, plan)
    assert [words[f"{name}.weight"].rpartition(", ")[2] for name in ("up", "down")] == ["column@tp", "row@tp"]


@pytest.mark.parametrize("strategy", ["tp", "tp+sp", "fsdp+tp"])
def test_where_megatrons_pairs_cut_all_products_the_batch_stays_whole(gpt: JointGraph, strategy: str) -> None:
    plan = plan_named(strategy, gpt, (2, 2), 4)
    assert share_left_whole(gpt, plan) == 0
    assert "batch" not in {ref.label for ref in plan.factors[-1]}


@pytest.mark.parametrize(("rows", "is_cut"), [(8, False), (1024, True)])
def test_a_few_rows_are_not_cut_at_the_price_of_reducing_large_gradients(rows: int, is_cut: bool) -> None:
    """Between two norms is a product of 64 x 64, a ninth of the FLOPs: its gradient outweighs what 8 rows send."""
    norms = (nn.LayerNorm(64) for _ in range(2))
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), next(norms), nn.Linear(64, 64), next(norms)
    )
    joint = normalise(trace(model, (torch.randn(rows, 64),), {}))
    plan = plan_named("tp", joint, (4,), 4)
    assert ("batch" in {ref.label for ref in plan.factors[-1]}) is is_cut
    assert (share_left_whole(joint, plan) == 0) is is_cut


class ChannelsLast(nn.Module):
    """A group norm whose input has its channels innermost in memory, before convolutions that are cut in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.up, self.down = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.permute(0, 3, 1, 2))
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def test_a_gradient_from_a_collective_is_brought_to_the_order_of_its_input_in_memory() -> None:
    torch.manual_seed(0)
    ours = subject(ChannelsLast(), torch.randn(8, 6, 6, 3))
    assert ours.plan("tp", 4).factors[-1][-1].label == "batch"
    report = ours.verify("tp", 4)
    assert report.ok, report


class Residual(nn.Module):
    """Convolutions with biases around skips: of the hidden channels, or of what skips join, one kind can be cut."""

    def __init__(self, width: int = 8, hidden: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(width, hidden, 3, padding=1) for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(hidden, width, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return torch.nn.functional.cross_entropy(self.head(x.mean((2, 3))), label)


@pytest.mark.parametrize(("strategy", "sizes"), [("tp", (4,)), ("tp", (2,)), ("fsdp+tp", (2, 2))])
def test_convolutions_with_biases_are_cut_by_what_divides_most(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = subject(Residual(), torch.randn(8, 3, 6, 6), torch.arange(8) % 5)
    report = ours.verify(strategy, *sizes)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > 0.8
    storage = ours.plan(strategy, *sizes).storage
    assert [storage[f"{name}.1.weight"].sharding[-1] for name in ("up", "down")] == [shard(0), shard(1)]


def test_a_set_of_factors_is_chosen_by_bytes_for_what_it_divides() -> None:
    """Cutting the narrow widths of a chain sends a third less, and divides a tenth of the products."""
    sizes = (16, 64, 64, 16, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    ours = subject(nn.Sequential(*layers), torch.randn(8, 16))
    assert len(tensor_parallel_factors(ours.joint, analyse(ours.joint), 4)) == 2
    assert ours.verify("tp", 4).sharded_flops_fraction == 1.0
