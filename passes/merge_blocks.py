"""Merge blocks: sort at once what no rank parts, rather than each row of the batch by itself.

Rows are sorted in blocks so that the batch may be cut, and any number of blocks would do (`autopar.row_order`).  The
fewer there are, the larger are the groups that a rank multiplies.  So there are as many as the cuts need, which are
known now.  Changes the rounding of sums over rows, which are made in another order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import partial

import torch
from torch import fx

from autopar import grouped, sorted_rows  # noqa: F401  (register ops)
from autopar.mesh import Mesh
from autopar.passes.reshard import is_reshard
from autopar.placement import Placement, is_sharded, meta_value, shard_dim, shard_split
from autopar.rules import rule_for

aten, ours = torch.ops.aten, torch.ops.autopar

_READERS = {ours.take_rows.default, ours.put_rows.default, ours.grouped_mm.default}
"""Take an order or ends of any number of blocks; what else they read and what they give does not depend on it."""


def merge_blocks(module: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """Let every sort of rows have as few blocks as the cuts of all that reads its order allow."""
    for sort in module.graph.find_nodes(op="call_function", target=aten.sort.stable):
        view = _unmoved(sort.args[0])
        found = _by_blocks(view) if view.target is aten.view.default else None
        if found is not None and (number := _num_parts(found, mesh)) is not None:
            _set_number(*found, number)
    return module


def _unmoved(node: fx.Node) -> fx.Node:
    """A value before it was resharded."""
    while is_reshard(node):
        node = node.all_input_nodes[0]
    return node


def _by_blocks(view: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """What has the blocks as its first dim, in the graph's order, and the ops that read such values; None if others
    than those that may have any number of blocks do, or none."""
    values, readers = [view], []
    for node in values:
        for user in node.users:
            if is_reshard(user) or user.target in (aten.sort.stable, ours.group_ends.default, operator.getitem):
                values += [user] if user not in values else []
            elif user.target in _READERS or (user.target is aten.view.default and user.meta["val"].dim() == 1):
                readers.append(user)
            else:
                return None
    return (values, readers) if any(user.target in _READERS for user in readers) else None


def _num_parts(found: tuple[list[fx.Node], list[fx.Node]], mesh: Mesh) -> int | None:
    """The fewest blocks of which every rank has whole ones, wherever blocks are cut; None if they are cut otherwise
    than one after another."""
    number = 1
    for value in found[0]:
        for sharding in _shardings(value):
            cut = [(p, n) for p, n in zip(sharding, mesh.sizes, strict=True) if is_sharded(p)]
            if any(shard_dim(p) != 0 or shard_split(p) != 1 for p, _ in cut):
                return None
            number = math.lcm(number, math.prod(n for _, n in cut))
    return number


def _shardings(node: fx.Node) -> Iterator[tuple[Placement, ...]]:
    several = isinstance(node.meta["val"], (tuple, list))
    yield from node.meta["sharding"] if several else (node.meta["sharding"],)


def _set_number(values: list[fx.Node], readers: list[fx.Node], number: int) -> None:
    """Give all values so many blocks; the calls are cut as they were."""
    values[0].args = (values[0].args[0], [number, -1])
    num_rows = values[0].meta["val"].numel()
    for value in values:
        before = value.meta["val"]
        is_ends = _unmoved(value).target is ours.group_ends.default
        shape = (number, before.shape[1] if is_ends else num_rows // number)
        several = isinstance(before, (tuple, list))
        value.meta["val"] = tuple(map(partial(_like, shape), before)) if several else _like(shape, before)
    for call in (*values, *readers):
        if call.meta.get("rule") is not None:
            call.meta["rule"] = rule_for(call)


def _like(shape: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    return meta_value(shape, value.dtype)
