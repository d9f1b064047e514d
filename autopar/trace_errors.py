"""What to say when a model cannot be traced: where in it, why, and what to do about it."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from autopar._compat import is_value_missing, value_read, version_of
from autopar.captured import ACTING
from autopar.errors import TraceError
from autopar.known_values import KnownValues, reads_values
from autopar.selected_rows import UnfollowedError


def trace_error(
    error: Exception, paths: Mapping[int, str], dtype: torch.dtype | None, all_rows: Mapping[str, Sequence[int]]
) -> TraceError:
    """Where in the model an exception came from, why, and what to do about it.

    Args:
        error: what tracing raised.
        paths: module path by id of the module.
        dtype: what the model computes in, if not in its tensors' dtypes.
        all_rows: the inputs' shapes with the rows of all ranks, by path; empty if there is but one.
    """
    place, in_library = _place(error, paths)
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if (read := value_read(error)) is not None:
        kind, op = read
        if reads_itself(error):
            kind, op = "op", _name(_functions(error)[-1])
        elif kind == "condition" and (sized := _asks_for_sizes(error)):
            kind, op = "shape asked for", sized
        what, way_out = _READS[kind]
        if in_library:
            way_out = f"{_IN_LIBRARY}. In code of your own: {way_out[0].lower()}{way_out[1:]}"
        return TraceError(
            f"cannot trace the model to one graph: {place} depends on the values of a tensor:"
            f" {what.format(op=op)}. {way_out}. What follows from the inputs alone can also be computed before the call"
            " and passed in; shapes and Python values among the arguments are constants here and may decide"
        )
    mixed = (
        f" Parameters are used as {dtype} here, while buffers and what is computed from them stay as they are: cast one"
        " to the other where they meet (x.to(y.dtype))."
    )
    shapes = ", ".join(f"{path} {list(shape)}" for path, shape in all_rows.items())
    return TraceError(
        f"cannot trace the model to one graph: {place} raised {type(error).__name__}: {reason}."
        f"{f' The rows of all ranks are traced together: {shapes}.' if all_rows else ''}"
        f"{mixed if dtype else ''}"
        " If the model runs eagerly on the same inputs, it does something there that fake tensors cannot"
    )


def acting_error(error: Exception, paths: Mapping[int, str]) -> TraceError:
    """Where in the model an op is called for something else than what it gives, as `error` names it."""
    return TraceError(f"cannot trace the model to one graph: {_place(error, paths)[0]} calls {error}, {ACTING}")


def unfollowed_error(refused: TraceError, error: BaseException | None, paths: Mapping[int, str]) -> TraceError:
    """What is refused because of a mask, with what was called with the rows that it selects."""
    assert error is not None
    what = error.what if isinstance(error, UnfollowedError) else str(error)
    return TraceError(
        f"{refused}. What a mask selects is followed as all rows and which of them count, but not through {what}:"
        f" {_place(error, paths)[0]}"
    )


def place_of(error: BaseException, paths: Mapping[int, str]) -> str:
    """The module of the model and the line that an exception came from."""
    return _place(error, paths)[0]


class WrittenError(Exception):
    """A tensor was written to, in the call that raises this."""


class StopsAtWrite(TorchFunctionMode):
    """While it is active, a call that writes to a tensor in place is a `WrittenError`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor, self._version = tensor, version_of(tensor)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        version, self._version = self._version, version_of(self._tensor)
        if version != self._version:  # once, and not again in what is called on the way out
            raise WrittenError
        return result


def _place(error: BaseException, paths: Mapping[int, str]) -> tuple[str, bool]:
    """The module of the model and the line that an exception came from, and whether that line is an installed
    library's."""
    frames = list(_frames(error))
    active = [paths[id(f.f_locals.get("self"))] for f, _ in frames if id(f.f_locals.get("self")) in paths]
    module = f"module {active[-1]}" if active and active[-1] else "the root module"
    line = _line(frames)
    return (f"{module}, {line}" if line else module), "site-packages" in line.partition(" (`")[0]


def read_place(error: Exception) -> str:
    """The source line, outside of PyTorch, that an exception came from; an installed file by its place there."""
    return _line(list(_frames(error))).rpartition("site-packages/")[2] or "a line that is not known"


def _line(frames: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost line of code that is not PyTorch's, autopar's or Python's own; empty if there is none."""
    places = [(f.f_code.co_filename, number) for f, number in frames if not _is_library(f.f_code.co_filename)]
    if not places:
        return ""
    name, number = places[-1]
    code = linecache.getline(name, number).strip()
    return f"{name}:{number}" + (f" (`{code}`)" if code else "")


def reads_itself(error: BaseException) -> bool:
    """Whether it is a function of PyTorch's that looked at the values which made a trace fail, and not the code that
    called it, and that reading raised the error, not what was done with what was read."""
    functions = _functions(error)
    return is_value_missing(error) and bool(functions) and not reads_values(functions[-1])


def _asks_for_sizes(error: BaseException) -> str:
    """The function of PyTorch's whose own code, not the model's, asks how many elements it is given; empty if none."""
    functions = _functions(error)
    return _name(functions[-1]) if functions and not reads_values(functions[-1]) else ""


def _name(function: Any) -> str:
    if function is torch.autograd.grad:
        return "the backward pass"
    return str(resolve_name(function) or getattr(function, "__name__", repr(function)))


def _functions(error: BaseException) -> list[Any]:
    """The functions of PyTorch's that were being called where an exception was raised, outermost first."""
    code = KnownValues.__torch_function__.__code__
    return [frame.f_locals["func"] for frame, _ in _frames(error) if frame.f_code is code]


_IN_LIBRARY = (
    "The line is a library's: look for an option that leaves it out, or do not give the argument that leads there"
    " (labels, say) and compute that part yourself"
)

_KEEP_EVERY = (
    "Keep every element and give those that are not selected the weight 0 (torch.where(mask, y, 0).sum() / mask.sum());"
    " count with one_hot(x, n).sum(0); take a fixed number (topk); give repeat_interleave its output_size"
)

_READS = {
    "condition": (
        "an `if`, `while` or `assert` asks for one",
        "Compute both cases and take each where it holds (torch.where(condition, a, b)); a check or an early exit that"
        " the numbers do not need goes under `if not torch.compiler.is_compiling():`",
    ),
    "number": (
        "a Python number is made of one, as .item(), .tolist(), int(), len(), range() and sizes do",
        "Keep it a tensor: multiply by it, index by it, or loop to a fixed bound and mask what is beyond"
        " (torch.arange(bound) < n); divide by x[mask].shape[0] or mask.sum(), not by len(x[mask])",
    ),
    "op": (
        "{op} reads them itself",
        "Give it what it looks for (one_hot its num_classes), use a function that takes a tensor where this one takes a"
        " number, or write it in sums, products and torch.where",
    ),
    "shape": ("they say how many elements {op} gives, as a mask does when it is an index", _KEEP_EVERY),
    "shape asked for": (
        "they say how many elements there are, as a mask does when it is an index, and {op} asks for that number",
        _KEEP_EVERY,
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
