"""Decompose: take apart the ops that a plan cuts along a factor which they need whole.

Changes rounding.  A softmax over a cut vocabulary becomes a maximum, a sum and pointwise ops, each of which can be cut
(this is Megatron-LM's vocabulary-parallel cross entropy); a product with a bias, contracted over a cut factor, becomes
a
product and a sum, so that the bias is added once.  Ops that the plan leaves whole stay fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.factors import FactorAnalysis
from autopar.graph import JointGraph
from autopar.plan import Plan
from autopar.rules import Call
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
    return write(aten.sub.Tensor, shifted, write(aten.log.default, total))


def _softmax(call: Call, write: Writer) -> fx.Node:
    _, exponential, dims = _shifted(call, write)
    return write(aten.div.Tensor, exponential, write(aten.sum.dim_IntList, exponential, dims, True))


def _log_softmax_backward(call: Call, write: Writer) -> fx.Node:
    total = write(aten.sum.dim_IntList, call["grad_output"], [int(call["dim"])], True)
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


DECOMPOSITIONS: dict[Any, Callable[[Call, Writer], fx.Node]] = {
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}


def decompose(joint: JointGraph, analysis: FactorAnalysis, plan: Plan) -> bool:
    """Take apart, in place, every op that the plan cuts along a factor it needs whole; whether there were any."""
    classes = [[analysis.find(ref) for ref in refs] for refs in plan.factors]
    found = [n for n in joint.module.graph.nodes if n.target in DECOMPOSITIONS and _is_cut(n, analysis, classes, plan)]
    for node in found:
        with joint.module.graph.inserting_before(node):
            new = DECOMPOSITIONS[node.target](Call(node), Writer(node))
        node.replace_all_uses_with(new)
        joint.module.graph.erase_node(node)
    return bool(found)


def _is_cut(node: fx.Node, analysis: FactorAnalysis, classes: list[list[Any]], plan: Plan) -> bool:
    """Whether, along some axis, the factor that the plan wants most in this op is one the op needs whole."""
    rule = analysis.rules.get(node)
    if rule is None:
        return False
    for wanted, size in zip(classes, plan.mesh.sizes, strict=True):
        best: tuple[int, bool] | None = None
        for name in rule.factors:
            for factor in analysis.rule_factors(node, name):
                position = next((i for i, f in enumerate(wanted) if f is factor), None)
                if position is not None and factor.size % size == 0 and (best is None or position < best[0]):
                    best = (position, name in rule.whole)
        if best and best[1]:
            return True
    return False
