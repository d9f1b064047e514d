"""The graph that is written while a model runs is node for node the one that AOTAutograd makes, or is left to that."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.graph import JointGraph, graph_lines
from autopar.graph_writer import GraphWriter, UnwritableError
from autopar.normalise import normalise
from autopar.trace import trace
from tests.deep_models import FOLDED, WHOLE
from tests.tiny_models import ConvNet


@contextmanager
def by_aot() -> Iterator[None]:
    """Inside, no graph is written."""

    def refuse(*_: Any) -> None:
        raise UnwritableError("left to AOTAutograd")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphWriter, "finish", refuse)
        yield


@contextmanager
def by_writer() -> Iterator[None]:
    """Inside, AOTAutograd cannot be used."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the graph was not written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.trace.capture_joint", refuse)
        yield


def described(joint: JointGraph, owners: bool = True) -> list[tuple[Any, ...]]:
    """Inputs, outputs and every node of a graph, with its strides and the module that owns it."""
    graph = joint.module.graph
    nodes = zip(graph_lines(graph), graph.nodes, strict=True)
    described = [
        (line, node.meta["module"] if owners else "", node.meta.get("backward"), strides(node)) for line, node in nodes
    ]
    return [(joint.inputs, joint.outputs, joint.trains, joint.tied), *described]


def strides(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value.stride() if isinstance(value, Tensor) else None


def both(model: nn.Module, args: tuple[Any, ...], kwargs: Any = None, **settings: Any) -> tuple[JointGraph, JointGraph]:
    """The graph as it is written, and as AOTAutograd makes it, without ops that do nothing."""
    with by_writer():
        written = trace(model, args, kwargs or {}, **settings)
    with by_aot():
        made = trace(model, args, kwargs or {}, **settings)
    return normalise(written), normalise(made)


def check_same(*call: Any, owners: bool = True, **settings: Any) -> None:
    written, made = both(*call, **settings)
    for one, other in zip(described(written, owners), described(made, owners), strict=True):
        assert one == other


@pytest.mark.parametrize(
    "name",
    [
        *("alternating_experts", "bert", "gemma3", "gpt2_dropout", "tiny_gpt"),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_models(name: str) -> None:
    build, call, _ = FOLDED[name]
    args, kwargs = call()
    check_same(build(), args, kwargs, num_ranks=2)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_models_with_hooks_functions_and_other_oddities(name: str) -> None:
    build, call = WHOLE[name]
    args, kwargs = call()
    check_same(build(), args, kwargs, owners="hooks" not in name)  # a hook's ops belong to whoever's gradient it gets


def test_a_view_of_what_was_written_in_place_may_stand_elsewhere() -> None:
    """AOTAutograd makes such views anew where they are read."""
    build, call, _ = FOLDED["mixtral"]
    args, kwargs = call()
    written, made = both(build(), args, kwargs)
    kinds = [
        Counter((n.target, str(strides(n)), n.meta["module"], n.meta.get("backward")) for n in joint.module.graph.nodes)
        for joint in (written, made)
    ]
    calls = [{kind: count for kind, count in one.items() if not isinstance(kind[0], str)} for one in kinds]
    assert calls[0] == calls[1]


class Apply(nn.Module):
    """A function of a linear layer's result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 2] = True
    return x.masked_fill(mask, 0.0)


def written_by_index(x: Tensor) -> Tensor:
    order = x.detach()[:, 0].argsort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return x[places]


def shifted(x: Tensor) -> Tensor:
    moved = torch.zeros_like(x)
    moved[:, 1:] = x[:, :-1]
    moved[:, 0] = 1.0
    return moved


def written_through_views(x: Tensor) -> Tensor:
    y = x * 2
    rows, before = y.t().unsqueeze(0), y[1:3]
    rows[0, 2:4].mul_(x.detach().t()[:2])
    y.view(3, 8).permute(1, 0)[5].add_(1.0)
    return rows.sum() + before.square().sum() + y[0, 3]


WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3).square(),
    "in_place": lambda x: (x * 2).add_(x).mul_(0.5).relu_(),
    "in_place_by_index": written_by_index,
    "part_written": shifted,
    "view_written": lambda x: (y := x * 2, y[:, 0].mul_(2), y)[2],
    "views_written": written_through_views,
    "mask_written": masked,
    "in_place_narrower": lambda x: (x * 2).add_(torch.ones(6, dtype=torch.bfloat16)),
    "scalar": lambda x: x * torch.tensor(0.5) + torch.tensor([1.0, 2.0] * 3),
    "several_results": lambda x: torch.cat(list(reversed(x.split(2, 1))), 1).sort(1)[0],
    "complex": lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))).conj().abs(),
    "inverse": lambda x: torch.linalg.inv(x[:4, :4]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "interpolated": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "indexed": lambda x: x[torch.tensor([1, 0, 1])],
    "without_gradient": lambda x: (x.sum(), x.detach() * 2),
    "no_tangent": lambda x: x.detach() + 1,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long), ignore_index=2),
    "binary": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("train", [True, False])
def test_functions(name: str, train: bool) -> None:
    check_same(Apply(WRITTEN[name]), (torch.randn(4, 6),), train=train)


LEFT_TO_AOT: dict[str, Callable[[Tensor], Any]] = {
    "diagonal_written": lambda x: (y := x * 2, y.diagonal().mul_(2), y)[2],
    "part_of_a_split_written": lambda x: (y := x.detach() * 2, y.split(3, 1)[0].mul_(2), x + y)[2],
}


@pytest.mark.parametrize("name", LEFT_TO_AOT)
def test_what_is_not_written(name: str) -> None:
    """What writes through a view of a rarer kind is left to AOTAutograd."""
    model = Apply(LEFT_TO_AOT[name])
    with by_writer(), pytest.raises(TraceError, match="the graph was not written"):
        trace(model, (torch.randn(4, 6),), {})


@pytest.mark.parametrize("counts", [True, False])
def test_batch_statistics_are_left_to_aot(counts: bool) -> None:
    """Buffers change, with a count of batches or, called as a function, in an op whose schema does not say so."""
    model = ConvNet() if counts else Apply(lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6), training=True))
    call = (torch.randn(4, 3, 8, 8),) if counts else (torch.randn(4, 6),)
    with by_writer(), pytest.raises(TraceError, match="the graph was not written"):
        trace(model, call, {})


def test_nothing_is_kept_of_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[Any] = []
    start = GraphWriter.__init__

    def noted(self: GraphWriter, *args: Any) -> None:
        writers.append(weakref.ref(self))
        start(self, *args)

    monkeypatch.setattr(GraphWriter, "__init__", noted)
    trace(Apply(WRITTEN["views_written"]), (torch.randn(4, 6),), {})
    gc.collect()
    assert len(writers) == 1
    assert writers[0]() is None


@pytest.mark.parametrize("fails", [False, True])
def test_no_mode_of_tracing_stays(fails: bool) -> None:
    """After a trace, also one that fails, saved tensors have their hooks and views their usual gradients."""
    with by_aot(), pytest.raises(TraceError) if fails else nullcontext():
        trace(Apply(lambda x: x[0] if fails and x.sum() > 0 else x), (torch.randn(4, 6),), {})
    packed: list[Tensor] = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        x.exp()
    assert len(packed) == 1
    base = torch.randn(3, 4, requires_grad=True).clone()
    view = base.t()
    base.mul_(2)
    assert view.grad_fn is not None
    assert view.grad_fn.name() == "AsStridedBackward0"  # "TBackward0" where views are replayed
