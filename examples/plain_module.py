"""Shard a plain `nn.Module` and train it.  Run it with

    torchrun --nproc-per-node 2 examples/plain_module.py

The same lines run on CPU with gloo and on CUDA with NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

WIDTH, CLASSES, ROWS, STEPS = 64, 8, 128, 30


class Classifier(nn.Module):
    """Two layers and the loss that they are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), labels)


def my_batches() -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of each global batch of `ROWS` rows; the label is the index of the largest feature."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator).chunk(dist.get_world_size())[dist.get_rank()].to(device)
        yield {"x": x, "labels": x[:, :CLASSES].argmax(1)}


cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)
model = Classifier().to(device)

mesh = init_device_mesh(device.type, (dist.get_world_size(),))
pm = autopar.parallelize(model, mesh, mem_gb=4)  # shards the parameters in place
optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)

for step, batch in enumerate(my_batches()):  # each rank passes its own rows
    loss = pm(**batch)  # the first call traces, plans and rewrites; the loss is that of all rows
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4 and dist.get_rank() == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(pm.plan)  # placements per module, memory, step time, and why each alternative lost
dist.destroy_process_group()
