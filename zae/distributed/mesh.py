"""The dimensions along which ranks divide the work: sizes that a user gives, and the place of each rank in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zae.distributed.drift import in_time
from zae.errors import ConfigError, did_you_mean

__all__ = ["DATA", "DIMENSIONS", "Mesh", "check_mesh"]

DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")
"""The known dimensions, outermost first: ranks that differ in the last one are neighbours."""

DATA = ("replicate", "shard")
"""The dimensions whose ranks get different batches."""

_FILLERS = ("shard", "replicate", "tensor", "pipeline")
"""The dimensions that a mesh may leave out: the first of them takes the ranks that remain."""


def check_mesh(mesh: Any, dimensions: Sequence[str], owner: str) -> dict[str, int]:
    """Return the sizes that a user gave, in the order of `DIMENSIONS`; refuse what no add-on of the class divides."""
    if mesh is None:
        return {}
    if not isinstance(mesh, Mapping) or not all(type(size) is int and size > 0 for size in mesh.values()):
        raise ConfigError(f"mesh={mesh!r}; it must map dimensions to sizes, as in mesh={{'replicate': 2, 'shard': 4}}")
    for name in mesh:
        if name not in DIMENSIONS:
            raise ConfigError(
                f"mesh={dict(mesh)!r}: unknown dimension {name!r}; available: {', '.join(DIMENSIONS)}"
                f"{did_you_mean(str(name), DIMENSIONS)}"
            )
        if name not in dimensions and mesh[name] > 1:
            raise ConfigError(
                f"mesh={dict(mesh)!r}: no add-on of {owner} divides the work along {name!r}; its add-ons divide it "
                f"along {', '.join(dimensions)}. Leave {name!r} out, or add an add-on for it"
            )
    return {name: mesh[name] for name in DIMENSIONS if name in mesh}


class Mesh:
    """The ranks of a run, arranged along named dimensions.

    Parameters
    ----------
    requested : mapping
        Sizes by dimension, from `check_mesh`. One dimension that is left out gets the remaining ranks.
    dimensions : sequence of str
        The dimensions along which the add-ons divide the work.
    world : int
        The number of ranks.

    Raises
    ------
    ConfigError
        The sizes do not multiply to the number of ranks.

    Examples
    --------
    >>> mesh = Mesh({"tensor": 2}, ("replicate", "shard", "tensor"), 8)
    >>> mesh.sizes, mesh.dp_world_size, [mesh.dp_rank(rank) for rank in range(8)]
    ({'shard': 4, 'tensor': 2}, 4, [0, 0, 1, 1, 2, 2, 3, 3])
    """

    def __init__(self, requested: Mapping[str, int], dimensions: Sequence[str], world: int) -> None:
        sizes = dict(requested)
        product = math.prod(requested.values())
        filler = next((name for name in _FILLERS if name in dimensions and name not in sizes), None)
        if world > 1 and filler is not None and world % product == 0:
            sizes[filler] = world // product
        elif world > 1 and product != world:
            raise ConfigError(
                f"mesh={dict(requested)!r} is of {product} ranks, and this run has {world}; give sizes whose product "
                f"is {world}, or start {product} ranks"
            )
        self.sizes = {name: sizes[name] for name in DIMENSIONS if name in sizes} if world > 1 else {}
        self.world = world
        self.dp_world_size = math.prod(size for name, size in self.sizes.items() if name in DATA)

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each dimension."""
        coordinates = {}
        for name in reversed(self.sizes):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return coordinates

    def dp_rank(self, rank: int) -> int:
        """Return the number of a rank's share of the data."""
        place = self.place(rank)
        number = 0
        for name in self.sizes:
            number = number * self.sizes[name] + place[name] if name in DATA else number
        return number

    def build(self, device: torch.device, timeout: float) -> Any:
        """Return the DeviceMesh of torch; all ranks call it. Its process groups have this timeout."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.world).reshape(tuple(self.sizes.values()))
        rank = dist.get_rank()
        groups: list[Any] = []
        for axis in range(ranks.dim()):
            lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
            line_groups: list[Any] = (
                [dist.group.WORLD] if len(lines) == 1 else [_group(line, timeout) for line in lines]
            )
            groups.append(next(group for line, group in zip(lines, line_groups) if rank in line))
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=(*self.sizes,))
        return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=(*self.sizes,))


_groups: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _group(ranks: list[int], timeout: float) -> Any:
    """Return a process group of these ranks; trainers of one process share it, since each has a thread that polls."""
    groups = _groups.setdefault(dist.group.WORLD, {})
    if (*ranks, timeout) not in groups:
        groups[(*ranks, timeout)] = in_time(lambda: dist.new_group(ranks, timeout=timedelta(seconds=timeout)), timeout)
    return groups[(*ranks, timeout)]
