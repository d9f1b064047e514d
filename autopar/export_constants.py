"""Constant tensors of an exported program: small ones stand in its text, larger ones in `.npy` files beside it."""

from __future__ import annotations

import io
from typing import Any

import numpy
import torch
from torch import fx

from autopar._compat import FakeTensor
from autopar.errors import InputError
from autopar.python_text import literal

MAX_INLINE_ELEMENTS = 1024


class Constants:
    """The tensors that a program's graph modules hold on to, each under one name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def name_of(self, module: fx.GraphModule, target: str) -> str:
        """Name of the tensor that a `get_attr` node reads.

        Raises:
            InputError: if it is no tensor, or has no values to write.
        """
        value: Any = module
        for part in target.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise InputError(f"the graph reads {target!r}, a {type(value).__name__}: only tensors can be exported")
        dense = value.layout is torch.strided and not value.is_quantized
        if isinstance(value, FakeTensor) or value.is_meta or not dense:
            kind = "has no values" if dense else f"is not dense ({value.layout})"
            raise InputError(
                f"the graph holds a constant tensor {target!r} of shape {list(value.shape)} that {kind}, so it cannot "
                "be exported: make it a parameter or buffer of the model"
            )
        name = target
        while name in self.tensors and self.tensors[name] is not value:
            name += "_"
        self.tensors[name] = value
        return name

    def text(self) -> tuple[str, dict[str, bytes]]:
        """The definition of `CONSTANTS`, and the files that it reads: name -> content.  Empty if there are none."""
        if not self.tensors:
            return "", {}
        lines, files = [], {}
        for i, (name, tensor) in enumerate(self.tensors.items()):
            tensor = tensor.detach().cpu().contiguous()
            if tensor.numel() > MAX_INLINE_ELEMENTS:
                file_name = f"constant_{i}.npy"
                files[file_name] = _npy(tensor)
                value = f"_load({file_name!r}, {tensor.dtype}, {tuple(tensor.shape)})"
            elif tensor.numel() == 0:
                value = f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
            else:
                value = f"torch.tensor({literal(tensor.tolist())}, dtype={tensor.dtype})"
            lines.append(f"    {name!r}: {value},")
        definition = "\n".join(["CONSTANTS = {", *lines, "}"])
        return (f"{_LOAD}\n\n{definition}" if files else definition), files


def _npy(tensor: torch.Tensor) -> bytes:
    """The elements in a row; as bytes where numpy lacks the dtype."""
    flat = tensor.reshape(-1)
    try:
        array = flat.numpy()
    except TypeError:
        array = flat.view(torch.uint8).numpy()
    buffer = io.BytesIO()
    numpy.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


_LOAD = '''\
def _load(name, dtype, shape):
    """A constant tensor from a file beside this one."""
    elements = numpy.load(os.path.join(os.path.dirname(__file__), name), allow_pickle=False)
    return torch.from_numpy(elements).view(dtype).reshape(shape)
'''
