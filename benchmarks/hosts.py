"""Correctness and a fault across hosts: the same program on ranks that only a network joins.

    python -m benchmarks.hosts --netlab PATH/netlab --out docs/benchmarks/hosts.md

`netlab` is a tool that joins network namespaces by rate-limited links (needs root).  Two hosts of two ranks train with
every strategy in float64 beside the single device; two hosts of one rank go on from a checkpoint of the four; and a
host's link is cut in the middle of a step, after which the run is started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.netlab import Hosts

ROOT = Path(__file__).resolve().parents[1]
MESHES = {"hsdp": "2x2", "fsdp+tp": "2x2"}
STRATEGIES = "ddp,zero1,zero2,zero3,hsdp,tp,tp+sp,fsdp+tp,auto"
STEPS, SAVED_AT, CUT_AT = 6, 2, 4
HEADER = (
    "| strategy | mesh | steps | largest difference of a loss | largest difference of a parameter |\n"
    + "|---" * 5
    + "|"
)


def run(arguments: argparse.Namespace, ranks_per_host: int, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the ranks on emulated hosts; returns the exit status and their lines."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "lines.jsonl"
        hosts = Hosts(arguments.netlab, arguments.hosts, ranks_per_host, arguments.rate, arguments.rt)
        program = ["-m", "benchmarks.hosts_rank", "--steps", str(STEPS), "--out", str(out), *flags]
        command = hosts.command(program, "--timeout", "900", "--grace", "60")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if not lines:
            raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")
        return done.returncode, lines


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs.

    Raises:
        RuntimeError: if a run that should have finished failed.
    """
    ranks = arguments.hosts * arguments.ranks_per_host
    wanted = ",".join(f"{name}:{MESHES.get(name, ranks)}" for name in arguments.strategies.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = ["--checkpoint", f"{scratch}/checkpoint"]
        found = {"equal": finished(run(arguments, arguments.ranks_per_host, "--strategies", wanted))}
        cut = ["--cut-at", str(CUT_AT), "--save-at", str(SAVED_AT), "--timeout-s", str(arguments.timeout_s)]
        zero3 = ["--strategies", f"zero3:{ranks}", *checkpoint]
        status, found["cut"] = run(arguments, arguments.ranks_per_host, *zero3, *cut)
        if status == 0 or not any("cut_at" in line for line in found["cut"]):
            raise RuntimeError(f"a rank was to fail after the link was cut: exit status {status}, {found['cut']}")
        other = ["--strategies", f"tp:{arguments.hosts}", *checkpoint]
        found["fewer"] = finished(run(arguments, 1, *other))
        found["again"] = finished(run(arguments, arguments.ranks_per_host, *zero3))
    return found


def finished(result: tuple[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines of a run that must not fail."""
    status, lines = result
    if status:
        raise RuntimeError(f"exit status {status}: {lines}")
    return lines


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> str:
    """The page."""
    shown = f"--hosts {arguments.hosts} --ranks-per-host {arguments.ranks_per_host} --rate {arguments.rate}"
    (fewer,), (again,) = found["fewer"], found["again"]
    (cut_at,) = (line["cut_at"] for line in found["cut"] if "cut_at" in line)
    failed = sorted((line for line in found["cut"] if "rank" in line), key=lambda line: line["rank"])
    text = [
        "# Across hosts", "",
        f"    python -m benchmarks.hosts --netlab netlab {shown} --timeout-s {arguments.timeout_s:g}"
        + (" --rt" if arguments.rt else ""), "",
        f"{arguments.hosts} hosts of {arguments.ranks_per_host} ranks in network namespaces, joined by links of "
        f"{arguments.rate}; gloo; a transformer in float64,", f"{STEPS} steps of AdamW, beside the single device.", "",
        HEADER, *map(row, found["equal"]), "",
        "## Fewer ranks go on", "",
        f"A checkpoint of step {fewer['first']}, saved by {again['ranks']} ranks under zero3, loaded by "
        f"{fewer['ranks']} ranks on {arguments.hosts} hosts under another strategy:", "",
        HEADER, row(fewer), "",
        "## A link is cut in the middle of a step", "",
        f"The last host's link goes down in step {CUT_AT} of zero3; the process group's timeout is "
        f"{arguments.timeout_s:g} s.", "",
        "| rank | raised after | what it says |", "|---|---|---|",
        *(f"| {line['rank']} | {line['failed_at'] - cut_at:.1f} s | {cell(line['error'])} |" for line in failed), "",
        f"Started again, all ranks go on from the checkpoint of step {again['first']}:", "", HEADER, row(again), "",
    ]  # fmt: skip
    return "\n".join(text)


def row(line: dict[str, Any]) -> str:
    """A strategy beside the single device."""
    steps = f"{line['first']} to {line['first'] + len(line['losses'])}"
    cells = [
        line["strategy"],
        line["mesh"],
        steps,
        f"{line['loss_difference']:.0e}",
        f"{line['parameter_difference']:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"


def cell(text: str) -> str:
    """One line that cannot end its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.hosts", description=__doc__, formatter_class=raw)
    parser.add_argument("--netlab", required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rt", action="store_true", help="real-time priority, where others use the CPUs too")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--timeout-s", type=float, default=20.0, help="of the process group, where the link is cut")
    parser.add_argument("--out", type=Path, required=True, metavar="TABLE.md")
    arguments = parser.parse_args()
    found = measure(arguments)
    arguments.out.write_text(report(arguments, found))
    arguments.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
