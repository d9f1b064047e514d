"""Decompose: take apart the ops that a plan cuts along a factor which they need whole.

Changes rounding.  A softmax over a cut vocabulary becomes a maximum, a sum and pointwise ops, each of which can be cut
(this is Megatron-LM's vocabulary-parallel cross entropy); a product or convolution with a bias, contracted over a cut
factor, becomes one without and a sum, so that the bias is added once.  Ops that the plan leaves whole stay fused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule, QuickGraph
from autopar.factors import Factor, FactorAnalysis, may_be_padded, ranked
from autopar.graph import JointGraph, copy_node
from autopar.passes.one_hot import sum_of_one_hot
from autopar.plan import EXPERTS, SENT, Plan
from autopar.rules import Call, OpRule
from autopar.writer import Writer

aten = torch.ops.aten


def _addmm(call: Call, write: Writer) -> fx.Node:
    batched = call.op is aten.baddbmm.default
    left, right = (call["batch1"], call["batch2"]) if batched else (call["mat1"], call["mat2"])
    product = write((aten.bmm if batched else aten.mm).default, left, right)
    if call["alpha"] != 1:
        product = write(aten.mul.Scalar, product, call["alpha"])
    bias = call["self"] if call["beta"] == 1 else write(aten.mul.Scalar, call["self"], call["beta"])
    return write(aten.add.Tensor, product, bias)


def _convolution(call: Call, write: Writer) -> fx.Node:
    arguments = [value for name, value in call.args.items() if name not in ("input", "weight", "bias")]
    product = write(aten.convolution.default, call["input"], call["weight"], None, *arguments)
    shape = [-1, *[1] * len(call["stride"])]
    return write(aten.add.Tensor, product, write(aten.view.default, call["bias"], shape))


def _convolution_backward(call: Call, write: Writer) -> tuple[fx.Node | None, ...]:
    wanted = [*call["output_mask"][:2], False]
    arguments = {**call.args, "bias_sizes": None, "output_mask": wanted}
    both = write(call.op, *arguments.values())
    gradients = (
        write.place(operator.getitem, (both, i), {}, both.meta["val"][i]) if wanted[i] else None for i in range(2)
    )
    gradient = call["grad_output"]
    return (*gradients, write(aten.sum.dim_IntList, gradient, [0, *range(2, gradient.meta["val"].dim())]))


def _shifted(call: Call, write: Writer) -> tuple[fx.Node, fx.Node, list[int]]:
    """The input less its maximum, and the sum of its exponentials."""
    value, dims = call["self"], [int(call["dim"])]
    if call.args.get("half_to_float"):
        value = write(aten._to_copy.default, value, dtype=torch.float32)
    shifted = write(aten.sub.Tensor, value, write(aten.amax.default, value, dims, True))
    return shifted, write(aten.exp.default, shifted), dims


def _log_softmax(call: Call, write: Writer) -> fx.Node:
    shifted, exponential, dims = _shifted(call, write)
    total = write(aten.sum.dim_IntList, exponential, dims, True)
    pick = _first_pick(write.node, dims[0], total)
    if pick is None:
        return write(aten.sub.Tensor, shifted, write(aten.log.default, total))
    # One number of each row is picked before the sum is used, so that both sums over a cut dim can travel together.
    with pick.graph.inserting_before(pick):
        picked = write(aten.gather.default, shifted, *pick.args[1:])
        log = write(aten.log.default, total)
        result = write(aten.sub.Tensor, shifted, log)
        pick.replace_all_uses_with(write(aten.sub.Tensor, picked, log))
    pick.graph.erase_node(pick)
    return result


def _first_pick(node: fx.Node, dim: int, total: fx.Node) -> fx.Node | None:
    """The first reader of `node`, if it takes one number along `dim` from each place where `total` has one."""
    first = min(node.users, default=node)
    if first.target is not aten.gather.default or first.meta["backward"] != node.meta["backward"]:
        return None
    source, along, index = first.args
    picks = source is node and (along - dim) % node.meta["val"].ndim == 0  # type: ignore[operator]
    return first if picks and index.meta["val"].shape == total.meta["val"].shape else None  # type: ignore[union-attr]


def _softmax(call: Call, write: Writer) -> fx.Node:
    _, exponential, dims = _shifted(call, write)
    return write(aten.div.Tensor, exponential, write(aten.sum.dim_IntList, exponential, dims, True))


def _log_softmax_backward(call: Call, write: Writer) -> fx.Node:
    gradient, dim = call["grad_output"], int(call["dim"])
    total = sum_of_one_hot(gradient, dim, write) or write(aten.sum.dim_IntList, gradient, [dim], True)
    spread = write(aten.mul.Tensor, write(aten.exp.default, call["output"]), total)
    return _as_input(call, write(aten.sub.Tensor, call["grad_output"], spread), write)


def _softmax_backward(call: Call, write: Writer) -> fx.Node:
    weighted = write(aten.mul.Tensor, call["grad_output"], call["output"])
    total = write(aten.sum.dim_IntList, weighted, [int(call["dim"])], True)
    return _as_input(call, write(aten.sub.Tensor, weighted, write(aten.mul.Tensor, call["output"], total)), write)


def _as_input(call: Call, gradient: fx.Node, write: Writer) -> fx.Node:
    if gradient.meta["val"].dtype == call["input_dtype"]:
        return gradient
    return write(aten._to_copy.default, gradient, dtype=call["input_dtype"])


DECOMPOSITIONS: dict[Any, Callable[[Call, Writer], fx.Node | tuple[fx.Node | None, ...]]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}


def freed(node: fx.Node, rule: OpRule) -> frozenset[str]:
    """The factors that an op needs whole and its parts, once it is taken apart, do not."""
    if node.target in (aten.convolution.default, aten.convolution_backward.default):
        return rule.whole & {"c"} if Call(node)["groups"] == 1 else frozenset()
    return rule.whole if node.target in DECOMPOSITIONS else frozenset()


def cut_whole(joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> tuple[fx.Node, ...]:
    """The ops that can be taken apart and that the plan would cut along a factor which they need whole."""
    wanted = [ranked(analysis, (ref for ref in refs if ref.label not in (EXPERTS, SENT))) for refs in plan.factors]
    if not any(wanted):
        return ()
    find = joint.module.graph.find_nodes
    nodes = sorted(node for op in DECOMPOSITIONS for node in find(op="call_function", target=op, sort=False))
    return tuple(n for n in nodes if _is_cut(n, analysis, wanted, plan))


def decompose(joint: JointGraph, nodes: Iterable[fx.Node], folded: JointGraph | None = None) -> JointGraph:
    """A copy of the graph in which these nodes are taken apart; traced values are shared.

    If the graph was unfolded, `folded` is the folded one in which the same nodes were taken apart.
    """
    graph = QuickGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.module.graph.nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    for node in nodes:
        whole = copies[node]
        with graph.inserting_before(whole):
            write = Writer(whole)
            parts = DECOMPOSITIONS[whole.target](Call(whole), write)
        for number, part in enumerate(write.written):
            part.meta["held"] = (whole.meta.get("held"), number)
        _replace(whole, parts)
    return replace(joint, module=LazyGraphModule(joint.module, graph), folded=folded, derived={})


def _replace(whole: fx.Node, parts: fx.Node | tuple[fx.Node | None, ...]) -> None:
    """Let the readers of a node, or of each of its outputs, read what takes its place."""
    if isinstance(parts, fx.Node):
        whole.replace_all_uses_with(parts)
    else:
        for reader in list(whole.users):
            part = parts[reader.args[1]]  # type: ignore[index]
            assert part is not None, f"{reader} reads a gradient that {whole} does not give"
            reader.replace_all_uses_with(part)
            whole.graph.erase_node(reader)
    whole.graph.erase_node(whole)


def _is_cut(node: fx.Node, analysis: FactorAnalysis, wanted: Sequence[Mapping[Factor, int]], plan: Plan) -> bool:
    """Whether, along some axis, the factor that the plan wants most in this op is one the op needs whole."""
    rule = analysis.rules.get(node)
    if rule is None or not (free := freed(node, rule)):
        return False
    for places, refs, size in zip(wanted, plan.factors, plan.mesh.sizes, strict=True):
        padded = may_be_padded(analysis, refs)
        parts = (
            (f, name)
            for name, split, f in analysis.parts(node)
            if f in places
            and (
                f.size % size == 0
                or (f in padded and rule.may_be_uneven(name, split, rule.sizes[name] // (split * f.size)))
            )
        )
        found = [(places[f], name in free) for f, name in parts if name in free or name not in rule.whole]
        if found and min(found, key=lambda pair: pair[0])[1]:
            return True
    return False
