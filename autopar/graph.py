"""`JointGraph`: the traced program, forward and backward, that every later stage reads.

A node of the graph is an ATen call with three entries in `node.meta` that autopar relies on:

* `"val"`: a fake tensor (or tuple of them) with the global shape, dtype and strides;
* `"module"`: dotted path of the module that owns the node (`""` is the root);
* `"backward"`: whether the node belongs to the backward pass.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._compat import map_nodes

Kept = TypeVar("Kept")
MAX_KEPT = 64
"""How many derived values are kept with a graph."""


class InputKind(str, enum.Enum):
    """What a placeholder of a graph stands for."""

    PARAM = "param"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"  # gradient of an output, given by the caller of backward
    SAVED = "saved"  # value handed from the forward to the backward graph
    RANK = "rank"  # this rank's position along a mesh axis, an int
    SEED = "seed"  # seed of the step's random ops, an int


class OutputKind(str, enum.Enum):
    """What an output of a graph stands for."""

    OUTPUT = "output"
    MUTATION = "mutation"  # new value of a buffer that the module updates in place
    GRADIENT = "gradient"
    SAVED = "saved"


@dataclass(frozen=True)
class GraphInput:
    """One placeholder: `path` is a parameter's or buffer's name, an input's path (`input_ids`, `0`), a tangent's
    output path, or a mesh axis for `InputKind.RANK`."""

    kind: InputKind
    path: str


@dataclass(frozen=True)
class GraphOutput:
    """One output: `path` names the module output, the buffer that changes, or the tensor that the gradient is of."""

    kind: OutputKind
    path: str


@dataclass(frozen=True)
class Run:
    """Alike units of a stack, one after another, of which a folded graph holds only some.

    Attributes:
        units: module paths of every unit, in order: `(("layers.0",), ("layers.1",), ...)`; a unit may be several
            blocks.
        held: indices of the units that the graph holds: the first, two inner ones and the last, `(0, 1, n - 2, n - 1)`.
    """

    units: tuple[tuple[str, ...], ...]
    held: tuple[int, ...]


@dataclass
class JointGraph:
    """A module traced to one graph in the global view.

    Attributes:
        module: the graph; its placeholders follow `inputs`, its output is a flat tuple that follows `outputs`
            (`None` where an input gets no gradient).
        inputs: what each placeholder is.
        outputs: what each output is.
        batch_dims: for each batched input path, the dim that is cut over the ranks.
        tied: name of every parameter or buffer that is another one's alias -> the name that stands for both.
        trains: whether the graph has a backward part.
        runs: the units of which the graph holds only some; empty if the graph is whole.
        folded: the folded graph that this one was unfolded from, if it is known: nodes of the two with equal
            `meta["held"]` are alike (see `mark_held`).  Whoever adds nodes without that must clear it.
        output_tree: rebuilds the module's return value from its tensor leaves (see `autopar.trace`).
        derived: what later stages worked out from the graph and keep with it to share (see `keep`).  Whoever edits
            the graph after that must clear it.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    batch_dims: Mapping[str, int]
    tied: Mapping[str, str] = field(default_factory=dict)
    trains: bool = True
    output_tree: Any = None
    runs: tuple[Run, ...] = ()
    folded: JointGraph | None = field(default=None, repr=False, compare=False)
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def keep(self, key: Hashable, work: Callable[[], Kept]) -> Kept:
        """What `work` gives, worked out once for each key; of many the last `MAX_KEPT` are kept.

        A planner rewrites one graph under many plans, and most of the work depends on the graph alone, or on what plans
        have in common.
        """
        found: Kept = self.derived.pop(key) if key in self.derived else work()
        self.derived[key] = found  # the latest last
        if len(self.derived) > MAX_KEPT:
            del self.derived[next(iter(self.derived))]
        return found

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, in the order of `inputs`."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def output_values(self) -> tuple[fx.Node | None, ...]:
        """The nodes returned, in the order of `outputs`."""
        return tuple(self.module.graph.output_node().args[0])  # type: ignore[arg-type]

    def param_nodes(self) -> dict[str, fx.Node]:
        """Placeholder of each parameter, by name."""
        pairs = zip(self.inputs, self.placeholders, strict=True)
        return {spec.path: node for spec, node in pairs if spec.kind is InputKind.PARAM}

    def fingerprint(self) -> str:
        """A digest of the whole program: ops, arguments, shapes, dtypes, inputs and outputs."""
        return graph_fingerprint(self.module.graph, f"{self.inputs}{self.outputs}{self.runs or ''}")


def mark_held(joint: JointGraph) -> None:
    """Give each node of a folded graph a mark, `meta["held"]`, which its copies will have, too."""
    for position, node in enumerate(joint.module.graph.nodes):
        node.meta["held"] = position


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nobody reads and what does nothing but compute."""
    # `Graph.eliminate_dead_code` asks of every node whether it has side effects; few have no reader.
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def copy_node(
    graph: fx.Graph, node: fx.Node, change: Callable[[fx.Node], Any], meta: dict[str, Any] | None = None
) -> fx.Node:
    """As `fx.Graph.node_copy`: `change` gives each node argument's counterpart, in the order of the arguments; `meta`
    is the copy's metadata, by default the node's."""
    args, kwargs = map_nodes(node.args, change), node.kwargs
    kwargs = map_nodes(kwargs, change) if kwargs else kwargs
    new = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
    new.meta.update(node.meta if meta is None else meta)
    return new


def add_call(graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: dict[str, Any]) -> fx.Node:
    """As `fx.Graph.call_function`, with metadata."""
    new = graph.create_node("call_function", op, args, kwargs)
    new.meta.update(meta)
    return new


def graph_fingerprint(graph: fx.Graph, extra: str = "") -> str:
    """Digest of a graph that equals on every rank that holds the same program.

    Node names are replaced by positions, so two traces that name nodes differently agree.
    """
    digest = hashlib.sha256(extra.encode())
    for line in graph_lines(graph):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def graph_lines(graph: fx.Graph) -> Iterator[str]:
    """Each node as text: its op, what it reads by position, its shape and dtype."""
    index = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Ref(index[n]))
        if any(isinstance(argument, ProcessName) for argument in node.args):
            args = tuple(a.shared if isinstance(a, ProcessName) else a for a in args[0]), args[1]
        yield f"{node.op} {_target_text(node.target)} {args!r} {describe_value(node.meta.get('val'))}"


def _target_text(target: object) -> str:
    """A call's target without the address that a plain function's text holds."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


class ProcessName(str):
    """A name that means something in this process only.

    Attributes:
        shared: what stands for it where processes compare their graphs, or a later one looks for a graph of an earlier.
    """

    shared: str


class _Ref(str):
    """A node's position inside a fingerprint; printed bare."""

    def __repr__(self) -> str:
        return str(self)


def describe_value(value: object) -> str:
    """Shape and dtype of a traced value in words, such as `f32[4, 16]`."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe_value(v) for v in value) + ")"
    return "" if value is None else str(value)


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
