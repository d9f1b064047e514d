"""Train under `torchrun` so that a rank's death costs the steps since the last checkpoint and nothing else.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --out run
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --out run --kill-at 25    # see it happen

`torchrun` ends all ranks when one has died, and starts all again; they load the last checkpoint and go on.  The loss of
every step is what it would have been.  Started again with another number of processes, the run goes on just as well.

The variable gives each attempt a store of its own.  Without it (PyTorch 2.13) the ranks of a second attempt may read
the addresses of those of the first, and wait for them.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

WIDTH, CLASSES, ROWS = 64, 8, 96


class Classifier(nn.Module):
    """Two layers with dropout, and the loss that they are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), 0.1, self.training)
        return nn.functional.cross_entropy(self.down(hidden), labels)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """This rank's rows of the global batch of a step, which depends on the step alone: so a restart repeats none."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, WIDTH, generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
    return {"x": rows, "labels": rows[:, :CLASSES].argmax(1)}


def train(device: torch.device, out: Path, steps: int, save_every: int, kill_at: int | None = None) -> list[float]:
    """Train from the last checkpoint in `out`, or from the start.  Returns the losses of the steps that it made."""
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    pm = autopar.parallelize(Classifier().to(device), mesh, mem_gb=4)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    checkpoint, first = out / "checkpoint", 0
    if checkpoint.exists():
        extra = autopar.load_checkpoint(checkpoint, pm, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
        if dist.get_rank() == 0:
            print(f"resumed at step {first} with {dist.get_world_size()} ranks", flush=True)

    losses = []
    for step in range(first, steps):
        loss = pm(**{name: tensor.to(device) for name, tensor in batch_of(step).items()})
        optimizer.zero_grad()
        loss.backward()
        last = dist.get_rank() == dist.get_world_size() - 1
        if step == kill_at and last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {losses[-1]:.9f}", flush=True)
        if (step + 1) % save_every == 0:
            extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
            autopar.save_checkpoint(checkpoint, pm, optimizer, extra=extra)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("elastic_out"), help="a folder that all ranks see")
    parser.add_argument("--kill-at", type=int, help="the last rank dies in this step, once")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(device, arguments.out, arguments.steps, arguments.save_every, arguments.kill_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
