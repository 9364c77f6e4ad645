"""What the trainer of fairseq2 does around its steps: cadences of steps and epochs, a profiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from zae.addon import AddOnBase
from zae.errors import ConfigError
from zae.loop.cadence import Every
from zae.loop.progress import NO_LIMIT
from zae.loop.step_output import StepOutput

__all__ = ["AnyOf", "RegimeAddon", "any_of", "every_of"]


@dataclasses.dataclass(frozen=True, repr=False)
class AnyOf(Every):
    """Several cadences together; `any_of` makes it."""

    parts: tuple[Every, ...] = ()

    def __repr__(self) -> str:
        """Return it as it is written in a script."""
        return f"any_of({', '.join(map(repr, self.parts))})"

    def due_at_step(self, step: int) -> bool:
        """Return whether one of them is due after this optimizer step."""
        return any(part.due_at_step(step) for part in self.parts)

    def due_at_epoch(self, epoch: int) -> bool:
        """Return whether one of them is due at the end of this epoch."""
        return any(part.due_at_epoch(epoch) for part in self.parts)


def any_of(*cadences: Every) -> Every:
    """Return the cadence that is due whenever one of several is: of steps, and of epochs.

    Parameters
    ----------
    *cadences : Every
        At least one.

    Returns
    -------
    Every
        For ``valid_every``, ``save_every``, ``save_weights_every`` and ``log_every``.

    Examples
    --------
    >>> from zae import Every
    >>> from zae.addons.fairseq2 import any_of
    >>> every = any_of(Every(steps=100), Every(epochs=1))
    >>> every.due_at_step(200), every.due_at_step(250), every.due_at_epoch(3)
    (True, False, True)
    """
    if not cadences or not all(isinstance(cadence, Every) for cadence in cadences):
        raise ConfigError(f"any_of{cadences!r}; give one or more of Every(steps=...) and Every(epochs=...)")
    if len(cadences) == 1:
        return cadences[0]
    steps = next((cadence.steps for cadence in cadences if cadence.steps is not None), NO_LIMIT)
    return AnyOf(steps=steps, parts=cadences)


def every_of(steps: int | None, after: int, epochs: int | None, after_epochs: int) -> list[Every]:
    """Return the cadences of fairseq2's arguments, which begin at the step, or epoch, ``after``."""
    cadences = [] if steps is None else [Every(steps=steps, after=max(0, after - 1))]
    return cadences if epochs is None else [*cadences, Every(epochs=epochs, after=max(0, after_epochs - 1))]


class RegimeAddon(AddOnBase):
    """Do around the steps what the trainer of fairseq2 does; `from_arguments` adds it where it is needed.

    A step whose validation is due by its number and by the end of its epoch is validated once. Where ``log_every``
    counts steps, a record has the metrics of the unit's ``metric_bag`` since the record before, over all ranks, and the
    row of an epoch has none of them.

    Parameters
    ----------
    profiler : object, optional
        One with ``step()``, which is called after each step, and a context of ``with`` around a run: a
        ``TorchProfiler`` of fairseq2, or a ``torch.profiler.profile``.

    Examples
    --------
    >>> import torch
    >>> from zae import Every
    >>> from zae.addons.fairseq2 import RegimeAddon, any_of
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))] * 4
    >>> trainer = PlainTask.add_on(RegimeAddon)(model, "cpu", optimizer=torch.optim.SGD)
    >>> metrics = trainer.run(1, batches, batches, valid_every=any_of(Every(steps=2), Every(epochs=1)))
    >>> [row["step"] for row in metrics["valid_metrics_history"]]
    [2, 4]
    """

    layer = "observe"
    outside = ("writes_records",)
    process_attributes = {"_is_profiling": False, "_published": {}}

    def __init__(self, *args: Any, profiler: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.profiler = profiler
        self._is_profiling = False
        self._published: dict[str, float] = {}  # The metrics of the unit, until the record of this step.

    @property
    def publishes_metrics(self) -> bool:
        """Whether the metrics of a unit are logged within epochs: ``log_every`` counts steps."""
        return hasattr(self, "publish_metrics") and self.log_every.steps not in (None, NO_LIMIT)

    def on_run_begin(self) -> None:
        """Start the profiler."""
        super().on_run_begin()
        if self.profiler is not None:
            self.profiler.__enter__()
            self._is_profiling = True

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Tell the profiler that a step has ended, and compute the metrics of the unit for its record."""
        super().on_step_end(outputs)
        if self.publishes_metrics and self.log_every.due_at_step(self.progress_checker.step):
            self._published = cast(Any, self).publish_metrics()
        if self._is_profiling:
            self.profiler.step()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of the unit to the record of a step."""
        if self._published and any(name.startswith("train/") for name in metrics):
            published = self._published
            self._published = {}
            metrics = {**metrics, **{f"train/{name}": value for name, value in published.items()}}
        super().log(metrics, step)

    def teardown(self) -> None:
        """Stop the profiler."""
        is_profiling = self._is_profiling
        self._is_profiling = False
        try:
            if is_profiling:
                self.profiler.__exit__(None, None, None)
        finally:
            super().teardown()

    def should_validate(self, is_due: bool) -> bool:
        """Do not validate again at the end of an epoch whose last step was validated."""
        rows = self.history.valid
        progress = self.progress_checker
        is_done = not progress.epoch_batch and bool(rows) and rows[-1]["step"] == progress.step
        return super().should_validate(is_due and not is_done)
