"""`parallelize(..., verify=True)`: the program is tried in one process before training starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from test_parallelize import hugging_face, mine
from tiny_models import Mlp, TinyGpt, token_batch
from torch import fx, nn

import autopar
from autopar import rehearsal, signature
from autopar.passes import pipeline
from autopar.program import COLLECTIVE_KINDS


def verified(strategy: str, precision: str | None, lazy: bool) -> str:
    torch.manual_seed(0)
    example = mine(*token_batch(12))
    pm = autopar.parallelize(
        TinyGpt(dropout=0.1), 4, 1.0, strategy=strategy, precision=precision, verify=True,
        example_inputs=None if lazy else example,
    )  # fmt: skip
    assert (pm.verify_report is None) == lazy
    pm(*example)["loss"].backward()
    report = pm.verify_report
    assert report.ok
    assert {"output loss", "gradient of tokens.weight"} <= set(report.errors)
    assert report.plan == pm.plan
    return str(report)


@pytest.mark.parametrize(
    ("strategy", "precision", "lazy"), [("fsdp+tp", None, True), ("tp", "bf16", False), ("zero3", None, False)]
)
def test_a_right_program_is_tried_on_rows_of_every_rank(
    gloo4: RankPool, strategy: str, precision: str | None, lazy: bool
) -> None:
    texts = gloo4.run(verified, strategy, precision, lazy)
    assert len(set(texts)) == 1
    assert texts[0].startswith("equal: ")
    assert texts[0].endswith(", on 2 of each rank's 3 rows, in float64 on rank 0")


def verified_hugging_face() -> None:
    (rows,) = mine(token_batch(4, vocab=64)[0])
    pm = autopar.parallelize(hugging_face("llama"), 4, strategy="fsdp+tp", verify=True)
    pm(input_ids=rows, labels=rows).loss.backward()
    assert str(pm.verify_report).endswith("on 1 of each rank's 1 rows, in float64 on rank 0")


def test_a_hugging_face_model_is_tried_with_keywords(gloo4: RankPool) -> None:
    gloo4.run(verified_hugging_face)


def double_one_sum(module: fx.GraphModule) -> fx.GraphModule:
    """As a wrong pass would: the sum over ranks of one gradient counts twice."""
    reduction = next((n for n in module.graph.nodes if COLLECTIVE_KINDS.get(n.target) == "all_reduce"), None)
    if reduction is not None:
        with module.graph.inserting_after(reduction):
            doubled = module.graph.call_function(torch.ops.aten.mul.Tensor, (reduction, 2))
        doubled.meta = dict(reduction.meta)
        doubled.meta.pop("bytes")
        reduction.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    return module


def wrong() -> str:
    before, pipeline._scheduling = pipeline._scheduling, lambda plan: [("double_one_sum", double_one_sum)]
    try:
        with pytest.raises(autopar.VerificationError) as caught:
            autopar.parallelize(Mlp(), 4, strategy="ddp", example_inputs=torch.randn(3, 12), verify=True)
    finally:
        pipeline._scheduling = before
    return str(caught.value)


def test_a_wrong_program_is_refused_on_every_rank(gloo4: RankPool) -> None:
    for rank, text in enumerate(gloo4.run(wrong)):
        assert text.startswith("rank 0 failed while verifying: ") == (rank > 0)
        assert "the ddp plan on mesh dp=4 does not compute what one device does: DIFFERENT: 5 tensors" in text
        assert "on 2 of each rank's 3 rows" in text
        assert "Nothing was trained" in text


def test_a_model_too_large_for_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "free_memory_bytes", lambda: 100_000)
    message = r"verifying 512 parameters for 64 ranks .* takes about 272\.0 KiB in float64, and .* has 97\.7 KiB free"
    with pytest.raises(autopar.InputError, match=message):
        rehearsal.check_memory(Mlp(), 64)
    rehearsal.check_memory(Mlp(), 4)


class _Batchless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.weight * scale).sum()


def without_batch() -> str:
    pm = autopar.parallelize(_Batchless(), 4, strategy="ddp", example_inputs=torch.tensor(2.0), verify=True)
    return str(pm.verify_report)


def test_inputs_without_a_batch_are_taken_whole(gloo4: RankPool) -> None:
    assert gloo4.run(without_batch)[0].endswith("on inputs without a batch, in float64 on rank 0")


def test_only_rows_travel() -> None:
    x = torch.randn(1000, 5)
    rows: Any = rehearsal._first_rows(x, 0)
    assert rows.shape == (2, 5)
    assert rows.untyped_storage().nbytes() == 40
    assert signature.find_batch_dims((x,), {}) == {"0": 0}


def real_step(strategy: str, precision: str | None) -> str:
    torch.manual_seed(0)
    example = mine(*token_batch(8))
    pm = autopar.parallelize(
        TinyGpt(layers=1, dropout=0.2), 2, strategy=strategy, precision=precision, example_inputs=example
    )
    pm(*example)["loss"].backward()
    gradients, state = [p.grad.full_tensor().clone() for p in pm.parameters()], pm.random_state  # type: ignore[union-attr]
    report = pm.verify_step(*example)
    assert report.ok
    assert {"output loss", "gradient of tokens.weight", "gradient of norm.bias"} <= set(report.errors)
    assert pm.random_state == state
    for parameter, before in zip(pm.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), before)  # type: ignore[union-attr]
    with pm.no_sync(), pytest.raises(autopar.InputError, match="wait for their reduction"):
        pm.verify_step(*example)
    bias = pm.get_parameter("blocks.0.out.bias")
    handle = bias.register_hook(lambda gradient: gradient * 2)  # stands for a rank that computes wrongly
    with pytest.raises(autopar.VerificationError) as caught:
        pm.verify_step(*example)
    handle.remove()
    return str(caught.value)


@pytest.mark.parametrize(("strategy", "precision"), [("tp", None), ("zero3", "bf16")])
def test_a_real_step_is_compared(gloo2: RankPool, strategy: str, precision: str | None) -> None:
    for text in gloo2.run(real_step, strategy, precision):
        assert "differs from the single device's: DIFFERENT: " in text
        assert "in gradient of blocks.0.out.bias, on 2 of each rank's 4 rows" in text


def no_loss() -> None:
    pm = autopar.parallelize(Mlp(), 2, strategy="ddp", example_inputs=torch.ones(4, 12))
    with pytest.raises(autopar.InputError, match="needs a module that returns its loss"):
        pm.verify_step(torch.ones(4, 12))


def test_a_step_without_a_loss_is_refused(gloo2: RankPool) -> None:
    gloo2.run(no_loss)
