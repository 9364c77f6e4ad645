"""Gangs of fairseq2, or objects that are written like them, as the ranks of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zae.distributed.launcher import launched_world
from zae.errors import ConfigError

__all__ = ["GangSizes", "read_gangs"]

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
        dimensions = {**data, "tensor": self.tensor} if self.tensor > 1 else data
        return dimensions if len(dimensions) > 1 or self.tensor > 1 else None


def read_gangs(root: Any, dp: Any = None, tp: Any = None, gangs: Any = None) -> GangSizes:
    """Return how gangs divide the ranks of this run; refuse gangs that do not fit them, or each other."""
    if gangs is not None:
        if root is not None:
            raise ConfigError("gangs and root_gang are both given; keep gangs, which has root, dp and tp")
        root = gangs.root
        dp = gangs.dp
        tp = gangs.tp
        if getattr(getattr(gangs, "pp", None), "size", 1) > 1:
            raise ConfigError("gangs.pp has several ranks; write task_of(unit).add_on(PipelineAddon), see its page")
    present = dist.get_world_size() if dist.is_initialized() else (launched_world() or (0, 1))[1]
    if root is None:
        if dp is not None or tp is not None or present > 1:
            raise ConfigError(
                f"{present} process{'es' * (present > 1)} started, and root_gang is missing, whose ranks dp_gang and "
                "tp_gang divide; write root_gang=setup_root_gang(device)"
            )
        return GangSizes()
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


def _pair(root: Any, dp: Any, tp: Any) -> tuple[Any, Any]:
    """Return the gangs that divide the ranks, where both are given; refuse those that do not."""
    ranks = list(range(root.size))
    rank = root.rank
    _check_ranks("root_gang", root, ranks, rank)
    if dp is None and tp is None:
        return None, None
    if dp is None or tp is None or dp.size * tp.size != root.size:
        sizes = [None if gang is None else gang.size for gang in (dp, tp)]
        raise ConfigError(
            f"dp_gang and tp_gang have {sizes[0]} and {sizes[1]} ranks, which do not divide the {root.size} of "
            f"root_gang; {_PARALLEL}"
        )
    first = rank - rank % tp.size
    _check_ranks("tp_gang", tp, ranks[first : first + tp.size], rank)
    _check_ranks("dp_gang", dp, ranks[rank % tp.size :: tp.size], rank)
    return dp, tp


def _check_ranks(name: str, gang: Any, wanted: list[int], rank: int) -> None:
    """Refuse a gang of other ranks, or in another order, than zae numbers them: those of ``tp_gang`` are neighbours."""
    ranks = [rank] if gang.size == 1 else dist.get_process_group_ranks(gang.as_process_group())
    if ranks != wanted or wanted.index(rank) != gang.rank:
        raise ConfigError(
            f"{name} of rank {rank} has the ranks {ranks}, in which it is number {gang.rank}; here they are {wanted}, "
            f"since neighbouring ranks divide tensors. {_PARALLEL[0].upper()}{_PARALLEL[1:]}"
        )
