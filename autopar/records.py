"""What a model does when it is called: every op that it runs, what each reads, and which block of a stack runs it.

A record is made by running the forward pass on fake tensors.  It is compared, not executed: two blocks whose stretches
of a record are alike do the same, forward and backward.  A `GraphWriter` makes a graph of what is recorded meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from autopar._compat import (
    FakeMaker,
    FakeTensor,
    FakeTensorMode,
    QuickDispatchMode,
    as_captured,
    autograd_nodes,
    device_of,
    is_custom_function,
    is_plain_fake,
    meta_of,
    sequence_number,
    tree_map_only,
    values_of,
)
from autopar.flat_module import FlatModule
from autopar.graph import GraphOutput
from autopar.graph_writer import GraphWriter
from autopar.ownership import current_module
from autopar.regions import prefixes

Token = Hashable
"""What an op reads: the name of a parameter, buffer or input, the position of the op that made it and which of its
results it is, or the value of a constant."""


@dataclass(frozen=True)
class Extent:
    """A block's stretch of a record: `[start, end)` of its ops, and the same of the nodes of autograd's graph."""

    start: int
    end: int
    grad_start: int
    grad_end: int


@dataclass
class Record:
    """One call of a model.

    Attributes:
        ops: for each op a number that stands for the op, its constants, and the shapes and dtypes of its results.
        reads: what each op reads, and last the path of the module that calls it.
        grads_at: how many nodes autograd had made when each op's function was called.
        grads: the nodes of autograd's graph, as they were made: their sequence number and a number that stands for
            the kind and the constants of a user's own function.
        outputs: what the call returns and which buffers it replaces: by what, and whether that requires grad.
    """

    ops: list[int] = field(default_factory=list)
    reads: list[tuple[Token, ...]] = field(default_factory=list)
    grads_at: list[int] = field(default_factory=list)
    grads: list[tuple[int, int]] = field(default_factory=list)
    outputs: dict[GraphOutput, tuple[Token, bool]] = field(default_factory=dict)

    def extents(self, blocks: Iterable[str]) -> dict[str, Extent]:
        """Where each of the modules `blocks` runs, from its first op to its last; those without ops are left out."""
        wanted = set(blocks)
        positions: dict[str, list[int]] = {}
        within: dict[str, list[str]] = {}
        for at, read in enumerate(self.reads):
            path = cast(str, read[-1])
            if path not in within:
                within[path] = [block for block in prefixes(path) if block in wanted]
            for block in within[path]:
                positions.setdefault(block, [at, at])[1] = at
        return {
            block: Extent(first, last + 1, self.grads_at[first], self.grads_at[last])
            for block, (first, last) in positions.items()
        }


def record_call(
    flat: FlatModule,
    inputs: Sequence[torch.Tensor],
    numbers: dict[Hashable, int],
    known: KnownResults,
    writer: GraphWriter | None = None,
) -> Record:
    """Run a model once, under `annotate_modules`.

    Args:
        flat: the model; its state is as it was afterwards.
        inputs: its arguments, tensors of `known.mode`.
        numbers: the numbers that stand for ops; records that share it can be compared.
        known: results of ops; records that share it take less time.
        writer: writes the joint graph of what is recorded.

    Raises:
        UnwritableError: if the writer cannot write that graph.
    """
    recorder = _Recorder(flat, numbers, known, writer)
    try:
        with as_captured(known.mode), known.mode, recorder:
            with _Functions(recorder):
                outputs, reassigned = flat.run(*inputs)
            recorder.end(outputs, reassigned)
            if writer is not None:
                writer.finish(flat, inputs, flat.returned(outputs, reassigned))
    finally:
        flat.state.restore()
    return recorder.record


def _kinds_of_nodes(roots: Iterable[Any]) -> list[tuple[int, Hashable]]:
    """Sequence number and kind of every node of an autograd graph that stands for an op, as they were made."""
    found: list[tuple[int, Hashable]] = []
    for node in autograd_nodes(roots):
        kind: Hashable = node.name()
        if kind == _LEAF:
            continue
        if is_custom_function(node):
            kind = (type(node), tuple((name, _attribute(value)) for name, value in sorted(vars(node).items())))
        found.append((node._sequence_nr(), kind))
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


class KnownResults:
    """Results of ops on fake tensors, to be had again for the same op on tensors of the same kinds.

    A fake tensor mode remembers them, too, but takes several times as long to find and make one.  These share no memory
    with what the op reads, which nothing that is recorded depends on.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self._fake = mode, FakeMaker(mode)
        self._found: dict[int, Any] = {}

    def result(self, op: int) -> Any:
        """New tensors like those that an op gave; None if that is not known."""
        found = self._found.get(op)
        if isinstance(found, list):
            return [self._fake(*one) for one in found]
        return None if found is None else self._fake(*found)

    def value(self, op: int, result: Any) -> Any:
        """What `result` of an op is like, in fake tensors that have no part in autograd's graph."""
        # Each is an object of its own: who traces a part of a graph tells its operands apart by their identity.
        return self.result(op) if op in self._found else tree_map_only(FakeTensor, self.like, result)

    def like(self, tensor: FakeTensor) -> FakeTensor:
        """A tensor of the size, strides, dtype and device of another."""
        return self._fake(meta_of(tensor), tensor.fake_device)

    def add(self, op: int, func: Any, reads: Sequence[torch.Tensor], result: Any) -> None:
        """Note what an op gave, if it would give the same again."""
        results = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable or not all(map(is_plain_fake, (*reads, *results))):
            return
        kept = [(meta_of(one), one.fake_device) for one in results]
        self._found[op] = kept if isinstance(result, (list, tuple)) else kept[0]


class _Recorder(QuickDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down each op that is called while it is active and the model's own code runs."""

    def __init__(
        self, flat: FlatModule, numbers: dict[Hashable, int], known: KnownResults, writer: GraphWriter | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._writer = known, writer
        self._kinds: dict[int, int] = {}
        self.record = Record()
        self.grads_at = 0  # nodes of autograd's graph when the last function was called
        self._begin = -1  # nodes of autograd's graph when the model's own code begins
        self._ended = False
        self._flat, self._numbers = flat, numbers
        self._tokens: dict[int, Token] = {}
        self._alive: list[torch.Tensor] = []  # so that no two tensors have one id

    def _records(self) -> bool:
        """Whether it is the model's own code that runs: what comes before casts its parameters."""
        if self._begin < 0 and current_module() is not None:
            self._begin = self.grads_at
            self._tokens = {id(t): spec for spec, t in self._flat.held.items()}
            self._alive += self._flat.held.values()
        return self._begin >= 0 and not self._ended

    def end(self, outputs: Sequence[torch.Tensor], reassigned: Mapping[str, torch.Tensor]) -> None:
        """The model has run, and this is what it gave: what is called from now on is not recorded."""
        self._ended = True
        results = [*outputs, *reassigned.values()]
        pairs = zip(self._flat.outputs, results, strict=True)
        self.record.outputs = {spec: (self.token(t), t.requires_grad) for spec, t in pairs}
        nodes = _kinds_of_nodes([t.grad_fn for t in results if t.grad_fn is not None])
        self.record.grads = [(at, self.number(kind)) for at, kind in nodes if at >= self._begin]

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

    def note(self, op: Hashable, reads: torch.Tensor) -> None:
        """Add something that is no op."""
        self._note(self.number(op), [self.token(reads)])

    def _note(self, op: int, reads: Sequence[Token]) -> None:
        self.record.ops.append(op)
        self.record.reads.append((*reads, current_module() or ""))
        self.record.grads_at.append(self.grads_at)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked twice for each op
            return device_of(args[0])
        kwargs = kwargs or {}
        records = self._records()
        if not records and self._writer is None:
            return func(*args, **kwargs)
        reads: list[torch.Tensor] = []
        constants = self._constants(args, reads), self._constants(tuple(kwargs.items()), reads)
        op = self.number((func, constants, tuple(map(self._kind, reads))))
        tokens = [self.token(tensor) for tensor in reads] if records else []
        result = self._known.result(op)
        if result is None:
            result = func(*args, **kwargs)
            self._known.add(op, func, reads, result)
        if self._writer is not None:
            self._writer.call(func, args, kwargs, result, self._known.value(op, result))
        if records:
            position = len(self.record.ops)
            results = result if isinstance(result, (tuple, list)) else (result,)
            for index, tensor in enumerate(results):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in self._tokens:
                    self._tokens[id(tensor)] = (position, index)
                    self._alive.append(tensor)
            self._note(op, tokens)
        return result

    def _kind(self, tensor: torch.Tensor) -> int:
        """The number that stands for a tensor's shape, strides, dtype and device."""
        found = self._kinds.get(id(tensor))
        if found is None:
            found = self.number(_described(tensor))
            if id(tensor) in self._tokens:
                self._kinds[id(tensor)] = found
        return found

    def _constants(self, values: Iterable[Any], reads: list[torch.Tensor]) -> Hashable:
        """The values with tensors left out, which go to `reads`."""
        found: list[Hashable] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                reads.append(value)
                found.append(None)
            elif isinstance(value, (list, tuple)):
                found.append(self._constants(value, reads))
            else:
                found.append((type(value), value))
        return tuple(found)


class _Functions(TorchFunctionMode):
    """Sees what the model calls before autograd does: how far that is, and hooks, which act in the backward pass."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._recorder.grads_at = sequence_number()
        if func is torch.Tensor.register_hook:
            self._recorder.note((func, args[1]), args[0])
        return func(*args, **(kwargs or {}))


_MAX_CONSTANT = 4096  # elements; larger ones are equal only if they are the same


def _described(result: Any) -> Hashable:
    if isinstance(result, torch.Tensor):
        return (tuple(result.shape), result.stride(), result.dtype, device_of(result))
    return (type(result), result)
