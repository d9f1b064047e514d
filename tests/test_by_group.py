"""Experts of sorted rows on the ranks that hold them: each takes the rows of its own, however many there are."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_op import assert_same, assignment_of, lowered, one_op
from pool import RankPool
from programs import Subject, subject
from test_mutants import collectives, drop, edited, is_told
from test_parallelize import mine, whole
from test_row_order import NUM_EXPERTS, Mixture, Sorts, mixture, tokens
from torch import Tensor, fx, nn

import autopar
from autopar.export_text import program_text
from autopar.factors import analyse
from autopar.layouts import Layout, storages
from autopar.mesh import Mesh
from autopar.passes.propagate import Assignment, Cut
from autopar.placement import ROWS_MARGIN, ByGroup, Partial, Replicate, Shard, describe_sharding, is_uneven, local_shape
from autopar.plan import EXPERTS, SENT, FactorRef, Plan
from autopar.program import COLLECTIVE_KINDS, LocalProgram
from autopar.rules import tensor_inputs
from autopar.runtime.lockstep import run_lockstep
from autopar.strategies import batch_refs, expert_refs, tensor_parallel_factors

ours = torch.ops.autopar


def plan_on(one: Subject, mesh: Mesh, *factors: tuple[FactorRef, ...], mode: str = "whole") -> Plan:
    """The plan that cuts so, with parameters that rest as they are used or cut further."""
    layout = Layout("by hand", mesh, factors)
    return layout.plan({path: modes[mode] for path, modes in storages(one.joint, layout).items()}, {})


def experts(one: Subject, num_ranks: int) -> tuple[FactorRef, ...]:
    return expert_refs(one.joint, analyse(one.joint), num_ranks)


def expert_plan(one: Subject, sizes: tuple[int, ...], label: str = EXPERTS, mode: str = "whole") -> Plan:
    """Experts along the last axis, the batch along all; `label` says how rows come to their experts."""
    batch = batch_refs(one.joint)
    refs = tuple(replace(ref, label=label) for ref in experts(one, sizes[-1]))
    mesh = Mesh(("dp", "ep")[-len(sizes) :], sizes)
    return plan_on(one, mesh, *[batch] * (len(sizes) - 1), (*refs, *batch), mode=mode)


EITHER_WAY = pytest.mark.parametrize("label", [EXPERTS, SENT])


def products(program: LocalProgram) -> list[fx.Node]:
    nodes = program.forward.module.graph.nodes
    return [node for node in nodes if node.target is ours.grouped_mm.default]


def by_group(program: LocalProgram) -> set[str]:
    """The axes along which products have rows by group."""
    names = program.mesh.names
    shardings = [node.args[0].meta["sharding"] for node in products(program)]
    return {name for sharding in shardings for name, p in zip(names, sharding, strict=True) if isinstance(p, ByGroup)}


def assert_equal(one: Subject, plan: Plan, axes: set[str], num_steps: int = 3) -> LocalProgram:
    program = one.program(plan)
    assert by_group(program) == axes
    report = one.compare(program, plan, num_steps)
    assert report.ok, str(report)
    return program


# ---- the ops that a rank's own rows come from


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_blocks", "length", "num_groups"), [(1, 12, 4), (3, 8, 4), (2, 6, 6), (2, 1, 2)])
def test_own_orders_part_all_rows(seed: int, num_blocks: int, length: int, num_groups: int) -> None:
    """Each row is in the order of just one rank, with its group; an order of all groups sorts all blocks at once."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(num_groups - seed % 2, (num_blocks, length), generator=generator)
    ids, order = ids.sort(stable=True, dim=1)
    ends = ours.group_ends(ids, num_groups)
    unsorted = torch.empty_like(ids).scatter_(1, order, ids).flatten()
    for num_ranks in (n for n in (1, 2, 3) if num_groups % n == 0):
        share, seen = num_groups // num_ranks, []
        for first in range(0, num_groups, share):
            own = ours.own_order(order, ends, first, share)
            bounds = [0, *ours.own_ends(ends, first, share)[0].tolist()]
            assert own.shape == (1, bounds[-1])
            for i, (start, end) in enumerate(itertools.pairwise(bounds)):
                assert (unsorted[own[0, start:end]] == first + i).all()
            seen += own[0].tolist()
        assert sorted(seen) == list(range(num_blocks * length))


BLOCKS, LENGTH, COPIES = 4, 6, 2
"""Two blocks for each of two ranks, as no model's plan has them."""


def one_call(op: Any, *args: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A call in blocks of rows of four groups, with its order, its ends, and the rows' places by group."""
    ids = torch.randint(NUM_EXPERTS, (BLOCKS, LENGTH), generator=torch.Generator().manual_seed(0))
    ids, order = ids.sort(stable=True, dim=1)
    ends = ours.group_ends(ids, NUM_EXPERTS)
    known = {"order": order, "ends": ends}
    case = one_op(op, [known.get(arg, arg) if isinstance(arg, str) else arg for arg in args], {})
    return case, order, ends, ours.own_order(order, ends, 0, NUM_EXPERTS)[0]


def run_by_group(case: Any, sent: bool, inputs: list[list[Tensor]]) -> tuple[list[Tensor], Any]:
    """Each rank's result of a call that is cut by group over two ranks."""
    mesh = Mesh(("ep",), (2,))
    assignment = assignment_of(case, mesh, [Cut("p", 1, by_group=True, sent=sent)])
    made = assignment.nodes[case.call]
    given = dict(zip(tensor_inputs(case.call), made.inputs, strict=True))
    nodes = {**assignment.nodes, **{n: replace(assignment.nodes[n], outputs=(s,)) for n, s in given.items()}}
    wanted = tuple(made.outputs[0] for _ in assignment.wanted)
    graph = lowered(case, mesh, Assignment(nodes, wanted))
    found = run_lockstep(graph, mesh, [[*values, rank] for rank, values in enumerate(inputs)])
    return [outputs[0] for outputs in found.outputs], made


SENT_OR_NOT = pytest.mark.parametrize("sent", [False, True])


@SENT_OR_NOT
def test_a_take_gives_each_rank_the_rows_of_its_groups(sent: bool) -> None:
    table = torch.randn(BLOCKS * LENGTH // COPIES, 3, dtype=torch.float64)
    case, order, ends, places = one_call(ours.take_rows.default, table, "order", COPIES, "ends")
    parts = [table.chunk(2), order.chunk(2)] if sent else [[table] * 2, [order] * 2]
    found, made = run_by_group(case, sent, [[parts[0][rank], parts[1][rank], ends] for rank in range(2)])
    assert made.outputs == ((ByGroup(0),),)
    torch.testing.assert_close(torch.cat(found), table[places // COPIES], rtol=0, atol=0)


@SENT_OR_NOT
@pytest.mark.parametrize("copies", [1, COPIES])
def test_a_put_brings_each_rank_its_part(sent: bool, copies: int) -> None:
    rows = torch.randn(BLOCKS * LENGTH, 3, dtype=torch.float64)
    case, order, ends, places = one_call(ours.put_rows.default, rows, "order", copies, "ends")
    by_place = torch.empty_like(rows)
    by_place[(order + LENGTH * torch.arange(BLOCKS)[:, None]).flatten()] = rows
    sizes = [int(ours.own_ends(ends, first, NUM_EXPERTS // 2)[0, -1]) for first in (0, NUM_EXPERTS // 2)]
    own, orders = by_place[places].split(sizes), order.chunk(2) if sent else [order] * 2
    found, made = run_by_group(case, sent, [[own[rank], orders[rank], ends] for rank in range(2)])
    assert made.outputs == (((Shard(0),) if sent else (Partial("sum"),)),)
    expected = by_place.view(-1, copies, 3).sum(1)
    assert_same(torch.cat(found) if sent else found[0] + found[1], expected, "put back")


@pytest.mark.parametrize("contracted", [False, True])
def test_products_are_of_a_ranks_own_groups(contracted: bool) -> None:
    rows, right = torch.randn(BLOCKS * LENGTH, 3, dtype=torch.float64), torch.randn(BLOCKS * LENGTH, 5).double()
    weights = torch.randn(NUM_EXPERTS, 3, 5, dtype=torch.float64)
    operands = (rows.T, right) if contracted else (rows, weights)
    case, order, ends, places = one_call(ours.grouped_mm.default, *operands, "ends")
    in_order = (order + LENGTH * torch.arange(BLOCKS)[:, None]).flatten().argsort()[places]
    sizes = [int(ours.own_ends(ends, first, NUM_EXPERTS // 2)[0, -1]) for first in (0, NUM_EXPERTS // 2)]
    own, others = rows[in_order].split(sizes), right[in_order].split(sizes) if contracted else weights.chunk(2)
    given = [[own[r].T if contracted else own[r], others[r], ends] for r in range(2)]
    found, made = run_by_group(case, False, given)
    assert made.outputs == ((Shard(0) if contracted else ByGroup(0),),)
    assert_same(torch.cat(found), case.expected[0] if contracted else case.expected[0][in_order], "product")


def test_rows_by_group_are_priced_with_a_margin() -> None:
    mesh = Mesh(("dp", "ep"), (2, 4))
    sharding = (Shard(0), ByGroup(0))
    assert local_shape((96, 5), sharding, mesh) == (96 // 2 * ROWS_MARGIN / 4, 5)
    assert local_shape((96, 5), (ByGroup(0), ByGroup(0)), mesh) == (96 * ROWS_MARGIN / 8, 5)
    assert local_shape((3,), (Replicate(), ByGroup(0)), mesh) == (1,)
    assert not any(is_uneven(sharding, axis, (98, 5), mesh) for axis in range(2))
    assert describe_sharding(sharding, mesh) == "shard(0)@dp, by_group(0)@ep"


# ---- whole models


@EITHER_WAY
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [pytest.param((2,), "whole", marks=pytest.mark.slow), ((4,), "whole"), ((2, 2), "regathered")],
)
def test_mixtures_equal_the_single_device(kind: str, sizes: tuple[int, ...], mode: str, label: str) -> None:
    one = subject(mixture(kind), input_ids=tokens(), labels=tokens())
    program = assert_equal(one, expert_plan(one, sizes, label, mode), {"ep"})
    ends = {tuple(node.args[2].meta["val"].shape) for node in products(program)}
    assert ends == {(1, (8 if kind == "DeepseekV3" else 4) // sizes[-1])}
    kinds = Counter(c.kind for c in program.collectives() if c.axis == "ep")
    assert (kinds["all_to_all"] > 0) is (label == SENT)


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_experts_where_tokens_are_whole(kind: str) -> None:
    """As tensor parallelism has it: no rank sends rows, and one sum brings them together."""
    one = subject(mixture(kind), input_ids=tokens(), labels=tokens())
    batch = batch_refs(one.joint)
    assert_equal(one, plan_on(one, Mesh(("dp", "tp"), (2, 2)), batch, experts(one, 2)), {"tp"})
    for refs in tensor_parallel_factors(one.joint, analyse(one.joint), 2):
        if any(ref.label == EXPERTS for ref in refs):
            program = assert_equal(one, plan_on(one, Mesh(("tp",), (2,)), refs), {"tp"}, num_steps=0)
            moved = [n.args[0] for n in collectives(program.forward.module.graph)]
            assert not any(isinstance(p, ByGroup) for n in moved for p in n.meta["sharding"] or ())  # type: ignore[union-attr]
            break
    else:
        pytest.fail("tensor parallelism does not look at experts")


@pytest.fixture(scope="module", name="one")
def _one() -> Subject:
    torch.manual_seed(0)
    return subject(Mixture(), torch.randn(8, 5, 8))


@EITHER_WAY
@pytest.mark.parametrize("names", [("ep", "dp"), ("dp", "ep")])
def test_experts_along_either_axis(one: Subject, names: tuple[str, str], label: str) -> None:
    """Rows are sent along the inner axis alone: along an outer one, whose ranks' rows of the batch lie further apart,
    they are gathered."""
    batch = batch_refs(one.joint)
    refs = tuple(replace(ref, label=label) for ref in experts(one, 2))
    cut = {"ep": (*refs, *batch), "dp": batch}
    program = assert_equal(one, plan_on(one, Mesh(names, (2, 2)), *(cut[name] for name in names)), {"ep"})
    is_sent = any(c.kind == "all_to_all" for c in program.collectives())
    assert is_sent is (label == SENT and names[1] == "ep")


def test_rows_are_not_sent_where_all_tokens_are_there(one: Subject) -> None:
    refs = tuple(replace(ref, label=SENT) for ref in experts(one, 2))
    program = assert_equal(one, plan_on(one, Mesh(("ep",), (2,)), refs), {"ep"})
    assert not any(c.kind == "all_to_all" for c in program.collectives())


def test_only_rows_and_counts_travel(one: Subject) -> None:
    """There and back, and once more in the backward pass: rows, and what weighs each of them; beside them the ends."""
    program = one.program(expert_plan(one, (4,), SENT))
    found = [(c.kind, c.backward) for c in program.collectives()]
    assert Counter(found)["all_to_all", False] == 3  # rows, their weights, and what is made of them
    gathered = [n for n in collectives(program.forward.module.graph) if COLLECTIVE_KINDS[n.target] == "all_gather"]
    assert [(n.meta["val"].dtype, n.meta["val"].numel()) for n in gathered] == [(torch.int32, 4 * NUM_EXPERTS)]


@pytest.mark.parametrize("beside", [False, True])
def test_experts_along_both_axes(one: Subject, beside: bool) -> None:
    refs = experts(one, 2)
    inner = (*(replace(ref, label=SENT) for ref in refs), *batch_refs(one.joint)) if beside else refs
    program = assert_equal(one, plan_on(one, Mesh(("a", "b"), (2, 2)), inner, inner), {"a", "b"})
    assert {n.args[1].meta["val"].shape[0] for n in products(program)} == {1}


def test_rows_lie_by_group_until_they_are_put_back(one: Subject) -> None:
    """What is between the take and the put is a rank's own; what is put back is summed there, before ranks sum it."""
    program = one.program(expert_plan(one, (4,)))
    nodes = program.forward.module.graph.nodes
    puts = [n for n in nodes if n.target is ours.put_rows.default]
    assert [(put.args[2], put.kwargs["num_places"]) for put in puts] == [(2, 40)]
    orders = {n.args[1] for graph in program.graphs for n in graph.module.graph.nodes if n.target in MOVES}
    assert {node.name for node in orders} == {"own_order_default"}, "one order for all that move rows"


MOVES = {ours.take_rows.default, ours.put_rows.default}


class Skewed(Mixture):
    """Routes all tokens to some experts, whichever they are told."""

    def __init__(self, favoured: tuple[int, ...]) -> None:
        super().__init__()
        favour = torch.tensor([100.0 * (i in favoured) for i in range(NUM_EXPERTS)])
        self.register_buffer("favour", favour)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(rows)
        _, chosen = (logits + self.favour).topk(2, dim=-1)
        return logits.softmax(-1).gather(1, chosen), chosen


@EITHER_WAY
@pytest.mark.parametrize("favoured", [(0, 1), (2, 3), (3,), (1, 2)])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_ranks_may_have_no_rows_or_all(favoured: tuple[int, ...], sizes: tuple[int, ...], label: str) -> None:
    torch.manual_seed(0)
    one = subject(Skewed(favoured), torch.randn(8, 5, 8))
    assert_equal(one, expert_plan(one, sizes, label), {"ep"})


@EITHER_WAY
def test_experts_may_have_biases(label: str) -> None:
    torch.manual_seed(0)
    one = subject(Sorts(), torch.randn(8, 5, 8))
    assert_equal(one, expert_plan(one, (2, 2), label), {"ep"})


class Views(Mixture):
    """Rows in other shapes, constants for so many, and sizes that ops are told: slices, new dims, repeated columns."""

    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        wide = hidden.unflatten(1, (3, 4)).transpose(1, 2).flatten(1)
        first = F.pad(wide[:, :6], (0, 6)) + wide.sum(1, keepdim=True).expand(-1, 12)
        scaled = first * torch.full((len(hidden), 1), 0.7, dtype=hidden.dtype)
        return scaled + hidden.split(4, dim=1)[1].repeat_interleave(3, 1)


@EITHER_WAY
def test_sizes_that_ops_are_told_are_those_of_the_step(label: str) -> None:
    torch.manual_seed(0)
    one = subject(Views(), torch.randn(8, 5, 8))
    assert_equal(one, expert_plan(one, (4,), label), {"ep"})


# ---- what cannot be cut so, and stays whole


class Alone(Mixture):
    """A constant that meets no rows before it is put back with theirs."""

    def put(self, out: Tensor, order: Tensor) -> Tensor:
        return super().put(out, order) + super().put(torch.ones_like(out).cos(), order)


class Largest(Mixture):
    """A maximum over all rows, of which a rank may have none."""

    def activate(self, hidden: Tensor, sorted_ids: Tensor, order: Tensor) -> Tensor:
        return F.silu(hidden) / hidden.detach().abs().amax()


@pytest.mark.parametrize("kind", [Alone, Largest])
def test_groups_whose_rows_cannot_be_parted_stay_whole(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    one = subject(kind(), torch.randn(8, 5, 8))
    assert_equal(one, expert_plan(one, (2,)), set())


def test_groups_stay_whole_where_another_axis_parts_the_products(one: Subject) -> None:
    """Rows that the other axis has whole for one product and cut for the next could not be brought from one to the
    other."""
    widths = tuple(FactorRef(name, dim, 0, "ffn") for name, dim in (("up", 2), ("down", 1)))
    plan = plan_on(one, Mesh(("tp", "ep"), (2, 2)), (*widths, *batch_refs(one.joint)), experts(one, 2))
    assert_equal(one, plan, set())


def test_experts_that_ranks_do_not_divide_stay_whole(one: Subject) -> None:
    assert experts(one, 3) == ()
    refs = experts(one, 2)
    three = subject(Mixture(), torch.randn(9, 5, 8))
    assert_equal(three, plan_on(three, Mesh(("ep",), (3,)), refs), set(), num_steps=0)
    assert_equal(one, plan_on(one, Mesh(("a", "b"), (4, 2)), refs, refs), {"a"}, num_steps=0)


# ---- what could go wrong unseen


@EITHER_WAY
def test_a_dropped_collective_is_told(one: Subject, label: str) -> None:
    plan = expert_plan(one, (2, 2), label)
    program = one.program(plan)
    assert one.compare(program, plan).ok
    for backward, local in enumerate(program.graphs):
        for i in range(len(collectives(local.module.graph))):
            mutant = edited(program, bool(backward), lambda graph, found, i=i: drop(graph, found[i]))
            assert is_told(one, plan, mutant), f"collective {i} of {'backward' if backward else 'forward'} dropped"


def test_the_rows_of_another_rank_are_told(one: Subject) -> None:
    plan = expert_plan(one, (2,))

    def take_others(graph: Any, found: Any) -> None:
        node = next(n for n in graph.nodes if n.target is ours.own_order.default)
        node.args = (*node.args[:2], 0, node.args[3])

    assert is_told(one, plan, edited(one.program(plan), False, take_others))


# ---- plans


@pytest.mark.parametrize(("shape", "num_per_token", "label"), [((8, 256), 8, EXPERTS), ((32, 1024), 1, SENT)])
def test_auto_chooses_experts_where_they_cost_least(shape: tuple[int, int], num_per_token: int, label: str) -> None:
    """Gathering such weights, or summing their gradients, would take longer than bringing so few tokens together; of
    many tokens, each with one expert, rows are sent."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024, hidden_size=2048, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        num_experts=128, num_experts_per_tok=num_per_token, moe_intermediate_size=768,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.empty(shape, dtype=torch.long)
    plan = autopar.plan(model, "8 H100-80GB", example_inputs={"input_ids": ids, "labels": ids}, precision="bf16")
    labels = [{ref.label for ref in refs} for refs in plan.factors]
    axes = [name for name, found in zip(plan.mesh.names, labels, strict=True) if label in found]
    assert axes, str(plan)
    assert plan.report is not None
    assert plan.report.by_group == tuple(axes)
    assert f"Along {axes[0]} each rank has the rows of its own experts; time and memory are predicted" in str(plan)
    assert f"experts@{axes[0]}" in str(plan)
    assert f"cut along {axes[0]}: {label} (" in str(replace(plan, report=None))


def test_the_exported_program_reads_as_it_runs(one: Subject) -> None:
    """What only the step knows is in the text as a call."""
    plan = expert_plan(one, (2,))
    text = program_text(one.program(plan), plan).text
    assert "own_order.default(" in text
    assert "by_group(0)@ep" in text


# ---- processes


def skewed_mixture(skewed: bool) -> nn.Module:
    """A mixture of DeepSeek's kind; if it is skewed, its first two experts get all rows."""
    model = mixture("DeepseekV3")
    for name, buffer in model.named_buffers():
        if skewed and name.endswith("e_score_correction_bias"):
            buffer[:2] = 100.0
    return model


def trains_with_experts(plan: Plan, skewed: bool) -> list[str]:
    """Three steps on this rank's rows and on one device beside it; returns what was warned of."""
    model = skewed_mixture(skewed)
    reference, ids, (rows,) = copy.deepcopy(model), tokens(), mine(tokens())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batch = {"input_ids": rows, "labels": rows}
        pm = autopar.parallelize(model, "x".join(map(str, plan.mesh.sizes)), 1.0, strategy=plan, example_inputs=batch)
        program = pm.compiled_steps[-1].program if pm.compiled_steps else None
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2) for m in (pm, reference)]
        for _ in range(3):
            losses = pm(**batch).loss, reference(input_ids=ids, labels=ids).loss
            torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-4, atol=1e-5)
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert program is None or by_group(program) == {"ep"}
    for (name, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
        # float32, which is all that the single device's kernel has: sums over ranks are made in another order
        torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=1e-4, atol=1e-5, msg=name)
    return [str(warning.message) for warning in said if "rows belong to groups" in str(warning.message)]


@pytest.mark.parametrize(
    ("sizes", "skewed", "label"),
    [((4,), False, EXPERTS), pytest.param((2, 2), True, EXPERTS, marks=pytest.mark.slow), ((2, 2), True, SENT)],
)
def test_experts_train_on_processes(gloo4: RankPool, sizes: tuple[int, ...], skewed: bool, label: str) -> None:
    plan = expert_plan(subject(skewed_mixture(skewed), input_ids=tokens(), labels=tokens()), sizes, label)
    said = gloo4.run(trains_with_experts, plan, skewed, timeout_s=300.0)
    if skewed:  # the first rank of each pair has all rows of its pair, the second none
        assert [len(texts) for texts in said] == [1, 0, 1, 0], said
        assert "model.layers.1.mlp.experts: 48 rows belong to groups 0 to 3, which this rank holds" in said[0][0]
        assert "predicted for at most 30, 1.25 times an even share" in said[0][0]
