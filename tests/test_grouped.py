"""Grouped products: a mixture of experts by sorted rows, whoever's op multiplies them, equals the single device's."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from programs import subject
from tiny_models import Experts
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.grouped import grouped_mm, multiply_in_any_dtype
from autopar.regions import find_regions

GROUPED = torch.ops.autopar.grouped_mm.default


@pytest.mark.parametrize(
    ("shapes", "form"),
    [(((8, 4), (3, 4, 12)), "rows"), (((4, 8), (8, 12)), "contracted"), (((3, 12, 4), (4, 8)), "columns")],
)
def test_definition_is_pytorchs(shapes: tuple[tuple[int, ...], tuple[int, ...]], form: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    found, expected = multiply_in_any_dtype(a, b, ends), F.grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(found, expected)
    if form != "columns":
        torch.testing.assert_close(grouped_mm(a.detach(), b.detach(), ends), expected)
    assert multiply_in_any_dtype(a.double(), b.double(), ends).dtype == torch.float64


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("ddp", (4,)),
        ("ddp", (2, 2)),
        ("zero3", (4,)),
        ("tp", (4,)),
        ("tp", (2, 2)),
        ("tp+sp", (4,)),
        ("fsdp+tp", (2, 2)),
    ],
)
def test_experts_by_sorted_rows_equal_the_single_device(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = subject(Experts(), torch.randn(8, 4, 16))
    assert any(node.target is GROUPED for node in ours.joint.module.graph.nodes)
    report = ours.verify(strategy, *sizes)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > 0.9


def test_selective_recomputation_repeats_no_grouped_product() -> None:
    ours = subject(Experts(), torch.randn(8, 4, 16))
    plan = ours.plan("ddp", 4)
    plain, again = (
        ours.program(replace(plan, recompute=dict.fromkeys(find_regions(ours.joint), level) if level else {}))
        for level in ("", "selective")
    )
    assert plain.backward is not None
    assert again.backward is not None
    assert nodes_of(again.backward.module.graph) != nodes_of(plain.backward.module.graph)
    assert nodes_of(again.backward.module.graph).count(GROUPED) == nodes_of(plain.backward.module.graph).count(GROUPED)


def nodes_of(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes]


def test_flop_counters_count_grouped_products() -> None:
    with FlopCounterMode(display=False) as counter:
        grouped_mm(torch.randn(8, 4), torch.randn(3, 4, 12), torch.tensor([2, 2, 8]))
        grouped_mm(torch.randn(4, 8), torch.randn(8, 12), torch.tensor([2, 2, 8]))
    assert counter.get_total_flops() == 2 * 2 * 8 * 4 * 12


def test_unmodified_model_is_verified_in_float64() -> None:
    torch.manual_seed(0)
    model = Experts()
    before = copy.deepcopy(model.state_dict())
    report = autopar.verify(model, "ddp", (torch.randn(8, 4, 16),), mesh="4")
    assert report.ok, str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
