"""`Pareto`: what memory buys, as plans from the smallest to the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.table import Table

from autopar.plan import Plan
from autopar.show import as_text, format_time

_GIB = 2**30


@dataclass(frozen=True)
class ParetoPoint:
    """One plan of the frontier.

    Attributes:
        plan: the plan, with its report.
    """

    plan: Plan

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of one rank, reserve included."""
        return self.plan.peak_bytes

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.plan.step_time_s


@dataclass(frozen=True)
class Pareto:
    """Step time against memory, on one cluster.

    Attributes:
        cluster: what it was made for.
        points: the frontier by rising peak, so by falling step time; if budgets were given, the fastest point within
            each of them, or None where nothing fits.
        budgets: the budgets in GiB that were given, one for each point; None for the whole frontier.
        smallest_feasible_gb: the smallest budget in GiB that works; None if it was not looked for, since all that were
            asked for do.
    """

    cluster: str
    points: tuple[ParetoPoint | None, ...]
    budgets: tuple[float, ...] | None
    smallest_feasible_gb: float | None

    def __str__(self) -> str:
        return _render(self)


def fastest_by_peak(costs: Iterable[tuple[int, float]]) -> list[int]:
    """The peaks at which a larger budget first buys a faster step, rising.

    Args:
        costs: peak in bytes and step time in seconds of each plan.
    """
    peaks: list[int] = []
    fastest_s = float("inf")
    for peak_bytes, step_time_s in sorted(costs):
        if step_time_s < fastest_s:
            peaks.append(peak_bytes)
            fastest_s = step_time_s
    return peaks


def _render(pareto: Pareto) -> str:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    budgets = pareto.budgets
    for name in (["budget"] if budgets is not None else []) + ["peak", "step", "one more GiB buys"]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    before: ParetoPoint | None = None
    for i, point in enumerate(pareto.points):
        row = [] if budgets is None else [f"{budgets[i]:g} GiB"]
        if point is None:
            row += ["", "", "", f"nothing fits: the smallest budget that works is {pareto.smallest_feasible_gb:g} GiB"]
        else:
            row += [_gib(point.peak_bytes), format_time(point.step_time_s), _gain(before, point)]
            row += [_describe(point.plan)]
            before = point
        table.add_row(*row)
    return as_text([f"step time against memory on {pareto.cluster}", table])


def _gib(num_bytes: int) -> str:
    """Rounded up, so that it is a budget which works."""
    return f"{math.ceil(num_bytes * 1000 / _GIB) / 1000:.3f} GiB"


def _gain(before: ParetoPoint | None, point: ParetoPoint) -> str:
    """Step time saved for each GiB between two neighbours."""
    if before is None or point.peak_bytes <= before.peak_bytes:
        return ""
    return format_time((before.step_time_s - point.step_time_s) / (point.peak_bytes - before.peak_bytes) * _GIB)


def _describe(plan: Plan) -> str:
    levels = list(plan.recompute.values())
    counts = [f"{levels.count(level)} {level}" for level in dict.fromkeys(levels)]
    return f"{plan.strategy} on {plan.mesh}" + (f"; regions recomputed: {', '.join(counts)}" if counts else "")


__all__ = ["Pareto", "ParetoPoint", "fastest_by_peak"]
