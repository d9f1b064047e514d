"""The single device's side of a comparison: a model in float64, and what its steps compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar import grouped
from autopar._compat import grouped_mm, tree_leaves, tree_map
from autopar.errors import InputError
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.signature import flatten_inputs

SEED = 1234
"""Of the random ops, on both sides."""


@dataclass
class SingleDevice:
    """What one device computes: outputs by path, gradients and new buffer values by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    tangents: dict[str, torch.Tensor]


def run_single_device(
    model: nn.Module, joint: JointGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SingleDevice:
    """Run the unmodified module eagerly; gradients start from random tangents, or from 1 for a scalar.

    Raises:
        InputError: if the model fails on the inputs.
    """
    tangent_paths = [s.path for s in joint.inputs if s.kind is InputKind.TANGENT]
    tree = joint.output_tree
    with torch.set_grad_enabled(joint.trains), Float64Throughout():
        try:
            returned = model(*args, **kwargs)
        except Exception as error:  # whatever the model raises on real numbers, which tracing does not see
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"the model itself fails on these inputs in float64 on the CPU ({type(error).__name__}: {reason}): "
                "give inputs of the dtypes and values that it takes; ops without a float64 form cannot be verified"
            ) from error
        outputs = dict(zip(tree.paths, tree.tensors_of(returned), strict=True))
    generator = torch.Generator().manual_seed(0)
    tangents = {}
    for path in tangent_paths:
        value = outputs[path]
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        tangents[path] = torch.ones_like(value) if value.dim() == 0 else random
    params = {s.path: tensor_of(model, s.path) for s in joint.inputs if s.kind is InputKind.PARAM}
    if tangents:
        torch.autograd.backward([outputs[p] for p in tangents], list(tangents.values()))
    gradients = {path: p.grad for path, p in params.items()}
    return SingleDevice(
        {path: value.detach() for path, value in outputs.items()},
        gradients,
        {s.path: tensor_of(model, s.path).detach() for s in joint.outputs if s.kind is OutputKind.MUTATION},
        {path: value.detach() for path, value in tangents.items()},
    )


class _CopyingViews(fx.Interpreter):
    """Runs a traced graph whose values may lie in memory otherwise than the traced ones: a view that cannot be is a
    copy, as it is in the rewritten program."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_view = target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if is_view else target, args, kwargs)


def run_traced(
    joint: JointGraph, values: Mapping[GraphInput, torch.Tensor], tangents: dict[str, torch.Tensor], seed: int = SEED
) -> SingleDevice:
    """Run the joint graph as it was traced, on one device."""
    flat = [
        seed if s.kind is InputKind.SEED else tangents[s.path] if s.kind is InputKind.TANGENT else values[s]
        for s in joint.inputs
    ]
    with torch.no_grad():
        results = dict(zip(joint.outputs, _CopyingViews(joint.module).run(*flat), strict=True))

    def of(kind: OutputKind) -> dict[str, Any]:
        return {spec.path: value for spec, value in results.items() if spec.kind is kind}

    return SingleDevice(of(OutputKind.OUTPUT), of(OutputKind.GRADIENT), of(OutputKind.MUTATION), tangents)


class Reference:
    """The single device over several steps: the module itself or, if it draws random numbers, its traced graph.

    (The module draws other numbers than the program, so that the graph stands for it then.)

    Attributes:
        values: its parameters and buffers; whoever changes them between steps changes what it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        joint: JointGraph,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: Mapping[GraphInput, torch.Tensor],
        seed: int = SEED,
    ) -> None:
        self._seed = seed
        self._model, self._joint, self._args, self._kwargs = model, joint, args, kwargs
        self._is_random = any(spec.kind is InputKind.SEED for spec in joint.inputs)
        self._tangents: dict[str, torch.Tensor] | None = None
        self._inputs = {s: value for s, value in inputs.items() if s.kind is InputKind.INPUT}
        self.values = {
            spec: tensor_of(model, spec.path).detach().clone() if self._is_random else tensor_of(model, spec.path)
            for spec in joint.inputs
            if spec.kind in (InputKind.PARAM, InputKind.BUFFER)
        }

    def step(self) -> SingleDevice:
        """Forward and backward on the values as they are now.

        Raises:
            InputError: if the model fails on the inputs.
        """
        if not self._is_random or self._tangents is None:
            self._model.zero_grad()
            found = run_single_device(self._model, self._joint, self._args, self._kwargs)
            if not self._is_random:
                return found
            self._tangents = found.tangents
        return run_traced(self._joint, {**self.values, **self._inputs}, self._tangents, self._seed)


def tensor_of(model: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer of a name."""
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)  # type: ignore[no-any-return]


_LOW = {torch.float32, torch.bfloat16, torch.float16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class Float64Throughout(TorchFunctionMode):
    """Lifts the casts that a model makes to a lower precision (`logits.float()`) to float64.

    Otherwise one such cast would bring float32's rounding, which depends on the order of a sum, into a comparison that
    is meant to be free of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        def lift(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value

        if func in _CASTS:
            return args[0].to(torch.float64)
        if func is grouped_mm:  # which has no kernel for float64
            return grouped.multiply_in_any_dtype(*args, **(kwargs or {}))
        return func(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


def in_float64(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its inputs in float64 on the CPU; what is on the meta device, or cut over ranks, gets
    random values.

    Raises:
        InputError: if an input is on the meta device, or not dense.
    """
    for path, tensor in flatten_inputs(args, kwargs)[0]:
        if tensor.is_meta:
            raise InputError(f"input {path} is on the meta device and has no values to verify with: give a real batch")
    generator = torch.Generator().manual_seed(0)
    # Copying starts from these, so that no whole copy in another dtype, or on another device, is ever there.
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if is_lazy(tensor):  # it has no shape, which tracing will tell
            continue
        value = _value_in_float64(tensor, generator)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    for tensor in _plain_tensors(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = _value_in_float64(tensor, generator)
    copied = copy.deepcopy(model, memo)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().cpu().double() if leaf.is_floating_point() else leaf.detach().cpu()

    return copied, tree_map(convert, args), tree_map(convert, dict(kwargs))


def _plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """What modules hold beside parameters and buffers: constants, and weights that are computed from others, which
    PyTorch would not copy."""
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        yield from (leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor) and not is_lazy(leaf))


_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _value_in_float64(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy on the CPU, floating in float64; random where this process has no whole value."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    whole = tensor.detach()
    if isinstance(whole, DTensor) and all(isinstance(placement, Replicate) for placement in whole.placements):
        whole = whole.to_local()
    if not whole.is_meta and not isinstance(whole, DTensor):
        return whole.to("cpu", dtype, copy=True)
    made = torch.zeros(whole.shape, dtype=dtype)
    return made.normal_(std=0.02, generator=generator) if dtype.is_floating_point else made
