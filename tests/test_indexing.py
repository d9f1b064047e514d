"""Models that read and write rows where an index says: graphs, tables, slots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import subject
from torch import Tensor, nn

from autopar.factors import analyse

NODES, EDGES = 12, 30


class Messages(nn.Module):
    """Two layers of messages along a graph's edges, summed at nodes by whichever op writes rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer in (self.first, self.second):
            rows = layer(F.relu(x))
            sent, empty = rows[source], rows.new_zeros(rows.shape)
            if self.how == "index_add":
                x = empty.index_add(0, target, sent)
            elif self.how == "scatter_add":
                x = empty.scatter_add(0, target[:, None].expand_as(sent), sent)
            else:
                x = torch.zeros_like(empty).index_put((target,), sent, accumulate=True)
        return x.square().mean()


@pytest.mark.parametrize("how", ["index_add", "scatter_add", "index_put"])
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("fsdp+tp", (2, 2))])
def test_rows_summed_at_nodes_are_rows_of_the_batch(how: str, strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    report = subject(Messages(how), torch.randn(NODES, 6), torch.randint(NODES, (2, EDGES))).verify(strategy, *sizes)
    assert report.ok, str(report)
    assert report.sharded_flops_fraction == 1.0


class Slots(nn.Module):
    """Each token goes to a slot of its expert, whose rows are one batch; by indices into a buffer of slots."""

    def __init__(self, width: int = 8, hidden: int = 12, num_experts: int = 4, capacity: int = 16) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(width, num_experts, bias=False), capacity
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(7, width))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        rows = (x + self.bias[kind]).flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        hot = F.one_hot(chosen, len(self.up))
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        slot = torch.where(place < self.capacity, chosen * self.capacity + place, len(self.up) * self.capacity)
        slots = rows.new_zeros(len(self.up) * self.capacity + 1, rows.shape[-1]).index_add(0, slot, rows)
        done = torch.bmm(F.relu(torch.bmm(slots[:-1].unflatten(0, (len(self.up), -1)), self.up)), self.down)
        done = torch.cat([done.flatten(0, 1), rows.new_zeros(1, rows.shape[-1])])
        return (rows + done[slot] * weight[:, None]).square().mean()


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("zero3", (2, 2)), ("tp", (4,)), ("fsdp+tp", (2, 2))])
def test_rows_written_to_slots_are_summed_over_the_ranks(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = subject(Slots(), torch.randn(8, 6, 8), torch.randint(7, (8, 6)))
    report = ours.verify(strategy, *sizes)
    assert report.ok, str(report)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(7, 5, 4))

    def forward(self, x: Tensor, kind: Tensor, place: Tensor) -> Tensor:
        return (x + self.rows[kind, place]).relu().mean()


def test_the_gradient_of_a_table_that_is_read_by_index_is_summed_once() -> None:
    torch.manual_seed(0)
    ours = subject(Table(), torch.randn(8, 6, 4), torch.randint(7, (8, 1)), torch.randint(5, (8, 6)))
    plan = ours.plan("ddp", 4)
    program = ours.program(plan)
    assert {c.kind for c in program.collectives()} == {"all_reduce"}
    report = ours.compare(program, plan)
    assert report.ok, str(report)


class Images(nn.Module):
    """Rows of a second input stand where a row's mask has room for them, as images stand in text."""

    def __init__(self, spread: str) -> None:
        super().__init__()
        self.spread, self.eye, self.mix = spread, nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, text: Tensor, mask: Tensor, pixels: Tensor) -> Tensor:
        mask = {
            "one": mask[..., None],
            "expanded": mask[..., None].expand_as(text),
            "each": mask[..., None] & (text > 0),
        }[self.spread]
        filled = self.mix(text).masked_scatter(mask, self.eye(pixels))
        return self.mix(filled).square().mean()


@pytest.mark.parametrize("spread", ["one", "expanded", "each"])
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (4,)), ("tp", (2,)), ("fsdp+tp", (2, 2))])
def test_masked_places_are_filled_in_order_over_all_ranks(spread: str, strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = torch.rand(8, 6) < torch.linspace(0, 1, 8)[:, None]
    ours = subject(Images(spread), torch.randn(8, 6, 4), mask, torch.randn(8, 6, 5))
    assert analyse(ours.joint).replicated == []
    report = ours.verify(strategy, *sizes)
    assert report.ok, str(report)
