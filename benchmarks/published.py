"""Predicted step time and peak memory beside published measurements.

    python -m benchmarks.published --runs training_runs.csv [--golden golden_memory.csv] --json OUT

Builds each row's model from its dimensions, its cluster, and its strategy as a plan, and lets autopar trace, rewrite
and simulate it.  Rows that autopar cannot run (pipeline parallelism, FP8, experts) are skipped by name and counted.
Prints each row, then by source and for all: median and 90th percentile of the absolute error, signed bias, and the rank
correlation within the source.  Beside it stands a roofline: FLOPs over the card's rate, with the one efficiency that
suits the given rows best.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.devices import GIB
from benchmarks.published_golden import read_golden
from benchmarks.published_price import laid_out, predict
from benchmarks.published_roofline import roofline_step_s
from benchmarks.published_rows import Run, read_runs

_ROWS_BETWEEN_COLLECTIONS = 16


@dataclass(frozen=True)
class Result:
    """One row, predicted and measured; `roofline_step_s` is before it is scaled by one efficiency, and `card_gib` what
    the card has."""

    id: str
    family: str
    skipped: str = ""
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    predicted_mem_gib: float | None = None
    measured_mem_gib: float | None = None
    mem_kind: str = ""
    roofline_step_s: float | None = None
    card_gib: float = 0.0


@dataclass(frozen=True)
class Errors:
    """Relative errors of a group of predictions, and how well they rank it."""

    count: int
    median: float
    p90: float
    bias: float
    worst_under: float
    spearman: float | None


def result_of(run: Run) -> Result:
    """Predict one row."""
    if run.skipped:
        return Result(run.id, run.family, run.skipped, None, run.step_s, None, run.memory_gib, run.memory_kind)
    assert run.cluster is not None
    predicted = predict(run)
    return Result(
        run.id, run.family, "", predicted.step_s, run.step_s, predicted.memory_gib(run.memory_kind), run.memory_gib,
        run.memory_kind, roofline_step_s(run), run.cluster.device.memory_bytes / GIB,
    )  # fmt: skip


def errors(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Errors of (predicted, measured) pairs; None if there are none."""
    if not pairs:
        return None
    signed = [predicted / measured - 1 for predicted, measured in pairs]
    absolute = sorted(map(abs, signed))
    p90 = absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))]
    return Errors(
        len(pairs), statistics.median(absolute), p90, statistics.fmean(signed), min(0.0, *signed), spearman(pairs)
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None where either side does not vary."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    if any(len(set(side)) < 2 for side in ranks):
        return None
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: i for i, value in reversed(list(enumerate(order)))}
    times = Counter(values)
    return [first[value] + (times[value] - 1) / 2 for value in values]


def time_pairs(results: Sequence[Result]) -> list[tuple[float, float]]:
    """Predicted and measured step times, where there are both."""
    pairs = ((r.predicted_step_s, r.measured_step_s) for r in results)
    return [(p, m) for p, m in pairs if p and m]


def memory_pairs(results: Sequence[Result]) -> list[tuple[float, float]]:
    """Predicted and measured peaks, where there are both."""
    pairs = ((r.predicted_mem_gib, r.measured_mem_gib) for r in results)
    return [(p, m) for p, m in pairs if p and m]


def roofline_pairs(results: Sequence[Result]) -> list[tuple[float, float]]:
    """The roofline's and the measured step times, with the one efficiency that makes the median error zero."""
    pairs = [(r.roofline_step_s, r.measured_step_s) for r in results]
    raw = [(p, m) for p, m in pairs if p and m]
    efficiency = statistics.median(p / m for p, m in raw) if raw else 1.0
    return [(p / efficiency, m) for p, m in raw]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Errors by source and over all, for time, memory and the roofline; skipped rows by reason; and of the runs that
    went out of memory, how many are predicted to."""
    timed = [i for i, r in enumerate(results) if r.roofline_step_s and r.measured_step_s]
    scaled = dict(zip(timed, roofline_pairs(results), strict=True))

    def group(members: Sequence[int]) -> dict[str, Any]:
        rows = [results[i] for i in members]
        allocated = [r for r in rows if "alloc" in r.mem_kind]
        burst = [r for r in rows if r.mem_kind == "OOM" and not r.skipped]
        found = {
            "step_time": errors(time_pairs(rows)),
            "roofline": errors([scaled[i] for i in members if i in scaled]),
            "memory": errors(memory_pairs(rows)),
            "memory_allocated": errors(memory_pairs(allocated)),
        }
        return {
            **{name: None if one is None else asdict(one) for name, one in found.items()},
            "skipped": dict(Counter(r.skipped for r in rows if r.skipped)),
            "out_of_memory": {
                "measured": len(burst),
                "predicted": sum((r.predicted_mem_gib or 0.0) > r.card_gib for r in burst),
            },
        }

    families: dict[str, list[int]] = {}
    for i, r in enumerate(results):
        families.setdefault(r.family, []).append(i)
    return {
        "all": group(range(len(results))),
        "families": {family: group(members) for family, members in families.items()},
    }


def print_table(results: Sequence[Result]) -> None:
    """Every row, then every source."""
    for r in results:
        time = _words("step", r.predicted_step_s, r.measured_step_s, " s")
        memory = _words("memory", r.predicted_mem_gib if r.mem_kind else None, r.measured_mem_gib, " GiB")
        print(f"{r.id}: " + (f"skipped ({r.skipped})" if r.skipped else f"{time}{memory} {r.mem_kind}"))
    whole = summary(results)
    print("\n| source | what | rows | median | p90 | bias | worst under | Spearman |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for family, group in {**whole["families"], "all": whole["all"]}.items():
        for what in ("step_time", "roofline", "memory", "memory_allocated"):
            if one := group[what]:
                print(f"| {family} | {what} | {_cells(**one)} |")
        for reason, count in group["skipped"].items():
            print(f"| {family} | skipped: {reason} | {count} | | | | | |")


def _cells(count: int, median: float, p90: float, bias: float, worst_under: float, spearman: float | None) -> str:
    rank = "" if spearman is None else f"{spearman:.3f}"
    return f"{count} | {median:.1%} | {p90:.1%} | {bias:+.1%} | {worst_under:.1%} | {rank}"


def _words(what: str, predicted: float | None, measured: float | None, unit: str) -> str:
    if predicted is None:
        return ""
    if measured is None:
        return f" {what} {predicted:.4g}{unit}"
    return f" {what} {predicted:.4g}{unit}, measured {measured:.4g} ({predicted / measured - 1:+.1%})"


def _progress() -> Callable[[str], None]:
    """Says which row is at work, where somebody watches."""
    if os.environ.get("CI") or not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Read the files, predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="CSV of training runs")
    parser.add_argument("--golden", type=Path, help="CSV of exact peaks of small models")
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    given = parser.parse_args(arguments)
    runs = [*read_runs(given.runs), *(read_golden(given.golden) if given.golden else ())]
    say, done = _progress(), dict[int, Result]()
    # Rows of equal shapes stand together, so that what is traced once serves them all.
    order = sorted(range(len(runs)), key=lambda i: repr(laid_out(runs[i])))
    gc.disable()  # it would walk all graphs time and again, and take as long as tracing them
    for count, i in enumerate(order):
        say(f"{count + 1} of {len(runs)}: {runs[i].id}")
        done[i] = result_of(runs[i])
        if count % _ROWS_BETWEEN_COLLECTIONS == 0:
            gc.collect()
    results = [done[i] for i in range(len(runs))]
    print_table(results)
    text = json.dumps({"rows": [asdict(r) for r in results], "summary": summary(results)}, indent=1)
    given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
