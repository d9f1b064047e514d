"""The decoder-only transformer that the step benchmark trains.

Its parameters are made, ordered and initialised so that a run starts from the same numbers as the PyTorch baselines
it is compared with: equal seeds give equal losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the global batch (in rows of `seq` tokens)."""

    layers: int
    dim: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int


SHAPES = {
    "wide": Shape(2, 384, 8, 1536, 512, 32, 4),  # the weights outweigh the activations
    "narrow": Shape(4, 128, 4, 512, 512, 128, 16),  # the reverse
    "mid": Shape(4, 256, 8, 1024, 512, 64, 8),
    "tiny": Shape(2, 64, 4, 128, 64, 16, 8),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x, (batch, heads, seq, head_dim), in the half-split layout."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, heads, seq, head_dim)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k = rotate(self.heads(self.q(x)), cos, sin), rotate(self.heads(self.k(x)), cos, sin)
        y = F.scaled_dot_product_attention(q, k, self.heads(self.v(x)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n1 = nn.LayerNorm(shape.dim)
        self.attn = Attention(shape)
        self.n2 = nn.LayerNorm(shape.dim)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x), cos, sin)
        return x + self.mlp(self.n2(x))


class Transformer(nn.Module):
    """Maps token ids and next-token ids, both (batch, seq), to the mean cross entropy."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.emb = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        half = shape.dim // shape.heads // 2
        angle = torch.outer(torch.arange(shape.seq), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
