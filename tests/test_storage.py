"""Parameters that rest cut along both axes of a mesh: how they are cut, what moves and when, and that they train as on
one device."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from pool import RankPool
from programs import Subject, subject
from test_parallelize import mine, train, whole
from test_passes import DeepMlp, check_golden, passes_as_text
from test_uneven import Classifier
from tiny_models import Mlp, TinyGpt, token_batch
from torch import fx, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.layouts import Layout, find_layouts, storages
from autopar.mesh import Mesh
from autopar.passes import coalesce
from autopar.placement import describe_sharding, local_shape, replicated, shard
from autopar.plan import Plan, Storage
from autopar.plan_file import check_plan_matches
from autopar.program import COLLECTIVE_KINDS, LocalProgram, collective_axis
from autopar.strategies import cut_at_rest_along

GRID = Mesh(("dp", "fsdp"), (2, 2))


def layout_of(ours: Subject, name: str, *sizes: int) -> Layout:
    found = find_layouts(ours.joint, sizes, sizes[-1])
    return next(one for one in found if one.name == name and one.mesh.sizes == sizes)


def spread(ours: Subject, *sizes: int, regather: bool = True, name: str = "data, in groups") -> Plan:
    """The plan in which all parameters rest cut along both axes."""
    layout = layout_of(ours, name, *sizes)
    modes = storages(ours.joint, layout)
    rest = {path: dataclasses.replace(found["spread"], regather=regather) for path, found in modes.items()}
    return layout.plan(rest, {})


@pytest.mark.parametrize(
    ("shape", "mesh", "expected"),
    [
        ((16, 6), GRID, "shard(0, split=2)@dp, shard(0)@fsdp"),  # inside the parts of the inner axis
        ((6, 8), GRID, "shard(1)@dp, shard(0)@fsdp"),  # these have 3 rows each
        ((7, 8), GRID, "shard(1, split=2)@dp, shard(1)@fsdp"),
        ((7, 5), GRID, "shard(1)@dp, shard(0)@fsdp"),  # nothing divides: each axis its own dim
        ((6,), GRID, "shard(0)@fsdp"),
        ((7,), GRID, "shard(0)@fsdp"),
        ((), GRID, "replicate"),
        ((0, 4), GRID, "shard(1, split=2)@dp, shard(1)@fsdp"),
        ((16, 6), Mesh(("dp", "fsdp"), (3, 8)), "shard(1)@dp, shard(0)@fsdp"),
    ],
)
def test_the_outer_axis_cuts_inside_the_parts_of_the_inner_one(
    shape: tuple[int, ...], mesh: Mesh, expected: str
) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(shape, device="meta")
    found = cut_at_rest_along(node, replicated(mesh), (1, 0), mesh)
    assert describe_sharding(found, mesh) == expected


def test_a_dim_cut_by_a_factor_inside_it_is_not_cut_again() -> None:
    """PyTorch's DTensor has no name for two splits of one dim."""
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(36, 8, device="meta")
    found = cut_at_rest_along(node, (replicated(GRID)[0], shard(0, split=3)), (0,), GRID)
    assert describe_sharding(found, GRID) == "shard(1)@dp, shard(0, split=3)@fsdp"


@pytest.fixture(scope="module")
def gpt() -> Subject:
    torch.manual_seed(0)
    return subject(TinyGpt(), *token_batch(8))


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=str)
def test_a_rank_holds_its_share_and_computes_what_a_single_device_does(
    gpt: Subject, sizes: tuple[int, int], regather: bool
) -> None:
    plan = spread(gpt, *sizes, regather=regather)
    params = {path: tuple(node.meta["val"].shape) for path, node in gpt.joint.param_nodes().items()}
    held = {path: local_shape(params[path], rest.sharding, plan.mesh) for path, rest in plan.storage.items()}
    shares = {path: torch.Size(params[path]).numel() // torch.Size(held[path]).numel() for path in params}
    assert set(shares.values()) == {plan.mesh.num_ranks}
    report = gpt.compare(gpt.program(plan), plan, num_steps=1)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["tensor, batch between", "tensor, sequence between"])
def test_what_is_cut_for_computing_rests_cut_along_the_other_axis_too(gpt: Subject, name: str) -> None:
    plan = spread(gpt, 2, 2, name=name)
    words = {path: describe_sharding(rest.sharding, plan.mesh) for path, rest in plan.storage.items()}
    assert "@dp" in words["blocks.0.up.weight"]
    assert "@tp" in words["blocks.0.up.weight"]
    report = gpt.compare(gpt.program(plan), plan)
    assert report.ok, str(report)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(("width", "classes"), [(33, 65), (34, 66), (31, 10)])
def test_sizes_that_do_not_divide(width: int, classes: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = subject(Classifier(width, classes), torch.randn(8, 12), torch.arange(8))
    plan = spread(ours, *sizes)
    report = ours.compare(ours.program(plan), plan)
    assert report.ok, str(report)


def test_equal_parts_may_be_cut_again_unevenly() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 6))
    ours = subject(layers, torch.randn(8, 10))
    both = Storage((shard(0), shard(0)))
    plan = Plan("by hand", GRID, ((), ()), dict.fromkeys(ours.joint.param_nodes(), both))
    check_plan_matches(plan, ours.joint)
    report = ours.compare(ours.program(plan), plan, num_steps=1)
    assert report.ok, str(report)


def test_golden_text() -> None:
    ours = subject(Mlp(), torch.randn(8, 12))
    check_golden("mlp_spread", passes_as_text(ours, spread(ours, 2, 2)))


# ------------------------------------------------------------------------------------------------ what moves, and when

MATRIX = 16 * 16 * 8


@pytest.fixture
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send parameters as large as those of a large model, so each by itself."""
    monkeypatch.setattr(coalesce, "BUCKET_BYTES", 0)


def deep_program() -> LocalProgram:
    ours = subject(DeepMlp(), torch.randn(8, 16))
    return ours.program(spread(ours, 2, 2))


@pytest.mark.usefixtures("_one_by_one")
def test_the_outer_axis_moves_a_part_and_the_inner_one_the_whole() -> None:
    found = Counter((c.kind, c.axis, c.num_bytes) for c in deep_program().collectives())
    assert found == {
        ("all_gather", "dp", MATRIX // 2): 6,
        ("all_gather", "fsdp", MATRIX): 6,
        ("reduce_scatter", "fsdp", MATRIX): 4,
        ("reduce_scatter", "dp", MATRIX // 2): 4,
    }


@pytest.mark.usefixtures("_one_by_one")
def test_both_gathers_of_a_parameter_start_before_the_layer_ahead_of_it_computes() -> None:
    """And both reductions of a gradient are under way while later layers compute."""
    forward, backward = deep_program().graphs
    nodes = list(forward.module.graph.nodes)
    products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
    for axis in ("dp", "fsdp"):
        gathers = [i for i, n in enumerate(nodes) if is_collective(n, "all_gather", axis)]
        assert all(gather < product for gather, product in zip(gathers[1:], products[:-1], strict=True)), axis
    nodes = list(backward.module.graph.nodes)
    waits = {n.all_input_nodes[0]: i for i, n in enumerate(nodes) if n.target is coalesce.WAIT}
    products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
    first = [i for i, n in enumerate(nodes) if is_collective(n, "reduce_scatter", "fsdp")]
    assert sum(any(start < p < waits[nodes[start]] for p in products) for start in first) == len(first) - 1


def is_collective(node: fx.Node, kind: str, axis: str) -> bool:
    return COLLECTIVE_KINDS.get(node.target) == kind and collective_axis(node) == axis


def test_buckets_hold_collectives_of_one_axis_and_stage(gpt: Subject) -> None:
    program = gpt.program(spread(gpt, 2, 2))
    found = Counter((c.kind, c.axis) for c in program.collectives() if c.backward and c.kind != "all_reduce")
    assert found == {(kind, axis): 1 for kind in ("all_gather", "reduce_scatter") for axis in GRID.names}


# -------------------------------------------------------------------------------------------------- on four processes


def trains_and_is_saved(path: str) -> None:
    torch.manual_seed(0)
    model = TinyGpt().double()
    plan = spread(subject(copy.deepcopy(model), *token_batch(8)), 2, 2)
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, "2x2", strategy=plan, example_inputs=mine(*token_batch(8)))
    for parameter in pm.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() * 4 == parameter.numel()
    found = train(pm, lambda step: mine(*token_batch(8, seed=step)))
    expected = train(reference, lambda step: token_batch(8, seed=step))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=0)
    same(pm, reference)
    autopar.save_checkpoint(path, pm)


def is_loaded(path: str, strategy: str) -> None:
    torch.manual_seed(1)
    model = TinyGpt().double()
    plan = spread(subject(copy.deepcopy(model), *token_batch(8)), 2, 2) if strategy == "spread" else strategy
    pm = autopar.parallelize(model, "2x2", strategy=plan, example_inputs=mine(*token_batch(8)))
    autopar.load_checkpoint(path, pm)
    torch.manual_seed(0)
    reference = TinyGpt().double()
    train(reference, lambda step: token_batch(8, seed=step))
    same(pm, reference)


def same(pm: nn.Module, reference: nn.Module) -> None:
    expected = reference.state_dict()
    for name, value in pm.state_dict().items():
        torch.testing.assert_close(whole(value), expected[name], rtol=0, atol=1e-9)


def test_it_trains_as_on_one_device_and_any_plan_loads_it(gloo4: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    gloo4.run(trains_and_is_saved, path)
    for strategy in ("spread", "fsdp+tp"):
        gloo4.run(is_loaded, path, strategy)
