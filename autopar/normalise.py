"""Rewrite a traced graph into ops whose meaning does not depend on how their inputs are cut.

A mean over a cut dim divides by the local size, and a loss op hides a mean: both become sums and an explicit division
by the global count.  Ops that do nothing, and copies of ops that are there already, go.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import batch_norm, composites
from autopar._compat import OpOverload, core_decompositions, detect_fake_mode, tree_leaves
from autopar.captured import ASSERTIONS
from autopar.graph import JointGraph
from autopar.row_order import sort_within_rows

aten = torch.ops.aten


def normalise(joint: JointGraph) -> JointGraph:
    """Run every pass of `PASSES` on the graph, in place, and sort within each row of the batch where that may be.

    The passes keep results up to rounding, and every node's `"val"`, `"module"` and `"backward"`.
    """
    for graph_pass in PASSES:
        graph_pass(joint.module.graph)
    sort_within_rows(joint)
    joint.module.graph.lint()
    joint.module.recompile()
    return joint


# ---- passes ----


def drop_no_ops(graph: fx.Graph) -> None:
    """Replace ops that return their input as it is by the input."""
    for node in _calls(graph):
        if _is_no_op(node):
            _replace(node, node.args[0])
        elif node.target is aten.cat.default:
            pieces = [piece for piece in cast(list[fx.Node], node.args[0]) if piece.meta["val"].numel()]
            if len(pieces) == 1 and pieces[0].meta["val"].shape == node.meta["val"].shape:
                _replace(node, pieces[0])  # a cache that was empty joins nothing to the keys


def _is_no_op(node: fx.Node) -> bool:
    if node.target in _ALWAYS_NO_OP:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return False
    before, after = source.meta["val"], node.meta["val"]
    if node.target in _SAME_SHAPE_NO_OP:
        return tuple(before.shape) == tuple(after.shape)
    if node.target is aten._to_copy.default:
        same_kind = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
        return same_kind and node.kwargs.get("memory_format") in {None, torch.preserve_format}
    return False


_ALWAYS_NO_OP = {
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}  # fmt: skip
_SAME_SHAPE_NO_OP = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}


def drop_assertions(graph: fx.Graph) -> None:
    """Remove checks of values and of metadata: they return nothing, and on a shard they would see something else."""
    for node in _calls(graph):
        if node.target in ASSERTIONS:
            graph.erase_node(node)


def cancel_transposes(graph: fx.Graph) -> None:
    """Replace a transpose of a transpose of the same two dims by what was there first."""
    for node in _calls(graph):
        if node.target in {aten.t.default, aten.transpose.int}:
            inner = node.args[0]
            if isinstance(inner, fx.Node) and _swapped_dims(inner) == _swapped_dims(node):
                _replace(node, inner.args[0])


def _swapped_dims(node: fx.Node) -> frozenset[int] | None:
    """The two dims that a node transposes, or None if it does something else."""
    if node.target is aten.t.default:
        return frozenset({0, 1})
    if node.target is aten.transpose.int:
        ndim = node.meta["val"].ndim
        return frozenset(cast(int, dim) % ndim for dim in node.args[1:3])
    return None


def decompose_batch_ops(graph: fx.Graph) -> None:
    """Replace losses and batch norms, both passes, by pointwise ops, gathers and sums over the global batch."""
    for node in _calls(graph):
        decomposition = _loss_decompositions().get(node.target) or batch_norm.DECOMPOSITIONS.get(node.target)
        if decomposition is not None:
            replace_by_function(node, decomposition)


def decompose_composites(graph: fx.Graph) -> None:
    """Take apart the ops that have no rule, as far as that leads to ops that have one."""
    pending = list(_calls(graph))
    while pending:
        node = pending.pop()
        definition = composites.definition_of(node)
        if definition is not None:
            traced = _traced(node, definition)
            if composites.leads_on(traced.graph.nodes):
                pending += _place(node, traced)


def decompose_means(graph: fx.Graph) -> None:
    """Replace a mean by a sum and a division by the global count."""
    for node in _calls(graph):
        if node.target in {aten.mean.default, aten.mean.dim}:
            replace_by_function(node, _mean)


def merge_equal_nodes(graph: fx.Graph) -> None:
    """Let equal calls of deterministic ops be one node (common-subexpression elimination).

    A backward node is merged into a forward one only if it is a view, so that nothing more is saved in between.
    """
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in _calls(graph):
        if not _is_mergeable(node):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        for backward in {False, node.meta["backward"]} if _is_view(node) else {node.meta["backward"]}:
            if (key, backward) in seen:
                _replace(node, seen[key, backward])
                break
        else:
            seen[key, node.meta["backward"]] = node


def _is_mergeable(node: fx.Node) -> bool:
    """Whether two equal calls give equal results and do nothing else."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.full.default:
        return False  # equal by chance: one constant in two places would tie dims together that have nothing in common
    unmergeable = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
    return not node.target._schema.is_mutable and not unmergeable & set(node.target.tags)


def _is_view(node: fx.Node) -> bool:
    """Whether the node's result shares its input's memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_view(source)
    return bool(getattr(node.target, "is_view", False))


def _hashable(value: object) -> object:
    """Arguments as a value that equals only for the same arguments: `1`, `1.0` and `True` differ."""
    if isinstance(value, (tuple, list)):
        return tuple(_hashable(v) for v in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(value[key])) for key in sorted(value))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def drop_unused(graph: fx.Graph) -> None:
    """Remove nodes that no output needs."""
    graph.eliminate_dead_code()


def forget_device_index(graph: fx.Graph) -> None:
    """Name devices by type alone (`cuda`, not `cuda:3`), so that every rank has the same graph."""
    for node in _calls(graph):
        device = node.kwargs.get("device")
        if isinstance(device, torch.device) and device.index is not None:
            node.kwargs = {**node.kwargs, "device": torch.device(device.type)}


PASSES: tuple[Callable[[fx.Graph], None], ...] = (
    forget_device_index,
    drop_assertions,
    drop_no_ops,
    cancel_transposes,
    decompose_batch_ops,  # before the means: some losses become one
    decompose_composites,
    decompose_means,
    drop_no_ops,  # what the decompositions left
    merge_equal_nodes,
    drop_unused,
)


# ---- decompositions, as functions of tensors ----


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen sums values of `dtype`."""
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def _mean(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """`aten.mean`: a half-precision mean is summed in float32, where it cannot overflow."""
    result = dtype or x.dtype
    dims = [d % x.ndim for d in dim] if dim and x.ndim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=_accumulation_dtype(result))
    mean: Tensor = aten.div.Scalar(total, count)
    return mean if mean.dtype == result else mean.to(result)


_NONE, _MEAN = 0, 1  # how a loss op is told to reduce; 2 is the sum


def _nll_loss_forward(
    log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`aten.nll_loss_forward` and `nll_loss2d_forward`: the loss and the total weight of the targets that count."""
    class_dim = 0 if log_probs.ndim == 1 else 1
    wide = _accumulation_dtype(log_probs.dtype)
    valid = target != ignore_index
    index = torch.where(valid, target, 0)  # a target to ignore may be out of range
    picked = torch.gather(log_probs, class_dim, index.unsqueeze(class_dim)).squeeze(class_dim)
    losses = -picked if weight is None else -picked * aten.index.Tensor(weight, [index])
    losses = torch.where(valid, losses, 0)
    if reduction == _NONE:
        return losses, log_probs.new_zeros(())
    weights = valid if weight is None else torch.where(valid, aten.index.Tensor(weight, [index]), 0)
    total_weight = weights.sum().to(wide) if weight is None else weights.sum(dtype=wide)
    loss = losses.sum(dtype=wide)
    if reduction == _MEAN:
        loss = loss / total_weight
    return loss.to(log_probs.dtype), total_weight.to(log_probs.dtype)


def _nll_loss_backward(
    grad: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """`aten.nll_loss_backward` and `nll_loss2d_backward`, pointwise: no scatter, so the classes may be cut."""
    class_dim = 0 if log_probs.ndim == 1 else 1
    num_classes = log_probs.shape[class_dim]
    valid = target != ignore_index
    scale = -grad / total_weight if reduction == _MEAN else -grad
    if weight is not None:
        scale = scale * aten.index.Tensor(weight, [torch.where(valid, target, 0)])
    if scale.ndim == target.ndim:
        scale = scale.unsqueeze(class_dim)
    classes = torch.arange(num_classes, device=target.device)
    classes = classes.view([-1] + [1] * (log_probs.ndim - class_dim - 1))
    hit = (classes == target.unsqueeze(class_dim)) & valid.unsqueeze(class_dim)
    return torch.where(hit, scale, 0).to(log_probs.dtype)


@functools.cache
def _loss_decompositions() -> dict[Any, Callable[..., Any]]:
    """Definitions of loss ops by overload.  PyTorch's own serve for those that are pointwise before they reduce."""
    pointwise = ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"]
    names = [*pointwise, *(f"{name}_backward" for name in pointwise), "binary_cross_entropy_with_logits"]
    return {
        **core_decompositions([getattr(aten, name) for name in names]),
        aten.nll_loss_forward.default: _nll_loss_forward,
        aten.nll_loss2d_forward.default: _nll_loss_forward,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }


# ---- editing ----


def replace_by_function(node: fx.Node, function: Callable[..., Any]) -> None:
    """Put the ops of `function(*node.args, **node.kwargs)` in the node's place.

    `function` takes and returns tensors as the node's op does.  The new nodes belong to the node's module and pass.
    """
    _place(node, _traced(node, function))


def _traced(node: fx.Node, function: Callable[..., Any]) -> fx.GraphModule:
    """The graph of a function of a node's arguments, whose inputs are the nodes among them."""
    sources = list(dict.fromkeys(node.all_input_nodes))

    def call(*tensors: Any) -> Any:
        values = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        return function(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    mode = detect_fake_mode([*values, *tree_leaves(node.meta["val"])])
    assert mode is not None, f"{node} has no fake value to decompose it with"
    with mode, torch.no_grad():
        return make_fx(call)(*values)


def _place(node: fx.Node, traced: fx.GraphModule) -> list[fx.Node]:
    """Put a graph in a node's place; returns the new nodes."""
    graph = node.graph
    sources = list(dict.fromkeys(node.all_input_nodes))
    placed: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        results = graph.graph_copy(traced.graph, placed)
    for inner, outer in placed.items():
        if inner.op == "call_function":
            outer.meta = {"val": inner.meta["val"], "module": node.meta["module"], "backward": node.meta["backward"]}
        assert inner.op != "get_attr", f"the decomposition of {node} holds a constant tensor"
    if isinstance(results, (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem
            _replace(user, results[user.args[1]])  # type: ignore[index]
        graph.erase_node(node)
    else:
        _replace(node, results)
    return [outer for inner, outer in placed.items() if inner.op == "call_function"]


def _calls(graph: fx.Graph) -> Iterable[fx.Node]:
    """The nodes that call ops, as they are now; the graph may change meanwhile."""
    return [node for node in graph.nodes if node.op == "call_function"]


def _replace(node: fx.Node, value: Any) -> None:
    """Let the node's users use `value`, and remove the node."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
