"""Models of other kinds and sizes than the zoo's, as a registry for `benchmarks.zoo` and `benchmarks.coverage`.

    python -m benchmarks.zoo --zoo benchmarks/other_models.py --strategies ddp,tp,fsdp+tp --mesh 4 --json ROWS.json

Small, with random weights, from transformers and diffusers: speech encoders, translation, state spaces, mixtures of
experts, time series, diffusion; heads that four ranks do not divide (3; 14 for 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model: how it is built, a batch of `rows` rows, and the loss of what it returns."""

    name: str
    build: Callable[[], nn.Module]
    rows: Callable[[int], Batch]
    loss_fn: Callable[[Any], Tensor]

    def make_batch(self, batch_size: int, seed: int) -> Batch:
        torch.manual_seed(seed)
        return self.rows(batch_size)


def from_transformers(model: str, config: str, **settings: Any) -> nn.Module:
    import transformers  # takes seconds

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def from_diffusers(model: str, **settings: Any) -> nn.Module:
    import diffusers

    return getattr(diffusers, model)(**settings)


VOCAB = 99


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length))


def text(rows: int) -> Batch:
    return (), {"input_ids": ids(rows, 16), "labels": ids(rows, 16)}


def translation(rows: int) -> Batch:
    return (), {"input_ids": ids(rows, 12), "labels": ids(rows, 10)}


def speech_features(rows: int) -> Batch:
    return (), {"input_features": torch.randn(rows, 40, 16), "labels": ids(rows, 8)}


def waves(rows: int) -> Batch:
    return (), {"input_values": torch.randn(rows, 800)}


def series(rows: int) -> Batch:
    return (), {"past_values": torch.randn(rows, 32, 3), "future_values": torch.randn(rows, 4, 3)}


def images(rows: int) -> Batch:
    return (torch.randn(rows, 3, 32, 32),), {}


def captioned_noise(rows: int) -> Batch:
    conditions = {"resolution": None, "aspect_ratio": None}
    words = {"encoder_hidden_states": torch.randn(rows, 7, 16), "timestep": torch.randint(0, 9, (rows,))}
    return (torch.randn(rows, 4, 8, 8),), {**words, "added_cond_kwargs": conditions}


def own_loss(output: Any) -> Tensor:
    return output.loss


def squared_sample(output: Any) -> Tensor:
    return output.sample.square().mean()


def ctc(output: Any) -> Tensor:
    """The loss of a recogniser, which would look at its labels' values if it were to compute it."""
    rows, length, num_classes = output.logits.shape
    labels = (torch.arange(rows)[:, None] * 3 + torch.arange(5)) % (num_classes - 1) + 1
    scores = output.logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, labels, (length,) * rows, (5,) * rows)


_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0,
}  # fmt: skip
_DECODER = {"vocab_size": VOCAB, "num_hidden_layers": 2, "use_cache": False}
_GPT = {"vocab_size": VOCAB, "n_layer": 2, "n_positions": 32, "use_cache": False}

_ENTRIES = [
    Entry(
        "marian",
        partial(
            from_transformers, "MarianMTModel", "MarianConfig", **_SEQ2SEQ, decoder_start_token_id=0,
            max_position_embeddings=32,
        ),
        translation,
        own_loss,
    ),
    Entry(
        "speech2text",
        partial(
            from_transformers, "Speech2TextForConditionalGeneration", "Speech2TextConfig", **_SEQ2SEQ,
            input_feat_per_channel=16, conv_channels=32, max_source_positions=64, max_target_positions=32,
            encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        ),
        speech_features,
        own_loss,
    ),
    Entry(
        "hubert_ctc",
        partial(
            from_transformers, "HubertForCTC", "HubertConfig", hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, vocab_size=12,
            mask_time_prob=0.0, layerdrop=0.0,
        ),
        waves,
        ctc,
    ),
    Entry(
        "mamba2",
        partial(
            from_transformers, "Mamba2ForCausalLM", "Mamba2Config", **_DECODER, hidden_size=32, num_heads=8, head_dim=8,
            state_size=16, n_groups=2, chunk_size=8,
        ),
        text,
        own_loss,
    ),
    Entry(
        "olmoe",
        partial(
            from_transformers, "OlmoeForCausalLM", "OlmoeConfig", **_DECODER, hidden_size=32, intermediate_size=24,
            num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
            experts_implementation="grouped_mm",
        ),
        text,
        own_loss,
    ),
    Entry(
        "qwen2_14_heads_for_2",
        partial(
            from_transformers, "Qwen2ForCausalLM", "Qwen2Config", **_DECODER, hidden_size=56, intermediate_size=64,
            num_attention_heads=14, num_key_value_heads=2,
        ),
        text,
        own_loss,
    ),
    Entry(
        "gpt2_3_heads",
        partial(from_transformers, "GPT2LMHeadModel", "GPT2Config", **_GPT, n_embd=36, n_head=3),
        text,
        own_loss,
    ),
    Entry(
        "gptj",
        partial(from_transformers, "GPTJForCausalLM", "GPTJConfig", **_GPT, n_embd=32, n_head=4, rotary_dim=4),
        text,
        own_loss,
    ),
    Entry(
        "patchtst",
        partial(
            from_transformers, "PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=3, context_length=32,
            patch_length=8, patch_stride=8, prediction_length=4, d_model=32, num_hidden_layers=2,
            num_attention_heads=4, ffn_dim=64,
        ),
        series,
        own_loss,
    ),
    Entry(
        "vae_kl",
        partial(
            from_diffusers, "AutoencoderKL", block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, latent_channels=4,
        ),
        images,
        squared_sample,
    ),
    Entry(
        "pixart",
        partial(
            from_diffusers, "PixArtTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4,
            out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8, caption_channels=16,
            use_additional_conditions=False,
        ),
        captioned_noise,
        squared_sample,
    ),
]  # fmt: skip

REGISTRY = {entry.name: entry for entry in _ENTRIES}
