"""Small models of the kinds that people train, shared by several test files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block with fused QKV, as in GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + F.dropout(self.out(y), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGpt(nn.Module):
    """A causal language model with tied embeddings; returns logits and, given targets, a dict with the loss too."""

    def __init__(
        self, vocab: int = 32, width: int = 16, heads: int = 4, layers: int = 2, seq: int = 16, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), "logits": logits}


def token_batch(rows: int, seq: int = 8, vocab: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and targets; some targets are ignored, unevenly over the rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, seq + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, : seq // 2] = -1
    # A clone: a slice of one row counts as contiguous, and would keep the memory of the longer row.
    return ids[:, :-1].clone(memory_format=torch.contiguous_format), targets


class Mlp(nn.Module):
    """Returns its features; the loss is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Llama(nn.Module):
    """A causal language model with RMS norms, rotary positions, grouped-query attention and a gated FFN."""

    def __init__(self, vocab: int = 24, width: int = 16, heads: int = 4, kv_heads: int = 2, ffn: int = 20) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head_dim = width // heads
        self.tokens, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)
        self.register_buffer("frequencies", 100 ** -torch.linspace(0, 1, head_dim // 2), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        y = self.norms[0](x)
        q, k, v = (
            f(y).unflatten(-1, (n, -1)).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        logits = self.head(self.norms[2](x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class SortedExperts(nn.Module):
    """Top-2 of 4 experts: rows are sorted by expert, multiplied by groups, and put back."""

    def __init__(self, width: int = 16, hidden: int = 32, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        experts, order = chosen.flatten().sort(stable=True)
        counts = (experts[None] == torch.arange(self.num_experts, device=x.device)[:, None]).sum(1)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(rows[order // 2], self.up, offs=ends))
        out = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return out[back].unflatten(0, (-1, 2)).sum(1).view_as(x)


class Experts(nn.Module):
    """A mixture of experts by grouped products, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.norm, self.head = SortedExperts(), nn.LayerNorm(16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.experts(x))).square().mean()


class ConvNet(nn.Module):
    """Convolutions, one of them by groups, both norms of images, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.groups, self.group_norm = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(4, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.stem(x)))
        y = F.silu(self.group_norm(self.groups(y))) + y
        return self.head(y.mean((2, 3))).logsumexp(-1).square().mean()
