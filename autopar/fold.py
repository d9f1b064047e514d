"""Find the alike units of a model's stacks, and leave most of them out of a trace.

Blocks that do the same make the same nodes, so that of a long stretch of alike units four are enough to know the graph
of all: the first and the last, which have other neighbours, and two inner ones.  That the units are alike is read from
a record of the whole model (`autopar.records`), and that the rest of the model does not notice from one of the model
without the units that are left out.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from autopar._compat import has_backward_hooks
from autopar.graph import GraphInput, GraphOutput, OutputKind, Run
from autopar.model_state import ModelState
from autopar.records import Extent, Record, Token

MIN_UNITS = 5
"""Units that a run has at least: four are held."""


def find_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Paths of the containers of at least `MIN_UNITS` numbered modules, and of these; the outer containers first.

    Containers in which modules' hooks act on gradients are left out: these are in no record.
    """
    stacks: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        keys = list(module._modules)
        numbered = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        alike = numbered and len(keys) >= MIN_UNITS and keys == [str(i) for i in range(len(keys))]
        if alike and not has_backward_hooks(module):
            stacks[path] = [f"{path}.{key}" if path else key for key in keys]
    return dict(sorted(stacks.items(), key=lambda item: item[0].count(".")))


def find_runs(record: Record, state: ModelState, stacks: dict[str, list[str]]) -> tuple[Run, ...]:
    """The runs of alike units in a model's stacks.

    Args:
        record: of the whole model.
        state: the model's tensors.
        stacks: as `find_stacks` gives them.
    """
    runs: list[Run] = []
    for blocks in stacks.values():
        taken = [path for run in runs for unit in run.units for path in unit]
        if not any(blocks[0].startswith(f"{path}.") for path in taken):
            runs += _Stack(record, blocks, _tensors_by_block(state, blocks)).runs()
    return tuple(runs)


@contextlib.contextmanager
def held_only(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """While active, the model's stacks have only those units of `runs` that are held."""
    absent = {block for run in runs for i, unit in enumerate(run.units) if i not in run.held for block in unit}
    stacks = [(vars(model.get_submodule(path)), path) for path in {block.rpartition(".")[0] for block in absent}]
    before = [attributes["_modules"] for attributes, _ in stacks]
    for attributes, path in stacks:
        prefix = f"{path}." if path else ""
        held = {key: child for key, child in attributes["_modules"].items() if prefix + key not in absent}
        attributes["_modules"] = held
    try:
        yield
    finally:
        for (attributes, _), modules in zip(stacks, before, strict=True):
            attributes["_modules"] = modules


def renamed(path: str, old: Sequence[str], new: Sequence[str]) -> str:
    """A path within one of the modules `old`, as it is called within the module of `new` that stands there."""
    for before, after in zip(old, new, strict=True):
        if path == before or path.startswith(f"{before}."):
            return after + path[len(before) :]
    return path


# ------------------------------------------------------------------------------------------------- alike units


class _Stack:
    """The blocks of one stack, and which of them are alike."""

    def __init__(self, record: Record, blocks: list[str], tensors: dict[str, tuple[object, ...]]) -> None:
        self.record, self.blocks, self.tensors = record, blocks, tensors
        self.extents = _filled(record.extents(blocks), blocks)
        self.grads = [kind for _, kind in record.grads]
        self.grads_at = [at for at, _ in record.grads]

    def runs(self) -> list[Run]:
        """The longest stretches of alike units, none where a block ran out of turn."""
        if any(left.end > right.start for left, right in itertools.pairwise(self.extents)):
            return []
        found = []
        start = 0
        while start <= len(self.blocks) - MIN_UNITS:
            period, num_units = self._longest(start)
            if num_units < MIN_UNITS:
                start += 1
                continue
            stop = start + period * num_units
            units = tuple(tuple(self.blocks[i : i + period]) for i in range(start, stop, period))
            found.append(Run(units, (0, 1, num_units - 2, num_units - 1)))
            start = stop
        return found

    def _longest(self, start: int) -> tuple[int, int]:
        """Period and number of the alike units from block `start` on that cover most blocks."""
        best = 1, 1
        rest = len(self.blocks) - start
        for period in range(1, rest // MIN_UNITS + 1):
            if period > 1 and best[1] > 1 and period % best[0] == 0:
                continue  # several of these units in one
            stop = start + period
            while stop < len(self.blocks) and self._alike(stop - period, stop, start, period):
                stop += 1
            num_units = (stop - start) // period
            if num_units >= MIN_UNITS and period * num_units > best[0] * best[1]:
                best = period, num_units
            if stop == len(self.blocks) and num_units >= MIN_UNITS:
                break
        return best

    def _stretch(self, block: int, apart: bool) -> tuple[slice, slice]:
        """Where a block's ops and nodes of autograd's graph lie in the record, with what runs before the next block."""
        here = self.extents[block]
        end = here if apart else self.extents[block + 1]
        stop, grad_stop = (here.end, here.grad_end) if apart else (end.start, end.grad_start)
        grads = slice(*(bisect.bisect_left(self.grads_at, at) for at in (here.grad_start, grad_stop)))
        return slice(here.start, stop), grads

    def _alike(self, left: int, right: int, start: int, period: int) -> bool:
        """Whether two blocks, the second a period after the first, do the same; the units begin with block `start`."""
        apart = right == len(self.blocks) - 1  # what runs after the last block is no part of it
        if self.tensors[self.blocks[left]] != self.tensors[self.blocks[right]]:
            return False
        (ops, grads), (other_ops, other_grads) = self._stretch(left, apart), self._stretch(right, apart)
        if self.record.ops[ops] != self.record.ops[other_ops] or self.grads[grads] != self.grads[other_grads]:
            return False
        shift = _Shift(
            distance=other_ops.start - ops.start,
            begin=self.extents[start].start,
            first_end=self.extents[start + period].start if left < start + period else None,
            old=self.blocks[max(start, left - period + 1) : left + 1],
            new=self.blocks[max(start, left - period + 1) + period : right + 1],
        )
        pairs = zip(self.record.reads[ops], self.record.reads[other_ops], strict=True)
        return all(shift.relates(a, b) for reads, others in pairs for a, b in zip(reads, others, strict=True))


@dataclass(frozen=True)
class _Shift:
    """How what one unit reads relates to what the next one reads.

    Attributes:
        distance: ops from a unit to the next.
        begin: op with which the first unit begins; what was made before is there for all units.
        first_end: op at which the first unit ends, if this compares the first unit with the second: that one reads from
            the first, which has no unit before it, what the first reads from elsewhere.
        old, new: blocks that correspond.
    """

    distance: int
    begin: int
    first_end: int | None
    old: Sequence[str]
    new: Sequence[str]

    def relates(self, left: Token, right: Token) -> bool:
        """Whether one unit reads `right` where the unit before it reads `left`."""
        if isinstance(right, str) and isinstance(left, str):  # paths of modules
            return renamed(left, self.old, self.new) == right
        if isinstance(right, GraphInput) and isinstance(left, GraphInput):
            return left.kind is right.kind and renamed(left.path, self.old, self.new) == right.path
        at, was = _position(right), _position(left)
        if at is None or at < self.begin:
            return left == right
        if was is not None and left == (was, right[1]) and at == was + self.distance:  # type: ignore[index]
            return True
        outside = was is None or was < self.begin
        return self.first_end is not None and at < self.first_end and outside


def _filled(extents: dict[str, Extent], blocks: Sequence[str]) -> list[Extent]:
    """The extents of all blocks, in order; one without ops has an empty one before the next block."""
    found: list[Extent] = []
    for block in reversed(blocks):
        following = found[-1] if found else None
        nothing = Extent(*[following.start] * 2, *[following.grad_start] * 2) if following else Extent(0, 0, 0, 0)
        found.append(extents.get(block, nothing))
    return found[::-1]


def _position(token: Token) -> int | None:
    """The position of the op that made what a token stands for, if an op did."""
    return token[0] if isinstance(token, tuple) and isinstance(token[0], int) else None


def _tensors_by_block(state: ModelState, blocks: Iterable[str]) -> dict[str, tuple[object, ...]]:
    """For each block its parameters and buffers, under their names inside the block."""
    found: dict[str, list[object]] = {block: [] for block in blocks}
    stack = next(iter(found)).rpartition(".")[0]
    depth = stack.count(".") + 1 if stack else 0

    def block_of(name: str) -> str:
        return ".".join(name.split(".")[: depth + 1])

    for name, tensor in state.tensors.items():
        if (block := block_of(name)) in found:
            is_parameter = name in state.parameters
            entry = (name[len(block) :], is_parameter, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            found[block].append(entry)
    for name, first in state.tied.items():
        if (block := block_of(name)) in found:
            inside = first.startswith(f"{block}.")
            found[block].append((name[len(block) :], inside, first[len(block) :] if inside else first))
    return {block: tuple(entries) for block, entries in found.items()}


# -------------------------------------------------------------------------------------- the rest of the model


def is_unmoved(whole: Record, held: Record, runs: Sequence[Run]) -> bool:
    """Whether a model that has only the held units of `runs` does what the whole model does but for the others.

    Args:
        whole: the record of the whole model.
        held: the record of the model under `held_only`.
        runs: the runs.
    """
    gaps = sorted((_gap(whole, run) for run in runs), key=lambda gap: gap.ops.start)
    keep = [True] * len(whole.ops)
    for gap in gaps:
        keep[gap.ops.start : gap.ops.stop] = [False] * len(gap.ops)
    positions = list(itertools.compress(range(len(keep)), keep))
    grads = [kind for at, kind in whole.grads if not any(at in gap.grads for gap in gaps)]
    if [whole.ops[at] for at in positions] != held.ops or grads != [kind for _, kind in held.grads]:
        return False
    for at, read in zip(positions, held.reads, strict=True):
        if tuple(_without(gaps, token, at) for token in whole.reads[at]) != read:
            return False
    left = {spec: value for spec, value in whole.outputs.items() if not _is_absent(spec, runs)}
    outputs = [(spec, _without(gaps, token), grad) for spec, (token, grad) in left.items()]
    return outputs == [(spec, *value) for spec, value in held.outputs.items()] and all(
        _sets_alike(whole, run) for run in runs
    )


@dataclass(frozen=True)
class _Gap:
    """What of a record the units of a run that are not held fill.

    Attributes:
        ops, grads: positions and sequence numbers of what is left out.
        unit: number of ops of one unit.
    """

    ops: range
    grads: range
    unit: int


def _gap(record: Record, run: Run) -> _Gap:
    starts = _starts(record, run)
    begin, after, last = starts[2], starts[-2], starts[-1]
    return _Gap(range(begin.start, after.start), range(begin.grad_start, after.grad_start), last.start - after.start)


def _starts(record: Record, run: Run) -> list[Extent]:
    """The extent of each unit's first block."""
    blocks = [block for unit in run.units for block in unit]
    return _filled(record.extents(blocks), blocks)[:: len(run.units[0])]


def _without(gaps: Sequence[_Gap], token: Token, reader: int | None = None) -> Token:
    """What stands for a token of the whole record, read by the op at `reader`, in the record of the held units.

    The first unit after a gap reads there from the last unit before it what it reads in the whole from the last unit of
    the gap.  Nobody else may read what is made in a gap.
    """
    at = _position(token)
    if at is None:
        return token
    shift = 0
    for gap in gaps:
        if at in gap.ops:
            follows = reader is not None and gap.ops.stop <= reader < gap.ops.stop + gap.unit
            if not follows or at < gap.ops.stop - gap.unit:
                return None
        if at >= gap.ops.start:
            shift += len(gap.ops)
    return (at - shift, token[1])  # type: ignore[index]


def _is_absent(spec: GraphOutput, runs: Sequence[Run]) -> bool:
    """Whether an output is the new value of a buffer that a unit which is not held has."""
    absent = (unit for run in runs for i, unit in enumerate(run.units) if i not in run.held)
    return spec.kind is OutputKind.MUTATION and any(
        spec.path.startswith(f"{block}.") for unit in absent for block in unit
    )


def _sets_alike(record: Record, run: Run) -> bool:
    """Whether each unit sets the same of its buffers, to what the same of its ops makes."""
    found = []
    for unit, start in zip(run.units, (extent.start for extent in _starts(record, run)), strict=True):
        ours = [
            (renamed(spec.path, unit, run.units[0]), token, grad)
            for spec, (token, grad) in record.outputs.items()
            if spec.kind is OutputKind.MUTATION and any(spec.path.startswith(f"{block}.") for block in unit)
        ]
        relative = [((at - start, token[1]) if (at := _position(token)) is not None else token) for _, token, _ in ours]  # type: ignore[index]
        found.append([(path, what, grad) for (path, _, grad), what in zip(ours, relative, strict=True)])
    return all(unit == found[0] for unit in found)
