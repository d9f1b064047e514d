"""Predicted peaks beside those that the allocator really sees, on one rank of the real runtime."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar._compat import fake_process_group, has_avx512
from benchmarks import memory
from benchmarks.memory import LoneRank, measure
from tests import tiny_models

RANKS = 4


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    with fake_process_group(RANKS):
        yield


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        output = self.model(*args)
        loss = output["loss"] if isinstance(output, dict) else output if output.dim() == 0 else output.square().mean()
        return (loss, output["logits"]) if isinstance(output, dict) else (loss,)


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.head = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3)))


MODELS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "parameters dominate": (
        partial(tiny_models.TinyGpt, vocab=64, width=64, seq=8), tiny_models.token_batch(1, seq=4, vocab=64),
    ),
    "activations dominate": (
        partial(tiny_models.TinyGpt, dropout=0.1, seq=64), tiny_models.token_batch(8, seq=64, vocab=32),
    ),
    "heads that do not divide": (
        partial(tiny_models.TinyGpt, vocab=64, width=48, heads=3, seq=16), tiny_models.token_batch(2, seq=16, vocab=64),
    ),
    "grouped heads": (tiny_models.Llama, tiny_models.token_batch(2, seq=16, vocab=24)),
    "convolutions": (partial(Conv, 64), (torch.randn(8, 3, 16, 16),)),
    "narrow convolutions": (partial(Conv, 16), (torch.randn(8, 3, 16, 16),)),
}  # fmt: skip


def dense(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs of their own: a slice keeps all that it is a slice of alive, which no plan can know."""
    return tuple(t.clone() for t in batch)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
@pytest.mark.parametrize("name", MODELS)
def test_never_under_and_at_most_a_tenth_over(name: str, strategy: str) -> None:
    build, batch = MODELS[name]
    profile, measured = measure(WithLoss(build()), strategy, (RANKS,), dense(batch), {}, torch.optim.AdamW)
    assert measured.at_rest < measured.tensors <= measured.peak
    # Whether an image of fewer than 16 channels is padded to 16 depends on the CPU with AVX-512: it is taken to be.
    most = 1.6 if name == "narrow convolutions" and has_avx512() else 1.1
    assert measured.peak <= profile.peak.total <= most * measured.peak
    assert sum(live.num_bytes for live in profile.live_at_peak) == profile.peak.total
    if "convolutions" not in name:  # all but what convolutions take inside is exact
        assert profile.peak.total <= 1.01 * measured.peak


@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "tp+sp"])
def test_recomputation(strategy: str, level: str) -> None:
    build, batch = MODELS["activations dominate"]
    model = WithLoss(build())
    plan = memory.recomputing(model, strategy, (RANKS,), dense(batch), {}, level)
    profile, measured = measure(model, plan, (RANKS,), dense(batch), {}, torch.optim.SGD)
    assert measured.peak <= profile.peak.total <= 1.1 * measured.peak


FOREACH = partial(torch.optim.AdamW, foreach=True, amsgrad=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, FOREACH])
def test_other_optimizers(optimizer: Any) -> None:
    build, batch = MODELS["parameters dominate"]
    profile, measured = measure(WithLoss(build()), "zero3", (RANKS,), dense(batch), {}, optimizer)
    assert measured.peak <= profile.peak.total <= 1.1 * measured.peak


def test_stand_ins_hold_what_gloo_holds() -> None:
    c10d = torch.ops._c10d_functional
    with LoneRank() as tracker:
        x = torch.zeros(8)  # 32 bytes
        gathered = c10d.all_gather_into_tensor(x, 4, "axis")
        assert (tuple(gathered.shape), tracker.live_bytes) == ((32,), 32 + 128)
        del x
        assert tracker.live_bytes == 32 + 128
        gathered = c10d.wait_tensor(gathered)
        assert tracker.live_bytes == 128
        part = c10d.reduce_scatter_tensor(gathered, "sum", 4, "axis")
        assert (tuple(part.shape), tracker.live_bytes) == ((8,), 128 + 128 + 32)
        c10d.wait_tensor(part)
        assert tracker.live_bytes == 128 + 32
        total = c10d.all_reduce(part, "sum", "axis")
        del part
        assert (tuple(total.shape), tracker.live_bytes) == ((8,), 128 + 32)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter_tensor"])
def test_stand_ins_give_contiguous_results(kind: str) -> None:
    across = torch.zeros(4, 6).t()  # as the backward pass of a transposed product has it
    arguments = ("sum", "axis") if kind == "all_reduce" else ("sum", 2, "axis")
    with LoneRank():
        assert getattr(torch.ops._c10d_functional, kind)(across, *arguments).is_contiguous()


def test_benchmark_rows() -> None:
    entry = SimpleNamespace(
        name="small",
        build=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
        make_batch=lambda rows, seed: ((torch.ones(rows, 4),), {}),
        loss_fn=lambda output: output.square().mean(),
    )
    row = memory.check(entry, "zero3", "4", 8, "adamw", "none")
    assert row["error"] is None
    assert (row["model"], row["strategy"], row["mesh"]) == ("small", "zero3", "4")
    assert row["at_rest_bytes"] < row["tensor_bytes"] <= row["measured_bytes"] <= row["predicted_bytes"]
    assert row["ratio"] == row["predicted_bytes"] / row["measured_bytes"] <= 1.1
    broken = memory.check(SimpleNamespace(name="broken", build=lambda: 1 // 0), "ddp", "4", 8, "adamw", "none")
    assert "ZeroDivisionError" in broken["error"]
    assert broken.keys() == row.keys()
