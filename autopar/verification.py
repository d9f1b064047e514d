"""Verify: run every rank of a rewritten program in one process and compare with the single device, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.cost_model.ops import count_flops
from autopar.errors import BatchError, InputError, VerificationError
from autopar.graph import GraphInput, InputKind, JointGraph, OutputKind
from autopar.placement import describe_sharding
from autopar.plan import Plan
from autopar.program import Collective, LocalGraph, LocalProgram
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.sharding import shard_tensor, unshard
from autopar.signature import flatten_inputs
from autopar.single_device import SEED, Reference, SingleDevice, tensor_of

TOLERANCE = 1e-9
"""Largest accepted difference, relative to the largest entry of the tensor: float64 leaves about 1e-15 per operation,
and a missing or doubled reduction is off by a factor of the rank count."""


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
        note: where and on what the comparison was made, if not on all that was given.
    """

    ok: bool
    max_rel_err: float
    worst: str
    errors: Mapping[str, float]
    plan: Plan
    sharded_flops_fraction: float
    note: str = ""

    def __str__(self) -> str:
        word = "equal" if self.ok else "DIFFERENT"
        text = f"{word}: {len(self.errors)} tensors, largest relative error {self.max_rel_err:.2e} in {self.worst}"
        return f"{text}, {self.note}" if self.note else text


NOISE = 1e-6
"""Tensors all of whose entries are below this share of the step's largest number (input, parameter, tangent or, for a
gradient, any gradient) are compared on that scale.

Some results are zero in exact arithmetic (the gradient of a bias before a batch norm, of an attention key's bias): what
is computed is rounding noise of about 1e-16 of the other numbers, and two orders of summation share no digit of it.
"""

ROUNDING = 1e-12
"""Tensors that are below this share of the step's largest number on both sides are such noise and nothing else.  They
are compared on the scale of that number itself, since a sum of thousands of terms rounds by more than 1e-15 of it."""


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


LEARNING_RATE, EPS = 1e-3, 1e-8
"""Of the optimizer's steps that are compared: AdamW's defaults.  The first is about as much as one step changes."""


def compare(
    joint: JointGraph,
    program: LocalProgram,
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_steps: int = 0,
) -> VerifyReport:
    """Compare a program with the single device on global inputs.  `model` is left with gradients.

    With `num_steps`, both sides then take so many steps of AdamW on the same batch, each by its own gradients, and
    everything is compared again, parameters too.  The optimizer works entry by entry, and a gradient lies as its
    parameter does (which is checked), so that the whole tensors stand for the ranks' parts here.  Where the single
    device has no gradient and the program's is zero, neither takes the step, and the report says for which parameters.

    Raises:
        BatchError: if the batch cannot be cut over the ranks.
        InputError: if the single device itself gives nothing but NaN.
        VerificationError: if the program fails to run, moves other bytes than its graph says, or gives a gradient that
            lies otherwise than its parameter.
    """
    flat = dict(flatten_inputs(args, kwargs)[0])
    check_batch(flat, joint.batch_dims, program.mesh.num_ranks)
    _check_gradients_lie_as_parameters(program)
    values = {
        spec: flat[spec.path] if spec.kind is InputKind.INPUT else tensor_of(model, spec.path).detach().clone()
        for spec in joint.inputs
        if spec.kind in (InputKind.PARAM, InputKind.BUFFER, InputKind.INPUT)
    }
    single, errors = Reference(model, joint, args, kwargs, values), {}
    unstepped: dict[str, None] = {}
    ours, theirs = (_Optimizer(side) for side in (values, single.values))
    for step in range(num_steps + 1):
        expected = single.step()
        _check_has_numbers(expected, step)
        values.update({GraphInput(InputKind.TANGENT, path): value for path, value in expected.tangents.items()})
        results, executed = run_all_ranks(program, values)
        _check_bytes(program.collectives(), executed)
        if step in (0, num_steps):
            errors.update(differences(values, results, expected, f" after {step} steps" if step else ""))
        if step < num_steps:
            gradients = {path: value for (kind, path), value in results.items() if kind is OutputKind.GRADIENT}
            for path in _zero_for_none(gradients, expected.gradients):
                gradients[path], unstepped[path] = None, None
            noise = NOISE * _scale(single.values, expected.gradients)
            ours.step(_without_noise(gradients, expected.gradients, noise))
            ours.keep({path: value for (kind, path), value in results.items() if kind is OutputKind.MUTATION})
            theirs.step(expected.gradients)
            theirs.keep(expected.buffers)
    if num_steps:
        errors.update(_parameter_differences(values, single.values, num_steps))
    worst = max(errors, key=errors.__getitem__)
    fraction, note = sharded_flops_fraction(joint, program), _unstepped_note(list(unstepped))
    return VerifyReport(errors[worst] <= TOLERANCE, errors[worst], worst, errors, plan, fraction, note)


def _check_has_numbers(expected: SingleDevice, step: int) -> None:
    """NaN equals NaN here, since a masked row may well be that; a whole output of it is nothing to compare with."""
    for path, value in expected.outputs.items():
        if value.is_floating_point() and value.numel() and bool(value.isnan().all()):
            raise InputError(
                f"on the single device, output {path} is NaN in all {value.numel()} entries"
                f"{f' after {step} steps' if step else ''}, so that nothing can be compared: give finite inputs and "
                "parameters (autopar.find_nan says where a NaN begins)"
            )


class _Optimizer:
    """AdamW over one side's parameters, and the buffers beside them."""

    def __init__(self, values: Mapping[GraphInput, torch.Tensor]) -> None:
        self._parameters = {s.path: value for s, value in values.items() if s.kind is InputKind.PARAM}
        self._buffers = {s.path: value for s, value in values.items() if s.kind is InputKind.BUFFER}
        self._adamw = (
            torch.optim.AdamW(self._parameters.values(), lr=LEARNING_RATE, eps=EPS) if self._parameters else None
        )

    def step(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        for path, parameter in self._parameters.items():
            parameter.grad = gradients.get(path)
        if self._adamw is not None:
            self._adamw.step()

    def keep(self, buffers: Mapping[str, torch.Tensor | None]) -> None:
        for path, value in buffers.items():
            assert value is not None
            self._buffers[path].copy_(value)


def differences(
    values: Mapping[GraphInput, torch.Tensor],
    results: Mapping[tuple[OutputKind, str], torch.Tensor | None],
    reference: SingleDevice,
    suffix: str = "",
    noise: float = NOISE,
) -> dict[str, float]:
    """The error of every result of one step; see `NOISE`."""
    known: dict[OutputKind, tuple[Mapping[str, torch.Tensor | None], str]] = {
        OutputKind.OUTPUT: (reference.outputs, "output"),
        OutputKind.GRADIENT: (reference.gradients, "gradient of"),
        OutputKind.MUTATION: (reference.buffers, "buffer"),
    }
    scales = dict.fromkeys(OutputKind, _scale(values, {}))
    scales[OutputKind.GRADIENT] = _scale(values, reference.gradients)
    errors: dict[str, float] = {}
    for (kind, path), found in results.items():
        expected, name = known[kind][0].get(path), f"{known[kind][1]} {path}{suffix}"
        if found is None or expected is None:
            zero = found is None and (expected is None or not expected.any())
            errors[name] = 0.0 if zero or (found is not None and not found.any()) else float("inf")
        else:
            is_rounding = _is_rounding(found, scales[kind]) and _is_rounding(expected, scales[kind])
            errors[name] = relative_error(found, expected, scales[kind] * (1 if is_rounding else noise))
    return errors


def _is_rounding(value: torch.Tensor, scale: float) -> bool:
    return value.is_floating_point() and _largest(value) <= ROUNDING * scale


def _parameter_differences(
    found: Mapping[GraphInput, torch.Tensor], expected: Mapping[GraphInput, torch.Tensor], num_steps: int
) -> dict[str, float]:
    """The error of every parameter, relative to its largest entry, or to what a step changes."""
    return {
        f"parameter {spec.path} after {num_steps} steps": relative_error(found[spec], value.detach(), LEARNING_RATE)
        for spec, value in expected.items()
        if spec.kind is InputKind.PARAM
    }


def _without_noise(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], noise: float
) -> dict[str, torch.Tensor | None]:
    """Our gradients, with the single device's entries where both are on the scale of `NOISE`.

    Such entries are compared on that scale.  A step divides it by its own size, so that rounding alone would move a
    parameter, and what a later mean or sum shows of it, by digits that no two orders of summation share.
    """
    out = dict(found)
    for path, gradient in found.items():
        reference = expected.get(path)
        if gradient is not None and reference is not None:
            out[path] = torch.where((reference.abs() < noise) & (gradient.abs() < noise), reference, gradient)
    return out


def _zero_for_none(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Parameters with a gradient of zeros, where the single device, in whose step nothing reached them, has none."""
    return [path for path, g in found.items() if g is not None and expected.get(path) is None and not g.any()]


def _unstepped_note(paths: list[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"without the steps of {paths[0]}{more} in which the gradient is zero here and None on the single device"


def _scale(values: Mapping[GraphInput, torch.Tensor], gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The largest number of a step: an input, a parameter, a tangent or a gradient."""
    tensors = [v for v in values.values() if v.is_floating_point()] + [g for g in gradients.values() if g is not None]
    return max(map(_largest, tensors), default=0.0)


def _check_gradients_lie_as_parameters(program: LocalProgram) -> None:
    inputs = zip(program.forward.inputs, program.forward.input_shardings, strict=True)
    rests = {spec.path: sharding or () for spec, sharding in inputs if spec.kind is InputKind.PARAM}
    backward = program.backward
    for spec, sharding in zip(backward.outputs, backward.output_shardings, strict=True) if backward else ():
        if spec.kind is OutputKind.GRADIENT and sharding is not None and sharding != rests[spec.path]:
            raise VerificationError(
                f"the gradient of {spec.path} lies as {describe_sharding(sharding, program.mesh)}, but the parameter "
                f"as {describe_sharding(rests[spec.path], program.mesh)}"
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
