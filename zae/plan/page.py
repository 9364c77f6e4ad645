"""The preview of a run: what was found, and the page that shows it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from zae.display.text import number, terminal_columns, wrapped
from zae.loop.cadence import Every

__all__ = ["RunPreview"]


@dataclass
class RunPreview:
    """A preview of a run; it prints as a page.

    Attributes
    ----------
    name : str
        The class of the trainer.
    first_step, last_step : int or None
        The steps (optimizer steps, counted from 1 over all runs) that this run begins and ends with; None where
        the end is unknown.
    batches_per_epoch, steps_per_epoch : int or None
        None where the loader has no length.
    batches_per_step : int
        Loader batches in a step; the last step of an epoch may have fewer.
    batch_size, effective_batch_size : int or None
        Samples of a batch, and of a step over all batches and shares of the data.
    world_size, dp_world_size : int
        How many processes train, and how many of them get different batches.
    mesh : dict of str to int
        How many processes divide the work along each dimension; empty for one.
    leaves_out : bool
        Whether the last step of an epoch has too few samples for each process.
    epoch_ends : list of (int, int)
        The epochs that this run ends, each with its last step.
    learning_rates : dict of str to list of float
        For each name, the rate that each step uses.
    validates_at, logs_at, saves_at : list of int
        The steps after which each happens; ``saves_at`` has the certain ones.
    monitor : str
        The metric that decides which epoch is the best.
    notes : list of str
        Remarks of add-ons, and what is uncertain.
    """

    name: str
    first_step: int = 1
    last_step: int | None = None
    batches_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    batches_per_step: int = 1
    batch_size: int | None = None
    world_size: int = 1
    dp_world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    leaves_out: bool = False
    epoch_ends: list[tuple[int, int]] = field(default_factory=list)
    learning_rates: dict[str, list[float]] = field(default_factory=dict)
    validates_at: list[int] = field(default_factory=list)
    logs_at: list[int] = field(default_factory=list)
    saves_at: list[int] = field(default_factory=list)
    monitor: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps of this run."""
        return None if self.last_step is None else self.last_step - self.first_step + 1

    @property
    def effective_batch_size(self) -> int | None:
        """The number of samples of a step."""
        return None if self.batch_size is None else self.batch_size * self.batches_per_step * self.dp_world_size

    def due(self, every: Every) -> list[int]:
        """List the steps of this run at which a cadence is due: of epochs, the last steps of those epochs."""
        if parts := getattr(every, "parts", ()):  # Several cadences together.
            return sorted({step for part in parts for step in self.due(part)})
        if every.epochs is not None:
            return [step for epoch, step in self.epoch_ends if every.due_at_epoch(epoch)]
        assert every.steps is not None
        start = -(-self.first_step // every.steps) * every.steps
        stop = self.first_step - 1 if self.last_step is None else self.last_step
        return [step for step in range(start, stop + 1, every.steps) if step > every.after]

    def save(self, every: Every) -> None:
        """Set when checkpoints are certain to be saved: as often as ``every`` says, and at the end of the run."""
        end = [] if self.last_step is None else [self.last_step]
        self.saves_at = sorted({*self.due(every), *end})

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the page: a title and a text each."""
        size = f" of {self.batch_size} samples" if self.batch_size else ""
        samples = f"; {self.effective_batch_size} samples a step" if self.effective_batch_size else ""
        batches = f", of {self.batches_per_step} batches each" if self.batches_per_step > 1 else ""
        batches += f" on {self.world_size} processes" if self.world_size > 1 else ""
        ended = "none ended"
        if self.epoch_ends:
            ended = f"{len(self.epoch_ends)} ended, the last at step {self.epoch_ends[-1][1]}"
        rows = [
            ("batches", f"{_count(self.batches_per_epoch)} an epoch{size}"),
            ("steps", f"{_count(self.steps_per_epoch)} an epoch, {_count(self.steps)} in this run{batches}{samples}"),
            ("epochs", ended),
        ]
        rows += [(name, _curve(rates, self.first_step)) for name, rates in self.learning_rates.items()]
        rows += [("validates", _steps(self.validates_at)), ("logs", _steps(self.logs_at))]
        if self.saves_at:
            rows.append(("saves", _steps(self.saves_at)))
        if self.monitor:
            rows.append(("monitor", self.monitor))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(title) for title, _ in rows)
        columns = terminal_columns(sys.stdout)
        lines = [f"  {title:<{width}}  {text}" for title, text in rows]
        shown = [part for line in lines for part in wrapped(line, columns, width + 4)]
        return "\n".join([*wrapped(f"Plan of {self.name}", columns, 4), *shown])

    __repr__ = __str__


# ---------------------------------------------------------------------------------------------------- in words


def _count(value: int | None) -> str:
    return "an unknown number" if value is None else str(value)


def _steps(steps: list[int]) -> str:
    """Format a list of steps, shortened."""
    if not steps:
        return "never"
    if len(steps) <= 6:
        return f"at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"at steps {steps[0]}, {steps[1]}, {steps[2]}, ..., {steps[-1]} ({len(steps)} times)"


def _curve(rates: list[float], first: int) -> str:
    """Format the learning rates of a run: one number, or the first, the peak, the last and some between."""
    if len(set(rates)) == 1:
        return f"{rates[0]:g}"
    peak = max(range(len(rates)), key=rates.__getitem__)
    places = dict.fromkeys([0, len(rates) // 4, len(rates) // 2, 3 * len(rates) // 4, len(rates) - 1, peak])
    return ", ".join(f"{number(rates[at])} at step {first + at}" for at in sorted(places))
