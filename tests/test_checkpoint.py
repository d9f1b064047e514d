"""Checkpoints: saved under one plan and mesh, loaded under another, bit by bit; whole when a save is killed."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from test_parallelize import mine, whole
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, nn

import autopar
from autopar.checkpoint_state import model_slices
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard, Sharding, shard
from autopar.runtime.sharding import shard_tensor
from autopar.runtime.slices import Slices

GRID = Mesh(("dp", "tp"), (2, 2))
SHARDINGS: list[Sharding] = [
    *itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2),
    (Replicate(), shard(0, 3)), (Shard(0), shard(1, 3)), (Shard(0), shard(0, 6)), (shard(0, 3), Shard(1)),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (1, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_slices_are_what_a_rank_holds(shape: tuple[int, int], sharding: Sharding) -> None:
    if any("Strided" in type(p).__name__ for p in sharding) and shape != (12, 6):
        return
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    covered = torch.zeros(shape, dtype=torch.int64)
    for rank in range(GRID.num_ranks):
        part = shard_tensor(full, sharding, GRID, rank)
        slices = Slices(part, shape, sharding, GRID, rank)
        chunks = slices.__create_chunk_list__()
        assert sum(chunk.sizes.numel() for chunk in chunks) == part.numel()
        for chunk in chunks:
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(slices.part(chunk.offsets), full[where])
            covered[where] += 1
    assert covered.min() > 0 if covered.numel() else True


def made(strategy: str, mesh: int | str) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = TinyGpt(layers=1, dropout=0.2).double()  # other values than those that are saved
    pm = autopar.parallelize(model, mesh, strategy=strategy, example_inputs=mine(*token_batch(8)))
    return pm, optimizer_of(pm)


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02, **options)


def steps(pm: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterator[int] | range) -> list[float]:
    losses = []
    for step in numbers:
        loss = pm(*mine(*token_batch(8, seed=step)))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything, whole."""
    out = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        out |= {f"{name}.{key}": whole(value).clone() for key, value in optimizer.state[parameter].items()}
    return out


def save(path: str, strategy: str, mesh: int | str) -> tuple[dict[str, Tensor], list[float]]:
    pm, optimizer = made(strategy, mesh)
    steps(pm, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(2):  # the second takes the place of the first
        autopar.save_checkpoint(path, pm, optimizer, extra={"step": 2})
    return values(pm, optimizer), steps(pm, optimizer, range(2, 4))


def load(path: str, strategy: str, mesh: int | str) -> tuple[dict[str, Tensor], list[float]]:
    pm, optimizer = made(strategy, mesh)
    assert autopar.load_checkpoint(path, pm, optimizer) == {"step": 2}
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].placements == parameter.placements
    return values(pm, optimizer), steps(pm, optimizer, range(2, 4))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("ranks", "strategy", "others", "other"), [("2x2", "fsdp+tp", 2, "zero3"), (2, "zero3", 4, "tp")]
)
def test_any_plan_loads_what_any_other_saved(
    gloo4: RankPool, gloo2: RankPool, tmp_path: Path, ranks: int | str, strategy: str, others: int, other: str
) -> None:
    """Another number of ranks under another plan, then one device, then two ranks again."""
    path, pools = tmp_path / "checkpoint", {"2x2": gloo4, 4: gloo4, 2: gloo2}
    expected, losses = pools[ranks].run(save, str(path), strategy, ranks)[0]
    assert os.listdir(tmp_path) == ["checkpoint"]
    for found, continued in pools[others].run(load, str(path), other, others):
        same(found, expected)
        torch.testing.assert_close(torch.tensor(continued), torch.tensor(losses), rtol=1e-9, atol=0)
    model = TinyGpt(layers=1).double()
    optimizer = optimizer_of(model)
    autopar.load_checkpoint(path, model, optimizer)
    same(values(model, optimizer), expected)
    assert model.head.weight is model.tokens.weight
    single = tmp_path / "single"
    autopar.save_checkpoint(single, model, optimizer, extra={"step": 2})
    found, _ = gloo2.run(load, str(single), "zero3", 2)[0]
    same(found, expected)


def loaded_before_the_plan(path: str, strategy: str) -> list[float]:
    """Planning waits for the first call: parameters move then, and what the optimizer holds of them moves too."""
    pm = autopar.parallelize(TinyGpt(layers=1, dropout=0.2).double(), 2, strategy=strategy)
    optimizer = optimizer_of(pm, fused=True)
    autopar.load_checkpoint(path, pm, optimizer)
    losses = steps(pm, optimizer, range(2, 4))
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].placements == parameter.placements
        assert state["exp_avg"].to_local().is_contiguous()
    return losses


def test_a_module_that_is_not_planned_yet_loads_too(gloo2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    _, losses = gloo2.run(save, path, "zero3", 2)[0]
    for strategy in ("zero3", "tp"):
        for found in gloo2.run(loaded_before_the_plan, path, strategy):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-9, atol=0)


def test_eight_ranks_read_their_parts(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as load_slices

    from autopar.checkpoint import _LoadPlanner
    from autopar.checkpoint_reader import SafeReader

    torch.manual_seed(0)
    model, mesh, sharding = TinyGpt(layers=1), Mesh(("dp", "tp"), (2, 4)), (Shard(0), shard(0, 12))
    autopar.save_checkpoint(tmp_path / "c", model)
    full = model.blocks[0].qkv.weight.detach()  # 3 · 16 rows; (3 · 4) heads of 4 rows
    for rank in range(8):
        part = shard_tensor(full, sharding, mesh, rank)
        slices = Slices(torch.zeros_like(part), full.shape, sharding, mesh, rank)
        wanted = {"model.blocks.0.qkv.weight": slices}
        reader = SafeReader(tmp_path / "c")
        load_slices(wanted, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
        assert torch.equal(slices.local, part)


class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(3, 4))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self) -> Tensor:
        return (self.scale * self.weight).square().sum()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam"])
def test_every_optimizer_comes_back(tmp_path: Path, kind: str) -> None:
    def once() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Momentum()
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)

    model, optimizer = once()
    model().backward()
    optimizer.step()
    autopar.save_checkpoint(tmp_path / "c", model, optimizer)
    other, theirs = once()
    autopar.load_checkpoint(tmp_path / "c", other, theirs)
    same(values(other, theirs), values(model, optimizer))
    for one, both in ((model, optimizer), (other, theirs)):
        one.zero_grad()
        one().backward()
        both.step()
    same(values(other, theirs), values(model, optimizer))


# ---- what goes wrong


def saved(tmp_path: Path, optimizer: bool = True) -> Path:
    model = Mlp()
    autopar.save_checkpoint(tmp_path / "c", model, torch.optim.SGD(model.parameters()) if optimizer else None)
    return tmp_path / "c"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/executed",))


def test_damage_is_told(tmp_path: Path) -> None:
    path = saved(tmp_path)
    metadata, state = path / ".metadata", path / "state.json"
    good = {file: file.read_bytes() for file in path.iterdir()}
    data = next(file for file in good if file.suffix == ".distcp")
    hostile = json.loads(good[state])
    for file, content, message in [
        (metadata, good[metadata][:100], r"\.metadata is missing or damaged: UnpicklingError"),
        (metadata, pickle.dumps(Evil()), r"its description asks for posix\.system, which no checkpoint needs"),
        (metadata, pickle.dumps({"a": 1}), "does not describe a checkpoint"),
        (metadata, good[metadata].replace(data.name.encode(), b"/" * len(data.name)), "names a file outside"),
        (data, good[data][:200], "cannot be read"),
        (data, b"", "cannot be read"),
        (state, good[state][:20], r"state\.json is damaged"),
        (state, b"[" * 100_000, r"state\.json is damaged"),
        (state, b"\xff\xfe", r"state\.json is damaged"),
        (state, json.dumps({**hostile, "format": 99}).encode(), "is not of format 1"),
        (state, json.dumps({**hostile, "groups": [{"params": [3]}]}).encode(), "'groups' must be"),
        (state, json.dumps({**hostile, "groups": 7}).encode(), "'groups' must be"),
        (state, json.dumps({**hostile, "random": ["a", 1]}).encode(), "'random' two numbers"),
        (state, json.dumps({**hostile, "kind": [7]}).encode(), "'kind' must be"),
    ]:
        file.write_bytes(content)
        model = Mlp()
        with pytest.raises(autopar.CheckpointError, match=message):
            autopar.load_checkpoint(path, model, torch.optim.SGD(model.parameters()))
        file.write_bytes(good[file])
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(
        autopar.CheckpointError, match=rf"{data.name} is damaged: it has \d+ bytes, and \d+ were written"
    ):
        autopar.load_checkpoint(path, Mlp())
    data.unlink()
    with pytest.raises(autopar.CheckpointError, match=rf"{data.name} is missing"):
        autopar.load_checkpoint(path, Mlp())


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, optimizer=False)
    with pytest.raises(
        autopar.CheckpointError, match=r"is of another model: model\.blocks\.0\.down\.bias is missing; .*, and 27 more"
    ):
        autopar.load_checkpoint(path, TinyGpt())
    wider = Mlp()
    wider.down = nn.Linear(24, 9)
    with pytest.raises(autopar.CheckpointError, match=r"model\.down\.bias has shape \[8\], and in the model \[9\]"):
        autopar.load_checkpoint(path, wider)
    model = Mlp()
    with pytest.raises(autopar.CheckpointError, match="saved without an optimizer"):
        autopar.load_checkpoint(path, model, torch.optim.SGD(model.parameters()))
    path = saved(tmp_path)
    with pytest.raises(autopar.CheckpointError, match=r"groups of \[4\] parameters, and the one given has \[2\]"):
        autopar.load_checkpoint(path, model, torch.optim.SGD(model.up.parameters()))
    with pytest.raises(
        autopar.CheckpointError, match=r"the optimizer holds a parameter, of shape \[24, 12\], that is not"
    ):
        autopar.load_checkpoint(path, model, torch.optim.SGD(Mlp().parameters()))
    with pytest.raises(
        autopar.CheckpointError, match=r"another kind of optimizer, with the settings dampening, .*; the one given has "
    ):
        autopar.load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(autopar.CheckpointError, match="/none cannot be read: there is none"):
        autopar.load_checkpoint(tmp_path / "none", model)
    other = Mlp()
    adamw = torch.optim.AdamW(other.parameters())
    other(torch.ones(2, 12)).sum().backward()
    adamw.step()
    with pytest.raises(autopar.CheckpointError, match=r"a parameter, of shape \[24, 12\], that is not the model's"):
        autopar.save_checkpoint(tmp_path / "d", model, adamw)


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(autopar.CheckpointError, match=r"cannot be written: (NotADirectory|FileExists)Error"):
        autopar.save_checkpoint(tmp_path / "file" / "c", Mlp())
    with pytest.raises(autopar.CheckpointError, match="is there and is no checkpoint"):
        autopar.save_checkpoint(tmp_path / "folder", Mlp())
    with pytest.raises(autopar.CheckpointError, match="must be numbers, texts, lists or dicts"):
        autopar.save_checkpoint(tmp_path / "c", Mlp(), extra={"x": Mlp()})
    assert not (tmp_path / "c").exists()


def saves_apart(directory: str) -> str:
    """As with directories that only look the same: each rank has its own."""
    pm = autopar.parallelize(Mlp(), 2, strategy="zero3", example_inputs=torch.ones(2, 12))
    with pytest.raises(autopar.CheckpointError) as caught:
        autopar.save_checkpoint(f"{directory}/{dist.get_rank()}/c", pm)
    return str(caught.value)


def test_a_directory_that_ranks_do_not_share_is_refused(gloo2: RankPool, tmp_path: Path) -> None:
    for text in gloo2.run(saves_apart, str(tmp_path)):
        assert "__1_0.distcp is missing: every rank must name one directory" in text
    assert not any((tmp_path / rank / "c").exists() for rank in "01")


def fails_on_one_rank(path: str) -> str:
    pm = autopar.parallelize(Mlp(), 2, strategy="zero3", example_inputs=torch.ones(2, 12))
    with pytest.raises(autopar.CheckpointError) as caught:
        autopar.load_checkpoint(path, pm)
    return str(caught.value)


def test_every_rank_hears_of_it(gloo2: RankPool, tmp_path: Path) -> None:
    for text in gloo2.run(fails_on_one_rank, str(tmp_path / "none")):
        assert "/none cannot be read: " in text
    path = saved(tmp_path)
    data = next(file for file in path.iterdir() if file.suffix == ".distcp")
    data.write_bytes(data.read_bytes()[:200])
    for text in gloo2.run(fails_on_one_rank, str(path)):
        assert "cannot be read" in text


class Numbered(nn.Module):
    """All its values are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(50, 20)) for _ in range(4))


def save_forever(path: Path, ready: Any) -> None:
    torch.set_num_threads(1)
    model = Numbered()
    for number in itertools.count(1):
        with torch.no_grad():
            for part in model.parts:
                part.fill_(number)
        autopar.save_checkpoint(path, model, extra={"number": number})
        if number == 1:
            ready.set()


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path, generator = tmp_path / "c", random.Random(0)
    context = multiprocessing.get_context("fork")
    seen, halves = set(), 0
    for _ in range(50):
        ready = context.Event()
        process = context.Process(target=save_forever, args=(path, ready), daemon=True)
        process.start()
        assert ready.wait(30)
        time.sleep(generator.random() * 0.02)
        process.kill()
        process.join()
        halves += (tmp_path / ".c.writing").exists()
        model = Numbered()
        number = autopar.load_checkpoint(path, model)["number"]
        assert all((part == number).all() for part in model.parts)
        seen.add(number)
    assert len(seen) > 1
    assert halves > 5  # it was killed while it wrote
    assert set(os.listdir(tmp_path)) <= {"c", ".c.writing", ".c.before"}


def test_a_save_killed_between_its_renames_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.rename(tmp_path / ".c.before")
    autopar.load_checkpoint(path, Mlp())
    saved(tmp_path)
    assert os.listdir(tmp_path) == ["c"]
    shutil.rmtree(path)


def test_names_are_those_of_the_model() -> None:
    names = set(model_slices(Momentum()))
    assert names == {"model.scale", "model.weight", "model.count"}
