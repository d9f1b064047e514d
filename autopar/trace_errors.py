"""What to say when a model cannot be traced: where in it, why, and what to do about it."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import torch

from autopar._compat import value_read
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
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if (read := value_read(error)) is not None:
        kind, op = read
        what, way_out = _READS[kind]
        if places and "site-packages" in places[-1][0].f_code.co_filename:
            way_out = f"{_IN_LIBRARY}. In code of your own: {way_out[0].lower()}{way_out[1:]}"
        return TraceError(
            f"cannot trace the model to one graph: {module}{place} depends on the values of a tensor:"
            f" {what.format(op=op)}. {way_out}. What follows from the inputs alone can also be computed before the call"
            " and passed in; shapes and Python values among the arguments are constants here and may decide"
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


_IN_LIBRARY = (
    "The line is a library's: look for an option that leaves it out, or do not give the argument that leads there"
    " (labels, say) and compute that part yourself"
)

_READS = {
    "condition": (
        "an `if`, `while` or `assert` asks for one",
        "Compute both cases and take each where it holds (torch.where(condition, a, b)); a check or an early exit that"
        " the numbers do not need goes under `if not torch.compiler.is_compiling():`",
    ),
    "number": (
        "a Python number is made of one, as .item(), .tolist(), int(), range() and sizes do",
        "Keep it a tensor: multiply by it, index by it, or loop to a fixed bound and mask what is beyond"
        " (torch.arange(bound) < n)",
    ),
    "shape": (
        "they say how many elements {op} gives, as a mask does when it is an index",
        "Keep every element and give those that are not selected the weight 0 (torch.where(mask, y, 0).sum() /"
        " mask.sum()); count with one_hot(x, n).sum(0); take a fixed number (topk); give repeat_interleave its"
        " output_size",
    ),
    "numpy": ("numpy reads them", "Use the function of torch that does the same"),
    "text": (
        "they are written out",
        "Put that under `if not torch.compiler.is_compiling():`, or write out what the model returns",
    ),
}
"""For each way of reading a tensor: what was done, and what to do instead."""


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
