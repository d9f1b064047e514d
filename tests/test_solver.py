"""The exact solve against brute force over all choices, on random problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest

from autopar import solver
from autopar.solver import Choice, OptionCost, Problem, enumerated, peak, smallest, solve, step_time

NUM_PROBLEMS = 240

TIE = 1e-7
"""Weight of memory beside time, relative to the longest step: as far may a time be from the least."""


@pytest.fixture(autouse=True, params=["all choices at once", "HiGHS"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems are enumerated; HiGHS solves the others, and here the small ones as well."""
    if request.param == "HiGHS":
        monkeypatch.setattr(solver, "MAX_ENUMERATED", 0)
    enumerated.cache_clear()
    yield
    enumerated.cache_clear()


def random_problem(seed: int) -> Problem:
    """One to three classes of one to four members with two to five options each.

    Sizes and times are drawn wide or from a few values, so that there are ties, options that others beat, and options
    that are equal.
    """
    draw = random.Random(seed)
    scale = 10.0 ** draw.randint(3, 11)
    few = draw.random() < 0.4

    def size() -> float:
        return scale * draw.randint(0, 3) if few else float(round(scale * draw.random() ** 2))

    def option() -> OptionCost:
        time_s = draw.choice((1e-3, 2e-3, 5e-3)) if few else draw.uniform(1e-6, 1e-1)
        return OptionCost(time_s, size(), size(), size(), size(), size())

    counts = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    return Problem(counts, tuple(tuple(option() for _ in range(draw.randint(2, 5))) for _ in counts))


def every_choice(problem: Problem) -> list[Choice]:
    """All of them, those with options that others beat as well."""
    classes = []
    for count, costs in zip(problem.counts, problem.costs, strict=True):
        taken = combinations_with_replacement(range(len(costs)), count)
        classes.append([tuple(t.count(i) for i in range(len(costs))) for t in taken])
    return list(itertools.product(*classes))


def longest(problem: Problem) -> float:
    return sum(n * sum(c.time_s for c in costs) for n, costs in zip(problem.counts, problem.costs, strict=True))


def limits(peaks: list[float]) -> list[float]:
    """Between the smallest peak and the largest: at a peak, and halfway between two."""
    levels = sorted(set(peaks))
    picked = levels[:: max(1, len(levels) // 2)]
    between = [(a + b) / 2 for a, b in itertools.pairwise(levels) if b - a > 1e-5 * levels[-1]]
    return picked + between[:: max(1, len(between) // 2)]


def test_a_limit_gets_the_least_time_that_fits_it() -> None:
    num_solved = 0
    for seed in range(NUM_PROBLEMS):
        problem = random_problem(seed)
        choices = every_choice(problem)
        cost = {c: (step_time(problem, c), peak(problem, c)) for c in choices}
        for limit in limits([p for _, p in cost.values()]):
            best_s = min(time_s for time_s, top in cost.values() if top <= limit)
            found = solve(problem, limit)
            assert found in cost, (seed, limit)
            time_s, top = cost[found]
            assert top <= limit * (1 + 1e-9), (seed, limit)
            assert time_s <= best_s + TIE * longest(problem), (seed, limit)
            num_solved += 1
    assert num_solved > 3 * NUM_PROBLEMS


def test_without_a_limit_it_is_the_fastest_and_of_equally_fast_ones_the_smallest() -> None:
    for seed in range(NUM_PROBLEMS):
        problem = random_problem(seed)
        cost = {c: (step_time(problem, c), peak(problem, c)) for c in every_choice(problem)}
        least_s = min(time_s for time_s, _ in cost.values())
        least = min(top for time_s, top in cost.values() if time_s <= least_s * (1 + 1e-12))
        found = solve(problem, math.inf)
        assert found is not None
        assert cost[found][0] <= least_s + TIE * longest(problem), seed
        assert cost[found][1] <= least * (1 + 1e-6), seed


def test_the_smallest_has_the_smallest_peak_and_below_it_there_is_none() -> None:
    for seed in range(0, NUM_PROBLEMS, 2):
        problem = random_problem(seed)
        least = min(peak(problem, c) for c in every_choice(problem))
        assert peak(problem, smallest(problem)) <= least * (1 + 1e-6), seed
        if least > 0:
            assert solve(problem, least * 0.999) is None, seed


def test_of_equally_fast_choices_it_takes_the_smaller() -> None:
    lean, heavy = OptionCost(1e-3, 1e9, 0, 0, 0), OptionCost(1e-3, 1e9, 2e9, 2e9, 0)
    slow = OptionCost(2e-3, 1e8, 0, 0, 0)
    other = OptionCost(1e-3, 2e9, 0, 0, -0.0)  # beaten by none in transients, by `lean` in the rest
    problem = Problem((3,), ((heavy, other, slow, lean),))
    assert solve(problem, math.inf) == ((0, 0, 0, 3),)


def test_members_of_one_class_differ_when_that_is_best() -> None:
    """Four blocks that keep or recompute: as many keep as fit."""
    keep, again = OptionCost(3.0, 10, 40, 0, 5), OptionCost(4.0, 10, 5, 0, 5)
    problem = Problem((4,), ((keep, again),))
    for num_kept in range(5):
        limit = 4 * 10 + 40 * num_kept + 5 * (4 - num_kept) + 5
        assert solve(problem, limit) == ((num_kept, 4 - num_kept),)


def listed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices that are worked out all at once; each with the time and the peak that it has."""
    monkeypatch.setattr(solver, "MAX_ENUMERATED", 10**6)
    choices = enumerated(problem)
    assert choices is not None
    found = [choices.choice(i) for i in range(len(choices.peak))]
    assert choices.time_s == pytest.approx([step_time(problem, c) for c in found], rel=1e-12)
    assert choices.peak == pytest.approx([peak(problem, c) for c in found], rel=1e-12)
    return found


def test_all_choices_lack_only_what_others_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(0, NUM_PROBLEMS, 4):
        problem = random_problem(seed)
        found = listed(problem, monkeypatch)
        assert len(set(found)) == len(found)
        good = [(step_time(problem, c), peak(problem, c)) for c in found]
        for choice in set(every_choice(problem)) - set(found):
            time_s, top = step_time(problem, choice), peak(problem, choice)
            assert any(t <= time_s * (1 + 1e-12) and p <= top * (1 + 1e-12) for t, p in good), (seed, choice)
        for most, is_listed in ((len(found), True), (len(found) - 1, False)):
            enumerated.cache_clear()
            monkeypatch.setattr(solver, "MAX_ENUMERATED", most)
            assert (enumerated(problem) is not None) is is_listed


def test_the_filter_keeps_the_first_of_equal_options_and_all_that_are_best_somewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = OptionCost(1.0, 1.0, 1.0, 1.0, 1.0)
    twin = OptionCost(1.0, 1.0, 1.0, 1.0, 1.0)
    less_saved, less_grads = OptionCost(1.0, 1.0, 0.0, 2.0, 1.0), OptionCost(1.0, 1.0, 2.0, 0.0, 1.0)
    less_transient, worse = OptionCost(1.0, 1.0, 1.0, 1.0, 0.0), OptionCost(1.5, 1.0, 1.0, 1.0, 1.0)
    problem = Problem((1,), ((same, twin, less_saved, less_grads, worse, less_transient),))
    # `same` and `twin` lose to `less_transient`.
    assert listed(problem, monkeypatch) == [((0, 0, 1, 0, 0, 0),), ((0, 0, 0, 1, 0, 0),), ((0, 0, 0, 0, 0, 1),)]
    assert listed(Problem((1,), ((same, twin),)), monkeypatch) == [((1, 0),)]
