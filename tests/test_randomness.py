"""Counter-based random numbers: the same on any cut of the tensor, and uniform."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TinyGpt, token_batch
from torch import nn

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


class Shuffles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.randperm(x.shape[0])]


def test_other_random_ops_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Shuffles())
    with pytest.raises(autopar.TraceError, match=r"module '1' uses the random op aten.randperm.*pass them in"):
        autopar.verify(model, "ddp", torch.randn(8, 8), mesh=4)
