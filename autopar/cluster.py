"""`Cluster`: what the price stage knows about the machines.  Plain data; no process group and no GPU behind it."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import re
from collections import Counter
from dataclasses import dataclass, replace

import torch

from autopar.devices import GIB, NETWORK_SHARE, Device, Hardware, Link, find_hardware, known_devices, match_gpu
from autopar.errors import InputError, MeshError
from autopar.mesh import Mesh

__all__ = ["Cluster", "Device", "Link", "axis_link", "budget_bytes", "known_devices"]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.  Ranks are placed row-major: each node holds `ranks_per_node` consecutive ones.

    Attributes:
        num_nodes: number of machines.
        ranks_per_node: devices of each.
        device: what each rank computes on.
        intra: link between ranks of one node.
        inter: one rank's share of its node's network.
        backend: `nccl` or `gloo`.
    """

    num_nodes: int
    ranks_per_node: int
    device: Device
    intra: Link
    inter: Link
    backend: str

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise MeshError(f"a cluster needs nodes and ranks, got {self.num_nodes} nodes of {self.ranks_per_node}")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}×{self.ranks_per_node} {self.device.name} ({self.backend})"

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read a description such as `"2x8 H100-80GB"` (nodes × devices), `"8xA100-80GB"` or `"4 cpu"` (one node).

        A suffix such as `@ 100mbit` or `@ 3200gbit` sets the network rate of one node.

        Raises:
            InputError: if the text is not of this form or names an unknown device.
            MeshError: if a count is zero, or there are more than a million ranks.
        """
        match = _DESCRIPTION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise InputError(
                f'cannot read cluster {text!r}: write it as "2x8 H100-80GB", "8xA100-80GB" or "4 cpu"; '
                f"known devices: {', '.join(known_devices())}"
            )
        first, second = int(match["first"]), match["second"]
        num_nodes, ranks_per_node = (first, int(second)) if second else (1, first)
        if not 0 < num_nodes * ranks_per_node <= _MAX_RANKS:
            raise MeshError(f"cluster {text!r}: numbers of nodes and devices must be positive, {_MAX_RANKS} at most")
        hardware = find_hardware(match["device"], f"cluster {text!r}")
        gbit = float(match["rate"]) * _RATE_UNITS[match["unit"].lower()] if match["rate"] else None
        if gbit is not None and not 0 < gbit < math.inf:
            raise InputError(f"cluster {text!r}: the rate of the network must be positive and finite")
        return _cluster(hardware, num_nodes, ranks_per_node, gbit)

    @staticmethod
    def of_live(device_type: str, world: int, ranks_per_node: int) -> Cluster:
        """Describe the machines this process runs on, of which it sees its own device and host memory.

        A GPU is matched by name with the known ones; its memory is the true one.  An unlisted GPU gets cautious
        rates from its number of multiprocessors.  A CPU rank gets the fixed rates of `"cpu"` and an equal share of the
        host's memory.  Links are those that the device usually comes with: assumed, not measured.

        Raises:
            InputError: if the device type is neither `cuda` nor `cpu`.
            MeshError: if the ranks do not fill whole nodes.
        """
        if world < 1 or ranks_per_node < 1 or world % ranks_per_node:
            raise MeshError(f"{world} ranks do not fill whole nodes of {ranks_per_node}")
        if device_type == "cpu":
            hardware = find_hardware("cpu", "live cluster")
            memory = _host_memory_bytes() // ranks_per_node
        elif device_type == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            memory = int(properties.total_memory)
            hardware = match_gpu(properties.name, memory, int(properties.multi_processor_count))
        else:
            raise InputError(f"no cost figures for device type {device_type!r}: use a mesh of cuda or cpu devices")
        device = replace(hardware.device, memory_bytes=memory, nominal_memory_bytes=memory)
        return _cluster(replace(hardware, device=device), world // ranks_per_node, ranks_per_node, None)


def budget_bytes(mem_gb: float | None, cluster: Cluster) -> int:
    """The memory budget of one device: `mem_gb` GiB, but never more than the device really has.

    Raises:
        InputError: if `mem_gb` is not a positive number.
    """
    usable = cluster.device.memory_bytes
    if mem_gb is None:
        return usable
    given: object = mem_gb  # numbers of numpy and fractions are as good as floats
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not is_number or not 0 < mem_gb < math.inf:
        raise InputError(f"mem_gb must be a positive number of GiB on one device, got {mem_gb!r}")
    return int(mem_gb * GIB) if mem_gb < usable / GIB else usable  # a product of large numbers may overflow


def axis_link(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    """The link that collectives along one mesh axis use.

    An axis whose groups stay inside one node uses `cluster.intra`.  Any other uses the network: groups that have
    several ranks in a node drive that many ranks' shares of it at once, since the ring enters each node once per
    share, but never beat the link inside the node.  An all-to-all has no such help: each rank sends what leaves
    the node through its own share.

    Raises:
        MeshError: if the mesh is not of the cluster's size, or has no such axis.
    """
    if mesh.num_ranks != cluster.num_ranks:
        raise MeshError(f"mesh {mesh} has {mesh.num_ranks} ranks, cluster {cluster} has {cluster.num_ranks}")
    num_nodes, together = _spread(cluster.ranks_per_node, mesh, axis)
    if num_nodes == 1:
        return cluster.intra
    intra, inter, size = cluster.intra, cluster.inter, mesh.size(axis)
    bandwidth = min(intra.bandwidth_bytes_s, inter.bandwidth_bytes_s * together)
    start_s = max(intra.start_s, inter.start_s)
    if intra.nccl is not None:
        fabric = replace(intra.nccl, ranks_per_node=together, network_bytes_s=inter.bandwidth_bytes_s)
        return Link(inter.name, bandwidth, 0.0, start_s, nccl=fabric)
    share_leaving = (size - together) / (size - 1)
    all_to_all = inter.slowdown.get("all_to_all", 1.0) * share_leaving * bandwidth / inter.bandwidth_bytes_s
    return Link(
        inter.name,
        bandwidth,
        (num_nodes * inter.latency_s + (size - num_nodes) * intra.latency_s) / size,
        start_s,
        {**inter.slowdown, "all_to_all": all_to_all},
    )


def _spread(ranks_per_node: int, mesh: Mesh, axis: str) -> tuple[int, int]:
    """Over how many nodes the groups of one axis reach at most, and how many of their ranks share a node at least.

    Ranks of a group are `stride` apart, and how it lies in the nodes depends on its first rank's place in a node
    alone, so that a few groups stand for all of them on any number of ranks.
    """
    size = mesh.size(axis)
    stride = math.prod(mesh.sizes[mesh.axis(axis) + 1 :])
    if stride >= ranks_per_node:
        return size, 1
    block = size * stride
    starts = {(base + inner) % ranks_per_node
              for base in range(0, min(mesh.num_ranks, math.lcm(block, ranks_per_node)), block)
              for inner in range(stride)}  # fmt: skip
    per_node = [Counter((start + i * stride) // ranks_per_node for i in range(size)) for start in starts]
    return max(map(len, per_node)), min(min(counts.values()) for counts in per_node)


_DESCRIPTION = re.compile(
    r"(?P<first>\d+)(?:\s*[x×]\s*(?P<second>\d+))?(?:\s*[x×]\s*|\s+)(?P<device>[A-Za-z][\w-]*)"
    r"(?:\s*@\s*(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[mg]bit))?",
    re.IGNORECASE,
)
_RATE_UNITS = {"mbit": 1e-3, "gbit": 1.0}
_MAX_RANKS = 2**20
"""More than any cluster has; a batch for many more ranks is beyond the sizes of tensors."""


def _cluster(hardware: Hardware, num_nodes: int, ranks_per_node: int, node_gbit: float | None) -> Cluster:
    """Put nodes together; hosts of CPU ranks have one network adapter, GPUs one each unless a node's rate is given."""
    inter = hardware.inter
    if node_gbit is not None:
        node_bytes_s = node_gbit / 8 * 1e9 * NETWORK_SHARE[hardware.backend]
        inter = replace(inter, bandwidth_bytes_s=node_bytes_s / ranks_per_node)
    elif hardware.device.kind == "cpu":
        inter = replace(inter, bandwidth_bytes_s=inter.bandwidth_bytes_s / ranks_per_node)
    return Cluster(num_nodes, ranks_per_node, hardware.device, hardware.intra, inter, hardware.backend)


def _host_memory_bytes() -> int:
    """Memory of this host, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:  # no control groups here: the host's memory is all there is to know
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_memory_bytes() -> int:
    """What this host can still give to processes, or all of its memory where it does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(1024 * int(line.split()[1]), _host_memory_bytes())
    return _host_memory_bytes()
