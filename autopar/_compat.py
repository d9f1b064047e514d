"""The one place that touches PyTorch's private interfaces.

Tested with torch 2.13.0 and 2.14.1.  When a name moves between versions, it is resolved here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C import _fx_map_arg as map_nodes
from torch._C import _NodeBase
from torch._decomp import decomposition_table, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.distributions import Distribution
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.graph import _FindNodesLookupTable, _illegal_char_regex, _illegal_names, _snake_case
from torch.fx.node import has_side_effect
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.checkpoint import CheckpointFunction

from autopar.corrections import CORRECTIONS

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BatchNorm",
    "BoxedCodeGen",
    "FakeMaker",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "KnownOps",
    "LazyGraphModule",
    "OpOverload",
    "OpOverloadPacket",
    "PlainAOTInput",
    "PlainAOTOutput",
    "QuickDispatchMode",
    "QuickGraph",
    "StorageInfo",
    "StridedShard",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TreeSpec",
    "allocator_events",
    "around_calls",
    "as_captured",
    "as_outside_of_ops",
    "autograd_nodes",
    "below_autograd",
    "broadcast_coalesced",
    "capture_joint",
    "core_decompositions",
    "current_autograd_node",
    "detect_fake_mode",
    "device_of",
    "dtensor_like",
    "fake_kernel",
    "fake_process_group",
    "forget_meshes",
    "fsdp_memory_peaks",
    "function_modes",
    "give_default_timeout",
    "grouped_mm",
    "has_effects",
    "is_custom_function",
    "is_dense_fake",
    "is_only_acting",
    "is_plain_fake",
    "is_value_missing",
    "job_store",
    "lists_by_items",
    "load_tracer",
    "map_nodes",
    "meta_of",
    "never_drop",
    "new_fake_mode",
    "not_captured",
    "registered_decomposition",
    "save_state_dict",
    "sequence_number",
    "shares_storage",
    "storage_id",
    "storage_users",
    "timeout_of_default_group",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "value_read",
    "values_of",
    "version_of",
    "wrapper_like",
]


grouped_mm = torch._grouped_mm
"""What `torch.nn.functional.grouped_mm` calls, and so what a `TorchFunctionMode` sees."""


@dataclass(frozen=True)
class _Made:
    """What an op makes of tensors of known kinds: a tensor, and which of them it is a view of."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None


KnownOps = dict[Hashable, Any]
"""What ops make, by op, constants and kinds of tensors."""


_FAKE_KERNELS: dict[OpOverload, Callable[..., Any]] = {}


@functools.cache
def has_avx512() -> bool:
    """Whether this machine's CPU computes on 512 bits at once."""
    return bool(torch.cpu._is_avx512_supported())


@functools.cache
def onednn_computes(dtype: torch.dtype) -> bool:
    """Whether PyTorch leaves convolutions of a dtype to oneDNN, on this machine's CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    narrow = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype == torch.float32 or bool(dtype in narrow and narrow[dtype]())


def fake_kernel(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What the modes of `new_fake_mode` make of ops whose shapes PyTorch takes for a matter of values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _FAKE_KERNELS.update(dict.fromkeys(ops, function))
        return function

    return register


class QuickDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose calls Dynamo is not told to leave alone, which takes longer than most of them do.

    Nothing that is compiled runs under one, so Dynamo never meets them.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMaker:
    """Makes fake tensors of meta tensors.

    `FakeTensor(mode, elem, device)` does the same, but takes several times as long, for attributes that are the same in
    all of them.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __call__(self, elem: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on `device` of the size, strides and dtype of `elem`."""
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self._mode, elem, device)))
        made = torch.Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made


class _QuickDispatch:
    """Lets a fake tensor mode find sooner what it did before.

    PyTorch's own memory of results compares all that can matter to any op, which takes longer than what most ops do.
    Here it is the shapes, strides, dtypes and devices of dense tensors; ops on anything else, with side effects, or
    with results that depend on values, are left to PyTorch.  (No mode of a class of its own: PyTorch finds the rules
    of higher-order ops by a mode's class.)
    """

    def __init__(self, mode: FakeTensorMode, known: KnownOps) -> None:
        self._mode, self._known, self._fake = mode, known, FakeMaker(mode)
        self._usual = mode.dispatch
        mode.cache_enabled = False
        mode.dispatch = self.dispatch  # type: ignore[method-assign]

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As `FakeTensorMode.dispatch`."""
        reads: list[FakeTensor] = []
        key = self._key(func, args, kwargs or {}, reads)
        if key is None:
            if func in _FAKE_KERNELS:
                with self._mode:
                    return _FAKE_KERNELS[func](*args, **(kwargs or {}))
            return self._usual(func, types, args, kwargs or {})
        found = self._known.get(key)
        if found is None:
            result = self._usual(func, types, args, kwargs or {})
            self._remember(key, reads, result)
            return result
        return self._make(found, reads) if isinstance(found, _Made) else [self._make(one, reads) for one in found]

    def _key(self, func: Any, args: Any, kwargs: dict[str, Any], reads: list[FakeTensor]) -> Hashable | None:
        if not isinstance(func, OpOverload) or not _makes_by_shapes(func):
            return None
        constants = self._constants((*args, *kwargs.values()), reads)
        key = (func, torch.get_default_dtype(), constants, tuple(kwargs))
        return None if constants is None else key

    def _constants(self, values: Iterable[Any], reads: list[FakeTensor]) -> Hashable | None:
        """What of an op's arguments its result depends on, None if that is more than is compared; fills `reads`."""
        found: list[Hashable] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                if type(value) is not FakeTensor or not self._is_plain(value):
                    return None
                reads.append(value)
                found.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
            elif isinstance(value, (list, tuple)):
                inner = self._constants(value, reads)
                if inner is None:
                    return None
                found.append(inner)
            elif value is None or isinstance(value, _PLAIN_CONSTANTS):
                found.append((type(value), value))
            else:
                return None
        return tuple(found)

    def _is_plain(self, tensor: FakeTensor) -> bool:
        is_dense = tensor.layout is torch.strided and not tensor.dtype.is_complex and not tensor.is_neg()
        is_known = tensor.fake_mode is self._mode and tensor.constant is None and not tensor._has_symbolic_sizes_strides
        return is_dense and is_known and tensor.dispatch_keys is None

    def _remember(self, key: Hashable, reads: Sequence[FakeTensor], result: Any) -> None:
        several = isinstance(result, list)
        made = []
        for one in result if several else [result]:
            if type(one) is not FakeTensor or not self._is_plain(one) or any(one is read for read in reads):
                return
            storages = [storage_id(read) for read in reads]
            source = storages.index(storage_id(one)) if storage_id(one) in storages else None
            shape, stride, offset = tuple(one.shape), one.stride(), int(one.storage_offset())
            made.append(_Made(shape, stride, offset, one.dtype, one.fake_device, source))
        self._known[key] = made if several else made[0]

    def _make(self, made: _Made, reads: Sequence[FakeTensor]) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            elem = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.source is not None:
                elem.set_(reads[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        return self._fake(elem, made.device)


_PLAIN_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@functools.cache
def _makes_by_shapes(op: OpOverload) -> bool:
    """Whether an op may be one whose result has a shape that follows from its arguments' alone."""
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags)
    return op.namespace in ("aten", "prims") and not op._schema.is_mutable and not depends


class _QuickNode(fx.Node):
    """A node that is made without checks of its call, and whose attributes but two are set like any object's."""

    __init__ = _NodeBase.__init__  # whoever makes one gives it its arguments

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("name", "op", "target"):  # by which the graph finds it
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)


class _QuickTable(_FindNodesLookupTable):
    """Finds nodes by their targets' identity, since PyTorch works out an op's hash in Python."""

    def _key(self, node: fx.Node) -> tuple[str, Any]:
        return (node.op, id(node.target) if node.op == "call_function" else None)

    def find_nodes(self, *, op: str, target: Any = None) -> list[fx.Node]:
        if op == "call_function":
            return list(self.table[op, id(target)])  # type: ignore[index]
        return list(super().find_nodes(op=op, target=target))


class QuickGraph(fx.Graph):
    """A graph in which making a node takes a quarter of the time, and all else is as in `fx.Graph`, names included.

    What is left out: the search of each call's arguments for symbolic numbers, of which a traced graph has none, and
    the hooks of a module that owns the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._find_nodes_lookup_table = _QuickTable()
        self._insert = self._root._prepend  # type: ignore[assignment]

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """As `fx.Graph.create_node`."""
        if name is None:
            name = _name_of(target.__name__ if op == "call_function" else target)
        name = self._new_name(name)
        node: fx.Node = _QuickNode(self, name, op, target, type_expr)
        node._update_args_kwargs(args or (), kwargs or {})
        self._graph_namespace._obj_to_name[node] = name
        self._insert(node)
        key: Any = (op, id(target) if op == "call_function" else None)  # as `_QuickTable` has it
        self._find_nodes_lookup_table.table[key][node] = None
        self._len += 1
        return node

    def _new_name(self, wanted: str) -> str:
        """`wanted` if it is free, else its stem with the next free number, as `fx` counts."""
        used, counts = self._graph_namespace._used_names, self._graph_namespace._base_count
        stem, written = _stem_and_number(wanted)
        if not stem or wanted in _illegal_names:
            return str(self._graph_namespace.create_name(wanted, None))
        number = counts.get(stem, 0) if written is None or wanted in used else written
        name = wanted
        while name in used:
            number += 1
            name = f"{stem}_{number}"
        used.add(name)
        counts[stem] = number
        return name


@functools.lru_cache(maxsize=1 << 16)
def _stem_and_number(name: str) -> tuple[str, int | None]:
    """The two parts of a node's name, such as `mm` and 3; an empty stem if it is no name."""
    found = re.fullmatch(r"([a-zA-Z_][0-9a-zA-Z_]*?)(?:_(\d+))?", name)
    return (found[1], None if found[2] is None else int(found[2])) if found else ("", None)


@functools.lru_cache(maxsize=4096)
def _name_of(target: str) -> str:
    """The name that `fx` wants for a node by its target's."""
    if target.startswith("__") and target.endswith("__"):
        target = target[2:-2]
    return str(_illegal_char_regex.sub("_", _snake_case(target)))


def new_fake_mode(allow_value_reads: bool = True, known: KnownOps | None = None) -> FakeTensorMode:
    """A fake tensor mode with static shapes, in which real tensors that a module holds on to may occur.

    Without `allow_value_reads`, an op whose result depends on a tensor's values (`.item()`, `nonzero`) raises where
    it is called instead of giving a symbol.  Modes that share `known` take less time.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes a second to import

    shape_env = ShapeEnv(allow_scalar_outputs=allow_value_reads, allow_dynamic_output_shape_ops=allow_value_reads)
    mode = FakeTensorMode(shape_env=shape_env, static_shapes=True, allow_non_fake_inputs=True)
    _QuickDispatch(mode, {} if known is None else known)
    return mode


def load_tracer() -> None:
    """Import what `capture_joint` needs of PyTorch, which takes a fourth of a second where nobody did before."""
    import torch._functorch.aot_autograd
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def capture_joint(module: nn.Module, inputs: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace `module(*inputs)`, whose parameters, buffers and inputs are fake, and its backward to one ATen graph.

    Placeholders carry an `AOTInput` in `node.meta["desc"]`, the output node a list of `AOTOutput` (or None).
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # takes seconds to import

    with (
        as_captured(mode),
        fx.traceback.preserve_node_meta(),
        _use_lazy_graph_module(True),  # graphs on the way are never run
        contextlib.ExitStack() as stack,  # left first: it puts back what it found, which is `as_captured`'s
    ):
        joint = aot_export_joint_with_descriptors(stack, module, inputs, {}, ignore_shape_env=True)
        return joint.graph_module


@contextlib.contextmanager
def as_captured(mode: FakeTensorMode) -> Iterator[None]:
    """A context in which a model's code takes the ways that it takes in `capture_joint`."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with (
            tracing(TracingContext(mode)),
            _compiling_state_context(),
            enable_python_dispatcher(),
            _corrected(),
            _force_original_view_tracking(True),  # a view that is written to is made anew by what made it
            _direct_checkpoint(),
            _quiet_fake_tensors(),
            _unchecked_distributions(),
        ):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextlib.contextmanager
def not_captured() -> Iterator[None]:
    """Inside `as_captured`, a context in which a model's code takes the ways that it takes when it is run."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


def function_modes() -> tuple[Any, ...]:
    """The modes that see functions of PyTorch's as they are called here, outermost first."""
    return tuple(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def as_outside_of_ops() -> Iterator[None]:
    """A context inside of an op's kernel in which ops work as outside of one: autograd records them, and a tensor that
    is changed in place counts that."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("Autograd") or name == "ADInplaceOrView":
            exclude = exclude.remove(key)
    include = include.add(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


@contextlib.contextmanager
def _corrected() -> Iterator[None]:
    """Take ops apart by `CORRECTIONS` where PyTorch's own way of taking them apart gives other numbers than they do, or
    reads values."""
    before = {op: dict(op.py_kernels) for op in CORRECTIONS}
    in_cpp = torch._C.DispatchKey.CompositeImplicitAutograd  # who has no kernel in Python is taken apart there
    try:
        for op, definition in CORRECTIONS.items():
            _set_python_kernels(op, dict.fromkeys(before[op] or [in_cpp], definition))
        yield
    finally:
        for op, kernels in before.items():
            _set_python_kernels(op, kernels)


def _set_python_kernels(op: OpOverload, kernels: Mapping[Any, Callable[..., Any]]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


def device_of(tensor: torch.Tensor) -> torch.device:
    """A tensor's device; of a fake one without the dispatch that asking it takes."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_dense_fake(value: object) -> bool:
    """Whether a value is a fake tensor of known sizes that is dense."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return False
    return all(type(n) is int for n in value.shape)


def is_plain_fake(value: object) -> bool:
    """Whether a value is a dense fake tensor of which no more is known than its sizes, strides, dtype and device.

    A complex one may stand for its conjugate.
    """
    return is_dense_fake(value) and value.constant is None and not value.dtype.is_complex  # type: ignore[attr-defined]


def meta_of(tensor: FakeTensor) -> torch.Tensor:
    """A tensor on the meta device of the size, strides and dtype of a fake one."""
    with _disable_current_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context outside of all dispatch modes, in which ops compute."""
    return _disable_current_modes()


@contextlib.contextmanager
def lists_by_items() -> Iterator[None]:
    """Let `tolist()` of a tensor that is being traced read its items, which modes see, as `FakeTensor`'s does: that of
    `FunctionalTensor` reads what it wraps."""
    own = FunctionalTensor.tolist
    FunctionalTensor.tolist = FakeTensor.tolist  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        FunctionalTensor.tolist = own  # type: ignore[method-assign]


def values_of(tensor: torch.Tensor) -> Any:
    """A real tensor's values as numbers in lists, read outside of all dispatch modes."""
    with real_tensors():
        return tensor.tolist()


def sequence_number() -> int:
    """The number that autograd gives to the next node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def autograd_nodes(roots: Iterable[Any]) -> list[Any]:
    """All nodes of an autograd graph that the nodes `roots` lead to, and these."""
    seen = set(roots)
    found = list(seen)
    for node in found:  # which grows
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        found += new
    return found


def current_autograd_node() -> Any:
    """The node of autograd's graph that this thread runs; None if it runs none."""
    return torch._C._current_autograd_node()


@functools.cache
def has_effects(op: OpOverload) -> bool:
    """Whether an op acts by something else than its result, so that AOTAutograd would keep its place."""
    from torch._higher_order_ops.effects import _get_effect

    return not op._schema.returns or _get_effect(op) is not None


def is_only_acting(function: object, harmless: Collection[OpOverload]) -> bool:
    """Whether a function is an op that has effects, and neither gives nor changes anything; but for `harmless` ones."""
    if isinstance(function, OpOverloadPacket):
        return any(is_only_acting(getattr(function, name), harmless) for name in function.overloads())  # type: ignore[no-untyped-call]
    if not isinstance(function, OpOverload) or function in harmless or function.namespace == "profiler":
        return False
    return has_effects(function) and not function._schema.is_mutable


def never_drop(op: OpOverload) -> None:
    """Let graphs keep calls of an op whose results nobody reads."""
    has_side_effect(op)


def has_backward_hooks(model: nn.Module) -> bool:
    """Whether a hook of some module acts on gradients."""
    return any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())


def is_custom_function(node: Any) -> bool:
    """Whether a node of autograd's graph belongs to a `torch.autograd.Function` of the user's."""
    return isinstance(node, BackwardCFunction)


def value_read(error: BaseException) -> tuple[str, str] | None:
    """How the model looked at the values of a tensor, if a trace failed because of that.

    Returns:
        What it wanted: a `condition`, a `number`, a `shape`, a `text` or an array of `numpy`; and the op that was to
        give it, or an empty text.
    """
    from sympy import Expr
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return ("number" if isinstance(error.cond, Expr) else "condition"), ""
    if isinstance(error, DynamicOutputShapeException):
        return "shape", str(error.func).removesuffix(".default")
    if isinstance(error, DataDependentOutputException):
        is_number = error.func is torch.ops.aten._local_scalar_dense.default
        return ("number", "") if is_number else ("condition", str(error.func).removesuffix(".default"))
    if isinstance(error, RuntimeError) and ".numpy() is not supported for tensor subclasses" in text:
        return "numpy", ""
    if isinstance(error, TypeError) and ("FunctionalTensor" in text or "FakeTensor" in text):
        return ("text" if "__format__" in text else "number"), ""
    return None


def is_value_missing(error: BaseException) -> bool:
    """Whether an op raised an error because a value that it reads is not there while a model is traced."""
    return isinstance(error, DataDependentOutputException)


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Keep PyTorch from printing a traceback of its own for an op that fails: the exception is what is reported."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Let `torch.distributions` take its arguments as they are, unless one asks it for a check: checks read values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def _direct_checkpoint() -> Iterator[None]:
    """Let reentrant checkpoints call their function directly: their backward calls `Tensor.backward`, which tracing
    cannot see.  (The other kind works by saved-tensor hooks, which AOTAutograd turns off.)"""

    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply  # uncovers the inherited one


def broadcast_coalesced(group: dist.ProcessGroup | None, tensors: list[torch.Tensor], num_bytes: int, src: int) -> None:
    """Overwrite `tensors` with those of rank `src`, many to a message of about `num_bytes`."""
    dist._broadcast_coalesced(group or dist.group.WORLD, tensors, num_bytes, src)  # type: ignore[attr-defined,arg-type]


def save_state_dict(
    values: dict[str, Any], writer: StorageWriter, planner: SavePlanner, group: dist.ProcessGroup | None, alone: bool
) -> None:
    """`torch.distributed.checkpoint.save` without its warning that there is but one process, which could only be
    silenced for all threads."""
    _save_state_dict(values, writer, group, no_dist=alone, planner=planner)


def job_store() -> Any:
    """The key-value store of the default process group, over a connection of its own: one that waits for a key holds up
    whoever shares its connection."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def timeout_of_default_group() -> timedelta:
    """What `init_process_group(timeout=…)` was given; other groups have PyTorch's own default unless they are told."""
    group = dist.group.WORLD
    timeout: timedelta = group._get_backend(next(iter(group._device_types))).options._timeout  # type: ignore[union-attr]
    return timeout


def forget_meshes() -> None:
    """Empty what `DTensor` keeps of device meshes: after `destroy_process_group` it would take one whose groups are
    gone for a new one that equals it."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def give_default_timeout(group: dist.ProcessGroup) -> None:
    """Make a group's collectives wait as long as those of the default one: groups of meshes wait half an hour."""
    backends = [group._get_backend(device_type) for device_type in group._device_types]
    for backend in backends:
        if backend.name() in ("gloo", "nccl"):
            backend._set_default_timeout(timeout_of_default_group())


def core_decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's own definitions of the given op packets in simpler ops, by overload."""
    return dict(get_decompositions(ops))


def registered_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's own definition of an op, if it has one."""
    return decomposition_table.get(op)


def wrapper_like(cls: type[torch.Tensor], tensor: torch.Tensor) -> Any:
    """A tensor of the class `cls`, with a dtype, a device and no values: ops on it call `cls.__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(cls, (), dtype=tensor.dtype, device=tensor.device)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory has been written to."""
    return tensor._version


def shares_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are views of one allocation; on the meta device too, where addresses say nothing."""
    return storage_id(left) == storage_id(right)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that names a tensor's allocation as long as that lives; on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def storage_users(tensor: torch.Tensor) -> int:
    """How many hold on to a tensor's memory, threads of PyTorch's own among them; this function is one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@contextlib.contextmanager
def allocator_events() -> Iterator[list[int]]:
    """Fills the list, on leaving, with what PyTorch's CPU allocator gave (bytes) and took back (negative), in order.

    Garbage is collected first, so that memory from before is not taken for memory given back.
    """
    gc.collect()
    sizes: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield sizes
    result = profile.profiler.kineto_results
    events = [event for event in result.events() if event.name() == "[memory]"]
    sizes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def fsdp_memory_peaks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[torch.Tensor, ...],
    step: Callable[[], None],
    num_steps: int,
) -> list[int]:
    """Peak bytes on the CPU in each of `num_steps` calls, by PyTorch's tracker for modules under `fully_shard`."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)
    peaks = []
    with tracker:
        for _ in range(num_steps):
            step()
            peaks.append(int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]))
            tracker.reset_mod_stats()
    return peaks


@contextlib.contextmanager
def fake_process_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """The default process group is one of `num_ranks` in which nobody answers: one rank can run alone in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def around_calls(model: nn.Module, around: Callable[[str], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While active, every call of a module of `model`, its hooks included, runs inside `around(path of the module)`.

    A pair of hooks would not do: while tracing, `Module.__call__` does not run `always_call` hooks after an exception.
    """

    def wrapped(module: nn.Module, path: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with around(path):
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        return call

    before = [(module, vars(module).get("_compiled_call_impl")) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            vars(module)["_compiled_call_impl"] = wrapped(module, path)
        yield
    finally:
        for module, compiled in before:
            if compiled is None:
                vars(module).pop("_compiled_call_impl", None)
            else:
                vars(module)["_compiled_call_impl"] = compiled


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of `local` with the mesh, placements, global shape and strides of `like`.

    `DTensor.from_local` does the same, but works out and hashes the layout anew: some 100 µs for each tensor.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """A context in which calls skip autograd's dispatch, which collectives do in slow Python even under `no_grad`."""
    return torch._C._AutoDispatchBelowAutograd()
