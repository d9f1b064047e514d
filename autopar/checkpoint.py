"""Checkpoints that are independent of the plan: parameters, buffers and optimizer state by name and slice.

A checkpoint is a directory in the format of `torch.distributed.checkpoint`, with a `state.json` beside the tensors for
what is no tensor.  It is written aside and renamed when it is complete, so that one that is there is whole.  Nothing in
it is executed when it is read.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load

from autopar._compat import save_state_dict
from autopar.checkpoint_reader import SafeReader
from autopar.checkpoint_saving import Saving
from autopar.checkpoint_state import (
    STATE_FILE,
    OptimizerState,
    check_same,
    model_slices,
    optimizer_state,
    put_state,
    read_state,
    room_for_state,
    slices_of_state,
    state_text,
)
from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.control import ControlGroup
from autopar.runtime.module import ParallelModule
from autopar.runtime.slices import Slices
from autopar.signature import check_module

_under_way: WeakKeyDictionary[nn.Module, Saving] = WeakKeyDictionary()
"""The save of each model that was begun last: the next one waits for it."""


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Saving:
    """Write a checkpoint that can be loaded under any plan and mesh, and on a single device.

    Every rank calls it and writes what it alone holds; the directory must be on a file system that all ranks share.
    While it writes, and if it is killed, an earlier checkpoint at the same path stays whole.

    Args:
        path: the directory of the checkpoint.
        model: a `ParallelModule`, or on a single device any module.
        optimizer: its state and settings are kept by the names of the parameters.
        extra: what else to keep, of numbers, texts, lists and dicts: the step, `scheduler.state_dict()`.
        wait: without, what is saved is copied to the host's memory and written in the background, while training goes
            on and changes it.  Errors come from the `wait()` of what is returned, or from the model's next save.

    Returns:
        The save: `done()`, and `wait()`, which every program should call before it ends.

    Raises:
        CheckpointError: on every rank, if the directory cannot be written or something cannot be kept; and, before
            anything is begun, if the model's last save in the background failed.
    """
    path, control = Path(path).absolute(), _control_of(model)
    _finish_last(model)

    def everything() -> dict[str, Slices]:
        found = model_slices(model) | (slices_of_state(model, optimizer_state(model, optimizer)) if optimizer else {})
        return found if wait else {name: slices.copied() for name, slices in found.items()}

    with _told(path, "written"):
        tensors, text = control.on_every_rank(
            "looking at what to save", lambda: (everything(), state_text(model, optimizer, extra))
        )
    background = control if wait else control.beside

    def write() -> None:
        with _told(path, "written"):
            _write(path, tensors, text, background)

    saving = Saving(path, write, wait)
    if not wait:
        _under_way[model] = saving
    return saving


def _write(path: Path, tensors: dict[str, Slices], text: str, control: ControlGroup) -> None:
    """Write a checkpoint aside and rename it; called on every rank."""
    aside, before = path.with_name(f".{path.name}.writing"), _before(path)

    def prepare() -> None:
        if path.exists() and not (path / STATE_FILE).exists():
            raise CheckpointError(f"{path} is there and is no checkpoint: give another path")
        shutil.rmtree(aside, ignore_errors=True)  # what a killed save has left
        aside.mkdir(parents=True)

    def finish() -> None:
        SafeReader(aside).check_files()
        with open(aside / STATE_FILE, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        aside.rename(path)
        shutil.rmtree(before, ignore_errors=True)

    control.on_first_rank("preparing a checkpoint", prepare)
    try:
        save_state_dict(
            tensors, FileSystemWriter(aside), _SavePlanner(flatten_state_dict=False), control.group,
            alone=control.num_ranks == 1,
        )  # fmt: skip
        control.on_first_rank("finishing a checkpoint", finish)
    except BaseException:
        if control.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk has no room for half a checkpoint
        raise


def _finish_last(model: nn.Module) -> None:
    """Wait for the model's save in the background, if there is one; its failure is told on every rank."""
    last = _under_way.pop(model, None)
    if last is not None:
        last.finish()


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load, in place, what `save_checkpoint` wrote under any plan and mesh; each rank reads what it holds.

    Args:
        path: the directory of the checkpoint.
        model: a `ParallelModule` of the same model, or on a single device the module.
        optimizer: gets the state and settings that were saved, by the names of the parameters.

    Returns:
        The `extra` of the checkpoint.

    Raises:
        CheckpointError: on every rank, if there is none, it is damaged, or it is of another model or optimizer.
    """
    path, control = Path(path).absolute(), _control_of(model)
    _finish_last(model)

    def look() -> tuple[SafeReader, dict[str, Any], dict[str, Slices], OptimizerState]:
        reader, state = SafeReader(_whole(path)), read_state(_whole(path))
        saved = reader.read_metadata().state_dict_metadata
        wanted = model_slices(model)
        check_same(wanted, saved)
        made = room_for_state(model, optimizer, saved, state) if optimizer else {}
        return reader, state, wanted | slices_of_state(model, made), made

    with _told(path, "read"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        reader, state, wanted, made = control.on_every_rank("looking at a checkpoint", look)
        with torch.no_grad():
            load(
                wanted, storage_reader=reader, planner=_LoadPlanner(),
                process_group=control.group, no_dist=control.num_ranks == 1,
            )  # fmt: skip
        if optimizer is not None:
            put_state(model, optimizer, made, state)
    if isinstance(model, ParallelModule):
        if optimizer is not None:
            model.move_with_parameters(optimizer)
        if state["random"]:
            model.random_state = state["random"]
    extra: dict[str, Any] = state["extra"]
    return extra


class _SavePlanner(DefaultSavePlanner):
    """Finds slices where PyTorch's looks for tensors of its own."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].part(index.offset)


class _LoadPlanner(DefaultLoadPlanner):
    """The same for loading."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # PyTorch's would look for tensors in the values and put others in the place of what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].part(index.offset)
        return found


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    """Gives what the file system and PyTorch raise as a `CheckpointError`."""
    what = f"checkpoint {path} cannot be {done}"
    try:
        yield
    except CheckpointException as error:  # which is no `Exception`
        raise CheckpointError(f"{what}: {_reasons(error)}") from error
    except AutoparError as error:
        if type(error) in (AutoparError, CheckpointError):  # the first is what another rank met
            raise CheckpointError(f"{what}: {error}") from error
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _reasons(error: CheckpointException) -> str:
    """What up to five ranks met."""
    met = [(rank, failure[0]) for rank, failure in sorted(error.failures.items())]
    told = [f"rank {rank}: {failure or type(failure).__name__}" for rank, failure in met[:5]]
    return "; ".join(told) + (f"; and {len(met) - 5} ranks more" if len(met) > 5 else "")


def _control_of(model: nn.Module) -> ControlGroup:
    """All ranks for a `ParallelModule`; a plain module is this process's own affair."""
    check_module(model)
    return model.control_group if isinstance(model, ParallelModule) else ControlGroup(alone=True)


def _before(path: Path) -> Path:
    """Where the checkpoint that was at `path` stands for the moment in which the new one takes its place."""
    return path.with_name(f".{path.name}.before")


def _whole(path: Path) -> Path:
    """The directory to read: that of the checkpoint, or the one before if a save was killed between two renames."""
    for directory in (path, _before(path)):
        if (directory / STATE_FILE).exists():
            return directory
    raise CheckpointError(f"there is none, for it has no {STATE_FILE}")
