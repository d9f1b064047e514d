"""The picture of modules and collectives: folding, totals, and files that their readers accept."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from autopar.diagram import Box, module_boxes, render_dot
from autopar.diagram_svg import render_svg
from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard
from autopar.program import LocalGraph, LocalProgram

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MESH = Mesh(("dp", "tp"), (2, 2))


def graph_of(modules: list[tuple[str, int]], backward: bool) -> LocalGraph:
    """Each module adds one to what the one before gave; then all-reduces it if its bytes are not 0."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta = {"module": "", "backward": backward}
    for module, num_bytes in modules:
        value = graph.call_function(aten.add.Tensor, (value, 1))
        value.meta = {"module": module, "backward": backward, "sharding": (Shard(0), Replicate())}
        if num_bytes:
            value = graph.call_function(c10d.all_reduce.default, (value, "sum", "tp"))
            value.meta = {"module": module, "backward": backward, "bytes": num_bytes}
    graph.output((value,))
    inputs, outputs = (GraphInput(InputKind.INPUT, "x"),), (GraphOutput(OutputKind.OUTPUT, ""),)
    return LocalGraph(fx.GraphModule(nn.Module(), graph), inputs, outputs, (None,), (None,))


def program_of(modules: list[tuple[str, int]]) -> LocalProgram:
    forward, backward = graph_of(modules, False), graph_of(modules[::-1], True)
    return LocalProgram(MESH, forward, forward, backward)


def blocks(num: int, odd: int | None = None) -> list[tuple[str, int]]:
    """`num` equal blocks between an embedding and a head, but for one block that sends more."""
    inner = [(f"h.{i}.{part}", 64 + (i == odd)) for i in range(num) for part in ("attn.proj", "mlp")]
    return [("wte", 8), *inner, ("head", 0), ("", 4)]


def titles(box: Box, depth: int = 0) -> Iterator[str]:
    yield "  " * depth + box.title
    for child in box.children:
        yield from titles(child, depth + 1)


def totals(box: Box, outer: int = 1) -> Counter[tuple[str, bool, str]]:
    """Count and bytes by kind and pass over everything that the boxes stand for."""
    found: Counter[tuple[str, bool, str]] = Counter()
    count = outer * box.count
    for calls in box.calls:
        found[calls.label, calls.backward, "count"] += calls.count * count
        found[calls.label, calls.backward, "bytes"] += calls.num_bytes * count
    for child in box.children:
        found += totals(child, count)
    return found


def test_equal_blocks_fold() -> None:
    root = module_boxes(program_of(blocks(12)))
    assert list(titles(root)) == ["(root)", "  wte", "  h.* ×12", "    attn.proj", "    mlp", "  head"]


def test_a_block_that_differs_stands_alone() -> None:
    root = module_boxes(program_of(blocks(6, odd=2)))
    lines = [line for line in titles(root) if not line.startswith("      ")]
    assert lines == ["(root)", "  wte", "  h", "    0-1 ×2", "    2", "    3-5 ×3", "  head"]


def test_numbered_modules_that_do_other_things_do_not_fold() -> None:
    program = program_of([("net.0", 0), ("net.1", 0)])
    second = next(n for n in program.forward.module.graph.nodes if n.meta["module"] == "net.1")
    second.target = aten.mul.Tensor
    assert list(titles(module_boxes(program))) == ["net", "  0", "  1"]


@pytest.mark.parametrize("max_boxes", [1, 2, 5, 20, 1000])
def test_no_collective_is_lost(max_boxes: int) -> None:
    modules = [(f"tower.{i}.level.{j}.part{k}", 1 + i * j + k) for i in range(4) for j in range(5) for k in range(3)]
    program = program_of([*modules, ("", 7)])
    root = module_boxes(program, max_boxes)
    assert sum(1 for _ in root.walk()) <= max(max_boxes, 1)
    expected: Counter[tuple[str, bool, str]] = Counter()
    for c in program.collectives():
        expected[f"{c.kind}@{c.axis}", c.backward, "count"] += 1
        expected[f"{c.kind}@{c.axis}", c.backward, "bytes"] += c.num_bytes
    assert totals(root) == expected
    modules_drawn = sorted(member for box in root.walk() for member in box.members)
    assert modules_drawn == sorted({module for module, _ in modules} | {""})


def test_svg_shows_names_counts_and_bytes() -> None:
    svg = render_svg(program_of(blocks(12)), "tp on mesh dp=2×tp=2")
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "tp on mesh dp=2×tp=2"
    assert texts[1] == "4 ranks · 52 collectives on 3.0 KiB a step (whole tensors, on each rank)"
    assert "all_reduce@tp ×52, 3.0 KiB" in texts
    assert "h.* ×12" in texts
    assert texts.count("all_reduce@tp ×12") == 4  # two modules, forward and backward
    assert texts.count("768 B") == 4
    assert texts.count("shard(0)@dp") == 5  # `h.*` computes nothing itself
    height = float(root.attrib["height"])
    rectangles = [e.attrib for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.attrib["width"] != "100%"]
    assert all(float(r["y"]) + float(r["height"]) <= height for r in rectangles)
    assert all(float(r["x"]) + float(r["width"]) <= float(root.attrib["width"]) for r in rectangles)


def test_svg_of_a_program_that_does_nothing() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    local = LocalGraph(fx.GraphModule(nn.Module(), graph), (GraphInput(InputKind.INPUT, "x"),), (), (None,), ())
    root = ET.fromstring(render_svg(LocalProgram(Mesh(("dp",), (1,)), local, local, None), "alone"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "1 rank · 0 collectives on 0 B a step (whole tensors, on each rank)" in texts


def test_dot_has_boxes_and_flow() -> None:
    dot = render_dot(program_of(blocks(12)), 'a "title"\n')
    assert dot.count("{") == dot.count("}")
    assert r'label="a \"title\"\\n"' in dot
    assert dot.count("subgraph cluster_") == 2
    assert "<b>attn.proj</b>" in dot
    assert "all_reduce@tp ×12, 768 B, forward" in dot
    names = dict(re.findall(r"(m\d+) \[label=<.*?<b>(.*?)</b>", dot))
    edges = [(names[a], names[b], back) for a, b, back in re.findall(r"(m\d+) -> (m\d+)(.*);", dot)]
    assert edges == [
        ("wte", "attn.proj", ""),
        ("attn.proj", "mlp", ""),
        ("mlp", "attn.proj", " [constraint=false]"),
        ("mlp", "head", ""),
        ("head", "(own)", ""),
    ]
