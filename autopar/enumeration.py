"""The choices of a planning problem at once, as arrays: exact, and faster than a solver while they are few.

Classes that follow each other are taken together, two at a time, into a table with a row for each choice of theirs.  Of
a table only those rows matter that no other beats in time and at each of the moments at which memory may peak, since
what is there at these moments only grows with what the other classes have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Choice, OptionCost, Problem, is_beaten

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

FEW = 400
"""Up to so many choices in all are listed, whether or not others beat them."""

MAX_ROWS = 16_000_000
"""Up to so many choices are looked at; beyond, a solver is faster."""

MANY = 5
"""Of so many members of a class or more, only choices of at most two options are looked at: of a third one there would
be little, since memory has two moments at which it may be short."""


@dataclass(frozen=True)
class Choices:
    """Choices of an option for each member of each class; one entry of each array for each.

    Attributes:
        ways: for each class, in how many ways its members may take its options: ways x options.
        rows: which way of each class a choice takes: choices x classes.
        time_s, peak: what each choice takes.
        is_complete: whether choices are listed that others beat.
    """

    ways: tuple[Counts, ...]
    rows: Counts
    time_s: Numbers
    peak: Numbers
    is_complete: bool

    def choice(self, index: int) -> Choice:
        """One of them."""
        return tuple(tuple(way[i].tolist()) for way, i in zip(self.ways, self.rows[index], strict=True))

    def fastest(self, limit: float) -> Choice | None:
        """The fastest choice whose peak is at most `limit`; of equally fast ones the smallest."""
        fits = np.flatnonzero(self.peak <= limit)
        if not len(fits):
            return None
        shortest = fits[self.time_s[fits] <= self.time_s[fits].min() * (1 + 1e-12)]
        return self.choice(int(shortest[np.argmin(self.peak[shortest])]))

    def smallest(self) -> Choice:
        """The choice with the smallest peak; of equally small ones the fastest."""
        return self.choice(int(np.lexsort((self.time_s, self.peak))[0]))

    def worth_trying(self, slack: float) -> list[int]:
        """Choices than which no smaller one is faster by more than `slack`, from the smallest to the largest."""
        order = np.lexsort((self.time_s, self.peak))
        shortest = np.minimum.accumulate(self.time_s[order])
        return [int(i) for i in order[self.time_s[order] <= shortest * (1 + slack)]]


@dataclass(frozen=True)
class _Table:
    """Choices of some classes that follow each other.

    Attributes:
        rows: which of each class's ways a choice takes; choices x classes.
        costs: its seconds; bytes that are there as the forward pass ends, as the backward pass ends, and at most in
            between; and bytes that come on top as either pass ends; choices x 5.
    """

    rows: Counts
    costs: Numbers

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, which: Counts | slice) -> _Table:
        return _Table(self.rows[which], self.costs[which])


def enumerate_choices(problem: Problem) -> Choices | None:
    """All choices of options that others do not beat, or those that no other choice beats in time and memory; None if
    there are too many to look at."""
    open_to = [[i for i, cost in enumerate(costs) if not is_beaten(cost, costs)] for costs in problem.costs]
    sizes = [_num_ways(len(options), count) for options, count in zip(open_to, problem.counts, strict=True)]
    if max(sizes) > min(_MAX_TABLE, MAX_ROWS):
        return None
    is_complete = math.prod(sizes) <= min(FEW, MAX_ROWS)
    ways = [_ways(*one) for one in zip(open_to, problem.counts, map(len, problem.costs), strict=True)]
    tables = [_table(one, costs) for one, costs in zip(ways, problem.costs, strict=True)]
    if not is_complete:
        tables = [_without_beaten(table) for table in tables]
    while len(tables) > (1 if is_complete else 2):
        i = min(range(len(tables) - 1), key=lambda i: len(tables[i]) * len(tables[i + 1]))
        if len(tables[i]) * len(tables[i + 1]) > min(_MAX_TABLE, MAX_ROWS):
            return None
        both = _combined(tables[i], tables[i + 1])
        tables[i : i + 2] = [both if is_complete else _without_beaten(both)]
    if is_complete:
        return Choices(tuple(ways), tables[0].rows, tables[0].costs[:, 0], _peak(*tables[0].costs.T[1:]), True)
    if len(tables) == 1:
        tables.append(_Table(np.empty((1, 0), dtype=np.int64), np.zeros((1, 5))))
    if len(tables[0]) * len(tables[1]) > MAX_ROWS:
        return None
    rows, time_s, peak = _frontier(*tables)
    return Choices(tuple(ways), rows, time_s, peak, False)


def _num_ways(num_options: int, count: int) -> int:
    """How many `_ways` there are."""
    if count < MANY:
        return math.comb(count + num_options - 1, count)
    return num_options + math.comb(num_options, 2) * (count - 1)


def _ways(options: Sequence[int], count: int, num_options: int) -> Counts:
    """How many members of one class take each option: ways x options."""
    if count < MANY:
        taken = combinations_with_replacement(options, count)
        return np.array([[one.count(i) for i in range(num_options)] for one in taken], dtype=np.int64)
    alone = count * np.eye(num_options, dtype=np.int64)[list(options)]
    pairs = np.array(list(combinations(options, 2)), dtype=np.int64).reshape(-1, 2)
    first, second = np.repeat(pairs, count - 1, axis=0).T
    mixed, row = np.zeros((len(first), num_options), dtype=np.int64), np.arange(len(first))
    mixed[row, first] = np.tile(np.arange(1, count), len(pairs))
    mixed[row, second] = count - mixed[row, first]
    return np.concatenate([alone, mixed])


def _table(ways: Counts, costs: Sequence[OptionCost]) -> _Table:
    """The choices of one class."""
    measures = np.array([cost.measures for cost in costs], dtype=np.float64)
    time_s, rest, saved, grads = (ways @ measures[:, :4]).T
    on_top = np.where(ways > 0, measures[:, 4], 0.0).max(1)
    # While a member runs its backward pass: what all of its class have then, and itself on top.
    beside = np.array([[other.beside(cost) for cost in costs] for other in costs], dtype=np.float64)
    alone = np.array([cost.alone for cost in costs], dtype=np.float64)
    running = np.where(ways > 0, ways @ beside + alone, 0.0).max(1)
    rows = np.arange(len(ways), dtype=np.int64)[:, None]
    return _Table(rows, np.stack([time_s, rest + saved, rest + grads, rest + running, on_top], 1))


def _combined(left: _Table, right: _Table) -> _Table:
    """Each of the left's choices with each of the right's, which run after them forward."""
    i, j = np.divmod(np.arange(len(left) * len(right)), len(right))
    costs = np.stack(_pairs(left, right), 1)
    return _Table(np.concatenate([left.rows[i], right.rows[j]], 1), costs)


def _pairs(left: _Table, right: _Table) -> tuple[Numbers, ...]:
    """The costs of `_combined`, each kind on its own."""
    (time_s, forward, backward, within, on_top), theirs = left.costs.T, right.costs.T
    kinds = (
        np.add.outer(time_s, theirs[0]),
        np.add.outer(forward, theirs[1]),
        np.add.outer(backward, theirs[2]),
        np.maximum(np.add.outer(within, theirs[2]), np.add.outer(forward, theirs[3])),
        np.maximum.outer(on_top, theirs[4]),
    )
    return tuple(kind.ravel() for kind in kinds)


def _without_beaten(table: _Table) -> _Table:
    """Without rows than which another is at least as good in every respect; of equal ones the first stays.

    Only the rows that promise to beat most are compared with all: it need not find every row that is beaten.
    """
    order = np.argsort((table.costs / np.maximum(table.costs.max(0), 1e-300)).sum(1), kind="stable")
    costs, left = table.costs[order], np.arange(len(order))
    found: list[int] = []
    while len(left) and len(found) < _MAX_COMPARED:
        first, left = int(left[0]), left[1:]
        found.append(first)
        left = left[(costs[left] < costs[first]).any(1)]
    return table[np.sort(order[np.concatenate([np.array(found, dtype=np.int64), left])])]


def _peak(forward: Numbers, backward: Numbers, within: Numbers, on_top: Numbers) -> Numbers:
    most: Numbers = np.maximum(within, np.maximum(forward, backward) + on_top)
    return most


def _frontier(left: _Table, right: _Table) -> tuple[Counts, Numbers, Numbers]:
    """Of all pairs of two tables' choices those that no other pair beats in time and memory, from the smallest to the
    largest: which way of each class they take, seconds, and bytes."""
    time_s, peak, pair = np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)
    size = max(1, _PART // len(right))
    for start in range(0, len(left), size):
        times, *costs = _pairs(left[start : start + size], right)
        peaks = _peak(*costs)
        new = np.flatnonzero(times < _least_within(peaks, time_s, peak))
        time_s, peak = np.concatenate([time_s, times[new]]), np.concatenate([peak, peaks[new]])
        pair = np.concatenate([pair, start * len(right) + new])
        order = np.lexsort((time_s, peak))
        shortest = np.minimum.accumulate(time_s[order])
        best = order[np.concatenate([[True], shortest[1:] < shortest[:-1]])]
        time_s, peak, pair = time_s[best], peak[best], pair[best]
    i, j = np.divmod(pair, len(right))
    return np.concatenate([left.rows[i], right.rows[j]], 1), time_s, peak


def _least_within(peaks: Numbers, time_s: Numbers, peak: Numbers) -> Numbers:
    """For each of many peaks the least time of the known choices, a frontier, that are no larger; or a longer one."""
    if not len(peak):
        return np.full(len(peaks), np.inf)
    edges = np.linspace(peak[0], peak[-1], _BINS)
    known = np.searchsorted(peak, edges, side="right") - 1  # of those within an edge the largest is the fastest
    width = max((edges[-1] - edges[0]) / (_BINS - 1), 1e-300)
    below = np.floor(np.clip((peaks - edges[0]) / width, -1, _BINS - 1)).astype(np.int64)
    least: Numbers = np.concatenate([[np.inf], time_s[known]])[below + 1]
    return least


_MAX_TABLE, _MAX_COMPARED = 50_000, 100
"""Up to so many rows a table is made, and with so many of them all others are compared."""

_PART, _BINS = 50_000, 1_000
"""Pairs that are looked at in one go, and how finely their peaks are told apart before they are sorted."""
