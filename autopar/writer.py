"""Writing ops into a traced graph in place of another node."""

from __future__ import annotations

from typing import Any

from torch import fx


class Writer:
    """Writes ops that belong where `node` belongs, in global shapes, at the graph's insertion point."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.written: list[fx.Node] = []

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `op`, its value inferred from those of its arguments."""
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        return self.place(op, args, kwargs, op(*values[0], **values[1]))

    def place(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        """A call of `op` that is known to give `value`."""
        new = self.node.graph.call_function(op, args, kwargs)
        new.meta = {"val": value, "module": self.node.meta["module"], "backward": self.node.meta["backward"]}
        self.written.append(new)
        return new
