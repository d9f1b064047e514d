"""Rules of ops that do something to each matrix, or each sequence, of a batch of them."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules import Call, Dims, OpRule, argument_names, build, derives
from autopar.rules_view import names, opaque

aten = torch.ops.aten


@derives(
    aten.cholesky_inverse.default,
    aten.cholesky_solve.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_eigh.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_qr.default,
    aten.linalg_slogdet.default,
    aten.linalg_solve_triangular.default,
    aten._linalg_det.default,
    aten._linalg_eigh.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
    aten.lu_unpack.default,
)
def of_matrices(call: Call) -> OpRule:
    """Linear algebra of whole matrices: the dims in front of them may be cut, where all tensors have the same."""
    batch = call.shape(call.named[0][0])[:-2]
    given = [node.meta["val"].shape for _, node in call.named]
    made = [value.shape if isinstance(value, torch.Tensor) else None for value in call.outputs]
    if any(tuple(shape[: len(batch)]) != batch for shape in (*given, *made) if shape not in (None, _NOTHING)):
        return opaque(call)
    lead = tuple((f,) for f in names(len(batch)))

    def dims(shape: Any) -> Dims:
        return ((),) if shape == _NOTHING else (*lead, *(() for _ in range(len(shape) - len(batch))))

    inputs: dict[str, Dims | list[Dims]] = {name: dims(node.meta["val"].shape) for name, node in call.named}
    even = names(len(batch)) if call.op in _OF_FACTORS else []
    return build(call, inputs, [() if shape is None else dims(shape) for shape in made], even=even)


_NOTHING = torch.Size([0])
"""The shape of an output that was not asked for."""

_OF_FACTORS = {aten.cholesky_inverse.default, aten.linalg_lu_solve.default, aten.lu_unpack.default}
"""Refuse padding: zeros are no rows that were exchanged, and no factor of an invertible matrix."""


@derives(aten._cdist_forward.default)
def distances(call: Call) -> OpRule:
    """From each point to each; a point's coordinates stay whole."""
    lead = tuple((f,) for f in names(len(call.out_shape) - 2))
    if call.shape("x1")[:-2] != call.shape("x2")[:-2]:
        return opaque(call)
    inputs: dict[str, Dims | list[Dims]] = {"x1": (*lead, ("p",), ("m",)), "x2": (*lead, ("r",), ("m",))}
    return build(call, inputs, [(*lead, ("p",), ("r",))], whole=["m"])


@derives(aten._cdist_backward.default)
def distances_backward(call: Call) -> OpRule:
    """The gradient of one side's points, summed over the other's."""
    lead = tuple((f,) for f in names(len(call.out_shape) - 2))
    pairs: Dims = (*lead, ("p",), ("r",))
    if call.shape("x1")[:-2] != call.shape("x2")[:-2]:
        return opaque(call)
    gradient = argument_names(call.op)[0]  # PyTorch 2.14 has named it anew
    inputs: dict[str, Dims | list[Dims]] = {
        gradient: pairs,
        "x1": (*lead, ("p",), ("m",)),
        "x2": (*lead, ("r",), ("m",)),
        "cdist": pairs,
    }
    return build(call, inputs, [(*lead, ("p",), ("m",))], whole=["m"], linear=[[gradient]])
