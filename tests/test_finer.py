"""Modules inside of blocks get options of their own: where that gives faster plans, and that these compute the same."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import layout_search, search
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.graph import JointGraph
from autopar.layout_search import LayoutSearch, Priced
from autopar.layouts import find_layouts
from autopar.plan import Plan
from autopar.regions import find_regions, inner_modules
from tests.programs import Subject, subject


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class Ffn(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.ffn = nn.LayerNorm(width), Attention(width), Ffn(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + F.dropout(self.ffn(self.norm(x)), 0.1)
        return y


class Blocks(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def small() -> Subject:
    torch.manual_seed(0)
    return subject(Blocks(8, 2), torch.randn(8, 4, 8))


def test_the_modules_inside_of_blocks(small: Subject) -> None:
    assert find_regions(small.joint) == ("blocks.0", "blocks.1", "")
    inner = inner_modules(small.joint, find_regions(small.joint))
    assert inner == {f"blocks.{i}": ("attention", "ffn") for i in (0, 1)}  # the norm has no modules inside


@pytest.mark.parametrize(("strategy", "sizes"), [("zero3", (4,)), ("fsdp+tp", (2, 2))])
def test_a_module_that_recomputes_more_than_its_block_gives_the_same(
    small: Subject, strategy: str, sizes: tuple[int, ...]
) -> None:
    levels = {"blocks.0": "selective", "blocks.0.ffn": "full", "blocks.1": "selective", "blocks.1.attention": "full"}
    plan = replace(small.plan(strategy, *sizes), recompute=levels)
    report = small.compare(small.program(plan), plan)
    assert report.ok, str(report)


@functools.cache
def large() -> tuple[Compiler, JointGraph]:
    with torch.device("meta"):
        model, x = Blocks(2048, 3).to(torch.bfloat16), torch.empty(32, 2048, 2048, dtype=torch.bfloat16)
    compiler = Compiler(model, (4,), Cluster.parse("4xA100-80GB"))
    return compiler, compiler.trace((x,), {}, train=True, local=False)


def pool_of(min_share: float, monkeypatch: pytest.MonkeyPatch) -> list[Priced]:
    monkeypatch.setattr(layout_search, "MIN_SHARE", min_share)
    monkeypatch.setattr(search, "POLISHED_NODES", 0)
    compiler, joint = large()
    return replace(compiler).candidates(joint)


def fastest(pool: list[Priced], budget: int) -> Priced:
    return min((p for p in pool if p.simulation.memory.total <= budget), key=lambda p: p.simulation.step_time_s)


def test_finer_options_give_faster_plans_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    finer, coarse = (pool_of(share, monkeypatch) for share in (layout_search.MIN_SHARE, 1.0))
    least = min(p.simulation.memory.total for p in coarse)
    budgets = {p.simulation.memory.total for p in (*coarse, *finer) if p.simulation.memory.total >= least}
    pairs = {budget: (fastest(coarse, budget), fastest(finer, budget)) for budget in sorted(budgets)}
    gains = {budget: one.simulation.step_time_s / two.simulation.step_time_s for budget, (one, two) in pairs.items()}
    best = max(gains, key=gains.__getitem__)
    assert gains[best] > 1.01
    assert any(region.endswith((".attention", ".ffn")) for region in pairs[best][1].plan.recompute)


def test_modules_that_keep_little_get_no_options_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, joint = large()
    layout = find_layouts(joint, (4,), 4)[0]

    def price(plan: Plan, _: object) -> Priced:
        return compiler.price(joint, plan)

    assert {option.full_in for option in LayoutSearch(joint, layout, price).option_sets(True)[-1]} == {
        "",
        "attention",
        "ffn",
    }
    monkeypatch.setattr(layout_search, "MIN_SHARE", 0.4)
    assert {option.full_in for option in LayoutSearch(joint, layout, price).option_sets(True)[-1]} == {
        "",
        "ffn",
    }
