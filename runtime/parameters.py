"""A model's parameters as `DTensor`s: made from the values in memory, moved in place, checked before each call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import broadcast_coalesced
from autopar.errors import InputError, PlanError, StaleModelError
from autopar.mesh import Mesh
from autopar.placement import Sharding, describe_sharding
from autopar.plan import Storage
from autopar.runtime.control import ControlGroup
from autopar.runtime.sharding import device_placements, shard_tensor

_BROADCAST_BYTES = 256 * 2**20  # DDP's default: large enough for bandwidth, small enough for memory


@dataclass(frozen=True)
class Layout:
    """Where parameters lie: the mesh of a plan, the process groups behind it, and this rank's place in it.

    Attributes:
        mesh: the logical mesh.
        device_mesh: the live mesh with the same axes.
        rank: this rank's number in the mesh, in row-major order.
        device: where this rank's parts are held.
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    rank: int
    device: torch.device


@dataclass
class _Slot:
    """One parameter, under all the names that share it."""

    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    parameter: DTensor
    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    sharding: Sharding


class ShardedParameters:
    """The parameters of a model, replaced in the model by `DTensor` parameters of the same names.

    Every rank holds the whole model when this is made.  If the ranks' values differ, rank 0's win, as in
    DistributedDataParallel; they are compared by checksum first, so equal models (same seed, same checkpoint) cost no
    traffic.
    """

    def __init__(
        self, model: nn.Module, control: ControlGroup, layout: Layout, shardings: Mapping[str, Sharding]
    ) -> None:
        self._model = model
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    owners.setdefault(id(parameter), []).append((name, module, attribute))
        _check_real(model)
        _share_values([*parameters.values(), *model.buffers()], control, layout.device)
        self._slots = [self._shard(parameter, owners[key], layout, shardings) for key, parameter in parameters.items()]
        for module in model.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None and buffer.device != layout.device:
                    module._buffers[attribute] = buffer.to(layout.device)
        self._shape = _module_shape(model)

    def _shard(
        self,
        full: nn.Parameter,
        owners: list[tuple[str, nn.Module, str]],
        layout: Layout,
        shardings: Mapping[str, Sharding],
    ) -> _Slot:
        names = tuple(name for name, _, _ in owners)
        sharding = _sharding_of(names, shardings)
        with torch.no_grad():
            parameter = _to_parameter(full.detach(), sharding, layout, full.requires_grad)
        for _, module, attribute in owners:
            module._parameters[attribute] = cast(nn.Parameter, parameter)
        places = tuple((module, attribute) for _, module, attribute in owners)
        return _Slot(names, places, parameter, full.requires_grad, parameter.shape, parameter.dtype, sharding)

    def move(self, layout: Layout, shardings: Mapping[str, Sharding]) -> None:
        """Move replicated parameters to planned places, keeping each parameter object (an optimizer may hold it)."""
        for slot in self._slots:
            self._check(slot, during_planning=True)
            sharding = _sharding_of(slot.names, shardings)
            with torch.no_grad():
                moved = _to_parameter(slot.parameter.to_local(), sharding, layout, slot.parameter.requires_grad)
            torch.utils.swap_tensors(slot.parameter, moved)  # type: ignore[no-untyped-call]
            slot.sharding, slot.requires_grad = sharding, slot.parameter.requires_grad
        self._shape = _module_shape(self._model)

    @property
    def by_name(self) -> dict[str, DTensor]:
        """Every name, those of tied parameters too -> the parameter."""
        return {name: slot.parameter for slot in self._slots for name in slot.names}

    @property
    def shardings(self) -> dict[str, Sharding]:
        """Every name -> where it rests."""
        return {name: slot.sharding for slot in self._slots for name in slot.names}

    @property
    def any_trained(self) -> bool:
        """Whether any parameter asks for a gradient."""
        return any(slot.parameter.requires_grad for slot in self._slots)

    def check(self) -> None:
        """Compare the model with what was planned.

        Raises:
            StaleModelError: if a parameter was replaced, resized, cast, frozen or unfrozen, or modules came or went.
        """
        for slot in self._slots:
            self._check(slot)
        found = _module_shape(self._model)
        if found != self._shape:
            raise StaleModelError(
                f"the model had {self._shape[0]} modules with {self._shape[1]} parameters and {self._shape[2]} buffers "
                f"when it was planned, and has {found[0]}, {found[1]} and {found[2]} now: {_AGAIN}"
            )

    def _check(self, slot: _Slot, during_planning: bool = False) -> None:
        name, parameter = slot.names[0], slot.parameter
        for module, attribute in slot.owners:
            found = module._parameters.get(attribute)
            if cast(object, found) is not parameter:
                what = (
                    "no parameter" if found is None else f"another {type(found).__name__} of shape {list(found.shape)}"
                )
                raise StaleModelError(
                    f"parameter {name!r} was replaced after planning: expected the DTensor of shape {list(slot.shape)} "
                    f"that autopar made, found {what}; {_AGAIN}, or change its values in place"
                )
        if parameter.shape != slot.shape or parameter.dtype != slot.dtype:
            raise StaleModelError(
                f"parameter {name!r} changed after planning: expected {list(slot.shape)} {slot.dtype}, found "
                f"{list(parameter.shape)} {parameter.dtype}; {_AGAIN}"
            )
        if not during_planning and parameter.requires_grad != slot.requires_grad:
            raise StaleModelError(
                f"parameter {name!r} changed after planning: expected requires_grad={slot.requires_grad}, found "
                f"{parameter.requires_grad}; freeze or unfreeze before planning: {_AGAIN}"
            )


_AGAIN = "call autopar.parallelize again on a fresh model"


def full_to_placed(full: Tensor, like: DTensor, sharding: Sharding, layout: Layout) -> DTensor:
    """A whole tensor, the same on every rank, as a DTensor that lies like `like`."""
    local = shard_tensor(full, sharding, layout.mesh, layout.rank).to(layout.device)
    return _to_dtensor(local, like.shape, sharding, layout)


def storage_shardings(storage: Mapping[str, Storage]) -> dict[str, Sharding]:
    """Where each parameter of a plan rests."""
    return {name: one.sharding for name, one in storage.items()}


def wrap_gradient(local: Tensor, parameter: DTensor) -> DTensor:
    """A local gradient as a DTensor that lies like its parameter."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _to_parameter(full: Tensor, sharding: Sharding, layout: Layout, requires_grad: bool) -> DTensor:
    local = shard_tensor(full, sharding, layout.mesh, layout.rank).to(layout.device)
    if local.numel() != full.numel() or not local.is_contiguous():
        local = local.clone(memory_format=torch.contiguous_format)  # own memory: the whole tensor can be freed
    parameter = nn.Parameter(_to_dtensor(local, full.shape, sharding, layout), requires_grad=requires_grad)
    return cast(DTensor, parameter)  # it is one: `Parameter` only marks the tensor that it is given


def _to_dtensor(local: Tensor, shape: torch.Size, sharding: Sharding, layout: Layout) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    placements = device_placements(sharding, layout.mesh)
    return DTensor.from_local(local, layout.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _sharding_of(names: Sequence[str], shardings: Mapping[str, Sharding]) -> Sharding:
    found = {name: shardings[name] for name in names if name in shardings}
    if not found:
        raise PlanError(
            f"the plan does not say how parameter {names[0]!r} rests; it knows {len(shardings)} parameters: was it "
            "made for another model?"
        )
    if len(set(found.values())) > 1:
        raise PlanError(f"the plan cuts one tied parameter in different ways: {', '.join(map(repr, found))}")
    return next(iter(found.values()))


def _check_real(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise InputError(
                    f"{kind} {name!r} is on the meta device and has no values to shard: materialise the model first "
                    "(model.to_empty(device=...) and its initialisation, or load a checkpoint), or plan without a mesh "
                    "of live ranks"
                )
            if isinstance(tensor, DTensor):
                raise InputError(
                    f"{kind} {name!r} is a DTensor already, placed {describe_sharding(*_describe(tensor))}: give "
                    "parallelize a plain model"
                )


def _describe(tensor: DTensor) -> tuple[Sharding, Mesh]:
    names = tensor.device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(tensor.device_mesh.ndim))
    return tuple(tensor.placements), Mesh(tuple(names), tuple(tensor.device_mesh.shape))


def _share_values(tensors: Sequence[Tensor], control: ControlGroup, device: torch.device) -> None:
    """Make every rank's values rank 0's, in place."""
    if control.num_ranks == 1 or not tensors:
        return
    described = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    if len(set(map(str, control.gather(described)))) > 1:
        raise StaleModelError(
            "the ranks hold different models: their parameters and buffers differ in number, shape or dtype; build the "
            "same model on every rank"
        )
    if all(t.device.type == "cpu" for t in tensors) and control.all_agree(_checksum(tensors)):
        return
    with torch.no_grad():
        on_device = [t.detach().to(device) for t in tensors]
        broadcast_coalesced(None, on_device, _BROADCAST_BYTES, 0)
        for target, value in zip(tensors, on_device, strict=True):
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)


def _checksum(tensors: Sequence[Tensor]) -> int:
    first, second = 0, 1
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        first, second = zlib.crc32(data, first), zlib.adler32(data, second)
    return (first << 29) ^ second


def _module_shape(model: nn.Module) -> tuple[int, int, int]:
    """How many modules, parameters and buffers there are, shared parameters counted at each place."""
    modules = list(model.modules())
    num_parameters = sum(p is not None for module in modules for p in module._parameters.values())
    return len(modules), num_parameters, sum(b is not None for module in modules for b in module._buffers.values())
