"""What to say when nothing fits: the smallest budget that works, what fills it, and what would help, with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.cost_model.memory import fixed_reserve
from autopar.cost_model.simulate import Simulation
from autopar.errors import InfeasibleBudgetError
from autopar.layout_search import Priced
from autopar.plan import RECOMPUTE_LEVELS, MemoryParts, Plan
from autopar.search import AUTO
from autopar.show import format_bytes
from autopar.whole_plan import Split

GIB = 2**30

Reprice = Callable[[str], Simulation]
"""What the smallest plan needs with the optimizer of a name."""


NUM_TURNED = 4
"""Of the smallest plans, how many are tried with gradients reduced at the other time."""


def more_frugal(
    priced: Sequence[Priced], named: Sequence[Priced], regions: Sequence[str]
) -> Iterator[tuple[Plan, tuple[Split, ...]]]:
    """Plans that may need less than any that was simulated, which the search leaves out since little is gained by them
    where something fits: the smallest with gradients reduced after the backward pass if they were as they arise, and
    the reverse; the named strategies with all recomputed.

    Args:
        priced: every plan that was simulated.
        named: those of the named strategies among them.
        regions: all of the graph's.
    """
    for one in sorted(priced, key=lambda p: p.simulation.memory.total)[:NUM_TURNED]:
        yield replace(one.plan, strategy=AUTO, delay_reduction=not one.plan.delay_reduction), one.splits
    for one in named:
        for level in RECOMPUTE_LEVELS:
            yield replace(one.plan, strategy=AUTO, recompute=dict.fromkeys(regions, level)), one.splits


def infeasible(
    smallest: Priced, priced: Sequence[Priced], budget: int, usable: int, optimizer: str, reprice: Reprice
) -> InfeasibleBudgetError:
    """The error for a budget under which none of the simulated plans fits.

    Args:
        smallest: the plan that needs least.  Of a folded graph, others may seem to need less that were not looked at.
        priced: every plan that was simulated.
        budget: bytes on one device.
        usable: bytes that the device has.
        optimizer: name of the one that was asked for.
        reprice: simulates the smallest plan with another optimizer.
    """
    memory = smallest.simulation.memory
    gb = feasible_gb(memory.total)
    parts = sorted(_PARTS.items(), key=lambda item: -int(getattr(memory, item[0])))
    largest = ", ".join(f"{words} {format_bytes(getattr(memory, name))}" for name, words in parts[:3])
    modules = ", ".join(
        f"{live.module or '(root)'} {format_bytes(live.num_bytes)} of {live.kind}"
        for live in smallest.simulation.live_at_peak[:3]
        if live.kind != "reserve"
    )
    peaks: dict[str, int] = {}
    for p in priced:
        total = p.simulation.memory.total
        peaks[p.plan.strategy] = min(total, peaks.get(p.plan.strategy, total))
    peaks[smallest.plan.strategy] = memory.total
    beyond = f", more than the {format_bytes(usable)} that the device has" if memory.total > usable else ""
    reserve = min(fixed_reserve(p.simulation.memory) for p in priced)
    tried = ", ".join(f"{name} {format_bytes(total)}" for name, total in peaks.items())
    return InfeasibleBudgetError(
        f"no candidate fits {format_bytes(budget)} on one device; the smallest budget that works is mem_gb={gb:g} with "
        f"{smallest.plan.strategy} on {smallest.plan.mesh}{beyond}. Its peak, at {smallest.simulation.peak_at}: "
        f"{largest}; by module: {modules}. Smallest peaks: {tried}. "
        f"{_help(memory, budget, reserve, optimizer, reprice)}",
        gb,
    )


_PARTS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations",
    "temporaries": "temporaries and collective buffers",
    "reserve": "reserve",
}


def feasible_gb(num_bytes: int) -> float:
    """A budget in GiB that holds so many bytes, rounded up to the third digit after the point."""
    return -(-num_bytes * 1000 // GIB) / 1000


def _help(memory: MemoryParts, budget: int, reserve: int, optimizer: str, reprice: Reprice) -> str:
    """Means in words.  Other optimizers are simulated; rows and ranks are estimated: what a row brings is halved with
    the rows, and what rests cut is halved with twice the ranks."""
    if budget <= reserve:
        return (
            f"The reserve alone, {format_bytes(reserve)} for the device's context and the collectives' buffers, leaves "
            f"nothing of {format_bytes(budget)}, so that neither fewer rows nor more ranks nor another optimizer would "
            "help: only a larger budget does"
        )
    rows = memory.activations + memory.temporaries
    rests = memory.params + memory.grads + memory.optimizer
    words = [
        f"half the rows or tokens on each rank (about {format_bytes(memory.total - rows / 2)})",
        f"twice the ranks (about {format_bytes(memory.total - rests / 2)} where parameters rest cut)",
    ]
    for name in _LEANER:
        peak = reprice(name).memory.total if name != optimizer else memory.total
        if peak < memory.total:
            words.append(f"optimizer={name!r} ({format_bytes(peak)})")
    return f"What would help: {'; '.join(words)}"


_LEANER = ("adamw_8bit", "adafactor", "sgd")
"""Optimizers with less state than AdamW, the closest first."""
