"""The command line: models by name, config and factory; plans, explanations, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.models import find_model, model_shapes
from autopar.trace import trace

pytest.importorskip("transformers")

TINY = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "model_type": "gpt2"}
QWEN = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "dtype": "bfloat16",
}  # fmt: skip


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# ---- plan and explain ----


def test_a_config_is_planned_saved_and_explained(config: Path) -> None:
    file = config / "plan.json"
    asked = ("--cluster", "4 cpu", "--batch", "8", "--seq", "8")
    code, out, err = run("plan", str(config), *asked, "--json", str(file))
    assert code == 0, err
    first, blank, *lines = out.splitlines()
    assert first == f"{config}: 7872 parameters in float32; 8 sequences of 8 tokens, 2 on each rank"
    assert blank == ""
    plan = autopar.load_plan(file)
    assert "\n".join(lines) == str(plan)
    assert err == f"wrote {file}\n"  # no progress, no remarks: this is no terminal

    block = "transformer.h.1.mlp"
    code, explained, _ = run("explain", str(file), "--module", block)
    assert (code, explained.rstrip("\n")) == (0, plan.explain(block))
    assert explained.startswith(f"{block} under ")
    code, explained, _ = run("explain", str(config / "config.json"), *asked, "--module", block, "--strategy", "ddp")
    assert code == 0
    assert explained.startswith(f"{block} under ddp on dp=4\n")
    code, _, err = run("explain", str(file), "--module", "transformer.h.9")
    assert code == 2
    assert "the plan knows no module 'transformer.h.9'" in err


def test_options_reach_the_planner(config: Path) -> None:
    options = ("--strategy", "hsdp", "--mesh", "4x2", "--optimizer", "sgd", "--mem-gb", "3.5", "--dtype", "bf16")
    code, out, err = run("plan", str(config), "--cluster", "2x4 H100-80GB", *options, "--layers", "1")
    assert code == 0, err
    # By default one sequence a rank, of as many tokens as the model takes.
    assert "4592 parameters in bfloat16; 8 sequences of 16 tokens, 1 on each rank" in out
    assert "autopar plan: hsdp on mesh dp=4×fsdp=2" in out
    assert "cluster 2×4 H100-80GB (nccl), budget 3.5 GiB per device" in out
    assert "transformer.h.0." in out
    assert "transformer.h.1" not in out


def test_mixed_precision_keeps_parameters_wide(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, err = run(
        "plan", str(config), "--cluster", "4 cpu", "--precision", "bf16", "--strategy", "ddp", "--json", str(file)
    )
    assert code == 0, err
    assert "parameters in float32" in out
    report = autopar.load_plan(file).report
    assert report is not None
    assert report.precision == "bf16"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan", "CONFIG", "--cluster", "4 cpu", "--precision", "int8"), 2, "no precision 'int8'; choose one of fp32"),
        (("plan", "gtp2", "--cluster", "4 cpu"), 2, r"no model 'gtp2': give a built-in shape (gpt2, gpt2-medium"),
        (("plan", "CONFIG", "--cluster", "4 X9"), 2, "unknown device 'X9'"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--batch", "6"), 2, "cannot be cut evenly over 4 ranks: use 4 or 8"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--batch", "2"), 2, "cannot be cut evenly over 4 ranks: use 4"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--seq", "17"), 2, "takes at most 16 tokens, not 17"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--strategy", "zero4"), 2, "no strategy 'zero4'"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--optimizer", "adamm"), 2, "adamm"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--mesh", "3"), 2, "mesh '3' has 3 ranks, but cluster"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--json", "no/such/plan.json"), 2, "there is no directory 'no/such'"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--strategy", "ddp", "--mem-gb", "0.0001"), 3, "smallest budget"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--batch", str(2**62)), 2, "are more than a tensor can hold"),
        (("plan", "CONFIG", "--cluster", "4 cpu", "--batch", str(2**70)), 2, "are more than a tensor can hold"),
        (("plan", "m" * 5000, "--cluster", "4 cpu"), 2, "no model 'mmm"),
        (("explain", "m" * 5000 + ".json", "--cluster", "4 cpu"), 2, "no model 'mmm"),
        (("explain", "CONFIG"), 2, "Give --cluster"),
    ],
)
def test_a_fault_is_one_message_and_an_exit_code(
    config: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run(*(str(config) if word == "CONFIG" else word for word in arguments))
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_saved_plan_takes_no_options_of_planning(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"schema_version": 1}')
    for option in (("--cluster", "4 cpu"), ("--optimizer", "sgd"), ("--strategy", "tp")):
        assert "only --module goes with it" in run("explain", str(file), *option)[2]
    for text in ("{", "[" * 200_000):
        file.write_text(text)
        code, _, err = run("explain", str(file))
        assert code == 2
        assert err.startswith(f"error: {file}: ")


NOISY = """
import os, torch

def build():
    print("from Python")
    os.write(1, b"from a library\\n")
    return torch.nn.Linear(4, 4), torch.empty(2, 4)
"""


def test_run_as_a_module_it_keeps_standard_output_for_the_answer(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    command = [sys.executable, "-m", "autopar", "plan", "noisy:build", "--cluster", "2 cpu", "--strategy", "ddp"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("noisy:build: 20 parameters in float32\n\nautopar plan: ddp on mesh dp=2\n")
    assert "from" not in ended.stdout
    assert sorted(ended.stderr.splitlines()) == ["from Python", "from a library"]


# ---- models by name ----


@pytest.mark.parametrize("name", model_shapes())
def test_a_built_in_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = model_shapes()[name]
    assert shape["source"]
    call = find_model(name, 8, seq=16)
    assert sum(p.numel() for p in call.model.parameters()) == shape["num_parameters"]
    assert all(t.is_meta for t in (*call.model.parameters(), *call.model.buffers()))
    assert call.model.training


def test_a_language_model_is_called_with_its_loss() -> None:
    call = find_model("gpt2", 4, batch=8, seq=32, num_layers=1)
    assert {name: tuple(t.shape) for name, t in call.example_inputs.items()} == {
        "input_ids": (2, 32),
        "labels": (2, 32),
    }
    joint = trace(call.model, (), call.example_inputs, num_ranks=4)
    assert joint.output_tree.paths == ("loss", "logits")  # and no cache of keys and values
    assert joint.trains


def test_fewer_layers_shorten_what_the_config_lists_for_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    call = find_model(str(tmp_path), 2, num_layers=2)
    assert len(call.model.get_submodule("model.layers")) == 2
    assert len(call.model.config.layer_types) == 2  # type: ignore[union-attr, arg-type]
    assert {p.dtype for p in call.model.parameters()} == {torch.bfloat16}  # as its config says
    cast = find_model(str(tmp_path), 2, dtype=torch.float32)
    assert {p.dtype for p in cast.model.parameters()} == {torch.float32}
    with pytest.raises(autopar.InputError, match=r"lists layer_types for 3 layers, so it cannot have 4"):
        find_model(str(tmp_path), 2, num_layers=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no config that transformers can read"),
        ('{"model_type": "unheard-of"}', "no config that transformers can read"),
        (json.dumps({"model_type": "t5"}), "makes no causal language model"),
        (json.dumps({**TINY, "model_type": "new", "auto_map": {"AutoConfig": "c.C"}}), "trust_remote_code"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(autopar.InputError, match=message):
        find_model(str(tmp_path), 2)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(autopar.InputError, match=r"has no config\.json"):
        find_model(str(tmp_path), 2)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(autopar.InputError, match=r'pip install "autopar\[hf\]"'):
        find_model("gpt2", 2)


# ---- models by factory ----

FACTORIES = """
import torch
from torch import nn

def pair():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.empty(2, 8)

def alone():
    return nn.Linear(8, 8)

def reads_values():
    return nn.Linear(int(torch.linspace(0, 8, 3)[1].item()), 8)

def leaves():
    raise SystemExit(0)

def language_model():
    import transformers
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config)

number = 3
"""


@pytest.fixture
def factories(here: Path, request: pytest.FixtureRequest) -> str:
    name = f"factories_{abs(hash(request.node.name))}"  # a module is imported once
    (here / f"{name}.py").write_text(FACTORIES)
    return name


def test_a_factory_brings_its_inputs(factories: str) -> None:
    code, out, err = run("plan", f"{factories}:pair", "--cluster", "2 cpu", "--strategy", "ddp")
    assert code == 0, err
    assert out.startswith(f"{factories}:pair: 212 parameters in float32\n")
    assert "autopar plan: ddp on mesh dp=2" in out
    call = find_model(f"{factories}:pair", 2)
    assert isinstance(call.model, nn.Sequential)
    assert all(p.is_meta for p in call.model.parameters())


def test_a_factory_may_leave_the_inputs_of_a_language_model_out(factories: str) -> None:
    assert find_model(f"{factories}:language_model", 2, seq=4).example_inputs["labels"].shape == (1, 4)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("alone", {}, r"return \(module, example_inputs\)"),
        ("reads_values", {}, r"failed at \S*factories_\d+\.py:\d+ \(.*meta device as the default"),
        ("leaves", {}, r"failed at \S*factories_\d+\.py:\d+ \(SystemExit: 0\)"),
        ("number", {}, "is a int: name a function"),
        ("missing", {}, "cannot import .*:missing from .*: AttributeError"),
        ("pair", {"batch": 4}, "brings its own example inputs"),
        ("pair", {"num_layers": 4}, "is its factory's to decide"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused(
    factories: str, factory: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(autopar.InputError, match=message):
        find_model(f"{factories}:{factory}", 2, **options)  # type: ignore[arg-type]


def test_a_module_that_cannot_be_imported_is_refused(here: Path) -> None:
    with pytest.raises(autopar.InputError, match=r"cannot import nowhere:build from .*: ModuleNotFoundError"):
        find_model("nowhere:build", 2)


def test_a_plan_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    code, _, err = run("explain", str(tmp_path / "nosuch.json"), "--module", "blocks.0")
    assert code != 0
    assert f"there is no plan file {tmp_path / 'nosuch.json'}" in " ".join(err.split()).replace("- ", "-")
