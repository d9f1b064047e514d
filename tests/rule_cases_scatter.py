"""Calls of ops that write, sort or move along dims; see `rule_cases`."""

from __future__ import annotations

import torch
from rule_cases import Case, Random, case, f, i, whole, zeros

from autopar import grouped, sorted_rows  # noqa: F401  (registers ops and their rules)

aten = torch.ops.aten
C128 = torch.complex128


def cx(*shape: int) -> Random:
    """Complex numbers."""
    return Random(shape, dtype=C128)


def ends(*positions: int) -> torch.Tensor:
    """Where groups of rows end."""
    return torch.tensor(positions, dtype=torch.int32)


def orders(blocks: int, length: int) -> torch.Tensor:
    """For each block a permutation."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(length, generator=generator) for _ in range(blocks)])


def block_ends(blocks: int, *positions: int) -> torch.Tensor:
    """Where groups of rows end in each block: in every other one elsewhere."""
    other = [max(0, p - 1) for p in positions]
    return torch.tensor([other if i % 2 else positions for i in range(blocks)], dtype=torch.int32)


SCATTERS: list[Case] = [
    case(torch.ops.autopar.grouped_mm.default, f(36, 6), f(4, 6, 2), block_ends(12, 1, 1, 2, 3)),
    case(torch.ops.autopar.grouped_mm.default, f(2, 30), f(30, 6), block_ends(6, 1, 4, 5)),
    case(torch.ops.autopar.take_rows.default, f(24, 6), orders(12, 4), 2),
    case(torch.ops.autopar.take_rows.default, f(30), orders(6, 5), 1),
    case(torch.ops.autopar.put_rows.default, f(48, 6), orders(12, 4), 2),
    case(torch.ops.autopar.put_rows.default, f(30, 2, 3), orders(6, 5), 1),
    case(torch.ops.autopar.take_rows.default, f(24, 6), orders(12, 4), 2, block_ends(12, 1, 1, 2, 4)),
    case(torch.ops.autopar.put_rows.default, f(48, 6), orders(12, 4), 1, block_ends(12, 1, 1, 2, 4)),
    case(torch.ops.autopar.group_ends.default, i(6, 5, below=4).make(torch.Generator()).sort(1)[0], 4),
    case(torch.ops.autopar.grouped_mm.default, f(12, 6), f(4, 6, 2), ends(3, 3, 7, 12)),
    case(torch.ops.autopar.grouped_mm.default, f(6, 2), f(3, 2, 6), ends(0, 6, 6)),
    case(torch.ops.autopar.grouped_mm.default, f(2, 12), f(12, 6), ends(3, 3, 7, 12)),
    case(aten.sort.default, f(6, 5), -1),
    case(aten.sort.stable, f(5, 6), stable=True, dim=0),
    case(aten.topk.default, f(6, 5), 2),
    case(aten.topk.default, f(5, 6), 3, 0),
    case(aten.kthvalue.default, f(6, 5), 2),
    case(aten.median.dim, f(6, 5), 1),
    case(aten.mode.default, f(6, 5), 1),
    case(aten.max.dim, f(6, 5), 1),
    case(aten.max.dim, f(5, 6), 0, True),
    case(aten.min.dim, f(6, 5, 4), -2),
    case(aten.cummax.default, f(6, 5), 1),
    case(aten.cummin.default, f(5, 6), 0),
    case(aten.roll.default, f(6, 5), [2], [1]),
    whole(aten.roll.default, f(6, 4), [2]),
    case(aten.flip.default, f(6, 5, 4), [1]),
    case(aten._fft_c2c.default, cx(6, 5), [1], 0, True),
    case(aten._fft_r2c.default, f(6, 5), [1], 0, True),
    case(aten._fft_c2r.default, cx(6, 3), [1], 0, 5),
    case(aten.diagonal.default, f(6, 5, 4), 1, 1, -1),
    case(aten.diagonal_copy.default, f(5, 6, 4), 0, 0, 2),
    case(aten.diagonal_backward.default, f(6, 3), [6, 5, 4], 1, 1, -1),
    case(aten.unfold.default, f(6, 9, 4), 1, 3, 2),
    case(aten.unfold_backward.default, f(6, 4, 12, 3), [6, 9, 12], 1, 3, 2),
    case(aten.unfold_backward.default, f(1, 4, 12, 3), [6, 9, 12], 1, 3, 2),
    case(aten.searchsorted.Tensor, ends(1, 4, 7, 9), f(6, 12)),
    case(aten.searchsorted.Tensor, torch.arange(30.0).view(6, 5), f(6, 12)),
    whole(aten.searchsorted.Tensor, f(6, 5), f(6, 12), sorter=i(6, 5, below=5)),
    case(aten.scatter_reduce.two, f(6, 5), 1, i(6, 3, below=5), f(6, 3), "amax"),
    case(aten.glu.default, f(6, 10), 1),
    case(aten.glu_backward.default, f(6, 5), f(6, 10), 1),
    case(aten.repeat.default, f(6, 5), [1, 2]),
    case(aten.repeat.default, f(6, 5), [3, 1, 2]),
    case(aten.diagonal_scatter.default, f(6, 5, 4), f(6, 3), 1, 1, -1),
    case(aten.polar.default, f(6, 4), f(6, 4)),
    case(aten.complex.default, f(6, 4), f(4)),
    case(aten._neg_view.default, f(6, 4)),
    case(aten.view_as_real.default, cx(6, 4)),
    case(aten.view_as_complex.default, f(6, 4, 2)),
    case(aten.select_scatter.default, f(6, 5, 4), f(6, 4), 1, 2),
    case(aten.slice_scatter.default, f(6, 7), f(6, 3), 1, 2, 5),
    case(aten.scatter.src, f(6, 7), 1, i(6, 3, below=7), f(6, 3)),
    whole(aten.scatter.src, f(7, 6), 0, i(1, 4, below=7), f(1, 6)),
    case(aten.scatter.value, f(6, 7), 1, i(6, 1, below=7), 2.0),
    case(aten.scatter_add.default, f(6, 7), 1, i(6, 12, below=7), f(6, 12)),
    case(aten.index_add.default, f(7, 6), 0, i(4, below=7), f(4, 6)),
    case(aten.index_add.default, f(6, 7), 1, i(4, below=7), f(6, 4)),
    case(aten.scatter_add.default, zeros(7, 6), 0, i(12, 6, below=7), f(12, 6)),
    case(aten.scatter_add.default, zeros(6, 7), 1, i(6, 5, below=7), f(6, 9)),
    case(aten.scatter_reduce.two, zeros(7, 6), 0, i(12, 6, below=7), f(12, 6), "sum"),
    case(aten.scatter_reduce.two, f(7, 6), 0, i(12, 6, below=7), f(12, 6), "amin"),
    case(aten.scatter_reduce.two, zeros(6, 5), 1, i(6, 3, below=5), f(6, 3), "mean"),
    case(aten.scatter_reduce.two, f(6, 5), 1, i(6, 3, below=5), f(6, 3), "amax", include_self=False),
    case(aten.index_add.default, zeros(7, 6), 0, i(12, below=7), f(12, 6), alpha=2),
    case(aten.index_put.default, zeros(7, 6), [i(12, below=7)], f(12, 6), True),
    case(aten.index_put.default, zeros(7, 6), [i(12, below=7)], f(6)),
    case(aten.index_put.default, zeros(7), [i(12, below=7)], f(), True),
    case(aten.index_put.default, zeros(6, 7, 5, 4), [None, i(12, 1, below=7), i(6, below=5)], f(6, 12, 6, 1), True),
    case(aten.index_put.default, f(7, 6), [i(3, below=7)], f(3, 6)),
    case(aten.index_put.default, f(7, 6), [i(3, below=7)], f(3, 6), True),
    case(aten.index_put.default, f(6, 7, 4), [None, i(3, below=7)], f(6, 3, 4), True),
    case(aten.index_put.default, f(6, 7, 4), [None, i(3, below=7)], f(4), True),
    case(aten.index_put.default, f(7, 5, 6), [i(3, below=7), i(3, below=5)], f(3, 6), True),
    whole(aten.index_put.default, f(7, 6), [i(4, below=7)], f()),
    case(aten._unsafe_index_put.default, f(7, 6), [i(3, below=7)], f(3, 6), True),
    case(aten._unsafe_index.Tensor, f(7, 6), [i(4, below=7)]),
    case(aten.softplus_backward.default, f(6, 4), f(6, 4), 1.0, 20.0),
    case(aten.log_sigmoid_forward.default, f(6, 4)),
    case(aten.log_sigmoid_backward.default, f(6, 4), f(6, 4), f(6, 4)),
    case(aten._prelu_kernel.default, f(6, 4), f(1, 4)),
    case(aten._prelu_kernel_backward.default, f(6, 4), f(6, 4), f(1, 4)),
    case(aten._conj.default, cx(6, 4)),
    case(aten._conj_physical.default, cx(6, 4)),
    case(aten.resolve_conj.default, cx(6, 4)),
    case(aten.fill.Tensor, f(6, 4), f()),
    case(aten.fill.Scalar, f(6, 4), 2.0),
    case(aten.floor_divide.default, i(6, 4, below=12), i(4, below=12)),
    case(aten.floor_divide.Scalar, i(6, 4, below=12), 3),
]
