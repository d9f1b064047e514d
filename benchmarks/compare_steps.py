"""autopar's plans beside PyTorch's own DDP, FSDP2 and tensor parallelism, on an emulated cluster.

    python -m benchmarks.compare_steps --netlab PATH/netlab --baselines PATH/baselines.py --rates 100mbit,none

`netlab` is a tool that joins network namespaces by rate-limited links (needs root), `baselines.py` the step benchmark
of PyTorch's strategies, with the flags and output of `benchmarks.step`.  The two programs take turns, in alternating
order, so that a change in the machine's load meets both.  Writes a table (`--out`) and, beside it, every raw line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.netlab import Hosts

ROOT = Path(__file__).resolve().parents[1]
PAIRS = "ddp:ddp,zero1:zero1,zero2:zero2,fsdp:zero3,tp:tp,tp_sp:tp+sp"
HEADER = (
    "| shape | strategy | PyTorch s | autopar s | time ratio (min–max) | bytes/link PyTorch | bytes/link autopar "
    "| worst link | params | optimizer | loss difference |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
LEGEND = """\
Times are medians over the runs of each run's median step; the ratio is autopar's over PyTorch's of the same turn, its
median and extremes over the turns. Bytes per step are those sent on the busiest link between hosts; *worst link* is the
largest ratio of autopar's bytes to PyTorch's over all links, loopback included, and both directions, where either
sends a thousandth of the busiest link's. *params* and
*optimizer* are bytes on the fullest rank, PyTorch → autopar (one number where they are equal). The loss difference is
the largest over all steps.
"""


@dataclass
class Pair:
    """One comparison: the baseline's strategy, ours, and what both gave in each turn."""

    shape: str
    baseline: str
    ours: str
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    failure: str = ""


def run_in_netlab(arguments: argparse.Namespace, rate: str, program: list[str]) -> list[dict[str, Any]]:
    """Run one benchmark on the emulated hosts and return its JSON lines.

    Raises:
        RuntimeError: if it failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "line.jsonl"
        hosts = Hosts(arguments.netlab, arguments.hosts, arguments.ranks_per_host, rate, real_time=True)
        flags = ["--timeout", "600", "--stream", "all", "--no-prefix"]
        command = hosts.command([*program, "--out", str(out)], *flags)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
        return [json.loads(line) for line in out.read_text().splitlines()]


def compare(arguments: argparse.Namespace, pair: Pair, rate: str) -> None:
    """Let both programs take turns; fills `pair`."""
    flags = ["--shape", pair.shape, "--steps", str(arguments.steps), "--warmup", "2"]
    programs = [
        [str(Path(arguments.baselines).resolve()), "--strategy", pair.baseline, *flags],
        ["-m", "benchmarks.step", "--strategy", pair.ours, *flags],
    ]
    for turn in range(arguments.turns):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        results: dict[int, dict[str, Any]] = {}
        for which in order:
            try:
                (results[which],) = run_in_netlab(arguments, rate, programs[which])
            except RuntimeError as error:
                pair.failure = f"{'autopar' if which else 'PyTorch'}: {error}"
                return
        pair.turns.append((results[0], results[1]))
        ratio = results[1]["median_s"] / results[0]["median_s"]
        print(f"{rate} {pair.shape} {pair.baseline}/{pair.ours} turn {turn}: time ratio {ratio:.3f}", flush=True)


def host_links(result: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Counters of the links between hosts, without each host's loopback."""
    return {name: counters for name, counters in result["bytes_per_step"].items() if not name.endswith(":lo")}


def table_row(pair: Pair) -> str:
    """One line of the Markdown table."""
    label = pair.ours if pair.baseline == pair.ours else f"{pair.baseline} / {pair.ours}"
    if pair.failure:
        return f"| {pair.shape} | {label} | failed |" + " |" * 8
    theirs, ours = ([turn[which] for turn in pair.turns] for which in (0, 1))
    ratios = [b["median_s"] / a["median_s"] for a, b in pair.turns]
    links, our_links = host_links(theirs[0]), host_links(ours[0])
    every, our_every = theirs[0]["bytes_per_step"], ours[0]["bytes_per_step"]
    pairs = [(our_every[link][way], every[link][way]) for link in every for way in ("tx", "rx")]
    counted = max(map(max, pairs)) / 1000
    worst = max(ours / max(theirs, 1) for ours, theirs in pairs if max(ours, theirs) >= counted)
    difference = max(abs(x - y) for a, b in pair.turns for x, y in zip(a["losses"], b["losses"], strict=False))
    cells = [
        pair.shape,
        label,
        f"{statistics.median(r['median_s'] for r in theirs):.3f}",
        f"{statistics.median(r['median_s'] for r in ours):.3f}",
        f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})",
        f"{max(c['tx'] for c in links.values()):,}",
        f"{max(c['tx'] for c in our_links.values()):,}",
        f"{worst:.3f}",
        both(theirs[0], ours[0], "param_bytes_per_rank"),
        both(theirs[0], ours[0], "opt_state_bytes_per_rank"),
        f"{difference:.1e}",
    ]
    return "| " + " | ".join(cells) + " |"


def both(theirs: dict[str, Any], ours: dict[str, Any], key: str) -> str:
    """Two byte counts, or one where they are equal."""
    return f"{theirs[key]:,}" if theirs[key] == ours[key] else f"{theirs[key]:,} → {ours[key]:,}"


def write_report(arguments: argparse.Namespace, pairs: dict[str, list[Pair]]) -> None:
    """Write the table of every rate, and the raw lines."""
    command = (
        f"python -m benchmarks.compare_steps --netlab netlab --baselines baselines.py --hosts {arguments.hosts} "
        f"--ranks-per-host {arguments.ranks_per_host} --rates {arguments.rates} --shapes {arguments.shapes} "
        f"--pairs {arguments.pairs} --steps {arguments.steps} --turns {arguments.turns}"
    )
    text = ["# Step time and bytes on the links, beside PyTorch's own strategies", "", f"    {command}", "", LEGEND]
    for rate, of_rate in pairs.items():
        title = "not throttled" if rate == "none" else f"links of {rate}"
        text += [f"## {arguments.hosts} hosts × {arguments.ranks_per_host}, {title}", "", HEADER]
        text += [*(table_row(pair) for pair in of_rate), ""]
        text += [f"{p.shape} {p.baseline} / {p.ours} failed: {p.failure}\n" for p in of_rate if p.failure]
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(text).rstrip() + "\n")
    with out.with_suffix(".jsonl").open("w") as file:
        for rate, of_rate in pairs.items():
            for pair in of_rate:
                for number, turn in enumerate(pair.turns):
                    for program, result in zip(("baselines", "autopar"), turn, strict=True):
                        file.write(json.dumps({"rate": rate, "turn": number, "program": program, **result}) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.compare_steps", description=__doc__, formatter_class=raw)
    parser.add_argument("--netlab", required=True)
    parser.add_argument("--baselines", required=True)
    parser.add_argument("--pairs", default=PAIRS, help="PyTorch's strategy:autopar's, comma-separated")
    parser.add_argument("--shapes", default="wide,narrow")
    parser.add_argument("--rates", default="100mbit,none")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", default="docs/benchmarks/steps.md")
    arguments = parser.parse_args()
    pairs: dict[str, list[Pair]] = {}
    for rate in arguments.rates.split(","):
        pairs[rate] = []
        for shape in arguments.shapes.split(","):
            for text in arguments.pairs.split(","):
                baseline, _, ours = text.partition(":")
                pairs[rate].append(Pair(shape, baseline, ours or baseline))
                compare(arguments, pairs[rate][-1], rate)
                write_report(arguments, pairs)  # after every pair, so that a later failure loses nothing
    print(Path(arguments.out).read_text())


if __name__ == "__main__":
    main()
