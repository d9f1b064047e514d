"""Values and names as Python text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import InputError
from autopar.graph import ProcessName


def comment_text(text: str) -> str:
    """Text made fit for a comment: names of modules may hold line ends and worse."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def literal(value: Any) -> str:
    """An argument of a node as Python; nodes print as their names.

    Raises:
        InputError: if it is of a type that has no literal.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if value is ...:
        return "..."
    if value is None or type(value) in (bool, int, float, Name):
        return repr(value)
    if type(value) is str or isinstance(value, ProcessName):
        value = str(value)
        text = repr(value)  # which takes single quotes unless they are in the text
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
    raise InputError(
        f"the graph has an argument of type {type(value).__name__}, which cannot be written: {value!r:.100}"
    )


class Name(str):
    """A Python expression; printed bare."""

    def __repr__(self) -> str:
        return str(self)
