"""A model's buffers by name, wherever they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from autopar.errors import StaleModelError


class Buffers(Mapping[str, Tensor]):
    """The model's buffers by name, looked up in their module each time: a user may assign a new one."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = {
            f"{prefix}.{attribute}" if prefix else attribute: (module, attribute)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for attribute in module._buffers
        }

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self._owners[name]
        buffer = module._buffers.get(attribute)
        if buffer is None:
            raise StaleModelError(f"buffer {name!r} was removed after planning")
        return cast(Tensor, buffer)

    def find_all(self) -> dict[str, Tensor | None]:
        """Every one, or None where it was removed."""
        return {name: module._buffers.get(attribute) for name, (module, attribute) in self._owners.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class BufferShapes:
    """What a model's buffers were like when its parameters were sharded: programs are compiled for these shapes."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = Buffers(model)
        self._before = self._shapes()

    def _shapes(self) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
        found = self._buffers.find_all()
        return {name: None if held is None else (held.shape, held.dtype) for name, held in found.items()}

    def check(self, planned: bool = True) -> None:
        """Compare with how it was; before planning, buffers may still change.

        Raises:
            StaleModelError: if a buffer was resized or cast, or came or went.
        """
        now = self._shapes()
        if not planned:
            self._before = now
        if now == self._before:
            return
        name = next(name for name in now if now[name] != self._before[name])
        before, after = (_describe(shapes[name]) for shapes in (self._before, now))
        raise StaleModelError(
            f"buffer {name!r} changed after planning: expected {before}, found {after}; make such changes first, then "
            "call autopar.parallelize again on a fresh model"
        )


def _describe(buffer: tuple[torch.Size, torch.dtype] | None) -> str:
    return "none" if buffer is None else f"{list(buffer[0])} {buffer[1]}"
