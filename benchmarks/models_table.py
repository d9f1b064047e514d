"""Write the table of models from the results of `benchmarks.zoo` and `benchmarks.coverage`.

    python -m benchmarks.models_table --zoo-json ROWS.json[,ROWS.json] --coverage-json OUT.json [--zoo FILE.py] \
        [--note TEXT] --out docs/models.md

Of several rows for one model, strategy and mesh the last counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.zoo import STRATEGIES, TOLERANCE

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# Models

Written by `python -m benchmarks.models_table` from what these gave:

{commands}
    python -m benchmarks.coverage --zoo {zoo} --strategies {covered} --json OUT.json

Each model is small, with random weights, in train mode with its loss; dropout is off. All ranks run in one process in
float64 and are compared with the unmodified module on one device: the largest error of loss, outputs, every gradient
and buffer, relative to the largest entry of its tensor. Beside it the share of the FLOPs of products, convolutions and
attention that is divided over the ranks. At most {tolerance:.0e} is equal: **{num_ok} of {num_rows}** are,
{num_refused} are refused with the reason below, {num_wrong} are not equal.

{steps}
Seconds are those of one core of a busy machine: tracing to one graph and normalising it, and rewriting it for one plan,
the slower of {covered}.  `auto` on models as small as these is often `replicate` (0 %).  Empty cells were not run.
"""

STEPS = """After {steps} steps of AdamW all is compared again, with every parameter; the errors are the largest of both.
"""


def table(rows: list[dict[str, Any]], coverage: list[dict[str, Any]], zoo: str = "zoo.py", note: str = "") -> str:
    """The page's text.

    Args:
        rows: of `benchmarks.zoo`.
        coverage: of `benchmarks.coverage`.
        zoo: the registry file that both were run on.
        note: of which state of the code the rows are, if not all of one.
    """
    last = {(row["model"], row["strategy"], row["mesh"]): row for row in rows}
    models = list(dict.fromkeys(key[0] for key in last))
    order = {name: i for i, name in enumerate(STRATEGIES.split(","))}
    columns = sorted({key[1:] for key in last}, key=lambda column: (column[1], order.get(column[0], -1), column[0]))
    timed = {entry["model"]: entry for entry in coverage}
    covered = list(dict.fromkeys(r["strategy"] for entry in coverage for r in entry["strategies"]))
    results = [_verdict(row) for row in last.values()]
    counts = {word: results.count(word) for word in ("equal", "refused")}
    lines = [
        HEAD.format(
            commands="\n".join(_commands(columns, zoo)), zoo=zoo, covered=",".join(covered), tolerance=TOLERANCE,
            num_ok=counts["equal"], num_rows=len(results), num_refused=counts["refused"],
            num_wrong=len(results) - sum(counts.values()), steps=_steps(last.values()),
        ),
        "| model | " + " | ".join(map(" ".join, columns)) + " | nodes | trace s | rewrite s |",
        "|---|" + "---|" * (len(columns) + 3),
    ]  # fmt: skip
    for model in models:
        cells = [_cell(last.get((model, *column))) for column in columns]
        lines.append(f"| {model} | {' | '.join([*cells, *_times(timed.get(model))])} |")
    notes = [note, ""] if note else []
    return "\n".join([*lines, "", *notes, *_dominating(coverage), *_reasons(last.values())]) + "\n"


def _commands(columns: list[tuple[str, str]], zoo: str) -> list[str]:
    """How the rows came about: a command for each mesh."""
    strategies: dict[str, list[str]] = {}
    for strategy, mesh in columns:
        strategies.setdefault(mesh, []).append(strategy)
    return [
        f"    python -m benchmarks.zoo --zoo {zoo} --strategies {','.join(names)} --mesh {mesh} --json ROWS.json"
        for mesh, names in strategies.items()
    ]


def _steps(rows: Iterable[dict[str, Any]]) -> str:
    """What was compared after steps of an optimizer, if all rows agree on that."""
    counts = {row.get("steps", 0) for row in rows}
    return STEPS.format(steps=counts.pop()) if len(counts) == 1 and 0 not in counts else ""


def _verdict(row: dict[str, Any]) -> str:
    return "equal" if row["ok"] else "refused" if row["refused"] else "wrong"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["max_rel_err"] is None:
        return _verdict(row)
    share = f"{row['max_rel_err']:.0e}, {100 * row['sharded_flops_fraction']:.0f} %"
    return share if row["ok"] else f"**{share}**"


def _times(entry: dict[str, Any] | None) -> list[str]:
    if entry is None or not entry["strategies"]:
        return ["", "", ""]
    rewrite = max(result["rewrite_s"] for result in entry["strategies"])
    return [str(entry["nodes"]), f"{entry['trace_s'] + entry['normalise_s']:.1f}", f"{rewrite:.1f}"]


def _dominating(coverage: list[dict[str, Any]]) -> list[str]:
    """Which stage takes the time, over all models and in the slowest."""
    done = [entry for entry in coverage if entry["strategies"]]
    if not done:
        return []
    stages = {"tracing": [e["trace_s"] for e in done], "normalising": [e["normalise_s"] for e in done]}
    for i, strategy in enumerate(result["strategy"] for result in done[0]["strategies"]):
        results = [entry["strategies"][i] for entry in done]
        stages[f"planning and rewriting `{strategy}`"] = [r["plan_s"] + r["rewrite_s"] for r in results]
    totals = [sum(parts) for parts in zip(*stages.values(), strict=True)]
    slowest = max(range(len(done)), key=totals.__getitem__)
    most = max(stages, key=lambda name: sum(stages[name]))
    shares = ", ".join(f"{name} {100 * sum(times) / sum(totals):.0f} %" for name, times in stages.items())
    return [
        f"Of the time of all models together: {shares}; {most} dominates. The slowest is {done[slowest]['model']} with "
        f"{totals[slowest]:.0f} s for all of this.",
        "",
    ]


def _reasons(rows: Any) -> list[str]:
    """Why a row is not equal, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["error"]:
            text = re.sub(r"\S*/site-packages/", "", " ".join(row["error"].partition(": ")[2].split()))
            text = text.replace(f"{ROOT}/", "")
            reasons.setdefault((row["model"], text), []).append(row["strategy"])
    return [
        f"* `{model}` ({', '.join(dict.fromkeys(strategies))}): {text}" for (model, text), strategies in reasons.items()
    ]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.models_table", description=__doc__, formatter_class=raw)
    parser.add_argument("--zoo-json", required=True, metavar="ROWS.json[,ROWS.json]")
    parser.add_argument("--coverage-json", type=Path, required=True, metavar="OUT.json")
    parser.add_argument("--zoo", default="zoo.py", metavar="FILE.py", help="the registry that the rows are of")
    parser.add_argument("--note", default="", metavar="TEXT", help="of which state of the code the rows are")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.md")
    arguments = parser.parse_args()
    rows = [row for path in arguments.zoo_json.split(",") for row in json.loads(Path(path).read_text())]
    arguments.out.write_text(
        table(rows, json.loads(arguments.coverage_json.read_text()), arguments.zoo, arguments.note)
    )


if __name__ == "__main__":
    main()
