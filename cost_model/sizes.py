"""The sizes of a model by name, and the local dims of a program as products of them.

A factor class gets a name from where it occurs: `batch`, `seq`, `vocab`, `positions` and `hidden` from the inputs and
the lookup tables, `heads` and `head_dim` from attention, `ffn` and `features` from the remaining dims of parameters.
Classes of one kind and size, such as the `ffn` of every layer, are one symbol; another size of the kind is `ffn_2`.
Factors without a name, such as the 3 of a fused QKV weight, stay numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import fx

from autopar.cost_model.products import Product, constant, product, symbol
from autopar.factors import Factor, FactorAnalysis, leaves, source_of
from autopar.graph import JointGraph
from autopar.mesh import Mesh
from autopar.placement import Sharding, is_sharded, shard_dim
from autopar.program import COLLECTIVE_KINDS, collective_axis
from autopar.rules import tensor_inputs

Dims = tuple[Product, ...]


class SizeNames:
    """Names of the factor classes of one joint graph.

    Attributes:
        values: the traced size of each name.
    """

    def __init__(self, joint: JointGraph, analysis: FactorAnalysis) -> None:
        self.values: dict[str, int] = {}
        self._analysis = analysis
        self._factors: dict[int, Product] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._name_inputs(joint)
        self._name_tables(joint)
        self._name_attention()
        self._name_parameters(joint)

    def dims(self, node: fx.Node, output: int = 0) -> Dims:
        """The global dims of a traced value."""
        source, index = source_of(node, output)
        return tuple(product(map(self._factor, leaves([f]))) for f in self._analysis.dims[source, index])

    def _factor(self, factor: Factor) -> Product:
        return self._factors.get(id(factor)) or constant(factor.size)

    def _is_named(self, parts: Sequence[Factor]) -> bool:
        return any(id(part) in self._factors for part in parts)

    def _name(self, label: str, parts: Sequence[Factor]) -> None:
        """Name the product of some factors; the largest carries the name, and the others are numbers."""
        whole = math.prod(part.size for part in parts)
        if whole == 1 or self._is_named(parts):
            return
        name = self._names.get((label, whole))
        if name is None:
            count = sum(known == label for known, _ in self._names) + 1
            name = label if count == 1 else f"{label}_{count}"
            self._names[label, whole] = name
            self.values[name] = whole
        carrier = max(parts, key=lambda part: part.size)
        for part in parts:
            self._factors[id(part)] = constant(part.size)
        self._factors[id(carrier)] = symbol(name).times(Fraction(carrier.size, whole))

    def _name_inputs(self, joint: JointGraph) -> None:
        nodes = {path: self._analysis.anchors[f"input:{path}"] for path in joint.batch_dims}
        for path, node in nodes.items():
            self._name("batch", self._analysis.dim_factors(node, joint.batch_dims[path]))
        in_params = {
            id(factor)
            for node in joint.param_nodes().values()
            for dim in range(node.meta["val"].dim())
            for factor in self._analysis.dim_factors(node, dim)
        }
        for node in nodes.values():
            for dim in range(node.meta["val"].dim()):
                parts = self._analysis.dim_factors(node, dim)
                if parts and not self._is_named(parts) and not any(id(part) in in_params for part in parts):
                    self._name("seq", parts)

    def _name_tables(self, joint: JointGraph) -> None:
        inputs = {self._analysis.anchors[f"input:{path}"] for path in joint.batch_dims}
        for node in joint.param_nodes().values():
            rules = {user: self._analysis.rules.get(user) for user in node.users}
            lookups = [user for user, rule in rules.items() if rule is not None and rule.lookup]
            if lookups and node.meta["val"].dim() == 2:
                is_vocab = any(inputs & set(user.all_input_nodes) for user in lookups)
                self._name("vocab" if is_vocab else "positions", self._analysis.dim_factors(node, 0))
                self._name("hidden", self._analysis.dim_factors(node, 1))
        # A loss looks its targets up in the logits, whose vocabulary a head of its own does not share with a table.
        for node, rule in self._analysis.rules.items():
            for factor in rule.lookup:
                parts = self._analysis.rule_factors(node, factor)
                if ("vocab", math.prod(part.size for part in parts)) in self._names:
                    self._name("vocab", parts)

    def _name_attention(self) -> None:
        for node in self._analysis.rules:
            if "scaled_dot_product" in str(node.target):
                query = next(n for n in node.all_input_nodes if n.meta["val"].dim() >= 4)
                rank = query.meta["val"].dim()
                self._name("heads", self._analysis.dim_factors(query, rank - 3))
                self._name("head_dim", self._analysis.dim_factors(query, rank - 1))

    def _name_parameters(self, joint: JointGraph) -> None:
        hidden = {name for (label, _), name in self._names.items() if label == "hidden"}
        for node in joint.param_nodes().values():
            dims = range(min(2, node.meta["val"].dim()))  # what a convolution has beyond them is its kernel
            if len(dims) < 2:
                continue
            beside = {name for one in self.dims(node) for name, _ in one.powers}
            for dim in dims:
                self._name("ffn" if beside & hidden else "features", self._analysis.dim_factors(node, dim))


class LocalSizes:
    """Local dims of every value of a program's graphs, as products that are exact at the traced sizes."""

    def __init__(self, joint: JointGraph, names: SizeNames, mesh: Mesh) -> None:
        self.values = {**names.values, **{axis_symbol(n): size for n, size in zip(mesh.names, mesh.sizes, strict=True)}}
        self._names, self._mesh = names, mesh
        self._traced = {node.name: node for node in joint.module.graph.nodes}
        self._global: dict[fx.Node, Dims] = {}
        self._local: dict[fx.Node, tuple[Dims, ...]] = {}

    def add(self, graph: fx.Graph) -> None:
        """Work out the values of a graph, in program order."""
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self._local[node] = (self._tensor(node, value),)
            elif isinstance(value, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in value):
                self._local[node] = tuple(self._output(node, i, v) for i, v in enumerate(value))

    def dims(self, node: fx.Node) -> Dims:
        """Local dims of a tensor."""
        return self._local[node][0]

    def outputs(self, node: fx.Node) -> tuple[Dims, ...]:
        """Local dims of each tensor that a node returns; none for a number."""
        return self._local.get(node, ())

    def _output(self, node: fx.Node, index: int, value: torch.Tensor) -> Dims:
        traced, sharding = self._traced.get(node.name), node.meta.get("sharding")
        if traced is None or not sharding:
            return tuple(map(constant, value.shape))
        return self._cut(self._names.dims(traced, index), sharding[index], value)

    def _tensor(self, node: fx.Node, value: torch.Tensor) -> Dims:
        shape, sharding = node.meta.get("global_shape"), node.meta.get("sharding")
        if shape is not None and (known := self._global_dims(node, tuple(shape))) is not None:
            self._global[node] = known
            if sharding is not None and len(known) == value.dim():
                return self._cut(known, sharding, value)
        return self._moved(node, value)

    def _global_dims(self, node: fx.Node, shape: tuple[int, ...]) -> Dims | None:
        """Those of the traced value of this name; for an op that the rewrite made, those that its rule takes from its
        operands, or an operand of the same global shape, or dim by dim what an operand has of the size in the same
        place, counted from the right."""
        traced = self._traced.get(node.name)
        if traced is not None and isinstance(v := traced.meta.get("val"), torch.Tensor) and tuple(v.shape) == shape:
            return self._names.dims(traced)
        operands = [(self._global[n], n.meta["global_shape"]) for n in node.all_input_nodes if n in self._global]
        if not operands:
            return None
        by_factor = self._by_factor(node)
        if by_factor is None:
            for dims, given in operands:
                if tuple(given) == shape:
                    return dims
        known: list[Product] = []
        for place in range(-len(shape), 0):
            if by_factor is not None and (one := by_factor[place]) is not None:
                known.append(one)
                continue
            fits = (d[place] for d, s in operands if len(s) >= -place and s[place] == shape[place])
            known.append(next(fits, constant(shape[place])))
        return tuple(known)

    def _by_factor(self, node: fx.Node) -> list[Product | None] | None:
        """For each dim of the result, the operand's dim that stands for the same factors in the op's rule."""
        rule = node.meta.get("rule")
        if rule is None or len(rule.outputs) != 1:
            return None
        known: dict[tuple[str, ...], Product] = {}
        for operand, dims in zip(tensor_inputs(node), rule.inputs, strict=False):
            if operand in self._global and len(self._global[operand]) == len(dims):
                known.update(
                    (tuple(factors), one) for factors, one in zip(dims, self._global[operand], strict=True) if factors
                )
        return [known.get(tuple(factors)) for factors in rule.outputs[0]]

    def _cut(self, dims: Dims, sharding: Sharding, value: torch.Tensor) -> Dims:
        local = list(dims)
        for name, placement in zip(self._mesh.names, sharding, strict=True):
            if is_sharded(placement):
                local[shard_dim(placement)] /= symbol(axis_symbol(name))
        return tuple(self._exact(one, int(size)) for one, size in zip(local, value.shape, strict=True))

    def _exact(self, one: Product, size: int) -> Product:
        value = one.at(self.values)
        if value == size:
            return one
        return one.times(size / value) if value else constant(size)

    def _moved(self, node: fx.Node, value: torch.Tensor) -> Dims:
        """What the lowering makes between two placements: its operand's elements in another shape, perhaps of more
        ranks or fewer."""
        shape = tuple(int(n) for n in value.shape)
        operand = next((n for n in node.all_input_nodes if n in self._local and len(self._local[n]) == 1), None)
        if operand is None or not shape:
            return tuple(map(constant, shape))
        dims, before = self.dims(operand), tuple(int(n) for n in operand.meta["val"].shape)
        axis = collective_axis(node) if node.target in COLLECTIVE_KINDS else None
        if len(before) == len(shape):
            return tuple(self._resized(d, b, s, axis) for d, b, s in zip(dims, before, shape, strict=True))
        rest = tuple(map(constant, shape[1:]))
        whole = self._resized(product(dims), math.prod(before), math.prod(shape), axis)
        return (whole / product(rest) if math.prod(shape) else constant(shape[0]), *rest)

    def _resized(self, one: Product, before: int, after: int, axis: str | None) -> Product:
        """A dim that became larger or smaller, by the size of a mesh axis if there is one that fits."""
        if before == after:
            return one
        for name in (axis,) if axis is not None else self._mesh.names:
            size = self._mesh.size(name)
            if before * size == after:
                return one * symbol(axis_symbol(name))
            if after * size == before:
                return one / symbol(axis_symbol(name))
        return self._exact(one, after)


def axis_symbol(name: str) -> str:
    """The symbol of a mesh axis's size."""
    return f"ranks_{name}"
