"""Trying a plan in one process, in float64, before it is trusted with a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.cluster import Cluster, free_memory_bytes
from autopar.compiler import Compiler
from autopar.errors import InputError, MeshError, VerificationError
from autopar.lifting import lift_joint, lift_program
from autopar.mesh import parse_shape
from autopar.plan import Plan
from autopar.plan_file import check_plan_matches
from autopar.runtime.control import ControlGroup
from autopar.search import AUTO
from autopar.show import format_bytes
from autopar.signature import call_signature, check_module, find_batch_dims, flatten_inputs, split_call
from autopar.single_device import Float64Throughout, in_float64
from autopar.strategies import canonical_name
from autopar.verification import TOLERANCE, VerifyReport, check_batch, compare

ROWS = 2
"""Of each rank's batch that a rehearsal runs: with one row, dims of size 1 would hide what is cut wrongly."""


def verify(
    model: nn.Module,
    plan: Plan | str,
    example_inputs: Any,
    *,
    mesh: int | str | Sequence[int] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    precision: str | None = None,
    num_steps: int = 0,
) -> VerifyReport:
    """Run all ranks of the rewritten program in this process, in float64, and compare with the single device.

    Needs no process group.  The model and the inputs are copied; parameters on the meta device get random values.
    Casts
    to a lower precision inside the model are lifted to float64 on both sides.  With `precision`, the program is that of
    mixed precision, casts and all, in which then float64 takes the place of every floating dtype.

    Args:
        model: the module, in the mode (train or eval) to verify.
        plan: a plan, or a strategy's name, which then needs `mesh`.
        example_inputs: the *global* batch, in a form that `parallelize` takes.
        mesh: shape of the mesh, for a strategy's name.
        batch_dims, precision: as in `parallelize`.
        num_steps: compare everything again after so many steps of AdamW, parameters too.

    Returns:
        Loss, outputs, every gradient and every buffer compared; `report.ok` and the largest difference.

    Raises:
        InputError: if the inputs have no values, or the model itself fails on them.
        BatchError: if the batch cannot be cut over the ranks.
    """
    if not isinstance(plan, (str, Plan)):
        raise InputError(f"verify takes a plan or a strategy's name, got {plan!r}")
    if not isinstance(num_steps, int) or num_steps < 0:
        raise InputError(f"num_steps={num_steps!r}: give a whole number of steps of the optimizer, from 0")
    if isinstance(plan, str) and mesh is None:
        raise InputError(f'verify needs the mesh to make a {plan!r} plan for, such as mesh=4 or mesh="2x2"')
    if isinstance(plan, Plan) and mesh is not None and math.prod(parse_shape(mesh)) != plan.mesh.num_ranks:
        raise MeshError(f"mesh {mesh!r} is not the plan's, which is {plan.mesh}: leave mesh out")
    check_module(model)
    inputs = split_call(example_inputs)
    copied, args, kwargs = in_float64(model, *inputs)
    sizes = plan.mesh.sizes if isinstance(plan, Plan) else parse_shape(mesh)  # type: ignore[arg-type]
    num_ranks = math.prod(sizes)
    name = AUTO if isinstance(plan, Plan) or plan == AUTO else canonical_name(plan)
    cluster = Cluster.of_live("cpu", num_ranks, num_ranks)
    mixed = precision is not None
    around_trace = nullcontext if mixed else Float64Throughout
    compiler = Compiler(
        model if mixed else copied, sizes, cluster, None, name, batch_dims=batch_dims, around_trace=around_trace,
        precision=precision,
    )  # fmt: skip
    joint = compiler.trace(*(inputs if mixed else (args, kwargs)), train=True, local=False)
    check_batch(dict(flatten_inputs(args, kwargs)[0]), joint.batch_dims, num_ranks)
    if isinstance(plan, Plan):
        check_plan_matches(plan, joint)
    made = plan if isinstance(plan, Plan) else compiler.plan(joint)
    program = compiler.compile(joint, made)
    if mixed:
        joint, program = lift_joint(joint), lift_program(program)
    return compare(joint, program, made, copied, args, kwargs, num_steps)


def rehearse(
    model: nn.Module,
    control: ControlGroup,
    batch_dims: Mapping[str, int | None] | None,
    precision: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
) -> VerifyReport:
    """Verify a plan on the first rows of every rank's batch; called on all ranks.

    Rank 0 does the work: it runs all ranks of the program and the single device in float64 on the CPU.  The model may
    hold DTensors; where they are cut, random values stand for theirs.

    Raises:
        VerificationError: on every rank, if the program's numbers differ from the single device's.
        InputError: if rank 0's host lacks the memory for it, or the model cannot run in float64 on the CPU.
    """
    _, batch, every, note = global_rows(control, args, kwargs, batch_dims)

    def run() -> VerifyReport:
        check_memory(model, plan.mesh.num_ranks)
        report = replace(verify(model, plan, batch, batch_dims=every, precision=precision), note=note)
        if not report.ok:
            raise VerificationError(
                f"the {plan.strategy} plan on mesh {plan.mesh} does not compute what one device does: {report} "
                f"(accepted: {TOLERANCE:.0e}). Nothing was trained. autopar.verify(model, strategy, batch, "
                'mesh=…) repeats the comparison; take another strategy, such as strategy="ddp", until it is equal'
            )
        return report

    return control.on_first_rank("verifying", run)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def global_rows(
    control: ControlGroup, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Mapping[str, int | None] | None
) -> tuple[Call, Call, dict[str, int | None], str]:
    """The first rows of every rank's batch; called on all ranks.

    Returns:
        This rank's rows as a call; the global batch of them all as a call, on the CPU; the batch dim of each of its
        inputs, or None; and in words what was taken.
    """
    signature, tensors = call_signature(args, kwargs)
    dims = find_batch_dims(args, kwargs, batch_dims)
    rows = [_first_rows(t, dims.get(path)) for path, t in zip(signature.paths, tensors, strict=True)]
    parts = control.gather(rows)
    named = zip(signature.paths, zip(*parts, strict=True), strict=True)
    batch = [torch.cat(part, dims[path]) if path in dims else part[0] for path, part in named]
    mine = [row.to(tensor.device) for row, tensor in zip(rows, tensors, strict=True)]
    sizes = (tensor.shape[dims[path]] for path, tensor in zip(signature.paths, tensors, strict=True) if path in dims)
    size = next(sizes, 0)
    words = f"on {min(ROWS, size)} of each rank's {size} rows" if size else "on inputs without a batch"
    every = {path: dims.get(path) for path in signature.paths}
    return signature.rebuild(mine), signature.rebuild(batch), every, f"{words}, in float64 on rank 0"


def _first_rows(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    rows = tensor if dim is None else tensor.narrow(dim, 0, min(ROWS, tensor.shape[dim]))
    return rows.detach().cpu().clone()  # a copy, so that no more travels than the rows


def check_memory(model: nn.Module, num_ranks: int) -> None:
    """Refuse what the host's memory does not hold: values and gradients of both sides, and gradients of each rank."""
    num_elements = sum(t.numel() for t in [*model.parameters(), *model.buffers()])
    need, free = 8 * num_elements * (4 + num_ranks), free_memory_bytes()
    if need > free:
        raise InputError(
            f"verifying {num_elements:,} parameters for {num_ranks} ranks in one process takes about "
            f"{format_bytes(need)} in float64, and this host has {format_bytes(free)} free: verify the same model with "
            "fewer layers (autopar.verify needs no ranks), or leave verify=True out"
        )
