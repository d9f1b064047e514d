"""What to say when a model cannot be traced: where in it, why, and what to do about it."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import torch

from autopar._compat import is_value_read
from autopar.errors import TraceError


def trace_error(error: Exception, paths: Mapping[int, str], dtype: torch.dtype | None) -> TraceError:
    """Where in the model an exception came from, why, and what to do about it.

    Args:
        error: what tracing raised.
        paths: module path by id of the module.
        dtype: what the model computes in, if not in its tensors' dtypes.
    """
    frames = list(_frames(error))
    active = [paths[id(f.f_locals.get("self"))] for f, _ in frames if id(f.f_locals.get("self")) in paths]
    module = f"module {active[-1]}" if active and active[-1] else "the root module"
    places = [(f, number) for f, number in frames if not _is_library(f.f_code.co_filename)]
    place = ""
    if places:
        frame, number = places[-1]
        code = linecache.getline(frame.f_code.co_filename, number).strip()
        place = f", {frame.f_code.co_filename}:{number}" + (f" (`{code}`)" if code else "")
    reason = str(error).strip().partition("\n")[0]
    if is_value_read(error):
        return TraceError(
            f"cannot trace the model to one graph: {module}{place} depends on the values of a tensor"
            f" ({type(error).__name__}: {reason}). Compute it with tensor ops (torch.where, masking instead of"
            " selecting), or decide from shapes or from Python values given as arguments"
        )
    mixed = (
        f" Parameters are used as {dtype} here, while buffers and what is computed from them stay as they are: cast one"
        " to the other where they meet (x.to(y.dtype))."
    )
    return TraceError(
        f"cannot trace the model to one graph: {module}{place} raised {type(error).__name__}: {reason}."
        f"{mixed if dtype else ''}"
        " If the model runs eagerly on the same inputs, it does something there that fake tensors cannot"
    )


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames between the trace and the place where the exception was raised, outermost first."""
    link: TracebackType | None = error.__traceback__
    while link is not None:
        yield link.tb_frame, link.tb_lineno
        link = link.tb_next


def _is_library(filename: str) -> bool:
    """Whether a source file belongs to PyTorch, to autopar or to Python's standard library."""
    if filename.startswith(_LIBRARY_ROOTS) or filename.startswith("<"):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


_LIBRARY_ROOTS = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent) + "/")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"
