"""The modules of a program as a tree of boxes with the collectives of each, and that tree in Graphviz's language.

Equal neighbours with numbers for names fold into one box with a count, and deep modules into their ancestors until the
picture is small enough to read.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.placement import describe_sharding
from autopar.program import LocalGraph, LocalProgram, collectives_of
from autopar.python_text import comment_text
from autopar.show import format_bytes

MAX_BOXES = 60
COLOURS = {"all_reduce": "#c2570c", "all_gather": "#2563eb", "reduce_scatter": "#0b7a5b", "all_to_all": "#7c3aed"}
"""A colour for each kind of collective, dark enough for white text."""


@dataclass(frozen=True)
class Calls:
    """The collectives of one module that are of one kind, along one axis and in one pass.

    `num_bytes` is the sum of `Collective.num_bytes`.
    """

    kind: str
    axis: str
    backward: bool
    count: int
    num_bytes: int

    @property
    def label(self) -> str:
        """`all_reduce@tp`."""
        return f"{self.kind}@{self.axis}"

    def times(self, count: int) -> Calls:
        """Those of `count` equal modules."""
        return Calls(self.kind, self.axis, self.backward, self.count * count, self.num_bytes * count)


@dataclass
class Box:
    """A module, or several equal ones.

    Attributes:
        label: the last parts of its path; `*`, `0-3` where a number was, for folded ones.
        count: how many modules with equal contents it stands for, inside one of the box around it.
        calls: the collectives of one of them, without those of the boxes inside.
        output: sharding of the last value it computes in the forward pass, in words.
        ops: the operators it runs in the forward pass.
        children: the boxes inside, in the order in which they first run.
        members: paths of the modules that it stands for.
    """

    label: str
    count: int = 1
    calls: tuple[Calls, ...] = ()
    output: str = ""
    ops: frozenset[str] = frozenset()
    children: list[Box] = field(default_factory=list)
    members: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """The label with the count."""
        return (self.label or "(root)") + (f" ×{self.count}" if self.count > 1 else "")

    def walk(self) -> Iterator[Box]:
        """This box and all inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def contents(self) -> tuple[object, ...]:
        """What must be equal for two boxes to be folded.

        Operators tell modules apart that have nothing inside, such as a linear layer from an activation; of a block
        they may differ in what the first one computes for all, such as a mask.
        """
        inside = tuple((child.label, child.contents()) for child in self.children)
        return (self.count, self.calls, self.output, inside or self.ops)


def module_boxes(program: LocalProgram, max_boxes: int = MAX_BOXES) -> Box:
    """The tree of a program's modules, folded to at most `max_boxes` boxes (or to the root alone)."""
    depth = max(len(_path(node)) for graph in _graphs(program) for node in graph.module.graph.nodes)
    while True:
        root = _join_chains(_fold_numbers(_tree(program, depth)))
        if depth == 0 or sum(1 for _ in root.walk()) <= max_boxes:
            return root
        depth -= 1


def _graphs(program: LocalProgram) -> list[LocalGraph]:
    return [program.forward] if program.backward is None else [program.forward, program.backward]


def _module_of(node: fx.Node) -> str:
    return str(node.meta.get("module", ""))


def _path(node: fx.Node) -> tuple[str, ...]:
    return tuple(part for part in _module_of(node).split(".") if part)


def _tree(program: LocalProgram, depth: int) -> Box:
    """One box for each module, those deeper than `depth` merged into their ancestors."""
    root = Box("")
    boxes: dict[tuple[str, ...], Box] = {(): root}
    for graph in _graphs(program):
        forward = graph is program.forward
        for node in graph.module.graph.nodes:
            if node.op != "call_function":
                continue
            path = _path(node)[:depth]
            for end in range(1, len(path) + 1):
                if path[:end] not in boxes:
                    boxes[path[:end]] = Box(path[end - 1])
                    boxes[path[: end - 1]].children.append(boxes[path[:end]])
            box = boxes[path]
            box.members |= {_module_of(node)}
            sharding = node.meta.get("sharding")
            if forward:
                box.ops |= {str(node.target)}
                if sharding and not isinstance(sharding[0], tuple):
                    box.output = describe_sharding(sharding, program.mesh)
        counts: Counter[tuple[tuple[str, ...], str, str]] = Counter()
        sizes: Counter[tuple[tuple[str, ...], str, str]] = Counter()
        for c in collectives_of(graph.module.graph):
            key = (tuple(part for part in c.module.split(".") if part)[:depth], c.kind, c.axis)
            counts[key] += 1
            sizes[key] += c.num_bytes
        for key, count in counts.items():
            path, kind, axis = key
            boxes[path].calls += (Calls(kind, axis, not forward, count, sizes[key]),)
    return root


def _fold_numbers(box: Box) -> Box:
    """Fold equal neighbours that have numbers for names, from the inside out."""
    children = [_fold_numbers(child) for child in box.children]
    numbered = sorted((child for child in children if child.label.isdigit()), key=lambda child: int(child.label))
    runs: list[list[Box]] = []
    for child in numbered:
        last = runs[-1] if runs else None
        if last and int(child.label) == int(last[-1].label) + 1 and child.contents() == last[0].contents():
            last.append(child)
        else:
            runs.append([child])
    folded = {id(run[0]): _merged(run) for run in runs}
    for run in runs:
        if len(run) > 1:
            folded[id(run[0])].label = "*" if len(runs) == 1 else f"{run[0].label}-{run[-1].label}"
    kept = [folded.get(id(child), child) for child in children if not child.label.isdigit() or id(child) in folded]
    return replace(box, children=kept)


def _merged(run: Sequence[Box]) -> Box:
    """One box for several with equal contents."""
    inside = [_merged(group) for group in zip(*(box.children for box in run), strict=True)]
    for merged, original in zip(inside, run[0].children, strict=True):
        merged.count = original.count
    members = frozenset[str]().union(*(box.members for box in run))
    return replace(run[0], count=len(run) * run[0].count, children=inside, members=members)


def _join_chains(box: Box) -> Box:
    """Join boxes that do nothing and hold only one other with that one."""
    box = replace(box, children=[_join_chains(child) for child in box.children])
    if len(box.children) != 1 or box.members:
        return box
    only = box.children[0]
    return replace(only, label=f"{box.label}.{only.label}".lstrip("."), count=only.count * box.count)


def render_dot(program: LocalProgram, title: str) -> str:
    """The diagram in Graphviz's language: modules as boxes with their collectives, and the forward pass's data flow."""
    root = module_boxes(program)
    names = {id(box): f"m{i}" for i, box in enumerate(root.walk())}
    box_of = {member: names[id(box)] for box in root.walk() for member in box.members}
    lines = [
        "digraph autopar {",
        f"  label={_quoted(title)}; labelloc=t; rankdir=TB;",
        '  graph [fontname="Helvetica", fontsize=12]; node [fontname="Helvetica", fontsize=11, shape=plain];',
        '  edge [color="#94a3b8", arrowsize=0.6];',
        *_dot_box(root, names, 1, "  "),
    ]
    first_run: dict[str, int] = {}
    edges: dict[tuple[str, str], None] = {}
    for position, node in enumerate(program.forward.module.graph.nodes):
        if node.op == "call_function":
            here = box_of[_module_of(node)]
            first_run.setdefault(here, position)
            sources = [box_of[_module_of(source)] for source in node.all_input_nodes if source.op == "call_function"]
            edges.update(dict.fromkeys((source, here) for source in sources if source != here))
    for source, target in edges:
        # Flow back to a box that has run before, such as a block's own additions, must not turn the picture over.
        back = "" if first_run[source] < first_run[target] else " [constraint=false]"
        lines.append(f"  {source} -> {target}{back};")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_box(box: Box, names: dict[int, str], outer: int, indent: str) -> Iterator[str]:
    name, count = names[id(box)], outer * box.count
    if box.children:
        yield f"{indent}subgraph cluster_{name} {{"
        yield f'{indent}  label={_quoted(box.title)}; style="rounded,filled"; color="#cbd5e1"; fillcolor="#00000008";'
        if box.members:
            yield f"{indent}  {name} [label=<{_dot_table(box, '(own)', count)}>];"
        for child in box.children:
            yield from _dot_box(child, names, count, indent + "  ")
        yield f"{indent}}}"
    else:
        yield f"{indent}{name} [label=<{_dot_table(box, box.title, count)}>];"


def _dot_table(box: Box, title: str, count: int) -> str:
    rows = [f"<tr><td><b>{_escaped(title)}</b></td></tr>"]
    if box.output:
        rows.append(f'<tr><td><font color="#64748b">{_escaped(box.output)}</font></td></tr>')
    for one in (calls.times(count) for calls in box.calls):
        name = f"{one.label} ×{one.count}" if one.count > 1 else one.label
        words = f"{name}, {format_bytes(one.num_bytes)}, {'backward' if one.backward else 'forward'}"
        rows.append(f'<tr><td bgcolor="{COLOURS[one.kind]}"><font color="white">{_escaped(words)}</font></td></tr>')
    return f'<table border="1" color="#94a3b8" cellborder="0" bgcolor="white" style="rounded">{"".join(rows)}</table>'


def _quoted(text: str) -> str:
    return '"' + comment_text(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    return html.escape(comment_text(text))
