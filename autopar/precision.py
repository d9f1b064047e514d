"""Mixed precision: the dtype in which a model computes, while its parameters rest in their own.

The rules are those of PyTorch's FSDP2 with `MixedPrecisionPolicy(param_dtype=…, reduce_dtype=torch.float32,
cast_forward_inputs=True)`, with every module that holds parameters as a unit: parameters are cast where the program
uses them, a module that holds parameters gets its floating inputs in their dtype, and buffers stay as they are.  A
module that has floating buffers beside its parameters (a batch norm's running statistics) computes as it is, since its
kernel needs them all in one dtype.  Losses are computed in float32 at least, as `torch.autocast` does.  Gradients go
back through the casts, so they arrive in the dtype of the parameter at rest, and are summed over the ranks in that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._compat import tree_map
from autopar.errors import InputError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which a model computes, by name.  With `fp16` gradients may underflow: scale the loss, as with PyTorch's
`GradScaler`."""


def compute_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype of a name in `PRECISIONS`; None for None: the model computes as it is.

    Raises:
        InputError: if there is no such name.
    """
    if precision is None:
        return None
    if precision not in PRECISIONS:
        raise InputError(
            f"no precision {precision!r}; choose one of {', '.join(PRECISIONS)}, or None for what the model's own "
            "dtypes give"
        )
    return PRECISIONS[precision]


def used_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """The dtype in which each floating parameter of a model is used, by its id, if the model computes in `dtype`."""
    if dtype is None:
        return {}
    held = [(module, p) for module in model.modules() for p in _floating(module._parameters)]
    as_they_are = {id(p) for module, p in held if _floating(module._buffers)}
    return {id(p): p.dtype if id(p) in as_they_are else dtype for _, p in held}


@contextmanager
def cast_inputs(model: nn.Module, used: Mapping[int, torch.dtype]) -> Iterator[None]:
    """While active, a module that holds parameters gets its floating inputs in the dtype in which they are used."""
    hooks = []
    try:
        for module in model.modules() if used else ():
            dtypes = {used[id(p)] for p in _floating(module._parameters)}
            if len(dtypes) == 1:
                hooks.append(module.register_forward_pre_hook(InputCast(*dtypes), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


class InputCast:
    """A hook that casts what a module is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments, cast."""

        def cast(leaf: Any) -> Any:
            return leaf.to(self.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return tree_map(cast, args), tree_map(cast, kwargs)


class WideLosses(TorchFunctionMode):
    """Computes PyTorch's losses in float32 where their inputs are narrower."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _LOSSES:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(at_least_float32, args), **tree_map(at_least_float32, kwargs or {}))


_LOSSES = {
    function for name, function in vars(F).items() if name.endswith("_loss") or name in {
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div",
    }
}  # fmt: skip


def at_least_float32(value: Any) -> Any:
    """A floating tensor in float32, or its own dtype if that is wider; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _floating(tensors: Mapping[str, torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in tensors.values() if t is not None and t.is_floating_point()]
