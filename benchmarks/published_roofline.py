"""What a constant efficiency would predict: the FLOPs that a run needs, over the card's sustained rate."""

from __future__ import annotations

from benchmarks.published_rows import Run


def step_flops(run: Run) -> float:
    """FLOPs of one rank's step: 6 a parameter and token, causal attention's half, and the forward pass again where it
    is recomputed."""
    model = run.model
    assert model is not None
    kv_width = model.kv_heads * model.head_dim
    attention = 2 * model.hidden**2 + 2 * model.hidden * kv_width
    block = attention + (3 if model.is_gated else 2) * model.hidden * model.ffn
    scores = model.seq * model.hidden  # two products of half the square each
    again = run.recomputed_share if run.recompute == "full" else 0.0
    per_token = run.num_layers * (block + scores) * (6 + 2 * again) + 6 * model.vocab * model.hidden
    return per_token * model.seq * run.micro_batch * run.accumulate / (run.tensor * run.context)


def roofline_step_s(run: Run) -> float:
    """Seconds at the card's sustained rate of large matmuls."""
    assert run.cluster is not None
    return step_flops(run) / run.cluster.device.flops["bf16"]
