"""From an example call to a plan, and from a plan to a program: the stages strung together."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.bounds import Bounds
from autopar.cluster import Cluster, budget_bytes
from autopar.cost_model.folded import Copies
from autopar.cost_model.optimizers import OptimizerLike, find_optimizer
from autopar.cost_model.simulate import Simulation, simulate
from autopar.cost_model.symbolic import symbolic_cost
from autopar.cost_model.workspaces import machine_traits
from autopar.errors import FoldError, InfeasibleBudgetError, InputError, MeshError
from autopar.graph import JointGraph, Run, mark_held
from autopar.infeasible import infeasible, more_frugal
from autopar.layout_search import Price, Priced
from autopar.named import LeftOut, Named
from autopar.normalise import normalise
from autopar.passes.overlap import hidden_axes
from autopar.passes.pipeline import prefetched, rewrite
from autopar.plan import Plan
from autopar.plan_cache import PlanCache, check_kept, request_key
from autopar.plan_cost import PlanCost, SymbolicCost
from autopar.plan_file import check_plan_matches
from autopar.plan_report import plan_report, replicated_ops, whole_modules
from autopar.planner import plan_named
from autopar.precision import compute_dtype
from autopar.program import LocalProgram
from autopar.progress import Say, silent
from autopar.randomness import replace_random_ops
from autopar.regions import find_regions
from autopar.search import AUTO, Search
from autopar.signature import flatten_inputs
from autopar.strategies import STRATEGIES
from autopar.trace import trace
from autopar.unfold import check_unfolds, unfold
from autopar.whole_plan import QUICK, Sample, Split, StandIns, even_splits, inner_alike, stand_ins, whole_plan

NUM_LOOKS = 3
"""How many plans are looked at closely, the fastest first, before one is taken."""

NEAR = 0.01
"""Up to such a part of the budget the peak of some units may be from it for all to be looked at; theirs is within 0.4%
of that, and 0.9% where gradients are summed over micro-steps (`tests/test_folded.py`)."""

DEEP_PREFETCH = 8
"""`Plan.prefetch` of plans that otherwise wait for gathers of parameters.  With 4, less is gained nearly everywhere;
with more, gathers hold up what shares their link."""

WORTH_PREFETCHING = 0.01
"""What part of the step a plan must wait for gathers, for it to be simulated once more."""

MUCH_WAITED = 0.2
"""How long a plan must wait along axes whose collectives products for weights do not hide, beside the time that it
computes, to be simulated without `Plan.overlap` too: with less, plans of tensor parallelism take up to 5 % more without
it, with more up to 11 % less."""


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
        cache: where plans are kept, and looked for before planning; None: nowhere.
        say: is told what goes on.
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
    cache: PlanCache | None = None
    say: Say = silent
    _traced: tuple[object, JointGraph] | None = field(default=None, repr=False)
    _whole: tuple[JointGraph, JointGraph] | None = field(default=None, repr=False)
    _priced: tuple[JointGraph, Named, Search] | None = field(default=None, repr=False)
    _warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.optimizer = find_optimizer(self.optimizer)  # measured once, and refused before any work
        compute_dtype(self.precision)
        budget_bytes(self.mem_gb, self.cluster)
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise InputError(
                f"accumulate={self.accumulate!r}: an optimizer's step takes at least 1 micro-step, and a whole number"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        """For a copied model, whose modes are its own; what was worked out is the same."""
        copied = copy.copy(self)
        copied.model = copy.deepcopy(self.model, memo)
        return copied

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
            self.say("tracing the model")
            self._warn_checkpointing()
            with _collector_paused():
                self._traced = (key, self._trace(args, kwargs, train, self.cluster.num_ranks if local else 1))
            self._warn_whole(self._traced[1])
        return self.unfolded(self._traced[1]) if whole else self._traced[1]

    def _trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, num_ranks: int) -> JointGraph:
        for fold in (True, False):
            with self.around_trace():
                joint = trace(
                    self.model, args, kwargs, num_ranks=num_ranks, batch_dims=self.batch_dims, train=train,
                    dtype=compute_dtype(self.precision), fold=fold, opaque=True,
                )  # fmt: skip
            joint = replace_random_ops(normalise(joint))
            mark_held(joint)
            try:
                check_unfolds(joint)  # normalising may have told units apart that were alike
            except FoldError:
                continue
            break
        return joint

    def unfolded(self, joint: JointGraph) -> JointGraph:
        """The whole graph of a folded one, any other graph itself; the last one is kept."""
        if not joint.runs:
            return joint
        if self._whole is None or self._whole[0] is not joint:
            self._whole = (joint, replace(unfold(joint), folded=joint))
        return self._whole[1]

    def _planned_on(self, joint: JointGraph) -> JointGraph:
        """The folded graph from which a whole one came, else the graph itself."""
        return self._whole[0] if self._whole is not None and self._whole[1] is joint else joint

    def plan(self, joint: JointGraph) -> Plan:
        """The best plan for a traced graph, with its report; from the cache, if there is one that has it.

        Raises:
            InfeasibleBudgetError: if no candidate fits the budget.
            MeshError: if the strategy cannot use the mesh.
        """
        budget = budget_bytes(self.mem_gb, self.cluster)
        if self.cache is None:
            return self.plan_within(joint, budget)
        planned_on = self._planned_on(joint)
        settings = (self.sizes, self.cluster, budget, self.strategy, self.optimizer, self.precision, self.accumulate)
        key = request_key(planned_on, *settings, planned_on is joint, machine_traits(self.cluster.device.kind))
        fingerprint = planned_on.fingerprint()
        num_ranks = self.cluster.num_ranks
        kept = self.cache.find(
            key, lambda plan: check_kept(plan, self.unfolded(planned_on), fingerprint, num_ranks, budget)
        )
        if kept is not None:
            return replace(kept, cost=self.cost(joint, kept), from_cache=True)
        plan = self.plan_within(joint, budget)
        self.cache.keep(key, plan)
        return plan

    def plan_within(self, joint: JointGraph, budget: int, closely: bool = True) -> Plan:
        """`plan` for a budget in bytes; what was simulated for one budget is not simulated again for another.

        Of a graph that was unfolded the folded one is searched.  With `closely`, the plan that is taken is priced with
        more units, or where it is a near thing with all, and that has the last word on what fits.
        """
        with _collector_paused():
            return self._plan_within(self._planned_on(joint), budget, closely)

    def _plan_within(self, joint: JointGraph, budget: int, closely: bool) -> Plan:
        look = self._closely if closely and joint.runs else self._as_searched
        limit = budget  # of the prices that are searched
        while limit > 0:
            priced = self.candidates(joint, limit)
            fitting = [p for p in priced if p.simulation.memory.total <= limit]
            if not fitting:
                break
            best, seen = _fastest(fitting, lambda one: look(joint, one, budget), budget)
            excess = seen.peak_bytes - budget
            if excess <= 0:
                return self._report(seen, [p for p in priced if p is not best], budget, self._left_out())
            limit = best.simulation.memory.total - excess
        priced = self.candidates(joint)
        best = min(priced, key=lambda p: p.simulation.memory.total)
        seen = look(joint, best, None)  # to the byte: it may be said to be a budget that works
        if seen.peak_bytes <= budget:
            return self._report(seen, [p for p in priced if p is not best], budget, self._left_out())
        raise self._infeasible(seen, [seen.priced if p is best else p for p in priced], budget)

    def _as_searched(self, joint: JointGraph, priced: Priced, budget: int | None = None) -> _Seen:
        graph, held, program, _ = self._rewritten(joint, priced.plan, priced.splits)
        plan = whole_plan(priced.plan, joint.runs, priced.splits)
        return _Seen(self._planned_on(joint), graph, program, replace(priced, plan=held), plan)

    def _closely(self, joint: JointGraph, priced: Priced, budget: int | None) -> _Seen:
        """A plan of a folded graph with more of its units; with all if its peak is near the budget, or without one."""
        self.say("looking at the plan more closely")
        every = Sample(joint.runs, priced.splits, {})
        for sample in (every,) if budget is None else (Sample.of(priced.plan, joint.runs, priced.splits), every):
            graph, held, program, standing = self._rewritten(joint, priced.plan, priced.splits, sample)
            simulation = self._run(program, self.optimizer, Copies.of(standing))
            if budget is None or sample.runs == joint.runs or abs(simulation.memory.total - budget) > NEAR * budget:
                break
        close = Priced(held, simulation, standing=standing)
        return _Seen(joint, graph, program, close, whole_plan(priced.plan, joint.runs, priced.splits))

    def _rewritten(
        self, joint: JointGraph, plan: Plan, splits: tuple[Split, ...], sample: Sample | None = None
    ) -> tuple[JointGraph, Plan, LocalProgram, StandIns]:
        """The graph with which a plan of a folded one is priced, its plan and its program, and what its units stand
        for.  Without a `sample` it is the folded graph itself; but if its inner units, which stand for `splits`, take
        two options, it has more units: what one does next to another that does otherwise says little of what all of its
        kind do."""
        if sample is None and not all(inner_alike(plan, run) for run in joint.runs):
            sample = Sample.of(plan, joint.runs, splits, QUICK)
        if sample is None:
            return joint, plan, rewrite(joint, plan, check=False), stand_ins(joint.runs, splits)
        graph, held = self._with_units(joint, sample.runs), whole_plan(plan, sample.runs, sample.splits)
        return graph, held, rewrite(graph, held, check=False), sample.standing

    def _with_units(self, joint: JointGraph, runs: tuple[Run, ...]) -> JointGraph:
        """A folded graph with the copies of its units that these runs have."""
        if runs == joint.runs:
            return self.unfolded(joint)
        folded = replace(joint, runs=runs)
        return joint.keep(("units", runs), lambda: replace(unfold(folded), folded=folded))

    def candidates(self, joint: JointGraph, budget: int | None = None) -> list[Priced]:
        """Every strategy that is asked for and can use the mesh, simulated; with `auto`, also the plans of the search:
        all, or with a budget in bytes those among which its best plan is.  Those of the last graph are kept.  Of a
        graph that was unfolded they are plans of the folded one.

        Raises:
            MeshError: if the one strategy that is asked for cannot use the mesh.
        """
        joint = self._planned_on(joint)
        with _collector_paused():
            if self._priced is None or self._priced[0] is not joint:
                self._priced = (joint, *self._searched(joint, self._remembering(joint)))
            _, named, search = self._priced
            if self.strategy != AUTO:
                return named.everything()
            if budget is None or search.is_small:
                found = [*named.everything(), *search.everything()]
                return [*found, *self._more_frugal(joint, found)]
            simulated = named.within(budget)
            found = [*simulated, *search.within(budget, simulated)]
            fits = any(p.simulation.memory.total <= budget for p in found)
            return found if fits else [*found, *self._more_frugal(joint, found)]

    def _more_frugal(self, joint: JointGraph, found: Sequence[Priced]) -> list[Priced]:
        """Plans that need less than any that was found."""
        assert self._priced is not None
        _, named, search = self._priced
        least = min(p.simulation.memory.total for p in found)
        plans = more_frugal(found, named.everything(), find_regions(joint))
        tried = [search.price(plan, splits) for plan, splits in plans]
        return [p for p in tried if p.simulation.memory.total < least]

    def _searched(self, joint: JointGraph, price: Price) -> tuple[Named, Search]:
        """What is searched for the best plan of a graph."""
        copies = Copies.of(stand_ins(joint.runs, even_splits(joint.runs)))
        bounds = Bounds(joint, self.cluster, find_optimizer(self.optimizer), copies, self.accumulate)
        named = Named(joint, list(self._named_plans(joint)), price, bounds)
        return named, Search(joint, self.sizes, self.cluster.ranks_per_node, price, bounds)

    def _named_plans(self, joint: JointGraph) -> Iterator[Plan]:
        for name in STRATEGIES if self.strategy == AUTO else (self.strategy,):
            try:
                yield plan_named(name, joint, self.sizes, self.cluster.ranks_per_node)
            except MeshError:
                if self.strategy != AUTO:
                    raise

    def _remembering(self, joint: JointGraph) -> Price:
        """Simulates equal plans of a graph once."""
        known: dict[object, Priced] = {}

        def price(plan: Plan, splits: tuple[Split, ...]) -> Priced:
            rests, recomputes = tuple(plan.storage.items()), tuple(sorted(plan.recompute.items()))
            key = (plan.mesh, plan.factors, rests, recomputes, plan.delay_reduction, splits)
            if key not in known:
                self.say(f"searching: {len(known)} plans simulated")
                known[key] = self.scheduled(joint, plan, splits)
            return known[key].called(plan.strategy)

        return price

    def price(self, joint: JointGraph, plan: Plan) -> Priced:
        """Rewrite and simulate one plan as it is."""
        return self._simulated(joint, plan, even_splits(joint.runs))[0]

    def scheduled(self, joint: JointGraph, plan: Plan, splits: tuple[Split, ...]) -> Priced:
        """Rewrite and simulate a plan of a folded graph whose inner units stand for `splits`.

        Where the plan waits much for gradients' reductions, gradients are computed as soon as they can be, so that
        links begin with them early; where it waits for gathers, these start further ahead.  Each is kept if by the
        simulator it saves time and needs no more memory: so whatever the budget, the plan is none the worse for it.
        """
        best, program = self._simulated(joint, plan, splits)
        if _waits_for_what_is_not_hidden(best.simulation, program):
            other, sooner = self._simulated(joint, replace(plan, overlap=False), splits)
            if _is_better(other, best):
                best, program = other, sooner
        waited_s = best.simulation.waited_s(lambda kind, axis: kind == "all_gather")
        if waited_s > WORTH_PREFETCHING * best.simulation.step_time_s:
            deeper = prefetched(program, DEEP_PREFETCH)
            if deeper is not None:
                simulation = self._run(deeper, self.optimizer, Copies.of(best.standing))
                other = replace(best, plan=replace(best.plan, prefetch=DEEP_PREFETCH), simulation=simulation)
                best = other if _is_better(other, best) else best
        return best

    def _simulated(self, joint: JointGraph, plan: Plan, splits: tuple[Split, ...]) -> tuple[Priced, LocalProgram]:
        _, _, program, standing = self._rewritten(joint, plan, splits)
        return Priced(plan, self._run(program, self.optimizer, Copies.of(standing)), splits, standing), program

    def _run(self, program: LocalProgram, optimizer: OptimizerLike, copies: Copies) -> Simulation:
        return simulate(program, self.cluster, optimizer, accumulate=self.accumulate, copies=copies)

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
        seen = self._as_searched(joint, self.price(joint, plan))
        budget = budget_bytes(self.mem_gb, self.cluster)
        if seen.peak_bytes > budget:
            raise self._infeasible(seen, [seen.priced], budget)
        return self._report(seen, [], budget)

    def compile(self, joint: JointGraph, plan: Plan) -> LocalProgram:
        """The program of a plan; ops that have no sharding rule are named in a warning, once."""
        self._warn_replicated(joint)
        self.say("rewriting the program")
        return rewrite(joint, plan)

    def _left_out(self) -> Sequence[LeftOut]:
        """The named strategies' plans that the search has not simulated."""
        return () if self._priced is None else self._priced[1].left_out

    def _report(self, seen: _Seen, others: Sequence[Priced], budget: int, left_out: Sequence[LeftOut] = ()) -> Plan:
        report = replace(
            plan_report(seen.joint, seen.program, seen.priced, [seen.priced, *others], left_out, budget),
            cluster=str(self.cluster),
            whole_modules=whole_modules(seen.origin),
            precision=self.precision or "",
            accumulate=self.accumulate,
            mesh_sizes=self.sizes,
        )
        cost, fingerprint = self.cost(seen.origin, seen.plan), seen.origin.fingerprint()
        return replace(seen.plan, graph_fingerprint=fingerprint, report=report, cost=cost)

    def cost(self, joint: JointGraph, plan: Plan) -> PlanCost:
        """What a plan costs in symbols, to be worked out when that is first wanted."""
        return PlanCost(functools.partial(self._symbolic, joint, plan))

    def _symbolic(self, joint: JointGraph, plan: Plan) -> SymbolicCost:
        joint = self.unfolded(joint)
        return symbolic_cost(joint, rewrite(joint, plan, check=False), self.cluster, self.optimizer)

    def _infeasible(self, seen: _Seen, priced: Sequence[Priced], budget: int) -> InfeasibleBudgetError:
        """That nothing fits: `seen` is the smallest of the simulated plans."""
        name, copies = find_optimizer(self.optimizer).name, Copies.of(seen.priced.standing)
        usable = self.cluster.device.memory_bytes
        return infeasible(
            seen.priced, priced, budget, usable, name, lambda other: self._run(seen.program, other, copies)
        )

    def _warn_checkpointing(self) -> None:
        """Hugging Face models say under one of two names that they do; the older one warns where there is the newer."""
        newer = getattr(self.model, "is_activation_checkpointing", None)
        switched_on = getattr(self.model, "is_gradient_checkpointing", False) if newer is None else newer
        if switched_on and "checkpointing" not in self._warned:
            self._warned.add("checkpointing")
            warnings.warn(
                "the model has gradient checkpointing switched on, which has no effect: the plan says what is computed "
                "again (plan.recompute), as the budget mem_gb demands",
                stacklevel=4,
            )

    def _warn_replicated(self, joint: JointGraph) -> None:
        new = {name: n for name, n in replicated_ops(joint, {}).items() if name not in self._warned}
        if new:
            self._warned.update(new)
            ops = ", ".join(f"{name} ({n}×)" for name, n in new.items())
            warnings.warn(
                f"no sharding rule for {ops}: they run whole on every rank. Results are right, but "
                "their inputs are gathered; teach autopar with autopar.register_sharding_rule",
                stacklevel=3,
            )

    def _warn_whole(self, joint: JointGraph) -> None:
        new = [words for words in whole_modules(joint) if words not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"what these modules do depends on values of tensors: {'; '.join(new)}. Each runs whole on every rank,"
                " on the batch of all ranks, with all of its parameters gathered. Results are right; to have its work"
                " divided, write it without reading values (sorted tokens and grouped products, or every expert on"
                " every token with weights of 0), or take a variant of the library's that does not",
                stacklevel=3,
            )


@dataclass(frozen=True)
class _Seen:
    """A plan that was looked at.

    Attributes:
        origin: the graph that is planned on.
        joint: that, or one with more of its units.
        program: of `joint`.
        priced: a plan of `joint`, simulated.
        plan: the whole model's.
    """

    origin: JointGraph
    joint: JointGraph
    program: LocalProgram
    priced: Priced
    plan: Plan

    @property
    def step_time_s(self) -> float:
        """Of `priced`."""
        return self.priced.simulation.step_time_s

    @property
    def peak_bytes(self) -> int:
        """Of `priced`."""
        return self.priced.simulation.memory.total


def _waits_for_what_is_not_hidden(simulation: Simulation, program: LocalProgram) -> bool:
    """Whether products for weights hide collectives along some axes, and a plan waits much along others."""
    much_s = MUCH_WAITED * simulation.compute_s
    if simulation.exposed_s <= much_s:  # as of most plans, which need not be looked through
        return False
    axes = hidden_axes(program)
    return bool(axes) and simulation.waited_s(lambda kind, axis: axis not in axes) > much_s


def _is_better(one: Priced, other: Priced) -> bool:
    """Whether a plan is faster and needs no more memory."""
    mine, theirs = one.simulation, other.simulation
    return mine.step_time_s < theirs.step_time_s and mine.memory.total <= theirs.memory.total


def _fastest(fitting: Sequence[Priced], look: Callable[[Priced], _Seen], budget: int) -> tuple[Priced, _Seen]:
    """Of the first plans by the prices that are searched the one that is the fastest when looked at; if none of them is
    within the budget then, the first."""
    order = sorted(fitting, key=lambda p: (p.simulation.step_time_s, p.simulation.memory.total))
    first = order[0], look(order[0])
    best = first if first[1].peak_bytes <= budget else None
    for one in order[1:NUM_LOOKS]:
        if best is not None and one.simulation.step_time_s >= best[1].step_time_s:
            break
        seen = look(one)
        if seen.peak_bytes <= budget and (best is None or seen.step_time_s < best[1].step_time_s):
            best = one, seen
    return best or first


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector.

    Graphs are many small objects.  As they are made the collector walks, time and again, all that the process holds,
    and finds nothing to free; that took 40 % of the time that planning takes.  To look at all that is new when it is
    switched on again takes a tenth; so what is new counts as old, and is looked at when that is.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what others froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
