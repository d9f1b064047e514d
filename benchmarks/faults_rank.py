"""What each rank of `benchmarks.faults` runs: an ordinary loop, with a fault before or in one of its steps.

    python -m benchmarks.faults_rank --fault NAME --directory DIR [--timeout-s S]

Rank, number of ranks and the address of rank 0 are in the environment, as launchers set them.  The rank leaves in the
directory what it prints (`output-RANK`), its process (`pid-RANK`), when the fault came (`fault-RANK`), how its loop
ended (`end-RANK`), and the job's checkpoint (`c`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from benchmarks.netlab import set_link

NUM_RANKS, WIDTH = 4, 32
FAULT_STEP, NUM_STEPS = 2, 5
LOST_S = 10


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


def cut_link(step: Step) -> None:
    step.in_backward = lambda: set_link("down")


def lose_link(step: Step) -> None:
    def lose() -> None:
        set_link("down")
        threading.Timer(LOST_S, set_link, ["up"]).start()

    step.in_backward = lose


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        what: it in words.
        act: called on the faulty rank before its step.
        rank: the faulty rank.
        of_link: the rank is well, and its host's link is not; needs ranks that only a network joins.
    """

    what: str
    act: Callable[[Step], None]
    rank: int = 2
    of_link: bool = False


STOPPED = "NaN stops"

FAULTS: dict[str, Fault] = {
    "killed": Fault("killed (`SIGKILL`) between two steps", kill),
    "killed in backward": Fault("killed between forward and backward", kill_in_backward),
    "hangs": Fault("hangs while it loads data", hang),
    "hangs in backward": Fault("hangs between forward and backward", hang_in_backward),
    "frozen": Fault("frozen (`SIGSTOP`), as a host that is cut off", freeze),
    "first frozen": Fault("the same on rank 0, in whose process the job's store is", freeze, rank=0),
    "user error": Fault("an exception in the loop", fail),
    "ends early": Fault("its data ends a batch early", finish),
    "out of memory": Fault("memory for a tensor is not there", exhaust),
    "bad index": Fault("a token that the vocabulary does not have", bad_index),
    "lingers": Fault("the same, and its program hangs in its own cleanup", bad_index_and_linger),
    "other shape": Fault("a row fewer in its batch", bad_shape),
    "other dtype": Fault("another dtype in its batch", bad_dtype),
    "other mode": Fault("in evaluation mode", other_mode),
    "NaN": Fault("NaN in its batch", not_a_number),
    STOPPED: Fault("the same with `stop_at_nan=True`", not_a_number),
    "full disk": Fault("no room for its part of the next checkpoint", full_disk),
    "other code": Fault("another constant in its model", lambda step: None),
    "other versions": Fault("another version of PyTorch", lambda step: None),
    "link cut": Fault("its host's link is cut between forward and backward", cut_link, of_link=True),
    "link lost": Fault(f"the same, and the link is back after {LOST_S} s", lose_link, of_link=True),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 64, (4,), generator=generator), torch.rand(4, generator=generator)


def run_rank(fault: str, directory: Path) -> None:
    """One rank's program: an ordinary loop, with the fault before one of its steps."""
    rank = dist.get_rank()
    faulty = rank == FAULTS[fault].rank
    torch.manual_seed(0)
    if fault == "other versions" and faulty:
        torch.__version__ = "2.0.0"  # type: ignore[assignment]
    model = Model(constant=2.0 if fault == "other code" and faulty else 1.0)
    write(directory / f"fault-{rank}", {"at": time.time()})
    pm = autopar.parallelize(model, NUM_RANKS, strategy="zero3", stop_at_nan=fault == STOPPED)
    optimizer = torch.optim.AdamW(pm.parameters())
    for number in range(NUM_STEPS):
        step = Step(pm, *batch(number, rank))
        if number == FAULT_STEP:
            autopar.save_checkpoint(directory / "c", pm, optimizer, extra={"step": number})
            write(directory / f"fault-{rank}", {"at": time.time()})
            if faulty:
                FAULTS[fault].act(step)
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
    """Whole or not at all: others read it at any moment."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def run_program(fault: str, directory: Path, timeout_s: float) -> None:
    """Join the other ranks, run one rank's program, keep how it ended, and end as a program does.

    Args:
        fault: a name in `FAULTS`.
        directory: where the ranks leave what the table needs.
        timeout_s: of the process group.
    """
    rank = int(os.environ["RANK"])
    with (directory / f"output-{rank}").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    write(directory / f"pid-{rank}", {"pid": os.getpid()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        run_rank(fault, directory)
    except BaseException as error:
        write(directory / f"end-{rank}", {"error": type(error).__name__, "message": str(error)})
        raise
    write(directory / f"end-{rank}", {"error": "none", "message": "all steps done"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", required=True, choices=list(FAULTS))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of the process group")
    options = parser.parse_args()
    run_program(options.fault, options.directory, options.timeout_s)


if __name__ == "__main__":
    main()
