"""The step of one rank, simulated: what computes when, what the links carry when, and what waits for what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Cluster, Link, axis_link
from autopar.cost_model.collectives import collective_time
from autopar.cost_model.layout import Layouts, layouts_of
from autopar.cost_model.memory import LiveBytes, at_rest, memory_profile
from autopar.cost_model.ops import op_time
from autopar.cost_model.optimizers import OptimizerLike, find_optimizer
from autopar.plan import MemoryParts
from autopar.program import Collective, LocalProgram, collectives_of


@dataclass(frozen=True)
class Simulation:
    """Predictions for one rank and one step.

    Attributes:
        step_time_s: forward, backward and optimizer step; always `compute_s + exposed_s`.
        compute_s: time that the ops and the optimizer take.
        collective_s: time that the collectives take, hidden or not.
        exposed_s: time that computing stands still for collectives.
        memory: bytes at the peak, by kind.
        peak_at: pass and node of the peak, such as `backward:mm_3`.
        collective_bytes: bytes by `kind@axis`, each the whole tensor as in `Collective.num_bytes`.
        timeline: total bytes while each node runs.
        live_at_peak: what makes up `memory`, by module and kind, the largest first.
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


def simulate(
    program: LocalProgram, cluster: Cluster, optimizer: OptimizerLike = "adamw", allow_tf32: bool = False
) -> Simulation:
    """Predict time and memory of one step of a rewritten program.

    Args:
        program: with local shapes; its mesh has as many ranks as the cluster.
        cluster: what it runs on.
        optimizer: a name in `autopar.cost_model.optimizers.OPTIMIZERS`, an optimizer or its class.
        allow_tf32: whether float32 matmuls may use TF32 units.

    Raises:
        MeshError: if mesh and cluster differ in size.
        InputError: if the optimizer is not known and cannot be measured.
    """
    optimizer = find_optimizer(optimizer)
    links = {axis: axis_link(cluster, program.mesh, axis) for axis in program.mesh.names}
    layouts = layouts_of(program)
    clock = _Clock(program, cluster, links, layouts, allow_tf32)
    for graph in (program.forward, program.backward):
        if graph is not None:
            clock.run(graph.module.graph)
    collectives = program.collectives()
    priced_s = math.fsum(_price(c, program, links) for c in collectives)
    assert math.isclose(clock.collective_s, priced_s, rel_tol=1e-9), "the price is not that of the graph's collectives"
    rest = at_rest(program, optimizer)
    optimizer_s = (2 * rest.trained + rest.optimizer) / cluster.device.memory_bandwidth_bytes_s
    profile = memory_profile(program, cluster, optimizer, layouts)
    collective_bytes: Counter[str] = Counter()
    for c in collectives:
        collective_bytes[f"{c.kind}@{c.axis}"] += c.num_bytes
    compute_s = clock.compute_s + optimizer_s
    return Simulation(
        step_time_s=compute_s + clock.exposed_s,
        compute_s=compute_s,
        collective_s=priced_s,
        exposed_s=clock.exposed_s,
        memory=profile.peak,
        peak_at=profile.peak_at,
        collective_bytes=dict(sorted(collective_bytes.items())),
        timeline=profile.timeline,
        live_at_peak=profile.live_at_peak,
    )


def _price(collective: Collective, program: LocalProgram, links: Mapping[str, Link]) -> float:
    size = program.mesh.size(collective.axis)
    return collective_time(collective.kind, size, collective.num_bytes, links[collective.axis])


@dataclass
class _Clock:
    """One compute stream and one stream per physical link.

    Ops run in program order on the compute stream.  A collective starts when its input is ready and its link is
    free (two mesh axes on one link share it, so their collectives queue), and blocks nothing but its `wait_tensor`.
    """

    program: LocalProgram
    cluster: Cluster
    links: Mapping[str, Link]
    layouts: Layouts
    allow_tf32: bool
    compute_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0
    link_free_s: dict[str, float] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """Time on the compute stream since the start of the step."""
        return self.compute_s + self.exposed_s

    def run(self, graph: fx.Graph) -> None:
        """Advance by one graph; collectives that nobody waits for end with it."""
        by_name = {c.node: c for c in collectives_of(graph)}
        done_s: dict[fx.Node, float] = {}
        for node in graph.nodes:
            for used in node.all_input_nodes:
                if used in done_s:
                    self._wait_until(done_s.pop(used))
            if node.name in by_name:
                done_s[node] = self._start(by_name[node.name])
            else:
                self.compute_s += op_time(node, self.cluster.device, self.allow_tf32, self.layouts)
        for end_s in done_s.values():
            self._wait_until(end_s)

    def _start(self, collective: Collective) -> float:
        """Queue a collective on its link and return when it ends."""
        duration_s = _price(collective, self.program, self.links)
        link = self.links[collective.axis].name
        end_s = max(self.now_s, self.link_free_s.get(link, 0.0)) + duration_s
        self.link_free_s[link] = end_s
        self.collective_s += duration_s
        return end_s

    def _wait_until(self, end_s: float) -> None:
        self.exposed_s += max(0.0, end_s - self.now_s)
