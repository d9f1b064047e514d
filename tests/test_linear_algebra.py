"""Linear algebra and covariances, whose eager forms read values to check them: traced and cut, equal to these."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joint_eager import assert_equals_eager
from pool import RankPool
from programs import subject
from test_passes import MESHES, random_plan
from torch import Tensor, nn

import autopar
from autopar.factors import analyse
from autopar.normalise import normalise
from autopar.trace import trace

linalg = torch.linalg


class OfMatrices(nn.Module):
    """`function` of a batch of symmetric positive definite matrices, (rows, 4, 4), which depend on parameters."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight
        return self.function(y @ y.mT + torch.diag(self.scale.exp()))


MATRICES: dict[str, Callable[[Tensor], Any]] = {
    "inv": linalg.inv,
    "inverse": torch.inverse,
    "power": lambda a: linalg.matrix_power(a, -2),
    "cholesky": lambda a: linalg.cholesky(a, upper=True),
    "solve": lambda a: linalg.solve(a, a[..., :2].sin()),
    "solve right": lambda a: linalg.solve(a, a[..., :2, :].sin(), left=False),
    "solve vectors": lambda a: linalg.solve(a, a[..., 0].sin()),
    "solve one vector": lambda a: linalg.solve(a, a[0, 0].sin()),
    "solve for more": lambda a: linalg.solve(a[:, None], a[:, None, :, :2].sin().expand(-1, 3, -1, -1)),
    "one of one matrix": lambda a: linalg.solve(a[0], a[..., :2].sin()),
    "lu_factor": lambda a: linalg.lu_factor(a)[0],
    "lu_solve": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a.sin()),
    "tensorinv": lambda a: linalg.tensorinv(a[0].reshape(2, 2, 4)),
    "tensorsolve": lambda a: linalg.tensorsolve(a[0].reshape(2, 2, 4), a[1, :2, :2]),
}

SAMPLES: dict[str, Callable[[Tensor], Any]] = {
    "cov": torch.cov,
    "cov of one": lambda y: torch.cov(y[:, 0]),
    "cov of columns": lambda y: torch.cov(y.t(), correction=0),
    "cov counted": lambda y: torch.cov(y, fweights=torch.tensor([1, 0, 3, 2])),
    "cov weighted": lambda y: torch.cov(y, aweights=y[0].abs() + 0.1, fweights=torch.tensor([1, 4, 3, 2])),
    "cov of too few": lambda y: torch.cov(y.detach(), correction=7).nan_to_num(posinf=1, neginf=-1) * y.sum(),
    "corrcoef": torch.corrcoef,
    "corrcoef of one": lambda y: torch.corrcoef(y[0]) * y.sum(),
}


class OfSamples(nn.Module):
    """`function` of a linear layer's result, (rows, 4)."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in MATRICES:
        return OfMatrices(MATRICES[name]).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    return OfSamples(SAMPLES[name]).double(), torch.randn(8, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", [*MATRICES, *SAMPLES])
@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom:UserWarning")
def test_equals_the_eager_op(name: str) -> None:
    model, x = made(name)
    assert_equals_eager(trace(model, (x,), {}), model, ((x,), {}))


@pytest.mark.parametrize("name", [*MATRICES, *SAMPLES])
@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom:UserWarning")
def test_any_cut_equals_the_single_device(name: str) -> None:
    model, x = made(name)
    ours = subject(model, x)
    analysis = analyse(ours.joint)
    for seed in range(6):
        rng = random.Random(seed)
        plan = random_plan(rng, ours, analysis, rng.choice(MESHES))
        report = ours.compare(ours.program(plan), plan)
        assert report.ok, (seed, str(report))
    report = ours.verify("ddp", 4)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["inv", "cholesky", "solve", "solve vectors", "lu_factor", "lu_solve"])
def test_each_rank_has_its_own_matrices(name: str) -> None:
    model, x = made(name)
    assert analyse(normalise(trace(model, (x,), {}))).replicated == []


@pytest.mark.parametrize(
    ("function", "matrix"),
    [
        (linalg.inv, torch.zeros(4, 4)),
        (linalg.cholesky, -torch.eye(4)),
        (lambda a: linalg.solve(a, torch.ones(4)), torch.zeros(4, 4)),
        (lambda a: linalg.lu_factor(a)[0], torch.zeros(4, 4)),
        (lambda a: torch.cov(a, fweights=torch.tensor([1, 1, 1, 1]) - a[0].detach().long()), 2 * torch.ones(4, 4)),
    ],
)
def test_what_the_eager_op_refuses_is_not_a_number(function: Callable[[Tensor], Tensor], matrix: Tensor) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return function(self.scale * x).sum()

    with pytest.raises(RuntimeError):
        Root()(matrix)
    joint = trace(Root(), (matrix,), {})
    loss, gradient = joint.module(torch.ones(()), matrix, torch.ones(()))
    assert loss.isnan()
    assert gradient.isnan()


def indefinite_on_one_rank() -> str:
    pm = autopar.parallelize(nn.Sequential(OfMatrices(lambda a: linalg.cholesky(a).sum())), 2, strategy="ddp")
    x = torch.randn(2, 4, 4)
    assert autopar.find_nan(pm, x) == ""
    with torch.no_grad():
        pm.get_parameter("0.scale").fill_(-1e4)  # whose exponential is zero
    return autopar.find_nan(pm, x * (1 - dist.get_rank()))


def test_an_indefinite_matrix_is_found_on_its_rank(gloo2: RankPool) -> None:
    text = "rank 1: the result of div.Tensor, of module 0 in the forward pass"
    assert gloo2.run(indefinite_on_one_rank) == [text, text]
