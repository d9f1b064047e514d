"""Calls of the module: looked at on each rank, and agreed on before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import BatchError, StaleModelError
from autopar.runtime.agreement import digest
from autopar.runtime.control import ControlGroup


@dataclass(frozen=True)
class Call:
    """One call, looked at on this rank.

    Attributes:
        tensors: its inputs, by path.
        key: what a program is kept under.
        trains: whether a backward pass may follow.
        shapes, mode: what the ranks must have in common, in words.
    """

    tensors: dict[str, Tensor]
    key: Hashable
    trains: bool
    shapes: str
    mode: str


def agree_on_call(control: ControlGroup, look: Callable[[], Call]) -> Call:
    """Look at the call, and make sure before any collective that every rank makes the same one.

    Args:
        control: all ranks, each of which calls this.
        look: must not communicate.

    Raises:
        BatchError: on every rank, if inputs have different shapes.
        StaleModelError: on every rank, if modes differ.
        Exception: whatever `look` raises; on the other ranks an `AutoparError` that says so.
    """
    error: Exception | None = None
    shapes = mode = ""
    try:
        call = look()
        shapes, mode = call.shapes, call.mode
    except Exception as caught:  # noqa: BLE001 (raised below, once the other ranks know)
        error = caught
    if not control.all_agree(digest(f"{shapes}|{mode}|{error!r}")):
        control.on_every_rank("checking its call", lambda: _reraise(error))
        _explain_difference(control, shapes, mode)
    if error is not None:
        raise error
    return call


def _explain_difference(control: ControlGroup, shapes: str, mode: str) -> None:
    """Raise on every rank, saying which ranks differ in what; called on all of them."""
    all_shapes, all_modes = zip(*control.gather((shapes, mode)), strict=True)
    if len(set(all_shapes)) > 1:
        raise BatchError(
            f"the ranks pass inputs of different shapes ({each_rank(all_shapes)}): every rank must pass "
            "equally many rows; drop or pad the last incomplete batch (DataLoader: drop_last=True)"
        )
    raise StaleModelError(
        f"the ranks call the module in different modes ({each_rank(all_modes)}): train(), eval(), no_grad(), "
        "autocast and non-tensor arguments must be the same on every rank"
    )


def each_rank(texts: Sequence[str]) -> str:
    """What every rank says, in a line."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _reraise(error: Exception | None) -> None:
    if error is not None:
        raise error
