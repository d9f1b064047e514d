"""Modules whose work depends on values of tensors run whole on every rank, as one op, and equal the single device."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from programs import Subject, trained_beside_one_device
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar._compat import allocator_events
from autopar.errors import StaleModelError, TraceError
from autopar.export_text import program_text
from autopar.normalise import normalise
from autopar.opaque import OPAQUE_OPS, OpaqueCall, find_call, run_opaque
from autopar.plan_report import whole_modules
from autopar.randomness import replace_random_ops
from autopar.single_device import Float64Throughout, in_float64
from autopar.trace import trace

D = 8


def subject(model: nn.Module, *args: Any, **kwargs: Any) -> Subject:
    """Trace a model on a global batch as `autopar.verify` does, modules that read values as one op each."""
    model, args, kwargs = in_float64(model, args, kwargs)
    with Float64Throughout():
        joint = trace(model, args, kwargs, opaque=True)
    return Subject(model, args, kwargs, replace_random_ops(normalise(joint)))


def calls_of(one: Subject) -> list[OpaqueCall]:
    nodes = one.joint.module.graph.find_nodes(op="call_function", target=OPAQUE_OPS[0])
    return [find_call(node.args[-1]) for node in nodes]


def paths_of(one: Subject) -> list[str]:
    return [call.path for call in calls_of(one)]


def assert_equal(one: Subject, *cases: tuple[str, tuple[int, ...]], num_steps: int = 0) -> None:
    for strategy, sizes in cases or (("zero3", (4,)), ("fsdp+tp", (2, 2))):
        plan = one.plan(strategy, *sizes)
        report = one.compare(one.program(plan), plan, num_steps)
        assert report.ok, f"{strategy}: {report}"


# ---- ways of reading ----


class Reader(nn.Module):
    """Does something with a linear layer that depends on values."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(D, D), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear, x)


class Around(nn.Module):
    """A module between two layers that can be cut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), inner, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x).tanh())).square().mean()


def if_positive(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) if x.sum() > 0 else -x


def until_small(linear: nn.Module, x: Tensor) -> Tensor:
    while x.abs().max() > 0.4:
        x = x * 0.5
    return linear(x)


def by_a_number(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * x.mean().item()


def selected_rows(linear: nn.Module, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, rows, linear(x[rows]))


def by_mask(linear: nn.Module, x: Tensor) -> Tensor:
    out, mask = x.clone(), x[:, 0] > 0
    out[mask] = linear(x[mask])
    return out


def by_mask_if_any(linear: nn.Module, x: Tensor) -> Tensor:
    return by_mask(linear, x) if (x[:, 0] > 0).any() else x.clone()


def in_parts(linear: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    counts = (x[:, 0] > 0).long().bincount(minlength=2).tolist()
    few, many = x[order].split(counts)
    return torch.cat([linear(few), many * 2])[order.argsort()]


def by_numpy(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * float(x.detach().cpu().numpy().max())


def one_of_several(linear: nn.Module, x: Tensor) -> Tensor:
    return [x.sin(), linear(x)][int(x[0, 0] > 0)]


FOLLOWED = [by_mask]  # as all rows, without a module's running whole
READS = [if_positive, until_small, by_a_number, selected_rows, in_parts, by_numpy, one_of_several, *FOLLOWED]


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_equals_the_single_device(read: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    one = subject(Around(Reader(read)), torch.randn(8, D))
    assert paths_of(one) == ([] if read in FOLLOWED else ["inner"])
    assert_equal(one, ("zero3", (4,)), ("tp", (2,)))


class Experts(nn.Module):
    """A loop over the experts that have tokens, as in eager mixtures of experts."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, D, 2 * D) / 4)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * D, D) / 4)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self.up)).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            place, token = torch.where(mask[expert[0]])
            row = x[token] @ self.up[expert[0]]
            out.index_add_(0, token, row.relu() @ self.down[expert[0]] * weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Linear(D, D), nn.Linear(D, 3), Experts()
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        x = x + self.experts(rows, chosen, weights).view_as(x)
        return self.head(x).square().mean()


def test_a_loop_over_experts_under_every_strategy() -> None:
    torch.manual_seed(0)
    one = subject(Mixture(), torch.randn(8, 2, D))
    assert paths_of(one) == ["experts"]
    cases = [("ddp", (4,)), ("zero3", (2, 2)), ("tp", (4,)), ("tp+sp", (2, 2)), ("fsdp+tp", (2, 2))]
    assert_equal(one, *cases, num_steps=2)
    report = one.verify("tp", 4)
    assert 0 < report.sharded_flops_fraction < 0.9  # what runs whole is counted as such


def test_found_by_verify_and_auto() -> None:
    torch.manual_seed(0)
    model, batch = Mixture(), torch.randn(8, 2, D)
    with pytest.warns(UserWarning, match=r"values of tensors: experts, with \d+% of the parameters, for .*py"):
        assert autopar.verify(model, "auto", batch, mesh=4).ok
    with pytest.warns(UserWarning, match=r"run.* whole on every rank"):
        assert autopar.verify(model, "zero3", batch, mesh=4, precision="bf16").ok


# ---- how modules are called, and hold their parameters ----


class Rows(nn.Module):
    """Gives the rows that are positive: as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[(x[:, 0] > 0).nonzero()[:, 0]])


class SumOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = Rows(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.rows(x).sum(0)


def test_what_gives_as_many_rows_as_there_are_runs_in_the_module_around_it() -> None:
    torch.manual_seed(0)
    one = subject(Around(SumOfRows()), torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert_equal(one)


class Twice(nn.Module):
    """Two modules call one, with keywords and containers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        shared = Several()
        self.left, self.right = nn.ModuleDict({"inner": shared}), nn.ModuleDict({"inner": shared})
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, (b, gone) = self.left["inner"](x, scale=2, parts={"bias": x[:1]})
        c, (d, _) = self.right["inner"](x=self.mix(a), parts={"bias": b[:1]}, scale=3)
        assert gone is None
        return {"loss": (c * d).mean(), "ids": a.argmax(-1)}


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.register_buffer("shift", torch.randn(D))

    def forward(self, x: Tensor, *, scale: int, parts: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, None]]:
        y = self.linear(x) * scale + self.shift
        if y.mean() > 0:
            y = y * self.frozen
        return y, (y.t().contiguous().t() + parts["bias"], None)


def test_a_shared_module_with_keywords_containers_frozen_parameters_and_buffers() -> None:
    torch.manual_seed(0)
    one = subject(Twice(), torch.randn(8, D))
    assert paths_of(one) == ["left.inner", "left.inner"]
    assert_equal(one)


class Tied(nn.Module):
    """A weight that is used in a module that runs whole, twice, and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)
        self.inner = nn.Sequential(nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), Sign())
        self.inner[0].weight = self.inner[1].weight = self.first.weight
        self.whole, self.last = Whole(self.inner), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.whole(self.first(x)) @ self.first.weight).square().mean()


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[(x[:, 0] > 0).nonzero()[:, 0]]


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sum(0)


def test_a_parameter_tied_in_and_out_of_a_module_that_runs_whole() -> None:
    torch.manual_seed(0)
    one = subject(Tied(), torch.randn(8, D))
    assert paths_of(one) == ["whole"]
    assert_equal(one, ("zero3", (4,)), ("tp", (4,)), num_steps=2)


class LeavesLoss(nn.Module):
    """Leaves a tensor on itself that the model reads, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.balance, self.width = nn.Linear(D, D), torch.zeros(()), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.balance, self.width = y.square().mean(), x.shape[-1]
        return y if y.sum() > 0 else y.sin()


class ReadsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = LeavesLoss(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)).square().mean() + self.inner.width * self.inner.balance


def test_what_a_module_sets_on_itself_is_there_for_others() -> None:
    torch.manual_seed(0)
    model = ReadsLoss()
    with pytest.warns(UserWarning, match=r"the model's forward keeps inner\.balance"):
        one = subject(model, torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert one.model.inner.width == 0  # type: ignore[union-attr]
    assert_equal(one)


def test_without_gradients() -> None:
    """In evaluation, and under `no_grad` inside of training."""
    torch.manual_seed(0)
    model = Around(Reader(selected_rows)).eval()
    with torch.no_grad():
        joint = trace(model.double(), (torch.randn(8, D).double(),), {}, train=False, opaque=True)
    x = torch.randn(8, D).double()
    parameters = dict(model.named_parameters())
    (found,) = joint.module(*(parameters.get(s.path, x) for s in joint.inputs))
    torch.testing.assert_close(found, model(x), rtol=0, atol=1e-12)

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(D, D), Reader(if_positive)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.inner(x)
            return (self.first(x) * scale).sum()

    one = subject(Frozen(), torch.randn(8, D))
    assert [node.target for node in one.joint.module.graph.nodes if node.target in OPAQUE_OPS] == [OPAQUE_OPS[0]]
    assert_equal(one)


def test_beside_batch_statistics() -> None:
    """Which are written to buffers, so that AOTAutograd makes the graph."""
    torch.manual_seed(0)
    model = Around(Reader(selected_rows))
    model.first = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))  # type: ignore[assignment]
    one = subject(model, torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert_equal(one, num_steps=1)


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) if self.training else x
        return y if y.sum() > 0 else -y


def test_gradients_are_those_of_the_mode_of_the_forward() -> None:
    torch.manual_seed(0)
    one = subject(Around(ByMode()), torch.randn(8, D))
    one.model.inner.eval()  # type: ignore[operator,union-attr]
    (call,) = calls_of(one)
    linear = one.model.inner.linear  # type: ignore[union-attr]
    x = torch.randn(8, D).double()
    grads = call.gradients([x, linear.weight, linear.bias], [torch.ones(8, D).double()])  # type: ignore[list-item,union-attr]
    assert grads[1].any()
    assert not one.model.inner.training  # type: ignore[union-attr]


def train_on_ranks(mesh: Any, strategy: str) -> int:
    torch.manual_seed(0)
    model = Mixture().double()
    batches = [(torch.randn(8, 2, D).double(),) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_beside_one_device(model, mesh, strategy, batches, lambda loss: loss)
    return dist.get_rank()


@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", 4), ("fsdp+tp", "2x2")])
def test_on_real_ranks(gloo4: RankPool, strategy: str, mesh: Any) -> None:
    assert gloo4.run(train_on_ranks, mesh, strategy) == [0, 1, 2, 3]


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(D, D), ByScale(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.linear(x).tanh())


class ByScale(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(D, D), scale

    def forward(self, x: Tensor) -> Tensor:
        return selected_rows(self.linear, x) * self.scale


class Stack(nn.Module):
    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(map(Block, scales)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("scales", [[0.5] * 7, [0.5, 0.6, 0.7, 0.5, 0.6, 0.5, 0.7]])
def test_alike_modules_of_a_stack_are_one_call(scales: list[float]) -> None:
    """Which leaves the stack folded; a number that differs tells them apart."""
    torch.manual_seed(0)
    model, batch = Stack(scales), torch.randn(8, D)
    joint = trace(model, (batch,), {}, fold=True, opaque=True)
    assert all("forward" not in vars(module) for module in model.modules())
    nodes = joint.module.graph.find_nodes(op="call_function", target=OPAQUE_OPS[0])
    alike = len(set(scales)) == 1
    assert len({node.args[-1] for node in nodes}) == len(set(scales))
    assert len(nodes) == (4 if alike else 7)
    text = whole_modules(joint)
    assert len(text) == 1
    assert text[0].startswith("blocks.0.inner and 6 more, with 47% of the parameters, for ")
    with pytest.warns(UserWarning, match=r"blocks\.0\.inner and 6 more"):
        assert autopar.verify(model, "zero3", batch, mesh=4).ok


# ---- what is refused ----


def refusal(model: nn.Module, *args: Tensor) -> str:
    with pytest.raises(TraceError) as caught:
        subject(model, *args)
    return str(caught.value)


def test_the_model_itself_is_never_run_whole() -> None:
    message = refusal(Reader(if_positive), torch.randn(4, D))
    assert "the root module" in message
    assert "test_opaque.py:" in message
    assert "torch.where(condition, a, b)" in message
    assert "No module inside of the model holds that line" in message
    assert "the model itself is not run so: nothing would be divided" in message
    message = refusal(nn.Sequential(nn.Tanh(), Reader(if_positive)), torch.randn(4, D))
    assert "module 1 cannot: it holds all parameters of the model" in message
    message = refusal(nn.Sequential(nn.Linear(D, D), Rows()), torch.randn(4, D))
    assert "module 1 cannot: shapes of what it gives depend on values: (f64[4, 8]) or (f64[0, 8])" in message


class ReadsAnothers(nn.Module):
    """Reads a value, and a parameter that is not its own: held in a list, or by a function."""

    def __init__(self, scale: nn.Parameter, by_function: bool) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(D, D), (lambda: scale) if by_function else [scale]

    def forward(self, x: Tensor) -> Tensor:
        scale = self.held() if callable(self.held) else self.held[0]
        return self.linear(x) * scale if x.sum() > 0 else x


@pytest.mark.parametrize("by_function", [False, True])
def test_a_parameter_that_is_not_its_own_is_refused(by_function: bool) -> None:
    """An op gets no gradient to it."""
    scale = nn.Parameter(torch.ones(D))
    model = Around(ReadsAnothers(scale, by_function))
    model.scale = scale  # type: ignore[assignment]
    with pytest.raises(TraceError, match="it reads a tensor that is neither an argument nor a parameter or buffer"):
        trace(model, (torch.randn(8, D),), {}, opaque=True)


class GivesTwice(nn.Module):
    """Gives one tensor in two places, or sets what it gives on itself."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.linear, self.sets = nn.Linear(D, D), sets

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) if x.sum() > 0 else x.sin()
        if self.sets:
            self.hidden = y
            return y
        return y, y


class SumsBoth(nn.Module):
    def __init__(self, inner: GivesTwice) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), inner

    def forward(self, x: Tensor) -> Tensor:
        given = self.inner(self.first(x))
        one, other = (given, self.inner.hidden) if self.inner.sets else given
        return (one * other).mean()


@pytest.mark.parametrize("sets", [False, True])
def test_one_tensor_given_twice(sets: bool) -> None:
    torch.manual_seed(0)
    one = subject(SumsBoth(GivesTwice(sets)), torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert_equal(one)


class Touches(nn.Module):
    """Reads a value, and does something else besides."""

    def __init__(self, touch: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.touch = nn.Linear(D, D), touch
        self.calls, self.seen = 0, [0]
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y.sin()
        touched = self.touch(self, y)
        return touched if isinstance(touched, Tensor) else y


def counts(module: Any, y: Tensor) -> None:
    module.calls += 1


def keeps_a_number(module: Any, y: Tensor) -> None:
    module.calls = int(y.argmax())


def fills_a_list(module: Any, y: Tensor) -> None:
    module.seen.append(y)


def keeps_a_tuple(module: Any, y: Tensor) -> None:
    module.pair = (y, y)


def replaces_a_buffer(module: Any, y: Tensor) -> None:
    module.last = y.detach().mean(0)


def adds_to_a_buffer(module: Any, y: Tensor) -> None:
    module.total.add_(1)


def drops_out(module: Any, y: Tensor) -> Tensor:
    return nn.functional.dropout(y, 0.5)


def adds_noise(module: Any, y: Tensor) -> Tensor:
    return y + torch.randn_like(y)


@pytest.mark.parametrize(
    ("touch", "reason"),
    [
        (counts, r"module inner cannot: it sets calls to another value at each call"),
        (keeps_a_number, r"module inner cannot: what it gives besides tensors depends on values"),
        (fills_a_list, r"module inner cannot: it changes seen of a Touches"),
        (keeps_a_tuple, r"module inner cannot: it sets pair of a Touches to a tuple"),
        (replaces_a_buffer, r"module inner cannot: it replaces last of a Touches by another tensor"),
        (adds_to_a_buffer, r"module inner, which .* \(.*test_opaque\.py:\d+ .*\), changes inner\.total in place"),
        (drops_out, r"module inner, which runs whole .* calls aten\.native_dropout\.default, whose random numbers"),
        (adds_noise, r"module inner, which runs whole .* calls aten\.randn_like\.default, .* pass them in"),
    ],
)
def test_what_a_module_that_runs_whole_may_not_do(touch: Callable[[Any, Tensor], Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        subject(Around(Touches(touch)), torch.randn(8, D))


class InPlace(nn.Module):
    """Changes what it is given, in a module that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Clips()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.inner(y)
        return y


class Clips(nn.Module):
    def forward(self, y: Tensor) -> None:
        if y.sum() > 0:
            y.mul_(2)


def test_a_module_that_changes_what_it_is_given_runs_in_the_module_that_made_it() -> None:
    torch.manual_seed(0)
    one = subject(Around(InPlace()), torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert_equal(one)


class Told(nn.Module):
    """Tells a module a tensor by setting it there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hears()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.said = x.cos()
        return self.inner(x)


class Hears(nn.Module):
    said: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.said * x if x.sum() > 0 else x


def test_a_module_that_is_told_a_tensor_otherwise_runs_in_the_module_that_tells_it() -> None:
    torch.manual_seed(0)
    one = subject(Around(Told()), torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    assert_equal(one)


class ToldLater(nn.Module):
    """Calls a module twice, and tells it a tensor in between; or it remembers one itself."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.inner, self.last, self.remembers = MayHear(remembers), nn.Linear(D, D), remembers

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if not self.remembers:
            self.inner.said = y
        return self.last(self.inner(x))


class MayHear(nn.Module):
    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.said: Tensor | None = None
        self.remembers = remembers

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() if x.sum() > 0 else x
        if self.said is not None:
            y = y + self.said
        if self.remembers:
            self.said = y
        return y


@pytest.mark.parametrize("remembers", [False, True])
def test_what_a_module_holds_at_a_later_call_is_seen(remembers: bool) -> None:
    torch.manual_seed(0)
    model = Around(ToldLater(remembers))
    one = subject(model, torch.randn(8, D))
    assert paths_of(one) == ["inner"]
    expected = copy.deepcopy(one.model)(*one.args)
    found = one.joint.module(
        *(dict(one.model.named_parameters()).get(s.path, one.args[0]) for s in one.joint.inputs[:-1]),
        torch.ones(()).double(),
    )[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Counted(nn.Module):
    """A number on a module decides what its next call does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.warm = nn.Linear(D, D), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * (2 if self.warm else 1)
        self.warm = True
        return y if y.sum() > 0 else y.sin()


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Counted(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x))).square().mean()


def test_a_number_that_a_call_leaves_counts_in_the_next() -> None:
    torch.manual_seed(0)
    model = CallsTwice().double()
    x = torch.randn(8, D).double()
    expected = copy.deepcopy(model)(x)
    joint = trace(model, (x,), {}, opaque=True)
    values = [dict(model.named_parameters()).get(s.path, x) for s in joint.inputs[:-1]]
    torch.testing.assert_close(joint.module(*values, torch.ones(()))[0], expected, rtol=0, atol=1e-12)


def test_arguments_lie_in_memory_as_they_did() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1).sin().view(x.shape) if x.sum() > 0 else x

    one = subject(Around(Views()), torch.randn(8, D))
    (call,) = calls_of(one)
    x = torch.rand(D, 8).double().t()
    torch.testing.assert_close(call.values([x])[0], x.sin())
    assert copy.deepcopy(one.joint.module) is not None


class EarlyExit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x.sin()


class AddsLater(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inner, self.linear, self.in_place = EarlyExit(), nn.Linear(D, D), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = self.inner(x)
        if self.in_place:
            y += 1
        return (x * y).mean()


def test_what_may_be_an_argument_itself() -> None:
    torch.manual_seed(0)
    one = subject(AddsLater(False), torch.randn(8, D))
    assert_equal(one)
    message = refusal(AddsLater(True), torch.randn(8, D))
    assert "module inner, which runs whole" in message
    assert "return a copy (x.clone())" in message


# ---- what is found while running ----


class Grows(nn.Module):
    """Does something that no assumption meets."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(D, D), act

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.act(y) if x.sum().item() > 100 else y


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda y: y[:1], r"gave \(f64\[1, 8\]\), and \(f64\[8, 8\]\) when traced"),
        (lambda y: y.long(), r"gave \(i64\[8, 8\]\), and \(f64\[8, 8\]\) when traced"),
        (lambda y: torch.rand_like(y), r"drew random numbers"),
        (lambda y: (y, y), r"does another thing than when it was traced"),
    ],
)
def test_what_differs_from_the_trace_is_an_error(act: Callable[[Tensor], Tensor], reason: str) -> None:
    torch.manual_seed(0)
    one = subject(Around(Grows(act)), torch.randn(8, D))
    (call,) = calls_of(one)
    linear: Any = one.model.inner.linear  # type: ignore[union-attr]
    tensors = [torch.ones(8, D).double(), linear.weight, linear.bias]
    assert run_opaque(tensors, call.name)[0].shape == (8, D)
    tensors[0] = tensors[0] * 100
    with pytest.raises(StaleModelError, match=rf"module inner, which runs whole on every rank \(.*\), {reason}"):
        run_opaque(tensors, call.name)


class Overwrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 100:
            x.zero_()
        return x.sin()


def test_a_change_in_place_that_no_assumption_met_is_an_error() -> None:
    one = subject(Around(Overwrites()), torch.randn(8, D))
    (call,) = calls_of(one)
    with pytest.raises(StaleModelError, match=r"changed what it was given, a parameter or a buffer in place"):
        run_opaque([torch.full((8, D), 100.0).double()], call.name)


def test_experts_without_rows_get_gradients_of_zero() -> None:
    torch.manual_seed(0)
    one = subject(Around(Reader(selected_rows)), torch.randn(8, D))
    (call,) = calls_of(one)
    linear: Any = one.model.inner.linear  # type: ignore[union-attr]
    x = -torch.ones(8, D).double()
    given, weight, bias = call.gradients([x, linear.weight, linear.bias], [torch.ones_like(x)])
    assert given.eq(1).all()
    assert not weight.any()
    assert not bias.any()


def test_a_call_ends_with_its_graph() -> None:
    one = subject(Around(Reader(selected_rows)), torch.randn(8, D))
    name = calls_of(one)[0].name
    del one
    gc.collect()
    with pytest.raises(StaleModelError, match=r"module inner runs whole as its own Python code"):
        find_call(name)


# ---- what is said ----


def test_what_a_plan_and_an_export_say(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Mixture(), torch.randn(8, 2, D)
    with pytest.warns(UserWarning, match="run") as caught:
        plan = autopar.plan(model, "4x A100-80GB", example_inputs=batch, strategy="zero3")
    assert sum("Each runs whole on every rank" in str(w.message) for w in caught) == 1
    text = " ".join(str(plan).split())
    assert "so these modules run whole on every rank" in text
    assert "experts, with" in text
    assert "No sharding rule" not in text
    path = tmp_path / "plan.json"
    autopar.save_plan(plan, path)
    again = autopar.load_plan(path)
    assert again.report is not None
    assert again.report.whole_modules == plan.report.whole_modules  # type: ignore[union-attr]
    one = subject(model, batch)
    made = one.plan("zero3", 4)
    python = program_text(one.program(made), made).text
    assert "runs whole on every rank: Python of module experts" in python


def test_graphs_of_two_processes_are_the_same() -> None:
    """What tells calls of one process apart is left out where graphs are compared."""
    torch.manual_seed(0)
    model, batch = Mixture(), torch.randn(8, 2, D)
    first, second = (subject(model, batch) for _ in range(2))
    assert calls_of(first)[0].name != calls_of(second)[0].name
    assert first.joint.fingerprint() == second.joint.fingerprint()


class ByCounts(nn.Module):
    """Experts on slices of the rows sorted by expert, whose lengths numpy counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, D, 2 * D) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort()
        rows, parts, start = x[order // chosen.shape[1]], [], 0
        for matrix, length in zip(self.up, flat.bincount(minlength=3).cpu().numpy(), strict=True):
            if length == 0:
                continue
            parts.append((rows[start : start + length] @ matrix).relu() @ matrix.t())
            start += length
        done = torch.cat(parts)
        return torch.empty_like(done).index_copy(0, order, done).view(*chosen.shape, D).sum(1)


class ByComparison(ByCounts):
    """The same by comparing the ids with each expert's number."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, matrix in enumerate(self.up):
            token, _ = torch.where(chosen == number)
            if token.numel() > 0:
                out = out.index_add(0, token, (x[token] @ matrix).relu() @ matrix.t())
        return out


class Weighted(Experts):
    """The loop over a one-hot encoding."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().forward(x, chosen, torch.ones_like(chosen, dtype=x.dtype))


class Routed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.router, self.inner = nn.Linear(D, D), nn.Linear(D, 3), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.inner(x, self.router(x).topk(2).indices).square().mean()


@pytest.mark.parametrize("experts", [Weighted, ByCounts, ByComparison])
def test_experts_are_priced_as_the_tokens_dealt_out(experts: Callable[[], nn.Module]) -> None:
    """FLOPs as counted, and memory that is not under the allocator's, nor that of all tokens for every expert."""
    torch.manual_seed(0)
    one = subject(Routed(experts()), torch.randn(1024, D))
    assert_equal(one, ("zero3", (4,)))
    (call,) = calls_of(one)
    inner: Any = one.model.inner
    tensors = [torch.randn(1024, D).double(), torch.rand(1024, 3).topk(2).indices, *inner.parameters()]
    with FlopCounterMode(display=False) as counter:
        call.values(tensors)
    assert counter.get_total_flops() <= call.forward.flops <= 1.01 * counter.get_total_flops()
    with allocator_events() as sizes:
        results = call.gradients(tensors, [torch.randn(1024, D).double()])
    peak = max(itertools.accumulate(sizes)) - sum(result.nbytes for result in results)
    assert 0.98 * peak < call.backward.num_bytes < 2.5 * peak


def test_memory_is_that_of_all_rows_selected() -> None:
    """What the allocator gives, but for what kernels take for themselves."""
    torch.manual_seed(0)
    one = subject(Around(Reader(by_mask_if_any)), torch.randn(512, D))
    (call,) = calls_of(one)
    linear: Any = one.model.inner.linear  # type: ignore[union-attr]
    x = torch.ones(512, D).double()
    for estimate, run in (
        (call.forward, lambda: call.values([x, linear.weight, linear.bias])),
        (call.backward, lambda: call.gradients([x, linear.weight, linear.bias], [x])),
    ):
        with allocator_events() as sizes:
            results = run()
        peak = max(itertools.accumulate(sizes)) - sum(result.nbytes for result in results)
        assert 0.7 * estimate.num_bytes < peak < 1.1 * estimate.num_bytes
