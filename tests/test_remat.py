"""Recomputation: exact, and less is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.graph import OutputKind
from autopar.passes.remat import choose_saved, forward_nodes, parameter_looks
from autopar.placement import replicated
from autopar.plan import Plan
from autopar.plan_file import check_plan_matches, plan_from_json, plan_to_json
from autopar.program import LocalProgram
from autopar.regions import find_regions, region_of
from tests.programs import Subject, subject
from tests.test_passes import HEADS, ROWS, SEQ, VOCAB, WIDTH, token_batch
from tests.tiny_models import TinyGpt

STRATEGIES = [("ddp", (4,)), ("zero2", (4,)), ("zero3", (4,)), ("tp", (4,)), ("tp+sp", (4,)), ("fsdp+tp", (2, 2))]


@pytest.fixture(scope="module")
def gpt() -> Subject:
    torch.manual_seed(0)
    return subject(TinyGpt(VOCAB, WIDTH, HEADS, layers=2, seq=SEQ, dropout=0.1), *token_batch(ROWS, SEQ, VOCAB))


def everywhere(plan: Plan, ours: Subject, level: str) -> Plan:
    return replace(plan, recompute=dict.fromkeys(find_regions(ours.joint), level))


def saved_bytes(program: LocalProgram) -> int:
    """Bytes handed to the backward pass, parameters and views of them left out."""
    graph = program.forward.module.graph
    from_params = {n for n, s in zip(graph.find_nodes(op="placeholder"), program.forward.inputs, strict=True)}
    for node in graph.nodes:
        if node.op == "call_function" and {*node.all_input_nodes} <= from_params and node.all_input_nodes:
            from_params.add(node)
    values = zip(program.forward.outputs, graph.output_node().args[0], strict=True)
    saved = [n for spec, n in values if spec.kind is OutputKind.SAVED and n not in from_params]
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in saved)


@pytest.mark.parametrize(("strategy", "sizes"), STRATEGIES)
def test_recomputation_gives_the_same_and_keeps_less(gpt: Subject, strategy: str, sizes: tuple[int, ...]) -> None:
    plan = gpt.plan(strategy, *sizes)
    kept = [saved_bytes(gpt.program(plan))]
    for level in ("selective", "full"):
        program = gpt.program(everywhere(plan, gpt, level))
        report = gpt.compare(program, plan)
        assert report.ok, report
        kept.append(saved_bytes(program))
    assert kept[2] < kept[1] < kept[0]


def test_some_blocks_can_differ_from_others(gpt: Subject) -> None:
    plan = replace(gpt.plan("zero3", 4), recompute={"blocks.0": "full"})
    program = gpt.program(plan)
    assert gpt.compare(program, plan).ok
    assert program.backward is not None
    again = {n.meta["module"].rpartition(".")[0] for n in _forward_products(program.backward.module.graph, gpt)}
    assert again == {"blocks.0"}


def _forward_products(graph: fx.Graph, ours: Subject) -> list[fx.Node]:
    """Products of the backward graph that bias a result, which only forward products do here."""
    return [n for n in graph.nodes if n.target is torch.ops.aten.addmm.default]


def test_selective_repeats_no_product_and_no_collective(gpt: Subject) -> None:
    plan = gpt.plan("tp", 4)
    plain, selective = gpt.program(plan), gpt.program(everywhere(plan, gpt, "selective"))
    assert [(c.kind, c.num_bytes) for c in selective.collectives()] == [
        (c.kind, c.num_bytes) for c in plain.collectives()
    ]
    assert selective.backward is not None
    assert not _forward_products(selective.backward.module.graph, gpt)


def test_full_repeats_collectives_and_is_priced_with_them(gpt: Subject) -> None:
    plan = gpt.plan("tp", 4)
    full = everywhere(plan, gpt, "full")
    assert len(gpt.program(full).collectives()) > len(gpt.program(plan).collectives())


def test_the_cut_is_the_smallest(gpt: Subject) -> None:
    """Between the inputs of a block and what its backward reads there is no cheaper set of values."""
    graph = fx.Graph()
    mesh = gpt.plan("ddp", 4).mesh
    wide, narrow = torch.empty(8, 64), torch.empty(8, 2)
    values = []
    for width in (wide, narrow, wide, wide):
        read = values[-1] if values else graph.placeholder("x")
        if not values:
            read.meta = {"val": wide, "sharding": replicated(mesh)}
        node = graph.call_function(torch.ops.aten.relu.default, (read,))
        node.meta = {"val": width, "module": "block", "backward": False, "sharding": replicated(mesh)}
        values.append(node)
    reader = graph.call_function(torch.ops.aten.relu.default, (values[-1],))
    reader.meta = {"val": wide, "module": "block", "backward": True, "sharding": replicated(mesh)}
    graph.output(reader)
    nodes = forward_nodes(graph, ["block"])["block"]
    chosen = choose_saved(nodes, parameter_looks(graph, ()), "full", mesh)
    assert chosen.saved == (values[1],)
    assert chosen.repeated == (values[2], values[3])


def test_regions_are_blocks_children_and_the_root(gpt: Subject) -> None:
    regions = find_regions(gpt.joint)
    assert set(regions) == {"tokens", "positions", "blocks.0", "blocks.1", "norm", "head", ""}
    assert region_of("blocks.1.up", regions) == "blocks.1"
    assert region_of("blocks", regions) == ""
    assert region_of("norm", ["blocks.0"]) is None


def test_unknown_regions_and_levels_are_refused(gpt: Subject) -> None:
    plan = gpt.plan("ddp", 4)
    with pytest.raises(PlanError, match=r"the model runs nothing in 1 region: 'blocks.7'"):
        check_plan_matches(replace(plan, recompute={"blocks.7": "full"}), gpt.joint)
    with pytest.raises(PlanError, match=r"recomputes 'norm' at level 'some'; the levels are selective, full"):
        gpt.program(replace(plan, recompute={"norm": "some"}))


def test_the_printed_plan_says_what_is_recomputed(gpt: Subject) -> None:
    text = str(replace(gpt.plan("ddp", 4), recompute={"": "selective", "blocks.0": "full", "blocks.1": "full"}))
    assert "Computed again in the backward pass: (root): selective, blocks.* ×2: full" in text


def test_plan_files_hold_recomputation(gpt: Subject) -> None:
    plan = replace(gpt.plan("ddp", 4), recompute={"": "selective", "blocks.1": "full"})
    assert plan_from_json(plan_to_json(plan)).recompute == plan.recompute
