"""Check that the schedules of a run are as long as the run, in the unit that they are stepped by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import OneCycleLR

from zae.errors import ConfigError
from zae.schedulers.lengths import is_per_step, is_plateau, own_length, planned_length, steps_taken

__all__ = ["Span", "check_schedules"]


class Span(NamedTuple):
    """The part of a counter, of epochs or of optimizer steps, that a call of ``run`` covers."""

    start: int  # At the beginning of the call.
    present: int  # Now; after a resume it is larger.
    left: int | None  # Remaining; None is unknown.

    def totals(self) -> set[int]:
        """Return the length of this call, and the total at its end."""
        if self.left is None:
            return set()
        end = self.present + self.left
        return {end - self.start, end}


def check_schedules(
    schedulers: Mapping[str, Any], default: bool, is_set: bool, epochs: Span, steps: Span, has_metric: bool
) -> list[str]:
    """Refuse an invalid schedule before the first batch, and return texts of warnings."""
    warnings: list[str] = []
    if 0 in (epochs.left, steps.left):
        return warnings  # A finished script that is started again steps nothing.
    for name, scheduler in schedulers.items():
        place = f"scheduler {name} ({type(scheduler).__name__})"
        on_batch = is_per_step(scheduler, default)
        if on_batch and is_set and not default:
            raise ConfigError(
                f"{place} counts optimizer steps, and scheduler_step_on_batch=False is for schedulers that count "
                "epochs; leave that option out"
            )
        if is_plateau(scheduler):
            if not has_metric:
                raise ConfigError(
                    f"{place} needs a metric after each validation, and run() got no valid_loader; give "
                    "run(..., valid_loader=...), or monitor='train/loss'"
                )
            continue
        if isinstance(scheduler, OneCycleLR) and not on_batch:
            _check_cycle(place, scheduler, is_set, epochs, steps)
        _check_end(place, scheduler, on_batch, epochs, steps)
        warnings += _check_unit(place, scheduler, on_batch, is_set, epochs, steps)
    return warnings


def _check_cycle(place: str, scheduler: OneCycleLR, is_set: bool, epochs: Span, steps: Span) -> None:
    """Refuse a OneCycleLR that is stepped by epochs, unless the user asked for it and its length can be in epochs."""
    total = int(scheduler.total_steps)
    fits = steps_taken(scheduler) + (epochs.left or 0) == total or total in epochs.totals()
    if is_set and (fits or total not in steps.totals()):
        return
    line = "scheduler_step_on_batch=True"
    if steps.left is not None and total < steps.present + steps.left:
        line += f", and total_steps={steps.present + steps.left}"
    if not is_set:
        line += " (for a cycle that is counted in epochs: scheduler_step_on_batch=False)"
    raise ConfigError(
        f"{place} has total_steps={total} and would be stepped once an epoch; it is made to be stepped after each "
        f"optimizer step: write {line}"
    )


def _check_end(place: str, scheduler: Any, on_batch: bool, epochs: Span, steps: Span) -> None:
    """Refuse a schedule that ends before the run does."""
    longest = planned_length(scheduler)
    if longest is None:
        return
    unit = "optimizer steps" if on_batch else "epochs"
    planned = steps.left if on_batch else epochs.left
    taken = steps_taken(scheduler)
    if planned is None:
        limit = "run(..., max_steps=...)" if on_batch else "a number of epochs: run(n_epoch, ...)"
        raise ConfigError(
            f"{place} ends after {longest} steps, and the loader has no length to plan with; give "
            f"run(..., steps_per_epoch=...) or {limit}"
        )
    total = taken + planned
    if total <= longest:
        return
    after = f" after {taken}" if taken else ""
    factory = ""
    if hasattr(scheduler, "shape"):
        factory = f", zae.schedulers.{scheduler.shape}(..., total_steps={total})"
    instead = ""
    if on_batch and longest in epochs.totals():
        instead = ", or, if its steps are epochs, write scheduler_step_on_batch=False"
    elif on_batch and longest > taken:
        instead = f", or end the run earlier: run(..., max_steps={longest - taken})"
    elif not on_batch and longest > planned:
        instead = ", or did you mean scheduler_step_on_batch=True?"
    raise ConfigError(
        f"{place} ends after {longest} steps, but this run has {planned} {unit}{after}; create it with a length of "
        f"{total} steps{factory}{instead}"
    )


def _check_unit(place: str, scheduler: Any, on_batch: bool, is_set: bool, epochs: Span, steps: Span) -> list[str]:
    """Compare a schedule's own length with what it is stepped by, and with the other unit."""
    length = own_length(scheduler)
    used, unused = (steps, epochs) if on_batch else (epochs, steps)
    taken = 0 if used.left is None else steps_taken(scheduler) + used.left
    if length not in unused.totals() or length in {taken, *used.totals()}:
        return []
    if on_batch:
        return [
            f"{place} lasts {length} steps, as many as this run has epochs, and is stepped after each of its optimizer "
            "steps; if its steps are epochs, write scheduler_step_on_batch=False"
        ]
    lasts = f"{place} lasts {length} steps, as many as this run has optimizer steps,"
    if not is_set:
        raise ConfigError(
            f"{lasts} but would be stepped once an epoch; write scheduler_step_on_batch=True (or "
            f"scheduler_step_on_batch=False, if {length} epochs are meant)"
        )
    return [f"{lasts} but is stepped once an epoch; if these are meant, write scheduler_step_on_batch=True"]
