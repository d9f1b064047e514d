"""The named strategies as candidates: each is simulated unless what bounds it says that it cannot be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.bounds import Bounds
from autopar.graph import JointGraph
from autopar.layout_search import Price, Priced
from autopar.plan import Plan
from autopar.whole_plan import even_splits


@dataclass(frozen=True)
class LeftOut:
    """A plan that was not simulated, and what it takes at least.

    Attributes:
        plan: the plan.
        least_s: seconds of a step.
        least_bytes: memory of one rank.
    """

    plan: Plan
    least_s: float
    least_bytes: int


@dataclass
class Named:
    """The named strategies' plans of one graph; each is simulated once.

    Attributes:
        joint: the graph, whole or folded.
        plans: the plans.
        price: simulates one.
        bounds: what they do not undercut.
    """

    joint: JointGraph
    plans: Sequence[Plan]
    price: Price
    bounds: Bounds
    _priced: dict[int, Priced] = field(default_factory=dict)

    def everything(self) -> list[Priced]:
        """All of them, simulated."""
        for position in range(len(self.plans)):
            self._simulate(position)
        return self._simulated()

    def within(self, budget: int) -> list[Priced]:
        """Those of them, simulated, among which the fastest is that fits a budget in bytes, if one fits."""
        fastest_s = math.inf
        for position in sorted(range(len(self.plans)), key=lambda i: self._least[i].least_s):
            one = self._least[position]
            if one.least_bytes > budget or one.least_s >= fastest_s:
                continue
            simulation = self._simulate(position).simulation
            if simulation.memory.total <= budget:
                fastest_s = min(fastest_s, simulation.step_time_s)
        return self._simulated()

    @property
    def left_out(self) -> list[LeftOut]:
        """Those that were not simulated until now."""
        return [self._least[position] for position in range(len(self.plans)) if position not in self._priced]

    @cached_property
    def _least(self) -> list[LeftOut]:
        return [LeftOut(plan, self.bounds.time_s(plan), self.bounds.num_bytes(plan)) for plan in self.plans]

    def _simulate(self, position: int) -> Priced:
        if position not in self._priced:
            self._priced[position] = self.price(self.plans[position], even_splits(self.joint.runs))
        return self._priced[position]

    def _simulated(self) -> list[Priced]:
        return [self._priced[position] for position in sorted(self._priced)]
