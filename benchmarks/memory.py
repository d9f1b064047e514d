"""The predicted peak of memory beside the measured one, per rank, model and strategy.

    python -m benchmarks.memory --zoo FILE.py [--only NAME,NAME] [--strategies ddp,zero3,…] [--mesh 4|2x2]
        [--recompute none|selective|full] [--precision bf16] --json OUT

FILE.py holds `REGISTRY`, as for `benchmarks.zoo`.  One process is one rank of a job in which nobody else answers: it
runs what `autopar.parallelize` makes, forward, backward and a step of the optimizer, on real tensors.  Collectives are
answered by stand-ins that allocate, and hold on to their inputs, as gloo does.  Parameters, buffers, inputs and the
optimizer's state count from the start; what comes and goes in the step is read off PyTorch's CPU allocator, so that
memory that ops take for themselves counts, too.  The step that is measured is the second one.  OUT is a list of

    {"model", "strategy", "mesh", "recompute", "predicted_bytes", "measured_bytes", "ratio", "tensor_bytes",
     "at_rest_bytes", "predicted_at", "error"}

`ratio` is predicted over measured: 1.0 or a little more is right, less than 1.0 is a prediction that breaks a budget.
`tensor_bytes` is the peak of tensors that ops return, without what they take inside, and `at_rest_bytes` what there is
between steps.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import autopar
from autopar._compat import allocator_events, fake_process_group, storage_id
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.cost_model.allocations import AllocationTracker
from autopar.cost_model.memory import MemoryProfile, memory_profile
from autopar.cost_model.optimizers import BuildOptimizer
from autopar.mesh import parse_shape
from autopar.plan import RECOMPUTE_LEVELS
from autopar.planner import plan_named
from autopar.precision import PRECISIONS
from autopar.program import COLLECTIVE_KINDS
from autopar.regions import find_regions
from benchmarks.zoo import WithLoss, chosen_models, describe, zoo_parser

STRATEGIES = "ddp,zero3,tp,fsdp+tp"
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
    "sgd": torch.optim.SGD,
}
"""With `sgd`, whose step takes nothing, the peak is in the forward or backward pass."""


class LoneRank(AllocationTracker):
    """Counts allocations, and answers collectives of a group in which nobody else is.

    The results have the right shape, and values that ranks with the same tensors would get but for the factor of a sum,
    and zeros where this rank receives another number of rows than it sends.
    As with gloo, all but an all-reduce, which works on a copy, hold on to their input until they are waited for, and a
    reduce-scatter sums a copy of it.  Results are contiguous, however the input lies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: dict[int, tuple[Tensor, ...]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._in_flight.pop(storage_id(args[0]), None)
            return args[0]
        kind = COLLECTIVE_KINDS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        operand: Tensor = args[0]
        if kind == "all_to_all" and sum(args[1]) != operand.shape[0]:
            result = operand.new_zeros((sum(args[1]), *operand.shape[1:]))
        elif kind in ("all_reduce", "all_to_all"):
            result = operand.clone(memory_format=torch.contiguous_format)
        elif kind == "all_gather":
            result = torch.cat([operand] * args[1])
        else:
            result = operand[: operand.shape[0] // args[2]].clone(memory_format=torch.contiguous_format)
        if kind != "all_reduce":
            held = (operand, operand.clone()) if kind == "reduce_scatter" else (operand,)
            self._register(held, counted=True)
            self._in_flight[storage_id(result)] = held
        return result


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, accumulate: int = 1) -> None:
    """One step, after which gradients are freed; the caller holds outputs until the end, or until there are others."""
    for _ in range(accumulate):
        outputs = model(*args, **kwargs)
        outputs[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def constants(module: fx.GraphModule) -> list[Any]:
    """Tensors that a graph holds itself."""
    return [attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr")]


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: the peak at the allocator, the same without what kernels allocate and free again at once, the
    peak of the tensors that ops return, and between steps."""

    peak: int
    lasting: int
    tensors: int
    at_rest: int


def recomputing(
    model: nn.Module,
    strategy: str,
    sizes: tuple[int, ...],
    args: Any,
    kwargs: Any,
    level: str,
    precision: str | None = None,
) -> autopar.Plan:
    """A named strategy's plan with every region of the model at one level of recomputation."""
    num_ranks = math.prod(sizes)
    compiler = Compiler(model, sizes, Cluster.of_live("cpu", num_ranks, num_ranks), precision=precision)
    joint = compiler.trace(args, kwargs, train=True)
    plan = plan_named(strategy, joint, sizes, num_ranks)
    return replace(plan, recompute={} if level == "none" else dict.fromkeys(find_regions(joint), level))


def measure(
    model: nn.Module,
    strategy: str | autopar.Plan,
    sizes: tuple[int, ...],
    args: Any,
    kwargs: Any,
    build: BuildOptimizer,
    precision: str | None = None,
    accumulate: int = 1,
) -> tuple[MemoryProfile, Measured]:
    """Predicted and measured memory of the first rank, inside a `fake_process_group`, for a module that returns its
    loss first."""
    num_ranks = math.prod(sizes)
    parallel = autopar.parallelize(
        model, sizes, strategy=strategy, example_inputs=(args, kwargs), optimizer=build, precision=precision
    )
    optimizer = build(parallel.parameters())
    program = parallel.compiled_steps[-1].program
    cluster = Cluster.of_live("cpu", num_ranks, num_ranks)
    profile = memory_profile(program, cluster, optimizer, accumulate=accumulate)
    with LoneRank():
        train_step(parallel, optimizer, args, kwargs)
    gc.collect()
    with LoneRank() as tracker:
        tracker.hold([list(parallel.parameters()), list(parallel.buffers()), args, kwargs])
        tracker.hold([list(state.values()) for state in optimizer.state.values()])
        tracker.hold([constants(graph.module) for graph in program.graphs])
        at_rest = tracker.live_bytes
        with allocator_events() as events:
            train_step(parallel, optimizer, args, kwargs, accumulate)
    lasting = [size for i, size in enumerate(events) if not _is_scratch(events, i)]
    peaks = (at_rest + max(itertools.accumulate(sizes), default=0) for sizes in (events, lasting))
    return profile, Measured(*peaks, tracker.peak_bytes, at_rest)


def _is_scratch(events: Sequence[int], i: int) -> bool:
    """Whether an event of the allocator takes what the next one gives back, or gives back what the last one took."""
    neighbour = i + 1 if events[i] > 0 else i - 1
    return 0 <= neighbour < len(events) and events[neighbour] == -events[i]


def check(
    entry: Any, strategy: str, mesh: str, batch: int, optimizer: str, level: str = "none", precision: str | None = None
) -> dict[str, Any]:
    """One row of the result."""
    row: dict[str, Any] = {
        "model": entry.name, "strategy": strategy, "mesh": mesh, "recompute": level, "predicted_bytes": None,
        "measured_bytes": None, "ratio": None, "tensor_bytes": None, "at_rest_bytes": None, "predicted_at": None,
        "error": None,
    }  # fmt: skip
    sizes = parse_shape(mesh)
    try:
        model = WithLoss(entry.build(), entry.loss_fn)
        args, kwargs = entry.make_batch(batch // math.prod(sizes), 0)
        plan = recomputing(model, strategy, sizes, args, kwargs, level, precision)
        profile, measured = measure(model, plan, sizes, args, kwargs, OPTIMIZERS[optimizer], precision)
        row |= {
            "predicted_bytes": profile.peak.total, "measured_bytes": measured.peak,
            "ratio": profile.peak.total / measured.peak, "tensor_bytes": measured.tensors,
            "at_rest_bytes": measured.at_rest, "predicted_at": profile.peak_at,
        }  # fmt: skip
    except Exception as error:  # noqa: BLE001  one model that breaks must not hide the others
        row["error"] = describe(error)
    return row


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Every row, and how far off the predictions are."""
    table = Table("model", "strategy", "mesh", "predicted_bytes", "measured_bytes", "ratio")
    for row in rows:
        figures = ("error", "", "") if row["error"] else (
            f"{row['predicted_bytes']:,}", f"{row['measured_bytes']:,}", f"{row['ratio']:.3f}"
        )  # fmt: skip
        table.add_row(row["model"], row["strategy"], row["mesh"], *figures)
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"{row['model']} {row['strategy']}: {row['error'][:300]}", markup=False, highlight=False)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if ratios:
        under = sum(ratio < 1 for ratio in ratios)
        console.print(
            f"{len(ratios)} of {len(rows)} measured: ratios {min(ratios):.3f} to {max(ratios):.3f}, {under} under"
        )


def main() -> None:
    parser = zoo_parser("memory", __doc__, STRATEGIES)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--recompute", choices=("none", *RECOMPUTE_LEVELS), default="none", help="in every region")
    parser.add_argument("--precision", choices=PRECISIONS, help="what the model computes in; as it is without it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start
    models = chosen_models(parser, arguments)
    rows: list[dict[str, Any]] = []
    with fake_process_group(math.prod(parse_shape(arguments.mesh))):
        for name, entry in models.items():
            for strategy in arguments.strategies.split(","):
                settings = (arguments.mesh, arguments.batch, arguments.optimizer)
                rows.append(check(entry, strategy, *settings, arguments.recompute, arguments.precision))
                row = rows[-1]
                print(name, strategy, row["error"] or f"{row['ratio']:.3f}", flush=True)
                if arguments.json:  # after every row, so that nothing is lost if the process dies
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
                gc.collect()
    print_table(rows, Console(width=max(Console().width, 90)))


if __name__ == "__main__":
    main()
