"""The logical mesh: named axes and their sizes.  Plain data; no process group behind it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import MeshError


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged in a row-major grid; the last axis is the innermost (fastest) one.

    Attributes:
        names: one name per axis, unique.
        sizes: number of ranks along each axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or not self.sizes:
            raise MeshError(f"a mesh needs one name per axis and at least one axis, got {self.names} and {self.sizes}")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axis names must be unique, got {self.names}")
        for name in self.names:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                raise MeshError(f"mesh axis name {name!r} is not an identifier")
        if any(type(size) is not int or size < 1 for size in self.sizes):
            raise MeshError(f"mesh axis sizes must be positive integers, got {self.sizes}")

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the whole grid."""
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` along each axis."""
        out = []
        for size in reversed(self.sizes):
            out.append(rank % size)
            rank //= size
        return tuple(reversed(out))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Inverse of `coordinate`."""
        rank = 0
        for position, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + position
        return rank

    def axis(self, name: str) -> int:
        """Index of the axis called `name`."""
        try:
            return self.names.index(name)
        except ValueError:
            raise MeshError(f"no mesh axis {name!r}; the axes are {', '.join(self.names)}") from None

    def size(self, name: str) -> int:
        """Size of the axis called `name`."""
        return self.sizes[self.axis(name)]

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The rank groups along one axis: every rank is in exactly one, in order of its position."""
        axis = self.axis(name)
        others = [range(size) for i, size in enumerate(self.sizes) if i != axis]
        groups = []
        for rest in itertools.product(*others):
            members = [rest[:axis] + (i,) + rest[axis:] for i in range(self.sizes[axis])]
            groups.append(tuple(self.rank(c) for c in members))
        return tuple(groups)

    def __str__(self) -> str:
        return "×".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def parse_shape(shape: int | str | Sequence[int]) -> tuple[int, ...]:
    """Read a mesh shape given as `4`, `"2x4"` or `(2, 4)`.

    Raises:
        MeshError: if it is none of these or an axis is not a positive integer.
    """
    if isinstance(shape, str):
        parts = shape.lower().replace("×", "x").split("x")
        if not all(part.strip().isdecimal() and part.isascii() for part in parts):
            raise MeshError(f'cannot read mesh {shape!r}: write axis sizes joined by \'x\', such as "4" or "2x4"')
        sizes = tuple(int(part) for part in parts)
    elif isinstance(shape, bool) or not isinstance(shape, (int, Sequence)):
        raise MeshError(f'cannot read mesh {shape!r}: give a DeviceMesh, 4, "2x4" or (2, 4)')
    else:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)  # type: ignore[arg-type]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise MeshError(f"mesh {shape!r}: axis sizes must be positive integers")
    return sizes
