"""The exported program: it reads as promised, runs by itself, and computes what the graph does."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import operator
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import handwritten
import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import InputError
from autopar.export import export_program
from autopar.export_constants import MAX_INLINE_ELEMENTS
from autopar.export_text import program_text
from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.mesh import Mesh
from autopar.normalise import normalise
from autopar.passes.pipeline import rewrite
from autopar.placement import is_sharded, local_shape
from autopar.plan import Plan
from autopar.plan_file import load_plan
from autopar.planner import plan_named
from autopar.program import COLLECTIVE_KINDS, LocalGraph, LocalProgram
from autopar.python_text import comment_text, literal
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.sharding import shard_tensor
from autopar.trace import trace

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[1]
ROWS, WIDTH, HIDDEN, CLASSES = 8, 6, 8, 10
"""The width does not divide by 4, so parameters rest in parts of different sizes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Net(nn.Module):
    """Embedding, equal blocks, a constant tensor, a tied head, a running buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.float64)
        self.head.weight = self.emb.weight
        self.scale = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.emb(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        self.seen += x.detach().mean()
        return {"loss": logits.logsumexp(-1).mean(), "logits": logits}


@functools.cache
def traced() -> JointGraph:
    torch.manual_seed(0)
    joint = trace(Net(), (torch.arange(ROWS),), {})
    normalise(joint)
    return joint


@functools.cache
def compiled(strategy: str, sizes: tuple[int, ...]) -> tuple[LocalProgram, Plan]:
    plan = plan_named(strategy, traced(), sizes, math.prod(sizes))
    return rewrite(traced(), plan), plan


# ------------------------------------------------------------------------------------------------------ running it


def load(path: Path) -> Any:
    """Import a Python file by its path."""
    spec = importlib.util.spec_from_file_location("exported_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments_of(
    graph: LocalGraph, mesh: Mesh, rank: int, values: dict[GraphInput, Tensor], saved: dict[str, Any]
) -> list[Any]:
    """What one rank passes to a graph: its parts of global values, its position, what the forward saved."""
    out: list[Any] = []
    for spec, sharding in zip(graph.inputs, graph.input_shardings, strict=True):
        if spec.kind is InputKind.RANK:
            out.append(mesh.coordinate(rank)[mesh.axis(spec.path)])
        elif spec.kind is InputKind.SAVED:
            out.append(saved.get(spec.path))
        else:
            out.append(shard_tensor(values[spec], sharding or (), mesh, rank) if sharding else values[spec])
    return out


def saved_of(graph: LocalGraph, results: Any) -> dict[str, Any]:
    pairs = zip(graph.outputs, results, strict=True)
    return {spec.path: value for spec, value in pairs if spec.kind is OutputKind.SAVED}


def in_lockstep(program: LocalProgram, values: dict[GraphInput, Tensor]) -> list[list[Any]]:
    """Results of the graphs themselves, forward then backward, for each rank."""
    assert program.backward is not None
    ranks = range(program.mesh.num_ranks)
    forward_inputs = [arguments_of(program.forward, program.mesh, rank, values, {}) for rank in ranks]
    forward = run_lockstep(program.forward, program.mesh, forward_inputs).outputs
    saved = [saved_of(program.forward, results) for results in forward]
    backward_inputs = [arguments_of(program.backward, program.mesh, rank, values, saved[rank]) for rank in ranks]
    backward = run_lockstep(program.backward, program.mesh, backward_inputs).outputs
    return [one + other for one, other in zip(forward, backward, strict=True)]


def run_on_rank(
    path: str, mesh: Mesh, forward_inputs: list[list[Any]], backward_inputs: list[list[Any]]
) -> tuple[list[Any], str]:
    """Results of an exported program on this rank, forward then backward, and its report of a step of its own."""
    module, rank = load(Path(path)), dist.get_rank()
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    groups = {axis: device_mesh.get_group(axis).group_name for axis in mesh.names}
    forward = module.forward(*forward_inputs[rank], groups=groups)
    saved = {v.path: r for v, r in zip(module.OUTPUTS["forward"], forward, strict=True) if v.kind == "saved"}
    specs = zip(module.INPUTS["backward"], backward_inputs[rank], strict=True)
    arguments = [saved[value.path] if value.kind == "saved" else given for value, given in specs]
    backward = module.backward(*arguments, groups=groups)
    if any(value.local_shape is None for value in module.INPUTS["forward"] if value.kind == "param"):
        return [*forward, *backward], ""  # a graph without shapes cannot make up inputs
    coordinate = dict(zip(mesh.names, mesh.coordinate(rank), strict=True))
    step = module.run_step(groups, coordinate)
    shapes = [
        f"{tuple(result.shape)} {module.local_shape(value, coordinate)}"
        for function, results in step.items()
        for value, result in zip(module.OUTPUTS[function], results, strict=True)
        if isinstance(result, Tensor) and value.sharding
    ]
    return [*forward, *backward], "\n".join(shapes)


def random_values(program: LocalProgram) -> dict[GraphInput, Tensor]:
    """Global values of everything the two graphs take."""
    generator = torch.Generator().manual_seed(1)
    values: dict[GraphInput, Tensor] = {}
    for graph in (program.forward, program.backward):
        assert graph is not None
        nodes = graph.module.graph.find_nodes(op="placeholder")
        for spec, node in zip(graph.inputs, nodes, strict=True):
            if spec.kind not in (InputKind.RANK, InputKind.SAVED) and spec not in values:
                val, shape = node.meta["val"], node.meta["global_shape"]
                integers = torch.randint(0, CLASSES, shape, generator=generator)
                floats = torch.rand(shape, generator=generator, dtype=torch.float64)
                values[spec] = floats if val.dtype.is_floating_point else integers
    return values


def assert_same(actual: list[list[Any]], expected: list[list[Any]]) -> None:
    compared = 0
    for mine, wanted in zip(actual, expected, strict=True):
        for one, other in zip(mine, wanted, strict=True):
            assert type(one) is type(other)
            if isinstance(one, Tensor):
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                # The order in which a collective sums may differ.
                assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
                compared += 1
            else:
                assert one == other
    assert compared > 0


@pytest.mark.parametrize(("strategy", "sizes"), [("tp", (4,)), ("zero3", (4,)), ("fsdp+tp", (2, 2)), ("hsdp", (2, 2))])
def test_every_rank_computes_what_the_graph_does(
    gloo4: RankPool, tmp_path: Path, strategy: str, sizes: tuple[int, ...]
) -> None:
    program, plan = compiled(strategy, sizes)
    assert program.backward is not None
    export_program(program, plan, tmp_path)
    mesh, values = program.mesh, random_values(program)
    ranks = range(mesh.num_ranks)
    forward = [arguments_of(program.forward, mesh, rank, values, {}) for rank in ranks]
    backward = [arguments_of(program.backward, mesh, rank, values, {}) for rank in ranks]
    answers = gloo4.run(run_on_rank, str(tmp_path / "program.py"), mesh, forward, backward)
    assert_same([results for results, _ in answers], in_lockstep(program, values))
    for _, shapes in answers:
        pairs = [line.split(") (") for line in shapes.splitlines()]
        assert len(pairs) > 20
        assert all(real.strip("()") == said.strip("()") for real, said in pairs)


def handwritten_program() -> tuple[LocalProgram, Plan]:
    """Graphs without shapes: only what a graph must have."""
    program = handwritten.program_of("tp", 2, train=True, counts=True)
    for graph in (program.forward, program.backward):
        assert graph is not None
        for node in graph.module.graph.nodes:
            if node.target in COLLECTIVE_KINDS:
                node.meta["bytes"] = 80
    return program, replace(handwritten.plan_of("tp"), factors=((), ()))


def test_a_handwritten_program_runs_too(gloo4: RankPool, tmp_path: Path) -> None:
    program, plan = handwritten_program()
    assert program.backward is not None
    export_program(program, plan, tmp_path)
    mesh, local_rows = program.mesh, 2
    model = handwritten.Mlp()
    parameters = dict(model.named_parameters())
    forward, backward = [], []
    saved: list[dict[str, Any]] = []
    for rank in range(4):
        torch.manual_seed(rank)
        rows = {"0": torch.randn(local_rows, handwritten.WIDTH, dtype=torch.float64)}
        rows["target"] = torch.randn(local_rows, handwritten.OUT, dtype=torch.float64)
        kinds = {
            InputKind.PARAM: {
                path: shard_tensor(parameters[path].detach(), handwritten.STORAGE["tp"][path], mesh, rank)
                for path in handwritten.NAMES
            },
            InputKind.BUFFER: {"steps": model.steps},
            InputKind.INPUT: rows,
            InputKind.RANK: dict(zip(mesh.names, mesh.coordinate(rank), strict=True)),
        }
        forward.append([kinds[spec.kind][spec.path] for spec in program.forward.inputs])
    results = run_lockstep(program.forward, mesh, forward).outputs
    for rank in range(4):
        saved.append(saved_of(program.forward, results[rank]))
        tangents = {"y": torch.full((2, handwritten.OUT), 0.25, dtype=torch.float64), "loss": torch.ones(()).double()}
        backward.append([saved[rank].get(spec.path, tangents.get(spec.path)) for spec in program.backward.inputs])
    expected = run_lockstep(program.backward, mesh, backward).outputs
    answers = gloo4.run(run_on_rank, str(tmp_path / "program.py"), mesh, forward, backward)
    assert_same([answer for answer, _ in answers], [a + b for a, b in zip(results, expected, strict=True)])


@pytest.fixture
def alone() -> Iterator[str]:
    """A process group of this process alone; its name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_one_rank_alone(tmp_path: Path, alone: str) -> None:
    """On a mesh of one rank the functions give the lockstep run's own numbers, and the file runs without a launcher."""
    program, plan = compiled("replicate", (1,))
    assert program.backward is not None
    export_program(program, plan, tmp_path)
    module, values = load(tmp_path / "program.py"), random_values(program)
    groups = dict.fromkeys(program.mesh.names, alone)
    forward = module.forward(*arguments_of(program.forward, program.mesh, 0, values, {}), groups=groups)
    saved = saved_of(program.forward, forward)
    backward = module.backward(*arguments_of(program.backward, program.mesh, 0, values, saved), groups=groups)
    expected = in_lockstep(program, values)[0]
    assert len(expected) == len(forward) + len(backward)
    for one, other in zip([*forward, *backward], expected, strict=True):
        assert torch.equal(one, other)

    run = start(tmp_path / "program.py")
    assert run.returncode == 0, run.stderr
    assert "forward: output loss: () torch.float64" in run.stdout
    assert f"forward: output logits: ({ROWS}, {CLASSES}) torch.float64" in run.stdout
    assert "forward: mutation seen: () torch.float64" in run.stdout
    assert f"backward: gradient blocks.0.up.weight: ({HIDDEN}, {WIDTH}) torch.float64" in run.stdout


def start(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a file as a user would, without a launcher."""
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=120)


def test_the_wrong_number_of_ranks_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = compiled("tp", (4,))
    export_program(program, plan, tmp_path)
    module = load(tmp_path / "program.py")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"needs 4 ranks and has 2; start it with: torchrun --nproc-per-node 4 .*py"):
        module.main()


# ------------------------------------------------------------------------------------------------------ reading it


def test_every_line_says_where_it_belongs() -> None:
    program, plan = compiled("fsdp+tp", (2, 2))
    text = program_text(program, plan).text
    body = text[text.index("@torch.no_grad()") : text.index("INPUTS = {")].splitlines()
    lines = [line for line in body if re.match(r"    \w+ = ", line)]
    graphs = [program.forward, program.backward]
    nodes = [n for g in graphs if g for n in g.module.graph.nodes if n.op in ("call_function", "get_attr")]
    assert len(lines) == len(nodes)
    for line, node in zip(lines, nodes, strict=True):
        module = node.meta["module"] or "(root)"
        assert re.search(rf"  # {re.escape(module)}( · |$)", line), line
        val = node.meta["val"]
        if isinstance(val, Tensor):
            assert f"{list(val.shape)}" in line.partition("  # ")[2]
        if node.target in COLLECTIVE_KINDS:
            axis = node.args[-1]
            about = f"{COLLECTIVE_KINDS[node.target]} along {axis} over 2 ranks, {node.meta['bytes']:,} bytes"
            assert about in line
            assert f'groups["{axis}"]' in line
    said = sum(int(number.replace(",", "")) for number in re.findall(r"ranks, ([\d,]+) bytes$", "\n".join(lines), re.M))
    assert said == sum(c.num_bytes for c in program.collectives()) > 0


def test_the_text_of_a_matmul() -> None:
    program, plan = compiled("tp", (4,))
    text = program_text(program, plan).text
    assert text.startswith("# Written by autopar: the program of one rank under tp on mesh tp=4.\n")
    assert "Run one step on random inputs:  torchrun --nproc-per-node 4 program.py" in text
    assert 'MESH = {"tp": 4}  # ranks along each axis' in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    argument = "param_blocks_0_up_weight, # param · blocks.0.up.weight · f64[2, 6] ← [8, 6] · shard(0)@tp"
    assert argument in lines
    start = lines.index("# --- blocks.0.up")
    transposed = "t = aten.t.default(param_blocks_0_up_weight) # blocks.0.up · f64[6, 2] ← [6, 8] · shard(1)@tp"
    assert lines[start + 1] == transposed
    moved = r'\w+ = c10d\.reduce_scatter_tensor\.default\(\w+, "sum", 4, groups\["tp"\]\) # blocks\.0\.down '
    moved += r"· f64\[2, 6\] · reduce_scatter along tp over 4 ranks, 384 bytes"
    assert any(re.fullmatch(moved, line) for line in lines)
    assert any(re.fullmatch(r"\w+, # output · loss · f64\[\] ← \[\] · replicate", line) for line in lines)
    value = 'Value("param", "blocks.0.up.weight", torch.float64, (2, 6), (8, 6), {"tp": 0}, "shard(0)@tp"),'
    assert value in text
    ast.parse(text)


def test_module_comments_stand_where_the_module_changes() -> None:
    text = program_text(*compiled("ddp", (4,))).text
    module = None
    for line in text[text.index("def forward") : text.index("INPUTS = {")].splitlines():
        if line.startswith("    # --- "):
            heading = line.removeprefix("    # --- ")
            assert heading != module
            module = heading
        elif re.match(r"    \w+ = ", line):
            assert line.partition("  # ")[2].split(" · ")[0] == module
        elif line.startswith("def "):
            module = None


def test_the_text_is_the_same_on_every_rank() -> None:
    """Nothing in it comes from the process: another trace of the model gives the same text, pictures included."""
    program, plan = compiled("zero3", (4,))
    joint = trace(Net(), (torch.arange(ROWS),), {})
    normalise(joint)
    again = rewrite(joint, plan_named("zero3", joint, (4,), 4))
    assert program_text(again, plan) == program_text(program, plan)
    assert not re.search(r"/(home|root|tmp|usr)/|0x[0-9a-f]{6}", program_text(program, plan).text)


def test_described_shapes_hold_on_every_rank(tmp_path: Path) -> None:
    program, plan = compiled("zero3", (4,))
    export_program(program, plan, tmp_path)
    module = load(tmp_path / "program.py")
    described = {v.path: v for v in module.INPUTS["forward"] if v.kind == "param"}
    uneven = 0
    for path, node in traced().param_nodes().items():
        sharding, shape = plan.storage[path].sharding, tuple(node.meta["val"].shape)
        shapes = [local_shape(shape, sharding, plan.mesh, plan.mesh.coordinate(rank)) for rank in range(4)]
        said = [module.local_shape(described[path], {plan.mesh.names[0]: rank}) for rank in range(4)]
        assert said == shapes
        assert bool(described[path].cuts) == any(map(is_sharded, sharding))
        uneven += len(set(shapes)) > 1
    assert uneven > 0


# ------------------------------------------------------------------------------------------------------- literals


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 1.5, -0.0, 1e-300, math.inf, -math.inf, 1 + 2j, complex(math.inf, -1),
        "sum", 'a"b', "a'b", "a\n\"'",
        torch.float32, torch.bfloat16, torch.bool, torch.strided, torch.contiguous_format, torch.channels_last,
        torch.preserve_format, torch.device("cuda:1"), torch.device("cpu"), [1, [2]], (), (1,), (1, 2), [],
        slice(1, None, 2), ..., {"a": [1.0]}, torch.Size([2, 3]), fx.immutable_collections.immutable_list([1, 2]),
    ],
)  # fmt: skip
def test_literals_mean_what_they_stand_for(value: Any) -> None:
    again = eval(literal(value), {"torch": torch})
    assert again == value
    assert str(again).replace("torch.Size", "") == str(value).replace("torch.Size", "").replace("([", "(").replace(
        "])", ")"
    )


def test_nan_and_what_has_no_literal() -> None:
    assert math.isnan(eval(literal(math.nan)))
    with pytest.raises(InputError, match=r"argument of type Generator, which cannot be written"):
        literal([torch.Generator()])
    with pytest.raises(InputError, match=r"argument of type InputKind"):
        literal(InputKind.PARAM)


def test_comments_cannot_end_their_line() -> None:
    assert comment_text("a\nimport os\x85\u2028\x0c×") == r"a\nimport os\x85\u2028\x0c×"


# ----------------------------------------------------------------------------------------------- graphs by hand


def forward_only(build: Callable[[fx.Graph, fx.Node], Any], root: nn.Module | None = None) -> tuple[LocalProgram, Plan]:
    """A program of one rank with one input `x`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((build(graph, x),))
    for node in graph.nodes:
        node.meta.setdefault("module", "")
        node.meta.setdefault("backward", False)
    inputs, outputs = (GraphInput(InputKind.INPUT, "x"),), (GraphOutput(OutputKind.OUTPUT, ""),)
    local = LocalGraph(fx.GraphModule(root or nn.Module(), graph), inputs, outputs, (None,), (None,))
    mesh = Mesh(("dp",), (1,))
    return LocalProgram(mesh, local, local, None), Plan("by hand", mesh, ((),), {})


def test_constant_tensors(tmp_path: Path) -> None:
    root = nn.Module()
    tensors = {
        "small": torch.tensor([[1.5, math.inf], [-math.inf, -0.0]], dtype=torch.float64),
        "brief": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "table": torch.randn(40, 30).t(),
        "large_half": torch.randn(MAX_INLINE_ELEMENTS + 1).to(torch.bfloat16),
    }
    holder = nn.Module()
    root.holder = holder
    for name, tensor in tensors.items():
        holder.register_buffer(name, tensor)

    def build(graph: fx.Graph, x: fx.Node) -> Any:
        return [graph.get_attr(f"holder.{name}") for name in tensors]

    written = export_program(*forward_only(build, root), tmp_path)
    assert [p.name for p in written if p.suffix == ".npy"] == ["constant_5.npy", "constant_6.npy"]
    module = load(tmp_path / "program.py")
    (found,) = module.forward(None, groups={})
    for name, again in zip(tensors, found, strict=True):
        assert again.dtype == tensors[name].dtype
        assert again.shape == tensors[name].shape
        assert torch.equal(again, tensors[name]), name
    text = (tmp_path / "program.py").read_text()
    assert "allow_pickle=False" in text
    assert "pickle" not in text.replace("allow_pickle", "")


def test_constants_without_values_are_refused() -> None:
    root = nn.Module()
    root.register_buffer("table", torch.empty(3, device="meta"))
    root.sub = nn.Module()
    with pytest.raises(InputError, match=r"constant tensor 'table' of shape \[3\] that has no values"):
        program_text(*forward_only(lambda graph, x: graph.get_attr("table"), root))
    root.table = torch.eye(2).to_sparse()
    with pytest.raises(InputError, match=r"constant tensor 'table' .* is not dense \(torch\.sparse_coo\)"):
        program_text(*forward_only(lambda graph, x: graph.get_attr("table"), root))
    with pytest.raises(InputError, match=r"reads 'sub', a Module: only tensors can be exported"):
        program_text(*forward_only(lambda graph, x: graph.get_attr("sub"), root))


def test_functions_that_are_no_operators(tmp_path: Path) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Any:
        two = graph.call_function(operator.add, (1, 1))
        four = graph.call_function(operator.mul, (two, two))
        root = graph.call_function(math.isqrt, (four,))
        nine = graph.call_function(operator.pow, (3, root))
        part = graph.call_function(operator.getitem, (x, (slice(None, root), ...)))
        return [four, root, nine, part]

    export_program(*forward_only(build), tmp_path)
    module = load(tmp_path / "program.py")
    (found,) = module.forward(torch.arange(5), groups={})
    assert found[:3] == [4, 2, 9]
    assert found[3].tolist() == [0, 1]


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"calls <function .*<lambda>.*, which cannot be imported by name"):
        program_text(*forward_only(lambda graph, x: graph.call_function(lambda: None)))


def test_names_do_not_collide(tmp_path: Path) -> None:
    """Nodes called like what the file itself uses get other names."""

    def build(graph: fx.Graph, x: fx.Node) -> Any:
        value = x
        for name in ("groups", "torch_1", "aten", "forward", "DEVICE", "aten_", "math", "dist"):
            value = graph.call_function(aten.add.Tensor, (value, 1))
            value.name = name  # past the graph's own naming, which avoids some of them
        return value

    program, plan = forward_only(build)
    export_program(program, plan, tmp_path)
    module = load(tmp_path / "program.py")
    assert module.forward(torch.tensor(0), groups={})[0] == 8


def test_names_of_modules_cannot_inject_code(tmp_path: Path) -> None:
    evil = 'a"""\nraise SystemExit("ran")\n#<&>'

    def build(graph: fx.Graph, x: fx.Node) -> Any:
        value = graph.call_function(aten.add.Tensor, (x, 1))
        value.meta["module"] = evil
        return value

    program, plan = forward_only(build)
    program.forward.inputs = (GraphInput(InputKind.INPUT, evil),)
    text = program_text(program, replace(plan, strategy=evil)).text
    (tmp_path / "program.py").write_text(text)
    assert load(tmp_path / "program.py").forward(1, groups={})[0] == 2
    export_program(program, plan, tmp_path)
    ET.parse(tmp_path / "graph.svg")
    assert len((tmp_path / "graph.dot").read_text().splitlines()) < 12


def test_devices_are_named_once() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Any:
        there = graph.call_function(aten.zeros.default, ([2],), {"device": torch.device("cuda")})
        here = graph.call_function(aten.zeros.default, ([2],), {"device": torch.device("cpu")})
        return [there, here]

    text = program_text(*forward_only(build)).text
    assert 'DEVICE = "cuda"' in text
    assert "aten.zeros.default([2], device=DEVICE)" in text
    assert 'aten.zeros.default([2], device=torch.device("cpu"))' in text


def test_operators_of_other_libraries() -> None:
    """Whose namespace may be called like a function of the file."""
    library = torch.library.Library("example", "DEF")
    library.define("double(Tensor x) -> Tensor")
    double = torch.ops.example.double.default
    text = program_text(*forward_only(lambda graph, x: graph.call_function(double, (x,)))).text
    assert "\nexample_ = torch.ops.example  # import the module that registers these operators first\n" in text
    assert " = example_.double.default(x) " in text


# ----------------------------------------------------------------------------------------------------------- files


def test_files_of_an_export(tmp_path: Path) -> None:
    program, plan = compiled("tp", (4,))
    directory = tmp_path / "new" / "folder"
    written = export_program(program, plan, str(directory))
    assert [p.name for p in written] == ["program.py", "plan.json", "plan.txt", "graph.dot", "graph.svg"]
    assert sorted(directory.iterdir()) == sorted(written)
    assert load_plan(directory / "plan.json") == plan
    assert (directory / "plan.txt").read_text().startswith("autopar plan: tp on mesh tp=4")
    other, other_plan = compiled("zero3", (4,))
    assert export_program(other, other_plan, directory) == written
    assert load_plan(directory / "plan.json") == other_plan
    assert sorted(directory.iterdir()) == sorted(written)


def test_where_an_export_cannot_go(tmp_path: Path) -> None:
    program, plan = compiled("tp", (4,))
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match=r"cannot export to .*file': it is a file; name a directory"):
        export_program(program, plan, file)
    with pytest.raises(InputError, match=r"cannot make directory .*file.below' to export to: Not a directory"):
        export_program(program, plan, file / "below")
    assert file.read_text() == "mine"
    (tmp_path / "out" / "plan.json").mkdir(parents=True)
    with pytest.raises(InputError, match=r"cannot write .*plan\.json': Is a directory"):
        export_program(program, plan, tmp_path / "out")
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
