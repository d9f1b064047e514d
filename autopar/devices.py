"""The devices that autopar knows: their rates, memory and usual links.

Rates are *sustained*, not data-sheet ones: large matmuls of bf16 reach 0.73 to 0.87 of a GPU's dense peak in published
measurements (0.8 is taken here), a streaming kernel 0.83 to 0.89 of its memory bandwidth (0.86).  Bandwidths of links
are *bus* bandwidths as NCCL's tests define them, so that the ring formulas of `autopar.cost_model.collectives` apply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import InputError

GIB = 2**30
_MATMUL_SHARE = 0.8
_STREAM_SHARE = 0.86
NETWORK_SHARE = {"nccl": 0.8, "gloo": 0.9}
"""Goodput over line rate: 200 Gbit/s adapters gave 16 to 23 GB/s under NCCL; TCP on a throttled link 0.9 and more."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: as `Cluster.parse` reads it.
        kind: `cuda` or `cpu`.
        memory_bytes: memory that a process can really have, context included.
        nominal_memory_bytes: what the name says (an "80 GB" card has 79.1 GiB).
        flops: sustained FLOP/s of matmuls, by `bf16`, `fp16`, `tf32`, `fp32`, `fp64`.
        memory_bandwidth_bytes_s: sustained.
        kernel_launch_s: time that one op costs on top of its work.
    """

    name: str
    kind: str
    memory_bytes: int
    nominal_memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_s: float
    kernel_launch_s: float


@dataclass(frozen=True)
class Link:
    """What a collective runs over.

    Attributes:
        name: for readers.
        bandwidth_bytes_s: per rank and direction, with all ranks busy.
        latency_s: per hop of a ring.
        start_s: once per collective.
        slowdown: bytes over the wire, or time, relative to the ring ideal, by kind of collective; 1.0 where
            missing.  Half-duplex transports and wasteful algorithms have more, reduction in the switch less.
    """

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    start_s: float = 0.0
    slowdown: Mapping[str, float] = field(default_factory=dict, hash=False)


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
    return _gpu(
        live_name,
        usable_gib=memory_bytes / GIB,
        nominal_gb=memory_bytes / GIB,
        tb_s=0.006 * num_multiprocessors,
        tflops={k: v * num_multiprocessors for k, v in _UNLISTED_TFLOPS.items()},
        ring_gb_s=10,
        network_gbit=25,
    )


def _gpu(
    name: str,
    usable_gib: float,
    nominal_gb: float,
    tb_s: float,
    tflops: Mapping[str, float],
    ring_gb_s: float,
    network_gbit: float,
    in_switch: float = 1.0,
) -> Hardware:
    """Hardware from data-sheet rates (`tb_s`, dense `tflops`) and NCCL's ring bandwidth inside the node.

    `in_switch` is the time of an all-reduce relative to the ring's, below 1 where the switch does the sum.
    Latencies are those of NCCL's tuner for its LL128 protocol, which serves messages around a megabyte.
    """
    flops = {dtype: rate * 1e12 * _MATMUL_SHARE for dtype, rate in tflops.items()}
    device = Device(
        name, "cuda", int(usable_gib * GIB), int(nominal_gb * GIB), flops, tb_s * 1e12 * _STREAM_SHARE, 5e-6
    )
    intra = Link("intra-node", ring_gb_s * 1e9, 1.9e-6, 8.4e-6, {"all_reduce": in_switch})
    inter = Link("inter-node", network_gbit / 8 * 1e9 * NETWORK_SHARE["nccl"], 4.0e-6, 8.4e-6)
    return Hardware(device, intra, inter, "nccl")


def _rates(bf16: float, tf32: float, fp32: float, fp64: float) -> dict[str, float]:
    return {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32, "fp64": fp64}


_UNLISTED_TFLOPS: dict[str, float] = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.4, "fp32": 0.2, "fp64": 0.006}
"""Per multiprocessor: about those of the smallest cards with tensor cores."""

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

_A100, _H100 = _rates(312, 156, 19.5, 19.5), _rates(989, 495, 67, 67)
_B200, _GB200 = _rates(2250, 1125, 75, 37), _rates(2500, 1250, 80, 40)

# Data sheets (dense rates); ring bandwidth = NVLinks × NCCL's figure per link (20, 20.6, 40.1 GB/s), which published
# nccl-tests runs confirm: 231 to 254 GB/s on A100, 350 to 370 on H100 and 480 there, 846 on B200, summed in the switch.
# PCIe boxes, V100 and MI300X: estimates.  Usable memory is what drivers report, rounded down.  Network: one adapter
# a GPU (200 Gbit/s with A100, 400 later), 200 Gbit/s a node of PCIe cards.  The columns:
# name, usable GiB, nominal GB, memory TB/s, matmul TFLOP/s, ring GB/s, network Gbit/s a GPU, all-reduce in the switch
_CATALOG: dict[str, Hardware] = {
    hardware.device.name: hardware
    for hardware in (
        _gpu("V100-16GB", 15.7, 16, 0.9, {**_rates(15.7, 15.7, 15.7, 7.8), "fp16": 125}, 100, 50),
        _gpu("V100-32GB", 31.7, 32, 0.9, {**_rates(15.7, 15.7, 15.7, 7.8), "fp16": 125}, 100, 50),
        _gpu("A100-40GB", 39.4, 40, 1.555, _A100, 240, 200),
        _gpu("A100-80GB", 79.1, 80, 2.039, _A100, 240, 200),
        _gpu("A100-PCIe-80GB", 79.1, 80, 1.935, _A100, 20, 25),
        _gpu("H100-80GB", 79.1, 80, 3.35, _H100, 370, 400, 0.77),
        _gpu("H100-PCIe-80GB", 79.1, 80, 2.0, _rates(756, 378, 51, 51), 40, 25),
        _gpu("H200-141GB", 139.0, 141, 4.8, _H100, 370, 400, 0.77),
        _gpu("GH200-96GB", 94.5, 96, 4.0, _H100, 370, 400, 0.77),
        _gpu("B200-180GB", 178.0, 180, 8.0, _B200, 722, 400, 0.85),
        _gpu("GB200-186GB", 184.0, 186, 8.0, _GB200, 722, 400, 0.85),
        _gpu("B300-288GB", 268.0, 288, 8.0, _rates(2250, 1125, 75, 1.2), 722, 800, 0.85),
        _gpu("GB300-288GB", 268.0, 288, 8.0, _rates(2500, 1250, 80, 1.3), 722, 800, 0.85),
        _gpu("L40S-48GB", 44.4, 48, 0.86, _rates(362, 183, 91.6, 1.4), 20, 25),
        _gpu("RTX4090-24GB", 23.5, 24, 1.008, _rates(165, 82.6, 82.6, 1.3), 10, 25),
        _gpu("MI300X-192GB", 191.5, 192, 5.3, _rates(1300, 653, 163, 163), 300, 400),
        _CPU,
    )
}
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
