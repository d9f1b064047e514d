"""Rows that are sorted, treated one by one and put back: sorted within each row of the batch, if that is proved."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_op import OneOp, assert_same, one_op
from pool import RankPool
from programs import Subject, subject
from rule_cases import CASES as GENERAL
from rule_cases import Case
from rule_cases_batched import BATCHED
from rule_cases_image import IMAGES
from rule_cases_scatter import SCATTERS
from test_parallelize import mine, whole
from torch import Tensor, fx, nn

import autopar
from autopar.program import COLLECTIVE_KINDS, LocalProgram
from autopar.row_wise import rows_through
from autopar.rules import rule_for, tensor_inputs

aten, ours = torch.ops.aten, torch.ops.autopar
NUM_EXPERTS = 4


def targets(one: Subject) -> set[Any]:
    return {node.target for node in one.joint.module.graph.nodes}


def is_sorted_by_row(one: Subject) -> bool:
    """Whether each row of the batch is sorted by itself; if not, the sort of all is still there."""
    sorts = [node for node in one.joint.module.graph.nodes if node.target in (aten.sort.default, aten.sort.stable)]
    assert sorts
    shapes = {node.meta["val"][0].dim() for node in sorts}
    assert (shapes == {2}) is (ours.take_rows.default in targets(one) or ours.put_rows.default in targets(one))
    return shapes == {2}


# ---- the proof's premise


@pytest.mark.parametrize("case", [*GENERAL, *BATCHED, *IMAGES, *SCATTERS], ids=str)
def test_what_carries_rows_gives_the_same_rows_in_any_order(case: Case) -> None:
    """For each op and each way in which the proof would let rows through it."""
    args, kwargs = case.arguments()
    op = one_op(case.op, args, kwargs, case.stand_in)
    rule = rule_for(op.call)
    if rule is None or not case.values:
        return
    for factor in rule.factors:
        given = [next((d for d, group in enumerate(dims) if group == (factor,)), None) for dims in rule.inputs]
        if all(dim is None for dim in given) or (found := rows_through(op.call, given)) is None:
            continue
        order = torch.randperm(rule.sizes[factor], generator=torch.Generator().manual_seed(1))
        reordered = run_reordered(op, given, order)
        for value, expected, dim in zip(reordered, op.expected, found, strict=True):
            if expected is not None:
                wanted = expected if dim is None else expected.index_select(dim, order)
                assert_same(value, wanted, f"{case}, rows are {factor}")


def run_reordered(op: OneOp, given: list[int | None], order: Tensor) -> list[Any]:
    """What an op gives of inputs whose rows, along the given dims, have another order."""
    dims = dict(zip(tensor_inputs(op.call), given, strict=True))
    values: dict[fx.Node, Tensor] = dict(zip(op.joint.placeholders, op.tensors, strict=True))
    values = {n: t if dims.get(n) is None else t.index_select(dims[n], order) for n, t in values.items()}
    zeros = {n: torch.zeros(n.meta["val"].shape, dtype=torch.float64) for n in dims if n not in values}
    args, kwargs = fx.map_arg((op.call.args, op.call.kwargs), lambda n: {**values, **zeros}[n])
    result = (op.stand_in or op.call.target)(*args, **kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


# ---- ways to write a mixture


class Mixture(nn.Module):
    """Top-2 of some experts by sorted rows; what a subclass writes otherwise is a method."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, hidden, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, hidden) * 0.3)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(rows).softmax(-1).topk(2, dim=-1)

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids.sort()

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.histc(sorted_ids.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)

    def take(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order // 2]

    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return F.silu(hidden)

    def put(self, out: Tensor, order: Tensor) -> Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return out[back].unflatten(0, (-1, 2)).sum(1)

    def loss(self, out: Tensor, counts: Tensor, sorted_ids: Tensor) -> Tensor:
        return out.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.choose(rows)
        ids = chosen.flatten()
        sorted_ids, order = self.sort(ids)
        counts = self.counts(ids, sorted_ids)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(self.take(rows, order), self.up, offs=ends)
        out = F.grouped_mm(self.activate(hidden, sorted_ids, order), self.down, offs=ends)
        return self.loss(self.put(out * weights.flatten()[order, None], order), counts, sorted_ids)


class StableHot(Mixture):
    """Counted by comparing with every expert."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids.sort(stable=True)

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return (sorted_ids[None] == torch.arange(NUM_EXPERTS, device=ids.device)[:, None]).sum(1)


class Hot(Mixture):
    """Counted before they are sorted."""

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return F.one_hot(ids.view(-1, 2), NUM_EXPERTS).sum((0, 1))


class Adds(Mixture):
    """Counted by adding ones, put back by adding rows."""

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.zeros(NUM_EXPERTS, dtype=torch.int64).scatter_add(0, sorted_ids, torch.ones_like(ids))

    def put(self, out: Tensor, order: Tensor) -> Tensor:
        empty = out.new_zeros(len(order) // 2, out.shape[1])
        return empty.index_add(0, torch.div(order, 2, rounding_mode="floor"), out)


class Gathers(Mixture):
    """Rows by indices as wide as they are."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.argsort()
        return ids[order], order

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.histc(ids.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)

    def take(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows.gather(0, (order // 2)[:, None].expand(-1, rows.shape[1]))

    def put(self, out: Tensor, order: Tensor) -> Tensor:
        empty = out.new_zeros(len(order) // 2, out.shape[1])
        return empty.scatter_add(0, (order // 2).view(-1, 1).expand_as(out), out)


class Sorts(Mixture):
    """The way back found by sorting the positions, and biases of experts."""

    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return F.silu(hidden + self.bias[sorted_ids]) / (1 + hidden.square().sum(1, keepdim=True))

    def put(self, out: Tensor, order: Tensor) -> Tensor:
        return out.index_select(0, order.argsort()).unflatten(0, (-1, 2)).sum(1)


class Balances(Mixture):
    """The loss reads how many rows each expert got, and all sorted ids."""

    def loss(self, out: Tensor, counts: Tensor, sorted_ids: Tensor) -> Tensor:
        return out.square().mean() * (1 + counts.square().mean() / counts.sum() ** 2 + sorted_ids.sum())


CLOSED = [Mixture, StableHot, Hot, Adds, Gathers, Sorts, Balances]


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("fsdp+tp", (2, 2)), ("tp+sp", (2,))])
def test_rows_are_sorted_where_they_are(kind: type[Mixture], strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one = subject(kind(), torch.randn(8, 5, 8))
    assert is_sorted_by_row(one)
    plan = one.plan(strategy, *sizes)
    program = one.program(plan)
    report = one.compare(program, plan, num_steps=2)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > 0.9


def test_under_data_parallelism_only_gradients_and_the_loss_travel() -> None:
    one = subject(Mixture(), torch.randn(8, 5, 8))
    program = one.program(one.plan("ddp", 4))
    kinds = {
        str(node.target) for graph in program.graphs for node in graph.module.graph.nodes if "_c10d" in str(node.target)
    }
    assert not any("gather" in kind or "all_to_all" in kind for kind in kinds), kinds


def ends_read(program: LocalProgram) -> set[tuple[int, ...]]:
    """The shapes of one rank's ends of groups, (blocks, groups), as its products read them."""
    found = [n for graph in program.graphs for n in graph.module.graph.nodes if n.target is ours.grouped_mm.default]
    return {tuple(node.args[2].meta["val"].shape) for node in found}


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("zero3", (2, 2)), ("tp", (2,)), ("fsdp+tp", (2, 2))])
def test_what_no_rank_parts_is_sorted_at_once(strategy: str, sizes: tuple[int, ...]) -> None:
    one = subject(Mixture(), torch.randn(8, 5, 8))
    plan = one.plan(strategy, *sizes)
    if "tp" in strategy:  # which cuts by the batch what its pairs of products leave whole, and so the blocks
        assert ends_read(one.program(plan)) == {(2, NUM_EXPERTS)}
        pairs = tuple(ref for ref in plan.factors[-1] if ref.label != "batch")
        plan = replace(plan, factors=(*plan.factors[:-1], pairs))
    assert ends_read(one.program(plan)) == {(1, NUM_EXPERTS)}


def test_blocks_are_as_fine_as_the_finest_cut() -> None:
    """Rows are read along the batch cut by both axes, and gathered along one of them for products cut by widths."""
    one = subject(Mixture(), torch.randn(8, 5, 8))
    plan = one.plan("fsdp+tp", 2, 2)
    plan = replace(plan, factors=(plan.factors[0], (*plan.factors[1], *plan.factors[0])))
    program = one.program(plan)
    assert ends_read(program) == {(2, NUM_EXPERTS)}
    report = one.compare(program, plan, num_steps=2)
    assert report.ok, str(report)


def test_tokens_travel_rather_than_a_copy_for_each_expert() -> None:
    """Along the axis that cuts widths, rows are gathered before they are taken, forward and backward."""
    one = subject(Mixture(width=16, hidden=64), torch.randn(8, 5, 16))
    plan = one.plan("fsdp+tp", 2, 2)
    plan = replace(plan, factors=(plan.factors[0], (*plan.factors[1], *plan.factors[0])))
    program = one.program(plan)
    report = one.compare(program, plan)
    assert report.ok, str(report)
    num_tokens, width = 8 * 5 // 2, 16
    for graph in program.graphs:
        sizes = [
            node.meta["val"].numel()
            for node in graph.module.graph.nodes
            if node.op == "call_function" and COLLECTIVE_KINDS.get(node.target) == "all_gather"
            and node.meta["val"].is_floating_point() and node.meta["val"].shape[-1] == width
        ]  # fmt: skip
        assert sizes == [num_tokens * width]


def test_gradients_of_tokens_are_summed_over_experts_before_ranks() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixture = nn.Linear(16, 16), Mixture(width=16, hidden=64)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixture(self.first(x))

    one = subject(Deep(), torch.randn(8, 5, 16))
    plan = one.plan("tp", 2)
    program = one.program(plan)
    report = one.compare(program, plan)
    assert report.ok, str(report)
    nodes = program.graphs[1].module.graph.nodes
    puts = [n for n in nodes if n.target is ours.put_rows.default and n.args[2] == 2]
    products = [n for n in nodes if n.target is ours.grouped_mm.default]
    assert puts
    assert all(put.args[0] in products for put in puts), "what is put back is not reduced yet"


# ---- what depends on the order


class RunningSum(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden.cumsum(0)


class Softmax(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden.softmax(0)


class ByPlace(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden * torch.arange(len(hidden))[:, None]


class ByPosition(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden * order[:, None]


class Neighbours(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden + hidden.roll(1, 0)


class FirstRows(Mixture):
    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden - hidden[:3].sum(0)


class UnsortedRows(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        self.extra = x.flatten(0, 1).repeat_interleave(2, 0)[:, :1]
        return super().forward(x)

    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return hidden * self.extra


class AnotherOrder(Mixture):
    def put(self, out: Tensor, order: Tensor) -> Tensor:
        return out[order].unflatten(0, (-1, 2)).sum(1)


class ShiftedBack(Mixture):
    def put(self, out: Tensor, order: Tensor) -> Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device).flip(0)
        return out[back].unflatten(0, (-1, 2)).sum(1)


class NeverBack(Mixture):
    def put(self, out: Tensor, order: Tensor) -> Tensor:
        return out.unflatten(0, (-1, 2)).sum(1)


class Descending(Mixture):
    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids.sort(descending=True)


class OtherCounts(Mixture):
    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.worst = self.gate(rows).topk(2, largest=False)[1].flatten()
        return super().choose(rows)

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.histc(self.worst.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)


class SomeCounts(Mixture):
    """Of the first ids alone, the rest for the last expert."""

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.histc(sorted_ids[:40].float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)


class CoarseBins(Mixture):
    """Bins from 0 to the number of experts: of another width than one."""

    def counts(self, ids: Tensor, sorted_ids: Tensor) -> Tensor:
        return torch.histc(sorted_ids.float(), NUM_EXPERTS, 0, NUM_EXPERTS)


class Unbounded(Mixture):
    """Ids that may be no expert's."""

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().choose(rows)
        return weights, (chosen - 1).clamp(min=0)


OPEN = [
    RunningSum, Softmax, ByPlace, ByPosition, Neighbours, FirstRows, UnsortedRows, AnotherOrder, ShiftedBack,
    NeverBack, Descending, OtherCounts, SomeCounts, CoarseBins, Unbounded,
]  # fmt: skip


@pytest.mark.parametrize("kind", OPEN)
def test_what_depends_on_the_order_keeps_it(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    one = subject(kind(), torch.randn(8, 5, 8))
    assert not is_sorted_by_row(one)
    report = one.verify("ddp", 4)
    assert report.ok, str(report)


def test_sorted_rows_that_the_model_returns_keep_their_order() -> None:
    class Returns(Mixture):
        def loss(self, out: Tensor, counts: Tensor, sorted_ids: Tensor) -> Any:
            return super().loss(out, counts, sorted_ids), sorted_ids

    assert not is_sorted_by_row(subject(Returns(), torch.randn(8, 5, 8)))


def test_ids_that_the_batch_does_not_divide_keep_their_order() -> None:
    class OfPositions(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sum(0, keepdim=True)) + x.square().mean()

    one = subject(OfPositions(), torch.randn(8, 5, 8))
    assert not is_sorted_by_row(one)
    report = one.verify("ddp", 4)
    assert report.ok, str(report)


# ---- mixtures of Hugging Face, in one process and in several

TINY = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 16,
    "experts_implementation": "grouped_mm",
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4}),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 8}
        | LATENT,
    ),
}


def mixture(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name, fields = MIXTURES[kind]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**TINY, **fields))
    return model


def tokens() -> Tensor:
    return torch.randint(48, (8, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", "4"),
        ("zero3", "4"),
        ("tp", "4"),
        ("fsdp+tp", "2x2"),
        pytest.param("auto", "4", marks=pytest.mark.slow),
        ("auto", "2x2"),
    ],
)
def test_mixtures_equal_the_single_device(kind: str, strategy: str, mesh: str) -> None:
    batch = {"input_ids": tokens(), "labels": tokens()}
    report = autopar.verify(mixture(kind), strategy, batch, mesh=mesh, num_steps=2)
    assert report.ok, str(report)


def trains_equally(kind: str, strategy: str, mesh: Any) -> None:
    model = mixture(kind)
    reference = copy.deepcopy(model)
    ids, (rows,) = tokens(), mine(tokens())
    batch = {"input_ids": rows, "labels": rows}
    pm = autopar.parallelize(model, mesh, 1.0, strategy=strategy, example_inputs=batch)
    forward = pm.compiled_steps[-1].program.graphs[0].module.graph
    assert ours.take_rows.default in {node.target for node in forward.nodes}
    ours_sgd, theirs_sgd = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pm, reference))
    for _ in range(3):
        losses = pm(**batch).loss, reference(input_ids=ids, labels=ids).loss
        for optimizer, loss in zip((ours_sgd, theirs_sgd), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # float32, which is all that the single device's kernel has: sums over ranks are made in another order
    for (name, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "strategy", "mesh"),
    [
        ("Mixtral", "zero3", 4),
        ("DeepseekV3", "fsdp+tp", "2x2"),
        pytest.param("Qwen3Moe", "auto", 4, marks=pytest.mark.slow),
    ],
)
def test_mixtures_train_on_processes_as_on_one_device(gloo4: RankPool, kind: str, strategy: str, mesh: Any) -> None:
    gloo4.run(trains_equally, kind, strategy, mesh)
