"""`LocalProgram`: what the rewrite hands to the runtime, the simulator and the exporter.

It is the program of *one* rank, the same text on every rank.  Where a rank's position matters (slicing a replicated
tensor, masking a sharded lookup) the graph takes it as an integer placeholder (`InputKind.RANK`), so nothing in
the graph depends on which rank holds it.  Collectives are calls of `torch.ops._c10d_functional`; their group
argument is the name of a mesh *axis*, bound to a process group by the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.graph import GraphInput, GraphOutput, graph_fingerprint, graph_lines
from autopar.mesh import Mesh
from autopar.placement import Sharding


@dataclass
class LocalGraph:
    """One rank's graph with the meaning and sharding of each input and output.

    Node metadata: `"val"` holds *local* shapes, `"global_shape"` and `"sharding"` describe tensor nodes, `"module"`
    and `"backward"` are kept from the trace, and `"bytes"` is the message size of a collective node.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    input_shardings: tuple[Sharding | None, ...]
    output_shardings: tuple[Sharding | None, ...]


@dataclass
class LocalProgram:
    """The rewritten program of one rank.

    Attributes:
        mesh: the mesh that the plan works on (a factoring or flattening of the user's).
        joint: forward and backward in one graph, as they were before partitioning.
        forward: takes parameters, buffers, inputs, rank positions and seed; returns outputs, mutations, saved values.
        backward: takes saved values, tangents and rank positions; returns one gradient per trained parameter (and
            None for an input); None when the program does not train.
    """

    mesh: Mesh
    joint: LocalGraph
    forward: LocalGraph
    backward: LocalGraph | None

    @property
    def graphs(self) -> tuple[LocalGraph, ...]:
        """The forward graph, and the backward graph if there is one."""
        return (self.forward, self.backward) if self.backward else (self.forward,)

    def fingerprint(self) -> str:
        """Digest of both graphs, equal on all ranks that hold the same program."""
        return "-".join(graph_fingerprint(g.module.graph, f"{self.mesh}{g.inputs}{g.outputs}") for g in self.graphs)

    def lines(self) -> Iterator[str]:
        """Both graphs as text, a line for each node, equal on all ranks that hold the same program."""
        for graph in self.graphs:
            yield f"{self.mesh} {graph.inputs} {graph.outputs}"
            nodes = graph.module.graph.nodes
            for node, line in zip(nodes, graph_lines(graph.module.graph), strict=True):
                module = node.meta.get("module")
                yield f"{line} of module {module}" if module else line.rstrip()

    def collectives(self) -> list[Collective]:
        """Every collective of the step, in program order, forward then backward."""
        return [c for graph in self.graphs for c in collectives_of(graph.module.graph)]


@dataclass(frozen=True)
class DeferredBackward:
    """A backward graph in two, for gradients that are summed over several backward passes and then reduced once.

    Attributes:
        compute: takes what the backward graph takes; returns its gradients, None for those that a reduction gives,
            then what waits for a reduction (`OutputKind.SAVED`).
        reduce: takes what waits, or sums of it, and rank positions; returns the gradients that `compute` did not.
    """

    compute: LocalGraph
    reduce: LocalGraph


@dataclass(frozen=True)
class Collective:
    """One collective node.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        axis: name of the mesh axis that it runs along.
        num_bytes: size of the *whole* tensor on one rank: the input of an all-reduce or a reduce-scatter, the output of
            an all-gather, the larger of both of an all-to-all.
        module: path of the module that owns it.
        backward: whether it runs in the backward pass.
        node: name of the node.
    """

    kind: str
    axis: str
    num_bytes: int
    module: str
    backward: bool
    node: str


COLLECTIVE_KINDS = {
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
    torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
}
"""The functional collectives that a local graph may hold."""


_KIND_OF_ID = {id(op): kind for op, kind in COLLECTIVE_KINDS.items()}


def collective_kind(node: fx.Node) -> str | None:
    """The kind of collective that a node starts; None for all other nodes."""
    return _KIND_OF_ID.get(id(node.target))  # by identity, since PyTorch works out an op's hash in Python


def is_collective_step(node: fx.Node) -> bool:
    """Whether a node starts a collective or waits for one."""
    return id(node.target) in _COLLECTIVE_STEPS


_COLLECTIVE_STEPS = {id(torch.ops._c10d_functional.wait_tensor.default), *_KIND_OF_ID}


def collective_axis(node: fx.Node) -> str:
    """The mesh axis of a collective node: its group argument, always the last one."""
    return str(node.args[-1])


def collective_nodes(graph: fx.Graph, *kinds: str) -> list[tuple[fx.Node, str]]:
    """The nodes that start collectives of these kinds, or of any, in program order, and of which kind they are."""
    # A graph knows its nodes by op: there are few of these among many.
    found = [
        (node, kind)
        for op, kind in COLLECTIVE_KINDS.items()
        if kind in kinds or not kinds
        for node in graph.find_nodes(op="call_function", target=op, sort=False)
    ]
    return sorted(found, key=lambda pair: pair[0])


def collectives_of(graph: fx.Graph) -> Iterator[Collective]:
    """The collectives of one graph, in program order."""
    for node, kind in collective_nodes(graph):
        yield Collective(
            kind,
            collective_axis(node),
            int(node.meta["bytes"]),
            node.meta["module"],
            node.meta["backward"],
            node.name,
        )
