"""A model's parameters as `DTensor`s: made from the values in memory, moved in place, checked before each call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import broadcast_coalesced
from autopar.errors import InputError, PlanError, StaleModelError
from autopar.mesh import Mesh
from autopar.placement import Replicate, Shard, Sharding, describe_sharding
from autopar.plan import Storage
from autopar.runtime.control import ControlGroup
from autopar.runtime.live_mesh import Layout
from autopar.runtime.sharding import device_placements, shard_tensor
from autopar.runtime.stale_optimizers import mark_replaced

_BROADCAST_BYTES = 256 * 2**20  # DDP's default: large enough for bandwidth, small enough for memory


Rest = Callable[[Sequence[str], Tensor], Sharding]
"""Says how a parameter, given by its names and global shape, lies between steps."""


@dataclass
class _Slot:
    """One parameter, under all the names that share it."""

    names: tuple[str, ...]
    parameter: DTensor
    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding
    untouched: int | None = None
    """Of a parameter that was on the meta device: its version when it was made, without values."""

    @property
    def has_values(self) -> bool:
        """Whether something was written into the parameter since it was on the meta device."""
        if self.untouched is None or not local_part(self.parameter).numel():
            return True
        return _version(self.parameter) != self.untouched


@dataclass(frozen=True)
class _Place:
    """One module of the tree as it was when parameters were sharded."""

    path: str
    module: nn.Module
    children: tuple[tuple[str, nn.Module | None], ...]
    parameters: tuple[tuple[str, nn.Parameter | None], ...]


class ShardedParameters:
    """The parameters of a model, replaced in the model by `DTensor` parameters of the same names.

    Every rank holds the whole model when this is made, or has it on the meta device.  If the ranks' values differ, rank
    0's win, as in DistributedDataParallel; they are compared by checksum first, so equal models (same seed, same
    checkpoint) cost no traffic.  Of what is on the meta device each rank makes its part alone, without values.
    """

    def __init__(self, model: nn.Module, control: ControlGroup, layout: Layout, rest: Rest) -> None:
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
                    owners.setdefault(id(parameter), []).append((_join(prefix, attribute), module, attribute))
        _refuse_placed(model)
        tensors = [*parameters.values(), *model.buffers()]
        _share_values([tensor for tensor in tensors if not tensor.is_meta], control, layout.device)
        # Popped one by one, so that each whole parameter is freed as soon as its part is made.
        self._slots = [self._shard(parameters.pop(key), owners[key], layout, rest) for key in list(parameters)]
        self._empty_buffers: list[tuple[str, nn.Module, str, Tensor]] = []
        for path, module in model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is None or buffer.device == layout.device:
                    continue
                if buffer.is_meta:
                    held = torch.empty(buffer.shape, dtype=buffer.dtype, device=layout.device)
                    self._empty_buffers.append((_join(path, attribute), module, attribute, held))
                else:
                    held = buffer.to(layout.device)
                module._buffers[attribute] = held
        self._tree = [_Place(path, m, _children(m), tuple(m._parameters.items())) for path, m in model.named_modules()]

    def _shard(
        self,
        full: nn.Parameter,
        owners: list[tuple[str, nn.Module, str]],
        layout: Layout,
        rest: Rest,
    ) -> _Slot:
        names = tuple(name for name, _, _ in owners)
        sharding = rest(names, full)
        with torch.no_grad():
            parameter = _to_parameter(full.detach(), sharding, layout, full.requires_grad)
        for _, module, attribute in owners:
            module._parameters[attribute] = cast(nn.Parameter, parameter)
        version = _version(parameter) if full.is_meta else None
        mark_replaced(full, names[0])
        return _Slot(
            names, parameter, full.requires_grad, parameter.shape, parameter.dtype, parameter.device, sharding, version
        )

    def move(self, layout: Layout, rest: Rest) -> None:
        """Move parameters to planned places, one after the other, keeping each object: an optimizer may hold it."""
        shardings = [rest(slot.names, slot.parameter) for slot in self._slots]
        for sharding in shardings:
            device_placements(sharding, layout.mesh)  # refuse a bad plan before anything moves
        for slot, sharding in zip(self._slots, shardings, strict=True):
            meta = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
            with torch.no_grad():
                full = slot.parameter.full_tensor() if slot.has_values else meta
                moved = _to_parameter(full, sharding, layout, slot.parameter.requires_grad)
            untouched = None if slot.has_values else _version(moved)
            torch.utils.swap_tensors(slot.parameter, moved)  # type: ignore[no-untyped-call]
            slot.sharding, slot.untouched = sharding, untouched

    def move_state(self, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        """Put what an optimizer holds of parameters where these lie now."""
        for slot in self._slots:
            state = optimizer.state.get(slot.parameter, {})
            for key, value in state.items():
                if isinstance(value, DTensor):
                    local = _own_part(value.full_tensor(), slot.sharding, layout)
                    state[key] = _to_dtensor(local, slot.shape, slot.sharding, layout)

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

    @property
    def training_modes(self) -> bytes:
        """The `training` flag of every module."""
        return bytes(place.module.training for place in self._tree)

    def has_values(self, parameter: Tensor) -> bool:
        """Whether a parameter has any; see `without_values`."""
        return self._slot(parameter).has_values

    def write(self, full: Tensor, parameter: DTensor, layout: Layout) -> None:
        """Overwrite a parameter by a whole tensor, the same on every rank."""
        with torch.no_grad():
            parameter.copy_(full_to_placed(full, parameter, self._slot(parameter).sharding, layout))

    def _slot(self, parameter: Tensor) -> _Slot:
        return next(slot for slot in self._slots if slot.parameter is parameter)

    @property
    def without_values(self) -> list[str]:
        """Names of the parameters and buffers that were on the meta device, and that nothing was written into since."""
        self._empty_buffers = [
            (name, module, attribute, held)
            for name, module, attribute, held in self._empty_buffers
            if module._buffers.get(attribute) is held and not held._version
        ]
        empty = [slot.names[0] for slot in self._slots if not slot.has_values]
        return empty + [name for name, _, _, _ in self._empty_buffers]

    def check_values(self) -> None:
        """Refuse to run while something has no values.

        Raises:
            InputError: naming what came from the meta device and was never written.
        """
        if empty := self.without_values:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            raise InputError(
                f"{', '.join(empty[:5])}{more} came from the meta device and got no values since: give them some with "
                "pm.apply(initialise), which sees each module whole, or with autopar.load_checkpoint or "
                "pm.load_pretrained, which leave buffers that are not persistent to pm.apply"
            )

    def check(self, planned: bool = True) -> None:
        """Compare the model with what was planned; before planning, parameters may still be frozen or unfrozen.

        Raises:
            StaleModelError: if a parameter was replaced, resized, cast, moved, frozen or unfrozen, or a module came,
                went or was replaced.
        """
        for place in self._tree:
            if _children(place.module) != place.children:
                _raise_about_module(place)
            parameters = place.module._parameters
            if len(parameters) != len(place.parameters) or any(parameters.get(n) is not p for n, p in place.parameters):
                _raise_about_parameter(place)
        for slot in self._slots:
            parameter = slot.parameter
            if not planned:
                slot.requires_grad = parameter.requires_grad
            found = (parameter.shape, parameter.dtype, parameter.requires_grad, parameter.device)
            expected = (slot.shape, slot.dtype, slot.requires_grad, slot.device)
            if found != expected:
                raise StaleModelError(
                    f"parameter {slot.names[0]!r} changed after planning: expected {_describe_state(*expected)}, found "
                    f"{_describe_state(*found)}; make such changes first, then {_AGAIN}"
                )


def _children(module: nn.Module) -> tuple[tuple[str, nn.Module | None], ...]:
    return tuple(module._modules.items())


def _raise_about_module(place: _Place) -> NoReturn:
    before, now = dict(place.children), dict(_children(place.module))
    name = next(name for name in {**before, **now} if before.get(name) is not now.get(name))
    what = "was replaced" if name in before and name in now else "was removed" if name in before else "was added"
    raise StaleModelError(f"module {_join(place.path, name)!r} {what} after planning: {_AGAIN}")


def _raise_about_parameter(place: _Place) -> NoReturn:
    before, now = dict(place.parameters), place.module._parameters
    name = next(name for name in {**before, **now} if before.get(name) is not now.get(name))
    expected, found = (_describe_parameter(parameters.get(name)) for parameters in (before, now))
    raise StaleModelError(
        f"parameter {_join(place.path, name)!r} was replaced after planning: expected {expected}, found {found}; "
        f"change its values in place, or {_AGAIN}"
    )


def _describe_parameter(parameter: Tensor | None) -> str:
    return "no parameter" if parameter is None else f"a {type(parameter).__name__} of shape {list(parameter.shape)}"


def _describe_state(shape: torch.Size, dtype: torch.dtype, requires_grad: bool, device: torch.device) -> str:
    return f"{list(shape)} {dtype} on {device} with requires_grad={requires_grad}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_AGAIN = "call autopar.parallelize again on a fresh model"


def full_to_placed(full: Tensor, like: DTensor, sharding: Sharding, layout: Layout) -> DTensor:
    """A whole tensor, the same on every rank, as a DTensor that lies like `like`."""
    local = shard_tensor(full, sharding, layout.mesh, layout.rank).to(layout.device)
    return _to_dtensor(local, like.shape, sharding, layout)


def planned(storage: Mapping[str, Storage]) -> Rest:
    """Rest as a plan says."""

    def rest(names: Sequence[str], parameter: Tensor) -> Sharding:
        found = {name: storage[name].sharding for name in names if name in storage}
        if not found:
            raise PlanError(
                f"the plan does not say how parameter {names[0]!r} of shape {list(parameter.shape)} rests; it knows "
                f"{len(storage)} parameters: was it made for another model?"
            )
        if len(set(found.values())) > 1:
            raise PlanError(f"the plan cuts one tied parameter in different ways: {', '.join(map(repr, found))}")
        return next(iter(found.values()))

    return rest


def unplanned(layout: Layout) -> Rest:
    """Rest until there is a plan: where the values are if they need not move, else cut, for the model may not fit."""

    def rest(names: Sequence[str], parameter: Tensor) -> Sharding:
        whole = parameter.device.type == layout.device.type or parameter.dim() == 0
        return (Replicate() if whole else Shard(0),) * layout.mesh.num_axes

    return rest


def local_part(parameter: DTensor) -> Tensor:
    """What this rank holds of a parameter."""
    with torch.no_grad():
        return parameter.to_local()


def _version(parameter: DTensor) -> int:
    """Grows whenever something is written into a parameter, or by whatever way into this rank's part of it."""
    return parameter._version + local_part(parameter)._version


def _own_part(full: Tensor, sharding: Sharding, layout: Layout) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own if it is not all of it, so that the whole can be freed,
    and contiguous, as fused optimizers take it to be."""
    local = shard_tensor(full, sharding, layout.mesh, layout.rank)
    local = torch.empty_like(local, device=layout.device) if local.is_meta else local.to(layout.device)
    if local.numel() != full.numel() or not local.is_contiguous():
        local = local.clone(memory_format=torch.contiguous_format)
    return local


def _to_parameter(full: Tensor, sharding: Sharding, layout: Layout, requires_grad: bool) -> DTensor:
    local = _own_part(full, sharding, layout)
    parameter = nn.Parameter(_to_dtensor(local, full.shape, sharding, layout), requires_grad=requires_grad)
    return cast(DTensor, parameter)  # it is one: `Parameter` only marks the tensor that it is given


def _to_dtensor(local: Tensor, shape: torch.Size, sharding: Sharding, layout: Layout) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    placements = device_placements(sharding, layout.mesh)
    return DTensor.from_local(local, layout.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _refuse_placed(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
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
