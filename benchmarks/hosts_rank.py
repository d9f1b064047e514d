"""What each rank of `benchmarks.hosts` runs: train, compare with a single device, save, resume, cut a link.

Lines of JSON go to `--out`, each in one write: of a finished strategy from rank 0, of a failure from every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from benchmarks.netlab import set_link
from benchmarks.transformer import SHAPES, Transformer

SHAPE = SHAPES["tiny"]
LR = 1e-2


def batch_of(step: int, rank: int = 0, num_ranks: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step's ids and next ids."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.seq + 1), generator=generator).chunk(num_ranks)[rank]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE).double()


def alone(steps: int) -> tuple[list[float], nn.Module]:
    """Losses and model of a single device."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(steps):
        loss = model(*batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def cut_link(out: Path) -> None:
    """Take this host's link down."""
    set_link("down")
    write_line(out, {"cut_at": time.time()})


def write_line(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def train(arguments: argparse.Namespace, strategy: str, mesh: str) -> dict[str, Any]:
    """Train one strategy from the checkpoint if that is there; returns rank 0's line."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pm = autopar.parallelize(build_model(), mesh, strategy=strategy)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=LR)
    first = 0
    if arguments.checkpoint and arguments.checkpoint.exists():
        first = autopar.load_checkpoint(arguments.checkpoint, pm, optimizer)["step"]
    losses = []
    for step in range(first, arguments.steps):
        if step == arguments.cut_at and rank == num_ranks - 1:
            threading.Timer(arguments.cut_after_s, cut_link, [arguments.out]).start()
        # Once the link is to be cut, the step is repeated until it is: so that it is cut inside one.
        for _ in range(1 if step != arguments.cut_at else sys.maxsize):
            loss = pm(*batch_of(step, rank, num_ranks))
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if arguments.checkpoint and step + 1 in arguments.save_at:
            autopar.save_checkpoint(arguments.checkpoint, pm, optimizer, extra={"step": step + 1})
    parameters = {name: parameter.detach().full_tensor() for name, parameter in pm.named_parameters()}
    line = {"strategy": strategy, "mesh": str(pm.plan.mesh), "ranks": num_ranks, "first": first, "losses": losses}
    if rank == 0:
        expected, model = alone(arguments.steps)
        pairs = zip(losses, expected[first:], strict=True)
        line["loss_difference"] = max(abs(a - b) for a, b in pairs)
        line["parameter_difference"] = max(
            float((parameters[name] - value.detach()).abs().max()) for name, value in model.named_parameters()
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.hosts_rank", description=__doc__)
    parser.add_argument("--strategies", required=True, help="strategy:mesh, comma-separated")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--checkpoint", type=Path, help="loaded if it is there")
    parser.add_argument("--save-at", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--cut-at", type=int, help="the step in which the last rank cuts its host's link")
    parser.add_argument("--cut-after-s", type=float, default=0.2)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of the process group")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout_s))
    try:
        for text in arguments.strategies.split(","):
            strategy, _, mesh = text.partition(":")
            line = train(arguments, strategy, mesh)
            if dist.get_rank() == 0:
                write_line(arguments.out, line)
    except (autopar.AutoparError, RuntimeError) as error:
        failed = {"rank": dist.get_rank(), "failed_at": time.time(), "error": f"{type(error).__name__}: {error}"}
        write_line(arguments.out, failed)
        os._exit(1)  # a group whose link is gone cannot be destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
