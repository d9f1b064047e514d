"""The exact solve: one option for each member of each class, the least time within a memory limit.

Members of a class are alike, so what is decided is how many of them take each option.  Memory peaks when the forward
pass ends (what rests and what is kept for the backward pass), when the backward pass ends (what rests and the
gradients), or in between, as a member runs its backward pass: members before it still keep theirs, and those after it
have gradients instead.  What comes and goes is there on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autopar.enumeration import Choices, enumerate_choices, num_choices


@dataclass(frozen=True)
class OptionCost:
    """What one member costs with one option; seconds and bytes of one rank.

    Attributes:
        time_s: its share of the step.
        rest: parameters and optimizer state.
        saved: kept from the forward to the backward pass.
        grads: gradients.
        transient: what the step needs on top when either pass ends.
        running: what it needs on top while such a member runs its backward pass.
    """

    time_s: float
    rest: float
    saved: float
    grads: float
    transient: float
    running: float = 0.0

    @property
    def measures(self) -> tuple[float, ...]:
        """What an option is the better for the less it has of it."""
        return (self.time_s, self.rest, self.saved, self.grads, self.transient, self.running)

    def beside(self, other: OptionCost) -> float:
        """Bytes of one that takes this option while an alike member runs its backward pass with another: those that
        keep less run first, so that they keep it longest, and have been or have yet to be run then."""
        return max(self.grads, min(self.saved, other.saved))

    @property
    def alone(self) -> float:
        """Bytes on top of `beside` of every member of the class, itself among them, while one with this option runs."""
        return self.running + self.saved - self.beside(self)


@dataclass(frozen=True)
class Problem:
    """Classes of alike members, each with its options' costs.

    Attributes:
        counts: number of members of each class, the classes in the order in which they run forward.
        costs: for each class the cost of each option, for one member.
    """

    counts: tuple[int, ...]
    costs: tuple[tuple[OptionCost, ...], ...]


Choice = tuple[tuple[int, ...], ...]
"""For each class, how many members take each option."""


def peak(problem: Problem, choice: Choice) -> float:
    """Bytes at the peak of a choice."""
    rest = saved = grads = running = transient = 0.0
    for ns, costs in zip(choice, problem.costs, strict=True):
        taken = [(n, cost) for n, cost in zip(ns, costs, strict=True) if n]
        here = max((one.alone + sum(n * cost.beside(one) for n, cost in taken) for _, one in taken), default=0.0)
        more = sum(n * cost.grads for n, cost in taken)
        running = max(running + more, saved + here)
        rest += sum(n * cost.rest for n, cost in taken)
        saved += sum(n * cost.saved for n, cost in taken)
        grads += more
    pairs = zip(choice, problem.costs, strict=True)
    transient = max(
        (cost.transient for ns, costs in pairs for n, cost in zip(ns, costs, strict=True) if n), default=0.0
    )
    return rest + max(running, max(saved, grads) + transient)


def step_time(problem: Problem, choice: Choice) -> float:
    """Seconds of a choice."""
    pairs = zip(choice, problem.costs, strict=True)
    return sum(n * cost.time_s for ns, costs in pairs for n, cost in zip(ns, costs, strict=True))


def solve(problem: Problem, limit: float) -> Choice | None:
    """The fastest choice whose peak is at most `limit` bytes; None if there is none.

    Of equally fast ones it takes one that needs little memory.
    """
    choices = enumerated(problem)
    if choices is not None:
        index = choices.fastest(limit)
        return None if index is None else choices.choice(index)
    return _solve(problem, limit, by_time=True)


MAX_ENUMERATED = 500_000
"""Up to so many choices are all worked out; beyond, HiGHS solves."""


@lru_cache(maxsize=4)
def enumerated(problem: Problem) -> Choices | None:
    """Every choice of options that others do not beat, if there are not too many."""
    open_to = [[i for i, cost in enumerate(costs) if not _beaten(cost, costs)] for costs in problem.costs]
    if num_choices(problem.counts, [len(options) for options in open_to]) > MAX_ENUMERATED:
        return None
    return enumerate_choices(problem.counts, open_to, problem.costs)


def smallest(problem: Problem) -> Choice:
    """The choice with the smallest peak."""
    choices = enumerated(problem)
    if choices is not None:
        return choices.choice(int(choices.peak.argmin()))
    choice = _solve(problem, None, by_time=False)
    assert choice is not None, "without a limit every choice is possible"
    return choice


def _solve(problem: Problem, limit: float | None, by_time: bool) -> Choice | None:
    """A mixed-integer program for HiGHS.  Variables: a count and a flag "used" for each option, and the peak.

    Bytes are scaled by the largest peak that there can be and times by the longest step, since HiGHS works with
    absolute tolerances.
    """
    flat = [(c, cost) for c, costs in enumerate(problem.costs) for cost in costs if not _beaten(cost, costs)]
    counts = [problem.counts[c] for c, _ in flat]
    num = len(flat)
    size = max(
        1.0,
        sum(
            n * (cost.rest + max(cost.saved, cost.grads)) + max(cost.transient, cost.running)
            for n, (_, cost) in zip(counts, flat, strict=True)
        ),
    )
    rows, lower, upper = [], [], []

    def constrain(coefficients: dict[int, float], low: float, high: float) -> None:
        rows.append(coefficients)
        lower.append(low)
        upper.append(high)

    for c in range(len(problem.counts)):
        constrain({i: 1.0 for i, (owner, _) in enumerate(flat) if owner == c}, problem.counts[c], problem.counts[c])
    transient, top = 2 * num, 2 * num + 1
    for i, (_, cost) in enumerate(flat):
        constrain({i: 1.0, num + i: -float(counts[i])}, -np.inf, 0.0)
        constrain({transient: 1.0, num + i: -cost.transient / size}, 0.0, np.inf)
    for kind in ("saved", "grads"):
        held = {i: (cost.rest + getattr(cost, kind)) / size for i, (_, cost) in enumerate(flat)}
        constrain({top: 1.0, transient: -1.0, **{i: -v for i, v in held.items()}}, 0.0, np.inf)
    for i, (c, one) in enumerate(flat):
        there = {
            j: cost.rest + (cost.saved if owner < c else cost.beside(one) if owner == c else cost.grads)
            for j, (owner, cost) in enumerate(flat)
        }
        # Where none takes it, this says no more than that the peak is not below zero.
        constrain(
            {top: 1.0, num + i: -one.alone / size - 1.0, **{j: -v / size for j, v in there.items()}}, -1.0, np.inf
        )
    objective = np.zeros(2 * num + 2)
    if by_time:
        longest = sum(n * cost.time_s for n, (_, cost) in zip(counts, flat, strict=True)) or 1.0
        objective[:num] = [cost.time_s / longest for _, cost in flat]
    objective[top] = _TIE if by_time else 1.0
    # No peak is larger than `size`; a bound that is infinite makes HiGHS call wrong solutions optimal.
    high = np.concatenate([counts, np.ones(num), [1.0, 1.0 if limit is None else min(1.0, limit / size)]])
    matrix = csr_array(
        (
            [v for row in rows for v in row.values()],
            ([r for r, row in enumerate(rows) for _ in row], [i for row in rows for i in row]),
        ),
        shape=(len(rows), 2 * num + 2),
    )
    result = milp(
        _SCALE * objective,
        constraints=LinearConstraint(matrix, lower, upper),
        bounds=Bounds(np.zeros(2 * num + 2), high),
        integrality=np.concatenate([np.ones(2 * num), np.zeros(2)]),
        options={"mip_rel_gap": 0.0, "presolve": False},
    )
    if result.x is None:
        return None
    taken = iter(round(x) for x in result.x[:num])
    return tuple(tuple(0 if _beaten(cost, costs) else next(taken) for cost in costs) for costs in problem.costs)


def _beaten(cost: OptionCost, others: Sequence[OptionCost]) -> bool:
    """Whether another option is at least as good in every respect; of equal ones the first stays."""
    before = True
    for other in others:
        if other is cost:
            before = False
        elif (before or other.measures != cost.measures) and all(
            theirs <= ours for ours, theirs in zip(cost.measures, other.measures, strict=True)
        ):
            return True
    return False


_SCALE = 1e4
"""HiGHS stops at an absolute gap of 1e-6, which must be small even beside the weight of memory."""

_TIE = 1e-7
"""Weight of memory beside time, both relative: it decides between choices that are equally fast."""
