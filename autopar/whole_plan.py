"""From a plan of a folded graph to the plan of the whole model: every copy of a unit does as the held one does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.graph import Run
from autopar.plan import FactorRef, Plan
from autopar.regions import region_of

Unit = tuple[str, ...]
"""The module paths of a unit's blocks."""

Split = tuple[int, int]
"""How many units of the whole model the two inner units of a run stand for; together all but the first and the last."""


def even_splits(runs: Sequence[Run]) -> tuple[Split, ...]:
    """For each run a split into halves, for plans in which the inner units are alike."""
    inner = [len(run.units) - 2 for run in runs]
    return tuple((num // 2, num - num // 2) for num in inner)


StandIns = Mapping[Unit, Sequence[Unit]]
"""For each unit that a graph holds of its runs, the units of the whole model for which it stands."""


def stand_ins(runs: Sequence[Run], splits: Sequence[Split]) -> StandIns:
    """What the units of a folded graph stand for.

    Args:
        runs: the folded graph's.
        splits: for each run how many units do as its first and as its second inner one, the former ones first.
    """
    found = {}
    for run, (first, second) in zip(runs, splits, strict=True):
        num = len(run.units)
        assert first > 0 < second, f"a split of {num - 2} inner units into {first} and {second}"
        assert first + second == num - 2, f"a split of {num - 2} inner units into {first} and {second}"
        groups = range(1), range(1, first + 1), range(first + 1, num - 1), range(num - 1, num)
        for held, group in zip(run.held, groups, strict=True):
            found[run.units[held]] = tuple(run.units[i] for i in group)
    return found


def copies_of(standing: StandIns) -> Callable[[str], list[str]]:
    """Gives for a path in a graph its paths in all units that do as its own does; outside of the units that stand for
    others there is but itself."""
    copies = {
        block: [unit[position] for unit in units]
        for held, units in standing.items()
        for position, block in enumerate(held)
    }
    return functools.partial(_paths, copies=copies)


def whole_plan(plan: Plan, runs: Sequence[Run], splits: Sequence[Split]) -> Plan:
    """The plan of the graph that has all units.

    Args:
        plan: names parameters and regions of the folded graph only.
        runs: the folded graph's.
        splits: for each run how many units do as its first and as its second inner one, the former ones first.
    """
    if not runs:
        return plan
    copies = copies_of(stand_ins(runs, splits))
    return replace(
        plan,
        factors=whole_factors(plan.factors, runs),
        storage={path: storage for held, storage in plan.storage.items() for path in copies(held)},
        recompute={path: level for held, level in plan.recompute.items() for path in copies(held)},
    )


Factors = tuple[tuple[FactorRef, ...], ...]


def whole_factors(factors: Factors, runs: Sequence[Run]) -> Factors:
    """The factors that a plan of the whole model cuts along each axis: those of a folded one's, in all copies."""
    alike = copies_of(stand_ins(runs, [(len(run.units) - 3, 1) for run in runs]))
    return tuple(tuple(replace(ref, anchor=path) for ref in refs for path in alike(ref.anchor)) for refs in factors)


def folded_factors(factors: Factors, runs: Sequence[Run]) -> Factors | None:
    """What `whole_factors` makes these of; None if they are not the same in all copies."""
    absent = {"", *(block for run in runs for i, unit in enumerate(run.units) if i not in run.held for block in unit)}
    held = tuple(tuple(ref for ref in refs if region_of(ref.anchor, absent) == "") for refs in factors)
    return held if whole_factors(held, runs) == factors else None


CLOSE, QUICK = (2, 2), (1, 2)
"""Shapes of a `Sample`: that for the last word on a plan, and one for the search, of a plan whose units take two
options."""


@dataclass(frozen=True)
class Sample:
    """Some units of each run, of which the last word on a plan is had: those at the ends and where the option changes,
    and two for all between.

    What passes and the simulator do at one unit depends on the units near it.  In a folded graph the inner units stand
    next to the ends; here units that stand for others have some on either side that do as they do.  They are two, since
    within a bound on bytes under way every other unit may wait for what the next one then finds done.

    Attributes:
        runs: the units that are there, each run as if these were all that it has; two of them are `held`.
        splits: how many of them do as the first and as the second inner one.
        standing: what each of them stands for.
    """

    runs: tuple[Run, ...]
    splits: tuple[Split, ...]
    standing: StandIns

    @staticmethod
    def of(plan: Plan, runs: Sequence[Run], splits: Sequence[Split], shape: tuple[int, int] = CLOSE) -> Sample:
        """The sample for a plan of a folded graph.

        Args:
            plan, runs, splits: as in `whole_plan`.
            shape: of units that do alike, how many stand on either side of those that stand for others, and how many
                these are.
        """
        found: list[Run] = []
        parts: list[Split] = []
        standing: dict[Unit, Sequence[Unit]] = {}
        for run, (first, _) in zip(runs, splits, strict=True):
            last = len(run.units) - 1
            changes = () if inner_alike(plan, run) else (first + 1,)
            inner = [_sampled(range(*ends), *shape) for ends in itertools.pairwise((1, *changes, last))]
            groups = [range(1), *itertools.chain.from_iterable(inner), range(last, last + 1)]
            # Whatever the split, they have the same names, so that plans share the graph that has them.
            units = (*run.units[: len(groups) - 2], *run.units[-2:])
            standing.update(
                (unit, tuple(run.units[i] for i in group)) for unit, group in zip(units, groups, strict=True)
            )
            found.append(Run(units, (0, 1, len(units) - 2, len(units) - 1)))
            parts.append((len(inner[0]), len(inner[1])) if changes else (len(inner[0]) - 1, 1))
        return Sample(tuple(found), tuple(parts), standing)


def _sampled(units: range, near: int, middle: int) -> list[range]:
    """Units that do alike, each alone or, of many, those between `near` at either end in `middle` parts."""
    if len(units) <= 2 * near + middle:
        return [range(i, i + 1) for i in units]
    ends = [round(near + (len(units) - 2 * near) * i / middle) for i in range(middle + 1)]
    edges = [*range(near), *ends, *range(len(units) - near + 1, len(units) + 1)]
    return [units[i:j] for i, j in itertools.pairwise(edges)]


def inner_alike(plan: Plan, run: Run) -> bool:
    """Whether a plan gives the two inner units of a run the same options."""
    near, far = (_options(plan, run.units[held]) for held in run.held[1:3])
    return near == far


def _options(plan: Plan, unit: Unit) -> dict[tuple[int, str], object]:
    """What a plan says of the blocks of a unit, by the paths from there."""
    found: dict[tuple[int, str], object] = {}
    for path, option in (*plan.storage.items(), *plan.recompute.items()):
        block = region_of(path, {*unit, ""})
        if block:
            found[unit.index(block), path[len(block) :]] = option
    return found


def _paths(path: str, copies: Mapping[str, Sequence[str]]) -> list[str]:
    """A path inside a held unit in each of its copies; any other path as it is."""
    block = path
    while block and block not in copies:
        block = block.rpartition(".")[0]
    return [f"{copy}{path[len(block) :]}" for copy in copies[block]] if block else [path]


__all__ = [
    "CLOSE", "QUICK", "Sample", "Split", "StandIns", "copies_of", "even_splits", "folded_factors", "inner_alike",
    "stand_ins", "whole_plan",
]  # fmt: skip
