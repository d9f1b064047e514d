"""The rewrite: a joint graph and a plan become one rank's program, by a list of passes that a reader can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from autopar.factors import analyse
from autopar.graph import GraphInput, InputKind, JointGraph
from autopar.passes.coalesce import coalesce
from autopar.passes.decompose import decompose
from autopar.passes.localise import localise
from autopar.passes.lower import lower_reshards
from autopar.passes.partition import partition
from autopar.passes.propagate import Assignment, propagate
from autopar.passes.regather import regather
from autopar.passes.remat import remat
from autopar.passes.reshard import insert_reshards
from autopar.passes.schedule import bound_reductions, prefetch_parameters, sink_waits
from autopar.placement import Sharding, is_sharded
from autopar.plan import Plan
from autopar.program import LocalGraph, LocalProgram
from autopar.rules import tensor_inputs

Trace = Callable[[str, fx.GraphModule], None]
"""Called with each pass's name and the graph after it."""


def rewrite(joint: JointGraph, plan: Plan, after_pass: Trace | None = None) -> LocalProgram:
    """Rewrite a normalised joint graph under a plan.

    Raises:
        PlanError: if the plan does not belong to this graph.
    """
    joint, assignment = _assign(joint, plan)
    module = insert_reshards(joint, assignment, plan)
    passes: list[tuple[str, Callable[[fx.GraphModule], fx.GraphModule]]] = [
        ("insert_reshards", lambda m: m),
        ("remat", lambda m: remat(m, joint.inputs, plan)),
        ("regather", lambda m: regather(m, joint.inputs, plan)),
        ("localise", lambda m: localise(m, plan.mesh)),
        ("lower_reshards", lambda m: lower_reshards(m, plan.mesh)),
        ("drop_dead", _drop_dead),
        ("coalesce", coalesce),
        ("sink_waits", sink_waits),
        ("prefetch_parameters", prefetch_parameters),
        ("bound_reductions", bound_reductions),
    ]
    for name, run in passes:
        module = run(module)
        module.graph.lint()
        if after_pass:
            after_pass(name, module)
    whole = _local_graph(joint, assignment, module, plan)
    forward, backward = partition(whole)
    return LocalProgram(plan.mesh, whole, forward, backward)


def _assign(joint: JointGraph, plan: Plan) -> tuple[JointGraph, Assignment]:
    """A copy of the graph with the ops taken apart that the plan cuts, and the decision for each op."""
    joint = copy_joint(joint)
    analysis = analyse(joint)
    if decompose(joint, analysis, plan):
        analysis = analyse(joint)
    return joint, propagate(joint, analysis, plan)


def parameter_uses(joint: JointGraph, plan: Plan) -> dict[str, Sharding]:
    """How each parameter must lie where it is first used cut; parameters that are only used whole are left out."""
    joint, assignment = _assign(joint, plan)
    params = {node: path for path, node in joint.param_nodes().items()}
    uses: dict[str, Sharding] = {}
    for node, decided in assignment.nodes.items():
        for operand, sharding in zip(tensor_inputs(node), decided.inputs, strict=False):
            if operand in params and any(is_sharded(p) for p in sharding):
                uses.setdefault(params[operand], sharding)
    return uses


def copy_joint(joint: JointGraph) -> JointGraph:
    """A copy whose graph may be changed; traced values are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(joint.module.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    return replace(joint, module=fx.GraphModule(joint.module, graph))


def _drop_dead(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.eliminate_dead_code()
    return module


def _local_graph(joint: JointGraph, assignment: Assignment, module: fx.GraphModule, plan: Plan) -> LocalGraph:
    module.recompile()
    ranks = tuple(GraphInput(InputKind.RANK, name) for name in plan.mesh.names)
    shardings = (*(assignment.of(n) for n in joint.placeholders), *(None for _ in ranks))
    return LocalGraph(module, (*joint.inputs, *ranks), joint.outputs, shardings, assignment.wanted)
