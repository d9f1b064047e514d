"""Rows of published training runs, and what each says about its model, cluster and strategy."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import Cluster, Device, known_devices
from autopar.cost_model.efficiency import with_flash_attention
from autopar.devices import GIB, match_gpu
from benchmarks.published_model import Sizes

_DEFAULT_VOCAB = 50304
"""GPT-2's, padded to a multiple of 128."""

_FIRST_FLASH = "2205"
"""Year and month of FlashAttention (arXiv:2205.14135)."""

_MULTIPROCESSORS, _WITH_SLOW_LINKS = 100, "L40S-48GB"
"""For GPUs that are not known."""

_MICRO_BATCH_TOKENS = 16384
"""Where a row does not say its micro-batch: as many sequences as stay within so many tokens."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        id: the row's own name.
        family: its source, in a word.
        skipped: why the row is not predicted; empty if it is.
        model: sizes of the model, and `num_layers` of its blocks.
        cluster: what it ran on.
        data, context, tensor: ranks along each axis; `shards` of the data axis hold one copy of what is sharded.
        zero: ZeRO stage: 0 to 3.
        owners: ranks among which parameters and their optimizer state are dealt as whole tensors: each steps its own
            and then sends them to the others.  Gradients are reduced whole, as with stage 0.
        has_sequence_parallel: whether tensor parallelism cuts the sequence between the blocks' cut parts.
        micro_batch: sequences of one rank and micro-step.
        accumulate: micro-steps of one optimizer step.
        recompute: `none`, `selective` or `full`, and `recomputed_share` of the blocks do it.
        is_fused: whether chains of pointwise ops run as one kernel.
        has_gradient_buffer: whether whole gradients have a place of their own throughout, as in the buckets of
            PyTorch's `DistributedDataParallel` and in Megatron-LM.
        holds_gradients: whether what was measured is one micro-step of several, so that gradients are there throughout.
        workspace_bytes: what cuBLAS takes from PyTorch's allocator, for PyTorch and for Transformer Engine.
        param_dtype: dtype in which parameters rest and gradients are summed.
        optimizer: a name in `autopar.cost_model.optimizers.OPTIMIZERS`.
        step_s, memory_gib, memory_kind: what was measured; None where it was not.
        nominal_gib: memory of the card.
    """

    id: str
    family: str
    skipped: str = ""
    model: Sizes | None = None
    num_layers: int = 0
    cluster: Cluster | None = None
    data: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    owners: int = 1
    has_sequence_parallel: bool = False
    micro_batch: int = 1
    accumulate: int = 1
    recompute: str = "none"
    recomputed_share: float = 1.0
    is_fused: bool = False
    has_gradient_buffer: bool = False
    holds_gradients: bool = False
    workspace_bytes: int = 0
    param_dtype: str = "fp32"
    optimizer: str = "adamw"
    step_s: float | None = None
    memory_gib: float | None = None
    memory_kind: str = ""


def read_runs(path: Path) -> list[Run]:
    """The rows of a CSV file of the form of `training_runs.csv`."""
    with path.open(newline="") as file:
        return [read_run(row) for row in csv.DictReader(file)]


def read_run(row: Mapping[str, str]) -> Run:
    """What one row says; fields that it leaves empty take the usual values."""
    name, family = row["id"], row["family"]
    measured = {
        "step_s": number(row, "step_time_s"),
        "memory_gib": _memory_gib(row),
        "memory_kind": row.get("mem_kind", ""),
    }
    if reason := _unsupported(row):
        return Run(name, family, reason, **measured)
    ranks, tensor, context = (whole(row, key, 1) for key in ("num_gpus", "tp", "cp"))
    data = ranks // (tensor * context)
    zero = _zero_stage(row)
    shards, owners = min(whole(row, "fsdp_size", data), data), 1
    if zero == 1 and _deals_tensors(row):
        zero, shards, owners = 0, 1, shards
    seq = whole(row, "seq_len", 2048)
    micro_batch, accumulate = _batches(row, data, seq)
    recompute, share = _recompute(row)
    cluster = _cluster(row)
    return Run(
        name, family, "", _sizes(row, seq), whole(row, "n_layers", 1), cluster, data, shards, context, tensor,
        zero, owners, _flag(row, "sequence_parallel"), micro_batch, accumulate, recompute, share, _is_fused(row),
        zero < 2 and data > 1 and row["compile"] in ("", "0", "1"),
        "micro-step" in row.get("notes", ""),
        cublas_bytes(cluster.device),
        *_at_rest(row), **measured,
    )  # fmt: skip


def _unsupported(row: Mapping[str, str]) -> str:
    if whole(row, "pp", 1) > 1:
        return "pipeline parallelism"
    if _flag(row, "fp8") or "fp8" in row.get("dtype", "").lower():
        return "FP8"
    if missing := [key for key in ("num_gpus", "n_layers", "hidden", "n_heads", "seq_len") if not whole(row, key, 0)]:
        return f"no {missing[0]}"
    if any(whole(row, key, 0) > 1 for key in ("ep", "num_experts", "n_experts")) or "moe" in row["model_name"].lower():
        return "mixture of experts"
    return ""


def _sizes(row: Mapping[str, str], seq: int) -> Sizes:
    hidden, heads = whole(row, "hidden", 0), whole(row, "n_heads", 0)
    tensor = whole(row, "tp", 1)
    vocab = -(-whole(row, "vocab", _DEFAULT_VOCAB) // tensor) * tensor  # tables that are cut are padded
    return Sizes(
        hidden, heads, whole(row, "n_kv_heads", heads), whole(row, "ffn_hidden", 4 * hidden), vocab, seq,
        _flag(row, "mlp_gated"), _flag(row, "tied_emb"), _dropout(row), _has_flash(row),
        is_sequence_first=_is_megatron(row),
    )  # fmt: skip


def _dropout(row: Mapping[str, str]) -> float:
    """Megatron-LM's default for what it calls a GPT; recipes of other models have none."""
    return 0.1 if _is_megatron(row) and "gpt" in row["model_name"].lower() else 0.0


def _zero_stage(row: Mapping[str, str]) -> int:
    strategy = row["strategy"].lower()
    if match := re.search(r"zero[-_ ]?(?:stage[-_ ]?)?(\d)", strategy):
        return int(match[1])
    if "grad_op" in strategy:
        return 2
    return 3 if "fsdp" in strategy or "hsdp" in strategy else 0


def _batches(row: Mapping[str, str], data: int, seq: int) -> tuple[int, int]:
    """Micro-batch and micro-steps, the one from the other where only one is given."""
    rows = (whole(row, "global_batch", 0) or whole(row, "global_batch_tokens", 0) // seq) // data
    micro_batch, accumulate = whole(row, "micro_batch_per_gpu", 0), whole(row, "grad_accum", 0)
    if not micro_batch and accumulate:
        micro_batch = max(1, rows // accumulate)
    if not micro_batch:
        most = max(1, _MICRO_BATCH_TOKENS // seq)
        micro_batch = max((n for n in range(1, most + 1) if rows % n == 0), default=1)
    return micro_batch, accumulate or max(1, rows // micro_batch)


def _recompute(row: Mapping[str, str]) -> tuple[str, float]:
    """The level, and the share of the blocks that recompute: `selective_layer` is every other one in full, and what
    Megatron-LM selects is inside of attention, where one fused kernel keeps nothing anyway."""
    text = row["activation_ckpt"].lower()
    if text.startswith("selective") and _is_megatron(row) and _has_flash(row):
        return "none", 1.0
    if "layer" in text:
        return "full", 0.5
    return next((level for level in ("selective", "full") if text.startswith(level)), "none"), 1.0


def _is_fused(row: Mapping[str, str]) -> bool:
    """Compiled, or with kernels that a library has fused by hand."""
    return row["compile"] not in ("", "0") or _is_megatron(row)


def _is_megatron(row: Mapping[str, str]) -> bool:
    """Whether a row runs on Megatron-LM, whose distributed optimizer or three axes its strategy names."""
    return bool(re.search(r"dist-opt|megatron|3d\(", row["strategy"].lower()))


def _deals_tensors(row: Mapping[str, str]) -> bool:
    """Whether a row runs on InternEvo, whose ZeRO-1 gives each tensor one owner, reduces gradients whole, and
    broadcasts each owner's tensors after the step (`internlm/solver/optimizer/hybrid_zero_optim.py`)."""
    return "internevo" in row.get("source", "").lower()


def _at_rest(row: Mapping[str, str]) -> tuple[str, str]:
    """Dtype in which parameters rest, and the optimizer.

    Automatic mixed precision, and whoever sums gradients in float32, is taken to keep its parameters in float32;
    other stacks keep them in 16 bits, with a float32 copy in the optimizer, unless `true` says that there is none.
    """
    text = row["dtype"].lower()
    if re.search(r"amp|fp32 (grad|reduce)", text):
        return "fp32", "adamw"
    return "bf16", "adamw" if "true" in text else "adamw_master"


def _cluster(row: Mapping[str, str]) -> Cluster:
    """Nodes of the row's devices, or of cautiously described ones where the device is not known."""
    ranks = whole(row, "num_gpus", 1)
    per_node = math.gcd(ranks, whole(row, "gpus_per_node", 8))
    node_gbit = network_gbit(row["interconnect"], per_node)
    rate = "" if node_gbit is None else f" @ {node_gbit:g}gbit"
    device = match_gpu(row["hardware"], whole(row, "gpu_mem_gb", 80) * 10**9, _MULTIPROCESSORS).device
    name = device.name if device.name in known_devices() else _WITH_SLOW_LINKS
    cluster = Cluster.parse(f"{ranks // per_node}x{per_node} {name}{rate}")
    return replace(cluster, device=with_flash_attention(device, flash_generation(row)))


def cublas_bytes(device: Device, is_deterministic: bool = False) -> int:
    """Workspaces of cuBLAS, of which the threads of the forward and the backward pass have one each.

    PyTorch asks for 2 of 4 MiB and 8 of 16 KiB, on Hopper for 32 MiB (`aten/src/ATen/cuda/CublasHandlePool.cpp`);
    deterministic runs set `CUBLAS_WORKSPACE_CONFIG=:4096:8`, 8 of 4 MiB.
    """
    is_large = device.has_async_tensor_cores or is_deterministic
    return 2 * (32 * 2**20 if is_large else 2 * 4 * 2**20 + 8 * 2**14)


def transformer_engine_bytes(device: Device) -> int:
    """The workspace that Transformer Engine gives its own calls of cuBLAS, one for both passes
    (`get_cublas_workspace_size_bytes` in `transformer_engine/pytorch/cpp_extensions/gemm.py`)."""
    return (32 if device.has_async_tensor_cores else 4) * 2**20


def _has_flash(row: Mapping[str, str]) -> bool:
    """Whether attention is one fused kernel: not where the notes say otherwise, nor in papers older than the first."""
    paper = re.search(r"arxiv:(\d{4})\.", row.get("source", "").lower())
    return "unfused" not in row.get("notes", "").lower() and (paper is None or paper[1] >= _FIRST_FLASH)


def flash_generation(row: Mapping[str, str]) -> int:
    """Version of FlashAttention: what the notes say, the first where they name it without a number; else what the stack
    is built on, cuDNN's kernels for Megatron-LM and PyTorch's, which are the second, for others."""
    match = re.search(r"flash[-_\s]?(?:attention|attn)[-_\s]?v?([123])?", row.get("notes", ""), re.IGNORECASE)
    if match is None:
        return 3 if _is_megatron(row) else 2
    return int(match[1] or 1)


def network_gbit(text: str, per_node: int) -> float | None:
    """Rate of a node's network, from words such as `4x100 Gb RoCE per node` or `NDR 400 Gb per GPU`; None if unsaid."""
    match = re.search(r"(?:(\d+)\s*x\s*(?:[A-Za-z-]+\s+)?)?(\d+)\s*Gb", text)
    if match is None:
        return None
    adapters = float(match[1] or (per_node if "per gpu" in text.lower() else 1))
    return adapters * float(match[2])


def _memory_gib(row: Mapping[str, str]) -> float | None:
    """Measured memory in GiB; sources that say decimal gigabytes are converted."""
    value = number(row, "peak_mem_GiB")
    return value * 1e9 / GIB if value is not None and "1e9" in row.get("mem_kind", "") else value


def number(row: Mapping[str, str], key: str) -> float | None:
    """A column's number; None where it is missing or holds none."""
    text = row.get(key) or ""
    try:
        return float(text)
    except ValueError:
        return None


def whole(row: Mapping[str, str], key: str, default: int) -> int:
    """A column's whole number, or a default where it holds none."""
    value = number(row, key)
    return default if value is None else int(value)


def _flag(row: Mapping[str, str], key: str) -> bool:
    return whole(row, key, 0) == 1
