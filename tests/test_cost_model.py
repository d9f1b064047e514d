"""The price stage against numbers worked out by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.cluster import Cluster, Device, Link
from autopar.compiler import Compiler
from autopar.cost_model.collectives import collective_time, num_hops, wire_bytes
from autopar.cost_model.memory import CONTEXT_BYTES, NCCL_BYTES, LiveBytes, at_rest, memory_profile
from autopar.cost_model.ops import aliased_input, count_flops, is_free, node_bytes, node_flops, op_time
from autopar.cost_model.simulate import Simulation, simulate
from autopar.devices import GIB
from autopar.errors import InputError, MeshError
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.mesh import Mesh
from autopar.passes.pipeline import rewrite
from autopar.planner import plan_named
from autopar.program import COLLECTIVE_KINDS, LocalGraph, LocalProgram

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
OPS = {kind: op for op, kind in COLLECTIVE_KINDS.items()}


class MeanSquare(nn.Module):
    """Two products of which the second has three times the parameters, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 192, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Builder:
    """Writes a local graph by hand; values are computed on the meta device, in float64."""

    def __init__(self, mesh: Mesh, backward: bool = False) -> None:
        self.mesh, self.backward = mesh, backward
        self.graph = fx.Graph()
        self.inputs: list[GraphInput] = []

    def input(self, kind: InputKind, path: str, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(path.replace(".", "_"))
        node.meta = {"val": torch.empty(shape, dtype=dtype, device="meta"), "module": "", "backward": self.backward}
        self.inputs.append(GraphInput(kind, path))
        return node

    def call(self, target: Any, *args: Any, module: str = "", val: object = None, **meta: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        value = target(*fx.map_arg(args, lambda n: n.meta["val"])) if val is None else val
        node.meta = {"val": value, "module": module, "backward": self.backward, **meta}
        return node

    def start(self, kind: str, value: fx.Node, axis: str, module: str = "") -> fx.Node:
        """A collective without its wait."""
        size, whole = self.mesh.size(axis), value.meta["val"]
        length = whole.shape[0] * size if kind == "all_gather" else whole.shape[0]
        length = length // size if kind == "reduce_scatter" else length
        out = whole.new_empty((length, *whole.shape[1:]))
        args = {
            "all_reduce": (value, "sum", axis),
            "all_gather": (value, size, axis),
            "reduce_scatter": (value, "sum", size, axis),
            "all_to_all": (value, [length // size] * size, [length // size] * size, axis),
        }[kind]
        message = max(out.numel(), whole.numel()) * whole.element_size()
        return self.call(OPS[kind], *args, module=module, val=out, bytes=message)

    def wait(self, collective: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, collective, val=collective.meta["val"])

    def run(self, kind: str, value: fx.Node, axis: str) -> fx.Node:
        return self.wait(self.start(kind, value, axis))

    def build(self, *outputs: tuple[OutputKind, str, fx.Node], holder: torch.nn.Module | None = None) -> LocalGraph:
        self.graph.output(tuple(node for _, _, node in outputs))
        self.graph.output_node().meta = {"module": "", "backward": self.backward}
        module = fx.GraphModule(holder or torch.nn.Module(), self.graph)
        specs = tuple(GraphOutput(kind, path) for kind, path, _ in outputs)
        return LocalGraph(module, tuple(self.inputs), specs, (None,) * len(self.inputs), (None,) * len(specs))


PARAM, INPUT, SAVED_IN, TANGENT = InputKind.PARAM, InputKind.INPUT, InputKind.SAVED, InputKind.TANGENT
OUTPUT, SAVED, GRADIENT = OutputKind.OUTPUT, OutputKind.SAVED, OutputKind.GRADIENT


def program_of(mesh: Mesh, forward: LocalGraph, backward: LocalGraph | None = None) -> LocalProgram:
    return LocalProgram(mesh, forward, forward, backward)


def toy_cluster(num_ranks: int, kind: str = "cpu", backend: str = "gloo", **device: Any) -> Cluster:
    """Round numbers: 1 TFLOP/s, 1 GB/s of memory, 1 GB/s of link, no latencies."""
    rates = dict.fromkeys(("bf16", "fp16", "tf32", "fp32", "fp64"), 1e12)
    figures: dict[str, Any] = {"flops": rates, "memory_bandwidth_bytes_s": 1e9, "kernel_launch_s": 0.0, **device}
    return Cluster(
        1,
        num_ranks,
        Device("toy", kind, 64 * GIB, 64 * GIB, **figures),
        Link("in", 1e9, 0.0),
        Link("out", 1e8, 0.0),
        backend,
    )


ONE = Mesh(("dp",), (1,))
FOUR = Mesh(("dp",), (4,))


# Collectives


def test_ring_bytes() -> None:
    assert wire_bytes("all_reduce", 8, 800) == 1400
    assert wire_bytes("all_gather", 8, 800) == wire_bytes("reduce_scatter", 8, 800) == 700
    assert wire_bytes("all_to_all", 4, 800) == 600
    assert wire_bytes("all_reduce", 1, 800) == 0
    assert (num_hops("all_reduce", 8), num_hops("all_gather", 8)) == (14, 7)


def test_ring_time() -> None:
    link = Link("toy", bandwidth_bytes_s=1e9, latency_s=1e-3, start_s=1e-2, slowdown={"reduce_scatter": 2.0})
    # start 10 ms, 6 hops of 1 ms, 1.5 · 4 MB at 1 GB/s
    assert collective_time("all_reduce", 4, 4_000_000, link) == pytest.approx(0.022, rel=1e-12)
    assert collective_time("all_gather", 4, 4_000_000, link) == pytest.approx(0.016, rel=1e-12)
    assert collective_time("reduce_scatter", 4, 4_000_000, link) == pytest.approx(0.019, rel=1e-12)
    assert collective_time("all_reduce", 1, 4_000_000, link) == 0.0


@pytest.mark.parametrize(
    ("device", "kind", "bus_gb_s"),
    [("A100", "all_reduce", 231), ("H100", "all_reduce", 480), ("H100", "all_gather", 350)],
)
def test_published_bus_bandwidth(device: str, kind: str, bus_gb_s: float) -> None:
    """nccl-tests at 8 GiB on eight GPUs; 10% is the spread between published runs of the same hardware."""
    seconds = collective_time(kind, 8, 8 * GIB, Cluster.parse(f"8 {device}").intra)
    assert wire_bytes(kind, 8, 8 * GIB) / seconds / 1e9 == pytest.approx(bus_gb_s, rel=0.1)


# Ops


def single(target: Any, *shapes: tuple[int, ...] | Any, dtype: torch.dtype = torch.float64) -> fx.Node:
    """One op on inputs of the given shapes; other arguments are passed as they are."""
    b = Builder(ONE)
    args = [b.input(INPUT, f"x{i}", *s, dtype=dtype) if isinstance(s, tuple) else s for i, s in enumerate(shapes)]
    return b.call(target, *args)


@pytest.mark.parametrize(
    ("target", "args", "flops"),
    [
        (aten.mm.default, ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
        (aten.addmm.default, ((7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        (aten.bmm.default, ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (aten.baddbmm.default, ((2, 3, 7), (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (aten.dot.default, ((5,), (5,)), 10),
        (aten.add.Tensor, ((3, 5), (3, 5)), 0),
    ],
)
def test_flops_by_hand(target: Any, args: tuple[Any, ...], flops: int) -> None:
    assert node_flops(single(target, *args)) == flops


def test_attention_flops() -> None:
    # 6 heads of 4×8 scores with head size 16: two products forward, five backward
    forward = single(
        aten._scaled_dot_product_flash_attention_for_cpu.default, (2, 3, 4, 16), (2, 3, 8, 16), (2, 3, 8, 16)
    )
    assert node_flops(forward) == 2 * 2 * (6 * 4 * 8 * 16)
    q, kv, lse = (2, 3, 4, 16), (2, 3, 8, 16), (2, 4, 3)
    backward = single(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, q, q, kv, kv, q, lse, 0.0, False
    )
    assert node_flops(backward) == 5 * 2 * (6 * 4 * 8 * 16)


def test_flops_equal_pytorchs_count() -> None:
    """Matmuls, convolutions (plain and transposed) and their backward, as `FlopCounterMode` counts them."""
    conv = torch.nn.Conv2d(4, 8, 3, padding=1)
    back = torch.nn.ConvTranspose2d(8, 6, 2, stride=2)
    head = torch.nn.Linear(6, 5)
    weights = [p.detach().requires_grad_() for m in (conv, back, head) for p in m.parameters()]

    def step(x: torch.Tensor, w: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.conv2d(x, w[0], w[1], padding=1).relu()
        y = torch.nn.functional.conv_transpose2d(y, w[2], w[3], stride=2).mean((2, 3))
        return torch.autograd.grad(torch.nn.functional.linear(y, w[4], w[5]).pow(2).sum(), [x, *w])

    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        step(x, weights)
    graph = make_fx(step)(x, weights).graph
    assert count_flops(graph) == counter.get_total_flops() > 0


def test_flops_of_a_grouped_convolution() -> None:
    """Each of 2·8·36 outputs sums 2 channels of a 3×3 filter; backward does as much for each gradient asked for."""
    one = 2 * (2 * 8 * 36) * (2 * 9)
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    assert node_flops(single(aten.convolution.default, (2, 4, 6, 6), (8, 2, 3, 3), None, *args)) == one
    shapes = ((2, 8, 6, 6), (2, 4, 6, 6), (8, 2, 3, 3))
    both = single(aten.convolution_backward.default, *shapes, [8], *args, [True, True, True])
    weight = single(aten.convolution_backward.default, *shapes, [8], *args, [False, True, False])
    assert (node_flops(both), node_flops(weight)) == (2 * one, one)


def test_bytes_read_and_written() -> None:
    assert node_bytes(single(aten.add.Tensor, (3, 5), (3, 5))) == 3 * 15 * 8
    b = Builder(ONE)
    table, ids = b.input(PARAM, "table", 1000, 4), b.input(INPUT, "ids", 6, dtype=torch.int64)
    assert node_bytes(b.call(aten.embedding.default, table, ids)) == 2 * 6 * 4 * 8 + 6 * 8  # rows, not the table
    row = b.input(INPUT, "row", 1, 4)
    tall = b.call(aten.expand.default, row, [50, 4])
    assert node_bytes(tall) == 0
    assert node_bytes(b.call(aten.mul.Tensor, tall, tall)) == 4 * 8 + 50 * 4 * 8  # the repeated row is read once


def test_views_are_free_and_copies_are_not() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 4, 6)
    views = [
        b.call(aten.view.default, x, [2, 12]), b.call(aten.t.default, x), b.call(aten.transpose.int, x, 0, 1),
        b.call(aten.permute.default, x, [1, 0]), b.call(aten.slice.Tensor, x, 0, 0, 2),
        b.call(aten.select.int, x, 0, 1), b.call(aten.unsqueeze.default, x, 0), b.call(aten.detach.default, x),
        b.call(aten.split.Tensor, x, 2),
        b.call(aten._unsafe_view.default, x, [24]), b.call(aten.as_strided.default, x, [2], [1]),
        b.call(aten.reshape.default, x, [24]),
    ]  # fmt: skip
    for view in views:
        assert aliased_input(view) is x
        assert is_free(view)
    for copy in (
        b.call(aten.clone.default, x),
        b.call(aten.reshape.default, views[1], [24]),
        b.call(aten.neg.default, x),
    ):
        assert aliased_input(copy) is None
        assert not is_free(copy)
    in_place = b.call(aten.add_.Tensor, x, x)
    assert aliased_input(in_place) is x
    assert not is_free(in_place)


def test_roofline() -> None:
    device = toy_cluster(1, kernel_launch_s=1e-6).device
    wide = single(aten.mm.default, (1000, 1000), (1000, 1000))  # 2 GFLOP at 1 TFLOP/s < 24 MB at 1 GB/s
    assert op_time(wide, device) == pytest.approx(24e-3 + 1e-6, rel=1e-12)
    fast = toy_cluster(1, memory_bandwidth_bytes_s=1e15).device
    assert op_time(wide, fast) == pytest.approx(2e-3, rel=1e-12)
    assert op_time(single(aten.t.default, (3, 4)), device) == 0.0


def test_float32_uses_tf32_only_where_allowed() -> None:
    device = Cluster.parse("8 A100").device
    node = single(aten.mm.default, (4096, 4096), (4096, 4096), dtype=torch.float32)
    plain, tensor_cores = op_time(node, device), op_time(node, device, allow_tf32=True)
    # A queued device hides the host's launch; its own start is part of the op.
    assert (plain - device.kernel_start_s) / (tensor_cores - device.kernel_start_s) == pytest.approx(8, rel=1e-9)


# Liveness


def test_peak_of_a_chain_by_hand() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 10)  # 80 bytes, always
    w = b.input(PARAM, "w", 10)  # 80 bytes, always
    wide = b.call(aten.repeat.default, x, [5])  # +400
    rows = b.call(aten.view.default, wide, [5, 10])  # a view
    product = b.call(aten.mul.Tensor, rows, w)  # +400, then `wide` is free
    total = b.call(aten.sum.dim_IntList, product, [0])  # +80, then `product` is free
    half = b.call(aten.div.Tensor, total, 2)  # +80, and the number as a tensor, 16
    profile = memory_profile(program_of(ONE, b.build((OUTPUT, "y", half))), toy_cluster(1))
    assert [size for _, size in profile.timeline] == [560, 560, 960, 640, 336, 240]
    assert profile.peak_at == f"forward:{product.name}"
    assert (profile.peak.params, profile.peak.activations, profile.peak.temporaries) == (80, 80, 800)
    assert profile.peak.total == 960


def test_a_fused_kernel_keeps_its_inner_values_and_writes_in_place() -> None:
    b = Builder(ONE)
    x, w = b.input(INPUT, "x", 10, 10), b.input(PARAM, "w", 10, 10)  # 800 bytes each, always
    product = b.call(aten.mm.default, x, w)  # +800
    gate = b.call(aten.mul.Tensor, product, b.call(aten.sigmoid.default, product))  # in place of the product
    program = program_of(ONE, b.build((OUTPUT, "y", b.call(aten.mm.default, gate, w))))  # +800, then the gate is free
    fused, eager = (memory_profile(program, toy_cluster(1), fused=fused) for fused in (True, False))
    assert [size for _, size in fused.timeline] == [2400, 2400, 2400, 3200, 2400]
    assert [size for _, size in eager.timeline] == [2400, 3200, 4000, 3200, 2400]


def training_step(batch: int = 2, mesh: Mesh = ONE) -> LocalProgram:
    """y = relu(x @ w), with x (batch, 3) and w (3, 5); saves the input, the parameter and the result."""
    b = Builder(mesh)
    w, x = b.input(PARAM, "w", 3, 5), b.input(INPUT, "x", batch, 3)
    product = b.call(aten.mm.default, x, w)
    y = b.call(aten.relu.default, product)
    forward = b.build((OUTPUT, "y", y), (SAVED, "x", x), (SAVED, "w", w), (SAVED, "mask", b.call(aten.gt.Scalar, y, 0)))
    b = Builder(mesh, backward=True)
    saved = [b.input(SAVED_IN, "x", batch, 3), b.input(SAVED_IN, "w", 3, 5)]
    mask = b.input(SAVED_IN, "mask", batch, 5, dtype=torch.bool)
    tangent = b.input(TANGENT, "y", batch, 5)
    grad = b.call(aten.mul.Tensor, tangent, mask)
    swapped = b.call(aten.mm.default, b.call(aten.t.default, grad), saved[0])
    weight_grad = b.call(aten.t.default, swapped)
    b.call(aten.mm.default, grad, b.call(aten.t.default, saved[1]))
    return program_of(mesh, forward, b.build((GRADIENT, "w", weight_grad)))


def test_training_step_by_hand() -> None:
    profile = memory_profile(training_step(), toy_cluster(1), "adamw")
    # Always: w 120, its two moments 240 and their count 4, x 48.  y, 80, is held by the caller; the mask is 10 bools.
    always = 120 + 240 + 4 + 48
    assert [size for _, size in profile.timeline] == [
        always + 80,  # product
        always + 80 + 80,  # y
        always + 80 + 10 + 16,  # mask; zero becomes a tensor
        always + 80 + 10,  # forward's outputs; saved x and w cost nothing
        always + 80 + 10 + 80 + 80 + 80,  # tangent, and its product with the mask, which is cast
        always + 80 + 80 + 80,  # a view; the mask is gone
        always + 80 + 80 + 80 + 120,  # the gradient of w, transposed
        always + 80 + 80 + 80 + 120,
        always + 80 + 80 + 80 + 120,
        always + 80 + 80 + 80 + 120 + 48,  # a gradient that nobody takes
        always + 80 + 80 + 120,  # backward's outputs
        always + 80 + 120 + 240 + 64,  # optimizer: two temporaries of w's size, and numbers
    ]
    assert profile.peak_at == "optimizer:step"
    assert (profile.peak.params, profile.peak.grads, profile.peak.optimizer) == (120, 120, 244)
    assert (profile.peak.activations, profile.peak.temporaries, profile.peak.reserve) == (48 + 80, 240 + 64, 0)


def test_what_is_live_at_the_peak_by_module() -> None:
    program = training_step()
    for graph in program.graphs:
        for node in graph.module.graph.nodes:
            node.meta["module"] = "layer" if node.op == "call_function" else ""
    profile = memory_profile(program, toy_cluster(1), "sgd_momentum")
    assert profile.peak_at == "backward:mm_default_1"
    live = profile.live_at_peak
    assert live == (
        LiveBytes("layer", "temporaries", 80 + 48),  # tangent times mask, and the gradient that nobody takes
        LiveBytes("", "optimizer", 120),
        LiveBytes("", "params", 120),
        LiveBytes("layer", "grads", 120),
        LiveBytes("", "temporaries", 80),  # the tangent
        LiveBytes("layer", "activations", 80),  # y, which the caller holds
        LiveBytes("", "activations", 48),  # x
    )
    assert sum(one.num_bytes for one in live) == profile.peak.total


def test_the_backward_pass_names_the_modules_that_run_and_their_most_bytes() -> None:
    compiler = Compiler(MeanSquare(), (2,), Cluster.parse("2x1 cpu @ 100mbit"))
    joint = compiler.trace((torch.empty(8, 64),), {}, train=True, local=False)
    simulation = simulate(rewrite(joint, plan_named("zero3", joint, (2,), 1)), compiler.cluster)
    assert [module for module, _ in simulation.in_backward] == ["", "layers.2", "layers.1", "layers.0"]
    backward = [size for step, size in simulation.timeline if step.startswith("backward:")]
    assert max(size for _, size in simulation.in_backward) == max(backward)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_bucket_is_of_those_whose_tensors_are_in_it(strategy: str) -> None:
    """What is waited for and the gradients that it holds, by bytes; nothing of it is the model's own."""
    compiler = Compiler(MeanSquare(), (2,), Cluster.parse("2x1 cpu @ 100mbit"))
    joint = compiler.trace((torch.empty(8, 64),), {}, train=True, local=False)
    simulation = simulate(rewrite(joint, plan_named(strategy, joint, (2,), 1)), compiler.cluster)
    waited = {module: spent.exposed_s for module, spent in simulation.by_module.items() if spent.exposed_s}
    reduced = "all_reduce@dp" if strategy == "ddp" else "reduce_scatter@dp"
    first, last = waited["layers.0"][reduced], waited["layers.2"][reduced]
    assert first == pytest.approx(last / 3)
    assert sum(sum(kinds.values()) for kinds in waited.values()) == pytest.approx(simulation.exposed_s)
    grads = {one.module: one.num_bytes for one in simulation.live_at_end if one.kind == "grads"}
    assert grads.keys() == {"layers.0", "layers.2"}
    assert grads["layers.2"] == 3 * grads["layers.0"]


def test_constants_of_a_graph_are_always_there() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 10)
    first = b.call(aten.neg.default, x)
    constant = b.graph.create_node("get_attr", "table")
    constant.meta = {"val": torch.empty(10, dtype=torch.float64, device="meta"), "module": "layer", "backward": False}
    out = b.call(aten.add.Tensor, b.call(aten.add.Tensor, first, constant), constant)
    holder = torch.nn.Module()
    holder.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    graph = b.build((OUTPUT, "y", out), holder=holder)
    profile = memory_profile(program_of(ONE, graph), toy_cluster(1))
    assert [size - 160 for _, size in profile.timeline] == [80, 80, 160, 160, 80]  # x and the constant are always there
    assert LiveBytes("layer", "params", 80) in profile.live_at_peak


def test_split_parts_keep_the_whole_alive() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 10)
    twice = b.call(aten.add.Tensor, x, x)
    parts = b.call(aten.split.Tensor, twice, 5)
    first = b.call(operator.getitem, parts, 0, val=parts.meta["val"][0])
    out = b.call(aten.neg.default, first)
    profile = memory_profile(program_of(ONE, b.build((OUTPUT, "y", out))), toy_cluster(1))
    assert [size for _, size in profile.timeline] == [160, 160, 160, 200, 120]


def test_outputs_of_one_op_are_separate_blocks() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 4, 8)
    pair = b.call(aten.max.dim, x, 1)
    values = b.call(operator.getitem, pair, 0, val=pair.meta["val"][0])
    out = b.call(aten.neg.default, values)  # the indices are gone
    profile = memory_profile(program_of(ONE, b.build((OUTPUT, "y", out))), toy_cluster(1))
    assert [size - 256 for _, size in profile.timeline] == [32 + 32, 32 + 32, 32 + 32, 32]


@pytest.mark.parametrize(
    ("kind", "backend", "in_flight", "waited"),
    [
        # 32 bytes in; one op of 8 bytes runs while the collective does.
        ("all_gather", "nccl", 32 + 128 + 8, 32 + 128),  # the input stays until the wait
        ("reduce_scatter", "nccl", 32 + 8 + 8, 32 + 8),
        ("reduce_scatter", "gloo", 32 + 32 + 8 + 8, 32 + 32 + 8),  # gloo sums a copy
        ("all_to_all", "nccl", 32 + 32 + 8, 32 + 32),
        ("all_reduce", "nccl", 32 + 8, 32),  # works on a copy of its own: the input may go
    ],
)
def test_a_collectives_input_lives_until_its_wait(kind: str, backend: str, in_flight: int, waited: int) -> None:
    b = Builder(FOUR)
    x = b.input(INPUT, "x", 4)
    started = b.start(kind, b.call(aten.neg.default, x), "dp")
    b.call(aten.sum.default, x)
    out = b.call(aten.sum.default, b.wait(started))
    profile = memory_profile(program_of(FOUR, b.build((OUTPUT, "y", out))), toy_cluster(4, backend=backend))
    assert [size - 32 for _, size in profile.timeline][2:4] == [in_flight, waited]


def test_cuda_rounds_and_reserves() -> None:
    program = training_step(mesh=Mesh(("dp", "tp"), (2, 2)))
    profile = memory_profile(program, toy_cluster(4, kind="cuda", backend="nccl"), "adamw_fused")
    at_peak = profile.peak
    assert at_peak.params == 512
    assert at_peak.reserve == CONTEXT_BYTES + 2 * NCCL_BYTES + int(0.05 * (at_peak.activations + at_peak.temporaries))
    alone = memory_profile(training_step(), toy_cluster(1, kind="cuda", backend="nccl")).peak
    assert alone.reserve < CONTEXT_BYTES + NCCL_BYTES


def test_memory_grows_with_the_batch_and_the_optimizer() -> None:
    cluster = toy_cluster(1)
    by_batch = [memory_profile(training_step(batch), cluster).peak.total for batch in (2, 4, 64, 1000)]
    assert by_batch == sorted(set(by_batch))
    by_state = [memory_profile(training_step(), cluster, name).peak.total for name in ("sgd", "sgd_momentum", "adamw")]
    assert by_state == sorted(set(by_state))
    assert at_rest(training_step(), "sgd").optimizer == 0
    assert at_rest(training_step(), "adamw").optimizer == 244
    assert memory_profile(training_step(), cluster, torch.optim.SGD).peak.total == by_state[0]
    with pytest.raises(InputError, match=r"unknown optimizer 'shampoo'; known: sgd, .*adamw"):
        memory_profile(training_step(), cluster, "shampoo")


def test_inference_has_no_gradients_and_no_optimizer() -> None:
    whole = training_step()
    peak = memory_profile(program_of(ONE, whole.forward), toy_cluster(1)).peak
    assert (peak.grads, peak.optimizer) == (0, 0)


# Strategies


def layers(mesh: Mesh, num_layers: int, sharded: bool) -> LocalProgram:
    """A chain of matmuls with 8×8 weights: DDP reduces gradients; ZeRO-3 gathers in both passes and scatters."""
    n = mesh.num_ranks
    b = Builder(mesh)
    rest = [b.input(PARAM, f"w{i}", 8 // n if sharded else 8, 8) for i in range(num_layers)]
    x = b.input(INPUT, "x", 2, 8)
    saved = []
    for i, w in enumerate(rest):
        saved.append((SAVED, f"x{i}", x))
        x = b.call(aten.mm.default, x, b.run("all_gather", w, "dp") if sharded else w)
    kept = [(SAVED, f"w{i}", w) for i, w in enumerate(rest)]
    forward = b.build((OUTPUT, "y", x), *saved, *kept)
    b = Builder(mesh, backward=True)
    inputs = [b.input(SAVED_IN, f"x{i}", 2, 8) for i in range(num_layers)]
    weights = [b.input(SAVED_IN, f"w{i}", *w.meta["val"].shape) for i, w in enumerate(rest)]
    grad = b.input(TANGENT, "y", 2, 8)
    gradients = []
    for i in reversed(range(num_layers)):
        weight_grad = b.call(aten.mm.default, b.call(aten.t.default, inputs[i]), grad)
        gradients.append((GRADIENT, f"w{i}", b.run("reduce_scatter" if sharded else "all_reduce", weight_grad, "dp")))
        weight = b.run("all_gather", weights[i], "dp") if sharded else weights[i]
        grad = b.call(aten.mm.default, grad, b.call(aten.t.default, weight))
    return program_of(mesh, forward, b.build(*gradients))


def sent(program: LocalProgram) -> float:
    return sum(wire_bytes(c.kind, program.mesh.size(c.axis), c.num_bytes) for c in program.collectives())


def test_ddp_moves_two_and_zero3_three_times_the_parameters() -> None:
    psi = 3 * 64 * 8
    ddp, zero3 = layers(FOUR, 3, sharded=False), layers(FOUR, 3, sharded=True)
    assert sent(ddp) == 2 * psi * 3 / 4
    assert sent(zero3) == 3 * psi * 3 / 4
    cluster = toy_cluster(4)
    assert simulate(ddp, cluster).collective_bytes == {"all_reduce@dp": psi}
    assert simulate(zero3, cluster).collective_bytes == {"all_gather@dp": 2 * psi, "reduce_scatter@dp": psi}


def test_zero3_divides_what_rests() -> None:
    ddp, zero3 = (at_rest(layers(FOUR, 3, sharded), "sgd_momentum") for sharded in (False, True))
    assert (ddp.params, ddp.optimizer) == (4 * zero3.params, 4 * zero3.optimizer)
    peaks = [simulate(layers(FOUR, 8, sharded), toy_cluster(4)).memory for sharded in (False, True)]
    assert peaks[1].total < peaks[0].total
    assert peaks[1].grads < peaks[0].grads


def test_deferred_micro_steps_reduce_once() -> None:
    psi, cluster = 3 * 64 * 8, toy_cluster(4)
    ddp = layers(FOUR, 3, sharded=False)
    once, each = (simulate(ddp, cluster, accumulate=5, defer=defer) for defer in (True, False))
    assert once.collective_bytes == {"all_reduce@dp": psi}
    assert each.collective_bytes == {"all_reduce@dp": 5 * psi}
    assert once.compute_s == pytest.approx(each.compute_s)
    assert once.collective_s == pytest.approx(each.collective_s / 5)
    assert once.step_time_s < each.step_time_s
    assert simulate(ddp, cluster, defer=True) == simulate(ddp, cluster)
    zero3 = layers(FOUR, 3, sharded=True)  # gathers again in each backward pass, and gathers of kept copies once
    assert simulate(zero3, cluster, accumulate=5, defer=True).collective_bytes == {
        "all_gather@dp": psi + 5 * psi, "reduce_scatter@dp": psi,
    }  # fmt: skip


# Time


def overlapping(mesh: Mesh, kinds: tuple[tuple[str, str], ...], between: int) -> Simulation:
    """Start collectives of 8 kB, run `between` ops of 16 kB each, wait; on a 1 GB/s machine an op takes 16 µs."""
    b = Builder(mesh)
    x = b.input(INPUT, "x", 1000)
    started = [b.start(kind, x, axis) for kind, axis in kinds]
    y = x
    for _ in range(between):
        y = b.call(aten.neg.default, y)
    waited = [b.wait(collective) for collective in started]
    return simulate(program_of(mesh, b.build((OUTPUT, "y", y), *((OUTPUT, f"z{i}", w) for i, w in enumerate(waited)))),
                    toy_cluster(mesh.num_ranks))  # fmt: skip


def test_collectives_hide_behind_compute() -> None:
    # An all-reduce of 8 kB over four ranks at 1 GB/s takes 12 µs.
    bare = overlapping(FOUR, (("all_reduce", "dp"),), between=0)
    assert (bare.compute_s, bare.exposed_s, bare.step_time_s) == pytest.approx((0, 12e-6, 12e-6), rel=1e-12)
    hidden = overlapping(FOUR, (("all_reduce", "dp"),), between=1)
    assert (hidden.compute_s, hidden.step_time_s) == pytest.approx((16e-6, 16e-6), rel=1e-12)
    assert hidden.exposed_s == 0
    assert hidden.collective_s == bare.collective_s == pytest.approx(12e-6, rel=1e-12)


def test_collectives_of_one_link_queue() -> None:
    two = (("all_reduce", "dp"), ("all_reduce", "dp"))
    queued = overlapping(FOUR, two, between=1)
    assert (queued.exposed_s, queued.step_time_s) == pytest.approx((24e-6 - 16e-6, 24e-6), rel=1e-12)
    # Two axes inside one node share its link: 8 µs each over two ranks.
    both = overlapping(Mesh(("dp", "tp"), (2, 2)), (("all_reduce", "dp"), ("all_reduce", "tp")), between=0)
    assert both.step_time_s == pytest.approx(16e-6, rel=1e-12)


def test_links_of_different_kinds_run_side_by_side() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    b = Builder(mesh)
    x = b.input(INPUT, "x", 1000)
    started = [b.start("all_reduce", x, axis) for axis in mesh.names]
    program = program_of(mesh, b.build(*((OUTPUT, f"z{i}", b.wait(s)) for i, s in enumerate(started))))
    device = toy_cluster(4).device
    cluster = Cluster(2, 2, device, Link("in", 1e9, 0.0), Link("out", 1e8, 0.0), "gloo")
    # 80 µs between the nodes, 8 µs inside them.
    simulation = simulate(program, cluster)
    assert simulation.step_time_s == pytest.approx(80e-6, rel=1e-12)
    assert simulation.collective_s == pytest.approx(88e-6, rel=1e-12)


def test_optimizer_step_is_bound_by_memory() -> None:
    simulation = simulate(training_step(), toy_cluster(1))
    ops = [n for g in (training_step().forward, training_step().backward) if g for n in g.module.graph.nodes]
    work = sum(op_time(node, toy_cluster(1).device) for node in ops)
    # Reads gradient, parameter and both moments (and AdamW's count of steps); writes all but the gradient.
    assert simulation.compute_s == pytest.approx(work + (3 * 120 + 2 * 244) / 1e9, rel=1e-12)
    assert simulation.exposed_s == 0


def test_price_is_the_sum_over_the_collectives_in_the_graph() -> None:
    program = layers(FOUR, 3, sharded=True)
    cluster = Cluster.parse("4 cpu")
    priced = sum(collective_time(c.kind, 4, c.num_bytes, cluster.intra) for c in program.collectives())
    simulation = simulate(program, cluster)
    assert simulation.collective_s == pytest.approx(priced, rel=1e-12)
    assert sum(simulation.collective_bytes.values()) == sum(c.num_bytes for c in program.collectives()) == 9 * 512
    assert simulation.step_time_s == simulation.compute_s + simulation.exposed_s


def test_simulation_is_deterministic_and_checks_the_mesh() -> None:
    program = layers(FOUR, 2, sharded=True)
    assert simulate(program, toy_cluster(4)) == simulate(program, toy_cluster(4))
    with pytest.raises(MeshError, match="mesh dp=4 has 4 ranks"):
        simulate(program, toy_cluster(8))
