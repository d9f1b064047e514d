"""The decoder-only transformer of a published row: a GPT or a Llama of given sizes, as plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.transformer import rotate


@dataclass(frozen=True)
class Sizes:
    """Sizes of one block and of what stands around the stack.

    Attributes:
        hidden: width of the residual stream.
        heads: query heads; their size is `hidden // heads`.
        kv_heads: heads of keys and values.
        ffn: width inside the feed-forward network.
        vocab: rows of the embedding.
        seq: tokens of a sequence.
        is_gated: whether the model is a Llama (SwiGLU, RMSNorm, rotary positions, no biases) and not a GPT (GELU,
            LayerNorm, learned positions, biases).
        is_tied: whether the output projection is the embedding.
        dropout: after the embedding, on the probabilities of attention, and after each half of a block.
        is_flash: whether attention is one fused kernel.
        is_sequence_first: whether the sequence comes before the batch in memory, as in Megatron-LM: what a fused kernel
            returns with the batch first is copied for the projection, and both are kept.
        has_qk_norm: whether the heads of queries and keys are normalised.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    is_gated: bool
    is_tied: bool
    dropout: float = 0.0
    is_flash: bool = True
    is_sequence_first: bool = False
    has_qk_norm: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.drop = sizes, _dropout(sizes)
        has_bias, kv_width = not sizes.is_gated, sizes.kv_heads * sizes.head_dim
        self.q = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=has_bias)
        self.k = nn.Linear(sizes.hidden, kv_width, bias=has_bias)
        self.v = nn.Linear(sizes.hidden, kv_width, bias=has_bias)
        self.o = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=has_bias)
        has_norm = sizes.has_qk_norm
        self.q_norm, self.k_norm = (_norm(sizes, sizes.head_dim) if has_norm else nn.Identity() for _ in range(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) -> (batch, heads, seq, head_dim)"""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_norm(self._heads(self.q(x))), self.k_norm(self._heads(self.k(x))), self._heads(self.v(x))
        if self.sizes.is_gated:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.sizes.kv_heads < self.sizes.heads
        if self.sizes.is_flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            y = _unfused_attention(q, k, v, self.drop)
        if self.sizes.is_flash and self.sizes.is_sequence_first:
            return self.o(y.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)
        return self.o(y.transpose(1, 2).flatten(2))


def _unfused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, drop: nn.Module) -> torch.Tensor:
    """Causal attention that makes the whole matrix of scores."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return drop(scores.masked_fill(~allowed, float("-inf")).softmax(-1)) @ v


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        has_bias = not sizes.is_gated
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False) if sizes.is_gated else None
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=has_bias)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(sizes, sizes.hidden), _norm(sizes, sizes.hidden)
        self.attention, self.mlp = Attention(sizes), FeedForward(sizes)
        self.drop = _dropout(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x), cos, sin))
        return x + self.drop(self.mlp(self.norm2(x)))


def _norm(sizes: Sizes, width: int) -> nn.Module:
    return nn.RMSNorm(width) if sizes.is_gated else nn.LayerNorm(width)


def _dropout(sizes: Sizes) -> nn.Module:
    return nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()


class Decoder(nn.Module):
    """Maps token ids and next-token ids, both (batch, seq), to the mean cross entropy."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = None if sizes.is_gated else nn.Embedding(sizes.seq, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(num_layers))
        self.norm, self.drop = _norm(sizes, sizes.hidden), _dropout(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight
        half = sizes.head_dim // 2
        angle = torch.outer(torch.arange(sizes.seq), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = self.drop(x + self.positions.weight)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
