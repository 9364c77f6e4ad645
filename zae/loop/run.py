"""One call of `Trainer.run`: its limits, its validation, and what happens between the steps."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zae import optim
from zae.compose.introspect import is_overridden, mentions_super
from zae.data.loaders import describe, length_of
from zae.data.workers import check_epoch_of_workers, ignore_dead_workers
from zae.display.notebook import choose_display
from zae.display.terminal import Display
from zae.errors import CheckpointMismatch, ConfigError, LoaderError, MonitorError, TaskError, kind_of
from zae.loop.error_notes import add_notes
from zae.loop.first_step import unmoved, weights_of
from zae.loop.history import Metrics
from zae.loop.progress import NO_LIMIT, SIGNALED, TIME_IS_UP, EvaluationAborted, RunLimits, RunView, remaining
from zae.loop.step_remarks import why_uncounted
from zae.metrics.reductions import means_of, merge_sums
from zae.optim.checks import Span
from zae.schedulers.lengths import is_plateau

if TYPE_CHECKING:
    from zae.loop.epoch_log import EpochLog
    from zae.trainer import Trainer

__all__ = ["Run"]

_log = logging.getLogger("zae")


class Run:
    """One call of `Trainer.run`, or the steps between ``setup`` and ``teardown`` that no call of ``run`` makes.

    It belongs to one process: a copy of a trainer leaves its run behind. The trainer holds the run, and the run only
    refers to the trainer, so that the memory of a trainer that is deleted is freed at once.

    Attributes
    ----------
    signals : list of int
        Signals that ask for the end, as `StopSignals` notes them.
    last_epoch, last_step : int
        Where the call ends at the latest.
    in_epoch : int or None
        Optimizer steps of an epoch, where that is known, once `begin` was called.
    is_call, is_new : bool
        Whether it is a call of ``run``, and whether that is still to be set up.
    is_ready : bool
        Whether the trainer is set up.
    watches_next_step : bool
        Whether the next step of training is the first since the trainer was set up.
    has_begun_epoch : bool
        Whether the present call of ``run_epoch`` has begun an epoch.
    is_evaluating : bool
        Whether weights, modes and random streams are those of an evaluation.
    test_step : {"test_step", "predict_step"}
        The step that an evaluation makes of each batch.
    loader_place : tuple of int
        Which loader an evaluation reads, of how many.
    valid_name : str or None
        The name of that loader, where they were given by name.
    requests : set of str
        What `Trainer.request` asked for, as all ranks know it; `serve_requests` does it.
    micro_index : int
        The index in its window of the batch whose gradient is computed.
    batch, current_loader : object
        For error notes: the batch of the step in progress, and the loader of the open epoch or evaluation.
    computation : int
        How often the gradients of the present step were computed, this time included: an add-on that notes or counts
        what a step does, does so for the first one alone.
    is_loading : bool
        For error notes: whether that loader is being asked for a batch.
    loader_use : {"epoch", "evaluation"}
        For error notes: which of them it is of.
    """

    def __init__(
        self, trainer: Trainer, loader: Any = None, valid_loader: Any = None, limits: RunLimits | None = None
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self.user_loader, self.loader, self.valid_loader = loader, loader, valid_loader
        self.is_call, self.limits = limits is not None, limits or RunLimits()
        self.is_ready, self.is_new = False, self.is_call
        self.watches_next_step = self.has_begun_epoch = False
        self._warns_of_mode = True
        self.previous_device: torch.device | None = None  # The current one of the process before the trainer's.
        self._weights: dict[str, list[Any]] = {}  # Of each optimizer, as the first epoch began.
        self._skipped_before = 0  # Steps that were left out before that epoch.
        self.last_epoch = self.last_step = NO_LIMIT
        self.epoch_steps = self.limits.steps_per_epoch or 0
        self.in_epoch: int | None = None
        self.began = time.monotonic()
        self.signals: list[int] = []
        self.requests: set[str] = set()
        self._logged_at, self.computation, self.micro_index = -1, 1, 0
        self._progress: Any = None  # The counters of this call; another object is that of a state loaded since.
        self._load: Callable[[], None] | None = None  # What `continue_with` was given.
        self.wrapped: Any = None  # What `wrap_model` returned.
        self.batch: Any = None
        self.current_loader: Any = None
        self.is_loading = self.is_evaluating = False
        self.loader_use, self.test_step, self.loader_place = "epoch", "test_step", (0, 1)
        self.valid_name: str | None = None

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self._trainer()

    @cached_property
    def display(self) -> Display:
        """What the run shows of itself."""
        return choose_display(self.trainer.log_bar if self.trainer.is_main else False)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Show a sentence about the run beside its progress, on the main rank; with ``log_bar=False``, log it."""
        if self.trainer.is_main:
            self.display.say(RunView(self), text, level)

    def say_not_numbers(self, log: EpochLog, step: str) -> None:
        """Name, once each, the entries of a step that are no numbers and look like metrics."""
        trainer = self.trainer
        if not log.not_numbers or log.keeps or is_overridden(trainer, "metric_on_epoch_end"):  # It may read them.
            return
        for key, found in log.not_numbers.items():
            if found.may_be_metric and trainer.history.is_first_remark(key):
                self.say(f"{type(trainer).__name__}.{step} returned {found.text(key)}", logging.WARNING)

    def say_uncounted(self, batch: Any, values: Mapping[str, Any]) -> None:
        """Say, once, that the means of an epoch cannot weigh the batches by their samples."""
        trainer = self.trainer
        if values.get("num_targets") is not None or is_overridden(trainer, "sample_weight"):
            return
        why = why_uncounted(batch)
        if why and trainer.history.is_first_remark("the weight of a batch"):
            self.say(
                f"how many samples a batch has is not known: {why}. The means of an epoch weigh each sample alike only "
                "if all batches have as many samples; else return 'num_targets' from the step, or override "
                "sample_weight(batch, num_targets)",
                logging.WARNING,
            )

    @property
    def place(self) -> str:
        """The step, and the epoch that is open or was just closed, of how many, in words."""
        progress = self.trainer.progress_checker
        of = "" if self.last_epoch == NO_LIMIT else f" of {self.last_epoch}"
        return f"step {progress.step} (epoch {progress.place['epoch']}{of})"

    def new_call(self, loader: Any, valid_loader: Any, limits: RunLimits) -> Run:
        """Return a call of ``run``; the trainer may be set up already."""
        trainer, batches = self.trainer, limits.batches
        is_training = trainer.mode == "train"
        view = trainer.loader_position.view_of(loader, batches) if is_training else batches.of_validation(loader)
        call = Run(trainer, view, batches.of_validation(valid_loader), limits)
        call.user_loader, call.is_ready, call.watches_next_step = loader, self.is_ready, self.watches_next_step
        return call

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Set up on entering, note an error, and tear down; within a scope, or after a lone step, do nothing."""
        if self.is_ready and not self.is_new:
            yield
            return
        trainer = self.trainer
        try:
            self.set_up()
            yield
        except BaseException as error:
            with ignore_dead_workers():
                if "display" in vars(self):  # First: what is said of the error begins on its own line.
                    self.display.fail(RunView(self), error)
                trainer.on_exception(error) if self.is_call else add_notes(error, self)
            raise
        finally:
            if trainer.current_run is self:  # Else a call of ``run`` in the block has torn down.
                trainer.teardown()

    def set_up(self) -> None:
        """Set the trainer up, unless it is."""
        self.is_new = False
        if not self.is_ready:
            self.trainer.setup()
            if self.wrapped is None:
                owners = [c for c in type(self.trainer).__mro__ if "setup" in vars(c)]
                owner = next((c for c in owners if not mentions_super(vars(c)["setup"])), owners[0])
                raise TaskError(
                    f"{owner.__name__}.setup does not call super().setup(), and so nothing is set up; call it first"
                )
            self.is_ready, self.watches_next_step = True, True

    def close(self) -> None:
        """Close the display."""
        if "display" in vars(self):
            self.display.close(RunView(self))

    # --------------------------------------------------------------------------------------------- its beginning

    def begin(self) -> None:
        """Find where this call ends, refuse a loader or a schedule that does not fit, and count the call."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        calls = progress.run_calls
        loader = self.current_loader = self._fit_loader()
        optim.check_closures(trainer.optimizers, type(trainer))
        self.in_epoch = self.steps_per_epoch(loader)
        if not calls.is_completed:
            has_metric = self.valid_loader is not None or trainer.history.watches_training
            for text in trainer.optimization.check_run(*self.counts_of_call(self.in_epoch), has_metric):
                if trainer.is_main:
                    _log.warning("%s", text)
        elif trainer.is_main:  # It was checked as it began.
            calls.warn_of_early_end(self.limits.n_epoch, self.limits.max_steps)
        if calls.is_new_call:
            calls.starts.append([progress.epoch, progress.step])
            progress.stop_reason = None
        calls.index += 1
        self._progress = progress
        trainer.loader_position.view = (self.user_loader, self.limits.batches, self.loader)
        trainer.loader_position.restore_random()

    # ------------------------------------------------------------------------------------- a state within the call

    def continue_with(self, load: Callable[[], None], state: Mapping[str, Any] | None = None) -> None:
        """Load a state when the present step is done, and continue the call from there."""
        if self._progress is None:
            raise ConfigError(
                "continue_from(...) is for a call of run() that trains, once it has begun; elsewhere load the state: "
                "load_state_dict(state), or load_state(path) of StateManagerAddon"
            )
        self._check_repeatable()
        if state is not None:
            self.check_state(state)
        self._load = load

    def check_load(self) -> None:
        """Refuse to load a state within a step or an evaluation, which would go on with it."""
        if self.batch is not None or self.is_evaluating:
            within = "an evaluation" if self.is_evaluating else "a step"
            raise ConfigError(
                f"a state is loaded within {within}, which would go on with other weights than it began with; write "
                "continue_from(state), which loads it when the step is done"
            )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another call of ``run`` than the one that is under way."""
        starts = state["progress"].get("run_starts") if isinstance(state.get("progress"), Mapping) else None
        number = self._progress.run_calls.index
        if not isinstance(starts, (list, tuple)) or len(starts) != number:
            found = len(starts) if isinstance(starts, (list, tuple)) else "no known"
            raise CheckpointMismatch(
                f"the state is of {found} calls of run(), and this is call {number}, which continues only from a "
                "state of its own; load that one between two calls: load_state_dict(state), or load_state(path)"
            )

    @property
    def is_left(self) -> bool:
        """Whether the call is to continue from another state than it has come to."""
        was_loaded = self._progress is not None and self._progress is not self.trainer.progress_checker
        return self._load is not None or was_loaded

    def takes_up_state(self) -> bool:
        """Continue from a state that was loaded within the call, as a script does that is started again in it."""
        if not self.is_left:
            return False
        load, self._load = self._load, None
        if load is not None:
            load()
        progress = self.trainer.progress_checker
        self._check_repeatable()
        self.check_state({"progress": progress.state_dict()})
        calls = self._progress.run_calls
        progress.run_calls.index, progress.run_calls.planned_steps = calls.index - 1, calls.planned_steps
        self.requests.clear()
        self._logged_at, self.epoch_steps = -1, self.limits.steps_per_epoch or 0
        self.trainer.nonfinite.forget()
        self.begin()
        self.resume_pending_validation()
        return True

    def _check_repeatable(self) -> None:
        """Refuse to go back in a loader that yields each batch once."""
        if isinstance(self.user_loader, Iterator):
            raise ConfigError(
                f"the loader is a {type(self.user_loader).__name__}, which yields each batch once, so that the run "
                "cannot go back in it; give a DataLoader, a list, or a class with __iter__"
            )

    def resume_pending_validation(self) -> None:
        """Repeat the validation that the loaded state was saved in, and what follows it."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        if progress.run_calls.must_replay:  # The state is of a later call.
            return
        trainer.optimization.settings.warn(trainer.is_main)
        if progress.pending_validation == "epoch":
            self.end_epoch()
        elif progress.pending_validation:
            self._validate("step")
            trainer.checkpoint()

    def _fit_loader(self) -> Any:
        """Wrap the loader, find where the call ends, and refuse a loader that cannot continue a loaded state."""
        progress, position = self.trainer.progress_checker, self.trainer.loader_position
        calls, is_new = progress.run_calls, progress.run_calls.is_new_call
        self.last_epoch, self.last_step = self.end_of_call()
        has_more = progress.epoch < self.last_epoch and progress.step < self.last_step
        if has_more and not is_new:
            if progress.epoch_batch:
                position.check_order(self.loader)
            position.reshard(self.trainer, self.loader)
        loader = self.trainer.wrap_loader(self.loader, True)
        if has_more:
            position.check(loader, is_new)
            if progress.epoch_batch and position.is_of(loader):
                position.check_order(loader)
        if is_new:
            self._leave_epoch(loader)
            self.last_epoch, self.last_step = self.end_of_call()  # An epoch that is left is not one of this call.
        if has_more:
            check_epoch_of_workers(loader, self.last_epoch - progress.epoch - bool(progress.epoch_batch))
        if calls.must_replay and not calls.is_completed:
            position.note_loader(loader)
        return loader

    def cannot_continue_epoch(self, wrapped: Any) -> bool:
        """Return whether an epoch is open that this loader, after ``wrap_loader``, cannot continue."""
        return self.trainer.progress_checker.epoch_batch > 0 and not self.trainer.loader_position.is_of(wrapped)

    def _leave_epoch(self, wrapped: Any) -> None:
        """Close an open epoch that this loader cannot continue."""
        progress = self.trainer.progress_checker
        if self.cannot_continue_epoch(wrapped):
            _log.info("epoch %d was left open; another loader begins the next", progress.epoch + 1)
            progress.close_epoch()

    # -------------------------------------------------------------------------------------------------- an epoch

    def has_more_epochs(self) -> bool:
        """Return whether an epoch is to begin, or to continue."""
        self.takes_up_state()
        trainer, progress = self.trainer, self.trainer.progress_checker
        if progress.epoch >= self.last_epoch or progress.pending_validation:
            return False
        if progress.step < self.last_step and not trainer.should_stop:
            return True
        # A state of the run's last step, if that was an epoch's last too: the epoch is still to be closed.
        return trainer.loader_position.is_restored and self._is_full(trainer.wrap_loader(self.loader, True))

    def open_epoch(self, wrapped: Any) -> None:
        """Begin an epoch, or continue the one that a stop, a kill or ``max_steps`` left open."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        self.has_begun_epoch = True
        trainer.optimization.track(trainer.unwrap())  # Again: the model may have grown.
        trainer.optimization.check_given()
        trainer.optimization.warn_of_untrained(trainer.unwrap(), trainer.is_main)
        trainer.optimization.check_unreplaced()
        self._leave_epoch(wrapped)
        if not progress.epoch_batch:
            trainer.log_train.begin_epoch()
            trainer.log_test.clear()
        progress.pending_validation = ""
        trainer.optimization.begin_training()
        trainer.zero_grad()  # An exception may have left the gradients of a step.
        self._weights = weights_of(trainer) if self.watches_next_step and not progress.epoch_batch else {}
        self._skipped_before = progress.skipped_steps
        if isinstance(trainer.model, nn.Module) and not trainer.model.training:
            trainer.model.train()
        self.display.open(RunView(self, wrapped))

    def batches(self, wrapped: Any) -> Iterator[Any]:
        """Return the remaining batches of the open epoch: none after the last of ``steps_per_epoch``."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        self.current_loader, self.is_loading, self.loader_use = wrapped, True, "epoch"
        if progress.epoch_batch and progress.epoch_step == self.epoch_steps:
            trainer.loader_position.batches(wrapped, progress.epoch_batch, progress.batch)  # The next epoch follows it.
            return iter(())
        batches: Iterator[Any] = trainer.batches(wrapped)
        return batches

    def after_step(self) -> bool:
        """Log, validate and save where it is due, in this order; return whether the epoch, or the run, ends here."""
        trainer, self.is_loading = self.trainer, False
        if self._load is not None:  # What was done since that state counts no more.
            return True
        progress, every = trainer.progress_checker, trainer.log_every
        step = progress.step
        if (every.steps and every.due_at_step(step)) or "log" in self.requests:
            self.log_training()
        if self.valid_loader is not None:
            every = self.limits.valid_every
            is_due = self.decide("should_validate", bool(every.steps) and every.due_at_step(step))
            if is_due or "validate" in self.requests:
                self._validate("step")
        if self.limits.max_time is not None:
            self._check_time()
        trainer.checkpoint()
        if self.display.shown and self.display.due():
            self.display.update(RunView(self))
        self.is_loading = True
        if self.is_left:
            return True
        return step >= self.last_step or progress.epoch_step == self.epoch_steps or trainer.should_stop

    @cached_property
    def decisions(self) -> list[str]:
        """Which decisions a class, or an attribute of this trainer, overrides: a step does not ask for the others."""
        return [name for name in ("should_validate", "should_checkpoint") if is_overridden(self.trainer, name)]

    def decide(self, name: str, is_due: bool) -> bool:
        """Ask a hook whether to do what is due, or not due; of several ranks, the answer of rank 0 counts."""
        if name not in self.decisions:
            return is_due
        answer = getattr(self.trainer, name)(is_due)
        if type(answer).__name__ not in ("bool", "bool_"):  # The second is that of NumPy.
            raise ConfigError(f"{name}({is_due}) returned {kind_of(answer)}; return True or False")
        return bool(self.trainer.gather(answer)[0])

    def request(self, action: str) -> None:
        """Note what is to be done after this step; all ranks call it."""
        if action not in ("log", "validate", "save", "end_epoch"):
            raise ConfigError(f"request({action!r}); write 'log', 'validate', 'save' or 'end_epoch'")
        self.requests.add(action)

    def serve_requests(self) -> None:
        """Log, validate and end the epoch where that was asked for and not done at this step; leave "save"."""
        progress, history, requests = self.trainer.progress_checker, self.trainer.history, self.requests
        if "log" in requests and self._logged_at != progress.step:
            self.log_training()
        if "validate" in requests and (not history.valid or history.valid[-1]["step"] != progress.step):
            self._validate("step")
            if progress.pending_validation:  # The signal that has ended it came to all ranks.
                progress.stop_reason = SIGNALED
        if "end_epoch" in requests and progress.epoch_batch:
            self.end_epoch_here()
        self.requests = requests & {"save"}

    def end_epoch_here(self) -> None:
        """End the open epoch after the step that was made last."""
        self.epoch_steps = self.trainer.progress_checker.epoch_step

    @property
    def ends_epoch_here(self) -> bool:
        """Whether `end_epoch_here` was called in the open epoch."""
        return self.trainer.progress_checker.epoch_batch > 0 and self.epoch_steps != (self.limits.steps_per_epoch or 0)

    def _check_time(self) -> None:
        """Ask for the end where ``max_time`` has passed; several ranks agree on it in ``checkpoint``."""
        trainer, limit = self.trainer, self.limits.max_time
        if limit is not None and time.monotonic() - self.began >= limit and not trainer.should_stop:
            trainer.stop(TIME_IS_UP)

    def ends_epoch(self, wrapped: Any, batches: Iterator[Any]) -> bool:
        """Return whether the step that ends the loop over the batches is the last of the epoch."""
        progress = self.trainer.progress_checker
        if self.is_left or progress.pending_validation:  # A resumed run repeats its validation before the epoch ends.
            return False
        if progress.epoch_step == self.epoch_steps:
            return True
        # A sampler may draw as it ends: ask for the end, so that a complete epoch ends like any other.
        return progress.epoch_batch == length_of(wrapped) and next(batches, None) is None

    def close_epoch(self, wrapped: Any, is_complete: bool) -> Metrics:
        """Compute the means of an epoch, step its schedulers, and count it."""
        trainer, progress, history = self.trainer, self.trainer.progress_checker, self.trainer.history
        self.is_loading = False
        self.display.end_epoch(RunView(self))
        if self.is_left:
            return Metrics()
        if not progress.epoch_batch:
            used_up = "; a generator is exhausted after one epoch: give a list, or a class with __iter__"
            raise LoaderError(
                f"the loader yielded 0 batches in epoch {progress.epoch + 1} ({describe(wrapped)})"
                + (used_up if progress.epoch else "; give it data")
            )
        trainer.nonfinite.sync_counts(progress, trainer)
        is_any_taken = progress.skipped_steps - self._skipped_before < progress.epoch_step
        if is_any_taken and (still := unmoved(self._weights)):
            self._warn_of_unmoved(still)
        self._weights = {}
        if not is_complete:
            return Metrics(means_of(merge_sums(trainer.gather_data(trainer.log_train.sums()))))
        trainer.log_test.clear()
        metrics = history.summarize("train", trainer.gather_data, trainer.dp_world_size, trainer.metric_on_epoch_end)
        history.record("train", metrics, progress.place, trainer.optimization.learning_rates())
        if trainer.log_every.due_at_epoch(progress.epoch + 1):
            self.log_training(trainer.train_metrics)
        trainer.scheduler_step("epoch")
        progress.close_epoch()
        self.epoch_steps = self.limits.steps_per_epoch or 0
        trainer.loader_position.forget()
        self.say_not_numbers(trainer.log_train, "train_step")
        made: Metrics = history.train_metrics
        return made

    def _warn_of_unmoved(self, names: list[str]) -> None:
        """Warn of optimizers that have changed no weight in the epoch that ends."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        if not trainer.is_main:
            return
        several = f" of optimizer {', '.join(map(repr, names))}" if len(trainer.optimizers) > 1 else ""
        own = ", and return a loss for each: {'loss': {name: loss, ...}}" if several else ""
        _log.warning(
            "epoch %d has changed no weight%s in %d steps: compute the loss from self.model(...), let optimizer_step() "
            "step the optimizers, and a learning rate be above 0%s",
            progress.epoch + 1, several, progress.epoch_step, own,
        )  # fmt: skip

    def end_epoch(self) -> None:
        """Validate the epoch that was just closed, update the best, show it, call ``on_epoch_end``, and save."""
        trainer, progress, every = self.trainer, self.trainer.progress_checker, self.limits.valid_every
        try:
            if progress.pending_validation or (
                self.valid_loader is not None and self.decide("should_validate", every.due_at_epoch(progress.epoch))
            ):
                self._validate("epoch")
            if not progress.pending_validation:
                if self.valid_loader is None or trainer.history.watches_training:
                    self.update_best("train", trainer.history.train_metrics)
                self.display.line(RunView(self))
                trainer.on_epoch_end()
        finally:
            if not progress.pending_validation:  # Else its repetition may read it.
                trainer.log_train.free()
        self._check_time()
        trainer.checkpoint()

    # ------------------------------------------------------------------------------------------------ validation

    @contextmanager
    def iterating(self, loader: Any) -> Iterator[None]:
        """Hold, for error notes, which loader is evaluated."""
        before = self.batch, self.current_loader, self.is_loading, self.loader_use
        self.batch, self.current_loader, self.is_loading, self.loader_use = None, loader, True, "evaluation"
        yield  # An error leaves them, for its note.
        self.batch, self.current_loader, self.is_loading, self.loader_use = before

    def _validate(self, moment: str) -> None:
        """Validate; a signal that asks for the end leaves it pending, with the state as before it."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        progress.pending_validation = moment if self.valid_loader is not None else ""
        if progress.pending_validation:
            with suppress(EvaluationAborted):
                trainer.on_validation_begin()
                metrics = trainer.validate()
                if not isinstance(metrics, Mapping):
                    raise TaskError(
                        f"{type(trainer).__name__}.validate returned {kind_of(metrics)}, and the loop needs the "
                        "metrics of the validation: write return super().validate(), or give a method of your own "
                        "another name"
                    )
                progress.pending_validation = ""
                if moment == "step":  # Else it is in the line of the epoch.
                    self.display.validation(RunView(self))
                trainer.on_validation_end(metrics)

    def warn_of_training_mode(self) -> None:
        """Warn once of a ``test_step`` that leaves the model in training mode."""
        if self._warns_of_mode and self.trainer.is_main:
            self._warns_of_mode = False
            _log.warning(
                "%s.test_step leaves the model in training mode, and the next batch is evaluated in it unless the step "
                "begins with self.model.eval(); leave model.train() out of test_step: training continues as it was",
                type(self.trainer).__name__,
            )

    def run_test_epoch(self) -> None:
        """Evaluate the loader of a call in mode "test", and record the metrics."""
        self.trainer.on_validation_begin()
        metrics = self.trainer.run_epoch(self.loader)
        if not isinstance(metrics, Mapping):
            raise TaskError(
                f"run_epoch returned {kind_of(metrics)} in mode 'test'; return the metrics of the evaluation: return "
                "super().run_epoch(loader), or self.evaluate(loader)"
            )
        self.record_validation(metrics)
        self.trainer.on_validation_end(metrics)

    @property
    def stop_signals(self) -> list[int] | None:
        """The signals that end the validation of a run early; None for one that the user calls."""
        return self.signals if self.trainer.progress_checker.pending_validation else None

    def end_validation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Record the metrics of a validation, and update the best."""
        self.record_validation(metrics)
        self.update_best("valid", metrics)
        return metrics

    def record_validation(self, metrics: Mapping[str, float]) -> None:
        """Record and log the metrics of a validation."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        progress.pending_validation = ""
        trainer.history.record("valid", metrics, progress.place)
        trainer.log({f"valid/{key}": value for key, value in metrics.items()}, progress.step)

    def update_best(self, split: str, metrics: Mapping[str, float]) -> None:
        """Keep the best metrics, and step the schedulers that wait for a metric."""
        trainer, history = self.trainer, self.trainer.history
        if split == "valid" and history.watches_training and history.monitor not in metrics:
            return
        history.check_split(split, metrics)
        score = trainer.score_of(metrics)
        if trainer.check_better(metrics):
            history.update_best(split, metrics, score, trainer.progress_checker.place)
        for name, scheduler in trainer.schedulers.items():
            if is_plateau(scheduler):
                if score is None:
                    raise MonitorError(f"scheduler {name} needs monitor={history.monitor!r}; available: {[*metrics]}")
                scheduler.step(score)

    # --------------------------------------------------------------------------------------------------- logging

    def log_training(self, means: Mapping[str, float] | None = None) -> None:
        """Log the means of an epoch, or those since the last record, with learning rates and gradient norm."""
        trainer, progress = self.trainer, self.trainer.progress_checker
        self._logged_at = progress.step
        if means is None:
            trainer.nonfinite.sync_counts(progress, trainer)
        since = means_of(merge_sums(trainer.gather_data(trainer.log_train.take_sums())))  # Reset in any case.
        record = {f"train/{k}": v for k, v in (means or since).items()} | trainer.optimization.learning_rates()
        if trainer.grad_norm is not None:
            record["grad_norm"] = float(trainer.grad_norm)
            record |= {f"grad_norm/{name}": float(norm) for name, norm in trainer.optimization.grad_norms.items()}
        counts = {"skipped_steps": progress.skipped_steps, "nonfinite_steps": progress.nonfinite_steps}
        record |= {name: float(count) for name, count in counts.items() if count}
        trainer.log(record, progress.step)

    # ------------------------------------------------------------------------------------------------- its extent

    def end_of_call(self) -> tuple[int, int]:
        """Return the epoch and the step at which this call ends at the latest; ``sys.maxsize`` means no limit."""
        progress, limits = self.trainer.progress_checker, self.limits
        starts, call = progress.run_starts, progress.run_calls.index
        if progress.run_calls.is_completed:  # It may have ended early.
            return starts[call + 1][0], starts[call + 1][1]
        epoch, step = starts[call] if progress.run_calls.must_replay else (progress.epoch, progress.step)
        last_epoch = NO_LIMIT if limits.n_epoch is None else epoch + limits.n_epoch
        return last_epoch, NO_LIMIT if limits.max_steps is None else step + limits.max_steps

    def steps_per_epoch(self, wrapped: Any) -> int | None:
        """Return the optimizer steps of an epoch over a loader that ``wrap_loader`` returned; None is unknown."""
        counts = (self.limits.steps_per_epoch, self.trainer.steps_per_epoch(wrapped))
        return min((count for count in counts if count is not None), default=None)

    def total_steps(self) -> int | None:
        """Return the steps that the last call of ``run`` was planned to take; None for a loader without a length."""
        trainer, calls = self.trainer, self.trainer.progress_checker.run_calls
        if self.is_call and trainer.mode == "train":
            in_epoch = self.steps_per_epoch(trainer.wrap_loader(self.loader, True))
            calls.planned_steps = self.limits.total_steps(in_epoch)
        if calls.planned_steps is ...:
            raise ConfigError(
                "the scheduler's factory takes total_steps, the number of optimizer steps of the run, which "
                "is known only within run() in mode 'train'; call run(n_epoch, loader) first (resume=... loads a "
                "state within it), or give a factory that takes only the optimizer: scheduler=lambda optimizer: ..."
            )
        found: int | None = calls.planned_steps
        return found

    def counts_of_call(self, in_epoch: int | None) -> tuple[Span, Span]:
        """Return the epochs and the optimizer steps of this call, now and to come, of epochs with so many steps."""
        progress, calls = self.trainer.progress_checker, self.trainer.progress_checker.run_calls
        present = (progress.epoch, progress.step)
        start = present if calls.is_new_call else calls.starts[calls.index]
        epochs, steps = map(Span, start, present, remaining(progress, *self.end_of_call(), in_epoch))
        return epochs, steps

    def _is_full(self, wrapped: Any) -> bool:
        """Return whether the open epoch has all of its steps, or batches."""
        progress = self.trainer.progress_checker
        return progress.epoch_batch > 0 and (
            progress.epoch_step == self.epoch_steps or progress.epoch_batch == length_of(wrapped)
        )
