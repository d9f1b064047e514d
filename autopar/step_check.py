"""One real step of a `ParallelModule`, on its ranks and in its precision, beside the single device in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.errors import InputError, VerificationError
from autopar.graph import GraphInput, InputKind, OutputKind
from autopar.rehearsal import check_memory, global_rows
from autopar.runtime.module import ParallelModule
from autopar.signature import flatten_inputs, flatten_output
from autopar.single_device import Float64Throughout, Reference, in_float64
from autopar.verification import NOISE, VerifyReport, differences

ROUNDINGS = 1e4
"""How many roundings of the computing dtype a difference may be: a sum left out or made twice is off by a factor, which
is more than these in every dtype (in bfloat16, whose roundings are large, at most a tenth is accepted)."""


def verify_step(
    module: ParallelModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dims: Mapping[str, int | None] | None,
    precision: torch.dtype | None,
) -> VerifyReport:
    """See `ParallelModule.verify_step`."""
    control, model, plan = module.control_group, module.original_module, module.plan
    mine, batch, dims, note = global_rows(control, args, kwargs, batch_dims)
    seed = sum(module.random_state)
    before = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
    found = real_step(module, mine)
    weights = {}
    for name, parameter in model.named_parameters():  # one after the other, and kept by rank 0 alone
        full = _whole(parameter)
        if control.rank == 0:
            weights[name] = full

    def compare() -> VerifyReport:
        check_memory(model, 1)
        copied = _with_values(model, {**weights, **before})
        copied, global_args, global_kwargs = in_float64(copied, *batch)
        compiler = Compiler(copied, (1,), Cluster.of_live("cpu", 1, 1), batch_dims=dims, around_trace=Float64Throughout)
        joint = compiler.trace(global_args, global_kwargs, train=True, local=False)
        inputs = dict(flatten_inputs(global_args, global_kwargs)[0])
        values = {GraphInput(InputKind.INPUT, path): value for path, value in inputs.items()}
        expected = Reference(copied, joint, global_args, global_kwargs, values, seed).step()
        dtype = precision or max((w.dtype for w in weights.values()), key=lambda d: d.itemsize)
        accepted = min(0.1, ROUNDINGS * torch.finfo(dtype).eps)
        paths = {spec.path for spec in joint.inputs if spec.kind is InputKind.PARAM}
        results = {key: v for key, v in found.items() if key[0] is not OutputKind.GRADIENT or key[1] in paths}
        parameters = {GraphInput(InputKind.PARAM, name): value.double() for name, value in weights.items()}
        errors = differences({**parameters, **values}, results, expected, noise=max(NOISE, accepted))
        worst = max(errors, key=errors.__getitem__)
        report = VerifyReport(errors[worst] <= accepted, errors[worst], worst, errors, plan, 1.0, note)
        if not report.ok:
            raise VerificationError(
                f"a step of the {plan.strategy} plan on mesh {plan.mesh} differs from the single device's: {report} "
                f"(accepted in {dtype}: {accepted:.0e}). If autopar.verify finds the same program right, a rank, a "
                "link or a library computes wrongly"
            )
        return report

    return control.on_first_rank("verifying a step", compare)


def real_step(
    module: ParallelModule, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> dict[tuple[OutputKind, str], Tensor | None]:
    """Scalar outputs, gradients and buffers of a step, whole and in float64 where they float; nothing stays changed."""
    random = module.random_state
    held = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with torch.enable_grad():
            tree, outputs = flatten_output(module(*call[0], **call[1]))
            scalars = {path: t for path, t in zip(tree.paths, outputs, strict=True) if t.dim() == 0}
            losses = [t for t in scalars.values() if t.requires_grad]
            if not losses:
                raise InputError("this needs a module that returns its loss, a scalar that requires grad")
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(losses, list(trained.values()), allow_unused=True)
        found: dict[tuple[OutputKind, str], Tensor | None] = {
            (OutputKind.OUTPUT, path): t.detach().cpu().double() for path, t in scalars.items()
        }
        for name, gradient in zip(trained, gradients, strict=True):
            found[OutputKind.GRADIENT, name] = None if gradient is None else _whole(gradient).double()
        return found
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(held[name])
        module.random_state = random


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model that holds these plain tensors, by first name."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = nn.Parameter(values[name], requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = values[name]
    return copy.deepcopy(model, memo)
