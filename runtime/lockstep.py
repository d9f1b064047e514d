"""Run a local graph for all ranks in one process, node by node in lockstep.

Every node that is not a collective runs once per rank on that rank's values; a collective runs once, jointly over the
rank groups of its axis.  No process group is needed, so a rewritten program can be compared with the single device
anywhere, in any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import VerificationError
from autopar.graph import describe_value
from autopar.mesh import Mesh
from autopar.placement import ByGroup, local_shape
from autopar.program import COLLECTIVE_KINDS, LocalGraph, collective_axis
from autopar.runtime.sharding import reduce_tensors, shard_tensor, unshard

__all__ = ["ExecutedCollective", "LockstepResult", "run_lockstep", "shard_tensor", "unshard"]


@dataclass(frozen=True)
class ExecutedCollective:
    """A collective that ran: `num_bytes` is measured on the real tensor, in the terms of `program.Collective`."""

    kind: str
    axis: str
    num_bytes: int


@dataclass(frozen=True)
class LockstepResult:
    """What a lockstep run returned.

    Attributes:
        outputs: the graph's flat outputs, per rank.
        collectives: every collective that ran, in order.
    """

    outputs: list[list[Any]]
    collectives: list[ExecutedCollective]


def run_lockstep(
    graph: LocalGraph, mesh: Mesh, inputs: Sequence[Sequence[Any]], *, check_shapes: bool = True
) -> LockstepResult:
    """Run `graph` on every rank of `mesh` in this process.

    Args:
        graph: the local graph, whose collectives name mesh axes.
        mesh: the mesh.
        inputs: for each rank, the values of the placeholders in the order of `graph.inputs`.
        check_shapes: compare shape and dtype of every value with what the graph claims in `node.meta["val"]`.

    Raises:
        VerificationError: if a node fails or produces another shape or dtype than the graph claims; the message names
            node, module and rank.
    """
    if len(inputs) != mesh.num_ranks:
        raise VerificationError(f"mesh {mesh} has {mesh.num_ranks} ranks, but inputs for {len(inputs)} were given")
    for rank, values in enumerate(inputs):
        if len(values) != len(graph.inputs):
            raise VerificationError(
                f"the graph has {len(graph.inputs)} placeholders; rank {rank} gives {len(values)} values"
            )
    run = _Lockstep(graph, mesh, check_shapes)
    with torch.no_grad():
        outputs = run.run([iter(values) for values in inputs])
    return LockstepResult(outputs, run.collectives)


class _Lockstep:
    """One run: an environment per rank, walked through the graph together."""

    def __init__(self, graph: LocalGraph, mesh: Mesh, check_shapes: bool) -> None:
        self.module, self.mesh, self.check_shapes = graph.module, mesh, check_shapes
        self.envs: list[dict[fx.Node, Any]] = [{} for _ in range(mesh.num_ranks)]
        self.collectives: list[ExecutedCollective] = []

    def run(self, inputs: list[Any]) -> list[list[Any]]:
        dead_after = _dead_after(self.module.graph)
        for node in self.module.graph.nodes:
            if node.op == "output":
                return [list(fx.map_arg(node.args[0], env.__getitem__)) for env in self.envs]
            values = [next(mine) for mine in inputs] if node.op == "placeholder" else self._execute(node)
            if self.check_shapes and "val" in node.meta:
                self._check(node, values)
            for env, value in zip(self.envs, values, strict=True):
                env[node] = value
                for dead in dead_after.get(node, ()):
                    del env[dead]
        raise VerificationError("the graph has no output node")

    def _execute(self, node: fx.Node) -> list[Any]:
        if node.op == "get_attr":
            value = _attribute(self.module, str(node.target))
            return [value] * self.mesh.num_ranks
        if node.op != "call_function" or not callable(node.target):
            raise VerificationError(f"{_where(node)}: a local graph holds no {node.op} nodes")
        calls = [fx.map_arg((node.args, node.kwargs), env.__getitem__) for env in self.envs]
        try:
            if node.target in COLLECTIVE_KINDS:
                return self._execute_collective(node, [args for args, _ in calls])
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                return [args[0] for args, _ in calls]
            return [node.target(*args, **kwargs) for args, kwargs in calls]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = [describe_value(fx.map_arg(list(node.all_input_nodes), env.__getitem__)) for env in self.envs]
            raise VerificationError(
                f"{_where(node)} failed: {error}\n  call: {node.format_node()}\n  inputs on rank 0: {shapes[0]}"
            ) from error

    def _execute_collective(self, node: fx.Node, calls: list[Any]) -> list[Any]:
        kind, axis = COLLECTIVE_KINDS[node.target], collective_axis(node)  # type: ignore[index]
        outputs: list[Any] = [None] * self.mesh.num_ranks
        for group in self.mesh.groups(axis):
            members = [calls[rank] for rank in group]
            tensors = [args[0] for args in members]
            _check_agreement(node, kind, members)
            for rank, output in zip(group, _COLLECTIVES[kind](tensors, members), strict=True):
                outputs[rank] = output
        self.collectives.append(ExecutedCollective(kind, axis, _num_bytes(node, calls[0][0], outputs[0])))
        return outputs

    def _check(self, node: fx.Node, values: list[Any]) -> None:
        for rank, value in enumerate(values):
            expected = node.meta["val"]
            if _matches(value, expected, node.meta.get("sharding")) or self._is_uneven_part(node, value, rank):
                continue
            raise VerificationError(
                f"{_where(node)} on rank {rank}: the graph claims {describe_value(expected)}, the run gave "
                f"{describe_value(value)}\n  call: {node.format_node()}"
            )

    def _is_uneven_part(self, node: fx.Node, value: Any, rank: int) -> bool:
        """Whether the value is this rank's smaller part of dims that do not divide, some of them perhaps padded."""
        shape, sharding, expected = node.meta.get("global_shape"), node.meta.get("sharding"), node.meta["val"]
        if shape is None or sharding is None or not isinstance(value, Tensor) or not isinstance(expected, Tensor):
            return False
        mine = local_shape(shape, sharding, self.mesh, self.mesh.coordinate(rank))
        if value.dtype != expected.dtype or not value.dim() == len(mine) == expected.dim():
            return False
        return all(size in sizes for size, *sizes in zip(value.shape, mine, expected.shape, strict=True))


def _num_bytes(node: fx.Node, sent: Tensor, received: Tensor) -> int:
    """Of the larger side, as programs count; of rows by group what was priced, since each step has another number."""
    if any(isinstance(p, ByGroup) for n in (node, *node.all_input_nodes) for p in n.meta.get("sharding") or ()):
        return int(node.meta["bytes"])
    measured = max(received, sent, key=Tensor.numel)
    return measured.numel() * measured.element_size()


def _check_agreement(node: fx.Node, kind: str, members: list[Any]) -> None:
    """Ranks of one collective must bring equal shapes and sizes; a real one would hang or corrupt otherwise."""
    shapes = {(tuple(args[0].shape), args[0].dtype) for args in members}
    if kind != "all_to_all" and len(shapes) > 1:
        raise VerificationError(
            f"{_where(node)}: ranks bring different tensors to one collective: {sorted(map(str, shapes))}"
        )
    if kind in ("all_gather", "reduce_scatter"):
        claimed = members[0][-2]
        if claimed != len(members):
            raise VerificationError(f"{_where(node)}: group size {claimed}, but the axis has {len(members)} ranks")


def _all_reduce(tensors: list[Tensor], members: list[Any]) -> list[Tensor]:
    total = reduce_tensors(tensors, members[0][1])
    return [total] + [total.clone() for _ in tensors[1:]]


def _all_gather(tensors: list[Tensor], members: list[Any]) -> list[Tensor]:
    whole = torch.cat(tensors, 0)
    return [whole] + [whole.clone() for _ in tensors[1:]]


def _reduce_scatter(tensors: list[Tensor], members: list[Any]) -> list[Tensor]:
    rows = tensors[0].shape[0]
    if rows % len(tensors):
        raise ValueError(f"{rows} rows cannot be scattered evenly over {len(tensors)} ranks")
    total = reduce_tensors(tensors, members[0][1])
    return [piece.clone() for piece in total.chunk(len(tensors), 0)] if rows else [total.clone() for _ in tensors]


def _all_to_all(tensors: list[Tensor], members: list[Any]) -> list[Tensor]:
    num_ranks = len(tensors)
    sent = []
    for tensor, (_, _, input_splits, _) in zip(tensors, members, strict=True):
        splits = list(input_splits) or [tensor.shape[0] // num_ranks] * num_ranks
        if len(splits) != num_ranks or sum(splits) != tensor.shape[0]:
            raise ValueError(f"input splits {splits} do not cut {tensor.shape[0]} rows for {num_ranks} ranks")
        sent.append(torch.split_with_sizes(tensor, splits))
    outputs = []
    for position, (_, output_splits, _, _) in enumerate(members):
        received = [pieces[position] for pieces in sent]
        if output_splits and [piece.shape[0] for piece in received] != list(output_splits):
            raise ValueError(
                f"position {position} expects rows {list(output_splits)}, is sent {[p.shape[0] for p in received]}"
            )
        outputs.append(torch.cat(received, 0))
    return outputs


_COLLECTIVES: dict[str, Callable[[list[Tensor], list[Any]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _matches(value: Any, expected: Any, sharding: Any) -> bool:
    """Whether a value is what the graph claims; of rows that lie by group there may be any number."""
    if isinstance(expected, Tensor):
        if not isinstance(value, Tensor) or value.dtype != expected.dtype or value.dim() != expected.dim():
            return False
        rows = {p.dim for p in sharding or () if isinstance(p, ByGroup)}
        return all(a == b or d in rows for d, (a, b) in enumerate(zip(value.shape, expected.shape, strict=True)))
    if isinstance(expected, (tuple, list)):
        shardings = sharding if isinstance(sharding, (tuple, list)) else [None] * len(expected)
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(expected) == len(shardings)
            and all(map(_matches, value, expected, shardings))
        )
    return not isinstance(value, Tensor)


def _dead_after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody needs once it ran, itself included if it has no user."""
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                dead.setdefault(node, []).append(value)
    return dead


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _where(node: fx.Node) -> str:
    return f"node {node.name!r} (module {node.meta.get('module', '')!r})"
