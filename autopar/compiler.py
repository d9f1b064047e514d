"""From an example call to a plan, and from a plan to a program: the stages strung together."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.cluster import Cluster, budget_bytes
from autopar.cost_model.optimizers import OptimizerLike, find_optimizer
from autopar.cost_model.simulate import Simulation, Spent, simulate
from autopar.cost_model.symbolic import symbolic_cost
from autopar.describe import describe_params
from autopar.errors import FoldError, InfeasibleBudgetError, InputError, MeshError
from autopar.explain import CHOSEN
from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.infeasible import infeasible
from autopar.normalise import normalise
from autopar.passes.pipeline import rewrite
from autopar.plan import Candidate, ModuleCost, Plan, PlanReport
from autopar.plan_cost import PlanCost
from autopar.plan_file import check_plan_matches
from autopar.planner import plan_named
from autopar.precision import compute_dtype
from autopar.program import LocalProgram
from autopar.randomness import replace_random_ops
from autopar.search import Priced, search
from autopar.show import build_rows, format_bytes, format_time
from autopar.signature import flatten_inputs
from autopar.strategies import STRATEGIES
from autopar.trace import trace
from autopar.unfold import unfold

AUTO = "auto"


@dataclass
class Compiler:
    """Traces, plans and rewrites one model for one cluster.

    Attributes:
        model: the module, on any device.
        sizes: the user's mesh shape.
        cluster: what it runs on.
        mem_gb: budget in GiB for one device, or None for all that the device has.
        strategy: `auto` or a name in `STRATEGIES`.
        optimizer: whose state counts against the budget.
        batch_dims: overrides of the batch dim, per input path.
        around_trace: makes a context in which the model is traced.
        precision: what the model computes in, a name in `PRECISIONS`; None: as its tensors' dtypes give.
        accumulate: micro-steps to one step of the optimizer.
    """

    model: nn.Module
    sizes: tuple[int, ...]
    cluster: Cluster
    mem_gb: float | None = None
    strategy: str = AUTO
    optimizer: OptimizerLike = "adamw"
    batch_dims: Mapping[str, int | None] | None = None
    around_trace: Callable[[], AbstractContextManager[Any]] = nullcontext
    precision: str | None = None
    accumulate: int = 1
    _traced: tuple[object, JointGraph] | None = field(default=None, repr=False)
    _whole: JointGraph | None = field(default=None, repr=False)
    _priced: tuple[JointGraph, list[Priced]] | None = field(default=None, repr=False)
    _warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.optimizer = find_optimizer(self.optimizer)  # measured once, and refused before any work
        compute_dtype(self.precision)
        if self.accumulate < 1:
            raise InputError(f"accumulate={self.accumulate}: an optimizer's step takes at least 1 micro-step")

    def trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, local: bool = True, whole: bool = True
    ) -> JointGraph:
        """The normalised joint graph for all ranks together; the last one is kept.

        Args:
            args, kwargs: one rank's rows, or with `local=False` the global batch.
            train: whether to trace a backward pass.
            local: whether the inputs are one rank's.
            whole: whether the graph must hold every layer; otherwise it may be folded (see `JointGraph.runs`).
        """
        tensors, constants = flatten_inputs(args, kwargs)
        shapes = tuple((path, tuple(t.shape), t.dtype) for path, t in tensors)
        modes = bytes(module.training for module in self.model.modules())
        key = (
            shapes,
            constants,
            train,
            modes,
            local,
            self.precision,
            *(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        )
        if self._traced is None or self._traced[0] != key:
            self._traced = (key, self._trace(args, kwargs, train, local, fold=True))
            self._whole = None
        folded = self._traced[1]
        if not whole or not folded.runs:
            return folded
        if self._whole is None:
            try:
                self._whole = unfold(folded)
            except FoldError:
                self._whole = self._trace(args, kwargs, train, local, fold=False)
        return self._whole

    def _trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, local: bool, fold: bool
    ) -> JointGraph:
        ranks = self.cluster.num_ranks if local else 1
        with _collector_paused():
            with self.around_trace():
                joint = trace(
                    self.model, args, kwargs, num_ranks=ranks, batch_dims=self.batch_dims, train=train,
                    dtype=compute_dtype(self.precision), fold=fold,
                )  # fmt: skip
            return replace_random_ops(normalise(joint))

    def plan(self, joint: JointGraph) -> Plan:
        """The best plan for a traced graph, with its report.

        Raises:
            InfeasibleBudgetError: if no candidate fits the budget.
            MeshError: if the strategy cannot use the mesh.
        """
        return self.plan_within(joint, budget_bytes(self.mem_gb, self.cluster))

    def plan_within(self, joint: JointGraph, budget: int) -> Plan:
        """`plan` for a budget in bytes; the candidates are simulated once for all budgets."""
        priced = self.candidates(joint)
        fitting = [p for p in priced if p.simulation.memory.total <= budget]
        if not fitting:
            raise self._infeasible(joint, priced, budget)
        best = min(fitting, key=lambda p: (p.simulation.step_time_s, p.simulation.memory.total))
        return self._report(joint, best, priced, budget)

    def candidates(self, joint: JointGraph) -> list[Priced]:
        """Every strategy that is asked for and can use the mesh, simulated; with `auto`, also the plans of the search;
        those of the last graph are kept.

        Raises:
            MeshError: if the one strategy that is asked for cannot use the mesh.
        """
        if self._priced is None or self._priced[0] is not joint:
            names = STRATEGIES if self.strategy == AUTO else (self.strategy,)
            priced = []
            with _collector_paused():
                for name in names:
                    try:
                        plan = plan_named(name, joint, self.sizes, self.cluster.ranks_per_node)
                        priced.append(self.price(joint, plan))
                    except MeshError:
                        if self.strategy != AUTO:
                            raise
                if self.strategy == AUTO:
                    priced += search(joint, self.sizes, self.cluster.ranks_per_node, lambda p: self._simulate(joint, p))
            self._priced = (joint, priced)
        return self._priced[1]

    def price(self, joint: JointGraph, plan: Plan) -> Priced:
        """Rewrite and simulate one plan."""
        return Priced(plan, self._simulate(joint, plan))

    def _simulate(self, joint: JointGraph, plan: Plan) -> Simulation:
        return self._run(rewrite(joint, plan, check=False), self.optimizer)

    def _run(self, program: LocalProgram, optimizer: OptimizerLike) -> Simulation:
        return simulate(program, self.cluster, optimizer, accumulate=self.accumulate)

    def given(self, joint: JointGraph, plan: Plan) -> Plan:
        """A plan that the user brought, checked against the graph and the budget, and priced.

        Raises:
            PlanError: if it belongs to another model.
            MeshError: if it is for another number of ranks.
            InfeasibleBudgetError: if it does not fit the budget.
        """
        if plan.mesh.num_ranks != self.cluster.num_ranks:
            raise MeshError(
                f"the plan is for {plan.mesh.num_ranks} ranks ({plan.mesh}), this mesh has {self.cluster.num_ranks}"
            )
        check_plan_matches(plan, joint)
        priced = self.price(joint, plan)
        budget = budget_bytes(self.mem_gb, self.cluster)
        if priced.simulation.memory.total > budget:
            raise self._infeasible(joint, [priced], budget)
        return self._report(joint, priced, [priced], budget)

    def compile(self, joint: JointGraph, plan: Plan) -> LocalProgram:
        """The program of a plan; ops that have no sharding rule are named in a warning, once."""
        self._warn_replicated(joint)
        return rewrite(joint, plan)

    def _report(self, joint: JointGraph, best: Priced, priced: Sequence[Priced], budget: int) -> Plan:
        sim = best.simulation
        words = describe_params(joint, best.plan)
        program = rewrite(joint, best.plan, check=False)
        searched = [p for p in priced if p.plan.strategy == AUTO]
        fitting = [p for p in searched if p.simulation.memory.total <= budget] or searched
        first = min(fitting, key=lambda p: p.simulation.step_time_s, default=best)
        named = [p for p in priced if p.plan.strategy != AUTO or p is best or p is first]
        report = PlanReport(
            cluster=str(self.cluster),
            budget_bytes=budget,
            step_time_s=sim.step_time_s,
            compute_s=sim.compute_s,
            exposed_s=sim.exposed_s,
            memory=sim.memory,
            rows=build_rows(joint, program, words.__getitem__),
            candidates=tuple(_candidate(p, best, budget) for p in named),
            collective_bytes=sim.collective_bytes,
            num_searched=len(priced),
            bound_s=min(p.simulation.compute_s for p in priced),
            replicated_ops=replicated_ops(joint),
            precision=self.precision or "",
            accumulate=self.accumulate,
        )
        cost = PlanCost(functools.partial(symbolic_cost, joint, program, self.cluster, self.optimizer))
        return replace(best.plan, graph_fingerprint=joint.fingerprint(), report=report, cost=cost)

    def _infeasible(self, joint: JointGraph, priced: Sequence[Priced], budget: int) -> InfeasibleBudgetError:
        smallest = min(priced, key=lambda p: p.simulation.memory.total)
        program = rewrite(joint, smallest.plan, check=False)
        name = find_optimizer(self.optimizer).name
        usable = self.cluster.device.memory_bytes
        return infeasible(priced, budget, usable, name, lambda other: self._run(program, other))

    def _warn_replicated(self, joint: JointGraph) -> None:
        new = {name: n for name, n in replicated_ops(joint).items() if name not in self._warned}
        if new:
            self._warned.update(new)
            ops = ", ".join(f"{name} ({n}×)" for name, n in new.items())
            warnings.warn(
                f"no sharding rule for {ops}: they run whole on every rank. Results are right, but "
                "their inputs are gathered; teach autopar with autopar.register_sharding_rule",
                stacklevel=3,
            )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector.

    Graphs are many small objects.  As they are made the collector walks, time and again, all that the process holds,
    and finds nothing to free; that took 40 % of the time that planning takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def replicated_ops(joint: JointGraph) -> dict[str, int]:
    """Ops without a sharding rule, and how often they occur."""
    return dict(Counter(str(node.target) for node in analyse(joint).replicated))


def _candidate(priced: Priced, best: Priced, budget: int) -> Candidate:
    sim, won = priced.simulation, best.simulation
    if priced is best:
        verdict = CHOSEN
    elif sim.memory.total > budget:
        verdict = f"over the budget by {format_bytes(sim.memory.total - budget)}"
    elif sim.step_time_s > won.step_time_s:
        verdict = f"{format_time(sim.step_time_s - won.step_time_s)} slower: {_slower_by(sim, won)}"
    else:
        verdict = f"as fast, {format_bytes(sim.memory.total - won.memory.total)} more memory"
    return Candidate(
        priced.plan.strategy,
        str(priced.plan.mesh),
        sim.step_time_s,
        sim.compute_s,
        sim.exposed_s,
        sim.memory.total,
        verdict,
        _module_costs(sim),
    )


def _module_costs(sim: Simulation) -> tuple[ModuleCost, ...]:
    rest: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    for live in sim.live_after_forward:
        if live.kind in ("params", "optimizer", "activations"):
            (saved if live.kind == "activations" else rest)[live.module] += live.num_bytes
    modules = dict.fromkeys((*sim.by_module, *rest, *saved))
    spent = {module: sim.by_module.get(module, Spent()) for module in modules}
    return tuple(
        ModuleCost(m, spent[m].compute_s, dict(sorted(spent[m].exposed_s.items())), rest[m], saved[m]) for m in modules
    )


def _slower_by(sim: Simulation, won: Simulation) -> str:
    compute, exposed = sim.compute_s - won.compute_s, sim.exposed_s - won.exposed_s
    if compute >= exposed:
        return f"{format_time(compute)} more computing"
    return f"{format_time(exposed)} more waiting for collectives"
