"""The diagram of modules and collectives as SVG.

Modules stand on the left in program order, each one's collectives beside it, forward and backward, with bars in
proportion to their bytes.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.diagram import COLOURS, Box, Calls, module_boxes
from autopar.program import LocalProgram
from autopar.python_text import comment_text
from autopar.show import format_bytes

MARGIN, LINE, PAD, INDENT = 28, 24, 7, 14
CHAR = 7.3
"""Width of a character of the names' font, a monospace one."""
SMALL_CHAR = 6.7
BAR, SIZE_TEXT = 120, 110

_STYLE = """
text { font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #0f172a; }
.title { font-size: 20px; font-weight: 600; }
.about, .head { font-size: 13px; fill: #475569; }
.head { font-weight: 600; }
.name, .words, .badge { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.name { font-size: 12px; font-weight: 600; }
.words { font-size: 11px; fill: #64748b; }
.badge { font-size: 11px; fill: #ffffff; }
.size { font-size: 11px; fill: #334155; }
.box { stroke: #cbd5e1; }
.lead { stroke: #cbd5e1; stroke-dasharray: 2 3; }
"""


@dataclass
class _Sheet:
    """The drawing so far."""

    tree_width: float
    badge_width: float
    largest: int
    lines: list[str] = field(default_factory=list)

    @property
    def columns(self) -> tuple[float, float]:
        """Left ends of the columns of the forward and the backward pass."""
        first = MARGIN + self.tree_width + 44
        return first, first + self.column_width

    @property
    def column_width(self) -> float:
        """Width of the column of one pass: badges, bars and bytes."""
        return self.badge_width + BAR + SIZE_TEXT

    @property
    def width(self) -> float:
        """Width of the whole picture."""
        return self.columns[1] + self.column_width

    def text(self, x: float, y: float, text: str, style: str, end: bool = False) -> None:
        anchor = ' text-anchor="end"' if end else ""
        self.lines.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{style}"{anchor}>{_escaped(text)}</text>')


def render_svg(program: LocalProgram, title: str) -> str:
    """The diagram as a whole SVG file; `title` names strategy and mesh."""
    root = module_boxes(program)
    every = [calls for _, _, all_calls in _rows(root) for calls in all_calls]
    names = [len(box.title) * CHAR + len(box.output) * SMALL_CHAR + 2 * depth * INDENT for box, depth, _ in _rows(root)]
    sheet = _Sheet(
        tree_width=min(760.0, max(320.0, *names) + 60),
        badge_width=max((len(_badge(calls)) * SMALL_CHAR + 32 for calls in every), default=100.0),
        largest=max((calls.num_bytes for calls in every), default=0) or 1,
    )
    top = _head(sheet, title, every, program.mesh.num_ranks)
    height = top + _box(sheet, root, MARGIN, top, 0, 1) + MARGIN
    bottom = height - MARGIN
    sheet.lines.append(f'<path d="M14 {top:.0f}V{bottom:.0f}m-4 -6l4 6l4 -6" stroke="#94a3b8" fill="none"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{sheet.width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {sheet.width:.0f} {height:.0f}">',
            f"<title>{_escaped(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *sheet.lines,
            "</svg>",
            "",
        ]
    )


def _rows(box: Box, depth: int = 0, outer: int = 1) -> Iterator[tuple[Box, int, list[Calls]]]:
    """Every box with its depth and the collectives of all modules that it stands for."""
    count = outer * box.count
    yield box, depth, [calls.times(count) for calls in box.calls]
    for child in box.children:
        yield from _rows(child, depth + 1, count)


def _head(sheet: _Sheet, title: str, every: list[Calls], num_ranks: int) -> float:
    """Title, totals by kind and axis, and the columns' heads; returns where the boxes may begin."""
    sheet.text(MARGIN, 40, title, "title")
    num_calls, num_bytes = sum(c.count for c in every), sum(c.num_bytes for c in every)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    about = f"{ranks} · {num_calls} collectives on {format_bytes(num_bytes)} a step (whole tensors, on each rank)"
    sheet.text(MARGIN, 62, about, "about")
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for calls in every:
        counts[calls.kind, calls.label] += calls.count
        sizes[calls.kind, calls.label] += calls.num_bytes
    x, y = float(MARGIN), 76.0
    for (kind, label), count in counts.items():
        words = f"{label} ×{count}, {format_bytes(sizes[kind, label])}"
        if x + 14 + len(words) * CHAR > sheet.width - MARGIN:
            x, y = float(MARGIN), y + 22
        sheet.lines.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" rx="2" fill="{COLOURS[kind]}"/>')
        sheet.text(x + 16, y + 9, words, "about")
        x += 16 + len(words) * CHAR + 14
    y += 42 if counts else 18
    sheet.text(MARGIN, y, "Modules, and how the output of each lies", "head")
    for column, words in zip(sheet.columns, ("Forward ↓", "Backward ↑"), strict=True):
        sheet.text(column, y, words, "head")
    return y + 14


def _box(sheet: _Sheet, box: Box, x: float, y: float, depth: int, outer: int) -> float:
    """Draw a box and what is inside it with its corner at (x, y); returns its height."""
    count = outer * box.count
    passes = [[c.times(count) for c in box.calls if c.backward is backward] for backward in (False, True)]
    own = max(1, *map(len, passes)) * LINE + PAD
    width = sheet.tree_width - 2 * depth * INDENT
    place = len(sheet.lines)
    below = y + own
    for child in box.children:
        below += _box(sheet, child, x + INDENT, below, depth + 1, count) + PAD
    height = below - y + (2 if box.children else 0)
    fill = "#ffffff" if not box.children else ("#f1f5f9", "#f8fafc")[depth % 2]
    frame = (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" class="box"/>'
    )
    sheet.lines.insert(place, frame)
    _label(sheet, box, x, y, width)
    for i in range(max(map(len, passes))):
        left, middle = x + width, y + i * LINE + PAD / 2 + LINE / 2
        for column, calls in zip(sheet.columns, passes, strict=True):
            if i < len(calls):
                if left < column:
                    sheet.lines.append(f'<path d="M{left:.0f} {middle:.1f}H{column:.0f}" class="lead"/>')
                _call(sheet, calls[i], column, middle)
                left = sheet.width
    return height


def _label(sheet: _Sheet, box: Box, x: float, y: float, width: float) -> None:
    title, middle = box.title, y + PAD / 2 + LINE / 2 + 4
    room = int((width - 20) / CHAR)
    if len(title) > room:
        title = "…" + title[len(title) - room + 1 :]
    sheet.text(x + 10, middle, title, "name")
    room = int((width - 36 - len(title) * CHAR) / SMALL_CHAR)
    words = box.output if len(box.output) <= room else f"{box.output[: max(0, room - 1)]}…"
    if room > 3 and words:
        sheet.text(x + width - 10, middle, words, "words", end=True)


def _call(sheet: _Sheet, calls: Calls, x: float, y: float) -> None:
    """A badge, a bar and the bytes, from x rightwards around the line y."""
    words, colour = _badge(calls), COLOURS[calls.kind]
    wide = len(words) * SMALL_CHAR + 16
    sheet.lines.append(f'<rect x="{x:.0f}" y="{y - 9:.1f}" width="{wide:.0f}" height="18" rx="9" fill="{colour}"/>')
    sheet.text(x + 8, y + 4, words, "badge")
    start, long = x + sheet.badge_width, max(2.0, BAR * calls.num_bytes / sheet.largest)
    sheet.lines.append(
        f'<rect x="{start:.0f}" y="{y - 5:.1f}" width="{long:.1f}" height="10" rx="2" fill="{colour}" opacity="0.45"/>'
    )
    sheet.text(start + long + 6, y + 4, format_bytes(calls.num_bytes), "size")


def _badge(calls: Calls) -> str:
    label = calls.label if len(calls.label) <= 24 else f"{calls.label[:23]}…"
    return f"{label} ×{calls.count}" if calls.count > 1 else label


def _escaped(text: str) -> str:
    return html.escape(comment_text(text))
