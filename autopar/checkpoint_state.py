"""What a checkpoint holds: the tensors of model and optimizer by name, and in JSON what is no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import local_part
from autopar.runtime.slices import Slices

STATE_FILE = "state.json"
FORMAT = 1

OptimizerState = dict[str, dict[str, Tensor]]
"""Parameter's name -> the optimizer's tensors for it, by their key."""


def model_slices(model: nn.Module) -> dict[str, Slices]:
    """Every parameter and every persistent buffer, each once, under its first name."""
    persistent = model.state_dict()
    for name, value in persistent.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} of the state dict is a {type(value).__name__}, and only tensors are kept")
    named = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in persistent)]
    return {f"model.{name}": _slices(model, name, tensor) for name, tensor in named}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's tensors by the names of the parameters."""
    names = _names(model)
    found: OptimizerState = {}
    for parameter, values in optimizer.state.items():
        name = _name_of(parameter, names)
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        others = [key for key, value in values.items() if value is not None and key not in tensors]
        if others:
            raise CheckpointError(
                f"the optimizer's state {others[0]!r} of {name} is no tensor, and only those are kept"
            )
        found[name] = tensors
    return found


def slices_of_state(model: nn.Module, state: OptimizerState) -> dict[str, Slices]:
    """The tensors of an optimizer as a checkpoint names them."""
    return {
        f"optimizer.{name}.{key}": _slices(model, name, value)
        for name, values in state.items()
        for key, value in values.items()
    }


def _slices(model: nn.Module, name: str, value: Tensor) -> Slices:
    """A parameter, or a tensor that lies as the parameter of this name does; or a plain one, whole on every rank."""
    if not isinstance(value, DTensor):
        return Slices(value, value.shape)
    if not isinstance(model, ParallelModule):
        raise CheckpointError(f"{name} is a DTensor: give the ParallelModule that it is of")
    sharding, layout = model.placement_of(name)
    return Slices(local_part(value), value.shape, sharding, layout.mesh, layout.rank)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer holds a parameter, of shape {list(parameter.shape)}, that is not the model's: make it of "
            "pm.parameters(), after parallelize"
        )
    return names[id(parameter)]


def state_text(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None) -> str:
    """The JSON beside the tensors.

    Raises:
        CheckpointError: for what JSON cannot hold.
    """
    groups = None if optimizer is None else list(_groups(model, optimizer))
    random = list(model.random_state) if isinstance(model, ParallelModule) else None
    kind = None if optimizer is None else sorted(optimizer.defaults)
    state = {"format": FORMAT, "kind": kind, "groups": groups, "random": random, "extra": dict(extra or {})}
    try:
        return json.dumps(state, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra, and an optimizer's settings, must be numbers, texts, lists or dicts: {error}"
        ) from error


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    names = _names(model)
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        plain = {key: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in settings.items()}
        yield {"params": [_name_of(p, names) for p in group["params"]], "settings": plain}


def read_state(directory: Path) -> dict[str, Any]:
    """The JSON of a checkpoint.

    Raises:
        CheckpointError: if it is damaged or of another format.
    """
    path = directory / STATE_FILE
    try:
        state = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}, which this version reads")
    random, groups = state.get("random"), state.get("groups")
    is_pair = isinstance(random, list) and len(random) == 2 and all(type(number) is int for number in random)
    if not isinstance(state.get("extra"), dict) or not (random is None or is_pair):
        raise CheckpointError(f"{path} is damaged: 'extra' must be an object and 'random' two numbers")
    if groups is not None and not (isinstance(groups, list) and all(map(_is_group, groups))):
        raise CheckpointError(f"{path} is damaged: 'groups' must be a list of names and settings")
    kind = state.get("kind")
    if not (kind is None or (isinstance(kind, list) and all(isinstance(name, str) for name in kind))):
        raise CheckpointError(f"{path} is damaged: 'kind' must be a list of names")
    return {"extra": state["extra"], "kind": kind, "groups": groups, "random": tuple(random) if random else None}


def _is_group(group: object) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        and isinstance(group.get("settings"), dict)
    )


def check_same(wanted: Mapping[str, Slices], saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: with up to five of the names that are missing, too many or of another shape.
    """
    of_model = {name: value for name, value in saved.items() if name.startswith("model.")}
    differences = [
        *(f"{name} is missing" for name in wanted if name not in of_model),
        *(f"{name} is not in the model" for name in of_model if name not in wanted),
    ]
    for name in wanted.keys() & of_model.keys():
        if saved[name].size != wanted[name].shape:
            shapes = f"{list(saved[name].size)}, and in the model {list(wanted[name].shape)}"
            differences.append(f"{name} has shape {shapes}")
    if differences:
        more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"it is of another model: {'; '.join(sorted(differences)[:5])}{more}")


def room_for_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], state: Mapping[str, Any]
) -> OptimizerState:
    """Empty tensors for the state that a checkpoint holds for the optimizer's parameters, lying as these do.

    Raises:
        CheckpointError: if it has none, or it is that of other parameters.
    """
    if state["groups"] is None:
        raise CheckpointError("it was saved without an optimizer: leave the optimizer out")
    if state["kind"] is not None:
        _check_kind(set(optimizer.defaults), set(state["kind"]))
    ours = [sorted(group["params"]) for group in _groups(model, optimizer)]
    theirs = [sorted(group["params"]) for group in state["groups"]]
    if ours != theirs:
        raise CheckpointError(
            f"its optimizer has groups of {list(map(len, theirs))} parameters, and the one given has "
            f"{list(map(len, ours))}, or of others: make the same groups"
        )
    for ours_group, group in zip(optimizer.param_groups, state["groups"], strict=True):
        for key, value in group["settings"].items():
            if key in ours_group and not _is_alike(ours_group[key], value):
                raise CheckpointError(f"its optimizer has {key} = {value!r:.60}, and the one given {ours_group[key]!r}")
    parameters = dict(model.named_parameters())
    made: OptimizerState = {}
    for full_name, described in saved.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        if not full_name.startswith("optimizer.") or name not in parameters:
            continue
        made.setdefault(name, {})[key] = _empty(parameters[name], key, described)
    return made


def _check_kind(ours: set[str], theirs: set[str]) -> None:
    """Refuse the state of another kind of optimizer, as told by the names of its settings; a version may add some."""
    if theirs - ours and ours - theirs:
        raise CheckpointError(
            f"it is of another kind of optimizer, with the settings {', '.join(sorted(theirs - ours))}; the one given "
            f"has {', '.join(sorted(ours - theirs))} instead"
        )


def _is_alike(ours: object, theirs: object) -> bool:
    """Whether a setting may take the place of another; flags such as `foreach` may be None."""
    if ours is None or theirs is None:
        return isinstance(theirs if ours is None else ours, (bool, type(None)))
    if isinstance(ours, tuple):
        return isinstance(theirs, list) and len(ours) == len(theirs) and all(map(_is_alike, ours, theirs))
    if isinstance(ours, (int, float, Tensor)) and not isinstance(ours, bool):
        return isinstance(theirs, (int, float)) and not isinstance(theirs, bool)
    return isinstance(theirs, type(ours))


def _empty(parameter: Tensor, key: str, described: Any) -> Tensor:
    dtype = described.properties.dtype
    if described.size == parameter.shape and key != "step":  # which is a number, even for a parameter that is one
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(described.size, dtype=dtype)


def put_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, made: OptimizerState, state: Mapping[str, Any]
) -> None:
    """Give the optimizer its state and settings."""
    numbers = {id(p): number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    parameters = dict(model.named_parameters())
    groups = []
    for ours, theirs in zip(optimizer.param_groups, state["groups"], strict=True):
        settings = {
            key: tuple(value) if isinstance(ours.get(key), tuple) else value
            for key, value in theirs["settings"].items()
        }
        groups.append({**ours, **settings, "params": [numbers[id(p)] for p in ours["params"]]})
    optimizer.load_state_dict(
        {"state": {numbers[id(parameters[name])]: values for name, values in made.items()}, "param_groups": groups}
    )
