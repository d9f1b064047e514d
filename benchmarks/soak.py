"""A run that is killed again and again, beside one that is not: do they compute the same?

    python -m benchmarks.soak [--steps N] [--ranks N] [--kills N] [--seed N] --json OUT

A small transformer with dropout, AdamW and a schedule trains under ZeRO-3 and saves in the background every 10 steps.
At random steps a random rank is killed (`SIGKILL`), the others as a launcher does, at once or a moment later, and all
start again from the last checkpoint.  OUT is

    {"ranks", "steps", "kills", "killed_ranks", "repeated_steps", "first_loss", "last_loss", "largest_difference",
     "equal", "seconds"}

`repeated_steps` are those that were computed more than once; each must have given the same loss each time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

WIDTH, VOCAB, SEQ, ROWS, SAVE_EVERY = 16, 32, 8, 2, 10


class Model(nn.Module):
    """One block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), ids[:, 1:].flatten())


def train(rank: int, num_ranks: int, ports: Any, directory: Path, num_steps: int) -> None:
    """One rank's program: an ordinary loop that goes on from the last checkpoint."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (directory / f"output-{rank}").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    store, timeout = dist.TCPStore("127.0.0.1", ports.get(), is_master=False), timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.manual_seed(0)
    pm = autopar.parallelize(Model(), num_ranks, strategy="zero3")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    path, begin, saving = directory / "c", 0, None
    if (path / "state.json").exists() or path.with_name(".c.before").exists():
        pm.prepare(batch(0, rank))  # so that the optimizer's state finds parameters where they rest
        state = autopar.load_checkpoint(path, pm, optimizer)
        begin = state["step"]
        schedule.load_state_dict(state["schedule"])
    with (directory / "losses").open("a", buffering=1) as losses:
        for step in range(begin, num_steps):
            loss = pm(batch(step, rank))
            loss.backward()
            nn.utils.clip_grad_norm_(pm.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if rank == 0:
                losses.write(f"{step} {float(loss.detach()).hex()}\n")
            if (step + 1) % SAVE_EVERY == 0:
                extra = {"step": step + 1, "schedule": schedule.state_dict()}
                saving = autopar.save_checkpoint(path, pm, optimizer, extra=extra, wait=False)
    if saving is not None:
        saving.wait()


def batch(step: int, rank: int) -> Tensor:
    """This rank's rows: tokens that count upwards, from somewhere."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(0, VOCAB, (ROWS, 1), generator=generator) + torch.arange(SEQ + 1)) % VOCAB


@dataclass
class Run:
    """A run in a directory, killed at the given steps after each start."""

    directory: Path
    num_ranks: int
    num_steps: int
    generator: random.Random
    killed_ranks: list[int] = field(default_factory=list)
    store: dist.TCPStore | None = None

    def finish(self, num_kills: int) -> None:
        """Start the ranks, kill them, and start them again, until they have come to the end."""
        self.directory.mkdir(parents=True)
        (self.directory / "losses").touch()
        while True:
            processes, begin = self._start(), len(self._lines())
            kills_left = num_kills - len(self.killed_ranks)
            room = max(2, 2 * self.num_steps // (num_kills + 1))
            kill_at = begin + self.generator.randint(1, room) if kills_left else None
            while any(process.is_alive() for process in processes):
                if kill_at is not None and len(self._lines()) >= kill_at:
                    self._kill(processes)
                    break
                time.sleep(0.01)
            codes = [process.exitcode for process in processes]
            if not any(codes):
                return
            if kill_at is None or None in codes or -9 not in codes:
                raise SystemExit(f"the ranks ended with {codes}; their output is in {self.directory}")

    def losses(self) -> dict[int, set[float]]:
        """Every loss that was computed for each step."""
        found: dict[int, set[float]] = {}
        for line in self._lines():
            step, loss = line.split()
            found.setdefault(int(step), set()).add(float.fromhex(loss))
        return found

    def _start(self) -> list[Any]:
        self.store = None  # it has a thread, and whoever is forked while that holds a lock waits for it forever
        context = multiprocessing.get_context("fork")
        ports = context.SimpleQueue()
        arguments = (self.num_ranks, ports, self.directory, self.num_steps)
        processes = [context.Process(target=train, args=(rank, *arguments)) for rank in range(self.num_ranks)]
        for process in processes:
            process.start()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in processes:
            ports.put(self.store.port)
        return processes

    def _kill(self, processes: list[Any]) -> None:
        first = self.generator.randrange(self.num_ranks)
        self.killed_ranks.append(first)
        time.sleep(self.generator.random() * 0.05)
        processes[first].kill()
        time.sleep(self.generator.choice([0.0, 0.02, 0.5]))
        for process in processes:
            process.kill()
            process.join()

    def _lines(self) -> list[str]:
        """What rank 0 wrote; a line that it was killed in is left out."""
        return [line for line in (self.directory / "losses").read_text().split("\n")[:-1] if line]


def soak(directory: Path, num_ranks: int, num_steps: int, num_kills: int, seed: int = 0) -> dict[str, Any]:
    """Both runs, and how they differ."""
    begin_s = time.monotonic()
    calm = Run(directory / "calm", num_ranks, num_steps, random.Random(seed))
    calm.finish(0)
    killed = Run(directory / "killed", num_ranks, num_steps, random.Random(seed))
    killed.finish(num_kills)
    expected, found = calm.losses(), killed.losses()
    steps = range(num_steps)
    largest = max(abs(a - b) for step in steps for a in expected[step] for b in found[step])
    return {
        "ranks": num_ranks, "steps": num_steps, "kills": len(killed.killed_ranks), "killed_ranks": killed.killed_ranks,
        "repeated_steps": len(killed._lines()) - num_steps,
        "first_loss": min(expected[0]), "last_loss": min(expected[num_steps - 1]), "largest_difference": largest,
        "equal": all(expected[step] == found[step] for step in steps), "seconds": round(time.monotonic() - begin_s),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp())  # which stays, with the ranks' output, if one of them fails
    row = soak(directory, options.ranks, options.steps, options.kills, options.seed)
    shutil.rmtree(directory)
    print(json.dumps(row))
    options.json.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
