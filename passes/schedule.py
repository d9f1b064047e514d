"""Schedule: start collectives early and wait for them late, within a bound on the bytes under way.

Preserves numerics exactly.  The order depends on the graph alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.passes import coalesce
from autopar.passes.coalesce import WAIT, layout_after, steps_after, steps_before, wait_of
from autopar.program import collective_kind, collective_nodes


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


def prefetch_parameters(module: fx.GraphModule, depth: int) -> fx.GraphModule:
    """Start the gather of a parameter while the ops before its first reader run.

    A gather starts before the one ahead of it is read, and ahead of more of them as long as no more than `depth` times
    its own bytes, or `depth` full buckets, are under way beside what is awaited.  The bound goes by what lies near, not
    by the pass's largest gather: links have work either way, memory follows the layer that runs, and the layers of a
    stack run alike however many there are.  Of a parameter that is gathered along one axis after another, the last
    gather is moved first, and takes the ones before it along; these are then moved further.

    A program whose gathers start ahead already can be given a greater depth.
    """
    for backward in (False, True):
        gathers = [g for g, _ in collective_nodes(module.graph, "all_gather") if g.meta["backward"] is backward]
        steps = {g: steps for g in gathers if (steps := steps_before(g)) is not None}
        stage: dict[fx.Node, int] = {}
        for gather, before in steps.items():
            stage[gather] = max((stage[earlier] + 1 for earlier in before if earlier in steps), default=0)
        for number in range(max(stage.values(), default=-1), -1, -1):
            _prefetch(sorted(g for g in steps if stage[g] == number), steps, depth)
    return module


def _prefetch(gathers: Sequence[fx.Node], steps: Mapping[fx.Node, set[fx.Node]], depth: int) -> None:
    waits = [wait_of(g) for g in gathers]
    first, ahead = 0, 0  # the one that is awaited, and the bytes that are under way beside it
    for k, gather in enumerate(gathers):
        size = int(gather.meta["bytes"])
        ahead += size if k else 0
        while first < k - 1 and ahead > depth * max(size, coalesce.BUCKET_BYTES):
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
    reductions = [c for c, _ in collective_nodes(module.graph, "reduce_scatter", "all_reduce") if c.meta["backward"]]
    after = {c: steps for c in reductions if (steps := steps_after(c)) is not None}
    for node in sorted(set().union(*after.values())):
        output.prepend(node)
    stage = dict.fromkeys(after, 0)
    for reduction, steps in after.items():
        for later in steps & after.keys():
            stage[later] = max(stage[later], stage[reduction] + 1)
    last = [c for c in after if after.keys().isdisjoint(after[c])]
    largest = max((int(c.meta["bytes"]) for c in last), default=0)
    for number in range(max(stage.values(), default=-1) + 1):
        followed = [c for c in after if stage[c] == number and c not in last]
        _bound(sorted(followed), after, _two_buckets())
        _bound(sorted(c for c in last if stage[c] == number), after, max(largest, _two_buckets()))
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


def _two_buckets() -> int:
    """So many bytes may always be under way: a link need not wait between buckets."""
    return 2 * coalesce.BUCKET_BYTES
