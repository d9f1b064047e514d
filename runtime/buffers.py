"""A model's buffers by name, wherever they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

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
        buffer = module._buffers[attribute]
        if buffer is None:
            raise StaleModelError(f"buffer {name!r} was removed after planning")
        return cast(Tensor, buffer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)
