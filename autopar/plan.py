"""`Plan`: what was decided, as plain data.  A hand-written plan is as good as a searched one.

A plan names *factors*, not nodes: "along axis `tp`, cut the factor that is dim 0 of `h.0.mlp.up.weight`".  The
factor analysis carries each decision to every op that the factor reaches, so a plan stays valid for another
batch size or sequence length, and stays small (a few dozen decisions for any depth).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import InputError
from autopar.mesh import Mesh
from autopar.placement import Sharding
from autopar.plan_cost import PlanCost, crossing


@dataclass(frozen=True)
class FactorRef:
    """A factor, named by a place where it occurs.

    Attributes:
        anchor: a parameter's or buffer's name, or `input:PATH` for a model input.
        dim: the tensor dim of the anchor in which the factor occurs.
        part: which factor of the dim, counted from the outermost, when the dim fuses several (a fused QKV weight).
        label: a word for readers: `batch`, `seq`, `vocab`, `heads`, `ffn`, …
    """

    anchor: str
    dim: int
    part: int = 0
    label: str = ""


@dataclass(frozen=True)
class Storage:
    """How a parameter rests between steps, and its gradient and optimizer state with it.

    Attributes:
        sharding: placements at rest, one per mesh axis of the plan.
        regather: whether a copy gathered for the forward is dropped and gathered again for the backward (ZeRO-3)
            instead of kept (ZeRO-2).
    """

    sharding: Sharding
    regather: bool = False


@dataclass(frozen=True)
class Plan:
    """A complete decision.

    Attributes:
        strategy: name of the strategy that proposed it.
        mesh: the mesh it works on: the user's ranks, in order, perhaps factored or flattened.
        factors: for each mesh axis, the factors cut along it, the most wanted first.  An op that carries several
            is cut along the first that it can be.
        storage: for each parameter, how it rests.
        delay_reduction: reduce gradients once, after the whole backward pass (ZeRO-1), instead of as they arise.
        graph_fingerprint: digest of the traced graph that the plan was made for; empty if it was written by hand.
        report: what the planner predicted and compared; `None` on a plan that has not been priced.
        cost: what it costs in symbols; `None` on a plan that has not been priced here: it is not saved with a plan.
    """

    strategy: str
    mesh: Mesh
    factors: tuple[tuple[FactorRef, ...], ...]
    storage: Mapping[str, Storage]
    delay_reduction: bool = False
    graph_fingerprint: str = ""
    report: PlanReport | None = field(default=None, compare=False)
    cost: PlanCost | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        from autopar.show import render_plan  # not at the top: it reads this module

        return render_plan(self)


def break_even(plan_a: Plan, plan_b: Plan, symbol: str) -> float | None:
    """The size at which two plans take the same time, so that the better choice changes.

    Both are priced without overlap, as `plan.cost.symbolic().time_s` says, all other sizes being those they were
    priced at.  Between a millionth and a million times that size, the crossing nearest to it (in ratio) is returned.

    Args:
        plan_a, plan_b: two priced plans of one model.
        symbol: what varies: `batch`, `seq`, `hidden`, …, or a rate such as `link_dp_bytes_s`.

    Returns:
        The value, not rounded; None if one plan is faster throughout, or if they never differ.

    Raises:
        InputError: if a plan has no cost (it was written by hand or loaded from a file), or no such symbol.
    """
    costs = []
    for plan in (plan_a, plan_b):
        if plan.cost is None:
            raise InputError(
                f"the {plan.strategy!r} plan has no cost: it was loaded or written by hand and not priced since; "
                "give it to parallelize, or plan again, and take the plan that comes back"
            )
        costs.append(plan.cost.symbolic())
        costs[-1].check(symbol)
    return crossing(costs[0], costs[1], symbol)


@dataclass(frozen=True)
class MemoryParts:
    """Predicted bytes on one rank at the moment of the peak, by kind."""

    params: int
    grads: int
    optimizer: int
    activations: int
    temporaries: int
    reserve: int

    @property
    def total(self) -> int:
        """Predicted peak, reserve included."""
        return self.params + self.grads + self.optimizer + self.activations + self.temporaries + self.reserve


@dataclass(frozen=True)
class Candidate:
    """One strategy that was simulated, and why it was not taken."""

    strategy: str
    mesh: str
    step_time_s: float
    compute_s: float
    exposed_s: float
    peak_bytes: int
    verdict: str


@dataclass(frozen=True)
class ModuleRow:
    """One line of the printed plan: a module, or `count` equal ones folded into a pattern such as `h.*.mlp`."""

    module: str
    count: int
    params: str
    activation: str
    collectives: str
    collective_bytes: int


@dataclass(frozen=True)
class PlanReport:
    """Predictions for one rank and one step."""

    cluster: str
    budget_bytes: int | None
    step_time_s: float
    compute_s: float
    exposed_s: float
    memory: MemoryParts
    rows: tuple[ModuleRow, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    collective_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes per step by `kind@axis`, each the whole tensor as in `Collective.num_bytes`."""
    replicated_ops: Mapping[str, int] = field(default_factory=dict)
    """Ops that have no sharding rule and so run whole on every rank: name -> number of nodes."""
