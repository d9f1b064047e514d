"""Liveness of a local program: when each allocation is made and when it is freed.

Program order is the order of allocation.  A *block* is one allocation; views share their base's block, a block is
freed after the last node that uses it or a view of it, and the inputs of a node are alive while its outputs are made.
What lives how long:

* parameters and buffers at rest, constants of the graph and the caller's inputs: always;
* a value saved for the backward pass: from where it is made to its last use there.  One that shares memory with a
  parameter at rest or an input costs nothing more.  Gathered parameters that a plan keeps are saved values;
* module outputs: from where they are made to the end of the step, since the caller holds them;
* a gradient: from where it is made to the end of the step (`zero_grad` frees it before the next one);
* the input of a collective: until its `wait_tensor`, except an all-reduce's, which is copied first;
* all else, gathered parameters and buffers of collectives included: until the last use.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, Union

import numpy as np
import torch
from torch import fx

from autopar.cost_model.fusion import FusedOp, fuse
from autopar.cost_model.layout import Layouts
from autopar.cost_model.ops import aliased_input, tensor_bytes
from autopar.cost_model.workspaces import workspace_bytes
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.program import LocalGraph, LocalProgram, collective_nodes

PARAM, GRADIENT, OPTIMIZER, ACTIVATION, TEMPORARY = "params", "grads", "optimizer", "activations", "temporaries"
"""Kinds of blocks, by their names in `MemoryParts`."""


@dataclass(eq=False)
class Block:
    """One allocation of a module, alive from step `born` to step `last`, both included."""

    num_bytes: int
    born: int
    last: int
    kind: str = TEMPORARY
    module: str = ""


Blocks: TypeAlias = Union[Block, "tuple[Blocks, ...]", None]
"""The blocks behind a traced value: one per tensor, nested as the value is."""


@dataclass
class Liveness:
    """The blocks of a program; made by `Liveness.of`.

    Attributes:
        layouts: strides of the program's values.
        device_kind: `cuda` or `cpu`, which decides what ops take for themselves.
        granularity: bytes that the allocator rounds blocks up to.
        copies_reduce_scatter: whether the backend sums a copy of a reduce-scatter's whole input, as gloo does.
        is_fused: whether chains of pointwise ops are one kernel, whose inner values take no memory.
        blocks: every block, in order of birth within a pass.
        steps: `pass:node` of every step.
        num_forward: how many of the steps are of the forward pass, which come first.
    """

    layouts: Layouts
    device_kind: str
    granularity: int
    copies_reduce_scatter: bool
    is_fused: bool = False
    blocks: list[Block] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    num_forward: int = 0
    _returned: list[Block] = field(default_factory=list)
    _in_flight: dict[fx.Node, tuple[Block, ...]] = field(default_factory=dict)
    _constants: dict[str, Blocks] = field(default_factory=dict)
    _parts: dict[fx.Node, FusedOp] = field(default_factory=dict)
    _collectives: dict[fx.Node, str] = field(default_factory=dict)
    _replacing: list[tuple[Block, list[Block]]] = field(default_factory=list)

    @staticmethod
    def of(
        program: LocalProgram, layouts: Layouts, device_kind: str, granularity: int, copies_reduce_scatter: bool,
        is_fused: bool = False,
    ) -> Liveness:  # fmt: skip
        """Walk forward, then backward."""
        liveness = Liveness(layouts, device_kind, granularity, copies_reduce_scatter, is_fused)
        held: list[Blocks] = []
        saved = liveness._run_forward(program.forward, held)
        liveness.num_forward = len(liveness.steps)
        if program.backward is not None:
            liveness._run_backward(program.backward, saved, held)
        for value in held:
            liveness._use(value, len(liveness.steps))
        liveness._write_in_place()
        return liveness

    def follow_another(self) -> None:
        """Make this a later one of several micro-steps: the sum of the earlier ones' gradients is there from the start
        and to the end, this one's are freed when they have been added to it, and the outputs of the one before are held
        until those of this one take their place."""
        last = len(self.steps) - 1
        forward = self.num_forward - 1
        sums = [Block(b.num_bytes, 0, _ALWAYS, GRADIENT, b.module) for b in self.blocks if b.kind == GRADIENT]
        for block in self.blocks:
            if block.kind == GRADIENT:
                block.last = last
        before = {id(b): b for b in self._returned if b.last < _ALWAYS}.values()
        self.blocks += [*sums, *(Block(b.num_bytes, 0, forward, ACTIVATION, b.module) for b in before)]

    def live_bytes(self) -> dict[str, np.ndarray]:
        """For each kind of block the bytes alive in each step."""
        num_steps = len(self.steps)
        live = {}
        for kind in _KINDS:
            changes = np.zeros(num_steps + 1, dtype=np.int64)
            blocks = [block for block in self.blocks if block.kind == kind]
            sizes = np.array([block.num_bytes for block in blocks], dtype=np.int64)
            np.add.at(changes, [block.born for block in blocks], sizes)
            np.subtract.at(changes, [min(block.last, num_steps - 1) + 1 for block in blocks], sizes)
            live[kind] = np.cumsum(changes)[:num_steps]
        return live

    def live_at(self, step: int, owners: Mapping[str, Mapping[str, float]]) -> Mapping[tuple[str, str], int]:
        """Bytes alive in one step, by module and kind; a block that is made in a step of `owners` is theirs, by shares
        that sum to 1."""
        live: defaultdict[tuple[str, str], int] = defaultdict(int)
        for block in self.blocks:
            if not block.born <= step <= block.last:
                continue
            left, made = block.num_bytes, self.steps[block.born]
            if made in owners:
                for module, share in owners[made].items():
                    live[module, block.kind] += (part := min(left, round(block.num_bytes * share)))
                    left -= part
            if left:
                live[block.module, block.kind] += left
        return live

    def _run_forward(self, graph: LocalGraph, held: list[Blocks]) -> dict[str, Blocks]:
        values: dict[fx.Node, Blocks] = {}
        for spec, node in placeholders(graph):
            kind = _PERMANENT.get(spec.kind)
            module = owner_of(spec.path) if kind == PARAM else ""
            values[node] = self._allocate(node.meta["val"], module, kind) if kind else None
            held.append(values[node])
        self._walk(graph, "forward", values)
        saved: dict[str, Blocks] = {}
        for output, node in outputs(graph):
            if output.kind is OutputKind.SAVED:
                saved[output.path] = values[node]
            elif output.kind is OutputKind.OUTPUT:
                held.append(values[node])
                self._returned += _flatten(values[node])
            if output.kind is not OutputKind.MUTATION:
                self._mark(values[node], ACTIVATION)
        return saved

    def _run_backward(self, graph: LocalGraph, saved: Mapping[str, Blocks], held: list[Blocks]) -> None:
        values: dict[fx.Node, Blocks] = {}
        tangents: list[Blocks] = []
        for spec, node in placeholders(graph):
            if spec.kind is InputKind.SAVED:
                values[node] = saved[spec.path]
            elif spec.kind is InputKind.TANGENT:
                values[node] = self._allocate(node.meta["val"], "")
                tangents.append(values[node])
            else:
                values[node] = None
        self._walk(graph, "backward", values)
        for value in tangents:  # autograd holds them until the backward pass returns
            self._use(value, len(self.steps) - 1)
        for output, node in outputs(graph):
            if output.kind is OutputKind.GRADIENT:
                held.append(values[node])
                self._mark(values[node], GRADIENT)

    def _walk(self, graph: LocalGraph, name: str, values: dict[fx.Node, Blocks]) -> None:
        """Run the nodes of one graph; handing over its outputs is a step of its own."""
        self._parts = fuse(graph.module.graph, self.layouts) if self.is_fused else {}
        self._collectives = dict(collective_nodes(graph.module.graph))
        nodes = [node for node in graph.module.graph.nodes if node.op != "placeholder"]
        first = len(self.steps)
        self.steps += [f"{name}:{node.name}" for node in nodes]
        for now, node in enumerate(nodes, first):
            values[node] = self._run_node(node, now, values)
            for used in node.all_input_nodes:
                value = values[used]
                if type(value) is Block:  # nearly always
                    if value.last < now:
                        value.last = now
                elif value is not None:
                    self._use(value, now)
                if used in self._in_flight:
                    self._use(self._in_flight[used], now)

    def _run_node(self, node: fx.Node, now: int, values: Mapping[fx.Node, Blocks]) -> Blocks:
        """Blocks of a node's result: its base's if it is a view, new ones otherwise."""
        if node.op == "output":
            return None
        meta = node.meta
        if node.op == "get_attr":  # both passes hold the same tensor
            name = str(node.target)
            if name not in self._constants:
                self._constants[name] = self._allocate(meta.get("val"), meta.get("module", ""), PARAM, 0)
                self._use(self._constants[name], _ALWAYS)
            return self._constants[name]
        if workspace := workspace_bytes(node, self.layouts, self.device_kind):
            self._add(workspace, now, meta.get("module", ""))
        if node in self._collectives and self._collectives[node] != "all_reduce":
            self._in_flight[node] = self._busy_until_waited_for(node, self._collectives[node], now, values)
        base = aliased_input(node, self.layouts)
        if base is None:
            part = self._parts.get(node, _ALONE)
            if not part.is_stored:
                return None
            made = self._allocate(meta.get("val"), meta.get("module", ""), TEMPORARY, now)
            if part.may_overwrite and isinstance(made, Block):
                self._replacing.append((made, [b for used in node.all_input_nodes for b in _flatten(values[used])]))
            return made
        shared = values[base]
        if node.target is operator.getitem and isinstance(shared, tuple):
            index = node.args[1]
            assert isinstance(index, int)
            return shared[index]
        value = meta.get("val")
        return (shared,) * len(value) if isinstance(value, (tuple, list)) else shared

    def _write_in_place(self) -> None:
        """What a fused kernel reads for the last time and what it writes share memory, if they are of one size."""
        for made, read in self._replacing:
            for block in read:
                if block.last == made.born > block.born and block.num_bytes == made.num_bytes and block.kind != PARAM:
                    block.last -= 1
                    break

    def _busy_until_waited_for(
        self, node: fx.Node, kind: str, now: int, values: Mapping[fx.Node, Blocks]
    ) -> tuple[Block, ...]:
        operand = node.all_input_nodes[0]
        busy = tuple(_flatten(values[operand]))
        if kind == "reduce_scatter" and self.copies_reduce_scatter:
            busy += (self._add(tensor_bytes(operand.meta["val"]), now, node.meta.get("module", "")),)
        return busy

    def _allocate(self, value: object, module: str, kind: str = TEMPORARY, born: int | None = None) -> Blocks:
        if isinstance(value, torch.Tensor):
            return self._add(int(value.nbytes), len(self.steps) if born is None else born, module, kind)
        if isinstance(value, (tuple, list)):
            return tuple(self._allocate(v, module, kind, born) for v in value)
        return None

    def rounded(self, num_bytes: int) -> int:
        """What the allocator gives for so many bytes."""
        return -(-num_bytes // self.granularity) * self.granularity

    def _add(self, num_bytes: int, born: int, module: str, kind: str = TEMPORARY) -> Block:
        block = Block(self.rounded(num_bytes), born, born, kind, module)
        self.blocks.append(block)
        return block

    def _use(self, value: Blocks, now: int) -> None:
        for block in _flatten(value):
            block.last = max(block.last, now)

    def _mark(self, value: Blocks, kind: str) -> None:
        for block in _flatten(value):
            if block.kind == TEMPORARY:
                block.kind = kind


_ALWAYS = sys.maxsize
_ALONE = FusedOp(0, True)
_KINDS = (PARAM, GRADIENT, OPTIMIZER, ACTIVATION, TEMPORARY)
_PERMANENT = {InputKind.PARAM: PARAM, InputKind.BUFFER: PARAM, InputKind.INPUT: ACTIVATION}


def owner_of(path: str) -> str:
    """The module that a parameter or buffer belongs to."""
    return path.rpartition(".")[0]


def placeholders(graph: LocalGraph) -> Iterator[tuple[GraphInput, fx.Node]]:
    """Each input of a local graph with its node."""
    return zip(graph.inputs, graph.module.graph.find_nodes(op="placeholder"), strict=True)


def outputs(graph: LocalGraph) -> Iterator[tuple[GraphOutput, fx.Node]]:
    """Each output of a local graph that is a node (`None` is not) with it."""
    values = graph.module.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    for spec, value in zip(graph.outputs, values, strict=True):
        if isinstance(value, fx.Node):
            yield spec, value


def _flatten(value: Blocks) -> Iterator[Block]:
    if isinstance(value, Block):
        yield value
    elif value is not None:
        for part in value:
            yield from _flatten(part)
