"""The facade: what a user calls."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.cluster import Cluster
from autopar.compiler import AUTO, Compiler
from autopar.cost_model.optimizers import OptimizerLike
from autopar.errors import InputError, MeshError
from autopar.lifting import lift_joint, lift_program
from autopar.mesh import parse_shape
from autopar.passes.defer import defer_reductions
from autopar.plan import Plan
from autopar.runtime.execution import CompiledStep
from autopar.runtime.module import ParallelModule
from autopar.signature import flatten_inputs
from autopar.single_device import Float64Throughout, in_float64
from autopar.strategies import canonical_name
from autopar.verification import VerifyReport, check_batch, compare

MeshLike = DeviceMesh | int | str | Sequence[int]


def parallelize(
    model: nn.Module,
    mesh: MeshLike,
    mem_gb: float | None = None,
    *,
    strategy: str | Plan = AUTO,
    example_inputs: Any = None,
    batch_dims: Mapping[str, int | None] | None = None,
    optimizer: OptimizerLike = "adamw",
    cluster: Cluster | str | None = None,
    precision: str | None = None,
    accumulate: int = 1,
) -> ParallelModule:
    """Shard a model over a mesh: trace, plan, rewrite, and turn its parameters into DTensors in place.

    Call it on every rank, under `torchrun`, and build the optimizer afterwards.  Each rank then calls the result with
    its own
    rows of the batch, as with DDP.

    Args:
        model: an unmodified module, whole on every rank.
        mesh: a `DeviceMesh` of all ranks, or its shape: `4`, `"2x4"`, `(2, 4)`.  The last axis is the fast one.
        mem_gb: memory budget in GiB on one device; never more than the device has.  None: all of it.
        strategy: `auto`, a named strategy (`replicate`, `ddp`, `zero1`, `zero2`, `zero3` = `fsdp`, `hsdp`, `tp`,
        `tp+sp`,
            `fsdp+tp`), or a `Plan`, such as one from `load_plan`.
        example_inputs: one rank's example batch: a tuple of positional arguments, a dict of keyword arguments, a pair
            `(args, kwargs)`, or a tensor.  Without it, planning waits for the first call.
        batch_dims: for inputs whose batch dim is not found by its size: path -> dim, or None for an input that is the
            same on every rank.
        optimizer: whose memory counts against the budget: a name (`adamw`, `sgd`, …), a `torch.optim` class, or an
            instance, whose class and options count.
        cluster: what the ranks run on, for prices alone, where the usual rates of the device and its links are not
            those at hand: a `Cluster`, or a description such as `"2x8 H100-80GB @ 400gbit"`.  Memory stays the live
            device's.
        precision: `"bf16"` to compute in bfloat16 while parameters rest, and gradients are summed over the ranks, in
            their own dtype (see `autopar.precision` for `"fp16"` and what is cast where).  None: the model computes in
            the dtypes of its tensors, or those of `torch.autocast` around the call.
        accumulate: how many forward and backward passes your loop makes before a step of the optimizer, for the
            predictions of time and memory; the program is the same (see `ParallelModule.no_sync`).

    Raises:
        InputError: if there is no such strategy, optimizer or precision.
        MeshError: if the mesh does not fit the running ranks, or the cluster has another number of ranks.
        InfeasibleBudgetError: if nothing fits; says the smallest budget that does.
        TraceError: if the model cannot be traced to one graph.
    """
    check_module(model)
    if not isinstance(strategy, Plan) and strategy != AUTO:
        strategy = canonical_name(strategy)
    device_mesh = _live_mesh(model, mesh)
    sizes = tuple(device_mesh.shape)
    compiler = Compiler(
        model,
        sizes,
        _priced_cluster(device_mesh, cluster),
        mem_gb,
        AUTO if isinstance(strategy, Plan) else strategy,
        optimizer,
        batch_dims,
        precision=precision,
        accumulate=accumulate,
    )

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        joint = compiler.trace(args, kwargs, torch.is_grad_enabled())
        return compiler.given(joint, strategy) if isinstance(strategy, Plan) else compiler.plan(joint)

    def compile_step(args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, plan: Plan) -> CompiledStep:
        joint = compiler.trace(args, kwargs, train)
        return CompiledStep(compiler.compile(joint, plan), joint.output_tree.rebuild, defer_reductions)

    module = ParallelModule(model, device_mesh, compile=compile_step, flatten=flatten_inputs, decide=decide)
    if example_inputs is not None:
        args, kwargs = split_call(example_inputs)
        module.prepare(*args, **kwargs)
    return module


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
    if num_steps < 0:
        raise InputError(f"num_steps={num_steps}: give 0 or more steps of the optimizer")
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
    made = compiler.given(joint, plan) if isinstance(plan, Plan) else compiler.plan(joint)
    program = compiler.compile(joint, made)
    if mixed:
        joint, program = lift_joint(joint), lift_program(program)
    return compare(joint, program, made, copied, args, kwargs, num_steps)


def check_module(model: object) -> None:
    """Raise an `InputError` for what is no module, such as a class."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be an nn.Module instance, got {model!r}")


def split_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read example inputs as positional and keyword arguments.

    Raises:
        InputError: if they are neither a tensor, a tuple or list, nor a mapping.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        values = tuple(example_inputs)
        if len(values) == 2 and isinstance(values[0], (tuple, list)) and isinstance(values[1], Mapping):
            return tuple(values[0]), dict(values[1])
        return values, {}
    raise InputError(
        f"example_inputs must be a tensor, a tuple, a dict or (args, kwargs), not {type(example_inputs).__name__}"
    )


def ranks_per_node() -> int:
    """Ranks on this node, as the launcher says; all of them if it does not."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if 0 < local <= world and world % local == 0 else world


def _priced_cluster(mesh: DeviceMesh, described: Cluster | str | None) -> Cluster:
    """The live ranks, or the description of them with the live device's memory."""
    live = Cluster.of_live(mesh.device_type, mesh.size(), ranks_per_node())
    if described is None:
        return live
    cluster = Cluster.parse(described) if isinstance(described, str) else described
    if not isinstance(cluster, Cluster):
        raise InputError(f'cluster must be a Cluster or a text such as "2x8 H100-80GB", got {described!r}')
    if cluster.num_ranks != live.num_ranks:
        raise MeshError(f"cluster {cluster} has {cluster.num_ranks} ranks, but the mesh has {live.num_ranks}")
    if cluster.device.kind != live.device.kind:
        raise InputError(
            f"cluster {cluster} is of {cluster.device.kind} devices, but the mesh is of {live.device.kind}"
        )
    return replace(cluster, device=replace(cluster.device, memory_bytes=live.device.memory_bytes))


def _live_mesh(model: nn.Module, mesh: MeshLike) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    sizes = parse_shape(mesh)
    num_ranks = math.prod(sizes)
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
            raise MeshError(
                f"a mesh of {num_ranks} ranks needs {num_ranks} processes: start the script with "
                f"`torchrun --nproc-per-node {num_ranks} script.py`, or initialise torch.distributed first"
            )
        if int(os.environ["WORLD_SIZE"]) == num_ranks:
            dist.init_process_group()
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if world != num_ranks:
        raise MeshError(f"mesh {mesh!r} has {num_ranks} ranks, but {world} are running: they must be equal")
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    return init_device_mesh(_device_type(model), sizes, mesh_dim_names=names)


def _device_type(model: nn.Module) -> str:
    """Where the model lives; a model on `meta` goes to CUDA if there is one."""
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    if len(kinds) > 1:
        raise InputError(
            f"the model's parameters are on several kinds of devices ({', '.join(sorted(kinds))}): move it to one"
        )
    return kinds.pop() if kinds else ("cuda" if torch.cuda.is_available() else "cpu")


__all__ = ["MeshLike", "check_module", "parallelize", "split_call", "verify"]
