"""One call of `Trainer.run`: how it begins and ends, and what happens between its steps.

`Trainer.run`, `run_epoch` and `run_batch` are the loop; what they call on their run stands here. In the order of a run:

    scope()                            set the trainer up; at the end, and after an error, tear it down
      begin()                          fit the loader, find the end of the call, check the schedules, count the call
      resume()                         what the user's objects held is put back; a validation in which the state was
                                       saved is made again first
      while has_more_epochs():
        open_epoch(loader)             or continue the epoch that a stop or a kill has left open
        for batch in batches(loader):
          (Trainer.run_batch)          one optimizer step
          after_step()                 log, validate, look at the clock, save: what is due, in this order
        close_epoch(loader)            the means of the epoch; step the schedulers; count the epoch
        end_epoch()                    validate, keep the best, call on_epoch_end, save

What is counted lies in `zae.loop.progress`, where the call ends in `zae.loop.limits`, how the call goes back to an
earlier state in `zae.loop.continuation`, what it is doing at a moment in `zae.loop.activity`, what is asked of it in
`zae.loop.requests`, and what it records in `zae.loop.recording`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zae.compose.first_call import watching_first_calls
from zae.data.loaders import describe, length_of
from zae.data.workers import check_epoch_of_workers, ignore_dead_workers
from zae.display.choose import choose_display, is_in_a_notebook
from zae.display.terminal import Display
from zae.errors import LoaderError, TaskError
from zae.loop.activity import Activity
from zae.loop.continuation import Continuation
from zae.loop.first_epoch import FirstEpoch
from zae.loop.limits import Extent, RunLimits
from zae.loop.metric_rows import Metrics
from zae.loop.progress import NO_LIMIT, TIME_IS_UP
from zae.loop.recording import log_training, record_epoch, update_best
from zae.loop.requests import Requests
from zae.loop.run_view import RunView
from zae.loop.validation import validate
from zae.metrics.reductions import means_of, merge_sums
from zae.optim.checks import check_closures
from zae.parts import gather_dp

if TYPE_CHECKING:
    from zae.loop.progress import ProgressChecker
    from zae.trainer import Trainer

__all__ = ["Run", "Setup"]

_log = logging.getLogger("zae")


@dataclass(slots=True)
class Setup:
    """What `Trainer.setup` has done, until `Trainer.teardown` undoes it: the calls of ``run`` between the two share it.

    Attributes
    ----------
    is_done : bool
        Whether the trainer is set up.
    watches_next_step : bool
        Whether the next step of training is the first since then.
    wrapped_model : object
        What `Trainer.wrap_model` returned.
    previous_device : torch.device or None
        The current device of the process before that of the trainer.
    """

    is_done: bool = False
    watches_next_step: bool = False
    wrapped_model: Any = None
    previous_device: torch.device | None = None


class Run:
    """One call of `Trainer.run`, or the steps between ``setup`` and ``teardown`` that no call of ``run`` makes.

    It belongs to one process: a copy of a trainer leaves its run behind. The trainer holds the run, and the run only
    refers to the trainer, so that the memory of a trainer that is deleted is freed at once.

    Attributes
    ----------
    user_loader, loader : object
        The training loader as ``run`` was given it, and its view with the first batches alone, where they are limited.
    valid_loader : object
        What is validated, likewise limited.
    limits : RunLimits
        The other arguments of ``run``.
    extent : Extent
        Where the call ends, and its open epoch.
    continuation : Continuation
        What `Trainer.continue_from` has asked for.
    awaits_scope : bool
        Whether it is a call of ``run`` whose `scope` has not been entered yet.
    setup : Setup
        What `Trainer.setup` has done; a call of ``run`` may find the trainer set up.
    requests : Requests
        What `Trainer.request` asked for, and the hooks that decide what is due.
    activity : Activity
        What the run is doing at this moment.
    first_epoch : FirstEpoch
        What the first epoch is compared with as it ends.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: Any = None,
        valid_loader: Any = None,
        limits: RunLimits | None = None,
        user_loader: Any = None,
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self.user_loader = loader if user_loader is None else user_loader
        self.loader = loader
        self.valid_loader = valid_loader
        self.limits = limits or RunLimits()
        self.extent = Extent(trainer, loader, limits)
        self.continuation = Continuation(trainer, self.user_loader)
        self.awaits_scope = self.is_call
        self.setup = Setup()
        self.requests = Requests()
        self.activity = Activity()
        self.first_epoch = FirstEpoch()

    @property
    def trainer(self) -> Any:
        """The trainer; it has the hooks of its add-ons too, and so no type says what it has."""
        return self._trainer()

    @property
    def is_call(self) -> bool:
        """Whether it is a call of ``run``."""
        return self.extent.is_call

    @property
    def _progress(self) -> ProgressChecker:
        """The counters of the trainer, which are another object once a state was loaded."""
        progress: ProgressChecker = self.trainer.progress_checker
        return progress

    def new_call(self, loader: Any, valid_loader: Any, limits: RunLimits) -> Run:
        """Return a call of ``run``; the trainer may be set up already."""
        trainer = self.trainer
        batches = limits.batches
        if trainer.mode == "train":
            # The view of the call before, for the same loader: an open epoch continues only with the same object.
            view = trainer.loader_position.view_of(loader, batches)
        else:
            view = batches.of_validation(loader)
        call = Run(trainer, view, batches.of_validation(valid_loader), limits, loader)
        call.setup = self.setup
        return call

    # ------------------------------------------------------------------------------------------- set up, tear down

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Set up on entering, note an error, and tear down; within a scope, or after a lone step, do nothing."""
        if self.setup.is_done and not self.awaits_scope:
            yield
            return
        trainer = self.trainer
        with watching_first_calls(trainer):
            try:
                self.set_up()
                yield
            except BaseException as error:
                with ignore_dead_workers():
                    if is_in_a_notebook():
                        from zae.display.notebook import hide_frames

                        hide_frames(error)
                    if self._has_display:  # First: what is said of the error begins on its own line.
                        self.display.fail(RunView(self), error)
                    if self.is_call:
                        trainer.on_exception(error)
                    else:
                        from zae.loop.error_notes import add_notes

                        add_notes(error, self)
                raise
            finally:
                if trainer.current_run is self:  # Else a call of ``run`` in the block has torn down.
                    trainer.teardown()

    def set_up(self) -> None:
        """Set the trainer up, unless it is."""
        self.awaits_scope = False
        if self.setup.is_done:
            return
        self.trainer.setup()
        self.setup.is_done = True
        self.setup.watches_next_step = True

    def close(self) -> None:
        """Close the display."""
        if self._has_display:
            self.display.close(RunView(self))

    # ---------------------------------------------------------------------------------------------- what is shown

    @cached_property
    def display(self) -> Display:
        """What the run shows of itself."""
        return choose_display(self.trainer.log_bar if self.trainer.is_main else False)

    @property
    def _has_display(self) -> bool:
        """Whether anything was shown yet; `display` is made when it is first asked for."""
        return "display" in vars(self)

    def report(self, text: str, level: int = logging.INFO) -> None:
        """Show a sentence about the run beside its progress, on the main rank; with ``log_bar=False``, log it."""
        if self.trainer.is_main:
            self.display.report(RunView(self), text, level)

    @property
    def place(self) -> str:
        """The step, and the epoch that is open or was just closed, of how many, in words."""
        epoch = self._progress.place["epoch"]
        last = self.extent.last_epoch
        of_epochs = "" if last == NO_LIMIT else f" of {last}"
        return f"step {self._progress.step} (epoch {epoch}{of_epochs})"

    # ------------------------------------------------------------------------------------------- how a call begins

    def begin(self) -> None:
        """Find where this call ends, refuse a loader or a schedule that does not fit, and count the call."""
        trainer = self.trainer
        progress = self._progress
        calls = progress.run_calls
        trainer.run_record.note_call(self)  # First: an epoch that is set is no setting of the dataset.
        wrapped_loader = self._fit_loader()
        self.activity.loader = wrapped_loader
        check_closures(trainer.optimizers, type(trainer))
        self.extent.steps_in_epoch = self.extent.steps_per_epoch(wrapped_loader)
        if not calls.is_completed:
            self._check_schedules()
        elif trainer.is_main:  # Its schedules were checked as it began, in an earlier process.
            calls.warn_of_early_end(self.limits.n_epoch, self.limits.max_steps)
        is_new_call = not calls.must_replay
        if is_new_call:
            calls.starts.append([progress.epoch, progress.step])
            progress.stop_reason = None
        # A script that is started again makes its calls again: the index says which call in the state this one is.
        calls.index += 1
        self.continuation.note_begin(is_new_call)
        trainer.loader_position.view = (self.user_loader, self.limits.batches, self.loader)
        # Last: what is above may have drawn from the global streams, a sampler as it is made for instance.
        if not calls.must_replay:  # Else the state is of a later call.
            trainer.loader_position.restore_random()

    def _check_schedules(self) -> None:
        """Refuse schedules that do not fit this call, and warn of schedules that probably do not."""
        trainer = self.trainer
        epochs, steps = self.extent.spans(self.extent.steps_in_epoch)
        has_metric = self.valid_loader is not None or trainer.history.watches_training
        for text in trainer.optimization.check_run(epochs, steps, has_metric):
            if trainer.is_main:
                _log.warning("%s", text)

    def _fit_loader(self) -> Any:
        """Wrap the loader, find where the call ends, and refuse a loader that cannot continue a loaded state."""
        trainer = self.trainer
        progress = self._progress
        position = trainer.loader_position
        extent = self.extent
        calls = progress.run_calls
        is_new = not calls.must_replay
        extent.update_end()
        has_more = not extent.is_reached
        # Before the loader is wrapped: a sampler that it gets for this rank follows from where the epoch stands.
        if has_more and not is_new:
            position.reshard(trainer, self.loader)
        wrapped_loader = trainer.wrap_loader(self.loader, True)
        if has_more:
            position.check(wrapped_loader, is_new)
        if is_new:
            self._leave_epoch(wrapped_loader)
            extent.update_end()  # Again: an epoch that is left is not one of this call.
        if has_more:
            epochs_to_begin = extent.last_epoch - progress.epoch - bool(progress.epoch_batch)
            check_epoch_of_workers(wrapped_loader, epochs_to_begin)
        if not is_new and not calls.is_completed:
            position.note_loader(wrapped_loader)
        return wrapped_loader

    def cannot_continue_epoch(self, wrapped_loader: Any) -> bool:
        """Return whether an epoch is open that this loader, after ``wrap_loader``, cannot continue."""
        return self._progress.epoch_batch > 0 and not self.trainer.loader_position.is_of(wrapped_loader)

    def _leave_epoch(self, wrapped_loader: Any) -> None:
        """Close an open epoch that this loader cannot continue."""
        if self.cannot_continue_epoch(wrapped_loader):
            _log.info("epoch %d was left open; another loader begins the next", self._progress.epoch + 1)
            self._progress.close_epoch()

    def resume(self) -> None:
        """Put back what the user's objects held, and repeat the validation that the loaded state was saved in."""
        trainer = self.trainer
        progress = self._progress
        trainer.run_record.compare(self)
        if progress.run_calls.must_replay:  # The state is of a later call.
            return
        trainer.user_state.begin(trainer, self.continuation.is_in_same_call)
        trainer.loader_position.begin_values(self.activity.loader, trainer)
        if progress.pending_validation == "epoch":
            self.end_epoch()
        elif progress.pending_validation:
            validate(self, "step")
            trainer.checkpoint()

    # ---------------------------------------------------------------------------------- a state within the call

    def apply_pending_state(self) -> bool:
        """Continue from a state that was loaded within the call, as a script does that is started again in it."""
        if not self.continuation.is_due:
            return False
        self.continuation.apply()
        self.requests.clear()
        self.extent.reset_epoch()
        self.trainer.nonfinite.clear_pending()
        self.begin()
        self.resume()
        return True

    # -------------------------------------------------------------------------------------------------- an epoch

    def has_more_epochs(self) -> bool:
        """Return whether an epoch is to begin, or to continue."""
        self.apply_pending_state()
        trainer = self.trainer
        progress = self._progress
        if progress.epoch >= self.extent.last_epoch or progress.pending_validation:
            return False
        if progress.step < self.extent.last_step and not trainer.should_stop:
            return True
        # A state of the run's last step, if that was an epoch's last too: the epoch is still to be closed.
        if not trainer.loader_position.is_restored:
            return False
        return self.extent.is_epoch_full(trainer.wrap_loader(self.loader, True))

    def open_epoch(self, wrapped_loader: Any) -> None:
        """Begin an epoch, or continue an epoch that a stop, a kill or ``max_steps`` left open."""
        trainer = self.trainer
        progress = self._progress
        optimization = trainer.optimization
        self.activity.has_begun_epoch = True
        self.activity.has_read_batch = False
        optimization.track(trainer.unwrap())  # Again: the model may have grown.
        optimization.check_present()
        optimization.warn_of_untrained(trainer.unwrap(), trainer.is_main)
        optimization.check_unreplaced()
        self._leave_epoch(wrapped_loader)
        is_begin = not progress.epoch_batch
        if is_begin:
            trainer.log_train.begin_epoch()
            trainer.log_test.clear()
        progress.pending_validation = ""
        optimization.begin_training()
        trainer.zero_grad()  # An exception may have left the gradients of a step.
        # A script may have left the model in evaluation mode; modules that it has frozen one by one stay so.
        if isinstance(trainer.model, nn.Module) and not trainer.model.training:
            trainer.model.train()
        self.first_epoch.open(self, wrapped_loader)
        trainer.user_state.open_epoch(trainer)
        self.display.open(RunView(self, wrapped_loader))

    def batches(self, wrapped_loader: Any) -> Iterator[Any]:
        """Return the remaining batches of the open epoch: none after the last of ``steps_per_epoch``."""
        trainer = self.trainer
        progress = self._progress
        self.activity.loader = wrapped_loader
        self.activity.loader_use = "epoch"
        self.activity.is_loading = True
        if progress.epoch_batch and self.extent.is_epoch_end:
            # The epoch has all of its steps. Its loader is opened all the same: the next epoch follows what it draws.
            trainer.loader_position.batches(wrapped_loader, progress.epoch_batch, progress.batch)
            return iter(())
        batches: Iterator[Any] = trainer.batches(wrapped_loader)
        return batches

    def after_step(self) -> bool:
        """Log, validate and save where it is due, in this order; return whether the epoch, or the run, ends here."""
        trainer = self.trainer
        self.activity.is_loading = False
        self.activity.has_read_batch = True
        if self.continuation.is_requested:  # What was done since that state counts no more.
            return True
        progress = trainer.progress_checker
        step = progress.step
        requests = self.requests
        if trainer.log_every.due_at_step(step) or "log" in requests.actions:
            log_training(self)
        if self.valid_loader is not None:
            is_due = requests.decide(trainer, "should_validate", self.limits.valid_every.due_at_step(step))
            if is_due or "validate" in requests.actions:
                validate(self, "step")
        if self.limits.max_time is not None:
            self._check_time()
        # After the validation: a checkpoint has its metrics, and may be the best one.
        trainer.checkpoint()
        if self.display.shown and self.display.due():
            self.display.update(RunView(self))
        self.activity.is_loading = True
        if self.continuation.is_due:
            return True
        extent = self.extent
        return step >= extent.last_step or progress.epoch_step == extent.epoch_ends_at or trainer.should_stop

    def ends_epoch(self, wrapped_loader: Any, batches: Iterator[Any]) -> bool:
        """Return whether the step that ends the loop over the batches is the last of the epoch."""
        progress = self._progress
        # A resumed run repeats a pending validation before the epoch ends.
        if self.continuation.is_due or progress.pending_validation:
            return False
        if self.extent.is_epoch_end:
            return True
        # A sampler may draw as it ends: ask for the end, so that a complete epoch ends like any other.
        return progress.epoch_batch == length_of(wrapped_loader) and next(batches, None) is None

    def close_epoch(self, wrapped_loader: Any, is_complete: bool) -> Metrics:
        """Compute the means of an epoch, step its schedulers, and count it."""
        trainer = self.trainer
        progress = self._progress
        self.activity.is_loading = False
        self.display.end_epoch(RunView(self))
        if self.continuation.is_due:
            return Metrics()
        if not progress.epoch_batch:
            self._refuse_no_batches(wrapped_loader)
        # It may raise: losses that wait on an accelerator are looked at before the epoch is recorded.
        trainer.nonfinite.read_pending(progress, trainer)
        self.first_epoch.close(self, wrapped_loader, is_complete)
        if not is_complete:  # The epoch stays open: it has means, but no row in the history.
            sums = gather_dp(trainer.engine, trainer.log_train.sums())
            return Metrics(means_of(merge_sums(sums)))
        return record_epoch(self)

    def _refuse_no_batches(self, wrapped_loader: Any) -> None:
        """Raise the error for an epoch without a step: the loader has yielded nothing, or ``run_batch`` made none."""
        number = self._progress.epoch + 1
        if self.activity.has_read_batch:
            owner = next(c for c in type(self.trainer).__mro__ if "run_batch" in vars(c))
            raise TaskError(
                f"{owner.__name__}.run_batch has made no step in epoch {number}; call super().run_batch(batch), which "
                "makes the optimizer step and counts it"
            )
        remedy = "give it data"
        if number > 1:
            remedy = "a generator is exhausted after one epoch: give a list, or a class with __iter__"
        raise LoaderError(f"the loader yielded 0 batches in epoch {number} ({describe(wrapped_loader)}); {remedy}")

    def end_epoch(self) -> None:
        """Validate the epoch that was just closed, update the best, show it, call ``on_epoch_end``, and save."""
        trainer = self.trainer
        progress = self._progress
        try:
            # A state that was saved within this validation has it pending: the decision was made before.
            is_due = bool(progress.pending_validation)
            if not is_due and self.valid_loader is not None:
                is_due = self.requests.decide(
                    trainer, "should_validate", self.limits.valid_every.due_at_epoch(progress.epoch)
                )
            if is_due:
                validate(self, "epoch")
            if not progress.pending_validation:
                if self.valid_loader is None or trainer.history.watches_training:
                    update_best(self, "train", trainer.history.train_metrics)
                self.display.line(RunView(self))
                trainer.on_epoch_end()
        finally:
            if not progress.pending_validation:  # Else its repetition may read it.
                trainer.log_train.free()
        self._check_time()
        trainer.checkpoint()

    def _check_time(self) -> None:
        """Ask for the end where ``max_time`` has passed; several ranks agree on it in ``checkpoint``."""
        if self.extent.is_time_up and not self.trainer.should_stop:
            self.trainer.stop(TIME_IS_UP)

    @property
    def stop_signals(self) -> list[int] | None:
        """The signals that end the validation of a run early; None for one that the user calls."""
        return self.requests.signals if self._progress.pending_validation else None
