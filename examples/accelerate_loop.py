"""Train in a loop of one's own with `accelerate`, on several processes: accumulation, clipping, save and resume.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --out run
    torchrun --nproc-per-node 4 examples/accelerate_loop.py --out run --epochs 8 --resume

The second line goes on from the end of the first, on another number of processes.  `AutoparAccelerator` is all that a
script of one's own needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import autopar

WIDTH, CLASSES, ROWS = 16, 4, 96


class AutoparAccelerator(Accelerator):
    """An `Accelerator` that saves and loads a `ParallelModule` and its optimizer by autopar, one of each.

    Schedulers, loaders, scalers and registered objects stay with `accelerate`, whose own way with the other two is to
    write them whole from the first process.
    """

    @contextmanager
    def _without_module(self) -> Iterator[tuple[autopar.ParallelModule, torch.optim.Optimizer]]:
        """While active, `accelerate` does not know the module and the optimizer."""
        models, optimizers = self._models, self._optimizers
        ((pm,), (optimizer,)) = models, optimizers
        self._models, self._optimizers = [], []
        try:
            yield pm, optimizer.optimizer
        finally:
            self._models, self._optimizers = models, optimizers

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """As `Accelerator.save_state`, on every process; the directory must be one that all see."""
        with self._without_module() as (pm, optimizer):
            location = super().save_state(output_dir, safe_serialization, **options)
            autopar.save_checkpoint(f"{location}/autopar", pm, optimizer)
        return str(location)

    def load_state(self, input_dir: str, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """As `Accelerator.load_state`, on any number of processes."""
        with self._without_module() as (pm, optimizer):
            super().load_state(input_dir, load_kwargs, **options)
            autopar.load_checkpoint(f"{input_dir}/autopar", pm, optimizer)


class Classifier(nn.Module):
    """Two layers, and the loss that they are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), labels)


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tp, …")
    parser.add_argument("--out", type=Path, default=Path("accelerate_out"), help="a folder that all processes see")
    parser.add_argument("--resume", action="store_true", help="go on from what --out has")
    arguments = parser.parse_args(argv)

    accelerator = AutoparAccelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    pm = autopar.parallelize(
        Classifier().to(accelerator.device), mesh, mem_gb=4, strategy=arguments.strategy, accumulate=2
    )
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    rows = torch.randn(4 * ROWS, WIDTH)
    loader = DataLoader(TensorDataset(rows, rows[:, :CLASSES].argmax(1)), ROWS // accelerator.num_processes)
    pm, optimizer, scheduler, loader = accelerator.prepare(pm, optimizer, scheduler, loader)
    if arguments.resume:
        accelerator.load_state(str(arguments.out))

    losses = []
    for _ in range(arguments.epochs):
        for x, labels in loader:
            with accelerator.accumulate(pm):
                loss = pm(x, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(pm.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.print(f"loss {losses[-1]:.9f}")
    accelerator.save_state(str(arguments.out))
    return losses


if __name__ == "__main__":
    main()
