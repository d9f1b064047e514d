"""Layouts: what is cut to compute, before anything is said about how parameters rest or what is recomputed.

A layout is a mesh over the cluster's ranks and for each axis the factors cut along it.  The named strategies' layouts
are among them; beyond those, a layout may cut along one axis the tensor-parallel factors where there are any and the
batch elsewhere, also for some kinds of layers only, such as the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.factors import analyse
from autopar.graph import JointGraph
from autopar.mesh import Mesh
from autopar.passes.pipeline import parameter_uses
from autopar.placement import Replicate, Sharding, at_rest, is_sharded, replicated
from autopar.plan import SENT, FactorRef, Plan, Storage
from autopar.planner import named_on
from autopar.strategies import batch_refs, cut_at_rest_along, expert_refs, sequence_refs

Factors = tuple[FactorRef, ...]

MODES = ("whole", "kept", "regathered", "spread")
"""How a region's parameters rest along the axes that cut the batch: whole; cut along the innermost of them, the
gathered copy kept for the backward pass; cut so, and gathered again there; cut along all, and gathered again."""


@dataclass(frozen=True)
class Layout:
    """A mesh, and for each axis the factors cut along it, the most wanted first."""

    name: str
    mesh: Mesh
    factors: tuple[Factors, ...]

    def plan(self, storage: Mapping[str, Storage], recompute: Mapping[str, str]) -> Plan:
        """The plan that also says how parameters rest and what is recomputed."""
        return Plan("auto", self.mesh, self.factors, storage, recompute)

    @property
    def storage_axes(self) -> tuple[int, ...]:
        """The axes along which a parameter may rest cut though it is used whole: those that cut the batch, or, if none
        does, the last; the innermost first, since gathers are fastest there."""
        cut = [axis for axis, refs in enumerate(self.factors) if any(ref.label == "batch" for ref in refs)]
        return tuple(cut[::-1]) or (self.mesh.num_axes - 1,)


def find_layouts(joint: JointGraph, sizes: Sequence[int], ranks_per_node: int) -> list[Layout]:
    """The layouts that are worth pricing on a mesh of these sizes, those of the named strategies first; equal ones
    once."""
    total, batch = math.prod(sizes), batch_refs(joint)
    pairs = two_axes(sizes, ranks_per_node)
    meshes = [Mesh(("tp",), (total,)), *(Mesh(("dp", "tp"), pair) for pair in pairs)]
    layouts = [(0, Layout("data", Mesh(("dp",), (total,)), (batch,)))]
    layouts += [(0, Layout("data, in groups", Mesh(("dp", "fsdp"), pair), (batch, batch))) for pair in pairs]
    for mesh in meshes:
        outer = (batch,) * (mesh.num_axes - 1)
        for rank, (name, inner) in enumerate(_inner(joint, mesh, batch)):
            layouts.append((rank, Layout(name, mesh, (*outer, inner))))
    layouts.sort(key=lambda ranked: ranked[0])
    # Over links that are slow enough to compute all rows everywhere is best, and memory may call for more than that.
    cutting = [*(one for _, one in layouts if any(one.factors)), Layout("nothing", Mesh(("dp",), (total,)), ((),))]
    return list({(one.mesh, one.factors): one for one in cutting}.values())


def two_axes(sizes: Sequence[int], ranks_per_node: int) -> list[tuple[int, int]]:
    """The user's mesh as two axes, or the ways to factor a flat one with the inner axis inside a node.

    Axes of a larger mesh that stand next to each other are taken together.  Where the inner axis would span nodes, the
    mesh is also cut at the nodes.
    """
    total = math.prod(sizes)
    if len(sizes) > 1:
        ways = [math.prod(sizes[i:]) for i in range(len(sizes) - 1, 0, -1)]
        if sizes[-1] > ranks_per_node and total % ranks_per_node == 0:
            ways.insert(0, ranks_per_node)
        return [(total // inner, inner) for inner in dict.fromkeys(ways) if 1 < inner < total]
    widest = ranks_per_node if 1 < ranks_per_node < total else total // 2
    inner = [n for n in range(widest, 1, -1) if total % n == 0]
    return [(total // n, n) for n in inner[:_MAX_FACTORINGS]]


_MAX_FACTORINGS = 4


def _inner(joint: JointGraph, mesh: Mesh, batch: Factors) -> Iterator[tuple[str, Factors]]:
    """What the last axis may cut."""
    experts = expert_refs(joint, analyse(joint), mesh.sizes[-1])
    if experts:
        yield "experts, batch elsewhere", (*experts, *batch)
        if analyse(joint).groups_of_rows:
            yield "experts, rows sent, batch elsewhere", (*(replace(ref, label=SENT) for ref in experts), *batch)
    tensor = tuple(
        ref
        for ref in named_on("fsdp+tp" if mesh.num_axes > 1 else "tp", joint, mesh).factors[-1]
        if ref.label != "batch"
    )
    if not tensor:
        return
    yield "tensor", tensor
    sequence = sequence_refs(joint, analyse(joint))
    if sequence:
        yield "tensor, sequence between", (*tensor, *sequence)
    yield "tensor, batch between", (*tensor, *batch)
    groups: dict[str, list[FactorRef]] = {}
    for ref in tensor:
        groups.setdefault(f"{re.sub(r'[0-9]+', '*', ref.anchor)}:{ref.dim}", []).append(ref)
    if len(groups) > 1:
        for key, refs in groups.items():
            yield f"tensor in {key.partition(':')[0]}, batch elsewhere", (*refs, *batch)


def storages(joint: JointGraph, layout: Layout) -> dict[str, dict[str, Storage]]:
    """How each parameter may rest: for each mode its storage.  Modes that come to the same are equal."""
    params = joint.param_nodes()
    whole = dict.fromkeys(params, Storage(replicated(layout.mesh)))
    uses = parameter_uses(joint, layout.plan(whole, {}))
    axes, found = layout.storage_axes, {}
    for path, node in params.items():
        used: Sharding = uses.get(path, replicated(layout.mesh))
        base = tuple(p if is_sharded(p) else Replicate() for p in at_rest(used))
        rest = cut_at_rest_along(node, base, axes[:1], layout.mesh)
        spread = cut_at_rest_along(node, rest, axes[1:], layout.mesh)
        cut = Storage(rest)
        modes = (Storage(base), cut, replace(cut, regather=rest != base), Storage(spread, regather=spread != base))
        found[path] = dict(zip(MODES, modes, strict=True))
    return found
