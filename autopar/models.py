"""Models to plan for, from words: a built-in shape, a Hugging Face config, or a factory in the user's code.

Everything is made on the meta device, so that a model of any size costs no memory.  Nothing is downloaded, and no code
but the user's own factory is run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import BatchError, InputError

_MAX_DEFAULT_SEQ = 4096


@dataclass(frozen=True)
class ModelCall:
    """A model, and how one rank calls it.

    Attributes:
        model: in training mode; usually on the meta device.
        example_inputs: one rank's, in a form that `autopar.plan` takes.
        words: one line for readers.
    """

    model: nn.Module
    example_inputs: Any
    words: str


def find_model(
    text: str,
    num_ranks: int,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: torch.dtype | None = None,
    num_layers: int | None = None,
) -> ModelCall:
    """The model that `text` names, and a call of it.

    A causal language model is called with token ids, which are its labels too, so that the loss is in the graph.

    Args:
        text: a built-in shape (`model_shapes`), a local directory with a `config.json`, such a file, or
            `module:factory`, where the factory takes nothing and returns a module or `(module, example_inputs)`.
        num_ranks: ranks that share the batch.
        batch: sequences of the global batch; by default one a rank.
        seq: tokens of a sequence; by default as many as the model takes, at most 4096.
        dtype: what floating parameters and buffers are cast to; by default they stay as they are made.
        num_layers: in place of the config's own number of layers.

    Raises:
        InputError: if there is no such model, it cannot be built, or an argument does not fit it.
        BatchError: if the batch does not divide over the ranks.
    """
    inputs: Any = None
    if text in model_shapes():
        model = _from_config(text, _shape_config(text), num_layers)
    elif os.path.exists(text):  # unlike pathlib's, false for a name that is too long
        model = _from_config(text, _read_config(Path(text)), num_layers)
    elif ":" in text:
        if num_layers is not None:
            raise InputError(f"the number of layers of {text} is its factory's to decide: leave it out")
        model, inputs = _from_factory(text)
    else:
        raise InputError(
            f"no model {text!r}: give a built-in shape ({', '.join(model_shapes())}), a directory with a Hugging Face "
            "config.json, or module:factory. Names on the Hugging Face hub are not looked up: save the config first, "
            "AutoConfig.from_pretrained(name).save_pretrained(directory)"
        )
    if dtype is not None:
        model.to(dtype)
    rows = ""
    if inputs is None:
        inputs, rows = _token_batch(text, model, num_ranks, batch, seq)
    elif batch is not None or seq is not None:
        raise InputError(f"{text} brings its own example inputs, which say the batch and the sequence: leave both out")
    return ModelCall(model.train(), inputs, f"{text}: {_describe_params(model)}{rows}")


def model_shapes() -> dict[str, Any]:
    """The built-in shapes: what of a model's config its plan depends on, its number of parameters, and the source."""
    shapes: dict[str, Any] = json.loads((Path(__file__).parent / "model_shapes.json").read_text())
    return shapes


# ------------------------------------------------------------------------------------------- models of transformers


def _transformers() -> ModuleType:
    """The library, imported when it is needed: that takes seconds."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f'this model needs the transformers library ({error}): pip install "autopar[hf]", or give module:factory'
        ) from error
    transformers.logging.set_verbosity_error()  # remarks on configs, of no use to a plan
    return transformers


def _shape_config(name: str) -> Any:
    shape = model_shapes()[name]
    return _transformers().AutoConfig.for_model(shape["model_type"], **shape["fields"])


def _read_config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path} has no config.json, so it is no Hugging Face config")
    auto = _transformers().AutoConfig
    try:
        return auto.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a library's own kinds of errors, for a file that anyone may have written
        raise InputError(f"{file} is no config that transformers can read: {error}") from error


def _from_config(text: str, config: Any, num_layers: int | None) -> nn.Module:
    if num_layers is not None:
        _set_layers(text, config.get_text_config(), num_layers)
    config.use_cache = False  # a cache of keys and values is for inference
    try:
        with torch.device("meta"):
            model: nn.Module = _transformers().AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(
            f"transformers makes no causal language model of {text} ({type(error).__name__}: {error}): for another "
            "kind of model give module:factory"
        ) from error
    return model


def _set_layers(text: str, config: Any, num_layers: int) -> None:
    """Change the number of layers, and shorten what the config lists for each of them."""
    before = getattr(config, "num_hidden_layers", None)
    if before is None:
        raise InputError(f"the config of {text} does not say its number of layers, so it cannot be changed")
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == before}
    if lists and num_layers > before:
        raise InputError(f"{text} lists {', '.join(lists)} for {before} layers, so it cannot have {num_layers}")
    config.num_hidden_layers = num_layers
    for name, value in lists.items():
        setattr(config, name, value[:num_layers])


def _token_batch(
    text: str, model: nn.Module, num_ranks: int, batch: int | None, seq: int | None
) -> tuple[dict[str, torch.Tensor], str]:
    """One rank's token ids and labels, and words for the batch."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise InputError(
            f"{text} returns a module that is no model of transformers, and nothing says how to call it: return "
            "(module, example_inputs), one rank's inputs in a form that autopar.plan takes"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if seq is None:
        seq = min(longest or _MAX_DEFAULT_SEQ, _MAX_DEFAULT_SEQ)
    elif longest is not None and seq > longest:
        raise InputError(f"{text} takes at most {longest} tokens, not {seq}: that is its config's limit")
    batch = num_ranks if batch is None else batch
    if batch % num_ranks or batch < 1:
        below, above = batch // num_ranks * num_ranks, (batch // num_ranks + 1) * num_ranks
        near = f"{below} or {above}" if below > 0 else str(above)
        raise BatchError(f"a batch of {batch} sequences cannot be cut evenly over {num_ranks} ranks: use {near}")
    try:
        ids = torch.empty((batch // num_ranks, seq), dtype=torch.long, device="meta")
    except (RuntimeError, TypeError) as error:  # sizes that overflow
        raise InputError(f"{batch} sequences of {seq} tokens are more than a tensor can hold: use fewer") from error
    each = f"{batch // num_ranks} on each rank"
    return {"input_ids": ids, "labels": ids}, f"; {batch} sequences of {seq} tokens, {each}"


# ----------------------------------------------------------------------------------------------- models of the user


def _from_factory(text: str) -> tuple[nn.Module, Any]:
    """What a factory makes, called with the meta device as the default one."""
    factory = _import_factory(text)
    try:
        with torch.device("meta"):
            made = factory()
    except (Exception, SystemExit) as error:  # whatever the user's code raises, with its place
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((f for f in reversed(frames) if not f.filename.startswith(_LIBRARIES)), frames[-1])
        raise InputError(
            f"{text} failed at {frame.filename}:{frame.lineno} ({type(error).__name__}: {error}). It is called with "
            'the meta device as the default: what needs real values goes under `with torch.device("cpu"):` in it'
        ) from error
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise InputError(f"{text} must return a module or (module, example_inputs), not {type(made).__name__}")


_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _import_factory(text: str) -> Callable[[], Any]:
    name, _, path = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = attrgetter(path)(importlib.import_module(name))
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise InputError(f"cannot import {text} from {os.getcwd()}: {type(error).__name__}: {error}") from error
    if not callable(found) or isinstance(found, nn.Module):
        raise InputError(f"{text} is a {type(found).__name__}: name a function that takes nothing and returns a module")
    factory: Callable[[], Any] = found
    return factory


def _describe_params(model: nn.Module) -> str:
    parameters = list(model.parameters())
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "nothing"
    count = float(sum(p.numel() for p in parameters))
    for unit, scale in (("billion ", 1e9), ("million ", 1e6), ("", 1.0)):
        if count >= scale or not unit:
            return f"{count / scale:.{2 if unit else 0}f} {unit}parameters in {dtypes}"
    raise AssertionError("the loop returns at the last unit")


__all__ = ["ModelCall", "find_model", "model_shapes"]
