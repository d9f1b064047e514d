"""Localise: from the global view to one rank's: local shapes, local size arguments, local lookups.

Preserves numerics exactly.  Placeholders for the rank's position along each mesh axis come in here; the reshards stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.local_ops import mask_padding, pad_dim
from autopar.mesh import Mesh
from autopar.passes.localise_by_group import OwnRows, open_size
from autopar.passes.localise_indices import Emitter, localise_groups, localise_lookup, set_arguments
from autopar.passes.localise_padding import pad_operands
from autopar.passes.reshard import is_reshard
from autopar.placement import ByGroup, Sharding, cuts, local_shape, meta_value
from autopar.rules import Call, OpRule

aten = torch.ops.aten
Found = TypeVar("Found")


class _LocalValues:
    """Gives the local counterpart of a traced value: a tensor on `meta` with one rank's shape."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[tuple[Any, ...], tuple[Sharding, torch.Tensor]] = {}

    def of(self, value: Any, sharding: Any) -> Any:
        """Of a tensor, or of each of several with its sharding."""
        if isinstance(value, torch.Tensor):
            # Most shardings are one object for all that lies alike, and hashing placements takes longer than the rest.
            key = (value.shape, value.dtype, id(sharding))
            if key not in self._known:
                local = meta_value(local_shape(value.shape, sharding, self.mesh), value.dtype)
                self._known[key] = sharding, local
            return self._known[key][1]
        if isinstance(value, (tuple, list)):
            return tuple([self.of(v, s) for v, s in zip(value, sharding, strict=True)])
        return value


def localise(module: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """Turn every op into the op that one rank runs."""
    graph = module.graph
    ranks = _rank_placeholders(graph, mesh)
    by_group, local_values = OwnRows(graph, ranks, mesh), _LocalValues(mesh)
    for node in list(graph.nodes):
        if node.op == "output" or node.meta["sharding"] is None:  # where this rank is
            continue
        value = node.meta["val"]
        node.meta["global_shape"] = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        node.meta["val"] = local_values.of(value, node.meta["sharding"])
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            if id(node.target) in _RESIZERS:
                _localise_sizes(graph, node)
            pad_operands(graph, node, ranks, mesh)
            if id(node.target) in _DENSE_ARGUMENTS:
                _make_dense(graph, node)
            by_group.localise(node)
            if node.target is torch.ops.autopar.uniform.default:
                _localise_random(node, ranks, mesh)
            rule = node.meta["rule"]
            if rule is not None and (rule.lookup or rule.groups):
                _localise_indices(graph, node, rule, ranks, mesh)
    return module


def _localise_indices(graph: fx.Graph, node: fx.Node, rule: OpRule, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Let what points at rows or counts groups of the whole point at and count those of this rank."""
    along = [(axis, cut) for axis, cut in enumerate(node.meta["cuts"]) if cut is not None]
    looked_up = [(axis, cut) for axis, cut in along if cut.factor in rule.lookup]
    if looked_up:
        localise_lookup(graph, node, rule.lookup[looked_up[0][1].factor], looked_up, ranks, mesh)
    grouped = [axis for axis, cut in along if cut.factor in rule.groups]
    if grouped:
        localise_groups(graph, node, grouped, ranks, mesh)


def _rank_placeholders(graph: fx.Graph, mesh: Mesh) -> dict[str, fx.Node]:
    last = graph.find_nodes(op="placeholder")[-1:]
    ranks: dict[str, fx.Node] = {}
    with graph.inserting_after(last[0]) if last else graph.inserting_before():
        for name in reversed(mesh.names):
            node = graph.placeholder(f"rank_{name}")
            node.meta = {"val": 0, "module": "", "backward": False, "sharding": None, "axis": name}
            ranks[name] = node
    return ranks


# ------------------------------------------------------------------------------------------------------ size arguments

Resizer = Callable[[fx.Node, Call, Sequence[Any]], None]
"""Given the local shape of the first output; a size that only the step knows is -1, or a node that gives it."""


def _localise_sizes(graph: fx.Graph, node: fx.Node) -> None:
    resize = _RESIZERS[id(node.target)]
    local, sharding = node.meta["val"], node.meta["sharding"]
    # Of several outputs the first that is there: a gradient that nobody wants is None.
    first = 0 if not isinstance(local, tuple) else next(i for i, v in enumerate(local) if v is not None)
    local, sharding = (local[first], sharding[first]) if isinstance(local, tuple) else (local, sharding)
    shape: list[Any] = [int(n) for n in local.shape]
    for dim in {p.dim for p in sharding if type(p) is ByGroup}:
        is_inferred = resize is _reshape or node.target is aten.expand.default
        shape[dim] = -1 if is_inferred else open_size(graph, node)
    resize(node, Call(node), shape)


def _reshape(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    # A local tensor may have other strides than the traced one, so a view that was possible may need a copy.
    node.target = aten.reshape.default
    node.args, node.kwargs = (call["self"], list(shape)), {}


def _size(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    set_arguments(node, call, size=list(shape))


def _split(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    dim = call.dim("dim", len(shape))
    node.target = aten.split_with_sizes.default
    node.args, node.kwargs = (call["self"], [int(v.shape[dim]) for v in node.meta["val"]], dim), {}


def _slice(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    dim = call.dim("dim", len(shape))
    source = call["self"]
    local, whole = source.meta["val"].shape[dim], source.meta["global_shape"][dim]
    if local != whole:
        bounds = {name: _scaled(call[name], local, whole) for name in ("start", "end")}
        set_arguments(node, call, **bounds)


def _scaled(position: int | None, local: int, whole: int) -> int | None:
    """A position at a multiple of the cut grain, in the local dim."""
    if position is None:
        return None
    return max(-whole, min(position, whole)) * local // whole


def _slice_backward(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    dim = call.dim("dim", len(shape))
    local, whole = shape[dim], int(call["input_sizes"][dim])
    start, end = _scaled(call["start"], local, whole), _scaled(call["end"], local, whole)
    set_arguments(node, call, input_sizes=list(shape), start=start, end=end)


def _input_sizes(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    set_arguments(node, call, input_sizes=list(shape))


def _embedding_backward(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    set_arguments(node, call, num_weights=shape[0])


def _num_groups(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    if call["groups"] > 1:
        set_arguments(node, call, groups=_share(call["groups"], call["input"]))


def _bias_size(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    _num_groups(node, call, shape)
    if call["bias_sizes"] is not None:
        set_arguments(node, call, bias_sizes=[int(call["grad_output"].meta["val"].shape[1])])


def _group_norm(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    images, channels, *_ = call["input"].meta["val"].shape
    set_arguments(node, call, N=int(images), C=int(channels), group=_share(call["group"], call["input"]))


def _share(num_groups: int, image: fx.Node) -> int:
    """How many of an image's groups of channels are here."""
    return num_groups * int(image.meta["val"].shape[1]) // int(image.meta["global_shape"][1])


def _input_size(node: fx.Node, call: Call, shape: Sequence[Any]) -> None:
    set_arguments(node, call, input_size=list(shape))


def _by_identity(by_op: dict[Any, Found]) -> dict[int, Found]:
    """A table of ops by their identity, since PyTorch works out an op's hash in Python."""
    return {id(op): found for op, found in by_op.items()}


_RESIZERS: dict[int, Resizer] = _by_identity({
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.unflatten.int: _reshape,
    aten.squeeze.default: _reshape,  # which would drop a dim that is cut down to one position
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _size,
    aten.full.default: _size,
    aten.zeros.default: _size,
    aten.ones.default: _size,
    aten.empty.memory_format: _size,
    aten.new_zeros.default: _size,
    aten.new_ones.default: _size,
    aten.new_full.default: _size,
    aten.new_empty.default: _size,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _input_sizes,
    aten.diagonal_backward.default: _input_sizes,
    aten.unfold_backward.default: _input_sizes,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.convolution.default: _num_groups,
    aten.convolution_backward.default: _bias_size,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm,
    aten.upsample_nearest1d_backward.default: _input_size,
    aten.upsample_nearest2d_backward.default: _input_size,
    aten.upsample_nearest3d_backward.default: _input_size,
    aten.upsample_linear1d_backward.default: _input_size,
    aten.upsample_trilinear3d_backward.default: _input_size,
    aten.upsample_bilinear2d_backward.default: _input_size,
    aten.upsample_bicubic2d_backward.default: _input_size,
})  # fmt: skip


_DENSE_ARGUMENTS: dict[int, tuple[str, ...]] = _by_identity({
    aten.native_layer_norm_backward.default: ("mean", "rstd"),
    aten._fused_rms_norm_backward.default: ("rstd",),
    aten.native_group_norm.default: ("input",),
    aten.native_group_norm_backward.default: ("grad_out", "input", "mean", "rstd"),
    aten._linalg_det.default: ("A",),
    aten._linalg_slogdet.default: ("A",),
    aten.adaptive_max_pool3d_backward.default: ("grad_output", "self", "indices"),
})  # fmt: skip
"""Arguments that PyTorch's kernels take to be dense without looking, or whose factors depend on the order in memory; a
slice along an inner dim is not dense."""


_ALIKE_ARGUMENTS: dict[int, tuple[str, ...]] = _by_identity(
    {aten.native_group_norm_backward.default: ("grad_out", "input")}
)
"""Arguments that PyTorch's kernels take to have one order in memory without looking: autograd has brought a gradient to
its input's, but what comes of a collective has an order of its own."""


def _make_dense(graph: fx.Graph, node: fx.Node) -> None:
    alike = _ALIKE_ARGUMENTS.get(id(node.target), ())
    for name in _DENSE_ARGUMENTS[id(node.target)]:
        source = Call(node)[name]
        if name in alike or is_reshard(source) or source.target in (pad_dim, mask_padding):
            with graph.inserting_before(node):
                node.replace_input_with(source, Emitter(graph, node)(aten.contiguous.default, (source,), source))


def _localise_random(node: fx.Node, ranks: dict[str, fx.Node], mesh: Mesh) -> None:
    """Tell a random op which part of the whole this rank draws."""
    part: list[Any] = []
    for cut in cuts(node.meta["sharding"], mesh):
        part += [cut.dim, cut.split, mesh.sizes[cut.axis], ranks[mesh.names[cut.axis]]]
    _, _, *rest = node.args
    node.args = (list(node.meta["val"].shape), part, *rest)
