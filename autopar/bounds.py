"""What no program of a plan undercuts, from what is decided of each op alone, in a tenth of the time that rewriting and
simulating the plan takes.

Time: the ops of each pass and the chains of collectives between them (`autopar.bounds_ops`); the gathers of parameters
and the reductions of their gradients (`autopar.bounds_storage`), which slow down what hides them and of which no link
carries more than it has time for; and the optimizer's step.  Whatever else the rewrite adds is left out.

Memory: what rests and, at the end of the forward pass, what is kept for the backward pass or, at the end of that,
gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.bounds_ops import OpTimes, Seconds, Work, WorkOf, add_to
from autopar.bounds_storage import Rest, Travels
from autopar.cluster import Cluster
from autopar.cost_model.folded import Copies
from autopar.cost_model.optimizers import OptimizerMemory
from autopar.cost_model.simulate import CONTENTION
from autopar.graph import JointGraph
from autopar.passes.decide import decided
from autopar.plan import Plan

NUM_MIXES = 16
"""Shares of two ways to rest that are tried."""


@dataclass
class Bounds:
    """Bounds on the plans of one graph.

    Attributes:
        joint: the graph, whole or folded.
        cluster: what it runs on.
        optimizer: whose state rests.
        copies: how many units each unit of a folded graph stands for.
        accumulate: how many times forward and backward run before the optimizer's step.
    """

    joint: JointGraph
    cluster: Cluster
    optimizer: OptimizerMemory
    copies: Copies
    accumulate: int = 1
    _decided: dict[object, tuple[Work, Travels]] = field(default_factory=dict)
    _times: OpTimes = field(init=False)

    def __post_init__(self) -> None:
        self._times = OpTimes(self.cluster)

    def time_s(self, plan: Plan) -> float:
        """Seconds of a step that no program of the plan undercuts, nor one that computes more of it again."""
        return self._seconds(*self._parts(plan))

    def num_bytes(self, plan: Plan) -> int:
        """Bytes of one rank that no program of the plan undercuts at its peak."""
        work, rest = self._parts(plan)
        return round(max(_at_end(rest), _kept(rest) + (0.0 if plan.recompute else work.saved_bytes)))

    def within_s(self, plans: Sequence[Plan], budget: int) -> float:
        """Seconds that no plan within so many bytes is estimated to undercut whose parameters rest in part as in one of
        these, which cut the same, and in part as in another; infinite if none fits."""
        found = [self._parts(plan) for plan in plans]
        work, rests = found[0][0], [rest for _, rest in found]
        alone = [self._within(work, rest, budget) for rest in rests]
        mixed = [
            self._within(work, _mixed(one, other, i / NUM_MIXES), budget)
            for (one, s), (other, t) in itertools.combinations(zip(rests, alone, strict=True), 2)
            if (s == math.inf) != (t == math.inf) or (work.saved and _recomputes(work, one, other, budget))
            for i in range(1, NUM_MIXES)
        ]
        return min([*alone, *mixed])

    def _within(self, work: Work, rest: Rest, budget: int) -> float:
        if max(_at_end(rest), _kept(rest)) > budget:
            return math.inf
        return self._seconds(work, rest, work.recomputing_s(_kept(rest) + work.saved_bytes - budget))

    def _seconds(self, work: Work, rest: Rest, recomputing_s: float = 0.0) -> float:
        """Of a step.  What waits is computed again meanwhile, and what is hidden slows down what hides it."""
        computing_s = (work.computing_s[0], work.computing_s[1] + recomputing_s)
        busy: dict[str, float] = {}
        exposed_s = max(rest.late_s.values(), default=0.0)
        add_to(busy, rest.late_s)
        for backward, moving in enumerate(zip(work.moving_s, rest.moving_s, strict=True)):
            links: dict[str, float] = {}
            for by_link in moving:
                add_to(links, by_link)
            add_to(busy, links)
            waiting_s = work.waiting_s[backward] + rest.waiting_s[backward]
            meanwhile_s = recomputing_s if backward else 0.0
            exposed_s += max(0.0, waiting_s - meanwhile_s, max(links.values(), default=0.0) - computing_s[backward])
        hidden_s = max(0.0, max(busy.values(), default=0.0) - exposed_s)
        step_s = sum(computing_s) + exposed_s + CONTENTION[self.cluster.backend] * hidden_s
        moved = 3 * rest.grads + 2 * rest.state + 3 * rest.grads * (self.accumulate - 1)
        return self.accumulate * step_s + moved / self.cluster.device.memory_bandwidth_bytes_s

    def _parts(self, plan: Plan) -> tuple[Work, Rest]:
        key = (plan.mesh, plan.factors)
        if key not in self._decided:
            joint, ops = decided(self.joint, plan)
            work = WorkOf(joint, plan.mesh, ops, self._times, self.copies).run()
            self._decided[key] = work, Travels(joint, plan.mesh, ops, self.cluster, self.copies, work)
        work, travels = self._decided[key]
        return work, travels.rest(plan, self.optimizer)


def _recomputes(work: Work, one: Rest, other: Rest, budget: int) -> bool:
    """Whether two ways to rest leave different room for what is kept, and too little."""
    needs = {_kept(rest) + work.saved_bytes for rest in (one, other)}
    return len(needs) > 1 and max(needs) > budget


def _at_end(rest: Rest) -> float:
    return rest.params + rest.state + rest.grads


def _kept(rest: Rest) -> float:
    return rest.params + rest.state + rest.kept


def _mixed(one: Rest, other: Rest, share: float) -> Rest:
    """Parameters of which this share rests as in `one`, and the others as in `other`."""

    def mix(a: Seconds, b: Seconds) -> Seconds:
        return {link: share * a.get(link, 0.0) + (1 - share) * b.get(link, 0.0) for link in {**a, **b}}

    sizes = ("params", "grads", "state", "kept")
    return Rest(
        (mix(one.moving_s[0], other.moving_s[0]), mix(one.moving_s[1], other.moving_s[1])),
        (min(one.waiting_s[0], other.waiting_s[0]), min(one.waiting_s[1], other.waiting_s[1])),
        mix(one.late_s, other.late_s),
        *(share * getattr(one, size) + (1 - share) * getattr(other, size) for size in sizes),
    )
