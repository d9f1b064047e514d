"""`auto` beside every named strategy on an emulated cluster: step times as predicted and as measured.

    python -m benchmarks.auto_steps --netlab PATH/netlab --rate 100mbit --settings wide,narrow:47 --out TABLE.md

`netlab` is a tool that joins network namespaces by rate-limited links (needs root).  A setting is a shape of
`benchmarks.step`, and after a colon auto's memory budget in MiB.  Strategies take turns, in an order that is reversed
every other turn, so that a change in the machine's load meets all.  Plans are priced for the links' rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.compare_steps import run_in_netlab

STRATEGIES = "auto,replicate,ddp,zero1,zero2,zero3,tp,tp_sp"
HEADER = (
    "| shape | budget | strategy | predicted s | measured s (min–max) | measured / predicted | peak, predicted MiB "
    "| loss |\n|---|---|---|---|---|---|---|---|"
)


def run_setting(arguments: argparse.Namespace, shape: str, budget_mib: str) -> dict[str, list[dict[str, Any]]]:
    """Every strategy's JSON lines, one for each turn."""
    cluster = f"{arguments.hosts}x{arguments.ranks_per_host} cpu @ {arguments.rate}"
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    strategies = arguments.strategies.split(",")
    for turn in range(arguments.turns):
        order = strategies if turn % 2 == 0 else strategies[::-1]
        program = ["-m", "benchmarks.step", "--strategy", ",".join(order), "--shape", shape, "--cluster", cluster,
                   "--steps", str(arguments.steps), "--warmup", "1"]  # fmt: skip
        if budget_mib:
            program += ["--mem-gb", str(float(budget_mib) / 1024)]
        for line in run_in_netlab(arguments, arguments.rate, program):
            lines[line["strategy"]].append(line)
            print(shape, turn, line["strategy"], line["plan"]["step_time_s"], line["median_s"], flush=True)
    return lines


def rows(shape: str, budget_mib: str, lines: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table's rows of one setting, the fastest first."""
    table = []
    for strategy, turns in lines.items():
        plan, times = turns[0]["plan"], [line["median_s"] for line in turns]
        measured_s, predicted_s = statistics.median(times), plan["step_time_s"]
        name = strategy if strategy != "auto" else f"**auto** ({plan['strategy']} on {plan['mesh']})"
        peak_mib = plan["peak_bytes"] / 2**20
        over = budget_mib and peak_mib > float(budget_mib)
        cells = [
            shape, budget_mib and f"{budget_mib} MiB", name, f"{predicted_s:.3f}",
            f"{measured_s:.3f} ({min(times):.3f}–{max(times):.3f})", f"{measured_s / predicted_s:.2f}",
            f"{peak_mib:.1f}{' (over)' if over else ''}", f"{turns[0]['losses'][-1]:.6f}",
        ]  # fmt: skip
        table.append((measured_s, "| " + " | ".join(cells) + " |"))
    return [row for _, row in sorted(table)]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.auto_steps", description=__doc__, formatter_class=raw)
    parser.add_argument("--netlab", required=True)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--settings", default="wide,narrow:47")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, metavar="TABLE.md")
    arguments = parser.parse_args()
    table, every = [HEADER], []
    for setting in arguments.settings.split(","):
        shape, _, budget_mib = setting.partition(":")
        lines = run_setting(arguments, shape, budget_mib)
        table += rows(shape, budget_mib, lines)
        every += [line for turns in lines.values() for line in turns]
        arguments.out.write_text("\n".join(table) + "\n")  # after every setting, so that a failure loses nothing
        arguments.out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in every))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
