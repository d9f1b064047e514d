"""Send rows to the ranks that hold their groups, and back: what becomes of a take or a put whose rows are sent.

A rank takes its own rows, by group, and sends each rank those of its groups; what arrives lies by sender and is brought
into the order of `own_order`, so that the ops in between do not know whether rows were sent.  A put is the way back.
Preserves numerics exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graph import add_call
from autopar.placement import ByGroup, Sharding, meta_value, shard

c10d, ours = torch.ops._c10d_functional, torch.ops.autopar


@dataclass(frozen=True)
class Exchange:
    """The parts of one take or put whose rows are sent.

    Attributes:
        graph: the graph; new nodes go where it inserts.
        node: the take or the put.
        axis: the name of the mesh axis.
        sent, received: nodes that give how many rows go to each rank and come from each, on the way to the groups.
        order: this rank's rows before they are sent, by group.
        arrival: where its groups' rows stand among those that arrive.
    """

    graph: fx.Graph
    node: fx.Node
    axis: str
    sent: fx.Node
    received: fx.Node
    order: fx.Node
    arrival: fx.Node

    def move(self) -> None:
        """Insert the exchange before the call, or after what it now does first."""
        value, copies = self.node.args[0], self.node.args[2]
        assert isinstance(value, fx.Node)
        if self.node.target is ours.put_rows.default:
            inside: Sharding = value.meta["sharding"]
            outside = _of_blocks(inside)
            packed = self._call(ours.put_rows.default, (value, self.arrival, 1), self.arrival, inside)
            here = self._exchange(packed, (self.sent, self.received), self.order, outside)
            self.node.args = (here, self.order, copies)
        else:
            inside = self.node.meta["sharding"]
            outside = _of_blocks(inside)
            packed = self._call(ours.take_rows.default, (value, self.order, copies), self.order, outside)
            there = self._exchange(packed, (self.received, self.sent), self.arrival, inside)
            self.node.args = (there, self.arrival, 1)

    def _exchange(self, rows: fx.Node, sizes: tuple[fx.Node, fx.Node], order: fx.Node, sharding: Sharding) -> fx.Node:
        """Rows of as many as `order` has; `sizes` are how many come from each rank and how many go to each."""
        args = (rows, *sizes, self.axis)
        started = self._call(c10d.all_to_all_single.default, args, order, sharding)
        started.meta["bytes"] = max(rows.meta["val"].nbytes, started.meta["val"].nbytes)
        return self._call(c10d.wait_tensor.default, (started,), order, sharding)

    def _call(self, op: Any, args: tuple[Any, ...], order: fx.Node, sharding: Sharding) -> fx.Node:
        value = self.node.args[0].meta["val"]  # type: ignore[union-attr]
        rest = tuple(int(size) for size in value.shape[1:])
        meta = {
            "val": meta_value((int(order.meta["val"].numel()), *rest), value.dtype),
            "module": self.node.meta["module"],
            "backward": self.node.meta["backward"],
            "sharding": sharding,
            "global_shape": None,
        }
        return add_call(self.graph, op, args, {}, meta)


def _of_blocks(sharding: Sharding) -> Sharding:
    """How rows by group lie on the ranks that have their blocks."""
    return tuple(shard(0) if isinstance(p, ByGroup) else p for p in sharding)
