"""Random ops that do not depend on how their result is cut.

Each random number is a hash of (seed of the step, which random op, global position of the element), as in counter-based
generators (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).  So the same seed gives the same
dropout
masks on any number of ranks under any plan, and a repeated op repeats its numbers.  They are autopar's numbers, not
those that the eager op would draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import OpOverload
from autopar.errors import TraceError
from autopar.graph import GraphInput, InputKind, JointGraph
from autopar.local_ops import HASHED_AT_ONCE
from autopar.random_ops import DRAWN, REPLACEMENTS, Draw
from autopar.rules import Call, OpRule, derives
from autopar.rules_compute import constant as fill

aten = torch.ops.aten


@torch.library.custom_op("autopar::uniform", mutates_args=())
def uniform(shape: Sequence[int], cuts: Sequence[int], seed: int, salt: int, device: torch.device) -> Tensor:
    """Uniform float32 numbers in [0, 1), 24 bits each.

    Args:
        shape: this rank's shape.
        cuts: how the rank's part lies in the whole: `dim, split, n, index` for each cut, in the order of cutting: the
            dim is read as (split, n, rest) and this is part `index` of n.
        seed: of the step.
        salt: tells the random ops of a program apart.
        device: where to put the result.
    """
    whole = list(shape)
    positions = [torch.arange(size, device=device) for size in shape]
    quads = [tuple(cuts[i : i + 4]) for i in range(0, len(cuts), 4)]
    for dim, split, n, index in reversed(quads):
        rest = whole[dim] // split
        positions[dim] = positions[dim] // rest * (n * rest) + index * rest + positions[dim] % rest
        whole[dim] *= n
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    key = _signed(_mix_int(seed * _GOLDEN + salt))
    out = torch.empty(list(shape), dtype=torch.float32, device=device)
    if not shape:
        return out.copy_(_hash(torch.zeros((), dtype=torch.int64, device=device) + key))
    rows = max(1, HASHED_AT_ONCE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        places = torch.full([1] * len(whole), key, dtype=torch.int64, device=device)
        for dim, (position, stride) in enumerate(zip(positions, strides, strict=True)):
            part = position[start : start + rows] if dim == 0 else position
            places = places + (part * stride).reshape([-1 if d == dim else 1 for d in range(len(whole))])
        out[start : start + rows] = _hash(places)
    return out


@uniform.register_fake
def _(shape: Sequence[int], cuts: Sequence[int], seed: int, salt: int, device: torch.device) -> Tensor:
    return torch.empty(list(shape), dtype=torch.float32, device=device)


@derives(torch.ops.autopar.uniform)
def drawn(call: Call) -> OpRule:
    """Every position by itself; positions are counted, so that all parts must be of one size."""
    rule = fill(call)
    return replace(rule, even=frozenset(rule.factors))


# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _mix_int(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * _FIRST % 2**64
    value = (value ^ value >> 27) * _SECOND % 2**64
    return value ^ value >> 31


def _hash(value: Tensor) -> Tensor:
    """SplitMix64's output function on int64, whose products wrap; the top 24 bits as a float.  Overwrites `value`, so
    that one temporary of its size is all that is needed."""
    value.mul_(_signed(_GOLDEN))
    value.bitwise_xor_(_shifted(value, 30)).mul_(_signed(_FIRST))
    value.bitwise_xor_(_shifted(value, 27)).mul_(_signed(_SECOND))
    value.bitwise_xor_(_shifted(value, 31))
    value.bitwise_right_shift_(40).bitwise_and_(2**24 - 1)
    return value.to(torch.float32).mul_(2.0**-24)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; `>>` keeps the sign."""
    return (value >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def replace_random_ops(joint: JointGraph) -> JointGraph:
    """Make every random op of a joint graph a function of the step's seed, in place.

    The graph gets one more input, of kind `SEED`, if it has random ops.

    Raises:
        TraceError: for a random op that has no replacement, with its module.
    """
    graph = joint.module.graph
    random = [node for node in graph.nodes if node.op == "call_function" and _is_random(node)]
    if not random:
        return joint
    with graph.inserting_after(joint.placeholders[-1]):
        seed = graph.placeholder("seed")
    seed.meta = {"val": 0, "module": "", "backward": False}
    joint.inputs = (*joint.inputs, GraphInput(InputKind.SEED, ""))
    for node in random:
        replacement = REPLACEMENTS.get(node.target) if Call(node).args.get("generator") is None else None
        if replacement is None:
            raise TraceError(
                f"module {node.meta['module'] or '(root)'!r} uses the random op {node.target}, whose numbers "
                "would depend on the rank: draw them outside the model and pass them in, or use what autopar draws "
                f"itself, without a generator: dropout, {', '.join(DRAWN)}"
            )
        with graph.inserting_before(node):
            results = replacement(Call(node), Draw(node, seed))
        if isinstance(results, tuple):
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(results)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    number_draws(graph)
    joint.module.recompile()
    return joint


def number_draws(graph: fx.Graph) -> None:
    """Give each draw of random numbers a salt of its own: its place among them."""
    draws = graph.find_nodes(op="call_function", target=torch.ops.autopar.uniform.default, sort=True)
    for salt, node in enumerate(draws, 1):
        node.update_arg(_SALT, salt)


def without_salt(node: fx.Node) -> tuple[Any, ...]:
    """A call's arguments, less what tells a draw from another."""
    args = node.args
    if node.target is torch.ops.autopar.uniform.default:
        args = (*args[:_SALT], *args[_SALT + 1 :])
    return args, dict(node.kwargs)


_SALT = 3  # which argument of `uniform`


def _is_random(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Fused attention is tagged random for its dropout, which is a number here.
    return Call(node).args.get("dropout_p") != 0
