"""Where a step first meets a value that is not a number: on which rank, in which op of which module."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import TorchDispatchMode, tree_leaves
from autopar.errors import InputError
from autopar.program import LocalProgram
from autopar.runtime.control import ControlGroup
from autopar.runtime.finite import Replay
from autopar.runtime.module import ParallelModule
from autopar.runtime.standing import node_at
from autopar.signature import flatten_inputs
from autopar.step_check import real_step


def find_nan(module: ParallelModule, *args: Any, **kwargs: Any) -> str:
    """Run one step of a `ParallelModule`, which must return its loss, and say where the first NaN is.

    Every rank calls it with its own rows, as it would call the module.  Parameters, gradients, buffers and random
    numbers stay as they are; a step takes several times as long.

    Returns:
        The ranks that met one first, and whether in an input, a parameter, or which op of which module; empty if there
        is none.

    Raises:
        InputError: if it is no `ParallelModule`, or there is no loss.
    """
    if not isinstance(module, ParallelModule):
        raise InputError(f"find_nan takes a ParallelModule, got a {type(module).__name__}")
    held = [
        *((f"input {path!r}", tensor) for path, tensor in flatten_inputs(args, kwargs)[0]),
        *((f"parameter {name}", cast(DTensor, p).to_local()) for name, p in module.named_parameters()),
        *((f"buffer {name}", buffer) for name, buffer in module.named_buffers()),
    ]
    module.prepare(*args, **kwargs)
    search = _Search()
    for name, tensor in held:
        search.look_at_held(name, tensor)
    with module.step_apart(), search:
        real_step(module, (args, kwargs))
    return _first(module.control_group, search, module.compiled_steps[-1].program)


def search_replay(control: ControlGroup, replay: Replay, infinite: bool) -> str:
    """As `find_nan`, for a call that is run again; with `infinite`, where finite numbers first made an infinity.

    Called on every rank; the text is the same on each.
    """
    search = _Search(infinite)
    replay.run(search, search.look_at_held, search.look_at)
    return _first(control, search, replay.step.compiled.program)


def _first(control: ControlGroup, search: _Search, program: LocalProgram) -> str:
    """What the ranks found that found something first."""
    mine = search.found
    if mine is not None and mine.graph:
        mine = _Found(mine.turn, f"{mine.what}, of module {_module_of(program, mine)} in the {mine.graph} pass")
    found = {rank: one for rank, one in enumerate(control.gather(mine)) if one is not None}
    first = min((one.turn for one in found.values()), default=0)
    return "; ".join(f"rank {rank}: {one.what}" for rank, one in found.items() if one.turn == first)


@dataclass(frozen=True)
class _Found:
    """A NaN.

    Attributes:
        turn: how many ops had run before; all ranks run the same.
        what: what has it.
        graph, node: which node of the compiled program, if it was one.
    """

    turn: int
    what: str
    graph: str = ""
    node: str = ""


class _Search(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the result of every op until one has a NaN, or is infinite though nothing that the op takes is.

    Infinities may be meant (masks have them), so that an op that only passes one on is not told of, and a tensor that
    is given with one only where no op made one.
    """

    def __init__(self, infinite: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._infinite, self._turn = infinite, 0
        self._held: _Found | None = None
        self._made: _Found | None = None

    @property
    def found(self) -> _Found | None:
        """The first."""
        return self._made or self._held if self._infinite else self._held or self._made

    def look_at_held(self, name: str, tensor: Tensor) -> None:
        """Look at what the step is given."""
        if self._held is None and self._has(tensor):
            self._held = _Found(-1, name)

    def look_at(self, name: str, tensor: Tensor) -> None:
        """Look at what is given while the step runs."""
        if self._made is None and self._has(tensor):
            self._made = _Found(self._turn, name)

    def _has_any(self, values: object) -> bool:
        return any(map(self._has, tree_leaves(values)))

    def _has(self, value: object) -> bool:
        if isinstance(value, float):
            return self._infinite and math.isinf(value)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            return False
        return bool((value.isinf() if self._infinite else value.isnan()).any())

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self._turn += 1
        if self._made is None and not _has_no_values_yet(op) and self._has_any(result):
            if self._infinite and self._has_any((args, kwargs)):
                return result
            graph, node = _running()
            self._made = _Found(self._turn, f"the result of {op.name().partition('::')[2]}", graph, node)
        return result


def _has_no_values_yet(op: Any) -> bool:
    """Whether an op returns memory that is yet to be filled: a collective that is not waited for, an allocation."""
    library, _, name = op.name().partition("::")
    return "empty" in name or (library == "_c10d_functional" and not name.startswith("wait_tensor"))


def _running() -> tuple[str, str]:
    """Which graph runs, and which of its nodes; empty outside of compiled programs."""
    node, graph = "", "forward"
    for file, line, function in _frames():
        node = node or node_at(file, line)
        if function == "run_backward":
            graph = "backward"
    return (graph, node) if node else ("", "")


def _frames() -> Iterator[tuple[str, int, str]]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _module_of(program: LocalProgram, found: _Found) -> str:
    local = program.backward if found.graph == "backward" else program.forward
    assert local is not None
    nodes = {node.name: node for node in local.module.graph.nodes}
    return str(nodes[found.node].meta.get("module") or "(root)") if found.node in nodes else "(unknown)"
