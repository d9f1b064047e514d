"""Cast early: where all that read a gathered value cast it to a narrower dtype, cast first and gather the narrow value.

Preserves numerics exactly: a cast works on each element by itself, wherever that lies.  It is what makes mixed
precision move half the bytes: a parameter rests in float32 and is gathered in the dtype in which it is used.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import add_call
from autopar.passes.reshard import communicates, reshard
from autopar.placement import Partial, meta_value
from autopar.rules import is_look

_CAST = torch.ops.aten._to_copy.default


def cast_early(module: fx.GraphModule) -> fx.GraphModule:
    """Move casts ahead of the reshards that they follow."""
    for node in filter(_moves_parts, module.graph.find_nodes(op="call_function", target=reshard)):
        looks, readers = _readers(node)
        dtypes = {reader.kwargs["dtype"] if _is_cast(reader) else None for reader in readers}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if isinstance(dtype, torch.dtype) and dtype.itemsize < node.meta["val"].dtype.itemsize:
            _cast_before(module.graph, node, dtype, looks, readers)
    return module


def _moves_parts(reshard: fx.Node) -> bool:
    """Whether a reshard sends parts of a value elsewhere, rather than summing or only slicing."""
    return communicates(reshard) and Partial not in map(type, reshard.meta["source"])


def _readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What only looks at a value, and what else reads it or such a look."""
    looks, others = [], []
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if is_look(user):
            looks.append(user)
            stack += user.users
        else:
            others.append(user)
    return looks, others


def _is_cast(node: fx.Node) -> bool:
    """Whether a node is a cast and nothing else: to no other device or memory format."""
    return node.target is _CAST and set(node.kwargs) == {"dtype"}


def _cast_before(
    graph: fx.Graph, reshard: fx.Node, dtype: torch.dtype, looks: list[fx.Node], casts: list[fx.Node]
) -> None:
    wide = reshard.all_input_nodes[0]
    meta = {
        "val": meta_value(tuple(wide.meta["val"].shape), dtype),
        "module": reshard.meta["module"],
        "backward": reshard.meta["backward"],
        "sharding": reshard.meta["source"],
        "cuts": (),
        "rule": None,
        "layout": True,  # it belongs to the collective, and starts as early
    }
    with graph.inserting_before(reshard):
        narrow = add_call(graph, _CAST, (wide,), {"dtype": dtype}, meta)
    reshard.replace_input_with(wide, narrow)
    for node in (reshard, *looks):
        node.meta["val"] = meta_value(tuple(node.meta["val"].shape), dtype)
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        graph.erase_node(cast)
