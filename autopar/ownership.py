"""Who owns each node of a joint graph: the module it comes from, and whether it is part of the backward pass.

While a model is traced, each forward node is annotated with the innermost module whose call is active, and
AOTAutograd copies the annotation to the backward nodes of the same autograd node.  What is left (sums of gradients
that meet) belongs to a module that its neighbours have in common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from torch import fx, nn

from autopar._compat import around_calls

_ANNOTATION = "autopar_module"


@contextlib.contextmanager
def annotate_modules(model: nn.Module) -> Iterator[None]:
    """While active, nodes traced inside a module's call carry its path.  Leaves no trace on the model."""
    with around_calls(model, _annotation):
        yield


@contextlib.contextmanager
def _annotation(path: str) -> Iterator[None]:
    """As `fx.traceback.annotate`, but indifferent to what else happens to the tracer's metadata inside."""
    outer = fx.traceback.current_meta.get("custom")
    fx.traceback.current_meta["custom"] = {**(outer or {}), _ANNOTATION: path}
    try:
        yield
    finally:
        if outer is None:
            fx.traceback.current_meta.pop("custom", None)
        else:
            fx.traceback.current_meta["custom"] = outer


def current_module() -> str | None:
    """The innermost module whose call is active, under `annotate_modules`; None outside of the model."""
    path: str | None = (fx.traceback.current_meta.get("custom") or {}).get(_ANNOTATION)
    return path


def annotation(path: str | None) -> dict[str, object]:
    """What a node's `meta` has, whose module is `path`, if it is written and not traced."""
    return {} if path is None else {"custom": {_ANNOTATION: path}}


def traced_module(node: fx.Node) -> str | None:
    """The module in whose call a node of a graph was traced; None if that is not known."""
    path: str | None = (node.meta.get("custom") or {}).get(_ANNOTATION)
    return path


def assign_owners(
    graph: fx.Graph, tangents: Iterable[fx.Node], forward_values: Iterable[fx.Node], gradients: Mapping[fx.Node, str]
) -> None:
    """Set `node.meta["module"]` and `node.meta["backward"]` of every node that is no placeholder.

    Placeholders must have both already.

    Args:
        graph: the joint graph, as traced under `annotate_modules`.
        tangents: placeholders of the outputs' gradients.
        forward_values: the nodes that the forward pass returns.
        gradients: for each node that is the gradient of a parameter, the module that holds the parameter.
    """
    _mark_backward(graph, tangents, forward_values)
    unowned = []
    for node in graph.nodes:
        if node.op in {"placeholder", "output"}:
            node.meta.setdefault("module", "")
            continue
        path = traced_module(node)
        path = gradients.get(node) if path is None else path
        if path is None:
            unowned.append(node)
        else:
            node.meta["module"] = path
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in unowned:
        inputs = sorted(_owned(node.all_input_nodes), key=position.__getitem__)
        if inputs:
            node.meta["module"] = _accumulating_module(inputs, _owned(node.users))
    for node in reversed(unowned):
        if "module" not in node.meta:
            node.meta["module"] = common_module([user.meta["module"] for user in _owned(node.users)])


def _owned(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function" and "module" in node.meta]


def _accumulating_module(inputs: list[fx.Node], users: list[fx.Node]) -> str:
    """The module in whose forward the tensor is used several times whose gradients are summed.

    It holds the use that came first, whose gradient is the last to arrive, and some other node: a use whose gradient
    came before, or the op that made the tensor, which uses the sum.
    """
    *others, latest = inputs
    shared = [common_module([latest.meta["module"], node.meta["module"]]) for node in (*others, *users)]
    return max(shared, key=len, default=latest.meta["module"])


def _mark_backward(graph: fx.Graph, tangents: Iterable[fx.Node], forward_values: Iterable[fx.Node]) -> None:
    """A node is backward if it depends on a tangent, or if AOTAutograd made it in the backward pass and no result of
    the forward pass needs it."""
    dependent = set(tangents)
    for node in graph.nodes:
        if any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
    needed = set(forward_values)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        made_in_backward = node.meta.get("partitioner_tag") == "is_backward" and node not in needed
        node.meta["backward"] = node.op != "output" and (node in dependent or made_in_backward)


def common_module(paths: Iterable[str]) -> str:
    """The deepest module path that is a prefix of all the given ones."""
    split = [path.split(".") if path else [] for path in paths]
    prefix: list[str] = []
    for parts in zip(*split):  # noqa: B905  (ends at the shortest)
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return ".".join(prefix)
