"""How long planning takes, from a model on the meta device to the plan, in one process on one core.

    python -m benchmarks.planning --model NAME --cluster SPEC [--batch N] [--seq N] [--layers N] [--mesh SHAPE]
        [--mem-gb N] [--full-trace] --json OUT

NAME is what `autopar plan` takes: a built-in shape, a directory with a Hugging Face config, `module:factory`.
Importing libraries and building the module are not counted.  OUT is

    {"model", "cluster", "phases_s": {"trace", "search", "report"}, "total_s", "cpu_s", "peak_rss_gib", "num_variables",
     "gap", "num_nodes", "predicted_step_s", "predicted_peak_gib"}

`num_variables` is the number of regions that take an option each, times the options, times the layouts; `gap` is how
much longer the step takes than the least computing of any plan that was simulated, which is a bound that no collective
enters.
`num_nodes` is of the graph that is planned on.  With `--full-trace`, "full_trace" has the seconds that tracing every
layer takes, to compare with.

    python -m benchmarks.planning --sweep layers|axes|ranks --json OUT [--svg FILE]

times one model against its layers, the axes of its mesh, or the number of ranks, and draws what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.api import split_call
from autopar.cluster import Cluster, budget_bytes
from autopar.compiler import Compiler
from autopar.layout_search import OPTIONS
from autopar.layouts import find_layouts
from autopar.mesh import parse_shape
from autopar.models import find_model
from autopar.regions import find_regions
from autopar.trace import trace

GIB = 2**30

SWEEPS: dict[str, list[list[str]]] = {
    "layers": [["--model", "llama3-8b", "--cluster", "8x8 H100-80GB", "--layers", str(n)] for n in (2, 8, 32, 128)],
    "axes": [["--model", "llama3-8b", "--cluster", "8x8 H100-80GB", "--mesh", m] for m in ("64", "8x8", "4x4x4")],
    "ranks": [
        ["--model", "llama3-8b", "--cluster", cluster]
        for cluster in ("2 H100-80GB", "8 H100-80GB", "8x8 H100-80GB", "128x8 H100-80GB", "2048x8 H100-80GB")
    ],
}


def plan_once(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, with the seconds of each phase."""
    cluster = Cluster.parse(args.cluster)
    mesh = (cluster.num_nodes, cluster.ranks_per_node) if cluster.num_nodes > 1 else (cluster.num_ranks,)
    sizes = parse_shape(args.mesh) if args.mesh else mesh
    call = find_model(
        args.model, cluster.num_ranks, batch=args.batch, seq=args.seq, dtype=torch.bfloat16, num_layers=args.layers
    )
    inputs, kwargs = split_call(call.example_inputs)
    start, cpu = time.perf_counter(), time.process_time()
    compiler = Compiler(call.model, sizes, cluster, args.mem_gb)
    whole = compiler.trace(inputs, kwargs, train=True)
    joint = compiler.trace(inputs, kwargs, train=True, whole=False)  # kept from before
    traced = time.perf_counter()
    candidates = compiler.candidates(joint, budget_bytes(args.mem_gb, cluster))
    searched = time.perf_counter()
    plan = compiler.plan(whole)
    done, cpu_s = time.perf_counter(), time.process_time() - cpu
    layouts = find_layouts(joint, sizes, cluster.ranks_per_node)
    assert plan.report is not None
    row = {
        "model": args.model,
        "cluster": args.cluster,
        "mesh": str(plan.mesh),
        "strategy": plan.strategy,
        "layers": args.layers,
        "ranks": cluster.num_ranks,
        "phases_s": {"trace": traced - start, "search": searched - traced, "report": done - searched},
        "total_s": done - start,
        "cpu_s": cpu_s,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "num_variables": len(find_regions(joint)) * len(OPTIONS) * len(layouts),
        "num_simulated": len({id(p.simulation) for p in candidates}),
        "gap": plan.step_time_s / plan.report.bound_s - 1,
        "num_nodes": len(joint.module.graph.nodes),
        "predicted_step_s": plan.step_time_s,
        "predicted_peak_gib": plan.peak_bytes / GIB,
    }
    if args.full_trace:
        start = time.perf_counter()
        trace(call.model, inputs, kwargs, num_ranks=cluster.num_ranks)
        row["full_trace"] = time.perf_counter() - start
    return row


def sweep(name: str, out: Path) -> list[dict[str, Any]]:
    """One cold process for each point."""
    rows = []
    for arguments in SWEEPS[name]:
        part = out.with_suffix(".part.json")
        command = [sys.executable, "-m", "benchmarks.planning", *arguments, "--json", str(part)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows.append({**json.loads(part.read_text()), "arguments": arguments})
        part.unlink()
    return rows


def draw(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of each point as bars, in SVG."""
    longest = max(row["cpu_s"] for row in rows)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{40 + 28 * len(rows)}" font-size="13">']
    lines.append(f'<text x="8" y="20">CPU seconds of planning Llama-3 8B, by {name}</text>')
    for i, row in enumerate(rows):
        y, width = 34 + 28 * i, 380 * row["cpu_s"] / longest
        lines.append(f'<text x="8" y="{y + 14}">{row["arguments"][-1]}</text>')
        lines.append(f'<rect x="150" y="{y}" width="{width:.0f}" height="18" fill="#4477aa"/>')
        lines.append(f'<text x="{156 + width:.0f}" y="{y + 14}">{row["cpu_s"]:.1f} s</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--cluster")
    parser.add_argument("--mesh")
    for name in ("batch", "seq", "layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mem-gb", type=float)
    parser.add_argument("--full-trace", action="store_true")
    parser.add_argument("--sweep", choices=SWEEPS)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.sweep:
        rows = sweep(args.sweep, args.json)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
        if args.svg:
            args.svg.write_text(draw(args.sweep, rows))
        return
    if args.model is None or args.cluster is None:
        parser.error("--model and --cluster are needed, or --sweep")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row = plan_once(args)
    args.json.write_text(json.dumps(row, indent=1) + "\n")
    print(f"{args.model} on {args.cluster}: {row['total_s']:.1f} s ({row['cpu_s']:.1f} s of CPU), {row['phases_s']}")


if __name__ == "__main__":
    main()
