"""The model with whole tensors, one module after the other: what runs eagerly, and what gives parameters values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import around_calls
from autopar.errors import StaleModelError
from autopar.runtime.control import ControlGroup

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class _Held:
    """A parameter that a module holds whole for a while."""

    registry: dict[str, Any]
    name: str
    parameter: DTensor
    whole: nn.Parameter


@contextmanager
def _holding_whole(module: nn.Module) -> Iterator[list[_Held]]:
    """While active, plain tensors stand for the DTensors of a module, and of its children that have no children: some
    modules, though no containers, read these without calling them."""
    children = [] if isinstance(module, _CONTAINERS) else module.children()
    owners = [module, *(child for child in children if not any(True for _ in child.children()))]
    gathered: dict[int, nn.Parameter] = {}
    held: list[_Held] = []
    for owner in dict.fromkeys(owners):
        registry: dict[str, Any] = owner._parameters
        for name, parameter in registry.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in gathered:
                    with torch.no_grad():
                        gathered[id(parameter)] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
                held.append(_Held(registry, name, parameter, gathered[id(parameter)]))
    for one in held:
        one.registry[one.name] = one.whole
    try:
        yield held
    finally:
        for one in held:
            one.registry[one.name] = one.parameter


@contextmanager
def gathered_calls(model: nn.Module) -> Iterator[None]:
    """While active, a module that is called holds whole plain tensors until it returns.

    Every rank must make the same calls, for gathering is collective.  The tensors have no gradient: what is computed
    here cannot be trained, and `backward` says so.
    """
    modules = dict(model.named_modules())

    @contextmanager
    def around(path: str) -> Iterator[None]:
        with _holding_whole(modules[path]):
            yield

    with around_calls(model, around):
        yield


def apply_whole(
    model: nn.Module,
    function: Callable[[nn.Module], Any],
    control: ControlGroup,
    write: Callable[[Tensor, DTensor], None],
    has_values: Callable[[DTensor], bool],
) -> None:
    """`model.apply(function)`, with each module's parameters whole while `function` sees it, and written back after.

    Random numbers are rank 0's on every rank, so that they are those that a single device draws.

    Args:
        write: writes a whole tensor into a parameter.
        has_values: whether a parameter has any; one that has none is written only if `function` gave it some.

    Raises:
        StaleModelError: if `function` puts another tensor in the place of a parameter.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    seed = control.gather(torch.get_rng_state())[0]

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        with _holding_whole(module) as held:
            empty = {id(one.whole): one.whole for one in held if not has_values(one.parameter)}
            for whole in empty.values():
                whole.detach().fill_(float("nan") if whole.is_floating_point() else 0)
            function(module)
            for one in held:
                if one.registry[one.name] is not one.whole:
                    raise StaleModelError(
                        f"apply put another tensor in the place of {one.name!r} of a {type(module).__name__}: change "
                        "its values in place"
                    )
            for one in {id(one.whole): one for one in held}.values():
                if id(one.whole) not in empty or not one.whole.isnan().all():
                    write(one.whole.detach(), one.parameter)

    with torch.random.fork_rng(devices, enabled=control.rank > 0, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(seed)
        if devices:
            on_device = torch.get_device_module(device.type)
            on_device.set_rng_state(control.gather(on_device.get_rng_state())[0])
        visit(model)
