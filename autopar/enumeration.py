"""Every choice of a planning problem at once, as arrays: exact, and faster than a solver while they are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """All choices of an option for each member of each class; one entry of each array for each.

    Attributes:
        counts: for each class, the ways to count its members' options.
        time_s, peak: what each choice takes, the classes in row-major order.
    """

    counts: tuple[tuple[tuple[int, ...], ...], ...]
    time_s: Numbers
    peak: Numbers

    def choice(self, index: int) -> tuple[tuple[int, ...], ...]:
        """The counts of one choice."""
        positions = np.unravel_index(index, [len(ways) for ways in self.counts])
        return tuple(ways[int(i)] for ways, i in zip(self.counts, positions, strict=True))

    def fastest(self, limit: float) -> int | None:
        """The fastest choice whose peak is at most `limit`; of equally fast ones the smallest."""
        fits = np.flatnonzero(self.peak <= limit)
        if not len(fits):
            return None
        shortest = fits[self.time_s[fits] <= self.time_s[fits].min() * (1 + 1e-12)]
        return int(shortest[np.argmin(self.peak[shortest])])

    def worth_trying(self, slack: float) -> list[int]:
        """Choices than which no smaller one is faster by more than `slack`, from the smallest to the largest."""
        order = np.lexsort((self.time_s, self.peak))
        shortest = np.minimum.accumulate(self.time_s[order])
        return [int(i) for i in order[self.time_s[order] <= shortest * (1 + slack)]]


MANY = 5
"""Of so many members of a class or more, only choices of at most two options are looked at: of a third one there would
be little, since memory has two moments at which it may be short."""


def num_choices(counts: Sequence[int], num_options: Sequence[int]) -> int:
    """How many choices there are."""
    return math.prod(
        math.comb(n + k - 1, n) if n < MANY else k + math.comb(k, 2) * (n - 1)
        for n, k in zip(counts, num_options, strict=True)
    )


def _ways(options: Sequence[int], count: int, num_options: int) -> tuple[tuple[int, ...], ...]:
    """The counts of options that members of one class may take."""
    if count < MANY:
        taken = combinations_with_replacement(options, count)
        return tuple(tuple(map(one.count, range(num_options))) for one in taken)
    alone = [{option: count} for option in options]
    pairs = [{a: n, b: count - n} for a, b in combinations(options, 2) for n in range(1, count)]
    return tuple(tuple(way.get(i, 0) for i in range(num_options)) for way in (*alone, *pairs))


def enumerate_choices(
    counts: Sequence[int], open_options: Sequence[Sequence[int]], measures: Sequence[Sequence[Sequence[float]]]
) -> Choices:
    """All choices of a problem.

    Args:
        counts: members of each class.
        open_options: for each class, the indices of the options that it may take.
        measures: for each class and option time, bytes when the forward ends, when the step ends, transient ones.
    """
    ways = [
        _ways(options, count, len(costs)) for count, options, costs in zip(counts, open_options, measures, strict=True)
    ]
    tables = [np.array(costs, dtype=np.float64).T for costs in measures]
    numbers = [np.array(way, dtype=np.float64) for way in ways]
    time_s, start, end = (
        _outer(np.add, [n @ table[kind] for n, table in zip(numbers, tables, strict=True)]) for kind in range(3)
    )
    transient = _outer(
        np.maximum, [np.where(n > 0, table[3], 0.0).max(1) for n, table in zip(numbers, tables, strict=True)]
    )
    return Choices(tuple(ways), time_s, np.maximum(start, end) + transient)


def _outer(combine: Callable[..., Numbers], parts: Sequence[Numbers]) -> Numbers:
    """Combine one entry of each part, for all ways to take them, in row-major order."""
    return reduce(lambda left, right: combine(left[:, None], right[None, :]).ravel(), parts)
