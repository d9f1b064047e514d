"""The product, end to end on four gloo ranks: a model trains as it does on one device, whatever the strategy."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.cluster import Cluster
from autopar.strategies import STRATEGIES

STEPS = 3


def mine(*tensors: Tensor) -> tuple[Tensor, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(t.chunk(world)[rank] for t in tensors)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, rows: Any, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """An ordinary loop; returns the losses and the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = model(*rows(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms


def trains_equally(strategy: str, mesh: Any) -> str:
    torch.manual_seed(0)
    model = TinyGpt().double()
    reference = copy.deepcopy(model)
    names = list(dict(reference.named_parameters()))
    example = mine(*token_batch(8))
    pm = autopar.parallelize(model, mesh, 1.0, strategy=strategy, example_inputs=example)
    assert [name for name, _ in pm.named_parameters()] == names
    assert pm.plan.strategy == strategy or strategy == "auto"
    assert all(isinstance(p, DTensor) for p in pm.parameters())
    found = train(pm, lambda step: mine(*token_batch(8, seed=step)))
    # The loss ignores unequal numbers of targets on the ranks: the mean is over all of them.
    expected = train(reference, lambda step: token_batch(8, seed=step))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=0)
    parameters = dict(reference.named_parameters())
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), parameters[name].detach(), rtol=0, atol=1e-9)
    assert set(pm.state_dict()) == set(reference.state_dict())
    return pm.plan.strategy


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_a_tied_transformer_trains_as_on_one_device(gloo4: RankPool, strategy: str) -> None:
    mesh = "2x2" if strategy in ("hsdp", "fsdp+tp") else 4
    assert len(set(gloo4.run(trains_equally, strategy, mesh))) == 1


def hugging_face(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def three_argument_form(kind: str, strategy: str) -> None:
    """No example inputs: the optimizer is built before anything is planned."""
    model = hugging_face(kind)
    reference = copy.deepcopy(model)
    ids = token_batch(8, vocab=64)[0]
    (rows,) = mine(ids)
    pm = (
        autopar.parallelize(model, 4, 1.0)
        if strategy == "auto"
        else autopar.parallelize(model, 4, 1.0, strategy=strategy)
    )
    with pytest.raises(autopar.PlanError, match="planning waits for the first call"):
        _ = pm.plan
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pm, reference))
    for _ in range(STEPS):
        out = pm(input_ids=rows, labels=rows)
        loss = reference(input_ids=ids, labels=ids).loss
        assert type(out).__name__.endswith("Output") or "Output" in type(out).__name__
        assert out.logits.shape == (2, 8, 64)
        torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=0)
        for optimizer, value in ((ours, out.loss), (theirs, loss)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    # float32: sums over ranks are made in another order
    for (name, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), expected.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("kind", "strategy"), [("gpt2", "fsdp+tp"), ("llama", "auto"), ("llama", "zero3")])
def test_the_three_argument_form_works_for_hugging_face_models(gloo4: RankPool, kind: str, strategy: str) -> None:
    gloo4.run(three_argument_form, kind, strategy)


def evaluates(strategy: str) -> None:
    torch.manual_seed(0)
    model = TinyGpt(dropout=0.2).double()
    reference = copy.deepcopy(model).eval()
    pm = autopar.parallelize(model, 4, strategy=strategy, example_inputs=mine(*token_batch(8)))
    pm.eval()
    for rows, seq in ((8, 8), (4, 8), (12, 5)):
        ids, targets = token_batch(rows, seq)
        with torch.no_grad():
            out = pm(*mine(ids, targets))
        expected = reference(ids, targets)
        torch.testing.assert_close(out["loss"], expected["loss"].detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(out["logits"], mine(expected["logits"].detach())[0], rtol=0, atol=1e-9)
    assert not any(step.program.backward for step in pm.compiled_steps[1:])
    pm.train()
    pm(*mine(*token_batch(4, 6)))["loss"].backward()  # another shape trains under the same placements
    assert all(p.grad is not None for p in pm.parameters())


@pytest.mark.parametrize("strategy", ["zero3", "tp"])
def test_evaluation_and_other_shapes_run_under_the_same_placements(gloo4: RankPool, strategy: str) -> None:
    gloo4.run(evaluates, strategy)


def loss_outside(strategy: str) -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 12, dtype=torch.float64)
    pm = autopar.parallelize(model, 4, strategy=strategy, example_inputs=mine(x)[0])
    out = pm(*mine(x))
    assert out.shape == (2, 8)
    out.square().mean().backward()
    reference(x).square().mean().backward()
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), expected.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "tp", "fsdp+tp"])
def test_a_mean_loss_outside_the_model_gives_the_gradient_of_the_global_mean(gloo4: RankPool, strategy: str) -> None:
    gloo4.run(loss_outside, strategy)


def dropout_losses(strategy: str) -> list[float]:
    torch.manual_seed(0)
    pm = autopar.parallelize(TinyGpt(dropout=0.3).double(), 4, strategy=strategy, example_inputs=mine(*token_batch(8)))
    return train(pm, lambda step: mine(*token_batch(8, seed=step)))[0]


def test_dropout_masks_are_the_same_under_every_plan(gloo4: RankPool) -> None:
    ddp, *others = (gloo4.run(dropout_losses, s)[0] for s in ("ddp", "zero3", "tp", "fsdp+tp"))
    for other in others:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(ddp), rtol=1e-9, atol=0)
    assert len(set(ddp)) == STEPS


def saved_plan(directory: str) -> None:
    torch.manual_seed(0)
    example = mine(*token_batch(8))
    pm = autopar.parallelize(TinyGpt(), "2x2", strategy="fsdp+tp", example_inputs=example)
    pm.export(directory)
    dist.barrier()
    plan = autopar.load_plan(Path(directory) / "plan.json")
    assert plan == pm.plan
    again = autopar.parallelize(TinyGpt(), "2x2", strategy=plan, example_inputs=example)
    assert again.compiled_steps[0].program.fingerprint() == pm.compiled_steps[0].program.fingerprint()
    with pytest.raises(autopar.PlanError, match="parameter"):
        autopar.parallelize(Mlp(), 4, strategy=plan, example_inputs=torch.randn(2, 12))


def test_an_exported_plan_is_as_good_as_a_searched_one(gloo4: RankPool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        gloo4.run(saved_plan, directory)


def wrong_calls() -> None:
    with pytest.raises(autopar.MeshError, match=r"mesh 3 has 3 ranks, but 4 are running"):
        autopar.parallelize(Mlp(), 3)
    with pytest.raises(autopar.InputError, match=r"no strategy 'zero4'; choose one of auto, replicate, ddp"):
        autopar.parallelize(Mlp(), 4, strategy="zero4")
    with pytest.raises(autopar.InfeasibleBudgetError, match=r"smallest budget that works is mem_gb=") as caught:
        autopar.parallelize(TinyGpt(), 4, 1e-5, example_inputs=mine(*token_batch(8)))
    assert "Its peak" in str(caught.value)
    smallest = caught.value.smallest_feasible_gb
    pm = autopar.parallelize(TinyGpt(), 4, smallest, example_inputs=mine(*token_batch(8)))
    assert pm.plan.report is not None
    assert pm.plan.report.memory.total <= smallest * 2**30
    rows = 2 + dist.get_rank() // 3
    with pytest.raises(autopar.BatchError, match="equally many rows"):
        pm(*token_batch(rows))


def test_wrong_calls_are_refused_on_every_rank(gloo4: RankPool) -> None:
    gloo4.run(wrong_calls)


def priced_for_described_clusters() -> list[float]:
    inputs, times = mine(*token_batch(8)), []
    for cluster in ("1x4 cpu", "2x2 cpu @ 10mbit", Cluster.parse("2x2 cpu @ 1mbit")):
        pm = autopar.parallelize(TinyGpt(), 4, strategy="ddp", example_inputs=inputs, cluster=cluster)
        assert pm.plan.report is not None
        assert pm.plan.report.budget_bytes == Cluster.of_live("cpu", 4, 4).device.memory_bytes
        times.append(pm.plan.step_time_s)
    with pytest.raises(autopar.MeshError, match=r"cluster 1×2 cpu \(gloo\) has 2 ranks, but the mesh has 4"):
        autopar.parallelize(TinyGpt(), 4, cluster="2 cpu")
    with pytest.raises(autopar.InputError, match=r"cluster 1×4 A100-80GB \(nccl\) is of cuda devices, but .* of cpu"):
        autopar.parallelize(TinyGpt(), 4, cluster="4 A100-80GB")
    with pytest.raises(autopar.InputError, match=r"cluster must be a Cluster or a text .*, got 4"):
        autopar.parallelize(TinyGpt(), 4, cluster=4)  # type: ignore[arg-type]
    return times


def test_a_described_cluster_changes_prices_alone(gloo4: RankPool) -> None:
    for inside, slow, slower in gloo4.run(priced_for_described_clusters):
        assert inside < slow < slower


def test_without_processes_the_error_says_how_to_start_them() -> None:
    with pytest.raises(autopar.MeshError, match=r"torchrun --nproc-per-node 4"):
        autopar.parallelize(Mlp(), 4)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.max() > 0 else -y


def test_control_flow_on_data_is_refused_with_module_and_line() -> None:
    message = r"module 1, .*test_parallelize\.py:\d+ \(`return y if y\.max\(\) > 0 else -y`\) depends on the values"
    with pytest.raises(autopar.TraceError, match=message):
        autopar.verify(nn.Sequential(nn.Identity(), Peeks()), "ddp", torch.randn(8, 12), mesh=4)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(autopar.BatchError, match=r"6 rows .* cannot be cut evenly over 4 ranks; use 4 or 8 rows"):
        autopar.verify(Mlp(), "ddp", torch.randn(6, 12), mesh=4)
