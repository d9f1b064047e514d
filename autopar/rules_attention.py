"""Rules of fused attention, forward and backward, of every backend."""

from __future__ import annotations

import torch

from autopar.rules import Call, Dims, OpRule, build, derives

aten = torch.ops.aten


def _heads(query: tuple[int, ...], key: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Factors of the head dim of query and key: fewer key heads each serve a group of query heads."""
    return (("h",), ("h",)) if query[1] == key[1] else (("h", "g"), ("h",))


def _attention_mask(call: Call, name: str, q_heads: tuple[str, ...]) -> Dims:
    if call.args.get(name) is None:
        return ()
    mask = call.shape(name)
    full: Dims = (("b",), q_heads, ("s",), ("t",))
    query, key = call.shape("query"), call.shape("key")
    sizes = (query[0], query[1], query[2], key[2])
    offset = 4 - len(mask)
    return tuple(full[i + offset] if n == sizes[i + offset] and n != 1 else () for i, n in enumerate(mask))


@derives(
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
def attention(call: Call) -> OpRule:
    """Batch and heads may be cut; the sequence dims stay whole (masks and softmax see them)."""
    heads, kv_heads = _heads(call.shape("query"), call.shape("key"))
    query: Dims = (("b",), heads, ("s",), ("e",))
    inputs: dict[str, Dims | list[Dims]] = {
        "query": query,
        "key": (("b",), kv_heads, ("t",), ("e",)),
        "value": (("b",), kv_heads, ("t",), ("v",)),
    }
    for mask in ("attn_mask", "attn_bias"):
        if call.args.get(mask) is not None:
            inputs[mask] = _attention_mask(call, mask, heads)
    outs: list[Dims] = [(("b",), heads, ("s",), ("v",))]
    batch, num_heads = call.shape("query")[:2]
    for value in call.outputs[1:]:
        if not isinstance(value, torch.Tensor):
            outs.append(())
        elif value.dim() >= 2 and tuple(value.shape[:2]) == (batch, num_heads):  # log-sum-exp; may be padded along s
            outs.append((("b",), heads, *(() for _ in value.shape[2:])))
        else:  # random state, sequence offsets
            outs.append(tuple(() for _ in value.shape))
    return build(call, inputs, outs, whole=["s", "t", "e", "v"])


@derives(
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
def attention_backward(call: Call) -> OpRule:
    """Gradients lie as query, key and value."""
    heads, kv_heads = _heads(call.shape("query"), call.shape("key"))
    query: Dims = (("b",), heads, ("s",), ("e",))
    key: Dims = (("b",), kv_heads, ("t",), ("e",))
    value: Dims = (("b",), kv_heads, ("t",), ("v",))
    out: Dims = (("b",), heads, ("s",), ("v",))
    grad = "grad_out" if "grad_out" in call.args else "grad_out_"
    inputs: dict[str, Dims | list[Dims]] = {grad: out, "query": query, "key": key, "value": value, "out": out}
    lse = call.shape("logsumexp")
    inputs["logsumexp"] = (("b",), heads, *(() for _ in lse[2:]))
    for mask in ("attn_mask", "attn_bias"):
        if call.args.get(mask) is not None:
            inputs[mask] = _attention_mask(call, mask, heads)
    outs: list[Dims] = [query, key, value]
    if len(call.outputs) > 3:  # the mask's gradient, where an additive mask wants one
        outs.append(_attention_mask(call, "attn_bias", heads) if call.outputs[3] is not None else ())
    return build(call, inputs, outs, whole=["s", "t", "e", "v"])
