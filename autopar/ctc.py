"""Connectionist temporal classification with shapes that follow from shapes alone, each sequence by itself.

PyTorch's op keeps as much of each sequence as the longest target asks for, so that nobody knows its results' shapes who
does not know the lengths.  Here that is as wide as the targets are, which any device may cut along the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar._compat import fake_kernel
from autopar.corrections import FUNCTIONS
from autopar.rules import Call, Dims, OpRule, build, derives

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`aten._ctc_loss` of targets in rows.

    A. Graves et al., "Connectionist Temporal Classification", 2006: the negative log likelihood of each sequence, and
    the forward variables, equations 6 to 8.

    Args:
        log_probs: (positions, batch, classes).
        targets: (batch, longest) integers.
        input_lengths, target_lengths: (batch,) integers.
        blank: the class that stands for no label.
        zero_infinity: let sequences that are too short for their targets have no gradient.

    Returns:
        (batch,), and (batch, positions, 2 * longest + 1).
    """
    lengths = (input_lengths, target_lengths)
    losses, alphas = aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)
    # The kernel keeps as much as the longest target of these rows needs, and leaves undefined what is beyond a length.
    alphas = F.pad(alphas, (0, 2 * targets.shape[1] + 1 - alphas.shape[2]))
    given = [
        torch.arange(size, device=alphas.device) < bound.to(alphas.device).unsqueeze(1)
        for size, bound in zip(alphas.shape[1:], (input_lengths, 2 * target_lengths + 1), strict=True)
    ]
    return losses, alphas.masked_fill_(~(given[0].unsqueeze(2) & given[1].unsqueeze(1)), -torch.inf)


@ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_positions, num_rows = log_probs.shape[:2]
    alphas = log_probs.new_empty((num_rows, num_positions, 2 * targets.shape[1] + 1))
    return log_probs.new_empty((num_rows,)), alphas


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, losses: Tensor,
    alphas: Tensor, blank: int, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`aten._ctc_loss_backward`: the gradient of `log_probs`, given what `ctc_loss` returned and `grad` (batch,)."""
    gradient: Tensor = aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, input_lengths, target_lengths, losses, alphas, blank, zero_infinity
    )
    return gradient


@ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@derives(torch.ops.autopar.ctc_loss, torch.ops.autopar.ctc_loss_backward)
def sequences(call: Call) -> OpRule:
    """Each sequence of the batch by itself.  The kernel checks lengths, which padding has not got."""
    row: Dims = (("n",),)
    scores: Dims = (("t",), ("n",), ("c",))
    alphas: Dims = (("n",), ("t",), ("a",))
    inputs: dict[str, Dims | list[Dims]] = {"log_probs": scores, "targets": (("n",), ("s",)), "alphas": alphas}
    inputs |= dict.fromkeys(("input_lengths", "target_lengths", "grad", "losses"), row)
    outs: list[Dims] = [scores] if "grad" in call.args else [row, alphas]
    return build(call, call.own(inputs), outs, whole=["t", "c", "s", "a"], even=["n"])


# ------------------------------------------------------------------------------------------- in the place of PyTorch's


def _lengths_as_tensors(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Gives `ctc_loss` tensors of lengths instead of lists, and targets in rows instead of one after another.

    With lists, PyTorch writes into a tensor on the way, which a fake one does not allow.
    """
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    lengths, targets = given["target_lengths"], given["targets"]
    if not isinstance(lengths, Tensor):
        if targets.dim() == 1 and given["log_probs"].dim() == 3:
            given["targets"] = _in_rows(targets, lengths)
        given["target_lengths"] = _constants(lengths, targets.device)
    if not isinstance(given["input_lengths"], Tensor):
        given["input_lengths"] = _constants(given["input_lengths"], targets.device)
    return func(**given)


FUNCTIONS |= {func: partial(_lengths_as_tensors, func) for func in (F.ctc_loss, torch.ctc_loss)}

_ARGUMENTS = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")


def _in_rows(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Targets one after another as a matrix; a row that is shorter than the longest ends in labels that nobody
    reads."""
    starts = _constants([0, *itertools.accumulate(lengths)][:-1], targets.device)
    places = starts.unsqueeze(1) + torch.arange(max(lengths), device=targets.device)
    return targets[places.clamp(max=targets.shape[0] - 1)]


def _constants(values: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as a tensor, made by ops that each rank can do for its own part."""
    runs = [torch.full((len(list(run)),), value, device=device) for value, run in itertools.groupby(values)]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


@fake_kernel(aten._ctc_loss.Tensor)
def _shapes(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    num_positions, num_rows = log_probs.shape[:2]
    for name, lengths in (("input", input_lengths), ("target", target_lengths)):
        if len(lengths) != num_rows:
            raise ValueError(
                f"ctc_loss of {num_rows} sequences (the batch of all ranks together) got {len(lengths)} {name}_lengths:"
                " pass them as a tensor among the inputs, or make them of the batch's shape in the model"
            )
    if targets.dim() != 2:
        raise ValueError(
            "ctc_loss got the targets of all sequences one after another, and their lengths as a tensor, whose values "
            "are not known: pass targets as a matrix with a row for each sequence, filled up with any label"
        )
    return log_probs.new_empty((num_rows,)), log_probs.new_empty((num_rows, num_positions, 2 * targets.shape[1] + 1))


@fake_kernel(aten._ctc_loss_backward.Tensor)
def _backward_shape(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


DEFINITIONS: dict[Any, Callable[[Call], Callable[..., Any] | None]] = {
    aten._ctc_loss.Tensor: lambda call: torch.ops.autopar.ctc_loss,
    aten._ctc_loss_backward.Tensor: lambda call: torch.ops.autopar.ctc_loss_backward,
}
