"""A model's tensors by name, and what is needed to put the model back after a trace has run its forward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.signature import undivided_kind


class ModelState:
    """What a model holds at one moment.

    Attributes:
        parameters, buffers: each tensor once, under its first name.
        tied: every other name of a tensor -> its first name.
        paths: path of each module, by its id.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, torch.jit.ScriptModule):
                raise TraceError(
                    f"module {path or '(root)'} is TorchScript: give the Python module that it was made from"
                )
            for registry, kept in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
                for key, tensor in registry.items():
                    if tensor is None:
                        continue
                    name = f"{path}.{key}" if path else key
                    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                        raise TraceError(f"{name} has no shape yet (a lazy module): run the model once, then trace it")
                    _refuse_unsplittable(name, tensor)
                    canonical = first.setdefault(id(tensor), name)
                    if canonical == name:
                        kept[name] = tensor
                    else:
                        self.tied[name] = canonical
                    self._slots.append((registry, key, canonical))
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._contents = [
            (value, value.copy() if value else ())  # most are empty, and copying those would take most of the time
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]
        self.left: dict[str, Any] = {}
        """What the last forward set on the modules, see `changes`."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, then buffers."""
        return {**self.parameters, **self.buffers}

    def restore(self) -> None:
        """Give every module the attributes, parameters, buffers, submodules, hooks and containers that it had."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            elif content:
                container.update(content)

    def changes(self) -> dict[str, Any]:
        """What modules hold now that they did not before, by path and attribute: numbers, texts and tensors, by
        themselves or put into a list or dict.  (Registered tensors are `reassigned`'s.)"""
        changed: dict[str, Any] = {}
        contents = {id(container): content for container, content in self._contents}
        for module, attributes in self._attributes:
            path = self.paths[id(module)]
            computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
            for name, value in vars(module).items():
                if name in _REGISTRIES or name in computed:  # such a hook computes a weight before each call
                    continue
                place = f"{path}.{name}" if path else name
                if id(value) in contents:
                    changed |= _additions(place, value, contents[id(value)])
                elif isinstance(value, _VALUES) and value is not attributes.get(name):
                    changed[place] = value
        return changed

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the modules hold `tensors`, by first name, instead of their own."""
        for registry, key, canonical in self._slots:
            registry[key] = tensors[canonical]

    def reassigned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The buffers that, since `put(tensors)`, have been set to another tensor.

        Raises:
            TraceError: if a parameter was, or a buffer has another shape or dtype now.
        """
        changed: dict[str, torch.Tensor] = {}
        for registry, key, canonical in self._slots:
            before, after = tensors[canonical], registry.get(key)
            if after is None or after is before:
                continue
            if canonical in self.parameters:
                raise TraceError(
                    f"the forward replaces parameter {canonical} by another tensor: only buffers may change"
                )
            if (after.shape, after.dtype) != (before.shape, before.dtype):
                raise TraceError(
                    f"the forward replaces buffer {canonical} of shape {list(before.shape)} and {before.dtype} by one"
                    f" of shape {list(after.shape)} and {after.dtype}: only its values may change"
                )
            changed[canonical] = after
        return changed


_CONTAINERS = (dict, OrderedDict, list, set)
_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_VALUES = (bool, int, float, complex, str, torch.Tensor)


def _additions(place: str, container: Any, before: Any) -> dict[str, Any]:
    """What a container holds now that its copy `before` does not."""
    if isinstance(container, dict):
        new = {f"{place}[{key!r}]": v for key, v in container.items() if not before or v is not before.get(key)}
    elif isinstance(container, list) and len(container) > len(before):
        new = {f"{place}[{i}]": container[i] for i in range(len(before), len(container))}
    else:
        return {}
    return {name: value for name, value in new.items() if isinstance(value, _VALUES)}


def _refuse_unsplittable(name: str, tensor: torch.Tensor) -> None:
    if kind := undivided_kind(tensor):
        raise TraceError(f"{name} is a {kind} tensor, and only dense ones can be cut: make it dense")
    if tensor.is_complex() and tensor.requires_grad:
        raise TraceError(
            f"parameter {name} is {tensor.dtype}, and complex gradients are not exchanged between ranks: keep it as a "
            "real parameter with a last dim of 2, and use torch.view_as_complex of it in forward"
        )
