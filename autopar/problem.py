"""What a planning problem is: classes of alike members, each of which takes an option, and what a choice costs.

Members of a class are alike, so what is decided is how many of them take each option.  Memory peaks when the forward
pass ends (what rests and what is kept for the backward pass), when the backward pass ends (what rests and the
gradients), or in between, as a member runs its backward pass: members before it still keep theirs, and those after it
have gradients instead.  What comes and goes is there on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def is_beaten(cost: OptionCost, others: Sequence[OptionCost]) -> bool:
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
