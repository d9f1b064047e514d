"""Reading the files of a checkpoint without executing anything in them."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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
        tensors, files = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
        if not isinstance(found, Metadata) or not isinstance(tensors, dict) or not isinstance(files, dict):
            raise CheckpointError(f"{path} does not describe a checkpoint")
        for info in files.values():
            relative = Path(str(getattr(info, "relative_path", "/")))
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointError(f"{path} names a file outside the checkpoint: {relative}")
        found.storage_meta = found.storage_meta or names.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
