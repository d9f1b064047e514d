"""Grouped products, as mixtures of experts use them: rows in groups one after another, a matrix for each group.

PyTorch's op and those that libraries register for it become one op of autopar's, which has a rule, runs in every
dtype, and so can be verified in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.rules import Call, OpRule, RowsOfGroups, build, derives

aten = torch.ops.aten


def _multiply(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Grouped products of one block of rows, by PyTorch's kernel where it has one."""
    has_rows = a.numel() and b.numel()  # a rank may have none
    if a.is_cuda and a.dtype == torch.bfloat16 and has_rows and _is_aligned(a) and _is_aligned(b):
        return torch.nn.functional.grouped_mm(a, b, offs=ends.to(torch.int32))
    return _define(a, b, ends)


def _define(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The same in any dtype; it reads the values of `ends`."""
    bounds = [0, *ends.tolist()]
    spans = list(itertools.pairwise(bounds))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
    products = [a[start:end] @ matrix for (start, end), matrix in zip(spans, b, strict=True)]
    return torch.cat([*products, a.new_zeros(a.shape[0] - bounds[-1], b.shape[-1])])


def _is_aligned(matrix: Tensor) -> bool:
    """Whether PyTorch's kernel takes it: dense along one of the last two dims, steps along others of whole 16 bytes."""
    strides = sorted(matrix.stride()[-2:])
    steps = [*matrix.stride()[:-2], strides[1]]
    whole = all(step * matrix.element_size() % 16 == 0 for step in steps)
    return strides[0] == 1 and whole and matrix.data_ptr() % 16 == 0


@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products of groups: of rows with their group's matrix, or, contracted, of each group's rows.

    Args:
        a: (rows, k), or (m, rows).
        b: (groups, k, n), or (rows, n).
        ends: (groups,) integers: where each group's rows end; they begin at the end of the group before.  Or (blocks,
            groups): the rows are as many blocks of one length, and the ends count from each block's first row.

    Returns:
        (rows, n), where rows after a block's last group are undefined; or (groups, m, n).
    """
    if ends.dim() == 1:
        return _multiply(a, b, ends)
    contracted, num_blocks = b.dim() == 2, len(ends)
    left = a.tensor_split(num_blocks, dim=int(contracted))
    right = b.tensor_split(num_blocks) if contracted else [b] * num_blocks
    products = [_multiply(*block) for block in zip(left, right, ends, strict=True)]
    if num_blocks == 1:
        return products[0]
    return torch.stack(products).sum(0) if contracted else torch.cat(products)


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    rows = a.shape[:1] if b.dim() == 3 else (ends.shape[-1], a.shape[0])
    return a.new_empty((*rows, b.shape[-1]))


@register_flop_formula(torch.ops.autopar.grouped_mm)
def _flops(a: tuple[int, ...], b: tuple[int, ...], ends: tuple[int, ...], **_: object) -> int:
    """As if every row were in a group.  Ops that count FLOPs are worth keeping when a region is computed again."""
    return 2 * math.prod(a) * b[-1]


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b, ends = ctx.saved_tensors
    if b.dim() == 2:
        return grouped_mm(b, grad.mT, ends).mT, grouped_mm(a.mT, grad, ends), None
    return *_gradients(a, b, ends, grad), None


def _gradients(a: Tensor, b: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of a product of rows, for the rows and for the groups' matrices."""
    return grouped_mm(grad, b.mT, ends), grouped_mm(a.mT, grad, ends)


grouped_mm.register_autograd(_backward, setup_context=_keep)


@derives(torch.ops.autopar.grouped_mm)
def grouped_product(call: Call) -> OpRule:
    """Rows may be cut: each rank's groups end where the whole's do, within its rows (the rewrite shifts the ends).

    Of rows in blocks the blocks may be cut, and nothing needs to be shifted; or the groups, with their rows.
    """
    contracted, in_blocks = len(call.shape("b")) == 2, len(call.shape("ends")) == 2
    rows = ("s", "p") if in_blocks else ("s",)
    result = (("g",), ("m",), ("n",)) if contracted else (rows, ("n",))
    inputs: dict[str, Any] = {
        "a": (("m",), rows) if contracted else (rows, ("k",)),
        "b": (rows, ("n",)) if contracted else (("g",), ("k",), ("n",)),
        "ends": (("s",), ("e",)) if in_blocks else (("g",),),
    }
    groups = {} if in_blocks else {"s": "ends"}
    parted = {"p": RowsOfGroups("e", "g")} if in_blocks else {}
    return build(call, inputs, [result], whole=["g", "p", "e"], groups=groups, rows=parted, linear=[["a"], ["b"]])


# --------------------------------------------------------------------------------------------------- ops of libraries


def multiply_in_any_dtype(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`torch.nn.functional.grouped_mm` in any dtype, that of the operands."""
    product: Tensor = a @ b if offs is None else _by_rows(a, b, offs)
    return product if bias is None else product + bias


def _by_rows(self: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """The rows are those of the operand of two dims, or of both."""
    product: Tensor = grouped_mm(self, mat2, offs) if self.dim() == 2 else grouped_mm(mat2.mT, self.mT, offs).mT
    return product


def _plain(call: Call) -> Callable[..., Any] | None:
    """`aten._grouped_mm` without options of its own."""
    plain = call["offs"] is not None and call["bias"] is None and call["out_dtype"] is None
    return _by_rows if plain else None


DEFINITIONS: dict[str, Callable[[Call], Callable[..., Any] | None]] = {
    "aten::_grouped_mm": _plain,
    # What Hugging Face's experts call while they are traced.
    "transformers::grouped_mm_fallback": lambda call: grouped_mm,
    "transformers::grouped_mm_fallback_backward": lambda call: _gradients,
}
"""Grouped products of PyTorch and of libraries in terms of `grouped_mm`, by the op's name; None for a call that is
something else."""
