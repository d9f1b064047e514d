"""Weights in safetensors files, in the names and the layout of directories that Hugging Face models come in.

Reading takes from the files only the slices that a rank holds; writing has one whole tensor at a time.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.control import ControlGroup
from autopar.runtime.slices import Slices

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def load_files(directory: Path, model: nn.Module, parameters: Mapping[str, Slices], control: ControlGroup) -> None:
    """Fill parameters, and the persistent buffers that the files have, from the files of a directory.

    Raises:
        CheckpointError: on every rank, if files or parameters are missing, damaged, or of another shape.
    """
    control.on_every_rank(f"loading weights from {directory}", lambda: _load(directory, model, parameters))


def _load(directory: Path, model: nn.Module, parameters: Mapping[str, Slices]) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError("reading weights needs the package safetensors: pip install safetensors") from error
    persistent = model.state_dict().keys()
    buffers = {name: Slices(b, b.shape) for name, b in model.named_buffers() if name in persistent}
    wanted = {**buffers, **parameters}
    aliases = _first_names(model)
    filled: set[str] = set()
    unknown: list[str] = []
    try:
        paths = _files(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    first = aliases.get(name, name)
                    if first not in wanted:
                        unknown.append(name)
                    elif first not in filled:
                        _fill(wanted[first], file, name, path)
                        filled.add(first)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    missing = [name for name in parameters if name not in filled]
    if missing:
        raise CheckpointError(f"{directory} lacks {_some(missing)} of the model{_has(unknown)}: is it another model's?")
    if unknown:
        warnings.warn(f"{directory} has weights that the model does not: {_some(unknown)}; left out", stacklevel=6)


def _fill(slices: Slices, file: Any, name: str, path: Path) -> None:
    whole = file.get_slice(name)
    if list(whole.get_shape()) != list(slices.shape):
        raise CheckpointError(f"{name} has shape {whole.get_shape()} in {path}, in the model {list(slices.shape)}")
    with torch.no_grad():
        for where, part in slices.pieces():
            part.copy_(whole[where] if where else file.get_tensor(name))


def _files(directory: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, or the single one, or all."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise CheckpointError(f"{index} names files outside its directory")
        return [directory / name for name in sorted(names)]
    single = directory / SINGLE
    found = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{directory} holds no .safetensors files")
    return found


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a tied parameter -> the first one."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in every}


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _has(unknown: list[str]) -> str:
    return f" (it has {_some(unknown)} instead)" if unknown else ""


def save_files(directory: Path, model: nn.Module, control: ControlGroup, max_bytes: int) -> None:
    """Write parameters and persistent buffers; called on every rank.

    Raises:
        CheckpointError: on every rank, if a file cannot be written, or a tensor's dtype has no name in the format.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in persistent)]
    tensors: dict[str, Tensor] = dict(named)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors files do not hold here")
    shards = list(_shards(tensors, max_bytes))
    failure: OSError | None = None
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i + 1, len(shards)) for i in range(len(shards))]
    for file_name, shard in zip(names, shards, strict=True):
        failure = _write(directory / file_name, shard, control.rank == 0 and failure is None) or failure

    def finish() -> None:
        try:
            if failure is not None:
                raise failure
            _finish(directory, model, dict(zip(names, shards, strict=True)))
        except OSError as error:
            raise CheckpointError(f"weights cannot be written to {directory}: {error}") from error

    control.on_first_rank(f"writing weights to {directory}", finish)


def _finish(directory: Path, model: nn.Module, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write what stands beside the files of weights: which tensor is in which, and the model's config."""
    index = directory / INDEX
    if len(shards) > 1:
        placed = {name: file_name for file_name, shard in shards.items() for name in shard}
        size = sum(_num_bytes(tensor) for shard in shards.values() for tensor in shard.values())
        aside = index.with_suffix(".writing")
        try:
            aside.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": placed}, indent=2))
            aside.replace(index)
        finally:
            aside.unlink(missing_ok=True)
    else:
        index.unlink(missing_ok=True)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(directory)


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(map(_num_bytes, shard.values())) + _num_bytes(tensor) > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write(path: Path, tensors: Mapping[str, Tensor], writes: bool) -> OSError | None:
    """One file, of tensors that every rank gathers and one writes: beside the old one, then in its place.

    A failure to write is returned, so that this rank goes on gathering with the others.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside, file, failure = path.with_name(f".{path.name}.writing"), None, None
    try:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(aside, "wb")  # noqa: SIM115 (closed below, for gathering goes on after a failure)
            file.write(len(text).to_bytes(8, "little") + text)
    except OSError as error:
        failure = error
    for tensor in tensors.values():
        full = _gather(tensor)
        if file is not None and failure is None:
            try:
                file.write(full.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
            except OSError as error:
                failure = error
    if file is not None:
        failure = _close(file, aside, path, failure)
    return failure


def _gather(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _close(file: Any, aside: Path, path: Path, failure: OSError | None) -> OSError | None:
    try:
        if failure is None:
            file.flush()
            os.fsync(file.fileno())
        file.close()
        if failure is None:
            aside.replace(path)
    except OSError as error:
        failure = failure or error
    if failure is not None:
        aside.unlink(missing_ok=True)
    return failure
