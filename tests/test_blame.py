"""A rank that fails while it computes: the others say in which collective they waited for it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import mine
from tiny_models import TinyGpt, token_batch
from torch import fx

import autopar
from autopar.runtime.blame import blame, places


def one_fails() -> str:
    ids, targets = mine(*token_batch(4))
    pm = autopar.parallelize(TinyGpt(layers=1), 2, strategy="zero3", example_inputs=(ids, targets))
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(
        timedelta(seconds=2)
    )
    with pytest.raises((IndexError, autopar.CollectiveError)) as caught:
        pm(ids + 99 * dist.get_rank(), targets)
    return f"{caught.type.__name__}: {caught.value}"


def test_the_others_name_the_collective_that_they_waited_in() -> None:
    pool = RankPool(2)  # of its own: a group in which a collective failed is of no more use
    try:
        waited, failed = pool.run(one_fails)
    finally:
        pool.close()
    assert failed.startswith("IndexError: index out of range in self (on rank 1, in aten.embedding.default, of module ")
    assert waited.startswith("CollectiveError: rank 0 waited in vain in ")
    assert "along mesh axis 'dp', of module " in waited
    assert "in the forward pass (" in waited
    assert ".cc:" not in waited
    assert "resume from the last checkpoint" in waited


def test_other_errors_say_which_op_of_which_module_raised_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    product.meta = {"module": "layers.3", "backward": True}
    graph.output(product)
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert places(graph) == {}
    with pytest.raises(RuntimeError) as caught:
        module.forward(torch.ones(2))
    assert isinstance(blame(caught.value, graph, {"mm_default": "the product"}, 3), autopar.CollectiveError)
    assert blame(caught.value, graph, {"all_reduce": "…"}, 3) is caught.value
    assert str(caught.value).endswith(" (on rank 3, in aten.mm.default, of module layers.3 in the backward pass)")
