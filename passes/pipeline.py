"""The rewrite: a joint graph and a plan become one rank's program, by a list of passes that a reader can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from autopar.factors import analyse
from autopar.graph import GraphInput, InputKind, JointGraph, drop_unread
from autopar.passes.cast_early import cast_early
from autopar.passes.coalesce import coalesce
from autopar.passes.decide import assign
from autopar.passes.localise import localise
from autopar.passes.lower import lower_reshards
from autopar.passes.merge_blocks import merge_blocks
from autopar.passes.overlap import overlap
from autopar.passes.own_parts import own_parts
from autopar.passes.partition import partition
from autopar.passes.propagate import Assignment
from autopar.passes.regather import regather
from autopar.passes.remat import remat
from autopar.passes.reshard import insert_reshards
from autopar.passes.schedule import bound_reductions, prefetch_parameters, sink_waits
from autopar.placement import Sharding, is_sharded
from autopar.plan import Plan
from autopar.program import LocalGraph, LocalProgram

Trace = Callable[[str, fx.GraphModule], None]
"""Called with each pass's name and the graph after it."""

_Passes = Sequence[tuple[str, Callable[[fx.GraphModule], fx.GraphModule]]]


def rewrite(
    joint: JointGraph,
    plan: Plan,
    after_pass: Trace | None = None,
    check: bool = True,
) -> LocalProgram:
    """Rewrite a normalised joint graph under a plan.

    Args:
        joint: the graph; stays as it is, except that what plans share is kept with it (`JointGraph.derived`).
        plan: the plan.
        after_pass: is shown the graph after each pass.
        check: lint the graph after each pass.  Whoever only compares plans can leave it out.

    Raises:
        PlanError: if the plan does not belong to this graph.
    """
    joint, assignment = assign(joint, plan)
    module = insert_reshards(joint, assignment, plan)
    module = _run([*_lowering(joint, plan), *_scheduling(plan)], module, after_pass, check)
    whole = _local_graph(joint, assignment, module, plan)
    forward, backward = partition(whole)
    program = LocalProgram(plan.mesh, whole, forward, backward)
    if check:
        for local in program.graphs:
            local.module.graph.lint()
    return program


def lowered(joint: JointGraph, plan: Plan) -> fx.Graph:
    """What one rank runs under a plan, without making the program: scheduling moves its ops and collectives and
    partitioning parts them, but neither adds one or takes one away.

    Raises:
        PlanError: as `rewrite` does.
    """
    joint, assignment = assign(joint, plan)
    return _run(_lowering(joint, plan), insert_reshards(joint, assignment, plan), None, check=False).graph


def _lowering(joint: JointGraph, plan: Plan) -> _Passes:
    """From reshards in the global view to one rank's ops."""
    return [
        ("insert_reshards", lambda m: m),
        ("merge_blocks", lambda m: merge_blocks(m, plan.mesh)),
        ("cast_early", cast_early),
        ("remat", lambda m: remat(m, joint.inputs, plan)),
        ("regather", lambda m: regather(m, joint.inputs, plan)),
        ("localise", lambda m: localise(m, plan.mesh)),
        ("lower_reshards", lambda m: lower_reshards(m, plan.mesh)),
        ("own_parts", own_parts),
        ("drop_dead", _drop_dead),
        ("coalesce", coalesce),
    ]


def _scheduling(plan: Plan) -> _Passes:
    """When things run; what runs is settled before."""
    return [
        ("overlap", overlap if plan.overlap else lambda m: m),
        ("sink_waits", sink_waits),
        ("prefetch_parameters", lambda m: prefetch_parameters(m, plan.prefetch)),
        ("bound_reductions", bound_reductions),
    ]


def prefetched(program: LocalProgram, depth: int) -> LocalProgram | None:
    """The program of the same plan but for a greater `Plan.prefetch`, for which the passes before need not run again;
    None if that is the same program.

    The nodes of the given program's joint graph become the new one's.
    """
    before = list(program.joint.module.graph.nodes)
    joint = replace(program.joint, module=prefetch_parameters(program.joint.module, depth))
    if all(old is new for old, new in zip(before, joint.module.graph.nodes, strict=True)):
        return None
    return LocalProgram(program.mesh, joint, *partition(joint))


def _run(passes: _Passes, module: fx.GraphModule, after_pass: Trace | None, check: bool) -> fx.GraphModule:
    for name, run in passes:
        module = run(module)
        if check:
            module.graph.lint()
        if after_pass:
            after_pass(name, module)
    return module


def parameter_uses(joint: JointGraph, plan: Plan) -> dict[str, Sharding]:
    """How each parameter must lie where it is first used cut; parameters that are only used whole are left out."""
    joint, assignment = assign(joint, plan)
    params = {node: path for path, node in joint.param_nodes().items()}
    uses: dict[str, Sharding] = {}
    for node, operands in analyse(joint).operands.items():
        for operand, sharding in zip(operands, assignment.nodes[node].inputs, strict=True):
            if operand in params and any(is_sharded(p) for p in sharding):
                uses.setdefault(params[operand], sharding)
    return uses


def _drop_dead(module: fx.GraphModule) -> fx.GraphModule:
    drop_unread(module.graph)
    return module


def _local_graph(joint: JointGraph, assignment: Assignment, module: fx.GraphModule, plan: Plan) -> LocalGraph:
    ranks = tuple(GraphInput(InputKind.RANK, name) for name in plan.mesh.names)
    shardings = (*(assignment.of(n) for n in joint.placeholders), *(None for _ in ranks))
    return LocalGraph(module, (*joint.inputs, *ranks), joint.outputs, shardings, assignment.wanted)
