"""Names within the units of a run, and what they are in another unit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.graph import GraphInput, GraphOutput, Run

Spec = TypeVar("Spec", GraphInput, GraphOutput)


class Units:
    """Names within the units of a run, and what they are in another unit.

    The inner units are called near (the second of all) and far (the last but one); what stands between are copies.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        _, self.near, self.far, _ = run.held
        self.copies = range(self.near + 1, self.far)
        self._unit_of = {block: (i, q) for i, unit in enumerate(run.units) for q, block in enumerate(unit)}
        self._depths = sorted({block.count(".") + 1 for block in self._unit_of})
        self._places: dict[str, tuple[int, int, str] | None] = {}

    def place(self, path: str) -> tuple[int, int, str] | None:
        """Unit, block in the unit, and the rest of a path; None for one that lies in no unit."""
        if path not in self._places:
            parts = path.split(".")
            blocks = (".".join(parts[:depth]) for depth in self._depths)
            block = next((block for block in blocks if block in self._unit_of), None)
            self._places[path] = None if block is None else (*self._unit_of[block], path[len(block) :])
        return self._places[path]

    def unit(self, path: str) -> int | None:
        """The unit in which a path lies."""
        place = self.place(path)
        return None if place is None else place[0]

    def counterpart(self, path: str, unit: int) -> str:
        """What a path that lies in a unit is in another one."""
        place = self.place(path)
        assert place is not None
        return self.run.units[unit][place[1]] + place[2]

    def relative(self, path: str, origin: int) -> tuple[int, int, str] | str:
        """A path as seen from the near or the far unit: how many units away, and where in that unit; the path itself
        for one that does not lie in a unit or its neighbours."""
        place, held = self.place(path), self.run.held
        if place is None or place[0] not in held:
            return path
        distance = held.index(place[0]) - held.index(origin)
        return (distance, *place[1:]) if abs(distance) <= 1 else path

    def moved(self, path: str, origin: int, unit: int) -> str:
        """What a path that a node of unit `origin`, near or far, has is for the same node of `unit`."""
        seen = self.relative(path, origin)
        return seen if isinstance(seen, str) else self.run.units[unit + seen[0]][seen[1]] + seen[2]

    def with_copies(self, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Inputs or outputs of the whole graph: those of the copies before those of the far unit."""
        found: list[Spec] = []
        for (_, unit), group in itertools.groupby(specs, key=lambda spec: (spec.kind, self.unit(spec.path))):
            members = list(group)
            if unit == self.far:
                for copy in self.copies:
                    found += [replace(spec, path=self.counterpart(spec.path, copy)) for spec in members]
            found += members
        return tuple(found)

    def renamed(self, tied: Mapping[str, str]) -> dict[str, str]:
        """The other names of tensors in the copies."""
        names = [name for name in tied if self.unit(name) == self.far]
        return {
            self.counterpart(name, copy): self.moved(tied[name], self.far, copy)
            for copy in self.copies
            for name in names
        }
