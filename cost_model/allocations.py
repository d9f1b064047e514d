"""Counting the tensor memory that ops really take, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._compat import TorchDispatchMode, storage_id


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of the storages that ops return, until each is freed.

    A storage counts once, however many views it has, from the op that returns it to the death of its last tensor.  The
    memory of tensors that were made before counts only if `hold` is called with them.  What an op takes for itself and
    gives back before it returns is not seen; the operands of an op are alive when its result is counted.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most that was alive since the start or the last `reset_peak`.
        peak_op: the op that made the peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.peak_op = ""
        self._sizes: dict[int, int] = {}

    def hold(self, value: object) -> None:
        """Count tensors that exist already."""
        for tensor in _tensors(value):
            self._register(tensor, counted=False)
            key, num_bytes = storage_id(tensor), tensor.untyped_storage().nbytes()
            self.live_bytes += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget peaks before now."""
        self.peak_bytes, self.peak_op = self.live_bytes, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on the local tensors come here
        self._register((args, kwargs), counted=False)
        result = self.run(func, args, kwargs or {})
        self._register(result, counted=True)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_op = self.live_bytes, str(func)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out one op, unseen by the tracker; a subclass may answer it in another way."""
        return func(*args, **kwargs)

    def _register(self, value: object, counted: bool) -> None:
        for tensor in _tensors(value):
            key, storage = storage_id(tensor), tensor.untyped_storage()
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes() if counted else 0
                self.live_bytes += self._sizes[key]
                weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The plain tensors in nested containers; a `DTensor`'s local part."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
