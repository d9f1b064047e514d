"""The step of one rank, simulated: what computes when, what the links carry when, and what waits for what."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Cluster, Link, axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.deferral import collectives_once
from autopar.cost_model.folded import WHOLE, Copies
from autopar.cost_model.fusion import fuse
from autopar.cost_model.layout import Layouts, layouts_of
from autopar.cost_model.memory import AtRest, LiveBytes, at_rest, memory_profile
from autopar.cost_model.ops import is_free, op_time
from autopar.cost_model.optimizers import OptimizerLike, find_optimizer
from autopar.plan import MemoryParts
from autopar.program import Collective, LocalProgram, collectives_of

CONTENTION = {"nccl": 0.19, "gloo": 0.0}
"""By how much computing and a collective slow each other down while both run, by backend.

NCCL's kernels take multiprocessors and memory bandwidth: 18.9% on average over training runs on several GPUs, up to 40%
(arXiv:2507.03114, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning").  Gloo's
threads mostly wait for a network much slower than memory.
"""


@dataclass
class Spent:
    """Seconds that one module spends.

    Attributes:
        compute_s: computing, or waiting for launches.
        exposed_s: standing still for its collectives, by `kind@axis`.
    """

    compute_s: float = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)

    def add(self, other: Spent, times: int) -> None:
        """And what another spends, so many times."""
        self.compute_s += other.compute_s * times
        for kind, seconds in list(other.exposed_s.items()):
            self.exposed_s[kind] = self.exposed_s.get(kind, 0.0) + seconds * times

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + sum(self.exposed_s.values())


@dataclass(frozen=True)
class Simulation:
    """Predictions for one rank and one step.

    Attributes:
        step_time_s: forward, backward (as often as they run) and optimizer step; always `compute_s + exposed_s`.
        compute_s: time that the ops and the optimizer take, waiting for the host's launches included.
        collective_s: time that the collectives take alone, hidden or not.
        exposed_s: time that computing stands still for collectives.
        memory: bytes at the peak, by kind.
        peak_at: pass and node of the peak, such as `backward:mm_3`.
        collective_bytes: bytes by `kind@axis`, each the whole tensor as in `Collective.num_bytes`.
        timeline: total bytes while each node runs.
        live_at_peak: what makes up `memory`, by module and kind, the largest first.
        live_after_forward: the same at the end of the forward pass.
        live_at_end: the same at the end of the step.
        in_backward: the modules that run in the backward pass, one after another, each with the most bytes then.
        by_module: what each module spends of `compute_s` (without the optimizer's step) and of `exposed_s`.
    """

    step_time_s: float
    compute_s: float
    collective_s: float
    exposed_s: float
    memory: MemoryParts
    peak_at: str
    collective_bytes: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    live_at_peak: tuple[LiveBytes, ...] = field(default=(), repr=False)
    live_after_forward: tuple[LiveBytes, ...] = field(default=(), repr=False)
    live_at_end: tuple[LiveBytes, ...] = field(default=(), repr=False)
    in_backward: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    by_module: Mapping[str, Spent] = field(default_factory=dict, repr=False)

    def waited_s(self, is_meant: Callable[[str, str], bool]) -> float:
        """How much of `exposed_s` is for collectives of which this is true, given kind and axis; of a folded program,
        as its own units wait."""
        waited = [(of, seconds) for spent in self.by_module.values() for of, seconds in spent.exposed_s.items()]
        total_s = math.fsum(seconds for _, seconds in waited)
        meant_s = math.fsum(seconds for of, seconds in waited if is_meant(*of.split("@")))
        return self.exposed_s * meant_s / total_s if total_s else 0.0


def simulate(
    program: LocalProgram,
    cluster: Cluster,
    optimizer: OptimizerLike = "adamw",
    allow_tf32: bool = False,
    fused: bool = False,
    accumulate: int = 1,
    defer: bool = False,
    copies: Copies = WHOLE,
) -> Simulation:
    """Predict time and memory of one step of a rewritten program.

    Args:
        program: with local shapes; its mesh has as many ranks as the cluster.
        cluster: what it runs on.
        optimizer: a name in `autopar.cost_model.optimizers.OPTIMIZERS`, an optimizer or its class.
        allow_tf32: whether float32 matmuls may use TF32 units.
        fused: whether the graphs are compiled, so that chains of pointwise ops are one kernel.
        accumulate: how many times forward and backward run before the optimizer's step.
        defer: whether only one of these times gathers the parameters that stay gathered and reduces the gradients, as
            ZeRO-1 and `no_sync` do, instead of each.
        copies: how many units of the whole model each unit of a folded program stands for: predictions are then those
            of the whole model, but `timeline`, and `by_module`, which is of one copy.

    Raises:
        MeshError: if mesh and cluster differ in size.
        InputError: if the optimizer is not known and cannot be measured.
    """
    optimizer = find_optimizer(optimizer)
    links = {axis: axis_link(cluster, program.mesh, axis) for axis in program.mesh.names}
    layouts = layouts_of(program)
    parts = copies.shares(program)
    shares = {node.name: modules for node, modules in parts.items()}
    collectives = [list(collectives_of(graph.module.graph)) for graph in program.graphs]
    defers = defer and accumulate > 1
    once = [collectives_once(g, g is program.backward) if defers else frozenset[str]() for g in program.graphs]

    def run(skipped: Sequence[frozenset[str]]) -> _Clock:
        clock = _Clock(program, cluster, links, layouts, shares, allow_tf32, fused)
        priced_s = []
        for graph, found, names in zip(program.graphs, collectives, skipped, strict=True):
            working = {c.node: c for c in found if c.node not in names}
            clock.run(graph.module.graph, working)
            priced_s += [_price(c, program, links) for c in working.values()]
        total_s = math.fsum(priced_s)
        assert math.isclose(clock.collective_s, total_s, rel_tol=1e-9), "the price is not that of the collectives"
        return clock

    clock = run([frozenset()] * len(once))
    clock.add(run(once) if any(once) else clock, accumulate - 1)
    rest = at_rest(program, optimizer, copies)
    # Adding a gradient to the sum of earlier ones reads both and writes one.
    bytes_moved = optimizer_bytes(rest) + 3 * rest.trained * (accumulate - 1)
    profile = memory_profile(program, cluster, optimizer, layouts, accumulate, fused, copies, parts)
    collective_bytes: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    for found, names in zip(collectives, once, strict=True):
        for c in found:
            number = copies.weight(shares.get(c.node, {c.module: 1})) * (1 if c.node in names else accumulate)
            kind = f"{c.kind}@{c.axis}"
            collective_bytes[kind] = collective_bytes.get(kind, 0) + c.num_bytes * number
            link = links[c.axis].name
            busy_s[link] = busy_s.get(link, 0.0) + _price(c, program, links) * number
    numbers = [(copies.number(module), spent) for module, spent in clock.by_module.items()]
    compute_s = sum(n * spent.compute_s for n, spent in numbers)
    # A link that lags behind is awaited in the end, and of a folded program that comes too soon.
    lag_s = max(busy_s.values(), default=0.0) - compute_s if copies.units else 0.0
    compute_s += bytes_moved / cluster.device.memory_bandwidth_bytes_s
    exposed_s = max(lag_s, sum(n * sum(spent.exposed_s.values()) for n, spent in numbers))
    return Simulation(
        step_time_s=compute_s + exposed_s,
        compute_s=compute_s,
        collective_s=sum(busy_s.values()),
        exposed_s=exposed_s,
        memory=profile.peak,
        peak_at=profile.peak_at,
        collective_bytes={kind: round(number) for kind, number in sorted(collective_bytes.items())},
        timeline=profile.timeline,
        live_at_peak=profile.live_at_peak,
        live_after_forward=profile.live_after_forward,
        live_at_end=profile.live_at_end,
        in_backward=profile.in_backward,
        by_module=dict(clock.by_module),
    )


def _price(collective: Collective, program: LocalProgram, links: Mapping[str, Link]) -> float:
    size = program.mesh.size(collective.axis)
    return collective_time(collective.kind, size, collective.num_bytes, links[collective.axis])


def optimizer_bytes(rest: AtRest) -> int:
    """Memory traffic of one fused optimizer step: gradients are read, parameters and state read and written."""
    return 3 * rest.trained + 2 * rest.optimizer


@dataclass
class _Running:
    """A collective on its link; `work_s` is what is left of it, in seconds alone."""

    node: fx.Node
    collective: Collective
    work_s: float

    @property
    def kind(self) -> str:
        """What it does, and along which axis."""
        return f"{self.collective.kind}@{self.collective.axis}"


@dataclass
class _Clock:
    """A host that launches, one compute stream, and one stream per physical link.

    Ops run in program order on the compute stream, each no sooner than the host has launched it.  A collective starts
    when its input is ready and its link is free (two mesh axes on one link share it, so their collectives queue), and
    blocks nothing but its `wait_tensor`.  While a collective runs beside an op, both are slower by `CONTENTION`.
    """

    program: LocalProgram
    cluster: Cluster
    links: Mapping[str, Link]
    layouts: Layouts
    shares: Mapping[str, Mapping[str, float]]
    allow_tf32: bool
    fused: bool
    compute_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    queues: dict[str, deque[_Running]] = field(default_factory=dict)
    by_module: defaultdict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))

    @property
    def now_s(self) -> float:
        """Time on the compute stream since the start of the step."""
        return self.compute_s + self.exposed_s

    def add(self, other: _Clock, times: int) -> None:
        """What another clock's step takes, so many times, after this one's."""
        self.compute_s += other.compute_s * times
        self.collective_s += other.collective_s * times
        self.exposed_s += other.exposed_s * times
        for module, spent in other.by_module.items():
            self.by_module[module].add(spent, times)

    def run(self, graph: fx.Graph, by_name: Mapping[str, Collective]) -> None:
        """Advance by one graph; collectives that nobody waits for end with it, and those that are not among `by_name`
        take no time."""
        kernels = fuse(graph, self.layouts) if self.fused else {}
        running: dict[fx.Node, str] = {}
        readers: set[fx.Node] = set()  # of what those that have started bring
        for node in graph.nodes:
            before_s = self.compute_s
            if node in readers:
                for used in node.all_input_nodes:
                    if used in running:
                        self._wait(used, running.pop(used))
            if node.name in by_name:
                running[node] = self._start(node, by_name[node.name])
                readers.update(node.users)
            elif not is_free(node, self.layouts):
                part = kernels.get(node)
                self._compute(node, None if part is None else part.moved_bytes, part is None or part.is_kernel)
                for module, share in self._shares(node, node.meta["module"]):
                    self.by_module[module].compute_s += (self.compute_s - before_s) * share
        for node, link in running.items():
            self._wait(node, link)

    def _shares(self, node: fx.Node, module: str) -> Iterable[tuple[str, float]]:
        """Whose time a node takes, and how much of it: its own module's, or that of the modules that it serves."""
        shares = self.shares.get(node.name)
        return ((module, 1.0),) if shares is None else shares.items()

    def _compute(self, node: fx.Node, moved_bytes: int | None, is_kernel: bool) -> None:
        device = self.cluster.device
        work_s = op_time(node, device, self.allow_tf32, self.layouts, moved_bytes)
        if not is_kernel:
            work_s -= device.kernel_start_s + (0.0 if device.is_queued else device.kernel_launch_s)
        elif device.is_queued:
            self.host_s += device.kernel_launch_s
            if self.host_s > self.now_s:
                self._idle(self.host_s - self.now_s)
        slowdown = 1 + CONTENTION[self.cluster.backend]
        while work_s > 0 and self.queues:
            both_s = min(work_s, *[queue[0].work_s for queue in self.queues.values()])
            self.compute_s += both_s * slowdown
            work_s -= both_s
            self._advance(both_s)
        self.compute_s += work_s

    def _idle(self, wait_s: float) -> None:
        """Let the collectives run on while the compute stream waits for the host."""
        self.compute_s += wait_s
        self._advance(wait_s)

    def _start(self, node: fx.Node, collective: Collective) -> str:
        """Queue a collective on its link, and say which that is."""
        work_s = _price(collective, self.program, self.links)
        link = self.links[collective.axis].name
        self.queues.setdefault(link, deque()).append(_Running(node, collective, work_s))
        self.collective_s += work_s
        return link

    def _wait(self, node: fx.Node, link: str) -> None:
        """Stand still until a collective is done; nothing computes meanwhile."""
        queue = tuple(self.queues.get(link, ()))
        ahead = next((queue[: i + 1] for i, running in enumerate(queue) if running.node is node), ())
        for running in ahead:
            # What holds the link is waited for, also where it is only in the way of what is needed.
            for module, share in self._shares(running.node, running.collective.module):
                exposed_s = self.by_module[module].exposed_s
                exposed_s[running.kind] = exposed_s.get(running.kind, 0.0) + running.work_s * share
        waited_s = sum(running.work_s for running in ahead)
        self.exposed_s += waited_s
        self._advance(waited_s)

    def _advance(self, work_s: float) -> None:
        """Take work off every link's queue; a link that has nothing left to do has none."""
        for link, queue in list(self.queues.items()):
            left_s = work_s
            while queue and queue[0].work_s <= left_s:
                left_s -= queue.popleft().work_s
            if queue:
                queue[0].work_s -= left_s
            else:
                del self.queues[link]
