"""What a boolean mask selects, followed as all rows and which of them count: equal to eager, forward and backward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from joint_eager import run_joint, tangents_of
from pool import RankPool
from programs import subject
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.graph import OutputKind
from autopar.normalise import normalise
from autopar.trace import trace

ROWS, LENGTH, WIDTH, CLASSES = 8, 3, 5, 4

Use = Callable[["Selects", Tensor, Tensor, Tensor], Tensor]


class Selects(nn.Module):
    """Gives what `use` makes of scores, labels and a mask, and a number that has a gradient whatever the mask."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.scores, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.scale, self.temperature = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.tensor(1.5))
        self.table, self.norm = nn.Embedding(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.use = use

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        y = self.scores(x)
        return torch.stack([self.use(self, y, labels, mask), (y.sum() + self.scale.sum() + self.temperature) / 1000])


def masks() -> dict[str, Tensor]:
    everywhere = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return {
        "random": torch.rand(ROWS, LENGTH) > 0.5,
        "all": everywhere,
        "not on one rank": everywhere & (torch.arange(ROWS) >= ROWS // 4).unsqueeze(1),
        "none": ~everywhere,
    }


def batch(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, LENGTH, 6, dtype=torch.float64), torch.randint(CLASSES, (ROWS, LENGTH)), mask


def all_losses(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a, b, sign = y[mask], (y * y)[mask], (labels[mask] > 1).double() * 2 - 1
    return sum(  # type: ignore[return-value]
        [
            F.mse_loss(a, b), F.l1_loss(a, b), F.smooth_l1_loss(a, b, reduction="sum"), F.huber_loss(a, b),
            F.binary_cross_entropy(a.sigmoid(), b.detach().sigmoid()), F.soft_margin_loss(a[:, 0], sign),
            F.binary_cross_entropy_with_logits(a, b.detach().sigmoid(), pos_weight=torch.tensor(2.0)),
            F.kl_div(a.log_softmax(-1), b.detach().softmax(-1), reduction="batchmean"),
            F.kl_div(a.log_softmax(-1), b.detach().softmax(-1), reduction="sum"), F.poisson_nll_loss(a, b),
            F.cosine_embedding_loss(a, b, sign), F.triplet_margin_loss(a, b, a.flip(1)), F.gaussian_nll_loss(a, b, b),
            F.margin_ranking_loss(a[:, 0], b[:, 0], sign), F.hinge_embedding_loss(a[:, 1], sign),
            F.multi_margin_loss(a, labels[mask]), F.multilabel_soft_margin_loss(a, (b > 1).double()),
        ]
    )  # fmt: skip


def weighted_classes(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    weight = torch.arange(1.0, WIDTH + 1, dtype=y.dtype, device=y.device)
    loss = F.cross_entropy(y[mask], labels[mask], weight=weight, label_smoothing=0.1, ignore_index=1)
    each = F.cross_entropy(y[mask], labels[mask], reduction="none").square().mean()
    of_shares = F.cross_entropy(y[mask], y.detach()[mask].softmax(-1))
    return loss + each + of_shares + nn.NLLLoss(reduction="sum")(y[mask].log_softmax(-1), labels[mask])


def masks_made_twice(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    kept = labels.masked_fill(~mask, -1)  # which no class is
    flat = F.cross_entropy(y.view(-1, WIDTH)[kept.view(-1) != -1], kept.view(-1)[kept.view(-1) != -1])
    return flat + F.cross_entropy(s.head(y[kept > -1]), kept[kept > -1])


def labels_from_one(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    shifted = torch.where(mask, labels + 1, -1)
    return F.cross_entropy(y[shifted > 0], shifted[shifted > 0] - 1)


def elements(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return y.masked_select(mask.unsqueeze(-1)).square().mean() + y.masked_select(y > 0).sum() + y[y > 0].log().mean()


def decoded(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(s.head(F.relu(s.norm(y[mask]), inplace=True)), labels[mask])


def shared_operands(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    powers = (a.exp() ** s.scale + torch.atan2(a, s.temperature) + s.scale / a.exp()).mean()
    return powers + (s.head.weight.sum(0) * a / s.temperature).sum() / mask.sum()


def undefined_elsewhere(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Rows that do not count are NaN, or the derivative of their root is infinite."""
    nan = torch.where(mask.unsqueeze(-1), y, torch.nan)
    zero = y.abs() * torch.where(mask.unsqueeze(-1), 1.0, 0.0)
    return s.head(nan[mask]).square().mean() + s.head(zero.sqrt()[mask]).mean()


def undefined_after(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """So they may be once they have gone through a layer."""
    return s.head(y[mask]).square().log().mean() + s.head(y[mask] - 1).square().sum(-1).sqrt().mean()


def norms(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    rows = s.head(a).norm(dim=-1).mean() + F.normalize(s.head(a), dim=-1).sum() + a.std(-1).mean()
    return rows + s.norm(a).square().mean() + a.norm() + F.cosine_similarity(a, (y + 1)[mask], dim=-1).mean()


def lookups(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a, classes = y[mask], labels[mask]
    chosen = a.log_softmax(-1).gather(1, classes.unsqueeze(1)).squeeze().mean()
    hot = (F.one_hot(classes, WIDTH) * a.softmax(-1)).sum(-1).mean()
    return chosen + hot + s.table(classes).mul(a).sum() + s.table.weight[classes].square().mean()


def products(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a, weight = y[mask], s.head.weight.t()
    flat = (
        (a @ weight).mean()
        + (a @ s.scale).mean()
        + torch.mm(a, weight).sum()
        + torch.addmm(s.scale[:4], a, weight).sum()
    )
    q = a.unflatten(1, (WIDTH, 1))
    attended = (
        F.scaled_dot_product_attention(q, q, q).mean() + F.conv1d(a.unsqueeze(1), s.scale[:3].view(1, 1, 3)).sum()
    )
    return flat + attended + torch.bmm(a.unsqueeze(1), a.unsqueeze(2)).mean()


def parts(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    columns = (
        a[:, 1:].mean() + a[..., 0].sum() + y[mask, 0].mean() + y[mask, :2].sum() + a[:, torch.tensor([0, 2])].sum()
    )
    pieces = a.unbind(1)[0].mean() + a.split([2, 3], -1)[1].sum() + a.chunk(5, dim=1)[0].mean() + a[:, None].mean()
    shapes = a.view(-1).mean() + (a.flatten() * a.reshape(-1)).mean() + a.unsqueeze(-1).transpose(1, 2).mean()
    return columns + pieces + shapes + torch.cat([a, a], -1).mean() + torch.stack([a, a * a], 1).permute(0, 2, 1).mean()


def reductions(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    over_rows = a.sum(0).mean() + a.mean(0).sum() + a.mean(dim=(0, 1)) + a.mean(0, keepdim=True).sum()
    each = a.sum(1).mean() + a.amax(-1).mean() + a.max(-1).values.sum() + a.logsumexp(-1).mean()
    truths = (
        (a > 0).any(0).sum() + (a > 0).all() + torch.count_nonzero(a) + (a.argmax(-1) == labels[mask]).double().mean()
    )
    return over_rows + each + truths + a.topk(2, -1).values.mean() + a.sort(-1)[0].cumsum(-1).mean()


def selected_again(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a, classes = y[mask], labels[mask]
    kept = classes > 1
    twice = F.cross_entropy(y[mask][labels[mask] > 0], labels[mask][labels[mask] > 0]) + F.cross_entropy(
        a[classes != 1], classes[classes != 1]
    )
    return twice + F.cross_entropy(a[kept], classes[kept]) + a[a > 0].mean() + a[kept][:, 0].sum()


def pointwise(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    made = torch.where(a > 0, a, a * 2) + a.masked_fill(a < 0, 1.0) + a.clamp(min=0) + torch.maximum(a, -a) + 2**a
    made = made + (1 - a) + 1 / a.exp() + torch.special.expit(a) + F.logsigmoid(a) + F.silu(a) + (~(a > 0)).double()
    sizes = a.size(-1) + a.shape[-1] + a.dim() + a.ndim + (a.dtype is y.dtype)
    whole = (labels[mask] // (labels[mask] + 1)).double().mean()
    return (made * sizes + a.new_zeros(WIDTH) + a.to(y).clone().contiguous().type_as(y)).mean() + whole


def sizes(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask]
    n, width = a.shape
    assert a.shape == (y * 2)[mask].shape
    mean = a.sum() / n + a.sum() / a.numel() + a.square().sum() / (2 * n) + a.sum() / a.shape.numel()
    return mean + a.view(n, width, 1).mean() + a.reshape(a.size(0), width).sum() / (a.shape[0] * a.shape[1])


def joined(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a, b, classes = y[mask], y[labels > 1], torch.cat([labels[mask], labels[labels > 1]])
    return F.cross_entropy(torch.cat([a, b]), classes) + torch.cat([a, y[:, 0]]).mean()


def whitened(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    a = y[mask].sum(-1)
    spread = a.var(unbiased=False) + y[mask].std(0).sum() + torch.var(y[mask], dim=0, correction=0).mean()
    return ((a - a.mean()) / (a.std() + 1e-5)).pow(3).mean() + spread


def without_spread(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A deviation of equal rows: no gradient passes, rather than one that is no number."""
    equal = (y * 0 + s.temperature)[mask]
    return equal.std(0, unbiased=False).sum() + equal.std(0).nan_to_num().sum() + y[mask].sum()


def paired(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return y.log_softmax(-1)[mask, labels[mask]].mean()


def one_for_all(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """What is written is a parameter, as where tokens are masked."""
    z = y * 1
    z[mask] = s.scale
    z[labels > 2] = s.temperature
    return z.square().mean()


def written(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[mask] = F.gelu(y[mask])
    z[mask] *= 2
    z[~mask] = 1.0
    a = y[mask]
    a += z[mask]
    a.mul_(s.temperature).clamp_(max=3)
    return z.square().mean() + a.mean()


def mask_written_later(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    kept = mask.clone()
    before = y.detach()[kept]
    kept[:, 0] = True
    return before.sum() + y[kept].mean()


USES = [
    all_losses, weighted_classes, masks_made_twice, labels_from_one, elements, decoded, shared_operands,
    undefined_elsewhere, undefined_after, norms, lookups, products, parts, reductions, selected_again, pointwise,
    sizes, joined, whitened, without_spread, paired, one_for_all, written, mask_written_later,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.filterwarnings("ignore:(std|var):UserWarning")
def test_the_numbers_are_those_of_eager(use: Use) -> None:
    torch.manual_seed(0)
    model, cases = Selects(use).double(), masks()
    joint = trace(model, batch(cases["random"]), {})
    tangents = tangents_of(joint)
    for is_normalised in (False, True):
        if is_normalised:
            normalise(joint)
        for name, mask in cases.items():
            call, eager = batch(mask), copy.deepcopy(model)
            output = eager(*call)
            output.backward(*tangents.values())
            for spec, value in run_joint(joint, model, (call, {}), tangents).items():
                is_output = spec.kind is OutputKind.OUTPUT
                expected = output.detach() if is_output else eager.get_parameter(spec.path).grad
                value = torch.zeros(()) if value is None else value
                expected = torch.zeros_like(value) if expected is None else expected
                same = torch.allclose(value, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
                assert same, f"{name}, {spec}: {value} instead of {expected}"


@pytest.mark.parametrize("use", [all_losses, weighted_classes, decoded, selected_again, written])
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("tp", (4,)), ("fsdp+tp", (2, 2))])
def test_every_plan_gives_them(use: Use, strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cases = masks()
    case = subject(Selects(use), *batch(cases["random"]))
    plan = case.plan(strategy, *sizes)
    program = case.program(plan)
    for mask in cases.values():
        case.args = batch(mask)
        report = case.compare(program, plan)
        assert report.ok, report


class WithStatistics(Selects):
    """Changes buffers, so that AOTAutograd traces it."""

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self.statistics = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.statistics(x.flatten(0, 1)).view(x.shape), labels, mask)


@pytest.mark.parametrize("use", [masks_made_twice, written, mask_written_later])
def test_they_are_followed_where_buffers_change(use: Use) -> None:
    torch.manual_seed(0)
    report = subject(WithStatistics(use), *batch(masks()["random"])).verify("ddp", 4)
    assert report.ok, report


def test_rows_stay_where_they_are() -> None:
    """Under data parallelism nothing but the sums over all rows, and how many count, leaves a rank."""
    case = subject(Selects(decoded), *batch(masks()["random"]))
    graph = case.program(case.plan("ddp", 4)).forward.module.graph
    moved = [node for node in graph.nodes if "_c10d_functional" in str(node.target) and "wait" not in node.name]
    assert moved
    assert all("all_reduce" in node.name and node.meta["val"].numel() <= 3 for node in moved)


def loss_alone(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(s.head(y[mask]), labels[mask]) + y.square().mean()


def in_processes() -> None:
    """Three steps with masks of another kind each, beside the single device."""
    torch.manual_seed(0)
    model, cases = Selects(loss_alone).double(), masks()
    reference, rank, world = copy.deepcopy(model), dist.get_rank(), dist.get_world_size()
    calls = [batch(cases[name]) for name in ("random", "all", "not on one rank")]
    own = [tuple(t.chunk(world)[rank] for t in call) for call in calls]
    pm = autopar.parallelize(model, world, strategy="zero3", example_inputs=own[0])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, reference)]
    for call, part in zip(calls, own, strict=True):
        for module, optimizer, given in ((pm, optimizers[0], part), (reference, optimizers[1], call)):
            optimizer.zero_grad()
            module(*given).sum().backward()
            optimizer.step()
    for name, parameter in reference.named_parameters():
        found = pm.get_parameter(name).full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-10)


def test_training_on_ranks(gloo2: RankPool) -> None:
    gloo2.run(in_processes)


# ------------------------------------------------------------------------------------------------------------- refusals


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


REFUSED: dict[str, tuple[Use, str]] = {
    "range": (lambda s, y, labels, mask: y.sum() + torch.arange(y[mask].size(0)).sum(), ".*UnknownSize"),
    "unknown": (lambda s, y, labels, mask: y[mask].cumsum(0).sum(), r"torch\.Tensor\.cumsum"),
    "two masks": (
        lambda s, y, labels, mask: (y[mask] * y[labels > 1]).sum(),
        r"torch\.Tensor\.mul of rows that different masks select",
    ),
    "others": (
        lambda s, y, labels, mask: (y[mask] * y[:, 0]).sum(),
        r"torch\.Tensor\.mul of selected rows and a tensor of shape \[8, 5\]",
    ),
    "positions": (lambda s, y, labels, mask: y[mask].max(0).indices.sum(), r"torch\.Tensor\.max"),
    "iteration": (lambda s, y, labels, mask: sum(row.sum() for row in y[mask]), r"torch\.Tensor\.__iter__"),  # type: ignore[dict-item]
    "first": (lambda s, y, labels, mask: y[mask][0].sum(), r"torch\.Tensor\.__getitem__"),
    "dims": (lambda s, y, labels, mask: F.mse_loss(y[mask][:, :1], y[mask][:, 0]), r"torch\.nn\.functional\.mse_loss"),
    "batch norm": (lambda s, y, labels, mask: F.batch_norm(y[mask], None, None, training=True).sum(), ".*batch_norm"),
    "custom": (lambda s, y, labels, mask: Doubles.apply(y[mask]).sum(), r"torch\.Tensor\.mul"),
    "product": (lambda s, y, labels, mask: (y[mask] @ y[mask].T).sum(), r"torch\.Tensor\.T"),
    "returned": (lambda s, y, labels, mask: y[mask], "what the model returns"),
}


def test_a_mask_beside_other_positions_is_refused() -> None:
    """Which go with the selected rows, one for each, and are of another number than all rows."""
    uses: list[Use] = [
        lambda s, y, labels, mask: y.log_softmax(-1)[mask[:, 0], 0, labels[:, 0]].sum(),
        lambda s, y, labels, mask: y[mask.any(1), :, torch.tensor([1])].sum(),
    ]
    for use in uses:
        with pytest.raises(TraceError, match=f"the root module, {__file__}"):
            trace(Returns(use).double(), batch(masks()["random"]), {})


class Returns(Selects):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.use(self, self.scores(x), labels, mask)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_named(case: str) -> None:
    use, name = REFUSED[case]
    with pytest.raises(TraceError) as caught:
        trace(Returns(use).double(), batch(masks()["random"]), {})
    message = str(caught.value)
    assert "depends on the values of a tensor" in message
    assert __file__ in message
    assert "an `if`" not in message  # there is none: PyTorch's own code asks how many rows there are
    said = rf"is followed as all rows and which of them count, but not through {name}[^:]*: the root module"
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda s, y, labels, mask: y.sum() / len(y[mask]), "a Python number .*, not by len"),
        (lambda s, y, labels, mask: y[mask].sum() * (1 / y[mask].shape[0]), "a Python number is made of one"),
        (lambda s, y, labels, mask: y.sum() if y[mask].numel() > 0 else y.mean(), "an `if`, `while` or `assert` asks"),
        (lambda s, y, labels, mask: y.sum() if y[mask].shape == y.shape else y.mean(), "an `if`, `while` or `assert`"),
    ],
)
def test_their_number_is_read_as_any_other(use: Use, reason: str) -> None:
    with pytest.raises(TraceError, match=f"the root module, {__file__}.*depends on the values of a tensor: {reason}"):
        trace(Returns(use).double(), batch(masks()["random"]), {})


def test_a_check_of_their_number_is_left_out() -> None:
    def checked(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        is_same = y[mask].numel() == y[labels > 1].numel()
        del is_same
        return y[mask].mean()

    trace(Returns(checked).double(), batch(masks()["random"]), {})


def test_what_is_selected_and_goes_nowhere_is_left_out() -> None:
    """A metric that nobody reads, of a function that is not followed."""

    def measures(s: Selects, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        y[mask].cumsum(0)
        return y.mean()

    report = subject(Selects(measures), *batch(masks()["random"])).verify("ddp", 4)
    assert report.ok, report
