"""Models of many small layers, of the kinds whose layers repeat in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.tiny_models import TinyGpt, token_batch

Call = tuple[tuple[Any, ...], dict[str, Any]]
VOCAB = 17


def hugging_face(kind: str, config: str, **fields: Any) -> nn.Module:
    """A model of transformers in training mode, on the meta device."""
    import transformers

    made = getattr(transformers, config)(**fields)
    made.use_cache = False
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind)(made)
    return model.train()


DECODER = {
    "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def gpt2_dropout() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "n_embd": 8, "n_head": 2, "n_positions": 16}
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.3}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **sizes, **rates, n_layer=7)


def llama() -> nn.Module:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", **DECODER, num_hidden_layers=8)


def gemma3() -> nn.Module:
    """A local layer, a global one, and so on; ends within a period."""
    kinds = ["sliding_attention", "full_attention"] * 6
    return hugging_face(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, num_hidden_layers=11, layer_types=kinds[:11],
        head_dim=4, sliding_window=3,
    )  # fmt: skip


def qwen3() -> nn.Module:
    return hugging_face("Qwen3ForCausalLM", "Qwen3Config", **DECODER, num_hidden_layers=6, head_dim=4)


def mixtral() -> nn.Module:
    return hugging_face(
        "MixtralForCausalLM", "MixtralConfig", **DECODER, num_hidden_layers=6, num_local_experts=3,
        num_experts_per_tok=2, experts_implementation="batched_mm",
    )  # fmt: skip


def sorted_experts() -> nn.Module:
    """Experts by grouped products; the first layer has none."""
    latent = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    return hugging_face(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **(DECODER | latent | {"num_key_value_heads": 2}),
        num_hidden_layers=7, first_k_dense_replace=1, n_routed_experts=6, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=4, experts_implementation="grouped_mm",
    )  # fmt: skip


def alternating_experts() -> nn.Module:
    """Every other layer has experts."""
    return hugging_face(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **DECODER, num_hidden_layers=10, head_dim=4, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=4, decoder_sparse_step=2, mlp_only_layers=[],
        experts_implementation="batched_mm",
    )  # fmt: skip


def t5() -> nn.Module:
    """Two stacks; all layers of one share the position bias that its first layer makes."""
    return hugging_face(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=12, num_layers=6,
        num_decoder_layers=7, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip


def bert() -> nn.Module:
    return hugging_face(
        "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, hidden_size=8, num_hidden_layers=6,
        num_attention_heads=2, intermediate_size=12, max_position_embeddings=16,
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)


class Residual(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


def plain() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(9)))


def plain_pairs() -> nn.Module:
    """A stack whose unit is two modules."""
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(6, 6), nn.Tanh())))


class Residuals(nn.Module):
    """Blocks between two layers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 6), nn.ModuleList(blocks), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


def scaled_by_layer() -> nn.Module:
    return Residuals(*(Residual(scale=1 / (i + 1)) for i in range(8)))


def two_kinds() -> nn.Module:
    """Seven blocks of a kind, then six of another: two runs."""
    return Residuals(*(Residual() for _ in range(7)), *(Residual(scale=0.5) for _ in range(6)))


def frozen_half() -> nn.Module:
    """The first layers are frozen: they have no backward pass."""
    model = Residuals(*(Residual() for _ in range(12)))
    for module in (model.first, *model.blocks[:6]):
        module.requires_grad_(False)
    return model


class ReadsIndex(Residuals):
    """The blocks are alike, but what goes into each depends on where it stands."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x) / (i + 1)
        return self.last(x).sum()


class ReadsDepth(Residuals):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) / len(self.blocks)
        return self.last(x).sum()


class ReadsHidden(Residuals):
    """What comes out of some block is read again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.first(x)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.last(hidden[self.tap] + hidden[-1]).sum()

    tap = 4


class Accumulates(Residuals):
    """Each block adds to a running sum, as auxiliary losses do."""

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            total = total + x.square().mean()
        return self.last(x).sum() + total


class WithNorms(nn.Module):
    """A block with a batch norm, whose buffers change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Scale(torch.autograd.Function):
    """Scales the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


class ScalesGradient(Residual):
    """What it computes does not depend on `factor`; its gradient does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scale.apply(x, self.factor))


def scales_gradients(*factors: float) -> nn.Module:
    return Residuals(*map(ScalesGradient, factors))


class Checkpointed(Residuals):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(*(Residual() for _ in range(6)))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x).sum()


def shared_weight() -> nn.Module:
    """All blocks share the first one's weight."""
    model = Residuals(*(Residual() for _ in range(7)))
    for block in model.blocks:
        block.up.weight = model.blocks[0].up.weight
    return model


def listed_twice() -> nn.Module:
    """The blocks' parameters have other names, too, before and after."""
    model = Residuals(*(Residual() for _ in range(6)))
    model.odd = nn.ModuleList(model.blocks[1::2])
    return model


class HooksGradient(Residual):
    """Doubles or trebles its gradient by a hook."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.hook)
        return y


def module_hooks() -> nn.Module:
    """One block triples the gradient that enters it, by a hook on the module."""
    model = Residuals(*(Residual() for _ in range(6)))
    model.blocks[3].register_full_backward_hook(lambda _, entering, __: tuple(3 * grad for grad in entering))
    return model


def double(gradient: Tensor) -> Tensor:
    return gradient * 2


def tokens_call(rows: int = 4) -> Call:
    ids = token_batch(rows, seq=6, vocab=VOCAB)[0]
    return (), {"input_ids": ids, "labels": ids}


def rows_call() -> Call:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),), {}


def sequence_call() -> Call:
    return (torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)),), {}


def tiny_gpt() -> nn.Module:
    return TinyGpt(layers=6, dropout=0.1)


FOLDED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call], list[tuple[int, int]]]] = {
    "gpt2_dropout": (gpt2_dropout, tokens_call, [(7, 1)]),
    "llama": (llama, tokens_call, [(8, 1)]),
    "gemma3": (gemma3, tokens_call, [(5, 2)]),
    "qwen3": (qwen3, tokens_call, [(6, 1)]),
    "mixtral": (mixtral, tokens_call, [(6, 1)]),
    "sorted_experts": (sorted_experts, tokens_call, [(6, 1)]),
    "alternating_experts": (alternating_experts, tokens_call, [(5, 2)]),
    "t5": (t5, tokens_call, [(5, 1), (6, 1)]),
    "bert": (bert, tokens_call, [(6, 1)]),
    "encoder": (encoder, sequence_call, [(6, 1)]),
    "plain": (plain, rows_call, [(9, 1)]),
    "plain_pairs": (plain_pairs, rows_call, [(6, 2)]),
    "tiny_gpt": (tiny_gpt, lambda: (token_batch(4), {}), [(6, 1)]),
    "two_kinds": (two_kinds, rows_call, [(7, 1), (6, 1)]),
    "frozen_half": (frozen_half, rows_call, [(6, 1), (6, 1)]),
    "accumulates": (lambda: Accumulates(*(Residual() for _ in range(7))), rows_call, [(7, 1)]),
    "batch_norms": (lambda: Residuals(*(WithNorms() for _ in range(6))), rows_call, [(6, 1)]),
    "scales_gradients": (lambda: scales_gradients(*[0.5] * 6), rows_call, [(6, 1)]),
    "checkpointed": (lambda: Checkpointed(reentrant=False), rows_call, [(6, 1)]),
    "checkpointed_reentrant": (lambda: Checkpointed(reentrant=True), rows_call, [(6, 1)]),
    "shared_weight": (shared_weight, rows_call, [(6, 1)]),
    "hooks": (lambda: Residuals(*(HooksGradient(double) for _ in range(6))), rows_call, [(6, 1)]),
}
"""By name a model, a call of it, and units and blocks in a unit of each of its runs."""

WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "scaled_by_layer": (scaled_by_layer, rows_call),
    "reads_index": (lambda: ReadsIndex(*(Residual() for _ in range(8))), rows_call),
    "reads_depth": (lambda: ReadsDepth(*(Residual() for _ in range(8))), rows_call),
    "reads_hidden": (lambda: ReadsHidden(*(Residual() for _ in range(8))), rows_call),
    "other_gradients": (lambda: scales_gradients(0.5, 0.4, 0.3, 0.2, 0.1, 0.1), rows_call),
    "other_hooks": (lambda: Residuals(*(HooksGradient(lambda g, i=i: g * i) for i in range(6))), rows_call),
    "module_hooks": (module_hooks, rows_call),
    "listed_twice": (listed_twice, rows_call),
    "too_few": (lambda: Residuals(*(Residual() for _ in range(4))), rows_call),
}
"""Models of which nothing can be left out."""
