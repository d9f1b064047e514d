"""Reading values that follow from constants alone while a model is traced; reading others is refused as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import subject
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.normalise import normalise
from autopar.trace import trace


class Reads(nn.Module):
    """Scales its input by what a function of it makes of constants."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.read(x)).square().mean()


def causal(x: Tensor) -> float:
    mask = torch.triu(torch.full((3, 3), float("-inf"), device=x.device), 1)
    return 2.0 if (mask == nn.Transformer.generate_square_subsequent_mask(3)).all() else 3.0


def written(x: Tensor) -> float:
    kept = x.new_zeros(5)
    kept[1:3] += 1
    kept[torch.arange(2, device=x.device)] = 4
    return float(kept.sum()) + kept[1].item()


def largest(x: Tensor) -> float:
    places = torch.cumsum(torch.ones_like(x[0], dtype=torch.int64), 0)
    return places.max().item() + int(places[0])


def listed(x: Tensor) -> float:
    sizes = torch.eye(3, dtype=torch.int64, device=x.device).cumsum(0).sum(0)
    return sum(n * 2.0**i for i, n in enumerate(sizes.tolist())) + (2 in sizes)


def compared(x: Tensor) -> float:
    places, again = torch.arange(4, device=x.device), torch.ones_like(x[0], dtype=torch.int64).cumsum(0) - 1
    same = torch.equal(places, again) and places.equal(again) and torch.allclose(places.double(), again.double())
    return float(f"{places.sum():d}") if same else 0.0


@pytest.mark.parametrize("read", [causal, written, largest, listed, compared])
def test_what_follows_from_constants_may_be_read(read: Callable[[Tensor], float]) -> None:
    torch.manual_seed(0)
    report = subject(Reads(read), torch.randn(8, 4)).verify("ddp", 4)
    assert report.ok, str(report)


def from_input(x: Tensor) -> float:
    return float(x.sum())


def into_view(x: Tensor) -> float:
    kept = torch.zeros(4)
    kept[:2].copy_(x[0, :2])
    return float(kept.sum())


def drawn(x: Tensor) -> float:
    return float(torch.bernoulli(torch.full((4,), 0.5)).sum())


def compared_with_input(x: Tensor) -> float:
    return 1.0 if torch.equal(torch.zeros(4, dtype=x.dtype), x[0]) else 2.0


def listed_input(x: Tensor) -> float:
    return sum(torch.cat([torch.zeros(1, dtype=x.dtype), x[0]]).tolist())


@pytest.mark.parametrize("read", [from_input, into_view, drawn, compared_with_input, listed_input])
def test_other_values_stay_unknown(read: Callable[[Tensor], float]) -> None:
    with pytest.raises(TraceError, match=r"depends? on the values of"):
        normalise(trace(Reads(read), (torch.randn(8, 4),), {}))


class Translator(nn.Module):
    """PyTorch's own transformer compares the mask that it is given with a causal one."""

    def __init__(self, width: int = 12, heads: int = 3, vocab: int = 31) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width, padding_idx=0)
        self.body = nn.Transformer(width, heads, 1, 2, 20, 0.0, batch_first=True, norm_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=self.words.weight.dtype)
        padding = source == 0
        y = self.body(
            self.words(source), self.words(target[:, :-1]), tgt_mask=mask, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        logits = y @ self.words.weight.T
        return nn.functional.cross_entropy(logits.transpose(1, 2), target[:, 1:], ignore_index=0, label_smoothing=0.1)


@pytest.mark.parametrize(("strategy", "sizes"), [("zero3", (4,)), ("fsdp+tp", (2, 2))])
def test_an_encoder_decoder_that_checks_its_mask(strategy: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    source = torch.randint(1, 31, (8, 7)).masked_fill(torch.arange(7) > torch.arange(1, 9)[:, None], 0)
    report = subject(Translator(), source, torch.randint(1, 31, (8, 6))).verify(strategy, *sizes)
    assert report.ok, str(report)
