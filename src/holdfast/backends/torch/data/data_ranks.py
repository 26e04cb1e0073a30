"""The data ranks: those ranks that read different samples."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from holdfast.backends.torch.private_layout import devices_of
from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The data ranks, and the place of this process among them."""

    rank: int = 0
    number: int = 1
    are_named: bool = False
    """Whether the caller gave a mesh or a group."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups whose sums, one after another, give the sum over all data ranks."""

    def require_current(self) -> None:
        """Refuse ranks that were counted before the process group was made.

        Raises:
            InvalidError: There are several ranks now, and each would read every sample.
        """
        if not self.groups and dist.is_initialized() and dist.get_world_size() > 1:
            raise InvalidError(
                f"holdfast.data was made before init_process_group, and {dist.get_world_size()} ranks train now; "
                "expected the samples to be divided. Call init_process_group first"
            )

    def total(self, value: float) -> float:
        """Return the sum of a value over all data ranks; collective where there are several."""
        if self.number == 1:
            return value
        kind = next(iter(sorted(devices_of(self.groups[0]), key=lambda device: device.type != "cpu")))
        summed = torch.tensor(value, dtype=torch.float64, device=kind.type)
        for group in self.groups:
            dist.all_reduce(summed, group=group)
        return float(summed.item())


def data_ranks_of(mesh: object, group: object) -> DataRanks:
    """Return the data ranks of a mesh whose dimensions all hold data, or of a group; all ranks without either.

    Raises:
        InvalidError: Both are given, this rank is not among them, or one is of another type.
    """
    if mesh is not None and group is not None:
        raise InvalidError("mesh and group are both given; expected one of them to name the data ranks. Leave one out")
    if mesh is not None:
        return _of_mesh(mesh)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidError(f"group is {type(group).__name__}; expected a ProcessGroup of this rank, or a mesh=")
    if not dist.is_initialized():
        ranks = os.environ.get("WORLD_SIZE", "")
        if ranks.isdecimal() and int(ranks) > 1:
            raise InvalidError(
                f"WORLD_SIZE={ranks}, but torch.distributed has no process group; expected one before the samples are "
                "divided among ranks. Call init_process_group first"
            )
        return DataRanks()
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return DataRanks(dist.get_rank(found), dist.get_world_size(found), group is not None, (found,))


def _of_mesh(mesh: object) -> DataRanks:
    if not isinstance(mesh, DeviceMesh):
        raise InvalidError(f"mesh is {type(mesh).__name__}; expected a DeviceMesh such as mesh['dp']")
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise InvalidError(
            f"mesh: rank {dist.get_rank()} is not in {mesh}; expected a mesh with this rank. Slice the mesh of all "
            "ranks: mesh['dp']"
        )
    rank = 0
    for coordinate, length in zip(coordinates, mesh.shape, strict=True):
        rank = rank * length + coordinate
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return DataRanks(rank, mesh.size(), True, groups)
