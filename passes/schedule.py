"""Schedule: start collectives early and wait for them late, within a bound on the bytes under way.

Preserves numerics exactly.  The order depends on the graph alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import fx

from autopar.passes import coalesce
from autopar.passes.coalesce import WAIT, layout_after, layout_before, wait_of
from autopar.program import collective_kind


def sink_waits(module: fx.GraphModule) -> fx.GraphModule:
    """Move each wait, and the layout steps that follow it, to just before the first reader."""
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed([n for wait in graph.nodes if wait.target is WAIT for n in _with_layout(wait, order)]):
        if node.users:
            min(node.users).prepend(node)
    return module


def _with_layout(wait: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """A wait and the layout steps that bring its result, or the results that came together, into place."""
    return [wait, *sorted(layout_after(wait), key=order.__getitem__)]


def prefetch_parameters(module: fx.GraphModule) -> fx.GraphModule:
    """Start the gather of a parameter while the ops before its first reader run.

    A gather may start ahead of earlier ones' readers as long as the bytes under way stay below the largest single
    gather of the pass, so that prefetching at most doubles what gathered parameters take at any moment, or below two
    full buckets.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for backward in (False, True):
        gathers = [g for g in _collectives(module.graph, "all_gather") if g.meta["backward"] is backward]
        gathers = [g for g in gathers if layout_before(g) is not None]
        waits = [wait_of(g) for g in gathers]
        limit = _bytes_under_way(gathers)
        first, ahead = 0, 0  # what is under way beside the first of those that are not yet read
        for k, gather in enumerate(gathers):
            ahead += int(gather.meta["bytes"]) if k else 0
            while first < k and ahead > limit:
                first += 1
                ahead -= int(gathers[first].meta["bytes"])
            if order[waits[first]] < order[gather]:
                for node in (*sorted(layout_before(gather) or ()), gather):
                    waits[first].prepend(node)
    return module


def bound_reductions(module: fx.GraphModule) -> fx.GraphModule:
    """Wait for gradients' reductions in time, so that few unreduced gradients are alive at once.

    Nothing reads a reduced gradient before the optimizer, so its wait would sink to the end and every unreduced
    gradient with it.  The oldest is waited for before a new reduction would bring the bytes under way above the largest
    single reduction, and above two full buckets.
    """
    output = module.graph.output_node()
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    reductions = [c for c in _collectives(module.graph, "reduce_scatter", "all_reduce") if c.meta["backward"]]
    finals = [c for c in reductions if _read_by(c, output, order)]
    limit = _bytes_under_way(finals)
    under_way: deque[fx.Node] = deque()
    total = 0
    for reduction in finals:
        size = int(reduction.meta["bytes"])
        while under_way and total + size > limit:
            oldest = under_way.popleft()
            total -= int(oldest.meta["bytes"])
            for node in _with_layout(wait_of(oldest), order):
                reduction.prepend(node)
        under_way.append(reduction)
        total += size
    return module


def _bytes_under_way(collectives: Sequence[fx.Node]) -> int:
    """How many bytes may be under way at once: the largest, or two buckets, so that a link need not wait between
    them."""
    return max([2 * coalesce.BUCKET_BYTES, *(int(c.meta["bytes"]) for c in collectives)])


def _read_by(reduction: fx.Node, output: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether only the graph's output reads what a reduction gives."""
    steps = _with_layout(wait_of(reduction), order)
    return {user for step in steps for user in step.users} - set(steps) == {output}


def _collectives(graph: fx.Graph, *kinds: str) -> Sequence[fx.Node]:
    return [n for n in graph.nodes if collective_kind(n) in kinds]
