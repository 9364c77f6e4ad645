"""Trainer: the training loop, and the hooks that add-ons override.

Read `Trainer.run`, `run_epoch`, `run_batch` and `gradients` first: they are the loop, and nothing else is. Each verb
that they call is a hook with a default of a few lines; other code lives in other files.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import random_state
from zae.arguments import Seed
from zae.arguments.constructor import (
    check_alone,
    check_devices,
    check_launch_precision,
    check_mode,
    check_model,
    check_same,
)
from zae.compose.calls import explained_call, of_class_or_instance
from zae.compose.composition import compose
from zae.compose.first_call import without_first_calls
from zae.compose.instance_checks import initial_values, without_test_step
from zae.compose.introspect import hook, slots_of, with_trait
from zae.compose.metaclass import TrainerMeta
from zae.data.gather import batches_of
from zae.data.loader_parts import set_epoch
from zae.data.loaders import length_of
from zae.data.position import LoaderPosition
from zae.device import can_copy_async, exchange_current, parse_device, to_device
from zae.errors import ConfigError, TaskError
from zae.loop.cadence import Every
from zae.loop.epoch_log import EpochLog, plain_numbers
from zae.loop.evaluation import Evaluation, evaluated_model, evaluation_weights, switch_mode
from zae.loop.first_step import FirstStep
from zae.loop.history import History
from zae.loop.limits import RunLimits
from zae.loop.metric_rows import Metrics, MetricsDict
from zae.loop.nonfinite import NonFiniteGuard
from zae.loop.own_loop import loader_of_epoch, without_loop
from zae.loop.processes import Processes
from zae.loop.progress import ProgressChecker
from zae.loop.run import Run
from zae.loop.step_output import StepOutput, copy_output, count_targets, explain_failure, read_output, sample_weight
from zae.loop.user_state import UserState
from zae.loop.validation import run_test_epoch
from zae.model.weights import without_wrappers
from zae.null_context import NULL_CONTEXT
from zae.optim import checks
from zae.optim.copies import mark_copied
from zae.optim.factories import call_factories, make_optimizer
from zae.optim.gradients import normalize
from zae.optim.optimization import Optimization
from zae.parts import Precision, SingleProcess, StepWindow
from zae.record.run_record import RunRecord

if TYPE_CHECKING:
    from zae.addon import AddOnBase, Composed
    from zae.checkpoint.weights import Weights
    from zae.description import Description
    from zae.explain import Text
    from zae.plan.page import RunPreview

__all__ = ["Trainer"]


def _of_part(part: str, name: str, doc: str) -> Any:
    """Return a property for a public attribute of a trainer that one of its parts holds."""

    def read(trainer: Any) -> Any:  # Not an attrgetter, which torch.compile cannot trace.
        return getattr(getattr(trainer, part), name)

    def write(trainer: Any, value: Any) -> None:
        setattr(getattr(trainer, part), name, value)

    return property(read, write, doc=doc)


class Trainer(Processes, metaclass=TrainerMeta):
    """A training loop with overridable hooks: subclass it, and define ``train_step`` and ``test_step``.

    Parameters
    ----------
    model : Module
        What is trained, or a function that returns it.
    device : str, torch.device, int or list of them
        "auto" takes one accelerator when there is one, else the CPU. A list needs a parallel add-on.
    mode : {"train", "test"}
        What ``run``, ``run_epoch`` and ``run_batch`` do.
    optimizer : Optimizer, callable, or a list or dict of them
        One or several, or functions that make them of the model's parameters; a function of ``model`` or of
        ``named_parameters`` gets the model itself, or this method of it, for groups by name. None is for mode "test".
        Do not call ``train`` and ``eval`` of schedule-free ones: evaluation, ``save_model`` and the weights in a
        checkpoint are those of its evaluation mode, and training continues from its training weights, bitwise.
    scheduler : LRScheduler, callable, or a list or dict of them, optional
        One or several, or functions that make them of the optimizer. A function of ``optimizer, total_steps`` gets the
        optimizer steps that the first call of ``run`` is planned to take; None where the loader has no length.
    log_bar : {"auto", "bar", "lines"} or bool
        How a run shows its progress, on standard error of rank 0. "bar" is a bar and a table. "lines" is a plain line
        for each epoch, for each validation within an epoch (at most one per second), and after each minute without one.
        "auto", and True, is the bar on a terminal, one output in a notebook, and lines elsewhere: in a pipe, a file, or
        CI. False shows nothing.
    scheduler_step_on_batch : bool, optional
        Step the schedulers after each optimizer step, as warm-up and OneCycleLR need, instead of after each epoch. None
        is False, except that a schedule as long as the run has optimizer steps is then refused before the first batch.
        Schedules of ``zae.schedulers.cosine`` and the like are stepped after each optimizer step, and
        ``ReduceLROnPlateau`` after each validation, whatever this says.
    gradient_clip : float
        The largest gradient norm, of each optimizer; 0 does not clip. The norm before clipping is logged as
        ``grad_norm``; ``math.inf`` only logs it.
    monitor : str
        The metric that decides which epoch is best, of the validation where there is one.
    monitor_mode : {"auto", "min", "max"}
        Whether smaller or larger is better; "auto" infers it from the metric's name.
    seed : int, optional
        Seeds Python, NumPy and torch when the trainer is set up, and before ``model`` is called where it is a
        function. A module that exists already has its weights, which no seed changes: give a function instead,
        ``Task(lambda: Net(), optimizer=torch.optim.AdamW, seed=0)``. A loop by hand is the same with
        ``torch.manual_seed(0)`` before the model is made, and again before the first epoch.
    log_every : Every or int, optional
        When ``log`` is called with the training metrics: steps, or ``Every(epochs=1)``, the default.
    on_nonfinite : {"raise", "skip", "warn"}
        What to do about a loss, or a gradient norm computed for ``gradient_clip``, that is not finite: raise before the
        optimizer steps, skip the step, or only warn.
    fast_data : bool
        Take each batch of a DataLoader over tensors in memory with one gather, bitwise as the loader does.
    keep_train_outputs : bool
        Whether ``log_train`` keeps what ``train_step`` returns besides numbers until the epoch ends, for
        ``metric_on_epoch_end``. What ``test_step`` returns is kept if that is overridden.

    Raises
    ------
    ConfigError, OptionError
        At construction, with the value found and what to write.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         inputs, targets = batch
    ...         return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}
    ...     def test_step(self, batch):
    ...         return self.train_step(batch)
    >>> model = torch.nn.Linear(2, 1)
    >>> trainer = Task(model, device="cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 10
    >>> metrics = trainer.run(2, batches)
    >>> metrics["step"], len(metrics["train_metrics_history"])
    (20, 2)
    """

    # The attributes of a trainer that no option stands for; what else an object has is the user's, and is saved.
    devices: list[torch.device]
    engine: SingleProcess
    optimization: Optimization
    history: History
    nonfinite: NonFiniteGuard
    progress_checker: ProgressChecker
    run_record: RunRecord
    loader_position: LoaderPosition
    user_state: UserState
    current_run: Run
    precision_part: Precision
    step_window: StepWindow
    _module: nn.Module
    _mode: str
    _in_training: list[nn.Module] | None
    _initial_values: dict[str, Any]

    replicated_options: ClassVar[Mapping[str, str]] = {
        "mode": "run",
        "gradient_clip": "clip",
        "scheduler_step_on_batch": "scheduler_step",
        "monitor": "check_better",
        "monitor_mode": "check_better",
        "log_every": "log",
        "on_nonfinite": "should_step",
        "keep_train_outputs": "metric_on_epoch_end",
    }

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        device: str | torch.device | int | Sequence[str | torch.device | int] = "auto",
        mode: str = "train",
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        log_bar: Literal["auto", "bar", "lines", True, False] = "auto",
        scheduler_step_on_batch: bool | None = None,
        gradient_clip: float = 0.0,
        monitor: str = "loss",
        monitor_mode: Literal["auto", "min", "max"] = "auto",
        seed: Seed | None = None,
        log_every: Every | int | None = None,
        on_nonfinite: Literal["raise", "skip", "warn"] = "raise",
        fast_data: bool = True,
        keep_train_outputs: bool = False,
    ) -> None:
        name = type(self).__name__
        slots = slots_of(type(self))
        takes_precision = with_trait(type(self), "takes_launch_precision", "precision") is not None
        check_launch_precision(name, takes_precision)
        self.devices = check_devices(parse_device(device), name, slots)
        self.device = self.devices[0]
        self.mode = mode
        self.engine = SingleProcess()  # An engine's add-on puts its own in.
        self.seed = seed
        self.model: Any = check_model(model, random_state.seeded(self.seed))
        self._module = self.model
        checks.check_optimizers(optimizer, scheduler, self._module, self.mode)
        self.log_bar = "auto" if log_bar is True else log_bar
        self.log_every = Every.parse(log_every, "log_every", Every(epochs=1))
        # The parts; docs/explanation/architecture.md says what each answers.
        self.optimization = Optimization(optimizer, scheduler, gradient_clip, scheduler_step_on_batch)
        self.history = History(
            monitor,
            monitor_mode,
            keep_train_outputs=keep_train_outputs,
            keep_test_outputs=type(self).metric_on_epoch_end is not Trainer.metric_on_epoch_end,
            owner=name,
        )
        self.nonfinite = NonFiniteGuard(on_nonfinite, self.optimization)
        self.progress_checker = ProgressChecker()
        self.run_record = RunRecord()
        self.loader_position = LoaderPosition(fast_data)
        self.user_state = UserState()
        self.current_run = Run(self)
        self.precision_part = Precision()  # An add-on for precision, or an engine, puts its own in.
        self.step_window = StepWindow()  # So does one that makes a step of several batches.
        self._in_training = None  # The modules that `toggle` puts back into training mode.
        self._initial_values = initial_values(self)

    @property
    def mode(self) -> str:
        """What ``run``, ``run_epoch`` and ``run_batch`` do, "train" or "test"; "test" in an evaluation."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = check_mode(mode)

    @classmethod
    def make_from(cls, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Return a trainer made by an add-on from the arguments of the constructor; None makes it as usual.

        An add-on overrides it where an argument asks for further add-ons, which the class does not have.

        Parameters
        ----------
        args : tuple
            What was given by position.
        options : mapping
            What was given by name.

        Returns
        -------
        Trainer or None
            A trainer of a class composed of this one and of further add-ons.
        """
        return None

    @classmethod
    def expand_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the constructor, which every ``__init__`` gets, with aliases expanded.

        It is called before anything is checked or made. An add-on overrides it for an option that sets options of
        other add-ons.
        """
        return dict(options)

    # ------------------------------------------------------------------------------------ what the user writes

    @abstractmethod
    def train_step(self, batch: Any) -> Mapping[str, Any] | Tensor:
        """Compute the loss of one batch; the trainer does the backward and the optimizer step.

        Parameters
        ----------
        batch : object
            A batch of the loader, on the trainer's device.

        Returns
        -------
        mapping
            ``"loss"``: a scalar tensor (or, for a dict of optimizers, a dict with one for each: it is differentiated by
            that optimizer's parameters only). ``"num_targets"``, optional: the count that the loss is the mean over;
            with it, every target has the same weight with accumulation and on several ranks. Other numbers are
            recorded, typed ones of ``zae.metrics`` as well. A loss alone is ``{"loss": loss}``.
        """

    def test_step(self, batch: Any) -> Mapping[str, Any] | Tensor | float:
        """Compute the metrics of one batch, under ``torch.no_grad()`` and in evaluation mode.

        A class that evaluates nothing leaves it out.

        Parameters
        ----------
        batch : object
            What the loader gave, on the trainer's device.

        Returns
        -------
        mapping
            Numbers are averaged by sample; those of a type of ``zae.metrics`` are combined as it says. Of several
            loaders, ``self.valid_name`` is the one of this batch. Anything else is kept for ``metric_on_epoch_end``
            where that is overridden, and freed when the evaluation ends. A number alone is ``{"loss": number}``.
        """
        raise without_test_step(type(self))

    def predict_step(self, batch: Any) -> Any:
        """Compute what `predict` and `inference` return for one batch, as ``test_step`` is called; by default it is.

        Parameters
        ----------
        batch : object
            What the loader gave, on the trainer's device.

        Returns
        -------
        mapping or Tensor
            Tensors with one row for each sample, by name. A tensor alone is ``{"output": tensor}``.
        """
        return self.test_step(batch)

    @hook
    def metric_on_epoch_end(self) -> Mapping[str, float]:
        """Return further metrics of an epoch, computed from ``log_train`` or ``log_test``.

        It is called at the end of each epoch of training, and of each evaluation; ``self.mode`` says which. When it
        asks a log for an entry that no step of that mode has recorded yet, it adds nothing to this epoch. What
        ``train_step`` returns beside numbers is kept only with ``keep_train_outputs=True``.

        Returns
        -------
        mapping
            Numbers by name.
        """
        return {}

    # ------------------------------------------------------------------------------------------------ the loop

    @explained_call("run(3, loader, valid_loader, max_steps=100): the number of epochs first, and the rest by name")
    def run(
        self,
        n_epoch: int | None,
        loader: Iterable[Any],
        valid_loader: Any = None,
        *,
        max_steps: int | None = None,
        valid_every: Every | int | None = None,
        steps_per_epoch: int | None = None,
        max_time: float | timedelta | None = None,
        limit_batches: int | tuple[int | None, int | None] | None = None,
        overfit_batches: int | None = None,
    ) -> MetricsDict:
        """Train for ``n_epoch`` epochs (or evaluate, in mode "test"), from where the last call of ``run`` ended.

        With ``resume="auto"`` a script that is started again continues the call it was in: a call trains ``n_epoch``
        epochs, however often its script was started.

        Parameters
        ----------
        n_epoch : int or None
            Epochs that this call trains; None, with ``max_steps`` or ``max_time``, is no limit.
        loader : iterable
            Batches; anything that can be iterated over once an epoch, with or without a length.
        valid_loader : iterable, or dict of them, optional
            Batches to evaluate.
        max_steps : int, optional
            Optimizer steps at most, in this call.
        valid_every : Every or int, optional
            When to evaluate: steps, or ``Every(epochs=1)``, the default.
        steps_per_epoch : int, optional
            Ends an epoch after so many optimizer steps; for streams that do not end.
        max_time : float or timedelta, optional
            Seconds after which the run ends: all ranks finish their step, the state is saved, and
            ``metrics["stop_reason"]`` is "max_time has passed". The time of this call in this process counts, so a
            resumed run has all of it again.
        limit_batches : int or (int, int), optional
            The first batches of each epoch that are used: of ``loader`` and of each ``valid_loader``, or, as a pair,
            of the one and of the others, where None is all. The order is that of the loader, new in each epoch where
            it shuffles. Several ranks share these batches; a stream that each rank reads itself is limited on each.
        overfit_batches : int, optional
            Train on the same first batches in each epoch: those of the dataset in its order, without shuffling, or of
            the list. The ``valid_loader`` is not limited. Dropout and random transforms draw as ever.

        Returns
        -------
        MetricsDict
            The history; it prints as a table.

        Raises
        ------
        ConfigError, LoaderError
            Before the first batch.
        """
        limits = RunLimits(n_epoch, max_steps, valid_every, steps_per_epoch, max_time, limit_batches, overfit_batches)
        limits.check(type(self), loader, valid_loader)
        check_alone(type(self).__name__, slots_of(type(self)))
        return cast("MetricsDict", self.launch(self._run, loader, valid_loader, limits))

    def _run(self, loader: Any, valid_loader: Any, limits: RunLimits) -> MetricsDict:
        """Run in the process that trains."""
        self.current_run.close()
        run = self.current_run.new_call(loader, valid_loader, limits)
        self.current_run = run
        with self.ready():
            if self.mode == "test":
                for _ in range(limits.n_epoch or 1):
                    run_test_epoch(run)
                return self.metrics
            run.begin()
            self.user_state.note_loaded(self)
            self.on_run_begin()
            run.resume()
            while run.has_more_epochs():
                self.user_state.keep_over_epoch_hooks(self)
                self.on_epoch_begin()
                # on_epoch_begin may load a state, which may be of the end of the call.
                if run.apply_pending_state() and not run.has_more_epochs():
                    break
                with loader_of_epoch(run) as its_loader:
                    self.run_epoch(its_loader)
                # Not where the run ends within the epoch, or continues from another state.
                is_epoch_open = self.progress_checker.epoch_batch > 0
                if not is_epoch_open and not run.continuation.is_due:
                    run.end_epoch()
            self.user_state.keep_over_validation(self)
            self.on_run_end()
            self.user_state.release()
        return self.metrics

    def run_epoch(self, loader: Iterable[Any]) -> Metrics:
        """Train (or, in mode "test", evaluate) one epoch, or what is left of the open one.

        An override calls ``super().run_epoch(loader)``, or makes the loop itself with the loader that ``run`` gives
        it: ``for batch in loader: self.run_batch(batch)``. Between two batches that loader logs, validates and saves
        what is due, and its end, or a ``break``, ends the epoch.

        Parameters
        ----------
        loader : iterable
            Batches.

        Returns
        -------
        Metrics
            The epoch's means.
        """
        self.current_run.set_up()
        if self.mode == "test":
            return Evaluation(self).epoch(loader)
        run = self.current_run
        loader = self.wrap_loader(without_loop(loader), True)
        run.open_epoch(loader)
        is_complete = True
        with self.epoch_context():
            batches = run.batches(loader)
            for batch in batches:
                self.run_batch(batch)
                if run.after_step():  # The epoch, or the run, ends before the loader does.
                    is_complete = run.ends_epoch(loader, batches)
                    break
        return run.close_epoch(loader, is_complete)

    def run_batch(self, batch: Any) -> None:
        """Make one optimizer step from a batch, or an accumulation window (in mode "test": evaluate one batch)."""
        run = self.current_run
        if not run.setup.is_done:  # Called by itself: nothing has set the trainer up, and no epoch was opened.
            run.set_up()
            if self.mode == "train":
                self.optimization.begin_training()
        if self.mode == "test":
            Evaluation(self).record_batch(batch)
            return
        if run.setup.watches_next_step:
            run.setup.watches_next_step = False
            # This method again, with some hooks watched; an override of it is called once.
            FirstStep(self).run_batch(partial(Trainer.run_batch, self, batch))
            return
        run.activity.batch = batch
        self.on_step_begin(batch)
        with self.batch_context():
            # Before the forward, which puts a NaN into the buffers too: a step that is left out gives them back.
            self.nonfinite.begin_step(self._module)
            outputs = [*map(StepOutput, self.gradients(batch))]
            # From here on the gradients are the true ones: the norm, the clipping and should_step go by these.
            self.unscale()
            self.clip()
            stepped = self.should_step(outputs) and self.optimizer_step()
            if stepped:  # A schedule counts the steps that were taken.
                self.scheduler_step("batch")
            # After the step and not before the next one: the memory of the gradients is free for the next forward.
            self.zero_grad()
        # A step that was left out counts as well: the batches are used, and the position in the data moves on.
        self.progress_checker.advance(len(outputs), not stepped)
        for step_dict, weight in outputs:
            self.logging(step_dict, weight)
        self.on_step_end(outputs)
        run.activity.batch = None

    @hook
    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Compute the gradient of the window's mean loss, and store it in every ``.grad``.

        Called by ``run_batch``. An add-on for an engine that does forward and backward in one (a pipeline) replaces
        it.

        Parameters
        ----------
        batch : object
            What ``run_batch`` was given.

        Returns
        -------
        list of (mapping, float)
            For each micro-batch, what ``train_step`` returned and its weight in the epoch's means.
        """
        micro_batches = self.micro_batches(batch)
        activity = self.current_run.activity
        count = len(micro_batches)
        outputs: list[tuple[Mapping[str, Any], float]] = []
        # The activity holds both, for error notes and for add-ons that count batches.
        for activity.micro_index, activity.batch in enumerate(micro_batches):
            with self.sync_context(activity.micro_index == count - 1):
                outputs.append(self.micro_step(self.to_device(activity.batch), count))
        self.normalize([values.get("num_targets") for values, _ in outputs])
        return outputs

    def ready(self) -> AbstractContextManager[None]:
        """Set the trainer up for the block, and tear it down afterwards; an error gets a note of where it happened.

        ``run``, ``evaluate`` and ``inference`` enter it themselves. Enter it around calls of ``run_epoch`` and
        ``run_batch`` of your own, in a search for a learning rate for instance: without it the trainer stays set up
        until ``teardown`` is called. Where the trainer is set up already it does nothing.

        Examples
        --------
        >>> import torch
        >>> from zae import Trainer
        >>> class Task(Trainer):
        ...     def train_step(self, batch):
        ...         return {"loss": self.model(batch).square().mean()}
        ...     test_step = train_step
        >>> model = torch.nn.Linear(2, 1)
        >>> trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with trainer.ready():
        ...     for batch in [torch.ones(4, 2)] * 3:
        ...         trainer.run_batch(batch)
        >>> trainer.progress_checker.step
        3
        """
        return self.current_run.scope()

    # ------------------------------------------------------------------------- the hooks of a step, in its order

    @hook
    def on_step_begin(self, batch: Any) -> None:
        """Called by ``run_batch`` before an optimizer step, with the batch, or the window, as the loader gave it."""

    @hook
    def batch_context(self) -> AbstractContextManager[None]:
        """Enclose an optimizer step, from its first forward to ``zero_grad``."""
        return NULL_CONTEXT

    @hook
    def micro_batches(self, batch: Any) -> Sequence[Any]:
        """Split a window into batches of the loader, each with its own forward and backward.

        Parameters
        ----------
        batch : object
            A batch of the loader, or the window that ``batches`` made of several.

        Returns
        -------
        sequence
            The batches; ``len()`` is asked first.
        """
        return (batch,)

    @hook
    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward of a micro-batch; ranks need to agree on gradients in the last one only."""
        return NULL_CONTEXT

    @hook
    def to_device(self, batch: Any) -> Any:
        """Move a batch to the trainer's device, without waiting for the copy where possible.

        Parameters
        ----------
        batch : object
            A batch of the loader: tensors in lists, tuples and dicts, or objects with a ``to`` method.

        Returns
        -------
        object
            What ``train_step`` gets.
        """
        return to_device(batch, self.device, self.loader_position.pinned and can_copy_async(self.device))

    @hook
    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Add the gradient of one micro-batch to every ``.grad``.

        Parameters
        ----------
        batch : object
            One batch of the loader, on the trainer's device.
        count : int
            The true number of micro-batches in the window.

        Returns
        -------
        (mapping, float)
            What ``train_step`` returned, and its weight in the epoch's means.
        """
        with self.forward_context():
            out = self.train_step(batch)
        try:
            output = read_output(out, batch, self.sample_weight, type(self), self.mode, self.count_targets)
            values = output[0]
            self.backward(self.scale_loss(values["loss"], values.get("num_targets"), count))
        except Exception as error:
            explain_failure(error, out, batch, type(self), self.optimizers)
            raise
        return copy_output(output, count > 1, with_outputs=self.log_train.keeps)

    @hook
    def forward_context(self) -> AbstractContextManager[None]:
        """Return a new context around one ``train_step`` or ``test_step``, not the backward: the place of autocast."""
        return NULL_CONTEXT

    # Hooks that `read_output` calls; they stand beside it, in step_output.py.
    sample_weight = sample_weight
    count_targets = count_targets

    @hook
    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Scale the loss of one micro-batch of a window: by ``num_targets`` where it is given, else by ``1 / count``.

        ``normalize`` divides the gradients by the sum of the targets. A single micro-batch is not scaled.
        """
        if count == 1 and (num_targets is None or self.engine.dp_world_size == 1):
            return loss
        if isinstance(loss, Mapping):  # Not self.scale_loss: an override scales all of them, once.
            return {key: Trainer.scale_loss(self, scalar, num_targets, count) for key, scalar in loss.items()}
        return loss / count if num_targets is None else loss * num_targets

    @hook
    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss to ``.grad``; one of several losses, to its own optimizer's parameters.

        Parameters
        ----------
        loss : Tensor, or dict of them
            What is differentiated; a dict has one loss for each optimizer.
        **kwargs : object
            Arguments of ``Tensor.backward``: ``retain_graph``, ``create_graph``, ``inputs``. An override passes them
            on to ``super()``.
        """
        self.optimization.backward(loss, **kwargs)

    @hook
    def normalize(self, num_targets: list[Any]) -> None:
        """Divide the gradients by the targets of the window over all ranks, when the steps counted them."""
        if num_targets != [None]:  # Most steps count none.
            # The ranks of one share of the data count the same targets.
            ranks = self.world_size if self.engine.dp_world_size > 1 else 1
            normalize(num_targets, self.optimization.parameters, self.reduce, ranks)

    @hook
    def unscale(self) -> None:
        """Divide the gradients by the loss scale: from here on they are the true ones."""

    @hook
    def clip(self) -> None:
        """Compute ``grad_norm``, and clip the gradients to ``gradient_clip``."""
        self.optimization.clip(self.engine.gradient_norm)

    @hook
    def should_step(self, outputs: Sequence[StepOutput]) -> bool:
        """Decide whether the optimizers step; by default ``on_nonfinite`` decides where loss or norm is not finite.

        Parameters
        ----------
        outputs : sequence of StepOutput
            One for each micro-batch: ``values``, what ``train_step`` returned; ``weight``; ``loss``; ``num_targets``.
            Tensors among the values are those of the step itself, for instance ``values["output"]``: keep a copy of
            what is needed later, for they are freed after ``on_step_end``.

        Returns
        -------
        bool
            False leaves the step out: it counts as skipped.
        """
        return self.nonfinite.should_step(outputs, self.progress_checker, self)

    @hook
    def optimizer_step(self) -> bool:
        """Step every optimizer.

        Returns
        -------
        bool
            False when one was skipped, as after an overflow in float16: schedulers and averages then wait.
        """
        stepped = True
        for optimizer in self.optimization.optimizers.values():
            stepped = self.step_one(optimizer) and stepped
        return stepped

    @hook
    def step_one(self, optimizer: Optimizer) -> bool:
        """Step one optimizer; return whether that took place."""
        optimizer.step()
        return True

    @hook
    def scheduler_step(self, when: str) -> None:
        """Step the schedulers that are due after an optimizer step ("batch") or an epoch ("epoch")."""
        self.optimization.scheduler_step(when)

    @hook
    def zero_grad(self) -> None:
        """Clear every gradient. An optimizer that overrides ``zero_grad`` is called as well."""
        self.optimization.zero_grad()

    @hook
    def logging(self, step_dict: Mapping[str, Any], weight: float = 1) -> None:
        """Record what a step returned in the log of the present mode; its numbers weigh ``weight`` in the means."""
        log = self.history.log_train if self.mode == "train" else self.history.log_test
        log.record(step_dict, weight)

    @hook
    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Called after a step was made or skipped, and logged.

        Parameters
        ----------
        outputs : sequence of StepOutput
            Those of `should_step`; tensors among the values are freed afterwards.
        """

    # ---------------------------------------------------------------------------------- the hooks around the step

    @hook
    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the loop, here or in the processes that an add-on starts."""
        return function(*args)

    @hook
    def setup(self) -> None:
        """Make everything ready on the device: side effects begin here, never in ``__init__``. Call super() first."""
        # Once in a process: a second call of run goes on in the streams where the first one ended.
        if self.seed is not None and not self.progress_checker.is_seeded:
            random_state.seed_everything(self.seed)
        self.progress_checker.is_seeded = True
        # Code of the user that names no index, .cuda() for instance, means the trainer's device.
        self.current_run.setup.previous_device = exchange_current(self.device)
        self.materialize(check_same(self.model, self.current_run.setup.wrapped_model, self._module))
        self.model = self.wrap_model(self._module)
        self.current_run.setup.wrapped_model = self.model
        # After the model: an engine may put other parameters in, which the optimizers then hold.
        self.optimization.build(self.build_optimizer, self.build_scheduler, self.wrap_optimizers)
        self.optimization.track(self._module)
        self.run_record.note_script(self)

    @hook
    def teardown(self) -> None:
        """Undo ``setup``; it is called after every run, in reverse order, also when ``setup`` failed half-way."""
        self.optimization.release()
        exchange_current(self.current_run.setup.previous_device)
        self.current_run.close()
        self.current_run = Run(self)
        self.model = self._module

    @hook
    def wrap_model(self, model: nn.Module) -> Any:
        """Return what ``train_step`` calls as ``self.model``; ``unwrap()`` stays the module that was given.

        Parameters
        ----------
        model : Module
            The model that was given, on its device.

        Returns
        -------
        callable
            The model, or an object around it that is called in the same way.
        """
        return model

    @hook
    def build_optimizer(self) -> Any:
        """Return the optimizers that were given, made of the model's parameters where they are factories."""
        return call_factories(self.optimizer, lambda name: self._module, Optimizer, "optimizer", make_optimizer)

    @hook
    def build_scheduler(self) -> Any:
        """Return the schedulers that were given, made of their optimizers where they are factories."""
        return self.optimization.make_schedulers(self.current_run.extent.total_steps)

    @hook
    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Return the loader to iterate over, for instance with a sampler for this rank.

        For training, ``set_epoch`` of the loader, its samplers and its dataset is called where they have it.

        Parameters
        ----------
        loader : iterable
            What ``run`` or ``evaluate`` was given.
        training : bool
            False for an evaluation.

        Returns
        -------
        iterable
            Batches.
        """
        if not training:
            return loader
        set_epoch(loader, self.progress_checker.epoch)
        return self.loader_position.pad_loader(loader)

    @hook
    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield what ``run_batch`` takes, from where the epoch stands."""
        return self.loader_position.batches(loader, self.progress_checker.epoch_batch, self.progress_checker.batch)

    @hook
    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an evaluation, of a loader after ``wrap_loader``."""
        return batches_of(loader, self.loader_position.is_fast)

    @hook
    def steps_per_epoch(self, loader: Any) -> int | None:
        """Return how many optimizer steps an epoch of this loader takes; None if it has no length."""
        return length_of(loader)

    @hook
    def epoch_context(self) -> AbstractContextManager[None]:
        """Enclose the batches of an epoch of training."""
        return NULL_CONTEXT

    @hook
    def evaluation_context(self) -> AbstractContextManager[None]:
        """Enclose an evaluation, for instance with averaged weights in the model."""
        return evaluation_weights(self.optimization, self.device)

    @hook
    def on_run_begin(self) -> None:
        """Called when a run is set up and checked, before its first batch."""

    @hook
    def on_run_end(self) -> None:
        """Called when a run has ended by itself, before ``teardown``."""

    @hook
    def on_epoch_begin(self) -> None:
        """Called by ``run`` before an epoch, or the rest of one."""

    @hook
    def on_epoch_end(self) -> None:
        """Called by ``run`` after an epoch, its validation and its schedulers."""

    @hook
    def on_validation_begin(self) -> None:
        """Called before each validation of a run; in mode "test", before each evaluation of its loader.

        A call of ``evaluate``, ``predict`` or ``inference`` is no validation, and calls neither this nor its end.
        """

    @hook
    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        """Called after a validation of a run, with the metrics that were recorded.

        The model has the training weights; use those that were evaluated in ``with self.averaged():``. A validation
        that a signal interrupts has no end: the resumed run begins it again.

        Parameters
        ----------
        metrics : mapping of str to float
            Means by sample, and what ``metric_on_epoch_end`` added.
        """

    @hook
    def on_exception(self, error: BaseException) -> None:
        """Called when a run ends by an exception, which is raised again with a note of where it happened."""
        from zae.loop.error_notes import add_notes

        add_notes(error, self.current_run)

    @hook
    def checkpoint(self) -> None:
        """Save when it is due: called between steps, after the validation of that moment, and after each epoch.

        By default it does what was asked for by `request`, a save excepted.
        """
        if self.current_run.requests.actions:
            self.current_run.requests.serve(self.current_run)

    @hook
    def should_validate(self, is_due: bool) -> bool:
        """Decide whether to validate now: after a step or, where ``progress_checker.epoch_batch`` is 0, an epoch.

        It is asked where ``run`` has a ``valid_loader``. Of several ranks, the answer of rank 0 counts. A validation
        requested by `request` takes place in any case, and so does one that a resumed run repeats. ``is_due`` is what
        ``valid_every`` says, and what it returns by default.
        """
        return is_due

    @hook
    def should_checkpoint(self, is_due: bool) -> bool:
        """Decide whether StateManagerAddon saves a checkpoint now; it is asked as `should_validate`, and after that.

        ``is_due`` is true when ``save_every`` says so, or the validation of this moment was the best so far. The end
        of a run, a signal that ends it, and a save requested by `request` are saved in any case.
        """
        return is_due

    @hook
    def on_save(self, path: Path) -> None:
        """Called on every rank when a checkpoint was saved; with ``save_async`` a thread may still be writing it."""

    @hook
    def on_load(self, path: Path) -> None:
        """Called on every rank when a checkpoint was loaded, by a resume or by ``load_state``."""

    @hook
    @explained_call("log({name: number}, self.progress_checker.step), or return a number of a batch from the step")
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics, named ``train/loss``, ``valid/loss``, ``lr`` and so on.

        Parameters
        ----------
        metrics : mapping of str to float
            Numbers by name.
        step : int
            Optimizer steps so far.
        """
        self.history.log.append({"step": step, "batch": self.progress_checker.batch, **plain_numbers(metrics)})

    @property
    @hook
    def should_stop(self) -> bool:
        """Whether `stop` was called in this run."""
        return self.progress_checker.stop_reason is not None

    @hook
    @explained_call("stop(reason), for instance stop('it has converged')")
    def stop(self, reason: str = "stop() was called") -> None:
        """End the run after this step; the reason is kept as ``metrics["stop_reason"]``."""
        self.progress_checker.stop_reason = reason

    @hook
    def request(self, action: str) -> None:
        """Request an action after this step, before the next one; any of several ranks may request it.

        Several ranks do it after the next step, except after a validation, an epoch and the last step of the run,
        where it is done at once. What was done at that step already is not done twice.

        Parameters
        ----------
        action : {"log", "validate", "save", "end_epoch"}
            Log the training metrics, evaluate the ``valid_loader``, save the state (with StateManagerAddon), or end
            the epoch, whose other batches are left out.
        """
        self.current_run.requests.add(action)

    @hook
    def check_better(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the monitored metric is the best so far, after each validation; NaN never is."""
        return self.history.is_better(self.score_of(metrics))

    # -------------------------------------------------------------------------------- evaluation and inference

    @explained_call("evaluate(loader)")
    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the means of what ``test_step`` returns over a loader; training is left exactly as it is.

        Nothing is recorded; ``on_validation_begin`` and ``on_validation_end``, which are of ``run``, are not called.

        Parameters
        ----------
        loader : iterable, or dict of them
            Batches. Of several loaders the metrics are named ``"<loader>/<metric>"``, and the plain name is the mean
            over the loaders, or of a typed metric its sum, largest, smallest or last value.

        Returns
        -------
        dict of str to float
            Means by sample, and what ``metric_on_epoch_end`` adds.
        """
        self.engine.rendezvous("evaluate")
        with self.ready():
            return Evaluation(self).metrics(loader)

    @explained_call("inference(loader)")
    def inference(self, loader: Iterable[Any], *, seed: int | None = None) -> list[dict[str, Any]]:
        """Return what ``predict_step`` returns for each batch, on the host; ``seed`` is that of `predict`."""
        self.engine.rendezvous("inference")
        outputs: list[dict[str, Any]] = []
        with self.ready():
            Evaluation(self, seed=seed).outputs(loader, lambda size, values: outputs.append(values))
        return outputs

    @explained_call("predict(loader), or predict(loader, path)")
    def predict(
        self, loader: Iterable[Any], path: str | Path | None = None, *, seed: int | None = None
    ) -> dict[str, Tensor] | Path:
        """Return what ``predict_step`` returns for all samples, in the order of the loader, or write it to a file.

        The result is the same on any number of ranks; rank 0 writes the file, while it holds a few batches in memory.

        Parameters
        ----------
        loader : iterable
            Batches.
        path : str or Path, optional
            A file, ``.npy`` for one array, ``.safetensors`` or ``.pt``. It appears when it is whole, and replaces an
            existing one.
        seed : int, optional
            Where the random streams begin in this call, and the generators of add-ons: each seed is another sample of
            a ``predict_step`` that draws, with dropout for instance. By default they begin where training stands, and
            calls between the same two steps draw the same numbers. They are restored afterwards.

        Returns
        -------
        dict of str to Tensor, or Path
            Tensors on the host with one row for each sample; numbers of a batch, its loss for instance, are left out.
            With ``path``, the file.

        Raises
        ------
        StepError
            An entry has not one row for each sample, or differs between batches in shape or type.

        Examples
        --------
        >>> import torch
        >>> from zae import Trainer
        >>> class Task(Trainer):
        ...     def train_step(self, batch):
        ...         return {"loss": self.model(batch).square().mean()}
        ...     test_step = train_step
        ...     def predict_step(self, batch):
        ...         return self.model(batch)
        >>> trainer = Task(torch.nn.Linear(2, 3), "cpu", mode="test")
        >>> trainer.predict([torch.ones(4, 2), torch.ones(1, 2)])["output"].shape
        torch.Size([5, 3])
        """
        from zae.loop.predictions import Predictions

        self.engine.rendezvous("predict")
        with self.ready(), Predictions(path, self.is_main) as predictions:
            Evaluation(self, seed=seed).outputs(loader, predictions.add)
            arrays = predictions.finish()
            self.gather(None)  # The file is there on each rank when this returns.
        return arrays

    @hook
    @explained_call("evaluate(loader)")
    def validate(self) -> dict[str, float]:
        """Return the metrics of the ``valid_loader`` of a run, which then records them and updates the best.

        An override may add numbers to those of ``super().validate()``, or return others. Of several ranks, what rank 0
        returns counts.

        Returns
        -------
        dict of str to float
            Means by sample, and what ``metric_on_epoch_end`` added.
        """
        run = self.current_run
        return Evaluation(self, run.stop_signals).metrics(run.valid_loader)

    def averaged(self) -> AbstractContextManager[None]:
        """Use the model in a ``with`` block as an evaluation does, for instance to draw samples after each validation.

        It has the averaged weights of ``EMAAddon``, or the evaluation weights of a schedule-free optimizer, and is in
        evaluation mode, without gradients. Afterwards weights and modes are those of training again. Without an average
        the weights stay as they are. Random streams are not restored.

        Returns
        -------
        context manager
            For one ``with`` statement.

        Examples
        --------
        >>> import torch
        >>> from zae import Trainer
        >>> from zae.addons import EMAAddon
        >>> class Task(Trainer):
        ...     def train_step(self, batch):
        ...         return {"loss": self.model(batch).square().mean()}
        ...     test_step = train_step
        ...     def on_validation_end(self, metrics):
        ...         super().on_validation_end(metrics)
        ...         with self.averaged():
        ...             self.sample = self.model(torch.ones(1, 2))
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Task.add_on(EMAAddon)(model, "cpu", optimizer=optimizer)
        >>> _ = trainer.run(1, [torch.ones(4, 2)] * 3, [torch.ones(4, 2)])
        >>> (trainer.sample == model(torch.ones(1, 2))).item()
        False
        """
        return evaluated_model(self)

    def toggle(self, mode: str | None = None) -> None:
        """Switch to a mode, or to the other one; back in training, each module has the mode that it had before."""
        before = self.mode
        root = self.model if isinstance(self.model, nn.Module) else self._module
        self.mode = mode or ("test" if before == "train" else "train")
        self._in_training = switch_mode(root, self._module, (before, self.mode), self._in_training)

    # ------------------------------------------------------------------------------------- weights and state

    def unwrap(self) -> nn.Module:
        """Return the module itself: without what the trainer, ``torch.compile``, DataParallel or DDP put around it."""
        return without_wrappers(self._module)

    @hook
    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; an add-on adds an entry under its own class name.

        Returns
        -------
        dict
            "model", "optimizer", "scheduler", "progress", "records", "position", and one entry for each add-on;
            "validation" where that of this moment is still to be made.
        """
        from zae.loop.trainer_state import read_state  # A run that saves nothing does not import it.

        return read_state(self)

    @hook
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state: all of it or, on an error, nothing. An add-on takes its own entry out first.

        Parameters
        ----------
        state : mapping
            What ``state_dict`` returned.
        strict : bool
            Refuse entries that nobody takes and weights that are missing or unexpected; else warn.

        Raises
        ------
        CheckpointMismatch
            With what differs.
        """
        from zae.loop.trainer_state import load_state

        load_state(self, state, strict)

    @hook
    def load_evaluation_state(self, state: Mapping[str, Any]) -> None:
        """Load only the weights of a state, for an evaluation; training would continue from them."""
        from zae.loop.trainer_state import load_weights

        load_weights(self, {**state["model"], **state.get("extra_state", {})}, strict=True)

    @explained_call("continue_from(state)")
    def continue_from(self, state: Any) -> None:
        """Continue the current call of ``run`` from another state, after this step.

        The run continues like a restarted script that resumes from this state. Call it on every rank, in any method
        that a run calls, for instance in a guard that goes back when training has gone wrong. Change something for the
        second attempt, a learning rate for instance, in ``on_epoch_begin``, which is called before the run continues,
        or in ``on_load`` where a checkpoint is loaded. The attributes of the task go back as well, except those that
        its class names in ``unsaved_attributes``: the state itself, and the count of returns.

        Parameters
        ----------
        state : mapping
            What ``state_dict`` returned in this call of ``run``, between two steps: in ``checkpoint`` or
            ``on_epoch_end``, for instance. With StateManagerAddon also the path of a checkpoint, or of a folder with
            checkpoints, whose newest whole one is taken.

        Raises
        ------
        ConfigError
            No call of ``run`` is under way, or its loader yields each batch once.
        CheckpointMismatch
            The state is of another call of ``run``, or does not fit.

        Examples
        --------
        >>> import torch
        >>> from zae import Trainer
        >>> class Guarded(Trainer):
        ...     good, returns = None, 0
        ...     unsaved_attributes = ("good", "returns")
        ...     def train_step(self, batch):
        ...         return {"loss": self.model(batch).square().mean()}
        ...     test_step = train_step
        ...     def checkpoint(self):
        ...         super().checkpoint()
        ...         if self.progress_checker.step == 2:
        ...             self.good = self.state_dict()
        ...     def on_step_end(self, outputs):
        ...         super().on_step_end(outputs)
        ...         if self.progress_checker.step == 4 and not self.returns:
        ...             self.returns += 1
        ...             self.continue_from(self.good)
        >>> trainer = Guarded(torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD)
        >>> metrics = trainer.run(1, [torch.ones(4, 2)] * 6)
        >>> metrics["step"], trainer.returns
        (6, 1)
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"continue_from({state!r:.80}); give what state_dict() returned, or add StateManagerAddon for the path "
                "of a checkpoint"
            )
        copied = copy.deepcopy(dict(state))  # The run may change what it holds before it is loaded.
        self.current_run.continuation.request(partial(self.load_state_dict, copied), copied)

    @explained_call("save_model('weights.safetensors')")
    def save_model(self, path: str | Path | None = None) -> Path:
        """Save the weights alone, in the format of the suffix: ``.safetensors``, ``.ckpt``, ``.pt`` or ``.pth``.

        Where the weights lie in parts on several ranks, all of them call it, and rank 0 writes the file.

        Parameters
        ----------
        path : str or Path
            A file; its folder is created if needed.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        ConfigError
            No file is named, or its suffix stands for no format.
        """
        from zae.checkpoint.weights import save_weights
        from zae.loop.trainer_state import weights_of

        if path is None:
            raise ConfigError("save_model() needs a file; write save_model('weights.safetensors')")
        step = str(self.progress_checker.step)
        writes = self.is_main or self.engine.can_save_alone
        return save_weights(Path(path), weights_of(self), {"step": step}, writes)

    @explained_call("apply_weights(path)")
    def apply_weights(self, weights: Weights, strict: bool = True) -> tuple[list[str], list[str]]:
        """Load weights into the model, and nothing else.

        Parameters
        ----------
        weights : str, Path or mapping
            A file of ``save_model``, or a state dict; prefixes that wrappers leave are taken off.
        strict : bool
            Refuse missing and unexpected keys; a shape that differs is refused in any case.

        Returns
        -------
        missing, unexpected : list of str
            Keys that the weights lack, and those that the model lacks; empty where ``strict`` is true.

        Raises
        ------
        CheckpointMismatch, CheckpointNotFound
            The model is unchanged.
        """
        from zae.checkpoint.weights import read_weights
        from zae.loop.trainer_state import load_weights

        return load_weights(self, read_weights(weights), strict)

    # ------------------------------------------------------------------------------------------- what is shown

    optimizer: Any = _of_part("optimization", "optimizer", "The optimizers as given, or made by the factories.")
    scheduler: Any = _of_part("optimization", "scheduler", "The schedulers as given, or made by the factories.")
    optimizers: dict[str, Optimizer] = _of_part(
        "optimization", "optimizers", "The optimizers by name; an only one is '0'."
    )
    schedulers: dict[str, Any] = _of_part("optimization", "schedulers", "The schedulers by name; an only one is '0'.")
    parameters: list[Tensor] = _of_part(
        "optimization", "parameters", "What is trained, of the model and the optimizers."
    )
    gradient_clip: float = _of_part("optimization", "gradient_clip", "The largest gradient norm; 0 does not clip.")
    grad_norm: Tensor | None = _of_part("optimization", "grad_norm", "The norm of the gradients before the last clip.")
    scheduler_step_on_batch: bool = _of_part(
        "optimization", "scheduler_step_on_batch", "Step schedulers after each step."
    )
    monitor: str = _of_part("history", "monitor", "The metric that decides which epoch is the best.")
    keep_train_outputs: bool = _of_part("log_train", "keeps", "Whether what steps return beside numbers is kept.")
    log_train: EpochLog = _of_part("history", "log_train", "What the steps of the open epoch returned.")
    log_test: EpochLog = _of_part("history", "log_test", "What the steps of the last evaluation returned.")
    train_metrics: Metrics = _of_part("history", "train_metrics", "The metrics of the last epoch.")
    test_metrics: Metrics = _of_part("history", "test_metrics", "The metrics of the last validation.")
    best: Metrics = _of_part("history", "best", "The metrics of the best epoch, with its score and place.")
    train_history: list[Metrics] = _of_part("history", "train", "A row for each epoch of training.")
    valid_history: list[Metrics] = _of_part("history", "valid", "A row for each validation.")
    log_history: list[dict[str, Any]] = _of_part("history", "log", "A row for each call of ``log``.")

    @property
    def valid_name(self) -> str | None:
        """The name of the loader that is evaluated, where several were given by name."""
        return self.current_run.activity.evaluation.loader_name

    @property
    def metrics(self) -> MetricsDict:
        """The history so far, as ``run`` returns it."""
        return self.history.as_metrics(self.progress_checker)

    def log_reset(self, epoch_end: bool = False) -> None:
        """Clear the logs of the open epoch and of the last evaluation; at an ``epoch_end``, their metrics too."""
        self.log_train.clear()
        self.log_test.clear()
        if epoch_end:
            self.train_metrics = Metrics()
            self.test_metrics = Metrics()

    def score_of(self, metrics: Mapping[str, float]) -> float | None:
        """Return the monitored metric of a row; None only for the default monitor, where no step returns a loss."""
        return self.history.score_of(metrics)

    # Options that a part of the trainer holds.
    _option_places: ClassVar[Any] = {
        "fast_data": "loader_position.is_fast",
        "monitor_mode": "history.direction",
        "on_nonfinite": "nonfinite.policy",
    }

    @classmethod
    @explained_call("Task.add_on(AMPAddon)(model, ..., precision='bf16'): options are those of the class that it makes")
    def add_on(cls, *add_ons: type[AddOnBase] | str) -> type[Composed]:
        """Return this class with add-ons; their order does not matter, and this class is unchanged.

        Type checkers accept any option and attribute of the new class; docs/reference/types.md has the form that they
        check.

        Parameters
        ----------
        *add_ons : type
            Add-on classes (or the names they are installed under).

        Returns
        -------
        type
            A subclass; the same set gives the same class.

        Raises
        ------
        AddOnError
            With the remedy.
        """
        return cast("type[Composed]", compose(cls, add_ons))

    @of_class_or_instance
    def explain(self) -> Text:
        """Show the effective loop as pseudo-code, each line with the add-ons that override it.

        It may be called on a trainer class too.

        Returns
        -------
        Text
            Printed as it is, in a terminal and in a notebook; for an instance, with the options.
        """
        from zae.explain import explain

        return explain(self)

    @explained_call("plan(20, loader, valid_loader), with the arguments of run")
    def plan(
        self,
        n_epoch: int | None,
        loader: Iterable[Any],
        valid_loader: Any = None,
        *,
        max_steps: int | None = None,
        valid_every: Every | int | None = None,
        steps_per_epoch: int | None = None,
        max_time: float | timedelta | None = None,
        limit_batches: int | tuple[int | None, int | None] | None = None,
        overfit_batches: int | None = None,
    ) -> RunPreview:
        """Preview what ``run`` would do with the same arguments, without changing anything.

        No batch is loaded, and no step is made: whether ``train_step`` and ``test_step`` work, and which metrics they
        return, is not looked at. ``run(1, loader, valid_loader, limit_batches=1)`` of another trainer tries a batch of
        each. The size of a checkpoint is that of its tensors.

        Parameters
        ----------
        n_epoch, loader, valid_loader, max_steps, valid_every, steps_per_epoch, max_time, limit_batches, overfit_batches
            As for ``run``.

        Returns
        -------
        RunPreview
            It prints as a page.

        Raises
        ------
        ConfigError, LoaderError
            What ``run`` would refuse.

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
          monitor    loss
        """
        from zae.plan.preview import plan

        limits = RunLimits(n_epoch, max_steps, valid_every, steps_per_epoch, max_time, limit_batches, overfit_batches)
        return plan(self, loader, valid_loader, limits)

    @hook
    def describe(self) -> list[Description]:
        """Return descriptions of the trainer; an add-on adds its own to those of ``super()``.

        Plans, loggers, reports and checkpoints call it, before a run as well as in one.

        Returns
        -------
        list of Description
            The options, the model and the optimizers, and what add-ons tell.
        """
        from zae.description import descriptions_of

        return descriptions_of(self)

    def __repr__(self) -> str:
        from zae.description import trainer_text

        return trainer_text(self)

    # ------------------------------------------------------------------------------------------------ the rest

    if not TYPE_CHECKING:  # A checker would accept any attribute.

        def __getattr__(self, name: str) -> Any:
            """Explain a name that nothing has; Python calls this where it has found no attribute."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # A property has raised an AttributeError: that one counts.
            from zae.compose.hints import missing_attribute

            raise missing_attribute(self, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Explain a call of the trainer."""
            raise TaskError(
                f"{type(self).__name__} is called, and the trainer is not the model: call self.model(...), or "
                "predict(loader) for the outputs of all samples"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, without those of this run: it sets itself up, and continues from here."""
        # A copy of a trainer that evaluates has the weights of the evaluation.
        evaluation = self.current_run.activity.evaluation
        attributes = {name: value for name, value in without_first_calls(vars(self)).items() if name != "current_run"}
        engine = copy.deepcopy(self.engine)  # It has no process group, and has wrapped no model.
        return {**attributes, "model": self._module, "engine": engine, "evaluation": evaluation}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Set the attributes of a copy, whose schedulers see again that their optimizers step."""
        vars(self).update(state, current_run=Run(self))
        self.current_run.activity.evaluation = vars(self).pop("evaluation")
        mark_copied(self.scheduler)
