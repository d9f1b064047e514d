"""Damaged and hostile files: a plan, a checkpoint or a weights file is used, or refused by an `AutoparError`.

A few hundred inputs each time, and over ten thousand among the slow tests.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from mutations import changed_bytes, changed_json
from safetensors.torch import save_file
from test_plan_file import PLAN
from tiny_models import TinyGpt, token_batch
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.compiler import Compiler
from autopar.errors import AutoparError
from autopar.plan_file import load_plan, plan_to_json
from autopar.runtime.control import ControlGroup
from autopar.runtime.safetensors_files import load_files
from autopar.runtime.slices import Slices

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def fuzzed(strategy: Any, body: Callable[[Any], None], num_inputs: int) -> None:
    """Call `body` with as many inputs; they are the same each time."""

    def once(data: Any) -> None:
        body(data)

    given(strategy)(
        settings(
            max_examples=num_inputs, deadline=None, database=None, derandomize=True,
            phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
        )(once)
    )()  # fmt: skip


SIZES = [pytest.param(40, id="some"), pytest.param(1200, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_inputs", SIZES)
def test_plan_files(tmp_path: Path, num_inputs: int) -> None:
    path = tmp_path / "plan.json"

    def body(data: bytes) -> None:
        path.write_bytes(data)
        try:
            plan = load_plan(path)
        except AutoparError:
            return
        text = plan_to_json(plan)
        path.write_text(text)
        assert plan_to_json(load_plan(path)) == text
        str(plan)

    good = plan_to_json(PLAN)
    fuzzed(changed_json(json.loads(good)), body, 2 * num_inputs)
    fuzzed(changed_bytes(good.encode()), body, num_inputs)


@cache
def compiled() -> tuple[Compiler, Any, bytes]:
    """A model, and a plan of it that works."""
    compiler = Compiler(TinyGpt(layers=1), (2, 2), Cluster.parse("1x4 H100-80GB"), strategy="fsdp+tp")
    joint = compiler.trace(token_batch(8), {}, train=True)
    return compiler, joint, plan_to_json(compiler.plan(joint)).encode()


@pytest.mark.parametrize("num_inputs", SIZES)
def test_plans_that_are_used(tmp_path: Path, num_inputs: int) -> None:
    """A plan that was read is refused, or gives a program."""
    compiler, joint, good = compiled()
    content = json.loads(good)
    path = tmp_path / "plan.json"

    def body(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(AutoparError):
            compiler.compile(joint, compiler.given(joint, load_plan(path)))

    parts = {key: content[key] for key in ("factors", "storage", "recompute", "mesh")}
    whole = {**content, "report": None}
    fuzzed(changed_json(parts).map(lambda data: with_parts(whole, data)), body, num_inputs)


def with_parts(whole: dict[str, Any], data: bytes) -> bytes:
    try:
        parts = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps({**whole, **parts} if isinstance(parts, dict) else parts).encode()


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("num_inputs", SIZES)
def test_checkpoints(tmp_path: Path, num_inputs: int) -> None:
    path = tmp_path / "c"
    model, optimizer = small()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    autopar.save_checkpoint(path, model, optimizer)
    other, theirs = small()
    (data,) = path.glob("*.distcp")
    state = path / "state.json"

    def damage(file: Path) -> Callable[[bytes], None]:
        good = file.read_bytes()

        def body(content: bytes) -> None:
            file.write_bytes(content)
            with suppress(AutoparError):
                autopar.load_checkpoint(path, other, theirs)
            file.write_bytes(good)

        return body

    fuzzed(changed_json(json.loads(state.read_text())), damage(state), num_inputs)
    for file in (path / ".metadata", data):
        fuzzed(changed_bytes(file.read_bytes()), damage(file), num_inputs)
    autopar.load_checkpoint(path, other, theirs)
    assert torch.equal(other.weight, model.weight)
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize("num_inputs", SIZES)
def test_weights_files(tmp_path: Path, num_inputs: int) -> None:
    model, _ = small()
    slices = {name: Slices(p, p.shape) for name, p in model.named_parameters()}
    control = ControlGroup(alone=True)
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path)
    good = path.read_bytes()
    size = 8 + int.from_bytes(good[:8], "little")
    header, values = json.loads(good[8:size]), good[size:]

    def load() -> None:
        with suppress(AutoparError):
            load_files(tmp_path, model, slices, control)

    def body(data: bytes) -> None:
        path.write_bytes(data)
        load()

    fuzzed(changed_bytes(good), body, num_inputs)
    fuzzed(changed_json(header).map(lambda text: len(text).to_bytes(8, "little") + text + values), body, num_inputs)
    path.write_bytes(good)

    def indexed(data: bytes) -> None:
        index.write_bytes(data)
        load()

    fuzzed(changed_json({"metadata": {}, "weight_map": dict.fromkeys(header, path.name)}), indexed, num_inputs)


def test_an_index_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(autopar.CheckpointError, match=r"index\.json is damaged"):
        load_files(tmp_path, nn.Linear(1, 1), {}, ControlGroup(alone=True))
