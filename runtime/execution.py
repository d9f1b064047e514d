"""One compiled program, bound to this rank's process groups, parameters and buffers, and run as one autograd node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import BoxedCodeGen, below_autograd, dtensor_like
from autopar.graph import GraphInput, InputKind, OutputKind
from autopar.plan_cost import PlanCost
from autopar.program import COLLECTIVE_KINDS, DeferredBackward, LocalGraph, LocalProgram, collective_axis
from autopar.runtime.accumulation import Accumulation
from autopar.runtime.blame import blame, places
from autopar.runtime.finite import Guard
from autopar.runtime.live_mesh import Layout
from autopar.runtime.roles import ForwardRoles, GradientRoles
from autopar.runtime.shares import watch_shares
from autopar.runtime.watch import Watch

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A graph as a function of one list, which it empties, so that each value can be freed after its last use."""


@dataclass(frozen=True)
class CompiledStep:
    """What compiling gives the runtime.

    Attributes:
        program: the rewritten program; its parameter and buffer paths are names in the model, its input paths are
            those that `flatten` gives.
        rebuild_output: makes the module's return value from the values of the forward graph's `OUTPUT`s, in order.
        defer: takes the gradients' reductions out of the backward graph; asked when that is first wanted.
        cost: what its plan costs in symbols, worked out when that is first wanted.
    """

    program: LocalProgram
    rebuild_output: Callable[[Sequence[Any]], Any]
    defer: Callable[[LocalGraph], DeferredBackward] | None = None
    cost: PlanCost | None = None


def bind_graph(
    module: fx.GraphModule, device_mesh: DeviceMesh, axes: Sequence[str], watch: Watch | None = None
) -> Boxed:
    """Compile a graph to Python, with each collective's axis name replaced by the name of its process group.

    The function raises a `CollectiveError` where a collective fails, and says of another error which op raised it.
    """
    bound = fx.Graph()
    bound.output(bound.graph_copy(module.graph, {}))
    known = places(bound)
    groups = {name: device_mesh.get_group(axis).group_name for axis, name in enumerate(axes)}
    for node in bound.nodes:
        if node.op == "call_function" and node.target in COLLECTIVE_KINDS:
            node.args = (*node.args[:-1], groups[collective_axis(node)])
    watch_shares(bound)
    bound.set_codegen(BoxedCodeGen())
    compiled: Boxed = fx.GraphModule(module, bound).forward

    def run(values: list[Any]) -> Sequence[Any]:
        try:
            return compiled(values)
        except Exception as error:
            told = blame(error, bound, known, device_mesh.get_rank(), watch)
            if told is error:
                raise
            raise told from error

    def watched(values: list[Any]) -> Sequence[Any]:
        with watch.running(known) if watch else nullcontext():
            return run(values)

    return watched


_IN_WORDS = {InputKind.INPUT: "input", InputKind.PARAM: "parameter", InputKind.BUFFER: "buffer"}


class BoundStep:
    """A compiled program that this rank can call."""

    def __init__(
        self,
        compiled: CompiledStep,
        layout: Layout,
        parameters: Mapping[str, DTensor],
        buffers: Mapping[str, Tensor],
        trained_inputs: Sequence[str],
        accumulation: Accumulation,
        guard: Guard,
        watch: Watch | None = None,
    ) -> None:
        self.compiled, self._layout, self._watch = compiled, layout, watch
        self.accumulation, self.guard = accumulation, guard
        program = compiled.program
        axes, self.device_type = program.mesh.names, layout.device.type
        self._position = dict(zip(axes, program.mesh.coordinate(layout.rank), strict=True))
        self._parameters, self._buffers = parameters, buffers
        self._forward = bind_graph(program.forward.module, layout.device_mesh, axes, watch)
        self._forward_inputs, self._roles = program.forward.inputs, ForwardRoles.of(program.forward)
        self.trained: list[tuple[InputKind, str]] = []
        self._backward: Boxed | None = None
        if program.backward is not None:
            self._backward = bind_graph(program.backward.module, layout.device_mesh, axes, watch)
            self._backward_inputs, self._num_gradients = program.backward.inputs, len(program.backward.outputs)
            self._gradients = GradientRoles.of(program.backward, program.forward, parameters, program.mesh.num_ranks)
            self._gradients.require(trained_inputs)
            used = {id(parameters[s.path]): s.path for s in program.forward.inputs if s.kind is InputKind.PARAM}
            self.trained += [(InputKind.PARAM, path) for path in used.values() if parameters[path].requires_grad]
            self.trained += [(InputKind.INPUT, path) for path in trained_inputs]

    def __call__(self, tensors: Mapping[str, Tensor], seed: int) -> Any:
        """Run on this rank's tensors, by path; returns what the module returns."""
        with torch.autocast(self.device_type, enabled=False):  # casts are in the graph
            if self._backward is None:
                with torch.no_grad():
                    outputs = self._run_untrained(tensors, seed)
            else:
                leaves = [self._parameters[p] if k is InputKind.PARAM else tensors[p] for k, p in self.trained]
                outputs = list(_Step.apply(self, tensors, seed, *leaves))  # type: ignore[no-untyped-call]
        return self.compiled.rebuild_output(outputs)

    def _run_untrained(self, tensors: Mapping[str, Tensor], seed: int) -> list[Any]:
        replay = self.guard.keep(self, tensors, seed)
        outputs, _ = self.run_forward(tensors, seed)
        if replay is not None:
            replay.returned(outputs)
            self.guard.check_forward(replay)
        return outputs

    @property
    def changed_buffers(self) -> dict[str, Tensor]:
        """The buffers that the module updates, by name, as they are now."""
        return {path: self._buffers[path] for _, path in self._roles.mutations}

    @property
    def output_paths(self) -> list[str]:
        """Names of the outputs, in order."""
        return [spec.path for spec in self.compiled.program.forward.outputs if spec.kind is OutputKind.OUTPUT]

    def named_inputs(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What the program reads, by name in words: of the call, and this rank's of parameters and buffers."""
        for kind in (InputKind.INPUT, InputKind.PARAM, InputKind.BUFFER):
            for spec in self._forward_inputs:
                if spec.kind is kind:
                    name = repr(spec.path) if kind is InputKind.INPUT else spec.path
                    yield f"{_IN_WORDS[kind]} {name}", self._input(spec, tensors, 0)

    def run_forward(self, tensors: Mapping[str, Tensor], seed: int) -> tuple[list[Any], list[Any]]:
        """Outputs and saved values; updates the buffers that the module changes."""
        roles = self._roles
        values = [self._input(spec, tensors, seed) for spec in self._forward_inputs]
        with below_autograd():
            results = list(self._forward(values))
        for index in roles.clones:
            results[index] = results[index].clone()
        for index, path in roles.mutations:
            self._buffers[path].copy_(results[index])
        return [results[i] for i in roles.outputs], [results[i] for i in roles.saved]

    def _input(self, spec: GraphInput, tensors: Mapping[str, Tensor], seed: int) -> Any:
        if spec.kind is InputKind.PARAM:
            parameter = self._parameters[spec.path]
            return parameter.to_local()
        if spec.kind is InputKind.BUFFER:
            return self._buffers[spec.path]
        if spec.kind is InputKind.INPUT:
            return tensors[spec.path].detach().contiguous()
        if spec.kind is InputKind.RANK:
            return self._position[spec.path]
        assert spec.kind is InputKind.SEED, spec
        return seed

    def run_backward(
        self, saved: list[Any], tangents: Sequence[Tensor | None], seed: int, reduce: bool = True
    ) -> list[Any]:
        """Gradients in the order of `trained`; those that wait for a reduction are None without `reduce`, and with it
        have what waited before added.  Empties `saved`, so that each value dies at its last use."""
        by_path = dict(zip(self._roles.saved_paths, saved, strict=True))
        saved.clear()
        roles, values = self._gradients, []
        for index, spec in enumerate(self._backward_inputs):
            if spec.kind is InputKind.SAVED:
                values.append(by_path[spec.path])
            elif spec.kind is InputKind.TANGENT:
                values.append(roles.tangent(index, tangents))
            else:
                values.append(self._input(spec, {}, seed))
        by_path.clear()
        with below_autograd():
            gradients = self._compute_gradients(values, reduce)
        return [self._wrap(gradients[key], *key) for key in self.trained]

    def _compute_gradients(self, values: list[Any], reduce: bool) -> dict[tuple[InputKind, str], Tensor | None]:
        if reduce and not self.accumulation:
            assert self._backward is not None
            return self._by_name(list(self._backward(values)))
        compute, _ = self._parts
        results = list(compute(values))
        gradients = self._by_name(results)
        self.accumulation.add(self, results[self._num_gradients :])
        del results
        for step, waiting in self.accumulation.take() if reduce else ():
            assert isinstance(step, BoundStep)
            for key, reduced in step._reduce(waiting).items():
                before = gradients.get(key)
                if reduced is not None:
                    gradients[key] = reduced if before is None else before + reduced
        return gradients

    def _reduce(self, waiting: list[Any]) -> dict[tuple[InputKind, str], Tensor | None]:
        """The gradients of what has waited; empties `waiting`."""
        _, reduce = self._parts
        specs = self._deferred.reduce.inputs[len(waiting) :]
        waiting += [self._input(spec, {}, 0) for spec in specs]
        return self._by_name(list(reduce(waiting)))

    @cached_property
    def _deferred(self) -> DeferredBackward:
        program, defer = self.compiled.program, self.compiled.defer
        assert program.backward is not None
        assert defer is not None, "compiled without a way to defer reductions"
        return defer(program.backward)

    @cached_property
    def _parts(self) -> tuple[Boxed, Boxed]:
        """The backward graph up to the gradients' reductions, and these."""
        mesh, axes, watch = self._layout.device_mesh, self.compiled.program.mesh.names, self._watch
        compute, reduce = self._deferred.compute.module, self._deferred.reduce.module
        return bind_graph(compute, mesh, axes, watch), bind_graph(reduce, mesh, axes, watch)

    def _by_name(self, results: list[Any]) -> dict[tuple[InputKind, str], Tensor | None]:
        """What a backward graph returned, by what it is the gradient of."""
        gradients = {}
        for kind, path in self.trained:
            position = self._gradients.position(kind, path)
            local = None if position is None else results[position]
            if local is not None and position in self._gradients.clones:
                local = local.clone(memory_format=torch.contiguous_format)
            gradients[kind, path] = local
        return gradients

    def _wrap(self, local: Tensor | None, kind: InputKind, path: str) -> Tensor | None:
        if local is None or kind is InputKind.INPUT:
            return local
        return dtensor_like(local.contiguous(), self._parameters[path])

    @property
    def undifferentiable(self) -> list[int]:
        """Positions of the outputs that no gradient flows into."""
        return self._gradients.undifferentiable


class _Step(torch.autograd.Function):
    """The whole module as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, step: BoundStep, tensors: Mapping[str, Tensor], seed: int, *leaves: Tensor
    ) -> tuple[Any, ...]:
        replay = step.guard.keep(step, tensors, seed)
        outputs, saved = step.run_forward(tensors, seed)
        if replay is not None:
            replay.returned(outputs)
        ctx.replay = replay
        ctx.step, ctx.seed, ctx.reduce = step, seed, not step.accumulation.active
        # Autograd keeps the tensors, so that it notices one that is changed in place before backward.
        ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
        ctx.constants = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.is_tensor = [isinstance(value, Tensor) for value in saved]
        ctx.mark_non_differentiable(*(outputs[i] for i in step.undifferentiable if isinstance(outputs[i], Tensor)))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        remaining = iter(ctx.saved_tensors)
        saved = [
            next(remaining) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.constants, strict=True)
        ]
        del remaining
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, so that they can be freed while this runs
        step: BoundStep = ctx.step
        added = bool(step.accumulation)
        gradients = step.run_backward(saved, tangents, ctx.seed, ctx.reduce)
        if ctx.replay is not None:
            waiting = [] if ctx.reduce else step.accumulation.of(step)
            step.guard.check_backward(ctx.replay, tangents, [*gradients, *waiting], added)
        return (None, None, None, *gradients)
