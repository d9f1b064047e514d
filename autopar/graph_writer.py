"""Write the joint graph of a model while it runs on fake tensors: each op as it is called, forward and then backward.

AOTAutograd does the same and more, and takes several times as long.  Where this can write a graph it is the same.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar._compat import (
    FakeTensor,
    LazyGraphModule,
    QuickGraph,
    autograd_nodes,
    current_autograd_node,
    has_effects,
    is_dense_fake,
    sequence_number,
)
from autopar.captured import ASSERTIONS, copied
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.known_values import ActingError
from autopar.ownership import annotation, current_module
from autopar.views import Views, gives_views

if TYPE_CHECKING:
    from autopar.flat_module import FlatModule
    from autopar.records import KnownResults


class UnwritableError(Exception):
    """The model does something of which only AOTAutograd makes a graph."""


class GraphWriter:
    """Writes every op that it is told of.

    Attributes:
        module: the graph, with the constant tensors that the model holds on to; once it is finished.
        inputs, outputs: what its placeholders and its results are.
    """

    module: fx.GraphModule

    def __init__(self, flat: FlatModule, inputs: Sequence[torch.Tensor], known: KnownResults) -> None:
        self._known, self._graph = known, QuickGraph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # so that no two tensors have one id
        self._constants: dict[str, torch.Tensor] = {}
        self._modules: dict[int, str | None] = {}  # by the number of the node of autograd's graph that was made last
        self._views = Views()
        self._stale: set[int] = set()  # tensors whose memory has been written to since their nodes were written
        self._is_backward = False
        self._finished: int | None = None  # the node of autograd's graph that ran last
        self.inputs: tuple[GraphInput, ...] = flat.inputs
        self.outputs: tuple[GraphOutput, ...] = ()
        for tensor in inputs:
            self._placeholder(tensor)
        self._held = set(self._nodes)

    def _placeholder(self, tensor: torch.Tensor) -> None:
        node = self._graph.placeholder(f"captured_{len(self._nodes)}")
        node.meta = {"val": self._value(tensor)}
        self._name(tensor, node)

    def _value(self, tensor: torch.Tensor) -> FakeTensor:
        if not isinstance(tensor, FakeTensor) or not is_dense_fake(tensor):
            raise UnwritableError(f"a tensor that is no dense fake one: {type(tensor).__name__}")
        return self._known.like(tensor)

    def _name(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, value: Any) -> None:
        """Write a call of an op.

        Args:
            op, args, kwargs: the call.
            result: what it gave.
            value: fake tensors like that, for `meta["val"]`.

        Raises:
            ActingError: if it acts by something else than its result.
            UnwritableError: if it writes to an input, or to memory that has names of an unknown kind; or if it gives
                what depends on the values of tensors.
        """
        if op.namespace == "profiler":
            return
        if op not in ASSERTIONS and has_effects(op):
            raise ActingError(str(op))
        if op._schema.is_mutable:
            self._replace(op, args, kwargs, result)
            return
        if gives_views(op):
            self._views.note(op, args, kwargs, result if isinstance(result, (tuple, list)) else [result])
        if isinstance(result, torch.Tensor):
            if id(result) in self._nodes:  # nothing but what it was given
                return
            self._name(result, self._write(op, args, kwargs, value, result))
        elif isinstance(result, (tuple, list)):
            node = self._write(op, args, kwargs, value, *result)
            for index, one in enumerate(result):
                if one is not None:
                    self._name(one, self._item(node, index, value[index]))
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnwritableError(f"{op} reads the values of a tensor")
        elif result is None:
            self._write(op, args, kwargs, None)

    def _replace(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write a call that changes its first argument as one that gives a new tensor, which then goes by that name."""
        functional, names = _functional(op), self._views.names(result)
        upwards = self._views.upwards(result)
        if functional is None or result is not args[0] or upwards is None or names & self._held:
            raise UnwritableError(f"{op} writes in place")
        value, old = functional(*args, **kwargs), result
        if (value.shape, value.dtype) != (result.shape, result.dtype):
            raise UnwritableError(f"{op} writes other values in place than it would give")
        node = self._write(functional, args, kwargs, self._value(value), result)
        for view in upwards:
            old = view.source
            if (call := view.put_back(value)) is not None:
                scatter, given = call
                new = scatter(*given)
                written = (node if one is value else self._written(one) for one in given)
                node = self._place(scatter, tuple(written), {}, self._value(new))
                value = new
        if value.stride() != old.stride():
            raise UnwritableError(f"{op} writes in place to memory in another order than it would give")
        self._nodes[id(old)] = node
        self._stale |= names - {id(old)}

    def _renew(self, tensor: torch.Tensor) -> None:
        """Write the call again that makes a view of memory that has been written to."""
        view = self._views.made(tensor)
        if view is None:
            raise UnwritableError("an op writes in place to what is read by another name later")
        self._nodes[id(tensor)] = self._write(view.op, (view.source, *view.args), {}, self._value(tensor), tensor)
        self._stale.remove(id(tensor))

    def _write(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, *results: Any) -> fx.Node:
        if not all(one is None or is_dense_fake(one) for one in results):
            raise UnwritableError(f"{op} gives something else than dense fake tensors of known shapes")
        optional = _optional(op)
        named = {name: self._written(one) for name, one in kwargs.items() if one is not None or name not in optional}
        num_given = len(args)
        while num_given and args[num_given - 1] is None and op._schema.arguments[num_given - 1].name in optional:
            num_given -= 1  # as when the dispatcher passes a call on
        return self._place(op, tuple(map(self._written, args[:num_given])), named, value)

    def _place(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self._graph.create_node("call_function", op, args, kwargs, name=op.overloadpacket.__name__)
        node.meta = {"val": value, **self._origin()}
        return node

    def _item(self, node: fx.Node, index: int, value: Any) -> fx.Node:
        item = self._graph.create_node("call_function", operator.getitem, (node, index))
        item.meta = {**node.meta, "val": value}
        return item

    def _origin(self) -> dict[str, Any]:
        """What is known of the place of the op that runs: as in AOTAutograd's graphs a backward op comes from where the
        op was called whose gradient it computes."""
        if not self._is_backward:
            path = current_module()
            self._modules.setdefault(sequence_number() - 1, path)
            return annotation(path)
        node = current_autograd_node()
        at = None if node is None else node._sequence_nr()
        path = None if at is None or at == self._finished else self._modules.get(at)
        return {"partitioner_tag": "is_backward", **annotation(path)}

    def _written(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._stale:
                self._renew(value)
            return self._nodes.get(id(value)) or self._constant(value)
        if isinstance(value, (list, tuple)):
            return [self._written(one) for one in value]
        return value

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        """A node for a tensor that the model holds on to, or that it made of numbers."""
        if isinstance(tensor, FakeTensor):
            raise UnwritableError("a fake tensor of unknown origin")
        name = f"_tensor_constant{len(self._constants)}"
        self._constants[name] = tensor
        node = self._graph.create_node("get_attr", name)
        node.meta = {"val": self._known.mode.from_tensor(tensor), **self._origin()}
        self._name(tensor, node)
        return node

    def finish(self, flat: FlatModule, inputs: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]) -> None:
        """Write the backward pass, and what the graph gives.

        Args:
            flat: the model, which has run.
            inputs: its arguments.
            returned: what it returns, of `FlatModule.returned`.
        """
        results: list[tuple[GraphOutput, fx.Node | None]] = [
            (spec, copied(self._nodes[id(t)])) for spec, t in zip(flat.outputs, returned, strict=True)
        ]
        roots = [(spec, t) for spec, t in zip(flat.outputs, returned, strict=True) if t.requires_grad]
        trained = [(spec, t) for spec, t in zip(flat.inputs, inputs, strict=True) if t.requires_grad]
        if roots and trained:
            tangents = self._tangents([t for _, t in roots])
            self.inputs += tuple(GraphInput(InputKind.TANGENT, spec.path) for spec, _ in roots)
            given = self._backward([t for _, t in roots], [t for _, t in trained], tangents)
            for (spec, _), gradient in zip(trained, given, strict=True):
                node = None if gradient is None else self._written(gradient)
                results.append((GraphOutput(OutputKind.GRADIENT, spec.path), node))
        self.outputs = tuple(spec for spec, _ in results)
        self._graph.output(tuple(node for _, node in results))
        self.module = LazyGraphModule(self._constants, self._graph)

    def _backward(
        self, roots: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what is trained, each op on the way written."""
        self._is_backward = True
        hooks = [n.register_hook(self._finish_node) for n in autograd_nodes([root.grad_fn for root in roots])]
        try:
            with torch.autograd.set_multithreading_enabled(False):  # the modes that are active are this thread's
                return torch.autograd.grad(roots, trained, tangents, allow_unused=True)
        finally:
            for hook in hooks:  # else the nodes and this keep each other alive, unseen by Python's collector
                hook.remove()

    def _finish_node(self, *_gradients: object) -> None:
        """A node of autograd's graph has run: while it is still the current one, gradients that meet are summed."""
        self._finished = current_autograd_node()._sequence_nr()

    def _tangents(self, roots: Sequence[torch.Tensor]) -> list[FakeTensor]:
        """The gradients of what the model returns, as placeholders after the others."""
        first_call = self._graph.find_nodes(op="placeholder")[-1].next
        tangents = [self._value(root) for root in roots]
        with self._graph.inserting_before(first_call):
            for tangent in tangents:
                self._placeholder(tangent)
        return tangents


@functools.cache
def _functional(op: Any) -> Any | None:
    """The op that gives what `op` writes to its first argument; None if there is none."""
    name = op.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name[:-1], None) if op.namespace == "aten" and name.endswith("_") else None
    return getattr(packet, op._overloadname, None)


@functools.cache
def _optional(op: Any) -> frozenset[str]:
    """Names of arguments that are None unless they are given."""
    return frozenset(one.name for one in op._schema.arguments if one.has_default_value() and one.default_value is None)
