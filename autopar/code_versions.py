"""Which code runs in this process: versions of packages, and digests of the files that define a model."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

import torch
from torch import nn

_COVERED = ("torch", "builtins", "abc", "typing", "collections")
"""Packages whose classes need no digest: their versions are compared."""

_READ = (".py", ".csv", ".json")


def versions() -> dict[str, str]:
    """Package -> its version here."""
    try:
        own = importlib.metadata.version("autopar")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        own = "not installed"
    return {"python": platform.python_version(), "torch": str(torch.__version__), "autopar": own}


def code_of(model: nn.Module) -> dict[str, str]:
    """What is compared -> a digest of it: autopar's own files, and each file that defines a class of the model, base
    classes included.  Classes without a file, as those of a prompt, are left out."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    found = {"code of autopar": own_code()}
    for name in sorted(names):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and name.partition(".")[0] not in _COVERED and Path(path).is_file():
            found[f"code of {Path(path).name} ({name})"] = _digest([Path(path)])
    return found


@functools.cache
def own_code() -> str:
    """A digest of autopar's own files, code and tables: its version alone does not change as they do."""
    folder = Path(__file__).parent
    stages = (folder, *(folder / stage for stage in ("cost_model", "passes", "runtime")))
    return _digest(sorted(path for stage in stages for path in stage.iterdir() if path.suffix in _READ))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
