"""Rewritten programs of plain modules equal the single device: outputs, gradients and buffers, under every strategy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import Subject, subject
from tiny_models import Llama, Mlp, TinyGpt, token_batch
from torch import Tensor, nn

from autopar import rules, verification, verify
from autopar.errors import BatchError, InputError, VerificationError
from autopar.graph import GraphInput, InputKind, OutputKind
from autopar.single_device import SingleDevice
from autopar.strategies import STRATEGIES
from autopar.verification import TOLERANCE, differences, relative_error


class ConvNet(nn.Module):
    """Convolutions (which have no sharding rule), pooling and group normalisation, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.second(F.max_pool2d(F.relu(self.first(x)), 2)))
        return F.cross_entropy(self.head(self.norm(x).mean((2, 3))), labels)


class Several(nn.Module):
    """Returns a tuple with a dict, an integer tensor, a flag and a constant in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.linear(x)
        return y, {"best": y.argmax(-1), "positive": y > 0, "mean": y.mean(-1)}, None, 3


class Tied(nn.Module):
    """One matrix used twice, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.encode(x).tanh() @ self.decode.weight, x)


class Frozen(nn.Module):
    """The first layer and a bias do not train; a scale is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        self.first.requires_grad_(False)
        self.second.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))).square().mean()


class Counting(nn.Module):
    """Keeps a running mean over the whole batch and a step count in buffers."""

    mean: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
            self.steps += 1
        return (y - self.mean).square().sum()


class Attention(nn.Module):
    """Softmax attention written out, with a mask that is an input, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(mask[:, None, None, :], -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Shifted(nn.Module):
    """What a norm's bias adds the next norm takes away, so that its gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        y = self.norm2(self.second(self.norm1(self.first(x)))).relu().mean((2, 3))
        return torch.nn.functional.cross_entropy(y, label)


@dataclass(frozen=True)
class Example:
    """A model and a global batch of 8 rows."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)


EXAMPLES = {
    "mlp": Example(Mlp, lambda: (torch.randn(8, 12),)),
    "conv": Example(ConvNet, lambda: (torch.randn(8, 3, 9, 9), torch.arange(8) % 5)),
    "noise": Example(Shifted, lambda: (torch.randn(8, 3, 9, 9), torch.arange(8))),
    "several outputs": Example(Several, lambda: (torch.randn(8, 6),)),
    "tied": Example(Tied, lambda: (torch.randn(8, 8),)),
    "frozen": Example(Frozen, lambda: (torch.randn(8, 8),)),
    "buffers": Example(Counting, lambda: (torch.randn(8, 4),)),
    "attention": Example(Attention, lambda: (torch.randn(8, 3, 8), torch.rand(8, 3) < 0.3)),
    "odd sizes": Example(lambda: TinyGpt(vocab=65, width=10, heads=2, layers=1), lambda: token_batch(8, 7, 65)),
    "dropout": Example(lambda: TinyGpt(layers=1, dropout=0.3), lambda: token_batch(8)),
    "llama": Example(Llama, lambda: token_batch(8, 8, 24)),
    "eight heads": Example(lambda: TinyGpt(vocab=64, heads=8, layers=1), lambda: token_batch(8, 8, 64)),
}


def made(name: str) -> Subject:
    torch.manual_seed(0)
    example = EXAMPLES[name]
    return subject(example.model(), *example.inputs())


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_every_strategy_equals_the_single_device(name: str) -> None:
    ours = made(name)
    for strategy in STRATEGIES:  # those of two axes factor the four ranks themselves
        report = ours.verify(strategy, 4)
        assert report.ok, f"{strategy}: {report}"
        assert report.errors


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("zero3", (8,)), ("tp", (8,)), ("tp+sp", (2, 4)), ("hsdp", (4, 2)), ("fsdp+tp", (2, 4)), ("fsdp+tp", (4, 2))],
    ids=str,
)
def test_eight_ranks(strategy: str, sizes: tuple[int, ...]) -> None:
    report = made("eight heads").verify(strategy, *sizes)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["buffers", "tied", "frozen", "dropout", "odd sizes", "noise"])
def test_steps_of_the_optimizer_are_compared_too(name: str) -> None:
    ours = made(name)
    plan = ours.plan("fsdp+tp", 2, 2)
    report = ours.compare(ours.program(plan), plan, num_steps=3)
    assert report.ok, report
    after = {error.removesuffix(" after 3 steps") for error in report.errors if error.endswith(" after 3 steps")}
    once = {error for error in report.errors if not error.endswith(" after 3 steps")}
    names = {spec.path for spec in ours.joint.inputs if spec.kind is InputKind.PARAM}
    assert after == once | {f"parameter {path}" for path in names}


@pytest.mark.parametrize(("size", "is_equal"), [(1e-14, True), (5e-13, True), (2e-12, False), (1e-9, False)])
def test_what_rounds_on_both_sides_is_compared_on_the_steps_scale(size: float, is_equal: bool) -> None:
    weight, values = torch.ones(3), {GraphInput(InputKind.PARAM, "w"): torch.ones(3)}
    expected = SingleDevice({}, {"w": weight, "b": torch.full((3,), size)}, {}, {})
    found = {(OutputKind.GRADIENT, "w"): weight, (OutputKind.GRADIENT, "b"): torch.full((3,), -size)}
    errors = differences(values, found, expected)
    assert (errors["gradient of b"] <= TOLERANCE) == is_equal


def test_an_optimizer_that_steps_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made("mlp")
    plan = ours.plan("zero3", 4)
    step = verification._Optimizer.step
    calls = iter([1.0, 1.0, 1 + 1e-4, 1.0])

    def scaled(side: Any, gradients: Any) -> None:
        factor = next(calls)
        step(side, {path: value * factor for path, value in gradients.items()})

    monkeypatch.setattr(verification._Optimizer, "step", scaled)
    report = ours.compare(ours.program(plan), plan, num_steps=2)
    assert not report.ok
    assert "after 2 steps" in report.worst


def test_every_output_gradient_and_buffer_is_compared() -> None:
    ours = made("several outputs")
    outputs = {spec.path for spec in ours.joint.outputs if spec.kind is OutputKind.OUTPUT}
    assert len(outputs) == 4
    report = ours.verify("ddp", 4)
    assert {f"output {path}" for path in outputs} | {"gradient of linear.weight", "gradient of linear.bias"} == set(
        report.errors
    )
    assert {"buffer mean", "buffer steps"} <= set(made("buffers").verify("ddp", 4).errors)
    assert set(made("tied").verify("ddp", 4).errors) == {"output ", "gradient of encode.weight"}
    assert set(made("frozen").verify("ddp", 4).errors) == {"output ", "gradient of second.weight", "gradient of unused"}


def test_a_report_reads() -> None:
    text = str(made("mlp").verify("zero3", 4))
    assert re.fullmatch(r"equal: 5 tensors, largest relative error \d\.\d\de-\d\d in \w.*", text)


@torch.library.custom_op("autopar_tests::flip_rows", mutates_args=())
def flip_rows(x: Tensor) -> Tensor:
    """An op that autopar has never heard of."""
    return x.flip(-1)


flip_rows.register_fake(lambda x: torch.empty_like(x))
flip_rows.register_autograd(lambda _, grad: flip_rows(grad))


class OwnOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return flip_rows(self.linear(x)).tanh()


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp"])
def test_an_op_of_ones_own_runs_whole_or_by_its_rule(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_USER_RULES", {})

    def moved(rule: bool) -> int:
        if rule:
            rules.register_sharding_rule("autopar_tests::flip_rows", "... n^ -> ... n")
        ours = subject(OwnOp(), torch.randn(8, 6))
        plan = ours.plan(strategy, 4)
        program = ours.program(plan)
        assert ours.compare(program, plan).ok
        return sum(c.num_bytes for c in program.collectives())

    assert moved(rule=False) > moved(rule=True)


def test_without_a_backward_pass() -> None:
    from autopar.graph import JointGraph
    from autopar.normalise import normalise
    from autopar.trace import trace

    ours = made("odd sizes")
    ours.joint = normalise(trace(ours.model, ours.args, ours.kwargs, train=False))
    assert isinstance(ours.joint, JointGraph)
    for strategy in ("ddp", "zero3", "tp", "fsdp+tp"):
        plan = ours.plan(strategy, 2, 2)
        program = ours.program(plan)
        assert program.backward is None
        assert ours.compare(program, plan).ok


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (6, r"the batch of 6 rows \(dim 0 of input '0'\) cannot be cut evenly over 4 ranks; use 4 or 8 rows"),
        (3, r"the batch of 3 rows \(dim 0 of input '0'\) cannot be cut evenly over 4 ranks; use 4 rows"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(rows: int, message: str) -> None:
    ours = subject(Mlp(), torch.randn(rows, 12))
    with pytest.raises(BatchError, match=message):
        ours.verify("ddp", 4)


def test_bytes_that_a_program_does_not_move_are_told() -> None:
    ours = made("mlp")
    plan = ours.plan("ddp", 4)
    program = ours.program(plan)
    assert program.backward is not None
    next(n for n in program.backward.module.graph.nodes if "bytes" in n.meta).meta["bytes"] += 8
    with pytest.raises(
        VerificationError, match="the program's collectives differ from those that ran, first at number 0"
    ):
        ours.compare(program, plan)


def test_relative_error() -> None:
    x = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert relative_error(x, x) == 0
    assert relative_error(x + torch.tensor([0, 1.0]), x) == 0.25
    assert relative_error(x, x[:1]) == float("inf")
    assert relative_error(x * float("nan"), x) == float("inf")
    assert relative_error(x * float("inf"), x * float("inf")) == 0
    assert relative_error(x, x * float("nan")) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.ones(1), torch.zeros(1)) > 1


class _AttentionWithDropout(nn.Module):
    """Its keys join an empty cache, and so come to lie in order; the normalised graph leaves that out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k = torch.cat([k[:, :, :0], k], 2)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)


def test_the_traced_reference_lies_otherwise_in_memory() -> None:
    report = subject(_AttentionWithDropout(), torch.randn(4, 3, 8)).verify("ddp", 2)
    assert report.ok, report


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Mlp(), torch.ones(4, 12, dtype=torch.long), r"the model itself fails on these inputs .*RuntimeError: .*dtype"),
        (nn.Embedding(8, 4), torch.full((4, 3), 99), r"fails on these inputs .*IndexError: index out of range"),
        (Mlp(), torch.empty(4, 12, device="meta"), r"input 0 is on the meta device and has no values"),
        (Mlp(), torch.ones(4, 12).to_sparse(), r"input 0 is a sparse_coo tensor"),
    ],
)
def test_inputs_that_cannot_be_verified(model: nn.Module, inputs: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify(model, "ddp", inputs, mesh=2)


class Holds(nn.Module):
    """Constants that are no buffers, and weights that PyTorch computes before each call and would not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(nn.Linear(12, 16))  # type: ignore[no-untyped-call]
        self.down = nn.utils.spectral_norm(nn.Linear(16, 8))
        self.turn, self.tables = torch.randn(8, 8), {"shift": [torch.randn(8)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) @ self.turn + self.tables["shift"][0]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_what_modules_hold_beside_parameters_is_compared_in_float64_too(strategy: str) -> None:
    torch.manual_seed(0)
    model = Holds()
    model(torch.ones(2, 12))
    report = verify(model, strategy, torch.randn(8, 12), mesh=4, num_steps=1)
    assert report.ok, str(report)
    assert model.turn.dtype == torch.float32


class Branches(nn.Module):
    """Of two layers, takes one, by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 1e9 else self.right(x)


@pytest.mark.filterwarnings("ignore:.*depends? on values of tensors")
def test_a_parameter_that_nothing_reaches_takes_no_step_and_is_named() -> None:
    """Its gradient is zero, and the single device has none: a step would only decay it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), Branches(), nn.Linear(12, 12))
    report = verify(model, "zero3", torch.randn(8, 12), mesh=4, num_steps=2)
    assert report.ok, str(report)
    assert "without the steps of 1.left.weight and 1 more in which the gradient is zero here" in str(report)
    assert not verify(model, "zero3", torch.randn(8, 12), mesh=4).note


def test_verify_takes_plans_and_names_only() -> None:
    with pytest.raises(InputError, match="verify takes a plan or a strategy's name, got None"):
        verify(Mlp(), None, torch.ones(4, 12))  # type: ignore[arg-type]


def test_a_step_that_is_all_nan_is_no_proof() -> None:
    with pytest.raises(InputError, match=r"output .* is NaN in all 64 entries.* nothing can be compared"):
        verify(Mlp(), "tp", (torch.full((8, 12), float("nan")),), mesh=2)
    with pytest.raises(InputError, match=r"num_steps=1\.5: give a whole number"):
        verify(Mlp(), "tp", (torch.ones(8, 12),), mesh=2, num_steps=1.5)  # type: ignore[arg-type]
