"""Ranks with other versions, code, arguments or programs are refused before anything is sent, and told what differs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from pool import RankPool
from test_parallelize import mine
from tiny_models import Mlp, TinyGpt, token_batch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.code_versions import code_of, versions


def refusal(model: nn.Module | None = None, **options: object) -> str:
    with pytest.raises(autopar.InputError) as caught:
        autopar.parallelize(model or Mlp(), 2, **options)  # type: ignore[arg-type]
    return str(caught.value)


def other_versions() -> str:
    mine = versions() | ({"torch": "2.99.0"} if dist.get_rank() else {"torch": "2.98.0"})
    with patch.object(api, "versions", lambda: mine):
        return refusal()


def other_arguments() -> list[str]:
    rank = dist.get_rank()
    plan = autopar.parallelize(Mlp(), 2, strategy="tp", example_inputs=Tensor(2, 12)).plan
    return [
        refusal(strategy=("tp", "zero3")[rank], mem_gb=(4, 4.5)[rank]),
        refusal(strategy=(plan, "tp")[rank]),
        refusal(Mlp() if rank else TinyGpt()),
    ]


def other_code(directory: str) -> str:
    """The same model from a file that differs on rank 1."""
    path = Path(directory) / str(dist.get_rank()) / "their_model.py"
    path.parent.mkdir()
    path.write_text(f"from tiny_models import Mlp\nclass Theirs(Mlp):\n    number = {dist.get_rank()}\n")
    spec = importlib.util.spec_from_file_location("their_model", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["their_model"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return refusal(module.Theirs())
    finally:
        del sys.modules["their_model"]


def test_versions_arguments_and_code_are_compared(gloo2: RankPool, tmp_path: Path) -> None:
    for text in gloo2.run(other_versions):
        assert text.startswith("the ranks differ: torch is 2.98.0 on rank 0, 2.99.0 on rank 1. Start every rank with")
    for arguments, plan, model in gloo2.run(other_arguments):
        assert (
            "differ: mem_gb is 4 on rank 0, 4.5 on rank 1; strategy is 'tp' on rank 0, 'zero3' on rank 1." in arguments
        )
        assert "strategy is a plan on tp=2 with digest " in plan
        assert "model is TinyGpt on rank 0, Mlp on rank 1." in model
    for text in gloo2.run(other_code, str(tmp_path)):
        assert "differ: code of their_model.py (their_model) is " in text


def test_code_is_that_of_the_models_classes_and_their_bases() -> None:
    names = code_of(nn.Sequential(Mlp(), nn.Linear(2, 2)))
    assert list(names) == ["code of autopar", "code of tiny_models.py (tiny_models)"]


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = Mlp(), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


def other_programs() -> str:
    with pytest.raises(autopar.StaleModelError) as caught:
        autopar.parallelize(Scaled(1.0 + dist.get_rank()), 2, strategy="ddp", example_inputs=Tensor(2, 12))
    return str(caught.value)


def test_programs_are_compared_and_the_first_difference_is_shown(gloo2: RankPool) -> None:
    for text in gloo2.run(other_programs):
        assert text.startswith("the ranks compiled different programs; the first difference, at line ")
        assert "call_function aten.mul.Tensor ((%" in text
        assert ", 1.0), {}) f32[2, 12] on rank 0, call_function aten.mul.Tensor ((%" in text
        assert ", 2.0), {}) f32[2, 12] on rank 1. The model, its constants or arguments" in text


def agrees() -> None:
    ids, targets = mine(*token_batch(4))
    pm = autopar.parallelize(TinyGpt(layers=1), 2, strategy="zero3", example_inputs=(ids, targets), optimizer="sgd")
    again = autopar.parallelize(TinyGpt(layers=1), 2, strategy=pm.plan, optimizer="sgd", batch_dims={"1": 0})
    again(ids, targets)


def test_equal_ranks_go_on(gloo2: RankPool) -> None:
    gloo2.run(agrees)
