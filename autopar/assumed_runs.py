"""Find out what a call of a module gives and takes, whatever values it reads, by runs on assumed ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autopar._compat import function_modes, not_captured, storage_id
from autopar.assumed_values import (
    ASSUMPTIONS,
    AssumedValues,
    Assumption,
    AssumptionError,
    RandomError,
    WriteError,
    even_assumptions,
)
from autopar.errors import AutoparError, TraceError
from autopar.exclusive_masks import ExclusiveMasks
from autopar.graph import describe_value
from autopar.opaque import Estimate, OpaqueCall, TensorKind, UnfitError
from autopar.opaque_module import PLAIN, Given, ModuleCall
from autopar.single_device import Float64Throughout

Then = Callable[[Sequence[Tensor], Given], None]
"""What is done while values are assumed with the tensors of a call and what it gave."""


@dataclass(frozen=True)
class _Run:
    """What a module gave under an assumption, and was given."""

    assumption: Assumption
    given: Given
    values: AssumedValues
    given_to: Sequence[Tensor]

    @property
    def peak_bytes(self) -> int:
        """The most that was alive of what the module made."""
        return self.values.peak_bytes


@dataclass(frozen=True)
class AssumedRuns:
    """A call of a module, to be run on assumed values.

    Attributes:
        call: the call.
        tensors: fake ones of the kinds that it gets; they are left alone.
        path, place: the module's path, and the line for which it is run so.
    """

    call: ModuleCall
    tensors: Sequence[Tensor]
    path: str
    place: str

    def find_out(self) -> tuple[OpaqueCall, Given, tuple[tuple[int, int], ...]]:
        """The call as one op, what it gives, and which results may share memory with which of its tensors.

        Raises:
            UnfitError: if it cannot be one op.
            TraceError: if no module around it can either.
        """
        runs = self._runs()
        _check_alike(runs)
        first = runs[0]
        if not first.given.tensors:
            raise UnfitError("it gives no tensor")
        self._check_counters(first)
        followed = [i for i in range(len(first.given.tensors)) if any(r.given.tensors[i].requires_grad for r in runs)]
        wanted = [i for i, t in enumerate(self.tensors) if t.requires_grad] if followed else []
        forward, backward = self._estimates(runs)
        opaque = OpaqueCall(
            path=self.path, place=self.place, run=partial(_run, self.call, first.given.key()),
            given=tuple(map(TensorKind.of, self.tensors)), results=_results(runs), wanted=tuple(wanted),
            followed=tuple(followed), forward=forward, backward=backward,
            modes=tuple(mode for mode in function_modes() if isinstance(mode, Float64Throughout)),
        )  # fmt: skip
        return opaque, first.given, _aliases(runs)

    def _runs(self) -> list[_Run]:
        """The runs that get to the end; two at least read different values, if any do."""
        runs: list[_Run] = []
        failure: Exception | None = None
        for assumption in (*ASSUMPTIONS, *even_assumptions(self.tensors)):
            try:
                runs.append(self._assume(assumption))
            except (UnfitError, AutoparError):
                raise
            except Exception as error:  # noqa: BLE001  (the module's own, which takes other values than the assumed)
                failure = failure or error
        if failure is not None and len({tuple(run.values.answers) for run in runs}) < 2:
            words = str(failure).strip().partition("\n")[0]
            raise UnfitError(
                f"it fails on most of the values that were assumed ({type(failure).__name__}: {words})"
            ) from failure
        return runs

    @property
    def _where(self) -> str:
        return f"module {self.path}, which runs whole on every rank ({self.place}),"

    def _assume(
        self,
        assumption: Assumption,
        then: Then | None = None,
        counts: Sequence[int] = (),
        call: ModuleCall | None = None,
    ) -> _Run:
        """Run a module on assumed values.

        Args:
            assumption: what it reads.
            then: called meanwhile.
            counts: of `ExclusiveMasks`.
            call: another call of it.
        """
        given_to = [_like(tensor) for tensor in self.tensors]
        values = AssumedValues(assumption, given_to, ExclusiveMasks(counts))
        try:
            with not_captured(), values.active():
                given = (call or self.call).run(given_to)
                if then is not None:
                    then(given_to, given)
        except WriteError as error:
            raise self._changes(error.position) from error
        except RandomError as error:
            raise TraceError(
                f"{self._where} calls {error}, whose random numbers would be others on each"
                " rank: draw them outside of that module and pass them in, move dropout out of it, or leave it out"
                " (p=0)"
            ) from error
        except AssumptionError as error:
            raise UnfitError(str(error)) from error
        return _Run(assumption, given, values, given_to)

    def _changes(self, position: int) -> Exception:
        """An error for what a module writes to."""
        paths = [path for path, _ in self.call.module.named_modules()]
        slots = [(inner, key) for inner, _, key, at in self.call.slots if at == position]
        held = [".".join(filter(None, (self.path, paths[inner], key))) for inner, key in slots]
        if not held:
            return UnfitError("it changes a tensor in place that it is given")
        return TraceError(
            f"{self._where} changes {held[0]} in place: only what a module returns may come"
            " out of such a one; change the buffer in a module that reads no values"
        )

    def _check_counters(self, run: _Run) -> None:
        """Raise if a second call sets other numbers than the first."""
        own = tuple((m, name, v) for (m, name), v in run.given.settings.items() if isinstance(v, PLAIN))
        if not own:
            return
        call = replace(self.call, settings=(*self.call.settings, *own))
        again = self._assume(run.assumption, call=call).given.settings
        if changed := [name for module, name, value in own if again.get((module, name), value) != value]:
            raise UnfitError(f"it sets {', '.join(changed)} to another value at each call")

    def _estimates(self, runs: Sequence[_Run]) -> tuple[Estimate, Estimate]:
        """What the module takes forward, and forward and backward again.

        FLOPs are those of even shares.  Memory of the forward is the most of any run.  That of the backward is bounded
        by the run that takes all rows each time, and by the one that deals them out and, beside it, one part that has
        all of them.
        """
        most, even = self._most(runs)
        chosen = even or most
        with torch.no_grad():
            forward = max(self._peak(run) for run in {id(r): r for r in (most, chosen)}.values())
        bytes_all, bytes_even = (self._peak(run, _differentiate) for run in (most, chosen))
        backward = max(bytes_even, min(bytes_all, bytes_even + forward))
        made = sum(t.nbytes for t in most.given.tensors), sum(t.nbytes for t in self.tensors if t.requires_grad)
        flops = chosen.values.flops
        return Estimate(flops, max(0, forward - made[0])), Estimate(3 * flops, max(0, backward - made[1]))

    def _most(self, runs: Sequence[_Run]) -> tuple[_Run, _Run | None]:
        """The run that takes most memory, and the one that does of those that deal all work out, if these succeed."""
        even = [run for run in runs if run.assumption.shared]
        for index, run in enumerate(even):
            with contextlib.suppress(Exception):  # the module's own, which takes other values
                if counts := run.values.masks.counts:
                    even[index] = self._assume(run.assumption, counts=counts)
        return max(runs, key=_peak), max(even, key=_peak, default=None)

    def _peak(self, run: _Run, then: Then | None = None) -> int:
        """Bytes that a run takes, again as it is now."""
        counts = run.values.masks.counts if run.assumption.shared else ()
        with contextlib.suppress(Exception):  # what cannot be differentiated fails when it is
            return self._assume(run.assumption, then, counts).peak_bytes
        return run.peak_bytes


def _peak(run: _Run) -> int:
    return run.peak_bytes


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same kind, no leaf of autograd's graph: a module may try to change it in place."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.requires_grad:
        with torch.enable_grad():
            return made.requires_grad_().clone()
    return made


def _run(call: ModuleCall, key: Hashable, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a module gives and sets, as it did when it was traced but for values of tensors."""
    given = call.run(tensors)
    if given.key() != key:
        raise UnfitError("it gives or sets something else than when it was traced")
    return given.tensors


def _differentiate(given_to: Sequence[Tensor], given: Given) -> None:
    roots = [tensor for tensor in given.tensors if tensor.requires_grad]
    if not roots:
        return
    leaves = [tensor for tensor in given_to if tensor.requires_grad]
    torch.autograd.grad(roots, leaves, [torch.empty_like(root) for root in roots], allow_unused=True)


def _check_alike(runs: Sequence[_Run]) -> None:
    """Raise if shapes, dtypes or what is no tensor depend on what was assumed."""
    texts = {describe_value(run.given.tensors): None for run in runs}
    if len(texts) > 1:
        raise UnfitError(f"shapes of what it gives depend on values: {' or '.join(texts)}")
    if len({run.given.key() for run in runs}) > 1:
        raise UnfitError("what it gives besides tensors depends on values")


def _results(runs: Sequence[_Run]) -> tuple[TensorKind, ...]:
    """The kinds of results; contiguous where strides depend on values."""
    kinds = []
    for same in zip(*(run.given.tensors for run in runs), strict=True):
        found = {TensorKind.of(tensor) for tensor in same}
        kinds.append(found.pop() if len(found) == 1 else TensorKind.of(same[0].new_empty(same[0].shape)))
    return tuple(kinds)


def _aliases(runs: Sequence[_Run]) -> tuple[tuple[int, int], ...]:
    """Which results may share memory with which tensors that the module is given."""
    found = set()
    for run in runs:
        storages = {storage_id(tensor): position for position, tensor in enumerate(run.given_to)}
        for position, tensor in enumerate(run.given.tensors):
            if storage_id(tensor) in storages:
                found.add((position, storages[storage_id(tensor)]))
    return tuple(sorted(found))
