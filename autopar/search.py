"""The search for the best plan: layouts × how each region's parameters rest × what each region recomputes.

Two levels.  For some layouts a few uniform plans are simulated, which gives the time and the memory of every region
with every option.  From these an exact solve (`autopar.solver`) takes, for a row of memory limits, the fastest choice
of an option for each region, counting among equal regions; and each choice is then rewritten and simulated in full, so
that what is compared is the program that would run.

The pool of plans depends on the graph and the cluster alone, never on the budget, so that a larger budget never gets a
slower plan.  Of a large graph's pool a budget has only those plans simulated that may be its best, by their estimates,
which are optimistic: what hides a collective is shared, and each region counts on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.bounds import Bounds
from autopar.cost_model.simulate import Simulation
from autopar.graph import JointGraph
from autopar.layout_search import BASE, SLACK, LayoutSearch, Option, Price, Priced
from autopar.layouts import Layout, find_layouts

AUTO = "auto"
"""Name of the search among strategies, and of its plans."""

NUM_FASTEST, NUM_SMALLEST = 4, 2
"""Layouts whose options are searched, by the time of a first plan and by the memory that they need at least; the others
have that plan only."""

NUM_FOOTHOLDS = 2
"""Layouts of which a plan that fits is looked for before others."""

NUM_REFINED = 2
"""Of the fastest, layouts for which modules inside of blocks get options of their own."""


@dataclass
class Search:
    """The pool of plans of a graph; each is simulated when it is asked for, once.

    Attributes:
        joint: the graph, whole or folded.
        sizes: the user's mesh shape.
        ranks_per_node: of the cluster.
        price: simulates a plan.
        bounds: what no plan of a layout undercuts.
    """

    joint: JointGraph
    sizes: Sequence[int]
    ranks_per_node: int
    price: Price
    bounds: Bounds
    _searches: dict[Layout, LayoutSearch] = field(default_factory=dict)
    _known_bounds: dict[tuple[Layout, int], float] = field(default_factory=dict)

    def everything(self) -> list[Priced]:
        """Plans of all layouts from the fastest to the smallest, simulated; in no order.

        A small problem is simulated in full.  In a larger one a choice is simulated unless a simulated plan is already
        as good as the choice is estimated to be, in time and in memory.
        """
        return self._everything

    @cached_property
    def _everything(self) -> list[Priced]:
        if not self._is_exhausted:
            worth = self._worth_searching()
            if not self.is_small:
                worth += [(one, False) for one in self._most_frugal()]
            self._run_proposals([(one, one.option_sets(finer)[0]) for one, finer in worth])
            self._run_proposals([(one, options) for one, finer in worth for options in one.option_sets(finer)[1:]])
            if self.is_small:
                _polish(list(self._searches.values()), POLISHED_NODES // self._effort)
            else:
                self._run_smaller()
                return self._as_budgets_find()
        return self._simulated()

    def _as_budgets_find(self) -> list[Priced]:
        """What is simulated; but of layouts that no budget looks at as long as others fit, only first plans and those
        that are smaller than the others'.  So step time against memory is what planning under each budget gives."""
        first = {id(one.simulate(BASE)) for one in self._kinds(sys.maxsize, lambda: math.inf)}
        late = [p for one in self._most_frugal() for p in one.priced.values() if id(p.simulation) not in first]
        known = set(map(id, late))
        others = [p for p in self._simulated() if id(p) not in known]
        return others + [p for p in late if p.simulation.memory.total < _smallest_peak(others)]

    def _run_smaller(self) -> None:
        """Simulate what a budget below the smallest plan's peak would have simulated, until no plan is smaller: what is
        said to be the smallest budget that works is then the smallest that does."""
        least, before = _smallest_peak(self._simulated()), math.inf
        while least < before:
            before, least = least, _smallest_peak(self.within(least - 1, ()))

    def _run_proposals(self, spaces: Iterable[tuple[LayoutSearch, tuple[Option, ...]]]) -> None:
        """Simulate what the solves with these options propose, unless a simulated plan is already as good."""
        slack = 0.0 if self.is_small else SLACK
        proposals = [
            (time_s, peak_bytes, one, chosen)
            for one, options in spaces
            for time_s, peak_bytes, chosen in one.proposals(options)
        ]
        done = [p.simulation for p in self._simulated()]
        for time_s, peak_bytes, one, chosen in sorted(proposals, key=lambda proposal: proposal[:2]):
            near = (time_s * (1 + slack), peak_bytes * (1 + slack))
            if not any(s.step_time_s <= near[0] and s.memory.total <= near[1] for s in done):
                done.append(one.run(*chosen))

    def within(self, budget: int, known: Iterable[Priced]) -> list[Priced]:
        """Plans, simulated, with the best one under a budget of so many bytes among them, if `known` have no better.

        What is left out is bound or estimated to be slower than a plan that fits, or to need more than the budget.
        """
        if self._is_exhausted or self.is_small:
            return self.everything()
        known = [p for p in known if p.simulation.memory.total <= budget]

        def fastest_s() -> float:
            return _fastest_s([*known, *self._simulated()], budget)

        if fastest_s() == math.inf:
            self._run_foothold(budget, fastest_s)
        self._run_within(budget, self._worth_searching(budget, fastest_s), fastest_s)
        if fastest_s() == math.inf:
            self._run_within(budget, [(one, False) for one in self._most_frugal()], fastest_s)
        return self._simulated()

    def _run_foothold(self, budget: int, fastest_s: Callable[[], float]) -> None:
        """Simulate a plan that fits and may be nearly the fastest, so that little else is worth a look: of the layout
        with the lowest bound, all with one option that recomputes no more than it must."""
        for one in sorted(self._all_kinds, key=lambda search: self._bound_s(search, budget))[:NUM_FOOTHOLDS]:
            mode = min(one.modes, key=lambda mode: self.bounds.within_s([one.uniform(mode)], budget))
            for option in (option for option in one.choosable if option.mode == mode):
                if option.level is not None or self.bounds.num_bytes(one.uniform(mode)) <= budget:
                    one.simulate(option)
                if fastest_s() < math.inf:
                    return

    def _run_within(
        self, budget: int, searches: Iterable[tuple[LayoutSearch, bool]], fastest_s: Callable[[], float]
    ) -> None:
        """Simulate what the solves of some layouts propose that may fit, and be faster than `fastest_s` by then."""
        for one, finer in sorted(searches, key=lambda search: self._bound_s(search[0], budget)):
            if self._is_idle(self._bound_s(one, budget), fastest_s()):
                continue
            if self._is_idle(self._least_s(one, budget, fastest_s()), fastest_s()):
                continue
            for options in one.option_sets(finer):
                too_short = 1.0  # estimates of a layout are off by about the same
                for time_s, _, chosen in one.proposals(options, budget * (1 + SLACK)):
                    if time_s * max(1.0, too_short * (1 - SLACK / 4)) >= fastest_s():
                        break
                    too_short = one.run(*chosen).step_time_s / time_s

    @property
    def _effort(self) -> int:
        return len(self.joint.module.graph.nodes)

    @property
    def is_small(self) -> bool:
        """Whether all layouts are searched, whatever the budget."""
        return self._effort <= SMALL_NODES

    def _bound_s(self, search: LayoutSearch, budget: int) -> float:
        """What no plan of a layout is estimated to undercut within a budget."""
        key = search.layout, budget
        if key not in self._known_bounds:
            self._known_bounds[key] = self.bounds.within_s([search.uniform(mode) for mode in search.modes], budget)
        return self._known_bounds[key]

    def _least_s(self, search: LayoutSearch, budget: int, fastest_s: float) -> float:
        """The same from fewer simulations than the solve takes: of a plan for each way to rest that may be faster than
        `fastest_s`.  The bound falls short of all of the layout's plans at least by as much as of the one to which it
        comes nearest."""
        bounds = {mode: self.bounds.time_s(search.uniform(mode)) for mode in search.modes}
        near = [mode for mode in bounds if not self._is_idle(bounds[mode], fastest_s)] or list(bounds)
        short = min(search.simulate(Option(mode, None)).step_time_s / bounds[mode] for mode in near)
        return max(search.bound_s(near), self._bound_s(search, budget) * short)

    @staticmethod
    def _is_idle(bound_s: float, fastest_s: float) -> bool:
        """Whether what a bound leaves to be gained is not worth a simulation."""
        return bound_s * WORTH >= fastest_s

    def _may_beat(
        self, searches: Iterable[LayoutSearch], budget: int, fastest_s: Callable[[], float]
    ) -> Iterator[LayoutSearch]:
        """Those whose layouts may have a faster plan, as far as their bounds tell, the most promising first."""
        for one in sorted(searches, key=lambda search: self._bound_s(search, budget)):
            if not self._is_idle(self._bound_s(one, budget), fastest_s()):
                yield one

    @cached_property
    def _layouts(self) -> list[Layout]:
        return find_layouts(self.joint, self.sizes, self.ranks_per_node)

    def _of(self, layouts: Iterable[Layout]) -> list[LayoutSearch]:
        layouts = list(layouts)
        for one in layouts:
            if one not in self._searches:
                self._searches[one] = LayoutSearch(self.joint, one, self.price)
        return [self._searches[one] for one in layouts]

    @cached_property
    def _is_exhausted(self) -> bool:
        """Whether the problem is so small that every choice was simulated."""
        kinds = self._all_kinds
        if sum(len(one.choosable) ** len(one.parts) for one in kinds) * self._effort > EXHAUSTED_NODES:
            return False
        for one in kinds:
            one.run_all()
        return True

    @cached_property
    def _all_kinds(self) -> list[LayoutSearch]:
        """All layouts, or of a large graph one of each kind."""
        return self._of(self._layouts if self.is_small else _one_of_each_kind(self._layouts))

    def _kinds(self, budget: int, fastest_s: Callable[[], float]) -> list[LayoutSearch]:
        """Of all kinds those that may be worth a simulation within a budget, if a plan is known that takes
        `fastest_s`."""
        if self.is_small:
            return self._all_kinds
        worth: list[LayoutSearch] = []
        for one in self._may_beat((one for one in self._all_kinds if any(one.layout.factors)), budget, fastest_s):
            one.simulate(BASE)
            worth.append(one)
        whole = (one for one in self._all_kinds if not any(one.layout.factors))
        return [*worth, *self._may_beat(whole, budget, fastest_s)]

    def _bases(self, budget: int, fastest_s: Callable[[], float]) -> list[LayoutSearch]:
        """The layouts of which at least a first plan is simulated."""
        kinds = self._kinds(budget, fastest_s)
        if self.is_small:
            return kinds
        unbeaten, known = {one.layout.name for one in _unbeaten(kinds)}, {one.layout for one in kinds}
        others = self._of(one for one in self._layouts if one.name in unbeaten and one not in known)
        return kinds + list(self._may_beat(others, budget, fastest_s))

    def _worth_searching(
        self, budget: int = sys.maxsize, fastest_s: Callable[[], float] = lambda: math.inf
    ) -> list[tuple[LayoutSearch, bool]]:
        """The layouts whose options are searched, the fastest first, and whether modules inside of blocks have options
        of their own."""
        bases = self._bases(budget, fastest_s)
        worth = bases if self.is_small else _unbeaten(bases)
        by_time = sorted(worth, key=lambda s: _least_s(s) if self.is_small else s.simulate(BASE).step_time_s)
        by_memory = sorted(
            worth, key=lambda s: min(_first_bytes(s), _least_bytes(s)) if self.is_small else _first_bytes(s)
        )
        found = dict.fromkeys((*by_time[:NUM_FASTEST], *by_memory[:NUM_SMALLEST]))
        return [(one, one in by_time[:NUM_REFINED]) for one in found]

    def _most_frugal(self) -> list[LayoutSearch]:
        """Of a large graph, layouts that need the least memory and are not worth searching as long as others fit."""
        frugal = sorted(self._of(self._layouts), key=_least_bytes)[:NUM_SMALLEST]
        searched = [one for one, _ in self._worth_searching()]
        return [one for one in frugal if one not in searched]

    def _simulated(self) -> list[Priced]:
        return [p for one in self._searches.values() for p in one.priced.values()]


def _fastest_s(priced: Iterable[Priced], budget: int) -> float:
    """The step time of the fastest plan that fits a budget in bytes; infinite if there is none."""
    fitting = (p.simulation for p in priced if p.simulation.memory.total <= budget)
    return min((s.step_time_s for s in fitting), default=math.inf)


def _smallest_peak(priced: Iterable[Priced]) -> int:
    return min(p.simulation.memory.total for p in priced)


def _least_s(search: LayoutSearch) -> float:
    """What a layout takes at least, about: where parameters travel slowly, it is as they rest whole."""
    return min(search.simulate(option).step_time_s for option in (BASE, replace(BASE, mode="whole")))


def _first_bytes(search: LayoutSearch) -> int:
    """What the first plan of a layout needs."""
    return search.simulate(BASE).memory.total


def _least_bytes(search: LayoutSearch) -> int:
    """What a layout needs if all is cut and computed again, which in a large model is nearly the least."""
    return search.simulate(search.choosable[-1]).memory.total


def _one_of_each_kind(layouts: Sequence[Layout]) -> list[Layout]:
    """Of the layouts that cut the same on different meshes, one on a mesh of as many axes as any has."""
    most = max(layouts, key=lambda one: one.mesh.num_axes, default=None)
    found: dict[str, Layout] = {}
    for one in layouts:
        known = found.get(one.name)
        if known is None or (most is not None and known.mesh.num_axes < one.mesh.num_axes):
            found[one.name] = one
    return list(found.values())


def _unbeaten(searches: Sequence[LayoutSearch]) -> list[LayoutSearch]:
    """The layouts whose first plan no other's beats: in time and memory, or in memory at about the same time."""
    first = [(one.simulate(BASE), one) for one in searches]
    return [one for mine, one in first if not any(_beats(theirs, mine) for theirs, _ in first)]


def _beats(theirs: Simulation, mine: Simulation) -> bool:
    if theirs.memory.total == mine.memory.total:
        return theirs.step_time_s < mine.step_time_s
    return theirs.memory.total < mine.memory.total and theirs.step_time_s < mine.step_time_s * ALIKE


def _polish(searches: Sequence[LayoutSearch], num_tries: int) -> None:
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


def _frontier(searches: Sequence[LayoutSearch]) -> list[tuple[LayoutSearch, object]]:
    """The simulated plans that no other beats in both time and memory, the fastest first."""
    plans = [(p.simulation, one, key) for one in searches for key, p in one.priced.items()]
    plans.sort(key=lambda plan: (plan[0].step_time_s, plan[0].memory.total))
    found, least = [], math.inf
    for simulation, one, key in plans:
        if simulation.memory.total < least:
            least = simulation.memory.total
            found.append((one, key))
    return found


WORTH = 1.002
"""By how much a plan of a large graph may be faster than one that is known, as far as bounds tell, and not be looked
for."""

ALIKE = 1.005
"""Of two layouts of a large graph whose first plans take times in less than this ratio the smaller is searched only."""

SMALL_NODES = 400
"""Up to so many nodes of a graph, the first plan of every layout is simulated; of larger graphs, that of each kind on
one mesh, and on the others where no other kind beats it."""

EXHAUSTED_NODES, POLISHED_NODES = 20_000, 10_000
"""How much simulation, in nodes of graphs, a problem may take to be tried in full, and how much goes into polishing
other small ones."""
