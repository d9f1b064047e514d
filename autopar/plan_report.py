"""What is reported of a plan: its predictions, its rows, and the candidates beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from autopar.cost_model.folded import Copies
from autopar.cost_model.simulate import Simulation, Spent
from autopar.describe import describe_params
from autopar.explain import CHOSEN
from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.layout_search import Priced
from autopar.named import LeftOut
from autopar.opaque import OPAQUE_OPS, find_call
from autopar.placement import ByGroup
from autopar.plan import Candidate, ModuleCost, PlanReport
from autopar.program import LocalProgram
from autopar.search import AUTO
from autopar.show import build_rows, format_bytes, format_time
from autopar.whole_plan import StandIns, copies_of


def plan_report(
    joint: JointGraph,
    program: LocalProgram,
    best: Priced,
    priced: Sequence[Priced],
    left_out: Sequence[LeftOut],
    budget: int,
) -> PlanReport:
    """The report on the best of the simulated plans; cluster, precision and accumulation are left to the caller.

    Args:
        joint: the graph that `best` is a plan of.
        program: that of `best`.
        best: one of `priced`.
        priced: every plan that was simulated.
        left_out: named plans that were not, since they cannot be the best.
        budget: bytes on one device.
    """
    sim = best.simulation
    words = describe_params(joint, best.plan)
    searched = [p for p in priced if p.plan.strategy == AUTO]
    fitting = [p for p in searched if p.simulation.memory.total <= budget] or searched
    first = min(fitting, key=lambda p: p.simulation.step_time_s, default=best)
    named = [p for p in priced if p.plan.strategy != AUTO or p is best or p is first]
    copies = copies_of(best.standing)
    return PlanReport(
        cluster="",
        budget_bytes=budget,
        step_time_s=sim.step_time_s,
        compute_s=sim.compute_s,
        exposed_s=sim.exposed_s,
        memory=sim.memory,
        rows=build_rows(joint, program, words.__getitem__, copies),
        candidates=(*(_candidate(p, best, budget) for p in named), *(_bounded(one, best, budget) for one in left_out)),
        collective_bytes=sim.collective_bytes,
        num_searched=len(priced),
        bound_s=min((*(p.simulation.compute_s for p in priced), *(one.least_s for one in left_out))),
        replicated_ops=replicated_ops(joint, best.standing),
        by_group=_axes_by_group(program),
    )


def _axes_by_group(program: LocalProgram) -> tuple[str, ...]:
    """The axes along which some rows lie by group."""
    shardings = [n.meta["sharding"] for n in program.joint.module.graph.nodes if n.target in _MOVES]
    axes = {axis for s in shardings for axis, p in enumerate(s) if isinstance(p, ByGroup)}
    return tuple(program.mesh.names[axis] for axis in sorted(axes))


_MOVES = {torch.ops.autopar.take_rows.default, torch.ops.autopar.grouped_mm.default}


def replicated_ops(joint: JointGraph, standing: StandIns) -> dict[str, int]:
    """Ops without a sharding rule, and how often they occur in the whole model; `standing` says what units of the graph
    stand for."""
    copies = Copies.of(standing)
    found: Counter[str] = Counter()
    for node in analyse(joint).replicated:
        if node.target not in OPAQUE_OPS:
            found[str(node.target)] += copies.number(node.meta["module"])
    return dict(found)


def whole_modules(joint: JointGraph) -> tuple[str, ...]:
    """In words, the modules of the whole model that run whole on every rank since they read values, by the lines where
    they do."""
    sizes = {path: node.meta["val"].numel() for path, node in joint.param_nodes().items()}
    names = [*((path, path) for path in sizes), *joint.tied.items()]
    paths: dict[str, dict[str, None]] = {}
    for node in joint.module.graph.find_nodes(op="call_function", target=OPAQUE_OPS[0]):
        place = find_call(node.args[-1]).place
        paths.setdefault(place, {}).update(dict.fromkeys(_everywhere(node.meta["module"], joint)))
    texts = []
    for place, found in paths.items():
        prefixes = tuple(f"{path}." for path in found)
        held = {first for name, first in names if first in sizes and name.startswith(prefixes)}
        total = sum(size * len(_everywhere(path, joint)) for path, size in sizes.items())
        share = sum(sizes[path] * len(_everywhere(path, joint)) for path in held) / max(1, total)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        texts.append(f"{next(iter(found))}{more}, with {share:.0%} of the parameters, for {place}")
    return tuple(texts)


def _everywhere(path: str, joint: JointGraph) -> list[str]:
    """The path, and of what lies in the first inner unit of a folded run its counterparts in the units left out."""
    found = [path]
    for run in joint.runs:
        for place, block in enumerate(run.units[run.held[1]]):
            if path == block or path.startswith(f"{block}."):
                left_out = [unit for index, unit in enumerate(run.units) if index not in run.held]
                found += [unit[place] + path[len(block) :] for unit in left_out]
    return found


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
        _module_costs(priced),
    )


def _bounded(one: LeftOut, best: Priced, budget: int) -> Candidate:
    least_s, excess = one.least_s, one.least_bytes - budget
    if excess > 0:
        verdict = f"over the budget by at least {format_bytes(excess)}: what rests, with gradients or what is kept"
    else:
        slower_s = max(0.0, least_s - best.simulation.step_time_s)
        verdict = f"at least {format_time(slower_s)} slower: its ops, what they wait for and what its links carry"
    return Candidate(
        one.plan.strategy, str(one.plan.mesh), least_s, least_s, 0.0, one.least_bytes, verdict, is_bound=True
    )


def _module_costs(priced: Priced) -> tuple[ModuleCost, ...]:
    sim, copies = priced.simulation, copies_of(priced.standing)
    rest: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    for live in sim.live_after_forward:
        if live.kind in ("params", "optimizer", "activations"):
            (saved if live.kind == "activations" else rest)[live.module] += live.num_bytes
    costs = []
    for held in dict.fromkeys((*sim.by_module, *rest, *saved)):
        spent, paths = sim.by_module.get(held, Spent()), copies(held)
        waits: Mapping[str, float] = dict(sorted(spent.exposed_s.items()))
        rests, keeps = rest[held] // len(paths), saved[held] // len(paths)
        costs += [ModuleCost(path, spent.compute_s, waits, rests, keeps) for path in paths]
    return tuple(costs)


def _slower_by(sim: Simulation, won: Simulation) -> str:
    compute, exposed = sim.compute_s - won.compute_s, sim.exposed_s - won.exposed_s
    if compute >= exposed:
        return f"{format_time(compute)} more computing"
    return f"{format_time(exposed)} more waiting for collectives"
