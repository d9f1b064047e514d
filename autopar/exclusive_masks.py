"""How much masks select that exclude each other, while nobody knows what each selects.

Of a one-hot encoding of n classes one element in n holds.  Of the masks that compare one tensor of ids with n different
numbers, no two hold in the same place.  So the parts that experts take of tokens are, all together, the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._compat import storage_id

aten = torch.ops.aten


class ExclusiveMasks:
    """The shares of tensors that hold, on average, by what they are made of.

    Args:
        counts: how many numbers each tensor of ids is compared with, in the order of the first comparisons.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self._counts = counts
        self._shares: dict[int, float] = {}
        self._compared: dict[int, tuple[int, set[int]]] = {}

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers each tensor of ids has been compared with."""
        return tuple(len(numbers) for _, numbers in self._compared.values())

    def of(self, tensor: Tensor) -> float:
        """The share of a tensor's elements that holds; 1 if nothing is known of it."""
        return self._shares.get(storage_id(tensor), 1.0)

    def mark(self, tensor: Tensor, share: float) -> None:
        """Say that a share of a tensor's elements holds."""
        if share < 1:
            self._shares[storage_id(tensor)] = share

    def forget(self, storage: int) -> None:
        """A storage is gone, and its number may be another's."""
        self._shares.pop(storage, None)

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what an op makes of masks; views have their storage's share."""
        if func is aten.eq.Scalar and not args[0].is_floating_point():
            order, numbers = self._compared.setdefault(storage_id(args[0]), (len(self._compared), set()))
            numbers.add(args[1])
            if order < len(self._counts):
                self.mark(result, 1 / self._counts[order])
        elif func in _SAME_SHARE:
            self.mark(result, self.of(args[0]))
        elif func in _ANY:
            self.mark(result, self.of(args[0]) * args[0].numel() / max(1, result.numel()))


_SAME_SHARE = {
    aten._to_copy.default, aten.clone.default, aten.gt.Scalar, aten.index.Tensor, aten.index_select.default,
    aten.ne.Scalar,
}  # fmt: skip
_ANY = {aten.any.dim, aten.any.dims, aten.sum.dim_IntList}
