"""Every choice of a planning problem at once, as arrays: exact, and faster than a solver while they are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations, combinations_with_replacement
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class Cost(Protocol):
    """What one member costs with one option; see `autopar.solver.OptionCost`."""

    @property
    def measures(self) -> tuple[float, ...]:
        """Seconds, and bytes that rest, are kept, are gradients, come on top when a pass ends, and while it runs."""

    @property
    def alone(self) -> float:
        """Bytes while it runs its backward pass, on top of what all of its class have then."""

    def beside(self, other: Any, /) -> float:
        """Bytes that it has while a member with another option runs."""


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
    counts: Sequence[int], open_options: Sequence[Sequence[int]], costs: Sequence[Sequence[Cost]]
) -> Choices:
    """All choices of a problem.

    Args:
        counts: members of each class.
        open_options: for each class, the indices of the options that it may take.
        costs: for each class what each option costs.
    """
    ways = [_ways(options, count, len(one)) for count, options, one in zip(counts, open_options, costs, strict=True)]
    numbers = [np.array(way, dtype=np.float64) for way in ways]
    tables = [np.array([cost.measures for cost in one], dtype=np.float64).T for one in costs]
    time_s, rest, saved, grads = (
        [n @ table[kind] for n, table in zip(numbers, tables, strict=True)] for kind in range(4)
    )
    transient = [np.where(n > 0, table[4], 0.0).max(1) for n, table in zip(numbers, tables, strict=True)]
    before, after, running = saved[0], grads[0], _running(numbers[0], costs[0])
    for n, one, keeps, gives in zip(numbers[1:], costs[1:], saved[1:], grads[1:], strict=True):
        running = np.maximum(_pair(np.add, running, gives), _pair(np.add, before, _running(n, one)))
        before, after = _pair(np.add, before, keeps), _pair(np.add, after, gives)
    edge = np.maximum(before, after) + reduce(partial(_pair, np.maximum), transient)
    peak = reduce(partial(_pair, np.add), rest) + np.maximum(running, edge)
    return Choices(tuple(ways), reduce(partial(_pair, np.add), time_s), peak)


def _running(numbers: Numbers, costs: Sequence[Cost]) -> Numbers:
    """For each way to count a class's options, the most bytes while one of its members runs its backward pass."""
    beside = np.array([[other.beside(cost) for cost in costs] for other in costs], dtype=np.float64)
    alone = np.array([cost.alone for cost in costs], dtype=np.float64)
    most: Numbers = np.where(numbers > 0, numbers @ beside + alone, 0.0).max(1)
    return most


def _pair(combine: Callable[..., Numbers], left: Numbers, right: Numbers) -> Numbers:
    """Combine each of the left with each of the right, in row-major order."""
    return combine(left[:, None], right[None, :]).ravel()
