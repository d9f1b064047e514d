"""Planning without a cluster: the plans of a described one, and what memory buys there."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from tiny_models import Mlp, TinyGpt, token_batch
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.frontier import Pareto, fastest_by_peak

GIB = 2**30


def on_meta(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, dtype=torch.long, device="meta") for shape in shapes)


def meta_gpt() -> nn.Module:
    with torch.device("meta"):
        return TinyGpt()


ONE_RANK = on_meta((2, 8), (2, 8))


@pytest.fixture(scope="module")
def planned() -> autopar.Plan:
    return autopar.plan(meta_gpt(), "4 cpu", example_inputs=ONE_RANK)


# ---- what is planned offline runs on the cluster ----


def runs_offline_plans(directory: str) -> None:
    torch.manual_seed(0)
    model = TinyGpt()
    example = tuple(t.chunk(4)[dist.get_rank()] for t in token_batch(8))
    made_there = autopar.parallelize(copy.deepcopy(model), 4, strategy="fsdp+tp", example_inputs=example).plan
    made_offline = autopar.load_plan(f"{directory}/fsdp+tp.json")
    assert made_there == made_offline
    reference = copy.deepcopy(model).double()
    plan = autopar.load_plan(f"{directory}/auto.json")
    pm = autopar.parallelize(model.double(), 4, strategy=plan, example_inputs=example)
    loss, expected = pm(*example)["loss"], reference(*token_batch(8))["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    loss.backward()
    expected.backward()
    gradients = dict(reference.named_parameters())
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name].grad, rtol=0, atol=1e-9)


def test_a_plan_made_offline_is_the_one_made_there_and_runs(
    gloo4: RankPool, planned: autopar.Plan, tmp_path: Path
) -> None:
    autopar.save_plan(planned, tmp_path / "auto.json")
    named = autopar.plan(meta_gpt(), "4 cpu", example_inputs=ONE_RANK, strategy="fsdp+tp")
    autopar.save_plan(named, tmp_path / "fsdp+tp.json")
    gloo4.run(runs_offline_plans, str(tmp_path))


@pytest.mark.parametrize(("cluster", "strategy"), [("2x2 A100-80GB", "fsdp+tp"), ("2x2 H100-80GB", "auto")])
def test_a_plan_for_gpus_computes_what_the_single_device_does(cluster: str, strategy: str) -> None:
    plan = autopar.plan(meta_gpt(), cluster, example_inputs=ONE_RANK, strategy=strategy)
    assert autopar.verify(TinyGpt(), plan, token_batch(8)).ok


def test_nothing_is_materialised() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**17, 2**17)  # 64 GiB
        rows = torch.empty(4, 2**17)
    plan = autopar.plan(model, "8xH100-80GB", example_inputs=rows, strategy="tp", optimizer="sgd")
    assert plan.peak_bytes > 2 * 64 * GIB / 8  # parameters and gradients
    assert all(p.is_meta for p in model.parameters())
    assert not dist.is_initialized()


def test_without_gradients_the_plan_is_for_the_forward_pass() -> None:
    with torch.no_grad():
        plan = autopar.plan(meta_gpt(), "4 cpu", example_inputs=ONE_RANK, strategy="ddp")
    assert plan.report is not None
    assert plan.report.memory.grads == plan.report.memory.optimizer == 0


# ---- arguments ----


@pytest.mark.parametrize(
    ("cluster", "mesh", "expected"),
    [
        ("2x4 A100-80GB", None, "dp=2×fsdp=4"),
        ("2x4 A100-80GB", "4x2", "dp=4×fsdp=2"),
        ("8xA100-80GB", (2, 4), "dp=2×fsdp=4"),
        (Cluster.parse("2x2 cpu"), None, "dp=2×fsdp=2"),
    ],
)
def test_the_mesh_is_nodes_by_devices_unless_it_is_given(
    cluster: str | Cluster, mesh: str | tuple[int, ...] | None, expected: str
) -> None:
    plan = autopar.plan(meta_gpt(), cluster, example_inputs=ONE_RANK, mesh=mesh, strategy="hsdp")
    assert str(plan.mesh) == expected


def test_one_node_is_a_flat_mesh() -> None:
    assert autopar.plan(meta_gpt(), "4 cpu", example_inputs=ONE_RANK, strategy="tp").mesh.sizes == (4,)


def test_a_plan_is_priced_for_another_cluster(planned: autopar.Plan) -> None:
    priced = autopar.plan(meta_gpt(), "4xA100-80GB", example_inputs=ONE_RANK, strategy=planned)
    assert priced == planned
    assert priced.step_time_s != planned.step_time_s
    with pytest.raises(autopar.PlanError, match="made for another model"):
        autopar.plan(Mlp(), "4 cpu", example_inputs=torch.empty(2, 12), strategy=planned)


def test_wrong_arguments_are_refused() -> None:
    model = meta_gpt()
    with pytest.raises(autopar.MeshError, match=r"mesh '2x3' has 6 ranks, but cluster 1×4 cpu \(gloo\) has 4"):
        autopar.plan(model, "4 cpu", example_inputs=ONE_RANK, mesh="2x3")
    with pytest.raises(autopar.InputError, match=r"unknown device 'X9'"):
        autopar.plan(model, "4 X9", example_inputs=ONE_RANK)
    with pytest.raises(autopar.InputError, match="no strategy 'zero4'"):
        autopar.plan(model, "4 cpu", example_inputs=ONE_RANK, strategy="zero4")
    with pytest.raises(autopar.InputError, match="mem_gb must be a positive number"):
        autopar.plan(model, "4 cpu", 0, example_inputs=ONE_RANK)
    with pytest.raises(autopar.InputError, match=r"must be an nn\.Module instance"):
        autopar.plan(TinyGpt, "4 cpu", example_inputs=ONE_RANK)  # type: ignore[arg-type]
    with pytest.raises(autopar.InputError, match="mem_gb must be a positive number"):
        autopar.pareto(model, "4 cpu", example_inputs=ONE_RANK, budgets=[-1])
    for budgets in (8, "8", [None], ["8"], [True], [10**400]):
        with pytest.raises(autopar.InputError, match="budgets must be a list of numbers of GiB"):
            autopar.pareto(model, "4 cpu", example_inputs=ONE_RANK, budgets=budgets)  # type: ignore[arg-type]


def test_a_mesh_of_three_axes_is_said_to_be_taken_as_fewer() -> None:
    inputs = on_meta((1, 8), (1, 8))
    plan = autopar.plan(meta_gpt(), "8 cpu", example_inputs=inputs, mesh="2x2x2", strategy="zero3")
    assert plan.report is not None
    assert plan.report.mesh_sizes == (2, 2, 2)
    assert str(plan).splitlines()[1].startswith("mesh 2×2×2 is taken as dp=8, since plans have one or two axes")


def test_an_infeasible_budget_names_one_that_works() -> None:
    with pytest.raises(autopar.InfeasibleBudgetError) as caught:
        autopar.plan(meta_gpt(), "4 cpu", 1e-5, example_inputs=ONE_RANK, strategy="zero3")
    smallest = caught.value.smallest_feasible_gb
    plan = autopar.plan(meta_gpt(), "4 cpu", smallest, example_inputs=ONE_RANK, strategy="zero3")
    assert plan.peak_bytes <= smallest * GIB


# ---- the frontier ----


@pytest.fixture(scope="module")
def frontier() -> Pareto:
    return autopar.pareto(meta_gpt(), "4 cpu", example_inputs=ONE_RANK)


def test_the_frontier_falls_from_the_smallest_plan_to_the_fastest(frontier: Pareto, planned: autopar.Plan) -> None:
    points = [point for point in frontier.points if point is not None]
    assert len(points) == len(frontier.points) > 1
    assert all(a.peak_bytes < b.peak_bytes and a.step_time_s > b.step_time_s for a, b in itertools.pairwise(points))
    assert points[-1].plan == planned
    assert points[0].peak_bytes <= frontier.smallest_feasible_gb * GIB < points[0].peak_bytes + 2e-3 * GIB


def test_each_point_is_the_plan_for_a_budget_of_its_peak(frontier: Pareto) -> None:
    point = frontier.points[0]
    assert point is not None
    plan = autopar.plan(meta_gpt(), "4 cpu", point.peak_bytes / GIB, example_inputs=ONE_RANK)
    assert (plan, plan.report) == (point.plan, point.plan.report)


def test_a_budget_has_the_fastest_point_within_it_or_none(frontier: Pareto) -> None:
    peaks = [point.peak_bytes for point in frontier.points if point is not None]
    budgets = [peaks[0] / 2 / GIB, *((peak + 1) / GIB for peak in peaks), 1e6]
    found = autopar.pareto(meta_gpt(), "4 cpu", example_inputs=ONE_RANK, budgets=budgets)
    assert found.points[0] is None
    assert [point and point.peak_bytes for point in found.points[1:]] == [*peaks, peaks[-1]]
    assert found.budgets == tuple(budgets)
    assert f"nothing fits: the smallest budget that works is {frontier.smallest_feasible_gb:g} GiB" in str(found)


def test_the_table_says_what_one_more_gib_buys(frontier: Pareto) -> None:
    lines = str(frontier).splitlines()
    assert lines[0] == "step time against memory on 1×4 cpu (gloo)"
    assert lines[2].split() == ["peak", "step", "one", "more", "GiB", "buys", "plan"]
    assert len(lines) == 4 + len(frontier.points)
    assert all(len(line) <= 120 for line in lines)


def test_the_frontier_of_random_costs_is_what_no_other_beats() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = [(draw.randrange(9), float(draw.randrange(9))) for _ in range(draw.randrange(1, 12))]
        expected = {
            peak for peak, time in costs if all(p > peak or t >= time for p, t in costs if (p, t) != (peak, time))
            and not any(p < peak and t <= time for p, t in costs)
        }  # fmt: skip
        assert fastest_by_peak(costs) == sorted(expected)


def test_a_device_that_nothing_fits_has_no_frontier() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**17, 2**17)
        rows = torch.empty(4, 2**17)
    with pytest.raises(autopar.InfeasibleBudgetError, match="no candidate fits 15"):
        autopar.pareto(model, "2xV100-16GB", example_inputs=rows)
