"""A program's cost in symbols: sizes by the factor analysis, axis sizes, and rates of device and links.

Every dim of the traced graph is a product of factors, and factors that mean something get a name (see
`autopar.cost_model.sizes`).  A local dim is that product over the sizes of the axes that cut it.  So an element count
is one product of symbols, and FLOPs, memory traffic, messages and saved bytes are sums of such products; SymPy
comes in at the end only.  At the traced sizes the sums are the numeric counts to the last byte: where a local size is
not the quotient (an uneven cut, a layout that the lowering makes), the product carries the ratio as a constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.cluster import Cluster, axis_link
from autopar.cost_model.collectives import PHASES, Line, collective_lines
from autopar.cost_model.fusion import FusedOp, fuse
from autopar.cost_model.layout import Layouts, layouts_of
from autopar.cost_model.memory import at_rest
from autopar.cost_model.ops import (
    aliased_input,
    compute_time,
    flop_terms,
    is_free,
    matmul_rate,
    moved_parts,
    node_bytes,
    node_flops,
    tensor_bytes,
)
from autopar.cost_model.optimizers import OptimizerLike
from autopar.cost_model.products import Product, Sum, exactly, product, products_of, symbol, to_sympy, total
from autopar.cost_model.simulate import optimizer_bytes
from autopar.cost_model.sizes import LocalSizes, SizeNames, axis_symbol
from autopar.factors import analyse
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.plan_cost import SymbolicCost
from autopar.program import Collective, LocalGraph, LocalProgram, collectives_of

if TYPE_CHECKING:
    import sympy

MEMORY = "memory_bytes_s"
"""The symbol of the device's memory bandwidth; its rates are `flops_bf16_s` and so on, a link's `link_AXIS_bytes_s`."""


def symbolic_cost(
    joint: JointGraph,
    program: LocalProgram,
    cluster: Cluster,
    optimizer: OptimizerLike = "adamw",
    allow_tf32: bool = False,
    fused: bool = False,
) -> SymbolicCost:
    """The cost of one rank's step as expressions.

    Args:
        joint: the normalised graph that the program was rewritten from.
        program: one rank's program.
        cluster: what it runs on.
        optimizer, allow_tf32, fused: as for `autopar.cost_model.simulate.simulate`.

    Raises:
        MeshError: if mesh and cluster differ in size.
        InputError: if the optimizer is not known.
    """
    sizes = LocalSizes(joint, SizeNames(joint, analyse(joint)), program.mesh)
    for graph in program.graphs:
        sizes.add(graph.module.graph)
    counts = _Counts(program, sizes, fused)
    for graph in program.graphs:
        counts.add(graph.module.graph)
    rest = at_rest(program, optimizer)
    stepped = exactly(total(counts.trained_bytes()), sizes.values, optimizer_bytes(rest))
    time = _Time(program, cluster, allow_tf32)
    return SymbolicCost(
        flops=to_sympy(total(one for op in counts.ops for one in products_of(op.flops))),
        moved_bytes=to_sympy(total(one for op in counts.ops for one in products_of(op.moved))),
        wire_bytes={axis: to_sympy(total(counts.wire(axis))) for axis in program.mesh.names},
        saved_bytes=to_sympy(total(counts.saved_bytes())),
        time_s=time.ops(counts.ops) + time.optimizer(stepped) + time.collectives(counts.messages),
        values={**sizes.values, **time.values},
    )


@dataclass(frozen=True)
class _Op:
    """The counts of one node that does work, and whether a kernel starts with it."""

    node: fx.Node
    flops: Sum
    moved: Sum
    is_kernel: bool


class _Counts:
    """FLOPs, traffic and messages of a program's nodes as sums of products."""

    def __init__(self, program: LocalProgram, sizes: LocalSizes, fused: bool) -> None:
        self.program, self.sizes, self.fused = program, sizes, fused
        self.layouts = layouts_of(program)
        self.ops: list[_Op] = []
        self.messages: list[tuple[Collective, Sum]] = []

    def add(self, graph: fx.Graph) -> None:
        """Count the nodes of one graph."""
        collectives = {c.node: c for c in collectives_of(graph)}
        kernels = fuse(graph, self.layouts) if self.fused else {}
        for node in graph.nodes:
            if node.name in collectives:
                self.messages.append((collectives[node.name], self._message(node, collectives[node.name])))
            elif not is_free(node, self.layouts):
                alone = FusedOp(node_bytes(node, self.layouts), True)
                part = kernels.get(node, alone)
                self.ops.append(_Op(node, self._flops(node), self._moved(node, part.moved_bytes), part.is_kernel))

    def _exactly(self, products: Iterable[Product], wanted: int) -> Sum:
        return exactly(total(products), self.sizes.values, wanted)

    def _flops(self, node: fx.Node) -> Sum:
        terms = flop_terms(node, self.sizes.dims)
        return self._exactly((product(dims).times(count) for count, dims in terms), node_flops(node)) if terms else ()

    def _moved(self, node: fx.Node, num_bytes: int) -> Sum:
        times, read = moved_parts(node)
        written = (one.times(times) for one in self._bytes(node))
        loads = (one for n in read for one in self._distinct(n))
        return self._exactly((*written, *loads), num_bytes)

    def _bytes(self, node: fx.Node) -> Iterator[Product]:
        """Bytes of each tensor that a node returns."""
        value = node.meta.get("val")
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        for dims, tensor in zip(self.sizes.outputs(node), tensors, strict=False):
            yield product(dims).times(tensor.element_size())

    def _distinct(self, node: fx.Node) -> Iterator[Product]:
        """Bytes of a value as it lies in memory: dims that are only repeated are read once."""
        layout = self.layouts[node]
        if not isinstance(layout, torch.Tensor):
            yield from self._bytes(node)
            return
        stored = (d for d, stride in zip(self.sizes.dims(node), layout.stride(), strict=True) if stride)
        yield product(stored).times(layout.element_size())

    def _message(self, node: fx.Node, collective: Collective) -> Sum:
        whole = node if collective.kind == "all_gather" else node.all_input_nodes[0]
        return self._exactly(self._bytes(whole), collective.num_bytes)

    def wire(self, axis: str) -> Iterator[Product]:
        """Bytes sent along one axis."""
        ranks = symbol(axis_symbol(axis))
        for collective, message in self.messages:
            if collective.axis == axis:
                for one in products_of(message):
                    yield one.times(PHASES[collective.kind])
                    yield (one / ranks).times(-PHASES[collective.kind])

    def saved_bytes(self) -> Iterator[Product]:
        """Bytes that the forward pass keeps for the backward, each block of memory once; what the caller holds anyway
        (parameters, buffers, inputs) is not counted."""
        for node in saved_blocks(self.program, self.layouts):
            yield from products_of(self._exactly(self._bytes(node), tensor_bytes(node.meta["val"])))

    def trained_bytes(self) -> Iterator[Product]:
        """Bytes of the parameters that get a gradient."""
        backward = self.program.backward
        trained = {o.path for o in backward.outputs if o.kind is OutputKind.GRADIENT} if backward else set()
        for spec, node in _placeholders(self.program.forward):
            if spec.kind is InputKind.PARAM and spec.path in trained:
                yield from self._bytes(node)


def saved_blocks(program: LocalProgram, layouts: Layouts) -> list[fx.Node]:
    """The nodes of the forward graph in whose memory the saved values lie; no inputs."""
    values = program.forward.module.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    blocks: dict[fx.Node, None] = {}
    for spec, node in zip(program.forward.outputs, values, strict=True):
        if spec.kind is OutputKind.SAVED and isinstance(node, fx.Node):
            while (base := aliased_input(node, layouts)) is not None and isinstance(base.meta["val"], torch.Tensor):
                node = base
            if node.op == "call_function":
                blocks[node] = None
    return list(blocks)


def _placeholders(graph: LocalGraph) -> Iterator[tuple[GraphInput, fx.Node]]:
    yield from zip(graph.inputs, graph.module.graph.find_nodes(op="placeholder"), strict=True)


class _Time:
    """Seconds of ops, optimizer and collectives as expressions; equal terms are gathered first."""

    def __init__(self, program: LocalProgram, cluster: Cluster, allow_tf32: bool) -> None:
        self.mesh, self.cluster, self.device, self.allow_tf32 = program.mesh, cluster, cluster.device, allow_tf32
        self.values: dict[str, float] = {MEMORY: self.device.memory_bandwidth_bytes_s}

    def _symbol(self, name: str, value: float) -> sympy.Symbol:
        import sympy

        self.values[name] = value
        return sympy.Symbol(name, positive=True)

    def ops(self, ops: list[_Op]) -> sympy.Expr:
        """The longer of computing and moving, op by op; the launches instead, where a queue hides them and they take
        longer."""
        import sympy

        memory = self._symbol(MEMORY, self.device.memory_bandwidth_bytes_s)
        moved_only: list[Product] = []
        both: Counter[tuple[Sum, Sum, str, float]] = Counter()
        for op in ops:
            seconds = compute_time(op.node, self.device, self.allow_tf32) if op.flops else 0.0
            if not seconds:
                moved_only += products_of(op.moved)
                continue
            rate = matmul_rate(op.node, self.allow_tf32)
            both[op.flops, op.moved, rate, node_flops(op.node) / seconds / self.device.flops[rate]] += 1
        kernels = sum(op.is_kernel for op in ops)
        busy = to_sympy(total(moved_only)) / memory + kernels * self.device.kernel_start_s
        for (flops, moved, rate, share), count in both.items():
            speed = self._symbol(f"flops_{rate}_s", self.device.flops[rate])
            busy += count * sympy.Max(to_sympy(flops) / (speed * share), to_sympy(moved) / memory, evaluate=False)
        launches = kernels * self.device.kernel_launch_s
        return sympy.Max(busy, launches, evaluate=False) if self.device.is_queued else busy + launches

    def optimizer(self, moved: Sum) -> sympy.Expr:
        """The optimizer's step, which memory bounds."""
        return to_sympy(moved) / self._symbol(MEMORY, self.device.memory_bandwidth_bytes_s)

    def collectives(self, messages: list[tuple[Collective, Sum]]) -> sympy.Expr:
        """All messages one after the other, each in the fastest way for its size."""
        import sympy

        seconds = sympy.Integer(0)
        for (kind, axis, message), count in Counter((c.kind, c.axis, m) for c, m in messages).items():
            link = axis_link(self.cluster, self.mesh, axis)
            speed = self._symbol(f"link_{axis}_bytes_s", link.bandwidth_bytes_s)
            num_bytes = to_sympy(message)
            ways = []
            for line in _worth_taking(collective_lines(kind, self.mesh.size(axis), link)):
                transfer = num_bytes * (line.seconds_a_byte * link.bandwidth_bytes_s) / speed
                ways.append(line.start_s + transfer + 2 * sympy.sqrt(line.stage_s * transfer))
            if ways:
                seconds += count * (sympy.Min(*ways, evaluate=False) if len(ways) > 1 else ways[0])
        return seconds


def _worth_taking(lines: tuple[Line, ...]) -> list[Line]:
    """The lines that are fastest for some message: none is better in every respect."""

    def beats(one: Line, other: Line) -> bool:
        pairs = ((one.start_s, other.start_s), (one.seconds_a_byte, other.seconds_a_byte), (one.stage_s, other.stage_s))
        return one != other and all(a <= b for a, b in pairs)

    return [line for line in lines if not any(beats(other, line) for other in lines)]
