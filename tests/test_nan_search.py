"""The first value that is not a number is found on its rank, in its op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor, nn

import autopar


class Root(nn.Module):
    """Takes square roots: of a negative number, or with an infinite gradient times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.root, self.down = nn.Linear(4, 8), Sqrt(), nn.Linear(8, 4)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        hidden = self.root(self.up(x).relu() + self.shift, offset)
        return self.down(hidden).square().mean()


class Sqrt(nn.Module):
    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        return (x + offset[:, None]).sqrt() * x


def texts() -> list[str]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Root(), 2, strategy="zero3")
    rank, x = dist.get_rank(), torch.randn(2, 4)
    fine, negative, zero = torch.ones(2), torch.tensor([1.0, -50.0]), torch.zeros(2)
    random, found = pm.random_state, []
    found.append(autopar.find_nan(pm, x, fine))
    found.append(autopar.find_nan(pm, x, negative if rank == 1 else fine))
    found.append(autopar.find_nan(pm, x, zero))
    found.append(autopar.find_nan(pm, x * float("nan") if rank == 0 else x, fine))
    with torch.no_grad():
        pm.get_parameter("down.weight").to_local()[:] = float("nan") if rank == 1 else 0.0
    found.append(autopar.find_nan(pm, x, fine))
    assert pm.random_state == random
    assert all(parameter.grad is None for parameter in pm.parameters())
    return found


def test_the_first_nan_is_named(gloo2: RankPool) -> None:
    both: Any = gloo2.run(texts)
    assert both[0] == both[1]
    assert both[0] == [
        "",
        "rank 1: the result of sqrt, of module root in the forward pass",
        both[0][2],
        "rank 0: input '0'",
        "rank 1: parameter down.weight",
    ]
    assert "of module root in the backward pass" in both[0][2]


def test_only_a_parallel_module_is_searched() -> None:
    with pytest.raises(autopar.InputError, match="find_nan takes a ParallelModule, got a Linear"):
        autopar.find_nan(nn.Linear(1, 1))  # type: ignore[arg-type]
