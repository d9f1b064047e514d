"""The facade: what a user calls."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.cluster import Cluster
from autopar.code_versions import code_of, versions
from autopar.compiler import Compiler
from autopar.cost_model.optimizers import OptimizerLike
from autopar.errors import InputError, MeshError
from autopar.mesh import parse_shape
from autopar.nan_search import search_replay
from autopar.passes.defer import defer_reductions
from autopar.plan import Plan
from autopar.plan_cache import open_cache
from autopar.precision import compute_dtype
from autopar.progress import progress
from autopar.rehearsal import rehearse
from autopar.runtime.agreement import agree_on_setup
from autopar.runtime.control import ControlGroup
from autopar.runtime.execution import CompiledStep
from autopar.runtime.module import ParallelModule
from autopar.search import AUTO
from autopar.signature import check_module, flatten_inputs, split_call
from autopar.step_check import verify_step
from autopar.strategies import canonical_name
from autopar.verification import VerifyReport

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
    verify: bool = False,
    stop_at_nan: bool = False,
    cache: bool = True,
) -> ParallelModule:
    """Shard a model over a mesh: trace, plan, rewrite, and turn its parameters into DTensors in place.

    Call it on every rank, under `torchrun`, and build the optimizer afterwards.  Each rank then calls the result with
    its own rows of the batch, as with DDP.

    Args:
        model: an unmodified module, whole on every rank.
        mesh: a `DeviceMesh` of all ranks, or its shape: `4`, `"2x4"`, `(2, 4)`.  The last axis is the fast one.
        mem_gb: memory budget in GiB on one device; never more than the device has.  None: all of it.
        strategy: `auto`, a named strategy (`replicate`, `ddp`, `zero1`, `zero2`, `zero3` = `fsdp`, `hsdp`, `tp`,
            `tp+sp`, `fsdp+tp`), or a `Plan`, such as one from `load_plan`.
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
        verify: before training starts, run the plan's program for all ranks in one process, on two rows of each rank's
            batch in float64, and compare loss, outputs, gradients and buffers with the single device (see
            `autopar.verify`).  Rank 0 does it while the others wait; it holds float64 copies on its CPU.
        stop_at_nan: look after each backward pass (after a forward pass where no gradient can follow) whether outputs
            and gradients are numbers, and whether the loss is finite; if not, on any rank, that call is run again and
            every rank raises a `NanError` that names the rank, op and module where it began (see `autopar.find_nan`).
            What a `GradScaler` skips is no error.  Each step then waits for the device and for all ranks.
        cache: whether rank 0 keeps the plan on disk, and takes the one that it kept when the same was asked before:
            the same traced graph, mesh, cluster, budget, optimizer and settings (`plan.from_cache`; see
            `autopar.plan_cache` for where).

    Raises:
        InputError: if there is no such strategy, optimizer or precision.
        MeshError: if the mesh does not fit the running ranks, or the cluster has another number of ranks.
        InfeasibleBudgetError: if nothing fits; says the smallest budget that does.
        TraceError: if the model cannot be traced to one graph.
        VerificationError: with `verify`, if the numbers differ.
    """
    check_module(model)
    _join_processes(mesh)
    control = ControlGroup()
    setup = _setup(
        model, mesh, strategy, optimizer, mem_gb=mem_gb, batch_dims=batch_dims, cluster=cluster and str(cluster),
        precision=precision, accumulate=accumulate, verify=verify, stop_at_nan=stop_at_nan,
    )  # fmt: skip
    agree_on_setup(control, setup)
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
        cache=open_cache(cache),
    )

    # Partials rather than functions in here: a copied module's are bound to copies of what they are bound to.
    module = ParallelModule(
        model, device_mesh, compile=partial(_compile_step, compiler, control.rank == 0), flatten=flatten_inputs,
        decide=partial(_decide, compiler, strategy),
        rehearse=partial(rehearse, model, control, batch_dims, precision) if verify else None,
        check_step=partial(_check_step, batch_dims, precision), search_nan=search_replay, control=control,
    )  # fmt: skip
    module.stop_at_nan = stop_at_nan
    if example_inputs is not None:
        args, kwargs = split_call(example_inputs)
        module.prepare(*args, **kwargs)
    return module


def _decide(compiler: Compiler, strategy: str | Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    with progress() as compiler.say:
        joint = compiler.trace(args, kwargs, torch.is_grad_enabled())
        made = compiler.given(joint, strategy) if isinstance(strategy, Plan) else compiler.plan(joint)
    return replace(made, cost=None)  # each rank's own is ready when asked; to send it, it would be worked out


def _compile_step(
    compiler: Compiler, shown: bool, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, plan: Plan
) -> CompiledStep:
    with progress(shown=shown) as compiler.say:
        joint = compiler.trace(args, kwargs, train)
        program, cost = compiler.compile(joint, plan), compiler.cost(joint, plan)
    return CompiledStep(program, joint.output_tree.rebuild, defer_reductions, cost)


def _check_step(
    batch_dims: Mapping[str, int | None] | None,
    precision: str | None,
    module: ParallelModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> VerifyReport:
    return verify_step(module, args, kwargs, batch_dims, compute_dtype(precision))


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


def _setup(
    model: nn.Module, mesh: MeshLike, strategy: str | Plan, optimizer: OptimizerLike, **others: object
) -> dict[str, str]:
    """What the ranks must have in common: name -> this rank's, in words."""
    arguments = {name: repr(value) for name, value in others.items()}
    shape = f"{tuple(mesh.shape)} named {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else repr(mesh)
    arguments |= {"mesh": shape, "strategy": _strategy_text(strategy), "optimizer": _optimizer_text(optimizer)}
    return versions() | {"model": type(model).__qualname__} | code_of(model) | arguments


def _strategy_text(strategy: str | Plan) -> str:
    """A name, or what tells two plans apart; not what they were predicted to cost."""
    if not isinstance(strategy, Plan):
        return repr(strategy)
    parts = (strategy.mesh, strategy.factors, sorted(strategy.storage.items()), sorted(strategy.recompute.items()))
    return f"a plan on {strategy.mesh} with digest {hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _optimizer_text(optimizer: OptimizerLike) -> str:
    """A name, or that of the class or function."""
    if isinstance(optimizer, str):
        return repr(optimizer)
    made = optimizer if callable(optimizer) else type(optimizer)
    return str(getattr(made, "__qualname__", type(made).__qualname__))


def _join_processes(mesh: MeshLike) -> None:
    """Start torch.distributed over the ranks that the launcher started, if that was not done.

    Raises:
        MeshError: if they are not as many as the mesh has.
    """
    if isinstance(mesh, DeviceMesh):
        return
    num_ranks = math.prod(parse_shape(mesh))
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


def _live_mesh(model: nn.Module, mesh: MeshLike) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    sizes = parse_shape(mesh)
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


__all__ = ["MeshLike", "parallelize"]
