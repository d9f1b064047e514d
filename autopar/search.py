"""The search for the best plan: layouts × how each region's parameters rest × what each region recomputes.

Two levels.  For some layouts a few uniform plans are simulated, which gives the time and the memory of every region
with every option.  From these an exact solve (`autopar.solver`) takes, for a row of memory limits, the fastest choice
of an option for each region, counting among equal regions; and each choice is then rewritten and simulated in full, so
that what is compared is the program that would run.

The pool of plans depends on the graph and the cluster alone, never on the budget, so that a larger budget never gets a
slower plan.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.simulate import Simulation
from autopar.graph import JointGraph
from autopar.layouts import MODES, Layout, find_layouts, storages
from autopar.plan import RECOMPUTE_LEVELS, Plan
from autopar.regions import find_regions, region_of
from autopar.solver import Choice, OptionCost, Problem, enumerated, peak, smallest, solve, step_time


@dataclass(frozen=True)
class Priced:
    """A plan and what the simulator says of its program."""

    plan: Plan
    simulation: Simulation


Price = Callable[[Plan], Simulation]

NUM_LIMITS = 10
"""Memory limits between the smallest and the largest peak of a layout for which the solve is made."""

NUM_FASTEST, NUM_SMALLEST = 4, 2
"""Layouts whose options are searched, by the time and by the memory of a first plan; the others have that plan only."""


@dataclass(frozen=True)
class Option:
    """What is decided for a region: how its parameters rest, and what it recomputes."""

    mode: str
    level: str | None


OPTIONS = tuple(Option(mode, level) for mode in MODES for level in (None, *RECOMPUTE_LEVELS))
_BASE = Option("regathered", None)


def search(joint: JointGraph, sizes: Sequence[int], ranks_per_node: int, price: Price) -> list[Priced]:
    """Plans of all layouts from the fastest to the smallest, simulated; in no order.

    A small problem is simulated in full.  In a larger one a choice is simulated unless a simulated plan is already as
    good as the choice is estimated to be, in time and in memory.  (Estimates are optimistic: what hides a collective is
    shared, and each region counts on it.)
    """
    effort = len(joint.module.graph.nodes)
    layouts = find_layouts(joint, sizes, ranks_per_node)[: max(MIN_LAYOUTS, LAYOUT_NODES // effort)]
    bases = [_LayoutSearch(joint, layout, price) for layout in layouts]
    if sum(len(one.choosable) ** len(one.regions) for one in bases) * effort <= EXHAUSTED_NODES:
        for one in bases:
            one.run_all()
        return [p for one in bases for p in one.priced.values()]
    by_time = sorted(bases, key=lambda s: s.simulate(_BASE).step_time_s)
    by_memory = sorted(bases, key=lambda s: s.simulate(_BASE).memory.total)
    proposals = []
    for one in dict.fromkeys((*by_time[:NUM_FASTEST], *by_memory[:NUM_SMALLEST])):
        proposals += [(time_s, peak_bytes, one, options) for time_s, peak_bytes, options in one.proposals()]
    done = [p.simulation for one in bases for p in one.priced.values()]
    for time_s, peak_bytes, one, options in sorted(proposals, key=lambda proposal: proposal[:2]):
        if not any(s.step_time_s <= time_s and s.memory.total <= peak_bytes for s in done):
            done.append(one.run(options))
    _polish(bases, POLISHED_NODES // effort)
    return [p for one in bases for p in one.priced.values()]


def _polish(searches: Sequence[_LayoutSearch], num_tries: int) -> None:
    """Change one region's option at a time in the plans that are best under some budget, as long as that gives better
    ones.  It finds what the estimates miss: regions whose savings depend on their neighbours'."""
    tried: set[int] = set()
    while num_tries > 0:
        best = [(one, key) for one, key in _frontier(searches) if id(one.priced[key]) not in tried]
        if not best:
            return
        one, key = best[0]
        tried.add(id(one.priced[key]))
        options = one.options[key]
        for region in one.regions:
            for option in one.choosable:
                before = len(one.priced)
                one.run({**options, region: option})
                num_tries -= len(one.priced) - before
                if num_tries <= 0:
                    return


def _frontier(searches: Sequence[_LayoutSearch]) -> list[tuple[_LayoutSearch, object]]:
    """The simulated plans that no other beats in both time and memory, the fastest first."""
    plans = [(p.simulation, one, key) for one in searches for key, p in one.priced.items()]
    plans.sort(key=lambda plan: (plan[0].step_time_s, plan[0].memory.total))
    found, least = [], math.inf
    for simulation, one, key in plans:
        if simulation.memory.total < least:
            least = simulation.memory.total
            found.append((one, key))
    return found


def _worth_trying(problem: Problem) -> list[Choice]:
    """Choices from the smallest to the fastest: in a small problem all that may be best under some budget, as far as
    estimates can tell; else the solutions for a row of limits."""
    choices = enumerated(problem)
    if choices is not None and len(choices.peak) <= MAX_CHOICES:
        return [choices.choice(i) for i in choices.worth_trying(_SLACK)]
    least, fastest = smallest(problem), solve(problem, math.inf)
    low, high = peak(problem, least), peak(problem, fastest or least)
    limits = (low + (high - low) * (i + 1) / NUM_LIMITS for i in range(NUM_LIMITS))
    solutions = dict.fromkeys((least, *(solve(problem, limit) for limit in limits)))
    return [choice for choice in solutions if choice is not None]


LAYOUT_NODES, MIN_LAYOUTS = 40_000, 8
"""How much simulation, in nodes of graphs, goes into first plans of layouts, and how many there are at least."""

EXHAUSTED_NODES, POLISHED_NODES = 20_000, 10_000
"""How much simulation, in nodes of graphs, a problem may take to be tried in full, and how much goes into polishing
others."""

MAX_CHOICES = 400
"""Up to so many choices in a layout are all looked at."""

_SLACK = 0.02
"""By how much an estimated time may be off."""


@dataclass(eq=False)
class _LayoutSearch:
    """The search within one layout."""

    joint: JointGraph
    layout: Layout
    price: Price
    priced: dict[object, Priced] = field(default_factory=dict)
    options: dict[object, Mapping[str, Option]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trains = self.joint.trains
        self.choosable = OPTIONS if trains else tuple(o for o in OPTIONS if o.level is None and o.mode != "kept")
        self.regions = find_regions(self.joint)
        self.storage = storages(self.joint, self.layout)
        owners = {path: region_of(path.rpartition(".")[0], self.regions) for path in self.storage}
        self.params: dict[str, list[str]] = {region: [] for region in self.regions}
        for path, owner in owners.items():
            self.params[owner or ""].append(path)

    # -- from options to plans and their simulations

    def plan(self, options: Mapping[str, Option]) -> Plan:
        """The plan that gives each region its option."""
        storage = {
            path: self.storage[path][options[region].mode] for region in self.regions for path in self.params[region]
        }
        recompute = {region: level for region in self.regions if (level := options[region].level) is not None}
        return self.layout.plan({path: storage[path] for path in self.storage}, recompute)

    def run(self, options: Mapping[str, Option]) -> Simulation:
        """Simulate a choice; equal plans once."""
        plan = self.plan(options)
        key = (tuple(plan.storage.items()), tuple(sorted(plan.recompute.items())))
        if key not in self.priced:
            self.priced[key] = Priced(plan, self.price(plan))
            self.options[key] = options
        return self.priced[key].simulation

    def run_all(self) -> None:
        """Simulate every choice."""
        for options in itertools.product(self.choosable, repeat=len(self.regions)):
            self.run(dict(zip(self.regions, options, strict=True)))

    def simulate(self, option: Option) -> Simulation:
        """The same option everywhere."""
        return self.run(dict.fromkeys(self.regions, option))

    # -- the solve

    def proposals(self) -> Iterator[tuple[float, float, dict[str, Option]]]:
        """The best choices between the smallest memory and the least time, each with its estimated time and peak."""
        options = self.choosable
        costs = self._costs(options)
        classes = self._classes(costs)
        problem = Problem(tuple(map(len, classes)), tuple(tuple(costs[c[0]]) for c in classes))
        base = self.simulate(_BASE)
        unowned_s = base.step_time_s - sum(spent.total_s for spent in base.by_module.values())  # the optimizer's step
        for choice in _worth_trying(problem):
            chosen = self._assign(classes, choice, options, problem)
            yield step_time(problem, choice) + unowned_s, peak(problem, choice), chosen

    def _costs(self, options: Sequence[Option]) -> dict[str, list[OptionCost]]:
        """Each region's cost with each option.  How parameters rest and what is recomputed are taken to add up."""
        base = self._shares(_BASE)
        by_mode = {mode: self._shares(Option(mode, None)) for mode in dict.fromkeys(o.mode for o in options)}
        by_level = {level: self._shares(Option(_BASE.mode, level)) for level in dict.fromkeys(o.level for o in options)}
        costs: dict[str, list[OptionCost]] = {}
        for region in self.regions:
            start = base[region]
            costs[region] = []
            for option in options:
                mode, level = by_mode[option.mode][region], by_level[option.level][region]
                costs[region].append(
                    OptionCost(
                        time_s=max(0.0, mode.time_s + level.time_s - start.time_s),
                        rest=mode.rest,
                        saved=max(0.0, mode.saved + level.saved - start.saved),
                        grads=mode.grads,
                        transient=max(0.0, mode.transient + level.transient - start.transient),
                    )
                )
        return costs

    def _shares(self, option: Option) -> dict[str, OptionCost]:
        """Each region's share of the step when all take one option."""
        simulation = self.simulate(option)
        time_s, rest, saved, grads = (dict.fromkeys(self.regions, 0.0) for _ in range(4))
        for module, spent in simulation.by_module.items():
            time_s[self._region(module)] += spent.total_s
        for live in simulation.live_after_forward:
            region = self._region(live.module)
            if live.kind in ("params", "optimizer"):
                rest[region] += live.num_bytes
            elif live.kind == "activations":
                saved[region] += live.num_bytes
        for live in simulation.live_at_end:
            if live.kind == "grads":
                grads[self._region(live.module)] += live.num_bytes
        held = sum(rest.values()) + max(sum(saved.values()), sum(grads.values()))
        transient = max(0.0, simulation.memory.total - held)
        return {r: OptionCost(time_s[r], rest[r], saved[r], grads[r], transient) for r in self.regions}

    def _region(self, module: str) -> str:
        return region_of(module, self.regions) or ""

    def _classes(self, costs: Mapping[str, Sequence[OptionCost]]) -> list[list[str]]:
        """Regions that differ in a number of their path only and hold the same bytes, in the order they run in."""
        classes: dict[object, list[str]] = {}
        for region in self.regions:
            pattern = re.sub(r"\d+", "*", region)
            sizes = tuple((cost.rest, cost.saved, cost.grads) for cost in costs[region])
            classes.setdefault((pattern, sizes), []).append(region)
        return list(classes.values())

    def _assign(
        self, classes: Sequence[Sequence[str]], choice: Choice, options: Sequence[Option], problem: Problem
    ) -> dict[str, Option]:
        """Who takes which option: of alike regions the first ones keep least, since they keep it longest."""
        taken: dict[str, Option] = {}
        for members, counts, costs in zip(classes, choice, problem.costs, strict=True):
            order = sorted(range(len(options)), key=lambda i: (costs[i].saved, costs[i].rest))
            chosen = itertools.chain.from_iterable(itertools.repeat(options[i], counts[i]) for i in order)
            taken.update(zip(members, chosen, strict=True))
        return taken
