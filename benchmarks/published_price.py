"""What autopar predicts for one published run: trace, plan, rewrite, simulate."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace

import torch

from autopar.cluster import axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.memory import FRAGMENTATION_SHARE, at_rest
from autopar.cost_model.simulate import optimizer_bytes, simulate
from autopar.devices import GIB
from autopar.graph import InputKind, JointGraph
from autopar.mesh import Mesh
from autopar.normalise import normalise
from autopar.passes.pipeline import parameter_uses, rewrite
from autopar.placement import Sharding, is_sharded, replicated
from autopar.plan import FactorRef, Plan, Storage
from autopar.program import LocalProgram
from autopar.randomness import replace_random_ops
from autopar.regions import find_regions
from autopar.strategies import batch_refs, cut_at_rest
from autopar.trace import trace
from benchmarks.published_model import Decoder, Sizes
from benchmarks.published_rows import Run


@functools.lru_cache(maxsize=8)
def traced(sizes: Sizes, num_layers: int, rows: int, param_dtype: str) -> JointGraph:
    """The normalised joint graph of a model of few layers, computing in bf16, on a batch of `rows` sequences."""
    with torch.device("meta"):
        model = Decoder(sizes, num_layers)
        if param_dtype == "bf16":
            model = model.to(torch.bfloat16)
        ids = torch.empty((rows, sizes.seq), dtype=torch.long)
    return replace_random_ops(normalise(trace(model, (ids, ids), {}, num_ranks=1, dtype=torch.bfloat16)))


def mesh_of(run: Run) -> Mesh:
    """Axes of a run, the tensor axis innermost; axes of one rank are left out."""
    axes = {"dp": run.data // run.shards, "shard": run.shards, "cp": run.context, "tp": run.tensor}
    axes = {name: size for name, size in axes.items() if size > 1} or {"dp": 1}
    return Mesh(tuple(axes), tuple(axes.values()))


def plan_of(run: Run, joint: JointGraph) -> Plan:
    """The run's strategy as a plan: Megatron-LM's cuts along the tensor axis, the sequence (and heads inside attention)
    along the context axis, and parameters at rest as the ZeRO stage says."""
    mesh, params = mesh_of(run), joint.param_nodes()
    batch = batch_refs(joint)
    sequence = tuple(replace(ref, dim=1, label="seq") for ref in batch)  # every input is (batch, seq)
    factors = {
        "dp": batch,
        "shard": batch,
        "cp": (*sequence, *reversed(_heads(joint))),
        "tp": (*_megatron_factors(joint), *(sequence if run.has_sequence_parallel else ())),
    }
    cuts = tuple(factors[name] for name in mesh.names)
    storage = {path: Storage(replicated(mesh)) for path in params}
    if "tp" in mesh.names:
        uses, axis = parameter_uses(joint, Plan("published", mesh, cuts, storage)), mesh.axis("tp")
        storage = {
            path: Storage(_only(axis, uses[path], mesh) if path in uses else rest.sharding)
            for path, rest in storage.items()
        }
    for name in ("shard", "cp") if run.zero else ():
        if name in mesh.names:
            axis = mesh.axis(name)
            storage = {
                path: Storage(cut_at_rest(params[path], rest.sharding, axis, mesh), run.zero == 3)
                for path, rest in storage.items()
            }
    blocks = [region for region in find_regions(joint) if region.startswith("blocks.")]
    recompute = {} if run.recompute == "none" else dict.fromkeys(blocks, run.recompute)
    return Plan("published", mesh, cuts, storage, recompute)


def _only(axis: int, sharding: Sharding, mesh: Mesh) -> Sharding:
    """A sharding along one axis, whole along the others."""
    return tuple(
        p if i == axis and is_sharded(p) else w for i, (p, w) in enumerate(zip(sharding, replicated(mesh), strict=True))
    )


def _megatron_factors(joint: JointGraph) -> tuple[FactorRef, ...]:
    """Heads, the feed-forward network's inner width, and the vocabulary."""
    paths = joint.param_nodes()
    inner = [FactorRef(path, 0, 0, "ffn") for path in paths if path.endswith("mlp.up.weight")]
    tables = [FactorRef(path, 0, 0, "vocab") for path in ("embedding.weight", "head.weight") if path in paths]
    return (*_heads(joint), *inner, *tables)


def _heads(joint: JointGraph) -> tuple[FactorRef, ...]:
    """Heads of keys, which those of queries are a multiple of; then the queries' own, where there are more."""
    paths = joint.param_nodes()
    keys = [FactorRef(path, 0, 0, "kv heads") for path in paths if path.endswith("attention.k.weight")]
    return (*keys, *(FactorRef(ref.anchor.replace(".k.", ".q."), 0, 1, "heads") for ref in keys))


def laid_out(run: Run) -> Run:
    """What a run's program depends on: runs that are equal in it share one."""
    return replace(
        run, id="", family="", num_layers=0, cluster=None, owners=1, accumulate=1, recomputed_share=1.0, is_fused=False,
        has_gradient_buffer=False, holds_gradients=False, workspace_bytes=0, optimizer="", step_s=None,
        memory_gib=None, memory_kind="",
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def program_of(run: Run, num_layers: int) -> LocalProgram:
    """One rank's program, of a model of few layers."""
    assert run.model is not None
    joint = traced(run.model, num_layers, run.micro_batch * run.data, run.param_dtype)
    plan = plan_of(run, joint)
    if run.micro_batch * run.data % plan.mesh.num_ranks:
        joint = replace(joint, batch_dims={}, derived={})  # each rank is given the whole batch, and takes its rows
    return rewrite(joint, replace(plan, overlap=False), check=False)  # what was measured runs in PyTorch's own order


@dataclass(frozen=True)
class Prediction:
    """What autopar predicts for one rank.

    Attributes:
        step_s: seconds of a step of the optimizer.
        allocated_bytes: peak of what tensors take.
        cached_bytes: what the allocator holds besides.
        outside_bytes: context and communicators.
    """

    step_s: float
    allocated_bytes: float
    cached_bytes: float
    outside_bytes: float

    def memory_gib(self, kind: str) -> float:
        """The peak as a source of this kind counts it: tensors, what the allocator has reserved, or the whole card."""
        size = self.allocated_bytes
        if "alloc" not in kind:
            size += self.cached_bytes
            if "reserv" not in kind:
                size += self.outside_bytes
        return size / GIB

    def mixed(self, other: Prediction, share: float) -> Prediction:
        """So much of this one, and the rest of another."""
        mine, others = astuple(self), astuple(other)
        return Prediction(*(share * a + (1 - share) * b for a, b in zip(mine, others, strict=True)))


_DEPTHS = (1, 2)
"""Layers of the models that are traced: all further blocks cost what the second adds to the first."""


def predict(run: Run) -> Prediction:
    """Trace, rewrite and simulate a run."""
    if run.recomputed_share < 1:
        rest = replace(run, recompute="none", recomputed_share=1.0)
        return predict(replace(run, recomputed_share=1.0)).mixed(predict(rest), run.recomputed_share)
    few, more = (_simulated(run, depth) for depth in _DEPTHS)
    whole = more.mixed(few, 1 + run.num_layers - _DEPTHS[1])
    return replace(whole, step_s=whole.step_s + _broadcasts_s(run)) if run.owners > 1 else whole


def _simulated(run: Run, num_layers: int) -> Prediction:
    assert run.cluster is not None
    program = program_of(laid_out(run), num_layers)
    simulation = simulate(
        program, run.cluster, run.optimizer, fused=run.is_fused, accumulate=run.accumulate, defer=run.zero < 2
    )
    memory, rest = simulation.memory, at_rest(program, run.optimizer)
    cached = FRAGMENTATION_SHARE * (memory.activations + memory.temporaries)
    whole_bytes = memory.params * (run.shards * run.context if run.zero else 1)
    held_bytes = whole_bytes * run.has_gradient_buffer + memory.params * run.holds_gradients
    allocated = memory.total - memory.reserve + max(0, held_bytes - memory.grads) + run.workspace_bytes
    others = 1 - 1 / run.owners  # the share of the optimizer's work and state that other ranks have
    spared_bytes = others * optimizer_bytes(rest)
    copied_bytes = _copied_bytes(run, whole_bytes) if run.zero == 3 else 0.0
    more_s = (copied_bytes - spared_bytes) / run.cluster.device.memory_bandwidth_bytes_s
    return Prediction(
        simulation.step_time_s + more_s, allocated - others * memory.optimizer, cached, memory.reserve - cached
    )


def _copied_bytes(run: Run, whole_bytes: float) -> float:
    """Memory traffic of a step by which ZeRO-3 brings gradients into the flat buffer that it reduces.

    Each is read as it was computed, in 16 bits, and written in the dtype in which it is summed (PyTorch's
    `FlatParameter`, whose gradient joins those of its views, and `foreach_reduce_scatter_copy_in` of `fully_shard`).
    """
    summed = {"fp32": 4, "bf16": 2}[run.param_dtype]
    return run.accumulate * whole_bytes / summed * (2 + summed)


def _broadcasts_s(run: Run) -> float:
    """Seconds in which owners send their tensors to the others, one after another; nothing runs beside it.

    A broadcast goes round a ring as a gather of as many bytes does.
    """
    assert run.cluster is not None
    few, more = (_parameters(program_of(laid_out(run), depth)) for depth in _DEPTHS)
    count, num_bytes = (a + (run.num_layers - _DEPTHS[0]) * (b - a) for a, b in zip(few, more, strict=True))
    senders = min(run.owners, count)
    mesh = Mesh(("dp", "owners", "inner"), (run.data // run.owners, run.owners, run.context * run.tensor))
    link = axis_link(run.cluster, mesh, "owners")
    return senders * collective_time("all_gather", run.owners, num_bytes // senders, link)


def _parameters(program: LocalProgram) -> tuple[int, int]:
    """How many parameters one rank has, and their bytes."""
    return sum(spec.kind is InputKind.PARAM for spec in program.forward.inputs), at_rest(program).params
