"""A model that was built on the meta device: no rank ever holds it whole, and it gets the single device's values."""

from __future__ import annotations

import copy
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import hugging_face, mine, whole
from tiny_models import Llama, TinyGpt, token_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


class Table(nn.Module):
    """Has a parameter of its own beside its child's, an uneven one, and a buffer that no checkpoint keeps."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.normal_(self.inner.weight, std=float(self.scale.abs().sum()))  # a child's, by its own values
        nn.init.zeros_(self.shift)
        self.frequencies.copy_(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale * self.frequencies + self.shift).square().mean()


MODELS = {"gpt": (TinyGpt, (), lambda: token_batch(8)), "table": (Table, (), lambda: (torch.ones(8, 5),))}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name][0]()


def single_device(name: str) -> nn.Module:
    torch.manual_seed(3)
    model: Any = on_meta(name).to_empty(device="cpu")
    if name == "gpt":
        model.head.weight = model.tokens.weight  # `to_empty` makes two of what was one
    return model.apply(reset)


def initialised(name: str, strategy: str, lazy: bool) -> None:
    inputs = mine(*MODELS[name][2]())
    pm = autopar.parallelize(on_meta(name), 2, strategy=strategy, example_inputs=None if lazy else inputs)
    with pytest.raises(autopar.InputError, match=r"came from the meta device and got no values since: give them some"):
        pm(*inputs)
    torch.manual_seed(3 + dist.get_rank())  # rank 0's counts
    before = torch.get_rng_state()
    assert pm.apply(reset) is pm
    assert torch.equal(before, torch.get_rng_state()) == (dist.get_rank() > 0)
    reference = single_device(name)
    for (path, parameter), expected in zip(pm.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), expected.detach()), path
    found = pm(*inputs)
    expected = reference(*MODELS[name][2]())
    found, expected = (out["loss"] if isinstance(out, dict) else out for out in (found, expected))
    torch.testing.assert_close(found, expected)
    for parameter, wanted in zip(pm.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), wanted.detach())  # after planning, too


@pytest.mark.parametrize(
    ("name", "strategy", "lazy"), [("gpt", "tp", True), ("table", "zero3", False), ("table", "ddp", True)]
)
def test_modules_initialise_themselves_one_by_one(gloo2: RankPool, name: str, strategy: str, lazy: bool) -> None:
    gloo2.run(initialised, name, strategy, lazy)


def from_hugging_face() -> None:
    reference = hugging_face("llama")
    with torch.device("meta"):
        model = type(reference)(reference.config)
    torch.manual_seed(5)
    reference.apply(reference._init_weights)
    (rows,) = mine(token_batch(4, vocab=64)[0])
    pm = autopar.parallelize(model, 2, strategy="zero3")
    torch.manual_seed(5)
    pm.apply(model._init_weights)
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), expected.detach())
    ids = token_batch(4, vocab=64)[0]
    torch.testing.assert_close(
        pm(input_ids=rows, labels=rows).loss, reference(input_ids=ids, labels=ids).loss, rtol=1e-5, atol=0
    )


def test_a_hugging_face_model_initialises_itself(gloo2: RankPool) -> None:
    gloo2.run(from_hugging_face)


def from_checkpoint(path: str, lazy: bool) -> None:
    inputs = mine(*token_batch(8))
    pm = autopar.parallelize(on_meta("gpt"), 2, strategy="zero3", example_inputs=None if lazy else inputs)
    optimizer = torch.optim.AdamW(pm.parameters())
    autopar.load_checkpoint(path, pm)
    reference = single_device("gpt")
    for _ in range(2):
        torch.testing.assert_close(pm(*inputs)["loss"], reference(*token_batch(8))["loss"])
    pm(*inputs)["loss"].backward()
    optimizer.step()


@pytest.mark.parametrize("lazy", [True, False])
def test_values_come_from_a_checkpoint(gloo2: RankPool, tmp_path: Path, lazy: bool) -> None:
    autopar.save_checkpoint(tmp_path / "c", single_device("gpt"))
    gloo2.run(from_checkpoint, str(tmp_path / "c"), lazy)


def partly() -> None:
    """What has values keeps them; other ways of giving some count."""
    model = Table()
    kept = copy.deepcopy(model)
    model.inner.to("meta")
    model.frequencies = model.frequencies.to("meta")
    pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=(torch.ones(4, 5),))
    with pytest.raises(autopar.InputError, match=r"^inner\.weight, inner\.bias, frequencies came from"):
        pm(torch.ones(4, 5))
    nn.init.zeros_(pm.get_parameter("inner.weight"))
    with pytest.raises(autopar.InputError, match=r"^inner\.bias, frequencies came from"):
        pm(torch.ones(4, 5))
    pm.load_state_dict({"inner.bias": torch.ones(3)}, strict=False)
    with pytest.raises(autopar.InputError, match=r"^frequencies came from"):
        pm(torch.ones(4, 5))
    pm.frequencies = torch.arange(3.0)
    expected = ((torch.ones(3) * kept.scale * torch.arange(3.0)) + kept.shift).square().mean()
    torch.testing.assert_close(pm(torch.ones(4, 5)), expected)


def test_every_way_of_giving_values_counts(gloo2: RankPool) -> None:
    gloo2.run(partly)


def replaces() -> None:
    def function(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.ones(3, 5))

    pm = autopar.parallelize(on_meta("table"), 2, strategy="zero3", example_inputs=(torch.ones(4, 5),))
    with pytest.raises(autopar.StaleModelError, match="put another tensor in the place of 'weight' of a Linear"):
        pm.apply(function)


def test_values_are_changed_in_place(gloo2: RankPool) -> None:
    gloo2.run(replaces)


def half_the_memory() -> None:
    """Each rank allocates its part, never the whole, and has one whole tensor at a time."""
    from autopar._compat import allocator_events, storage_users

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    gathered: list[weakref.ref[Tensor]] = []
    most, gather = 0, DTensor.full_tensor

    def counted(parameter: DTensor) -> Tensor:
        nonlocal most
        most = max(most, sum(tensor() is not None for tensor in gathered))
        full = gather(parameter)
        gathered.append(weakref.ref(full))
        # The profiler does not see what gloo's own thread frees, which lets go of its collectives a little later: only
        # this tensor, the one that it is a view of, and who asks are to be left.
        deadline = time.monotonic() + 30
        while storage_users(full) > 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        return full

    with allocator_events() as sizes, mock.patch.object(DTensor, "full_tensor", counted):
        pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=(torch.ones(2, 512),))
        pm.apply(reset)
    assert len(gathered) == 8
    assert most == 0  # the one before was gone
    assert not any(tensor() is not None for tensor in gathered)
    held: int = sum(sizes)
    peak, now = 0, 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    whole_bytes = 4 * sum(p.numel() for p in pm.parameters())
    # Half of it rests.  Of what is gathered from, too, gloo's thread may be the last to let go.
    assert held < 0.8 * whole_bytes
    assert peak < 0.9 * whole_bytes


def test_no_rank_holds_the_whole_model(gloo2: RankPool) -> None:
    gloo2.run(half_the_memory)


def test_tied_weights_are_still_one() -> None:
    model: Any = on_meta("gpt")
    assert model.head.weight is model.tokens.weight
    assert isinstance(Llama(), nn.Module)
