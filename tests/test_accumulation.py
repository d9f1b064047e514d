"""Gradient accumulation: as users write it, and with reductions left out until the last micro-step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from pool import RankPool
from programs import subject
from test_memory_truth import MODELS, WithLoss
from test_parallelize import mine, whole
from tiny_models import TinyGpt, token_batch
from torch import nn

import autopar
from autopar._compat import fake_process_group
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.graph import InputKind, OutputKind
from autopar.passes.defer import defer_reductions
from autopar.program import collectives_of
from benchmarks.memory import measure

MICRO_STEPS, SEQS = 3, (8, 8, 5)
"""The last micro-batch is shorter, so that it runs as another program."""


def micro_batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    return token_batch(8, SEQS[micro], seed=MICRO_STEPS * step + micro)


def backwards(model: nn.Module, step: int, rows: Callable[..., tuple[torch.Tensor, ...]], no_sync: bool) -> None:
    for micro in range(MICRO_STEPS):
        inside = no_sync and micro < MICRO_STEPS - 1
        with model.no_sync() if inside else nullcontext():  # type: ignore[operator]
            loss = model(*rows(*micro_batch(step, micro)))["loss"]
        (loss / MICRO_STEPS).backward()


def accumulates(strategy: str, mesh: int | str, no_sync: bool) -> None:
    torch.manual_seed(0)
    model = TinyGpt().double()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, mesh, 1.0, strategy=strategy, example_inputs=mine(*token_batch(8)))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, reference))
    for step in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        backwards(pm, step, mine, no_sync)
        backwards(reference, step, lambda *rows: rows, False)
        for (name, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), expected.grad, rtol=1e-9, atol=1e-12, msg=name)  # type: ignore[arg-type]
        ours.step()
        theirs.step()
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "tp+sp"])
def test_equals_the_single_device(gloo2: RankPool, strategy: str, no_sync: bool) -> None:
    gloo2.run(accumulates, strategy, 2, no_sync)


@pytest.mark.parametrize("strategy", [pytest.param("hsdp", marks=pytest.mark.slow), "fsdp+tp"])
def test_equals_the_single_device_on_two_axes(gloo4: RankPool, strategy: str) -> None:
    gloo4.run(accumulates, strategy, "2x2", True)


def drops() -> None:
    torch.manual_seed(0)
    pm = autopar.parallelize(TinyGpt().double(), 2, strategy="zero3", example_inputs=mine(*token_batch(8)))
    batch = mine(*token_batch(8))
    pm(*batch)["loss"].backward()
    expected = [whole(p.grad) for p in pm.parameters()]  # type: ignore[arg-type]
    pm.zero_grad()
    with pm.no_sync():
        loss = pm(*batch)["loss"]
    loss.backward()
    assert {name for name, p in pm.named_parameters() if p.grad is not None} == {"positions.weight"}, "others wait"
    pm.zero_grad()
    pm(*batch)["loss"].backward()
    for parameter, gradient in zip(pm.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), gradient, rtol=0, atol=0)  # type: ignore[arg-type]


def test_zero_grad_drops_what_waits(gloo2: RankPool) -> None:
    gloo2.run(drops)


def one_rank_alone() -> None:
    pm = autopar.parallelize(TinyGpt(), 2, strategy="ddp", example_inputs=mine(*token_batch(8)))
    alone = pm.no_sync() if torch.distributed.get_rank() else nullcontext()
    with alone, pytest.raises(autopar.StaleModelError, match="no_sync is False on rank 0, True on rank 1"):
        pm(*mine(*token_batch(8)))


def test_ranks_that_differ_are_told(gloo2: RankPool) -> None:
    gloo2.run(one_rank_alone)


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("zero1", (4,)), ("zero3", (4,)), ("hsdp", (2, 2))])
def test_reductions_and_nothing_else_are_deferred(strategy: str, sizes: tuple[int, ...]) -> None:
    ours = subject(TinyGpt(), *token_batch(8))
    program = ours.program(ours.plan(strategy, *sizes))
    assert program.backward is not None
    deferred = defer_reductions(program.backward)
    for graph in (deferred.compute, deferred.reduce):
        graph.module.graph.lint()
        assert len(graph.inputs) == len(graph.module.graph.find_nodes(op="placeholder"))
        assert len(graph.outputs) == len(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
    before, compute, late = (
        [(c.kind, c.axis, c.num_bytes) for c in collectives_of(graph.module.graph)]
        for graph in (program.backward, deferred.compute, deferred.reduce)
    )
    assert sorted(compute + late) == sorted(before)
    # What the lookup of positions still does to its gradient keeps that one's reduction in the backward pass.
    assert sum(kind in ("reduce_scatter", "all_reduce") for kind, _, _ in compute) == len(sizes)
    assert {kind for kind, _, _ in late} <= {"reduce_scatter", "all_reduce"}
    waiting = [spec.path for spec in deferred.compute.outputs if spec.kind is OutputKind.SAVED]
    assert waiting == [spec.path for spec in deferred.reduce.inputs if spec.kind is InputKind.SAVED]


# ---- predictions


@pytest.fixture
def _alone() -> Iterator[None]:
    with fake_process_group(4):
        yield


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("parameters dominate", "ddp"),
        ("activations dominate", "ddp"),
        ("parameters dominate", "zero3"),
        pytest.param("activations dominate", "zero3", marks=pytest.mark.slow),
        pytest.param("parameters dominate", "tp", marks=pytest.mark.slow),
        ("activations dominate", "tp"),
    ],
)
def test_memory_is_predicted(name: str, strategy: str) -> None:
    build, batch = MODELS[name]
    for precision in (None, "bf16"):
        profile, measured = measure(
            WithLoss(build()), strategy, (4,), batch, {}, torch.optim.AdamW, precision, accumulate=3
        )
        # What a kernel for bfloat16 takes for itself depends on the CPU's instructions, and is not predicted.
        least = measured.peak if precision is None else measured.lasting
        assert least <= profile.peak.total <= 1.01 * measured.peak


def test_a_step_of_several_micro_steps() -> None:
    cluster, batch = Cluster.parse("4 cpu"), token_batch(2)
    one, three = (Compiler(TinyGpt(), (4,), cluster, strategy="zero3", accumulate=n) for n in (1, 3))
    single, triple = (c.plan(c.trace(batch, {}, True)).report for c in (one, three))
    assert single is not None
    assert triple is not None
    assert triple.exposed_s == pytest.approx(3 * single.exposed_s)
    assert 2 * single.compute_s < triple.compute_s < 3 * single.compute_s, "one step of the optimizer"
    assert triple.collective_bytes == {kind: 3 * size for kind, size in single.collective_bytes.items()}
    assert triple.memory.total >= single.memory.total
    with pytest.raises(autopar.InputError, match=r"accumulate=0: an optimizer's step takes at least 1 micro-step"):
        Compiler(TinyGpt(), (4,), cluster, accumulate=0)
    with pytest.raises(autopar.InputError, match=r"accumulate=2\.5: .* a whole number"):
        Compiler(TinyGpt(), (4,), cluster, accumulate=2.5)  # type: ignore[arg-type]
