"""How many stages there are, which rank has which, and what a plan says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from zae.addons.pipeline.chain import Chain
from zae.addons.pipeline.schedules import Schedule
from zae.errors import ConfigError

__all__ = ["Arrangement", "check_split"]

_SHOWN = 5
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_split(split: Any) -> Any:
    """Return the option ``split``; refuse what names no stages."""
    is_paths = isinstance(split, (list, tuple)) and all(isinstance(path, str) for path in split)
    is_count = isinstance(split, int) and not isinstance(split, bool) and split > 0
    if not (split is None or callable(split) or is_count or (is_paths and split)):
        raise ConfigError(
            f"split={split!r}; give paths of modules, as split=['layers.4'], the number of stages, or a function of "
            "model and number"
        )
    return split


class Arrangement:
    """The stages of a pipeline and their ranks.

    Parameters
    ----------
    split : list of str, int, callable or None
        The option of this name.
    schedule : Schedule
        How the stages take turns.
    per_rank, micro_batches : int or None
        The options ``stages_per_rank`` and ``pipeline_microbatches``.
    ranks : int
        How many ranks a pipeline has.
    """

    def __init__(
        self, split: Any, schedule: Schedule, per_rank: int | None, micro_batches: int | None, ranks: int
    ) -> None:
        self.split = split
        self.schedule = schedule
        self.ranks = ranks
        option = f"stages_per_rank={per_rank}"
        if per_rank is None and isinstance(split, (int, list, tuple)):
            stages = split if isinstance(split, int) else len(split) + 1
            per_rank = stages // ranks
            option = f"split={split!r} on {ranks} ranks"
            if stages % ranks or not per_rank:
                raise ConfigError(
                    f"{option} gives {stages} stages, since the first one begins with the model; their number must be "
                    "a multiple of the ranks of a pipeline"
                )
        per_rank = schedule.stages_per_rank(per_rank, option)
        self.count = per_rank * ranks
        if isinstance(split, int) and split != self.count:
            raise ConfigError(
                f"split={split} is not {per_rank} stages on each of {ranks} ranks; leave split out, or write "
                f"split={self.count}"
            )
        self.micro_batches = micro_batches or self.count
        self.owners = schedule.ranks_of(self.count, ranks)

    def chain(self, model: nn.Module, trains: bool) -> Chain:
        """Return the stages of a model."""
        norms = [name for name, each in model.named_modules() if isinstance(each, _NORMS) and each.training]
        if norms and trains:
            raise ConfigError(
                f"{', '.join(norms[:_SHOWN])} is a batch normalization, whose statistics would be those of "
                "micro-batches; use GroupNorm or LayerNorm, call eval() of it before run(), or train with MultiGPUAddon"
            )
        return Chain(model, self.split, self.count)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of the pipeline."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def check_size(self, size: int) -> None:
        """Refuse batches that the micro-batches do not divide."""
        if size % self.micro_batches:
            raise ConfigError(
                f"a batch of {size} samples cannot be divided into pipeline_microbatches={self.micro_batches}; write "
                f"batch_size={-(-size // self.micro_batches) * self.micro_batches} in the DataLoader, or another "
                "number of micro-batches"
            )

    def describe(self, chain: Chain, size: Any) -> list[str]:
        """Return a line for the schedule, and one for each stage; ``size`` writes a number of bytes."""
        idle = self.schedule.idle_share(self.count, self.ranks, self.micro_batches)
        waits = "" if idle is None else f"; if all stages take as long, a rank waits for {idle:.0%} of a step"
        head = (
            f"{self.count} stages on {self.ranks} ranks, {self.schedule.name} with {self.micro_batches} micro-batches"
        )
        lines = [f"{head}{waits}"]
        for stage, rank in enumerate(self.owners):
            parameters = chain.parameters([stage])
            elements = sum(tensor.numel() for tensor in parameters)
            weight = size(sum(tensor.nbytes for tensor in parameters))
            where = f"stage {stage} (rank {rank} of the pipeline): {_roots(chain.names[stage])}"
            lines.append(f"{where}; {elements:,} parameters, {weight}")
        return lines


def _roots(names: Iterable[str]) -> str:
    """Name the modules of a stage by the beginnings of the names of its tensors."""
    roots: Sequence[str] = list(dict.fromkeys(_root(name) for name in names))
    return ", ".join(roots[:_SHOWN]) + (f" to {roots[-1]}" if len(roots) > _SHOWN else "")


def _root(name: str) -> str:
    head, *rest = name.split(".")
    return f"{head}.{rest[0]}" if len(rest) > 1 and rest[0].isdigit() else head
