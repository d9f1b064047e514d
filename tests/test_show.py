"""The printed plan: folding, units, rows of a small program, and the text as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard
from autopar.plan import Candidate, FactorRef, MemoryParts, ModuleRow, Plan, PlanReport, Storage
from autopar.program import LocalGraph, LocalProgram
from autopar.show import build_rows, fold_repeats, format_bytes, format_time, render_plan

MESH = Mesh(("dp", "tp"), (2, 4))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**30, "1.0 GiB"),
        (2**50, "1048576.0 GiB"),
    ],
)
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 µs"), (1.5e-6, "1.50 µs"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (1.0, "1.00 s"), (120.0, "120 s")],
)
def test_time_in_words(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_equal_blocks_fold_to_a_star() -> None:
    rows = [("wte", "v"), *((f"h.{i}.{part}", part) for i in range(12) for part in ("ln", "mlp.fc")), ("head", "v")]
    assert fold_repeats(rows) == [("wte", 1, "v"), ("h.*.ln", 12, "ln"), ("h.*.mlp.fc", 12, "mlp.fc"), ("head", 1, "v")]


def test_unequal_blocks_fold_to_ranges() -> None:
    rows = [(f"h.{i}.fc", "a" if i < 4 or i > 9 else "b") for i in range(12)] + [("h.13.fc", "a")]
    assert fold_repeats(rows) == [
        ("h.0-3.fc", 4, "a"),
        ("h.4-9.fc", 6, "b"),
        ("h.10-11.fc", 2, "a"),
        ("h.13.fc", 1, "a"),
    ]


def test_nested_repeats_fold_from_the_inside() -> None:
    rows = [(f"h.{i}.experts.{j}.up", "e") for i in range(3) for j in range(8)]
    assert fold_repeats(rows) == [("h.*.experts.*.up", 24, "e")]


def test_what_occurs_once_keeps_its_number() -> None:
    rows = [("net.0", "linear"), ("net.1", "norm"), ("net.2", "linear"), ("tower.0.fc", "x"), ("", "root")]
    assert fold_repeats(rows) == [(path, 1, key) for path, key in rows]
    assert fold_repeats([]) == []


def tiny_program(num_blocks: int) -> tuple[JointGraph, LocalProgram]:
    """Blocks of one weight each whose output is summed along `tp`; the root adds a bias and gathers along `dp`."""
    c10d = torch.ops._c10d_functional
    graph = fx.Graph()
    batch = (Shard(0), Replicate())

    def meta(module: str, **more: object) -> dict[str, object]:
        return {"val": torch.empty(4, 4, device="meta"), "module": module, "backward": False, **more}

    names = [f"h.{i}.fc.weight" for i in range(num_blocks)] + ["bias", "x"]
    nodes = {name: graph.placeholder(name.replace(".", "_")) for name in names}
    for node in nodes.values():
        node.meta = meta("")
    value = nodes["x"]
    for i in range(num_blocks):
        module = f"h.{i}.fc"
        value = graph.call_function(torch.ops.aten.mm.default, (value, nodes[f"{module}.weight"]))
        value.meta = meta(module)
        value = graph.call_function(c10d.all_reduce.default, (value, "sum", "tp"))
        value.meta = meta(module, bytes=64)
        value = graph.call_function(c10d.wait_tensor.default, (value,))
        value.meta = meta(module, sharding=batch)
    value = graph.call_function(torch.ops.aten.add.Tensor, (value, nodes["bias"]))
    value.meta = meta("", sharding=batch)
    for _ in range(2):
        gathered = graph.call_function(c10d.all_gather_into_tensor.default, (value, 2, "dp"))
        gathered.meta = meta("", bytes=128)
        wait = graph.call_function(c10d.wait_tensor.default, (gathered,))
        wait.meta = meta("", sharding=(Replicate(), Replicate()))
    graph.output((wait,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    kinds = [InputKind.PARAM] * (num_blocks + 1) + [InputKind.INPUT]
    inputs = tuple(GraphInput(kind, name) for kind, name in zip(kinds, names, strict=True))
    outputs = (GraphOutput(OutputKind.OUTPUT, ""),)
    local = LocalGraph(module, inputs, outputs, (None,) * len(inputs), (None,))
    return JointGraph(module, inputs, outputs, {}, trains=False), LocalProgram(MESH, local, local, None)


def describe(name: str) -> str:
    return "row" if name.endswith("weight") else "replicate"


def test_rows_of_a_program() -> None:
    joint, program = tiny_program(3)
    assert build_rows(joint, program, describe) == (
        ModuleRow("", 1, "replicate", "replicate", "2 all_gather@dp", 256),
        ModuleRow("h.*.fc", 3, "row", "shard(0)@dp", "all_reduce@tp", 3 * 64),
    )
    total = sum(row.collective_bytes for row in build_rows(joint, program, describe))
    assert total == sum(c.num_bytes for c in program.collectives())


def test_rows_differ_where_placements_do() -> None:
    joint, program = tiny_program(4)
    rows = build_rows(joint, program, lambda name: "column" if name.startswith("h.3") else describe(name))
    assert [(row.module, row.count, row.params) for row in rows[1:]] == [
        ("h.0-2.fc", 3, "row"),
        ("h.3.fc", 1, "column"),
    ]


def test_params_of_a_module_are_told_apart_and_ties_named() -> None:
    joint, program = tiny_program(1)
    joint.tied = {"head.weight": "h.0.fc.weight", "head.cache": "some.buffer", "gain": "bias"}
    rows = {row.module: row for row in build_rows(joint, program, describe)}
    assert rows["head"].params == "tied to h.0.fc.weight"
    assert rows[""].params == "bias: replicate, gain: tied to bias"


def report() -> PlanReport:
    return PlanReport(
        cluster="1×8 H100-80GB (nccl)",
        budget_bytes=79 * 2**30,
        step_time_s=0.123,
        compute_s=0.1,
        exposed_s=0.023,
        memory=MemoryParts(2**30, 2**31, 2**32, 2**33, 2**20, 2**29),
        rows=(
            ModuleRow("wte", 1, "vocab", "shard(0)@dp", "all_reduce@tp", 2**20),
            ModuleRow("h.*.mlp.c_proj", 12, "weight: row, bias: replicate", "shard(0)@dp", "2 all_reduce@tp", 2**24),
            ModuleRow("", 1, "", "replicate", "", 0),
        ),
        candidates=(
            Candidate("ddp", "dp=8", 0.2, 0.1, 0.1, 100 * 2**30, "peak is 21.0 GiB over the budget"),
            Candidate("fsdp+tp", "dp=2×tp=4", 0.123, 0.1, 0.023, 16 * 2**30, "chosen"),
        ),
        collective_bytes={"all_reduce@tp": 17 * 2**20, "all_gather@dp": 2**30},
        replicated_ops={"my_lib::op": 3, "aten::cumsum": 1},
    )


PLAN = Plan(
    "fsdp+tp",
    MESH,
    ((FactorRef("input:x", 0, 0, "batch"),), (FactorRef("h.0.mlp.up.weight", 0),)),
    {
        **{f"h.{i}.w": Storage((Shard(0), Shard(1)), regather=True) for i in range(3)},
        "ln.weight": Storage((Replicate(), Replicate())),
        "wte.weight": Storage((Replicate(), Shard(0))),
    },
)

PRICED = """\
autopar plan: fsdp+tp on mesh dp=2×tp=4
cluster 1×8 H100-80GB (nccl), budget 79.0 GiB per device, predicted peak 15.5 GiB
step 123 ms = compute 100 ms + collectives that nothing hides 23.0 ms

Modules
module               parameters                     output        collectives of each   bytes of all
────────────────────────────────────────────────────────────────────────────────────────────────────
wte                  vocab                          shard(0)@dp   all_reduce@tp              1.0 MiB
h.*.mlp.c_proj ×12   weight: row, bias: replicate   shard(0)@dp   2 all_reduce@tp           16.0 MiB
(root)                                              replicate

Memory at the peak, per rank
 params     grads   optimizer   activations   temporaries     reserve      total     budget
───────────────────────────────────────────────────────────────────────────────────────────
1.0 GiB   2.0 GiB     4.0 GiB       8.0 GiB       1.0 MiB   512.0 MiB   15.5 GiB   79.0 GiB

Collectives, per rank and step
collective   axis      bytes
────────────────────────────
all_gather   dp      1.0 GiB
all_reduce   tp     17.0 MiB
total                1.0 GiB

Candidates
strategy   mesh          step   compute   exposed        peak   verdict
────────────────────────────────────────────────────────────────────────────────────────────────
ddp        dp=8        200 ms    100 ms    100 ms   100.0 GiB   peak is 21.0 GiB over the budget
fsdp+tp    dp=2×tp=4   123 ms    100 ms   23.0 ms    16.0 GiB   chosen

No sharding rule, so these run whole on every rank: aten::cumsum ×1, my_lib::op ×3"""

UNPRICED = """\
autopar plan: fsdp+tp on mesh dp=2×tp=4, not priced

cut along dp: batch (input:x, dim 0, part 0)
cut along tp: factor (h.0.mlp.up.weight, dim 0, part 0)

Parameters at rest
parameter    sharding                   gathered copy
───────────────────────────────────────────────────────────────────
h.*.w ×3     shard(0)@dp, shard(1)@tp   gathered again for backward
ln.weight    replicate
wte.weight   shard(0)@tp                kept for backward"""


def test_priced_plan_as_text() -> None:
    assert render_plan(replace(PLAN, report=report())) == PRICED


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 4), None),
        ((8,), "mesh 8 is taken as dp=2×tp=4: the same ranks in their order"),
        (
            (2, 2, 2),
            "mesh 2×2×2 is taken as dp=2×tp=4, since plans have one or two axes: the same ranks in their order",
        ),
    ],
)
def test_a_mesh_other_than_the_one_asked_for_is_said(sizes: tuple[int, ...], line: str | None) -> None:
    text = render_plan(replace(PLAN, report=replace(report(), mesh_sizes=sizes)))
    first, rest = PRICED.split("\n", 1)
    assert text == "\n".join([first, *([line] if line else []), rest])


def test_plan_without_a_report_as_text() -> None:
    assert render_plan(PLAN) == UNPRICED


def test_text_has_no_escapes_and_keeps_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = ModuleRow("a" * 60 + ".b", 1, "[bold]column[/bold]", "shard(0)@dp", ", ".join(["all_gather@dp"] * 9), 1)
    text = render_plan(
        replace(PLAN, report=replace(report(), rows=(long,), budget_bytes=None, replicated_ops={})), width=80
    )
    assert "\x1b" not in text
    assert "bold" in text
    assert "budget no budget" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text == render_plan(
        replace(PLAN, report=replace(report(), rows=(long,), budget_bytes=None, replicated_ops={})), width=80
    )
