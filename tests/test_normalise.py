"""Normalisation: each pass does what it says, keeps results, and gives every new node its metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_eager import assert_close, assert_equals_eager, check_against_eager, run_joint, tangents_of
from torch import Tensor, fx, nn

from autopar.graph import InputKind, JointGraph, OutputKind
from autopar.normalise import PASSES, forget_device_index, normalise
from autopar.trace import trace

aten = torch.ops.aten
F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Apply(nn.Module):
    """`function(linear(x), *rest)`, with the linear's module path `linear` and the function's `tail`."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.tail = Tail(function)

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.tail(self.linear(x), *rest)


class Tail(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def targets(joint: JointGraph) -> set[object]:
    return {node.target for node in joint.module.graph.nodes if node.op == "call_function"}


def count(joint: JointGraph, target: object) -> int:
    return sum(node.target is target for node in joint.module.graph.nodes)


# ---- losses ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("weighted", "ignore_index"), [(False, -100), (True, 2)], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 7, 2, 3)], ids=["one", "rows", "2d"])
def test_nll_loss(reduction: str, weighted: bool, ignore_index: int, shape: tuple[int, ...]) -> None:
    """Shape is (classes,) or (classes, rows, more…); some targets are ignored, one of them out of range."""
    classes, *rows = shape
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(1), dtype=F64) if weighted else None

    def loss(x: Tensor, target: Tensor) -> Tensor:
        scores = x[:, :classes]
        scores = scores.mean(0) if not rows else scores.reshape(rows[0], -1, classes).mean(1)
        if len(rows) > 1:
            scores = scores.view(rows[0], classes, 1, 1) * torch.arange(1, 7, device=x.device).view(1, 1, 2, 3)
        probs = F.log_softmax(scores, dim=1 if rows else 0)
        return F.nll_loss(probs, target, weight, reduction=reduction, ignore_index=ignore_index)

    def call(seed: int) -> Any:
        target = torch.randint(0, classes, rows, generator=torch.Generator().manual_seed(seed))
        if rows:
            target[0] = ignore_index
        return (random(14, 4, seed=seed), target), {}

    torch.manual_seed(0)
    joint = check_against_eager(Apply(loss, width=classes).double(), call(0), call(1))
    assert not {t for t in targets(joint) if "nll" in str(t)}
    assert aten.gather.default in targets(joint)
    assert not {t for t in targets(joint) if "scatter" in str(t) and not weighted}


def test_nll_loss_of_ignored_targets_only() -> None:
    """As ATen has it: a mean over nothing is nan, and its gradient is zero."""

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, ignore_index=-1)

    model = Apply(loss).double()
    call = ((random(3, 4), torch.full((3,), -1)), {})
    joint = normalise(trace(model, *call))
    for spec, value in run_joint(joint, model, call, tangents_of(joint)).items():
        if spec.kind is OutputKind.OUTPUT:
            assert value.isnan()
        else:
            assert torch.equal(value, torch.zeros_like(value))


def test_half_precision_nll_loss_counts_in_float32() -> None:
    """4,097 targets: bfloat16 cannot count that far, and sums of ones stall at 256."""
    model = Apply(lambda x, t: F.cross_entropy(x, t)).to(torch.bfloat16)
    call = ((random(4097, 4).to(torch.bfloat16), torch.zeros(4097, dtype=torch.long)), {})
    joint = normalise(trace(model, *call))
    eager = model(*call[0]).detach()
    (loss, *_) = run_joint(joint, model, call, tangents_of(joint)).values()
    assert_close(loss, eager, "loss", tolerance=2**-7)  # one rounding to bfloat16


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": F.soft_margin_loss,
    "l1": F.l1_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce": lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
    "label_smoothing": lambda x, t, reduction: F.cross_entropy(
        x, t[:, 0].long() % 4, label_smoothing=0.1, reduction=reduction
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_op_is_left(name: str, reduction: str) -> None:
    model = Apply(lambda x, t: LOSSES[name](x, t, reduction=reduction)).double()
    calls = [((random(3, 4, seed=seed), random(3, 4, seed=seed + 1).abs()), {}) for seed in (0, 5)]
    joint = check_against_eager(model, calls[0], calls[1])
    assert not {t for t in targets(joint) if "loss" in str(t) or "cross_entropy" in str(t) or "mean" in str(t)}


def test_a_decomposed_loss_belongs_to_its_module_and_pass() -> None:
    model = Apply(lambda x, t: F.cross_entropy(x, t))
    joint = normalise(trace(model, (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), {}))
    (gather,) = joint.module.graph.find_nodes(op="call_function", target=aten.gather.default)
    assert (gather.meta["module"], gather.meta["backward"]) == ("tail", False)
    (softmax,) = joint.module.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    where = softmax.all_input_nodes[0]
    assert where.target is aten.where.self
    assert (where.meta["module"], where.meta["backward"]) == ("tail", True)
    for node in joint.module.graph.nodes:
        assert {"module", "backward"} <= set(node.meta)
        assert node.op == "output" or "val" in node.meta


# ---- means ----


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.mean(),
    "one_dim": lambda x: x.mean(0),
    "negative_kept": lambda x: x.mean(-1, keepdim=True),
    "two_dims": lambda x: x.view(3, 2, 2).mean((0, 2)),
    "no_dims": lambda x: x.mean(()),
    "scalar": lambda x: x.sum().mean(),
    "integers": lambda x: x * torch.arange(4).mean(dtype=F64),
    "float32": lambda x: x.mean(dtype=torch.float32),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_become_sums_over_the_global_count(name: str) -> None:
    # A mean in float32 of float64 values is as exact as float32.
    calls = [((random(3, 4, seed=seed),), {}) for seed in (0, 5)]
    model = Apply(MEANS[name]).double()
    joint = normalise(trace(model, *calls[0]))
    assert_equals_eager(joint, model, calls[1], tolerance=1e-6 if name == "float32" else 1e-10)
    assert not {t for t in targets(joint) if "mean" in str(t)}
    assert aten.sum.dim_IntList in targets(joint)


def test_a_half_precision_mean_does_not_overflow() -> None:
    model = Apply(lambda x: (x * 0 + 60000).mean()).half()
    joint = normalise(trace(model, (torch.ones(4, 4).half(),), {}))
    (output, *_) = run_joint(joint, model, ((torch.ones(4, 4).half(),), {}), tangents_of(joint)).values()
    assert output.dtype == torch.float16
    assert output.item() == torch.tensor(60000.0).half().item()


# ---- no-ops, duplicates, dead code ----


def test_no_ops_are_dropped_and_copies_are_kept() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.detach().view(x.shape).to(F64).expand(3, 4)
        return x * y.clone()

    calls = [((random(3, 4, seed=seed),), {}) for seed in (0, 5)]
    joint = check_against_eager(Apply(function).double(), calls[0], calls[1])
    dropped = {aten.detach.default, aten.alias.default, aten._to_copy.default, aten.expand.default}
    assert not dropped & targets(joint)
    assert count(joint, aten.clone.default) == 1


def test_casts_that_change_something_are_kept() -> None:
    joint = normalise(trace(Apply(lambda x: x.double().sum()), (torch.ones(2, 4),), {}))
    assert count(joint, aten._to_copy.default) == 2  # and back, in the backward


def test_assertions_are_dropped() -> None:
    model = Apply(lambda x, t: (x * F.one_hot(t, 4)).sum())
    joint = trace(model, (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), {})
    assert {t for t in targets(joint) if "assert" in str(t)}
    assert not {t for t in targets(normalise(joint)) if "assert" in str(t)}


def test_a_transpose_of_a_transpose_is_nothing() -> None:
    joint = normalise(trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(2, 4),), {}))
    for node in joint.module.graph.find_nodes(op="call_function", target=aten.t.default):
        (source,) = node.all_input_nodes
        assert source.target is not aten.t.default
    weights = {
        node for node, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.path.endswith("weight")
    }
    backward = [
        node for node in joint.module.graph.nodes if node.meta["backward"] and weights & set(node.all_input_nodes)
    ]
    assert [node.target for node in backward] == [aten.mm.default]  # the second layer's weight, as it is


def test_other_transposes_stay() -> None:
    calls = [((random(3, 4, seed=seed),), {}) for seed in (0, 5)]
    model = Apply(lambda x: x.view(3, 2, 2).transpose(0, 1).transpose(1, 2).transpose(-1, -2)).double()
    joint = check_against_eager(model, calls[0], calls[1])
    forward = [n for n in joint.module.graph.nodes if n.target is aten.transpose.int and not n.meta["backward"]]
    assert len(forward) == 1


def test_equal_nodes_are_merged() -> None:
    joint = normalise(trace(Apply(lambda x: (x.exp() + x.exp()) * x.exp()), (torch.ones(2, 4),), {}))
    assert count(joint, aten.exp.default) == 1
    assert (
        count(normalise(trace(Apply(lambda x: x.sum(0) + x.sum(1)), (torch.ones(4, 4),), {})), aten.sum.dim_IntList)
        >= 2
    )


def test_arguments_that_python_calls_equal_are_told_apart() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.full((2,), 1) + torch.full((2,), 1.0) + torch.full((2,), True) + x.sum()

    joint = normalise(trace(Apply(function), (torch.ones(2, 4),), {}))
    assert count(joint, aten.full.default) == 3


def test_random_nodes_are_not_merged() -> None:
    model = Apply(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5) + torch.rand(4) + torch.rand(4))
    joint = normalise(trace(model, (torch.ones(2, 4),), {}))
    assert count(joint, aten.native_dropout.default) == 2
    assert count(joint, aten.rand.default) == 2


class RecomputesCosine(torch.autograd.Function):
    """Its backward repeats an op of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() * x.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.cos() ** 2 - x.sin() ** 2)


def test_the_backward_recomputes_what_it_recomputed() -> None:
    calls = [((random(3, 4, seed=seed),), {}) for seed in (0, 5)]
    joint = check_against_eager(Apply(RecomputesCosine.apply).double(), calls[0], calls[1])
    cosines = list(joint.module.graph.find_nodes(op="call_function", target=aten.cos.default))
    assert sorted(node.meta["backward"] for node in cosines) == [False, True]


def test_the_backward_reuses_views_of_the_forward() -> None:
    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.view(2, 8).sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return (grad * x.view(2, 8).cos()).view(4, 4)

    joint = normalise(trace(Apply(Views.apply), (torch.ones(4, 4),), {}))
    (cosine,) = joint.module.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert cosine.meta["backward"]
    assert cosine.all_input_nodes[0].target is aten.view.default
    assert not cosine.all_input_nodes[0].meta["backward"]


def test_dead_code_goes() -> None:
    joint = trace(Apply(lambda x: x.sum()), (torch.ones(2, 4),), {})
    graph = joint.module.graph
    with graph.inserting_before(graph.output_node()):
        dead = graph.call_function(aten.exp.default, (joint.placeholders[0],))
    dead.meta = {"val": joint.placeholders[0].meta["val"], "module": "", "backward": False}
    assert count(normalise(joint), aten.exp.default) == 0


def test_device_indices_are_forgotten() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.arange.default, (4,), {"device": torch.device("cuda", 3), "dtype": torch.int64})
    plain = graph.call_function(aten.arange.default, (4,), {"device": torch.device("cpu")})
    graph.output((node, plain))
    forget_device_index(graph)
    assert node.kwargs == {"device": torch.device("cuda"), "dtype": torch.int64}
    assert plain.kwargs == {"device": torch.device("cpu")}


def test_normalising_twice_changes_nothing() -> None:
    joint = normalise(trace(Apply(lambda x, t: F.cross_entropy(x, t)), (torch.ones(2, 4), torch.zeros(2).long()), {}))
    before = joint.fingerprint()
    assert normalise(joint).fingerprint() == before


def test_scalar_constants_become_nodes() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.half = torch.tensor(0.5, dtype=F64)  # neither parameter nor buffer

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.half + torch.tensor(2.0)

    calls = [((random(3, 4, seed=seed),), {}) for seed in (0, 5)]
    joint = check_against_eager(Constant().double(), calls[0], calls[1])
    assert not list(joint.module.graph.find_nodes(op="get_attr"))


@pytest.mark.parametrize("graph_pass", PASSES, ids=lambda p: p.__name__)
def test_each_pass_alone_keeps_results_and_metadata(graph_pass: Callable[[fx.Graph], None]) -> None:
    def function(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x.exp().t().t(), t) + x.exp().mean()

    model = Apply(function).double()
    calls = [((random(3, 4, seed=seed), torch.tensor([1, 0, 3])), {}) for seed in (0, 5)]
    joint = trace(model, *calls[0])
    graph_pass(joint.module.graph)
    joint.module.graph.lint()
    joint.module.recompile()
    assert_equals_eager(joint, model, calls[1])
    assert all({"module", "backward"} <= set(node.meta) for node in joint.module.graph.nodes)
    assert [spec.kind for spec in joint.inputs].count(InputKind.TANGENT) == 1
