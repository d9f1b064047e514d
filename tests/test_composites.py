"""Ops without a rule of their own, taken apart: equal to the op, with nothing left that has no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_eager import assert_equals_eager
from programs import subject
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.normalise import normalise
from autopar.trace import trace

aten = torch.ops.aten


class Apply(nn.Module):
    """`function` of a linear layer's result."""

    def __init__(self, function: Callable[[Tensor], Any], width: int = 6) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, width), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(12, 8, mode=mode), nn.Linear(8, 4)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.bag(indices)).square().mean()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "var": lambda y: y.var(),
    "var dim": lambda y: y.var(dim=1, correction=0),
    "var keep": lambda y: y.var(dim=(0, -1), keepdim=True),
    "std": lambda y: y.std(dim=-1),
    "std_mean": lambda y: torch.std_mean(y, dim=1),
    "var_mean": lambda y: torch.var_mean(y, dim=1, keepdim=True),
    "logsumexp": lambda y: y.logsumexp(1),
    "norm": lambda y: torch.linalg.vector_norm(y, dim=1),
    "diagonal": lambda y: y[:6].diagonal(1),
    "as_strided": lambda y: (y * 2).as_strided((4, 3), (6, 2), 1),
    "index_select": lambda y: y.index_select(1, torch.tensor([0, 2, 2])),
    "take": lambda y: y.take(torch.tensor([0, 7, 7])),
    "linear resize": lambda y: F.interpolate(y[:, None], size=9, mode="linear"),
    "multi margin": lambda y: F.multi_margin_loss(y, torch.arange(y.shape[0]) % 6),
    "multilabel margin": lambda y: F.multilabel_margin_loss(y, torch.tensor([3, 1, -1, 0, 0, 0]).expand_as(y)),
    "multilabel margin rows": lambda y: F.multilabel_margin_loss(
        y, torch.tensor([[5, -1, 2, 2, 2, 2], [4, 0, 5, 3, 1, 2]]).repeat(4, 1), reduction="none"
    ),
    "multilabel margin sum": lambda y: F.multilabel_margin_loss(
        y[0], torch.tensor([-1, 3, 3, 0, 0, 0]), reduction="sum"
    ),
    "cov": lambda y: torch.cov(y[:, :4].T),
    "cov of one": lambda y: torch.cov(y[:, 0], correction=2),
    "cov weighted": lambda y: torch.cov(
        y.T, correction=0, fweights=torch.arange(y.shape[0]), aweights=torch.linspace(0.1, 2, y.shape[0]).to(y)
    ),
    "corrcoef": lambda y: torch.corrcoef(y),
    "gaussian nll": lambda y: F.gaussian_nll_loss(y, y.flip(0), y[:, 0].square(), full=True, eps=0.1),
    "gaussian nll rows": lambda y: F.gaussian_nll_loss(y, y.flip(0), y[:, :1].exp(), reduction="none"),
    "gaussian nll number": lambda y: F.gaussian_nll_loss(y, y.flip(0), 0.3, reduction="sum"),
    "rrelu in evaluation": lambda y: F.rrelu(y) + F.rrelu(y * 2, 0.2, 0.4, inplace=True),
    "aminmax": lambda y: y.aminmax(dim=1, keepdim=True).max - y.aminmax().min,
    "any": lambda y: y * (y > 0).any(1, keepdim=True),
    "triplet": lambda y: F.triplet_margin_loss(y[:2], y[2:4], y[4:6]),
}


def graph_of(model: nn.Module, x: Tensor) -> JointGraph:
    return normalise(trace(model, (x,), {}))


def lacking(joint: JointGraph) -> list[str]:
    return [str(node.target) for node in analyse(joint).replicated]


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_taken_apart_equals_the_op(name: str) -> None:
    torch.manual_seed(0)
    model, x = Apply(FUNCTIONS[name]).double(), torch.randn(8, 5, dtype=torch.float64)
    joint = graph_of(model, x)
    assert lacking(joint) == []
    assert_equals_eager(joint, model, ((x,), {}))


@pytest.mark.parametrize(
    "name",
    ["var", "var dim", "std", "var_mean", "logsumexp", "norm", "multi margin", "multilabel margin", "cov", "any"],
)
def test_statistics_of_a_cut_batch_are_the_whole_batchs(name: str) -> None:
    torch.manual_seed(0)
    model = Apply(FUNCTIONS[name])
    for strategy, sizes in (("ddp", (4,)), ("fsdp+tp", (2, 2))):
        report = subject(model, torch.randn(8, 5)).verify(strategy, *sizes)
        assert report.ok, str(report)


@pytest.mark.parametrize("strategy", ["ddp", "tp", "fsdp+tp"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_one_length(mode: str, strategy: str) -> None:
    torch.manual_seed(0)
    ours = subject(Bags(mode), torch.randint(12, (8, 3)))
    assert lacking(ours.joint) == []
    report = ours.verify(strategy, *((2, 2) if strategy == "fsdp+tp" else (4,)))
    assert report.ok, str(report)


@pytest.mark.parametrize("mode", ["max", "sum"])
def test_other_bags_stay_whole_and_right(mode: str) -> None:
    class Ragged(Bags):
        def forward(self, indices: Tensor) -> Tensor:
            starts = torch.tensor([0, 3, 4, 9])
            return self.head(self.bag(indices, starts)).square().mean()

    torch.manual_seed(0)
    ours = subject(Ragged(mode), torch.randint(12, (16,)))
    assert "aten._embedding_bag.default" in lacking(ours.joint)
    report = ours.verify("ddp", 4)
    assert report.ok, str(report)


@pytest.mark.parametrize("strategy", ["zero3", "tp", "fsdp+tp"])
def test_weight_norm_is_cut(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 8), dim=1))
    ours = subject(model, torch.randn(8, 8))
    assert lacking(ours.joint) == []
    report = ours.verify(strategy, *((2, 2) if strategy == "fsdp+tp" else (4,)))
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > 0.9


def test_bilinear_is_a_product_of_dims() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.form = nn.Linear(4, 6), nn.Bilinear(6, 4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.form(self.inner(x), x)

    torch.manual_seed(0)
    ours = subject(Bilinear(), torch.randn(8, 4))
    assert lacking(ours.joint) == []
    report = ours.verify("fsdp+tp", 2, 2)
    assert report.ok, str(report)
