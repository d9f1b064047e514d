"""The named strategies: what Megatron-LM, ZeRO, FSDP and DDP would do, as plans.

| name | batch | parameters at rest | gathered copy | gradients |
|---|---|---|---|---|
| `replicate` | whole on every rank | whole | – | equal everywhere |
| `ddp` | cut | whole | – | all-reduced |
| `zero1` | cut | cut | kept | reduce-scattered once, after the backward |
| `zero2` | cut | cut | kept | reduce-scattered as they arise |
| `zero3` = `fsdp` | cut | cut | gathered again in the backward | reduce-scattered as they arise |
| `hsdp` | cut | cut along the inner axis | gathered again | reduce-scattered inside, all-reduced across |
| `tp` | whole (see below) | cut along the factors inside a block | – | – |
| `tp+sp` | as `tp`, sequence cut between the blocks' cut parts | as `tp` | – | – |
| `fsdp+tp` | cut along the outer axis | both | gathered again along the outer axis | as `fsdp` along the outer axis |

Which factors `tp` cuts follows from the factor analysis, not from layer names: see `tensor_parallel_factors`.  Where
these leave more than `MAX_WHOLE` of the FLOPs whole on every rank (key heads that are fewer than the ranks, patches,
convolutions between the cut ones), the last three cut the batch along the tensor axis too, in ops that have none of
these factors, if that is the better bargain by `price`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import networkx as nx
import torch
from torch import fx

from autopar.cost_model.ops import node_flops
from autopar.errors import InputError, MeshError
from autopar.factors import Factor, FactorAnalysis, source_of
from autopar.graph import JointGraph
from autopar.mesh import Mesh
from autopar.passes.decompose import freed
from autopar.placement import (
    Placement,
    Replicate,
    Sharding,
    at_rest,
    is_sharded,
    replicated,
    shard,
    shard_dim,
    shard_split,
)
from autopar.plan import EXPERTS, FactorRef, Plan, Storage
from autopar.rules import OpRule, is_look_or_cast

STRATEGIES = ("replicate", "ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp+sp", "fsdp+tp")
"""The named strategies, simplest first."""

ALIASES = {"fsdp": "zero3"}

Price = Callable[[Plan], float]
"""What a plan costs, for choosing between the ways in which a strategy can be carried out; lower is better."""

_MAX_SETS, _MAX_PRICED = 32, 4
"""How many sets of factors tensor parallelism looks at, and of how many it makes a plan: of those that most FLOPs have.
Transformers have one to three, convolutional nets with skips some twenty."""


def canonical_name(strategy: str) -> str:
    """The strategy's own name.

    Raises:
        InputError: if there is no such strategy.
    """
    name = ALIASES.get(strategy, strategy) if isinstance(strategy, str) else None
    if name not in STRATEGIES:
        known = ", ".join(("auto", *STRATEGIES, *ALIASES))
        raise InputError(f"no strategy {strategy!r}; choose one of {known}")
    return name


def strategy_mesh(strategy: str, sizes: Sequence[int], ranks_per_node: int) -> Mesh:
    """The mesh that a strategy works on, over the same ranks in the same order.

    A one-axis strategy flattens the mesh.  `hsdp` and `fsdp+tp` take the last axis as the inner one; they factor a flat
    mesh, at the node boundary if it has one, else as evenly as possible.

    Raises:
        MeshError: if a two-axis strategy cannot factor the ranks.
    """
    total = math.prod(sizes)
    if strategy not in ("hsdp", "fsdp+tp"):
        return Mesh(("tp" if strategy in ("tp", "tp+sp") else "dp",), (total,))
    names = ("dp", "tp") if strategy == "fsdp+tp" else ("dp", "fsdp")
    if len(sizes) > 1:
        return Mesh(names, (total // sizes[-1], sizes[-1]))
    inner = ranks_per_node
    if total % inner or not 1 < inner < total:
        inner = next((total // d for d in range(math.isqrt(total), 1, -1) if total % d == 0), 0)
        inner = min(inner, total // inner) if inner else 0
    if not inner:
        raise MeshError(
            f"{strategy} needs two mesh axes, and {total} ranks do not factor; use zero3 or tp, or another rank count"
        )
    return Mesh(names, (total // inner, inner))


def named_plan(
    strategy: str,
    joint: JointGraph,
    analysis: FactorAnalysis,
    mesh: Mesh,
    compute: Compute,
    price: Price,
    whole: Price,
) -> Plan:
    """The plan of a named strategy.

    Args:
        strategy: one of `STRATEGIES`.
        joint: the normalised graph, and `analysis` its factor analysis.
        mesh: from `strategy_mesh`.
        compute: tells how each parameter is used under a plan (see `Compute`).
        price: compares the alternatives of tensor parallelism.
        whole: tells what share of the FLOPs a plan leaves whole on each rank of the last axis.
    """
    batch = batch_refs(joint)
    params = joint.param_nodes()
    if strategy == "replicate":
        return Plan(strategy, mesh, ((),), _stored(params, replicated(mesh)))
    if strategy == "ddp":
        return Plan(strategy, mesh, (batch,), _stored(params, replicated(mesh)))
    if strategy in ("zero1", "zero2", "zero3", "hsdp"):
        axis = mesh.num_axes - 1
        storage = {
            path: Storage(cut_at_rest(node, replicated(mesh), axis, mesh), strategy in ("zero3", "hsdp"))
            for path, node in params.items()
        }
        return Plan(strategy, mesh, (batch,) * mesh.num_axes, storage, delay_reduction=strategy == "zero1")
    sequence = sequence_refs(joint, analysis) if strategy == "tp+sp" else ()

    def plan_of(refs: tuple[FactorRef, ...]) -> Plan:
        factors = (batch, refs) if strategy == "fsdp+tp" else (refs,)
        draft = Plan(strategy, mesh, factors, _stored(params, replicated(mesh)))
        uses = compute(draft)
        storage = {path: _tensor_storage(node, uses.get(path), mesh, strategy) for path, node in params.items()}
        return Plan(strategy, mesh, factors, storage)

    ways = []
    for refs in tensor_parallel_factors(joint, analysis, mesh.sizes[-1]):
        plain = filled = plan_of((*refs, *sequence))
        if refs and batch and whole(plain) > MAX_WHOLE:
            filled = plan_of((*refs, *sequence, *batch))
        ways.append((plain, filled))
    return _best_way(ways, price)


MAX_WHOLE = 0.01
"""The largest share of the FLOPs that tensor parallelism leaves whole on every rank without cutting the batch there."""


def _best_way(ways: Sequence[tuple[Plan, Plan]], price: Price) -> Plan:
    """Of pairs of plans, the second of one pair that is the cheapest, or the first of that pair if it is cheaper yet.

    A price takes a rewrite: of the first ones no others are looked at, and where there is no choice, none.
    """
    if len(ways) == 1 and ways[0][0] is ways[0][1]:
        return ways[0][0]
    prices = [price(filled) for _, filled in ways]
    least = min(prices)
    plain, filled = ways[prices.index(least)]
    return plain if filled is not plain and price(plain) < least else filled


Compute = Callable[[Plan], dict[str, Sharding]]
"""How each parameter must lie where it is first used, under a plan whose parameters rest whole."""


def _stored(params: dict[str, fx.Node], sharding: Sharding) -> dict[str, Storage]:
    return dict.fromkeys(params, Storage(sharding))


def _tensor_storage(node: fx.Node, use: Sharding | None, mesh: Mesh, strategy: str) -> Storage:
    """As the parameter is used along the tensor axis; cut along the data axis too for FSDP."""
    inner: Placement = at_rest(use)[-1] if use is not None and is_sharded(use[-1]) else Replicate()
    sharding = (*replicated(mesh)[:-1], inner)
    if strategy != "fsdp+tp":
        return Storage(sharding)
    return Storage(cut_at_rest(node, sharding, 0, mesh), regather=True)


def cut_at_rest(node: fx.Node, sharding: Sharding, axis: int, mesh: Mesh) -> Sharding:
    """Cut a parameter along one more mesh axis, for storage: the first free dim that divides, else the longest free one
    unevenly; a parameter without a free dim stays whole along this axis."""
    taken = {shard_dim(p) for p in sharding if is_sharded(p)}
    shape = node.meta["val"].shape
    free = [d for d in range(len(shape)) if d not in taken]
    if not free:
        return sharding
    even = [d for d in free if shape[d] % mesh.sizes[axis] == 0 and shape[d] > 0]
    dim = even[0] if even else max(free, key=lambda d: (shape[d], -d))
    return (*sharding[:axis], shard(dim), *sharding[axis + 1 :])


def cut_at_rest_along(node: fx.Node, sharding: Sharding, axes: Sequence[int], mesh: Mesh) -> Sharding:
    """Cut a parameter for storage along each of several axes, in their order, that does not cut it already.

    The parts that one axis makes of a dim are cut further by the next where they divide: what is gathered along the
    later axis is then one piece of memory.  Else the next axis takes another dim, as `cut_at_rest` does.
    """
    for axis in axes:
        if not is_sharded(sharding[axis]):
            inside = _cut_inside(node, sharding, axis, mesh)
            sharding = cut_at_rest(node, sharding, axis, mesh) if inside is None else inside
    return sharding


def _cut_inside(node: fx.Node, sharding: Sharding, axis: int, mesh: Mesh) -> Sharding | None:
    """Cut the parts that one other axis makes of a dim; more cuts of one dim PyTorch's `DTensor` cannot hold."""
    shape, taken = node.meta["val"].shape, [shard_dim(p) for p in sharding if is_sharded(p)]
    for placement, parts in zip(sharding, mesh.sizes, strict=True):
        if not is_sharded(placement) or shard_split(placement) != 1:
            continue
        dim = shard_dim(placement)
        if taken.count(dim) == 1 and shape[dim] and shape[dim] % (parts * mesh.sizes[axis]) == 0:
            return (*sharding[:axis], shard(dim, split=parts), *sharding[axis + 1 :])
    return None


# ------------------------------------------------------------------------------------------------ batch and sequence


def batch_refs(joint: JointGraph) -> tuple[FactorRef, ...]:
    """The batch, named by the first input that has it (the analysis knows that all share it)."""
    return tuple(
        FactorRef(f"input:{path}", dim, 0, "batch") for path, dim in itertools.islice(joint.batch_dims.items(), 1)
    )


def sequence_refs(joint: JointGraph, analysis: FactorAnalysis) -> tuple[FactorRef, ...]:
    """The sequence: a dim of a batched input beside the batch that no parameter shares."""
    in_params = {
        f
        for node in joint.param_nodes().values()
        for d in range(node.meta["val"].dim())
        for f in analysis.dim_factors(node, d)
    }
    for path, batch in joint.batch_dims.items():
        node = analysis.anchors[f"input:{path}"]
        for dim in range(node.meta["val"].dim()):
            parts = analysis.dim_factors(node, dim)
            if dim != batch and parts and parts[0] not in in_params:
                return (FactorRef(f"input:{path}", dim, 0, "seq"),)
    return ()


# -------------------------------------------------------------------------------------------------- tensor parallelism


def tensor_parallel_factors(joint: JointGraph, analysis: FactorAnalysis, num_ranks: int) -> list[tuple[FactorRef, ...]]:
    """The maximal sets of parameter factors that can be cut along one axis together.

    Two factors that meet in one parameter exclude each other: cutting one leaves the other whole there.  Megatron-LM's
    choice (heads, ffn, vocabulary) is one maximal set of a transformer's factors; the residual stream's width is
    another.  Which is best is a matter of price; of many sets the few are returned that most FLOPs have.  Blocks that
    repeat decide alike.
    """
    groups = _factor_groups(joint, analysis, num_ranks)
    graph = nx.Graph()
    graph.add_nodes_from(groups)
    for key, other in itertools.combinations(groups, 2):
        params = {node for _, _, node in groups[key]}
        if any(node in params for _, _, node in groups[other]):
            graph.add_edge(key, other)
    sets = list(itertools.islice(nx.find_cliques(nx.complement(graph)), _MAX_SETS)) if groups else []
    order = {key: i for i, key in enumerate(groups)}
    out: dict[frozenset[int], tuple[FactorRef, ...]] = {}
    for chosen in sorted(sorted(s, key=order.__getitem__) for s in sets):
        refs: dict[int, FactorRef] = {}
        for key in chosen:
            for ref, factor, _ in groups[key]:
                refs.setdefault(id(factor), ref)
        out.setdefault(frozenset(refs), tuple(refs.values()))
    if len(out) > _MAX_PRICED:
        shares = _flops_by_factor(analysis)
        flops = {chosen: sum(count for count, parts in shares if parts & chosen) for chosen in out}
        out = {chosen: out[chosen] for chosen in sorted(out, key=flops.__getitem__, reverse=True)[:_MAX_PRICED]}
    return list(out.values()) or [()]


def _flops_by_factor(analysis: FactorAnalysis) -> list[tuple[int, frozenset[int]]]:
    """The FLOPs of each product, and the factors along which it may be cut."""
    return [
        (flops, frozenset(id(f) for name, _, f in analysis.parts(node) if name not in _kept_whole(node, rule)))
        for node, rule in analysis.rules.items()
        if (flops := node_flops(node))
    ]


def _kept_whole(node: fx.Node, rule: OpRule) -> frozenset[str]:
    return rule.whole - freed(node, rule) - {rows.groups for rows in rule.rows.values()}


def expert_refs(joint: JointGraph, analysis: FactorAnalysis, num_ranks: int) -> tuple[FactorRef, ...]:
    """Dims of parameters along which a product treats each part by itself, with rows of its own: experts, if they
    divide."""
    params = {node: path for path, node in joint.param_nodes().items()}
    found: dict[int, Factor] = {}
    for node, rule in analysis.rules.items():
        for i, operand in enumerate(analysis.operands[node]):
            if operand in params or is_look_or_cast(operand):
                for name in _batched(rule, i) | {rows.groups for rows in rule.rows.values() if rows.groups}:
                    for factor in analysis.rule_factors(node, name)[:1]:
                        found[id(factor)] = factor
    refs = []
    for node, path in params.items():
        shape = node.meta["val"].shape
        for dim in range(len(shape)) if len(shape) > 2 else ():
            parts = analysis.dim_factors(node, dim)
            if len(parts) == 1 and id(parts[0]) in found and parts[0].size % num_ranks == 0:
                refs.append(FactorRef(path, dim, 0, EXPERTS))
    return tuple(refs)


def _batched(rule: OpRule, operand: int) -> set[str]:
    """Factors that all operands and results of a product have."""
    if not _contracts(rule, operand):
        return set()
    terms = [{name for group in dims for name in group} for dims in (*rule.inputs, *rule.outputs)]
    return set.intersection(*terms)


Group = list[tuple[FactorRef, Factor, fx.Node]]


def _factor_groups(joint: JointGraph, analysis: FactorAnalysis, num_ranks: int) -> dict[str, Group]:
    """Factors that ranks can share out of parameters of two dims or more, grouped by where they occur with layer
    numbers left out."""
    blocked, grouped = _factors_kept_whole(analysis), set(analysis.groups_of_rows.values())
    matmul_params = _multiplied_params(joint, analysis)
    occurrences: dict[int, Group] = {}
    for path, node in joint.param_nodes().items():
        if node.meta["val"].dim() < 2:
            continue
        if node not in matmul_params and not _table_worth_cutting(joint, node):
            continue
        for dim in range(node.meta["val"].dim()):
            for part, factor in _best_parts(analysis.dim_factors(node, dim), num_ranks, blocked):
                label = EXPERTS if factor in grouped else _label(analysis, node, dim)
                occurrences.setdefault(id(factor), []).append((FactorRef(path, dim, part, label), factor, node))
    groups: dict[str, Group] = {}
    for members in occurrences.values():
        key = ";".join(sorted({re.sub(r"\d+", "#", ref.anchor) + f"/{ref.dim}" for ref, _, _ in members}))
        groups.setdefault(key, []).extend(members)
    return groups


def _best_parts(parts: list[Factor], num_ranks: int, blocked: set[int]) -> list[tuple[int, Factor]]:
    """Of the factors that one dim fuses, the outermost that divides, and one further out that does not (heads around
    their dims), if no op needs it whole and cutting it wastes little."""
    free = [(part, factor) for part, factor in enumerate(parts) if id(factor) not in blocked]
    even = next(((part, factor) for part, factor in free if factor.size % num_ranks == 0), None)
    most = _MAX_PADDING if len(parts) == 1 else _MAX_FUSED_PADDING
    uneven = next(
        (
            (part, factor)
            for part, factor in free[: free.index(even) if even else None]
            if -factor.size % num_ranks <= most * factor.size
        ),
        None,
    )
    return [choice for choice in (even, uneven) if choice is not None]


_MAX_PADDING = 1 / 8
"""The largest share of a dim that padding may add where its size does not divide: an odd vocabulary adds next to none,
a classifier of ten classes on four ranks would add a fifth."""

_MAX_FUSED_PADDING = 1
"""The same for a factor among several, such as the heads: nothing else may be left to cut in attention, and whole it is
computed on every rank.  3 heads on 2 ranks are padded by a third, 12 on 8 too, 4 on 8 doubled."""


def _factors_kept_whole(analysis: FactorAnalysis) -> set[int]:
    """Factors that some op needs whole: cutting them buys a gather there.

    Not counted are ops that the rewrite takes apart, constants such as `arange`, which every rank can make whole, and
    groups where they are cut with their rows or where it is counted how many rows they have.
    """
    grouped = set(analysis.groups_of_rows.values())
    return {
        id(factor)
        for node, rule in analysis.rules.items()
        if rule.inputs
        for name in rule.whole - freed(node, rule)
        for factor in analysis.rule_factors(node, name)
        if factor not in grouped or not (rule.rows or _makes(rule, name))
    }


def _makes(rule: OpRule, name: str) -> bool:
    """Whether a factor occurs in an op's results alone."""
    return not any(name in group for dims in rule.inputs for group in dims)


_aten = torch.ops.aten


def _multiplied_params(joint: JointGraph, analysis: FactorAnalysis) -> set[fx.Node]:
    """Parameters that reach a product, such as a matrix product or a convolution: themselves, in another shape, some
    rows of them, or what is computed from parameters alone (a weight norm)."""
    made_of: dict[fx.Node, frozenset[fx.Node]] = {p: frozenset((p,)) for p in joint.param_nodes().values()}
    out: set[fx.Node] = set()
    for node, rule in analysis.rules.items():
        operands = analysis.operands[node]
        sources = [made_of.get(source_of(n)[0]) for n in operands]
        contracted = [params for i, params in enumerate(sources) if params and _contracts(rule, i)]
        out.update(*contracted)
        data = (n for n, params in zip(operands, sources, strict=True) if params is None)
        if not contracted and not rule.lookup and all(n.meta["val"].dtype in _INTEGERS for n in data):
            made_of[node] = frozenset().union(*(params for params in sources if params))
    return out


_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


def _contracts(rule: OpRule, operand: int) -> bool:
    """Whether an op sums over a factor that this operand and another one have."""
    ours, *others = (
        {name for group in dims for name in group}
        for dims in (rule.inputs[operand], *rule.inputs[:operand], *rule.inputs[operand + 1 :])
    )
    results = {name for dims in rule.outputs for group in dims for name in group}
    return any((ours & other) - results for other in others)


def _table_worth_cutting(joint: JointGraph, node: fx.Node) -> bool:
    """Whether a lookup table is larger than what its lookups return, so that cutting it saves more than it moves."""
    results = [u.meta["val"].numel() for u in node.users if u.target is _aten.embedding.default]
    return bool(results) and node.meta["val"].numel() > sum(results)


def _label(analysis: FactorAnalysis, node: fx.Node, dim: int) -> str:
    """A word for a parameter's factor, from how the parameter is used."""
    for user in node.users:
        rule = analysis.rules.get(user)
        if rule is not None and rule.lookup:
            return "vocab" if dim == 0 else "hidden"
    return f"dim{dim}"
