"""Peak memory of one rank over a step: liveness of the rewritten program, the optimizer, and a stated reserve.

The peak is that of a step in the steady state: the optimizer's state exists, gradients were freed (`zero_grad` sets
them to None, its default) before the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopar.cluster import Cluster
from autopar.cost_model.folded import WHOLE, Copies, Shares, moves_data, repeat_units
from autopar.cost_model.layout import Layouts, layouts_of
from autopar.cost_model.liveness import (
    ACTIVATION,
    OPTIMIZER,
    TEMPORARY,
    Block,
    Liveness,
    outputs,
    owner_of,
    placeholders,
)
from autopar.cost_model.ops import tensor_bytes
from autopar.cost_model.optimizers import OptimizerLike, OptimizerMemory, find_optimizer
from autopar.devices import GIB
from autopar.graph import InputKind, OutputKind
from autopar.plan import MemoryParts
from autopar.program import LocalProgram

ALLOCATION_BYTES = {"cuda": 512, "cpu": 1}
"""The allocator's granularity; every block is rounded up to it."""

CONTEXT_BYTES = GIB // 2
"""CUDA context and loaded kernels, outside the allocator."""

NCCL_BYTES = GIB
"""Buffers of one NCCL communicator, outside the allocator; 1 to 3 GiB in all are usual."""

FRAGMENTATION_SHARE = 0.05
"""What PyTorch's caching allocator loses on blocks that come and go, relative to them; an estimate."""


NUMBERS_BYTES = 64
"""Numbers that an optimizer's step makes tensors of, such as the bias corrections."""


@dataclass(frozen=True)
class AtRest:
    """Bytes that one rank holds between steps, as tensors, without the allocator's rounding.

    Attributes:
        params: parameters.
        buffers: buffers.
        trained: the parameters that get a gradient.
        optimizer: state of the optimizer.
    """

    params: int
    buffers: int
    trained: int
    optimizer: int


@dataclass(frozen=True)
class LiveBytes:
    """What one module holds at a moment.

    Attributes:
        module: path of the module that owns the parameters, or whose op allocated the rest; empty for the root.
        kind: `params`, `grads`, `optimizer`, `activations`, `temporaries` or `reserve`, as in `MemoryParts`.
        num_bytes: how much.
    """

    module: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """Predicted memory over one step.

    Attributes:
        peak: bytes by kind at the moment of the peak.
        peak_at: pass and node of the peak, such as `backward:mm_3`.
        timeline: total bytes, reserve included, while each node runs, in program order.
        live_at_peak: what makes up `peak`, by module and kind, the largest first.
        live_after_forward: the same at the end of the forward pass, when everything that is kept for the backward
            pass is there.
        live_at_end: the same at the end of the step, when all gradients are there.
        in_backward: the modules that run in the backward pass, one after another, each with the most bytes then.
    """

    peak: MemoryParts
    peak_at: str
    timeline: tuple[tuple[str, int], ...]
    live_at_peak: tuple[LiveBytes, ...]
    live_after_forward: tuple[LiveBytes, ...]
    live_at_end: tuple[LiveBytes, ...]
    in_backward: tuple[tuple[str, int], ...]


def at_rest(program: LocalProgram, optimizer: OptimizerLike = "adamw", copies: Copies = WHOLE) -> AtRest:
    """What one rank holds between steps; the first rank's, which has the most where a dim does not divide.

    `copies` says how many units each unit of a folded program stands for.
    """
    memory = find_optimizer(optimizer)
    sizes = {InputKind.PARAM: 0.0, InputKind.BUFFER: 0.0}
    for spec, node in placeholders(program.forward):
        if spec.kind in sizes:
            sizes[spec.kind] += tensor_bytes(node.meta["val"]) * copies.number(owner_of(spec.path))
    trained = [(tensor, copies.number(owner_of(path))) for path, tensor in _trained(program).items()]
    return AtRest(
        params=round(sizes[InputKind.PARAM]),
        buffers=round(sizes[InputKind.BUFFER]),
        trained=round(sum(number * tensor_bytes(tensor) for tensor, number in trained)),
        optimizer=round(sum(number * memory.state_bytes(tensor) for tensor, number in trained)),
    )


def memory_profile(
    program: LocalProgram,
    cluster: Cluster,
    optimizer: OptimizerLike = "adamw",
    layouts: Layouts | None = None,
    accumulate: int = 1,
    fused: bool = False,
    copies: Copies = WHOLE,
    shares: Shares | None = None,
) -> MemoryProfile:
    """Peak memory of one rank over forward, backward and optimizer step, with where it comes from.

    `layouts` are the program's, if they were worked out before.  With `accumulate` micro-steps to one step of the
    optimizer, it is the last of them that is profiled: the gradients of the earlier ones are alive throughout.  `fused`
    is for compiled graphs, and `copies` say how many units each unit of a folded program stands for, with
    their `shares` if they were worked out before.

    Raises:
        InputError: if the optimizer is not known and cannot be measured.
    """
    layouts = layouts_of(program) if layouts is None else layouts
    kind = cluster.device.kind
    liveness = Liveness.of(program, layouts, kind, ALLOCATION_BYTES[kind], cluster.backend == "gloo", fused)
    if accumulate > 1 and program.backward is not None:
        liveness.follow_another()
    if trained := _trained(program):
        _add_optimizer(liveness, trained, find_optimizer(optimizer), copies)
    shares = copies.shares(program) if shares is None else shares
    if copies.units:
        repeat_units(liveness, program, copies, shares)
    owners = _owners(program, copies, shares)
    fixed, share = _reserve(program, cluster)
    live = liveness.live_bytes()
    reserves = fixed + (share * (live[ACTIVATION] + live[TEMPORARY])).astype(np.int64)
    totals = sum(live.values(), reserves)
    peak, last = int(totals.argmax()), len(totals) - 1
    end = max(0, liveness.num_forward - 1)
    timeline = tuple(zip(liveness.steps, totals.tolist(), strict=True))
    at_peak, after_forward, at_end = (
        _by_module(liveness, step, int(reserves[step]), owners) for step in (peak, end, last)
    )
    return MemoryProfile(
        MemoryParts(**{kind: int(sizes[peak]) for kind, sizes in live.items()}, reserve=int(reserves[peak])),
        liveness.steps[peak],
        timeline,
        at_peak,
        after_forward,
        at_end,
        _in_backward(program, totals.tolist()[liveness.num_forward :]),
    )


def _in_backward(program: LocalProgram, totals: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Given the bytes in each step from the backward pass on.  What belongs to a collective counts for the module that
    computes before it."""
    found: list[tuple[str, int]] = []
    nodes = program.backward.module.graph.nodes if program.backward is not None else ()
    for node, total in zip((node for node in nodes if node.op != "placeholder"), totals, strict=False):
        module = found[-1][0] if found and moves_data(node) else node.meta.get("module", "")
        if not found or found[-1][0] != module:
            found.append((module, total))
        elif found[-1][1] < total:
            found[-1] = (module, total)
    return tuple(found)


def _owners(program: LocalProgram, copies: Copies, shares: Shares) -> dict[str, dict[str, float]]:
    """Of a buffer in which several modules have a part, by the step that makes it, whose part is how much."""
    owners: dict[str, dict[str, float]] = {}
    for node, parts in shares.items():
        name = "forward" if node.graph is program.forward.module.graph else "backward"
        total = copies.weight(parts)
        owners[f"{name}:{node.name}"] = {m: share * copies.number(m) / total for m, share in parts.items()}
    return owners


def _by_module(
    liveness: Liveness, step: int, reserve: int, owners: Mapping[str, Mapping[str, float]]
) -> tuple[LiveBytes, ...]:
    live = [LiveBytes(module, kind, size) for (module, kind), size in liveness.live_at(step, owners).items()]
    live.append(LiveBytes("", "reserve", reserve))
    return tuple(sorted((one for one in live if one.num_bytes), key=lambda one: (-one.num_bytes, one.module, one.kind)))


def _add_optimizer(
    liveness: Liveness, trained: Mapping[str, torch.Tensor], memory: OptimizerMemory, copies: Copies
) -> None:
    """The optimizer's state, which is always there, and its step, which comes last."""
    last = len(liveness.steps)
    liveness.steps.append("optimizer:step")
    for path, param in trained.items():
        num_bytes = memory.state_bytes(param, liveness.granularity)
        liveness.blocks.append(Block(num_bytes, 0, last, OPTIMIZER, owner_of(path)))
    largest = max(trained, key=lambda path: tensor_bytes(trained[path]))
    numbers = [copies.number(owner_of(path)) for path in trained]
    step_bytes = memory.step_bytes(list(trained.values()), numbers) + NUMBERS_BYTES
    liveness.blocks.append(Block(step_bytes, last, last, TEMPORARY, owner_of(largest)))


def _reserve(program: LocalProgram, cluster: Cluster) -> tuple[int, float]:
    """What the allocator does not show: fixed bytes, and a share of the blocks that come and go."""
    if cluster.device.kind != "cuda":
        return 0, 0.0
    num_communicators = sum(size > 1 for size in program.mesh.sizes)
    return CONTEXT_BYTES + NCCL_BYTES * num_communicators, FRAGMENTATION_SHARE


def fixed_reserve(memory: MemoryParts) -> int:
    """The bytes of a reserve that are there whatever a program allocates."""
    return max(0, memory.reserve - int(FRAGMENTATION_SHARE * (memory.activations + memory.temporaries)))


def _trained(program: LocalProgram) -> dict[str, torch.Tensor]:
    """Parameters that get a gradient, in the order in which an optimizer steps them."""
    if program.backward is None:
        return {}
    trained = {spec.path for spec, _ in outputs(program.backward) if spec.kind is OutputKind.GRADIENT}
    return {
        spec.path: node.meta["val"]
        for spec, node in placeholders(program.forward)
        if spec.kind is InputKind.PARAM and spec.path in trained
    }
