"""CTC losses: lengths as lists, as tensors and as inputs, targets in rows and one after another; cut by the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import subject
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError

ROWS, POSITIONS, CLASSES = 8, 9, 6

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Recogniser(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.scores, self.loss = nn.Linear(5, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return self.loss(self.scores(x).log_softmax(-1).transpose(0, 1), labels, lengths)


def of_one_length(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    rows = len(labels)
    return F.ctc_loss(scores, labels, (POSITIONS,) * rows, (3,) * rows)


def of_listed_lengths(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    rows = range(len(labels))
    return F.ctc_loss(scores, labels, [POSITIONS - i % 2 for i in rows], [1 + i % 3 for i in rows], 2, "sum")


def one_after_another(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    rows = len(labels)
    return F.ctc_loss(scores, labels.flatten()[: 2 * rows], [POSITIONS] * rows, [1, 3] * (rows // 2))


def of_tensors(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    return nn.CTCLoss(zero_infinity=True)(scores, labels, lengths[:, 0], lengths[:, 1])


def of_each(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    made = torch.full((len(labels),), POSITIONS)
    return torch.ctc_loss(scores, labels, made, lengths[:, 1], 0, 0)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.stack([torch.randint(6, POSITIONS + 1, (ROWS,)), torch.randint(1, 4, (ROWS,))], 1)
    lengths[0] = torch.tensor([2, 3])  # too short: an infinite loss, which `zero_infinity` leaves out
    return torch.randn(ROWS, POSITIONS, 5), torch.randint(1, CLASSES, (ROWS, 3)), lengths


@pytest.mark.parametrize("loss", [of_one_length, of_listed_lengths, one_after_another, of_tensors])
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp+tp"])
def test_the_losses_are_those_of_the_single_device(loss: Loss, strategy: str) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Recogniser(loss), strategy, batch(), mesh=4, num_steps=2)
    assert report.ok, report


def test_losses_of_each_sequence_stay_with_their_rank() -> None:
    torch.manual_seed(0)
    x, labels, lengths = batch()
    lengths[0, 0] = POSITIONS
    report = autopar.verify(Recogniser(of_each), "ddp", (x, labels, lengths), mesh=4)
    assert report.ok, report


def test_the_batch_is_cut_and_nothing_is_gathered() -> None:
    case = subject(Recogniser(of_tensors), *batch())
    graph = case.program(case.plan("ddp", 4)).forward.module.graph
    (losses,) = graph.find_nodes(op="call_function", target=torch.ops.autopar.ctc_loss.default)
    assert losses.meta["val"][0].shape == (ROWS // 4,)
    assert not [node for node in graph.nodes if "all_gather" in node.name]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda scores, labels, lengths: F.ctc_loss(scores, labels, [POSITIONS] * 3, lengths[:, 1]),
            r"ctc_loss of 8 sequences .* got 3 input_lengths",
        ),
        (
            lambda scores, labels, lengths: F.ctc_loss(scores, labels.flatten(), lengths[:, 0], lengths[:, 1]),
            r"pass targets as a matrix with a row for each sequence",
        ),
    ],
)
def test_what_has_no_shape_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        autopar.verify(Recogniser(loss), "ddp", batch(), mesh=1)
