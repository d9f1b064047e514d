"""Reading published runs, and the figures that sum up how well they are predicted."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Cluster, axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.memory import at_rest
from autopar.cost_model.simulate import optimizer_bytes, simulate
from autopar.mesh import Mesh
from benchmarks import published
from benchmarks.published_golden import read_golden
from benchmarks.published_model import Sizes
from benchmarks.published_price import laid_out, predict, program_of
from benchmarks.published_roofline import step_flops
from benchmarks.published_rows import Run, flash_generation, network_gbit, read_runs

ROW = {
    "id": "a-1", "family": "a", "hardware": "A100-SXM-80GB", "gpu_mem_gb": "80", "gpus_per_node": "8", "num_gpus": "16",
    "interconnect": "NVLink + 4x100 Gb RoCE per node", "model_name": "m", "n_layers": "4", "hidden": "256",
    "n_heads": "4", "n_kv_heads": "2", "ffn_hidden": "512", "vocab": "1001", "mlp_gated": "1", "tied_emb": "0",
    "seq_len": "128", "micro_batch_per_gpu": "2", "grad_accum": "3", "global_batch": "48", "dtype": "bf16",
    "strategy": "hybrid-zero1", "fsdp_size": "4", "tp": "2", "pp": "1", "cp": "1", "sequence_parallel": "1",
    "activation_ckpt": "full", "compile": "0", "fp8": "0", "step_time_s": "1.5", "peak_mem_GiB": "30",
    "mem_kind": "torch max allocated, GB (1e9) as printed", "notes": "", "source": "",
}  # fmt: skip


def write_rows(path: Path, *changes: dict[str, str], base: dict[str, str] = ROW) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(base))
        writer.writeheader()
        writer.writerows({**base, **change} for change in changes)
    return path


def read_one(path: Path, **change: str) -> Run:
    (run,) = read_runs(write_rows(path / "runs.csv", change))
    return run


def test_a_row_says_model_cluster_and_strategy(tmp_path: Path) -> None:
    run = read_one(tmp_path)
    assert run.model is not None
    assert run.cluster is not None
    assert (run.data, run.shards, run.tensor, run.zero) == (8, 4, 2, 1)
    assert (run.micro_batch, run.accumulate, run.recompute) == (2, 3, "full")
    assert (run.model.vocab, run.model.kv_heads, run.model.is_gated) == (1002, 2, True)  # padded to the tensor ranks
    assert str(run.cluster) == "2×8 A100-80GB (nccl)"
    assert run.memory_gib == pytest.approx(30e9 / 2**30)


def test_whole_tensors_may_have_one_owner_each(tmp_path: Path) -> None:
    run = read_one(tmp_path, source="github:InternLM/InternEvo@c628a8c874:doc/en/train_performance.md")
    assert (run.data, run.shards, run.owners, run.zero) == (8, 1, 4, 0)
    assert read_one(tmp_path, source="github:InternLM/InternEvo", strategy="fsdp_full", fsdp_size="").owners == 1


def test_owners_step_their_share_and_send_it_to_the_others() -> None:
    sizes = Sizes(64, 4, 4, 256, 512, 32, is_gated=False, is_tied=True)
    cluster = Cluster.parse("2x4 A100-80GB")
    alone = Run("r", "f", model=sizes, num_layers=2, cluster=cluster, data=8, optimizer="adamw_master")
    first, second = predict(alone), predict(replace(alone, owners=8))
    program = program_of(laid_out(alone), 2)
    rest, held_bytes = at_rest(program, "adamw_master"), simulate(program, cluster, "adamw_master").memory.optimizer
    assert first.allocated_bytes - second.allocated_bytes == pytest.approx(7 / 8 * held_bytes, rel=1e-9)
    spared_s = 7 / 8 * optimizer_bytes(rest) / cluster.device.memory_bandwidth_bytes_s
    assert len(program.forward.inputs) > 8  # so that every owner has something to send
    sent_s = 8 * collective_time("all_gather", 8, rest.params // 8, axis_link(cluster, Mesh(("dp",), (8,)), "dp"))
    assert second.step_s - first.step_s == pytest.approx(sent_s - spared_s, rel=1e-9)


def test_empty_fields_take_the_usual_values(tmp_path: Path) -> None:
    run = read_one(tmp_path, n_kv_heads="", ffn_hidden="", micro_batch_per_gpu="", grad_accum="", fsdp_size="", tp="",
                   pp="", cp="", step_time_s="", peak_mem_GiB="", strategy="ddp")  # fmt: skip
    assert run.model is not None
    assert (run.model.kv_heads, run.model.ffn, run.zero, run.shards) == (4, 1024, 0, 16)
    assert run.micro_batch * run.accumulate == 3  # of 48 sequences on 16 ranks
    assert run.step_s is None
    assert run.memory_gib is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pp": "4"}, "pipeline parallelism"),
        ({"fp8": "1"}, "FP8"),
        ({"dtype": "fp8 (TE) + bf16"}, "FP8"),
        ({"model_name": "moe-8x7b"}, "mixture of experts"),
    ],
)
def test_unsupported_rows_are_skipped_by_name(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    assert read_one(tmp_path, **change).skipped == reason


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("amp_bf16/DEFAULT", ("fp32", "adamw")),
        ("bf16 (fp32 master, fp32 reduce)", ("fp32", "adamw")),
        ("bf16 (fp32 grads)", ("fp32", "adamw")),
        ("bf16", ("bf16", "adamw_master")),
        ("bf16-true", ("bf16", "adamw")),
    ],
)
def test_precision_says_how_parameters_rest(tmp_path: Path, dtype: str, expected: tuple[str, str]) -> None:
    run = read_one(tmp_path, dtype=dtype)
    assert (run.param_dtype, run.optimizer) == expected


def test_words_for_networks_and_kernels() -> None:
    assert network_gbit("NVLink + 4x100 Gb RoCE per node", 8) == 400
    assert network_gbit("NVLink + 4x Omni-Path 100 Gb per node", 8) == 400
    assert network_gbit("NVLink/NVSwitch + IB NDR 400 Gb per GPU", 8) == 3200
    assert network_gbit("NVLink + RoCE 1600 Gbps/node", 8) == 1600
    assert network_gbit("NVLink + inter-node not stated", 8) is None
    notes = ("FlashAttention; tied", "uses FlashAttention-2", "flash_attn 3", "")
    assert [flash_generation({"notes": n, "strategy": "ddp"}) for n in notes] == [1, 2, 3, 2]
    assert flash_generation({"notes": "", "strategy": "zero1(dist-opt)"}) == 3


def test_golden_rows(tmp_path: Path) -> None:
    base = {
        "test": "t", "platform": "dev_dgx_a100", "gpus(assumed from recipe)": "8", "tp": "2", "pp": "1", "cp": "1",
        "n_layers": "12", "hidden": "512", "heads": "8", "query_groups": "", "seq_len": "1024", "micro_batch": "4",
        "global_batch": "32", "dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "unfused",
        "recompute_granularity": "full", "flags": "use-distributed-optimizer;sequence-parallel",
        "mem_max_allocated_bytes": str(2**31),
    }  # fmt: skip
    whole, piped = read_golden(write_rows(tmp_path / "golden.csv", {}, {"pp": "2"}, base=base))
    assert whole.model is not None
    assert (whole.data, whole.accumulate, whole.zero, whole.recompute) == (4, 2, 1, "full")
    assert whole.has_sequence_parallel
    assert not whole.model.is_flash
    assert whole.workspace_bytes == (2 * (2 * 4 * 2**20 + 8 * 2**14)) + 4 * 2**20  # PyTorch's, Transformer Engine's
    assert whole.memory_gib == 2
    assert piped.skipped == "pipeline parallelism"
    changes = {"test": "t_multi_dist_optimizer_instances", "flags": "qk-layernorm", "attention_backend": ""}
    (several,) = read_golden(write_rows(tmp_path / "golden.csv", changes, base=base))
    assert several.model is not None
    assert (several.data, several.shards) == (4, 2)
    assert several.model.has_qk_norm
    assert several.model.is_flash
    assert not whole.model.has_qk_norm


def test_a_fused_kernel_with_the_sequence_first_keeps_what_it_returns_twice() -> None:
    sizes = Sizes(64, 4, 4, 256, 512, 32, is_gated=False, is_tied=True)
    cluster = Cluster.parse("1x1 A100-80GB")

    def activations(sizes: Sizes, num_layers: int) -> float:
        run = Run("r", "f", model=sizes, num_layers=num_layers, cluster=cluster, micro_batch=2)
        return predict(run).allocated_bytes

    first, second = sizes, replace(sizes, is_sequence_first=True)
    more = [activations(second, n) - activations(first, n) for n in (4, 5)]
    assert more[1] - more[0] == 2 * 32 * 64 * 2  # one more bfloat16 tensor (batch, seq, hidden) a block


def test_summary_counts_and_ranks() -> None:
    rows = [
        published.Result("1", "a", "", 1.1, 1.0, 10.0, 9.0, "allocated", 0.5),
        published.Result("2", "a", "", 1.8, 2.0, None, None, "", 1.0),
        published.Result("3", "a", "", 4.0, 4.0, None, None, "", 2.0),
        published.Result("4", "b", "FP8", None, 3.0),
    ]
    found = published.summary(rows)
    families = found["families"]
    assert families["a"]["step_time"] == pytest.approx(
        {"count": 3, "median": 0.1, "p90": 0.1, "bias": 0.0, "worst_under": -0.1, "spearman": 1.0}
    )
    assert families["a"]["roofline"]["median"] == pytest.approx(0.0)
    assert families["b"]["skipped"] == {"FP8": 1}
    assert families["b"]["step_time"] is None
    assert found["all"]["memory"]["count"] == 1


def test_rank_correlation_shares_ranks_of_equal_values() -> None:
    assert published.spearman([(1, 1), (2, 3), (3, 2)]) == pytest.approx(0.5)
    assert published.spearman([(1, 1), (1, 2), (2, 3)]) == pytest.approx(0.8660254)
    assert published.spearman([(1, 1), (1, 2)]) is None


def test_roofline_counts_the_forward_pass_again(tmp_path: Path) -> None:
    once, again = (read_one(tmp_path, activation_ckpt=level) for level in ("none", "full"))
    head = 6 * 1002 * 256 * 128 * 2 * 3 / 2
    assert (step_flops(again) - head) / (step_flops(once) - head) == pytest.approx(8 / 6)


def test_the_command_predicts_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_rows(tmp_path / "runs.csv", {}, {"id": "a-2", "strategy": "fsdp_full"}, {"id": "a-3", "pp": "2"})
    published.main(["--runs", str(runs), "--json", str(tmp_path / "out.json")])
    text = capsys.readouterr().out
    assert "a-3: skipped (pipeline parallelism)" in text
    assert "| a | step_time | 2 |" in text
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["predicted_step_s"] > 0 and row["predicted_mem_gib"] > 0 for row in rows[:2])
