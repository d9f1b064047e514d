"""Directories without permission and full disks: a clear error from everything that reads or writes files, and nothing
half-written."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import compiled
from test_plan_file import PLAN
from tiny_models import Mlp
from torch import nn

import autopar
from autopar.errors import CheckpointError, InputError
from autopar.export import export_program
from autopar.runtime.control import ControlGroup
from autopar.runtime.safetensors_files import load_files, save_files
from autopar.runtime.slices import Slices

ALONE, NOBODY = ControlGroup(alone=True), 65534


def save_weights(path: Path, model: nn.Module, max_bytes: int = 10**9) -> None:
    save_files(path, model, ALONE, max_bytes)


def load_weights(path: Path, model: nn.Module) -> None:
    load_files(path, model, {name: Slices(p, p.shape) for name, p in model.named_parameters()}, ALONE)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": lambda path: autopar.save_checkpoint(path, Mlp(), extra={"text": "x" * 2000}),
    "weights": lambda path: save_weights(path, Mlp()),
    "index of weights": lambda path: save_weights(path, Mlp(), max_bytes=100),
    "plan": lambda path: autopar.save_plan(PLAN, path),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": lambda path: autopar.load_checkpoint(path, Mlp()),
    "weights": lambda path: load_weights(path, Mlp()),
    "plan": autopar.load_plan,
}


def told(action: Callable[[Path], Any], path: Path, connection: Any) -> None:
    """What an action raises for a user who may do nothing here."""
    torch.set_num_threads(1)
    if os.getuid() == 0:
        os.setuid(NOBODY)
    try:
        action(path)
        connection.send("nothing")
    except BaseException as error:  # noqa: BLE001 (the test compares it)
        connection.send(f"{type(error).__name__}: {error}")


def as_nobody(action: Callable[[Path], Any], path: Path) -> str:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=told, args=(action, path, there))
    process.start()
    assert here.poll(60)
    text: str = here.recv()
    process.join()
    return text


@pytest.fixture(name="closed")
def closed_directory(tmp_path: Path) -> Any:
    closed = tmp_path / "closed"
    closed.mkdir()
    yield closed
    closed.chmod(0o700)


@pytest.mark.parametrize("kind", WRITERS)
def test_no_permission_to_write(closed: Path, kind: str) -> None:
    closed.chmod(0o500)
    error = as_nobody(WRITERS[kind], closed / "new")
    assert error.startswith(("CheckpointError: ", "InputError: "))
    assert f"{closed}/new" in error
    assert "Permission denied" in error
    assert os.listdir(closed) == []


@pytest.mark.parametrize("kind", READERS)
def test_no_permission_to_read(closed: Path, kind: str) -> None:
    WRITERS[kind](closed / "there")
    closed.chmod(0o000)
    error = as_nobody(READERS[kind], closed / "there")
    assert error.startswith(("CheckpointError: ", "InputError: "))
    assert f"{closed}/there" in error
    assert "Permission denied" in error


def test_no_permission_to_look(closed: Path) -> None:
    closed.chmod(0o000)
    program, plan = compiled("tp", (4,))
    error = as_nobody(lambda path: export_program(program, plan, path), closed / "new")
    assert error.startswith(f"InputError: cannot make directory '{closed}/new' to export to: Permission denied")


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("room", [0, 150, 700, 2000], ids=str)
def test_a_full_disk(tmp_path: Path, kind: str, room: int) -> None:
    """At no size of the disk is there half a file afterwards, and what was there is whole."""
    path = tmp_path / "there"
    WRITERS[kind](path)
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    failed = ""
    try:
        WRITERS[kind](path)
    except (CheckpointError, InputError) as error:
        failed = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed or room >= 700
    assert set(files(tmp_path)) == set(before)
    if failed:
        assert str(path) in failed
        assert "File too large" in failed
    if kind == "checkpoint":
        autopar.load_checkpoint(path, Mlp())
    elif kind == "plan":
        autopar.load_plan(path)
    else:
        load_weights(path, Mlp())
