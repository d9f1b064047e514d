"""The devices that autopar knows: their rates, memory and usual links.

The figures are rows of `cost_model/gpus.csv`, each with its source: data sheets, and what measured matmuls and
attention kernels sustain of them.  A streaming kernel sustains 0.83 to 0.89 of a data sheet's memory bandwidth (0.86
is taken here).  Bandwidths of links are *bus* bandwidths as NCCL's tests define them, so that the ring formulas of
`autopar.cost_model.collectives` apply.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import InputError

GIB = 2**30
_STREAM_SHARE = 0.86
NETWORK_SHARE = {"nccl": 0.88, "gloo": 0.9}
"""Goodput over line rate.  NCCL: 0.92 to 0.94 on InfiniBand, 0.80 to 0.83 on Ethernet-like fabrics in published runs of
nccl-tests; TCP on a throttled link 0.9 and more."""

_LAUNCH_S = 5e-6
"""Time that the host takes to launch one op of an eager graph; a busy GPU hides it."""

_KERNEL_START_S = 3e-6
"""Time that a GPU takes to start and to drain one kernel, fitted to small matmuls (`autopar.cost_model.efficiency`)."""

_COLLECTIVE_START_S = 10e-6
"""What nccl-tests measures for its smallest messages on top of NCCL's own figures, 0 to 30 µs: the middle of it."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: as `Cluster.parse` reads it.
        kind: `cuda` or `cpu`.
        memory_bytes: memory that a process can really have, context included.
        nominal_memory_bytes: what the name says (an "80 GB" card has 79.1 GiB).
        flops: FLOP/s that large matmuls sustain, by `bf16`, `fp16`, `tf32`, `fp32`, `fp64`.
        memory_bandwidth_bytes_s: sustained.
        kernel_launch_s: host time of one op.  A `cuda` device works off a queue, so that the host's time shows only
            where the queue runs dry; on a `cpu` it adds to each op.
        kernel_start_s: the device's own time to start and drain one kernel.
        num_multiprocessors: work is dealt to them in tiles, the last round often unfinished; 0 if tiles do not matter.
        has_async_tensor_cores: whether it is a Hopper, whose faster attention kernels older cards cannot run.
        attention_shares: rate of fused attention, forward and backward, relative to that of matmuls.
    """

    name: str
    kind: str
    memory_bytes: int
    nominal_memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_s: float
    kernel_launch_s: float
    kernel_start_s: float = 0.0
    num_multiprocessors: int = 0
    attention_shares: tuple[float, float] = (1.0, 1.0)
    has_async_tensor_cores: bool = False

    @property
    def is_queued(self) -> bool:
        """Whether ops are queued and run after the host has launched them."""
        return self.kind == "cuda"


@dataclass(frozen=True)
class NcclFabric:
    """What NCCL's choice of algorithm and protocol depends on.

    Attributes:
        architecture: a GPU generation in `cost_model/nccl.csv`.
        inside: `NVLINK` or `PCI`, the link inside a node.
        inside_bytes_s: ring bandwidth inside a node.
        num_channels: rings that NCCL lays over that link.
        ranks_per_node: how many ranks of a group share a node; 0 if all of them do.
        network_bytes_s: one rank's share of its node's network.
    """

    architecture: str
    inside: str
    inside_bytes_s: float
    num_channels: int
    ranks_per_node: int = 0
    network_bytes_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """What a collective runs over.

    Attributes:
        name: for readers.
        bandwidth_bytes_s: per rank and direction, with all ranks busy.
        latency_s: per hop of a ring.
        start_s: once per collective.
        slowdown: bytes over the wire, or time, relative to the ring ideal, by kind of collective; 1.0 where
            missing.  Half-duplex transports and wasteful algorithms have more.
        nccl: where NCCL runs the collectives: it replaces `latency_s` and `slowdown` by the library's own figures.
    """

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    start_s: float = 0.0
    slowdown: Mapping[str, float] = field(default_factory=dict, hash=False)
    nccl: NcclFabric | None = None


def known_devices() -> tuple[str, ...]:
    """Names that `Cluster.parse` reads."""
    return tuple(_CATALOG)


@dataclass(frozen=True)
class Hardware:
    """A device with the links it usually comes with; `inter` at one rank's share."""

    device: Device
    intra: Link
    inter: Link
    backend: str


def match_gpu(live_name: str, memory_bytes: int, num_multiprocessors: int) -> Hardware:
    """The known hardware that a live GPU's name and memory fit best, or a cautious description of an unlisted one."""
    words = set(re.split(r"[^a-z0-9]+", live_name.lower().replace("rtx 4090", "rtx4090")))
    is_pcie = "pcie" in words
    fits = []
    for name, hardware in _CATALOG.items():
        family = name.split("-")[0].lower()
        # Drivers write both "A100-SXM4-80GB" and "NVIDIA H200"; MI300X boards may say "MI300X VF".
        if family in words and is_pcie == ("PCIe" in name):
            fits.append((abs(hardware.device.memory_bytes - memory_bytes), name))
    if fits:
        return _CATALOG[min(fits)[1]]
    return _hardware(_unlisted_row(live_name, memory_bytes, num_multiprocessors))


def _hardware(row: Mapping[str, str]) -> Hardware:
    """Hardware from one row of the table; shares in it are relative to the data sheet's dense rates."""
    share = float(row["matmul_share"])
    attention = (float(row["attention_forward_share"]) / share, float(row["attention_backward_share"]) / share)
    device = Device(
        row["name"],
        "cuda",
        int(float(row["usable_gib"]) * GIB),
        int(float(row["nominal_gb"]) * GIB),
        {dtype: float(row[f"{dtype}_tflops"]) * 1e12 * share for dtype in ("bf16", "fp16", "tf32", "fp32", "fp64")},
        float(row["memory_tb_s"]) * 1e12 * _STREAM_SHARE,
        _LAUNCH_S,
        _KERNEL_START_S,
        int(row["multiprocessors"]),
        attention,
        row["name"].startswith(("H100", "H200", "H800", "GH200")),
    )
    ring_bytes_s = float(row["ring_gb_s"]) * 1e9
    network_bytes_s = float(row["network_gbit"]) / 8 * 1e9 * NETWORK_SHARE["nccl"]
    fabric = NcclFabric(row["architecture"], row["inside"], ring_bytes_s, int(row["ring_channels"]))
    intra = Link("intra-node", ring_bytes_s, 0.0, _COLLECTIVE_START_S, nccl=fabric)
    return Hardware(device, intra, Link("inter-node", network_bytes_s, 0.0, _COLLECTIVE_START_S), "nccl")


def _unlisted_row(live_name: str, memory_bytes: int, num_multiprocessors: int) -> dict[str, str]:
    """A cautious row for a GPU that the table lacks: per multiprocessor about the rates of the smallest cards with
    tensor cores, and the links of a workstation."""
    gib, rate = memory_bytes / GIB, float(num_multiprocessors)
    figures = {
        "usable_gib": gib, "nominal_gb": gib, "memory_tb_s": 0.006 * rate,
        "bf16_tflops": rate, "fp16_tflops": rate, "tf32_tflops": 0.4 * rate, "fp32_tflops": 0.2 * rate,
        "fp64_tflops": 0.006 * rate, "multiprocessors": num_multiprocessors,
        "matmul_share": 0.75, "attention_forward_share": 0.45, "attention_backward_share": 0.3,
        "ring_gb_s": 10, "ring_channels": 1, "network_gbit": 25,
    }  # fmt: skip
    words = {"name": live_name, "architecture": "Ampere", "inside": "PCI"}
    return {**words, **{column: str(value) for column, value in figures.items()}}


_GLOO_SLOWDOWN = {"all_reduce": 1.0, "reduce_scatter": 2.0, "all_gather": 1.45, "all_to_all": 2.07}
"""Measured on throttled links: gloo's reduce-scatter sends an all-reduce's bytes; the other two run half-duplex."""

_CPU = Hardware(
    # One rank on one modern core: 70 GFLOP/s in float32, 30 in float64, 12 GB/s were measured; bf16 has no kernel
    # without AMX.  Latencies are loopback TCP's with processes that compete for cores.
    Device(
        "cpu", "cpu", 16 * GIB, 16 * GIB,
        {"bf16": 10e9, "fp16": 10e9, "tf32": 50e9, "fp32": 50e9, "fp64": 25e9}, 10e9, 8e-6,
    ),
    Link("intra-node", 1e9, 200e-6, 100e-6, _GLOO_SLOWDOWN),
    Link("inter-node", 10 / 8 * 1e9 * NETWORK_SHARE["gloo"], 200e-6, 100e-6, _GLOO_SLOWDOWN),
    "gloo",
)  # fmt: skip


def _catalog() -> dict[str, Hardware]:
    with (Path(__file__).parent / "cost_model" / "gpus.csv").open(newline="") as file:
        gpus = {row["name"]: _hardware(row) for row in csv.DictReader(file)}
    return {**gpus, _CPU.device.name: _CPU}


_CATALOG = _catalog()
_ALIASES = {"v100": "V100-16GB", "a100": "A100-80GB", "h100": "H100-80GB"}


def find_hardware(name: str, where: str) -> Hardware:
    """Look a device up by its full name, or by its family where that names one (`H100` is the 80 GB SXM one).

    Raises:
        InputError: if there is no such device; the text starts with `where`.
    """
    wanted = _ALIASES.get(name.lower(), name).lower()
    exact = [known for known in _CATALOG if known.lower() == wanted]
    family = [known for known in _CATALOG if known.lower().startswith(f"{wanted}-")]
    if len(exact or family) != 1:
        raise InputError(f"{where}: unknown device {name!r}; known devices: {', '.join(known_devices())}")
    return _CATALOG[(exact or family)[0]]
