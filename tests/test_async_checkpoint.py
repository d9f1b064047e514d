"""Saves in the background: of what was there, one at a time; failures are told, and a kill harms nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_checkpoint import Numbered, load, made, same, steps, values
from tiny_models import Mlp
from torch import Tensor

import autopar
from autopar import checkpoint


class Gate:
    """While it is closed, nothing is written."""

    def __init__(self) -> None:
        self.opened, self.running, self.most = threading.Event(), 0, 0
        self._write = checkpoint.save_state_dict
        checkpoint.save_state_dict = self.write

    def write(self, *args: Any, **kwargs: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.opened.wait(60)
        self._write(*args, **kwargs)
        self.running -= 1

    def restore(self) -> None:
        checkpoint.save_state_dict = self._write


@pytest.fixture(name="gate")
def gate_fixture() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.restore()


def save_while_training(path: str) -> tuple[dict[str, Tensor], list[float]]:
    gate = Gate()
    pm, optimizer = made("zero3", 2)
    steps(pm, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.01
    saving = autopar.save_checkpoint(path, pm, optimizer, extra={"step": 2}, wait=False)
    before = values(pm, optimizer)
    losses = steps(pm, optimizer, range(2, 4))  # changes everything before the first byte is written
    assert not saving.done()
    assert not os.path.exists(path)
    gate.opened.set()
    saving.wait()
    assert saving.done()
    gate.restore()
    return before, losses


def test_training_goes_on_and_changes_nothing_that_is_saved(gloo2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    expected, losses = gloo2.run(save_while_training, str(path))[0]
    assert os.listdir(tmp_path) == ["c"]
    for found, continued in gloo2.run(load, str(path), "zero3", 2):
        same(found, expected)
        assert continued == losses


def test_one_save_at_a_time(gate: Gate, tmp_path: Path) -> None:
    model = Numbered()
    first = autopar.save_checkpoint(tmp_path / "c", model, extra={"n": 1}, wait=False)
    later = threading.Timer(0.3, gate.opened.set)
    later.start()
    second = autopar.save_checkpoint(tmp_path / "c", model, extra={"n": 2}, wait=False)
    assert first.done()  # the second waited for it
    assert autopar.load_checkpoint(tmp_path / "c", model) == {"n": 2}  # loading waits, too
    assert second.done()
    assert gate.most == 1
    later.join()


def fails(tmp_path: Path, model: Numbered) -> checkpoint.Saving:
    (tmp_path / "no checkpoint").mkdir(exist_ok=True)
    return autopar.save_checkpoint(tmp_path / "no checkpoint", model, wait=False)


def test_a_failure_is_told_once(tmp_path: Path) -> None:
    model, message = Numbered(), "no checkpoint cannot be written: .* is there and is no checkpoint"
    with pytest.raises(autopar.CheckpointError, match=message):
        fails(tmp_path, model).wait()
    fails(tmp_path, model)
    with pytest.raises(autopar.CheckpointError, match=message):
        autopar.save_checkpoint(tmp_path / "c", model)
    assert autopar.save_checkpoint(tmp_path / "c", model).done()


AT_EXIT = """
import sys, autopar
from torch import nn
model = nn.Linear(3, 3)
autopar.save_checkpoint(sys.argv[1] + "/good", model, wait=False)
autopar.save_checkpoint(sys.argv[1], nn.Linear(2, 2), wait=False)
"""


def test_the_end_of_the_program_waits_and_tells(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert f"CheckpointError: checkpoint {tmp_path} cannot be written" in ended.stderr
    autopar.load_checkpoint(tmp_path / "good", torch.nn.Linear(3, 3))


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, wait: bool) -> None:
    model = Mlp()
    autopar.save_checkpoint(tmp_path / "c", model, extra={"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            autopar.CheckpointError, match=r"c cannot be written: .*(rank 0: .*File too large|Errno 27)"
        ):
            autopar.save_checkpoint(tmp_path / "c", model, extra={"n": 2}, wait=wait).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["c"]
    assert autopar.load_checkpoint(tmp_path / "c", model) == {"n": 1}


# ---- kills


def save_forever(rank: int, num_ranks: int, ports: Any, path: Path, ready: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", ports.get(), is_master=False)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    pm = autopar.parallelize(Numbered(), num_ranks, strategy="zero3")
    saving = None
    for number in range(1, 100_000):
        with torch.no_grad():
            for part in pm.parameters():
                part.fill_(number)
        before, saving = saving, autopar.save_checkpoint(path, pm, extra={"number": number}, wait=False)
        with torch.no_grad():
            for part in pm.parameters():
                part.fill_(-1)
        if before is not None and rank == 0:
            ready.set()


def kill_savers(tmp_path: Path, num_ranks: int, rounds: int) -> tuple[set[int], int]:
    """Kill `num_ranks` savers, one first, again and again; the numbers that were found, and how many half saves."""
    path, generator = tmp_path / "c", random.Random(num_ranks)
    context = multiprocessing.get_context("fork")
    seen, halves = set(), 0
    for _ in range(rounds):
        ready, ports = context.Event(), context.SimpleQueue()
        arguments = [(rank, num_ranks, ports, path, ready) for rank in range(num_ranks)]
        processes = [context.Process(target=save_forever, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        # Not before: it has a thread, and whoever is forked while that holds a lock waits for it forever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in processes:
            ports.put(store.port)
        assert ready.wait(60)
        time.sleep(generator.random() * 0.05)
        generator.shuffle(processes)
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(generator.choice([0, 0.01]))
        for process in processes:
            process.join()
        del store
        halves += (tmp_path / ".c.writing").exists()
        model = Numbered()
        number = autopar.load_checkpoint(path, model)["number"]
        assert all((part == number).all() for part in model.parts)
        seen.add(number)
    assert set(os.listdir(tmp_path)) <= {"c", ".c.writing", ".c.before"}
    return seen, halves


def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_savers(tmp_path, 2, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_fifty_kills_leave_whole_checkpoints(tmp_path: Path, num_ranks: int) -> None:
    seen, halves = kill_savers(tmp_path, num_ranks, rounds=50)
    assert len(seen) > 1
    assert halves > 5  # they were killed while they wrote
