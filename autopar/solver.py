"""The exact solve: one option for each member of each class, the least time within a memory limit."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autopar.enumeration import Choices, enumerate_choices
from autopar.problem import Choice, Problem, is_beaten

_KEPT_PROBLEMS, _KEPT_ANSWERS = 32, 256
"""Of how many problems the choices are kept, some megabytes each at most, and of how many limits HiGHS's answers: a
search asks again when its budget changes."""


def solve(problem: Problem, limit: float) -> Choice | None:
    """The fastest choice whose peak is at most `limit` bytes; None if there is none.

    Of equally fast ones it takes one that needs little memory.
    """
    choices = enumerated(problem)
    return _solve(problem, limit, by_time=True) if choices is None else choices.fastest(limit)


@lru_cache(_KEPT_PROBLEMS)
def enumerated(problem: Problem) -> Choices | None:
    """The choices that may be best within some limit; None if there are too many to look at."""
    return enumerate_choices(problem)


def smallest(problem: Problem) -> Choice:
    """The choice with the smallest peak."""
    choices = enumerated(problem)
    if choices is not None:
        return choices.smallest()
    choice = _solve(problem, None, by_time=False)
    assert choice is not None, "without a limit every choice is possible"
    return choice


@lru_cache(_KEPT_ANSWERS)
def _solve(problem: Problem, limit: float | None, by_time: bool) -> Choice | None:
    """A mixed-integer program for HiGHS.  Variables: a count and a flag "used" for each option, and the peak.

    Bytes are scaled by the largest peak that there can be and times by the longest step, since HiGHS works with
    absolute tolerances.
    """
    flat = [(c, cost) for c, costs in enumerate(problem.costs) for cost in costs if not is_beaten(cost, costs)]
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
    return tuple(tuple(0 if is_beaten(cost, costs) else next(taken) for cost in costs) for costs in problem.costs)


_SCALE = 1e4
"""HiGHS stops at an absolute gap of 1e-6, which must be small even beside the weight of memory."""

_TIE = 1e-7
"""Weight of memory beside time, both relative: it decides between choices that are equally fast."""
