"""What of the model runs eagerly: the parameters of each module are gathered while that is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import around_calls


@contextmanager
def gathered_calls(model: nn.Module) -> Iterator[None]:
    """While active, a module that is called holds whole plain tensors instead of DTensors until it returns: its own
    parameters, and those of its children that have none themselves, which some modules read without calling them.

    Every rank must make the same calls, for gathering is collective.  The tensors have no gradient: what is computed
    here cannot be trained, and `backward` says so.
    """
    modules = dict(model.named_modules())

    @contextmanager
    def around(path: str) -> Iterator[None]:
        module = modules[path]
        owners = [module, *(child for child in module.children() if not any(True for _ in child.children()))]
        before = [
            (owner._parameters, name, parameter)
            for owner in dict.fromkeys(owners)
            for name, parameter in owner._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        whole: dict[int, nn.Parameter] = {}
        for registry, name, parameter in before:
            if id(parameter) not in whole:
                with torch.no_grad():
                    whole[id(parameter)] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
            registry[name] = whole[id(parameter)]
        try:
            yield
        finally:
            for registry, name, parameter in before:
                registry[name] = parameter

    with around_calls(model, around):
        yield
