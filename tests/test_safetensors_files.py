"""Weights in the files that Hugging Face models come in, slice by slice in and tensor by tensor out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file, save_file
from test_meta_start import reset
from test_parallelize import hugging_face, mine, whole
from tiny_models import TinyGpt, token_batch

import autopar


def round_trip(directory: str, strategy: str) -> None:
    """Made on the meta device, loaded from files, written to others."""
    import transformers

    source, target = Path(directory) / "source", Path(directory) / "target"
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source)
    (rows,) = mine(token_batch(4, vocab=64)[0])
    pm = autopar.parallelize(model, 2, strategy=strategy, example_inputs={"input_ids": rows, "labels": rows})
    pm.apply(model._init_weights)  # for the rotary caches, which no file has
    pm.load_pretrained(source)
    for parameter, expected in zip(pm.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), expected.detach())
    ids = token_batch(4, vocab=64)[0]
    expected = reference(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(pm(input_ids=rows, labels=rows).loss, expected, rtol=1e-5, atol=0)
    pm.save_pretrained(target, max_shard_gb=5e-6)


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "zero3"), ("gpt2", "tp")])
def test_hugging_face_directories(gloo2: RankPool, tmp_path: Path, kind: str, strategy: str) -> None:
    model = hugging_face(kind)
    model.save_pretrained(tmp_path / "source", max_shard_size="10KB")
    gloo2.run(round_trip, str(tmp_path), strategy)
    found = type(model).from_pretrained(tmp_path / "target")
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    assert len(list((tmp_path / "target").glob("model-*-of-*.safetensors"))) > 1
    assert not list((tmp_path / "target").glob("*.writing"))


def files(directory: str) -> list[str]:
    """What is wrong with files, told on every rank; and that of right ones nothing is lost."""
    path = Path(directory)
    torch.manual_seed(0)
    pm = autopar.parallelize(TinyGpt(layers=1).bfloat16(), 2, strategy="zero3", example_inputs=mine(*token_batch(4)))
    saved = {name: whole(value.detach()).clone() for name, value in pm.named_parameters()}
    pm.save_pretrained(path / "good")
    pm.apply(reset)
    pm.load_pretrained(path / "good")
    for name, value in pm.named_parameters():
        assert torch.equal(whole(value.detach()), saved[name])
    texts = []
    for name in ("none", "another", "shape", "damaged", "index", "outside"):
        with pytest.raises(autopar.CheckpointError) as caught:
            pm.load_pretrained(path / name)
        texts.append(str(caught.value))
    with pytest.raises(autopar.CheckpointError) as caught:
        pm.save_pretrained(path / "file" / "inside")
    texts.append(str(caught.value))
    with pytest.warns(UserWarning, match="has weights that the model does not: extra; left out"):
        pm.load_pretrained(path / "more")
    return texts


def test_damage_is_told_on_every_rank(gloo2: RankPool, tmp_path: Path) -> None:
    for name in ("none", "another", "shape", "damaged", "index", "outside", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    torch.manual_seed(1)
    weights = {name: value.detach() for name, value in TinyGpt(layers=1).named_parameters()}
    save_file({"x": torch.ones(2)}, tmp_path / "another" / "model.safetensors")
    save_file({**weights, "norm.bias": torch.ones(3)}, tmp_path / "shape" / "model.safetensors")
    save_file({**weights, "extra": torch.ones(3)}, tmp_path / "more" / "model.safetensors")
    (tmp_path / "damaged" / "weights.safetensors").write_bytes(b"\x10" * 100)
    (tmp_path / "index" / "model.safetensors.index.json").write_text("[1")
    outside = {"weight_map": {"x": "../more/model.safetensors"}}
    (tmp_path / "outside" / "model.safetensors.index.json").write_text(json.dumps(outside))
    for texts in gloo2.run(files, str(tmp_path)):
        none, another, shape, damaged, index, out, unwritable = texts
        assert "none holds no .safetensors files" in none
        assert "lacks tokens.weight, positions.weight" in another
        assert "(it has x instead): is it another model's?" in another
        assert "norm.bias has shape [3] in" in shape
        assert "weights.safetensors cannot be read" in damaged
        assert "is damaged" in index
        assert "names files outside its directory" in out
        assert "weights cannot be written to" in unwritable
    written = load_file(tmp_path / "good" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert os.listdir(tmp_path / "good") == ["model.safetensors"]
