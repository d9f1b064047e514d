"""Models of many kinds, with sizes that do not divide: each strategy gives the single device's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import subject
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

ROWS = 8


class UNet(nn.Module):
    """Images of 13 × 11: circular and reflected padding, dilation, groups, resampling to the size of a skip."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, padding_mode="circular")
        self.down1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=2, dilation=2, groups=2)
        self.norm1, self.norm2 = nn.GroupNorm(4, 2 * width), nn.GroupNorm(2, 2 * width)
        self.middle, self.fuse = nn.Conv2d(2 * width, 4 * width, 1), nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.shuffle, self.out = nn.PixelShuffle(2), nn.Conv2d(2 * width, 3, 5, padding="same")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a = self.stem(x)
        b = F.silu(self.norm1(self.down1(a)))
        c = self.middle(F.gelu(self.norm2(self.down2(b))))
        up = F.interpolate(self.up(c), size=b.shape[-2:], mode="bilinear", align_corners=False)
        up = self.shuffle(F.leaky_relu(self.fuse(torch.cat([up, b], 1)), 0.1))
        up = F.pad(up, (0, 1, 1, 0), mode="reflect")[..., : a.shape[-2], : a.shape[-1]]
        return F.l1_loss(self.out(torch.cat([up, a], 1)), target)


class Speech(nn.Module):
    """Strided convolutions over a wave, then a convolutional module with batch statistics and attention."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, width, 10, 5, bias=False), nn.GroupNorm(width, width)
        self.second = nn.Conv1d(width, 2 * width, 3, 2)
        self.gate, self.point = nn.Conv1d(2 * width, 4 * width, 1), nn.Conv1d(2 * width, 2 * width, 1)
        self.depth, self.batch_norm = (
            nn.Conv1d(2 * width, 2 * width, 5, padding=2, groups=2 * width),
            nn.BatchNorm1d(24),
        )
        self.attention, self.head = nn.MultiheadAttention(2 * width, 4, batch_first=True), nn.Linear(2 * width, 11)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.norm(self.first(x[:, None])))))
        x = x + self.point(F.silu(self.batch_norm(self.depth(F.glu(self.gate(x), 1)))))
        x = x.transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.head(x).amax(1), label, label_smoothing=0.1)


class DiffusionTransformer(nn.Module):
    """Patches, modulation by time and class, and five heads, which no even number of ranks divides."""

    def __init__(self, width: int = 20, heads: int = 5, patch: int = 2) -> None:
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed, self.unembed = nn.Linear(3 * patch**2, width), nn.Linear(width, 3 * patch**2)
        self.time, self.kind = nn.Linear(16, width), nn.Embedding(7, width)
        self.position, self.modulate = nn.Parameter(torch.randn(1, 12, width) * 0.02), nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        b, c, h, w = x.shape
        p = self.patch
        patches = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        z = self.embed(patches) + self.position
        angle = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(8, device=x.device) / 8)
        state = self.time(torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype)) + self.kind(kind)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(F.silu(state))[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm(z) * (1 + scale1) + shift1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = z + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        z = z + gate2 * self.down(F.gelu(self.up(self.norm(z) * (1 + scale2) + shift2)))
        out = self.unembed(z).reshape(b, h // p, w // p, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
        return F.mse_loss(out, x)


class StateSpace(nn.Module):
    """A selective scan step by step, a long convolution by Fourier transforms, and a running mean."""

    def __init__(self, width: int = 12, states: int = 4) -> None:
        super().__init__()
        self.inward, self.outward, self.step = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.short, self.mix = nn.Conv1d(width, width, 4, padding=3, groups=width), nn.Linear(width, 2 * states)
        self.decay, self.skip = nn.Parameter(torch.rand(width, states)), nn.Parameter(torch.ones(width))
        self.kernel = nn.Parameter(torch.randn(width, 7) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.inward(x).chunk(2, -1)
        u = F.silu(self.short(u.transpose(1, 2))[..., :length]).transpose(1, 2)
        step = F.softplus(self.step(u))
        into, out_of = self.mix(u).chunk(2, -1)
        keep, add = torch.exp(-step[..., None] * self.decay.exp()), (step * u)[..., None] * into[:, :, None]
        state, seen = torch.zeros_like(add[:, 0]), []
        for t in range(length):
            state = state * keep[:, t] + add[:, t]
            seen.append((state * out_of[:, t, None]).sum(-1))
        y = torch.stack(seen, 1) + u * self.skip
        product = torch.fft.rfft(y, n=2 * length, dim=1) * torch.fft.rfft(self.kernel.T, n=2 * length, dim=0)
        y = (y + torch.fft.irfft(product, n=2 * length, dim=1)[:, :length]) * F.silu(gate)
        return self.outward(y.cumsum(1) / torch.arange(1, length + 1, device=x.device)[:, None]).square().mean()


class Grouped(nn.Module):
    """Six heads on three key-value heads, complex rotation, a sliding window with distances as a bias."""

    def __init__(self, width: int = 20, heads: int = 6, kv_heads: int = 3, head: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.q, self.out = nn.Linear(width, heads * head), nn.Linear(heads * head, width)
        self.k, self.v = nn.Linear(width, kv_heads * head), nn.Linear(width, kv_heads * head)
        self.gate, self.up, self.down = nn.Linear(width, 30), nn.Linear(width, 30), nn.Linear(30, width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        rows, (b, s, _) = self.norm(x), x.shape
        q, k, v = (layer(rows).view(b, s, -1, self.head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(s, device=x.device)
        angle = torch.outer(place, 100.0 ** (-torch.arange(0, self.head, 2, device=x.device) / self.head))
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (q, k))
        q, k = (torch.view_as_real(pair * turn).flatten(-2) for pair in pairs)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        far = place[:, None] - place
        slope = 2.0 ** (-torch.arange(1, self.heads + 1, device=x.device))[:, None, None]
        mask = torch.where((far >= 0) & (far < 3), -far * slope, float("-inf")).to(x.dtype)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        rows = self.norm(x)
        return (x + self.down(F.silu(self.gate(rows)) * self.up(rows))).square().mean()


class GraphAttention(nn.Module):
    """A softmax over the edges that end at a node: a maximum and sums by index."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.score, self.out = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        rows = self.nodes(x)
        score = F.leaky_relu(self.score(rows[source] + rows[target]), 0.2)
        most = torch.full((len(x), 2), -1e30, dtype=x.dtype)
        most = most.scatter_reduce(0, target[:, None].expand_as(score), score, "amax")
        weight = (score - most[target]).exp()
        total = torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, target, weight)
        weight = weight / total[target].clamp(min=1e-9)
        sent = weight[..., None] * rows[source].unflatten(-1, (2, 4))
        return (
            F.elu(self.out(torch.zeros(len(x), 2, 4, dtype=x.dtype).index_add(0, target, sent).flatten(1)))
            .square()
            .mean()
        )


class Contrast(nn.Module):
    """Every row of the batch beside every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.text = nn.Linear(7, 12), nn.Embedding(33, 12), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        text = F.normalize(self.text(self.words(ids))[rows, ids.argmax(-1)], dim=-1)
        logits = F.normalize(self.image(x), dim=-1) @ text.T * self.scale.exp()
        return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


class Codes(nn.Module):
    """Nearest codes, gradients straight through, and code statistics in buffers."""

    def __init__(self, codes: int = 13, width: int = 6) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(3, width, 3, 2, 1), nn.ConvTranspose1d(width, 3, 4, 2, 1)
        self.codes = nn.Embedding(codes, width)
        self.register_buffer("uses", torch.ones(codes))
        self.register_buffer("means", torch.randn(codes, width))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).transpose(1, 2)
        rows = z.flatten(0, 1)
        nearest = torch.cdist(rows, self.codes.weight).argmin(-1)
        with torch.no_grad():
            hot = F.one_hot(nearest, len(self.uses)).to(x.dtype)
            self.uses.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.means.mul_(0.9).add_(hot.T @ rows, alpha=0.1)
        code = self.codes(nearest).view_as(z)
        passed = z + (code - z).detach()
        return F.mse_loss(self.decode(passed.transpose(1, 2)), x) + F.mse_loss(code, z.detach())


class Critic(nn.Module):
    """Weights that are computed: by power iteration, which changes buffers, and by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), weight_norm(nn.Conv2d(8, 12, 3))
        self.norm, self.head = nn.InstanceNorm2d(8, affine=True), spectral_norm(nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(F.leaky_relu(self.norm(self.first(x)), 0.2)))
        return F.softplus(-self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))).mean()


class Local(nn.Module):
    """Windows by unfolding, shifted rows, queries of its own, pairs of pairs, and attention without a softmax."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.queries, self.out = nn.Parameter(torch.randn(5, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.roll(1, 1)
        q = self.q(x)
        k, v = (F.pad(layer(x), (0, 0, 1, 1)).unfold(1, 3, 1) for layer in (self.k, self.v))
        y = torch.einsum("bln,bldn->bld", torch.einsum("bld,bldn->bln", q, k).softmax(-1), v)
        latent = (self.queries.expand(len(x), -1, -1) @ y.transpose(1, 2) / 3).softmax(-1) @ y
        pairs = y[:, :4, None] * y[:, None, :4]
        pairs = torch.einsum("bikc,bjkc->bijc", pairs, y[:, :4, None].sigmoid() * y[:, None, :4])
        state = torch.einsum("bld,ble->blde", F.elu(self.k(x)) + 1, y).cumsum(1)
        linear = torch.einsum("bld,blde->ble", F.elu(q) + 1, state)
        return self.out(latent).square().mean() + pairs.tanh().mean() + 0.01 * linear.mean()


Kind = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
KINDS: dict[str, Kind] = {
    "unet": (UNet, lambda: (torch.randn(ROWS, 3, 13, 11), torch.randn(ROWS, 3, 13, 11))),
    "speech": (Speech, lambda: (torch.randn(ROWS, 203), torch.arange(ROWS))),
    "diffusion": (
        DiffusionTransformer,
        lambda: (torch.randn(ROWS, 3, 6, 8), torch.rand(ROWS) * 100, torch.randint(7, (ROWS,))),
    ),
    "state space": (StateSpace, lambda: (torch.randn(ROWS, 7, 12),)),
    "grouped": (Grouped, lambda: (torch.randn(ROWS, 6, 20),)),
    "graph": (GraphAttention, lambda: (torch.randn(12, 6), torch.randint(12, (2, 30)))),
    "contrast": (Contrast, lambda: (torch.randn(ROWS, 7), torch.randint(33, (ROWS, 5)))),
    "codes": (Codes, lambda: (torch.randn(ROWS, 3, 10),)),
    "critic": (Critic, lambda: (torch.randn(ROWS, 3, 10, 9),)),
    "local": (Local, lambda: (torch.randn(ROWS, 6, 12),)),
}
QUICK = {"graph", "contrast", "codes"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_a_kind_of_model_equals_the_single_device(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = KINDS[name]
    ours = subject(model(), *inputs())
    for strategy, sizes in (("ddp", (4,)), ("zero3", (4,)), ("tp", (4,)), ("tp", (2,)), ("fsdp+tp", (2, 2))):
        plan = ours.plan(strategy, *sizes)
        report = ours.compare(ours.program(plan), plan, num_steps=2)
        assert report.ok, f"{strategy} on {sizes}: {report}"
