"""Peak memory of one rank over a step: liveness of the rewritten program, the optimizer, and a stated reserve.

The peak is that of a step in the steady state: the optimizer's state exists, gradients were freed (`zero_grad` sets
them to None, its default) before the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost_model.layout import Layouts, layouts_of
from autopar.cost_model.liveness import ACTIVATION, GRADIENT, PARAM, TEMPORARY, Liveness, outputs, placeholders
from autopar.cost_model.ops import tensor_bytes
from autopar.devices import GIB
from autopar.errors import InputError
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


@dataclass(frozen=True)
class Optimizer:
    """Memory of an optimizer, relative to bytes of the parameters it steps.

    Attributes:
        state_ratio: state that it keeps.
        largest_ratio: temporaries of its step, relative to the largest parameter: it goes one by one, PyTorch's
            default for `DTensor` parameters.
        all_ratio: temporaries relative to all of them: `foreach=True` works on lists.
    """

    state_ratio: float
    largest_ratio: float
    all_ratio: float = 0.0


OPTIMIZERS = {
    "sgd": Optimizer(0, 1),
    "sgd_momentum": Optimizer(1, 1),
    "adam": Optimizer(2, 2),
    "adamw": Optimizer(2, 2),
    "adamw_foreach": Optimizer(2, 0, 1),
    "adamw_fused": Optimizer(2, 0),
}
"""Adam's step needs the square root of the second moment and its quotient at once."""


@dataclass(frozen=True)
class AtRest:
    """Bytes that one rank holds between steps, as tensors, without the allocator's rounding.

    Attributes:
        params: parameters.
        buffers: buffers.
        trained: the parameters that get a gradient.
        largest_trained: the largest of those.
        optimizer: state of the optimizer.
    """

    params: int
    buffers: int
    trained: int
    largest_trained: int
    optimizer: int


@dataclass(frozen=True)
class MemoryProfile:
    """Predicted memory over one step.

    Attributes:
        peak: bytes by kind at the moment of the peak.
        peak_at: pass and node of the peak, such as `backward:mm_3`.
        timeline: total bytes, reserve included, while each node runs, in program order.
    """

    peak: MemoryParts
    peak_at: str
    timeline: tuple[tuple[str, int], ...]


def find_optimizer(name: str) -> Optimizer:
    """The optimizer called `name`.

    Raises:
        InputError: if it is not known.
    """
    if name not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def at_rest(program: LocalProgram, optimizer: str = "adamw") -> AtRest:
    """What one rank holds between steps; the first rank's, which has the most where a dim does not divide."""
    trained = _trained(program)
    sizes: dict[InputKind, dict[str, int]] = {InputKind.PARAM: {}, InputKind.BUFFER: {}}
    for spec, node in placeholders(program.forward):
        if spec.kind in sizes:
            sizes[spec.kind][spec.path] = tensor_bytes(node.meta["val"])
    trained_sizes = [size for path, size in sizes[InputKind.PARAM].items() if path in trained]
    return AtRest(
        params=sum(sizes[InputKind.PARAM].values()),
        buffers=sum(sizes[InputKind.BUFFER].values()),
        trained=sum(trained_sizes),
        largest_trained=max(trained_sizes, default=0),
        optimizer=int(find_optimizer(optimizer).state_ratio * sum(trained_sizes)),
    )


def memory_profile(
    program: LocalProgram, cluster: Cluster, optimizer: str = "adamw", layouts: Layouts | None = None
) -> MemoryProfile:
    """Peak memory of one rank over forward, backward and optimizer step, with where it comes from.

    `layouts` are the program's, if they were worked out before.
    """
    rest = at_rest(program, optimizer)
    layouts = layouts_of(program) if layouts is None else layouts
    liveness = Liveness.of(program, layouts, ALLOCATION_BYTES[cluster.device.kind], cluster.backend == "gloo")
    steps = [*liveness.steps, "optimizer:step"] if rest.trained else liveness.steps
    moments = liveness.live_bytes(len(steps))
    if rest.trained:
        model = find_optimizer(optimizer)
        moments[-1][TEMPORARY] += int(model.all_ratio * rest.trained + model.largest_ratio * rest.largest_trained)
    fixed, share = _reserve(program, cluster)
    parts = [
        MemoryParts(
            params=moment[PARAM],
            grads=moment[GRADIENT],
            optimizer=rest.optimizer,
            activations=moment[ACTIVATION],
            temporaries=moment[TEMPORARY],
            reserve=fixed + int(share * (moment[ACTIVATION] + moment[TEMPORARY])),
        )
        for moment in moments
    ]
    totals = [part.total for part in parts]
    peak = totals.index(max(totals))
    return MemoryProfile(parts[peak], steps[peak], tuple(zip(steps, totals, strict=True)))


def _reserve(program: LocalProgram, cluster: Cluster) -> tuple[int, float]:
    """What the allocator does not show: fixed bytes, and a share of the blocks that come and go."""
    if cluster.device.kind != "cuda":
        return 0, 0.0
    num_communicators = sum(size > 1 for size in program.mesh.sizes)
    return CONTEXT_BYTES + NCCL_BYTES * num_communicators, FRAGMENTATION_SHARE


def _trained(program: LocalProgram) -> frozenset[str]:
    """Parameters that get a gradient."""
    if program.backward is None:
        return frozenset()
    return frozenset(spec.path for spec, _ in outputs(program.backward) if spec.kind is OutputKind.GRADIENT)
