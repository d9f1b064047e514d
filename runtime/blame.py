"""Which collective of a compiled graph failed, read off the traceback of the error that it raised."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.errors import CollectiveError
from autopar.program import COLLECTIVE_KINDS, collective_axis
from autopar.runtime.standing import Places, first_sentence, node_at
from autopar.runtime.watch import Watch


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


def blame(error: RuntimeError, known: Places, rank: int, watch: Watch | None = None) -> RuntimeError:
    """The error to raise in the place of one that a graph's code raised: itself, unless a collective raised it."""
    where = next((known[name] for name in _nodes_running(error) if name in known), None)
    return error if where is None else waited_in_vain(error, where, rank, watch)


def waited_in_vain(error: RuntimeError, where: str, rank: int, watch: Watch | None) -> CollectiveError:
    """The error to raise in the place of one that PyTorch raised where a rank waited for others."""
    reason = first_sentence(error)
    culprit = watch.verdict(error) if watch else "another rank failed, hangs or cannot be reached"
    return CollectiveError(
        f"rank {rank} waited in vain in {where} ({reason}): {culprit}. The first error in the ranks' output says why. "
        "End all ranks, and resume from the last checkpoint"
    )


def _nodes_running(error: BaseException) -> Iterator[str]:
    """Names of the nodes whose lines of generated code an error came through."""
    trace = error.__traceback__
    while trace is not None:
        yield node_at(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
