"""Planning for a cluster that is only described: no process group, no GPU, and a model that may be on the meta device.

Nothing of the model's size is allocated: the model is traced on fake tensors, and its programs are simulated, not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.cluster import Cluster, budget_bytes
from autopar.compiler import Compiler
from autopar.cost_model.optimizers import OptimizerLike
from autopar.errors import InfeasibleBudgetError, InputError, MeshError
from autopar.frontier import Pareto, ParetoPoint, fastest_by_peak
from autopar.graph import JointGraph
from autopar.infeasible import feasible_gb
from autopar.mesh import parse_shape
from autopar.plan import Plan
from autopar.plan_cache import open_cache
from autopar.progress import progress
from autopar.search import AUTO
from autopar.signature import check_module, split_call
from autopar.strategies import canonical_name

MeshShape = int | str | Sequence[int]


def plan(
    model: nn.Module,
    cluster: str | Cluster,
    mem_gb: float | None = None,
    *,
    example_inputs: Any,
    mesh: MeshShape | None = None,
    strategy: str | Plan = AUTO,
    optimizer: OptimizerLike = "adamw",
    batch_dims: Mapping[str, int | None] | None = None,
    precision: str | None = None,
    accumulate: int = 1,
    cache: bool = True,
) -> Plan:
    """The plan that `parallelize` would make on a cluster, made without it.

    Save it with `autopar.save_plan`; on the cluster, `parallelize(model, mesh, strategy=load_plan(path))` runs it.

    Args:
        model: an unmodified module; its parameters may be on the meta device.
        cluster: a description such as `"8xA100-80GB"` or `"2x8 H100-80GB"` (nodes × devices), or a `Cluster`.
        mem_gb: memory budget in GiB on one device; never more than the device has.  None: all of it.
        example_inputs: *one rank's* example batch, in a form that `parallelize` takes; its tensors may be on the meta
            device.
        mesh: shape of the mesh, `"2x8"` or `(2, 8)`; by default nodes × devices of each, or flat on one node.
        strategy: `auto`, a named strategy, or a `Plan` to be priced.
        optimizer: whose memory counts, as in `parallelize`.
        batch_dims, precision, accumulate, cache: as in `parallelize`.

    Raises:
        InputError: if an argument cannot be read, or names an unknown device, strategy or optimizer.
        MeshError: if the mesh has another number of ranks than the cluster, or the strategy cannot use it.
        InfeasibleBudgetError: if nothing fits; says the smallest budget that does.
        TraceError: if the model cannot be traced to one graph.
        PlanError: if the strategy is a plan for another model.
    """
    settings = {"optimizer": optimizer, "batch_dims": batch_dims, "precision": precision, "accumulate": accumulate}
    with progress() as say:
        return plan_with(
            model, cluster, mem_gb, example_inputs, mesh, strategy, settings, cache=open_cache(cache), say=say
        )


def plan_with(
    model: nn.Module,
    cluster: str | Cluster,
    mem_gb: float | None,
    example_inputs: Any,
    mesh: MeshShape | None,
    strategy: str | Plan,
    settings: Mapping[str, Any],
    **around: Any,
) -> Plan:
    """`plan`, without a display of its own.

    Args:
        model, cluster, mem_gb, example_inputs, mesh, strategy: as in `plan`.
        settings: `plan`'s other arguments, by name, as far as they are not the usual ones.
        around: `cache` and `say` of the `Compiler`.
    """
    name = AUTO if isinstance(strategy, Plan) or strategy == AUTO else canonical_name(strategy)
    given = isinstance(strategy, Plan)  # names every layer
    compiler, joint = _trace(model, cluster, mem_gb, example_inputs, mesh, name, {**settings, **around}, whole=given)
    return compiler.given(joint, strategy) if isinstance(strategy, Plan) else compiler.plan(joint)


def pareto(
    model: nn.Module,
    cluster: str | Cluster,
    *,
    example_inputs: Any,
    budgets: Iterable[float] | None = None,
    mesh: MeshShape | None = None,
    optimizer: OptimizerLike = "adamw",
    batch_dims: Mapping[str, int | None] | None = None,
    precision: str | None = None,
    accumulate: int = 1,
) -> Pareto:
    """Step time against memory: the plans that no other beats in both, by rising peak.

    Printed, it says what one more GiB buys.

    Args:
        model, cluster, example_inputs, mesh, optimizer, batch_dims, precision, accumulate: as in `plan`.
        budgets: budgets in GiB for which a point is wanted, each what `plan` returns for it.  Without, it is the whole
            frontier, by prices that of a deep model may be off by some per cent.

    Raises:
        InputError, MeshError, TraceError: as `plan`.
        InfeasibleBudgetError: without budgets, if nothing fits the device.  (A budget that nothing fits has no point.)
    """
    wanted = None if budgets is None else _budgets(budgets)
    settings = {"optimizer": optimizer, "batch_dims": batch_dims, "precision": precision, "accumulate": accumulate}
    with progress() as say:
        compiler, joint = _trace(
            model, cluster, None, example_inputs, mesh, AUTO, {**settings, "say": say}, whole=False
        )
        points, smallest_gb = _frontier(compiler, joint) if wanted is None else _points(compiler, joint, wanted)
    return Pareto(str(compiler.cluster), points, wanted, smallest_gb)


def _points(
    compiler: Compiler, joint: JointGraph, budgets: Sequence[float]
) -> tuple[tuple[ParetoPoint | None, ...], float | None]:
    """The points for these budgets in GiB; and the smallest that works, if one does not."""
    points: list[ParetoPoint | None] = []
    smallest_gb = None
    for limit in [budget_bytes(gb, compiler.cluster) for gb in budgets]:
        try:
            points.append(ParetoPoint(compiler.plan_within(joint, limit)))
        except InfeasibleBudgetError as error:
            points.append(None)
            smallest_gb = error.smallest_feasible_gb
    return tuple(points), smallest_gb


def _frontier(compiler: Compiler, joint: JointGraph) -> tuple[tuple[ParetoPoint | None, ...], float]:
    """The points of the whole frontier, and the smallest budget in GiB that works."""
    costs = [(p.simulation.memory.total, p.simulation.step_time_s) for p in compiler.candidates(joint)]
    smallest_gb = feasible_gb(min(peak_bytes for peak_bytes, _ in costs))
    usable = budget_bytes(None, compiler.cluster)
    compiler.plan_within(joint, usable, closely=False)  # refuses what does not fit the device at all
    peaks = [peak_bytes for peak_bytes in fastest_by_peak(costs) if peak_bytes <= usable]
    points = tuple(ParetoPoint(compiler.plan_within(joint, peak_bytes, closely=False)) for peak_bytes in peaks)
    return points, smallest_gb


def _budgets(budgets: Iterable[float]) -> tuple[float, ...]:
    try:
        listed = list(budgets)
        if not any(isinstance(gb, (str, bool)) for gb in listed):
            return tuple(map(float, listed))
    except (TypeError, ValueError, OverflowError):
        pass  # no list, or not of numbers
    raise InputError(f"budgets must be a list of numbers of GiB on one device, such as [40, 80], got {budgets!r}")


def _trace(
    model: nn.Module,
    cluster: str | Cluster,
    mem_gb: float | None,
    example_inputs: Any,
    mesh: MeshShape | None,
    strategy: str,
    settings: Mapping[str, Any],
    whole: bool,
) -> tuple[Compiler, JointGraph]:
    check_module(model)
    described = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster)
    args, kwargs = split_call(example_inputs)
    budget_bytes(mem_gb, described)  # refused before any work
    sizes = _mesh_sizes(described, mesh)
    compiler = Compiler(model, sizes, described, mem_gb, strategy, **settings)
    return compiler, compiler.trace(args, kwargs, torch.is_grad_enabled(), whole=whole)


def _mesh_sizes(cluster: Cluster, mesh: MeshShape | None) -> tuple[int, ...]:
    if mesh is None:
        nodes = (cluster.num_nodes,) if cluster.num_nodes > 1 else ()
        return (*nodes, cluster.ranks_per_node)
    sizes = parse_shape(mesh)
    if math.prod(sizes) != cluster.num_ranks:
        raise MeshError(
            f"mesh {mesh!r} has {math.prod(sizes)} ranks, but cluster {cluster} has {cluster.num_ranks}: they must be "
            "equal"
        )
    return sizes


__all__ = ["pareto", "plan", "plan_with"]
