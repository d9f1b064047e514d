"""Which collective of a compiled graph failed, read off the traceback of the error that it raised."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autopar.errors import CollectiveError
from autopar.program import COLLECTIVE_KINDS, collective_axis

Places = Mapping[str, str]
"""Name of a node -> its collective in words."""


def places(graph: fx.Graph) -> dict[str, str]:
    """Every collective of a graph and the wait for it, in words; asked while collectives still name mesh axes."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in COLLECTIVE_KINDS:
            part = "backward" if node.meta.get("backward") else "forward"
            module = node.meta.get("module") or "(root)"
            axis, kind = collective_axis(node), COLLECTIVE_KINDS[node.target]
            found[node.name] = f"{kind} along mesh axis {axis!r}, of module {module} in the {part} pass"
        elif node.target is torch.ops._c10d_functional.wait_tensor.default:
            started = node.all_input_nodes[0].name
            found[node.name] = found.get(started, "a collective")
    return found


def blame(error: RuntimeError, known: Places, rank: int) -> RuntimeError:
    """The error to raise in the place of one that a graph's code raised: itself, unless a collective raised it."""
    where = next((known[name] for name in _nodes_running(error) if name in known), None)
    if where is None:
        return error
    reason = str(error).strip().partition("\n")[0]
    return CollectiveError(
        f"rank {rank} waited in vain in {where} ({reason}): another rank failed, hangs or cannot be reached; the first "
        "error in the other ranks' output says which. End all ranks, and resume from the last checkpoint"
    )


def _nodes_running(error: BaseException) -> Iterator[str]:
    """Names of the nodes whose lines of generated code an error came through."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):
            line = linecache.getline(code.co_filename, trace.tb_lineno)
            yield line.partition("=")[0].partition(":")[0].strip()
        trace = trace.tb_next
