"""What a training loop meets, on two gloo ranks: odd batches, hooks, averages, evaluation, generation, schedulers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import hugging_face, mine, whole
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.signature import find_batch_dims


def made(strategy: str = "zero3", **options: Any) -> tuple[autopar.ParallelModule, TinyGpt]:
    torch.manual_seed(0)
    model = TinyGpt(layers=1).double()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 2, strategy=strategy, example_inputs=mine(*token_batch(4)), **options)
    return pm, reference


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=1e-9, atol=1e-12)


def ragged() -> None:
    """The last batch is smaller; then come those that cannot be."""
    pm, reference = made()
    for rows in (4, 2, 6):
        ids, targets = token_batch(rows)
        close(pm(*mine(ids, targets))["loss"], reference(ids, targets)["loss"])
    ids, targets = mine(*token_batch(4))
    with pytest.raises(autopar.BatchError, match=r"the batch is empty: dim 0 of input '0', of shape \[0, 8\]"):
        pm(ids[:0], targets[:0])
    with pytest.raises(autopar.BatchError, match=r"shapes: input '0' is i64\[1, 8\] on rank 0, i64\[2, 8\] on rank 1;"):
        pm(ids[: 1 + dist.get_rank()], targets[: 1 + dist.get_rank()])
    with pytest.raises(autopar.BatchError, match=r"dtypes: input '1' is i64\[2, 8\] on rank 0, i32\[2, 8\] on rank 1"):
        pm(ids, targets.int() if dist.get_rank() else targets)
    with pytest.raises(autopar.TraceError, match=r"module tokens, .*tiny_models\.py.*indices"):
        pm(ids.double(), targets)
    with pytest.raises(autopar.InputError, match="unexpected keyword argument 'labels'"):
        pm(ids, labels=targets)
    with pytest.raises(
        IndexError, match=r"\(on rank [01], in aten\.embedding\.default, of module tokens in the forward"
    ):
        pm(ids + 99, targets)
    ids, targets = token_batch(4)
    close(pm(*mine(ids, targets))["loss"], reference(ids, targets)["loss"])  # none of these did harm


def test_ragged_and_wrong_batches(gloo2: RankPool) -> None:
    gloo2.run(ragged)


def test_an_input_that_is_no_batch_may_be_empty() -> None:
    inputs = (torch.ones(4, 2), torch.ones(0, 2))
    assert find_batch_dims(inputs, {}) == {"0": 0}
    with pytest.raises(autopar.BatchError, match="dim 0 of input '1'"):
        find_batch_dims(inputs, {}, {"1": 0})


def hooks() -> None:
    pm, reference = made()
    weight, called = pm.get_parameter("norm.weight"), []
    handles = [
        weight.register_hook(lambda gradient: gradient * 2),
        weight.register_post_accumulate_grad_hook(lambda p: called.append(type(p.grad))),
        pm.register_forward_hook(lambda _, __, output: output["loss"] * 3),
    ]
    ids, targets = token_batch(4)
    pm(*mine(ids, targets)).backward()
    (reference(ids, targets)["loss"] * 3).backward()
    assert called == [DTensor]
    close(weight.grad, 2 * reference.norm.weight.grad)  # type: ignore[arg-type,operator]
    close(pm.get_parameter("tokens.weight").grad, reference.tokens.weight.grad)  # type: ignore[arg-type]
    for handle in handles:
        handle.remove()


def test_hooks_of_parameters_and_of_the_module_run(gloo2: RankPool) -> None:
    gloo2.run(hooks)


def averages() -> None:
    """An exponential moving average is a copy with parameters, and programs, of its own."""
    pm, reference = made()
    ours, theirs = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (pm, reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (pm, reference)]
    ids, targets = token_batch(4)
    for _ in range(2):
        pm(*mine(ids, targets))["loss"].backward()
        reference(ids, targets)["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours.update_parameters(pm)
        theirs.update_parameters(reference)
    with torch.no_grad():
        close(ours(*mine(ids, targets))["loss"], theirs(ids, targets)["loss"])
        close(pm(*mine(ids, targets))["loss"], reference(ids, targets)["loss"])
    assert abs(ours(*mine(ids, targets))["loss"] - pm(*mine(ids, targets))["loss"]) > 1e-3


def test_averaged_models(gloo2: RankPool) -> None:
    gloo2.run(averages)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def optimizers() -> None:
    """Groups, schedulers, fused and foreach: the loop is PyTorch's."""
    for make in OPTIMIZERS.values():
        pm, reference = made()
        both = []
        for model in (pm, reference):
            decayed = [p for p in model.parameters() if p.dim() > 1]
            others = [p for p in model.parameters() if p.dim() < 2]
            optimizer = make([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
            both.append((optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)))
        for step in range(2):
            ids, targets = token_batch(4, seed=step)
            pm(*mine(ids, targets))["loss"].backward()
            reference(ids, targets)["loss"].backward()
            for optimizer, scheduler in both:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=0, atol=1e-9)


def test_groups_schedulers_and_optimizers(gloo2: RankPool) -> None:
    gloo2.run(optimizers)


def copies() -> None:
    """A copy trains its own parameters with the programs that the original had, and compiles in modes of its own."""
    torch.manual_seed(0)
    model = TinyGpt(layers=1, dropout=0.3).double()
    reference = copy.deepcopy(model)
    rows = mine(*token_batch(4))
    pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=rows)
    pm.control_group.beside  # noqa: B018 (as a save in the background has made it)
    copied = copy.deepcopy(pm)
    copied(*rows)["loss"].backward()
    assert all(p.grad is None for p in pm.parameters())
    assert all(isinstance(p.grad, DTensor) for p in copied.parameters())
    copied.eval()
    close(copied(*rows)["loss"], reference.eval()(*token_batch(4))["loss"])
    assert pm.training
    pm(*rows)["loss"].backward()


def test_a_copy_is_a_module_of_its_own(gloo2: RankPool) -> None:
    gloo2.run(copies)


class Adapter(nn.Module):
    """A frozen layer and a trained low-rank term beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapters(strategy: str) -> None:
    torch.manual_seed(0)
    model = TinyGpt(layers=1).requires_grad_(False)
    model.blocks[0].qkv, model.blocks[0].up = Adapter(model.blocks[0].qkv), Adapter(model.blocks[0].up)
    model.unused = nn.Linear(3, 3)
    model, frozen = model.double(), copy.deepcopy(model).double().state_dict()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 2, strategy=strategy, example_inputs=mine(*token_batch(4)))
    both = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (pm, reference)]
    for step in range(2):
        ids, targets = token_batch(4, seed=step)
        pm(*mine(ids, targets))["loss"].backward()
        reference(ids, targets)["loss"].backward()
        assert pm.get_parameter("unused.weight").grad is None
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=0, atol=1e-9)
        if not parameter.requires_grad or name.startswith("unused"):
            assert torch.equal(whole(parameter.detach()), frozen[name])
    held = pm.state_dict()
    assert held["head.weight"].to_local().data_ptr() == held["tokens.weight"].to_local().data_ptr()


@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_adapters_train_beside_frozen_and_unused_parameters(gloo2: RankPool, strategy: str) -> None:
    gloo2.run(adapters, strategy)


class OddBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4, dtype=torch.bfloat16))
        self.register_buffer("counts", torch.arange(4, dtype=torch.int16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.table * self.counts).mean()


def resized() -> None:
    pm = autopar.parallelize(OddBuffers(), 2, strategy="zero3", example_inputs=torch.ones(2, 4))
    pm(torch.ones(2, 4)).backward()
    assert (pm.get_buffer("table").dtype, pm.get_buffer("counts").dtype) == (torch.bfloat16, torch.int16)
    assert set(pm.state_dict()) == {"linear.weight", "linear.bias", "table"}
    pm.linear.to("meta")
    with pytest.raises(autopar.StaleModelError, match=r"'linear.weight' changed after planning: .* on cpu .* on meta"):
        pm(torch.ones(2, 4))
    pm = autopar.parallelize(OddBuffers(), 2, strategy="zero3")
    pm.counts = torch.arange(1)  # not planned yet
    pm(torch.ones(2, 4)).backward()
    pm.counts = torch.ones(1, dtype=torch.int64)  # values may change
    pm(torch.ones(2, 4))
    pm.counts = torch.ones(4, dtype=torch.int64)
    with pytest.raises(autopar.StaleModelError, match=r"buffer 'counts' changed .* expected \[1\] .*, found \[4\]"):
        pm(torch.ones(2, 4))
    pm.counts = None
    with pytest.raises(autopar.StaleModelError, match=r"'counts' changed .* found none"):
        pm(torch.ones(2, 4))
    pm.counts = torch.ones(1, dtype=torch.int64)
    pm.get_parameter("linear.bias").data = torch.zeros(3)
    with pytest.raises(autopar.StaleModelError, match=r"'linear.bias' changed after planning: expected \[4\]"):
        pm(torch.ones(2, 4))


def test_buffers_keep_their_dtype_and_resized_parameters_are_refused(gloo2: RankPool) -> None:
    gloo2.run(resized)


def misused() -> None:
    model = Mlp()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=torch.ones(2, 12))
    pm(torch.ones(2, 12)).sum().backward()
    with pytest.raises(autopar.InputError, match=r"holds parameter 'up.weight' as it was before autopar.parallelize"):
        early.step()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model(torch.ones(2, 12))
    torch.optim.SGD(pm.parameters(), lr=0.1).step()
    with pytest.raises(autopar.InputError, match=r"cannot be pickled: .* autopar.save_checkpoint"):
        pickle.dumps(pm)
    with pytest.raises(autopar.InputError, match="mem_gb must be a positive number"):
        autopar.parallelize(Mlp(), 2, mem_gb=-1)


def test_early_optimizers_and_pickling_are_refused(gloo2: RankPool) -> None:
    gloo2.run(misused)


def scaled() -> None:
    pm, reference = made("tp")
    both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in both]
    ids, targets = token_batch(4)
    losses = (pm(*mine(ids, targets))["loss"], reference(ids, targets)["loss"])
    norms = []
    for model, loss, optimizer, scaler in zip((pm, reference), losses, both, scalers, strict=True):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    close(*norms)
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        close(parameter, expected)


def test_scaled_losses(gloo2: RankPool) -> None:
    gloo2.run(scaled)


def checkpointed() -> None:
    model = hugging_face("llama").double()
    reference = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    ids = token_batch(4, vocab=64)[0]
    (rows,) = mine(ids)
    with pytest.warns(UserWarning, match="has gradient checkpointing switched on, which has no effect: the plan says"):
        pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs={"input_ids": rows, "labels": rows})
    pm(input_ids=rows, labels=rows).loss.backward()
    reference(input_ids=ids, labels=ids).loss.backward()
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        close(parameter.grad, expected.grad)  # type: ignore[arg-type]


def test_checkpointing_of_the_model_is_left_to_the_plan(gloo2: RankPool) -> None:
    gloo2.run(checkpointed)


def generates(strategy: str) -> None:
    """The model's own `generate`, with its cache, after a training step: every module gathers what it needs."""
    model = hugging_face("llama").double()
    reference = copy.deepcopy(model)
    ids = token_batch(4, vocab=64)[0]
    (rows,) = mine(ids)
    pm = autopar.parallelize(model, 2, strategy=strategy, example_inputs={"input_ids": rows, "labels": rows})
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    pm.eval()
    reference.eval()
    found = pm.generate(input_ids=rows, attention_mask=torch.ones_like(rows), synced_gpus=True, **settings)
    expected = reference.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(found, mine(expected)[0])
    assert all(isinstance(p, DTensor) for p in pm.parameters())
    close(pm(input_ids=rows, labels=rows).loss, reference(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_generate_of_a_hugging_face_model(gloo2: RankPool, strategy: str) -> None:
    gloo2.run(generates, strategy)


class Encoder(Mlp):
    """Has a method that reads the weight of a child without calling it."""

    width = 8

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)

    def read(self, x: Tensor) -> Tensor:
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up.weight.t() + self.up.bias) @ self.down.weight.t()


def methods() -> None:
    torch.manual_seed(0)
    model = Encoder().double()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=torch.ones(2, 12).double())
    x = torch.randn(3, 12).double()
    assert pm.width == 8
    close(pm.encode(x), reference.encode(x))
    close(pm.read(x), reference(x))
    with pytest.raises(RuntimeError, match="does not require grad"):
        pm.encode(x).sum().backward()


def test_other_methods_of_the_model_run_eagerly(gloo2: RankPool) -> None:
    gloo2.run(methods)
