"""Why a plan is as it is: one module's costs under each candidate, and one plan beside another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.plan import Candidate, Plan, PlanReport
from autopar.show import format_bytes, format_time


@dataclass(frozen=True)
class _Total:
    """What a module and all inside it cost."""

    compute_s: float
    exposed_s: Mapping[str, float]
    rest_bytes: int
    saved_bytes: int

    @property
    def time_s(self) -> float:
        return self.compute_s + sum(self.exposed_s.values())


def explain_module(plan: Plan, module: str) -> str:
    """See `Plan.explain`."""
    report = _report(plan)
    chosen = next((c for c in report.candidates if c.verdict == CHOSEN), None)
    if chosen is None or not chosen.modules:
        raise PlanError("the plan's report does not say what its modules cost: make the plan again")
    total = _total(chosen, module)
    if total is None:
        known = ", ".join(sorted({m.module for m in chosen.modules if m.module})[:8])
        raise PlanError(f"the plan knows no module {module!r} that computes or holds anything; there are {known}, …")
    lines = [f"{module or 'the model'} under {plan.strategy} on {plan.mesh}"]
    lines += [f"  {line}" for line in _decisions(plan, report, module)]
    waiting_s = sum(total.exposed_s.values())
    lines.append(
        f"  costs {format_time(total.compute_s)} of computing and {format_time(waiting_s)} of waiting"
        f"{_waits(total.exposed_s)}; rests on {format_bytes(total.rest_bytes)}, keeps {format_bytes(total.saved_bytes)}"
        " for the backward pass"
    )
    lines.append("the others there, and as a whole:")
    for other in report.candidates:
        theirs = _total(other, module)
        if other is not chosen and theirs is not None:
            lines.append(f"  {other.strategy} on {other.mesh}: {_difference(total, theirs)} ({other.verdict})")
        elif other.is_bound:
            lines.append(f"  {other.strategy} on {other.mesh}: not simulated ({other.verdict})")
    return "\n".join(lines)


CHOSEN = "chosen"
"""Verdict of the candidate that the plan is."""


def _report(plan: Plan) -> PlanReport:
    if plan.report is None:
        raise PlanError(
            f"this plan ({plan.strategy} on {plan.mesh}) has not been priced, so there is nothing to explain"
        )
    return plan.report


def _decisions(plan: Plan, report: PlanReport, module: str) -> Iterable[str]:
    rows = [row for row in report.rows if _row_lies_in(row.module, module)]
    for row in rows[:_MAX_ROWS]:
        yield f"{row.module or '(root)'}: {row.params or 'no parameters'}" + (
            f", {row.collectives}" if row.collectives else ""
        )
    if len(rows) > _MAX_ROWS:
        yield f"… and {len(rows) - _MAX_ROWS} more modules"
    levels = {r: level for r, level in plan.recompute.items() if _inside(r, module) or (r and _inside(module, r))}
    if levels:
        yield "computed again in the backward pass: " + ", ".join(
            f"{r or '(root)'} {level}" for r, level in levels.items()
        )


_MAX_ROWS = 12


def _total(candidate: Candidate, module: str) -> _Total | None:
    """The sum over one module's own costs and those of the modules inside it; None if it has none."""
    rows = [row for row in candidate.modules if _inside(row.module, module)]
    if not rows:
        return None
    exposed: dict[str, float] = {}
    for row in rows:
        for kind, seconds in row.exposed_s.items():
            exposed[kind] = exposed.get(kind, 0.0) + seconds
    return _Total(
        sum(row.compute_s for row in rows),
        exposed,
        sum(row.rest_bytes for row in rows),
        sum(row.saved_bytes for row in rows),
    )


def _difference(ours: _Total, theirs: _Total) -> str:
    time_s = theirs.time_s - ours.time_s
    held = theirs.rest_bytes + theirs.saved_bytes - ours.rest_bytes - ours.saved_bytes
    words = [f"{'+' if time_s >= 0 else '−'}{format_time(abs(time_s))}"]
    words.append(f"{format_bytes(abs(held))} {'more' if held > 0 else 'less'}" if held else "as much memory")
    more = {kind: seconds - ours.exposed_s.get(kind, 0.0) for kind, seconds in theirs.exposed_s.items()}
    more["computing"] = theirs.compute_s - ours.compute_s
    kind, seconds = max(more.items(), key=lambda item: item[1])
    if time_s > 0 and seconds > 0:
        words.append(f"loses on {kind}, {format_time(seconds)} more" + ("" if kind == "computing" else " exposed"))
    return ", ".join(words)


def _waits(exposed_s: Mapping[str, float]) -> str:
    longest = sorted(exposed_s.items(), key=lambda item: -item[1])[:3]
    words = [f"{kind} {format_time(seconds)}" for kind, seconds in longest if seconds > 0]
    return f" ({', '.join(words)})" if words else ""


def compare_plans(ours: Plan, theirs: Plan) -> str:
    """See `Plan.compare`."""
    a, b = _report(ours), _report(theirs)
    rows = [
        ("", f"{ours.strategy} on {ours.mesh}", f"{theirs.strategy} on {theirs.mesh}"),
        *((name, format_time(x), format_time(y)) for name, x, y in _times(a, b)),
        *((name, format_bytes(x), format_bytes(y)) for name, x, y in _sizes(a, b)),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _times(a: PlanReport, b: PlanReport) -> Sequence[tuple[str, float, float]]:
    names = (("step", "step_time_s"), ("computing", "compute_s"), ("waiting for collectives", "exposed_s"))
    return [(name, getattr(a, field), getattr(b, field)) for name, field in names]


def _sizes(a: PlanReport, b: PlanReport) -> Sequence[tuple[str, float, float]]:
    parts = ("params", "grads", "optimizer", "activations", "temporaries", "reserve", "total")
    sizes = [(f"peak: {part}", getattr(a.memory, part), getattr(b.memory, part)) for part in parts]
    kinds = sorted({*a.collective_bytes, *b.collective_bytes})
    return sizes + [(kind, a.collective_bytes.get(kind, 0), b.collective_bytes.get(kind, 0)) for kind in kinds]


# ------------------------------------------------------------------------------------- patterns such as `h.0-3.mlp`


def _inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _row_lies_in(pattern: str, module: str) -> bool:
    """Whether a folded row stands for a module inside `module`, or for that module."""
    ours, theirs = pattern.split("."), module.split(".") if module else []
    return len(ours) >= len(theirs) and all(map(_part_covers, ours, theirs))


def _part_covers(part: str, name: str) -> bool:
    numbers = re.fullmatch(r"(\d+)-(\d+)", part)
    if name.isdecimal() and numbers:
        return int(numbers[1]) <= int(name) <= int(numbers[2])
    return part == name or (part == "*" and name.isdigit())
