"""What a collective costs: the algorithms and protocols that NCCL chooses from, or one ring for other backends.

Each way to run a collective is a `Line`: the time of a message of S bytes is `start + S·b + 2·sqrt(stage·S·b)`, and the
library takes the fastest.  The square root is what a pipeline loses while it fills and drains, when its chunks have the
best size: c chunks through a stage of latency `stage` cost `S·b + c·stage + S·b/c`, least at `c = sqrt(S·b/stage)`.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005, for ring, tree and pipelining; the notes on performance of NVIDIA's nccl-tests for bus bandwidth,
which is defined so that the same formulas give the time of each kind of collective; the cost model that NCCL itself
chooses by (`src/graph/tuning.cc`), whose figures are `nccl.csv` here.

Relative error of the time on published runs of nccl-tests, and of one bus bandwidth for all sizes, fitted to each row:

| measured | sizes | median | 90th percentile | one bandwidth |
|---|---:|---:|---:|---|
| 8 A100, 16 MiB and more; smaller | 13; 17 | 2%; 36% | 18%; 67% | 6%, 42%; 97% |
| 8 H100, 16 MiB and more; smaller | 29; 25 | 1%; 21% | 3%; 59% | 10%, 32%; 99% |
| 8 H200, 16 MiB and more; smaller | 11; 14 | 1%; 16% | 4%; 26% | 8%, 32%; 98% |
| 8 B200, 16 MiB and more; smaller | 11; 9 | 6%; 41% | 24%; 50% | 18%, 53%; 93% |
| 2 nodes of 8 A100, InfiniBand; of 8 H100 | 6; 5 | 6%; 5% | 12%; 7% | 4%, 79%; 2%, 10% |
| 2 nodes of 1 A100, InfiniBand | 3 | 25% | 26% | 2%, 18% |
| 4 nodes of 8 B200, Ethernet (EFA), 16 MiB and more | 11 | 14% | 52% | 17%, 72% |

The pipeline's square root, the start of a collective and the network's share of its line rate were chosen on these very
runs; the rest is NCCL's.  Left out are runs whose source calls the fabric below par and those of unstated hardware.
Runs of the same hardware differ by 10 to 30 µs at the smallest messages; the model takes the middle.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.cluster import Link
from autopar.devices import NcclFabric

PHASES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""An all-reduce is a reduce-scatter and then an all-gather."""


@dataclass(frozen=True)
class Line:
    """The time of one algorithm and protocol, for a given kind of collective, group and link.

    Attributes:
        algorithm: its name, for readers.
        start_s: of an empty message.
        seconds_a_byte: of the whole tensor, as in `Collective.num_bytes`.
        stage_s: latency of one stage of the pipeline; 0 where messages are not pipelined.
    """

    algorithm: str
    start_s: float
    seconds_a_byte: float
    stage_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Time of a message."""
        transfer = num_bytes * self.seconds_a_byte
        return self.start_s + transfer + 2 * math.sqrt(self.stage_s * transfer)


def wire_bytes(kind: str, num_ranks: int, num_bytes: int) -> float:
    """Bytes that one rank sends in a ring over `num_ranks`.

    `num_bytes` is the size of the whole tensor on one rank, as in `Collective.num_bytes`: an all-reduce sends
    2 (n-1)/n of it, an all-gather, a reduce-scatter or an all-to-all (n-1)/n.
    """
    return PHASES[kind] * (num_ranks - 1) * num_bytes / num_ranks


def num_hops(kind: str, num_ranks: int) -> int:
    """Messages that one rank sends one after the other in a ring."""
    return PHASES[kind] * (num_ranks - 1)


def collective_time(kind: str, num_ranks: int, num_bytes: int, link: Link) -> float:
    """Seconds from the start of a collective to its end on every rank; zero for a single rank."""
    return min((line.seconds(num_bytes) for line in collective_lines(kind, num_ranks, link)), default=0.0)


@functools.lru_cache(maxsize=4096)
def collective_lines(kind: str, num_ranks: int, link: Link) -> tuple[Line, ...]:
    """Every way in which a collective can run over a link; none for a single rank."""
    if num_ranks == 1:
        return ()
    if link.nccl is None:
        start_s = link.start_s + num_hops(kind, num_ranks) * link.latency_s
        slowdown = link.slowdown.get(kind, 1.0)
        return (Line("ring", start_s, wire_bytes(kind, num_ranks, 1) * slowdown / link.bandwidth_bytes_s),)
    group = _Group(kind, num_ranks, link.nccl, link.start_s)
    ways = [group.pairs()] if kind == "all_to_all" else [group.rings()]
    if kind == "all_reduce":
        ways += [group.trees(), group.switch()]
    return tuple(line for way in ways for line in way)


@dataclass(frozen=True)
class _Group:
    """One group of ranks under NCCL; bandwidths of its protocols are bounded as `tuning.cc` bounds them."""

    kind: str
    num_ranks: int
    fabric: NcclFabric
    start_s: float

    @property
    def local(self) -> int:
        """Ranks of the group in one node."""
        return self.fabric.ranks_per_node or self.num_ranks

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.local)

    @property
    def node_bytes_s(self) -> float:
        """What the group's ranks in one node send over the network together."""
        return self.fabric.network_bytes_s * self.local

    @property
    def crosses(self) -> bool:
        return self.num_nodes > 1

    def _line(self, algorithm: str, latency_us: float, seconds_a_byte: float, stage_us: float) -> Line:
        return Line(algorithm, self.start_s + latency_us * 1e-6, seconds_a_byte, stage_us * 1e-6)

    def _hop_us(self, algorithm: str, protocol: str, network: bool) -> float:
        return _nccl("hwLatency_us", "NET" if network else self.fabric.inside, algorithm, protocol)

    def _bound(self, constant: str) -> float:
        """A bandwidth of `nccl.csv` for this architecture and number of nodes, in bytes a second."""
        scale = {1: "N1", 2: "N2"}.get(self.num_nodes, "N4")
        return _nccl(constant, self.fabric.architecture, "", scale) * 1e9

    @property
    def _protocols(self) -> tuple[str, ...]:
        """LL128 stores 128 bytes at once, which only NVLink keeps together."""
        return ("LL", "LL128", "Simple") if self.fabric.inside == "NVLINK" else ("LL", "Simple")

    def rings(self) -> Iterator[Line]:
        """One ring over all ranks; it leaves each node once for each of the node's adapters."""
        inside, channels = self.fabric.inside_bytes_s, self.fabric.num_channels
        ring = min(inside, self.node_bytes_s) if self.crosses else inside
        hops = num_hops(self.kind, self.num_ranks)
        leaving = min(hops, PHASES[self.kind] * self.num_nodes) if self.crosses else 0
        for protocol in self._protocols:
            near, far = (self._hop_us("Ring", protocol, network) for network in (False, True))
            latency = _nccl("baseLatency_us", "", "Ring", protocol) + (hops - leaving) * near + leaving * far
            rate = {
                "LL": min(self._bound("llMaxBw_GBps"), ring / 2),  # half of what is stored are flags
                "LL128": min(ring * 0.92, channels * self._bound("perChMaxRingLL128Bw")),
                "Simple": ring,
            }[protocol]
            yield self._line(
                f"ring {protocol}",
                latency,
                wire_bytes(self.kind, self.num_ranks, 1) / rate,
                far if self.crosses else near,
            )

    def trees(self) -> Iterator[Line]:
        """A chain in each node and two trees over the nodes: the message goes up and comes down."""
        channels = self.fabric.num_channels
        levels = math.log2(self.num_nodes)
        network = 2 * (self.num_nodes - 1) / self.num_nodes / self.node_bytes_s if self.crosses else 0.0
        chain = 2 / (self.fabric.inside_bytes_s * 0.92) if self.local > 1 else 0.0
        slowest = max(network, chain)
        for protocol in self._protocols:
            near, far = (self._hop_us("Tree", protocol, network) for network in (False, True))
            latency = _nccl("baseLatency_us", "", "Tree", protocol) + 2 * ((self.local - 1) * near + levels * far)
            cost = {
                "LL": max(slowest * 3.8, 2 / self._bound("llMaxBw_GBps")),
                "LL128": max(
                    slowest * (128 / 120 if self.crosses else 9 / 7),
                    2 / (channels * self._bound("perChMaxTreeLL128Bw")),
                ),
                "Simple": max(slowest, 2 / (channels * self._bound("perChMaxTreeBw"))),
            }[protocol]
            yield self._line(f"tree {protocol}", latency, cost, far if self.crosses else near)

    def switch(self) -> Iterator[Line]:
        """The NVLink switch sums and copies, so that a rank sends the message once and its own part again; nodes are
        joined by a tree."""
        efficiency = _nccl("nvlsEfficiency", self.fabric.architecture)
        if not efficiency or self.fabric.inside != "NVLINK" or self.local == 1:
            return
        latency = self._hop_us("NVLS", "Simple", False)
        cost = (self.local + 1) / self.local / (self.fabric.inside_bytes_s * efficiency)
        if self.crosses:
            latency += 2 * math.log2(self.num_nodes) * self._hop_us("NVLSTree", "Simple", True)
            cost = max(cost, 2 * (self.num_nodes - 1) / self.num_nodes / self.node_bytes_s)
        yield self._line("switch", latency, cost, self._hop_us("Ring", "Simple", self.crosses))

    def pairs(self) -> Iterator[Line]:
        """Every rank sends to every other: those inside over their link, the rest through the rank's own adapter, eight
        at a time."""
        n, local, fabric = self.num_ranks, self.local, self.fabric
        cost = (local - 1) / n / fabric.inside_bytes_s
        if self.crosses:
            cost = max(cost, (n - local) / n / fabric.network_bytes_s)
        for protocol in ("LL", "Simple"):
            near, far = (self._hop_us("Ring", protocol, network) for network in (False, True))
            latency = _nccl("baseLatency_us", "", "Ring", protocol) + (local - 1) * near + -(-(n - local) // 8) * far
            yield self._line(
                f"pairs {protocol}", latency, cost * (2 if protocol == "LL" else 1), far if self.crosses else near
            )


def _nccl(constant: str, hardware: str = "", algorithm: str = "", scale: str = "") -> float:
    return _nccl_table()[constant, hardware, algorithm, scale]


@functools.cache
def _nccl_table() -> dict[tuple[str, str, str, str], float]:
    with (Path(__file__).parent / "nccl.csv").open(newline="") as file:
        return {
            (row["constant"], row["hardware"], row["algorithm"], row["scale"]): float(row["value"])
            for row in csv.DictReader(file)
        }
