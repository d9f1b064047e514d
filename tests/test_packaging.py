"""The project's own promises: what the wheel holds, where private interfaces may be touched, what the README shows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("cost_model", "passes", "runtime")
SOURCES = sorted(
    path for folder in ("autopar", *STAGES, "benchmarks", "examples", "tests") for path in (ROOT / folder).glob("*.py")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    """Dotted names of the packages that the four folders really hold, at any depth."""
    found = set()
    for folder in ("autopar", *STAGES):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.relative_to(ROOT).parent.parts
            found.add(".".join(parts if folder == "autopar" else ("autopar", *parts)))
    return found


def test_every_package_on_disk_is_listed() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk()


def test_package_dir_maps_each_package_to_a_folder() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {"autopar": "autopar", **{f"autopar.{stage}": stage for stage in STAGES}}


@pytest.mark.parametrize("stage", STAGES)
def test_links_are_relative_and_lead_to_the_folders(stage: str) -> None:
    link = ROOT / "autopar" / stage
    assert link.is_symlink()
    assert os.readlink(link) == f"../{stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_stage_folders_are_flat(stage: str) -> None:
    nested = [p.name for p in (ROOT / stage).iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert nested == []


def test_import_linter_reads_a_list_of_roots() -> None:
    assert PROJECT["tool"]["importlinter"]["root_packages"] == ["autopar"]


def is_private(dotted: str) -> bool:
    """Whether a dotted name reaches into PyTorch's private interfaces; operator namespaces are public by design."""
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or `""` when it does not start at a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_torch_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each import of, or attribute path into, a private part of torch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_name(node)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if is_private(name))


def test_private_names_are_recognised() -> None:
    source = """
import torch._dynamo
from torch._guards import tracing
from torch.distributed.tensor.placement_types import _StridedShard
from torch.distributed import tensor
x = torch._C.foo
y = torch.ops._c10d_functional.all_reduce.default
z = torch.nn.Linear.__init__
w = module._parameters
"""
    assert sorted({line for line, _ in private_torch_names(source)}) == [2, 3, 4, 6]


def test_private_torch_is_touched_in_one_module_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if path != ROOT / "autopar" / "_compat.py"
        for line, name in private_torch_names(path.read_text())
    ]
    assert found == []


def readme_example() -> str:
    """The first Python block of the README."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return block.group(1)


def test_readme_example_is_the_file_that_is_run() -> None:
    file_lines = iter((ROOT / "examples" / "plain_module.py").read_text().splitlines())
    missing = [line for line in readme_example().splitlines() if line and line not in file_lines]
    assert missing == []  # `in` moves the iterator on, so the order is checked too


def test_readme_links_lead_somewhere() -> None:
    for name in ("README.md", "docs/roadmap.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{name} links to {target}"


def run_example(
    name: str, num_ranks: int, *flags: str, launch: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a file of `examples/` on CPU processes, with flags of its own and more flags of `torchrun`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*torchrun, *launch, str(ROOT / "examples" / name), *flags]
    run = subprocess.run(command, capture_output=True, text=True, env=launch_environment(), check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def launch_environment() -> dict[str, str]:
    """What `torchrun` is started with."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONFAULTHANDLER"] = "1"  # a process that aborts says where its threads were
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see examples/elastic.py
    return env


def test_plain_module_example_trains_on_two_processes() -> None:
    run = run_example("plain_module.py", 2)
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\d+\.\d+)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 6, run.stdout
    assert losses[-1] < 0.5 * losses[0]
    assert "autopar plan: " in run.stdout


@pytest.mark.slow
def test_demo_follows_the_single_device(tmp_path: Path) -> None:
    run = run_example("train_gpt2.py", 4, "--steps", "6", "--layers", "1", "--strategy", "tp", "--out", str(tmp_path))
    difference = re.search(r"largest difference .*: (\S+)$", run.stdout, re.MULTILINE)
    assert difference is not None, run.stdout
    assert float(difference.group(1)) < 1e-5
    assert "autopar plan: tp " in run.stdout
    assert (tmp_path / "plan.json").exists()
