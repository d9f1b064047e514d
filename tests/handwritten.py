"""A small model and its local programs written by hand: the runtime is tested without the stages before it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.graph import GraphInput, GraphOutput, InputKind, OutputKind
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard, Sharding
from autopar.plan import Plan, Storage
from autopar.program import LocalGraph, LocalProgram
from autopar.runtime.execution import CompiledStep

aten, C10D = torch.ops.aten, torch.ops._c10d_functional
WIDTH, HIDDEN, OUT = 5, 8, 6
GRID = Mesh(("dp", "tp"), (2, 2))
ROW = Mesh(("dp",), (4,))


class Mlp(nn.Module):
    """Two linear layers; `twin` shares the first weight, `steps` counts the training calls."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, OUT, dtype=torch.float64)
        self.twin = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.float64)
        self.twin.weight = self.up.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.note = "an attribute"

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.down(self.up(x).relu())
        if self.training:
            self.steps += 1
        return {"y": y, "loss": (y - target).square().mean()}


NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")
R, S0, S1 = Replicate(), Shard(0), Shard(1)
STORAGE: dict[str, dict[str, Sharding]] = {
    "ddp": dict.fromkeys(NAMES, (R,)),
    # Columns and rows over tp; the row matrix rests cut over dp as well and is gathered before its use.
    "tp": {"up.weight": (R, S0), "up.bias": (R, S0), "down.weight": (S0, S1), "down.bias": (R, R)},
}


def plan_of(name: str) -> Plan:
    storage = {path: Storage(sharding) for path, sharding in STORAGE[name].items()}
    return Plan(name, ROW if name == "ddp" else GRID, (), storage)


class GraphWriter:
    """Writes one local graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[GraphInput] = []

    def input(self, kind: InputKind, path: str, like: Tensor | None = None) -> fx.Node:
        self.inputs.append(GraphInput(kind, path))
        node = self.graph.placeholder(f"{kind.value}_{path.replace('.', '_')}")
        if like is not None:
            node.meta["val"] = like
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def collective(self, target: Any, *args: Any) -> fx.Node:
        return self(C10D.wait_tensor.default, self(target, *args))

    def all_reduce(self, x: fx.Node, axis: str) -> fx.Node:
        return self.collective(C10D.all_reduce.default, x, "sum", axis)

    def all_gather(self, x: fx.Node, num_ranks: int, axis: str) -> fx.Node:
        return self.collective(C10D.all_gather_into_tensor.default, x, num_ranks, axis)

    def finish(self, outputs: Sequence[tuple[OutputKind, str, Any, Sharding | None]]) -> LocalGraph:
        self.graph.output(tuple(node for _, _, node, _ in outputs))
        for node in self.graph.nodes:
            node.meta.setdefault("module", "")
            node.meta.setdefault("backward", False)
        return LocalGraph(
            fx.GraphModule(nn.Module(), self.graph),
            tuple(self.inputs),
            tuple(GraphOutput(kind, path) for kind, path, _, _ in outputs),
            (None,) * len(self.inputs),
            tuple(sharding for _, _, _, sharding in outputs),
        )


def program_of(name: str, local_rows: int, train: bool, counts: bool) -> LocalProgram:
    """The program of the plan `name` for `local_rows` rows on each rank; `counts` says whether the buffer grows."""
    mesh = plan_of(name).mesh
    forward, saved = _forward(name, mesh, local_rows, train, counts)
    backward = _backward(name, mesh, local_rows, saved) if train else None
    return LocalProgram(mesh, forward, forward, backward)


def _forward(name: str, mesh: Mesh, rows: int, train: bool, counts: bool) -> tuple[LocalGraph, list[str]]:
    w = GraphWriter()
    up, up_bias, down, down_bias = (w.input(InputKind.PARAM, path) for path in NAMES)
    steps = w.input(InputKind.BUFFER, "steps")
    x, target = w.input(InputKind.INPUT, "0"), w.input(InputKind.INPUT, "target")
    rank = w.input(InputKind.RANK, mesh.names[-1])
    if name == "tp":
        x, target, down = w.all_gather(x, 2, "tp"), w.all_gather(target, 2, "tp"), w.all_gather(down, 2, "dp")
    h = w(aten.relu.default, w(aten.addmm.default, up_bias, x, w(aten.t.default, up)))
    y = w(aten.mm.default, h, w(aten.t.default, down))
    y = w(aten.add.Tensor, w.all_reduce(y, "tp") if name == "tp" else y, down_bias)
    diff = w(aten.sub.Tensor, y, target)
    total = w.all_reduce(w(aten.sum.default, w(aten.mul.Tensor, diff, diff)), "dp")
    loss = w(aten.div.Tensor, total, rows * mesh.num_ranks * OUT)
    mine = w(aten.narrow.default, y, 0, w(operator.mul, rank, rows), rows) if name == "tp" else y
    batch = (S0,) * mesh.num_axes
    outputs: list[Any] = [
        (OutputKind.OUTPUT, "y", mine, batch),
        (OutputKind.OUTPUT, "loss", loss, (R,) * mesh.num_axes),
    ]
    if counts:
        outputs.append((OutputKind.MUTATION, "steps", w(aten.add.Tensor, steps, 1), None))
    saved = {"x": x, "h": h, "down": down, "diff": diff} if train else {}
    outputs += [(OutputKind.SAVED, path, node, None) for path, node in saved.items()]
    return w.finish(outputs), list(saved)


def _backward(name: str, mesh: Mesh, rows: int, saved: list[str]) -> LocalGraph:
    w = GraphWriter()
    x, h, down, diff = (w.input(InputKind.SAVED, path) for path in saved)
    d_y = w.input(InputKind.TANGENT, "y", torch.empty(rows, OUT, dtype=torch.float64, device="meta"))
    d_loss = w.input(InputKind.TANGENT, "loss", torch.empty((), dtype=torch.float64, device="meta"))
    if name == "tp":
        d_y = w.all_gather(d_y, 2, "tp")
    scale = w(aten.mul.Tensor, d_loss, 2 / (rows * mesh.num_ranks * OUT))
    d_y = w(aten.add.Tensor, d_y, w(aten.mul.Tensor, diff, scale))
    d_h = w(aten.threshold_backward.default, w(aten.mm.default, d_y, down), h, 0)
    d_down = w(aten.mm.default, w(aten.t.default, d_y), h)
    if name == "tp":
        d_down = w.collective(C10D.reduce_scatter_tensor.default, d_down, "sum", 2, "dp")
    else:
        d_down = w.all_reduce(d_down, "dp")
    gradients = {
        "up.weight": w.all_reduce(w(aten.mm.default, w(aten.t.default, d_h), x), "dp"),
        "up.bias": w.all_reduce(w(aten.sum.dim_IntList, d_h, [0]), "dp"),
        "down.weight": d_down,
        "down.bias": w.all_reduce(w(aten.sum.dim_IntList, d_y, [0]), "dp"),
    }
    return w.finish([(OutputKind.GRADIENT, path, node, None) for path, node in gradients.items()])


class Stages:
    """Stands for the stages above the runtime, as the facade gives them to a `ParallelModule`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_compiled = 0

    def decide(self, args: Any, kwargs: Any) -> Plan:
        return plan_of(self.name)

    def compile(self, args: Any, kwargs: Any, train: bool, plan: Plan) -> CompiledStep:
        assert plan == plan_of(self.name)
        self.num_compiled += 1
        program = program_of(self.name, args[0].shape[0], train, counts=train)
        return CompiledStep(program, lambda values: dict(zip(("y", "loss"), values, strict=True)))

    def flatten(self, args: Any, kwargs: Any) -> tuple[list[tuple[str, Tensor]], tuple[object, ...]]:
        return [("0", args[0]), ("target", kwargs["target"])], tuple(sorted(set(kwargs) - {"target"}))
