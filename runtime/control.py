"""Small talk between ranks: one decision for all, and one rank's failure raised on every rank instead of a hang.

Apart from the data's own collectives.  It runs on CPU tensors over gloo, so that it never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar import errors
from autopar._compat import timeout_of_default_group
from autopar.errors import AutoparError, InfeasibleBudgetError
from autopar.runtime.blame import waited_in_vain
from autopar.runtime.watch import watch_job

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks: some exceptions do not survive pickling."""

    type_name: str
    text: str
    smallest_feasible_gb: float = float("nan")

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        smallest = error.smallest_feasible_gb if isinstance(error, InfeasibleBudgetError) else float("nan")
        return cls(type(error).__name__, str(error), smallest)

    def as_error(self, rank: int, doing: str) -> AutoparError:
        """The error that another rank raises: of the same type if it is one of ours."""
        text = f"rank {rank} failed while {doing}: {self.text}"
        error_type = getattr(errors, self.type_name, None)
        if error_type is InfeasibleBudgetError:
            return InfeasibleBudgetError(text, self.smallest_feasible_gb)
        if isinstance(error_type, type) and issubclass(error_type, AutoparError):
            return error_type(text)
        return AutoparError(f"rank {rank} failed while {doing}: {self.type_name}: {self.text}")


def _new_gloo_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout_of_default_group())
    return group


class ControlGroup:
    """All ranks of the job, for decisions.  Every method is a collective: every rank must call it.

    Attributes:
        num_ranks: how many take part; 1 when there is nobody to talk to (no process group, or a fake one).
        rank: this rank.
        watch: over the other ranks; None without any.
    """

    def __init__(self, alone: bool = False) -> None:
        """Over all ranks, or with `alone` of this process only."""
        initialized = not alone and dist.is_available() and dist.is_initialized()
        backend = dist.get_backend() if initialized else "fake"
        self.num_ranks = 1 if backend == "fake" else dist.get_world_size()
        self.rank = 0 if self.num_ranks == 1 else dist.get_rank()
        self._group: dist.ProcessGroup | None = None
        self.watch = watch_job() if self.num_ranks > 1 else None
        if self.num_ranks > 1 and backend != "gloo":
            self._group = _new_gloo_group()

    def __deepcopy__(self, memo: object) -> ControlGroup:
        """A copied module talks to the same ranks."""
        return self

    @cached_property
    def beside(self) -> ControlGroup:
        """The same ranks over connections of their own, for talk that goes on in a thread while these talk.

        Asked for the first time on every rank at once.
        """
        other = ControlGroup(alone=True)
        other.num_ranks, other.rank = self.num_ranks, self.rank
        other._group = _new_gloo_group() if self.num_ranks > 1 else None
        return other

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group; None where that is the default one, or there is none."""
        return self._group

    def all_agree(self, digest: int) -> bool:
        """Whether all ranks hold the same number, 0 <= digest < 2**62; each sends its 8 bytes around.

        An all-reduce would be sent in two pieces a rank, each with its handshake, and take twice the rounds.
        """
        if self.num_ranks == 1:
            return True
        found = list(torch.empty(self.num_ranks, 1, dtype=torch.int64))
        with self._talking():
            dist.all_gather(found, torch.tensor([digest]), group=self._group)
        return all(int(other) == digest for other in found)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order; anything that pickles."""
        if self.num_ranks == 1:
            return [value]
        values: list[T | None] = [None] * self.num_ranks
        with self._talking():
            dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def on_every_rank(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action`, which must not communicate, on every rank; if it fails on any, raise on all.

        Raises:
            Exception: this rank's own error if it has one; else an `AutoparError` of the type of the first failing
                rank's, which says which rank failed while `doing` what.
        """
        failure: _Failure | None = None
        caught: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 (raised below, once the other ranks know)
            caught, failure = error, _Failure.of(error)
        failures = self.gather(failure)
        if caught is not None:
            raise caught
        for rank, other in enumerate(failures):
            if other is not None:
                raise other.as_error(rank, doing)
        return result

    def on_first_rank(self, doing: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone and return its result, or raise its error, on every rank."""
        result = self.on_every_rank(doing, lambda: action() if self.rank == 0 else None)
        if self.num_ranks == 1:
            return result  # type: ignore[return-value]
        shared = [result]
        with self._talking():
            dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]  # type: ignore[return-value]

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Says who is missing when the others do not answer."""
        if self.watch:
            self.watch.takes_part()
        try:
            yield
        except RuntimeError as error:
            raise waited_in_vain(error, "the ranks' agreement on what to do next", self.rank, self.watch) from error
