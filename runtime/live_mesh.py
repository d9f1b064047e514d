"""A plan's mesh on the live ranks: which process groups its axes have, and where this rank is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import give_default_timeout
from autopar.errors import MeshError
from autopar.mesh import Mesh


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


def layout_on(user: DeviceMesh, mesh: Mesh | None) -> Layout:
    """The live mesh with the axes of `mesh` over all of the user's ranks; one axis of them if `mesh` is not known yet.
    Its groups wait as long as the job's does.

    Raises:
        MeshError: if they differ in size.
    """
    order = user.mesh.flatten()
    mesh = mesh or Mesh(("ranks",), (order.numel(),))
    if mesh.num_ranks != order.numel():
        raise MeshError(f"the plan is for {mesh.num_ranks} ranks ({mesh}), the device mesh has {order.numel()}")
    if tuple(user.shape) == mesh.sizes and user.mesh_dim_names == mesh.names:
        device_mesh = user
    else:
        device_mesh = DeviceMesh(user.device_type, order.reshape(mesh.sizes), mesh_dim_names=mesh.names)
    for axis in range(device_mesh.ndim):
        give_default_timeout(device_mesh.get_group(axis))
    device = torch.device(user.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return Layout(mesh, device_mesh, user.get_rank(), device)


def check_covers(device_mesh: DeviceMesh) -> None:
    """Refuse a mesh that does not hold all ranks of the job in ascending order.

    Raises:
        MeshError: says which ranks it has.
    """
    world, ranks = torch.distributed.get_world_size(), device_mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(world)):
        raise MeshError(
            f"the device mesh has ranks {ranks}, but the job has {world}: give a mesh of all ranks, for instance "
            f'init_device_mesh("{device_mesh.device_type}", ({world},))'
        )
    if ranks != list(range(world)):  # a process group orders its ranks by number, whatever the mesh says
        raise MeshError(
            f"the device mesh has its ranks in the order {ranks}: they must ascend in row-major order, as "
            "init_device_mesh makes them; give the axes in another order instead of transposing the mesh"
        )
