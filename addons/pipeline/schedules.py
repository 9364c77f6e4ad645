"""The schedules of torch.distributed.pipelining: which rank computes which stages, and for how long it waits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from zae.errors import ConfigError, did_you_mean

__all__ = ["SCHEDULES", "Schedule"]

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
    given : str, type or callable
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
            counts = [f"{each} stage{'s' * (each > 1)}" for each in (count, needed)]
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
