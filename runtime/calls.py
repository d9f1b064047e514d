"""Calls of the module: looked at on each rank, and agreed on before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import BatchError, StaleModelError
from autopar.runtime.agreement import differences, digest
from autopar.runtime.control import ControlGroup


@dataclass(frozen=True)
class Call:
    """One call, looked at on this rank.

    Attributes:
        tensors: its inputs, by path.
        key: what a program is kept under.
        trains: whether a backward pass may follow.
        inputs: what the ranks must pass alike: `input 'x'` -> its dtype and shape, such as `f32[4, 16]`.
        modes: what else they must have in common: name -> value, in words.
    """

    tensors: dict[str, Tensor]
    key: Hashable
    trains: bool
    inputs: Mapping[str, str]
    modes: Mapping[str, str]


def agree_on_call(control: ControlGroup, look: Callable[[], Call]) -> Call:
    """Look at the call, and make sure before any collective that every rank makes the same one.

    Args:
        control: all ranks, each of which calls this.
        look: must not communicate.

    Raises:
        BatchError: on every rank, if inputs have different names, dtypes or shapes.
        StaleModelError: on every rank, if modes differ.
        Exception: whatever `look` raises; on the other ranks an `AutoparError` that says so.
    """
    error: Exception | None = None
    inputs: Mapping[str, str] = {}
    modes: Mapping[str, str] = {}
    try:
        call = look()
        inputs, modes = call.inputs, call.modes
    except Exception as caught:  # noqa: BLE001 (raised below, once the other ranks know)
        error = caught
    if not control.all_agree(digest(f"{inputs}|{modes}|{error!r}")):
        control.on_every_rank("checking its call", lambda: _reraise(error))
        _explain_difference(control, inputs, modes)
    if error is not None:
        raise error
    return call


def _explain_difference(control: ControlGroup, inputs: Mapping[str, str], modes: Mapping[str, str]) -> None:
    """Raise on every rank, saying which ranks differ in what; called on all of them."""
    all_inputs, all_modes = zip(*control.gather((inputs, modes)), strict=True)
    found = differences(all_inputs)
    if not found:
        raise StaleModelError(
            f"the ranks call the module in different modes: {differences(all_modes)}. train(), eval(), no_grad(), "
            "autocast and non-tensor arguments must be the same on every rank"
        )
    if any(one.keys() != inputs.keys() for one in all_inputs):
        raise BatchError(f"the ranks pass different inputs: {found}. Every rank must make the same call")
    if any(_dtype(one[path]) != _dtype(inputs[path]) for one in all_inputs for path in inputs):
        raise BatchError(f"the ranks pass inputs of different dtypes: {found}. Cast them to one dtype before the call")
    raise BatchError(
        f"the ranks pass inputs of different shapes: {found}. Every rank must pass equally many rows, of equal "
        "lengths: drop or pad the last incomplete batch (DataLoader: drop_last=True), and pad all ranks to one length"
    )


def _dtype(described: str) -> str:
    return described.partition("[")[0]


def _reraise(error: Exception | None) -> None:
    if error is not None:
        raise error
