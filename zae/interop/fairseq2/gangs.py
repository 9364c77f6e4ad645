"""Gangs of fairseq2, or objects that are written like them, as the ranks of a trainer and as a mesh of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zae.errors import ConfigError, kind_of
from zae.launch.spawn import launched_world

__all__ = ["GangSizes", "mesh_of", "read_gangs"]

_PARALLEL = "make them with gangs = setup_parallel_gangs(root_gang, tp_size=...)"


@dataclass(frozen=True)
class GangSizes:
    """How gangs divide the ranks: those of one ``tp_gang`` are neighbours."""

    world: int = 1
    data: int = 1
    tensor: int = 1
    sharded: int = 1  # How many ranks share one copy of the state, of those that get different batches.
    device: Any = None

    def mesh(self, is_sharding: bool) -> dict[str, int] | None:
        """Return the option ``mesh`` of engines; None where they need none."""
        data = {"shard": self.data} if self.data > 1 else {}
        if is_sharding and 1 < self.sharded < self.data:
            data = {"replicate": self.data // self.sharded, "shard": self.sharded}
        found = {**data, "tensor": self.tensor} if self.tensor > 1 else data
        return found if len(found) > 1 or self.tensor > 1 else None


def read_gangs(root: Any, dp: Any = None, tp: Any = None, gangs: Any = None) -> GangSizes:
    """Return how gangs divide the ranks of this run; refuse gangs that do not fit them, or each other."""
    if gangs is not None:
        if root is not None:
            raise ConfigError("gangs and root_gang are both given; keep gangs, which has root, dp and tp")
        root, dp, tp = (_attribute(gangs, name) for name in ("root", "dp", "tp"))
        if getattr(getattr(gangs, "pp", None), "size", 1) > 1:
            raise ConfigError("gangs.pp has several ranks; write task_of(unit).add_on(PipelineAddon), see its page")
    present = dist.get_world_size() if dist.is_initialized() else (launched_world() or (0, 1))[1]
    if root is None:
        _check_alone(dp, tp, present)
        return GangSizes()
    for name, gang in (("root_gang", root), ("dp_gang", dp), ("tp_gang", tp)):
        _check_gang(name, gang)
    if root.size != present:
        raise ConfigError(
            f"root_gang has {root.size} rank{'s' * (root.size > 1)}, and {present} process{'es' * (present > 1)} "
            f"{'were' if present > 1 else 'was'} started; "
            + (
                "give the gang of all of them, setup_root_gang(device), which is no FakeGang there"
                if root.size < present
                else f"start them: torchrun --nproc_per_node {root.size} script.py"
            )
        )
    dp, tp = _pair(root, dp, tp)
    sharded = getattr(getattr(gangs, "sdp", None), "size", 1)
    data = dp.size if dp is not None else root.size
    return GangSizes(root.size, data, tp.size if tp is not None else 1, sharded, torch.device(root.device))


def mesh_of(root_gang: Any, dp_gang: Any = None, tp_gang: Any = None) -> Any:
    """Return the mesh of torch with the dimensions ``"dp"`` and ``"tp"`` that gangs are; all ranks call it.

    The dimensions have the process groups of the gangs, so that nothing new is connected; one of a single rank gets a
    new group.

    Parameters
    ----------
    root_gang, dp_gang, tp_gang : object
        Gangs of fairseq2: ``rank``, ``size``, ``device`` and ``as_process_group()``. Without the last two, all ranks
        are those of ``"dp"``.

    Returns
    -------
    DeviceMesh
        ``mesh["tp"]`` for ``parallelize_module``, ``mesh["dp"]`` for ``fully_shard``.

    Raises
    ------
    ConfigError
        The gangs do not divide the ranks of the process group: their sizes, or the ranks in them, do not fit.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from zae.interop.fairseq2 import mesh_of
    >>> class FakeGang:
    ...     rank, size, device = 0, 1, torch.device("cpu")
    ...     def as_process_group(self):
    ...         raise RuntimeError("it has no process group")
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = mesh_of(FakeGang())
    >>> mesh.mesh_dim_names, mesh["tp"].size()
    (('dp', 'tp'), 1)
    >>> dist.destroy_process_group()
    """
    from torch.distributed.device_mesh import DeviceMesh

    if root_gang is None or not dist.is_initialized():
        raise ConfigError(
            "mesh_of needs gangs of processes that are connected; start the script with torchrun, and write "
            "root_gang = setup_root_gang(device)"
        )
    sizes = read_gangs(root_gang, dp_gang, tp_gang)
    ranks = torch.arange(sizes.world).reshape(sizes.data, sizes.tensor)
    groups = [_group_of(gang, size) for gang, size in ((dp_gang or root_gang, sizes.data), (tp_gang, sizes.tensor))]
    return DeviceMesh.from_group(groups, torch.device(root_gang.device).type, mesh=ranks, mesh_dim_names=("dp", "tp"))


def _group_of(gang: Any, size: int) -> Any:
    """Return the process group of a dimension; where it has one rank, one of this rank alone."""
    if size > 1:
        return gang.as_process_group()
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]  # Every rank takes part in each.
    return made[dist.get_rank()]


def _attribute(gangs: Any, name: str) -> Any:
    if not hasattr(gangs, name):
        raise ConfigError(f"gangs is {kind_of(gangs)} and has no {name}; {_PARALLEL}")
    return getattr(gangs, name)


def _check_alone(dp: Any, tp: Any, present: int) -> None:
    """Refuse parts of a root gang that is not there, and ranks without one: each would train on its own."""
    for name, gang in (("dp_gang", dp), ("tp_gang", tp)):
        if gang is not None:
            raise ConfigError(f"{name} is given without root_gang, whose ranks it divides; write root_gang=...")
    if present > 1:
        raise ConfigError(
            f"{present} processes were started, and root_gang is missing: each would train on its own; write "
            "root_gang=setup_root_gang(device)"
        )


def _check_gang(name: str, gang: Any) -> None:
    absent = [each for each in ("rank", "size", "device", "as_process_group") if not hasattr(gang, each)]
    if gang is not None and absent:
        raise ConfigError(f"{name} is {kind_of(gang)} and has no {', '.join(absent)}; give a Gang of fairseq2")


def _pair(root: Any, dp: Any, tp: Any) -> tuple[Any, Any]:
    """Return the gangs that divide the ranks, where both are given; refuse those that do not."""
    if (dp is None) != (tp is None):
        given, other = ("dp_gang", "tp_gang") if tp is None else ("tp_gang", "dp_gang")
        raise ConfigError(f"{given} is given without {other}; give both, or leave both out: {_PARALLEL}")
    if dp is None:
        _check_ranks("root_gang", root, list(range(root.size)), root.rank)
        return None, None
    if dp.size * tp.size != root.size:
        raise ConfigError(
            f"dp_gang has {dp.size} ranks and tp_gang {tp.size}, and root_gang has {root.size}, not "
            f"{dp.size * tp.size}; {_PARALLEL}"
        )
    rank, size = root.rank, tp.size
    _check_ranks("root_gang", root, list(range(root.size)), rank)
    _check_ranks("tp_gang", tp, list(range(rank - rank % size, rank - rank % size + size)), rank)
    _check_ranks("dp_gang", dp, list(range(rank % size, root.size, size)), rank)
    return dp, tp


def _check_ranks(name: str, gang: Any, wanted: list[int], rank: int) -> None:
    """Refuse a gang of other ranks, or in another order, than zae numbers them: those of ``tp_gang`` are neighbours."""
    found = [rank] if gang.size == 1 else dist.get_process_group_ranks(gang.as_process_group())
    if found != wanted or wanted.index(rank) != gang.rank:
        raise ConfigError(
            f"{name} of rank {rank} has the ranks {found}, in which it is number {gang.rank}; here they are {wanted}, "
            f"since neighbouring ranks divide tensors. {_PARALLEL[0].upper()}{_PARALLEL[1:]}"
        )
