"""Calls of ops of each matrix or sequence of a batch; see `rule_cases`."""

from __future__ import annotations

import torch
from rule_cases import Case, case, f, i, whole

aten, ours = torch.ops.aten, torch.ops.autopar


def lengths(*each: int) -> torch.Tensor:
    return torch.tensor(each)


BATCHED: list[Case] = [
    case(aten.cholesky_inverse.default, f(6, 3, 3)),
    case(aten.cholesky_solve.default, f(6, 3, 2), f(6, 3, 3), True),
    case(aten.linalg_cholesky_ex.default, f(6, 3, 3)),
    case(aten.linalg_eigh.default, f(6, 3, 3)),
    case(aten.linalg_householder_product.default, f(2, 3, 5, 4), f(2, 3, 4)),
    case(aten.linalg_inv_ex.default, f(6, 3, 3)),
    case(aten.linalg_lu.default, f(6, 4, 3)),
    case(aten.linalg_lu_factor_ex.default, f(6, 3, 3)),
    case(aten.linalg_lu_solve.default, f(6, 3, 3), torch.tensor([[1, 2, 3], [3, 2, 3]] * 3).int(), f(6, 3, 2)),
    whole(aten.linalg_lu_solve.default, f(3, 3), torch.tensor([1, 2, 3]).int(), f(6, 3, 2)),
    case(aten.linalg_matrix_exp.default, f(6, 3, 3)),
    case(aten.linalg_qr.default, f(6, 4, 3)),
    case(aten.linalg_slogdet.default, f(6, 3, 3)),
    case(aten.linalg_solve_triangular.default, f(6, 3, 3), f(6, 3, 2), upper=True),
    whole(aten.linalg_solve_triangular.default, f(3, 3), f(6, 3, 2), upper=False),
    case(aten._linalg_det.default, f(6, 3, 3)),
    case(aten._linalg_eigh.default, f(6, 3, 3)),
    case(aten._linalg_slogdet.default, f(6, 3, 3)),
    case(aten._linalg_solve_ex.default, f(6, 3, 3), f(6, 3, 2)),
    case(aten._linalg_svd.default, f(6, 4, 3)),
    case(aten.lu_unpack.default, f(6, 3, 3), torch.tensor([[1, 2, 3], [3, 2, 3]] * 3).int()),
    case(aten.lu_unpack.default, f(6, 3, 3), torch.tensor([[1, 2, 3], [3, 2, 3]] * 3).int(), True, False),
    case(aten._cdist_forward.default, f(6, 4, 3), f(6, 12, 3), 2.0, None),
    whole(aten._cdist_forward.default, f(6, 4, 3), f(1, 12, 3), 2.0, None),
    case(aten._cdist_backward.default, f(6, 4, 12), f(6, 4, 3), f(6, 12, 3), 2.0, f(6, 4, 12)),
    whole(aten._cdist_backward.default, f(6, 4, 12), f(6, 4, 3), f(1, 12, 3), 2.0, f(6, 4, 12)),
    case(ours.ctc_loss.default, f(8, 6, 5), i(6, 3, below=4), lengths(*[8] * 6), lengths(*[3] * 6), 4, False),
    case(ours.ctc_loss.default, f(8, 6, 5), i(6, 3, below=4), lengths(*[8, 7] * 3), lengths(*[1, 2] * 3), 4, False),
    case(
        ours.ctc_loss_backward.default,
        f(6), f(8, 6, 5), i(6, 3, below=4), lengths(*[8] * 6), lengths(*[3] * 6), f(6), f(6, 8, 7), 4, False,
    ),
]  # fmt: skip
