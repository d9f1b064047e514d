"""Mixed precision: what is cast where, what moves in which dtype, and that programs stay right."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from test_memory_truth import MODELS, WithLoss
from test_parallelize import mine
from tiny_models import Llama, Mlp, TinyGpt, token_batch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar._compat import fake_process_group
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.errors import InputError, TraceError, VerificationError
from autopar.graph import GraphInput, JointGraph
from autopar.normalise import normalise
from autopar.passes import coalesce, pipeline
from autopar.passes.pipeline import rewrite
from autopar.plan_file import plan_from_json, plan_to_json
from autopar.planner import plan_named
from autopar.program import COLLECTIVE_KINDS, LocalProgram, collective_nodes
from autopar.randomness import replace_random_ops
from autopar.trace import trace
from autopar.verification import run_all_ranks
from benchmarks.memory import measure

BF16 = torch.bfloat16
STRATEGIES = [("ddp", (4,)), ("zero1", (4,)), ("zero3", (4,)), ("tp", (4,)), ("tp+sp", (4,)), ("fsdp+tp", (2, 2))]


class Normed(nn.Module):
    """Convolutions with a batch norm between them, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3)), labels)


class ByHand(nn.Module):
    """Casts its weights itself, one of them through a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(12, 24)), nn.Parameter(torch.randn(8, 24))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x.to(BF16) @ self.up.to(BF16)) @ self.down.t().to(BF16)
        return y.float().square().mean()


def traced(model: nn.Module, *args: Any, dtype: torch.dtype | None = BF16, autocast: bool = False) -> JointGraph:
    with torch.autocast("cpu", BF16) if autocast else nullcontext():
        joint = trace(model, args, {}, dtype=dtype)
    return replace_random_ops(normalise(joint))


def program_of(joint: JointGraph, strategy: str, *sizes: int) -> LocalProgram:
    return rewrite(joint, plan_named(strategy, joint, sizes, sizes[-1]))


def moved(program: LocalProgram, kind: str, backward: bool) -> dict[torch.dtype, int]:
    """Bytes that collectives of a kind move in one pass, by dtype; numbers that are counted aside."""
    found: Counter[torch.dtype] = Counter()
    for graph in program.graphs:
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and COLLECTIVE_KINDS.get(node.target) == kind:
                value = node.meta["val"]
                if node.meta["backward"] is backward and value.is_floating_point() and value.numel() > 1:
                    found[value.dtype] += node.meta["bytes"]
    return dict(found)


# ---- programs are right


@pytest.mark.parametrize(("strategy", "sizes"), STRATEGIES, ids=str)
def test_programs_equal_the_single_device(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    models: list[tuple[nn.Module, Any]] = [
        (TinyGpt(), token_batch(8)),
        (TinyGpt(layers=1, dropout=0.3), token_batch(8)),
        (Mlp(), torch.randn(8, 12)),
        (Normed(), (torch.randn(8, 3, 9, 9), torch.arange(8) % 4)),
    ]
    for model, inputs in models:
        report = autopar.verify(model, strategy, inputs, mesh=sizes, precision="bf16")
        assert report.ok, report


def places(program: LocalProgram, graph: int, *kinds: str) -> tuple[list[int], list[int]]:
    """Where in a pass the products are, and where collectives of some kinds are."""
    nodes = list(program.graphs[graph].module.graph.nodes)
    ops = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    products = [i for i, node in enumerate(nodes) if node.target in ops]
    return products, [i for i, node in enumerate(nodes) if COLLECTIVE_KINDS.get(node.target) in kinds]


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("zero3", (4,)), ("fsdp+tp", (2, 2))], ids=str)
def test_parameters_and_gradients_travel_while_layers_run(
    strategy: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing casts all parameters first and all gradients last: there, all would be gathered, and wait, at once."""
    monkeypatch.setattr(coalesce, "FIRST_BUCKET_BYTES", 0)
    monkeypatch.setattr(coalesce, "BUCKET_BYTES", 0)
    program = program_of(traced(TinyGpt(layers=3), *token_batch(8)), strategy, *sizes)
    products, reduced = places(program, 1, "reduce_scatter", "all_reduce")
    assert sum(place < products[-1] for place in reduced) > len(reduced) / 2
    if strategy != "ddp":
        products, gathered = places(program, 0, "all_gather")
        assert sum(place > products[0] for place in gathered) > len(gathered) / 2


class Scaled(nn.Module):
    """Layers with a norm whose weight is cast where it is used, so that its gradient is cast after it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(12, eps=1e-6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x.square().mean()


def test_nobody_waits_for_gradients_that_are_cast_when_complete() -> None:
    program = program_of(traced(Scaled(), torch.randn(8, 12)), "ddp", 4)
    graph = program.joint.module.graph
    reductions = [node for node, _ in collective_nodes(graph, "all_reduce") if node.meta["backward"]]
    after = [coalesce.steps_after(node) for node in reductions]
    assert reductions
    assert all(steps is not None for steps in after)
    assert any(step.target is torch.ops.aten._to_copy.default for steps in after for step in steps or ())
    assert autopar.verify(Scaled(), "ddp", torch.randn(8, 12), mesh=4, precision="bf16").ok


def test_a_program_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_one(module: fx.GraphModule) -> fx.GraphModule:
        """Drops the sum of one gradient that is cast before it is summed."""
        reduction = next(n for n in module.graph.nodes if COLLECTIVE_KINDS.get(n.target) == "all_reduce")
        assert reduction.meta["backward"]
        assert reduction.all_input_nodes[0].target is torch.ops.aten._to_copy.default
        reduction.target, reduction.args = torch.ops.aten.clone.default, reduction.args[:1]
        return module

    monkeypatch.setattr(coalesce, "BUCKET_BYTES", 0)  # each gradient by itself
    monkeypatch.setattr(pipeline, "_scheduling", lambda plan: [("break_one", break_one)])
    with pytest.raises(VerificationError, match="a reduction over this axis is missing"):
        autopar.verify(Mlp(), "ddp", torch.randn(8, 12), mesh=4, precision="bf16")


# ---- what is cast


def test_inputs_losses_and_running_statistics_stay_wide() -> None:
    joint = traced(Normed(), torch.randn(8, 3, 9, 9), torch.arange(8) % 4)
    outputs = dict(zip(joint.outputs, joint.output_values, strict=True))
    assert {v.meta["val"].dtype for v in outputs.values() if v is not None} == {torch.float32, torch.int64}
    calls = {str(n.target): n for n in joint.module.graph.nodes if n.op == "call_function"}
    assert {n.meta["val"].dtype for n in calls["aten.convolution.default"].all_input_nodes} == {BF16}
    assert calls["aten.rsqrt.default"].meta["val"].dtype == torch.float32  # the norm's deviation
    assert calls["aten._log_softmax.default"].meta["val"].dtype == torch.float32


def test_wider_precision_than_the_model_and_none() -> None:
    x = torch.randn(8, 12)
    same = traced(Mlp(), x, dtype=None).fingerprint()
    assert traced(Mlp(), x, dtype=torch.float32).fingerprint() == same
    widened = traced(Mlp().bfloat16(), x.bfloat16(), dtype=torch.float32)
    products = [n for n in widened.module.graph.nodes if "mm" in str(n.target)]
    assert products
    assert {n.meta["val"].dtype for n in products} == {torch.float32}


def test_tracing_leaves_no_hooks() -> None:
    model = Mlp()
    traced(model, torch.randn(8, 12))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_where_a_wide_buffer_meets_narrow_values_the_error_says_so() -> None:
    with pytest.raises(TraceError, match=r"Parameters are used as torch\.bfloat16 here, while buffers .* stay"):
        traced(Llama(), *token_batch(8, vocab=24))
    traced(Llama(), *token_batch(8, vocab=24), dtype=None)


# ---- what moves


@pytest.mark.parametrize("how", ["precision", "autocast", "by hand"])
def test_parameters_are_gathered_narrow_and_gradients_summed_wide(how: str) -> None:
    torch.manual_seed(0)
    model = ByHand() if how == "by hand" else TinyGpt()
    args = (torch.randn(8, 12),) if how == "by hand" else token_batch(8)
    joint = traced(model, *args, dtype=BF16 if how == "precision" else None, autocast=how == "autocast")
    wide = traced(model, *args, dtype=None) if how != "by hand" else None
    for strategy in ("zero1", "zero3"):
        program = program_of(joint, strategy, 4)
        gathered = [moved(program, "all_gather", backward) for backward in (False, True)]
        assert set(moved(program, "reduce_scatter", True)) | set(moved(program, "all_reduce", True)) == {torch.float32}
        if how == "autocast":  # whose lookups and norms run in float32
            assert gathered[0][BF16] > 0
            continue
        assert gathered[0].keys() == {BF16}
        assert gathered[1].keys() == ({BF16} if strategy == "zero3" and how == "precision" else set())
        if wide is not None:
            before = program_of(wide, strategy, 4)
            assert moved(before, "all_gather", False) == {torch.float32: 2 * gathered[0][BF16]}
            assert moved(before, "reduce_scatter", True) == moved(program, "reduce_scatter", True)
    summed = moved(program_of(joint, "ddp", 4), "all_reduce", True)
    assert summed.keys() == {torch.float32}


def test_a_model_of_one_dtype_is_summed_in_that() -> None:
    program = program_of(traced(Mlp().bfloat16(), torch.randn(8, 12).bfloat16(), dtype=None), "ddp", 4)
    assert moved(program, "all_reduce", True).keys() == {BF16}


def test_casting_early_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = TinyGpt(vocab=33)  # which does not divide
    ids, targets = token_batch(8, vocab=33)
    joint = traced(model, ids, targets)
    values = dict(_values(joint, model, ids, targets))
    for strategy, sizes in (("zero3", (4,)), ("fsdp+tp", (2, 2))):
        early, _ = run_all_ranks(program_of(joint, strategy, *sizes), values)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "cast_early", lambda module: module)
            late_program = program_of(joint, strategy, *sizes)
            late, _ = run_all_ranks(late_program, values)
        assert torch.float32 in moved(late_program, "all_gather", False)
        assert early.keys() == late.keys()
        for key, value in early.items():
            assert torch.equal(value, late[key]), key  # type: ignore[arg-type]


def _values(joint: JointGraph, model: nn.Module, *inputs: Tensor) -> Iterator[tuple[GraphInput, Tensor]]:
    parameters, given = dict(model.named_parameters()), iter(inputs)
    for spec in joint.inputs:
        kind = spec.kind.value
        if kind == "input":
            yield spec, next(given)
        elif kind == "tangent":
            yield spec, torch.ones(())
        elif kind == "param":
            yield spec, parameters[spec.path].detach()


# ---- memory


@pytest.fixture
def _alone() -> Iterator[None]:
    with fake_process_group(4):
        yield


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
@pytest.mark.parametrize("name", ["parameters dominate", "activations dominate"])
def test_memory_is_predicted(name: str, strategy: str) -> None:
    build, batch = MODELS[name]
    profile, measured = measure(WithLoss(build()), strategy, (4,), batch, {}, torch.optim.AdamW, "bf16")
    # What a kernel for bfloat16 takes for itself depends on the CPU's instructions, and is not predicted.
    assert measured.lasting <= profile.peak.total <= 1.01 * measured.peak


# ---- the product


def mixed_training(strategy: str) -> None:
    torch.manual_seed(0)
    model = TinyGpt()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 2, 1.0, strategy=strategy, precision="bf16", example_inputs=mine(*token_batch(8)))
    assert pm.plan.report is not None
    assert pm.plan.report.precision == "bf16"
    assert "precision bf16" in str(pm.plan)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, reference))
    found, expected = [], []
    for step in range(4):
        ids, targets = token_batch(8, seed=step)
        ours.zero_grad()
        loss = pm(*mine(ids, targets))["loss"]
        loss.backward()
        ours.step()
        found.append(loss)
        expected.append(bf16_step(reference, theirs, ids, targets))
    assert {t.dtype for t in found} == {torch.float32}
    for parameter in pm.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert {s.dtype for s in ours.state[parameter].values()} == {torch.float32}
    # bfloat16 rounds to 2^-9 of a number.  The ranks round each its partial sum of a gradient, where the single device
    # rounds the whole one, so the weights drift apart by such roundings; the losses of four steps by 7e-4 at most.
    torch.testing.assert_close(torch.stack(found).detach(), torch.stack(expected), rtol=2**-9, atol=0)


def bf16_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, targets: Tensor) -> Tensor:
    """One step with parameters cast to bfloat16 and gradients cast back, by hand; no autocast."""
    optimizer.zero_grad()
    cast = {name: p.to(BF16) for name, p in model.named_parameters()}  # a tied matrix once
    logits = torch.func.functional_call(model, cast, (ids,), tie_weights=True)["logits"]
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp"])
def test_training_follows_the_single_device(gloo2: RankPool, strategy: str) -> None:
    gloo2.run(mixed_training, strategy)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match=r"no precision 'fp8'; choose one of fp32, bf16, fp16, or None"):
        Compiler(Mlp(), (4,), Cluster.parse("4 cpu"), precision="fp8")


def test_a_plan_made_for_one_precision_is_priced_again_in_another() -> None:
    cluster, x = Cluster.parse("4 cpu"), torch.randn(2, 12)
    mixed, plain = (Compiler(Mlp(), (4,), cluster, strategy="zero3", precision=p) for p in ("bf16", None))
    plan = mixed.plan(mixed.trace((x,), {}, True))
    loaded = plan_from_json(plan_to_json(plan))
    assert loaded.report is not None
    assert loaded.report.precision == "bf16"
    again = plain.given(plain.trace((x,), {}, True), loaded)
    assert again.report is not None
    assert again.report.precision == ""
    gathered = {p.report.precision: p.report.collective_bytes["all_gather@dp"] for p in (loaded, again) if p.report}
    assert gathered[""] == 2 * gathered["bf16"]
    with pytest.raises(autopar.PlanError, match=r"report\.precision of the plan file must be one of fp32, bf16, fp16"):
        plan_from_json(plan_to_json(plan).replace('"precision": "bf16"', '"precision": "fp8"'))
