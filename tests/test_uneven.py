"""Sizes that do not divide: an odd vocabulary or width is cut by tensor parallelism, padded, and equal to the single
device; heads are in `test_uneven_heads.py`."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from programs import subject, trained_beside_one_device
from tiny_models import TinyGpt, token_batch
from torch import Tensor, nn

from autopar.local_ops import mask_padding, pad_dim
from autopar.placement import is_sharded
from autopar.plan import Plan
from autopar.program import collectives_of


class Classifier(nn.Module):
    """A hidden width that no power of two divides, and a loss over an odd number of classes."""

    def __init__(self, width: int = 33, classes: int = 65) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(12, width), nn.LayerNorm(12), nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.up(self.norm(x)))), target)


def cut_parameters(plan: Plan) -> set[str]:
    return {path for path, storage in plan.storage.items() if any(map(is_sharded, storage.sharding))}


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("tp", (2,)), ("tp", (4,)), ("tp", (8,)), ("tp+sp", (4,)), ("fsdp+tp", (2, 4))]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_odd_vocabulary_is_cut(strategy: str, sizes: tuple[int, ...], tied: bool) -> None:
    torch.manual_seed(0)
    model = TinyGpt(vocab=101, layers=1)
    if not tied:
        model.head = nn.Linear(16, 101, bias=False)
    ours = subject(model, *token_batch(8, 8, 101))
    plan = ours.plan(strategy, *sizes)
    assert "tokens.weight" in cut_parameters(plan) or "head.weight" in cut_parameters(plan)
    report = ours.compare(ours.program(plan), plan)
    assert report.ok, str(report)


@pytest.mark.parametrize("num_ranks", [2, 4, 5, 8])
def test_odd_widths_and_classes_are_cut(num_ranks: int) -> None:
    torch.manual_seed(0)
    batch = 8 if num_ranks != 5 else 10
    ours = subject(Classifier(), torch.randn(batch, 12), torch.arange(batch) % 65)
    report = ours.verify("tp", num_ranks)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > (0.8 if num_ranks < 8 else 0.5)


@pytest.mark.parametrize(("seq", "num_ranks"), [(7, 2), (7, 4), (15, 4), (5, 4)])
def test_odd_sequences_are_cut_between_the_blocks(seq: int, num_ranks: int) -> None:
    """What is not cut by heads or widths is cut by positions, of which the last ranks have fewer or none."""
    torch.manual_seed(0)
    ours = subject(TinyGpt(vocab=101, layers=1, seq=16), *token_batch(8, seq, 101))
    plan = ours.plan("tp+sp", num_ranks)
    program = ours.program(plan)
    kinds = {c.kind for graph in program.graphs for c in collectives_of(graph.module.graph)}
    assert "reduce_scatter" in kinds
    report = ours.compare(program, plan, num_steps=2)
    assert report.ok, str(report)


def test_few_classes_are_not_padded() -> None:
    ours = subject(Classifier(width=32, classes=10), torch.randn(8, 12), torch.arange(8))
    assert "head.bias" not in cut_parameters(ours.plan("tp", 4))


@pytest.mark.parametrize(("reduce", "neutral"), [("sum", 0.0), ("max", float("-inf")), ("min", float("inf"))])
def test_padding_is_neutral(reduce: str, neutral: float) -> None:
    part = pad_dim(torch.ones(2, 3), 1, 4)  # the last of two parts of seven
    masked = mask_padding(part + 5, 1, 7, 2, 1, reduce)
    assert masked[:, :3].eq(6).all()
    assert masked[:, 3].eq(neutral).all()
    whole = torch.ones(2, 4)
    assert mask_padding(whole, 1, 7, 2, 0, reduce) is whole


def trains_unevenly(strategy: str, mesh: Any, seq: int = 8) -> set[int]:
    """Three steps of a model with an odd vocabulary; returns the sizes of this rank's parts of the table."""
    torch.manual_seed(0)
    model = TinyGpt(vocab=101, width=20, heads=4, layers=1).double()
    batches = [token_batch(8, seq, 101, seed) for seed in range(3)]
    pm = trained_beside_one_device(model, mesh, strategy, batches, operator.itemgetter("loss"))
    return set(dict(pm.named_parameters())["tokens.weight"].to_local().shape)


@pytest.mark.parametrize(("strategy", "mesh"), [("tp", 4), ("zero3", 4), ("tp+sp", 4), ("fsdp+tp", "2x2")])
def test_real_ranks_hold_uneven_parts_and_train_as_one(gloo4: RankPool, strategy: str, mesh: Any) -> None:
    parts = gloo4.run(trains_unevenly, strategy, mesh)
    if strategy.startswith("tp"):
        assert [26 in sizes for sizes in parts] == [True, True, True, False]  # 101 = 26 + 26 + 26 + 23


def test_real_ranks_cut_odd_sequences_and_train_as_one(gloo4: RankPool) -> None:
    gloo4.run(trains_unevenly, "tp+sp", 4, 7)


def test_two_real_ranks_hold_uneven_parts_and_train_as_one(gloo2: RankPool) -> None:
    assert [51 in sizes for sizes in gloo2.run(trains_unevenly, "tp", 2)] == [True, False]
