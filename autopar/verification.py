"""Verify: run every rank of a rewritten program in one process and compare with the single device, in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autopar import grouped
from autopar._compat import grouped_mm, tree_map
from autopar.cost_model.ops import count_flops
from autopar.errors import BatchError, InputError, VerificationError
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.plan import Plan
from autopar.program import Collective, LocalGraph, LocalProgram
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.sharding import shard_tensor, unshard
from autopar.signature import flatten_inputs

TOLERANCE = 1e-9
"""Largest accepted difference, relative to the largest entry of the tensor: float64 leaves about 1e-15 per operation,
and a missing or doubled reduction is off by a factor of the rank count."""


SEED = 1234
"""Of the random ops, on both sides."""


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of a comparison.

    Attributes:
        ok: whether every difference is within the tolerance.
        max_rel_err: the largest difference, relative to the largest entry of its tensor.
        worst: what it was found in, such as `gradient of h.0.mlp.weight`.
        errors: every compared tensor's difference.
        plan: the plan that was verified.
        sharded_flops_fraction: share of the matrix FLOPs that is divided over ranks rather than repeated.
    """

    ok: bool
    max_rel_err: float
    worst: str
    errors: Mapping[str, float]
    plan: Plan
    sharded_flops_fraction: float

    def __str__(self) -> str:
        word = "equal" if self.ok else "DIFFERENT"
        return f"{word}: {len(self.errors)} tensors, largest relative error {self.max_rel_err:.2e} in {self.worst}"


NOISE = 1e-6
"""Tensors all of whose entries are below this share of the step's largest number (input, parameter, tangent or, for a
gradient, any gradient) are compared on that scale.

Some results are zero in exact arithmetic (the gradient of a bias before a batch norm, of an attention key's bias): what
is computed is rounding noise of about 1e-16 of the other numbers, and two orders of summation share no digit of it.
"""


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of `expected`, or over `floor` if that is larger; infinite where shapes
    differ or a value is not finite on one side only."""
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(found, expected) else float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(expected.abs()), (found - expected).abs())
    error = float(difference.max()) / max(_largest(expected), floor, 1e-300)
    return error if error == error else float("inf")


def _largest(value: torch.Tensor) -> float:
    """The largest finite magnitude."""
    magnitude = value.detach().abs()
    return float(magnitude.where(magnitude.isfinite(), torch.zeros_like(magnitude)).max()) if value.numel() else 0.0


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
    params = {s.path: _lookup(model, s.path) for s in joint.inputs if s.kind is InputKind.PARAM}
    if tangents:
        torch.autograd.backward([outputs[p] for p in tangents], list(tangents.values()))
    gradients = {path: p.grad for path, p in params.items()}
    return SingleDevice(
        {path: value.detach() for path, value in outputs.items()},
        gradients,
        {s.path: _lookup(model, s.path).detach() for s in joint.outputs if s.kind is OutputKind.MUTATION},
        {path: value.detach() for path, value in tangents.items()},
    )


class _CopyingViews(fx.Interpreter):
    """Runs a traced graph whose values may lie in memory otherwise than the traced ones: a view that cannot be is a
    copy, as it is in the rewritten program."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_view = target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if is_view else target, args, kwargs)


def run_traced(
    joint: JointGraph, values: Mapping[GraphInput, torch.Tensor], tangents: dict[str, torch.Tensor]
) -> SingleDevice:
    """Run the joint graph as it was traced, on one device."""
    flat = [
        SEED if s.kind is InputKind.SEED else tangents[s.path] if s.kind is InputKind.TANGENT else values[s]
        for s in joint.inputs
    ]
    with torch.no_grad():
        results = dict(zip(joint.outputs, _CopyingViews(joint.module).run(*flat), strict=True))

    def of(kind: OutputKind) -> dict[str, Any]:
        return {spec.path: value for spec, value in results.items() if spec.kind is kind}

    return SingleDevice(of(OutputKind.OUTPUT), of(OutputKind.GRADIENT), of(OutputKind.MUTATION), tangents)


def _lookup(model: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)  # type: ignore[no-any-return]


def run_all_ranks(
    program: LocalProgram, values: Mapping[GraphInput, torch.Tensor]
) -> tuple[dict[tuple[OutputKind, str], torch.Tensor | None], list[Any]]:
    """Run every rank of a program in lockstep on global values; returns the global results and the collectives run."""
    results: dict[tuple[OutputKind, str], torch.Tensor | None] = {}
    saved: list[dict[str, Any]] = [{} for _ in range(program.mesh.num_ranks)]
    executed = []
    for graph in program.graphs:
        inputs = [_rank_inputs(graph, program, values, saved[rank], rank) for rank in range(program.mesh.num_ranks)]
        run = run_lockstep(graph, program.mesh, inputs)
        executed += run.collectives
        node_values = graph.module.graph.output_node().args[0]
        for i, (spec, sharding) in enumerate(zip(graph.outputs, graph.output_shardings, strict=True)):
            parts = [outputs[i] for outputs in run.outputs]
            if spec.kind is OutputKind.SAVED:
                for rank, part in enumerate(parts):
                    saved[rank][spec.path] = part
            elif sharding is None:
                results[spec.kind, spec.path] = None
            else:
                shape = node_values[i].meta["global_shape"]  # type: ignore[index,union-attr]
                results[spec.kind, spec.path] = unshard(parts, sharding, program.mesh, shape)
    return results, executed


def _rank_inputs(
    graph: LocalGraph,
    program: LocalProgram,
    values: Mapping[GraphInput, torch.Tensor],
    saved: Mapping[str, Any],
    rank: int,
) -> list[Any]:
    out: list[Any] = []
    for spec, sharding in zip(graph.inputs, graph.input_shardings, strict=True):
        if spec.kind is InputKind.RANK:
            out.append(program.mesh.coordinate(rank)[program.mesh.axis(spec.path)])
        elif spec.kind is InputKind.SEED:
            out.append(SEED)
        elif spec.kind is InputKind.SAVED:
            out.append(saved[spec.path])
        else:
            assert sharding is not None
            out.append(shard_tensor(values[spec], sharding, program.mesh, rank))
    return out


_LOW = {torch.float32, torch.bfloat16, torch.float16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class Float64Throughout(TorchFunctionMode):
    """Lifts the casts that a model makes to a lower precision (`logits.float()`) to float64, and computes grouped
    products, which have no kernel for it, by their definition.

    Otherwise one such cast would bring float32's rounding, which depends on the order of a sum, into a comparison that
    is meant to be free of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        def lift(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value

        if func in _CASTS:
            return args[0].to(torch.float64)
        if func is grouped_mm:
            return grouped.multiply_in_any_dtype(*args, **(kwargs or {}))
        return func(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


def in_float64(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its inputs in float64 on the CPU; parameters on the meta device get random values.

    Raises:
        InputError: if an input is on the meta device, or not dense.
    """
    for path, tensor in flatten_inputs(args, kwargs)[0]:
        if tensor.is_meta:
            raise InputError(f"input {path} is on the meta device and has no values to verify with: give a real batch")
    copied = copy.deepcopy(model)
    if any(t.is_meta for t in [*copied.parameters(), *copied.buffers()]):
        copied = copied.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in [*copied.parameters(), *copied.buffers()]:
                if tensor.is_floating_point():
                    tensor.normal_(std=0.02, generator=generator)
                else:
                    tensor.zero_()
    copied = copied.cpu().double()

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().cpu().double() if leaf.is_floating_point() else leaf.detach().cpu()

    return copied, tree_map(convert, args), tree_map(convert, dict(kwargs))


def compare(
    joint: JointGraph,
    program: LocalProgram,
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> VerifyReport:
    """Compare a program with the single device on global inputs.  `model` is left with gradients.

    Raises:
        BatchError: if the batch cannot be cut over the ranks.
        VerificationError: if the program fails to run, or moves other bytes than its graph says.
    """
    values: dict[GraphInput, torch.Tensor] = {}
    flat = dict(flatten_inputs(args, kwargs)[0])
    check_batch(flat, joint.batch_dims, program.mesh.num_ranks)
    for spec in joint.inputs:
        if spec.kind in (InputKind.PARAM, InputKind.BUFFER):
            values[spec] = _lookup(model, spec.path).detach().clone()
        elif spec.kind is InputKind.INPUT:
            values[spec] = flat[spec.path]
    reference = run_single_device(model, joint, args, kwargs)
    if any(spec.kind is InputKind.SEED for spec in joint.inputs):
        # The model draws other random numbers than the program, so the traced graph stands for the single device.
        reference = run_traced(joint, values, reference.tangents)
    values.update({GraphInput(InputKind.TANGENT, path): value for path, value in reference.tangents.items()})
    results, executed = run_all_ranks(program, values)
    _check_bytes(program.collectives(), executed)
    known: dict[OutputKind, tuple[Mapping[str, torch.Tensor | None], str]] = {
        OutputKind.OUTPUT: (reference.outputs, "output"),
        OutputKind.GRADIENT: (reference.gradients, "gradient of"),
        OutputKind.MUTATION: (reference.buffers, "buffer"),
    }
    scale = max((_largest(v) for v in values.values() if v.is_floating_point()), default=0.0)
    steepest = max((_largest(g) for g in reference.gradients.values() if g is not None), default=0.0)
    floors = dict.fromkeys(OutputKind, NOISE * scale) | {OutputKind.GRADIENT: NOISE * max(scale, steepest)}
    errors: dict[str, float] = {}
    for (kind, path), found in results.items():
        expected, name = known[kind][0].get(path), f"{known[kind][1]} {path}"
        if found is None or expected is None:
            zero = found is None and (expected is None or not expected.any())
            errors[name] = 0.0 if zero or (found is not None and not found.any()) else float("inf")
        else:
            errors[name] = relative_error(found, expected, floors[kind])
    worst = max(errors, key=errors.__getitem__)
    return VerifyReport(
        errors[worst] <= TOLERANCE, errors[worst], worst, errors, plan, sharded_flops_fraction(joint, program)
    )


def sharded_flops_fraction(joint: JointGraph, program: LocalProgram) -> float:
    """Share of the matrix FLOPs that is divided over the ranks; the rest is repeated on each.

    One rank computes local = whole · (f / n + 1 - f) of the whole step's FLOPs, which is solved for f.
    """
    whole = count_flops(joint.module.graph)
    local = sum(count_flops(graph.module.graph) for graph in program.graphs)
    n = program.mesh.num_ranks
    return (1 - local / whole) / (1 - 1 / n) if whole and n > 1 else 1.0


def check_batch(inputs: Mapping[str, torch.Tensor], batch_dims: Mapping[str, int], num_ranks: int) -> None:
    """Refuse a global batch that does not divide.

    Raises:
        BatchError: naming the input, its batch and the nearest sizes that work.
    """
    for path, dim in batch_dims.items():
        size = inputs[path].shape[dim]
        if size % num_ranks or size == 0:
            below, above = size // num_ranks * num_ranks, (size // num_ranks + 1) * num_ranks
            near = f"{below} or {above}" if below else str(above)
            raise BatchError(
                f"the batch of {size} rows (dim {dim} of input {path!r}) cannot be cut evenly over {num_ranks} ranks; "
                f"use {near} rows"
            )


def _check_bytes(claimed: list[Collective], executed: list[Any]) -> None:
    said = [(c.kind, c.axis, c.num_bytes) for c in claimed]
    done = [(c.kind, c.axis, c.num_bytes) for c in executed]
    if said != done:
        first = next((i for i, (a, b) in enumerate(zip(said, done, strict=False)) if a != b), min(len(said), len(done)))
        raise VerificationError(
            f"the program's collectives differ from those that ran, first at number {first}: "
            f"{said[first : first + 1]} in the graph, {done[first : first + 1]} run"
        )
