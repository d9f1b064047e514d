"""Gradients of several backward passes that wait for one reduction."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor


class Accumulation:
    """What the steps of one module have computed and not yet reduced.

    Attributes:
        active: whether the steps that run now leave out their gradients' reductions.
    """

    def __init__(self) -> None:
        self.active = False
        self._waiting: dict[Hashable, list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, step: Hashable, tensors: list[Tensor]) -> None:
        """Add what one backward pass leaves unreduced; empties `tensors`.

        Sums are new tensors, since those given may share memory with each other or with an input of the step.
        """
        sums = self._waiting.setdefault(step, [])
        if not sums:
            sums += tensors
        else:
            for index in reversed(range(len(sums))):
                sums[index] = sums[index] + tensors.pop()
        tensors.clear()

    def of(self, step: Hashable) -> list[Tensor]:
        """The sums of one step that wait."""
        return self._waiting.get(step, [])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside finds nothing that waits and reduces at once; then all is as it was."""
        waiting, active = self._waiting, self.active
        self._waiting, self.active = {}, False
        try:
            yield
        finally:
            self._waiting, self.active = waiting, active

    def take(self) -> Iterator[tuple[Hashable, list[Tensor]]]:
        """Hand out what waits, step by step, in the order in which they first waited, which is that of every rank."""
        while self._waiting:
            step = next(iter(self._waiting))
            yield step, self._waiting.pop(step)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
