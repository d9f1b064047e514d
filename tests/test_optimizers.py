"""Memory of optimizers: the table against PyTorch's own steps, and what is measured where there is no table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_model.allocations import AllocationTracker
from autopar.cost_model.optimizers import OPTIMIZERS, Extent, Footprint, OptimizerMemory, Slot, find_optimizer
from autopar.errors import InputError

TORCH = {
    "sgd": torch.optim.SGD,
    "sgd_momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adam_foreach": partial(torch.optim.Adam, foreach=True),
    "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
    "adam_fused": partial(torch.optim.Adam, fused=True),
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
SHAPES = ((300, 200), (50, 40), (200,), (120, 120), (7, 5, 30), (11,), (64, 900))


def real_step(build: Any, shapes: Any, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], int, int]:
    """Parameters, bytes of the state that a real optimizer keeps for them, and the peak of its second step."""
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = build(params)
    optimizer.step()
    with AllocationTracker() as tracker:
        optimizer.step()
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return params, sum(t.numel() * t.element_size() for t in state), tracker.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_table_equals_real_steps(name: str, dtype: torch.dtype) -> None:
    memory = find_optimizer(name)
    params, state, peak = real_step(TORCH[name], SHAPES, dtype)
    assert sum(map(memory.state_bytes, params)) == state
    # Numbers that are not of a parameter's size, such as the count of steps, are not in the ratios.
    assert memory.step_bytes(params) == pytest.approx(peak, rel=0.01, abs=16)


@pytest.mark.parametrize("name", TORCH)
def test_measuring_finds_what_the_table_says(name: str) -> None:
    measured, known = find_optimizer(TORCH[name]), OPTIMIZERS[name]
    for found, expected in ((measured.matrix, known.matrix), (measured.vector, known.vector)):
        assert sorted(map(repr, found.slots)) == sorted(map(repr, expected.slots))
        ratios = [(f.own, f.carried, f.together) for f in (found, expected)]
        assert ratios[0] == pytest.approx(ratios[1], abs=0.03)


class Lion(torch.optim.Optimizer):
    """Not in PyTorch: somebody's own."""

    def __init__(self, params: Any, lr: float = 1e-4, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                update = (moment * group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(torch.sign(update), alpha=-group["lr"])
                moment.lerp_(p.grad, 0.01)


def test_an_unknown_class_is_measured() -> None:
    memory = find_optimizer(Lion)
    assert memory.name == "Lion"
    assert memory.matrix.slots == OPTIMIZERS["lion"].matrix.slots
    params, state, peak = real_step(Lion, SHAPES)
    assert (sum(map(memory.state_bytes, params)), memory.step_bytes(params)) == (state, peak)
    assert OPTIMIZERS["lion"].step_bytes(params) == peak


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"foreach": True, "maximize": True}, {"fused": True}, {"weight_decay": 0.0}, {}],
    ids=str,
)
def test_the_options_of_an_instance_count(options: dict[str, Any]) -> None:
    build = partial(torch.optim.AdamW, **options)
    memory = find_optimizer(build([nn.Parameter(torch.zeros(2, 3))]))
    params, state, peak = real_step(build, SHAPES)
    assert sum(map(memory.state_bytes, params)) == state
    assert memory.step_bytes(params) == pytest.approx(peak, rel=0.01)


def test_the_costliest_group_of_an_instance_counts() -> None:
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    instance = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}])
    assert find_optimizer(instance).matrix.slots == (Slot(Extent.ELEMENTS),)
    assert not instance.state  # it was not stepped itself


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    measured, known = find_optimizer(torch.optim.Muon), OPTIMIZERS["muon"]
    for memory in (measured, known):
        assert memory.matrix.slots == (Slot(Extent.ELEMENTS),)
        assert memory.vector == OPTIMIZERS["adamw"].vector
    params, state, peak = real_step(torch.optim.Muon, ((64, 64), (32, 96)))
    assert sum(map(known.state_bytes, params)) == state
    assert peak <= known.step_bytes(params) <= 1.01 * peak
    assert measured.step_bytes(params) == pytest.approx(known.step_bytes(params), rel=0.01)


def test_eight_bits() -> None:
    memory = find_optimizer("adamw_8bit")
    large, small = torch.empty(100, 100), torch.empty(63, 65)
    assert memory.state_bytes(large) == 2 * (10_000 + 4 * 40)  # 39.06 blocks of 256
    assert memory.state_bytes(small) == 2 * 4 * 63 * 65
    assert memory.state_bytes(torch.empty(100, 100, dtype=torch.bfloat16)) == 2 * (10_000 + 4 * 40)


def test_state_is_rounded_tensor_by_tensor() -> None:
    assert find_optimizer("adamw").state_bytes(torch.empty(130), 512) == 512 + 2 * 1024
    assert find_optimizer("adafactor").state_bytes(torch.empty(3, 10, 20)) == 4 + 4 * (30 + 60)


def test_a_record_is_taken_as_it_is() -> None:
    mine = OptimizerMemory("mine", Footprint(own=1), Footprint())
    assert find_optimizer(mine) is mine


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(InputError, match=r"unknown optimizer 'shampoo'; known: sgd, .*adamw.*or pass an optimizer"):
        find_optimizer("shampoo")
    with pytest.raises(InputError, match=r"memory of optimizer LBFGS, which fails .*TypeError.*pass an instance"):
        find_optimizer(torch.optim.LBFGS)
    with pytest.raises(InputError, match=r"a name, a torch\.optim\.Optimizer or its class, got 3"):
        find_optimizer(3)  # type: ignore[arg-type]
