"""Optimizers that were made before the parameters were sharded: they would step tensors that nobody computes with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError

_MARK = "_autopar_replaced"


def mark_replaced(parameter: Tensor, name: str) -> None:
    """From now on, an optimizer that holds this parameter is refused when it steps.

    Args:
        parameter: which the model does not have any more.
        name: of the one that has taken its place.
    """
    setattr(parameter, _MARK, name)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, _MARK, None)) is not None:
                raise InputError(
                    f"the optimizer holds parameter {name!r} as it was before autopar.parallelize, and would step what "
                    "the model no longer has: make it afterwards, of pm.parameters()"
                )
