"""Training steps of a small transformer under autopar's plans.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.step --strategy zero3 --shape wide
    python -m benchmarks.step --strategy single                   # the reference trajectory, without autopar

Flags and output are those of the PyTorch baselines that it is compared with (`benchmarks.compare_steps`), and so are
model, data, seeds and optimizer: the losses must agree.  Rank 0 prints one line of JSON for each shape and strategy,
and appends it to `--out`.  Inside an emulated cluster the line holds the bytes per step on each link, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.placement import local_shape
from benchmarks import netlab
from benchmarks.transformer import SHAPES, Shape, Transformer

STRATEGIES = (
    "single", "auto", "replicate", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "tp+sp", "fsdp+tp",
)  # fmt: skip
SIZES = [field.name for field in dataclasses.fields(Shape)]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.step", description=__doc__, formatter_class=raw)
    names = ", ".join(STRATEGIES)
    parser.add_argument("--strategy", default="single", help=f"one or more, comma-separated: {names} (or with _ for +)")
    parser.add_argument("--shape", default="tiny", help=f"one or more, comma-separated: {', '.join(SHAPES)}")
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, help=f"override the shape's {size}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--opt", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bucket-mb", type=float, default=25, help="of the DDP baseline; no effect here")
    parser.add_argument("--max-seconds", type=float, default=0, help="time about so long at most; all ranks agree")
    parser.add_argument("--cluster", help="price plans for this cluster, such as '2x1 cpu @ 100mbit'")
    parser.add_argument("--mem-gb", type=float, help="memory budget of auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument("--tag", default="")
    arguments = parser.parse_args(argv)
    arguments.strategies = arguments.strategy.split(",")
    arguments.shapes = arguments.shape.split(",")
    for strategy in arguments.strategies:
        if strategy.replace("_", "+") not in STRATEGIES:
            parser.error(f"unknown strategy {strategy}; there are {names}")
    for shape in arguments.shapes:
        if shape not in SHAPES:
            parser.error(f"unknown shape {shape}; there are {', '.join(SHAPES)}")
    return arguments


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where this process stands among the others, and what it computes on."""

    rank: int
    num_ranks: int
    ranks_per_host: int
    device: torch.device

    def mesh(self) -> dist.DeviceMesh:
        """The ranks as (hosts, ranks of a host); one flat axis where either is 1."""
        hosts = self.num_ranks // self.ranks_per_host
        shape = (hosts, self.ranks_per_host) if min(hosts, self.ranks_per_host) > 1 else (self.num_ranks,)
        return init_device_mesh(self.device.type, shape)


def join_cluster() -> Cluster:
    """Read torchrun's variables, and start the process group unless this process is alone."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, limit = "nccl" if cuda else "gloo", datetime.timedelta(seconds=300)
    if num_ranks == 1:  # alone, and perhaps not started by a launcher
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=limit)
    return Cluster(rank, num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))), device)


def local_bytes(values: object) -> int:
    """Bytes that this rank holds of the tensors among `values`."""
    total = 0
    for value in values:  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, dist.tensor.DTensor) else value
            total += local.numel() * local.element_size()
    return total


def describe_plan(model: nn.Module) -> dict[str, Any] | None:
    """What the plan decided and predicted; None for a model that has none."""
    plan = getattr(model, "plan", None)
    if plan is None:
        return None
    report = plan.report
    described = {"strategy": plan.strategy, "mesh": str(plan.mesh), "param_bytes": planned_param_bytes(model, plan)}
    if report is not None:
        described |= {
            "opt_state_bytes": report.memory.optimizer, "peak_bytes": report.memory.total,
            "step_time_s": report.step_time_s, "collective_bytes": dict(report.collective_bytes),
        }  # fmt: skip
    return described


def planned_param_bytes(model: nn.Module, plan: autopar.Plan) -> int:
    """Bytes of parameters at rest on the fullest rank, as the plan stores them."""
    total = 0
    for name, parameter in model.named_parameters():
        local = local_shape(parameter.shape, plan.storage[name].sharding, plan.mesh)
        total += math.prod(local) * parameter.element_size()
    return total


class Run:
    """One shape under one strategy: the model, its optimizer, and this rank's data."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape, strategy: str, cluster: Cluster) -> None:
        generator = torch.Generator().manual_seed(arguments.seed + 1)
        size = (shape.batch, shape.seq + 1)
        self.batches = []
        whole = strategy == "tp"
        for _ in range(2):
            tokens = torch.randint(0, shape.vocab, size, generator=generator)
            # Under tensor parallelism PyTorch's baselines feed every rank the whole batch; so does this.
            mine = (tokens if whole else tokens.chunk(cluster.num_ranks)[cluster.rank]).to(cluster.device)
            self.batches.append((mine[:, :-1].contiguous(), mine[:, 1:].contiguous()))
        torch.manual_seed(arguments.seed)
        model: nn.Module = Transformer(shape).to(cluster.device)
        self.num_params = sum(p.numel() for p in model.parameters())
        if strategy != "single":
            model = autopar.parallelize(
                model, cluster.mesh(), strategy=strategy.replace("_", "+"),
                example_inputs=(self.batches[0], {}), optimizer=arguments.opt,
                batch_dims={"0": None, "1": None} if whole else None, cluster=arguments.cluster,
                mem_gb=arguments.mem_gb if strategy == "auto" else None,
            )  # fmt: skip
        kind = torch.optim.AdamW if arguments.opt == "adamw" else torch.optim.SGD
        self.model, self.optimizer = model, kind(model.parameters(), lr=arguments.lr, foreach=False)
        self.device = cluster.device

    def step(self, index: int) -> torch.Tensor:
        """One training step; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.model(*self.batches[index % len(self.batches)])
        loss.backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return loss.detach()


@dataclasses.dataclass
class Timing:
    """Timed steps of this rank, with the counters read by rank 0 before and after."""

    times: list[float]
    losses: list[torch.Tensor]
    cpu_s: float
    wall_s: float
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def time_steps(arguments: argparse.Namespace, step: Callable[[int], torch.Tensor], cluster: Cluster) -> Timing:
    """Warm up, then time the steps between barriers."""

    def read(label: str) -> dict[str, Any] | None:
        dist.barrier()
        counters = netlab.mark(label) if cluster.rank == 0 else None
        dist.barrier()
        return counters

    losses = [step(index) for index in range(arguments.warmup)]
    before = read("steps-begin")
    times: list[float] = []
    num_steps = arguments.steps
    cpu_start, start = time.process_time(), time.perf_counter()
    while len(times) < num_steps:
        began = time.perf_counter()
        losses.append(step(arguments.warmup + len(times)))
        times.append(time.perf_counter() - began)
        if arguments.max_seconds and len(times) == 1:  # how many steps fit, on the slowest rank
            fit = torch.tensor([max(2, min(num_steps, int(arguments.max_seconds / times[0])))], device=cluster.device)
            dist.all_reduce(fit, op=dist.ReduceOp.MIN)
            num_steps = int(fit)
    dist.barrier()
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return Timing(times, losses, cpu_s, wall_s, before, read("steps-end"))


def measure(arguments: argparse.Namespace, name: str, strategy: str, cluster: Cluster) -> dict[str, Any]:
    """Build, train and describe one run; the result is complete on rank 0."""
    overrides = {size: getattr(arguments, size) for size in SIZES if getattr(arguments, size) is not None}
    shape = dataclasses.replace(SHAPES[name], **overrides)
    resident = netlab.resident_mb("VmRSS")
    netlab.reset_peak_resident()
    run = Run(arguments, shape, strategy, cluster)
    timing = time_steps(arguments, run.step, cluster)
    mine = {
        "median": statistics.median(timing.times),
        "resident": netlab.resident_mb("VmHWM") - resident,
        "params": local_bytes(run.model.parameters()),
        "optimizer": local_bytes(v for state in run.optimizer.state.values() for v in state.values()),
        "cpu_s": timing.cpu_s / len(timing.times),
        "losses": [float(loss) for loss in timing.losses],
    }
    ranks: list[dict[str, Any]] = [{}] * cluster.num_ranks
    dist.all_gather_object(ranks, mine)
    own_cpu_s = sum(r["cpu_s"] for r in ranks)
    result = {
        "tag": arguments.tag, "strategy": strategy, "shape": name, "config": dataclasses.asdict(shape),
        "world": cluster.num_ranks, "ranks_per_host": cluster.ranks_per_host, "params": run.num_params,
        "inter_bps": int(os.environ.get("NETLAB_INTER_BPS", "0")) or None,
        "intra_bps": int(os.environ.get("NETLAB_INTRA_BPS", "0")) or None,
        "steps": len(timing.times),
        "median_s": round(max(r["median"] for r in ranks), 4),
        "min_s": round(min(timing.times), 4),
        "mean_s": round(timing.wall_s / len(timing.times), 4),
        "times": [round(t, 4) for t in timing.times],
        "cpu_s_per_step_all_ranks": round(own_cpu_s, 4),
        "losses": [round(loss, 6) for loss in mine["losses"]],
        "rss_delta_mb_max": round(max(r["resident"] for r in ranks), 1),
        "param_bytes_per_rank": max(r["params"] for r in ranks),
        "opt_state_bytes_per_rank": max(r["optimizer"] for r in ranks),
        "torch": torch.__version__,
        "loss_spread_over_ranks": max(max(x) - min(x) for x in zip(*(r["losses"] for r in ranks), strict=True)),
        "plan": describe_plan(run.model),
    }  # fmt: skip
    if timing.before is not None and timing.after is not None:
        num_steps = len(timing.times)
        result["bytes_per_step"] = netlab.link_bytes(timing.before, timing.after, num_steps)
        result["machine"] = netlab.machine_load(timing.before, timing.after, own_cpu_s * num_steps)
    return result


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cluster = join_cluster()
    if "single" in arguments.strategies and cluster.num_ranks > 1:
        sys.exit("single: run with one rank")
    for shape in arguments.shapes:
        for strategy in arguments.strategies:
            result = measure(arguments, shape, strategy, cluster)
            gc.collect()
            if cluster.rank == 0:
                line = json.dumps(result)
                print(line, flush=True)
                if arguments.out:
                    with Path(arguments.out).open("a") as file:
                        file.write(line + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
