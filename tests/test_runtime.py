"""`ParallelModule` on four gloo ranks: it trains as the single device does, and disagreements raise on every rank."""

from __future__ import annotations

import operator
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from handwritten import GRID, OUT, ROW, WIDTH, GraphWriter, Mlp, Stages, plan_of
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import errors
from autopar.graph import InputKind, OutputKind
from autopar.placement import Replicate, Shard, Sharding, shard
from autopar.plan import Plan, Storage
from autopar.program import LocalGraph, LocalProgram
from autopar.runtime.control import ControlGroup
from autopar.runtime.execution import CompiledStep
from autopar.runtime.live_mesh import Layout
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import ShardedParameters, planned
from autopar.runtime.sharding import device_placements

ROWS = 3  # on each rank
PLANS = pytest.mark.parametrize("name", ["ddp", "tp"])


def make(
    name: str, lazy: bool = False, mesh: DeviceMesh | None = None, **options: Any
) -> tuple[ParallelModule, Mlp, Stages]:
    """A parallel module and its single-device twin; other ranks than 0 start from other values."""
    torch.manual_seed(dist.get_rank())
    model = Mlp()
    torch.manual_seed(0)
    reference = Mlp()
    stages = Stages(name)
    plan = None if lazy else plan_of(name)
    mesh = mesh or init_device_mesh("cpu", (4,))
    pm = ParallelModule(
        model, mesh, plan, compile=stages.compile, decide=stages.decide, flatten=stages.flatten, **options
    )
    return pm, reference, stages


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The whole batch, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    shapes = [(4 * rows, WIDTH), (4 * rows, OUT)]
    x, target = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, target


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(4)[dist.get_rank()]


def close(found: Tensor, expected: Tensor) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


def same_state(pm: ParallelModule, reference: nn.Module) -> None:
    found, expected = pm.state_dict(), reference.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(found[name], value)


def train(name: str, lazy: bool, outside: bool) -> None:
    """A few AdamW steps with clipping; the loss is the module's, or is taken `outside` over this rank's rows."""
    pm, reference, stages = make(name, lazy)
    ours = torch.optim.AdamW(pm.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
    for step in range(4):
        x, target = batch(step)
        ours.zero_grad()
        theirs.zero_grad()
        output = pm(mine(x), target=mine(target))
        expected = reference(x, target=target)
        close(output["y"], mine(expected["y"]))
        close(output["loss"], expected["loss"])
        if outside:
            loss, whole = (o["y"].pow(4).mean() for o in (output, expected))
            loss.backward()
            whole.backward()
        else:
            output["loss"].backward()
            expected["loss"].backward()
        for (found_name, found), (expected_name, wanted) in zip(
            pm.named_parameters(), reference.named_parameters(), strict=True
        ):
            assert found_name == expected_name
            assert isinstance(found.grad, DTensor)
            assert found.grad.placements == found.placements  # type: ignore[attr-defined]
            close(found.grad, wanted.grad)
        norm = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.05)
        close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        ours.step()
        theirs.step()
        same_state(pm, reference)
    assert stages.num_compiled == 1
    assert int(pm.get_buffer("steps")) == 4
    for parameter, state in ours.state.items():
        assert state["exp_avg"].placements == parameter.placements


@PLANS
@pytest.mark.parametrize("lazy", [False, True], ids=["planned", "lazy"])
@pytest.mark.parametrize("outside", [False, True], ids=["own-loss", "loss-outside"])
def test_training_equals_the_single_device(gloo4: RankPool, name: str, lazy: bool, outside: bool) -> None:
    gloo4.run(train, name, lazy, outside)


def accumulate(name: str) -> None:
    pm, reference, _ = make(name)
    for step in range(3):
        x, target = batch(step)
        (pm(mine(x), target=mine(target))["loss"] / 3).backward()
    x, target = (torch.cat(parts) for parts in zip(*(batch(step) for step in range(3)), strict=True))
    reference(x, target=target)["loss"].backward()
    for parameter, wanted in zip(pm.parameters(), reference.parameters(), strict=True):
        close(parameter.grad, wanted.grad)  # type: ignore[arg-type]


@PLANS
def test_accumulated_gradients_are_those_of_the_big_batch(gloo4: RankPool, name: str) -> None:
    gloo4.run(accumulate, name)


def backward_twice() -> None:
    pm, reference, _ = make("tp")
    x, target = batch(0)
    output, expected = pm(mine(x), target=mine(target)), reference(x, target=target)
    output["loss"].backward(retain_graph=True)
    output["y"].mean().backward()
    (expected["loss"] + expected["y"].mean()).backward()
    for parameter, wanted in zip(pm.parameters(), reference.parameters(), strict=True):
        close(parameter.grad, wanted.grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        output["loss"].backward()
    output = pm(mine(x), target=mine(target))
    with torch.no_grad():
        pm.get_parameter("down.weight").mul_(2)
        gathered = pm.get_parameter("down.bias")
        gathered.mul_(2)
    output["loss"].backward()  # only copies of these were saved


def test_retained_graph(gloo4: RankPool) -> None:
    gloo4.run(backward_twice)


def modes(name: str) -> None:
    pm, reference, stages = make(name)
    x, target = batch(0)
    pm.eval()
    reference.eval()
    assert not any(module.training for module in pm.modules())
    with torch.no_grad():
        output = pm(mine(x), target=mine(target))
    close(output["loss"], reference(x, target=target)["loss"])
    assert not output["loss"].requires_grad
    assert pm.compiled_steps[-1].program.backward is None
    with torch.inference_mode():
        close(
            pm(mine(x), target=mine(target))["y"],
            mine(output["y"].new_tensor(reference(x, target=target)["y"].tolist())),
        )
    assert stages.num_compiled == 1
    pm.train()
    reference.train()
    assert pm(mine(x), target=mine(target))["loss"].requires_grad
    x, target = batch(0, rows=5)
    close(pm(mine(x), target=mine(target))["loss"], reference(x, target=target)["loss"])
    assert stages.num_compiled == 3


@PLANS
def test_modes_and_shapes_have_programs_of_their_own(gloo4: RankPool, name: str) -> None:
    gloo4.run(modes, name)


def is_a_module() -> None:
    pm, reference, _ = make("tp")
    assert [name for name, _ in pm.named_parameters()] == [name for name, _ in reference.named_parameters()]
    assert pm.get_submodule("up") is pm.up
    assert pm.twin.weight is pm.up.weight
    assert pm.note == "an attribute"
    assert not hasattr(pm, "missing")
    assert pm.plan.strategy == "tp"
    assert pm.get_parameter("up.weight").to_local().shape == (4, WIDTH)  # type: ignore[attr-defined]
    assert pm.get_parameter("down.weight").to_local().shape == (OUT // 2, 4)  # type: ignore[attr-defined]
    torch.manual_seed(7)
    other = Mlp()
    pm.load_state_dict(other.state_dict())
    same_state(pm, other)
    saved = {name: value.clone() for name, value in pm.state_dict().items()}
    pm.load_state_dict(reference.state_dict())
    pm.load_state_dict(saved)
    same_state(pm, other)
    with pytest.raises(errors.InputError, match="assign=True"):
        pm.load_state_dict(saved, assign=True)
    holder = nn.Sequential(pm)
    assert list(holder.state_dict()) == [f"0.{name}" for name in reference.state_dict()]


def test_it_is_the_module_that_it_was_made_of(gloo4: RankPool) -> None:
    gloo4.run(is_a_module)


def meshes() -> None:
    x, target = batch(0)
    for mesh, name in [
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "ddp"),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "tp"),
        (init_device_mesh("cpu", (2, 2)), "tp"),
    ]:
        pm, reference, _ = make(name, mesh=mesh)
        close(pm(mine(x), target=mine(target))["loss"], reference(x, target=target)["loss"])
        assert pm.device_mesh.mesh_dim_names == plan_of(name).mesh.names
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    with pytest.raises(errors.MeshError, match="but the job has 4: give a mesh of all ranks"):
        make("ddp", mesh=half)
    with pytest.raises(errors.MeshError, match=r"in the order \[0, 2, 1, 3\]: they must ascend"):
        make("ddp", mesh=DeviceMesh("cpu", [[0, 2], [1, 3]]))


def test_any_mesh_of_all_ranks_will_do(gloo4: RankPool) -> None:
    gloo4.run(meshes)


def error_text(kind: type[Exception], pm: ParallelModule, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        pm(*args, **kwargs)
    return str(caught.value)


def disagreements() -> list[str]:
    """What each rank is told when the calls differ; the module still works after each."""
    rank = dist.get_rank()
    pm, reference, _ = make("tp")
    x, target = batch(0)
    good = {"target": mine(target)}
    texts = []
    for compiled in (False, True):
        rows = 2 if rank == 3 else ROWS
        texts.append(error_text(errors.BatchError, pm, mine(x)[:rows], target=mine(target)[:rows]))
        pm.train(rank != 1)
        texts.append(error_text(errors.StaleModelError, pm, mine(x), **good))
        pm.train()
        texts.append(error_text(errors.InputError, pm, mine(x).to("meta" if rank == 2 else "cpu"), **good))
        if not compiled:
            close(pm(mine(x), **good)["loss"], reference(x, target=target)["loss"])
    if rank == 0:
        pm.get_parameter("up.bias").requires_grad_(False)
    texts.append(error_text(errors.StaleModelError, pm, mine(x), **good))
    pm.get_parameter("up.bias").requires_grad_(True)
    close(pm(mine(x), **good)["loss"], reference(x, target=target)["loss"])
    return texts


def test_a_difference_between_ranks_raises_on_all(gloo4: RankPool) -> None:
    results = gloo4.run(disagreements)
    for texts in results:
        for text in (texts[0], texts[3]):
            assert "different shapes: input '0' is f64[3, 5] on ranks 0-2, f64[2, 5] on rank 3; input " in text
            assert "drop or pad the last incomplete batch" in text
        assert "modes: training is True on ranks 0, 2-3, False on rank 1. train(), eval()" in texts[1]
        assert "modes: training is True on ranks 0, 2-3, False on rank 1; program is " in texts[4]
    for rank, texts in enumerate(results):
        for text in (texts[2], texts[5]):
            assert "input '0' is on meta, but the mesh is of cpu devices" in text
            assert text.startswith("rank 2 failed while checking its call: ") == (rank != 2)
        assert "parameter 'up.bias' changed after planning: " in texts[6]
        assert "on cpu with requires_grad=True, found [8] torch.float64 on cpu with requires_grad=False" in texts[6]


def compile_failures() -> None:
    rank = dist.get_rank()
    pm, reference, stages = make("tp", lazy=True)
    x, target = batch(0)
    compile_, decide = stages.compile, stages.decide

    def fails(*args: Any) -> Any:
        raise errors.InfeasibleBudgetError("needs 12.5 GiB", 12.5)

    pm._decide = fails
    with pytest.raises(errors.InfeasibleBudgetError, match=r"needs 12\.5 GiB") as caught:
        pm(mine(x), target=mine(target))
    assert caught.value.smallest_feasible_gb == 12.5
    with pytest.raises(errors.PlanError, match="planning waits for the first call"):
        _ = pm.plan
    pm._decide = decide

    def fails_on_one(*args: Any) -> Any:
        if rank == 2:
            raise KeyError("surprise")
        return compile_(*args)

    pm._compile_step = fails_on_one
    with pytest.raises(KeyError if rank == 2 else errors.AutoparError, match="surprise"):
        pm(mine(x), target=mine(target))

    def differs_on_one(args: Any, kwargs: Any, train: bool, plan: Any) -> Any:
        return compile_((args[0][:2] if rank == 1 else args[0],), kwargs, train, plan)

    pm._compile_step = differs_on_one
    text = error_text(errors.StaleModelError, pm, mine(x), target=mine(target))
    assert "the ranks compiled different programs; the first difference, at line " in text
    assert "aten.div.Tensor ((%26, 72), {}) on ranks 0, 2-3, " in text
    assert "aten.div.Tensor ((%26, 48), {}) on rank 1. The model, its constants" in text
    pm._compile_step = compile_
    close(pm(mine(x), target=mine(target))["loss"], reference(x, target=target)["loss"])


def test_an_error_while_compiling_raises_on_all(gloo4: RankPool) -> None:
    gloo4.run(compile_failures)


def changes() -> None:
    x, target = batch(0)
    call = {"target": mine(target)}
    pm, _, _ = make("tp")
    pm.up.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    text = error_text(errors.StaleModelError, pm, mine(x), **call)
    assert "parameter 'up.bias' was replaced after planning: expected a DTensor of shape [8], found a Param" in text
    assert "call autopar.parallelize again" in text
    pm, _, _ = make("tp", lazy=True)
    pm.up.extra = nn.Linear(2, 2)
    assert "module 'up.extra' was added after planning" in error_text(errors.StaleModelError, pm, mine(x), **call)
    del pm.up.extra
    pm(mine(x), **call)
    pm.down = nn.Linear(2, 2)
    assert "module 'down' was replaced after planning" in error_text(errors.StaleModelError, pm, mine(x), **call)
    pm, _, _ = make("tp")
    pm(mine(x), **call)
    pm.float()
    text = error_text(errors.StaleModelError, pm, mine(x), **call)
    assert "expected [8, 5] torch.float64 on cpu with requires_grad=True, found [8, 5] torch.float32" in text
    pm, _, _ = make("tp")
    assert "requires grad, but the compiled program gives no gradient for it" in error_text(
        errors.InputError, pm, mine(x).clone().requires_grad_(), **call
    )


def test_a_changed_model_is_refused(gloo4: RankPool) -> None:
    gloo4.run(changes)


def specialisations() -> None:
    pm, reference, stages = make("ddp", max_specialisations=2)
    for rows in (1, 2, 1):
        x, target = batch(0, rows)
        close(pm(mine(x), target=mine(target))["loss"], reference(x, target=target)["loss"])
    assert stages.num_compiled == 2
    x, target = batch(0, 3)
    message = (
        r"compiled 3 programs for different calls: dim 0 of input '0' has had 3 sizes from 1 to 3; "
        r"dim 0 of input 'target' has had 3 .*only the 2 used last are kept: pad to few sizes"
    )
    with pytest.warns(UserWarning, match=message):
        pm(mine(x), target=mine(target))
    assert len(pm.compiled_steps) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once
        for rows in (1, 4):
            x, target = batch(0, rows)
            pm(mine(x), target=mine(target))
    assert stages.num_compiled == 4


def test_old_programs_are_dropped(gloo4: RankPool) -> None:
    gloo4.run(specialisations)


class Custom:
    """The forward and backward graphs of a test, as the stage above gives them."""

    def __init__(self, forward: LocalGraph, backward: LocalGraph | None) -> None:
        self.program = LocalProgram(ROW, forward, forward, backward)

    def module(self, model: nn.Module) -> ParallelModule:
        storage = {name: Storage((Replicate(),)) for name, _ in model.named_parameters()}
        return ParallelModule(
            model,
            init_device_mesh("cpu", (4,)),
            Plan("custom", ROW, (), storage),
            compile=lambda *_: CompiledStep(self.program, tuple),
            flatten=lambda args, _: ([(str(i), value) for i, value in enumerate(args)], ()),
        )


class TwoBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.arange(3.0)) for _ in range(2))
        self.register_buffer("last", torch.zeros(3))


def shared_memory(tangent_itself: bool) -> None:
    """Two gradients that are one value, a gradient that is the tangent, outputs that are inputs, a saved old buffer."""
    f, b = GraphWriter(), GraphWriter()
    a, bias = f.input(InputKind.PARAM, "a"), f.input(InputKind.PARAM, "b")
    last, x = f.input(InputKind.BUFFER, "last"), f.input(InputKind.INPUT, "0")
    y = f(torch.ops.aten.add.Tensor, f(torch.ops.aten.add.Tensor, a, bias), x)
    forward = f.finish(
        [
            (OutputKind.OUTPUT, "y", y, (Replicate(),)),
            (OutputKind.OUTPUT, "x", f(torch.ops.aten.view.default, x, [3]), None),
            (OutputKind.OUTPUT, "a", a, None),
            (OutputKind.MUTATION, "last", y, None),
            (OutputKind.SAVED, "old", last, None),
        ]
    )
    old, tangent = b.input(InputKind.SAVED, "old"), b.input(InputKind.TANGENT, "y", torch.empty(3, device="meta"))
    if tangent_itself:
        gradient = b(torch.ops.aten.view.default, tangent, [3])
    else:
        gradient = b(torch.ops.aten.mul.Tensor, tangent, b(torch.ops.aten.add.Tensor, old, 1))
    backward = b.finish([(OutputKind.GRADIENT, name, gradient, None) for name in ("a", "b")])
    model = TwoBiases()
    pm = Custom(forward, backward).module(model)
    x_value = torch.ones(3)
    y_value, x_out, a_out = pm(x_value)
    assert y_value.requires_grad
    assert not x_out.requires_grad
    assert not a_out.requires_grad
    x_out.zero_()
    a_out.zero_()
    assert torch.equal(x_value, torch.ones(3))
    assert torch.equal(pm.a.full_tensor(), torch.arange(3.0))
    assert torch.equal(model.last, torch.tensor([1.0, 3.0, 5.0]))
    tangent_value = torch.full((3,), 2.0)
    y_value.backward(tangent_value)
    pm.a.grad.mul_(10)
    assert torch.equal(pm.b.grad.full_tensor(), torch.full((3,), 2.0))
    assert torch.equal(tangent_value, torch.full((3,), 2.0))


@pytest.mark.parametrize("tangent_itself", [False, True])
def test_values_that_share_memory_are_kept_apart(gloo4: RankPool, tangent_itself: bool) -> None:
    gloo4.run(shared_memory, tangent_itself)


def seeds() -> list[int]:
    w = GraphWriter()
    w.input(InputKind.PARAM, "a")
    seed = w(operator.mul, w.input(InputKind.SEED, ""), 1)
    torch.manual_seed(dist.get_rank())
    pm = Custom(w.finish([(OutputKind.OUTPUT, "seed", seed, None)]), None).module(TwoBiases())
    return [pm()[0] for _ in range(3)]


def test_seeds_are_equal_on_all_ranks_and_new_at_each_call(gloo4: RankPool) -> None:
    results = gloo4.run(seeds)
    assert results == [results[0]] * 4
    assert len(set(results[0])) == 3


def freed() -> None:
    """Saved values die while backward runs, at their last use, not after it."""
    pm, _, stages = make("ddp")
    alive: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def count_alive(value: Tensor) -> Tensor:
        seen.append(sum(one() is not None for one in alive))
        return value

    def compile_(args: Any, kwargs: Any, train: bool, plan: Plan) -> CompiledStep:
        compiled = stages.compile(args, kwargs, train, plan)
        assert compiled.program.backward is not None
        module = compiled.program.backward.module
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            last = module.graph.call_function(count_alive, (output.args[0][-1],))  # type: ignore[index]
        output.args = ((*output.args[0][:-1], last),)  # type: ignore[index]
        return compiled

    def unpack(value: Tensor) -> Tensor:
        copy = value.clone()
        alive.append(weakref.ref(copy))
        return copy

    pm._compile_step = compile_
    x, target = batch(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        loss = pm(mine(x), target=mine(target))["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(alive) == 8
    assert seen == [0, 0]


def test_saved_values_die_at_their_last_use(gloo4: RankPool) -> None:
    gloo4.run(freed)


def frozen() -> None:
    """Freezing after `parallelize` and before planning is allowed."""
    pm, _, _ = make("ddp", lazy=True)
    pm.get_parameter("up.bias").requires_grad_(False)
    x, target = batch(0)
    pm(mine(x), target=mine(target))["loss"].backward()
    assert pm.get_parameter("up.bias").grad is None
    assert pm.get_parameter("up.weight").grad is not None


def test_parameters_may_be_frozen_before_planning(gloo4: RankPool) -> None:
    gloo4.run(frozen)


LAYOUTS: list[Sharding] = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (shard(0, 2), Shard(0)),
    (Shard(0), shard(0, 2)),
    (Shard(0), shard(0, 4)),
    (Replicate(), shard(0, 4)),
]


def placements() -> None:
    """DTensor reads every layout as `unshard` does, evenly divided or not."""
    device_mesh = init_device_mesh("cpu", GRID.sizes, mesh_dim_names=GRID.names)
    layout = Layout(GRID, device_mesh, dist.get_rank(), torch.device("cpu"))
    for sharding in LAYOUTS:
        sizes = [16] if any("Strided" in type(p).__name__ for p in sharding) else [16, 7, 1, 3]
        for size in sizes:
            torch.manual_seed(0)
            model = nn.Linear(3, size, bias=False)
            full = model.weight.detach().clone()
            sharded = ShardedParameters(model, ControlGroup(), layout, planned({"weight": Storage(sharding)}))
            assert isinstance(model.weight, DTensor)
            assert torch.equal(model.weight.full_tensor(), full), (sharding, size)
            assert sharded.by_name == {"weight": model.weight}
            weight = model.weight
            sharded.move(layout, planned({"weight": Storage((Shard(1), Shard(0)))}))
            assert model.weight is weight
            assert torch.equal(weight.full_tensor(), full)
            assert weight.placements == (Shard(1), Shard(0))


def test_layouts_are_those_of_dtensor(gloo4: RankPool) -> None:
    gloo4.run(placements)


@pytest.mark.parametrize("sharding", [(shard(0, 4), shard(0, 2)), (shard(0, 3), shard(0, 3)), (shard(0, 4), Shard(0))])
def test_layouts_that_dtensor_misreads_are_refused(sharding: Sharding) -> None:
    with pytest.raises(
        errors.PlanError, match=r"DTensor cannot hold a tensor that lies as shard\(0, split=\d\)@dp.*dim 0"
    ):
        device_placements(sharding, GRID)


def fail_on(rank: int, how: str) -> int:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("a reason")
        dist.barrier()
    return dist.get_rank()


def test_pool_reports_a_failing_rank_and_goes_on(gloo2: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)--- rank 1 ---.*ValueError: a reason"):
        gloo2.run(fail_on, 1, "raise")
    assert gloo2.run(fail_on, -1, "") == [0, 1]
    with pytest.raises(RankError, match=r"ranks \[0\] gave no answer"):
        gloo2.run(fail_on, 0, "wait", timeout_s=2.0)
    assert gloo2.run(fail_on, -1, "") == [0, 1]
