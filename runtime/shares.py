"""Say when a rank has more rows by group than its plan was priced for."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.placement import ROWS_MARGIN

ours = torch.ops.autopar


def watch_shares(graph: fx.Graph) -> None:
    """Let a graph warn where a rank has more rows of its own groups than the plan was priced for."""
    for node in graph.find_nodes(op="call_function", target=ours.own_order.default):
        node.target = own_order_watched
        node.args = (*node.args, int(node.meta["val"].shape[1]), node.meta["module"])


def own_order_watched(order: Tensor, ends: Tensor, first: int, num_groups: int, priced: int, module: str) -> Tensor:
    """`own_order`, which warns, once for each module, if there are more rows than the plan was `priced` for."""
    own: Tensor = ours.own_order(order, ends, first, num_groups)
    if own.shape[1] > priced and module not in _TOLD:
        _TOLD.add(module)
        warnings.warn(
            f"rank {dist.get_rank()}: {module}: {own.shape[1]} rows belong to groups {first} to "
            f"{first + num_groups - 1}, which this rank holds; the plan's time and memory were predicted for at most "
            f"{priced}, {ROWS_MARGIN} times an even share. Steps may take more of both: leave memory free, or train "
            "the router to balance. This is said once for each module",
            stacklevel=2,
        )
    return own


_TOLD: set[str] = set()
"""Modules of which it was said."""
