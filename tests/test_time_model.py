"""The time side of the cost model: efficiency by shape, NCCL's algorithms, launches, fusion and contention."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cluster import Cluster, axis_link
from autopar.cost_model.collectives import collective_lines, collective_time, wire_bytes
from autopar.cost_model.efficiency import attention_blocks, attention_time, matmul_time, with_flash_attention
from autopar.cost_model.fusion import fuse
from autopar.cost_model.ops import compute_time, op_time
from autopar.cost_model.simulate import CONTENTION, Simulation, simulate
from autopar.devices import GIB
from autopar.graph import InputKind, OutputKind
from autopar.mesh import Mesh
from benchmarks import time_model
from tests.test_cost_model import FOUR, ONE, Builder, program_of, single, toy_cluster

aten = torch.ops.aten
INPUT, OUTPUT = InputKind.INPUT, OutputKind.OUTPUT

A100 = Cluster.parse("8 A100").device


def median_error(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)


# Efficiency by shape

MATMULS = {
    # TFLOP/s by (m, n, k), published by Azure/AI-benchmarking-guide (A100 SXM, fp16) and MooreThreads/SimuMax (A100
    # PCIe, bf16, output in bf16).
    "A100": {
        (1024, 1024, 1024): 119.4, (2048, 2048, 2048): 221.8, (4096, 4096, 4096): 228.0, (8192, 8192, 8192): 253.7,
        (16384, 16384, 16384): 256.5, (6144, 12288, 12288): 250.8,
    },
    "A100-PCIe-80GB": {  # every 18th row
        (4096, 1536, 5120): 245.8, (4096, 5120, 12288): 240.8, (4096, 1536, 7168): 250.5, (4096, 7168, 2048): 212.6,
        (4096, 28672, 4096): 230.0, (4096, 64256, 4096): 232.8, (4096, 768, 4096): 238.8, (4096, 8192, 8192): 228.6,
        (4096, 28672, 8192): 233.3, (4096, 8192, 7168): 227.1, (4096, 16128, 8192): 233.8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MATMULS)
def test_published_matmuls(name: str) -> None:
    device = Cluster.parse(f"8 {name}").device
    start_s = device.kernel_start_s
    pairs, flat = [], []
    for (m, n, k), tflops in MATMULS[name].items():
        measured = 2 * m * n * k / tflops / 1e12
        pairs.append((matmul_time(1, m, n, k, 2, "bf16", device) + start_s, measured))
        flat.append((2 * m * n * k / device.flops["bf16"], measured))
    assert median_error(pairs) < 0.05
    if name == "A100":  # small ones among them
        assert median_error(flat) > 0.08


def test_tiles_come_in_rounds() -> None:
    """108 multiprocessors take 108 tiles of 256×128 in one round; one more starts another."""
    one, two = (matmul_time(1, 256 * tiles, 128, 4096, 2, "bf16", A100) for tiles in (108, 109))
    assert two / one == pytest.approx(2, rel=0.5)
    assert two > one
    assert matmul_time(1, 250, 100, 4096, 2, "bf16", A100) == matmul_time(1, 256, 128, 4096, 2, "bf16", A100)
    assert matmul_time(7, 256, 128, 64, 2, "bf16", A100) == matmul_time(1, 7 * 256, 128, 64, 2, "bf16", A100)


def test_a_short_depth_costs_more() -> None:
    long, short = (k / matmul_time(1, 8192, 8192, k, 2, "bf16", A100) for k in (8192, 128))
    assert short < 0.6 * long


def test_no_tiles_on_a_cpu() -> None:
    cpu = Cluster.parse("4 cpu").device
    assert matmul_time(3, 5, 7, 11, 4, "fp32", cpu) == pytest.approx(2 * 3 * 5 * 7 * 11 / cpu.flops["fp32"], rel=1e-12)


def test_matmul_shapes_of_ops() -> None:
    """Products are timed by their batch and sides, whatever op computes them."""
    half = torch.bfloat16
    expected = matmul_time(1, 512, 384, 256, 2, "bf16", A100)
    assert compute_time(single(aten.mm.default, (512, 256), (256, 384), dtype=half), A100) == expected
    assert compute_time(single(aten.addmm.default, (384,), (512, 256), (256, 384), dtype=half), A100) == expected
    assert compute_time(single(aten.linear.default, (2, 256, 256), (384, 256), dtype=half), A100) == expected
    batched = single(aten.bmm.default, (6, 512, 256), (6, 256, 384), dtype=half)
    assert compute_time(batched, A100) == matmul_time(6, 512, 384, 256, 2, "bf16", A100)


def test_published_attention() -> None:
    """Causal FlashAttention, sequence 4096, head size 128 (MooreThreads/SimuMax, which counts the whole matrix)."""
    device = Cluster.parse("8 A100-PCIe-80GB").device
    for is_backward, published in (
        (False, {64: 370.3, 32: 349.0, 16: 308.2, 8: 245.4}),
        (True, {64: 313.6, 16: 277.1}),
    ):
        for heads, tflops in published.items():
            flops = (5 if is_backward else 2) * heads * 4096**2 * 256
            seconds = attention_time(flops, attention_blocks(1, heads, 4096), True, is_backward, "bf16", device)
            assert seconds == pytest.approx(flops / tflops / 1e12, rel=0.17)


def test_attention_by_version() -> None:
    a100, h100 = (Cluster.parse(f"1 {name}").device for name in ("A100", "H100"))
    for device in (a100, h100):
        first, second = (with_flash_attention(device, version) for version in (1, 2))
        assert second == device
        assert all(one < two for one, two in zip(first.attention_shares, second.attention_shares, strict=True))
    assert with_flash_attention(a100, 3) == a100  # it needs Hopper's instructions
    assert with_flash_attention(h100, 3).attention_shares > h100.attention_shares


def test_causal_attention_skips_half() -> None:
    def attention(is_causal: bool) -> float:
        shape = (8, 32, 4096, 128)
        value = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        target: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
        b = Builder(ONE)
        q = b.input(INPUT, "q", *shape, dtype=torch.bfloat16)
        return compute_time(b.call(target, q, q, q, 0.0, is_causal, val=(value, value)), A100)

    assert 0.5 < attention(True) / attention(False) < 0.53


# NCCL

BUS_GB_S = [
    # Published nccl-tests (Azure/AI-benchmarking-guide, NVIDIA/dgxc-benchmarking, microsoft/mscclpp,
    # stas00/ml-engineering, NVIDIA/nccl issues): kind, ranks, nodes, device, bytes, bus GB/s.
    ("all_reduce", 8, 1, "A100", 2**26, 166.6), ("all_reduce", 8, 1, "A100", 2**30, 228.1),
    ("all_reduce", 8, 1, "H100", 2**22, 135.4), ("all_reduce", 8, 1, "H100", 2**28, 422.3),
    ("all_reduce", 8, 1, "H100", 2**34, 479.9), ("all_reduce", 8, 1, "B200", 2**27, 568.4),
    ("all_reduce", 8, 1, "B200", 2**33, 839.1), ("all_reduce", 16, 2, "A100", 2**30, 183.8),
    ("all_reduce", 16, 2, "H100", 2**30, 445.1), ("all_reduce", 256, 32, "H100", 2**31, 340.0),
    ("all_gather", 16, 2, "A100", 2**30, 177.1), ("all_gather", 8, 1, "H100", 2**33, 350.0),
    ("reduce_scatter", 8, 1, "H100", 2**33, 360.0), ("all_to_all", 16, 2, "A100", 2**30, 37.8),
]  # fmt: skip


def seconds_of(kind: str, ranks: int, nodes: int, name: str, num_bytes: int) -> float:
    link = axis_link(Cluster.parse(f"{nodes}x{ranks // nodes} {name}"), Mesh(("dp",), (ranks,)), "dp")
    return collective_time(kind, ranks, num_bytes, link)


def test_published_bus_bandwidths() -> None:
    pairs = [(seconds_of(*row[:5]), wire_bytes(row[0], row[1], row[4]) / row[5] / 1e9) for row in BUS_GB_S]
    assert median_error(pairs) < 0.05
    assert all(abs(predicted / measured - 1) < 0.2 for predicted, measured in pairs)


def test_algorithm_and_protocol_follow_the_message() -> None:
    link = Cluster.parse("8 H100").intra

    def best(kind: str, num_bytes: int) -> str:
        return min(collective_lines(kind, 8, link), key=lambda line: line.seconds(num_bytes)).algorithm

    assert best("all_reduce", 1024).endswith(" LL")
    assert best("all_reduce", GIB) == "switch"
    assert best("all_gather", 1024) == "ring LL"
    assert best("all_gather", GIB) == "ring Simple"
    assert any(best("all_gather", 2**power).endswith("LL128") for power in range(10, 30))
    assert "switch" not in {line.algorithm for line in collective_lines("all_reduce", 8, Cluster.parse("8 A100").intra)}


def test_trees_beat_rings_over_many_nodes() -> None:
    link = axis_link(Cluster.parse("128x8 A100"), Mesh(("dp",), (1024,)), "dp")
    lines = {line.algorithm: line.seconds(1 << 20) for line in collective_lines("all_reduce", 1024, link)}
    assert lines["tree LL128"] < 0.2 * lines["ring LL128"]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("cluster", ["8 H100", "4x8 H100", "8 L40S", "2x4 RTX4090", "4x2 cpu"])
def test_time_grows_with_the_message(kind: str, cluster: str) -> None:
    described = Cluster.parse(cluster)
    link = axis_link(described, Mesh(("dp",), (described.num_ranks,)), "dp")
    times = [collective_time(kind, described.num_ranks, 2**power, link) for power in range(0, 36, 3)]
    assert times == sorted(times)
    assert times[0] > 0


# Launches, contention and fusion


def chain(length: int, kind: str, **device: Any) -> Simulation:
    """`length` negations of 16 kB each: 16 µs at 1 GB/s."""
    b = Builder(ONE)
    x = b.input(INPUT, "x", 1000)
    for _ in range(length):
        x = b.call(aten.neg.default, x)
    return simulate(program_of(ONE, b.build((OUTPUT, "y", x))), toy_cluster(1, kind=kind, backend="gloo", **device))


def test_a_busy_queue_hides_launches() -> None:
    assert chain(10, "cpu", kernel_launch_s=5e-6).step_time_s == pytest.approx(10 * (16e-6 + 5e-6), rel=1e-9)
    # On a queued device one launch shows where ops are longer than it, and all launches where ops are shorter.
    assert chain(10, "cuda", kernel_launch_s=5e-6).step_time_s == pytest.approx(5e-6 + 10 * 16e-6, rel=1e-9)
    assert chain(10, "cuda", kernel_launch_s=50e-6).step_time_s == pytest.approx(10 * 50e-6 + 16e-6, rel=1e-9)


def test_overlap_slows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce of 12 µs beside ops of 16 µs, each slowing the other by half."""
    monkeypatch.setitem(CONTENTION, "gloo", 0.5)
    b = Builder(FOUR)
    x = b.input(INPUT, "x", 1000)
    started = b.start("all_reduce", x, "dp")
    y = b.call(aten.neg.default, b.call(aten.neg.default, x))
    simulation = simulate(program_of(FOUR, b.build((OUTPUT, "y", y), (OUTPUT, "z", b.wait(started)))), toy_cluster(4))
    assert simulation.compute_s == pytest.approx(12e-6 * 1.5 + 20e-6, rel=1e-9)
    assert simulation.exposed_s == 0
    assert simulation.collective_s == pytest.approx(12e-6, rel=1e-9)


def test_a_fused_chain_moves_its_ends() -> None:
    b = Builder(ONE)
    x, y, w = b.input(INPUT, "x", 100, 10), b.input(INPUT, "y", 100, 10), b.input(INPUT, "w", 10, 10)
    total = b.call(aten.add.Tensor, x, y)
    gate = b.call(aten.sigmoid.default, total)
    product = b.call(aten.mul.Tensor, total, gate)
    matmul = b.call(aten.mm.default, product, w)
    final = b.call(aten.add.Tensor, matmul, total)  # `total` is read again: the matmul stands between
    graph = b.build((OUTPUT, "z", final)).module.graph
    nodes = {node.name: share for node, share in fuse(graph).items()}
    size = 100 * 10 * 8
    assert nodes[total.name].moved_bytes == 3 * size  # two inputs, and itself for the last sum
    assert (nodes[gate.name].moved_bytes, nodes[gate.name].is_kernel) == (0, False)
    assert (nodes[product.name].moved_bytes, nodes[product.name].is_kernel) == (size, False)
    assert nodes[final.name].moved_bytes == 3 * size
    assert [name for name, share in nodes.items() if share.is_kernel] == [total.name, matmul.name, final.name]


def test_two_chains_that_meet_are_one_kernel() -> None:
    b = Builder(ONE)
    x, y = b.input(INPUT, "x", 10), b.input(INPUT, "y", 10)
    left, right = b.call(aten.neg.default, x), b.call(aten.exp.default, y)
    b.build((OUTPUT, "z", b.call(aten.sum.default, b.call(aten.mul.Tensor, left, right))))
    shares = fuse(b.graph).values()
    assert sum(share.is_kernel for share in shares) == 1
    assert sum(share.moved_bytes for share in shares) == 80 + 80 + 8


def test_compiled_is_never_slower() -> None:
    b = Builder(ONE)
    x = b.input(INPUT, "x", 4000, dtype=torch.float32)
    y = b.call(aten.mul.Tensor, b.call(aten.tanh.default, x), b.call(aten.neg.default, x))
    program = program_of(ONE, b.build((OUTPUT, "y", y)))
    cluster = Cluster.parse("1 A100")
    assert simulate(program, cluster, fused=True).step_time_s < simulate(program, cluster).step_time_s
    eager = [op_time(n, cluster.device) for n in program.forward.module.graph.nodes]
    assert sum(eager) > simulate(program, cluster, fused=True).compute_s - cluster.device.kernel_launch_s


def test_benchmark_of_published_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops, runs, out = tmp_path / "ops.csv", tmp_path / "runs.csv", tmp_path / "out.json"
    ops.write_text(
        "hardware,op,shape,peak_TFLOPs,efficiency,achieved_TFLOPs,source\n"
        'A100-SXM-80GB,cublasLt_fp16,"m=8192, n=8192, k=8192",312,0.813,253.7,here\n'
        'A100-PCIe,sdp_fwd,"batch=1, seq_len=4096, head_num=32, kv_head_num=8, qk_head_dim=128, v_head_dim=128",'
        "312,1.13,353.2,here\n"
        "Z80,matmul,best found,1,1,1,nowhere\n"
    )
    runs.write_text(
        "op,gpus,nodes,hardware,link,bytes,busbw_GBps,time_us,source,notes\n"
        "all_reduce,8,1,H100-SXM5-80GB,NVLink4,1073741824,466.35,,here,\n"
        "all_reduce,8,1,H100-SXM5-80GB,NVLink4,1073741824,1,,here,below-par fabric\n"
        "sendrecv,8,1,H100-SXM5-80GB,NVLink4,1073741824,200,,here,\n"
    )
    time_model.main(["--ops", str(ops), "--collectives", str(runs), "--json", str(out)])
    rows = json.loads(out.read_text())
    assert [row["group"] for row in rows] == [
        "A100-PCIe sdp_fwd", "A100-SXM-80GB cublasLt_fp16 sustained", "H100-80GB one node, 16 MiB and more",
    ]  # fmt: skip
    assert all(row["count"] == 1 and row["median_error"] < 0.15 for row in rows)
    assert {"p90_error", "bias", "roofline_median_error", "roofline_p90_error"} <= rows[0].keys()
    assert "| A100-PCIe sdp_fwd | 1 |" in capsys.readouterr().out
