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
from autopar.whole_plan import Split, even_splits

AUTO = "auto"
"""Name of the search among strategies, and of its plans."""


@dataclass(frozen=True)
class Priced:
    """A plan and what the simulator says of its program."""

    plan: Plan
    simulation: Simulation
    splits: tuple[Split, ...] = ()
    """Of a plan of a folded graph: how many units do as each run's inner ones."""


Price = Callable[[Plan, tuple[Split, ...]], Simulation]
"""Prices a plan of a graph; if that is folded, with how many units do as each run's inner ones."""

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
    layouts = find_layouts(joint, sizes, ranks_per_node)
    small = effort <= SMALL_NODES
    slack = 0.0 if small else _SLACK
    bases = [_LayoutSearch(joint, one, price) for one in (layouts if small else _one_of_each_kind(layouts))]
    if sum(len(one.choosable) ** len(one.parts) for one in bases) * effort <= EXHAUSTED_NODES:
        for one in bases:
            one.run_all()
        return [p for one in bases for p in one.priced.values()]
    if not small:
        kinds = {one.layout.name for one in _unbeaten(bases)}
        known = {one.layout for one in bases}
        bases += [_LayoutSearch(joint, one, price) for one in layouts if one.name in kinds and one not in known]
    worth = bases if small else _unbeaten(bases)
    by_time = sorted(worth, key=lambda s: s.simulate(_BASE).step_time_s)
    by_memory = sorted(worth, key=lambda s: s.simulate(_BASE).memory.total)
    proposals = []
    for one in dict.fromkeys((*by_time[:NUM_FASTEST], *by_memory[:NUM_SMALLEST])):
        proposals += [(time_s, peak_bytes, one, chosen) for time_s, peak_bytes, chosen in one.proposals()]
    done = [p.simulation for one in bases for p in one.priced.values()]
    for time_s, peak_bytes, one, chosen in sorted(proposals, key=lambda proposal: proposal[:2]):
        near = (time_s * (1 + slack), peak_bytes * (1 + slack))
        if not any(s.step_time_s <= near[0] and s.memory.total <= near[1] for s in done):
            done.append(one.run(*chosen))
    _polish(bases, POLISHED_NODES // effort)
    return [p for one in bases for p in one.priced.values()]


def _one_of_each_kind(layouts: Sequence[Layout]) -> list[Layout]:
    """Of the layouts that cut the same on different meshes, one on a mesh of as many axes as any has."""
    most = max(layouts, key=lambda one: one.mesh.num_axes, default=None)
    found: dict[str, Layout] = {}
    for one in layouts:
        known = found.get(one.name)
        if known is None or (most is not None and known.mesh.num_axes < one.mesh.num_axes):
            found[one.name] = one
    return list(found.values())


def _unbeaten(searches: Sequence[_LayoutSearch]) -> list[_LayoutSearch]:
    """The layouts whose first plan no other's beats in both time and memory."""
    first = [(one.simulate(_BASE), one) for one in searches]
    return [
        one
        for mine, one in first
        if not any(s.step_time_s < mine.step_time_s and s.memory.total < mine.memory.total for s, _ in first)
    ]


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
        options, splits = one.chosen[key]
        for part in one.parts:
            for option in one.choosable:
                before = len(one.priced)
                one.run({**options, part: option}, splits)
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


SMALL_NODES = 400
"""Up to so many nodes of a graph, the first plan of every layout is simulated; of larger graphs, that of each kind on
one mesh, and on the others where no other kind beats it."""

EXHAUSTED_NODES, POLISHED_NODES = 20_000, 10_000
"""How much simulation, in nodes of graphs, a problem may take to be tried in full, and how much goes into polishing
others."""

MAX_CHOICES = 400
"""Up to so many choices in a layout are all looked at."""

_SLACK = 0.02
"""By how much an estimated time may be off."""


Chosen = tuple[dict[str, Option], tuple[Split, ...]]
"""An option for each part, and how many units do as each run's inner ones."""


@dataclass(eq=False)
class _LayoutSearch:
    """The search within one layout.

    What takes one option is a *part*: a region, or in a folded graph a held unit with the regions in it.
    """

    joint: JointGraph
    layout: Layout
    price: Price
    priced: dict[object, Priced] = field(default_factory=dict)
    chosen: dict[object, Chosen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trains = self.joint.trains
        self.choosable = OPTIONS if trains else tuple(o for o in OPTIONS if o.level is None and o.mode != "kept")
        self.regions = find_regions(self.joint)
        self.part_of = {region: region for region in self.regions}
        units = (run.units[held] for run in self.joint.runs for held in run.held)
        self.part_of.update((block, unit[0]) for unit in units for block in unit if block in self.part_of)
        self.parts = tuple(dict.fromkeys(self.part_of.values()))
        self.storage = storages(self.joint, self.layout)
        self.splits = even_splits(self.joint.runs)
        self.num_units: dict[str, int] = {}  # those that each inner part stands for when they are split evenly
        for run, split in zip(self.joint.runs, self.splits, strict=True):
            self.num_units.update(zip((run.units[held][0] for held in run.held[1:3]), split, strict=True))

    # -- from options to plans and their simulations

    def plan(self, options: Mapping[str, Option]) -> Plan:
        """The plan that gives each part its option."""
        storage = {path: modes[options[self._owner(path)].mode] for path, modes in self.storage.items()}
        levels = {region: options[part].level for region, part in self.part_of.items()}
        return self.layout.plan(storage, {region: level for region, level in levels.items() if level is not None})

    def _owner(self, path: str) -> str:
        return self._part(path.rpartition(".")[0])

    def _part(self, module: str) -> str:
        return self.part_of[region_of(module, self.part_of) or ""]

    def run(self, options: Mapping[str, Option], splits: tuple[Split, ...] | None = None) -> Simulation:
        """Simulate a choice; equal plans once."""
        plan, splits = self.plan(options), splits or self.splits
        key = (tuple(plan.storage.items()), tuple(sorted(plan.recompute.items())), splits)
        if key not in self.priced:
            self.priced[key] = Priced(plan, self.price(plan, splits), splits)
            self.chosen[key] = dict(options), splits
        return self.priced[key].simulation

    def run_all(self) -> None:
        """Simulate every choice."""
        for options in itertools.product(self.choosable, repeat=len(self.parts)):
            self.run(dict(zip(self.parts, options, strict=True)))

    def simulate(self, option: Option) -> Simulation:
        """The same option everywhere."""
        return self.run(dict.fromkeys(self.parts, option))

    # -- the solve

    def proposals(self) -> Iterator[tuple[float, float, Chosen]]:
        """The best choices between the smallest memory and the least time, each with its estimated time and peak."""
        options = self.choosable
        costs = self._costs(options)
        classes = self._classes(costs)
        problem = Problem(tuple(map(len, classes)), tuple(tuple(costs[c[0].part]) for c in classes))
        base = self.simulate(_BASE)
        spent = {module: spent.total_s for module, spent in base.by_module.items()}
        owned_s = sum(total_s * self.num_units.get(self._part(module), 1) for module, total_s in spent.items())
        unowned_s = base.step_time_s - owned_s  # the optimizer's step
        for choice in _worth_trying(problem):
            chosen = self._assign(classes, choice, options, problem)
            if chosen is not None:
                yield step_time(problem, choice) + unowned_s, peak(problem, choice), chosen

    def _costs(self, options: Sequence[Option]) -> dict[str, list[OptionCost]]:
        """Each part's cost with each option.  How parameters rest and what is recomputed are taken to add up."""
        base = self._shares(_BASE)
        by_mode = {mode: self._shares(Option(mode, None)) for mode in dict.fromkeys(o.mode for o in options)}
        by_level = {level: self._shares(Option(_BASE.mode, level)) for level in dict.fromkeys(o.level for o in options)}
        costs: dict[str, list[OptionCost]] = {}
        for part in self.parts:
            start = base[part]
            costs[part] = []
            for option in options:
                mode, level = by_mode[option.mode][part], by_level[option.level][part]
                costs[part].append(
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
        """Each part's share of the step, or one unit's of those that it stands for, when all take one option."""
        simulation = self.simulate(option)
        time_s, rest, saved, grads = (dict.fromkeys(self.parts, 0.0) for _ in range(4))
        for module, spent in simulation.by_module.items():
            time_s[self._part(module)] += spent.total_s
        for live in simulation.live_after_forward:
            part = self._part(live.module)
            if live.kind in ("params", "optimizer"):
                rest[part] += live.num_bytes
            elif live.kind == "activations":
                saved[part] += live.num_bytes
        for live in simulation.live_at_end:
            if live.kind == "grads":
                grads[self._part(live.module)] += live.num_bytes
        held = sum(rest.values()) + max(sum(saved.values()), sum(grads.values()))
        transient = max(0.0, simulation.memory.total - held)
        shares = {}
        for part in self.parts:
            num = self.num_units.get(part, 1)
            shares[part] = OptionCost(time_s[part], rest[part] / num, saved[part] / num, grads[part] / num, transient)
        return shares

    def _classes(self, costs: Mapping[str, Sequence[OptionCost]]) -> list[list[_Member]]:
        """Parts that differ in a number of their path only and hold the same bytes, in the order they run in; all units
        of a run are one class, at the cost of its first inner one."""
        runs = {run.units[0][0]: (number, run) for number, run in enumerate(self.joint.runs)}
        others = {run.units[held][0] for run in self.joint.runs for held in run.held[1:]}
        classes: dict[object, list[_Member]] = {}
        for part in self.parts:
            if part in runs:
                number, run = runs[part]
                inner = run.units[run.held[1]][0]
                classes[number] = [_Member(inner, number, i) for i in range(len(run.units))]
            elif part not in others:
                pattern = re.sub(r"\d+", "*", part)
                sizes = tuple((cost.rest, cost.saved, cost.grads) for cost in costs[part])
                classes.setdefault((pattern, sizes), []).append(_Member(part))
        return list(classes.values())

    def _assign(
        self, classes: Sequence[Sequence[_Member]], choice: Choice, options: Sequence[Option], problem: Problem
    ) -> Chosen | None:
        """Who takes which option: of alike parts the first ones keep least, since they keep it longest.  None if more
        than two options meet in what a run's inner units stand for."""
        taken: dict[_Member, Option] = {}
        for members, counts, costs in zip(classes, choice, problem.costs, strict=True):
            order = sorted(range(len(options)), key=lambda i: (costs[i].saved, costs[i].rest))
            chosen = itertools.chain.from_iterable(itertools.repeat(options[i], counts[i]) for i in order)
            taken.update(zip(members, chosen, strict=True))
        parts = {member.part: option for member, option in taken.items()}
        splits = list(self.splits)
        for number, run in enumerate(self.joint.runs):
            first, *inner, last = (option for member, option in taken.items() if member.run == number)
            groups = [(option, len(list(same))) for option, same in itertools.groupby(inner)]
            if len(groups) > 2:
                return None
            if len(groups) == 2:
                splits[number] = (groups[0][1], groups[1][1])
            held = (first, groups[0][0], groups[-1][0], last)
            parts.update({run.units[i][0]: option for i, option in zip(run.held, held, strict=True)})
        return parts, tuple(splits)


@dataclass(frozen=True)
class _Member:
    """One of the parts that take options: of a run, one of all its units, held or not.

    Attributes:
        part: whose costs it has.
        run, index: number of the run, and position in it.
    """

    part: str
    run: int = -1
    index: int = 0
