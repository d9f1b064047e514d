"""A folded graph, unfolded, is node for node the graph that tracing every layer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.flat_module import FlatModule
from autopar.graph import JointGraph
from autopar.normalise import normalise
from autopar.randomness import replace_random_ops
from autopar.trace import trace
from autopar.unfold import unfold
from tests.deep_models import FOLDED, WHOLE


@pytest.mark.parametrize("name", FOLDED)
def test_unfolded_is_the_whole(name: str) -> None:
    build, call, runs = FOLDED[name]
    model = build()
    args, kwargs = call()
    folded, whole = (trace(model, args, kwargs, num_ranks=2, fold=fold) for fold in (True, False))
    assert [(len(run.units), len(run.units[0])) for run in folded.runs] == runs
    assert len(folded.module.graph.nodes) < len(whole.module.graph.nodes)
    check_equal(unfold(folded), whole)
    folded, whole = (replace_random_ops(normalise(joint)) for joint in (folded, whole))
    check_equal(unfold(folded), whole)


@pytest.mark.parametrize(("name", "train", "dtype"), [("tiny_gpt", True, torch.bfloat16), ("bert", False, None)])
def test_mixed_precision_and_no_backward(name: str, train: bool, dtype: torch.dtype | None) -> None:
    """Parameters are cast before the layers run, and gradients after all of them."""
    build, call, runs = FOLDED[name]
    model = build().train(train)
    args, kwargs = call()
    folded, whole = (trace(model, args, kwargs, train=train, dtype=dtype, fold=fold) for fold in (True, False))
    assert [(len(run.units), len(run.units[0])) for run in folded.runs] == runs
    check_equal(unfold(folded), whole)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_alike_is_traced_whole(name: str) -> None:
    build, call = WHOLE[name]
    model = build()
    args, kwargs = call()
    folded, whole = (trace(model, args, kwargs, fold=fold) for fold in (True, False))
    assert folded.runs == ()
    check_equal(folded, whole)


class Doubled(nn.Module):
    """A stack that may change a tensor in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        self.in_place = in_place

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layers(x)
        y = y.mul_(2) if self.in_place else y * 2
        return {"loss": y.sum(), "out": y, "sign": y > 0}


@pytest.mark.parametrize("in_place", [False, True])
def test_the_model_runs_once_for_each_record(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is of the whole model, and the graph is written while the other is made."""
    calls = []
    run = FlatModule.run
    monkeypatch.setattr(FlatModule, "run", lambda *args: calls.append(1) or run(*args))
    model = Doubled(in_place)
    args = (torch.empty(2, 4),)
    folded = trace(model, args, {}, fold=True)
    assert len(folded.runs) == 1
    assert len(calls) == 2
    whole = trace(model, args, {})
    assert len(calls) == 3
    check_equal(unfold(folded), whole)
    assert folded.output_tree.rebuild([0, 1, 2]) == whole.output_tree.rebuild([0, 1, 2])


def check_equal(left: JointGraph, right: JointGraph) -> None:
    """Two graphs are equal in all but the names of nodes."""
    assert left.inputs == right.inputs
    assert left.outputs == right.outputs
    assert (left.batch_dims, left.tied, left.trains) == (right.batch_dims, right.tied, right.trains)
    assert left.runs == right.runs == ()
    at = {node: i for i, node in enumerate(left.module.graph.nodes)}
    at.update({node: i for i, node in enumerate(right.module.graph.nodes)})
    for a, b in zip(left.module.graph.nodes, right.module.graph.nodes, strict=True):
        assert described(a, at) == described(b, at), f"{a} and {b}"
    assert left.fingerprint() == right.fingerprint()


def described(node: fx.Node, at: dict[fx.Node, int]) -> tuple[Any, ...]:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{at[n]}")
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return (
        node.op, str(node.target) if node.op == "call_function" else "", repr(args), repr(kwargs),
        [(v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in values],
        node.meta.get("module"), node.meta.get("backward"), sorted(node.meta),
    )  # fmt: skip
