"""Which ops of a set of models run whole on every rank, what share of the work that is, and how long rewriting takes.

    python -m benchmarks.coverage --zoo FILE.py [--only NAME,NAME] [--strategies ddp,tp] [--mesh 4] --json OUT

FILE.py is as for `benchmarks.zoo`.  Each model is traced and rewritten under each strategy; nothing is run.  OUT is a
list of

    {"model", "nodes", "trace_s", "normalise_s", "strategies": [{"strategy", "mesh", "plan_s", "rewrite_s",
     "whole_flops_fraction", "whole": [{"op", "calls", "has_rule", "flops_fraction", "traffic_fraction"}]}], "error"}

An op runs whole if no mesh axis cuts it and it passes on no unreduced sum.  FLOPs are those of products, convolutions
and attention; traffic is the bytes that ops read and write, of the whole step in the global view.
"""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from autopar.cost_model.ops import node_bytes, node_flops, op_name
from autopar.errors import AutoparError
from autopar.graph import JointGraph
from autopar.mesh import parse_shape
from autopar.normalise import normalise
from autopar.passes.pipeline import rewrite
from autopar.passes.reshard import is_reshard
from autopar.placement import Replicate
from autopar.planner import plan_named
from autopar.randomness import replace_random_ops
from autopar.trace import trace
from benchmarks.zoo import WithLoss, chosen_models, describe, switch_off_dropout, zoo_parser


def measure(entry: Any, strategies: list[str], mesh: str, batch: int) -> dict[str, Any]:
    """One entry of the result: a model traced once and rewritten under each strategy."""
    row: dict[str, Any] = {"model": entry.name, "strategies": [], "error": None}
    model = entry.build()
    switch_off_dropout(model)
    args, kwargs = entry.make_batch(batch, 0)
    start = time.perf_counter()
    try:
        joint = trace(WithLoss(model, entry.loss_fn), args, kwargs, opaque=True)
        row["trace_s"] = _seconds_since(start)
        start = time.perf_counter()
        joint = replace_random_ops(normalise(joint))
        row["normalise_s"] = _seconds_since(start)
        row["nodes"] = len(joint.module.graph.nodes)
        for strategy in strategies:
            row["strategies"].append(_rewritten(joint, strategy, mesh))
    except AutoparError as error:
        row["error"] = describe(error)
    return row


def _rewritten(joint: JointGraph, strategy: str, mesh: str) -> dict[str, Any]:
    start = time.perf_counter()
    sizes = parse_shape(mesh)
    plan = plan_named(strategy, joint, sizes, sizes[-1])
    row: dict[str, Any] = {"strategy": strategy, "mesh": mesh, "plan_s": _seconds_since(start)}
    found: dict[str, Any] = {}

    def look(name: str, module: fx.GraphModule) -> None:
        if name == "insert_reshards":
            found.update(whole_ops(module.graph))

    start = time.perf_counter()
    rewrite(joint, plan, look)
    row["rewrite_s"] = _seconds_since(start)
    return {**row, **found}


def whole_ops(graph: fx.Graph) -> dict[str, Any]:
    """What runs whole in a graph whose values are global and whose nodes know how they are cut."""
    calls = [n for n in graph.nodes if n.op == "call_function" and op_name(n) and not is_reshard(n)]
    flops, traffic = ({node: count(node) for node in calls} for count in (node_flops, node_bytes))
    all_flops, all_traffic = (max(1, sum(counts.values())) for counts in (flops, traffic))
    whole = [n for n in calls if _runs_whole(n) and (flops[n] or traffic[n])]
    by_op: dict[str, list[fx.Node]] = {}
    for node in whole:
        by_op.setdefault(op_name(node), []).append(node)
    listed = [
        {
            "op": name,
            "calls": len(nodes),
            "has_rule": all(n.meta["rule"] is not None for n in nodes),
            "flops_fraction": sum(flops[n] for n in nodes) / all_flops,
            "traffic_fraction": sum(traffic[n] for n in nodes) / all_traffic,
        }
        for name, nodes in by_op.items()
    ]
    listed.sort(key=lambda entry: (entry["flops_fraction"], entry["traffic_fraction"]), reverse=True)
    return {"whole_flops_fraction": sum(flops[n] for n in whole) / all_flops, "whole": listed}


def _runs_whole(node: fx.Node) -> bool:
    shardings = node.meta["sharding"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["sharding"],)
    lies_whole = all(isinstance(p, Replicate) for sharding in shardings for p in sharding)
    return lies_whole and not any(node.meta.get("cuts") or ())


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 3)


def print_summary(rows: list[dict[str, Any]], console: Console) -> None:
    """The ops without a rule, and those that run whole for the largest share of a model's work."""
    lacking: Counter[str] = Counter()
    worst: dict[tuple[str, str], tuple[float, float, str]] = {}
    for row in rows:
        for result in row["strategies"]:
            for entry in result["whole"]:
                if not entry["has_rule"]:
                    lacking[entry["op"]] += entry["calls"]
                key, share = (result["strategy"], entry["op"]), (entry["flops_fraction"], entry["traffic_fraction"])
                worst[key] = max(worst.get(key, (0.0, 0.0, "")), (*share, row["model"]))
    console.print("without a rule: " + (", ".join(f"{op} ({n})" for op, n in lacking.most_common()) or "none"))
    table = Table("strategy", "op", "FLOPs", "traffic", "in", title="run whole, in the model where that is most work")
    for (strategy, op), (flops, traffic, model) in sorted(worst.items(), key=lambda item: item[1], reverse=True)[:40]:
        table.add_row(strategy, op, f"{100 * flops:.1f}%", f"{100 * traffic:.1f}%", model)
    console.print(table)


def main() -> None:
    parser = zoo_parser("coverage", __doc__, "ddp,tp")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    models = chosen_models(parser, arguments)
    rows: list[dict[str, Any]] = []
    for name, entry in models.items():
        rows.append(measure(entry, arguments.strategies.split(","), arguments.mesh, arguments.batch))
        shares = ", ".join(f"{r['strategy']} {100 * r['whole_flops_fraction']:.1f}%" for r in rows[-1]["strategies"])
        print(f"{name}: FLOPs run whole: {shares or rows[-1]['error'][:100]}", flush=True)
        if arguments.json:  # after every model, so that nothing is lost if the process dies
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
    print_summary(rows, Console())


if __name__ == "__main__":
    main()
