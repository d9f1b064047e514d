"""Heads that the ranks do not divide are dealt out whole, as 2 and 1 of 3: exact, priced for the rank that has most,
and stored as PyTorch cuts the dim."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from programs import subject, trained_beside_one_device
from torch import Tensor, fx, nn

from autopar.describe import describe_params
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.pipeline import parameter_uses
from autopar.placement import Shard, StridedShard, is_sharded, shard, shard_grain
from autopar.program import collectives_of
from autopar.runtime.sharding import device_placements

WIDTH, DIM = 12, 4


class Attention(nn.Module):
    """Attention and a head, with q, k and v from one product (`fused`) or from three, and keys and values for each
    head (`repeat`), for a group of them (`grouped`), or by products and a softmax (`eager`)."""

    def __init__(self, heads: int, kv_heads: int = 0, kind: str = "repeat") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.kind = heads, kv_heads or heads, kind
        if kind == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * heads * DIM)
        else:
            self.q, self.k = nn.Linear(WIDTH, heads * DIM), nn.Linear(WIDTH, self.kv_heads * DIM)
            self.v = nn.Linear(WIDTH, self.kv_heads * DIM)
        self.out, self.head = nn.Linear(heads * DIM, WIDTH), nn.Linear(WIDTH, 40)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        parts = self.qkv(x).split(self.heads * DIM, -1) if self.kind == "fused" else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(rows, seq, -1, DIM).transpose(1, 2) for part in parts)
        grouped = self.kind == "grouped"
        if not grouped and self.kv_heads < self.heads:
            k, v = (one.repeat_interleave(self.heads // self.kv_heads, 1) for one in (k, v))
        if self.kind == "eager":
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2))).square().mean()


CASES = {
    "3 fused on 2": (partial(Attention, 3, kind="fused"), 2),
    "3 fused on 4, one without": (partial(Attention, 3, kind="fused"), 4),
    "12 fused on 8, two without": (partial(Attention, 12, kind="fused"), 8),
    "3 on 2": (partial(Attention, 3), 2),
    "3 by products on 2": (partial(Attention, 3, kind="eager"), 2),
    "6 for 3 on 4": (partial(Attention, 6, 3), 4),
    "8 for 4 on 8": (partial(Attention, 8, 4), 8),
    "8 for 4 on 8, in groups": (partial(Attention, 8, 4, "grouped"), 8),
    "4 for 2 on 4": (partial(Attention, 4, 2), 4),
}


def has_grains(sharding: Any) -> bool:
    return any(shard_grain(placement) > 1 for placement in sharding)


@pytest.mark.parametrize("strategy", ["tp", "tp+sp", "fsdp+tp"])
@pytest.mark.parametrize("name", CASES)
def test_heads_are_dealt_out_exactly(name: str, strategy: str) -> None:
    build, num_ranks = CASES[name]
    torch.manual_seed(0)
    ours = subject(build(), torch.randn(16, 24, WIDTH))
    plan = ours.plan(strategy, *((2, num_ranks) if strategy == "fsdp+tp" else (num_ranks,)))
    uses = parameter_uses(ours.joint, plan)
    attention = {path for path in plan.storage if path.endswith("weight") and not path.startswith("head")}
    assert {path for path, used in uses.items() if has_grains(used)} >= attention
    for path in attention:  # what rests is what PyTorch can name
        assert isinstance(plan.storage[path].sharding[-1], (Shard, StridedShard))
    report = ours.compare(ours.program(plan), plan, num_steps=2)
    assert report.ok, str(report)


def test_parts_of_different_sizes_beside_a_batch_in_one_dim() -> None:
    """Products of (batch, head) pairs: the batch is cut outside the heads, and the heads by grains."""
    torch.manual_seed(0)
    ours = subject(Attention(3, kind="eager"), torch.randn(8, 24, WIDTH))
    plan = ours.plan("fsdp+tp", 2, 2)
    cuts = []

    def look(name: str, module: fx.GraphModule) -> None:
        if name == "insert_reshards":
            found = module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
            cuts.extend(tuple(cut is not None and cut.grain for cut in node.meta["cuts"]) for node in found)

    program = ours.program(plan, look)
    assert set(cuts) == {(0, 1)}
    assert ours.compare(program, plan).ok


def test_two_key_heads_on_four_ranks_leave_the_query_heads_to_be_cut() -> None:
    """Where each serves four queries, every rank gets one query of each; the keys are whole."""
    torch.manual_seed(0)
    ours = subject(Attention(8, 2, "grouped"), torch.randn(8, 64, WIDTH))
    plan = ours.plan("tp", 4)
    assert ours.compare(ours.program(plan), plan).ok
    assert not any(has_grains(used) for used in parameter_uses(ours.joint, plan).values())


def test_the_first_rank_has_most_and_is_what_is_priced() -> None:
    """2 of 3 heads; the parameters' parts are exchanged once before and once after, and no whole one is gathered."""
    ours = subject(Attention(3, kind="fused"), torch.randn(8, 5, WIDTH))
    plan = ours.plan("tp", 2)
    graphs = [graph.module.graph for graph in ours.program(plan).graphs]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    (call,) = graphs[0].find_nodes(op="call_function", target=attention)
    assert [tuple(n.meta["val"].shape) for n in call.all_input_nodes] == [(8, 2, 5, DIM)] * 3
    found = [c for graph in graphs for c in collectives_of(graph) if c.kind in ("all_gather", "all_to_all")]
    sizes = {"qkv.weight": 3 * 8 * WIDTH, "qkv.bias": 3 * 8, "out.weight": 8 * WIDTH}
    moved = {("all_to_all", 8 * n): 2 for n in sizes.values()}
    assert Counter((c.kind, c.num_bytes) for c in found) == {**moved, ("all_gather", 8 * 8 * 5 * WIDTH): 1}  # the batch
    assert describe_params(ours.joint, plan)["qkv.weight"] == "column (2 of 3)@tp"


def test_a_grain_is_for_programs_and_not_for_what_rests() -> None:
    with pytest.raises(PlanError, match=r"lies as shard\(0, grain=64\)@tp.*store it as shard\(0\)@tp"):
        device_placements((shard(0, grain=64),), Mesh(("tp",), (2,)))
    assert copy.deepcopy(shard(0, grain=64)) == shard(0, grain=64) != shard(0)


def trains(strategy: str, mesh: Any, kind: str, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Three steps beside the single device; returns the shape of this rank's part of the output product's weight."""
    torch.manual_seed(0)
    model = Attention(heads, kv_heads, kind).double()
    draws = (torch.Generator().manual_seed(seed) for seed in range(3))
    batches = [(torch.randn(8, 5, WIDTH, generator=draw).double(),) for draw in draws]
    pm = trained_beside_one_device(model, mesh, strategy, batches, lambda loss: loss)
    assert any(is_sharded(p) for p in pm.plan.storage["out.weight"].sharding)
    return tuple(dict(pm.named_parameters())["out.weight"].to_local().shape)


@pytest.mark.parametrize(
    ("strategy", "mesh", "kind", "heads", "kv_heads"),
    [
        ("tp", 4, "fused", 3, 3),
        ("tp", 4, "grouped", 6, 3),
        ("tp+sp", 4, "repeat", 6, 3),
        ("fsdp+tp", "2x2", "fused", 3, 3),
        ("fsdp+tp", "2x2", "eager", 3, 3),
    ],
)
def test_real_ranks_train_as_one(
    gloo4: RankPool, strategy: str, mesh: Any, kind: str, heads: int, kv_heads: int
) -> None:
    gloo4.run(trains, strategy, mesh, kind, heads, kv_heads)


def test_two_real_ranks_train_as_one(gloo2: RankPool) -> None:
    assert gloo2.run(trains, "tp", 2, "fused", 3, 3) == [(WIDTH, 6), (WIDTH, 6)]
