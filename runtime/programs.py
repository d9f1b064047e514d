"""The programs of one module, one for each kind of call; a bounded number of them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping

from torch import Tensor

from autopar.runtime.execution import BoundStep, CompiledStep

_MAX_SIZES = 1000
"""Sizes of one dim that are remembered for the warning."""


class Programs:
    """Compiled programs by the key of the calls that they serve.  Of more than `limit`, those used last are kept.

    The first time that one is dropped, a warning says which dims of which inputs keep changing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, tuple[int, BoundStep]] = OrderedDict()
        self._num_compiled = 0
        self._sizes: dict[tuple[str, int], set[int]] = {}
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def number(self, key: Hashable) -> int | None:
        """Which of all programs compiled so far serves a call; None if it is not there."""
        return self._kept[key][0] if key in self._kept else None

    def use(self, key: Hashable) -> BoundStep:
        """The program for a call, which is now the one used last."""
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def add(self, key: Hashable, step: BoundStep, tensors: Mapping[str, Tensor]) -> None:
        """Keep the program that was compiled for a call with these tensors."""
        self._kept[key] = (self._num_compiled, step)
        self._num_compiled += 1
        for path, tensor in tensors.items():
            for dim, size in enumerate(tensor.shape):
                sizes = self._sizes.setdefault((path, dim), set())
                if len(sizes) < _MAX_SIZES:
                    sizes.add(size)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
            if not self._warned:
                self._warned = True
                warnings.warn(self._advice(), stacklevel=5)

    @property
    def compiled(self) -> tuple[CompiledStep, ...]:
        """The programs held now, the one used last at the end."""
        return tuple(step.compiled for _, step in self._kept.values())

    def _advice(self) -> str:
        changing = [
            f"dim {dim} of input {path!r} has had {len(sizes)} sizes from {min(sizes)} to {max(sizes)}"
            for (path, dim), sizes in self._sizes.items()
            if len(sizes) > 1
        ]
        if changing:
            why = "; ".join(changing)
            advice = "pad to few sizes (multiples of 64, say), or sort the data into buckets of like size"
        else:
            why = "dtypes, modes or arguments that are no tensors keep changing"
            advice = "pass numbers that change as tensors"
        return (
            f"compiled {self._num_compiled} programs for different calls: {why}. The plan stays as it is, but each new "
            f"kind of call is traced and rewritten, and only the {self._limit} used last are kept: {advice}"
        )
