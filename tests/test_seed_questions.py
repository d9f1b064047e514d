"""What practitioners are told about DDP, ZeRO, FSDP and tensor parallelism, asked of the planner, with numbers.

Large models are asked about at full depth, on the meta device.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.cost_model.memory import at_rest
from autopar.cost_model.optimizers import Extent, Footprint, OptimizerLike, OptimizerMemory, Slot
from autopar.errors import InfeasibleBudgetError
from autopar.graph import JointGraph
from autopar.layout_search import Priced
from autopar.passes.pipeline import rewrite
from autopar.placement import is_sharded
from autopar.plan import Plan
from autopar.planner import plan_named
from autopar.program import LocalProgram
from tests.tiny_models import TinyGpt

GIB = 2**30

_FLOAT32 = Slot(Extent.ELEMENTS, 4)
MIXED = OptimizerMemory("adamw, float32 state", *(2 * [Footprint(3 * (_FLOAT32,))]))
"""AdamW for parameters in bfloat16 with bfloat16 gradients: a float32 copy and two float32 moments, 12 bytes a
parameter."""


# ------------------------------------------------------------------------------------------- what model states take


class Wide(nn.Module):
    """Two matrices that any power of two up to 2048 cuts evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@functools.cache
def wide_in_bfloat16() -> tuple[JointGraph, int]:
    with torch.device("meta"):
        model, rows = Wide().to(torch.bfloat16), torch.empty(1024, 2048, dtype=torch.bfloat16)
    compiler = Compiler(model, (1,), Cluster.parse("1 A100-80GB"))
    return compiler.trace((rows,), {}, train=True, local=False), sum(p.numel() for p in model.parameters())


def state_bytes(plan: Plan, program: LocalProgram) -> int:
    """Model states of one rank while a step runs: optimizer state, and parameters and gradients as they are held.

    A gathered copy that is kept counts whole, and so do gradients that are reduced only at the end.  (The piece that
    rests beside a kept copy, at most an N-th of it, is not in the table: DeepSpeed's is the float32 one.)
    """
    rest = at_rest(program, MIXED)
    moved = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for collective in program.collectives():
        moved[collective.kind] += collective.num_bytes
    kept = not all(storage.regather for storage in plan.storage.values())
    params = max(rest.params, moved["all_gather"]) if kept else rest.params
    grads = max(rest.trained, moved["reduce_scatter"]) if plan.delay_reduction else rest.trained
    return rest.optimizer + params + grads


# S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, Table 1:
# gigabytes of model states per device for each degree of data parallelism.
ZERO_TABLE: Mapping[tuple[float, str], Mapping[int, float]] = {
    (7.5, "zero1"): {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    (7.5, "zero2"): {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    (7.5, "zero3"): {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12},
    (128, "zero1"): {1: 2048, 4: 896, 16: 608, 64: 536, 256: 518, 1024: 513},
    (128, "zero2"): {1: 2048, 4: 704, 16: 368, 64: 284, 256: 263, 1024: 257},
    (128, "zero3"): {1: 2048, 4: 512, 16: 128, 64: 32, 256: 8, 1024: 2},
    (1000, "zero1"): {1: 16000, 4: 7000, 16: 4750, 64: 4187, 256: 4046, 1024: 4011},
    (1000, "zero2"): {1: 16000, 4: 5500, 16: 2875, 64: 2218, 256: 2054, 1024: 2013},
    (1000, "zero3"): {1: 16000, 4: 4000, 16: 1000, 64: 250, 256: 62.5, 1024: 15.6},
}


@pytest.mark.parametrize(("billions", "stage"), ZERO_TABLE)
def test_the_zero_paper_table_of_model_states(billions: float, stage: str) -> None:
    joint, num_params = wide_in_bfloat16()
    for num_ranks, published_gb in ZERO_TABLE[billions, stage].items():
        plan = plan_named(stage, joint, (num_ranks,), min(8, num_ranks))
        gb = state_bytes(plan, rewrite(joint, plan, check=False)) / num_params * billions
        last_digit = 10.0 ** -len(f"{published_gb:g}".partition(".")[2])
        assert gb == pytest.approx(published_gb, rel=0.01, abs=last_digit / 2), num_ranks


def test_ten_billion_parameters_under_mixed_precision_adam_take_160_gb() -> None:
    joint, num_params = wide_in_bfloat16()
    rest = at_rest(rewrite(joint, plan_named("ddp", joint, (1,), 1), check=False), MIXED)
    per_param = [part / num_params for part in (rest.params, rest.trained, rest.optimizer)]
    assert per_param == [2, 2, 12]
    assert sum(per_param) * 10e9 == pytest.approx(160e9)


# ---------------------------------------------------------------------------------------------------- small models


class TwoMatrices(nn.Module):
    """An FFN on a residual stream, of any size."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


class Loss(nn.Module):
    """A language model of which only the loss is asked for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids, ids) if isinstance(self.model, TinyGpt) else self.model(input_ids=ids, labels=ids)
        loss: Tensor = out["loss"]
        return loss


def asked(
    model: nn.Module, inputs: Tensor, cluster: str, optimizer: OptimizerLike = "adamw"
) -> tuple[Compiler, JointGraph]:
    known = Cluster.parse(cluster)
    sizes = (known.num_nodes, known.ranks_per_node) if known.num_nodes > 1 else (known.ranks_per_node,)
    compiler = Compiler(model, sizes, known, optimizer=optimizer)
    return compiler, compiler.trace((inputs,), {}, train=True, local=False, whole=False)


def named(compiler: Compiler, joint: JointGraph, strategy: str) -> Priced:
    return next(p for p in compiler.candidates(joint) if p.plan.strategy == strategy)


def cut(plan: Plan, *words: str) -> set[bool]:
    """Whether parameters whose names have one of these words rest cut."""
    names = [name for name in plan.storage if any(word in name for word in words)]
    assert names
    return {any(map(is_sharded, plan.storage[name].sharding)) for name in names}


def verdict(plan: Plan, strategy: str) -> str:
    assert plan.report is not None
    return next(c.verdict for c in plan.report.candidates if c.strategy == strategy)


def tiny(cluster: str) -> tuple[Compiler, JointGraph]:
    with torch.device("meta"):
        model = Loss(TinyGpt(vocab=512, width=128, heads=4, layers=1, seq=32))
        ids = torch.empty(32, 32, dtype=torch.long)
    return asked(model, ids, cluster)


@pytest.mark.parametrize("cluster", ["8xA100-80GB", "2 cpu"])
def test_a_tiny_model_is_not_sharded(cluster: str) -> None:
    compiler, joint = tiny(cluster)
    plan = compiler.plan(joint)
    assert cut(plan, "weight", "bias") == {False}
    assert not plan.recompute
    assert re.fullmatch(r"\S+ [mµ]s slower: \S+ [mµ]s more (waiting for collectives|computing)", verdict(plan, "zero3"))


def test_where_a_tiny_model_is_cut_the_plan_says_why() -> None:
    """Four ranks in pairs: gradients are scattered, reduced and gathered in 4 rounds instead of the 6 of one ring."""
    compiler, joint = tiny("4 cpu")
    plan = compiler.plan(joint)
    assert plan.mesh.sizes == (2, 2)
    assert plan.step_time_s < named(compiler, joint, "ddp").simulation.step_time_s
    assert re.fullmatch(r"\S+ [mµ]s slower: \S+ [mµ]s more waiting for collectives", verdict(plan, "ddp"))


def test_a_matrix_larger_than_a_card_with_what_comes_and_goes_is_multiplied_in_parts() -> None:
    """8 GiB in float32 on cards of 16 GB: ZeRO-3 gathers it whole, and its gradient is whole before it is reduced."""
    with torch.device("meta"):
        model, rows = TwoMatrices(8192, 262144), torch.empty(64, 8192)
    compiler, joint = asked(model, rows, "8xV100-16GB")
    plan = compiler.plan(joint)
    assert plan.mesh.names == ("tp",)
    assert named(compiler, joint, "zero3").simulation.memory.total > 24 * GIB
    assert plan.peak_bytes < 14 * GIB
    assert plan.report is not None
    assert not any(kind.startswith("all_gather") and size >= 8 * GIB for kind, size in
                   plan.report.collective_bytes.items())  # fmt: skip
    for strategy in ("ddp", "zero2", "zero3", "hsdp"):
        assert verdict(plan, strategy).startswith("over the budget by")


def test_a_state_beyond_every_card_is_refused_with_the_memory_that_it_takes() -> None:
    with torch.device("meta"):
        model, rows = TwoMatrices(16384, 2**19), torch.empty(64, 16384)
    compiler, joint = asked(model, rows, "8xV100-16GB")
    with pytest.raises(InfeasibleBudgetError, match=r"more than the 15\.\d GiB that the device has") as caught:
        compiler.plan(joint)
    assert caught.value.smallest_feasible_gb > 32


# ------------------------------------------------------------------------------- large language models, at full depth

SIZES = {"7B": (4096, 11008, 32, 32, 32), "13B": (5120, 13824, 40, 40, 40), "30B": (6656, 17920, 60, 52, 52),
         "70B": (8192, 28672, 80, 64, 8)}  # fmt: skip
"""Llama models: width, ffn, layers, heads, key-value heads."""


def llama(
    size: str, cluster: str, rows: int, seq: int, optimizer: OptimizerLike = MIXED
) -> tuple[Compiler, JointGraph]:
    """In bfloat16, on the meta device."""
    transformers = pytest.importorskip("transformers")
    width, ffn, num_layers, heads, kv_heads = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=ffn, num_hidden_layers=num_layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Loss(transformers.LlamaForCausalLM(config).to(torch.bfloat16))
        ids = torch.empty(rows, seq, dtype=torch.long)
    return asked(model, ids, cluster, optimizer)


LAYERS = ("layers.0.self_attn", "layers.1.mlp")


def test_7b_that_fits_one_card_keeps_what_it_gathers() -> None:
    """All in bfloat16: 8 bytes a parameter, 54 GB of the card's 79 GiB.  DDP fits, but its optimizer steps all of the
    state on every rank; cutting the state and keeping the gathered copy, as ZeRO-2 does, is faster."""
    compiler, joint = llama("7B", "8xA100-80GB", 8, 2048, "adamw")
    plan = compiler.plan(joint)
    assert sum(name.endswith("mlp.up_proj.weight") for name in plan.storage) == 32
    assert named(compiler, joint, "ddp").simulation.memory.total <= compiler.cluster.device.memory_bytes
    assert cut(plan, *LAYERS) == {True}
    assert not any(s.regather for name, s in plan.storage.items() if any(word in name for word in LAYERS))
    assert not any("layers" in ref.anchor for refs in plan.factors for ref in refs)  # layers cut by rows of the batch
    assert not plan.recompute
    assert "slower" in verdict(plan, "ddp")
    assert "slower" in verdict(plan, "zero3")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["13B", "30B"])
def test_13b_and_30b_on_eight_cards_rest_cut(size: str) -> None:
    """208 and 520 GB of states.  13B keeps what it gathers; 30B gathers again and recomputes the cheap ops."""
    compiler, joint = llama(size, "8xA100-80GB", 8, 2048)
    plan = compiler.plan(joint)
    assert cut(plan, *LAYERS) == {True}
    gathers_again = {s.regather for name, s in plan.storage.items() if any(word in name for word in LAYERS)}
    assert gathers_again == {size == "30B"}
    assert set(plan.recompute.values()) == ({"selective"} if size == "30B" else set())
    for strategy in ("replicate", "ddp"):
        assert verdict(plan, strategy).startswith("over the budget by")


@pytest.mark.slow
def test_70b_on_eight_cards_is_refused_with_the_budget_that_would_do() -> None:
    """1.1 TB of states on 8 × 79 GiB; on twice the cards it fits, cut and recomputed."""
    compiler, joint = llama("70B", "8xA100-80GB", 8, 2048)
    with pytest.raises(InfeasibleBudgetError, match=r"more than the 79\.\d GiB that the device has") as caught:
        compiler.plan(joint)
    assert 16 * 68.7e9 / 8 < caught.value.smallest_feasible_gb * GIB < 1.25 * 16 * 68.7e9 / 8
    compiler, joint = llama("70B", "2x8 A100-80GB", 16, 2048)
    plan = compiler.plan(joint)
    assert cut(plan, *LAYERS) == {True}
    assert plan.recompute


@pytest.mark.slow
def test_two_nodes_use_the_network_for_the_batch_and_the_links_inside_for_the_rest() -> None:
    """30B on 2 × 8 cards, 100 Gbit between the nodes: from 36 GiB up, a little more than the states take, the inner
    axis is a node, and what crosses the network is the batch's gradients and little else."""
    compiler, joint = llama("30B", "2x8 A100-80GB @ 100gbit", 16, 1024)
    for gb in (79, 60, 50, 40, 36):
        compiler.mem_gb = gb
        plan = compiler.plan(joint)
        assert dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)) == {"dp": 2, "tp": 8}
        assert [ref.label for ref in plan.factors[0]] == ["batch"]
        assert re.search(r"slower|over the budget", verdict(plan, "zero3"))
