"""Rows by group: which rows that lie in groups (experts' tokens) a plan has on the ranks that hold their groups.

A plan that cuts the groups of some products cuts their rows with them: every op between the one that takes the rows and
the one that puts them back runs on a rank's own.  That is all or nothing, since no reshard leads there or away: where
an op in between cannot, or would have the rows otherwise along another axis, the groups stay whole along this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autopar.factors import Factor, FactorAnalysis, source_of
from autopar.mesh import Mesh
from autopar.placement import ByGroup, Sharding

Wanted = dict[Factor, int]
"""Factors that an axis cuts, with their place in the order of preference."""


def rows_by_group(analysis: FactorAnalysis, wanted: list[Wanted], mesh: Mesh) -> list[dict[Factor, Factor]]:
    """For each axis the rows that it may have by group, and their groups: those that it cuts into equal numbers.

    Groups that it cannot cut so are no longer wanted.
    """
    found: list[dict[Factor, Factor]] = []
    pairs = analysis.groups_of_rows
    for axis, size in enumerate(mesh.sizes):
        parts = {groups: size for groups in pairs.values() if groups in wanted[axis]}
        for earlier, n in zip(found, mesh.sizes, strict=False):
            parts |= {groups: parts[groups] * n for groups in set(earlier.values()) if groups in parts}
        for groups in [groups for groups, n in parts.items() if groups.size % n]:
            del wanted[axis][groups]
        found.append({rows: groups for rows, groups in pairs.items() if groups in wanted[axis]})
    return found


def rows_of(analysis: FactorAnalysis, node: fx.Node, cut: Mapping[Factor, Factor]) -> list[tuple[str, Factor]]:
    """The rows that a call has of those that an axis has by group, by their names in its rule."""
    return [(name, factor) for name, _, factor in analysis.parts(node) if factor in cut]


def groups_to_keep_whole(
    analysis: FactorAnalysis,
    by_group: list[dict[Factor, Factor]],
    inputs: Mapping[fx.Node, tuple[Sharding, ...]],
    outputs: Mapping[fx.Node, tuple[Sharding, ...]],
) -> set[tuple[int, Factor]]:
    """Of the groups cut along each axis, those whose rows not all calls would have as they lie."""
    nodes = [node for node in _misplaced(analysis, inputs, outputs) if node in analysis.rules]
    return {
        (axis, cut[rows])
        for axis, cut in enumerate(by_group)
        for node in nodes
        for _, rows in rows_of(analysis, node, cut)
    }


def _misplaced(
    analysis: FactorAnalysis,
    inputs: Mapping[fx.Node, tuple[Sharding, ...]],
    outputs: Mapping[fx.Node, tuple[Sharding, ...]],
) -> Iterator[fx.Node]:
    """The calls that would read rows by group otherwise than they lie, or something else as rows by group.

    A constant is made again for its reader, with as many rows as another operand has.
    """
    for node, needed in inputs.items():
        sources = [source_of(operand) for operand in analysis.operands[node]]
        given = [outputs[source][index] if source in outputs else () for source, index in sources]
        is_there = any(map(_is_by_group, given))
        for (source, _), lies, wanted in zip(sources, given, needed, strict=True):
            is_made = is_there and source.target is torch.ops.aten.full.default
            if lies != wanted and not is_made and (_is_by_group(lies) or _is_by_group(wanted)):
                yield node
                yield source


def _is_by_group(sharding: Sharding) -> bool:
    return any(isinstance(p, ByGroup) for p in sharding)
