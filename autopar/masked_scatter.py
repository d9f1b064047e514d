"""`masked_scatter`, forward and backward, as lookups: what a place gets is found by counting the places before it.

The op itself reads a source in the order in which a mask allows, so that no place is known without all before it.
Counted in two steps, within each row of the batch and over the rows, all but one number a row stays where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.rules import Call

aten = torch.ops.aten


def _num_alike(mask: fx.Node, shape: tuple[int, ...]) -> int:
    """Over how many of the last dims of `shape` a mask is the same everywhere."""
    source = mask.args[0] if mask.target is aten.expand.default else mask
    assert isinstance(source, fx.Node)
    given = tuple(source.meta["val"].shape)
    given = (1,) * (len(shape) - len(given)) + given
    count = 0
    while count < len(shape) and given[-1 - count] == 1:
        count += 1
    return count


def _places(mask: Tensor, alike: int) -> tuple[Tensor, Tensor]:
    """Whether each place is to be written, and how many are before it; `mask` is as wide as what it masks, and the same
    along the last `alike` dims, which are left out."""
    for _ in range(alike):
        mask = mask.select(-1, 0)
    rows = mask.reshape(mask.shape[0], -1).to(torch.int64)
    total = rows.sum(1)
    before = total.cumsum(0) - total
    places = rows.cumsum(1) - rows + before.unsqueeze(1)
    return mask, places.view(mask.shape)


def _definition(call: Call, shape: tuple[int, ...], length: int) -> tuple[int, int] | None:
    """Over how many last dims the mask is the same, and how many elements those are together; None where the
    op stays: the mask is one value, or the source is not of such blocks."""
    alike = _num_alike(call["mask"], shape)
    block = math.prod(shape[len(shape) - alike :])
    return None if alike == len(shape) or not block or not length or length % block else (alike, block)


def _forward(call: Call) -> Callable[..., Any] | None:
    shape, length = call.shape("self"), math.prod(call.shape("source"))
    found = _definition(call, shape, length)
    if found is None or tuple(call.out_shape) != shape:
        return None
    alike, block = found

    def scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        mask, places = _places(mask.expand(shape), alike)
        # A place that is not written looks up the first row instead of one that may not be there.
        rows = aten.index.Tensor(source.reshape(-1, block), [torch.where(mask, places, 0)])
        taken = rows.reshape(shape)
        return torch.where(mask.reshape(*mask.shape, *[1] * alike), taken, self)

    return scatter


def _backward(call: Call) -> Callable[..., Any] | None:
    shape, length = call.shape("grad_output"), math.prod(call["sizes"])
    found = _definition(call, shape, length)
    if found is None:
        return None
    alike, block = found

    def gather(grad_output: Tensor, mask: Tensor, sizes: list[int]) -> Tensor:
        mask, places = _places(mask.expand(shape), alike)
        rows = torch.where(mask.unsqueeze(-1), grad_output.reshape(*mask.shape, block), 0)
        empty = torch.zeros(length // block, block, dtype=rows.dtype, device=rows.device)
        written = aten.index_put.default(empty, [torch.where(mask, places, 0)], rows, True)
        return written.reshape(sizes)  # type: ignore[no-any-return]

    return gather


DEFINITIONS: dict[Any, Callable[[Call], Callable[..., Any] | None]] = {
    aten.masked_scatter.default: _forward,
    aten.masked_scatter_backward.default: _backward,
}
