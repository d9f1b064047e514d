"""Cluster descriptions, budgets and the link of each mesh axis."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from autopar.cluster import Cluster, axis_link, budget_bytes, known_devices
from autopar.devices import GIB, match_gpu
from autopar.errors import InputError, MeshError
from autopar.mesh import Mesh


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device", "backend"),
    [
        ("2x8 H100-80GB", 2, 8, "H100-80GB", "nccl"),
        ("2×8xH100", 2, 8, "H100-80GB", "nccl"),
        ("8xA100-80GB", 1, 8, "A100-80GB", "nccl"),
        ("  16 a100-40gb ", 1, 16, "A100-40GB", "nccl"),
        ("4 cpu", 1, 4, "cpu", "gloo"),
        ("8 H200", 1, 8, "H200-141GB", "nccl"),
        ("2x1 cpu @ 100mbit", 2, 1, "cpu", "gloo"),
    ],
)
def test_parse(text: str, nodes: int, per_node: int, device: str, backend: str) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.device.name) == (nodes, per_node, device)
    assert cluster.backend == backend
    assert cluster.num_ranks == nodes * per_node
    assert str(cluster) == f"{nodes}×{per_node} {device} ({backend})"


@pytest.mark.parametrize("text", ["", "H100", "8", "2x8", "two H100", "2x2x2 H100", "8 H100 @ fast"])
def test_unreadable_description(text: str) -> None:
    with pytest.raises(InputError, match=r"cannot read cluster .*write it as .*known devices: .*H100-80GB.*cpu"):
        Cluster.parse(text)


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"cluster '8 Z80': unknown device 'Z80'; known devices: .*A100-80GB"):
        Cluster.parse("8 Z80")


@pytest.mark.parametrize("text", ["0 cpu", "0x8 H100", "2x0 H100", f"{10**20} cpu", "2000x1000 H100"])
def test_empty_cluster(text: str) -> None:
    with pytest.raises(MeshError, match="must be positive"):
        Cluster.parse(text)


@pytest.mark.parametrize("text", ["2x2 cpu @ 0gbit", "2x2 cpu @ 0.0mbit", f"2x2 cpu @ {'9' * 400}gbit"])
def test_a_network_must_move_something(text: str) -> None:
    with pytest.raises(InputError, match="rate of the network must be positive and finite"):
        Cluster.parse(text)


def test_every_known_device_is_complete() -> None:
    assert len(known_devices()) == len(set(known_devices())) > 10
    for name in known_devices():
        device = Cluster.parse(f"2x8 {name}").device
        assert set(device.flops) == {"bf16", "fp16", "tf32", "fp32", "fp64"}
        assert all(rate > 0 for rate in device.flops.values())
        assert 0 < device.memory_bytes <= device.nominal_memory_bytes
        assert device.memory_bandwidth_bytes_s > 0
    assert Cluster.parse("8 H100").device.memory_bytes == int(79.1 * GIB)


def test_network_rate_is_of_a_node() -> None:
    slow = Cluster.parse("2x2 cpu @ 100mbit")
    assert slow.inter.bandwidth_bytes_s == pytest.approx(100e6 / 8 * 0.9 / 2, rel=1e-12)
    # Eight adapters of 400 Gbit/s are what the description assumes when it says nothing.
    assert Cluster.parse("2x8 H100 @ 3200gbit").inter == Cluster.parse("2x8 H100").inter


def test_budget_is_bounded_by_the_card() -> None:
    cluster = Cluster.parse("8 H100-80GB")
    assert budget_bytes(None, cluster) == cluster.device.memory_bytes
    assert budget_bytes(40, cluster) == 40 * GIB
    assert budget_bytes(0.5, cluster) == GIB // 2
    assert budget_bytes(80, cluster) == cluster.device.memory_bytes < 80 * GIB
    assert budget_bytes(10**400, cluster) == budget_bytes(1e308, cluster) == cluster.device.memory_bytes
    assert budget_bytes(Fraction(1, 2), cluster) == GIB // 2


@pytest.mark.parametrize("mem_gb", [0, -1, float("nan"), float("inf"), True, "80"])
def test_bad_budget(mem_gb: object) -> None:
    with pytest.raises(InputError, match="mem_gb must be a positive number of GiB"):
        budget_bytes(mem_gb, Cluster.parse("4 cpu"))  # type: ignore[arg-type]


def test_axis_inside_a_node_uses_its_link() -> None:
    cluster = Cluster.parse("2x8 H100")
    mesh = Mesh(("dp", "tp"), (4, 4))
    assert axis_link(cluster, mesh, "tp") is cluster.intra
    assert axis_link(cluster, Mesh(("tp",), (16,)), "tp") is not cluster.intra
    assert axis_link(Cluster.parse("16 cpu"), mesh, "dp").name == "intra-node"


def test_axis_across_nodes_shares_the_network() -> None:
    cluster = Cluster.parse("2x8 A100")
    share = cluster.inter.bandwidth_bytes_s
    alone = axis_link(cluster, Mesh(("dp", "tp"), (2, 8)), "dp")
    assert alone.bandwidth_bytes_s == share
    # dp=4: ranks 0, 4, 8, 12: two in each node, so two ranks' adapters.
    pair = axis_link(cluster, Mesh(("dp", "tp"), (4, 4)), "dp")
    assert pair.bandwidth_bytes_s == 2 * share
    assert pair.nccl is not None
    assert (pair.nccl.ranks_per_node, pair.nccl.network_bytes_s) == (2, share)
    whole = axis_link(cluster, Mesh(("dp",), (16,)), "dp")
    assert whole.bandwidth_bytes_s == 8 * share < cluster.intra.bandwidth_bytes_s


def test_gloo_ring_across_hosts() -> None:
    cluster = Cluster.parse("2x8 cpu @ 1gbit")
    share = cluster.inter.bandwidth_bytes_s
    inside, outside = cluster.intra.latency_s, cluster.inter.latency_s
    pair = axis_link(cluster, Mesh(("dp", "tp"), (4, 4)), "dp")
    assert pair.latency_s == pytest.approx((outside + inside) / 2, rel=1e-12)  # two hops of four leave the host
    # Each rank sends 8/16 of an all-to-all through its own share: 15/16 · bytes · slowdown / bandwidth.
    whole = axis_link(cluster, Mesh(("dp",), (16,)), "dp")
    seconds_a_byte = 15 / 16 * whole.slowdown["all_to_all"] / whole.bandwidth_bytes_s
    assert seconds_a_byte == pytest.approx(2.07 * 8 / 16 / share, rel=1e-12)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("sizes", [(24,), (2, 12), (12, 2), (3, 8), (8, 3), (2, 3, 4), (4, 3, 2), (6, 4)])
def test_links_follow_from_strides_as_from_all_groups(per_node: int, sizes: tuple[int, ...]) -> None:
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes)
    cluster = Cluster.parse(f"{24 // per_node}x{per_node} A100 @ 400gbit")
    for axis in mesh.names:
        counts = [Counter(rank // per_node for rank in group) for group in mesh.groups(axis)]
        link = axis_link(cluster, mesh, axis)
        assert (link is cluster.intra) == (max(map(len, counts)) == 1)
        if link.nccl is not None and link is not cluster.intra:
            assert link.nccl.ranks_per_node == min(min(c.values()) for c in counts)


def test_links_of_a_large_cluster_are_found_without_listing_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.parse("2048x8 H100")
    mesh = Mesh(("pp", "dp", "tp"), (16, 128, 8))
    for lists_ranks in ("groups", "rank", "coordinate"):
        monkeypatch.delattr(Mesh, lists_ranks)
    links = [axis_link(cluster, mesh, axis) for axis in mesh.names]
    assert [link.name for link in links] == ["inter-node", "inter-node", "intra-node"]


def test_network_never_beats_the_link_inside() -> None:
    cluster = Cluster.parse("2x8 RTX4090 @ 3200gbit")
    link = axis_link(cluster, Mesh(("dp",), (16,)), "dp")
    assert link.bandwidth_bytes_s == cluster.intra.bandwidth_bytes_s


def test_mesh_of_another_size() -> None:
    with pytest.raises(MeshError, match=r"mesh dp=4 has 4 ranks, cluster 1×8 H100-80GB \(nccl\) has 8"):
        axis_link(Cluster.parse("8 H100"), Mesh(("dp",), (4,)), "dp")


def test_live_cpu() -> None:
    cluster = Cluster.of_live("cpu", world=4, ranks_per_node=2)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.backend) == (2, 2, "gloo")
    alone = Cluster.of_live("cpu", world=1, ranks_per_node=1)
    assert cluster.device.memory_bytes == alone.device.memory_bytes // 2 > 0
    assert cluster.intra.slowdown["reduce_scatter"] == 2.0


def test_live_cuda_takes_the_true_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB + 5, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    cluster = Cluster.of_live("cuda", world=16, ranks_per_node=8)
    assert str(cluster) == "2×8 H100-80GB (nccl)"
    assert budget_bytes(80, cluster) == 79 * GIB + 5


@pytest.mark.parametrize(
    ("live", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 79.15, "A100-PCIe-80GB"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe-80GB"),
        ("NVIDIA H200", 139.8, "H200-141GB"),
        ("NVIDIA GH200 480GB", 94.5, "GH200-96GB"),
        ("NVIDIA L40S", 44.4, "L40S-48GB"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090-24GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("AMD Instinct MI300X", 191.9, "MI300X-192GB"),
    ],
)
def test_names_that_drivers_give(live: str, gib: float, known: str) -> None:
    assert match_gpu(live, int(gib * GIB), 100).device.name == known


def test_unlisted_gpu_gets_cautious_rates() -> None:
    device = match_gpu("NVIDIA Titan 9000", 24 * GIB, 100).device
    assert device.name == "NVIDIA Titan 9000"
    assert device.memory_bytes == 24 * GIB
    assert device.flops["bf16"] == pytest.approx(100e12 * 0.75, rel=1e-12)


def test_live_errors() -> None:
    with pytest.raises(MeshError, match="5 ranks do not fill whole nodes of 2"):
        Cluster.of_live("cpu", world=5, ranks_per_node=2)
    with pytest.raises(InputError, match="no cost figures for device type 'xpu'"):
        Cluster.of_live("xpu", world=2, ranks_per_node=2)
