"""Modules that run whole on every rank as one op, because what they do depends on the values of tensors.

The op takes the module's tensor arguments, parameters and buffers, so that these may rest, be cast and be tied as for
any op.  It has no sharding rule: whole tensors go in and come out, all ranks do the same, and so no collective is
needed inside.  Its gradients are those of running the module again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar._compat import as_outside_of_ops, never_drop, shares_storage, version_of
from autopar.errors import StaleModelError
from autopar.graph import ProcessName, describe_value


class UnfitError(Exception):
    """A call of a module cannot be one op, for the reason that is the text; a module around it may be one."""


@dataclass(frozen=True)
class TensorKind:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorKind:
        """That of a tensor; one whose elements overlap or lie apart is taken for a contiguous one."""
        stride = torch.empty_like(tensor, device="meta").stride()  # which keeps the order of dims
        return TensorKind(tuple(tensor.shape), stride, tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this kind whose values are not set."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Estimate:
    """What a run takes: floating-point operations, and bytes of memory besides what goes in and comes out."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """How a module is called in one place of a model.

    Attributes:
        path: of the module.
        place: the source line for which it is run whole, and why.
        run: calls the module, given its tensors; gives its results, and anew each time the same.
        given: the kinds of its tensors.
        results: what it gives.
        wanted: which of its tensors get gradients.
        followed: which of its results have gradients.
        forward, backward: what a run takes, at most where that depends on values.
        modes: function modes that were active around the model when it was traced, outermost first.
        name: by which the ops find it.
    """

    path: str
    place: str
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    given: tuple[TensorKind, ...]
    results: tuple[TensorKind, ...]
    wanted: tuple[int, ...]
    followed: tuple[int, ...]
    forward: Estimate
    backward: Estimate
    modes: tuple[contextlib.AbstractContextManager[Any], ...] = ()
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.path}#{next(_NUMBERS)}")
        _CALLS[self.name] = self

    def lifted(
        self, mode: contextlib.AbstractContextManager[Any], lift: Callable[[torch.dtype], torch.dtype]
    ) -> OpaqueName:
        """The name of this call in a program with other dtypes, which `mode` gives the module's own casts."""
        kinds = tuple(replace(kind, dtype=lift(kind.dtype)) for kind in self.results)
        return OpaqueName(replace(self, results=kinds, modes=(*self.modes, mode)))

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the module gives, checked and in memory of its own."""
        with torch.inference_mode(False), as_outside_of_ops(), torch.no_grad():
            given = self._as_traced(tensors)
            results = self._checked_run(given)
            own: list[Tensor] = []
            for result, kind in zip(results, self.results, strict=True):
                own.append(_own(result, kind, [*given, *own]))
            return own

    def gradients(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the wanted tensors, zeros where none arrives."""
        with torch.inference_mode(False), as_outside_of_ops(), torch.enable_grad():
            leaves = [tensor.detach() for tensor in self._as_traced(tensors)]
            for index in self.wanted:
                leaves[index].requires_grad_()
            results = self._checked_run(leaves)
            roots = [
                (results[i], grad) for i, grad in zip(self.followed, grads, strict=True) if results[i].requires_grad
            ]
            wanted = [leaves[index] for index in self.wanted]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if roots:
                outputs, given = zip(*roots, strict=True)
                found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)  # such as experts without rows
        filled = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, wanted, strict=True)]
        kinds = [TensorKind(tuple(leaf.shape), leaf.contiguous().stride(), leaf.dtype) for leaf in wanted]
        own: list[Tensor] = []
        for grad, kind in zip(filled, kinds, strict=True):
            own.append(_own(grad, kind, [*grads, *tensors, *own]))
        return own

    def _as_traced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the order in memory in which the module had them when it was traced: a view may need it."""
        pairs = zip(tensors, self.given, strict=True)
        return [
            tensor
            if tensor.stride() == kind.stride and not tensor.is_inference()
            else tensor.new_empty_strided(kind.shape, kind.stride).copy_(tensor)
            for tensor, kind in pairs
        ]

    def _checked_run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        versions = [version_of(tensor) for tensor in tensors]
        states = _generator_states(tensors)
        with contextlib.ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            try:
                results = self.run(tensors)
            except UnfitError as error:
                raise self.stale(f"does another thing than when it was traced: {error}") from error
        if any(version_of(tensor) != version for tensor, version in zip(tensors, versions, strict=True)):
            raise self.stale(
                "changed what it was given, a parameter or a buffer in place, which it did not when traced"
            )
        if not all(map(torch.equal, states, _generator_states(tensors))):
            raise self.stale(
                "drew random numbers, which are not the same on every rank, and which it did not when traced"
            )
        found = [(tuple(result.shape), result.dtype) for result in results]
        if found != [(kind.shape, kind.dtype) for kind in self.results]:
            traced = [kind.empty(torch.device("meta")) for kind in self.results]
            raise self.stale(f"gave {describe_value(results)}, and {describe_value(traced)} when traced")
        return results

    def stale(self, what: str) -> StaleModelError:
        """An error that says what the module did."""
        return StaleModelError(
            f"module {self.path}, which runs whole on every rank ({self.place}), {what}: what a module gives may have"
            " values that depend on data, and nothing else"
        )


class OpaqueName(ProcessName):
    """The name of an `OpaqueCall` as an argument of a graph's nodes, which keeps the call alive."""

    call: OpaqueCall

    def __new__(cls, call: OpaqueCall) -> OpaqueName:
        """The name of `call`."""
        name = super().__new__(cls, call.name)
        name.call = call
        name.shared = f"{call.path}: {call.wanted} {call.followed} {call.forward} {call.backward}"
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueName:
        """Itself: a copied graph calls the same module."""
        return self


_NUMBERS = itertools.count(1)
_CALLS: WeakValueDictionary[str, OpaqueCall] = WeakValueDictionary()


def find_call(name: str) -> OpaqueCall:
    """The call of a name.

    Raises:
        StaleModelError: if no graph that is alive has it: it is a name of another process.
    """
    found = _CALLS.get(name)
    if found is None:
        raise StaleModelError(
            f"module {name.partition('#')[0]} runs whole as its own Python code, which a program's text does not hold:"
            " it runs only in the process that compiled the model; call what parallelize returned, or trace the model"
            " again"
        )
    return found


def _own(value: Tensor, kind: TensorKind, others: Sequence[Tensor]) -> Tensor:
    """The value with the strides of `kind`, in memory that none of `others` shares."""
    value = value.detach()
    if value.stride() == kind.stride and not any(shares_storage(value, other) for other in others):
        return value
    return kind.empty(value.device).copy_(value)


def _generator_states(tensors: Sequence[Tensor]) -> list[Tensor]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]


# ---- the ops ----


@torch.library.custom_op("autopar::run_opaque", mutates_args=())
def run_opaque(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """What a module gives.

    Args:
        tensors: its arguments, each once, then its parameters and its buffers.
        name: of an `OpaqueCall`.
    """
    return find_call(name).values(tensors)


@torch.library.custom_op("autopar::run_opaque_backward", mutates_args=())
def run_opaque_backward(tensors: Sequence[Tensor], grads: Sequence[Tensor], name: str) -> list[Tensor]:
    """Gradients of the wanted among `tensors`.

    Args:
        tensors, name: as of `run_opaque`.
        grads: gradients of the results that have any.
    """
    return find_call(name).gradients(tensors, grads)


OPAQUE_OPS = (torch.ops.autopar.run_opaque.default, torch.ops.autopar.run_opaque_backward.default)
never_drop(OPAQUE_OPS[0])  # it tells if the module does what it did not when traced


@run_opaque.register_fake
def _(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    device = tensors[0].device if tensors else torch.device("cpu")
    return [kind.empty(device) for kind in find_call(name).results]


@run_opaque_backward.register_fake
def _(tensors: Sequence[Tensor], grads: Sequence[Tensor], name: str) -> list[Tensor]:
    wanted = (tensors[index] for index in find_call(name).wanted)
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in wanted]


class _Call(torch.autograd.Function):
    """A call with its gradients: what autograd keeps of it tells alike calls of alike modules by the name alone."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call_name = name
        ctx.save_for_backward(*tensors)
        results = run_opaque(list(tensors), name)
        followed = find_call(name).followed
        ctx.mark_non_differentiable(*(result for index, result in enumerate(results) if index not in followed))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call, tensors = find_call(ctx.call_name), list(ctx.saved_tensors)
        found = run_opaque_backward(tensors, [grads[index] for index in call.followed], ctx.call_name)
        by_index = dict(zip(call.wanted, found, strict=True))
        return None, *(by_index.get(index) for index in range(len(tensors)))


def call_opaque(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """`run_opaque` with gradients."""
    return list(_Call.apply(name, *tensors))  # type: ignore[no-untyped-call]


@register_flop_formula(torch.ops.autopar.run_opaque)
def _forward_flops(tensors: Any, name: str, **_: object) -> int:
    return find_call(name).forward.flops


@register_flop_formula(torch.ops.autopar.run_opaque_backward)
def _backward_flops(tensors: Any, grads: Any, name: str, **_: object) -> int:
    return find_call(name).backward.flops
