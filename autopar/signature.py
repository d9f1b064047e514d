"""What goes into a module's call and what comes out of it: paths of tensors, constants, batch dims, output trees.

A call `model(*args, **kwargs)` is flattened to its tensors, each named by a path: `0` for the first positional
argument, `input_ids` for a keyword, `batch.ids` or `0.ids` for what lies inside a container.  Everything else (numbers,
strings, None, other objects) is a constant of the traced program.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar._compat import TreeSpec, tree_flatten_with_path, tree_unflatten
from autopar.errors import BatchError, InputError


@dataclass(frozen=True)
class CallSignature:
    """The part of a call that is not tensors, and the place of each tensor in it.

    Two calls with equal signatures can run the same traced program if their tensors have equal shapes and dtypes.

    Attributes:
        paths: paths of the tensors, in order.
        slots: for each leaf of the call, its constant, or None for a tensor.
        tree: shape of the nested containers.
    """

    paths: tuple[str, ...]
    slots: tuple[Constant | None, ...]
    tree: TreeSpec

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that changes whenever a constant, a container or the set of tensors does."""
        return (self.paths, self.slots, repr(self.tree))

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The `(args, kwargs)` of a call that has `tensors` in the place of its tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if slot is None else slot.value for slot in self.slots]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return tuple(args), kwargs


@dataclass(frozen=True, eq=False)
class Constant:
    """A non-tensor leaf.  Equal to another one of the same type and value, or that is the same object if it has no
    hash."""

    value: Any

    def _identity(self) -> object:
        try:
            hash(self.value)
        except TypeError:
            return (type(self.value), id(self.value))
        return (type(self.value), self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


def call_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallSignature, list[torch.Tensor]]:
    """Split a call into its signature and its tensors.

    Raises:
        InputError: if two tensors of the call have the same path (a container's key holds a dot), a tensor is not
            dense, or an argument is an array of numpy or holds tensors where they cannot be seen.
    """
    keyed_leaves, tree = tree_flatten_with_path((tuple(args), dict(kwargs)))
    paths: list[str] = []
    tensors: list[torch.Tensor] = []
    slots: list[Constant | None] = []
    for key_path, leaf in keyed_leaves:
        if isinstance(leaf, torch.Tensor):
            paths.append(path_text(key_path[1:]))
            if kind := undivided_kind(leaf):
                raise InputError(f"input {paths[-1]} is a {kind} tensor, and only dense ones can be cut: make it dense")
            tensors.append(leaf)
            slots.append(None)
        else:
            _refuse_hidden_tensors(path_text(key_path[1:]), leaf)
            slots.append(Constant(leaf))
    if len(set(paths)) != len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise InputError(
            f"two input tensors are both called {', '.join(twice)}: rename a dict key so that paths differ"
        )
    return CallSignature(tuple(paths), tuple(slots), tree), tensors


def undivided_kind(tensor: torch.Tensor) -> str:
    """The kind of a tensor that is no plain array and so cannot be cut along its dims; empty for one that can."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")


def _refuse_hidden_tensors(path: str, leaf: object) -> None:
    """An array of numpy, or an object that holds tensors and that PyTorch cannot flatten, would become a constant."""
    if isinstance(leaf, np.ndarray):
        raise InputError(f"input {path} is an array of numpy: pass a tensor, torch.from_numpy({path})")
    held = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
    if not isinstance(leaf, (type, torch.nn.Module)) and any(isinstance(value, torch.Tensor) for value in held):
        raise InputError(
            f"input {path} is a {type(leaf).__name__} that holds tensors, and PyTorch cannot look into it: pass a dict,"
            " or register its class with torch.utils._pytree.register_pytree_node"
        )


def flatten_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, torch.Tensor]], tuple[object, ...]]:
    """The tensors of a call, with their paths, in the order of the traced graph's inputs; and a hashable key.

    A traced program may serve a later call only if the key equals that of the traced call: it covers the nesting of the
    containers, the paths of the tensors and the constants, not the tensors' shapes.
    """
    signature, tensors = call_signature(args, kwargs)
    return list(zip(signature.paths, tensors, strict=True)), signature.key


def check_module(model: object) -> None:
    """Raise an `InputError` for what is no module, such as a class."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be an nn.Module instance, got {model!r}")


def check_call(model: nn.Module, call: CallSignature) -> None:
    """Raise an `InputError` for a call that does not fit the module's `forward`: an unknown keyword, or one too few."""
    try:
        wanted = inspect.signature(model.forward)
    except (TypeError, ValueError):  # not written in Python
        return
    args, kwargs = call.rebuild(call.paths)
    try:
        wanted.bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} positional argument{'s' * (len(args) != 1)}", *map(repr, kwargs)]
        raise InputError(
            f"{type(model).__name__}.forward{wanted} cannot be called with {', '.join(given)}: {error}; give the inputs"
            " that it names"
        ) from None


def split_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read example inputs as positional and keyword arguments.

    Raises:
        InputError: if they are neither a tensor, a tuple or list, nor a mapping.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        values = tuple(example_inputs)
        if len(values) == 2 and isinstance(values[0], (tuple, list)) and isinstance(values[1], Mapping):
            return tuple(values[0]), dict(values[1])
        return values, {}
    raise InputError(
        f"example_inputs must be a tensor, a tuple, a dict or (args, kwargs), not {type(example_inputs).__name__}"
    )


def find_batch_dims(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], overrides: Mapping[str, int | None] | None = None
) -> dict[str, int]:
    """Which dim of each input tensor is the batch.

    The batch size is the size of dim 0 of the first tensor that has one, positional arguments first.  Every
    tensor whose dim 0 has that size is batched there; the others are replicated.

    Args:
        args, kwargs: the call.
        overrides: by path, the batch dim (negative counts from the end), or None for a tensor that is replicated.

    Returns:
        Path -> batch dim, without the tensors that are replicated.

    Raises:
        InputError: if the overrides are no mapping, or one names no tensor of the call or a dim that the tensor lacks.
        BatchError: if the batch has no rows.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InputError(f"batch_dims must be a dict of input path -> dim or None, got {overrides!r}")
    signature, tensors = call_signature(args, kwargs)
    shapes = {path: tuple(tensor.shape) for path, tensor in zip(signature.paths, tensors, strict=True)}
    batch_size = next((shape[0] for shape in shapes.values() if shape), None)
    batch_dims: dict[str, int] = {path: 0 for path, shape in shapes.items() if shape and shape[0] == batch_size}
    for path, dim in (overrides or {}).items():
        if path not in shapes:
            raise InputError(
                f"batch_dims names {path!r}, which is no input tensor; the inputs are {_describe_shapes(shapes)}"
            )
        ndim = len(shapes[path])
        if dim is None:
            batch_dims.pop(path, None)
        elif isinstance(dim, bool) or not isinstance(dim, int) or not -ndim <= dim < ndim:
            raise InputError(
                f"batch_dims[{path!r}] is {dim!r}, but {path} has shape {list(shapes[path])}: give a dim"
                f" of it, or None to replicate it; the inputs are {_describe_shapes(shapes)}"
            )
        else:
            batch_dims[path] = dim % ndim
    for path, dim in batch_dims.items():
        if shapes[path][dim] == 0:
            raise BatchError(
                f"the batch is empty: dim {dim} of input {path!r}, of shape {list(shapes[path])}, has no rows; leave "
                "such a batch out, on every rank"
            )
    return batch_dims


def _describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items()) or "none"


@dataclass(frozen=True)
class OutputTree:
    """How a module's return value is made of its tensors.

    Attributes:
        paths: paths of the tensors, in the order of the graph's outputs; `""` is a tensor returned bare.
        slots: for each leaf of the return value, its constant, or None for a tensor.
        tree: shape of the nested containers.
        dropped: paths of leaves that are neither tensors nor plain constants (a key-value cache): their tensors
            are out of the graph's reach, so they are None in what `rebuild` returns.
    """

    paths: tuple[str, ...]
    slots: tuple[Constant | None, ...]
    tree: TreeSpec
    dropped: tuple[str, ...] = ()

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The return value with `tensors` in the place of its tensors."""
        if len(tensors) != len(self.paths):
            raise InputError(f"the module returns {len(self.paths)} tensors, {len(tensors)} were given")
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if slot is None else slot.value for slot in self.slots], self.tree)

    def tensors_of(self, output: Any) -> list[torch.Tensor]:
        """The tensors of a return value of the same structure, in the order of `paths`."""
        return flatten_output(output)[1]


_PLAIN_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten_output(output: Any) -> tuple[OutputTree, list[torch.Tensor]]:
    """Split a module's return value into its tree and its tensors."""
    keyed_leaves, tree = tree_flatten_with_path(output)
    paths: list[str] = []
    tensors: list[torch.Tensor] = []
    slots: list[Constant | None] = []
    dropped: list[str] = []
    for key_path, leaf in keyed_leaves:
        path = path_text(key_path)
        if isinstance(leaf, torch.Tensor):
            paths.append(path)
            tensors.append(leaf)
            slots.append(None)
            continue
        if not isinstance(leaf, _PLAIN_CONSTANTS):
            dropped.append(path)
            leaf = None
        slots.append(Constant(leaf))
    return OutputTree(tuple(paths), tuple(slots), tree, tuple(dropped)), tensors


def path_text(key_path: Sequence[Any]) -> str:
    """A pytree key path as dotted text: `batch.ids`, `0`."""
    parts = []
    for key in key_path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)
