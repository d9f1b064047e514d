"""Call a module by itself on given tensors, and leave it as it was: so an `OpaqueCall` runs, and is found out about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.model_state import ModelState
from autopar.opaque import UnfitError
from autopar.precision import InputCast, WideLosses
from autopar.signature import CallSignature, OutputTree, call_signature, flatten_output

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What a module may be given and may keep besides tensors."""


@dataclass(frozen=True)
class Given:
    """What a call gave: its return value, and what it set on modules, by their place among `modules()` and name.

    Attributes:
        tensors: those returned and then those set, in order.
        tree: of the return value.
        settings: what was set: a value, or a mark for a tensor.
    """

    tensors: list[Tensor]
    tree: OutputTree
    settings: Mapping[tuple[int, str], Any]
    num_returned: int

    def key(self) -> tuple[Hashable, ...]:
        """Equal for calls that gave as many tensors in the same places, and the same of all else."""
        names = tuple((place, type(value), value) for place, value in self.settings.items())
        return self.tree.paths, self.tree.slots, repr(self.tree.tree), names

    def place(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """The return value made of `tensors`, which also go to where the call set some, on a module like the called."""
        rest, inner = iter(tensors[self.num_returned :]), list(module.modules())
        for (at, name), value in self.settings.items():
            vars(inner[at])[name] = next(rest) if isinstance(value, _Kept) else value
        return self.tree.rebuild(tensors[: self.num_returned])


@dataclass(frozen=True)
class _Kept:
    """Stands for a tensor that a call set on a module."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: all that it depends on but the values of tensors.

    Attributes:
        module, forward: the module, and what it runs.
        signature: of the arguments.
        places: for each tensor among the arguments which of the call's tensors it is; one may be given twice.
        slots: the registries of parameters and buffers: which module's (by its place among `modules()`), of what kind,
            the name there and which of the call's tensors.
        casts: to what dtype modules inside get their inputs.
        settings: numbers and texts on the modules, such as their mode.
        wide: whether losses are computed in float32 at least.
        likeness: equal for modules that do the same but for settings.
    """

    module: nn.Module
    forward: Callable[..., Any] = field(compare=False)
    signature: CallSignature
    places: tuple[int, ...]
    slots: tuple[tuple[int, str, str, int], ...]
    casts: tuple[tuple[int, InputCast], ...]
    settings: tuple[tuple[int, str, Any], ...]
    wide: bool
    likeness: tuple[Hashable, ...]

    @staticmethod
    def of(
        module: nn.Module,
        forwards: Mapping[nn.Module, Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wide: bool,
    ) -> tuple[ModuleCall, list[Tensor]]:
        """A call, and its tensors: arguments, then parameters and buffers, each once; `forwards` has what modules run.

        Raises:
            UnfitError: if it is given something else than tensors, numbers and texts.
        """
        try:
            signature, arguments = call_signature(args, kwargs)
        except InputError as error:
            raise UnfitError(str(error)) from error
        for slot in signature.slots:
            if slot is not None and not isinstance(slot.value, PLAIN):
                raise UnfitError(f"it is called with a {type(slot.value).__name__}, whose contents are not seen")
        index: dict[int, int] = {}
        tensors: list[Tensor] = []

        def number(tensor: Tensor) -> int:
            if id(tensor) not in index:
                index[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return index[id(tensor)]

        modules = list(enumerate(module.modules()))
        places = tuple(number(tensor) for tensor in arguments)
        slots = tuple(
            (at, kind, key, number(tensor))
            for kind in ("_parameters", "_buffers")
            for at, inner in modules
            for key, tensor in getattr(inner, kind).items()
            if tensor is not None
        )
        if not tensors:
            raise UnfitError("it is given no tensor")
        hooks = [(at, hook) for at, inner in modules if at for hook in inner._forward_pre_hooks.values()]
        casts = tuple((at, hook) for at, hook in hooks if isinstance(hook, InputCast))
        attributes = [(at, name, value) for at, inner in modules for name, value in vars(inner).items()]
        settings = tuple((at, name, value) for at, name, value in attributes if isinstance(value, PLAIN))
        numbers = {id(inner): at for at, inner in modules}
        likeness = tuple(_likeness(inner, forwards[inner], numbers) for _, inner in modules)
        call = ModuleCall(module, forwards[module], signature, places, slots, casts, settings, wide, likeness)
        return call, tensors

    def key(self) -> tuple[Hashable, ...]:
        """Equal for calls that do the same with equal settings and tensors of the same kinds and values."""
        return self.likeness, self.signature.key, self.places, self.slots

    def run(self, tensors: Sequence[Tensor]) -> Given:
        """Call the module on other tensors, and put it back.

        Raises:
            UnfitError: if it replaces parameters or buffers, changes a list or dict on a module, or gives or keeps
                something else than tensors, numbers and texts.
        """
        state, modules = ModelState(self.module), list(self.module.modules())
        try:
            for at, name, value in self.settings:
                vars(modules[at])[name] = value
            for at, kind, key, position in self.slots:
                getattr(modules[at], kind)[key] = tensors[position]
            args, kwargs = self.signature.rebuild([tensors[at] for at in self.places])
            with ExitStack() as stack:
                for at, cast in self.casts:
                    handle = modules[at].register_forward_pre_hook(cast, with_kwargs=True)
                    stack.callback(handle.remove)
                if self.wide:
                    stack.enter_context(WideLosses())
                before = [(inner, dict(vars(inner)), _contents(inner)) for inner in modules]
                returned = self.forward(*args, **kwargs)
            self._check_registries(modules, tensors)
            return _given(returned, before)
        finally:
            state.restore()

    def _check_registries(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> None:
        for at, kind, key, position in self.slots:
            if getattr(modules[at], kind).get(key) is not tensors[position]:
                raise UnfitError(f"it replaces {key} of a {type(modules[at]).__name__} by another tensor")


REGISTRIES = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip


def _likeness(module: nn.Module, forward: Callable[..., Any], numbers: Mapping[int, int]) -> tuple[Hashable, ...]:
    """Equal for two modules of a class that hold equal things, or the same, but for tensors, numbers and texts.

    `numbers` are the places of modules among all.
    """
    own = getattr(forward, "__self__", None) is module
    names = [(kind, key, value is None) for kind in _NAMED for key, value in getattr(module, kind).items()]
    inner = [(key, numbers.get(id(value))) for key, value in module._modules.items()]
    hooks = [_token(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
    held = [
        (name, _token(value))
        for name, value in vars(module).items()
        if name not in REGISTRIES and name not in _WRAPPERS and not isinstance(value, PLAIN)
    ]
    runs = id(forward.__func__ if own else forward)  # type: ignore[attr-defined]
    return id(type(module)), runs, tuple(names), tuple(inner), tuple(hooks), tuple(held)


_NAMED = ("_parameters", "_buffers")
_WRAPPERS = {"forward", "_compiled_call_impl"}
"""Set on modules while they are traced."""


def _token(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, InputCast):
        return "cast", value.dtype
    if isinstance(value, dict):
        return type(value), tuple((_token(key), _token(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_token, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_token, value))
    return "object", id(value)


def _contents(module: nn.Module) -> dict[str, list[Any]]:
    """What the lists and dicts on a module hold."""
    held = ((name, value) for name, value in vars(module).items() if name not in REGISTRIES)
    return {name: _items(value) for name, value in held if isinstance(value, (dict, list, set))}


def _items(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _given(returned: Any, before: Sequence[tuple[nn.Module, dict[str, Any], dict[str, list[Any]]]]) -> Given:
    tree, tensors = flatten_output(returned)
    if tree.dropped:
        raise UnfitError(f"it returns an object that PyTorch cannot look into, {tree.dropped[0] or 'by itself'}")
    num_returned = len(tensors)
    settings: dict[tuple[int, str], Any] = {}
    for at, (module, attributes, contents) in enumerate(before):
        for name, items in contents.items():
            now = vars(module).get(name)
            same = isinstance(now, (dict, list, set)) and len(_items(now)) == len(items)
            if not same or any(a is not b for a, b in zip(_items(now), items, strict=True)):
                raise UnfitError(f"it changes {name} of a {type(module).__name__}")
        for name, value in vars(module).items():
            if name in REGISTRIES or (name in attributes and value is attributes[name]):
                continue
            if isinstance(value, Tensor):
                tensors.append(value)
                settings[at, name] = _Kept()
            elif isinstance(value, PLAIN):
                settings[at, name] = value
            else:
                raise UnfitError(f"it sets {name} of a {type(module).__name__} to a {type(value).__name__}")
        if gone := [name for name in attributes if name not in vars(module)]:
            raise UnfitError(f"it removes {gone[0]} of a {type(module).__name__}")
    return Given(tensors, tree, settings, num_returned)
