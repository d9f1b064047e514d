"""Plans kept from one run to the next: found again, told apart, and never trusted where they do not fit."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deep_models import llama
from pool import RankPool
from tiny_models import TinyGpt, token_batch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import compiler, plan_cache, rules
from autopar.cli import app
from autopar.plan_cache import open_cache
from autopar.plan_file import plan_to_json

IDS = torch.empty(2, 8, dtype=torch.long, device="meta")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans are kept in this test."""
    monkeypatch.setenv("AUTOPAR_CACHE", "1")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


def gpt(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return TinyGpt(**{"layers": 1, **sizes})


def planned(model: nn.Module | None = None, cluster: str = "2x2 A100-80GB", **asked: Any) -> autopar.Plan:
    return autopar.plan(model or gpt(), cluster, **{"strategy": "fsdp+tp", "example_inputs": (IDS, IDS), **asked})


def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any) -> None:
        raise AssertionError("planned anew")

    monkeypatch.setattr(compiler.Compiler, "candidates", search)


# ---- found again ----


@pytest.mark.parametrize("make", [gpt, llama], ids=["whole", "folded"])
def test_the_second_plan_takes_no_planning_and_says_so(
    make: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(17, (2, 8), device="meta")
    asked = {
        "strategy": "auto" if make is gpt else "zero3",
        "example_inputs": {"input_ids": ids, "labels": ids} if make is llama else (IDS, IDS),
    }
    first = planned(make(), cluster="2 A100-80GB", **asked)
    assert not first.from_cache
    assert "from cache" not in str(first)
    no_planning(monkeypatch)
    second = planned(make(), cluster="2 A100-80GB", **asked)
    assert second.from_cache
    assert (second, second.report, second.graph_fingerprint) == (first, first.report, first.graph_fingerprint)
    assert str(second).splitlines()[0] == f"{str(first).splitlines()[0]}, from cache"
    assert str(second).splitlines()[1:] == str(first).splitlines()[1:]
    assert second.explain() == first.explain()
    assert first.compare(second).count("\n") > 2
    assert first.cost is not None
    assert second.cost is not None
    assert second.cost.symbolic().time_s == first.cost.symbolic().time_s
    assert autopar.load_plan(next(directory.iterdir())) == first


def parallelizes_twice() -> tuple[bool, bool]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = TinyGpt().double()
        example = tuple(t.chunk(2)[dist.get_rank()] for t in token_batch(4))
        pm = autopar.parallelize(model, 2, strategy="zero3", example_inputs=example)
        loss = pm(*example)["loss"]
        loss.backward()
        found.append((pm.plan, float(loss), pm.plan.cost.symbolic().flops))
    assert found[0] == found[1]
    return found[0][0].from_cache, found[1][0].from_cache


def with_cache(directory: str) -> tuple[bool, bool]:
    os.environ.update({"AUTOPAR_CACHE": "1", "AUTOPAR_CACHE_DIR": directory})
    try:
        return parallelizes_twice()
    finally:
        os.environ["AUTOPAR_CACHE"] = "0"


def test_all_ranks_take_the_plan_that_the_first_one_finds(gloo2: RankPool, tmp_path: Path) -> None:
    assert gloo2.run(with_cache, str(tmp_path)) == [(False, True)] * 2


def test_the_command_line_keeps_plans_unless_told_not_to(directory: Path) -> None:
    pytest.importorskip("transformers")
    command = ["plan", "gpt2", "--cluster", "2 cpu", "--layers", "1", "--strategy", "zero3", "--seq", "16"]
    outputs = [CliRunner().invoke(app, [*command, *more]).stdout for more in (["--no-cache"], [], [], ["--no-cache"])]
    assert [", from cache" in output for output in outputs] == [False, False, True, False]


# ---- told apart ----


def frozen() -> nn.Module:
    model = gpt()
    model.positions.weight.requires_grad_(False)
    return model


def untied() -> nn.Module:
    model = gpt()
    model.head.weight = nn.Parameter(torch.empty_like(model.tokens.weight))
    return model


OTHERS: dict[str, Any] = {
    "batch": lambda: planned(example_inputs=(torch.cat([IDS, IDS]),) * 2),
    "budget": lambda: planned(mem_gb=40),
    "optimizer": lambda: planned(optimizer="sgd"),
    "precision": lambda: planned(precision="bf16"),
    "micro-steps": lambda: planned(accumulate=2),
    "strategy": lambda: planned(strategy="zero3"),
    "mesh": lambda: planned(mesh="4x1"),
    "device": lambda: planned(cluster="2x2 H100-80GB"),
    "network": lambda: planned(cluster="2x2 A100-80GB @ 10gbit"),
    "width": lambda: planned(gpt(width=32)),
    "depth": lambda: planned(gpt(layers=2)),
    "dropout": lambda: planned(gpt(dropout=0.1)),
    "dtype": lambda: planned(gpt().double()),
    "frozen": lambda: planned(frozen()),
    "untied": lambda: planned(untied()),
    "no gradients": torch.no_grad()(planned),
    "batch dims": lambda: planned(batch_dims={"0": None, "1": None}),
}


def test_whatever_else_is_asked_is_planned_anew(directory: Path) -> None:
    planned()
    assert planned().from_cache
    for what, other in OTHERS.items():
        assert not other().from_cache, what
    assert len(list(directory.iterdir())) == 1 + len(OTHERS)
    assert planned().from_cache


def test_a_rule_of_the_users_makes_another_plan(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_USER_RULES", {})
    planned()
    autopar.register_sharding_rule("aten::gelu", "b s h^ -> b s h^")
    assert not planned().from_cache
    assert planned().from_cache
    autopar.register_sharding_rule("aten::gelu", "b s h -> b s h")
    assert not planned().from_cache


def test_another_planner_makes_another_plan(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(plan_cache, "own_code", lambda: "another version")
    assert not planned().from_cache


# ---- never trusted where they do not fit ----


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"regather": true', '"regather": false'))


def forged(path: Path, **changes: Any) -> None:
    """A well-formed entry under this name that holds another plan."""
    content = plan_to_json(replace(autopar.load_plan(path), **changes)).encode()
    path.unlink()
    key = path.stem.partition("-")[0]
    path.with_name(f"{key}-{plan_cache._content_digest(content)}.json").write_bytes(content)


def of_another_model(path: Path) -> None:
    plan = autopar.load_plan(path)
    forged(path, storage={f"other.{name}": rest for name, rest in plan.storage.items()})


def over_the_budget(path: Path) -> None:
    report = autopar.load_plan(path).report
    assert report is not None
    forged(path, report=replace(report, memory=replace(report.memory, reserve=2**50)))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def binary(path: Path) -> None:
    path.unlink()
    content = b"\x80\x04cposix\nsystem\n\xff"
    key = path.stem.partition("-")[0]
    path.with_name(f"{key}-{plan_cache._content_digest(content)}.json").write_bytes(content)


SPOILT = {
    "cut short": (cut_short, "changed or cut short"),
    "edited": (edited, "changed or cut short"),
    "another model's": (of_another_model, "made for another model"),
    "another graph's": (lambda path: forged(path, graph_fingerprint="0" * 16), "was made for graph 0000"),
    "unpriced": (lambda path: forged(path, report=None), "no report"),
    "over the budget": (over_the_budget, "of a budget of"),
    "a directory": (a_directory, "no plan file"),
    "binary": (binary, "not UTF-8"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_entry_is_told_and_planned_again(what: str, directory: Path) -> None:
    spoil, message = SPOILT[what]
    first = planned()
    spoil(next(directory.iterdir()))
    with pytest.warns(
        UserWarning, match=rf"plan cache: the plan kept in .* is not used, and planned again: .*{message}"
    ):
        second = planned()
    assert not second.from_cache
    assert (second, second.report) == (first, first.report)
    if what != "a directory":
        assert planned().from_cache


def test_a_directory_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE", "1")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "file" / "plans"))
    with pytest.warns(UserWarning, match=r"plan cache: the plan is not kept .*AUTOPAR_CACHE_DIR") as caught:
        assert not planned().from_cache
    assert len(caught) == 1


def test_the_oldest_entries_go_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_ENTRIES", 2)
    for age, optimizer in enumerate(("adamw", "sgd")):
        planned(optimizer=optimizer)
        newest = max(directory.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (1000 + age, 1000 + age))
    (directory / "mine.json").touch()
    assert planned(optimizer="adamw").from_cache  # used now, so `sgd` is the oldest
    planned(optimizer="adafactor")
    assert (directory / "mine.json").exists()
    assert planned(optimizer="adamw").from_cache
    assert not planned(optimizer="sgd").from_cache


# ---- where, and whether ----


def test_where_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AUTOPAR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def where() -> Path | None:
        cache = open_cache()
        return None if cache is None else cache.directory

    assert where() == tmp_path / ".cache" / "autopar"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert where() == tmp_path / ".cache" / "autopar"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert where() == tmp_path / "xdg" / "autopar"
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "plans"))
    assert where() == tmp_path / "plans"
    assert open_cache(wanted=False) is None
    monkeypatch.setenv("AUTOPAR_CACHE", "0")
    assert where() is None


def test_without_the_cache_nothing_is_written(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not planned(cache=False).from_cache
    assert not directory.exists()
