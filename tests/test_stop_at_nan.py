"""`stop_at_nan`: a step that meets a NaN ends every rank with an error that names the rank, the op and the module."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import mine, whole
from tiny_models import TinyGpt, token_batch
from torch import Tensor, nn

import autopar
from autopar.runtime.control import ControlGroup
from autopar.runtime.finite import Guard, Replay

FINE = torch.ones(2)


class Root(nn.Module):
    """Takes square roots: of a negative number in the forward pass, or of 0, whose infinite slope meets a 0 later."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.root, self.down = nn.Linear(4, 8), Sqrt(), nn.Linear(8, 4)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return self.down(self.root(self.up(x), factor)).square().mean()


class Sqrt(nn.Module):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (x.square() * factor[:, None]).sqrt()


class WithState(nn.Module):
    """Counts down in a buffer, and takes the square root of what is negative at one count alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("left", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return self.norm(self.up(x)).square().mean() * ((self.left - 1).square() - 0.5).sqrt()


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, floor: Tensor) -> Tensor:
        masked = self.up(x).masked_fill(x > 100, -math.inf).softmax(-1)
        return -(masked.detach() * 0 + floor[:, None]).log().mean() + self.up(x).mean()


class Scores(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.up(x)}


def rows() -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def error_of(step: Callable[[], object]) -> str:
    """What a step raises, which leaves gradients alone."""
    try:
        step()
    except autopar.NanError as error:
        return str(error)
    return ""


def steps(strategy: str, precision: str | None, mesh: int | str = 2) -> list[str]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Root(), mesh, strategy=strategy, precision=precision, stop_at_nan=True)
    last, x = dist.get_world_size() - 1, rows()
    mine_alone = dist.get_rank() == last

    def step(x: Tensor, factor: Tensor) -> Callable[[], object]:
        return lambda: pm(x, factor).backward()

    found = [error_of(step(x, FINE))]
    before = [whole(p.grad).clone() for p in pm.parameters()]
    found.append(error_of(step(x, torch.tensor([1.0, -50.0]) if mine_alone else FINE)))
    found.append(error_of(step(x * math.nan if mine_alone else x, FINE)))
    found.append(error_of(step(x, torch.zeros(2) if mine_alone else FINE)))
    with torch.no_grad():
        found.append(error_of(lambda: pm(x * math.nan if mine_alone else x, FINE)))
        found.append(error_of(lambda: pm(x, FINE)))
    for parameter, gradient in zip(pm.parameters(), before, strict=True):
        assert torch.equal(whole(parameter.grad), gradient)
    with torch.no_grad():
        pm.get_parameter("down.weight").to_local()[:] = math.nan if mine_alone else 0.0
    found.append(error_of(step(x, FINE)))
    pm.stop_at_nan = False
    found.append(error_of(step(x, FINE)))
    return found


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_every_rank_names_the_first_nan(gloo2: RankPool, strategy: str, precision: str | None) -> None:
    ranks = gloo2.run(steps, strategy, precision)
    assert ranks[0] == ranks[1]
    fine, negative, batch, backward, forward_only, fine_forward, parameter, off = ranks[0]
    assert [fine, fine_forward, off] == ["", "", ""]
    assert "is that of rank 1: the result of sqrt, of module root in the forward pass. " in negative
    assert "is that of rank 1: input '0'. " in batch
    assert "is that of rank 1: the result of " in backward
    assert "of module root in the backward pass. " in backward
    assert "a forward pass of the module gave NaN in outputs on rank" in forward_only
    assert ": the first NaN is that of rank 1: input '0'. " in forward_only
    if strategy == "zero3":
        assert "is that of rank 1: parameter down.weight. " in parameter
    else:
        assert "rank 1: parameter down.weight" in parameter


@pytest.mark.parametrize("strategy", ["hsdp", "fsdp+tp"])
def test_four_ranks_on_two_axes(gloo4: RankPool, strategy: str) -> None:
    ranks = gloo4.run(steps, strategy, None, "2x2")
    assert all(found == ranks[0] for found in ranks)
    fine, negative, batch, *_ = ranks[0]
    assert fine == ""
    assert "the result of sqrt, of module root in the forward pass" in negative
    assert "is that of rank 3: input '0'. " in batch


def accumulated() -> list[str]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Root(), 2, strategy="zero2", stop_at_nan=True)
    rank, x = dist.get_rank(), rows()

    def micro_steps(*factors: Tensor) -> None:
        with pm.no_sync():
            for factor in factors[:-1]:
                pm(x, factor).backward()
        pm(x, factors[-1]).backward()

    zero = torch.zeros(2) if rank == 1 else FINE
    micro_steps(FINE, FINE, FINE)
    found = [error_of(lambda: micro_steps(FINE, zero, FINE))]
    pm.zero_grad()
    found.append(error_of(lambda: micro_steps(FINE, FINE, zero)))
    pm.zero_grad()
    micro_steps(FINE, FINE)
    return found


def test_accumulated_gradients_are_looked_at_in_each_micro_step(gloo2: RankPool) -> None:
    ranks = gloo2.run(accumulated)
    assert ranks[0] == ranks[1]
    for text in ranks[0]:
        assert "rank 1: the result of " in text
        assert "of module root in the backward pass" in text


def changes_nothing(stop: bool) -> list[Tensor]:
    torch.manual_seed(0)
    pm = autopar.parallelize(TinyGpt(), 2, strategy="zero3", stop_at_nan=stop)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        pm(*mine(*token_batch(8, seed=number)))["loss"].backward()
        optimizer.step()
    return [whole(p.detach()) for p in pm.parameters()]


def test_numbers_stay_as_they_are(gloo2: RankPool) -> None:
    with_it, without = gloo2.run(changes_nothing, True)[0], gloo2.run(changes_nothing, False)[0]
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def with_state() -> tuple[list[str], float, float]:
    torch.manual_seed(0)
    pm = autopar.parallelize(WithState(), 2, strategy="ddp", stop_at_nan=True)
    found = [error_of(lambda: pm(rows()).backward()) for _ in range(2)]
    return found, float(pm.get_buffer("left")), float(pm.get_buffer("norm.num_batches_tracked"))


def test_a_step_is_run_again_with_the_buffers_that_it_had(gloo2: RankPool) -> None:
    found, left, seen = gloo2.run(with_state)[0]
    assert found[0] == ""
    assert "rank 0: the result of sqrt, of module (root) in the forward pass; rank 1: the result of sqrt" in found[1]
    assert (left, seen) == (1.0, 2.0)


def infinite() -> list[str]:
    torch.manual_seed(0)
    pm = autopar.parallelize(Log(), 2, strategy="ddp", stop_at_nan=True)
    x = rows() + torch.tensor([200.0, 0, 0, 0])  # a masked place, whose infinity is meant
    zero = torch.tensor([1.0, 0.0]) if dist.get_rank() == 1 else FINE
    return [error_of(lambda: pm(x, FINE).backward()), error_of(lambda: pm(x, zero).backward())]


def test_an_infinite_loss_is_one_of_the_op_that_made_it(gloo2: RankPool) -> None:
    ranks = gloo2.run(infinite)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ""
    assert (
        "an infinite loss on ranks 0-1: the first infinity is that of rank 1: the result of log, of module"
        in ranks[0][1]
    )


def scaled() -> list[str]:
    """A gradient overflows by the scale alone; then there is a NaN without it; then the loop's own loss is one."""
    torch.manual_seed(0)
    pm = autopar.parallelize(Scores(), 2, strategy="ddp", stop_at_nan=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    weights = torch.tensor([[1e30, -1e30, 1.0, 1.0]])
    found = [error_of(lambda: scaler.scale((pm(rows())["scores"] * weights).sum()).backward())]
    assert any(not whole(p.grad).isfinite().all() for p in pm.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**119
    optimizer.zero_grad()
    found.append(error_of(lambda: scaler.scale((pm(rows() * math.nan)["scores"]).sum()).backward()))
    mask = math.nan if dist.get_rank() == 1 else 1.0
    found.append(error_of(lambda: scaler.scale((pm(rows())["scores"] * mask).sum()).backward()))
    return found


def test_an_overflow_by_the_scale_of_the_loss_is_the_scalers(gloo2: RankPool) -> None:
    ranks = gloo2.run(scaled)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ""
    assert "rank 0: input '0'; rank 1: input '0'" in ranks[0][1]
    assert "rank 1: the gradient of output 'scores' that the loop computes" in ranks[0][2]


def scaled_and_accumulated() -> None:
    torch.manual_seed(0)
    pm = autopar.parallelize(Scores(), 2, strategy="ddp", stop_at_nan=True)
    weights = torch.tensor([[1e30, -1e30, 1.0, 1.0]]) * 2.0**120
    with pm.no_sync():
        (pm(rows())["scores"] * weights).sum().backward()
    pm(rows())["scores"].sum().backward()
    assert any(not whole(p.grad).isfinite().all() for p in pm.parameters())


def test_an_overflow_that_waits_for_its_reduction_is_not_lost(gloo2: RankPool) -> None:
    """Else the scaler would take the step, without the gradient of the micro-step that was run again."""
    gloo2.run(scaled_and_accumulated)


def test_what_was_changed_in_between_is_told() -> None:
    guard = Guard(ControlGroup(alone=True), lambda control, replay, infinite: "")
    replay = Replay(None, {}, 0, {})  # type: ignore[arg-type]
    replay.returned([torch.tensor(math.nan), torch.tensor(3)])
    assert error_of(lambda: guard.check_forward(replay)) == (
        "a forward pass of the module gave NaN in outputs on rank 0: run again, the call has no NaN: its batch, a "
        "parameter or a buffer was changed in between. Parameters are as before: mend what is named, or go on from the "
        "last checkpoint without this batch"
    )
    gradient = torch.tensor([1.0, math.nan])
    replay.returned([torch.tensor(0.0), torch.tensor(3)])
    assert "NaN in gradients" in error_of(lambda: guard.check_backward(replay, [torch.tensor(1.0), None], [gradient]))
    guard.check_backward(replay, [torch.tensor(1024.0), None], [gradient, None])  # by the scale of the loss
    guard.check_backward(replay, [torch.tensor(1.0), None], [torch.tensor(math.inf), torch.zeros(0)])


def test_find_nan_searches_a_module_that_stops(gloo2: RankPool) -> None:
    assert gloo2.run(searched) == ["rank 0: input '0'; rank 1: input '0'"] * 2


def searched() -> str:
    pm = autopar.parallelize(Root(), 2, strategy="ddp", stop_at_nan=True)
    pm(rows(), FINE).backward()
    expected = [2 * whole(p.grad) for p in pm.parameters()]
    pm.zero_grad()
    with pm.no_sync():
        pm(rows(), FINE).backward()
        found = autopar.find_nan(pm, rows() * math.nan, FINE)
    assert pm.stop_at_nan
    pm(rows(), FINE).backward()
    for parameter, gradient in zip(pm.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-5, atol=1e-6)
    return found
