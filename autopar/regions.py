"""Regions: the parts of a model that are decided as one, for recomputation and for storage.

A region is named by a module path and holds what that module and the modules inside it run; where regions nest, a node
belongs to the innermost.  The region `""` is what no other region holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autopar.graph import JointGraph


def region_of(module: str, regions: Collection[str]) -> str | None:
    """The innermost of `regions` that a module path lies in; None if it lies in none."""
    path = module
    while path not in regions:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def find_regions(joint: JointGraph) -> tuple[str, ...]:
    """The regions of a model, in the order in which they run: its outermost numbered modules that have modules inside
    (the blocks of a stack), the other children of the root, and the root itself, which comes last.  Of a folded graph,
    the blocks of its runs are regions wherever they lie."""
    folded = {block for run in joint.runs for held in run.held for block in run.units[held]}
    paths = list(dict.fromkeys(_module_paths(joint)))
    inner = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    regions: dict[str, None] = {}
    for path in paths:
        holders = prefixes(path)
        numbered = (p for p in holders if p.rpartition(".")[2].isdigit() and p in inner)
        block = next((p for p in holders if p in folded), next(numbered, None))
        regions[block or holders[0]] = None
    # A child that holds blocks is a region, too: what it runs outside of them is its own.
    return tuple({**regions, "": None})


def inner_modules(joint: JointGraph, regions: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Of each region that is a block, the modules directly inside that have modules with parameters inside, such as
    attention and a feed-forward net, by their names there."""
    found: dict[str, dict[str, None]] = {}
    for path in joint.param_nodes():
        owner = path.rpartition(".")[0]
        block = region_of(owner, regions) or ""
        name, dot, _ = owner[len(block) + 1 :].partition(".")
        if dot and block.rpartition(".")[2].isdigit():
            found.setdefault(block, {})[name] = None
    return {block: tuple(names) for block, names in found.items()}


def prefixes(path: str) -> list[str]:
    """A module path and those of the modules that hold it, the outermost first; the root is left out."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _module_paths(joint: JointGraph) -> Iterable[str]:
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and not node.meta["backward"]:
            yield node.meta["module"]
    for path in joint.param_nodes():
        yield path.rpartition(".")[0]
