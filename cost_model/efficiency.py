"""How long a device computes: what matmuls and fused attention reach of its rate, by shape.

A GPU deals tiles of the result to its multiprocessors, in rounds of which the last is often not full, and works on a
whole tile where the result fills only a part.  A tile takes as long as its depth K asks, and some more: loading the
first operands and writing the result, which weighs the more the smaller K is.  So

    time = rounds · tile FLOPs of (K + K0) / (rate of one multiprocessor),      rounds = ceil(tiles / multiprocessors)

with the best of three tiles.  Attention deals blocks of 128 queries of each head in the same way; under a causal mask
they differ in length and the longest one ends last, so that

    time = (all work / multiprocessors + tail · longest block) / (rate of one multiprocessor).

Constants are fitted to 513 published matmuls on A100, H100, H200 and B200 and to 62 attention kernels: K0 and the
kernel's start (`Device.kernel_start_s`) once for all, the sustained rate per device, attention's tails once for all and
its rates per device (`gpus.csv`).  Relative error of the time, against a roofline whose one efficiency is fitted too:

| measured | shapes | median | 90th percentile | roofline |
|---|---:|---:|---:|---|
| A100-PCIe bf16 matmuls (SimuMax) | 183 | 2.8% | 11% | 3.8%, 13% |
| A100-SXM fp16 matmuls (Azure) | 8 | 3.1% | 9% | 13%, 43% |
| H100, H200 fp8 matmuls (Azure) | 18 | 1.6% | 8% | 11%, 69% |
| B200 bf16 matmuls of 0.5 ms and more (SimuMax) | 304 | 3.4% | 9% | 3.4%, 9% |
| A100 attention, forward; backward | 12; 12 | 7%; 8% | 15%; 10% | 10%, 23%; 8%, 19% |
| B200 attention, forward; backward | 19; 19 | 8%; 9% | 31%; 19% | 25%, 60%; 13%, 22% |

These are the rows that the constants were fitted to, and that the tiles were chosen by among several sets: no row was
held out.  Left out of the fit are B200's matmuls under 0.5 ms (210 rows: 22% median, where the roofline has 17%).
They run up to 1.3 times faster than this says, as if the card had not yet met its power limit; a training step does.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from autopar.cluster import Device

_TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of the result that one multiprocessor holds: the usual ones of cuBLAS and CUTLASS."""

_PROLOGUE_BYTES = 270
"""K0, in bytes of an operand's row: 135 elements of 16 bits."""

_ATTENTION_BLOCK = 128
_ATTENTION_TAILS = (1.13, 0.24)
"""What the longest block adds at the end, forward and backward."""


FLASH_GENERATIONS = {1: (0.78, 0.48), 2: (1.0, 1.0), 3: (1.75, 1.6)}
"""Rates of FlashAttention's versions, forward and backward, relative to the second, which `gpus.csv` has.

The first, in Triton's form: from training runs of llm-foundry (`docs/accuracy.md`), where the forward kernel gives 177
TFLOP/s on A100 and 274 on H100, the backward 77 and 142; T. Dao, "FlashAttention-2" (arXiv:2307.08691), gives 25 to 35%
of A100's rate for the backward.  The third, and cuDNN's kernels for the same cards: J. Shah et al., "FlashAttention-3"
(arXiv:2407.08608), 1.5 to 2 times the second forward, 1.5 to 1.75 backward.  It needs Hopper's instructions.
"""


def with_flash_attention(device: Device, generation: int) -> Device:
    """A device whose fused attention is a given version of FlashAttention, or the nearest one that it can run.

    Raises:
        KeyError: if there is no such version.
    """
    ratios = FLASH_GENERATIONS[generation if device.has_async_tensor_cores else min(generation, 2)]
    forward, backward = (share * ratio for share, ratio in zip(device.attention_shares, ratios, strict=True))
    return replace(device, attention_shares=(forward, backward))


@functools.lru_cache(maxsize=1 << 14)
def matmul_time(batch: int, m: int, n: int, k: int, itemsize: int, rate: str, device: Device) -> float:
    """Seconds of computing `batch` products (m, k) × (k, n).

    Args:
        batch, m, n, k: sizes.
        itemsize: bytes of an element of the operands.
        rate: a key of `device.flops`.
        device: what computes.
    """
    units = device.num_multiprocessors
    if not units:
        return 2 * batch * m * n * k / device.flops[rate]
    depth = k + _PROLOGUE_BYTES / itemsize
    rounds = (
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / units) * rows * columns
        for rows, columns in _TILES
    )
    return min(rounds) * 2 * depth * units / device.flops[rate]


def attention_time(flops: float, blocks: int, is_causal: bool, is_backward: bool, rate: str, device: Device) -> float:
    """Seconds of one fused attention kernel.

    Args:
        flops: of the whole score matrix, as `autopar.cost_model.ops.node_flops` counts; a causal kernel skips half.
        blocks: of queries, over all heads and rows; see `attention_blocks`.
        is_causal: whether the kernel masks what comes later.
        is_backward: whether it is the backward kernel.
        rate: a key of `device.flops`.
        device: what computes.
    """
    work = flops / 2 if is_causal else flops
    speed = device.flops[rate] * device.attention_shares[is_backward]
    tail = _ATTENTION_TAILS[is_backward] * flops / max(1, blocks) * device.num_multiprocessors
    return (work + tail) / speed


def attention_blocks(num_rows: int, num_heads: int, num_queries: int) -> int:
    """Blocks of queries that fused attention deals out."""
    return num_rows * num_heads * -(-num_queries // _ATTENTION_BLOCK)
