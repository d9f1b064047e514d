"""Predicted memory beside real memory: rewritten programs run on real tensors, and every allocation is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.cluster import Cluster
from autopar.cost_model.allocations import AllocationTracker
from autopar.cost_model.layout import layouts_of
from autopar.cost_model.liveness import placeholders
from autopar.cost_model.memory import at_rest, memory_profile
from autopar.cost_model.workspaces import workspace_bytes
from autopar.graph import InputKind, JointGraph, OutputKind
from autopar.normalise import normalise
from autopar.passes.pipeline import rewrite
from autopar.planner import plan_named
from autopar.program import COLLECTIVE_KINDS, LocalProgram
from autopar.trace import trace

RANKS = 4


class RankAlone(fx.Interpreter):
    """Runs one rank's graph; a collective gives zeros, and holds on to its input until the wait as NCCL does."""

    def __init__(
        self, module: fx.GraphModule, name: str, tracker: AllocationTracker, log: list[tuple[str, int]]
    ) -> None:
        super().__init__(module)
        self.name, self.tracker, self.log = name, tracker, log
        self.in_flight: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        waited = n.args[0] if n.target is torch.ops._c10d_functional.wait_tensor.default else None
        if n.target in COLLECTIVE_KINDS:
            operand = n.args[0]
            assert isinstance(operand, fx.Node)
            result = torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype)
            if COLLECTIVE_KINDS[n.target] != "all_reduce":
                self.in_flight[n] = self.env[operand]
        elif isinstance(waited, fx.Node):
            result = self.env[waited]
        else:
            result = super().run_node(n)
        if n.op != "placeholder":
            self.log.append((f"{self.name}:{n.name}", self.tracker.live_bytes))
        if isinstance(waited, fx.Node):
            self.in_flight.pop(waited, None)
        return result


def example(node: fx.Node) -> Any:
    """A tensor for a placeholder, or rank zero."""
    value = node.meta["val"]
    return torch.ones(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else 0


def measure(program: LocalProgram) -> list[tuple[str, int]]:
    """Bytes that exist after each node of forward and backward, without parameters, buffers and inputs."""
    assert program.backward is not None
    boxed = [example(node) for _, node in placeholders(program.forward)]
    permanent = list(boxed)
    log: list[tuple[str, int]] = []
    with torch.no_grad(), AllocationTracker() as tracker:
        results = RankAlone(program.forward.module, "forward", tracker, log).boxed_run(boxed)
        outputs = list(zip(program.forward.outputs, results, strict=True))
        held = [value for spec, value in outputs if spec.kind is OutputKind.OUTPUT]
        saved = {spec.path: value for spec, value in outputs if spec.kind is OutputKind.SAVED}
        del results, outputs
        tangents = {
            spec.path: example(n) for spec, n in placeholders(program.backward) if spec.kind is InputKind.TANGENT
        }
        given = {InputKind.SAVED: saved, InputKind.TANGENT: tangents}
        boxed = [given[s.kind][s.path] if s.kind in given else example(n) for s, n in placeholders(program.backward)]
        saved.clear()
        gradients = RankAlone(program.backward.module, "backward", tracker, log).boxed_run(boxed)
    del permanent, held, gradients  # they were alive until here, as in a caller
    return log


class Block(nn.Module):
    """Heads that are views of views, a fused projection and a loss; what makes strides interesting."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 24, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (p.view(batch, length, 4, 8).transpose(1, 2) for p in self.qkv(self.norm(x)).split(width, dim=-1))
        q = torch.cat((-q[..., 4:], q[..., :4]), dim=-1) + q
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    inputs = (torch.randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.int64))
    return normalise(trace(Block(), inputs, {}, num_ranks=RANKS))


def taken_inside(program: LocalProgram) -> dict[str, int]:
    """What ops take for themselves, which the tracker does not see; `tests/test_allocations.py` has it."""
    assert program.backward is not None
    passes, layouts = {"forward": program.forward, "backward": program.backward}, layouts_of(program)
    return {
        f"{name}:{node.name}": workspace_bytes(node, layouts, "cpu")
        for name, graph in passes.items()
        for node in graph.module.graph.nodes
    }


@pytest.mark.parametrize("strategy", ["replicate", "ddp", "zero2", "zero3", "tp", "fsdp+tp"])
def test_prediction_equals_what_is_allocated(strategy: str, joint: JointGraph) -> None:
    program = rewrite(joint, plan_named(strategy, joint, [RANKS], RANKS))
    cluster = replace(Cluster.parse(f"{RANKS} cpu"), backend="nccl")  # without the copies that gloo makes
    profile = memory_profile(program, cluster, "sgd")
    rest = at_rest(program, "sgd")
    inputs = [n.meta["val"] for spec, n in placeholders(program.forward) if spec.kind is InputKind.INPUT]
    permanent = rest.params + rest.buffers + sum(value.numel() * value.element_size() for value in inputs)
    inside = taken_inside(program)
    predicted = {name: total - permanent - inside.get(name, 0) for name, total in profile.timeline}
    del predicted["optimizer:step"]
    measured = dict(measure(program))
    assert measured.keys() == predicted.keys()
    different = {name: (predicted[name], found) for name, found in measured.items() if predicted[name] != found}
    assert not different
    assert max(predicted.values()) > 0
