"""Sums of one-hot values: equal to the sum, and left alone where they are anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.one_hot import sum_of_one_hot
from autopar.writer import Writer

ROWS, CLASSES = 5, 7
INDEX = torch.tensor([0, 6, -100, 3, 7])
"""Two of these hit no class."""


def classes(shape: tuple[int, ...] = (CLASSES,)) -> Tensor:
    return torch.arange(CLASSES).view(shape)


def last(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where((classes() == index.unsqueeze(1)) & (index != 3).unsqueeze(1), scale.unsqueeze(1), 0)


def middle(index: Tensor, scale: Tensor) -> Tensor:
    hit = index.view(ROWS, 1, 1) == classes((CLASSES, 1))
    return torch.where(hit & (index.view(ROWS, 1, 1) > -1), scale.view(1, 1, ROWS), 0.0)


def narrowed(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where(classes() == index.unsqueeze(1), scale.sum(), 0).to(torch.float32)


def other_value(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where(classes() == index.unsqueeze(1), scale.unsqueeze(1), 1)


def not_counting(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where(torch.arange(1, CLASSES + 1) == index.unsqueeze(1), scale.unsqueeze(1), 0)


def varying(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where(classes() == index.unsqueeze(1), scale[:1] * torch.arange(CLASSES), 0)


def near(index: Tensor, scale: Tensor) -> Tensor:
    return torch.where(classes() <= index.unsqueeze(1), scale.unsqueeze(1), 0)


def summed(function: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Tensor | None]:
    """The sum over the classes, as it is and as it is found."""
    module = make_fx(function, tracing_mode="fake")(*args)
    value = module.graph.output_node().args[0]
    assert isinstance(value, fx.Node)
    for node in module.graph.nodes:
        node.meta |= {"module": "", "backward": False}
    with module.graph.inserting_before(module.graph.output_node()), value.meta["val"].fake_mode:
        found = sum_of_one_hot(value, 1, Writer(value))
    if found is None:
        return module(*args).sum(1, keepdim=True), None
    module.graph.output_node().args = ((value, found),)
    module.recompile()
    whole, result = module(*args)
    return whole.sum(1, keepdim=True), result


@pytest.mark.parametrize("function", [last, middle, narrowed])
def test_the_sum_is_found(function: Callable[..., Tensor]) -> None:
    total, found = summed(function, INDEX, torch.randn(ROWS, dtype=torch.float64))
    assert found is not None
    assert torch.equal(total, found)
    assert total.dtype == found.dtype


@pytest.mark.parametrize("function", [other_value, not_counting, varying, near])
def test_anything_else_is_left(function: Callable[..., Tensor]) -> None:
    _, found = summed(function, INDEX, torch.randn(ROWS, dtype=torch.float64))
    assert found is None
