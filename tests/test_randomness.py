"""Counter-based random numbers: the same on any cut of the tensor, and uniform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TinyGpt, token_batch
from torch import Tensor, nn

import autopar
from autopar.mesh import Mesh
from autopar.normalise import normalise
from autopar.placement import Shard, Sharding, local_shape, shard, shard_dim, shard_split
from autopar.randomness import replace_random_ops
from autopar.runtime.sharding import shard_tensor
from autopar.trace import trace

uniform = torch.ops.autopar.uniform
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "sharding", "sizes"),
    [
        ((8, 6), (Shard(0),), (4,)),
        ((8, 6), (Shard(0), Shard(0)), (2, 4)),
        ((8, 6), (Shard(0), Shard(1)), (4, 3)),
        ((4, 24), (shard(1, 3),), (4,)),
        ((12, 4), (Shard(0), shard(0, 6)), (3, 2)),
    ],
)
def test_a_rank_draws_the_numbers_of_its_own_elements(
    shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]
) -> None:
    mesh = Mesh(("a", "b")[: len(sizes)], sizes)
    whole = uniform(list(shape), [], 5, 2, CPU)
    for rank in range(mesh.num_ranks):
        coordinate = mesh.coordinate(rank)
        cuts: list[int] = []
        for axis, placement in enumerate(sharding):
            dim, split = shard_dim(placement), shard_split(placement)
            for other in range(axis):
                if shard_dim(sharding[other]) == dim and shard_split(sharding[other]) < split:
                    split //= mesh.sizes[other]
            cuts += [dim, split, mesh.sizes[axis], coordinate[axis]]
        part = uniform(list(local_shape(shape, sharding, mesh)), cuts, 5, 2, CPU)
        assert torch.equal(part, shard_tensor(whole, sharding, mesh, rank))


def test_numbers_are_uniform_and_differ_between_seeds_and_ops() -> None:
    drawn = uniform([3000, 1000], [], 7, 1, CPU).double()  # several chunks
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 3 million draws: the mean's standard error is 1.7e-4, the variance's 4.3e-5
    assert abs(drawn.mean() - 0.5) < 1e-3
    assert abs(drawn.var() - 1 / 12) < 3e-4
    assert abs((drawn[1:] * drawn[:-1]).mean() - 0.25) < 1e-3
    for seed, salt in ((8, 1), (7, 2)):
        assert (uniform([1000], [], seed, salt, CPU) == uniform([1000], [], 7, 1, CPU)).sum() < 5
    assert uniform([], [], 7, 1, CPU).shape == ()


class Noisy(nn.Module):
    """Draws in every way that is supported."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + torch.randn_like(x) * 0.1
        y = y * torch.rand(x.shape, dtype=x.dtype) * torch.bernoulli(torch.full_like(x, 0.5))
        return nn.functional.dropout(y, 0.25)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
def test_models_that_draw_are_equal_under_every_plan(strategy: str) -> None:
    torch.manual_seed(0)
    assert autopar.verify(Noisy(), strategy, torch.randn(8, 8), mesh=4).ok
    assert autopar.verify(TinyGpt(dropout=0.2), strategy, token_batch(8), mesh=4).ok


def test_dropout_keeps_its_share_and_its_scale() -> None:
    joint = replace_random_ops(normalise(trace(nn.Dropout(0.25), (torch.ones(400, 500, requires_grad=False),), {})))
    (dropped,) = joint.module(torch.ones(400, 500), 3)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 5e-3


class Draws(nn.Module):
    """What a function draws from its input."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(x)


def drawn(draw: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """What a function draws from ones, as the traced program does it."""
    joint = replace_random_ops(normalise(trace(Draws(draw), (torch.ones(*shape),), {})))
    (result,) = joint.module(torch.ones(*shape), 3)
    return torch.as_tensor(result).double() - 1


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda y: torch.empty_like(y).uniform_(-1, 3),
    "normal_": lambda y: torch.empty_like(y).normal_(2, 0.5),
    "normal of tensors": lambda y: torch.normal(y.detach() * 2, torch.full_like(y, 0.5)),
    "exponential_": lambda y: torch.empty_like(y).exponential_(4.0),
    "randint": lambda y: torch.randint(-2, 5, y.shape).to(y.dtype),
    "randint_like": lambda y: torch.randint_like(y, 7) - 2,
    "distribution": lambda y: torch.distributions.Normal(y * 2, 0.5 * y.abs()).rsample(),
    "multinomial": lambda y: torch.multinomial((torch.arange(5) == 3) + torch.ones(y.numel(), 5), 1).view_as(y) * 1.0,
    "with replacement": lambda y: torch.multinomial((torch.arange(5) == 3) + torch.ones(5), y.numel(), True).view_as(y),
    "bernoulli_ of tensors": lambda y: torch.empty_like(y).bernoulli_(torch.full_like(y, 0.3)),
    "rrelu": lambda y: F.rrelu(-y, 0.25, 0.75, training=True),
    "rrelu_": lambda y: F.rrelu(-1 * y, 0.25, 0.75, training=True, inplace=True),
}
MOMENTS = {
    "uniform_": (1, 4 / 3), "normal_": (2, 0.25), "normal of tensors": (2, 0.25), "exponential_": (0.25, 1 / 16),
    "randint": (1, 4), "randint_like": (1, 4), "distribution": (2, 0.25), "multinomial": (13 / 6, 65 / 36),
    "with replacement": (13 / 6, 65 / 36), "bernoulli_ of tensors": (0.3, 0.21),
    "rrelu": (-0.5, 1 / 48), "rrelu_": (-0.5, 1 / 48),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WAYS))
def test_draws_have_the_ops_distribution(name: str) -> None:
    found = drawn(WAYS[name], 250, 800)  # 200 thousand draws: standard errors are below 0.3 % of a deviation
    mean, variance = MOMENTS[name]
    assert abs(found.mean() - mean) < 0.015 * variance**0.5
    assert abs(found.var() - variance) < 0.03 * variance
    assert not (name == "exponential_" and found.min() <= 0)


def test_samples_without_replacement_differ_and_permutations_are_whole() -> None:
    weights = torch.tensor([0.0, 1, 1, 1, 5])
    samples = drawn(lambda y: torch.multinomial(weights.expand(len(y), 5), 4) * y, 3000, 4)
    assert torch.equal(samples.sort(1)[0], torch.tensor([[1.0, 2, 3, 4]]).double().expand(3000, 4))
    assert abs((samples[:, 0] == 4).double().mean() - 5 / 8) < 0.03
    order = drawn(lambda y: torch.randperm(4000) * y, 4000)
    assert torch.equal(order.sort()[0], torch.arange(4000).double())
    assert (order == torch.arange(4000)).sum() < 10


@pytest.mark.parametrize("strategy", ["zero3", "tp", "fsdp+tp"])
def test_whatever_is_drawn_is_the_same_under_every_plan(strategy: str) -> None:
    def mixed(y: Tensor) -> Tensor:
        noise = torch.stack([draw(y) for draw in WAYS.values()]).sum(0)
        soft = nn.functional.gumbel_softmax(y, hard=True)
        return noise * soft + y[torch.randperm(len(y))] + y[:, torch.multinomial(y.abs().mean(0).detach(), 8)]

    torch.manual_seed(0)
    assert autopar.verify(nn.Sequential(nn.Linear(8, 8), Draws(mixed)), strategy, torch.randn(8, 8), mesh=4).ok


@pytest.mark.parametrize(
    "draw",
    [lambda y: torch.poisson(y.detach().abs()), lambda y: torch.randn(y.shape, generator=torch.Generator())],
    ids=["poisson", "generator"],
)
def test_other_random_ops_are_refused(draw: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Draws(draw))
    with pytest.raises(autopar.TraceError, match=r"module '1' uses the random op aten.*pass them in, or use what"):
        autopar.verify(model, "ddp", torch.randn(8, 8), mesh=4)
