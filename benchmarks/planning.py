"""How long planning takes, from a model on the meta device to the plan, in one process on one core.

    python -m benchmarks.planning --model NAME --cluster SPEC [--batch N] [--seq N] [--layers N] [--mesh SHAPE]
        [--mem-gb N] [--full-trace] --json OUT

NAME is what `autopar plan` takes: a built-in shape, a directory with a Hugging Face config, `module:factory`.
Importing libraries and building the module are not counted.  OUT is

    {"model", "cluster", "phases_s": {"trace", "search", "report"}, "phases_cpu_s", "total_s", "cpu_s", "peak_rss_gib",
     "num_variables", "gap", "num_nodes", "predicted_step_s", "predicted_peak_gib"}

`num_variables` is the number of regions that take an option each, times the options, times the layouts; `gap` is how
much longer the step takes than the least computing of any plan that was simulated, which is a bound that no collective
enters.
`num_nodes` is of the graph that is planned on.  With `--full-trace`, "full_trace" has the seconds that tracing every
layer takes, to compare with.

    python -m benchmarks.planning --sweep layers|axes|ranks|all [--repeat N] --json OUT [--svg DIRECTORY]

times one model against its layers, the axes of its mesh, or the number of ranks, each point in a cold process, or the
fastest of N, and draws what came out.
"""

from __future__ import annotations

import argparse
import itertools
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

from autopar._compat import load_tracer
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

SWEPT = ["--model", "llama3-8b", "--cluster", "8x8 H100-80GB"]
"""What a sweep changes in one respect."""

SWEEPS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "layers": (
        "layers, on 8x8 H100-80GB",
        {"2": ["--layers", "2"], "8": ["--layers", "8"], "32": [], "128": ["--layers", "128"]},
    ),
    "axes": ("shape of the mesh of 64 ranks", {"64": ["--mesh", "64"], "8x8": [], "4x4x4": ["--mesh", "4x4x4"]}),
    "ranks": (
        "ranks (H100-80GB, 8 a node)",
        {
            "2": ["--cluster", "2 H100-80GB"], "8": ["--cluster", "8 H100-80GB"], "64": [],
            "1024": ["--cluster", "128x8 H100-80GB"], "16384": ["--cluster", "2048x8 H100-80GB"],
        },
    ),
}  # fmt: skip
"""For each sweep what is varied, and the points: a label, and what is added to the arguments."""

PHASES = {"trace": "#4477aa", "search": "#ee6677", "report": "#ccbb44"}
"""The phases of planning, each with its colour."""


def plan_once(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, with the seconds of each phase."""
    cluster = Cluster.parse(args.cluster)
    mesh = (cluster.num_nodes, cluster.ranks_per_node) if cluster.num_nodes > 1 else (cluster.num_ranks,)
    sizes = parse_shape(args.mesh) if args.mesh else mesh
    call = find_model(
        args.model, cluster.num_ranks, batch=args.batch, seq=args.seq, dtype=torch.bfloat16, num_layers=args.layers
    )
    inputs, kwargs = split_call(call.example_inputs)
    load_tracer()
    moments = [(time.perf_counter(), time.process_time())]
    compiler = Compiler(call.model, sizes, cluster, args.mem_gb)
    joint = compiler.trace(inputs, kwargs, train=True, whole=False)
    moments.append((time.perf_counter(), time.process_time()))
    candidates = compiler.candidates(joint, budget_bytes(args.mem_gb, cluster))
    moments.append((time.perf_counter(), time.process_time()))
    plan = compiler.plan(joint)
    moments.append((time.perf_counter(), time.process_time()))
    wall_s, cpu_s = (
        [after - before for before, after in itertools.pairwise(clock)] for clock in zip(*moments, strict=True)
    )
    layouts = find_layouts(joint, sizes, cluster.ranks_per_node)
    assert plan.report is not None
    row = {
        "model": args.model,
        "cluster": args.cluster,
        "mesh": str(plan.mesh),
        "strategy": plan.strategy,
        "layers": args.layers,
        "ranks": cluster.num_ranks,
        "phases_s": dict(zip(PHASES, wall_s, strict=True)),
        "phases_cpu_s": dict(zip(PHASES, cpu_s, strict=True)),
        "total_s": sum(wall_s),
        "cpu_s": sum(cpu_s),
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


def sweep(names: Sequence[str], out: Path, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """For each sweep its points, each the one of `repeat` cold processes that takes the least CPU time; a point that
    occurs in several sweeps is timed once."""
    timed: dict[tuple[str, ...], dict[str, Any]] = {}
    part = out.with_suffix(".part.json")
    points = {tuple(extra): extra for name in names for extra in SWEEPS[name][1].values()}
    for _ in range(repeat):  # all points in turn, since a machine may be slower for a while
        for point, extra in points.items():
            command = [sys.executable, "-m", "benchmarks.planning", *SWEPT, *extra, "--json", str(part)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            row = json.loads(part.read_text())
            timed[point] = min(row, timed.get(point, row), key=lambda one: one["cpu_s"])
            part.unlink()
    return {name: [{"point": label, **timed[tuple(e)]} for label, e in SWEEPS[name][1].items()] for name in names}


def draw(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """CPU seconds of each point as a bar of its phases over an axis, in SVG."""
    most = max(row["cpu_s"] for row in rows)
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if most / step <= 8)
    num_steps = int(most / step) + 1
    left, top, width, height = 110, 56, 500, 26 * len(rows)
    scale, bottom = width / (num_steps * step), top + height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{bottom + 48}" font-size="13"'
        ' font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20">Planning Llama-3 8B, by {SWEEPS[name][0]}</text>',
    ]
    for i, (phase, colour) in enumerate(PHASES.items()):
        lines.append(f'<rect x="{left + 90 * i}" y="32" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{left + 90 * i + 18}" y="43">{phase}</text>')
    for tick in range(num_steps + 1):
        x = left + scale * step * tick
        lines.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#cccccc"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{step * tick:g}</text>')
    lines.append(f'<text x="{left + width / 2}" y="{bottom + 36}" text-anchor="middle">CPU seconds, one core</text>')
    for i, row in enumerate(rows):
        y, x = top + 26 * i + 4, float(left)
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{row["point"]}</text>')
        for phase, colour in PHASES.items():
            length = scale * row["phases_cpu_s"][phase]
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="18" fill="{colour}"/>')
            x += length
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{row["cpu_s"]:.1f}</text>')
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
    parser.add_argument("--sweep", choices=[*SWEEPS, "all"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.sweep:
        swept = sweep(list(SWEEPS) if args.sweep == "all" else [args.sweep], args.json, args.repeat)
        args.json.write_text(json.dumps(swept, indent=1) + "\n")
        for name, rows in swept.items() if args.svg else ():
            (args.svg / f"planning_{name}.svg").write_text(draw(name, rows))
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
