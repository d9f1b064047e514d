"""`Plan`: what was decided, as plain data.  A hand-written plan is as good as a searched one.

A plan names *factors*, not nodes: "along axis `tp`, cut the factor that is dim 0 of `h.0.mlp.up.weight`".  The
factor analysis carries each decision to every op that the factor reaches, so a plan stays valid for another
batch size or sequence length, and stays small (a few dozen decisions for any depth).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import InputError, PlanError
from autopar.mesh import Mesh
from autopar.placement import Sharding
from autopar.plan_cost import PlanCost, crossing

RECOMPUTE_LEVELS = ("selective", "full")
"""What a region computes again in the backward pass: all but products, attention and collectives; everything."""


@dataclass(frozen=True)
class FactorRef:
    """A factor, named by a place where it occurs.

    Attributes:
        anchor: a parameter's or buffer's name, or `input:PATH` for a model input.
        dim: the tensor dim of the anchor in which the factor occurs.
        part: which factor of the dim, counted from the outermost, when the dim fuses several (a fused QKV weight).
        label: a word for readers: `batch`, `seq`, `vocab`, `heads`, `ffn`, …  `EXPERTS` and `SENT` have a meaning.
    """

    anchor: str
    dim: int
    part: int = 0
    label: str = ""


EXPERTS = "experts"
"""Label of a factor that is cut only where its anchor is read, and where it lives on in what came of that: the products
of experts, each with its own rows.  Where rows go to experts and come back, an op has the factor too, but runs as the
factors after it say, so that rows change places by an all-to-all.  Rows that are sorted to their experts are cut with
them: each rank takes those of its own from tokens that are brought together."""

SENT = "experts, rows sent"
"""Label of experts whose sorted rows go to the ranks that hold them, and come back, by all-to-alls, where the batch is
cut along the same axis; else as `EXPERTS`."""


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
        recompute: for each region (see `autopar.regions`), what of it is computed again in the backward pass instead of
            kept: a level of `RECOMPUTE_LEVELS`.  Regions that are not named keep what the backward pass reads.
        delay_reduction: reduce gradients once, after the whole backward pass (ZeRO-1), instead of as they arise.
        prefetch: parameters are gathered ahead of what reads them, as long as no more than so many times a gather's
            bytes, or so many full buckets, are under way beside what is read next.
        overlap: compute weights' gradients while the backward pass waits for a collective, instead of as soon as
            possible.
        graph_fingerprint: digest of the traced graph that the plan was made for; empty if it was written by hand.
        report: what the planner predicted and compared; `None` on a plan that has not been priced.
        cost: what it costs in symbols; `None` on a plan that has not been priced here: it is not saved with a plan.
        from_cache: whether it was not planned anew, but kept from when the same was asked before.
    """

    strategy: str
    mesh: Mesh
    factors: tuple[tuple[FactorRef, ...], ...]
    storage: Mapping[str, Storage]
    recompute: Mapping[str, str] = field(default_factory=dict)
    delay_reduction: bool = False
    prefetch: int = 2
    overlap: bool = True
    graph_fingerprint: str = ""
    report: PlanReport | None = field(default=None, compare=False)
    cost: PlanCost | None = field(default=None, compare=False, repr=False)
    from_cache: bool = field(default=False, compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of one rank, reserve included.

        Raises:
            PlanError: if the plan has not been priced.
        """
        return self._priced().memory.total

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step: forward, backward, optimizer.

        Raises:
            PlanError: if the plan has not been priced.
        """
        return self._priced().step_time_s

    def explain(self, module: str = "") -> str:
        """Why a module (the whole model by default) runs as it does: the choice, and what each other candidate costs
        there, with the collectives that bind.

        Raises:
            PlanError: if the plan has not been priced, or has no such module.
        """
        from autopar.explain import explain_module

        return explain_module(self, module)

    def compare(self, other: Plan) -> str:
        """This plan beside another: time, memory and collectives.

        Raises:
            InputError: if the other is no plan.
        PlanError: if either has not been priced.
        """
        from autopar.explain import compare_plans

        if not isinstance(other, Plan):
            raise InputError(f"a plan is compared with another plan, got {other!r}")
        return compare_plans(self, other)

    def _priced(self) -> PlanReport:
        if self.report is None:
            raise PlanError(
                f"this plan ({self.strategy} on {self.mesh}) has not been priced: plans made by autopar are, and one "
                "written by hand is once it is given to parallelize"
            )
        return self.report

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
        InputError: if one is no plan, or has no cost (it was written by hand or loaded from a file), or no such symbol.
    """
    costs = []
    for plan in (plan_a, plan_b):
        if not isinstance(plan, Plan):
            raise InputError(f"break_even takes two plans, got {plan!r}")
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
class ModuleCost:
    """What one module costs in a step, without the modules inside it.

    Attributes:
        module: its path.
        compute_s: seconds of computing.
        exposed_s: seconds of waiting, by `kind@axis` of the collective waited for.
        rest_bytes: parameters and optimizer state.
        saved_bytes: what it keeps for the backward pass.
    """

    module: str
    compute_s: float
    exposed_s: Mapping[str, float]
    rest_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at, and why it was not taken.

    With `is_bound` it was not simulated, since it needs at least so much time, or memory.
    """

    strategy: str
    mesh: str
    step_time_s: float
    compute_s: float
    exposed_s: float
    peak_bytes: int
    verdict: str
    modules: tuple[ModuleCost, ...] = field(default=(), repr=False)
    is_bound: bool = False


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
    num_searched: int = 0
    """Plans that were simulated."""
    bound_s: float = 0.0
    """No plan of the layouts searched computes in less than this; waiting and recomputation come on top."""
    replicated_ops: Mapping[str, int] = field(default_factory=dict)
    """Ops that have no sharding rule and so run whole on every rank: name -> number of nodes."""
    by_group: tuple[str, ...] = ()
    """Axes along which ranks have the rows of their own groups (experts), whose number only the step knows."""
    whole_modules: tuple[str, ...] = ()
    """Modules that run whole on every rank because they read values of tensors, and where they do, in words."""
    precision: str = ""
    """What the model computes in, if that was asked for; empty if it computes as its tensors' dtypes give."""
    accumulate: int = 1
    """Micro-steps to one step of the optimizer: times and bytes are of all of them together, but those of `rows`."""
    mesh_sizes: tuple[int, ...] = ()
    """Shape of the mesh that was asked for, or follows from the cluster; the plan's may be another over the same ranks.
    Empty if it is not known."""
