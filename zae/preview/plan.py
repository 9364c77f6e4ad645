"""`plan()`: preview a run without a side effect.

Steps and epochs are counted as `zae.loop.run` counts them; learning rates come from copies of the schedulers on an
optimizer without parameters, and the names of metrics from one batch, tried with a copy of the model.
"""

from __future__ import annotations

import copy
import html
import sys
import warnings
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zae.common import optim, random_state
from zae.common.device import leading_dimension
from zae.composition.introspect import seam, slots_of
from zae.data.gather import why_not
from zae.data.loader_state import facts_of
from zae.data.loaders import describe, length_of
from zae.data.reshard import own_batch_sampler
from zae.loop.history import split_prefix
from zae.loop.optimization import check_schedules
from zae.loop.progress import Every, RunLimits
from zae.preview import dry_run
from zae.preview.checkpoint_size import checkpoint_bytes
from zae.schedulers import is_plateau

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["RunPreview", "plan", "plan_lines"]

_LONGEST = 200_000  # Steps whose learning rates are simulated; longer runs show those of the first ones.


@dataclass
class RunPreview:
    """A preview of a run; it prints as a page, and shows as a table in a notebook.

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
        Samples of a batch, and of a step over all batches and processes.
    epoch_ends : list of (int, int)
        The epochs that this run ends, each with its last step.
    learning_rates : dict of str to list of float
        For each name, the rate that each step uses.
    validates_at, logs_at, saves_at : list of int
        The steps after which each happens; ``saves_at`` has the certain ones.
    metrics : list of str or None
        The names that ``monitor`` may have; None where they cannot be tried.
    bytes_per_checkpoint, disk : int
        The size of the largest checkpoint, and of all that are kept at once; 0 without a state manager.
    kernels : dict of str to str
        For each class of optimizer with a faster kernel that is not chosen, what to write; an add-on that uses that
        kernel removes the entry.
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
    epoch_ends: list[tuple[int, int]] = field(default_factory=list)
    learning_rates: dict[str, list[float]] = field(default_factory=dict)
    validates_at: list[int] = field(default_factory=list)
    logs_at: list[int] = field(default_factory=list)
    saves_at: list[int] = field(default_factory=list)
    metrics: list[str] | None = None
    monitor: str = ""
    bytes_per_checkpoint: int = 0
    disk: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # The bytes that a checkpoint has more within an epoch: so many, and so many for each step of it.
    _within_epoch: list[int] = field(default_factory=lambda: [0, 0], repr=False)

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps of this run."""
        return None if self.last_step is None else self.last_step - self.first_step + 1

    @property
    def effective_batch_size(self) -> int | None:
        """The number of samples of a step."""
        return None if self.batch_size is None else self.batch_size * self.batches_per_step * self.world_size

    def due(self, every: Every) -> list[int]:
        """List the steps of this run at which a cadence is due.

        Parameters
        ----------
        every : Every
            A cadence of steps, or of epochs: then the last steps of those epochs.

        Returns
        -------
        list of int
            Steps, in order.
        """
        if every.epochs is not None:
            return [step for epoch, step in self.epoch_ends if every.due_at_epoch(epoch)]
        assert every.steps is not None
        start = -(-self.first_step // every.steps) * every.steps
        stop = self.first_step - 1 if self.last_step is None else self.last_step
        return [step for step in range(start, stop + 1, every.steps) if step > every.after]

    def keep(self, every: Every, keep_last: int | None, keep_best: int, folder: Any) -> list[str]:
        """Set when checkpoints are saved, and the disk space that they take.

        Parameters
        ----------
        every : Every
            The cadence of saving; the end of the run is saved as well.
        keep_last, keep_best : int
            How many of the newest and of the best are kept; None keeps all.
        folder : str or Path
            Where they are.

        Returns
        -------
        list of str
            What is not certain.
        """
        end = [] if self.last_step is None else [self.last_step]
        self.saves_at = sorted({*self.due(every), *end})
        possible = len({*self.saves_at, *(self.validates_at if keep_best else [])})
        ends = [self.first_step - 1, *(step for _, step in self.epoch_ends)]
        steps = max((step - ends[bisect(ends, step) - 1] for step in self.saves_at), default=0)
        if steps:
            self.bytes_per_checkpoint += self._within_epoch[0] + steps * self._within_epoch[1]
        kept = possible if keep_last is None else min(possible, keep_last + keep_best)
        self.disk = self.bytes_per_checkpoint * (kept + 1)
        best = "; and where a validation is the best so far" if keep_best and self.validates_at else ""
        return [f"{kept} checkpoints are kept in {folder}, and there is one more while it is written{best}"]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the page: a title and a text each."""
        size = f" of {self.batch_size} samples" if self.batch_size else ""
        whole = f"; {self.effective_batch_size} samples a step" if self.effective_batch_size else ""
        of = f", of {self.batches_per_step} batches each" if self.batches_per_step > 1 else ""
        of += f" on {self.world_size} processes" if self.world_size > 1 else ""
        rows = [
            ("batches", f"{_count(self.batches_per_epoch)} an epoch{size}"),
            ("steps", f"{_count(self.steps_per_epoch)} an epoch, {_count(self.steps)} in this run{of}{whole}"),
            ("epochs", f"{len(self.epoch_ends)} ended, the last at step {self.epoch_ends[-1][1]}"
             if self.epoch_ends else "none ended"),
        ]  # fmt: skip
        rows += [(name, _curve(rates, self.first_step)) for name, rates in self.learning_rates.items()]
        rows += [("validates", _steps(self.validates_at)), ("logs", _steps(self.logs_at))]
        if self.bytes_per_checkpoint:
            rows.append(("saves", _steps(self.saves_at)))
            rows.append(("disk", f"{_size(self.disk)} at most, {_size(self.bytes_per_checkpoint)} a checkpoint"))
        if self.metrics is not None:
            rows.append(("monitor", f"{self.monitor}; there are {', '.join(self.metrics)}"))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(title) for title, _ in rows)
        return "\n".join([f"Plan of {self.name}", *(f"  {title:<{width}}  {text}" for title, text in rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{html.escape(t)}</th><td>{html.escape(x)}</td></tr>" for t, x in self.rows())
        return f"<table><caption>Plan of {html.escape(self.name)}</caption>{cells}</table>"


@seam
def plan_lines(self: Any, plan: RunPreview) -> list[str]:
    """Add to the preview of a run, and return notes to show below it; called by ``plan``."""
    return []


def plan(
    self: Trainer,
    n_epoch: int | None,
    loader: Iterable[Any],
    valid_loader: Any = None,
    *,
    max_steps: int | None = None,
    valid_every: Every | int | None = None,
    steps_per_epoch: int | None = None,
) -> RunPreview:
    """Preview what ``run`` would do with the same arguments, without changing anything.

    One batch of ``valid_loader`` (without it, of ``loader``) is tried with a copy of the model for the names of the
    metrics, unless loading a batch cannot be undone.

    Parameters
    ----------
    n_epoch, loader, valid_loader, max_steps, valid_every, steps_per_epoch
        As for ``run``.

    Returns
    -------
    RunPreview
        It prints as a page.

    Raises
    ------
    ConfigError, LoaderError
        What ``run`` would refuse.
    MonitorError
        No metric has the name ``monitor``.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     def test_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean(), "accuracy": 1.0}
    >>> model = torch.nn.Linear(2, 1)
    >>> trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    >>> trainer.plan(2, [torch.ones(8, 2)] * 5, [torch.ones(8, 2)])
    Plan of Task
      batches    5 an epoch of 8 samples
      steps      5 an epoch, 10 in this run; 8 samples a step
      epochs     2 ended, the last at step 10
      lr         0.1
      validates  at steps 5, 10
      logs       at steps 5, 10
      monitor    loss; there are loss, accuracy
    """
    limits = RunLimits.parse(n_epoch, loader, valid_loader, max_steps, valid_every, steps_per_epoch)
    run = self.current_run.new_call(loader, valid_loader, limits)
    preview = RunPreview(type(self).__name__, monitor=self.monitor)
    preview.world_size = max(self.world_size, len(self.devices))
    if self.mode == "test":
        return _of_evaluation(self, preview, loader)
    self.optimization.check_given()
    _count_steps(self, preview, run)
    preview.batch_size = _batch_size(loader)
    has_metric = valid_loader is not None or split_prefix(self.monitor)[0] == "train"
    _simulate(self, preview, run, has_metric)
    preview.logs_at = preview.due(self.log_every)
    preview.validates_at = [] if valid_loader is None else preview.due(limits.valid_every)
    _try_metrics(self, preview, loader, valid_loader)
    _measure_checkpoint(self, preview)
    preview.notes += self.plan_lines(preview)
    preview.notes += preview.kernels.values()
    if not preview.disk:
        preview.bytes_per_checkpoint = 0
    reason = why_not(loader) if self.fast_data else "fast_data=False"
    if reason is not None and hasattr(loader, "dataset"):
        preview.notes.append(f"batches come from the loader itself, not over the exact data path: {reason}")
    return preview


def _measure_checkpoint(trainer: Trainer, preview: RunPreview) -> None:
    """Set the size of a checkpoint, where the trainer saves any."""
    if "state" not in slots_of(type(trainer)):
        return
    if optim.has_lazy(trainer._module.parameters()):
        preview.notes.append("the model is lazy: what a checkpoint holds is known after its first batch")
        return
    settings = copy.copy(trainer.optimization.settings)
    try:
        sizes = checkpoint_bytes(trainer, preview, dry_run.states_after_a_step(trainer))
    except Exception as error:  # A state that cannot be saved is refused by the first save, which says more.
        preview.notes.append(f"the size of a checkpoint is not known: {type(error).__name__}: {error}")
        return
    finally:
        # A state notes the settings that it was read with; the run does so itself.
        trainer.optimization.settings = settings
    preview.bytes_per_checkpoint, *preview._within_epoch = sizes


def _of_evaluation(trainer: Trainer, preview: RunPreview, loader: Any) -> RunPreview:
    """Return the preview of a run in mode "test"."""
    preview.batches_per_epoch, preview.steps_per_epoch = length_of(loader), 0
    preview.last_step = trainer.progress_checker.step
    preview.first_step = preview.last_step + 1
    preview.notes.append("the mode is 'test': the loader is evaluated, and nothing is trained")
    return preview


def _count_steps(trainer: Trainer, preview: RunPreview, run: Run) -> None:
    """Count steps and epochs as `Run` and the loop do."""
    progress, (last_epoch, last_step), loader = trainer.progress_checker, run.bounds(), run.loader
    wrapped = loader
    if trainer.current_run.is_ready or "parallel" not in slots_of(type(trainer)):
        wrapped = trainer.wrap_loader(loader, True)
    else:
        preview.notes.append(
            "the loader is shared among the processes when they begin; the steps here are of one alone"
        )
    preview.batches_per_epoch, in_loader = length_of(wrapped), trainer.steps_in(wrapped)
    preview.steps_per_epoch = in_epoch = run.steps_per_epoch(wrapped)
    preview.first_step = progress.step + 1
    if in_epoch is None:
        preview.last_step = None if last_step == sys.maxsize else max(last_step, progress.step)
        preview.notes.append(f"the loader has no length ({describe(loader)}): where an epoch ends is not known")
        return
    if run.limits.steps_per_epoch is not None and (in_loader is None or in_epoch < in_loader):
        preview.batches_per_epoch = None if in_loader is None else preview.batches_per_epoch
    at_epoch, at_step, in_open = progress.epoch, progress.step, progress.epoch_step
    if run.leaves_epoch(wrapped):
        at_epoch, last_epoch, in_open = at_epoch + 1, last_epoch + 1, 0
    while at_epoch < last_epoch and at_step < last_step:
        left = in_epoch - in_open
        if at_step + left > last_step:
            at_step = last_step  # The run ends in the middle of an epoch.
            break
        at_epoch, at_step, in_open = at_epoch + 1, at_step + left, 0
        preview.epoch_ends.append((at_epoch, at_step))
    preview.last_step = at_step
    if len(preview.epoch_ends) > 1 and (own := own_batch_sampler(facts_of(loader))):
        preview.notes.append(
            f"each epoch is counted with the {preview.batches_per_epoch} batches that {own} has now; it may make "
            "another number of them later"
        )


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a batch, where the loader states it."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return leading_dimension(loader[0]) if isinstance(loader, (list, tuple)) and loader else None


def _simulate(trainer: Trainer, preview: RunPreview, run: Run, has_metric: bool) -> None:
    """Step copies of the schedulers as the run will."""
    total_steps = run.limits.total_steps(preview.steps_per_epoch)
    optimizers, schedulers = trainer.optimization.simulated(trainer.unwrap().parameters(), total_steps)
    steps, (in_epochs, in_steps) = preview.steps, run.spans(preview.steps_per_epoch)
    on_batch, is_set = trainer.scheduler_step_on_batch, trainer.optimization.is_step_explicit
    preview.notes += check_schedules(schedulers, on_batch, is_set, in_epochs, in_steps, has_metric)
    preview.kernels = optim.fused_hints(optimizers)
    stepped = [each for each in schedulers.values() if not is_plateau(each)]
    if len(stepped) < len(schedulers):
        preview.notes.append("ReduceLROnPlateau goes by the monitored metric: its cuts are not in the learning rates")
    ends = {step for _, step in preview.epoch_ends}
    last = 0 if steps is None else preview.first_step + min(steps, _LONGEST) - 1
    with random_state.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The copies of the schedulers see no optimizer step.
        for step in range(preview.first_step, last + 1):
            for name, rate in optim.learning_rates(optimizers).items():
                preview.learning_rates.setdefault(name, []).append(rate)
            if on_batch or step in ends:
                for scheduler in stepped:
                    scheduler.step()
    if steps is not None and steps > _LONGEST:
        preview.notes.append(f"the learning rates are those of the first {_LONGEST} steps")


def _try_metrics(trainer: Trainer, preview: RunPreview, loader: Any, valid_loader: Any) -> None:
    """Set the names of the metrics, and refuse a monitor that is not among them."""
    watches_training = valid_loader is None or split_prefix(trainer.monitor)[0] == "train"
    source = loader if watches_training else valid_loader
    split = "train" if watches_training else "valid"
    try:
        tried = dry_run.try_step(trainer, source, split)
        if tried.fault is not None:
            raise tried.fault
    except dry_run.NotTried as reason:
        preview.notes.append(f"{split} metrics are not known: {reason}")
        return
    except Exception as error:
        preview.notes.append(f"{split} metrics are not known: one batch was tried, and {type(error).__name__}: {error}")
        return
    preview.metrics = tried.names
    dry_run.check_monitor(trainer, tried.names, split)


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
    return ", ".join(f"{rates[at]:.4g} at step {first + at}" for at in sorted(places))


def _size(count: float) -> str:
    """Format a number of bytes with a unit."""
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
