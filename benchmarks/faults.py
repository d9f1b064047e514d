"""What happens to a run of four ranks when something goes wrong on one of them.

    python -m benchmarks.faults [--only NAME,…] [--timeout S] --json OUT

Each fault runs in processes of its own: two steps, a checkpoint, then the fault on rank 2 (or on rank 0, which has the
job's store) while the others go on.  OUT has a row for each fault:

    {"fault", "what", "rank", "others": {rank: {"after_s", "error", "message"}}, "detected_s", "names_rank",
     "checkpoint", "left_over"}

`after_s` is from the fault to that rank's end; `detected_s` the largest of the other ranks'.  `checkpoint` says whether
the one before the fault loads, bit by bit; `left_over` counts processes that had to be ended by force, the faulty rank
apart (a launcher ends that).
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar

NUM_RANKS, WIDTH = 4, 32
FAULT_STEP, NUM_STEPS = 2, 5


class Model(nn.Module):
    """Two blocks, with a table whose rows a bad index misses."""

    def __init__(self, constant: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.constant = constant

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return (x * weights[:, None] * self.constant).square().mean()


@dataclass
class Step:
    """What a fault may act on, on the faulty rank, before its step."""

    pm: autopar.ParallelModule
    ids: Tensor
    weights: Tensor
    in_backward: Callable[[], object] | None = None
    lingers: bool = False


def kill(step: Step) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_backward(step: Step) -> None:
    step.in_backward = lambda: os.kill(os.getpid(), signal.SIGKILL)


def hang(step: Step) -> None:
    time.sleep(3600)


def hang_in_backward(step: Step) -> None:
    step.in_backward = lambda: time.sleep(3600)


def freeze(step: Step) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(step: Step) -> None:
    raise ValueError("a record of the data is damaged")


def finish(step: Step) -> None:
    sys.exit(0)


def exhaust(step: Step) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    step.in_backward = lambda: torch.zeros(2**30)  # as a batch would that is too large


def bad_index(step: Step) -> None:
    step.ids = step.ids + 64


def bad_index_and_linger(step: Step) -> None:
    step.ids, step.lingers = step.ids + 64, True


def bad_shape(step: Step) -> None:
    step.ids, step.weights = step.ids[:-1], step.weights[:-1]


def bad_dtype(step: Step) -> None:
    step.weights = step.weights.double()


def other_mode(step: Step) -> None:
    step.pm.eval()


def not_a_number(step: Step) -> None:
    step.weights = step.weights * float("nan")


def full_disk(step: Step) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


FAULTS: dict[str, tuple[str, Callable[[Step], None]]] = {
    "killed": ("killed (`SIGKILL`) between two steps", kill),
    "killed in backward": ("killed between forward and backward", kill_in_backward),
    "hangs": ("hangs while it loads data", hang),
    "hangs in backward": ("hangs between forward and backward", hang_in_backward),
    "frozen": ("frozen (`SIGSTOP`), as a host that is cut off", freeze),
    "first frozen": ("the same on rank 0, in whose process the job's store is", freeze),
    "user error": ("an exception in the loop", fail),
    "ends early": ("its data ends a batch early", finish),
    "out of memory": ("memory for a tensor is not there", exhaust),
    "bad index": ("a token that the vocabulary does not have", bad_index),
    "lingers": ("the same, and its program hangs in its own cleanup", bad_index_and_linger),
    "other shape": ("a row fewer in its batch", bad_shape),
    "other dtype": ("another dtype in its batch", bad_dtype),
    "other mode": ("in evaluation mode", other_mode),
    "NaN": ("NaN in its batch", not_a_number),
    "full disk": ("no room for its part of the next checkpoint", full_disk),
    "other code": ("another constant in its model", lambda step: None),
    "other versions": ("another version of PyTorch", lambda step: None),
}


def faulty_rank(fault: str) -> int:
    """Where it happens."""
    return 0 if fault == "first frozen" else 2


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 64, (4,), generator=generator), torch.rand(4, generator=generator)


def run_rank(fault: str, directory: Path) -> None:
    """One rank's program: an ordinary loop, with the fault before one of its steps."""
    rank = dist.get_rank()
    faulty = rank == faulty_rank(fault)
    torch.manual_seed(0)
    if fault == "other versions" and faulty:
        torch.__version__ = "2.0.0"  # type: ignore[assignment]
    model = Model(constant=2.0 if fault == "other code" and faulty else 1.0)
    write(directory / f"fault-{rank}", {"at": time.time()})
    pm = autopar.parallelize(model, NUM_RANKS, strategy="zero3")
    optimizer = torch.optim.AdamW(pm.parameters())
    for number in range(NUM_STEPS):
        step = Step(pm, *batch(number, rank))
        if number == FAULT_STEP:
            autopar.save_checkpoint(directory / "c", pm, optimizer, extra={"step": number})
            write(directory / f"fault-{rank}", {"at": time.time()})
            if faulty:
                FAULTS[fault][1](step)
        try:
            loss = pm(step.ids, step.weights)
        except IndexError:
            if step.lingers:
                time.sleep(3600)
            raise
        if step.in_backward:
            step.in_backward()
        loss.backward()
        nn.utils.clip_grad_norm_(pm.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
    autopar.save_checkpoint(directory / "c", pm, optimizer, extra={"step": NUM_STEPS})


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def rank_main(fault: str, directory: Path, timeout_s: float, rank: int, port: int) -> None:
    """Run one rank in a child process, keep how it ended, and end as a program does."""
    with (directory / f"output-{rank}").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # in a test, they are files of pytest's
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=timeout_s)
    )  # fmt: skip
    try:
        run_rank(fault, directory)
    except BaseException as error:
        write(directory / f"end-{rank}", {"error": type(error).__name__, "message": str(error)})
        if not isinstance(error, SystemExit):
            sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()  # which `multiprocessing` leaves out


def try_fault(fault: str, directory: Path, timeout_s: float) -> dict[str, Any]:
    """One row of the table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(fault, directory, timeout_s, rank, port) for rank in range(NUM_RANKS)]
    processes = [multiprocessing.get_context("fork").Process(target=rank_main, args=each) for each in arguments]
    for process in processes:
        process.start()
    others = [rank for rank in range(NUM_RANKS) if rank != faulty_rank(fault)]
    ends: dict[int, float] = {}
    deadline = time.monotonic() + 300 + 2 * timeout_s
    while len(ends) < len(others) and time.monotonic() < deadline:
        ends |= {rank: time.time() for rank in others if rank not in ends and not processes[rank].is_alive()}
        time.sleep(0.05)
    left_over = sum(processes[rank].is_alive() for rank in others)
    for process in processes:
        process.kill()
        process.join()
    at_s = json.loads((directory / f"fault-{faulty_rank(fault)}").read_text())["at"]
    after_s = {rank: round(ends.get(rank, time.time()) - at_s, 1) for rank in others}
    told = {rank: {"after_s": after_s[rank], **end_of(directory, rank)} for rank in others}
    return {
        "fault": fault, "what": FAULTS[fault][0], "rank": faulty_rank(fault), "others": told,
        "detected_s": max(after_s.values()),
        "names_rank": all(f"rank {faulty_rank(fault)}" in end["message"] for end in told.values()),
        "checkpoint": checkpoint_loads(directory / "c"), "left_over": left_over,
    }  # fmt: skip


def end_of(directory: Path, rank: int) -> dict[str, str]:
    """How a rank ended: its exception, or what its watch wrote before it ended the process."""
    path = directory / f"end-{rank}"
    if path.exists():
        return dict(json.loads(path.read_text()))
    lines = (directory / f"output-{rank}").read_text(errors="replace").splitlines()
    given_up = [line for line in lines if line.startswith("autopar: ")]
    return {"error": "process ended" if given_up else "none", "message": " ".join(given_up)}


def checkpoint_loads(path: Path) -> bool | None:
    """Whether the last checkpoint is whole; None if the fault came before there was one."""
    if not path.exists():
        return None
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    return bool(autopar.load_checkpoint(path, model, optimizer)["step"] in (FAULT_STEP, NUM_STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument("--timeout", type=float, default=60.0, help="of the process group, in seconds")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(FAULTS)
    rows = []
    for name in names:
        directory = options.json.with_suffix("") / name.replace(" ", "-")
        directory.mkdir(parents=True)
        rows.append(try_fault(name, directory, options.timeout))
        print(json.dumps(rows[-1]), flush=True)
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
