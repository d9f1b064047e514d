"""From a plan of a folded graph to the plan of the whole model: every copy of a unit does as the held one does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.graph import Run
from autopar.plan import FactorRef, Plan
from autopar.regions import region_of

Split = tuple[int, int]
"""How many units of the whole model the two inner units of a run stand for; together all but the first and the last."""


def even_splits(runs: Sequence[Run]) -> tuple[Split, ...]:
    """For each run a split into halves, for plans in which the inner units are alike."""
    inner = [len(run.units) - 2 for run in runs]
    return tuple((num // 2, num - num // 2) for num in inner)


def copies_of(runs: Sequence[Run], splits: Sequence[Split]) -> Callable[[str], list[str]]:
    """Gives for a path in a folded graph its paths in all units that do as its own does; outside of inner units there
    is but itself."""
    return functools.partial(_paths, copies=_copies(runs, splits))


def whole_plan(plan: Plan, runs: Sequence[Run], splits: Sequence[Split]) -> Plan:
    """The whole model's plan.

    Args:
        plan: names parameters and regions of the folded graph only.
        runs: the folded graph's.
        splits: for each run how many units do as its first and as its second inner one, the former ones first.
    """
    if not runs:
        return plan
    copies = copies_of(runs, splits)
    return replace(
        plan,
        factors=whole_factors(plan.factors, runs),
        storage={path: storage for held, storage in plan.storage.items() for path in copies(held)},
        recompute={path: level for held, level in plan.recompute.items() for path in copies(held)},
    )


Factors = tuple[tuple[FactorRef, ...], ...]


def whole_factors(factors: Factors, runs: Sequence[Run]) -> Factors:
    """The factors that a plan of the whole model cuts along each axis: those of a folded one's, in all copies."""
    alike = copies_of(runs, [(len(run.units) - 3, 1) for run in runs])
    return tuple(tuple(replace(ref, anchor=path) for ref in refs for path in alike(ref.anchor)) for refs in factors)


def folded_factors(factors: Factors, runs: Sequence[Run]) -> Factors | None:
    """What `whole_factors` makes these of; None if they are not the same in all copies."""
    absent = {"", *(block for run in runs for i, unit in enumerate(run.units) if i not in run.held for block in unit)}
    held = tuple(tuple(ref for ref in refs if region_of(ref.anchor, absent) == "") for refs in factors)
    return held if whole_factors(held, runs) == factors else None


def _copies(runs: Sequence[Run], splits: Sequence[Split]) -> dict[str, list[str]]:
    """For each held inner block the blocks that do as it does, itself among them."""
    found = {}
    for run, (first, _) in zip(runs, splits, strict=True):
        last = len(run.units) - 1
        for held, members in ((run.held[1], range(1, first + 1)), (run.held[2], range(first + 1, last))):
            for position, block in enumerate(run.units[held]):
                found[block] = [run.units[i][position] for i in members]
    return found


def _paths(path: str, copies: Mapping[str, Sequence[str]]) -> list[str]:
    """A path inside a held unit in each of its copies; any other path as it is."""
    block = path
    while block and block not in copies:
        block = block.rpartition(".")[0]
    return [f"{copy}{path[len(block) :]}" for copy in copies[block]] if block else [path]


__all__ = ["Split", "copies_of", "even_splits", "folded_factors", "whole_factors", "whole_plan"]
