"""Schedule: start collectives early and wait for them late, within a bound on the bytes under way.

Preserves numerics exactly.  The order depends on the graph alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.passes import coalesce
from autopar.passes.coalesce import WAIT, layout_after, steps_after, steps_before, wait_of
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
    full buckets.  Of a parameter that is gathered along one axis after another, the last gather is moved first, and
    takes the ones before it along; these are then moved further, within a bound of their own.
    """
    for backward in (False, True):
        gathers = [g for g in _collectives(module.graph, "all_gather") if g.meta["backward"] is backward]
        steps = {g: steps for g in gathers if (steps := steps_before(g)) is not None}
        stage: dict[fx.Node, int] = {}
        for gather, before in steps.items():
            stage[gather] = max((stage[earlier] + 1 for earlier in before if earlier in steps), default=0)
        for number in range(max(stage.values(), default=-1), -1, -1):
            _prefetch(sorted(g for g in steps if stage[g] == number), steps)
    return module


def _prefetch(gathers: Sequence[fx.Node], steps: Mapping[fx.Node, set[fx.Node]]) -> None:
    waits = [wait_of(g) for g in gathers]
    limit = _bytes_under_way(gathers)
    first, ahead = 0, 0  # what is under way beside the first of those that are not yet read
    for k, gather in enumerate(gathers):
        ahead += int(gather.meta["bytes"]) if k else 0
        while first < k and ahead > limit:
            first += 1
            ahead -= int(gathers[first].meta["bytes"])
        for node in (*sorted(steps[gather]), gather):
            if waits[first] < node:
                waits[first].prepend(node)


def bound_reductions(module: fx.GraphModule) -> fx.GraphModule:
    """Wait for gradients' reductions in time, so that few unreduced gradients are alive at once.

    Nothing reads a reduced gradient before the optimizer, so its wait would sink to the end and every unreduced
    gradient with it.  The oldest is waited for before a new reduction would bring the bytes under way above the largest
    single reduction, and above two full buckets.  Where a gradient is reduced along one axis after another, the next
    reduction starts when the one before it is waited for; so there two full buckets are the bound, that the next starts
    soon.
    """
    output = module.graph.output_node()
    reductions = [c for c in _collectives(module.graph, "reduce_scatter", "all_reduce") if c.meta["backward"]]
    after = {c: steps for c in reductions if (steps := steps_after(c)) is not None}
    for node in sorted(set().union(*after.values())):
        output.prepend(node)
    stage = dict.fromkeys(after, 0)
    for reduction, steps in after.items():
        for later in steps & after.keys():
            stage[later] = max(stage[later], stage[reduction] + 1)
    last = [c for c in after if after.keys().isdisjoint(after[c])]
    for number in range(max(stage.values(), default=-1) + 1):
        followed = [c for c in after if stage[c] == number and c not in last]
        _bound(sorted(followed), after, _bytes_under_way(()))
        _bound(sorted(c for c in last if stage[c] == number), after, _bytes_under_way(last))
    return module


def _bound(reductions: Sequence[fx.Node], after: Mapping[fx.Node, set[fx.Node]], limit: int) -> None:
    under_way: deque[fx.Node] = deque()
    total = 0
    for reduction in reductions:
        size = int(reduction.meta["bytes"])
        while under_way and total + size > limit:
            oldest = under_way.popleft()
            total -= int(oldest.meta["bytes"])
            _finish(oldest, after[oldest], reduction)
        under_way.append(reduction)
        total += size


def _finish(reduction: fx.Node, after: set[fx.Node], place: fx.Node) -> None:
    """Wait for a reduction before `place` and start what comes next, unless that takes more than is there by then."""
    begun: set[fx.Node] = set()
    for node in sorted(after):
        ready = all(used < place for used in node.all_input_nodes)
        if ready and place < node and begun.isdisjoint(node.all_input_nodes):
            place.prepend(node)
            if collective_kind(node):
                begun.add(node)


def _bytes_under_way(collectives: Sequence[fx.Node]) -> int:
    """How many bytes may be under way at once: the largest, or two buckets, so that a link need not wait between
    them."""
    return max([2 * coalesce.BUCKET_BYTES, *(int(c.meta["bytes"]) for c in collectives)])


def _collectives(graph: fx.Graph, *kinds: str) -> Sequence[fx.Node]:
    return [n for n in graph.nodes if collective_kind(n) in kinds]
