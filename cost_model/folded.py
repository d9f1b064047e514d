"""Pricing a folded graph: what a program of some units of a stack costs in time and memory as that of all of them.

A folded graph (see `autopar.graph.Run`) holds of a run of n alike units the first, two inner ones and the last.  The
inner ones stand for all n - 2, each for as many as a plan gives it, which run next to each other.  (So do units of a
`Sample`, which holds more of them.)

* time: a copy spends what the held unit spends, since both run in the steady state: their neighbours are alike;
* what rests, gradients and what is kept for the backward pass are there as often.  Of what is kept, a unit has what it
  reads last, wherever it was made: its input is made by the unit before, which may be given another option;
* what comes and goes is there once, since it is gone before the next copy runs;
* a collective that serves several units is there as often as its parts are on average.

Memory while a held unit runs is that with the held one as the last of its copies in the forward pass; in the backward
pass, where what is kept goes and gradients come, as the first or as the last, whichever needs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autopar.cost_model.liveness import GRADIENT, OPTIMIZER, PARAM, Block, Liveness, owner_of, placeholders
from autopar.cost_model.ops import tensor_bytes
from autopar.program import LocalProgram, collective_nodes, is_collective_step
from autopar.regions import region_of
from autopar.whole_plan import StandIns


@dataclass(frozen=True)
class Copies:
    """How many units of the whole model each held unit stands for.

    Attributes:
        units: for each held unit the module paths of its blocks.
        counts: how many units each stands for.
    """

    units: tuple[tuple[str, ...], ...] = ()
    counts: tuple[int, ...] = ()

    @staticmethod
    def of(standing: StandIns) -> Copies:
        """Those of a graph whose units stand for others."""
        return Copies(tuple(standing), tuple(map(len, standing.values())))

    @cached_property
    def _unit_of_block(self) -> Mapping[str, int]:
        return {block: i for i, unit in enumerate(self.units) for block in unit}

    @cached_property
    def _known(self) -> dict[str, int | None]:
        return {}

    def unit(self, module: str) -> int | None:
        """The held unit in which a module lies."""
        if module not in self._known:
            block = region_of(module, self._unit_of_block)
            self._known[module] = None if block is None else self._unit_of_block[block]
        return self._known[module]

    def number(self, module: str) -> int:
        """How many modules of the whole model a module of the folded graph stands for."""
        unit = self.unit(module) if self.units else None
        return 1 if unit is None else self.counts[unit]

    def shares(self, program: LocalProgram) -> Shares:
        """For collectives over buffers in which several modules have a part, and those buffers: whose part is how much.

        In the whole program there are as many more such buffers as there are parts.
        """
        owners = {node.name: owner_of(spec.path) for spec, node in placeholders(program.forward)}
        found: dict[fx.Node, dict[str, float]] = {}
        for node in (n for graph in program.graphs for n, _ in collective_nodes(graph.module.graph)):
            buffer = node.args[0]
            if not isinstance(buffer, fx.Node) or buffer.target is not torch.ops.aten.cat.default:
                continue
            if self.unit(node.meta["module"]) is not None or not buffer.meta.get("layout"):
                continue
            parts: dict[str, float] = {}
            for part in buffer.all_input_nodes:
                module = _owner(part.all_input_nodes[0], owners)
                parts[module] = parts.get(module, 0) + tensor_bytes(part.meta["val"])
            total = sum(parts.values())
            found[node] = found[buffer] = {module: size / total for module, size in parts.items()}
        return found

    def weight(self, shares: Mapping[str, float]) -> float:
        """How many times as much there is in the whole program of what modules have these shares in."""
        return sum(share * self.number(module) for module, share in shares.items())


Shares = Mapping[fx.Node, Mapping[str, float]]
"""For collectives, and buffers, in which several modules have a part: each one's share, which sum to 1."""


def _owner(node: fx.Node, owners: Mapping[str, str]) -> str:
    """The module of what goes into a flat buffer: that of the op, or of the parameter that it looks at."""
    while node.op == "call_function" and not node.meta["module"] and node.meta.get("layout"):
        node = node.all_input_nodes[0]
    return owners.get(node.name, "") if node.op == "placeholder" else str(node.meta["module"])


WHOLE = Copies()
"""A graph that is not folded: each unit stands for itself."""


def repeat_units(liveness: Liveness, program: LocalProgram, copies: Copies, shares: Shares) -> None:
    """Add to a folded program's blocks those of the units that it does not hold; `shares` are those of `copies`."""
    nodes = [n for graph in program.graphs for n in graph.module.graph.nodes if n.op != "placeholder"]
    backward = sum(n.op != "placeholder" for n in program.forward.module.graph.nodes)
    spans = _Spans(nodes, backward, copies)
    kept: list[tuple[int, Block]] = []
    grads: list[tuple[int, Block]] = []
    for block in liveness.blocks:
        node = nodes[block.born] if block.born < len(nodes) else None
        if block.kind in (PARAM, OPTIMIZER) or (block.kind == GRADIENT and block.born == 0):
            block.num_bytes *= copies.number(block.module)
        elif node is not None and node in shares:
            if block.kind == GRADIENT or block.born < backward <= block.last:  # what does not last is there once
                block.num_bytes = liveness.rounded(round(tensor_bytes(node.meta["val"]) * copies.weight(shares[node])))
        elif block.born < backward <= block.last < len(nodes):
            unit = spans.reader(block.last)
            if unit is not None:
                kept.append((unit, block))
        elif node is not None and block.born >= backward:
            unit = copies.unit(block.module)
            if unit is not None and (block.kind == GRADIENT or spans.waits_for_the_end(block)):
                grads.append((unit, block))
    liveness.blocks += _copied(kept, grads, spans, copies)


def _copied(
    kept: Sequence[tuple[int, Block]], grads: Sequence[tuple[int, Block]], spans: _Spans, copies: Copies
) -> Iterator[Block]:
    """The blocks of absent copies: what is kept goes, and gradients come, when the held unit's backward pass begins or
    ends, whichever holds more while it runs."""
    balance = [0] * len(copies.units)
    for sign, found in ((1, kept), (-1, grads)):
        for unit, block in found:
            balance[unit] += sign * block.num_bytes
    for unit, block in kept:
        absent = (copies.counts[unit] - 1) * block.num_bytes
        start, end = spans.backward[unit]
        yield Block(absent, spans.forward[unit][0], end if balance[unit] >= 0 else start - 1, block.kind, block.module)
    for unit, block in grads:
        absent = (copies.counts[unit] - 1) * block.num_bytes
        start, end = spans.backward[unit]
        born = end + 1 if balance[unit] >= 0 else start
        if block.born > spans.end:  # reduced when all units are done
            born = block.born
        yield Block(absent, born, block.last, block.kind, block.module)


class _Spans:
    """Where in a program's steps each held unit computes, in the forward and in the backward pass."""

    def __init__(self, nodes: Sequence[fx.Node], backward: int, copies: Copies) -> None:
        self.nodes, self.copies = nodes, copies
        self.order = {node: i for i, node in enumerate(nodes)}
        self.forward: dict[int, tuple[int, int]] = {}
        self.backward: dict[int, tuple[int, int]] = {}
        for i, node in enumerate(nodes):
            unit = copies.unit(node.meta.get("module", ""))
            if unit is not None and not moves_data(node):
                spans = self.forward if i < backward else self.backward
                spans[unit] = (spans.get(unit, (i, i))[0], i)
        self.end = max((end for _, end in self.backward.values()), default=len(nodes))

    def reader(self, step: int) -> int | None:
        """The unit that runs in a step of the backward pass."""
        unit = self.copies.unit(self.nodes[step].meta.get("module", ""))
        if unit is None:
            unit = next((u for u, (start, end) in self.backward.items() if start <= step <= end), None)
        return unit if unit in self.backward and unit in self.forward else None

    def waits_for_the_end(self, block: Block) -> bool:
        """Whether a value of the backward pass is only read when all units are done, as with one late reduction."""
        if block.born > self.end or block.last <= self.end:
            return False
        return min(map(self._first_reader, self.nodes[block.born].users), default=0) > self.end

    def _first_reader(self, user: fx.Node) -> int:
        if user.meta.get("layout") and user.users:
            return min(map(self._first_reader, user.users))
        return self.order[user]


def moves_data(node: fx.Node) -> bool:
    """Whether a node belongs to a collective, which a schedule moves away from the unit it serves."""
    return node.op != "call_function" or is_collective_step(node) or bool(node.meta.get("layout"))


__all__ = ["WHOLE", "Copies", "Shares", "moves_data", "repeat_units"]
