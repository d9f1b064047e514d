"""`ParallelModule`: the user's model, its parameters `DTensor`s, its forward and backward compiled programs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, PlanError
from autopar.graph import describe_value
from autopar.placement import Sharding
from autopar.plan import Plan
from autopar.runtime.accumulation import Accumulation
from autopar.runtime.agreement import agree_on_program
from autopar.runtime.buffers import Buffers, BufferShapes
from autopar.runtime.calls import Call, agree_on_call
from autopar.runtime.control import ControlGroup
from autopar.runtime.execution import BoundStep, CompiledStep
from autopar.runtime.finite import Guard, Search
from autopar.runtime.gathering import apply_whole, gathered_calls
from autopar.runtime.live_mesh import Layout, check_covers, layout_on
from autopar.runtime.parameters import ShardedParameters, full_to_placed, local_part, planned, unplanned
from autopar.runtime.programs import Programs
from autopar.runtime.safetensors_files import load_files, save_files
from autopar.runtime.slices import Slices

Compile = Callable[[tuple[Any, ...], dict[str, Any], bool, Plan], CompiledStep]
"""`compile(args, kwargs, train, plan)`: the program for a call with this rank's example inputs.  Called on every rank;
must not communicate."""

Decide = Callable[[tuple[Any, ...], dict[str, Any]], Plan]
"""`decide(args, kwargs)`: makes the plan from this rank's example inputs.  Called on rank 0 only, and sent to all."""

Rehearse = Callable[[tuple[Any, ...], dict[str, Any], Plan], Any]
"""`rehearse(args, kwargs, plan)`: tries a new plan and raises, on every rank, if it is wrong; returns a report.  Called
on every rank."""

CheckStep = Callable[["ParallelModule", tuple[Any, ...], dict[str, Any]], Any]
"""`check_step(module, args, kwargs)`: compares one step with the single device.  Called on every rank."""

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Sequence[tuple[str, Tensor]], Hashable]]
"""`flatten(args, kwargs)`: the tensors of a call with their paths, and a key that covers everything else in it."""

MAX_SPECIALISATIONS = 16
"""Programs kept for different input shapes and modes, before the one used least recently is dropped."""


class ParallelModule(nn.Module):
    """A model that runs on all ranks of a mesh as it would on one device.

    Made by `autopar.parallelize`.  It shares the module tree of the model that it is made of: parameters keep their
    names, tied ones stay tied, and `state_dict`, `get_submodule`, `train`, optimizers and `clip_grad_norm_` work on it
    as on the model.  Parameters are `DTensor`s; buffers are plain tensors, equal on every rank.

    Each rank calls it with its own rows of the batch, all with equal shapes.  Every rank must make the same calls
    in the same order; a call that differs (another shape, another mode, an error on one rank) raises on every rank.
    """

    _is_accelerate_prepared = True
    """Read by Hugging Face's `Accelerator.prepare`: this module places itself, and is not to be wrapped in DDP."""

    def __init__(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        plan: Plan | None = None,
        *,
        compile: Compile,  # noqa: A002 (the word for what it does)
        flatten: Flatten,
        decide: Decide | None = None,
        rehearse: Rehearse | None = None,
        check_step: CheckStep | None = None,
        search_nan: Search | None = None,
        control: ControlGroup | None = None,
        max_specialisations: int = MAX_SPECIALISATIONS,
    ) -> None:
        """Shard the parameters of `model` in place.

        Args:
            model: the whole model, on every rank.  If values differ between ranks, rank 0's win.
            device_mesh: a mesh of all ranks of the job.
            plan: what was decided; without one, parameters become DTensors now, move later, and `decide` is asked
                when the first call shows the shapes.
            compile, decide, flatten, rehearse, check_step, search_nan: the stages above the runtime, given by the
                facade.
            control: the ranks' way to agree; made here if it is not given.
            max_specialisations: how many programs to keep.

        Raises:
            MeshError: if the mesh does not hold all ranks in ascending order, or the plan has another number.
        """
        super().__init__()
        if plan is None and decide is None:
            raise InputError("give a plan, or `decide` to make one at the first call")
        state = self.__dict__
        state["_model"] = model  # not a submodule: the tree below is the model's own
        state["_parameters"], state["_buffers"], state["_modules"] = model._parameters, model._buffers, model._modules
        self.training = model.training
        self._compile_step, self._decide, self._flatten = compile, decide, flatten
        self._rehearse, self._check_step = rehearse, check_step
        self._report: Any = None
        self._user_mesh, self._control = device_mesh, control or ControlGroup()
        check_covers(device_mesh)
        self._plan = plan
        self._layout = layout_on(device_mesh, plan.mesh if plan else None)
        rest = planned(plan.storage) if plan else unplanned(self._layout)
        self._sharded = ShardedParameters(model, self._control, self._layout, rest)
        self._buffer_shapes = BufferShapes(model)
        self._programs = Programs(max_specialisations)
        self._num_forwards = 0
        self._accumulation = Accumulation()
        self._guard = Guard(self._control, search_nan)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._base_seed = self._control.gather(torch.initial_seed())[0] % 2**40

    @property
    def plan(self) -> Plan:
        """What was decided.

        Raises:
            PlanError: before the first call of a module that was made without a plan or example inputs.
        """
        if self._plan is None:
            raise PlanError("not planned yet: planning waits for the first call; pass example_inputs to plan at once")
        return self._plan

    @property
    def verify_report(self) -> Any:
        """What `parallelize(..., verify=True)` found; None without it, or before the first plan."""
        return self._report

    @property
    def original_module(self) -> nn.Module:
        """The model that this was made of, whose tree it shares."""
        model: nn.Module = self._model
        return model

    @property
    def control_group(self) -> ControlGroup:
        """How the ranks agree."""
        return self._control

    @property
    def random_state(self) -> tuple[int, int]:
        """What the next call's random numbers depend on: the seed, and how many calls there were.  Settable, on every
        rank alike, which is how a run is continued."""
        return self._base_seed, self._num_forwards

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._base_seed, self._num_forwards = state

    @property
    def stop_at_nan(self) -> bool:
        """Whether a step that meets a NaN raises a `NanError` on every rank (see `autopar.parallelize`).  Settable, on
        every rank alike; it holds for the calls that follow.

        Raises:
            InputError: when set, if the module was made without a way to search.
        """
        return self._guard.active

    @stop_at_nan.setter
    def stop_at_nan(self, active: bool) -> None:
        if active and not self._guard.can_search:
            raise InputError("this module was made without a way to search for NaN: make it by autopar.parallelize")
        self._guard.active = active

    def placement_of(self, name: str) -> tuple[Sharding, Layout]:
        """How a parameter rests now, in the terms of its mesh."""
        return self._sharded.shardings[name], self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that parameters lie on: the user's, or a factoring or flattening of it."""
        return self._layout.device_mesh

    @property
    def compiled_steps(self) -> tuple[CompiledStep, ...]:
        """The programs held now, the one used last at the end."""
        return self._programs.compiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's rows of the batch; returns what the model returns.

        Raises:
            BatchError: on every rank, if the ranks' inputs differ in number, dtype or shape.
            StaleModelError: if the model changed after planning, or ranks are in different modes.
            InputError: if a tensor is on another device than the mesh.
        """
        call = self._agree_on_call(args, kwargs, runs=True)
        if call.key not in self._programs:
            self._specialise(call, args, kwargs)
        step = self._programs.use(call.key)
        seed = self._base_seed + self._num_forwards
        self._num_forwards += 1
        return step(call.tensors, seed)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for a call with these inputs, without running it.

        Raises:
            BatchError, StaleModelError, InputError: as `forward`.
        """
        call = self._agree_on_call(args, kwargs)
        if call.key not in self._programs:
            self._specialise(call, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them: the forward calls made inside give gradients that are summed on
        each rank, and reduced with those of the next backward pass of a call made outside.

        As with DDP and FSDP, which have it under the same name, gradients of N micro-steps move once instead of N
        times.  It costs each rank its gradients before reduction, of whole parameters however these rest; under ZeRO-2
        and 3 that is what those strategies avoid to hold, so that plain accumulation, which needs no block, is often
        the better choice.  Until the reduction `p.grad` lacks them.  `zero_grad` of this module drops what waits; that
        of an optimizer does not.

            with pm.no_sync():
                for micro_batch in micro_batches[:-1]:
                    pm(*micro_batch).backward()
            pm(*micro_batches[-1]).backward()
            optimizer.step()
        """
        before, self._accumulation.active = self._accumulation.active, True
        try:
            yield
        finally:
            self._accumulation.active = before

    @contextmanager
    def step_apart(self) -> Iterator[None]:
        """A step that is made inside is no part of the loop's: it reduces its gradients at once, leaves alone those
        that wait (see `no_sync`), and meets NaN without an error."""
        stops, self._guard.active = self._guard.active, False
        try:
            with self._accumulation.aside():
                yield
        finally:
            self._guard.active = stops

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; gradients that wait for their reduction (see `no_sync`) are dropped, too."""
        self._accumulation.clear()
        super().zero_grad(set_to_none)

    def verify_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on two rows of each rank's batch, on these ranks, with these links and in this precision, and
        compare loss, gradients and every parameter's part in them with the single device in float64 on rank 0.

        Every rank calls it, with its own rows, as it would call the module, which must return its loss.  Parameters,
        gradients, buffers and random numbers stay as they are.

        Returns:
            A `VerifyReport`.

        Raises:
            VerificationError: on every rank, if they differ by more than the computing dtype's roundings.
            InputError: if there is no loss, gradients wait for their reduction (`no_sync`), or rank 0's host lacks the
                memory for the whole model in float64.
            PlanError: before the first plan.
        """
        if self._check_step is None:
            raise InputError("this module was made without a way to verify a step: make it by autopar.parallelize")
        if self._accumulation or self._accumulation.active:
            raise InputError("gradients wait for their reduction (no_sync): verify a step before or after")
        return self._check_step(self, args, kwargs)

    def export(self, directory: str | Path) -> list[Path]:
        """Write the program used last as readable, runnable Python, with the plan and a diagram.

        Every rank may call it; the first one writes.

        Raises:
            PlanError: before there is a program.
            InputError: if the directory cannot be written.
        """
        plan = self.plan
        if not self._programs:
            raise PlanError("no program to export yet: call the module once, or pass example_inputs to parallelize")
        from autopar.export import export_program

        program = self.compiled_steps[-1].program
        return self._control.on_first_rank("exporting", lambda: export_program(program, plan, directory))

    def _agree_on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = False) -> Call:
        def look() -> Call:
            call = self._inspect(args, kwargs)
            if runs:
                self._sharded.check_values()
            return call

        return agree_on_call(self._control, look)

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._sharded.check(planned=self._plan is not None)
        self._buffer_shapes.check(planned=self._plan is not None)
        tensors, constants = self._flatten(args, kwargs)
        for path, tensor in tensors:
            if tensor.device.type != self._layout.device.type:
                raise InputError(
                    f"input {path!r} is on {tensor.device}, but the mesh is of {self._layout.device.type} devices: "
                    f"move it there first, for instance with .to({str(self._layout.device)!r})"
                )
            if isinstance(tensor, DTensor):
                raise InputError(f"input {path!r} is a DTensor: pass this rank's rows as a plain tensor (.to_local())")
        grad = torch.is_grad_enabled()
        inputs = tuple((path, tuple(t.shape), t.dtype, grad and t.requires_grad) for path, t in tensors)
        device = self._layout.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        trains = grad and (self._sharded.any_trained or any(wanted for _, _, _, wanted in inputs))
        key = (inputs, constants, self._sharded.training_modes, trains, autocast)
        known = self._programs.number(key)
        described = {f"input {path!r}": describe_value(tensor) for path, tensor in tensors}
        modes = {
            "training": str(self.training), "gradients": str(trains), "autocast": str(autocast),
            "no_sync": str(self._accumulation.active), "program": "not compiled" if known is None else str(known),
        }  # fmt: skip
        return Call(dict(tensors), key, trains, described, modes)

    def _specialise(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for a new kind of call; plan first if that has waited."""
        control, plan = self._control, self._plan
        if plan is None:
            decide = self._decide
            assert decide is not None
            plan = control.on_first_rank("planning", lambda: decide(args, kwargs))
            if self._rehearse is not None:
                self._report = self._rehearse(args, kwargs, plan)
        final_plan = plan
        compiled = control.on_every_rank("compiling", lambda: self._compile_step(args, kwargs, call.trains, final_plan))
        agree_on_program(control, compiled.program)
        if self._plan is None:
            self._adopt(replace(plan, cost=compiled.cost or plan.cost))
        trained_inputs = [path for path, tensor in call.tensors.items() if call.trains and tensor.requires_grad]
        buffers = Buffers(self._model)
        step = BoundStep(
            compiled, self._layout, self._sharded.by_name, buffers, trained_inputs, self._accumulation, self._guard,
            control.watch,
        )  # fmt: skip
        self._programs.add(call.key, step, call.tensors)

    def _adopt(self, plan: Plan) -> None:
        self._layout = layout_on(self._user_mesh, plan.mesh)
        self._sharded.move(self._layout, planned(plan.storage))
        while self._optimizers:
            self._sharded.move_state(self._optimizers.pop(), self._layout)
        self._plan = plan

    def move_with_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the state that an optimizer got before there is a plan moved when the parameters move."""
        if self._plan is None:
            self._optimizers.append(optimizer)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set training mode, as `nn.Module.train` does."""
        self.training = mode
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state by its original names: `DTensor` parameters, plain buffers."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load values in place.

        Whole plain tensors, as in a single-device checkpoint, are cut to this rank's parts; every rank must give
        the same.

        Raises:
            InputError: for `assign=True`, which would replace the sharded parameters.
        """
        if assign:
            raise InputError(
                "load_state_dict(assign=True) would replace the sharded parameters: load with assign=False"
            )
        parameters, shardings = self._sharded.by_name, self._sharded.shardings
        placed = dict(state_dict)
        for name, value in state_dict.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and name in parameters:
                parameter = parameters[name]
                if value.shape == parameter.shape:  # otherwise PyTorch's own message says what is wrong
                    placed[name] = full_to_placed(value.detach(), parameter, shardings[name], self._layout)
        return self._model.load_state_dict(placed, strict=strict)

    def save_pretrained(self, directory: str | Path, max_shard_gb: float = 5.0) -> None:
        """Write the weights as Hugging Face's `from_pretrained` reads them: safetensors files, and the model's
        `config` if it has one.  Every rank calls it; one tensor at a time is gathered, and rank 0 writes.

        Args:
            directory: files of the same names in it are replaced, others stay.
            max_shard_gb: weights beyond so many GB (10^9 bytes) are split over several files.

        Raises:
            CheckpointError: on every rank, if the files cannot be written.
        """
        self._sharded.check_values()
        save_files(Path(directory), self._model, self._control, int(max_shard_gb * 1e9))

    def load_pretrained(self, directory: str | Path) -> None:
        """Load weights in place from safetensors files, such as a Hugging Face model's directory: each rank reads the
        slices that it holds, and casts them to its own dtype.  Weights that the model does not have are left out, with
        a warning.

        Raises:
            CheckpointError: on every rank, if files, or weights of the model, are missing, or shapes differ.
        """
        by_name, slices = self._sharded.by_name, {}
        for name, _ in self._model.named_parameters():
            (sharding, layout), parameter = self.placement_of(name), by_name[name]
            slices[name] = Slices(local_part(parameter), parameter.shape, sharding, layout.mesh, layout.rank)
        load_files(Path(directory), self._model, slices, self._control)

    def apply(self, fn: Callable[[nn.Module], None]) -> ParallelModule:
        """As `nn.Module.apply`: give every module to `fn`, children first, with its parameters whole and plain while
        `fn` sees it; what `fn` makes of them is cut and kept.  Called on every rank.

        It is how a model that was built on the meta device gets values, one module at a time, the same as on a single
        device: random numbers are rank 0's.

            with torch.device("meta"):
                model = Model()
            pm = autopar.parallelize(model, mesh)
            pm.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)

        A module sees, whole, its own parameters and those of its children that have no children.
        """

        def write(full: Tensor, parameter: DTensor) -> None:
            self._sharded.write(full, parameter, self._layout)

        apply_whole(self._model, fn, self._control, write, self._sharded.has_values)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters and programs of its own, on the same ranks."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled, as by `torch.save(pm)`: process groups and programs live in this process.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a ParallelModule cannot be pickled: keep its state by autopar.save_checkpoint(path, pm, optimizer), or "
            "its weights by pm.save_pretrained(directory)"
        )

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model (`config`, methods) are reachable here too.

        Its methods (`generate`, `encode`) run eagerly and not compiled, on this rank's arguments, with the parameters
        of each module gathered while that is called; every rank must call them, with the same calls inside.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            model: nn.Module | None = self.__dict__.get("_model")
            if model is None or name.startswith("__"):
                raise
            value = getattr(model, name)
        if not inspect.ismethod(value) or value.__self__ is not model:
            return value

        owner = model

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with gathered_calls(owner):
                return value(*args, **kwargs)

        return call
