"""The search within one layout: an option for each part of the model, by an exact solve from uniform plans."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost_model.memory import fixed_reserve
from autopar.cost_model.simulate import Simulation
from autopar.graph import JointGraph
from autopar.layouts import MODES, Layout, storages
from autopar.plan import RECOMPUTE_LEVELS, Plan, Storage
from autopar.problem import Choice, OptionCost, Problem, peak, step_time
from autopar.regions import find_regions, inner_modules, region_of
from autopar.solver import enumerated, smallest, solve
from autopar.whole_plan import Split, StandIns, even_splits


@dataclass(frozen=True)
class Priced:
    """A plan and what the simulator says of its program."""

    plan: Plan
    simulation: Simulation
    splits: tuple[Split, ...] = ()
    """Of a plan of a folded graph: how many units do as each run's inner ones."""
    standing: StandIns = field(default_factory=dict)
    """What the units of the program that was simulated stand for."""

    def called(self, strategy: str) -> Priced:
        """The same for an equal plan that another strategy proposed."""
        return replace(self, plan=replace(self.plan, strategy=strategy))


Price = Callable[[Plan, tuple[Split, ...]], Priced]
"""Prices a plan of a graph; if that is folded, with how many units do as each run's inner ones."""

NUM_LIMITS = 24
"""Memory limits between the smallest and the largest peak of a layout for which the solve is made, each larger than the
one before by the same ratio: budgets are mostly nearer to the smallest."""

SLACK = 0.02
"""By how much an estimated time may be off."""

MIN_SHARE = 1 / 8
"""A module inside of a block has an option of its own if it keeps for the backward pass at least this share of what all
blocks keep."""


@dataclass(frozen=True)
class Option:
    """What is decided for a region: how its parameters rest, and what it recomputes.

    Attributes:
        mode: one of `MODES`.
        level: a recomputation level, or None.
        full_in: a module inside the region that recomputes everything, as its path from there; empty for none.
    """

    mode: str
    level: str | None
    full_in: str = ""


OPTIONS = tuple(Option(mode, level) for mode in MODES for level in (None, *RECOMPUTE_LEVELS))
BASE = Option("regathered", None)


Chosen = tuple[dict[str, Option], tuple[Split, ...]]
"""An option for each part, and how many units do as each run's inner ones."""


@dataclass(eq=False)
class LayoutSearch:
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
        modes = MODES if len(self.layout.storage_axes) > 1 else MODES[:-1]  # along one axis, that is all of them
        options = (option for option in OPTIONS if option.mode in modes)
        self.choosable = tuple(o for o in options if trains or (o.level is None and o.mode != "kept"))
        self._uniform: dict[str, Plan] = {}
        self._known_shares: dict[Option, dict[str, _Share]] = {}
        self._problems: dict[tuple[Option, ...], tuple[list[list[_Member]], Problem]] = {}
        self.regions = find_regions(self.joint)
        self.part_of = {region: region for region in self.regions}
        units = (run.units[held] for run in self.joint.runs for held in run.held)
        self.part_of.update((block, unit[0]) for unit in units for block in unit if block in self.part_of)
        self.parts = tuple(dict.fromkeys(self.part_of.values()))
        self.inner = inner_modules(self.joint, self.regions)
        self.splits = even_splits(self.joint.runs)
        self.num_units: dict[str, int] = {}  # those that each inner part stands for when they are split evenly
        for run, split in zip(self.joint.runs, self.splits, strict=True):
            self.num_units.update(zip((run.units[held][0] for held in run.held[1:3]), split, strict=True))

    # -- from options to plans and their simulations

    @cached_property
    def storage(self) -> dict[str, dict[str, Storage]]:
        """How each parameter rests in each mode."""
        return storages(self.joint, self.layout)

    def plan(self, options: Mapping[str, Option]) -> Plan:
        """The plan that gives each part its option."""
        storage = {path: modes[options[self._owner(path)].mode] for path, modes in self.storage.items()}
        levels = {region: level for region, part in self.part_of.items() if (level := options[part].level) is not None}
        for region, part in self.part_of.items():
            if options[part].full_in in self.inner.get(region, ()):
                levels[f"{region}.{options[part].full_in}"] = "full"
        return self.layout.plan(storage, levels)

    def uniform(self, mode: str) -> Plan:
        """The plan whose parameters all rest in one way; nothing is recomputed."""
        if mode not in self._uniform:
            self._uniform[mode] = self.plan(dict.fromkeys(self.parts, Option(mode, None)))
        return self._uniform[mode]

    def option_sets(self, finer: bool) -> tuple[tuple[Option, ...], ...]:
        """What the solve chooses among, once or, if it is `finer`, twice: what is `choosable`, and with it options that
        recompute everything in one of a block's modules and the cheap ops in the rest, for modules that keep much."""
        return (self.choosable, (*self.choosable, *self._finer)) if finer and self._finer else (self.choosable,)

    @cached_property
    def _finer(self) -> tuple[Option, ...]:
        saved: dict[str, int] = {}
        for live in self.simulate(BASE).live_after_forward:
            block = region_of(live.module, self.inner)
            if live.kind == "activations" and block is not None:
                name = live.module[len(block) + 1 :].partition(".")[0]
                saved[name] = saved.get(name, 0) + live.num_bytes
        names = dict.fromkeys(name for found in self.inner.values() for name in found)
        large = [name for name in names if saved.get(name, 0) > MIN_SHARE * sum(saved.values())]
        cheap = (option for option in self.choosable if option.level == "selective")
        return tuple(replace(option, full_in=name) for option in cheap for name in large)

    def _owner(self, path: str) -> str:
        return self._part(path.rpartition(".")[0])

    def _part(self, module: str) -> str:
        return self.part_of[region_of(module, self.part_of) or ""]

    def run(self, options: Mapping[str, Option], splits: tuple[Split, ...] | None = None) -> Simulation:
        """Simulate a choice; equal plans once."""
        plan, splits = self.plan(options), splits or self.splits
        key = (tuple(plan.storage.items()), tuple(sorted(plan.recompute.items())), splits)
        if key not in self.priced:
            self.priced[key] = self.price(plan, splits)
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

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways for parameters to rest."""
        return tuple(dict.fromkeys(option.mode for option in self.choosable))

    def bound_s(self, modes: Sequence[str]) -> float:
        """What no plan of the layout whose parameters rest in these ways is estimated to undercut, from fewer
        simulations than the solve takes: each part's least time with nothing recomputed."""
        shares = [self._shares(Option(mode, None)) for mode in modes]
        return sum(
            self.num_units.get(part, 1) * min(share[part].cost.time_s for share in shares) for part in self.parts
        )

    def proposals(self, options: tuple[Option, ...], limit: float = math.inf) -> Iterator[tuple[float, float, Chosen]]:
        """The best choices among these options within rising limits of memory, from the last limit that is at most
        `limit` bytes to the first: each with its estimated time and peak, so that times rise."""
        if options not in self._problems:
            costs = self._costs(options)
            classes = self._classes(costs)
            shape = Problem(tuple(map(len, classes)), tuple(_cost_of(members, costs) for members in classes))
            self._problems[options] = classes, shape
        classes, problem = self._problems[options]
        for choice in _worth_trying(problem, limit):
            chosen = self._assign(classes, choice, options, problem)
            if chosen is not None:
                yield step_time(problem, choice), peak(problem, choice), chosen

    def _costs(self, options: Sequence[Option]) -> dict[str, list[OptionCost]]:
        """Each part's cost with each option.  How parameters rest and what is recomputed are taken to add up; but what
        is recomputed hides no more gathers than there are."""
        base = self._shares(BASE)
        by_mode = {mode: self._shares(Option(mode, None)) for mode in dict.fromkeys(o.mode for o in options)}
        levels = dict.fromkeys((option.level, option.full_in) for option in options)
        by_level = {level: self._shares(Option(BASE.mode, *level)) for level in levels}
        costs: dict[str, list[OptionCost]] = {}
        for part in self.parts:
            start, costs[part] = base[part], []
            for option in options:
                again = by_level[option.level, option.full_in][part]
                # To compute again is to keep less: a part that does not has nothing to gain.
                shares = by_mode[option.mode][part], again if again.cost.saved < start.cost.saved else start
                (mode, level), gathers_s = (share.cost for share in shares), sum(share.gathers_s for share in shares)
                others_s = mode.time_s + level.time_s - gathers_s - (start.cost.time_s - start.gathers_s)
                costs[part].append(
                    OptionCost(
                        time_s=max(0.0, others_s) + max(0.0, gathers_s - start.gathers_s),
                        rest=mode.rest,
                        saved=max(0.0, mode.saved + level.saved - start.cost.saved),
                        grads=mode.grads,
                        transient=max(0.0, mode.transient + level.transient - start.cost.transient),
                        running=max(0.0, mode.running + level.running - start.cost.running),
                    )
                )
        return costs

    def _shares(self, option: Option) -> dict[str, _Share]:
        """Each part's share of the step, or one unit's of those that it stands for, when all take one option."""
        if option not in self._known_shares:
            self._known_shares[option] = self._shares_in(self.simulate(option))
        return self._known_shares[option]

    def _shares_in(self, simulation: Simulation) -> dict[str, _Share]:
        rest, saved, grads = (dict.fromkeys(self.parts, 0.0) for _ in range(3))
        for live in simulation.live_after_forward:
            part = self._part(live.module)
            if live.kind in ("params", "optimizer"):
                rest[part] += live.num_bytes
            elif live.kind == "activations":
                saved[part] += live.num_bytes
        for live in simulation.live_at_end:
            if live.kind == "grads":
                grads[self._part(live.module)] += live.num_bytes
        # The allocator's reserve grows with what is kept, by whoever keeps it.
        peak = simulation.memory
        reserve = (peak.reserve - fixed_reserve(peak)) / max(1, peak.activations + peak.temporaries)
        saved = {part: size * (1 + reserve) for part, size in saved.items()}
        held = sum(rest.values()) + max(sum(saved.values()), sum(grads.values()))
        at_ends = max((size for step, size in simulation.timeline if not step.startswith("backward:")), default=0)
        transient, running = max(0.0, at_ends - held), self._running(simulation, sum(rest.values()), saved, grads)
        (time_s, gathers_s), shares = self._times(simulation, rest), {}
        for part in self.parts:
            num = self.num_units.get(part, 1)
            held_by = (rest[part] / num, saved[part] / num, grads[part] / num)
            shares[part] = _Share(OptionCost(time_s[part], *held_by, transient, running[part]), gathers_s[part])
        return shares

    def _running(
        self, simulation: Simulation, rest: float, saved: Mapping[str, float], grads: Mapping[str, float]
    ) -> dict[str, float]:
        """What is there while each part runs its backward pass on top of what rests, what parts before it and it have
        saved, and the gradients of those after it; of several units, while one does that has most beside it."""
        most = dict.fromkeys(self.order, 0)
        for part, size in self._turns(simulation):
            most[part] = max(most[part], size)
        running, before, after = {}, 0.0, sum(grads.values())
        for part in self.order:
            num = self.num_units.get(part, 1)
            after -= grads[part]
            own = saved[part] / num + max(saved[part], grads[part]) * (num - 1) / num
            running[part] = max(0.0, most[part] - rest - before - own - after)
            before += saved[part]
        return running

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The parts in the order in which the forward pass comes to the end of them: the backward pass begins with the
        last; what runs in none comes first."""
        begun = tuple(dict.fromkeys(part for part, _ in self._turns(self.simulate(BASE))))[::-1]
        return (*(part for part in self.parts if part not in begun), *begun)

    def _turns(self, simulation: Simulation) -> Iterator[tuple[str, int]]:
        """The parts that run in the backward pass, and the most bytes meanwhile.  What a part does after others have
        begun, such as the lookups of a model whose last norm came first, is counted for the last of these."""
        begun: dict[str, None] = {}
        for module, size in simulation.in_backward:
            begun[self._part(module)] = None
            yield next(reversed(begun)), size

    def _times(self, simulation: Simulation, rest: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Each part's share of the seconds, or one unit's of those that it stands for: what it computes, the
        optimizer's step over its state (`rest`, in bytes), and of all that is waited for as much as it waits itself;
        and what of that is waiting for gathers."""
        computed, waited, gathers = (dict.fromkeys(self.parts, 0.0) for _ in range(3))
        for module, spent in simulation.by_module.items():
            part = self._part(module)
            computed[part] += spent.compute_s
            waited[part] += sum(spent.exposed_s.values())
            gathers[part] += sum(s for kind, s in spent.exposed_s.items() if kind.startswith("all_gather@"))
        num = {part: self.num_units.get(part, 1) for part in self.parts}
        ops_s = sum(num[part] * seconds for part, seconds in computed.items())
        waits_s = sum(num[part] * seconds for part, seconds in waited.items())
        a_byte_s = (simulation.compute_s - ops_s) / max(1.0, sum(rest.values()))
        # Of a folded graph there is more to wait for than its parts do, where a link lags behind all the time.
        lag = simulation.exposed_s / waits_s if waits_s else 1.0
        times = {part: computed[part] + waited[part] * lag + a_byte_s * rest[part] / num[part] for part in self.parts}
        return times, {part: seconds * lag for part, seconds in gathers.items()}

    def _classes(self, costs: Mapping[str, Sequence[OptionCost]]) -> list[list[_Member]]:
        """Parts that differ in a number of their path only and hold the same bytes, but for how their shares
        of a bucket are rounded, in the order they run in; all units of a run are one class, at the cost of its first
        inner one."""
        runs = {run.units[0][0]: (number, run) for number, run in enumerate(self.joint.runs)}
        others = {run.units[held][0] for run in self.joint.runs for held in run.held[1:]}
        classes: dict[object, list[_Member]] = {}
        for part in self.order:
            if part in runs:
                number, run = runs[part]
                inner = run.units[run.held[1]][0]
                classes[number] = [_Member(inner, number, i) for i in range(len(run.units))]
            elif part not in others:
                pattern = re.sub(r"\d+", "*", part)
                sizes = tuple(f"{size:.2e}" for cost in costs[part] for size in (cost.rest, cost.saved, cost.grads))
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
        if "" in parts and any(option.level is None for option in parts.values()):
            parts[""] = replace(parts[""], level=None)  # what a plan says of the root goes for whom it says nothing of
        return parts, tuple(splits)


@dataclass(frozen=True)
class _Share:
    """What one part costs when all take one option.

    Attributes:
        cost: all of it.
        gathers_s: what of its time is waiting for gathers.
    """

    cost: OptionCost
    gathers_s: float


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


def _cost_of(members: Sequence[_Member], costs: Mapping[str, Sequence[OptionCost]]) -> tuple[OptionCost, ...]:
    """Each option's cost for one of a class: the first one's, but on top of what is held any of them may need most."""
    each = zip(*(costs[member.part] for member in members), strict=True)
    return tuple(replace(options[0], running=max(cost.running for cost in options)) for options in each)


def _worth_trying(problem: Problem, limit: float) -> Iterator[Choice]:
    """Choices of at most `limit` bytes from the fastest to the smallest: in a small problem all that may be best under
    some budget, as far as estimates can tell; else the solutions for a row of limits, which is the same for each
    `limit`."""
    choices = enumerated(problem)
    if choices is not None and choices.is_complete:
        found = [i for i in choices.worth_trying(SLACK) if choices.peak[i] <= limit]
        yield from (choices.choice(i) for i in sorted(found, key=lambda i: float(choices.time_s[i])))
        return
    least, fastest = smallest(problem), solve(problem, math.inf)
    low, high = peak(problem, least), peak(problem, fastest or least)
    step = (high / low) ** (1 / NUM_LIMITS)
    before = None
    for i in range(NUM_LIMITS, -1, -1):
        within = low * step**i
        if within > limit * step:  # what fits the row's next limit, and this one not, takes more than `limit`
            continue
        choice = solve(problem, within) if i else least
        if choice is not None and choice != before:
            before = choice
            if peak(problem, choice) <= limit:
                yield choice
