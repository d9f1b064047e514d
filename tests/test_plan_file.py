"""Plans as files: round trips, refusals that name the key, and comparison with the model."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar import plan_reader
from autopar.errors import InputError, PlanError
from autopar.explain import CHOSEN
from autopar.graph import GraphInput, InputKind, JointGraph
from autopar.mesh import Mesh
from autopar.placement import Partial, Replicate, Shard, shard
from autopar.plan import (
    Candidate,
    FactorRef,
    MemoryParts,
    ModuleCost,
    ModuleRow,
    Plan,
    PlanReport,
    Storage,
    break_even,
)
from autopar.plan_file import check_plan_matches, load_plan, plan_from_json, plan_to_json, save_plan

R = Replicate()
REPORT = PlanReport(
    cluster="1×8 H100-80GB (nccl)",
    budget_bytes=79 * 2**30,
    step_time_s=0.1 + 0.2,
    compute_s=1e-9,
    exposed_s=0.0,
    memory=MemoryParts(1, 2, 3, 4, 5, 2**40),
    rows=(
        ModuleRow("", 1, "", "replicate", "", 0),
        ModuleRow("h.*.mlp", 12, "row", "shard(0)@dp", "2 all_reduce@tp", 9),
    ),
    candidates=(Candidate("ddp", "dp=8", math.inf, 0.5, 0.5, 7, "too large:\n21 GiB over"),),
    collective_bytes=Counter({"all_reduce@tp": 3, "all_gather@dp": 2**50}),
    replicated_ops={"my_lib::op": 3},
    by_group=("tp",),
    mesh_sizes=(2, 2, 2),
)
PLAN = Plan(
    "fsdp+tp",
    Mesh(("dp", "tp"), (2, 4)),
    ((FactorRef("input:x", 0, 0, "batch"),), (FactorRef("h.0.qkv.weight", 0, 1), FactorRef("wte.weight", 0))),
    {"h.0.qkv.weight": Storage((Shard(1), shard(0, 3)), True), "wte.weight": Storage((R, Shard(0)))},
    delay_reduction=True,
    prefetch=8,
    overlap=False,
    graph_fingerprint="0123456789abcdef",
    report=REPORT,
)


def test_round_trip_keeps_everything() -> None:
    text = plan_to_json(PLAN)
    again = plan_from_json(text)
    assert again == PLAN
    assert again.report == REPORT
    assert list(again.storage) == list(PLAN.storage)
    assert plan_to_json(again) == text


def test_a_plan_that_was_not_priced() -> None:
    bare = Plan("ddp", Mesh(("dp",), (4,)), ((),), {"w": Storage((R,))})
    again = plan_from_json(plan_to_json(bare))
    assert again == bare
    assert again.report is None


def test_the_text_is_readable() -> None:
    content = json.loads(plan_to_json(PLAN))
    assert list(content)[:5] == ["schema_version", "autopar", "torch", "graph_fingerprint", "strategy"]
    assert content["mesh"] == {"names": ["dp", "tp"], "sizes": [2, 4]}
    assert content["storage"]["h.0.qkv.weight"] == {"sharding": ["shard(1)", "shard(0, split=3)"], "regather": True}
    assert content["factors"]["dp"] == [{"anchor": "input:x", "dim": 0, "part": 0, "label": "batch"}]
    assert content["torch"] == str(torch.__version__)
    assert content["report"]["candidates"][0]["step_time_s"] == "infinite"
    assert '   "sharding": ["shard(1)", "shard(0, split=3)"],\n' in plan_to_json(PLAN)
    odd = replace(PLAN, storage={"a  b": Storage((R, R)), "[": Storage((R, R))})
    assert plan_from_json(plan_to_json(odd)) == odd


def edited(path: str, value: Any) -> str:
    """The plan's JSON with one place changed; `...` removes it."""
    content = json.loads(plan_to_json(PLAN))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    place = content
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, r"has schema_version 2, but this autopar reads 6: make the plan again"),
        ("schema_version", ..., r"has schema_version nothing"),
        ("schema_version", True, r"has schema_version True"),
        ("strategy", ..., r"the root of the plan file lacks key 'strategy'"),
        ("note", "x", r"the root of the plan file has unknown key 'note'"),
        ("strategy", "", r"strategy of the plan file must be a printable name .*, found ''"),
        ("strategy", "tp\x1b[2J", r"strategy of the plan file must be a printable name .*, found 'tp\\x1b\[2J'"),
        ("torch", 2, r"torch of the plan file must be a printable name"),
        ("graph_fingerprint", "../x", r"graph_fingerprint of the plan file must be a hexadecimal digest"),
        ("mesh", [2, 4], r"mesh of the plan file must be an object, found a list"),
        ("mesh/names/1", "dp", r"mesh of the plan file is wrong: mesh axis names must be unique"),
        ("mesh/names/1", "import os", r"is not an identifier"),
        ("mesh/sizes/0", 0, r"sizes must be positive integers"),
        ("mesh/sizes/0", 2.0, r"mesh\.sizes\[0\] of the plan file must be a whole number from 0, found 2\.0"),
        ("mesh/sizes/0", True, r"mesh\.sizes\[0\] .* found True"),
        ("delay_reduction", 1, r"delay_reduction of the plan file must be true or false, found 1"),
        ("prefetch", -1, r"prefetch of the plan file must be a whole number from 0, found -1"),
        ("overlap", 0, r"overlap of the plan file must be true or false, found 0"),
        ("prefetch", ..., r"the root of the plan file lacks key 'prefetch'"),
        ("factors/tp", ..., r"factors of the plan file lacks key 'tp'"),
        ("factors/pp", [], r"factors of the plan file has unknown key 'pp'"),
        ("factors/tp/1/dim", -1, r"factors\.tp\[1\]\.dim of the plan file must be a whole number from 0, found -1"),
        ("factors/tp/1/part", 2**63, r"factors\.tp\[1\]\.part .* whole number"),
        ("factors/dp/0/label", None, r"factors\.dp\[0\]\.label of the plan file must be printable text, found nothing"),
        ("storage", [], r"storage of the plan file must be an object, found a list"),
        ("storage/", {}, r"a key of storage of the plan file must be a printable name"),
        ("storage/wte.weight/sharding", ["replicate"], r"storage\.wte\.weight\.sharding .* 1 placements, .* 2 axes"),
        ("storage/wte.weight/sharding/1", "shard(x)", r"storage\.wte\.weight\.sharding\[1\] .* found 'shard\(x\)'"),
        ("storage/wte.weight/sharding/1", "shard(0))", r"must be a placement such as .* found 'shard\(0\)\)'"),
        ("storage/wte.weight/sharding/1", "partial(sum)", r"must be a placement .* found 'partial\(sum\)'"),
        ("storage/wte.weight/sharding/1", f"shard({'9' * 5000})", r"must be a placement .*\.\.\.$"),
        ("storage/wte.weight/sharding/1", "shard(64)", r"must be a placement .* found 'shard\(64\)'"),
        (
            "storage/wte.weight/sharding/1",
            f"shard(0, split={2**63})",
            r"must be a placement .* found 'shard\(0, split=",
        ),
        ("storage/wte.weight/regather", "no", r"storage\.wte\.weight\.regather .* true or false, found 'no'"),
        ("report/step_time_s", -1, r"report\.step_time_s of the plan file must be seconds from 0"),
        ("report/step_time_s", "fast", r"report\.step_time_s .* found 'fast'"),
        ("report/step_time_s", 10**400, r"report\.step_time_s"),
        ("report/memory/params", ..., r"report\.memory of the plan file lacks key 'params'"),
        ("report/rows/1/count", "12", r"report\.rows\[1\]\.count of the plan file must be a whole number"),
        ("report/rows/0", 3, r"report\.rows\[0\] of the plan file must be an object, found 3"),
        ("report/candidates/0/__class__", "x", r"report\.candidates\[0\] .* unknown key '__class__'"),
        ("report/collective_bytes/all_reduce@tp", None, r"report\.collective_bytes\.all_reduce@tp .* found nothing"),
        ("report/precision", {}, r"report\.precision of the plan file must be one of .*, found an object"),
        ("report/budget_bytes", 1.5, r"report\.budget_bytes of the plan file must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_json(edited(path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is not JSON"),
        ("{", r"is not JSON"),
        ("null", r"the root of the plan file must be an object, found nothing"),
        ("[" * 200_000, r"nested too deeply"),
        ('{"a":' * 200_000, r"nested too deeply"),
        ('{"schema_version": NaN}', r"holds NaN, which is no number"),
        ('{"schema_version": -Infinity}', r"holds -Infinity"),
        ('{"schema_version": 1, "schema_version": 1}', r"has key 'schema_version' twice"),
        ('{"schema_version": ' + "1" * 5000 + "}", r"is not JSON"),
        ('{"schema_version": 1e999}', r"has schema_version inf"),
        ("\ufeff{}", r"is not JSON"),
        ("cos\nsystem\n(S'true'\ntR.", r"is not JSON"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    "strategy", "mesh", "mesh/names", "mesh/sizes/1", "factors", "factors/dp", "factors/dp/0", "factors/tp/0/anchor",
    "storage/wte.weight", "storage/wte.weight/sharding", "storage/wte.weight/sharding/0", "report", "report/memory",
    "report/rows", "report/candidates/0", "report/candidates/0/compute_s", "report/replicated_ops", "graph_fingerprint",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_read_or_refused(path: str, value: Any) -> None:
    """Whatever stands in a place, reading gives a plan that can be written again, or a PlanError."""
    text = edited(path, value)
    try:
        plan = plan_from_json(text)
    except PlanError:
        return
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factors": ()}, r"the plan lists factors for 0 axes, but its mesh dp=2×tp=4 has 2"),
        ({"storage": {"w": Storage((R, Partial("sum")))}}, r"storage\.w\.sharding\[1\] .* found 'partial\(sum\)'"),
        ({"storage": {"w": Storage((R,))}}, r"storage\.w\.sharding .* has 1 placements"),
        ({"strategy": 'tp"""\nimport os'}, r"strategy of the plan file must be a printable name"),
        ({"report": replace(REPORT, compute_s=math.nan)}, r"cannot be written as JSON: .*nan"),
        ({"report": replace(REPORT, budget_bytes=1.0)}, r"report\.budget_bytes"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_to_json(replace(PLAN, **change))


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(replace(PLAN, report=None), path)
    save_plan(PLAN, str(path))
    assert load_plan(str(path)).report == REPORT
    assert path.read_text() == plan_to_json(PLAN)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    with pytest.raises(PlanError):
        save_plan(replace(PLAN, factors=()), path)
    assert load_plan(path) == PLAN
    with pytest.raises(InputError, match=r"cannot write .*nowhere.plan\.json': No such file or directory"):
        save_plan(PLAN, tmp_path / "nowhere" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*folder': Is a directory"):
        save_plan(PLAN, tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"cannot write .*pipe': it is a device or a pipe"):
        save_plan(PLAN, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "pipe").unlink()
    for no_name in ("", ".", "/", "plan\0.json"):
        with pytest.raises(InputError, match="that names no file"):
            save_plan(PLAN, no_name)
    with pytest.raises(InputError, match="a plan's file is given by its path, got None"):
        save_plan(PLAN, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"what is saved must be a plan, got 'ddp'"):
        save_plan("ddp", path)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "plan.json"]


def test_files_that_are_no_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"there is no plan file .*missing\.json'"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(InputError, match=r"there is no plan file"):
        load_plan(tmp_path)
    with pytest.raises(InputError, match=r"cannot read plan file .*File name too long"):
        load_plan("a" * 5000)
    for no_path in (None, 3, b"plan.json", PLAN):
        with pytest.raises(InputError, match="a plan's file is given by its path"):
            load_plan(no_path)  # type: ignore[arg-type]
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"plan\.json: the plan file is not UTF-8 text"):
        load_plan(path)
    path.write_text(edited("strategy", 3))
    with pytest.raises(PlanError, match=r"plan\.json: strategy of the plan file must be"):
        load_plan(path)
    assert plan_reader.MAX_FILE_BYTES == 64 * 2**20
    monkeypatch.setattr("autopar.plan_file.MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("autopar.plan_reader.MAX_FILE_BYTES", 1000)
    path.write_text(" " * 1001)
    with pytest.raises(PlanError, match=r"plan\.json: the file has more than 1000 bytes, so it is no plan"):
        load_plan(path)
    with pytest.raises(PlanError, match=r"1001 characters; more than 1000 are not read"):
        plan_from_json(" " * 1001)


def test_odd_numbers_and_names_in_a_report_can_be_shown() -> None:
    """What reading lets through, printing and explaining must stand."""
    report = replace(REPORT, bound_s=0.0, num_searched=2**62)
    assert "best of" not in str(replace(PLAN, report=report))
    cost = ModuleCost("h.²", 1.0, {"all_gather@tp": math.inf}, 2**62, 0)
    candidates = tuple(Candidate("tp", "tp=4", math.inf, 0.0, 0.0, 1, CHOSEN, (cost,)) for _ in range(2))
    rows = (ModuleRow("h.0-3.mlp", 4, "", "", "", 0),)
    plan = plan_from_json(plan_to_json(replace(PLAN, report=replace(report, candidates=candidates, rows=rows))))
    assert plan.explain("h.²").startswith("h.² under ")
    assert plan.compare(plan)
    with pytest.raises(InputError, match="a plan is compared with another plan, got 'ddp'"):
        plan.compare("ddp")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="break_even takes two plans, got 'ddp'"):
        break_even("ddp", plan, "batch")  # type: ignore[arg-type]


def joint_with(shapes: dict[str, tuple[int, ...]]) -> JointGraph:
    """A graph that holds parameters of these shapes and does nothing."""
    graph = fx.Graph()
    for i, shape in enumerate(shapes.values()):
        graph.placeholder(f"p{i}").meta["val"] = torch.empty(shape, device="meta")
    graph.output(())
    inputs = tuple(GraphInput(InputKind.PARAM, name) for name in shapes)
    return JointGraph(fx.GraphModule(torch.nn.Module(), graph), inputs, (), {})


SHAPES = {"h.0.qkv.weight": (12, 4), "wte.weight": (7, 4)}


def test_a_plan_fits_its_model_whatever_the_fingerprint() -> None:
    joint = joint_with(SHAPES)
    assert joint.fingerprint() != PLAN.graph_fingerprint
    check_plan_matches(PLAN, joint)  # 7 rows over 4 ranks: uneven storage is allowed


def test_a_stale_plan_is_refused_with_the_difference() -> None:
    joint = joint_with({"wte.weight": (7, 4), **{f"new.{i}": (2,) for i in range(7)}})
    with pytest.raises(PlanError) as caught:
        check_plan_matches(PLAN, joint)
    assert str(caught.value) == (
        "the plan (fsdp+tp on mesh dp=2×tp=4) was made for another model: the plan does not say how to store 7 "
        "parameters: 'new.0', 'new.1', 'new.2', 'new.3', 'new.4' and 2 more; the model does not have 1 parameter: "
        "'h.0.qkv.weight' (fingerprint of the plan's graph: 0123456789abcdef; of this one: "
        f"{joint.fingerprint()}); make a new plan for this model"
    )


@pytest.mark.parametrize(
    ("shapes", "sharding", "message"),
    [
        (SHAPES, (R,), r"gives parameter 'wte\.weight' 1 placements, but its mesh dp=2×tp=4 has 2 axes"),
        (SHAPES, (R, Shard(2)), r"'wte\.weight' as shard\(2\), but .* has shape \[7, 4\], without a dim 2"),
        (SHAPES, (R, Shard(-1)), r"without a dim -1"),
        (SHAPES, (R, Partial("sum")), r"as partial\(sum\), but a parameter rests whole or cut"),
        (SHAPES, (R, shard(0, 3)), r"its dim 0 of size 7 does not divide into 3 parts"),
        ({**SHAPES, "wte.weight": ()}, (R, Shard(0)), r"has shape \[\], without a dim 0"),
        (
            SHAPES,
            (Shard(0), Shard(0)),
            r"axis 'dp' makes parts of different sizes of its dim 0 of size 7, which axis 'tp' cannot cut again: cut",
        ),
    ],
)
def test_storage_must_fit_the_shapes(shapes: dict[str, tuple[int, ...]], sharding: Any, message: str) -> None:
    plan = replace(PLAN, storage={**PLAN.storage, "wte.weight": Storage(sharding)})
    with pytest.raises(PlanError, match=message):
        check_plan_matches(plan, joint_with(shapes))


def test_factors_must_fit_the_mesh() -> None:
    with pytest.raises(PlanError, match=r"lists factors for 1 axes, but its mesh dp=2×tp=4 has 2"):
        check_plan_matches(replace(PLAN, factors=((),)), joint_with(SHAPES))


def test_a_cut_along_a_tensor_that_does_not_exist_is_refused() -> None:
    odd = replace(PLAN, factors=((FactorRef("input:elsewhere", 0),), (FactorRef("nope", 0),)))
    with pytest.raises(PlanError, match=r"cuts dims of tensors that the model does not have: 1 name: 'nope'"):
        check_plan_matches(odd, joint_with(SHAPES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefetch": "8"}, r"prefetch of the plan must be a whole number from 0, found '8'"),
        ({"prefetch": -1}, r"whole number from 0, found -1"),
        ({"prefetch": True}, r"whole number from 0, found True"),
        ({"overlap": "no"}, r"overlap of the plan must be True or False, found 'no'"),
    ],
)
def test_what_a_plan_says_of_the_schedule_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan_matches(replace(PLAN, **change), joint_with(SHAPES))


def test_what_holds_parameters_and_runs_nothing_is_a_region_too() -> None:
    plan = replace(PLAN, recompute={"h": "full", "wte": "selective"})
    check_plan_matches(plan, joint_with(SHAPES))
    with pytest.raises(PlanError, match=r"runs nothing in 1 region: 'w'"):
        check_plan_matches(replace(plan, recompute={"w": "selective"}), joint_with(SHAPES))
