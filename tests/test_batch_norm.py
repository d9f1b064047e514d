"""Batch norm takes the statistics of the whole batch, whatever it is cut into; image models are cut, not run whole."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autopar


class Net(nn.Module):
    def __init__(self, track: bool) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=track)
        self.second, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16, affine=False)
        self.pool, self.head, self.norm3 = nn.MaxPool2d(2), nn.Linear(16 * 3 * 3, 12), nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = self.pool(torch.relu(self.norm2(self.second(x))))
        return self.norm3(self.head(x.flatten(1))).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
@pytest.mark.parametrize(("train", "track"), [(True, True), (True, False), (False, True), (False, False)])
def test_statistics_are_those_of_the_whole_batch(train: bool, track: bool, strategy: str) -> None:
    torch.manual_seed(0)
    model = Net(track).train(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an op without a rule would be named in a warning
        report = autopar.verify(model, strategy, torch.randn(8, 3, 14, 14), mesh=(2, 2))
    assert report.ok, report


def test_a_convolutional_net_is_divided_under_ddp() -> None:
    from autopar.cluster import Cluster
    from autopar.compiler import Compiler
    from autopar.cost_model.ops import count_flops

    compiler = Compiler(Net(True), (4,), Cluster.parse("4 cpu"), strategy="ddp")
    joint = compiler.trace((torch.randn(2, 3, 14, 14),), {}, train=True)
    program = compiler.compile(joint, compiler.plan(joint))
    local = sum(count_flops(graph.module.graph) for graph in program.graphs)
    assert local * 4 == count_flops(joint.module.graph)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tp", "fsdp+tp"])
def test_a_mean_over_all_batches_is_kept_without_reading_how_many_there_were(strategy: str) -> None:
    torch.manual_seed(0)
    model = Net(True)
    for norm in (model.norm1, model.norm2, model.norm3):
        norm.momentum = None
    report = autopar.verify(model, strategy, torch.randn(8, 3, 14, 14), mesh=(2, 2), num_steps=3)
    assert report.ok, report
    assert all("forward" not in vars(module) for module in model.modules())
