"""From a module to a rewritten program in float64, as `autopar.verify` goes, with every step at hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import autopar
from autopar.graph import JointGraph
from autopar.normalise import normalise
from autopar.passes.pipeline import rewrite
from autopar.plan import Plan
from autopar.planner import plan_named
from autopar.program import LocalProgram
from autopar.randomness import replace_random_ops
from autopar.single_device import Float64Throughout, in_float64
from autopar.trace import trace
from autopar.verification import VerifyReport, compare


@dataclass
class Subject:
    """A model in float64, a global batch, and the graph of both."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    joint: JointGraph

    def plan(self, strategy: str, *sizes: int) -> Plan:
        return plan_named(strategy, self.joint, sizes, sizes[-1] if len(sizes) > 1 else sizes[0])

    def program(self, plan: Plan, after_pass: Callable[[str, fx.GraphModule], None] | None = None) -> LocalProgram:
        return rewrite(self.joint, plan, after_pass)

    def compare(self, program: LocalProgram, plan: Plan, num_steps: int = 0) -> VerifyReport:
        return compare(self.joint, program, plan, self.model, self.args, self.kwargs, num_steps)

    def verify(self, strategy: str, *sizes: int) -> VerifyReport:
        plan = self.plan(strategy, *sizes)
        return self.compare(self.program(plan), plan)


def subject(model: nn.Module, *args: Any, **kwargs: Any) -> Subject:
    """Trace a model on a global batch."""
    model, args, kwargs = in_float64(model, args, kwargs)
    with Float64Throughout():
        joint = trace(model, args, kwargs)
    return Subject(model, args, kwargs, replace_random_ops(normalise(joint)))


def trained_beside_one_device(
    model: nn.Module, mesh: Any, strategy: str, batches: Sequence[tuple[Tensor, ...]], loss: Callable[[Any], Tensor]
) -> autopar.ParallelModule:
    """Take a step of AdamW with each batch, on this rank's rows and on one device beside it, and compare the last
    gradients and the parameters; called on every rank."""
    reference, rank, world = copy.deepcopy(model), dist.get_rank(), dist.get_world_size()
    rows = [tuple(t.chunk(world)[rank] for t in batch) for batch in batches]
    pm = autopar.parallelize(model, mesh, 1.0, strategy=strategy, example_inputs=rows[0])
    for module, calls in ((pm, rows), (reference, batches)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for call in calls:
            optimizer.zero_grad()
            loss(module(*call)).backward()
            optimizer.step()
    expected = dict(reference.named_parameters())
    for name, parameter in pm.named_parameters():
        gradient, whole = parameter.grad.full_tensor(), parameter.detach().full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(gradient, expected[name].grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(whole, expected[name].detach(), rtol=0, atol=1e-9)
    return pm
