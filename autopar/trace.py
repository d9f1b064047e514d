"""Trace a module and an example call to one graph of ATen ops, forward and backward, in the global view.

The model's tensors are replaced by fake ones of the same shapes while tracing, so nothing is computed or
allocated: parameters may be on the meta device, or be sharded DTensors (their global shape counts).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autopar._compat import FakeMaker, FakeTensorMode, KnownOps, as_captured, capture_joint, new_fake_mode, value_read
from autopar.captured import Captured, ChangedError, captured_by_aot, has_symbol, joint_graph, pairs_selected
from autopar.errors import AutoparError, InputError, TraceError
from autopar.flat_module import FlatModule
from autopar.fold import find_runs, find_stacks, held_only, is_unmoved
from autopar.graph import GraphInput, JointGraph
from autopar.graph_writer import GraphWriter, UnwritableError
from autopar.known_values import ActingError, KnownValues
from autopar.model_state import ModelState
from autopar.opaque_trace import OpaqueModules, hold_calls
from autopar.ownership import annotate_modules
from autopar.precision import cast_inputs, used_dtypes
from autopar.records import KnownResults, Record, record_call
from autopar.selected_sizes import is_unfollowed
from autopar.signature import (
    CallSignature,
    OutputTree,
    call_signature,
    check_call,
    find_batch_dims,
    flatten_inputs,
)
from autopar.trace_errors import (
    StopsAtWrite,
    WrittenError,
    acting_error,
    place_of,
    reads_itself,
    trace_error,
    unfollowed_error,
)
from autopar.unfold import check_unfolds, whole_names

_LOGGER = logging.getLogger(__name__)

__all__ = ["OutputTree", "find_batch_dims", "flatten_inputs", "trace"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_ranks: int = 1,
    batch_dims: Mapping[str, int | None] | None = None,
    train: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    fold: bool = False,
    opaque: bool = False,
) -> JointGraph:
    """Trace `model(*args, **kwargs)` for the batch of all ranks together.

    With `train`, the graph also holds the backward pass: gradients of every parameter that requires one, given the
    gradients ("tangents") of some outputs. If the module returns at least one 0-dim floating tensor that requires
    grad, only those outputs (the loss) get tangents, and the others are returned detached.  Otherwise every
    floating output that requires grad gets one.  Inputs never get gradients.

    The model is run as it is: call `model.train()` or `model.eval()` before.  It is left as it was found.

    Args:
        model: any module; its parameters may be on the meta device.
        args, kwargs: an example of what one rank calls the model with; only shapes and dtypes of tensors matter, and
            everything else is a constant of the graph.
        num_ranks: the graph's batch is this many times the example's.
        batch_dims: by input path, the batch dim or None, where `find_batch_dims` is wrong.
        train: trace the backward pass too.
        device: device type that the graph is for; by default the model's own, or for a meta model CUDA if there is
            one, else CPU.
        dtype: what the model computes in, while its parameters rest in their own dtype (see `autopar.precision`); by
            default what the dtypes of its tensors give.
        fold: of each run of alike blocks trace four only (see `JointGraph.runs` and `autopar.unfold`), where that gives
            the same program.
        opaque: make modules that read values of tensors one op each, which runs whole on every rank (see
            `autopar.opaque_trace`), rather than refuse the model.

    Returns:
        The graph.  It takes every tensor contiguous.  Its `output_tree` is an `OutputTree`.

    Raises:
        InputError: if the example does not fit, see `find_batch_dims`.
        TraceError: if the model cannot be one graph: it looks at tensor values, changes its inputs, ….
    """
    signature, tensors = call_signature(args, kwargs)
    dims = find_batch_dims(args, kwargs, batch_dims)
    _refuse_scripted(model)
    if not model._forward_pre_hooks:  # which may change the call
        check_call(model, signature)
    if train:
        _refuse_input_gradients(signature, tensors)
    shapes = [_global_shape(t, dims.get(path), num_ranks) for path, t in zip(signature.paths, tensors, strict=True)]

    used = used_dtypes(model, dtype)
    with annotate_modules(model), cast_inputs(model, used):
        whole = ModelState(model)
        call = _Call(model, signature, used, tensors, shapes, _target_device(whole, device), train, dims, dtype)
        try:
            joint = call.whole_joint(whole, fold)
        except TraceError as error:
            if not opaque or error.__cause__ is None or value_read(error.__cause__) is None:
                raise
            call.find_opaque(whole, error)
            joint = call.whole_joint(whole, fold)
            hold_calls(joint.module.graph)
        call.check_side_effects(whole)
        return joint


@dataclass
class _Call:
    """What is traced: a model, and what it is called with."""

    model: nn.Module
    signature: CallSignature
    used: Mapping[int, torch.dtype]
    tensors: Sequence[torch.Tensor]
    shapes: Sequence[Sequence[int]]
    device: torch.device
    train: bool
    batch_dims: Mapping[str, int]
    dtype: torch.dtype | None
    known: KnownOps = field(default_factory=dict)
    follows_masks: bool = True
    opaque: OpaqueModules | None = None

    def whole_joint(self, state: ModelState, fold: bool) -> JointGraph:
        """The graph of the model, folded if that is wanted and can be."""
        return (fold and self.folded(state)) or self.joint(state)

    def find_opaque(self, state: ModelState, error: TraceError) -> None:
        """Find the modules that read values and can be one op each, from now on.

        Raises:
            TraceError: if there are none, or the model itself would have to be one: `error`, and why.
        """
        mode = new_fake_mode(False, self.known)
        inputs = self._fakes(state, mode)
        self.follows_masks = False  # a module that is called whole cannot be given selected rows
        self.opaque = OpaqueModules(self.model, bool(self.used))

        def run() -> None:
            try:
                with self._grad_mode(), as_captured(mode), mode, KnownValues():
                    self._flat(state).run(*inputs)
            finally:
                state.restore()

        try:
            self.opaque.search(run)
        except AutoparError:
            raise
        except Exception as found:  # noqa: BLE001  (what `error` says, of the model itself)
            _LOGGER.debug("no module smaller than the model: %s", found)
            raise TraceError(f"{error}. {self.opaque.why_not()}") from error.__cause__
        if not self.opaque.places:
            raise error

    def _flat(self, state: ModelState) -> FlatModule:
        forwards = {} if self.opaque is None else self.opaque.forwards()
        return FlatModule(self.model, state, self.signature, self.used, forwards, self.follows_masks)

    def joint(self, state: ModelState) -> JointGraph:
        """The graph of the model as it is now, whose state is `state`."""
        try:
            return self._written(state, {}, KnownResults(new_fake_mode(known=self.known)))[1]
        except ActingError as error:
            raise acting_error(error, state.paths) from error
        except Exception as error:  # noqa: BLE001  (the model's own: AOTAutograd meets it again)
            _LOGGER.debug("not written as the model runs: %s", error)
        try:
            return self._captured(state)
        except TraceError as error:
            if not is_unfollowed(error.__cause__):
                raise
            self.follows_masks = False  # what is selected may go nowhere
            try:
                return self._captured(state)
            except TraceError as refused:
                raise unfollowed_error(refused, error.__cause__, state.paths) from refused.__cause__

    def _captured(self, state: ModelState) -> JointGraph:
        """The same by AOTAutograd, of any model."""
        try:
            captured, flat = self._capture(state, allow_value_reads=True)
        except TraceError as error:
            if error.__cause__ is not None and value_read(error.__cause__):
                self._refuse_reading_op(state)
            raise
        try:
            joint = joint_graph(captured_by_aot(captured, flat), flat, self.batch_dims)
        except ChangedError as error:
            raise ChangedError(error.changed, self._place_of_change(state, error.changed)) from None
        if any(has_symbol(node.meta.get("val")) or pairs_selected(node) for node in joint.module.graph.nodes):
            # Values of tensors became symbols.  Trace again with such reads forbidden, only to learn where they are.
            self._capture(state, allow_value_reads=False)
            raise TraceError("the model's shapes or scalars depend on the values of tensors, so it is no single graph")
        return joint

    def _place_of_change(self, state: ModelState, changed: GraphInput) -> str:
        """Where the model's code first changes a tensor in place; empty if no call of a function does."""
        flat, mode = self._flat(state), new_fake_mode(known=self.known)
        inputs = self._fakes(state, mode)
        try:
            with self._grad_mode(), as_captured(mode), mode, StopsAtWrite(inputs[flat.inputs.index(changed)]):
                flat.run(*inputs)
        except WrittenError as error:
            return place_of(error, state.paths)
        except Exception as error:  # noqa: BLE001  (values that this fake mode does not have: the name must do)
            _LOGGER.debug("no place of a change found: %s", error)
        finally:
            state.restore()
        return ""

    def _refuse_reading_op(self, state: ModelState) -> None:
        """Raise where a function of PyTorch's reads a value: what fails is only what it does with the value then."""
        try:
            self._capture(state, allow_value_reads=False)
        except TraceError as error:
            if error.__cause__ is not None and reads_itself(error.__cause__):
                raise

    def _written(
        self, state: ModelState, numbers: dict[Hashable, int], known: KnownResults
    ) -> tuple[Record, JointGraph]:
        """A record of the model as it is now, and the graph that is written meanwhile.

        Raises:
            UnwritableError: if it cannot be written so.
        """
        flat = self._flat(state)
        inputs = self._fakes(state, known.mode)
        writer = GraphWriter(flat, inputs, known)
        with self._grad_mode(), KnownValues():
            record = record_call(flat, inputs, numbers, known, writer)
        if any(map(pairs_selected, writer.module.graph.nodes)):
            raise UnwritableError("a mask selects together with other positions")
        captured = Captured(writer.module, writer.inputs, writer.outputs)
        return record, joint_graph(captured, flat, self.batch_dims)

    def _capture(self, state: ModelState, allow_value_reads: bool) -> tuple[fx.GraphModule, FlatModule]:
        flat = self._flat(state)
        mode = new_fake_mode(allow_value_reads, self.known)
        inputs = self._fakes(state, mode)
        try:
            with self._grad_mode(), KnownValues():
                return capture_joint(flat, inputs, mode), flat
        except AutoparError:
            raise
        except ActingError as error:
            raise acting_error(error, state.paths) from error
        except Exception as error:  # whatever the model raises, reported with its place
            raise trace_error(error, state.paths, self.dtype, self._all_rows()) from error
        finally:
            state.restore()

    def _all_rows(self) -> dict[str, Sequence[int]]:
        """The shapes that inputs are traced with, by path, if the rows of several ranks are put together."""
        is_one_rank = all(tuple(t.shape) == tuple(s) for t, s in zip(self.tensors, self.shapes, strict=True))
        return {} if is_one_rank else dict(zip(self.signature.paths, self.shapes, strict=True))

    def _fakes(self, state: ModelState, mode: FakeTensorMode) -> tuple[torch.Tensor, ...]:
        make = FakeMaker(mode)
        fakes = [_fake_like(t, t.shape, self.device, make, self.train) for t in state.tensors.values()]
        fakes += [_fake_like(t, shape, self.device, make) for t, shape in zip(self.tensors, self.shapes, strict=True)]
        return tuple(fakes)

    @contextmanager
    def _grad_mode(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.set_grad_enabled(self.train):
            yield

    def folded(self, whole: ModelState) -> JointGraph | None:
        """The graph with only some of each run of alike units; None if there is none that tells the others' nodes."""
        stacks = find_stacks(self.model)
        if not stacks:
            return None
        known = KnownResults(new_fake_mode(known=self.known))
        numbers: dict[Hashable, int] = {}
        try:
            everything = self._record(whole, numbers, known)
            runs = find_runs(everything, whole, stacks)
            if not runs:
                return None
            with held_only(self.model, runs):
                state = ModelState(self.model)
                try:
                    held, joint = self._written(state, numbers, known)
                except UnwritableError as error:
                    _LOGGER.debug("not written as the model runs: %s", error)
                    held, joint = self._record(state, numbers, known), None
                if not is_unmoved(everything, held, runs):
                    return None
                joint = joint or self._captured(state)
            joint.runs = runs
            check_unfolds(joint)
            inputs, _, tied = whole_names(joint)
            expected = self._flat(whole).inputs
            if inputs[: len(expected)] != expected or tied != whole.tied:  # a tensor of a unit has a name elsewhere
                return None
        except Exception as error:  # noqa: BLE001  (the model's own: tracing all of it meets it again, or it is not its)
            _LOGGER.debug("not folded: %s", error)
            return None
        return joint

    def check_side_effects(self, state: ModelState) -> None:
        """Look at what the forward has left on the modules, which a program does not: it is a trace's once.

        Raises:
            TraceError: if a number there is another one after each call.
        """
        kept = [place for place, value in state.left.items() if getattr(value, "requires_grad", False)]
        if kept:
            warnings.warn(
                f"the model's forward keeps {_some(kept)}, which autograd follows: the compiled program leaves it as it"
                " was before the first call, so return it from forward if a loss or anything else reads it",
                stacklevel=2,
            )
        first = {place: value for place, value in state.left.items() if not isinstance(value, torch.Tensor)}
        if not first:
            return
        again = self._after_another_call(state)
        counters = [f"{place} ({value!r}, then {again[place]!r})" for place, value in first.items() if place in again]
        if counters:
            raise TraceError(
                f"the model's forward changes {_some(counters)} at each call, but Python runs once, while the model is"
                " traced: register it as a buffer (a tensor, which forward may add to), count outside of forward and"
                " pass it in, or leave it out"
            )

    def _after_another_call(self, state: ModelState) -> dict[str, Any]:
        """What differs, by place, when the model is called again as the first call left it."""
        known = KnownResults(new_fake_mode(known=self.known))
        flat = self._flat(state)
        inputs = self._fakes(state, known.mode)
        args, kwargs = self.signature.rebuild(inputs[len(state.tensors) :])
        grad_mode = torch.no_grad() if self.opaque is None else self._grad_mode()  # which tells its calls apart
        try:
            with as_captured(known.mode), known.mode, grad_mode, KnownValues():
                flat.run(*inputs)
                before = dict(state.left)
                if self.opaque is not None:
                    self.opaque.called_again = True
                flat.called(args, kwargs)
                after = state.changes()
        except Exception as error:  # noqa: BLE001  (the model's own, which a first call does not meet)
            _LOGGER.debug("not called again: %s", error)
            return {}
        finally:
            state.restore()
        return {place: value for place, value in after.items() if _is_other(value, before.get(place))}

    def _record(self, state: ModelState, numbers: dict[Hashable, int], known: KnownResults) -> Record:
        flat = self._flat(state)
        with self._grad_mode(), KnownValues():
            return record_call(flat, self._fakes(state, known.mode), numbers, known)


def _is_other(value: Any, before: Any) -> bool:
    return not isinstance(value, torch.Tensor) and (type(value) is not type(before) or bool(value != before))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _target_device(state: ModelState, device: torch.device | str | None) -> torch.device:
    """The device type to trace for.  Never CUDA where there is none: a fake CUDA tensor that requires grad aborts."""
    if device is None:
        types = {t.device.type for t in state.tensors.values()}
        real = sorted(types - {"meta", "cpu"})
        if real:
            device = real[0]
        else:
            device = "cuda" if "meta" in types and torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    return torch.device("cpu") if chosen.type == "cuda" and not torch.cuda.is_available() else chosen


def _fake_like(
    tensor: torch.Tensor, shape: Sequence[int], device: torch.device, make: FakeMaker, train: bool = False
) -> torch.Tensor:
    """A contiguous fake tensor.  A parameter is one again if its gradient is wanted."""
    fake = make(torch.empty(tuple(shape), dtype=tensor.dtype, device="meta"), device)
    return fake.requires_grad_(train and tensor.requires_grad and isinstance(tensor, nn.Parameter))


def _global_shape(tensor: torch.Tensor, batch_dim: int | None, num_ranks: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if batch_dim is not None:
        shape[batch_dim] *= num_ranks
    return tuple(shape)


def _refuse_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"module {path or '(root)'} is TorchScript: give the Python module that it was made from")


def _refuse_input_gradients(signature: CallSignature, tensors: Sequence[torch.Tensor]) -> None:
    for path, tensor in zip(signature.paths, tensors, strict=True):
        if tensor.requires_grad:
            raise InputError(
                f"input {path} requires grad, but only parameters get gradients: detach it, or move what computes it"
                " into the model"
            )
