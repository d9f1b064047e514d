"""Models that read and write rows where an index says: graphs, tables, slots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import subject
from torch import Tensor, nn

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
