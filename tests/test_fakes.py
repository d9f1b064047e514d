"""The fake tensor mode that finds results again: what it gives is what PyTorch's own mode gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar._compat import FakeTensor, FakeTensorMode, KnownOps, new_fake_mode, shares_storage

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pointwise": lambda x, y: aten.add.Tensor(x, y, alpha=2),
    "promotion": lambda x, y: aten.mul.Tensor(x, y.to(torch.float64)),
    "product": lambda x, y: aten.mm.default(x, y),
    "view": lambda x, y: aten.view.default(x, [2, 18]),
    "transpose": lambda x, y: aten.t.default(x),
    "slice": lambda x, y: aten.slice.Tensor(x, 0, 2, 5),
    "slice of a slice": lambda x, y: aten.slice.Tensor(aten.slice.Tensor(x, 0, 2, 5), 1, 1, 3),
    "split": lambda x, y: aten.split.Tensor(x, 2, 1),
    "unbind": lambda x, y: aten.unbind.int(x, 1),
    "other dtype's view": lambda x, y: aten.view.dtype(x, torch.int32),
    "unsafe view": lambda x, y: aten._unsafe_view.default(x, [36]),
    "reshape that copies": lambda x, y: aten.t.default(x).reshape(36),
    "reshape that does not": lambda x, y: x.reshape(36),
    "strides kept": lambda x, y: aten.clone.default(aten.t.default(x)),
    "contiguous": lambda x, y: aten.clone.default(aten.t.default(x), memory_format=torch.contiguous_format),
    "list of tensors": lambda x, y: aten.cat.default([x, y], 1),
    "index": lambda x, y: aten.index.Tensor(x, [None, torch.arange(3)]),
    "two results": lambda x, y: aten.max.dim(x, 0),
    "factory": lambda x, y: aten.full.default([3], 1, dtype=torch.int64, device=x.device),
    "factory of floats": lambda x, y: torch.full((3,), 1.0),
    "in place": lambda x, y: aten.add_.Tensor(x.clone(), y),
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y)),
}


def described(result: Any, reads: tuple[Tensor, ...]) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result), [described(one, reads) for one in result]
    assert type(result) is FakeTensor
    offset = result.storage_offset()
    aliases = [shares_storage(result, read) for read in reads]
    return tuple(result.shape), result.stride(), offset, result.dtype, result.device, result.requires_grad, aliases


def results(mode: FakeTensorMode, call: Callable[[Tensor, Tensor], Any]) -> Any:
    with mode, torch.no_grad():
        reads = torch.empty(6, 6), torch.empty(6, 6)
        return described(call(*reads), reads)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_pytorch_when_new_and_when_found(name: str) -> None:
    known: KnownOps = {}
    expected = results(FakeTensorMode(), CALLS[name])
    assert results(new_fake_mode(known=known), CALLS[name]) == expected
    num_known = len(known)
    assert results(new_fake_mode(known=known), CALLS[name]) == expected
    assert len(known) == num_known


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    mode = new_fake_mode()
    with mode:
        dtypes = [torch.full((2,), value).dtype for value in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.bool]


def test_the_default_dtype_counts() -> None:
    known: KnownOps = {}
    with new_fake_mode(known=known):
        assert torch.full((2,), 1.0).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.full((2,), 1.0).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_two_results_are_two_tensors() -> None:
    with new_fake_mode():
        x = torch.empty(4)
        first, second = x + 1, x + 1
        assert first is not second
        assert not shares_storage(first, second)


def test_values_that_are_read_are_never_found_again() -> None:
    with new_fake_mode():
        x = torch.empty(4)
        first, second = x.nonzero(), (x + 1).nonzero()
        assert first.shape[0] is not second.shape[0]
        number = torch.tensor(3.0)
        assert (number * 2).item() == 6.0
        assert (torch.tensor(4.0) * 2).item() == 8.0
