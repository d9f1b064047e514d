"""What a collective costs: ring algorithms with a start, a latency per hop and a bandwidth.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005, for the algorithms; the notes on performance of NVIDIA's nccl-tests for bus bandwidth, which is
defined so that the same formulas give the time of each kind of collective.
"""

from __future__ import annotations

from autopar.cluster import Link

_PHASES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""An all-reduce is a reduce-scatter and then an all-gather."""


def wire_bytes(kind: str, num_ranks: int, num_bytes: int) -> float:
    """Bytes that one rank sends in a ring over `num_ranks`.

    `num_bytes` is the size of the whole tensor on one rank, as in `Collective.num_bytes`: an all-reduce sends
    2 (n-1)/n of it, an all-gather, a reduce-scatter or an all-to-all (n-1)/n.
    """
    return _PHASES[kind] * (num_ranks - 1) * num_bytes / num_ranks


def num_hops(kind: str, num_ranks: int) -> int:
    """Messages that one rank sends one after the other."""
    return _PHASES[kind] * (num_ranks - 1)


def collective_time(kind: str, num_ranks: int, num_bytes: int, link: Link) -> float:
    """Seconds from the start of a collective to its end on every rank; zero for a single rank."""
    if num_ranks == 1:
        return 0.0
    transfer = wire_bytes(kind, num_ranks, num_bytes) * link.slowdown.get(kind, 1.0) / link.bandwidth_bytes_s
    return link.start_s + num_hops(kind, num_ranks) * link.latency_s + transfer
