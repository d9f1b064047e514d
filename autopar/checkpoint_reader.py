"""Reading the files of a checkpoint without executing anything in them."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from autopar._compat import StorageInfo
from autopar.errors import CheckpointError

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((names.__name__, name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip
"""What PyTorch's description of a checkpoint is made of.  It is a pickle, which could name any function to call."""


def _member(kind: Any, name: str) -> enum.Enum:
    """What some versions of Python call `getattr` for: the member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise CheckpointError(
            f"its description asks for an attribute {name!r}, which no checkpoint needs: do not use it"
        )
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise CheckpointError(f"its description asks for {module}.{name}, which no checkpoint needs: do not use it")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """PyTorch's reader of checkpoints; its description may hold plain data only, and name files inside it only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the checkpoint.

        Raises:
            CheckpointError: if it is missing, damaged, or not plain data.
        """
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                found = _Unpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise CheckpointError(f"{path} is missing or damaged: {type(error).__name__}: {error}") from error
        if not _is_description(found):
            raise CheckpointError(f"{path} does not describe a checkpoint")
        for info in found.storage_data.values():
            relative = Path(info.relative_path)
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointError(f"{path} names a file outside the checkpoint: {relative}")
        description: Metadata = found
        description.storage_meta = names.StorageMeta(load_id=self.load_id)
        return description

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As PyTorch's, which says nothing of a file that is too short."""
        self._check_files(self.storage_data[item.storage_index] for item in plan.items)
        return super().read_data(plan, planner)

    def check_files(self) -> None:
        """Make sure that all files that the description names are there, as this process sees the directory.

        Raises:
            CheckpointError: naming the first that is missing or too short.
        """
        self._check_files(self.read_metadata().storage_data.values())

    def _check_files(self, stretches: Iterable[Any]) -> None:
        ends: dict[str, int] = {}
        for info in stretches:
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = Path(self.path) / name
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing: every rank must name one directory, on a file system they share"
                )
            if (size := path.stat().st_size) < end:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {end} were written")


def _is_description(found: Any) -> bool:
    """Whether what was unpickled has the parts of a description, each of its kind: damage may have left out any."""
    tensors, files = _parts(found, Metadata, "state_dict_metadata", "storage_data")
    return (
        isinstance(tensors, dict)
        and isinstance(files, dict)
        and all(isinstance(name, str) and _is_tensor(tensor) for name, tensor in tensors.items())
        and all(isinstance(index, MetadataIndex) and _is_stretch(info) for index, info in files.items())
    )


def _is_tensor(tensor: Any) -> bool:
    properties, size, chunks = _parts(tensor, TensorStorageMetadata, "properties", "size", "chunks")
    (dtype,) = _parts(properties, TensorProperties, "dtype")
    return (
        isinstance(dtype, torch.dtype) and _is_size(size) and isinstance(chunks, list)
        and all(all(map(_is_size, _parts(chunk, ChunkStorageMetadata, "offsets", "sizes"))) for chunk in chunks)
    )  # fmt: skip


def _is_size(size: object) -> bool:
    return isinstance(size, torch.Size) and all(type(n) is int and 0 <= n < 2**60 for n in size)


def _is_stretch(info: object) -> bool:
    relative, offset, length, filters = _parts(
        info, StorageInfo, "relative_path", "offset", "length", "transform_descriptors"
    )
    numbers = all(type(number) is int and 0 <= number < 2**60 for number in (offset, length))
    return isinstance(relative, str) and "\0" not in relative and numbers and filters is None


def _parts(value: object, kind: type, *attributes: str) -> list[Any]:
    """Attributes of a value, None for each that it lacks or if it is of another kind."""
    return [getattr(value, name, None) if isinstance(value, kind) else None for name in attributes]
