"""Which node of a compiled graph failed, read off the traceback of the error that it raised."""

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
            axis, kind = collective_axis(node), COLLECTIVE_KINDS[node.target]
            found[node.name] = f"{kind} along mesh axis {axis!r}, {_whose(node)}"
        elif node.target is torch.ops._c10d_functional.wait_tensor.default:
            started = node.all_input_nodes[0].name
            found[node.name] = found.get(started, "a collective")
    return found


def _whose(node: fx.Node) -> str:
    part = "backward" if node.meta.get("backward") else "forward"
    return f"of module {node.meta.get('module') or '(root)'} in the {part} pass"


def blame(error: Exception, graph: fx.Graph, known: Places, rank: int, watch: Watch | None = None) -> Exception:
    """The error to raise in the place of one that a graph's code raised: itself, with its place added to what it says,
    unless a collective raised it.

    Args:
        error: what was raised.
        graph: the graph.
        known: its `places`.
        rank: this rank.
        watch: what knows how the others stand.
    """
    running = list(_nodes_running(error))
    where = next((known[name] for name in running if name in known), None)
    if where is not None and isinstance(error, RuntimeError):
        return waited_in_vain(error, where, rank, watch)
    node = next((node for node in graph.nodes if node.name in running and node.op == "call_function"), None)
    if node is not None and len(error.args) == 1:
        said, *rest = str(error.args[0]).split("\n", 1)
        error.args = ("\n".join((f"{said} (on rank {rank}, in {node.target}, {_whose(node)})", *rest)),)
    return error


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
