"""What happens to a run of four ranks when something goes wrong on one of them.

    python -m benchmarks.faults [--only NAME,…] [--timeout S] --json OUT
    python -m benchmarks.faults --netlab PATH/netlab [--rate 100mbit] [--rt] --json OUT

Each fault runs in processes of its own: two steps, a checkpoint, then the fault on rank 2 (or on rank 0, which has the
job's store) while the others go on.  With `--netlab`, a tool that joins network namespaces by rate-limited links (needs
root), the ranks are two on each of two hosts, and links fail, too.  OUT has a row for each fault:

    {"fault", "what", "rank", "others": {rank: {"after_s", "error", "message"}}, "detected_s", "names_rank",
     "checkpoint", "left_over"}

`after_s` is from the fault to that rank's end; `detected_s` the largest of the other ranks'.  Where a link fails, the
rank that it belongs to is one of the others.  `checkpoint` says whether the one before the fault loads, bit by bit;
`left_over` counts processes that had to be ended by force, the faulty rank apart (a launcher ends that).
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.faults_rank import FAULT_STEP, FAULTS, NUM_RANKS, NUM_STEPS, Model, run_program
from benchmarks.netlab import Hosts

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
"""Within which the ranks are to start and to compile, on a machine that has other work, too."""


class Process:
    """A rank's process, whoever started it."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        with suppress(ProcessLookupError):  # it may have ended
            self._fd = os.pidfd_open(pid)

    def ended(self) -> bool:
        return self._fd is None or bool(select.select([self._fd], [], [], 0)[0])

    def kill(self) -> None:
        """End it for good, and wait until it has ended."""
        if self._fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            select.select([self._fd], [], [])
            os.close(self._fd)
            self._fd = None


def _run_forked(fault: str, directory: Path, timeout_s: float, rank: int, port: int) -> None:
    """The program of a rank in a child of this process."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # in a test, they are files of pytest's
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    try:
        run_program(fault, directory, timeout_s)
    except Exception as error:
        sys.last_value = error  # as the interpreter does at the end of a program
        raise
    finally:
        atexit._run_exitfuncs()  # which `multiprocessing` leaves out


@contextmanager
def on_this_host(fault: str, directory: Path, timeout_s: float) -> Iterator[Callable[[], None]]:
    """Ranks that are children of this process; gives what raises if they cannot be started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [(fault, directory, timeout_s, rank, port) for rank in range(NUM_RANKS)]
    children = [multiprocessing.get_context("fork").Process(target=_run_forked, args=each) for each in arguments]
    try:
        for child in children:
            child.start()
        yield lambda: None
    finally:
        for child in children:
            child.kill()
            child.join()


@contextmanager
def across_hosts(hosts: Hosts, fault: str, directory: Path, timeout_s: float) -> Iterator[Callable[[], None]]:
    """Ranks on emulated hosts, which go when the context is left; gives what raises if they cannot be started."""
    program = ["-m", "benchmarks.faults_rank", "--fault", fault, "--directory", str(directory)]
    # It is not to end the others once a rank has ended, which is what is measured.
    patience_s = 2 * patience(timeout_s)
    flags = ["--timeout", f"{patience_s:g}", "--grace", f"{patience_s:g}"]
    command = hosts.command([*program, "--timeout-s", f"{timeout_s:g}"], *flags)
    with (directory / "netlab").open("wb") as output:
        lab = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def check() -> None:
        if lab.poll() is not None:
            raise RuntimeError(f"{hosts.netlab} ended with {lab.returncode}: {(directory / 'netlab').read_text()}")

    try:
        yield check
    finally:
        lab.terminate()
        lab.wait()


def patience(timeout_s: float) -> float:
    """How long a fault may take."""
    return START_S + 2 * timeout_s


def started(directory: Path, check: Callable[[], None]) -> list[Process]:
    """The processes of the ranks, once all have begun."""
    paths = [directory / f"pid-{rank}" for rank in range(NUM_RANKS)]
    deadline = time.monotonic() + START_S
    while not all(path.exists() for path in paths):
        check()
        if time.monotonic() > deadline:
            missing = [rank for rank, path in enumerate(paths) if not path.exists()]
            raise RuntimeError(f"ranks {missing} did not begin within {START_S:g} s; their output is in {directory}")
        time.sleep(0.05)
    return [Process(json.loads(path.read_text())["pid"]) for path in paths]


def try_fault(fault: str, directory: Path, timeout_s: float, hosts: Hosts | None = None) -> dict[str, Any]:
    """One row of the table.

    Args:
        fault: a name in `FAULTS`.
        directory: an empty one, for what the ranks write.
        timeout_s: of the process group.
        hosts: where the ranks run; on this host unless given.

    Raises:
        RuntimeError: if the ranks cannot be started.
    """
    faulty = FAULTS[fault]
    others = [rank for rank in range(NUM_RANKS) if rank != faulty.rank or faulty.of_link]
    ends: dict[int, float] = {}
    where = across_hosts(hosts, fault, directory, timeout_s) if hosts else on_this_host(fault, directory, timeout_s)
    with where as check:
        processes = started(directory, check)
        try:
            deadline = time.monotonic() + patience(timeout_s)
            while len(ends) < len(others) and time.monotonic() < deadline:
                ends |= {rank: time.time() for rank in others if rank not in ends and processes[rank].ended()}
                time.sleep(0.05)
            left_over = sum(not processes[rank].ended() for rank in others)
        finally:
            for process in processes:
                process.kill()
    at_s = json.loads((directory / f"fault-{faulty.rank}").read_text())["at"]
    after_s = {rank: round(ends.get(rank, time.time()) - at_s, 1) for rank in others}
    told = {rank: {"after_s": after_s[rank], **end_of(directory, rank)} for rank in others}
    return {
        "fault": fault, "what": faulty.what, "rank": faulty.rank, "others": told, "detected_s": max(after_s.values()),
        "names_rank": all(f"rank {faulty.rank}" in end["message"] for end in told.values()),
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
    parser.add_argument("--netlab", help="run the ranks on two hosts that this tool emulates")
    parser.add_argument("--rate", default="100mbit", help="of the hosts' links")
    parser.add_argument("--rt", action="store_true", help="real-time priority there, where others use the CPUs too")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    hosts = Hosts(options.netlab, 2, NUM_RANKS // 2, options.rate, options.rt) if options.netlab else None
    names = options.only.split(",") if options.only else [name for name in FAULTS if hosts or not FAULTS[name].of_link]
    if not hosts and any(FAULTS[name].of_link for name in names):
        parser.error("links fail between hosts only: give --netlab")
    rows = []
    for name in names:
        directory = (options.json.with_suffix("") / name.replace(" ", "-")).resolve()
        directory.mkdir(parents=True)
        rows.append(try_fault(name, directory, options.timeout, hosts))
        print(json.dumps(rows[-1]), flush=True)
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
