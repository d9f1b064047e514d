"""Schedule: wait for a collective as late as its result allows.

Preserves numerics exactly, and the order of the collectives, which must be the same on all ranks.
"""

from __future__ import annotations

import torch
from torch import fx

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def sink_waits(module: fx.GraphModule) -> fx.GraphModule:
    """Move each wait, and the layout steps that follow it, to just before the first reader."""
    graph = module.graph
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _WAIT or (node.meta.get("layout") and any(n in late for n in node.all_input_nodes)):
            late.add(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in sorted(late, key=lambda n: order[n], reverse=True):
        if node.users:
            first = min(node.users, key=lambda n: order[n])
            first.prepend(node)
            # Readers of this node's own input now see it here.
            order[node] = order[first]
    return module
