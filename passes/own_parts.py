"""Own parts: this rank's part of a gradient that an opaque module gives whole is copied, so that the whole is freed.

Preserves numerics exactly.  Otherwise the part, a view, would keep the whole gradient alive until the optimizer's step.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.local_ops import take_chunk
from autopar.opaque import OPAQUE_OPS

_SLICES = (take_chunk, torch.ops.aten.slice.Tensor)
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.reshape.default, torch.ops.aten.view.default)


def own_parts(module: fx.GraphModule) -> fx.GraphModule:
    """Copy what is cut out of results of `run_opaque_backward`, once for each cut."""
    graph = module.graph
    for node in list(graph.nodes) if graph.find_nodes(op="call_function", target=OPAQUE_OPS[1]) else ():
        if node.target in _SLICES and _is_of_opaque(node) and not any(user.target in _SLICES for user in node.users):
            with graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return module


def _is_of_opaque(node: fx.Node) -> bool:
    source = node
    while source.target in _SLICES or source.target in _CASTS:
        source = source.args[0]  # type: ignore[assignment]
    is_result = source.target is operator.getitem
    return is_result and source.args[0].target is OPAQUE_OPS[1]  # type: ignore[union-attr]
