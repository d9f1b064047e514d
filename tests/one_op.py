"""One op as a whole program: cut it by hand, lower it by the real passes, run all ranks in lockstep."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rule_cases import Zeros
from torch import Tensor, fx, nn

from autopar._compat import tree_flatten, tree_map, tree_unflatten
from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.passes.localise import localise
from autopar.passes.lower import lower_reshards
from autopar.passes.propagate import Assignment, Cut, NodeSharding, input_placement, output_placement
from autopar.passes.reshard import insert_reshards
from autopar.placement import Partial, Sharding, replicated
from autopar.plan import Plan
from autopar.program import LocalGraph
from autopar.rules import OpRule, rule_for, tensor_inputs
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.sharding import shard_tensor, unshard

TOLERANCE = 1e-12
"""Largest accepted difference over the tensor's largest entry: the ops are small and run in float64."""


@dataclass
class OneOp:
    """A call of one op with its tensors, and the graph that holds nothing else.

    Attributes:
        call: the op's node in `joint`.
        tensors: the values of the placeholders.
        expected: what the whole op gives, output by output.
        stand_in: what to run in the op's place where this machine has no kernel for it.
    """

    joint: JointGraph
    call: fx.Node
    tensors: list[Tensor]
    expected: list[Any]
    stand_in: Callable[..., Any] | None = None
    rule: OpRule | None = field(init=False)

    def __post_init__(self) -> None:
        self.rule = rule_for(self.call)


def one_op(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], stand_in: Callable[..., Any] | None = None
) -> OneOp:
    """The graph of `op(*args, **kwargs)`; every tensor is an input, `Zeros` a constant, and every tensor that the op
    returns an output."""
    graph = fx.Graph()
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    placeholders = iter([_tagged(graph.placeholder(f"x{i}"), _shape_of(t)) for i, t in enumerate(tensors)])
    nodes = [
        next(placeholders) if isinstance(x, Tensor) else _constant(graph, x) if isinstance(x, Zeros) else x
        for x in leaves
    ]
    call_args, call_kwargs = tree_unflatten(nodes, spec)
    values = [torch.zeros(x.shape, dtype=torch.float64) if isinstance(x, Zeros) else x for x in leaves]
    args, kwargs = tree_unflatten(values, spec)
    result = (stand_in or op)(*args, **kwargs)
    several = isinstance(result, (tuple, list))
    expected = list(result) if several else [result]
    call = _tagged(
        graph.call_function(op, call_args, call_kwargs), tree_map(_shape_of, tuple(result) if several else result)
    )
    call.meta["rule"] = None  # not yet analysed: a view's result is then gathered itself, not what it looks at
    outputs: list[fx.Node | None] = [call]
    if several:
        outputs = [
            _tagged(graph.call_function(operator.getitem, (call, i)), _shape_of(v)) if isinstance(v, Tensor) else None
            for i, v in enumerate(expected)
        ]
    graph.output(tuple(outputs))
    joint = JointGraph(
        fx.GraphModule(nn.Module(), graph),
        tuple(GraphInput(InputKind.INPUT, str(i)) for i in range(len(tensors))),
        tuple(GraphOutput(OutputKind.OUTPUT, str(i)) for i in range(len(outputs))),
        {},
    )
    return OneOp(joint, call, tensors, expected, stand_in)


def _constant(graph: fx.Graph, zeros: Zeros) -> fx.Node:
    value = torch.zeros(zeros.shape, dtype=torch.float64, device="meta")
    return _tagged(
        graph.call_function(torch.ops.aten.full.default, (list(zeros.shape), 0.0), {"dtype": torch.float64}), value
    )


def _tagged(node: fx.Node, value: Any) -> fx.Node:
    node.meta = {"val": value, "module": "", "backward": False}
    return node


def _shape_of(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def legal_cuts(rule: OpRule, num_ranks: int) -> Iterator[Cut]:
    """Every cut of one axis that the rule allows: plain, and with each split that the factor's size allows."""
    for factor in rule.factors:
        size = rule.sizes[factor]
        for split in range(1, size + 1):
            if (
                factor not in rule.whole
                and size % (split * num_ranks) == 0
                and (split == 1 or not rule.is_range(factor))
            ):
                yield Cut(factor, split)


def uneven_cuts(rule: OpRule, num_ranks: int) -> Iterator[Cut]:
    """Every cut of one axis that the rule allows though it does not divide, with each split and grain that the factor's
    size allows; parts may be empty."""
    for factor in rule.factors:
        size = rule.sizes[factor]
        for split, grain in itertools.product(range(1, size + 1), repeat=2):
            if (
                factor not in rule.whole
                and size % (split * grain) == 0
                and size // (split * grain) % num_ranks
                and rule.may_be_uneven(factor, split, grain)
                and (split == 1 or not rule.is_range(factor))
            ):
                yield Cut(factor, split, grain)


def assignment_of(
    case: OneOp, mesh: Mesh, cuts: Sequence[Cut | None], partial: frozenset[int] = frozenset()
) -> Assignment:
    """The op cut along each axis, or, given inputs that are `partial`, run on unreduced sums along every axis.

    Inputs come in whole (or partial), outputs are wanted whole (or partial).
    """
    rule = case.rule
    assert rule is not None
    whole, unreduced = replicated(mesh), (Partial("sum"),) * mesh.num_axes

    def shardings(terms: Sequence[Any], place: Callable[..., Any]) -> tuple[Sharding, ...]:
        return tuple(tuple(place(rule, dims, cut) for cut in cuts) for dims in terms)

    inputs, outputs = shardings(rule.inputs, input_placement), shardings(rule.outputs, output_placement)
    if partial:
        inputs = tuple(unreduced if i in partial else whole for i in range(len(rule.inputs)))
        outputs = (unreduced,) * len(rule.outputs)
    given = {node: s for i, (node, s) in enumerate(zip(tensor_inputs(case.call), inputs, strict=True)) if i in partial}
    nodes = {node: NodeSharding((), (given.get(node, whole),)) for node in case.joint.placeholders}
    for constant in case.joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        nodes[constant] = NodeSharding((), (whole,), (None,) * mesh.num_axes, rule_for(constant))
    nodes[case.call] = NodeSharding(inputs, outputs, tuple(cuts), rule)
    wanted = tuple(None if node is None else unreduced if partial else whole for node in case.joint.output_values)
    return Assignment(nodes, wanted)


def lowered(case: OneOp, mesh: Mesh, assignment: Assignment) -> LocalGraph:
    """The local graph under an assignment, by the passes that a whole model goes through."""
    plan = Plan("by hand", mesh, ((),) * mesh.num_axes, {})
    module = lower_reshards(localise(insert_reshards(case.joint, assignment, plan), mesh), mesh)
    module.graph.lint()
    if case.stand_in is not None:
        for node in module.graph.find_nodes(op="call_function", target=case.call.target):
            node.target = case.stand_in
    ranks = tuple(GraphInput(InputKind.RANK, name) for name in mesh.names)
    shardings = (*(assignment.of(n) for n in case.joint.placeholders), *(None for _ in ranks))
    return LocalGraph(module, (*case.joint.inputs, *ranks), case.joint.outputs, shardings, assignment.wanted)


def run_whole(case: OneOp, mesh: Mesh, assignment: Assignment) -> tuple[list[Any], LocalGraph]:
    """Run the op under an assignment and put its outputs together."""
    graph = lowered(case, mesh, assignment)
    inputs: list[list[Any]] = [[] for _ in range(mesh.num_ranks)]
    for tensor, sharding in zip(case.tensors, graph.input_shardings, strict=False):
        assert sharding is not None
        for rank, part in enumerate(parts_of(tensor, sharding, mesh)):
            inputs[rank].append(part)
    for rank in range(mesh.num_ranks):
        inputs[rank] += mesh.coordinate(rank)
    result = run_lockstep(graph, mesh, inputs)
    joined = []
    for i, (value, sharding) in enumerate(zip(case.expected, graph.output_shardings, strict=True)):
        parts = [outputs[i] for outputs in result.outputs]
        joined.append(None if sharding is None else unshard(parts, sharding, mesh, value.shape))
    return joined, graph


def parts_of(tensor: Tensor, sharding: Sharding, mesh: Mesh) -> list[Tensor]:
    """Each rank's part; an unreduced sum is spread unevenly over the ranks, so that none holds zero or all of it."""
    parts = [shard_tensor(tensor, tuple(p for p in sharding), mesh, rank).clone() for rank in range(mesh.num_ranks)]
    for axis, placement in enumerate(sharding):
        if isinstance(placement, Partial):
            assert placement.reduce_op == "sum"
            for group in mesh.groups(mesh.names[axis]):
                for i, rank in enumerate(group[1:]):
                    noise = torch.full_like(parts[rank], i + 2)
                    parts[rank] += noise
                    parts[group[0]] -= noise
    return parts


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Equal shape and dtype, and values within the tolerance; a value that is not a tensor was not an output."""
    if not isinstance(expected, Tensor):
        return
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    if not (expected.is_floating_point() or expected.is_complex()):
        assert torch.equal(found, expected), what
    elif expected.numel():
        scale = max(1e-30, expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        close = torch.isclose(found, expected, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)
        assert bool(close.all()), f"{what}: off by {(found - expected).abs().max().item():.3g} of {scale:.3g}"
