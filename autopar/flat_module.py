"""The model as tracing wants it: a function from tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar import ctc  # noqa: F401  (takes the place of a function of PyTorch's)
from autopar.batch_norm import averages_batches, averaging_forward
from autopar.errors import InputError
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.model_state import ModelState
from autopar.precision import WideLosses, at_least_float32
from autopar.row_selection import SelectsRows, refuse_selected
from autopar.signature import CallSignature, OutputTree, flatten_output


class FlatModule(nn.Module):
    """The model as a function from its parameters, buffers and input tensors to its output tensors.

    The model's tensors are plain inputs, each once however many names it has.  Parameters are cast to
    the dtypes in which they are used, so that from here on mixed precision is nothing but casts in the graph.  Modules
    in `forwards` run what is there in the place of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        signature: CallSignature,
        used: Mapping[int, torch.dtype],
        forwards: Mapping[nn.Module, Callable[..., Any]],
        follows_masks: bool = True,
    ) -> None:
        super().__init__()
        self.follows_masks = follows_masks
        # Not a submodule, so that AOTAutograd does not lift the parameters itself.
        self.call = model.__call__
        averaging = [module for module in model.modules() if averages_batches(module)]
        held = {module: forward for module, forward in forwards.items() if id(module) in state.paths}
        self.forwards = {**held, **{module: partial(averaging_forward, module) for module in averaging}}
        self.state = state
        self.signature = signature
        self.dtypes = {name: used[id(p)] for name, p in state.parameters.items() if id(p) in used}
        self.inputs = (
            *(GraphInput(InputKind.PARAM, name) for name in state.parameters),
            *(GraphInput(InputKind.BUFFER, name) for name in state.buffers),
            *(GraphInput(InputKind.INPUT, path) for path in signature.paths),
        )
        self.output_tree: OutputTree | None = None
        self.outputs: tuple[GraphOutput, ...] = ()
        self.held: dict[GraphInput, torch.Tensor] = {}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `returned` makes of `run`, for AOTAutograd."""
        return self.returned(*self.run(*tensors))

    def returned(
        self, outputs: Sequence[torch.Tensor], reassigned: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The model's output tensors, those that get no tangents detached, and its buffers' new values."""
        with_tangent = [t.requires_grad for t in outputs]
        if any(wanted and t.ndim == 0 for wanted, t in zip(with_tangent, outputs, strict=True)):
            with_tangent = [wanted and t.ndim == 0 for wanted, t in zip(with_tangent, outputs, strict=True)]
        outputs = [t if wanted else t.detach() for wanted, t in zip(with_tangent, outputs, strict=True)]
        # The copies, removed again later, keep AOTAutograd from treating outputs that share memory specially, and let
        # it expect contiguous tangents.
        returned = (*outputs, *(t.detach() for t in reassigned.values()))
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in returned)

    def run(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """What the model returns, and the tensors to which it sets buffers, by their names."""
        names = list(self.state.tensors)
        held = {name: t.to(self.dtypes.get(name, t.dtype)) for name, t in zip(names, tensors, strict=False)}
        self.held = dict(zip(self.inputs, (*held.values(), *tensors[len(names) :]), strict=True))
        args, kwargs = self.signature.rebuild(tensors[len(names) :])
        # What an earlier call left on the modules must not reach this one.
        self.state.restore()
        self.state.put(held)
        for module, forward in self.forwards.items():
            vars(module)["forward"] = forward
        self.output_tree, outputs = flatten_output(self.called(args, kwargs))
        refuse_selected(outputs)
        if not outputs:
            raise _no_tensors(self.output_tree)
        if self.dtypes:  # whoever adds losses up, or scales them, wants no bfloat16
            outputs = [at_least_float32(t) if t.ndim == 0 else t for t in outputs]
        reassigned = self.state.reassigned(held)
        self.state.left = self.state.changes()
        self.outputs = (
            *(GraphOutput(OutputKind.OUTPUT, path) for path in self.output_tree.paths),
            *(GraphOutput(OutputKind.MUTATION, name) for name in reassigned),
        )
        return outputs, reassigned

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns of a call as it stands."""
        with (
            WideLosses() if self.dtypes else nullcontext(),
            SelectsRows() if self.follows_masks else nullcontext(),
        ):
            return self.call(*args, **kwargs)


def _no_tensors(tree: OutputTree) -> InputError:
    dropped = ", ".join(path or "the return value" for path in tree.dropped)
    hint = (
        f" ({dropped} is an object that PyTorch cannot look into: register its class with"
        " torch.utils._pytree.register_pytree_node, or return a dict)"
        if dropped
        else ""
    )
    return InputError(f"the module returns no tensor{hint}")
