"""The exact peaks of Megatron-LM's continuous integration, read as runs.

Its recipes train a GPT with learned positions, tied embeddings, biases and dropout of 0.1 in 16 bits, with gradients
summed in float32 for bf16.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from autopar.cluster import Cluster
from autopar.devices import GIB
from benchmarks.published_model import Sizes
from benchmarks.published_rows import Run, cublas_bytes, number, transformer_engine_bytes, whole

_FAMILY = "golden"
_KIND = "torch max allocated, bytes"
_DROPOUT = 0.1
_OPTIMIZER_INSTANCES = 2
"""Copies of the optimizer's state in the recipes that say in their name alone that there are several
(`--num-distributed-optimizer-instances`)."""


def read_golden(path: Path) -> list[Run]:
    """The rows of a CSV file of the form of `golden_memory.csv`."""
    with path.open(newline="") as file:
        return [read_golden_run(row) for row in csv.DictReader(file)]


def read_golden_run(row: Mapping[str, str]) -> Run:
    """What one row says: its model, its parallel sizes and its flags."""
    peak = number(row, "mem_max_allocated_bytes")
    measured = {"memory_gib": None if peak is None else peak / GIB, "memory_kind": _KIND}
    if whole(row, "pp", 1) > 1:
        return Run(row["test"], _FAMILY, "pipeline parallelism", **measured)
    flags = row["flags"].split(";")
    ranks = next((int(value) for key, value in row.items() if key.startswith("gpus") and value), 8)
    tensor, context = whole(row, "tp", 1), whole(row, "cp", 1)
    data = ranks // (tensor * context)
    micro_batch = whole(row, "micro_batch", 1)
    heads = whole(row, "heads", 1)
    hidden = whole(row, "hidden", 1)
    sizes = Sizes(
        hidden, heads, whole(row, "query_groups", heads), 4 * hidden, -(-50257 // (128 * tensor)) * 128 * tensor,
        whole(row, "seq_len", 1024), is_gated="swiglu" in flags, is_tied=True, dropout=_DROPOUT,
        is_flash=_has_flash(row), is_sequence_first=True, has_qk_norm="qk-layernorm" in flags,
    )  # fmt: skip
    family = re.split(r"[^a-z0-9]", row["platform"].lower())[-1].upper()
    cluster = Cluster.parse(f"1x{ranks} {family}")
    shards = data // _OPTIMIZER_INSTANCES if "multi_dist_optimizer_instances" in row["test"] else data
    recompute = row["recompute_granularity"] or "none"
    workspace_bytes = cublas_bytes(cluster.device, "deterministic-mode" in flags)
    if _has_transformer_engine(row):
        workspace_bytes += transformer_engine_bytes(cluster.device)
    return Run(
        row["test"], _FAMILY, "", sizes, whole(row, "n_layers", 1), cluster, data, shards,
        context, tensor, _zero_stage(flags), 1, "sequence-parallel" in flags, micro_batch,
        max(1, whole(row, "global_batch", 1) // (data * micro_batch)), "full" if recompute == "full" else "none",
        is_fused=True, has_gradient_buffer=True,
        workspace_bytes=workspace_bytes,
        param_dtype="fp32" if row["dtype"] == "bf16" else "bf16",
        optimizer="adamw_fused" if row["dtype"] == "bf16" else "adamw_master", **measured,
    )  # fmt: skip


def _zero_stage(flags: list[str]) -> int:
    if "use-megatron-fsdp" in flags:
        return 3
    return int("use-distributed-optimizer" in flags)


def _has_flash(row: Mapping[str, str]) -> bool:
    """Whether attention is one fused kernel: Transformer Engine's default, and not Megatron-LM's own layers'."""
    return _has_transformer_engine(row) and row["attention_backend"] != "unfused"


def _has_transformer_engine(row: Mapping[str, str]) -> bool:
    return row["transformer_impl"] == "transformer_engine"
