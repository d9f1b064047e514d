"""Say when a rank has more rows by group than its plan was priced for."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.placement import ROWS_MARGIN
from autopar.rules import Call

ours = torch.ops.autopar


def watch_shares(graph: fx.Graph) -> None:
    """Let a graph, which is about to be compiled, warn where a rank has more rows of its own groups than the plan was
    priced for."""
    for op in (ours.own_order.default, ours.arrival_order.default):
        for node in graph.find_nodes(op="call_function", target=op):
            call = Call(node)
            said = (int(node.meta["val"].numel()), node.meta["module"], call["first"], call["num_groups"])
            _TOLD.discard(node.meta["module"])
            node.target, node.args = order_watched, (op._schema.name.partition("::")[2], *said, *node.args)


def order_watched(name: str, priced: int, module: str, first: int, num_groups: int, *args: Any) -> Tensor:
    """The order that an op gives of the rows of a rank's groups; warns, once for each module, if there are more rows
    than the plan was `priced` for."""
    order: Tensor = getattr(ours, name)(*args)
    if order.numel() > priced and module not in _TOLD:
        _TOLD.add(module)
        warnings.warn(
            f"rank {dist.get_rank()}: {module}: {order.numel()} rows belong to groups {first} to "
            f"{first + num_groups - 1}, which this rank holds; the plan's time and memory were predicted for at most "
            f"{priced}, {ROWS_MARGIN} times an even share. Steps may take more of both: leave memory free, or train "
            "the router to balance. This is said once for each module",
            stacklevel=2,
        )
    return order


_TOLD: set[str] = set()
"""Modules of which it was said."""
