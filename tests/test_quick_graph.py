"""Graphs whose nodes are made quickly are graphs of `torch.fx` in all else."""

from __future__ import annotations

import random

import torch
from torch import fx

from autopar._compat import LazyGraphModule, QuickGraph

aten = torch.ops.aten

WANTED = ("add", "add_1", "add_2", "add_1_2", "add_01", "mm", "mm_3", "list", "list_1", "x.y", "3a", "_", "tensor")
"""Names that are free or taken, with and without numbers, of Python's own, and that are no names."""


def test_nodes_get_the_names_that_fx_gives() -> None:
    draw = random.Random(0)
    for _ in range(200):
        slow, quick = fx.Graph(), QuickGraph()
        for _ in range(40):
            name = draw.choice(WANTED)
            assert quick.placeholder(name).name == slow.placeholder(name).name
            assert quick.call_function(aten.add.Tensor).name == slow.call_function(aten.add.Tensor).name


def test_nodes_are_found_by_their_target_also_when_that_changes() -> None:
    graph = QuickGraph()
    x = graph.placeholder("x")
    one, two = (graph.call_function(aten.neg.default, (x,)) for _ in range(2))
    two.target = aten.abs.default
    assert graph.find_nodes(op="call_function", target=aten.neg.default) == [one]
    assert graph.find_nodes(op="call_function", target=aten.abs.default) == [two]
    assert graph.find_nodes(op="placeholder") == [x]
    graph.erase_node(two)
    assert graph.find_nodes(op="call_function", target=aten.abs.default) == []
    assert list(x.users) == [one]


def test_a_quick_graph_runs() -> None:
    graph = QuickGraph()
    x = graph.placeholder("x")
    rows = graph.call_function(aten.cat.default, ([x, x],), {"dim": 0})
    graph.output((graph.call_function(aten.sum.dim_IntList, (rows, [0]), {}),))
    graph.lint()
    module = LazyGraphModule(torch.nn.Module(), graph)
    assert torch.equal(module(torch.ones(2, 3))[0], torch.full((3,), 4.0))
