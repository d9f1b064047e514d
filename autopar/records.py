"""What a model does when it is called: every op that it runs, what each reads, and which block of a stack runs it.

A record is made by running the forward pass on fake tensors, without a graph.  It is compared, not executed: two blocks
whose stretches of a record are alike do the same, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    around_calls,
    as_captured,
    is_custom_function,
    sequence_number,
    values_of,
)
from autopar.flat_module import FlatModule
from autopar.graph import GraphOutput
from autopar.model_state import ModelState
from autopar.regions import prefixes

Token = Hashable
"""What an op reads: the name of a parameter, buffer or input, the position of the op that made it and which of its
results it is, or the value of a constant."""


@dataclass
class Extent:
    """A block's stretch of a record: `[start, end)` of its ops, and the same of the nodes of autograd's graph."""

    start: int
    grad_start: int
    end: int = 0
    grad_end: int = 0


@dataclass
class Record:
    """One call of a model.

    Attributes:
        ops: for each op a number that stands for the op, its constants, and the shapes and dtypes of its results.
        reads: what each op reads, and last the path of the module that calls it.
        grads: the nodes of autograd's graph, as they were made: their sequence number and a number that stands for
            the kind and the constants of a user's own function.
        extents: by path, those of the blocks that were asked for and ran.
        outputs: what the call returns and which buffers it replaces, and by what.
    """

    ops: list[int] = field(default_factory=list)
    reads: list[tuple[Token, ...]] = field(default_factory=list)
    grads: list[tuple[int, int]] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    outputs: dict[GraphOutput, tuple[Token, bool]] = field(default_factory=dict)


def record_call(
    model: nn.Module,
    make_flat: Callable[[], FlatModule],
    make_inputs: Callable[[ModelState], Sequence[torch.Tensor]],
    blocks: Iterable[str],
    numbers: dict[Hashable, int],
    mode: FakeTensorMode,
) -> Record:
    """Run a model once.

    Args:
        model: the module; it is left as it was.
        make_flat: makes the function that is run; called with this record's wrappers in place.
        make_inputs: makes its arguments, tensors of `mode`.
        blocks: paths of the modules whose extents are wanted.
        numbers: the numbers that stand for ops; records that share it can be compared.
        mode: the fake tensor mode of the run.
    """
    recorder = _Recorder(blocks, numbers)
    with around_calls(model, recorder.call):
        flat = make_flat()
        recorder.flat = flat
        inputs = make_inputs(flat.state)
        try:
            with as_captured(mode), mode, recorder, _Hooks(recorder):
                outputs, reassigned = flat.run(*inputs)
        finally:
            flat.state.restore()
    results = [*outputs, *reassigned.values()]
    record = recorder.record
    record.outputs = {spec: (recorder.token(t), t.requires_grad) for spec, t in zip(flat.outputs, results, strict=True)}
    nodes = _autograd_nodes([t.grad_fn for t in results if t.grad_fn is not None])
    record.grads = [(at, recorder.number(kind)) for at, kind in nodes if at >= recorder.begin]
    return record


def _autograd_nodes(roots: Iterable[Any]) -> list[tuple[int, Hashable]]:
    """Sequence number and kind of every node of an autograd graph that stands for an op, as they were made."""
    seen = set(roots)
    remaining = list(seen)
    found: list[tuple[int, Hashable]] = []
    while remaining:
        node = remaining.pop()
        if node.name() == _LEAF:
            continue
        kind: Hashable = node.name()
        if is_custom_function(node):
            kind = (type(node), tuple((name, _attribute(value)) for name, value in sorted(vars(node).items())))
        found.append((node._sequence_nr(), kind))
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                remaining.append(source)
    return sorted(found, key=lambda pair: pair[0])


_LEAF = "torch::autograd::AccumulateGrad"


def _attribute(value: Any) -> Hashable:
    """What a function of the user's keeps for its backward pass."""
    if isinstance(value, torch.Tensor):
        return _described(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_attribute, value))
    return (type(value), value) if isinstance(value, _PLAIN) else ("object", id(value))


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down each op that is called while it is active and the model's own code runs."""

    def __init__(self, blocks: Iterable[str], numbers: dict[Hashable, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._numbers = numbers
        self.flat: FlatModule | None = None
        self._blocks = set(blocks)
        self._within: dict[str, list[str]] = {}
        self._path: str | None = None
        self.begin = 0  # the sequence number where the model's own code begins
        self._tokens: dict[int, Token] = {}
        self._alive: list[torch.Tensor] = []  # so that no two tensors have one id

    @contextlib.contextmanager
    def call(self, path: str) -> Iterator[None]:
        """Surrounds each call of the module at `path`."""
        if self._path is None:
            assert self.flat is not None
            self.begin = sequence_number()
            held = self.flat.held
            self._tokens = {id(t): spec for spec, t in held.items()}
            self._alive += held.values()
        outer, self._path = self._path, path
        entered = self._enter(path)
        try:
            yield
        finally:
            for extent in entered:
                extent.end, extent.grad_end = len(self.record.ops), sequence_number()
            self._path = outer if outer is not None else path

    def _enter(self, path: str) -> list[Extent]:
        if path not in self._within:
            self._within[path] = [p for p in prefixes(path) if p in self._blocks]
        at = len(self.record.ops), sequence_number()
        return [self.record.extents.setdefault(block, Extent(*at)) for block in self._within[path]]

    def token(self, tensor: torch.Tensor) -> Token:
        """What stands for a tensor."""
        found = self._tokens.get(id(tensor))
        if found is not None:
            return found
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.numel() > _MAX_CONSTANT:
            return ("unknown", id(tensor))
        return ("constant", tensor.dtype, tuple(tensor.shape), repr(values_of(tensor)))

    def number(self, kind: Hashable) -> int:
        """The number that stands for a value."""
        return self._numbers.setdefault(kind, len(self._numbers))

    def note(self, op: Hashable, reads: Sequence[Token]) -> None:
        """Add one op."""
        self.record.ops.append(self.number(op))
        self.record.reads.append((*reads, self._path))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._path is None or func.namespace == "prim":
            return func(*args, **kwargs)
        reads: list[Token] = []
        constants = self._constants(args, reads), self._constants(tuple(kwargs.items()), reads)
        result = func(*args, **kwargs)
        position = len(self.record.ops)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for index, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._tokens:
                self._tokens[id(tensor)] = (position, index)
                self._alive.append(tensor)
        self.note((func, constants, tuple(map(_described, results))), reads)
        return result

    def _constants(self, values: Iterable[Any], reads: list[Token]) -> Hashable:
        """The values with tensors left out, which go to `reads`."""
        found: list[Hashable] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                reads.append(self.token(value))
                found.append(None)
            elif isinstance(value, (list, tuple)):
                found.append(self._constants(value, reads))
            else:
                found.append((type(value), value))
        return tuple(found)


class _Hooks(TorchFunctionMode):
    """Writes down hooks that the model puts on tensors: they act in the backward pass."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            self._recorder.note((func, args[1]), [self._recorder.token(args[0])])
        return func(*args, **(kwargs or {}))


_MAX_CONSTANT = 4096  # elements; larger ones are equal only if they are the same


def _described(result: Any) -> Hashable:
    if isinstance(result, torch.Tensor):
        return (tuple(result.shape), result.stride(), result.dtype, result.device)
    return (type(result), result)
