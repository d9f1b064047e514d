"""Memory of PyTorch's FSDP2 beside autopar's ZeRO-3, predicted and measured, for the step benchmark's transformer.

    python -m benchmarks.memory_fsdp2 [--shapes wide,narrow,mid] [--ranks 4] --json OUT

FSDP2 shards each block and the root.  Its memory is what PyTorch's own tracker (`torch.distributed._tools`) says;
autopar's is measured as in `benchmarks.memory`.  Both run as one rank of a job in which nobody else answers, with
AdamW, and the second step counts.  OUT is a list of

    {"shape", "fsdp2_bytes", "predicted_bytes", "measured_bytes", "ratio"}
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar._compat import fake_process_group, fsdp_memory_peaks
from benchmarks.memory import measure
from benchmarks.transformer import SHAPES, Shape, Transformer


class OneOutput(nn.Module):
    """A model whose loss comes first in a tuple, as `measure` wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> tuple[Tensor]:
        return (self.model(*args),)


def batch_of(shape: Shape, num_ranks: int) -> tuple[Tensor, Tensor]:
    """One rank's rows: tokens and next tokens."""
    ids = torch.randint(0, shape.vocab, (shape.batch // num_ranks, shape.seq + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def fsdp2_bytes(shape: Shape, num_ranks: int) -> int:
    """Peak of the second training step under FSDP2."""
    mesh, model = init_device_mesh("cpu", (num_ranks,)), Transformer(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, labels = batch_of(shape, num_ranks)

    def step() -> None:
        model(ids, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return fsdp_memory_peaks(model, optimizer, (ids, labels), step, num_steps=2)[-1]


def compare(name: str, num_ranks: int) -> dict[str, Any]:
    """One row of the result."""
    shape = SHAPES[name]
    theirs = fsdp2_bytes(shape, num_ranks)
    model = OneOutput(Transformer(shape))
    profile, measured = measure(model, "zero3", (num_ranks,), batch_of(shape, num_ranks), {}, torch.optim.AdamW)
    return {
        "shape": name, "fsdp2_bytes": theirs, "predicted_bytes": profile.peak.total, "measured_bytes": measured.peak,
        "ratio": profile.peak.total / measured.peak,
    }  # fmt: skip


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.memory_fsdp2", description=__doc__, formatter_class=raw)
    parser.add_argument("--shapes", default="wide,narrow,mid", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start
    with fake_process_group(arguments.ranks):
        rows = [compare(name, arguments.ranks) for name in arguments.shapes.split(",")]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("shape", "fsdp2_bytes", "predicted_bytes", "measured_bytes", "ratio")
    for row in rows:
        sizes = (f"{row[name]:,}" for name in ("fsdp2_bytes", "predicted_bytes", "measured_bytes"))
        table.add_row(row["shape"], *sizes, f"{row['ratio']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
