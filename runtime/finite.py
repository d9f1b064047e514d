"""A step that meets a NaN ends all ranks, in the same place, with an error that names the rank that met it first.

Looked at are, after a backward pass, the outputs that gradients flowed into and the gradients; after a forward pass
that no gradient can follow, its outputs.  Infinities count in a loss alone: masks hold them, and those in gradients are
`GradScaler`'s to judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar.errors import NanError
from autopar.runtime.agreement import by_value
from autopar.runtime.control import ControlGroup

if TYPE_CHECKING:  # which imports this
    from autopar.runtime.execution import BoundStep

_FINE, _NAN_OUTPUTS, _INFINITE_LOSS, _NAN_GRADIENTS = (
    "no fault",
    "NaN in outputs",
    "an infinite loss",
    "NaN in gradients",
)

Search = Callable[[ControlGroup, "Replay", bool], str]
"""`search(control, replay, infinite)`: runs a call again and says which ranks first had a NaN and where, or with
`infinite` an infinity; empty if none had one.  Called on every rank, and the same on each."""


@dataclass
class Replay:
    """A call of a program, kept until its backward pass is over, so that it can be run again as it was.

    Attributes:
        step: the program.
        tensors, seed: what it was called with.
        buffers: those that the program changes, as they were before.
        largest: the largest magnitude in each of its outputs; None for one that does not float.
        scalar: which of its outputs are scalars.
        tangents: the gradients of its outputs, where they are run again; None without a backward pass.
    """

    step: BoundStep
    tensors: Mapping[str, Tensor]
    seed: int
    buffers: Mapping[str, Tensor]
    largest: list[Tensor | None] = field(default_factory=list)
    scalar: list[bool] = field(default_factory=list)
    tangents: Sequence[Tensor | None] | None = None

    def returned(self, outputs: Sequence[Any]) -> None:
        """Remember what must be known of the outputs, which are not kept: logits are large."""
        self.largest = [_largest([output]) if _floats(output) else None for output in outputs]
        self.scalar = [isinstance(output, Tensor) and output.dim() == 0 for output in outputs]

    def run(
        self, search: AbstractContextManager[Any], before: Callable[[str, Tensor], None],
        between: Callable[[str, Tensor], None],
    ) -> None:  # fmt: skip
        """Run it again; nothing stays changed.

        Args:
            search: what the two passes run in; entered for each.
            before: given each input, parameter and buffer, with its name in words, before the passes.
            between: given the gradient of each output, before the backward pass.
        """
        step, changed = self.step, self.step.changed_buffers
        now = {path: buffer.clone() for path, buffer in changed.items()}
        device = step.device_type
        try:
            with torch.no_grad(), torch.autocast(device, enabled=False), step.accumulation.aside():
                _write(changed, self.buffers)
                for name, tensor in step.named_inputs(self.tensors):
                    before(name, tensor)
                with search:
                    _, saved = step.run_forward(self.tensors, self.seed)
                if self.tangents is not None:
                    for path, tangent in zip(step.output_paths, self.tangents, strict=True):
                        if tangent is not None:
                            between(f"the gradient of output {path!r} that the loop computes", tangent)
                    with search:
                        step.run_backward(saved, self.tangents, self.seed)
        finally:
            with torch.no_grad():
                _write(changed, now)


class Guard:
    """Looks at the steps of one module.

    Attributes:
        active: whether it does; the same on every rank.
    """

    def __init__(self, control: ControlGroup, search: Search | None = None) -> None:
        self.active = False
        self._control, self._search = control, search

    @property
    def can_search(self) -> bool:
        """Whether it can say where a fault began, without which it must not be active."""
        return self._search is not None

    def keep(self, step: BoundStep, tensors: Mapping[str, Tensor], seed: int) -> Replay | None:
        """What is needed to run a call again; None if nobody looks."""
        if not self.active:
            return None
        return Replay(step, tensors, seed, {path: b.clone() for path, b in step.changed_buffers.items()})

    def check_forward(self, replay: Replay) -> None:
        """Look at a forward pass that no backward pass follows.

        Raises:
            NanError: on every rank, if an output of any rank has a NaN.
        """
        self._judge(replay, _NAN_OUTPUTS if _any(math.isnan, replay.largest) else _FINE, None)

    def check_backward(
        self, replay: Replay, tangents: Sequence[Tensor | None], gradients: Iterable[Tensor | None], added: bool = False
    ) -> None:
        """Look at a step; its gradients are not yet in `p.grad`.

        Args:
            replay: the call.
            tangents: the gradients of its outputs.
            gradients: what its backward pass returned, and what that leaves for a later reduction.
            added: whether they hold those of earlier micro-steps, which were looked at, and left to `GradScaler`.

        Raises:
            NanError: on every rank, if any rank has a NaN in an output that gradients flow into or in a gradient, or an
                infinite loss.  No error is what `GradScaler` provides for: a NaN in gradients that is not there when
                the backward pass is run again without the loss's scale.
        """
        flows = [tangent is not None for tangent in tangents]
        outputs = [number for number, flow in zip(replay.largest, flows, strict=True) if flow]
        losses = [n for n, flow, scalar in zip(replay.largest, flows, replay.scalar, strict=True) if flow and scalar]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]
        mine = _FINE
        if _any(math.isnan, outputs):
            mine = _NAN_OUTPUTS
        elif _any(math.isinf, losses):
            mine = _INFINITE_LOSS
        elif _any(math.isnan, [_largest(local)]):
            mine = _NAN_GRADIENTS
        self._judge(replay, mine, tangents, added)

    def _judge(self, replay: Replay, mine: str, tangents: Sequence[Tensor | None] | None, added: bool = False) -> None:
        """Raise if any rank has a fault, once all know what it is and where it began."""
        fine = mine == _FINE
        if self._control.all_agree(0 if fine else self._control.rank + 1) and fine:
            return
        faults, scaled = self._control.gather(mine), False
        if tangents is not None:
            replay.tangents, scaled = self._unscaled(tangents)
        infinite = _NAN_OUTPUTS not in faults and _INFINITE_LOSS in faults
        assert self._search is not None, "active without a way to search"
        where = self._search(self._control, replay, infinite)
        left_to_scaler = (scaled or added) and set(faults) <= {_FINE, _NAN_GRADIENTS}
        if where or not left_to_scaler:
            raise NanError(_message(replay, faults, where, "infinity" if infinite else "NaN"))

    def _unscaled(self, tangents: Sequence[Tensor | None]) -> tuple[list[Tensor | None], bool]:
        """The gradients of the outputs with magnitudes of at most one and no infinities, on all ranks in proportion;
        and whether that changed them."""
        kept = [None if t is None else torch.nan_to_num(t, nan=math.nan, posinf=0.0, neginf=0.0) for t in tangents]
        mine = max((float(t.nan_to_num(nan=0.0).abs().max()) for t in kept if t is not None and t.numel()), default=0.0)
        infinite = any(t is not None and bool(t.isinf().any()) for t in tangents)
        told = self._control.gather((mine, infinite))
        scale = max(1.0, *(largest for largest, _ in told))
        changed = scale > 1.0 or any(found for _, found in told)
        return [None if t is None else t / scale for t in kept], changed


def _message(replay: Replay, faults: Sequence[str], where: str, value: str) -> str:
    found = f"the first {value} is that of {where}" if where else (
        f"run again, the call has no {value}: its batch, a parameter or a buffer was changed in between"
    )  # fmt: skip
    passes = "forward pass" if replay.tangents is None else "forward and backward pass"
    gradients = "" if replay.tangents is None else "; the gradients of this pass are not in p.grad"
    return (
        f"a {passes} of the module gave {by_value(faults)}: {found}. Parameters are as before{gradients}: mend what is "
        "named, or go on from the last checkpoint without this batch"
    )


def _write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for path, tensor in tensors.items():
        tensor.copy_(values[path])


def _floats(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, a scalar on their device, which is not waited for; NaN if any is one, else infinity if any
    is one."""
    return get_total_norm([tensor for tensor in tensors if tensor.numel()], norm_type=math.inf)


def _any(test: Callable[[float], bool], numbers: Iterable[Tensor | None]) -> bool:
    return any(test(float(number)) for number in numbers if number is not None)
