"""The benchmarks' command lines and JSON fields: claims are checked with them, so they stay stable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from autopar.errors import TraceError, VerificationError
from benchmarks import auto_steps, compare_steps, coverage, hosts, models_table, planner, planning, step, zoo

ROOT = Path(__file__).resolve().parents[1]
ROW = [
    "model", "strategy", "mesh", "ok", "refused", "max_rel_err", "sharded_flops_fraction", "error", "seconds", "steps",
]  # fmt: skip
LINE = {
    "tag", "strategy", "shape", "config", "world", "ranks_per_host", "params", "inter_bps", "intra_bps", "steps",
    "median_s", "min_s", "mean_s", "times", "cpu_s_per_step_all_ranks", "losses", "rss_delta_mb_max",
    "param_bytes_per_rank", "opt_state_bytes_per_rank", "torch", "plan",
}  # fmt: skip

REGISTRY = """
from __future__ import annotations
import dataclasses
from typing import Callable
import torch
from torch import nn

@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int], tuple]
    loss_fn: Callable

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

def missing():
    raise ImportError("No module named 'elsewhere'")

def batch(rows, seed):
    return (torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)),), {}

def loss(output):
    return output.square().mean()

REGISTRY = {"small": Entry("small", build, batch, loss), "missing": Entry("missing", missing, batch, loss)}
"""


@pytest.fixture(name="registry")
def _registry(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_zoo.py"
    path.write_text(REGISTRY)
    return path


def row_when(monkeypatch: pytest.MonkeyPatch, registry: Path, outcome: Any, model: str = "small") -> dict[str, Any]:
    """The row of a model when `autopar.verify` returns or raises `outcome`."""

    def verify(_model: nn.Module, _strategy: str, _inputs: Any, *, mesh: str, num_steps: int) -> Any:
        assert (mesh, num_steps) == ("4", 3)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("autopar.verify", verify, raising=False)
    row = zoo.check(zoo.load_registry(registry)[model], "tp", "4", 8)
    assert list(row) == ROW
    return row


def report(ok: bool, error: float) -> SimpleNamespace:
    return SimpleNamespace(ok=ok, max_rel_err=error, worst="gradient of 0.weight", sharded_flops_fraction=0.75)


def test_right_numbers_are_ok(monkeypatch: pytest.MonkeyPatch, registry: Path) -> None:
    row = row_when(monkeypatch, registry, report(True, 3e-16))
    assert (row["ok"], row["refused"], row["error"]) == (True, False, None)
    assert (row["max_rel_err"], row["sharded_flops_fraction"]) == (3e-16, 0.75)


@pytest.mark.parametrize("error", [2e-9, float("nan")])
def test_wrong_numbers_are_not_ok_whatever_the_report_says(
    monkeypatch: pytest.MonkeyPatch, registry: Path, error: float
) -> None:
    row = row_when(monkeypatch, registry, report(True, error))
    assert (row["ok"], row["refused"]) == (False, False)
    assert row["error"].startswith("gradient of 0.weight differs by")


def test_an_error_of_autopar_is_a_refusal(monkeypatch: pytest.MonkeyPatch, registry: Path) -> None:
    row = row_when(monkeypatch, registry, TraceError("reads a value"))
    assert (row["ok"], row["refused"], row["error"]) == (False, True, "TraceError: reads a value")


def test_a_failed_verification_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch, registry: Path) -> None:
    row = row_when(monkeypatch, registry, VerificationError("loss differs"))
    assert (row["ok"], row["refused"]) == (False, False)


def test_any_other_error_is_a_row_too(monkeypatch: pytest.MonkeyPatch, registry: Path) -> None:
    row = row_when(monkeypatch, registry, KeyError("x"))
    assert (row["ok"], row["refused"], row["error"]) == (False, False, "KeyError: 'x'")
    row = row_when(monkeypatch, registry, report(True, 0.0), "missing")
    assert (row["ok"], row["error"]) == (False, "ImportError: No module named 'elsewhere'")


def test_rows_of_an_earlier_run_are_kept(
    monkeypatch: pytest.MonkeyPatch, registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "rows.json", []

    def verify(_model: nn.Module, strategy: str, _inputs: Any, *, mesh: str, num_steps: int) -> Any:
        asked.append((strategy, mesh))
        return report(True, 0.0)

    monkeypatch.setattr("autopar.verify", verify)
    for strategies, meshes in (("ddp", "4"), ("ddp,tp", "4,2x2")):
        arguments = ["--zoo", str(registry), "--only", "small", "--strategies", strategies, "--mesh", meshes]
        monkeypatch.setattr("sys.argv", ["zoo", *arguments, "--json", str(out)])
        zoo.main()
    expected = [("ddp", "4"), ("tp", "4"), ("ddp", "2x2"), ("tp", "2x2")]
    assert asked == expected == [(row["strategy"], row["mesh"]) for row in json.loads(out.read_text())]
    assert "2 ok, 0 refused, 0 WRONG, 0 error of 2" in capsys.readouterr().out


def test_dropout_is_switched_off_in_modules_attributes_and_configurations() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.MultiheadAttention(4, 1, dropout=0.2))
    model.config = SimpleNamespace(attn_pdrop=0.3, dropout=0.4, hidden=4.0)  # type: ignore[assignment]
    zoo.switch_off_dropout(model)
    assert (model[0].p, model[1].dropout) == (0.0, 0.0)
    assert vars(model.config) == {"attn_pdrop": 0.0, "dropout": 0.0, "hidden": 4.0}


def test_loss_wrapper_returns_the_loss_and_the_other_tensors() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"loss": x.sum(), "hidden": (x + 1, None), "twice": [x * 2]}

    outputs = zoo.WithLoss(Model(), lambda output: output["loss"])(torch.ones(3))
    assert [tuple(t.shape) for t in outputs] == [(), (3,), (3,)]


def test_step_prints_the_fields_of_the_baselines() -> None:
    command = [sys.executable, "-m", "benchmarks.step", "--strategy", "single", "--shape", "tiny", "--layers", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, "--steps", "2", "--warmup", "1"], capture_output=True, text=True, cwd=ROOT, env=env, check=True
    )
    line = json.loads(run.stdout)
    assert set(line) >= LINE
    assert line["config"] == {"layers": 1, "dim": 64, "heads": 4, "ffn": 128, "vocab": 64, "seq": 16, "batch": 8}
    assert len(line["losses"]) == 3
    assert len(line["times"]) == line["steps"] == 2
    assert line["param_bytes_per_rank"] == 4 * line["params"]


def test_step_takes_the_flags_of_the_baselines() -> None:
    flags = (
        "--strategy tp_sp,fsdp --shape wide,narrow --layers 1 --dim 2 --heads 3 --ffn 4 --vocab 5 --seq 6 --batch 7 "
        "--steps 8 --warmup 9 --opt sgd --lr 0.1 --bucket-mb 2 --max-seconds 3 --seed 4 --out x --tag y"
    )
    arguments = step.parse_arguments(flags.split())
    assert arguments.strategies == ["tp_sp", "fsdp"]
    assert arguments.shapes == ["wide", "narrow"]


def test_step_names_an_unknown_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.parse_arguments(["--strategy", "magic"])
    assert "unknown strategy magic; there are single, auto," in capsys.readouterr().err


def test_comparison_row_shows_ratio_spread_and_bytes() -> None:
    def line(seconds: float, sent: int) -> dict[str, Any]:
        links = {"host0": {"tx": sent, "rx": 100}, "host0:lo": {"tx": 0, "rx": 0}}
        memory = {"param_bytes_per_rank": 10, "opt_state_bytes_per_rank": 20}
        return {"median_s": seconds, "losses": [1.0, 0.5], "bytes_per_step": links, **memory}

    pair = compare_steps.Pair(
        "wide", "fsdp", "zero3", [(line(1.0, 1000), line(0.9, 800)), (line(1.0, 1000), line(1.2, 800))]
    )
    row = compare_steps.table_row(pair)
    assert "| wide | fsdp / zero3 | 1.000 | 1.050 | **1.05** (0.90–1.20) | 1,000 | 800 | 1.000 |" in row
    assert row.count("|") == compare_steps.HEADER.splitlines()[0].count("|")
    pair.failure = "no"
    assert compare_steps.table_row(pair).count("|") == row.count("|")


def test_auto_row_shows_prediction_and_measurement() -> None:
    def line(strategy: str, seconds: float) -> dict[str, Any]:
        plan = {"strategy": strategy, "mesh": "dp=2", "step_time_s": 0.5, "peak_bytes": 50 * 2**20}
        return {"strategy": strategy, "median_s": seconds, "losses": [1.0], "plan": plan}

    slow, fast = auto_steps.rows(
        "narrow", "47", {"ddp": [line("ddp", 1.0), line("ddp", 2.0)], "auto": [line("zero2", 0.6)]}
    )[::-1]
    assert fast.startswith(
        "| narrow | 47 MiB | **auto** (zero2 on dp=2) | 0.500 | 0.600 (0.600–0.600) | 1.20 | 50.0 (over)"
    )
    assert "| ddp | 0.500 | 1.500 (1.000–2.000) | 3.00 |" in slow
    assert slow.count("|") == auto_steps.HEADER.splitlines()[0].count("|")


def test_planner_rows_show_every_broken_promise() -> None:
    row = {"model": "m", "cluster": "c", "mesh": "dp=2", "strategy": "auto", "named": "ddp", "named_s": 2.0}
    good = {**row, "budget_bytes": 10, "peak_bytes": 9, "step_time_s": 1.0, "speedup": 2.0}
    alone = {**good, "budget_bytes": 5, "peak_bytes": 5, "step_time_s": 1.5, "named": None, "speedup": None}
    assert planner.faults([alone, good]) == []
    assert planner.summary([alone, good]).count("|") == planner.HEADER.splitlines()[0].count("|")
    bad = {**good, "budget_bytes": 20, "peak_bytes": 21, "step_time_s": 1.2, "speedup": 0.9}
    assert [fault.rpartition(": ")[2] for fault in planner.faults([alone, good, bad])] == [
        "over the budget", "slower than with less memory", "slower than ddp",
    ]  # fmt: skip


def test_planner_benchmark_keeps_its_promises_on_a_model() -> None:
    case = planner.Case(SumOfIds, 1, 8)
    rows = [{"model": "toy", "cluster": "4 cpu", **row} for row in planner.plan_case(case, "4 cpu", 5)]
    assert planner.faults(rows) == []
    assert list(rows[0]) == [
        "model", "cluster", "budget_bytes", "peak_bytes", "step_time_s", "strategy", "mesh", "named", "named_s",
        "speedup",
    ]  # fmt: skip


class SumOfIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(ids)).square().mean()


def test_page_of_hosts_has_a_row_for_each_strategy_and_each_rank_that_failed() -> None:
    def line(strategy: str, ranks: int, first: int) -> dict[str, Any]:
        differences = {"loss_difference": 2e-16, "parameter_difference": 3e-14}
        losses = [1.0] * (6 - first)
        return {
            "strategy": strategy,
            "mesh": f"dp={ranks}",
            "ranks": ranks,
            "first": first,
            "losses": losses,
            **differences,
        }

    failed = [{"rank": rank, "failed_at": 120.0, "error": "Error: a|b\nc"} for rank in (1, 0)]
    found = {
        "equal": [line("ddp", 4, 0), line("tp", 4, 0)],
        "cut": [{"cut_at": 100.0}, *failed],
        "fewer": [line("tp", 2, 2)],
        "again": [line("zero3", 4, 2)],
    }
    arguments = SimpleNamespace(hosts=2, ranks_per_host=2, rate="100mbit", timeout_s=20.0, rt=False)
    page = hosts.report(arguments, found)  # type: ignore[arg-type]
    assert "| ddp | dp=4 | 0 to 6 | 2e-16 | 3e-14 |\n| tp | dp=4 |" in page
    assert "| 0 | 20.0 s | Error: a\\|b c |\n| 1 | 20.0 s |" in page
    assert "checkpoint of step 2, saved by 4 ranks under zero3, loaded by 2 ranks" in page


# ---- coverage and the table of models


UNRULY = REGISTRY.replace("nn.Dropout(0.5)", "Unruly()").replace(
    "def build():",
    """class Unruly(nn.Module):
    def forward(self, x):
        return x * x.detach().histc(4).sum()

def build():""",
)


def test_coverage_lists_what_runs_whole(tmp_path: Path) -> None:
    path = tmp_path / "unruly_zoo.py"
    path.write_text(UNRULY)
    row = coverage.measure(zoo.load_registry(path)["small"], ["ddp", "tp"], "4", 8)
    assert row["error"] is None
    assert [result["strategy"] for result in row["strategies"]] == ["ddp", "tp"]
    for result in row["strategies"]:
        assert result["whole_flops_fraction"] == 0
        (entry,) = (entry for entry in result["whole"] if entry["op"] == "aten::histc")
        assert not entry["has_rule"]
        assert 0 < entry["traffic_fraction"] < 1


def test_coverage_counts_products_that_nothing_cuts(registry: Path) -> None:
    row = coverage.measure(zoo.load_registry(registry)["small"], ["replicate"], "4", 8)
    (result,) = row["strategies"]
    assert result["whole_flops_fraction"] == pytest.approx(1)
    assert all(entry["has_rule"] for entry in result["whole"])


def test_table_of_models_says_what_is_equal_and_why_the_rest_is_not(registry: Path) -> None:
    base = {"mesh": "4", "refused": False, "sharded_flops_fraction": 0.5, "error": None, "seconds": 1.0, "steps": 3}
    error = "TraceError: module a, /x/site-packages/b.py:3 depends on\nvalues"
    rows = [
        {**base, "model": "small", "strategy": "ddp", "ok": True, "max_rel_err": 1e-15},
        {**base, "model": "small", "strategy": "tp", "ok": False, "max_rel_err": 1e-3, "error": "x differs"},
        {**base, "model": "other", "strategy": "tp", "ok": False, "refused": True, "max_rel_err": None, "error": error},
    ]
    timed = [coverage.measure(zoo.load_registry(registry)["small"], ["ddp"], "4", 8)]
    text = models_table.table(rows, timed)
    assert "**1 of 3** are,\n1 are refused" in text
    assert "| small | 1e-15, 50 % | **1e-03, 50 %** |" in text
    assert "| other |  | refused |" in text
    assert "* `other` (tp): module a, b.py:3 depends on values" in text
    assert "dominates" in text
    assert "After 3 steps of AdamW all is compared again" in text


@pytest.mark.parametrize("name", planning.SWEEPS)
def test_a_sweep_of_planning_is_drawn_to_scale(name: str) -> None:
    labels = list(planning.SWEEPS[name][1])
    rows = [
        {"point": label, "cpu_s": 3.0 * i, "phases_cpu_s": {"trace": 1.0 * i, "search": 1.5 * i, "report": 0.5 * i}}
        for i, label in enumerate(labels, 1)
    ]
    picture = ElementTree.fromstring(planning.draw(name, rows))
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "CPU seconds, one core" in texts
    assert set(labels) | set(planning.PHASES) <= set(texts)
    assert [f"{row['cpu_s']:.1f}" for row in rows] == [text for text in texts if text and text.endswith(".0")]
    bars = [node for node in picture.iter("{http://www.w3.org/2000/svg}rect") if node.get("height") == "18"]
    widths = [float(bar.get("width", "nan")) for bar in bars]
    seconds = [row["phases_cpu_s"][phase] for row in rows for phase in planning.PHASES]
    assert max(float(bar.get("x", "nan")) + width for bar, width in zip(bars, widths, strict=True)) < 680
    assert [width / widths[0] for width in widths] == pytest.approx([s / seconds[0] for s in seconds], abs=0.05)


def test_a_point_of_several_sweeps_is_timed_once_in_each_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        Path(command[-1]).write_text(json.dumps({"cpu_s": 30 - len(commands)}))

    monkeypatch.setattr(planning.subprocess, "run", run)
    swept = planning.sweep(list(planning.SWEEPS), tmp_path / "out.json", repeat=2)
    # Later turns are faster here, and a point's time is the least of its own.
    assert [row["cpu_s"] for row in swept["layers"]] == [19, 18, 17, 16]
    assert {name: [row["point"] for row in rows] for name, rows in swept.items()} == {
        name: list(points) for name, (_, points) in planning.SWEEPS.items()
    }
    assert len(commands) == 2 * len({tuple(command[:-1]) for command in commands}) == 20
    assert not list(tmp_path.glob("*.part.json"))


STACK = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def make():
    return Stack(), (torch.empty(2, 8),)
"""
PLANNED = {
    "model", "cluster", "phases_s", "total_s", "cpu_s", "peak_rss_gib", "num_variables", "gap", "num_nodes",
    "predicted_step_s", "predicted_peak_gib", "full_trace",
}  # fmt: skip


def test_planning_times_its_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "six_blocks.py").write_text(STACK)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    arguments = ["--model", "six_blocks:make", "--cluster", "2xA100-80GB", "--mem-gb", "8", "--full-trace"]
    monkeypatch.setattr(sys, "argv", ["planning", *arguments, "--json", str(out)])
    planning.main()
    row = json.loads(out.read_text())
    assert row.keys() >= PLANNED
    assert set(row["phases_s"]) == {"trace", "search", "report"}
    assert sum(row["phases_s"].values()) == pytest.approx(row["total_s"])
    assert sum(row["phases_cpu_s"].values()) == pytest.approx(row["cpu_s"])
    assert 0 < row["predicted_peak_gib"] <= 8
    assert row["gap"] >= 0
    assert row["full_trace"] > 0
