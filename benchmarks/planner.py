"""The planner on a grid of models, clusters and budgets: is it within the budget, and what does it gain?

    python -m benchmarks.planner --json OUT [--only NAME,NAME] [--budgets 12]

Models are few layers of widths that people train, on the meta device, in bfloat16 with AdamW.  Of each model on each
cluster the budgets are peaks of the plans that were simulated, from the smallest to the largest.  OUT is a list of

    {"model", "cluster", "mesh", "budget_bytes", "peak_bytes", "step_time_s", "strategy", "named", "named_s", "speedup"}

`named` is the fastest named strategy that fits the budget, null if none does, and `speedup` its predicted time over
auto's.  Whoever reads the list can check that no peak is over its budget, that more memory is never slower, and that
no speedup is less than one; the command fails if one is.

    python -m benchmarks.planner --gaps --json OUT

compares with brute force instead: models of two blocks, every option of every region in every layout.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.graph import JointGraph
from autopar.layout_search import Priced
from autopar.layouts import MODES, find_layouts, storages
from autopar.mesh import parse_shape
from autopar.plan import RECOMPUTE_LEVELS, Plan
from autopar.regions import find_regions, region_of
from autopar.whole_plan import Split

CLUSTERS = ("4xA100-80GB", "8xH100-80GB", "2x8 A100-80GB @ 400gbit", "2x2 cpu @ 100mbit")


class Loss(nn.Module):
    """A language model of which only the loss is asked for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


@dataclass(frozen=True)
class Case:
    """A model and the tokens of a global batch, in rows for each rank and tokens a row."""

    build: Callable[[], nn.Module]
    rows_per_rank: int
    seq: int


def llama(width: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocab, num_hidden_layers=2, use_cache=False,
    )  # fmt: skip
    return Loss(transformers.LlamaForCausalLM(config))


def gpt2(width: int, heads: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_embd=width, n_head=heads, n_layer=2, vocab_size=50304, use_cache=False)
    return Loss(transformers.GPT2LMHeadModel(config))


CASES = {
    "gpt2": Case(lambda: gpt2(768, 12), 4, 1024),
    "llama-1b": Case(lambda: llama(2048, 8192, 32, 8, 128256), 1, 2048),
    "llama-8b": Case(lambda: llama(4096, 14336, 32, 8, 128256), 1, 4096),
    "llama-30b": Case(lambda: llama(6656, 17920, 52, 52, 32000), 1, 1024),
}


def plan_case(case: Case, description: str, num_budgets: int) -> list[dict[str, Any]]:
    """The rows of one model on one cluster."""
    cluster = Cluster.parse(description)
    sizes = (cluster.num_nodes, cluster.ranks_per_node) if cluster.num_nodes > 1 else (cluster.num_ranks,)
    dtype = torch.float32 if cluster.device.kind == "cpu" else torch.bfloat16
    with torch.device("meta"):
        model = case.build().to(dtype)
        ids = torch.empty(case.rows_per_rank * cluster.num_ranks, case.seq, dtype=torch.long)
    compiler = Compiler(model, sizes, cluster)
    start = time.perf_counter()
    joint = compiler.trace((ids,), {}, train=True, local=False)
    candidates = compiler.candidates(joint)
    print(f"  {len(candidates)} plans in {time.perf_counter() - start:.1f} s", flush=True)
    fits_card = [p for p in candidates if p.simulation.memory.total <= cluster.device.memory_bytes]
    peaks = sorted({p.simulation.memory.total for p in fits_card})
    rows = []
    for i in range(num_budgets if peaks else 0):
        budget = peaks[i * (len(peaks) - 1) // (num_budgets - 1)]
        compiler.mem_gb = budget / 2**30
        plan = compiler.plan(joint)
        assert plan.report is not None
        simulated = [c for c in plan.report.candidates if not c.is_bound]
        named = [c for c in simulated if c.strategy != "auto" and c.peak_bytes <= budget]
        best = min(named, key=lambda c: c.step_time_s, default=None)
        rows.append({
            "budget_bytes": budget, "peak_bytes": plan.peak_bytes, "step_time_s": plan.step_time_s,
            "strategy": plan.strategy, "mesh": str(plan.mesh), "named": best and best.strategy,
            "named_s": best and best.step_time_s, "speedup": best and best.step_time_s / plan.step_time_s,
        })  # fmt: skip
    return rows


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What breaks the planner's promises, for rows of one model and cluster by rising budget."""
    found, fastest_s = [], math.inf
    for row in rows:
        where = f"{row['model']} on {row['cluster']} under {row['budget_bytes']:,} bytes"
        if row["peak_bytes"] > row["budget_bytes"]:
            found.append(f"{where}: over the budget")
        if row["step_time_s"] > fastest_s:
            found.append(f"{where}: slower than with less memory")
        if row["speedup"] is not None and row["speedup"] < 1:
            found.append(f"{where}: slower than {row['named']}")
        fastest_s = min(fastest_s, row["step_time_s"])
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """A line of the table for one model and cluster."""
    gains = [row["speedup"] for row in rows if row["speedup"] is not None]
    only = sum(row["speedup"] is None for row in rows)
    low, high = rows[0], rows[-1]
    gib = [f"{row['budget_bytes'] / 2**30:.2f}" for row in (low, high)]
    mean = f"{math.exp(math.fsum(map(math.log, gains)) / len(gains)):.3f}" if gains else "–"
    cells = [
        low["model"], low["cluster"], str(len(rows)), f"{gib[0]}–{gib[1]}",
        f"{low['step_time_s'] * 1e3:.4g}", f"{high['step_time_s'] * 1e3:.4g}",
        f"{sum(gain > 1 + 1e-9 for gain in gains)} of {len(gains)}", mean,
        f"{max(gains):.3f}" if gains else "–", str(only),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| model | cluster | budgets | GiB | ms, least memory | ms, most | faster than every named strategy that fits "
    "| speedup, mean | largest | nothing named fits |\n|---|---|---|---|---|---|---|---|---|---|"
)


def run_grid(names: list[str], num_budgets: int, out: Path) -> bool:
    """The grid; returns whether every promise was kept."""
    every: list[dict[str, Any]] = []
    table, broken = [HEADER], []
    for name, cluster in itertools.product(names, CLUSTERS):
        print(name, cluster, flush=True)
        rows = [{"model": name, "cluster": cluster, **row} for row in plan_case(CASES[name], cluster, num_budgets)]
        gc.collect()
        every += rows
        broken += faults(rows)
        table += [summary(rows)] if rows else []
        out.write_text(json.dumps(every, indent=1) + "\n")
    print("\n".join([*table, "", f"{len(every)} budgets, {len(broken)} promises broken", *broken]))
    return not broken


# --------------------------------------------------------------------------------------------------- brute force


class Block(nn.Module):
    def __init__(self, width: int, ffn: int, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(width, ffn), activation, nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.activation(self.up(x)))
        return y


class Blocks(nn.Module):
    def __init__(self, width: int, ffn: int, activation: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, ffn, activation) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass
class Remembering(Compiler):
    """Simulates equal plans once."""

    known: dict[object, Priced] = field(default_factory=dict)

    def scheduled(self, joint: JointGraph, plan: Plan, splits: tuple[Split, ...]) -> Priced:
        storage = tuple(plan.storage.items())
        key = (plan.mesh, plan.factors, storage, frozenset(plan.recompute.items()), plan.delay_reduction, splits)
        if key not in self.known:
            self.known[key] = super().scheduled(joint, plan, splits)
        return self.known[key].called(plan.strategy)


def every_plan(compiler: Compiler, joint: JointGraph) -> Iterator[Plan]:
    """Every layout with every way to keep and to recompute each region."""
    regions = find_regions(joint)
    owner = {path: region_of(path.rpartition(".")[0], regions) or "" for path in joint.param_nodes()}
    options = list(itertools.product(MODES, (None, *RECOMPUTE_LEVELS)))
    for layout in find_layouts(joint, compiler.sizes, compiler.cluster.ranks_per_node):
        rests = storages(joint, layout)
        for taken in itertools.product(options, repeat=len(regions)):
            of = dict(zip(regions, taken, strict=True))
            storage = {path: modes[of[owner[path]][0]] for path, modes in rests.items()}
            yield layout.plan(storage, {region: level for region, (_, level) in of.items() if level})


def gaps_of(seed: int, cluster: str, num_budgets: int) -> list[float]:
    """By how much the planner's time is above the least of all plans that fit, for budgets at their peaks."""
    draw = random.Random(seed)
    width, ffn, rows = draw.choice((24, 64, 256, 1024)), draw.choice((50, 128, 1024, 4096)), draw.choice((8, 64, 4096))
    with torch.device("meta"):
        model, inputs = Blocks(width, ffn, draw.choice((nn.ReLU(), nn.GELU(), nn.SiLU()))), torch.empty(rows, width)
    compiler = Remembering(model, parse_shape(draw.choice(("4", "2x2"))), Cluster.parse(cluster))
    joint = compiler.trace((inputs,), {}, train=True, local=False)
    found = [p.simulation for p in compiler.candidates(joint)]
    best = found + [compiler.scheduled(joint, plan, ()).simulation for plan in every_plan(compiler, joint)]
    peaks = sorted({s.memory.total for s in best})
    out = []
    for i in range(num_budgets):
        budget = peaks[i * (len(peaks) - 1) // (num_budgets - 1)]
        times = [min((s.step_time_s for s in some if s.memory.total <= budget), default=math.inf)
                 for some in (found, best)]  # fmt: skip
        out.append(times[0] / times[1] - 1)
    return out


def run_gaps(num_seeds: int, num_budgets: int, out: Path) -> None:
    """Random models of two blocks beside brute force."""
    clusters = ("4 cpu", "2x2 cpu @ 100mbit", "4xA100-80GB", "2x2 H100-80GB")
    rows = []
    for seed, cluster in itertools.product(range(num_seeds), clusters):
        rows.append({"seed": seed, "cluster": cluster, "gaps": gaps_of(seed, cluster, num_budgets)})
        print(seed, cluster, max(rows[-1]["gaps"]), flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
    print("| cluster | budgets | best plan found | gap: mean | largest |\n|---|---|---|---|---|")
    for cluster in clusters:
        gaps = [gap for row in rows if row["cluster"] == cluster for gap in row["gaps"]]
        best = sum(gap <= 1e-12 for gap in gaps)
        print(f"| {cluster} | {len(gaps)} | {best} | {math.fsum(gaps) / len(gaps):.3%} | {max(gaps):.2%} |")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--budgets", type=int, default=12, help="of each model on each cluster")
    parser.add_argument("--gaps", action="store_true", help="compare with brute force")
    parser.add_argument("--seeds", type=int, default=3, help="random models on each cluster, with --gaps")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.gaps:
        run_gaps(arguments.seeds, arguments.budgets, arguments.json)
        return
    names = arguments.only.split(",") if arguments.only else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}")
    if not run_grid(names, arguments.budgets, arguments.json):
        sys.exit(1)


if __name__ == "__main__":
    main()
