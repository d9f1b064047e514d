"""Running a joint graph by hand, and comparing it with the module that it was traced from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph import GraphOutput, InputKind, JointGraph, OutputKind
from autopar.normalise import normalise
from autopar.signature import flatten_inputs, flatten_output
from autopar.trace import trace

Call = tuple[tuple[Any, ...], dict[str, Any]]


def run_joint(
    joint: JointGraph, model: nn.Module, call: Call, tangents: Mapping[str, Tensor]
) -> dict[GraphOutput, Any]:
    """The graph's outputs for the model's own tensors, a call and the gradients of the outputs."""
    values = {
        InputKind.PARAM: dict(model.named_parameters()),
        InputKind.BUFFER: dict(model.named_buffers()),
        InputKind.INPUT: dict(flatten_inputs(*call)[0]),
        InputKind.TANGENT: dict(tangents),
    }
    with torch.no_grad():
        results = joint.module(*(values[spec.kind][spec.path] for spec in joint.inputs))
    return dict(zip(joint.outputs, results, strict=True))


def randomise(model: nn.Module, seed: int = 7) -> None:
    """Give every floating parameter and buffer other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                # Positive, as variances must be.
                tensor.copy_(tensor.abs() + 0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))


def tangents_of(joint: JointGraph) -> dict[str, Tensor]:
    """Random gradients for the outputs that want one."""
    generator = torch.Generator().manual_seed(3)
    pairs = zip(joint.inputs, joint.placeholders, strict=True)
    wanted = [(spec.path, node.meta["val"]) for spec, node in pairs if spec.kind is InputKind.TANGENT]
    return {
        path: torch.randn(val.shape, generator=generator, dtype=torch.float64).to(val.dtype) for path, val in wanted
    }


def assert_close(
    actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10, smallest: float = 1e-30
) -> None:
    """Equal shape and dtype, and values within `tolerance` of the tensor's largest, or of `smallest` if it is more."""
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if expected.is_floating_point() and expected.numel():
        difference = (actual - expected).abs().max().item()
        assert difference <= tolerance * max(expected.abs().max().item(), smallest), f"{what}: {difference}"
    else:
        assert torch.equal(actual, expected), what


def check_against_eager(model: nn.Module, traced_with: Call, call: Call, tolerance: float = 1e-10) -> JointGraph:
    """Trace on one call; on other weights and another call, compare outputs, gradients and buffers with eager, before
    and after normalising."""
    joint = trace(model, *traced_with)
    randomise(model)
    assert_equals_eager(joint, model, call, tolerance)
    normalise(joint)
    assert_equals_eager(joint, model, call, tolerance)
    return joint


def assert_equals_eager(joint: JointGraph, model: nn.Module, call: Call, tolerance: float = 1e-10) -> None:
    """The graph gives what the module does: outputs, gradients, and buffers after the call."""
    tangents = tangents_of(joint)
    actual = run_joint(joint, model, call, tangents)
    eager = copy.deepcopy(model)
    tree, outputs = flatten_output(eager(*call[0], **call[1]))
    expected = dict(zip(tree.paths, outputs, strict=True))
    if tangents:
        torch.autograd.backward([expected[path] for path in tangents], list(tangents.values()))
    assert list(joint.output_tree.paths) == list(tree.paths)

    parameters, buffers = dict(eager.named_parameters()), dict(eager.named_buffers())
    # A gradient that is zero but for rounding, such as that of a bias before a batch norm, has no scale of its own: it
    # is sums of numbers of the step's, whose rounding is about 1e-15 of those.
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    noise = 1e-4 * max((g.abs().max().item() for g in gradients if g.numel()), default=0.0)
    for spec, value in actual.items():
        if spec.kind is OutputKind.OUTPUT:
            assert_close(value, expected[spec.path].detach(), str(spec), tolerance)
        elif spec.kind is OutputKind.MUTATION:
            assert_close(value, buffers[spec.path], str(spec), tolerance)
        else:
            gradient = parameters[spec.path].grad
            if value is None:
                assert gradient is None, f"{spec} is missing"
            else:
                assert gradient is not None, f"{spec} is too much"
                assert_close(value, gradient, str(spec), tolerance, max(noise, 1e-30))
    if tangents:
        graded = {name for name, p in parameters.items() if p.requires_grad}
        assert {spec.path for spec in actual if spec.kind is OutputKind.GRADIENT} == graded
    changed = {name for name, b in model.named_buffers() if not torch.equal(b, buffers[name])}
    assert changed <= {spec.path for spec in actual if spec.kind is OutputKind.MUTATION}
