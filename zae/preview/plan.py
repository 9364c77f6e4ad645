"""`plan()`: predict what a run will do, without running it.

Steps and epochs are counted as `zae.loop.run` counts them; learning rates are those of copies of the schedulers on an
optimizer without parameters; the names of metrics come from one batch, tried with a copy of the model.
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
from zae.loop import scheduling
from zae.loop.history import split_prefix
from zae.loop.progress import Every
from zae.loop.run import Run, RunLimits, check_optimizer
from zae.loop.scheduling import simulated
from zae.preview import dry_run
from zae.preview.checkpoint_size import checkpoint_bytes
from zae.schedulers import is_plateau

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["RunPlan", "plan", "plan_lines"]

_LONGEST = 200_000  # Steps whose learning rates are simulated; longer runs show those of the first ones.


@dataclass
class RunPlan:
    """What a run will do; it prints as a page, and shows as a table in a notebook.

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
        How many loader batches make a step; the last one of an epoch may have fewer.
    batch_size, effective_batch_size : int or None
        Samples of a batch, and of a step over all batches and processes.
    epoch_ends : list of (int, int)
        The epochs that this run ends, each with its last step.
    learning_rates : dict of str to list of float
        For each name, the rate that each step uses.
    validates_at, logs_at, saves_at : list of int
        The steps after which that happens; ``saves_at`` are those that are certain.
    metrics : list of str or None
        The names that ``monitor`` may have; None where they cannot be tried.
    bytes_per_checkpoint, disk : int
        The size of the largest checkpoint, and the room that all of them take at once; 0 without a state manager.
    kernels : dict of str to str
        For each class of optimizer whose faster kernel nobody has chosen, what to write; an add-on that steps by that
        kernel takes it out.
    notes : list of str
        What add-ons have to say, and what is not certain.
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
        """Add the steps of checkpoints, and their size.

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
        """List the lines of the page, each with its title."""
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
def plan_lines(self: Any, plan: RunPlan) -> list[str]:
    """Add to the plan of a run, and return further notes; called by ``plan``."""
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
) -> RunPlan:
    """Return what ``run`` with the same arguments would do; nothing is changed.

    One batch of ``valid_loader`` (without one, of ``loader``) is tried with a copy of the model, to learn the names of
    the metrics; where loading a batch cannot be undone, it is left out.

    Parameters
    ----------
    n_epoch, loader, valid_loader, max_steps, valid_every, steps_per_epoch
        As for ``run``.

    Returns
    -------
    RunPlan
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
    run = Run(self, loader, valid_loader, limits)
    made = RunPlan(type(self).__name__, monitor=self.monitor)
    made.world_size = max(self.world_size, len(self.devices))
    if self.mode == "test":
        return _of_evaluation(self, made, loader)
    check_optimizer(self)
    _count_steps(self, made, run)
    made.batch_size = _batch_size(loader)
    has_metric = valid_loader is not None or split_prefix(self.monitor)[0] == "train"
    _simulate(self, made, run, has_metric)
    made.logs_at = made.due(self.log_every)
    made.validates_at = [] if valid_loader is None else made.due(limits.valid_every)
    _try_metrics(self, made, loader, valid_loader)
    _measure_checkpoint(self, made)
    made.notes += self.plan_lines(made)
    made.notes += made.kernels.values()
    if not made.disk:
        made.bytes_per_checkpoint = 0
    reason = why_not(loader) if self.fast_data else "fast_data=False"
    if reason is not None and hasattr(loader, "dataset"):
        made.notes.append(f"batches come from the loader itself, not over the exact data path: {reason}")
    return made


def _measure_checkpoint(trainer: Trainer, made: RunPlan) -> None:
    """Add the size of a checkpoint, if the trainer saves any."""
    if "state" not in slots_of(type(trainer)):
        return
    if optim.are_lazy(trainer._module.parameters()):
        made.notes.append("the model is lazy: what a checkpoint holds is known after its first batch")
        return
    settings = copy.copy(trainer.optimization.settings)
    try:
        sizes = checkpoint_bytes(trainer, made, dry_run.states_after_a_step(trainer))
    except Exception as error:  # A state that cannot be saved is refused by the first save, which says more.
        made.notes.append(f"the size of a checkpoint is not known: {type(error).__name__}: {error}")
        return
    finally:
        # A state notes the settings that it was read with; the run does so itself.
        trainer.optimization.settings = settings
    made.bytes_per_checkpoint, *made._within_epoch = sizes


def _of_evaluation(trainer: Trainer, made: RunPlan, loader: Any) -> RunPlan:
    """Return the plan of a run in mode "test"."""
    made.batches_per_epoch, made.steps_per_epoch = length_of(loader), 0
    made.last_step = trainer.progress_checker.step
    made.first_step = made.last_step + 1
    made.notes.append("the mode is 'test': the loader is evaluated, and nothing is trained")
    return made


def _count_steps(trainer: Trainer, made: RunPlan, run: Run) -> None:
    """Count steps and epochs as `Run.begin` and the loop do."""
    progress, (last_epoch, last_step), loader = trainer.progress_checker, run.bounds(), run.loader
    wrapped = loader
    if trainer.current_run.is_ready or "parallel" not in slots_of(type(trainer)):
        wrapped = trainer.wrap_loader(loader, True)
    else:
        made.notes.append("the loader is shared among the processes when they begin; the steps here are of one alone")
    made.batches_per_epoch, in_loader = length_of(wrapped), trainer.steps_in(wrapped)
    made.steps_per_epoch = in_epoch = run.steps_per_epoch(wrapped)
    made.first_step = progress.step + 1
    if in_epoch is None:
        made.last_step = None if last_step == sys.maxsize else max(last_step, progress.step)
        made.notes.append(f"the loader has no length ({describe(loader)}): where an epoch ends is not known")
        return
    if run.limits.steps_per_epoch is not None and (in_loader is None or in_epoch < in_loader):
        made.batches_per_epoch = None if in_loader is None else made.batches_per_epoch
    at_epoch, at_step, in_open = progress.epoch, progress.step, progress.epoch_step
    if run.leaves_epoch(wrapped):
        at_epoch, last_epoch, in_open = at_epoch + 1, last_epoch + 1, 0
    while at_epoch < last_epoch and at_step < last_step:
        left = in_epoch - in_open
        if at_step + left > last_step:
            at_step = last_step  # The run ends in the middle of an epoch.
            break
        at_epoch, at_step, in_open = at_epoch + 1, at_step + left, 0
        made.epoch_ends.append((at_epoch, at_step))
    made.last_step = at_step
    if len(made.epoch_ends) > 1 and (own := own_batch_sampler(facts_of(loader))):
        made.notes.append(f"each epoch is counted with the {made.batches_per_epoch} batches that {own} has now; it may "
                          "make another number of them later")  # fmt: skip


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a batch, if the loader knows."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return leading_dimension(loader[0]) if isinstance(loader, (list, tuple)) and loader else None


def _simulate(trainer: Trainer, made: RunPlan, run: Run, has_metric: bool) -> None:
    """Simulate the learning rates with copies of the schedulers."""
    optimizers, schedulers = simulated(trainer, run.limits.total_steps(made.steps_per_epoch))
    steps, (in_epochs, in_steps) = made.steps, run.spans(made.steps_per_epoch)
    on_batch, is_set = trainer.scheduler_step_on_batch, trainer.optimization.is_step_explicit
    made.notes += scheduling.check_schedules(schedulers, on_batch, is_set, in_epochs, in_steps, has_metric)
    made.kernels = optim.fused_hints(optimizers)
    stepped = [each for each in schedulers.values() if not is_plateau(each)]
    if len(stepped) < len(schedulers):
        made.notes.append("ReduceLROnPlateau goes by the monitored metric: its cuts are not in the learning rates")
    ends = {step for _, step in made.epoch_ends}
    last = 0 if steps is None else made.first_step + min(steps, _LONGEST) - 1
    with random_state.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The copies of the schedulers see no optimizer step.
        for step in range(made.first_step, last + 1):
            for name, rate in optim.learning_rates(optimizers).items():
                made.learning_rates.setdefault(name, []).append(rate)
            if on_batch or step in ends:
                for scheduler in stepped:
                    scheduler.step()
    if steps is not None and steps > _LONGEST:
        made.notes.append(f"the learning rates are those of the first {_LONGEST} steps")


def _try_metrics(trainer: Trainer, made: RunPlan, loader: Any, valid_loader: Any) -> None:
    """Find the names of the metrics with one batch, and refuse an unknown monitor."""
    watches_training = valid_loader is None or split_prefix(trainer.monitor)[0] == "train"
    source = loader if watches_training else valid_loader
    split = "train" if watches_training else "valid"
    try:
        tried = dry_run.try_step(trainer, source, split)
        if tried.fault is not None:
            raise tried.fault
    except dry_run.NotTried as reason:
        made.notes.append(f"{split} metrics are not known: {reason}")
        return
    except Exception as error:
        made.notes.append(f"{split} metrics are not known: one batch was tried, and {type(error).__name__}: {error}")
        return
    made.metrics = tried.names
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
    """Format a learning rate over a run: one number, or its first, largest and last value."""
    if len(set(rates)) == 1:
        return f"{rates[0]:g}"
    peak = max(range(len(rates)), key=rates.__getitem__)
    places = dict.fromkeys([0, len(rates) // 4, len(rates) // 2, 3 * len(rates) // 4, len(rates) - 1, peak])
    return ", ".join(f"{rates[at]:.4g} at step {first + at}" for at in sorted(places))


def _size(count: float) -> str:
    """Format a number of bytes."""
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
