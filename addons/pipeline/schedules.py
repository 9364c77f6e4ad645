"""How many stages there are, which rank computes which and when, and how long it waits: schedules of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from zae.addons.pipeline.chain import Chain, chain_of
from zae.display.text import format_size
from zae.distributed.blocks import check_shapes, check_tables
from zae.errors import ConfigError, did_you_mean

__all__ = ["SCHEDULES", "Arrangement", "Schedule", "check_split"]

_SHOWN = 5
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": None,
    "LoopedBFS": None,
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""The schedules by name, with the number of stages that a rank must have."""

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Schedule:
    """How the stages take turns.

    Parameters
    ----------
    choice : str, type or callable
        A name of `SCHEDULES`; a schedule class of torch; or a function of the stages of a rank, the number of
        micro-batches and the loss function, which returns a schedule with ``scale_grads=False``.
    """

    def __init__(self, choice: Any) -> None:
        self._choice = choice
        if isinstance(choice, str):
            names = {name.lower(): name for name in SCHEDULES}
            if choice.lower() not in names:
                raise ConfigError(
                    f"pipeline_schedule={choice!r} is not known; available: {', '.join(SCHEDULES)}"
                    f"{did_you_mean(choice, SCHEDULES)}"
                )
            self.name = names[choice.lower()]
        elif callable(choice):
            self.name = getattr(choice, "__name__", type(choice).__name__).removeprefix("Schedule")
        else:
            raise ConfigError(f"pipeline_schedule={choice!r}; give a name, {', '.join(SCHEDULES)}, or a function")
        is_class = isinstance(choice, type)
        self.is_v_shaped = self.name in _V_SHAPED and (is_class or isinstance(choice, str))

    def stages_per_rank(self, count: int | None, option: str) -> int:
        """Return how many stages a rank has: what was asked for, if the schedule allows it."""
        needed = SCHEDULES.get(self.name) if isinstance(self._choice, (str, type)) else count or 1
        if count is not None and needed not in (None, count):
            counts = [f"{number} stage{'s' * (number > 1)}" for number in (count, needed)]
            raise ConfigError(
                f"{option} gives {counts[0]} to each rank, and the schedule {self.name} computes {counts[1]} there; "
                f"write pipeline_schedule={'1F1B' if count == 1 else 'Interleaved1F1B'!r}, or divide the model into "
                f"{counts[1]} for each rank"
            )
        return needed or count or 2

    def ranks_of(self, count: int, ranks: int) -> list[int]:
        """Return the rank of each stage."""
        if not self.is_v_shaped:
            return [stage % ranks for stage in range(count)]
        return [min(stage, count - 1 - stage) for stage in range(count)]

    def make(self, stages: Sequence[Any], count: int, loss: Callable[..., Any]) -> Any:
        """Return a schedule of torch for the stages of this rank."""
        from torch.distributed.pipelining import schedules

        kind = schedules.get_schedule_class(self.name) if isinstance(self._choice, str) else self._choice
        try:
            if not isinstance(kind, type):
                return self._check(kind([*stages], count, loss))
            first = next(iter(inspect.signature(kind).parameters))
            stages_held = stages[0] if first == "stage" else [*stages]
            return kind(stages_held, n_microbatches=count, loss_fn=loss, scale_grads=False)
        except ValueError as error:
            raise ConfigError(
                f"pipeline_schedule={self.name} with pipeline_microbatches={count}: {' '.join(str(error).split())} "
                "Leave pipeline_microbatches out, or write a multiple of the number of stages"
            ) from error

    def _check(self, schedule: Any) -> Any:
        if not hasattr(schedule, "step") or getattr(schedule, "scale_grads", None) is not False:
            raise ConfigError(
                f"pipeline_schedule: {self.name} returned {schedule!r:.60}; return a schedule of "
                "torch.distributed.pipelining that was made with scale_grads=False, since a step weighs its own losses"
            )
        return schedule

    def idle_share(self, count: int, ranks: int, micro_batches: int) -> float | None:
        """Return for which part of a step a rank waits, if all stages take as long; None where that is not known."""
        if SCHEDULES.get(self.name) != 1:
            return None
        planned = SimpleNamespace(num_stages=count, group_size=ranks, group_rank=0, stage_index=0, submod=nn.Identity())
        planned.is_first = True
        planned.is_last = count == 1
        self.make([planned], micro_batches, print)  # It refuses a number of micro-batches that it cannot order.
        return (ranks - 1) / (micro_batches + ranks - 1)


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
        stages = split if isinstance(split, int) else len(split) + 1 if isinstance(split, (list, tuple)) else None
        if per_rank is None and stages is not None:
            per_rank = max(1, stages // ranks)
            option = f"split={split!r} on {ranks} ranks"
        per_rank = schedule.stages_per_rank(per_rank, option)
        self.count = per_rank * ranks
        if stages not in (None, self.count):
            raise ConfigError(
                f"split={split!r} on {ranks} ranks gives {stages} stages, since the first one begins with the model, "
                f"and there are {per_rank} on each rank; name the {self.count - 1} modules that begin the others, "
                f"write split={self.count}, or change stages_per_rank"
            )
        self.micro_batches = micro_batches or self.count
        self.owners = schedule.ranks_of(self.count, ranks)

    def chain(self, model: nn.Module, trains: bool, pipelines: int) -> Chain:
        """Return the stages of a model; refuse one that has no such stages, or that several pipelines cannot train."""
        check_shapes(model)
        if pipelines > 1:
            check_tables(model)
        norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS) and module.training]
        if norms and trains:
            raise ConfigError(
                f"{', '.join(norms[:_SHOWN])} is a batch normalization, whose statistics would be those of "
                "micro-batches; use GroupNorm or LayerNorm, call eval() of it before run(), or train with MultiGPUAddon"
            )
        return chain_of(model, self.split, self.count)

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

    def describe(self, chain: Chain) -> list[str]:
        """Return a line for the schedule, and one for each stage."""
        idle = self.schedule.idle_share(self.count, self.ranks, self.micro_batches)
        waits = "" if idle is None else f"; if all stages take as long, a rank waits for {idle:.0%} of a step"
        micro_batches = f"{self.schedule.name} with {self.micro_batches} micro-batches"
        lines = [f"{self.count} stages on {self.ranks} ranks, {micro_batches}{waits}"]
        for stage, rank in enumerate(self.owners):
            parameters = chain.parameters([stage])
            elements = sum(tensor.numel() for tensor in parameters)
            weight = format_size(sum(tensor.nbytes for tensor in parameters))
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
