"""Rows in the order of a sort within each block: reading them, writing them back, and where their groups end.

A block is so many consecutive rows, which are sorted among themselves.  An order has a row of positions for each block,
so that the blocks may be cut, as a batch is, without a rank knowing of another's rows.

The groups may be cut, too: a rank then has the rows of its own groups, as one block, by an order of those alone
(`own_order`).  Taken from a whole table they need nothing of other ranks; put back they are the rank's part of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.rules import Call, Dims, OpRule, RowsOfGroups, build, derives
from autopar.rules_view import names


def _sources(order: Tensor, copies: int) -> Tensor:
    """The row of the table that each sorted row belongs to."""
    num_blocks, length = order.shape
    starts = torch.arange(num_blocks, device=order.device).unsqueeze(1) * (length // copies)
    return (order // copies + starts).flatten()


@torch.library.custom_op("autopar::take_rows", mutates_args=())
def take_rows(table: Tensor, order: Tensor, copies: int, ends: Tensor | None = None) -> Tensor:
    """Rows of a table in the order of a sort.

    Args:
        table: (blocks * length / copies, ...); each row stands for `copies` rows that were sorted.
        order: (blocks, length) integers: which of its block's rows comes where.
        copies: how many consecutive sorted rows one row of the table stands for.
        ends: (blocks, groups) integers: where each block's groups of sorted rows end.  Not read here; it says which
            rows a rank takes that has some of the groups.

    Returns:
        (blocks * length, ...)
    """
    return table.index_select(0, _sources(order, copies))


@take_rows.register_fake
def _(table: Tensor, order: Tensor, copies: int, ends: Tensor | None = None) -> Tensor:
    return table.new_empty((order.numel(), *table.shape[1:]))


@torch.library.custom_op("autopar::put_rows", mutates_args=())
def put_rows(
    rows: Tensor, order: Tensor, copies: int, ends: Tensor | None = None, num_places: int | None = None
) -> Tensor:
    """Rows in the order of a sort back where they came from, those of one place summed: `take_rows` transposed.

    Args:
        rows: (blocks * length, ...) in the order of the sort.
        order: (blocks, length) integers, as for `take_rows`.
        copies: how many consecutive rows go to one place.
        ends: as for `take_rows`.
        num_places: how many places there are, where the order has some of the rows only; the others get zeros.

    Returns:
        (blocks * length / copies, ...), or (num_places, ...)
    """
    shape = (order.numel() // copies if num_places is None else num_places, *rows.shape[1:])
    # Every place is written once, or what is there is summed in an order that does not change from run to run.
    is_full = copies == 1 and num_places is None
    into = rows.new_empty(shape) if is_full else rows.new_zeros(shape)
    return into.index_put_((_sources(order, copies),), rows, accumulate=copies > 1)


@put_rows.register_fake
def _(rows: Tensor, order: Tensor, copies: int, ends: Tensor | None = None, num_places: int | None = None) -> Tensor:
    return rows.new_empty((order.numel() // copies if num_places is None else num_places, *rows.shape[1:]))


@torch.library.custom_op("autopar::group_ends", mutates_args=())
def group_ends(ids: Tensor, num_groups: int) -> Tensor:
    """Where each block's groups end.

    Args:
        ids: (blocks, length) integers, ascending in each block: the group of each row.
        num_groups: how many groups there are; ids run from 0.

    Returns:
        (blocks, num_groups) int32, as `autopar.grouped.grouped_mm` takes them.
    """
    groups = torch.arange(num_groups, dtype=ids.dtype, device=ids.device).repeat(ids.shape[0], 1)
    return torch.searchsorted(ids.contiguous(), groups, right=True, out_int32=True)


@group_ends.register_fake
def _(ids: Tensor, num_groups: int) -> Tensor:
    return ids.new_empty((ids.shape[0], num_groups), dtype=torch.int32)


# ---- what a rank has that holds some of the groups


@torch.library.custom_op("autopar::own_order", mutates_args=())
def own_order(order: Tensor, ends: Tensor, first: int, num_groups: int) -> Tensor:
    """The rows of some consecutive groups, of all blocks, group by group.

    Args:
        order: (blocks, length) integers, as for `take_rows`.
        ends: (blocks, all groups) integers, from `group_ends`.
        first: the first of the groups.
        num_groups: how many groups.

    Returns:
        (1, rows) integers: an order of one block, with as many rows as the groups have in this step.
    """
    starts, counts = _spans(ends, first, num_groups)
    num_blocks, length = order.shape
    offsets = torch.arange(num_blocks, device=order.device).unsqueeze(1) * length
    places = _places((starts + offsets).T.flatten(), counts.T.flatten())
    return (order + offsets).flatten()[places].unsqueeze(0)


@own_order.register_fake
def _(order: Tensor, ends: Tensor, first: int, num_groups: int) -> Tensor:
    return order.new_empty((1, torch.library.get_ctx().new_dynamic_size()))


@torch.library.custom_op("autopar::arrival_order", mutates_args=())
def arrival_order(ends: Tensor, first: int, num_groups: int, num_ranks: int) -> Tensor:
    """Where the rows of `own_order` stand among those that ranks send, each its own by group.

    Args:
        ends: (blocks, all groups) integers, from `group_ends`; each rank has as many consecutive blocks.
        first: the first of the groups that the rows belong to.
        num_groups: how many groups.
        num_ranks: how many ranks send, in the order of their blocks.

    Returns:
        (1, rows) integers: an order of one block.
    """
    _, counts = _spans(ends, first, num_groups)
    sent = counts.view(num_ranks, -1, num_groups).transpose(1, 2)
    begins = (sent.flatten().cumsum(0) - sent.flatten()).view_as(sent).transpose(0, 1).flatten()
    return _places(begins, sent.transpose(0, 1).flatten()).unsqueeze(0)


@arrival_order.register_fake
def _(ends: Tensor, first: int, num_groups: int, num_ranks: int) -> Tensor:
    return ends.new_empty((1, torch.library.get_ctx().new_dynamic_size()), dtype=torch.int64)


def rows_sent(ends: Tensor, num_ranks: int, rank: int) -> list[int]:
    """How many rows of its own blocks a rank sends to each rank, which has as many of the groups."""
    _, counts = _spans(ends, 0, ends.shape[1])
    mine = counts.view(num_ranks, -1, ends.shape[1])[rank].sum(0)
    sizes: list[int] = mine.view(num_ranks, -1).sum(1).tolist()
    return sizes


def rows_received(ends: Tensor, num_ranks: int, rank: int) -> list[int]:
    """How many rows of its own groups a rank gets from each rank, which has as many of the blocks."""
    num_groups = ends.shape[1] // num_ranks
    _, counts = _spans(ends, rank * num_groups, num_groups)
    sizes: list[int] = counts.reshape(num_ranks, -1).sum(1).tolist()
    return sizes


@torch.library.custom_op("autopar::own_ends", mutates_args=())
def own_ends(ends: Tensor, first: int, num_groups: int) -> Tensor:
    """Where groups end among the rows that `own_order` gives: (1, num_groups) int32."""
    _, counts = _spans(ends, first, num_groups)
    return counts.sum(0).cumsum(0).to(torch.int32).unsqueeze(0)


@own_ends.register_fake
def _(ends: Tensor, first: int, num_groups: int) -> Tensor:
    return ends.new_empty((1, num_groups), dtype=torch.int32)


def _places(begins: Tensor, counts: Tensor) -> Tensor:
    """The consecutive places of several spans, one span after another."""
    shifts = torch.repeat_interleave(begins - (counts.cumsum(0) - counts), counts)
    return shifts + torch.arange(len(shifts), device=shifts.device)


def _spans(ends: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor]:
    """Where some of the groups start in each block, and how many rows they have: both (blocks, num_groups)."""
    bounds = torch.nn.functional.pad(ends, (1, 0)).long()[:, first : first + num_groups + 1]
    return bounds[:, :-1], bounds.diff(dim=1)


# ---- rules


@derives(torch.ops.autopar.take_rows)
def taken(call: Call) -> OpRule:
    """Blocks may be cut, groups if the call says where they end, and what a row consists of."""
    return _moved(call, "table", before=("b", "t"), after=("b", "p"))


@derives(torch.ops.autopar.put_rows)
def put(call: Call) -> OpRule:
    """As `taken`, the other way."""
    return _moved(call, "rows", before=("b", "p"), after=("b", "t"))


def _moved(call: Call, name: str, before: tuple[str, ...], after: tuple[str, ...]) -> OpRule:
    rest: Dims = tuple((f,) for f in names(len(call.out_shape) - 1))
    # Positions of the order have a factor of their own: they are whole wherever a sort finds them.
    inputs: dict[str, Dims | list[Dims]] = {name: (before, *rest), "order": (("b",), ("s",)), "ends": (("b",), ("e",))}
    rows = {"p": RowsOfGroups("e")} if call["ends"] is not None else {}
    return build(call, inputs, [(after, *rest)], whole=["t", "p", "s", "e"], linear=[[name]], rows=rows)


@derives(torch.ops.autopar.group_ends)
def ends_of_groups(call: Call) -> OpRule:
    """Blocks may be cut."""
    return build(call, {"ids": (("b",), ("s",))}, [(("b",), ("g",))], whole=["s", "g"])
