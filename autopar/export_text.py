"""A local program as Python that reads well and runs by itself: one line a node, each with its module, shapes and
sharding."""

from __future__ import annotations

import builtins
import keyword
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.errors import InputError
from autopar.export_constants import Constants
from autopar.export_step import VALUE, step_text
from autopar.graph import GraphInput, GraphOutput, InputKind, describe_value
from autopar.mesh import Mesh
from autopar.opaque import OPAQUE_OPS
from autopar.placement import Sharding, describe_sharding, is_sharded, shard_dim
from autopar.plan import Plan
from autopar.program import COLLECTIVE_KINDS, LocalGraph, LocalProgram, collective_axis
from autopar.python_text import Name, comment_text, literal

CODE_COLUMN, NAME_COLUMN = 88, 48
"""Where comments start, after a call and after a lone name, if the code is no longer."""


@dataclass(frozen=True)
class ProgramText:
    """A Python file, and the files of constant tensors that it reads: name -> content."""

    text: str
    constants: Mapping[str, bytes]


def program_text(program: LocalProgram, plan: Plan) -> ProgramText:
    """The program as a Python file with the functions `forward` and `backward`.

    The text depends on the program and the plan's name alone, so every rank gets the same.

    Raises:
        InputError: if an operator, an argument or a constant of the graph cannot be written as Python.
    """
    graphs = {"forward": program.forward}
    if program.backward is not None:
        graphs["backward"] = program.backward
    writer = _Writer(program.mesh, list(graphs.values()))
    functions = [writer.function(name, graph) for name, graph in graphs.items()]
    constants, files = writer.constants.text()
    sections = [
        "\n\n".join((_header(program, plan), writer.imports(bool(files)), _settings(program.mesh, writer.device_type))),
        constants,
        VALUE,
        *functions,
        _values("INPUTS", {name: writer.arguments(graph) for name, graph in graphs.items()}),
        _values("OUTPUTS", {name: writer.results(graph) for name, graph in graphs.items()}),
        step_text(program.backward is not None),
    ]
    return ProgramText("\n\n\n".join(s.strip("\n") for s in sections if s) + "\n", files)


class _Writer:
    """Prints graphs, and collects what the printed lines need: imports, operator namespaces, constants."""

    def __init__(self, mesh: Mesh, graphs: Sequence[LocalGraph]) -> None:
        self.mesh = mesh
        self.constants = Constants()
        nodes = [node for graph in graphs for node in graph.module.graph.nodes]
        self.device_type = _device_type(nodes)
        self.namespaces: dict[str, str] = {}
        self.modules: set[str] = set()
        self.local_ops: set[str] = set()
        self.calls: dict[Any, str] = {}
        for node in nodes:
            if node.op == "call_function" and node.target not in self.calls:
                self.calls[node.target] = self._callee(node)
        self.reserved = {
            *_OWN_NAMES, *dir(builtins), *keyword.kwlist, *self.namespaces.values(), *self.local_ops,
            *(module.partition(".")[0] for module in self.modules),
        }  # fmt: skip

    # -- what lines need

    def _callee(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, OpOverload):
            namespace, _, rest = str(target).partition(".")
            alias = _ALIASES.get(namespace, namespace)
            while alias in _OWN_NAMES or keyword.iskeyword(alias):
                alias += "_"
            self.namespaces[namespace] = alias
            return f"{alias}.{rest}"
        if target in _INFIX or target is operator.getitem:
            return ""
        module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", ""))
        module = "operator" if module == "_operator" else module
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not target:
            raise InputError(f"node {node.name} calls {target!r:.100}, which cannot be imported by name")
        if module == "autopar.local_ops":
            self.local_ops.add(name)
            return name
        self.modules.add(module)
        return f"{module}.{name}"

    def imports(self, numpy: bool) -> str:
        """The file's imports, and short names for the operators' namespaces."""
        lines = [f"import {module}" for module in sorted({"math", "os", *self.modules} - {"torch"})]
        lines += ["from typing import Any, NamedTuple", ""]
        lines += ["import numpy"] if numpy else []
        lines += ["import torch", "import torch.distributed as dist"]
        lines.append("from torch.distributed.device_mesh import init_device_mesh")
        if self.local_ops:
            lines += ["", f"from autopar.local_ops import {', '.join(sorted(self.local_ops))}"]
        lines.append("")
        for namespace, alias in sorted(self.namespaces.items(), key=lambda item: item[1]):
            foreign = namespace not in _KNOWN_NAMESPACES
            note = "  # import the module that registers these operators first" if foreign else ""
            lines.append(f"{alias} = torch.ops.{namespace}{note}")
        return "\n".join(lines)

    # -- functions

    def function(self, name: str, graph: LocalGraph) -> str:
        """One graph as a function of its placeholders and `groups`."""
        nodes = list(graph.module.graph.nodes)
        names = self._names(nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        lines = ["@torch.no_grad()", f"def {name}("]
        for spec, node, sharding in zip(graph.inputs, placeholders, graph.input_shardings, strict=True):
            words = (spec.kind.value, spec.path, *self._shape_words(node), self._words(sharding))
            lines.append(_line(f"    {names[node]},", words))
        lines += ["    *,", _line("    groups,", ("mesh axis -> name of its process group",)), "):"]
        module = None
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.meta.get("module", "") != module:
                module = node.meta.get("module", "")
                lines.append(f"    # --- {comment_text(module) or '(root)'}")
            call = f"    {names[node]} = {self._expression(graph.module, node, names)}"
            lines.append(_line(call, self._about(node), CODE_COLUMN))
        lines.append("    return (")
        returned: Sequence[Any] = graph.module.graph.output_node().args[0]  # type: ignore[assignment]
        for result, value, sharding in zip(graph.outputs, returned, graph.output_shardings, strict=True):
            words = (result.kind.value, result.path, *self._shape_words(value), self._words(sharding))
            lines.append(_line(f"        {literal(fx.map_arg(value, names.__getitem__))},", words))
        return "\n".join([*lines, "    )"])

    def _names(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Name]:
        taken = {node.name for node in nodes}
        names: dict[fx.Node, Name] = {}
        for node in nodes:
            name = node.name
            assert name.isidentifier(), name
            if name in self.reserved:
                while name in self.reserved or name in taken:
                    name += "_"
                taken.add(name)
            names[node] = Name(name)
        return names

    def _expression(self, module: fx.GraphModule, node: fx.Node, names: Mapping[fx.Node, Name]) -> str:
        if node.op == "get_attr":
            name = self.constants.name_of(module, str(node.target))
            there = self.constants.tensors[name].device.type == self.device_type
            return f"CONSTANTS[{literal(name)}]" + (".to(DEVICE)" if there else "")
        if node.op != "call_function":
            raise InputError(f"node {node.name} is a {node.op} node; a local program has none")
        args = list(fx.map_arg(node.args, names.__getitem__))
        if node.target in COLLECTIVE_KINDS:
            args[-1] = Name(f'groups["{collective_axis(node)}"]')
        if node.target is operator.getitem:
            return f"{literal(args[0])}[{literal(args[1])}]"
        if node.target in _INFIX and len(args) == 2:
            return f"{literal(args[0])} {_INFIX[node.target]} {literal(args[1])}"
        keywords = {key: self._device(fx.map_arg(value, names.__getitem__)) for key, value in node.kwargs.items()}
        parts = [literal(self._device(arg)) for arg in args] + [f"{key}={literal(v)}" for key, v in keywords.items()]
        return f"{self.calls[node.target]}({', '.join(parts)})"

    def _device(self, value: Any) -> Any:
        """The program's own device becomes `DEVICE`, so that the file can be run elsewhere."""
        if isinstance(value, torch.device) and value.type in (self.device_type, "meta"):
            return Name("DEVICE")
        return value

    # -- words about values

    def _about(self, node: fx.Node) -> tuple[str, ...]:
        module = node.meta.get("module", "") or "(root)"
        if node.target in COLLECTIVE_KINDS:
            axis = collective_axis(node)
            size = f"{node.meta['bytes']:,} bytes" if "bytes" in node.meta else "bytes not known"
            moved = f"{COLLECTIVE_KINDS[node.target]} along {axis} over {self.mesh.size(axis)} ranks, {size}"
            return (module, describe_value(node.meta.get("val")), moved)
        if node.target in OPAQUE_OPS:
            path = str(node.args[-1]).partition("#")[0]
            return (module, describe_value(node.meta.get("val")), f"runs whole on every rank: Python of module {path}")
        sharding = node.meta.get("sharding")
        if sharding is None and node.meta.get("layout"):
            return (module, describe_value(node.meta.get("val")), "layout step")
        return (module, *self._shape_words(node), self._words(sharding))

    def _shape_words(self, node: Any) -> tuple[str, ...]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return () if value is None else (type(value).__name__,)
        shape = node.meta.get("global_shape")
        return (describe_value(value) + ("" if shape is None else f" ← {list(shape)}"),)

    def _words(self, sharding: Any) -> str:
        if not sharding:
            return ""
        if isinstance(sharding[0], tuple):  # an op with several results
            each = [self._words(one) for one in sharding]
            return each[0] if len(set(each)) == 1 else f"({', '.join(each)})"
        return describe_sharding(sharding, self.mesh)

    # -- descriptions as data

    def arguments(self, graph: LocalGraph) -> list[str]:
        """`Value(…)` of each argument."""
        nodes = graph.module.graph.find_nodes(op="placeholder")
        return list(map(self._value, graph.inputs, nodes, graph.input_shardings))

    def results(self, graph: LocalGraph) -> list[str]:
        """`Value(…)` of each result."""
        nodes: Sequence[Any] = graph.module.graph.output_node().args[0]  # type: ignore[assignment]
        return list(map(self._value, graph.outputs, nodes, graph.output_shardings))

    def _value(self, spec: GraphInput | GraphOutput, node: Any, sharding: Sharding | None) -> str:
        kind = spec.kind.value
        value = node.meta.get("val") if isinstance(node, fx.Node) and kind not in _NUMBERS else None
        dtype, local, whole = None, None, None
        if isinstance(value, torch.Tensor):
            dtype, local, whole = value.dtype, tuple(value.shape), node.meta.get("global_shape")
        placed = zip(self.mesh.names, sharding or (), strict=False)
        cuts = {axis: shard_dim(placement) for axis, placement in placed if is_sharded(placement)}
        fields = (kind, spec.path, dtype, local, None if whole is None else tuple(whole), cuts, self._words(sharding))
        return f"Value({', '.join(map(literal, fields))})"


def _line(code: str, words: Sequence[str], column: int = NAME_COLUMN) -> str:
    about = " · ".join(comment_text(word) for word in words if word)
    return f"{code:<{column}}  # {about}" if about else code


def _device_type(nodes: Sequence[fx.Node]) -> str:
    """The type of device that the graph creates tensors on; `cpu` if it names none."""
    found: list[str] = []
    for node in nodes:
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, torch.device) and value.type not in ("cpu", "meta"):
                found.append(value.type)
    return found[0] if found else "cpu"


def _header(program: LocalProgram, plan: Plan) -> str:
    mesh, launch = program.mesh, "python"
    if mesh.num_ranks > 1:
        launch = f"torchrun --nproc-per-node {mesh.num_ranks}"
    total = sum(c.num_bytes for c in program.collectives())
    targets = {node.target for graph in program.graphs for node in graph.module.graph.nodes}
    opaque = "" if targets.isdisjoint(OPAQUE_OPS) else " in the process that compiled the model, whose modules it calls"
    lines = [
        f"Written by autopar: the program of one rank under {plan.strategy} on mesh {mesh}.",
        "",
        "Every rank runs this same text; what differs is its part of each tensor and its position on the mesh, which",
        "the functions take as arguments.  A line's comment says which module of the model it belongs to, dtype and",
        "local shape ← global shape, and how the tensor lies over the mesh axes; a collective's says its axis and the",
        f"bytes of the whole tensor.  One step has {len(program.collectives())} collectives of {total:,} bytes.",
        "",
        f"Run one step on random inputs:  {launch} program.py{opaque}",
    ]
    return "\n".join(f"# {comment_text(line)}".rstrip() for line in lines)


def _settings(mesh: Mesh, device_type: str) -> str:
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return f"MESH = {literal(sizes)}  # ranks along each axis, the last one innermost\nDEVICE = {literal(device_type)}"


def _values(name: str, by_function: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{name} = {{"]
    for function, values in by_function.items():
        lines += [f'    "{function}": [', *(f"        {value}," for value in values), "    ],"]
    return "\n".join([*lines, "}"])


_ALIASES = {"_c10d_functional": "c10d"}
_KNOWN_NAMESPACES = {"aten", "prim", "prims", "_c10d_functional"}
_INFIX: dict[Callable[..., Any], str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%",
}  # fmt: skip
_NUMBERS = {InputKind.RANK.value, InputKind.SEED.value}
_OWN_NAMES = {
    "Any", "CONSTANTS", "DEVICE", "INPUTS", "MESH", "NamedTuple", "OUTPUTS", "Value", "_load", "backward", "dist",
    "example", "forward", "groups", "init_device_mesh", "local_shape", "main", "math", "numpy", "operator", "os",
    "run_step", "torch",
}  # fmt: skip
"""What the file itself defines or imports.  Nodes and namespaces that are called so get another name."""
