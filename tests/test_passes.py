"""The rewrite, pass by pass: golden text, what moves and how much, and random plans against the single device."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_op import one_op
from programs import Subject, subject
from test_verification import made
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, fx, nn

from autopar._compat import OpOverload
from autopar.cluster import Cluster
from autopar.cost_model.simulate import simulate
from autopar.errors import PlanError
from autopar.factors import FactorAnalysis, analyse
from autopar.graph import InputKind, OutputKind, describe_value
from autopar.mesh import Mesh
from autopar.passes import coalesce, overlap
from autopar.passes.decompose import DECOMPOSITIONS, Writer
from autopar.passes.lower import is_uneven
from autopar.passes.pipeline import rewrite
from autopar.passes.reshard import reshard
from autopar.placement import Placement, Replicate, describe_sharding, is_sharded, shard, shard_dim
from autopar.plan import FactorRef, Plan, Storage
from autopar.program import COLLECTIVE_KINDS, Collective, LocalProgram
from autopar.rules import Call
from autopar.verification import VerifyReport

aten = torch.ops.aten

GOLDEN = Path(__file__).parent / "golden"
REGENERATE = os.environ.get("AUTOPAR_REGENERATE_GOLDEN") == "1"
"""Run the tests once with this set to write the golden files anew, and read the difference before committing it."""

# ---- golden text


class DeepMlp(nn.Module):
    """Four equal matrices and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def line(node: fx.Node, mesh: Mesh) -> str:
    """A node as a call, with its local and global shape and its placement."""
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "placeholder":
        text = f"{node.name} = input"
    else:
        args = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        text = f"{node.name} = {_op_name(node.target)}({', '.join(args)})"
    notes = [describe_value(node.meta.get("val"))]
    if node.meta.get("global_shape") not in (None, tuple(getattr(node.meta.get("val"), "shape", ()))):
        notes.append(f"of {list(node.meta['global_shape'])}")
    sharding = node.meta.get("sharding")
    if sharding is not None and node.target is not reshard:
        several = isinstance(node.meta["val"], (tuple, list))
        notes.append("; ".join(describe_sharding(s, mesh) for s in (sharding if several else [sharding])))
    return f"{text}  # {' '.join(notes)}"


def _op_name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else target.__name__  # type: ignore[no-any-return]


def passes_as_text(ours: Subject, plan: Plan) -> str:
    """The graph after each pass that changed it, then the forward and the backward program."""
    sections: list[tuple[str, str]] = []

    def keep(name: str, module: fx.GraphModule) -> None:
        sections.append((name, graph_text(module, plan.mesh)))

    program = rewrite(ours.joint, plan, keep)
    assert program.backward is not None
    sections += [(f"partition: {name}", graph_text(local.module, plan.mesh))
                 for name, local in (("forward", program.forward), ("backward", program.backward))]  # fmt: skip
    out, before = [], ""
    for name, text in sections:
        out.append(f"== {name} ==\n" + ("(unchanged)\n" if text == before else text))
        before = text
    return "\n".join(out)


def graph_text(module: fx.GraphModule, mesh: Mesh) -> str:
    return "".join(line(node, mesh) + "\n" for node in module.graph.nodes)


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if REGENERATE:
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; AUTOPAR_REGENERATE_GOLDEN=1 writes it anew"


SMALL: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: subject(Mlp(), torch.randn(8, 12)),
    "deep": lambda: subject(DeepMlp(), torch.randn(8, 16)),
}


@pytest.mark.parametrize(
    ("model", "strategy", "sizes"),
    [
        ("mlp", "ddp", (4,)),
        ("mlp", "zero1", (4,)),
        ("deep", "zero3", (4,)),
        ("mlp", "tp", (4,)),
        ("mlp", "fsdp+tp", (2, 2)),
    ],
    ids=str,
)
def test_golden_text(model: str, strategy: str, sizes: tuple[int, ...]) -> None:
    ours = SMALL[model]()
    text = passes_as_text(ours, ours.plan(strategy, *sizes))
    check_golden(f"{model}_{strategy.replace('+', '_')}", text)
    again = SMALL[model]()
    assert passes_as_text(again, again.plan(strategy, *sizes)) == text, "names follow from the graph alone"


# ---- single passes


@pytest.mark.parametrize(
    ("op", "shapes", "args", "kwargs"),
    [
        (aten.addmm.default, [(6,), (4, 5), (5, 6)], [], {}),
        (aten.addmm.default, [(4, 1), (4, 5), (5, 6)], [], {"beta": 2, "alpha": 3}),
        (aten.baddbmm.default, [(3, 4, 6), (3, 4, 5), (3, 5, 6)], [], {"alpha": 0.5}),
        (aten.convolution.default, [(2, 4, 5, 6), (3, 4, 3, 3), (3,)], [[2, 1], [1, 0], [1, 1], False, [0, 0], 1], {}),
        (aten.convolution.default, [(2, 4, 5), (4, 3, 3), (3,)], [[2], [1], [1], True, [1], 1], {}),
        (
            aten.convolution_backward.default,
            [(2, 3, 3, 4), (2, 4, 5, 6), (3, 4, 3, 3)],
            [[3], [2, 1], [1, 0], [1, 1], False, [0, 0], 1, [True, True, True]],
            {},
        ),
        (
            aten.convolution_backward.default,
            [(2, 3, 5), (2, 4, 5), (3, 4, 3)],
            [[3], [1], [1], [1], False, [0], 1, [False, True, True]],
            {},
        ),
        (aten._softmax.default, [(4, 6)], [-1, False], {}),
        (aten._log_softmax.default, [(4, 6, 3)], [1, False], {}),
        (aten._softmax_backward_data.default, [(4, 6), (4, 6)], [-1, torch.float64], {}),
        (aten._log_softmax_backward_data.default, [(4, 6), (4, 6)], [0, torch.float64], {}),
    ],
    ids=str,
)
def test_an_op_taken_apart_gives_the_same(
    op: Any, shapes: list[tuple[int, ...]], args: list[Any], kwargs: dict[str, Any]
) -> None:
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    case = one_op(op, [*tensors, *args], kwargs)
    graph = case.joint.module.graph
    with graph.inserting_before(case.call):
        result = DECOMPOSITIONS[op](Call(case.call), Writer(case.call))
    results = (result,) if isinstance(result, fx.Node) else result
    assert [r.meta["val"].shape for r in results if r] == [e.shape for e in case.expected if e is not None]
    graph.output_node().args = (results,)
    for found, expected in zip(fx.GraphModule(nn.Module(), graph)(*tensors), case.expected, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_ops_are_taken_apart_only_where_the_plan_cuts_them(gpt: Subject) -> None:
    def num_softmaxes(strategy: str, *sizes: int) -> int:
        nodes = program_of(gpt, strategy, *sizes).forward.module.graph.nodes
        return sum(node.target is aten._log_softmax.default for node in nodes)

    assert num_softmaxes("ddp", 4) == 1
    assert num_softmaxes("tp", 4) == 0, "the vocabulary is cut"


def test_a_plan_that_lacks_a_parameter_is_refused(gpt: Subject) -> None:
    plan = gpt.plan("ddp", 4)
    storage = {path: storage for path, storage in plan.storage.items() if path != "norm.bias"}
    with pytest.raises(
        PlanError, match=r"the plan says nothing about parameter 'norm\.bias'; it was made for another model"
    ):
        gpt.program(replace(plan, storage=storage))


# ---- what moves

ROWS, SEQ, VOCAB, WIDTH, HEADS = 8, 8, 64, 16, 4
BLOCKS = ("blocks.0", "blocks.1")
ACTIVATION_BYTES = ROWS * SEQ * WIDTH * 8


@pytest.fixture(scope="module")
def gpt() -> Subject:
    torch.manual_seed(0)
    return subject(TinyGpt(VOCAB, WIDTH, HEADS, layers=2, seq=SEQ), *token_batch(ROWS, SEQ, VOCAB))


@pytest.fixture(scope="module")
def deep() -> Subject:
    return SMALL["deep"]()


def program_of(ours: Subject, strategy: str, *sizes: int) -> LocalProgram:
    return ours.program(ours.plan(strategy, *sizes))


def num_bytes_by_ring(collectives: Iterable[Collective], mesh: Mesh) -> float:
    """Bytes that a rank sends, by the ring formulas."""
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    return sum(rounds[c.kind] * (mesh.size(c.axis) - 1) / mesh.size(c.axis) * c.num_bytes for c in collectives)


def kinds(collectives: Iterable[Collective]) -> dict[str, int]:
    return dict(Counter(c.kind for c in collectives))


def in_block(program: LocalProgram, backward: bool) -> list[list[Collective]]:
    """The collectives of each block in one pass, in order, those that a block shares with its surroundings included."""
    return [
        [c for c in program.collectives() if c.module.startswith(block) and c.backward is backward] for block in BLOCKS
    ]


PARAM_BYTES = 4 * 16 * 16 * 8


@pytest.fixture
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send gradients as large as those of a large model, so each by itself."""
    monkeypatch.setattr(coalesce, "BUCKET_BYTES", 0)


@pytest.mark.usefixtures("_one_by_one")
def test_ddp_moves_twice_the_parameters(deep: Subject) -> None:
    program = program_of(deep, "ddp", 4)
    assert kinds(program.collectives()) == {"all_reduce": 4}
    assert num_bytes_by_ring(program.collectives(), program.mesh) == 2 * 3 / 4 * PARAM_BYTES


@pytest.mark.usefixtures("_one_by_one")
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_1_and_2_move_twice_the_parameters(deep: Subject, strategy: str) -> None:
    program = program_of(deep, strategy, 4)
    assert kinds(program.collectives()) == {"all_gather": 4, "reduce_scatter": 4}
    assert not any(c.kind == "all_gather" and c.backward for c in program.collectives())
    assert num_bytes_by_ring(program.collectives(), program.mesh) == 2 * 3 / 4 * PARAM_BYTES


@pytest.mark.usefixtures("_one_by_one")
def test_zero_3_moves_up_to_three_times_the_parameters(deep: Subject) -> None:
    program = program_of(deep, "zero3", 4)
    assert kinds(c for c in program.collectives() if not c.backward) == {"all_gather": 4}
    # The backward pass needs no gradient of the input, so not the first layer; and it starts with the last, which is
    # kept.
    assert kinds(c for c in program.collectives() if c.backward) == {"all_gather": 2, "reduce_scatter": 4}
    moved = num_bytes_by_ring(program.collectives(), program.mesh)
    assert moved == (2 + 2 / 4) * 3 / 4 * PARAM_BYTES < 3 * 3 / 4 * PARAM_BYTES


def test_zero_3_saves_no_gathered_parameter_and_zero_2_does(deep: Subject) -> None:
    def saved_matrices(strategy: str) -> int:
        forward = program_of(deep, strategy, 4).forward
        pairs = zip(forward.outputs, forward.module.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
        return sum(
            spec.kind is OutputKind.SAVED and tuple(node.meta["val"].shape) == (16, 16) and node.op != "placeholder"
            for spec, node in pairs
        )

    assert saved_matrices("zero3") == 1  # the last layer's
    assert saved_matrices("zero2") == 3


@pytest.mark.usefixtures("_one_by_one")
def test_zero_1_reduces_after_all_computing_and_zero_2_as_gradients_arise(deep: Subject) -> None:
    def places(strategy: str) -> tuple[list[int], int]:
        backward = program_of(deep, strategy, 4).backward
        assert backward is not None
        nodes = list(backward.module.graph.nodes)
        reductions = [i for i, n in enumerate(nodes) if COLLECTIVE_KINDS.get(n.target) == "reduce_scatter"]
        computing = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
        return reductions, max(computing)

    reductions, last = places("zero1")
    assert min(reductions) > last
    reductions, last = places("zero2")
    assert min(reductions) < last < max(reductions)


@pytest.mark.usefixtures("_one_by_one")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_gather_of_a_parameter_starts_before_the_layer_ahead_of_it_computes(deep: Subject, strategy: str) -> None:
    nodes = list(program_of(deep, strategy, 4).forward.module.graph.nodes)
    gathers = [i for i, n in enumerate(nodes) if COLLECTIVE_KINDS.get(n.target) == "all_gather"]
    products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
    assert all(gather < product for gather, product in zip(gathers[1:], products[:-1], strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_small_parameters_travel_together(gpt: Subject, strategy: str) -> None:
    program = program_of(gpt, strategy, 4)
    params = {path: n.meta["val"].numel() * 8 for path, n in gpt.joint.param_nodes().items()}
    largest = max(params.values())
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sent = [c for c in program.collectives() if c.kind == kind and c.backward]
        assert len(sent) < len(params) / 2
        assert all(c.num_bytes <= max(largest, coalesce.BUCKET_BYTES) for c in sent)
    reduced = [c for c in program.collectives() if c.backward and c.kind != "all_gather"]
    assert sum(c.num_bytes for c in reduced) == sum(params.values())


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [(1, 1, [1, 1, 1, 1]), (2, 2, [2, 2]), (1, 2, [1, 2, 1]), (2, 4, [2, 2]), (1, 4, [1, 3]), (8, 8, [4])],
)
def test_gradients_fill_buckets(
    deep: Subject, monkeypatch: pytest.MonkeyPatch, first: int, later: int, expected: list[int]
) -> None:
    matrix = PARAM_BYTES // 4
    monkeypatch.setattr(coalesce, "FIRST_BUCKET_BYTES", first * matrix)
    monkeypatch.setattr(coalesce, "BUCKET_BYTES", later * matrix)
    sent = program_of(deep, "ddp", 4).collectives()
    assert [c.num_bytes for c in sent] == [n * matrix for n in expected]


@pytest.mark.usefixtures("_one_by_one")
def test_hsdp_gathers_inside_and_reduces_across(deep: Subject) -> None:
    found = Counter((c.kind, c.axis) for c in program_of(deep, "hsdp", 2, 2).collectives())
    assert found == {("all_gather", "fsdp"): 6, ("reduce_scatter", "fsdp"): 4, ("all_reduce", "dp"): 4}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_megatron_has_two_all_reduces_a_block_and_pass(gpt: Subject, num_ranks: int) -> None:
    program = program_of(gpt, "tp", num_ranks)
    for backward in (False, True):
        for block in in_block(program, backward):
            assert [(c.kind, c.num_bytes) for c in block] == [("all_reduce", ACTIVATION_BYTES)] * 2
    assert {c.axis for c in program.collectives()} == {"tp"}


def hidden_products(program: LocalProgram) -> list[int]:
    """For each all-reduce of activations in the backward pass the products that run between its start and its wait."""
    assert program.backward is not None
    found, nodes = [], list(program.backward.module.graph.nodes)
    for i, node in enumerate(nodes):
        if COLLECTIVE_KINDS.get(node.target) == "all_reduce" and node.meta["bytes"] == ACTIVATION_BYTES:
            (wait,) = node.users
            found.append(sum(n.target in (aten.mm.default, aten.bmm.default) for n in nodes[i : nodes.index(wait)]))
    return found


def test_products_for_weights_run_while_activations_gradients_are_summed(
    gpt: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(gpt, "tp", 4)
    hidden = hidden_products(program)
    assert len(hidden) == 2 * len(BLOCKS) + 1  # and where the vocabulary is cut
    assert min(hidden) >= 1
    monkeypatch.setattr(overlap, "MOST_HELD", -1)
    plain = program_of(gpt, "tp", 4)
    assert set(hidden_products(plain)) == {0}
    names = [sorted(n.name for n in p.backward.module.graph.nodes) for p in (plain, program)]  # type: ignore[union-attr]
    assert names[0] == names[1]


def test_what_is_computed_meanwhile_keeps_no_more_than_the_collective_allows(
    gpt: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room what runs meanwhile reads only what is there anyway, so that nothing lives longer."""
    peaks = []
    for room in (-1, 0, overlap.MOST_HELD):
        monkeypatch.setattr(overlap, "MOST_HELD", room)
        program = program_of(gpt, "tp", 4)
        peaks.append(simulate(program, Cluster.parse("4xA100-80GB"), "sgd").memory.total)
    assert peaks[0] == peaks[1] <= peaks[2] <= peaks[0] + overlap.MOST_HELD * ACTIVATION_BYTES


def test_the_loss_is_summed_over_the_vocabulary_twice(gpt: Subject) -> None:
    program = program_of(gpt, "tp", 4)
    tokens = ROWS * SEQ * 8
    small = [c for c in program.collectives() if c.kind == "all_reduce" and c.num_bytes < ACTIVATION_BYTES]
    # The maximum; the sum of exponentials with the target's logit.  What the gradient sums to is known.
    assert [(c.num_bytes, c.backward) for c in small] == [(tokens, False), (2 * tokens, False)]


def test_megatron_cuts_heads_ffn_and_vocabulary(gpt: Subject) -> None:
    plan = gpt.plan("tp", 4)
    storage = {path: describe_sharding(storage.sharding, plan.mesh) for path, storage in plan.storage.items()}
    for block in BLOCKS:
        assert storage[f"{block}.qkv.weight"] == "shard(0, split=3)@tp"
        assert storage[f"{block}.qkv.bias"] == "shard(0, split=3)@tp"
        assert storage[f"{block}.out.weight"] == "shard(1)@tp"
        assert storage[f"{block}.up.weight"] == storage[f"{block}.up.bias"] == "shard(0)@tp"
        assert storage[f"{block}.down.weight"] == "shard(1)@tp"
        assert storage[f"{block}.out.bias"] == storage[f"{block}.norm1.weight"] == "replicate"
    assert storage["tokens.weight"] == "shard(0)@tp"


def test_sequence_parallelism_has_the_same_bytes_in_gathers_and_scatters(gpt: Subject) -> None:
    plain, sequence = program_of(gpt, "tp", 4), program_of(gpt, "tp+sp", 4)
    for block, reduced in zip(in_block(sequence, False), in_block(plain, False), strict=True):
        assert [c.kind for c in block] == ["all_gather", "reduce_scatter"] * 2
        assert num_bytes_by_ring(block, sequence.mesh) == num_bytes_by_ring(reduced, plain.mesh)
    for block, reduced in zip(in_block(sequence, True), in_block(plain, True), strict=True):
        large = [c for c in block if c.num_bytes == ACTIVATION_BYTES]
        assert kinds(large) == {"all_gather": 2, "reduce_scatter": 2}
        assert num_bytes_by_ring(large, sequence.mesh) == num_bytes_by_ring(reduced, plain.mesh)
    # The gradients of norms and of biases after a row-parallel product are sums over the sequence, sent together.
    small = [c for c in sequence.collectives() if c.backward and c.kind == "all_reduce"]
    plan = gpt.plan("tp+sp", 4)
    whole = [n for path, n in gpt.joint.param_nodes().items() if not any(map(is_sharded, plan.storage[path].sharding))]
    num_bytes = sum(n.meta["val"].numel() * 8 for n in whole)
    # The table of positions is not cut either.
    assert sum(c.num_bytes for c in small) == num_bytes
    assert len(small) < len(whole) / 2


def test_a_step_has_the_collectives_of_its_plan_in_one_order(gpt: Subject) -> None:
    plan = gpt.plan("fsdp+tp", 2, 2)
    first, second = gpt.program(plan), gpt.program(plan)
    assert first.collectives() == second.collectives()
    assert first.fingerprint() == second.fingerprint()


def test_placements_and_shapes_are_on_every_node(gpt: Subject) -> None:
    for strategy, sizes in [("zero3", (4,)), ("tp+sp", (4,)), ("fsdp+tp", (2, 2))]:
        program = program_of(gpt, strategy, *sizes)
        for local in (program.forward, program.backward):
            assert local is not None
            assert (
                len(local.inputs) == len(local.module.graph.find_nodes(op="placeholder")) == len(local.input_shardings)
            )
            for node in local.module.graph.nodes:
                if node.op != "output":
                    assert {"val", "module", "backward", "sharding"} <= set(node.meta), node
                if node.target in COLLECTIVE_KINDS:
                    (wait,) = node.users
                    assert wait.target is torch.ops._c10d_functional.wait_tensor.default
                    assert node.args[-1] in program.mesh.names


def test_gradients_come_out_as_their_parameters_rest(gpt: Subject) -> None:
    for strategy, sizes in [("ddp", (4,)), ("zero1", (4,)), ("zero3", (4,)), ("tp", (4,)), ("fsdp+tp", (2, 2))]:
        plan = gpt.plan(strategy, *sizes)
        program = gpt.program(plan)
        assert program.backward is not None
        for spec, sharding in zip(program.backward.outputs, program.backward.output_shardings, strict=True):
            assert sharding == plan.storage[spec.path].sharding
        specs = zip(program.forward.inputs, program.forward.input_shardings, strict=True)
        assert all(s == plan.storage[i.path].sharding for i, s in specs if i.kind is InputKind.PARAM)


# ---- any plan computes what the single device does


def random_plan(rng: random.Random, ours: Subject, analysis: FactorAnalysis, mesh: Mesh) -> Plan:
    """Cut anything along anything, and rest parameters anyhow: one axis may cut a dim that it does not divide."""
    anchors = {**ours.joint.param_nodes(), **{a: n for a, n in analysis.anchors.items() if a.startswith("input:")}}
    refs = [
        FactorRef(anchor, dim, part)
        for anchor, node in anchors.items()
        for dim in range(node.meta["val"].dim())
        for part in range(len(analysis.dim_factors(node, dim)))
    ]
    factors = tuple(tuple(rng.sample(refs, min(len(refs), rng.randint(0, 6)))) for _ in mesh.sizes)
    storage = {
        path: Storage(random_rest(rng, tuple(node.meta["val"].shape), mesh), regather=rng.random() < 0.5)
        for path, node in ours.joint.param_nodes().items()
    }
    return Plan(
        "random",
        mesh,
        factors,
        storage,
        delay_reduction=rng.random() < 0.2,
        prefetch=rng.choice((0, 2, 8)),
        overlap=rng.random() < 0.5,
    )


def random_rest(rng: random.Random, shape: tuple[int, ...], mesh: Mesh) -> tuple[Placement, ...]:
    resting: tuple[Placement, ...] = (Replicate(),) * mesh.num_axes
    uneven_dim: int | None = None
    for axis in range(mesh.num_axes):
        if not shape or rng.random() < 0.4:
            continue
        dim = rng.randrange(len(shape))
        wanted = (*resting[:axis], shard(dim), *resting[axis + 1 :])
        taken = any(is_sharded(p) and shard_dim(p) == dim for p in resting)
        if dim == uneven_dim:
            continue
        if is_uneven(wanted, axis, shape, mesh):
            if taken or uneven_dim is not None:
                continue
            uneven_dim = dim
        resting = wanted
    return resting


MESHES = [Mesh(("a",), (2,)), Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2)), Mesh(("a", "b"), (4, 2)),
          Mesh(("a", "b", "c"), (2, 2, 2))]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_plans"),
    [("mlp", 25), ("several outputs", 25), ("tied", 15), ("frozen", 15), ("attention", 25), ("llama", 12),
     ("odd sizes", 12), ("dropout", 6), ("eight heads", 12)],
)  # fmt: skip
def test_random_plans_equal_the_single_device(name: str, num_plans: int) -> None:
    ours = made(name)
    analysis = analyse(ours.joint)
    wrong: list[tuple[int, VerifyReport]] = []
    for seed in range(num_plans):
        rng = random.Random(seed)
        plan = random_plan(rng, ours, analysis, rng.choice(MESHES))
        report = ours.compare(ours.program(plan), plan)
        if not report.ok:
            wrong.append((seed, report))
    assert wrong == []
