"""The exact solve against brute force over all choices, on random problems."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest

from autopar import enumeration
from autopar.enumeration import enumerate_choices
from autopar.problem import Choice, OptionCost, Problem, peak, step_time
from autopar.solver import enumerated, smallest, solve

NUM_PROBLEMS = 240

TIE = 1e-7
"""Weight of memory beside time, relative to the longest step: as far may a time be from the least."""


@pytest.fixture(params=["all choices", "those that none beats", "HiGHS"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of small problems all choices are listed, of larger ones those that are best somewhere, and HiGHS solves the
    others; here small ones are solved in each way."""
    if request.param != "all choices":
        monkeypatch.setattr(enumeration, "FEW", 0)
        monkeypatch.setattr(enumeration, "_PART", 50)  # so that there are several parts
    if request.param == "HiGHS":
        monkeypatch.setattr(enumeration, "MAX_ROWS", 0)
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


@functools.cache
def problem_with_costs(seed: int) -> tuple[Problem, dict[Choice, tuple[float, float]]]:
    """A random problem, and every choice's seconds and peak."""
    problem = random_problem(seed)
    return problem, {c: (step_time(problem, c), peak(problem, c)) for c in every_choice(problem)}


def longest(problem: Problem) -> float:
    return sum(n * sum(c.time_s for c in costs) for n, costs in zip(problem.counts, problem.costs, strict=True))


def limits(peaks: list[float]) -> list[float]:
    """Between the smallest peak and the largest: at a peak, and halfway between two."""
    levels = sorted(set(peaks))
    picked = levels[:: max(1, len(levels) // 2)]
    between = [(a + b) / 2 for a, b in itertools.pairwise(levels) if b - a > 1e-5 * levels[-1]]
    return picked + between[:: max(1, len(between) // 2)]


@pytest.mark.usefixtures("_engine")
def test_a_limit_gets_the_least_time_that_fits_it() -> None:
    num_solved = 0
    for seed in range(NUM_PROBLEMS):
        problem, cost = problem_with_costs(seed)
        for limit in limits([p for _, p in cost.values()]):
            best_s = min(time_s for time_s, top in cost.values() if top <= limit)
            found = solve(problem, limit)
            assert found in cost, (seed, limit)
            time_s, top = cost[found]
            assert top <= limit * (1 + 1e-9), (seed, limit)
            assert time_s <= best_s + TIE * longest(problem), (seed, limit)
            num_solved += 1
    assert num_solved > 3 * NUM_PROBLEMS


@pytest.mark.usefixtures("_engine")
def test_without_a_limit_it_is_the_fastest_and_of_equally_fast_ones_the_smallest() -> None:
    for seed in range(NUM_PROBLEMS):
        problem, cost = problem_with_costs(seed)
        least_s = min(time_s for time_s, _ in cost.values())
        least = min(top for time_s, top in cost.values() if time_s <= least_s * (1 + 1e-12))
        found = solve(problem, math.inf)
        assert found is not None
        assert cost[found][0] <= least_s + TIE * longest(problem), seed
        assert cost[found][1] <= least * (1 + 1e-6), seed


@pytest.mark.usefixtures("_engine")
def test_the_smallest_has_the_smallest_peak_and_below_it_there_is_none() -> None:
    for seed in range(0, NUM_PROBLEMS, 2):
        problem, cost = problem_with_costs(seed)
        least = min(top for _, top in cost.values())
        assert peak(problem, smallest(problem)) <= least * (1 + 1e-6), seed
        if least > 0:
            assert solve(problem, least * 0.999) is None, seed


@pytest.mark.usefixtures("_engine")
def test_of_equally_fast_choices_it_takes_the_smaller() -> None:
    lean, heavy = OptionCost(1e-3, 1e9, 0, 0, 0), OptionCost(1e-3, 1e9, 2e9, 2e9, 0)
    slow = OptionCost(2e-3, 1e8, 0, 0, 0)
    other = OptionCost(1e-3, 2e9, 0, 0, -0.0)  # beaten by none in transients, by `lean` in the rest
    problem = Problem((3,), ((heavy, other, slow, lean),))
    assert solve(problem, math.inf) == ((0, 0, 0, 3),)


@pytest.mark.usefixtures("_engine")
def test_members_of_one_class_differ_when_that_is_best() -> None:
    """Four blocks that keep or recompute: as many keep as fit."""
    keep, again = OptionCost(3.0, 10, 40, 0, 5), OptionCost(4.0, 10, 5, 0, 5)
    problem = Problem((4,), ((keep, again),))
    for num_kept in range(5):
        limit = 4 * 10 + 40 * num_kept + 5 * (4 - num_kept) + 5
        assert solve(problem, limit) == ((num_kept, 4 - num_kept),)


def listed(problem: Problem) -> list[Choice]:
    """The choices that are worked out at once; each with the time and the peak that it has."""
    choices = enumerate_choices(problem)
    assert choices is not None
    found = [choices.choice(i) for i in range(len(choices.peak))]
    assert len(set(found)) == len(found)
    assert choices.time_s == pytest.approx([step_time(problem, c) for c in found], rel=1e-12)
    assert choices.peak == pytest.approx([peak(problem, c) for c in found], rel=1e-12)
    return found


@pytest.mark.parametrize("few", [10**6, 0])
@pytest.mark.parametrize("many", [5, 2])
def test_what_is_not_listed_is_beaten(few: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of classes of many members, among choices of two options."""
    monkeypatch.setattr(enumeration, "FEW", few)
    monkeypatch.setattr(enumeration, "MAX_ROWS", 10**6)
    monkeypatch.setattr(enumeration, "MANY", many)
    for seed in range(0, NUM_PROBLEMS, 4):
        problem, cost = problem_with_costs(seed)
        found = listed(problem)
        every = {choice for choice in cost if all(sum(ns) < many or sum(map(bool, ns)) < 3 for ns in choice)}
        assert set(found) <= every
        good = [cost[c] for c in found]
        for choice in every - set(found):
            time_s, top = cost[choice]
            assert any(t <= time_s * (1 + 1e-12) and p <= top * (1 + 1e-12) for t, p in good), (seed, choice)
        if not few:
            good.sort(key=lambda cost: cost[1])
            assert all(a[0] > b[0] for a, b in itertools.pairwise(good)), seed


def test_too_many_choices_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    rising = tuple(OptionCost(1.0 + i, 1.0, 4.0 - i, 1.0, 1.0 + i) for i in range(3))
    problem = Problem((2, 2), (rising, rising))  # six ways each
    monkeypatch.setattr(enumeration, "FEW", 0)
    for most, is_listed in ((36, True), (6, False), (5, False)):  # 5 are fewer than one class has
        monkeypatch.setattr(enumeration, "MAX_ROWS", most)
        assert (enumerate_choices(problem) is not None) is is_listed


def test_the_filter_keeps_the_first_of_equal_options_and_all_that_are_best_somewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enumeration, "FEW", 400)
    monkeypatch.setattr(enumeration, "MAX_ROWS", 400)
    same = OptionCost(1.0, 1.0, 1.0, 1.0, 1.0)
    twin = OptionCost(1.0, 1.0, 1.0, 1.0, 1.0)
    less_saved, less_grads = OptionCost(1.0, 1.0, 0.0, 2.0, 1.0), OptionCost(1.0, 1.0, 2.0, 0.0, 1.0)
    less_transient, worse = OptionCost(1.0, 1.0, 1.0, 1.0, 0.0), OptionCost(1.5, 1.0, 1.0, 1.0, 1.0)
    problem = Problem((1,), ((same, twin, less_saved, less_grads, worse, less_transient),))
    # `same` and `twin` lose to `less_transient`.
    assert listed(problem) == [((0, 0, 1, 0, 0, 0),), ((0, 0, 0, 1, 0, 0),), ((0, 0, 0, 0, 0, 1),)]
    assert listed(Problem((1,), ((same, twin),))) == [((1, 0),)]
