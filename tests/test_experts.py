"""Experts cut among ranks: rows change places by all-to-alls, and everything equals the single device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import Subject, subject
from torch import Tensor, nn

from autopar.factors import analyse
from autopar.layouts import find_layouts, storages
from autopar.placement import is_sharded
from autopar.plan import EXPERTS, Plan


class Switch(nn.Module):
    """Each token goes to one of four experts, of which each takes so many from a row of the batch; by one-hot sums."""

    def __init__(self, width: int = 8, hidden: int = 12, num_experts: int = 4, capacity: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.3)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, self.gate.out_features)
        place = (hot.cumsum(1) * hot).sum(-1) - 1
        kept = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity) * (place < self.capacity)[..., None]
        sent = (hot[..., None] * kept[..., None, :]).to(x.dtype)
        rows = torch.einsum("bsd,bsec->ebcd", x, sent)
        done = torch.einsum("ebch,ehd->ebcd", F.relu(torch.einsum("ebcd,edh->ebch", rows, self.up)), self.down)
        return x + torch.einsum("ebcd,bsec->bsd", done, sent * weight[..., None, None])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Switch(), nn.LayerNorm(8), Switch()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


@pytest.fixture(scope="module", name="ours")
def _ours() -> Subject:
    torch.manual_seed(0)
    return subject(Model(), torch.randn(8, 5, 8))


def plan_of(ours: Subject, sizes: tuple[int, ...], mode: str) -> Plan:
    """Of the layout that cuts experts, the plan whose other parameters rest as `mode` says."""
    layouts = find_layouts(ours.joint, sizes, sizes[-1])
    layout = next(one for one in layouts if one.name.startswith("experts") and one.mesh.num_axes == len(sizes))
    return layout.plan({path: modes[mode] for path, modes in storages(ours.joint, layout).items()}, {})


@pytest.mark.parametrize("mode", ["whole", "regathered"])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4)])
def test_experts_equal_the_single_device(ours: Subject, sizes: tuple[int, ...], mode: str) -> None:
    plan = plan_of(ours, sizes, mode)
    assert {ref.anchor for ref in plan.factors[-1] if ref.label == EXPERTS} == {
        f"{layer}.{name}" for layer in ("first", "second") for name in ("up", "down")
    }
    assert all(is_sharded(plan.storage[f"first.{name}"].sharding[-1]) for name in ("up", "down"))
    report = ours.compare(ours.program(plan), plan)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction > 0.99


def test_rows_go_to_experts_and_come_back_by_all_to_all(ours: Subject) -> None:
    program = ours.program(plan_of(ours, (2, 4), "whole"))
    kinds = Counter(collective.kind for collective in program.collectives() if collective.axis == "tp")
    # Each of two layers: there and back, forward; there and back again, backward; what is saved may go once more.
    assert 8 <= kinds["all_to_all"] <= 12, kinds
    assert kinds["all_gather"] == 0, kinds
    assert analyse(ours.joint).replicated == []
