"""What loops rely on besides the step itself, beside the single device: norms, scalers, compiled optimizers, flags."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import hugging_face, mine, whole
from tiny_models import TinyGpt, token_batch
from torch import Tensor, nn

import autopar


class Uneven(nn.Module):
    """Widths that neither 2 nor 4 divide, and a norm whose parts the ranks hold unequally."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 9)
        self.up, self.norm, self.down = nn.Linear(9, 22), nn.LayerNorm(22), nn.Linear(22, 31)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.down(self.norm(torch.relu(self.up(self.table(ids)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def made(model: nn.Module, strategy: str, mesh: int | str) -> tuple[autopar.ParallelModule, nn.Module]:
    reference = copy.deepcopy(model)
    return autopar.parallelize(model, mesh, strategy=strategy), reference


def clips(strategy: str, mesh: int | str) -> None:
    torch.manual_seed(0)
    pm, reference = made(Uneven().double(), strategy, mesh)
    ids, targets = token_batch(8, vocab=31)
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for model, rows in ((pm, mine(ids, targets)), (reference, (ids, targets))):
            model.zero_grad()
            model(*rows).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        found = whole(nn.utils.clip_grad_norm_(pm.parameters(), 0.1, norm_type))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        for parameter, other in zip(pm.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), other.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", 4), ("tp", 4), ("fsdp+tp", "2x2")])
def test_norms_of_uneven_parts(gloo4: RankPool, strategy: str, mesh: int | str) -> None:
    gloo4.run(clips, strategy, mesh)


def overflows() -> None:
    """A gradient that is infinite on one rank alone: every rank leaves out the step, and halves its scale."""
    torch.manual_seed(0)
    pm, _ = made(Uneven(), "zero3", 2)
    ids, targets = mine(*token_batch(4, vocab=31))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    before = [whole(p.detach()).clone() for p in pm.parameters()]
    scaler.scale(pm(ids, targets)).backward()
    local = pm.get_parameter("table.weight").grad.to_local()  # type: ignore[union-attr]
    if dist.get_rank() == 1:
        local.view(-1)[0] = math.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    for parameter, value in zip(pm.parameters(), before, strict=True):
        assert torch.equal(whole(parameter.detach()), value)


def test_an_overflow_on_one_rank_is_one_on_all(gloo2: RankPool) -> None:
    gloo2.run(overflows)


def compiled() -> None:
    torch.manual_seed(0)
    pm, reference = made(TinyGpt(layers=1).double(), "zero3", 2)
    ids, targets = token_batch(4)
    pm(*mine(ids, targets))
    ours = torch.optim.AdamW(pm.parameters(), lr=0.01, foreach=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=True)
    # Compiled, AdamW corrects its moments in float32, on a single device as well.
    both = [torch.compile(optimizer.step, backend="aot_eager") for optimizer in (ours, theirs)]
    for seed in range(3):
        ids, targets = token_batch(4, seed=seed)
        for model, rows in ((pm, mine(ids, targets)), (reference, (ids, targets))):
            model.zero_grad()
            model(*rows)["loss"].backward()
        for step in both:
            step()
    for parameter, other in zip(pm.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), other.detach(), rtol=0, atol=1e-9)


def test_a_compiled_optimizer(gloo2: RankPool) -> None:
    gloo2.run(compiled)


def flagged_later() -> None:
    """The model's flag for checkpointing, switched on through the `ParallelModule` as trainers do."""
    torch.manual_seed(0)
    pm, reference = made(hugging_face("llama").double(), "zero3", 2)
    ids = token_batch(4, vocab=64)[0]
    (rows,) = mine(ids)
    pm.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="gradient checkpointing switched on, which has no effect: the plan says"):
        loss = pm(input_ids=rows, labels=rows).loss
    loss.backward()
    reference(input_ids=ids, labels=ids).loss.backward()
    for parameter, other in zip(pm.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), other.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


def test_checkpointing_flags_that_come_later_are_told_too(gloo2: RankPool) -> None:
    gloo2.run(flagged_later)
