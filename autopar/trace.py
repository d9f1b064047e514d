"""Trace a module and an example call to one graph of ATen ops, forward and backward, in the global view.

The model's tensors are replaced by fake ones of the same shapes while tracing, so nothing is computed or
allocated: parameters may be on the meta device, or be sharded DTensors (their global shape counts).
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from autopar._compat import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    capture_joint,
    is_value_read,
    new_fake_mode,
)
from autopar.errors import AutoparError, InputError, TraceError
from autopar.graph import GraphInput, GraphOutput, InputKind, JointGraph, OutputKind
from autopar.model_state import ModelState
from autopar.ownership import annotate_modules, assign_owners, traced_module
from autopar.precision import WideLosses, at_least_float32, cast_inputs, used_dtypes
from autopar.signature import (
    CallSignature,
    OutputTree,
    call_signature,
    find_batch_dims,
    flatten_inputs,
    flatten_output,
    undivided_kind,
)

__all__ = ["OutputTree", "find_batch_dims", "flatten_inputs", "trace"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_ranks: int = 1,
    batch_dims: Mapping[str, int | None] | None = None,
    train: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> JointGraph:
    """Trace `model(*args, **kwargs)` for the batch of all ranks together.

    With `train`, the graph also holds the backward pass: gradients of every parameter that requires one, given the
    gradients ("tangents") of some outputs. If the module returns at least one 0-dim floating tensor that requires
    grad, only those outputs (the loss) get tangents, and the others are returned detached.  Otherwise every
    floating output that requires grad gets one.  Inputs never get gradients.

    The model is run as it is: call `model.train()` or `model.eval()` before.  It is left as it was found.

    Args:
        model: any module; its parameters may be on the meta device.
        args, kwargs: an example of what one rank calls the model with; only shapes and dtypes of tensors matter, and
            everything else is a constant of the graph.
        num_ranks: the graph's batch is this many times the example's.
        batch_dims: by input path, the batch dim or None, where `find_batch_dims` is wrong.
        train: trace the backward pass too.
        device: device type that the graph is for; by default the model's own, or for a meta model CUDA if there is
            one, else CPU.
        dtype: what the model computes in, while its parameters rest in their own dtype (see `autopar.precision`); by
            default what the dtypes of its tensors give.

    Returns:
        The graph.  It takes every tensor contiguous.  Its `output_tree` is an `OutputTree`.

    Raises:
        InputError: if the example does not fit, see `find_batch_dims`.
        TraceError: if the model cannot be one graph: it looks at tensor values, changes its inputs, ….
    """
    signature, tensors = call_signature(args, kwargs)
    dims = find_batch_dims(args, kwargs, batch_dims)
    _refuse_scripted(model)
    if train:
        _refuse_input_gradients(signature, tensors)
    shapes = [_global_shape(t, dims.get(path), num_ranks) for path, t in zip(signature.paths, tensors, strict=True)]

    used = used_dtypes(model, dtype)
    with annotate_modules(model), cast_inputs(model, used):
        state = ModelState(model)
        target = _target_device(state, device)

        def capture(allow_value_reads: bool) -> tuple[fx.GraphModule, _FlatModule]:
            flat = _FlatModule(model, state, signature, used)
            mode = new_fake_mode(allow_value_reads)
            with mode:
                fakes = [_fake_like(t, t.shape, target, train) for t in state.tensors.values()]
                fakes += [_fake_like(t, shape, target) for t, shape in zip(tensors, shapes, strict=True)]
            try:
                with torch.inference_mode(False), torch.set_grad_enabled(train):
                    return capture_joint(flat, tuple(fakes), mode), flat
            except AutoparError:
                raise
            except Exception as error:  # whatever the model raises, reported with its place
                raise _trace_error(error, state.paths, dtype) from error
            finally:
                state.restore()

        captured, flat = capture(allow_value_reads=True)
        joint = _joint_graph(captured, flat, dims)
        if any(_has_symbol(node.meta.get("val")) for node in joint.module.graph.nodes):
            # Values of tensors became symbols.  Trace again with such reads forbidden, only to learn where they are.
            capture(allow_value_reads=False)
            raise TraceError("the model's shapes or scalars depend on the values of tensors, so it is no single graph")
    return joint


# ---- the model, made traceable ----


class _FlatModule(nn.Module):
    """The model as a function from its parameters, buffers and input tensors to its output tensors.

    AOTAutograd sees the model's tensors as plain inputs, each once however many names it has.  Parameters are cast to
    the dtypes in which they are used, so that from here on mixed precision is nothing but casts in the graph.
    """

    def __init__(
        self, model: nn.Module, state: ModelState, signature: CallSignature, used: Mapping[int, torch.dtype]
    ) -> None:
        super().__init__()
        # Not a submodule, so that AOTAutograd does not lift the parameters itself.
        self.call = model.__call__
        self.state = state
        self.signature = signature
        self.dtypes = {name: used[id(p)] for name, p in state.parameters.items() if id(p) in used}
        self.inputs = (
            *(GraphInput(InputKind.PARAM, name) for name in state.parameters),
            *(GraphInput(InputKind.BUFFER, name) for name in state.buffers),
            *(GraphInput(InputKind.INPUT, path) for path in signature.paths),
        )
        self.output_tree: OutputTree | None = None
        self.outputs: tuple[GraphOutput, ...] = ()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = list(self.state.tensors)
        held = {name: t.to(self.dtypes.get(name, t.dtype)) for name, t in zip(names, tensors, strict=False)}
        args, kwargs = self.signature.rebuild(tensors[len(names) :])
        # AOTAutograd calls this twice; what the first call left on the modules must not reach the second.
        self.state.restore()
        self.state.put(held)
        with WideLosses() if self.dtypes else nullcontext():
            self.output_tree, outputs = flatten_output(self.call(*args, **kwargs))
        if not outputs:
            raise _no_tensors(self.output_tree)
        if self.dtypes:  # whoever adds losses up, or scales them, wants no bfloat16
            outputs = [at_least_float32(t) if t.ndim == 0 else t for t in outputs]
        reassigned = self.state.reassigned(held)
        self.outputs = (
            *(GraphOutput(OutputKind.OUTPUT, path) for path in self.output_tree.paths),
            *(GraphOutput(OutputKind.MUTATION, name) for name in reassigned),
        )
        with_tangent = [t.requires_grad for t in outputs]
        if any(wanted and t.ndim == 0 for wanted, t in zip(with_tangent, outputs, strict=True)):
            with_tangent = [wanted and t.ndim == 0 for wanted, t in zip(with_tangent, outputs, strict=True)]
        outputs = [t if wanted else t.detach() for wanted, t in zip(with_tangent, outputs, strict=True)]
        # The copies, removed again later, keep AOTAutograd from treating outputs that share memory specially, and let
        # it expect contiguous tangents.
        returned = (*outputs, *(t.detach() for t in reassigned.values()))
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in returned)


def _no_tensors(tree: OutputTree) -> InputError:
    dropped = ", ".join(path or "the return value" for path in tree.dropped)
    hint = (
        f" ({dropped} is an object that PyTorch cannot look into: register its class with"
        " torch.utils._pytree.register_pytree_node, or return a dict)"
        if dropped
        else ""
    )
    return InputError(f"the module returns no tensor{hint}")


def _target_device(state: ModelState, device: torch.device | str | None) -> torch.device:
    """The device type to trace for.  Never CUDA where there is none: a fake CUDA tensor that requires grad aborts."""
    if device is None:
        types = {t.device.type for t in state.tensors.values()}
        real = sorted(types - {"meta", "cpu"})
        if real:
            device = real[0]
        else:
            device = "cuda" if "meta" in types and torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    return torch.device("cpu") if chosen.type == "cuda" and not torch.cuda.is_available() else chosen


def _fake_like(tensor: torch.Tensor, shape: Sequence[int], device: torch.device, train: bool = False) -> torch.Tensor:
    """A contiguous tensor of the active fake mode.  A parameter is one again if its gradient is wanted."""
    fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(train and tensor.requires_grad and isinstance(tensor, nn.Parameter))


def _global_shape(tensor: torch.Tensor, batch_dim: int | None, num_ranks: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if batch_dim is not None:
        shape[batch_dim] *= num_ranks
    return tuple(shape)


def _refuse_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"module {path or '(root)'} is TorchScript: give the Python module that it was made from")


def _refuse_input_gradients(signature: CallSignature, tensors: Sequence[torch.Tensor]) -> None:
    for path, tensor in zip(signature.paths, tensors, strict=True):
        if tensor.requires_grad:
            raise InputError(
                f"input {path} requires grad, but only parameters get gradients: detach it, or move what computes it"
                " into the model"
            )


# ---- from AOTAutograd's graph to a JointGraph ----


def _joint_graph(captured: fx.GraphModule, flat: _FlatModule, batch_dims: Mapping[str, int]) -> JointGraph:
    """Name inputs and outputs by AOTAutograd's descriptors, drop what is not asked for, and assign owners."""
    assert flat.output_tree is not None
    graph = captured.graph
    _refuse_effects(graph)
    inputs = tuple(_graph_input(node.meta["desc"], flat) for node in graph.find_nodes(op="placeholder"))
    placeholders = _named_placeholders(graph, inputs)
    trains = any(spec.kind is InputKind.TANGENT for spec in inputs)

    _drop_profiler_marks(graph)
    output_node = graph.output_node()
    returned: dict[GraphOutput, fx.Node | None] = {}
    for value, desc in zip(output_node.args[0], output_node.meta["desc"], strict=True):  # type: ignore[arg-type]
        if desc is not None:
            spec = _graph_output(desc, flat)
            _refuse_sparse(spec, value)
            returned[spec] = _strip_copy(value) if isinstance(desc, PlainAOTOutput) else value
    outputs = [GraphOutput(OutputKind.OUTPUT, path) for path in flat.output_tree.paths]
    outputs += [spec for spec in returned if spec.kind is OutputKind.MUTATION]
    if trains:
        outputs += [GraphOutput(OutputKind.GRADIENT, n) for n, p in flat.state.parameters.items() if p.requires_grad]
    values = [returned.get(spec) for spec in outputs]
    output_node.args = (tuple(values),)
    output_node.meta = {}
    _inline_scalar_constants(captured)
    graph.eliminate_dead_code()

    for node, source in zip(placeholders, inputs, strict=True):
        node.meta["module"] = _owner(source)
    pairs = [(spec, value) for spec, value in zip(outputs, values, strict=True) if value is not None]
    assign_owners(
        graph,
        tangents=[node for node, spec in zip(placeholders, inputs, strict=True) if spec.kind is InputKind.TANGENT],
        forward_values=[value for spec, value in pairs if spec.kind is not OutputKind.GRADIENT],
        gradients={value: _owner(spec) for spec, value in pairs if spec.kind is OutputKind.GRADIENT},
    )
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in ("val", "module", "backward") if key in node.meta}
    graph.set_codegen(fx.graph.CodeGen())  # plain positional arguments
    graph.lint()
    return JointGraph(
        module=fx.GraphModule(captured, graph), inputs=inputs, outputs=tuple(outputs), batch_dims=dict(batch_dims),
        tied=dict(flat.state.tied), trains=trains, output_tree=flat.output_tree,
    )  # fmt: skip


def _drop_profiler_marks(graph: fx.Graph) -> None:
    """Leave out what `torch.profiler.record_function` records: it has no part in the numbers."""
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", None) == "profiler":
            graph.erase_node(node)


def _refuse_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if str(node.target) == "with_effects":
            raise TraceError(
                f"module {traced_module(node) or '(root)'} calls {node.args[1]}, which acts by something else than its "
                "result, so that it can be neither moved nor repeated: leave it out. What checks for errors has a form "
                "that does not, such as torch.linalg.inv_ex(x).inverse for torch.linalg.inv(x), or solve_ex for solve"
            )


def _refuse_sparse(spec: GraphOutput, value: object) -> None:
    result = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(result, torch.Tensor) and (kind := undivided_kind(result)):
        what = f"the gradient of {spec.path}" if spec.kind is OutputKind.GRADIENT else f"{spec.kind.value} {spec.path}"
        raise TraceError(
            f"{what} is a {kind} tensor, and only dense ones are exchanged between ranks: use "
            "nn.Embedding(sparse=False), or return to_dense() of it"
        )


def _named_placeholders(graph: fx.Graph, inputs: Sequence[GraphInput]) -> list[fx.Node]:
    """Put placeholders named for what they are (`param_head_weight`) in the place of the graph's."""
    named: list[fx.Node] = []
    taken: set[str] = set()
    for node, spec in zip(list(graph.find_nodes(op="placeholder")), inputs, strict=True):
        base = name = re.sub(r"\W", "_", f"{spec.kind.value}_{spec.path}").rstrip("_")
        while name in taken:
            name = f"{base}_{len(taken)}"
        taken.add(name)
        with graph.inserting_before(node):
            named.append(graph.placeholder(name))
        named[-1].meta = dict(node.meta)
        node.replace_all_uses_with(named[-1])
        graph.erase_node(node)
    return named


def _owner(spec: GraphInput | GraphOutput) -> str:
    """Path of the module that holds the parameter or buffer; the root for what none holds."""
    held = {InputKind.PARAM, InputKind.BUFFER, OutputKind.GRADIENT}
    return spec.path.rpartition(".")[0] if spec.kind in held else ""


def _graph_input(desc: AOTInput, flat: _FlatModule) -> GraphInput:
    if isinstance(desc, PlainAOTInput):
        return flat.inputs[desc.idx]
    if isinstance(desc, TangentAOTInput):
        if isinstance(desc.output, PlainAOTOutput):
            return GraphInput(InputKind.TANGENT, flat.outputs[desc.output.idx].path)
        if isinstance(desc.output, InputMutationAOTOutput):
            name = _mutated_buffer(desc.output, flat)
            raise TraceError(f"the model gives buffer {name} a value that requires grad: detach() the value first")
    raise TraceError(f"the traced graph has an input of a kind that autopar does not know: {desc}")


def _graph_output(desc: AOTOutput, flat: _FlatModule) -> GraphOutput:
    if isinstance(desc, PlainAOTOutput):
        return flat.outputs[desc.idx]
    if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
        return GraphOutput(OutputKind.GRADIENT, flat.inputs[desc.grad_of.idx].path)
    if isinstance(desc, InputMutationAOTOutput):
        return GraphOutput(OutputKind.MUTATION, _mutated_buffer(desc, flat))
    raise TraceError(f"the traced graph has an output of a kind that autopar does not know: {desc}")


def _mutated_buffer(desc: InputMutationAOTOutput, flat: _FlatModule) -> str:
    mutated = _graph_input(desc.mutated_input, flat)
    if mutated.kind is InputKind.BUFFER:
        return mutated.path
    noun = "input" if mutated.kind is InputKind.INPUT else "parameter"
    raise TraceError(
        f"the model changes its {noun} {mutated.path} in place: let it change a copy (x = x.clone()), or keep what"
        " changes in a buffer"
    )


def _strip_copy(copy: fx.Node) -> fx.Node:
    """What `_FlatModule` made a copy of to return it; the copy itself if that shares memory with an input."""
    assert copy.target is torch.ops.aten.clone.default
    source = copy.args[0]
    root = source
    while isinstance(root, fx.Node) and getattr(root.target, "is_view", False):
        root = root.args[0]
    assert isinstance(source, fx.Node)
    assert isinstance(root, fx.Node)
    return copy if root.op == "placeholder" else source


def _inline_scalar_constants(captured: fx.GraphModule) -> None:
    """Make a 0-dim constant tensor that a module holds on to (`torch.tensor(0.5)`) a node that creates it."""
    graph = captured.graph
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(captured, node.target)
        if not isinstance(value, torch.Tensor) or value.ndim or value.device.type == "meta":
            continue
        with graph.inserting_before(node):
            scalar = graph.call_function(
                torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        scalar.meta = dict(node.meta)
        node.replace_all_uses_with(scalar)
        graph.erase_node(node)


def _has_symbol(value: object) -> bool:
    """Whether a traced value is, or has in its shape, a number known only when the program runs."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(_has_symbol(v) for v in value)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


# ---- errors ----


def _trace_error(error: Exception, paths: Mapping[int, str], dtype: torch.dtype | None) -> TraceError:
    """Where in the model an exception came from, why, and what to do about it.

    Args:
        error: what tracing raised.
        paths: module path by id of the module.
        dtype: what the model computes in, if not in its tensors' dtypes.
    """
    frames = list(_frames(error))
    active = [paths[id(f.f_locals.get("self"))] for f, _ in frames if id(f.f_locals.get("self")) in paths]
    module = f"module {active[-1]}" if active and active[-1] else "the root module"
    places = [(f, number) for f, number in frames if not _is_library(f.f_code.co_filename)]
    place = ""
    if places:
        frame, number = places[-1]
        code = linecache.getline(frame.f_code.co_filename, number).strip()
        place = f", {frame.f_code.co_filename}:{number}" + (f" (`{code}`)" if code else "")
    reason = str(error).strip().partition("\n")[0]
    if is_value_read(error):
        return TraceError(
            f"cannot trace the model to one graph: {module}{place} depends on the values of a tensor"
            f" ({type(error).__name__}: {reason}). Compute it with tensor ops (torch.where, masking instead of"
            " selecting), or decide from shapes or from Python values given as arguments"
        )
    mixed = (
        f" Parameters are used as {dtype} here, while buffers and what is computed from them stay as they are: cast one"
        " to the other where they meet (x.to(y.dtype))."
    )
    return TraceError(
        f"cannot trace the model to one graph: {module}{place} raised {type(error).__name__}: {reason}."
        f"{mixed if dtype else ''}"
        " If the model runs eagerly on the same inputs, it does something there that fake tensors cannot"
    )


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames between the trace and the place where the exception was raised, outermost first."""
    link: TracebackType | None = error.__traceback__
    while link is not None:
        yield link.tb_frame, link.tb_lineno
        link = link.tb_next


def _is_library(filename: str) -> bool:
    """Whether a source file belongs to PyTorch, to autopar or to Python's standard library."""
    if filename.startswith(_LIBRARY_ROOTS) or filename.startswith("<"):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


_LIBRARY_ROOTS = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent) + "/")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"
