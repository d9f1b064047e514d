"""Hugging Face's `Trainer`, `accelerate` and elastic restarts around a `ParallelModule`, beside a single device."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_packaging import launch_environment, run_example
from test_parallelize import mine, whole
from tiny_models import TinyGpt, token_batch

import autopar

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss")


@contextmanager
def launched() -> Iterator[None]:
    """The environment that `torchrun` gives a rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


@contextmanager
def examples() -> Iterator[None]:
    """The folder's files can be imported."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))


def trained(*flags: str) -> list[dict[str, float]]:
    """What the example logs of each step."""
    with examples():
        from hf_trainer import main
    history = main(["--rows", "8", "--save-every", "3", *flags])
    return [{key: entry[key] for key in COMPARED if key in entry} for entry in history if "train_loss" not in entry]


def trained_on_ranks(*flags: str) -> list[dict[str, float]]:
    with launched():
        return trained(*flags)


def logged(entries: list[dict[str, float]]) -> torch.Tensor:
    return torch.tensor([value for entry in entries for value in entry.values()], dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("tp", marks=pytest.mark.slow)])
def test_the_trainer_logs_what_it_logs_on_a_single_device(gloo2: RankPool, tmp_path: Path, strategy: str) -> None:
    """Losses, gradient norms before clipping, the schedule and evaluation, with two micro-steps to a step."""
    from transformers import GPT2LMHeadModel

    expected = trained("--steps", "5", "--out", str(tmp_path / "single"))
    flags = ("--steps", "5", "--strategy", strategy, "--out", str(tmp_path / "ranks"))
    found, _ = gloo2.run(trained_on_ranks, *flags, timeout_s=300)
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    assert "eval_loss" in found[3]
    torch.testing.assert_close(logged(found), logged(expected), rtol=1e-4, atol=0)
    shutil.rmtree(tmp_path / "ranks" / "checkpoint-5")
    resumed, _ = gloo2.run(trained_on_ranks, *flags, "--resume", timeout_s=300)
    assert resumed == found, "steps 4 and 5 again, after the record of the first three"
    weights = GPT2LMHeadModel.from_pretrained(tmp_path / "ranks" / "checkpoint-5").state_dict()
    for name, value in GPT2LMHeadModel.from_pretrained(tmp_path / "single" / "checkpoint-5").state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


def accelerated() -> None:
    """`Accelerator.prepare` leaves the module as it is; accumulation, clipping and unwrapping work."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = TinyGpt(layers=1).double()
    reference = copy.deepcopy(model)
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=mine(*token_batch(4)))
    optimizer: Any = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(pm, optimizer)
    assert prepared is pm
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        ids, targets = token_batch(4, seed=step)
        with accelerator.accumulate(pm):
            accelerator.backward(pm(*mine(ids, targets))["loss"])
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(pm.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        (reference(ids, targets)["loss"] / 2).backward()
        if step % 2:
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(whole(norm), expected, rtol=1e-9, atol=0)
            theirs.step()
            theirs.zero_grad()
    for parameter, other in zip(pm.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), other.detach(), rtol=0, atol=1e-9)


def test_accelerate_prepares_it_as_it_is(gloo2: RankPool) -> None:
    gloo2.run(accelerated)


def looped(*flags: str) -> list[float]:
    with launched(), examples():
        from accelerate_loop import main

        losses: list[float] = main(flags)
    return losses


def test_accelerate_saves_and_loads_its_state(gloo2: RankPool, tmp_path: Path) -> None:
    """With the example's `Accelerator`: schedule, moments and parameters go on, under another strategy."""
    whole, _ = gloo2.run(looped, "--epochs", "4", "--strategy", "zero3", "--out", str(tmp_path / "whole"))
    half = ("--epochs", "2", "--out", str(tmp_path / "half"))
    first, _ = gloo2.run(looped, "--strategy", "zero3", *half)
    second, _ = gloo2.run(looped, "--strategy", "tp", "--resume", *half)
    torch.testing.assert_close([*first, *second], whole, rtol=1e-4, atol=0)


def never_killed(directory: str) -> list[float]:
    with examples():
        from elastic import train
    return train(torch.device("cpu"), Path(directory), steps=6, save_every=9)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(gloo2: RankPool, tmp_path: Path) -> None:
    """Under `torchrun` all ranks start again, and every loss is what it was before, or would have been."""
    flags = ("--steps", "6", "--save-every", "2", "--kill-at", "3", "--out", str(tmp_path / "run"))
    lines = run_example("elastic.py", 2, *flags, launch=("--max-restarts", "1")).stdout.splitlines()
    losses, _ = gloo2.run(never_killed, str(tmp_path))
    expected = [f"step {step:2d}  loss {loss:.9f}" for step, loss in enumerate(losses)]
    assert lines == [*expected[:4], "resumed at step 2 with 2 ranks", *expected[2:]]


def run_on_nodes(*flags: str, num_nodes: int = 2, num_ranks: int = 2) -> list[str]:
    """Run the elastic example under one `torchrun` for each node, as on several hosts; the lines that all printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the launchers meet
    launch = {
        "nnodes": num_nodes, "nproc-per-node": num_ranks, "max-restarts": 1, "local-addr": "127.0.0.1",
        "rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{store.port}", "rdzv-conf": "is_host=0",
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in launch.items())]
    command = [*torchrun, str(EXAMPLES / "elastic.py"), *flags]
    pipe, env = subprocess.PIPE, launch_environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    agents = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) for _ in range(num_nodes)]
    try:
        ends = [agent.communicate(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert not any(agent.returncode for agent in agents), ends
    return [line for output, _ in ends for line in output.splitlines()]


@pytest.mark.slow
def test_a_rank_killed_on_one_node_restarts_all_nodes(gloo4: RankPool, tmp_path: Path) -> None:
    """The launchers of both nodes end their ranks, meet again, and go on from the last checkpoint; no loss differs."""
    lines = run_on_nodes("--steps", "6", "--save-every", "2", "--kill-at", "3", "--out", str(tmp_path / "run"))
    losses, *_ = gloo4.run(never_killed, str(tmp_path))
    expected = [f"step {step:2d}  loss {loss:.9f}" for step, loss in enumerate(losses)]
    # Rank 0, which prints, may be on the other node after the restart.
    assert sorted(lines) == sorted([*expected[:4], "resumed at step 2 with 4 ranks", *expected[2:]])
