"""Callbacks: objects that are called at the events of a run, those of Transformers included."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.addon import AddOnBase
from zae.addons.callbacks import trainer_state
from zae.addons.callbacks.calls import Callbacks
from zae.addons.callbacks.trainer_state import RunReader, TrainerControl, TrainerState
from zae.compose.introspect import slots_of
from zae.compose.options import option_value
from zae.errors import ConfigError
from zae.loop.progress import SIGNALED, TIME_IS_UP
from zae.loop.step_output import StepOutput

__all__ = ["CallbackAddon"]

_log = logging.getLogger("zae")
_ACTIONS = {"should_log": "log", "should_evaluate": "validate", "should_save": "save", "should_epoch_stop": "end_epoch"}
_BY_STEP = ("should_save", "should_evaluate", "should_log")


class CallbackAddon(AddOnBase):
    """Call callbacks at the events of a run: plain objects, and those of Transformers and Forgather as they are.

    A plain callback has methods with the names of zae's events, ``on_step_end(trainer, outputs)`` for instance. A
    method ``(args, state, control, **kwargs)`` is called as Transformers calls it, without Transformers being
    installed.

    Parameters
    ----------
    callbacks : sequence, optional
        Instances, or classes that need no arguments; they are called in this order.
    callback_args : object, optional
        The ``args`` of Transformers' events, a TrainingArguments for instance; None makes them of this run:
        metric_for_best_model is ``monitor``, eval_strategy follows ``valid_every``, and so on.

    Raises
    ------
    ConfigError
        A callback has no method named as an event, or one that would never be called, or cannot be.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import CallbackAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> class Halve:
    ...     def on_epoch_end(self, trainer):
    ...         for group in trainer.optimizers["0"].param_groups:
    ...             group["lr"] /= 2
    >>> class StopEarly:
    ...     def on_step_end(self, args, state, control, **kwargs):
    ...         control.should_training_stop = state.epoch >= 1.5
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(CallbackAddon)(model, "cpu", optimizer=optimizer, callbacks=[Halve, StopEarly()])
    >>> metrics = trainer.run(3, [torch.ones(8, 2)] * 4)
    >>> metrics["step"], metrics["stop_reason"], optimizer.param_groups[0]["lr"]
    (6, 'the callback StopEarly set should_training_stop in on_step_end', 0.05)
    """

    layer = "observe"
    slot = "callbacks"
    traits = ("changes_run",)
    state_attributes = ("_shared_state",)
    rank_state_attributes = ("_callback_states", "_step_losses")
    _callbacks: Callbacks

    def __init__(
        self, *args: Any, callbacks: Sequence[Any] | None = (), callback_args: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        callbacks = () if callbacks is None else callbacks
        if isinstance(callbacks, (str, Mapping)) or not isinstance(callbacks, Iterable):
            raise ConfigError(f"callbacks={callbacks!r:.80}; write a list of them: callbacks=[...]")
        self._callbacks = Callbacks(callbacks)
        self.callback_args = callback_args

    # ------------------------------------------------------------------------------------------ which there are

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks, in the order of their calls; a copy of the list."""
        return list(self._callbacks.items)

    @property
    def _reader(self) -> RunReader:
        return RunReader(self, self._callbacks.in_epoch, self._callbacks.batches_in_epoch)

    @property
    def state(self) -> TrainerState:
        """Where the run stands, as callbacks of Transformers read it."""
        self._read_callback_state()
        return self._callbacks.state

    @property
    def control(self) -> TrainerControl:
        """What callbacks have asked for."""
        return self._callbacks.control

    def add_callback(self, callback: Any) -> None:
        """Add a callback, also during a run: it is called from the next event on.

        Parameters
        ----------
        callback : object or type
            An instance, or a class that needs no arguments.

        Raises
        ------
        ConfigError
            It has no method named as an event, or is there already.
        """
        self._callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None where there is none."""
        removed = self._callbacks.pop(callback)
        return removed

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class; an instance that is not there is refused."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            names = ", ".join(type(item).__name__ for item in self.callbacks)
            raise ConfigError(f"{callback!r:.80} is not among the callbacks ({names or 'none'}); nothing was removed")

    # ------------------------------------------------------------------------------------------------- the calls

    def _call_plain(self, event: str, *args: Any) -> None:
        """Call an event of zae."""
        self._callbacks.call(event, self, *args)

    def call_event(self, event: str, **event_arguments: Any) -> None:
        """Call an event of Transformers, and do what the callbacks ask for."""
        if not self._callbacks.wants(event):
            return
        self._read_callback_state()
        run = self.current_run
        if self._callbacks.args is None:
            self._callbacks.args = self._reader.arguments()
        objects = {
            name: next(iter(part.values())) if len(part) == 1 else part or None
            for name, part in (("optimizer", self.optimizers), ("lr_scheduler", self.schedulers))
        }
        keywords = {
            "model": self.unwrap(),
            "processing_class": self._callbacks.processing_class,
            **objects,
            "train_dataloader": run.loader,
            "eval_dataloader": run.activity.loader if run.activity.evaluation.is_running else run.valid_loader,
            **event_arguments,
        }
        for flag, name in self._callbacks.call_foreign(event, self._callbacks.args, keywords):
            self._obey_flag(flag, name, event)

    def _obey_flag(self, flag: str, name: str, event: str) -> None:
        """Do what a flag asks for, or warn that it cannot be done."""
        run = self.current_run
        if self.mode != "train" or not run.is_call:
            return
        if flag == "should_training_stop":
            self._callbacks.is_pause = self.control.should_save
            self.stop(f"the callback {name} set {flag} in {event}")
        elif flag == "should_evaluate" and run.valid_loader is None:
            self._warn_of_flag(f"the callback {name} set {flag}, and run() has no valid_loader: nothing is evaluated")
        elif flag == "should_save" and "state" not in slots_of(type(self)):
            self._warn_of_flag(f"the callback {name} set {flag}, and there is no StateManagerAddon: nothing is saved")
        else:
            self.request(_ACTIONS[flag])

    def _warn_of_flag(self, text: str) -> None:
        if text not in self._callbacks.warned and self.is_main:
            _log.warning("%s", text)
        self._callbacks.warned.add(text)

    def _read_callback_state(self) -> None:
        self._reader.read(self._callbacks.state)

    # --------------------------------------------------------------------------------------------------- the run

    def setup(self) -> None:
        """Call ``on_init_end`` the first time."""
        super().setup()
        self._callbacks.processing_class = option_value(self, "processing_class")
        if not self._callbacks.was_set_up:
            self._callbacks.was_set_up = True
            self.call_event("on_init_end")
            self._callbacks.args = self.callback_args

    def on_run_begin(self) -> None:
        """Call ``on_train_begin``, and ask again for what the loaded state had been asked for."""
        super().on_run_begin()
        run = self.current_run
        self._callbacks.args = self.callback_args
        self._callbacks.in_epoch = run.extent.steps_in_epoch
        _, first_step = self.progress_checker.run_calls.present_start
        if first_step == self.progress_checker.step:
            self._callbacks.losses.begin(self.progress_checker.step)
            self._callbacks.state.log_history = []
        self._reader.begin(self._callbacks.state)
        self._reader.read_best(self._callbacks.state)
        self._callbacks.run_began = time.monotonic()
        self._callbacks.first_step = self.progress_checker.step
        self._callbacks.batches_in_epoch = self._reader.batches_in_epoch()
        if self._callbacks.ends_epoch and self.progress_checker.epoch_batch:
            run.extent.end_epoch_here()
        self._callbacks.ends_epoch = False
        self._callbacks.is_pause = False
        self.control.reset(*vars(self.control))
        self._call_plain("on_run_begin")
        self.call_event("on_train_begin")

    def on_run_end(self) -> None:
        """Log the speed of the run, and call ``on_train_end``."""
        super().on_run_end()
        seconds = time.monotonic() - self._callbacks.run_began
        loss = self._callbacks.losses.mean_of_run(self.progress_checker.step, self._mean_over_ranks)
        logs = self._reader.end_logs(seconds, self._callbacks.first_step, loss)
        self._log_callbacks(logs)
        self._call_plain("on_run_end")
        self.call_event("on_train_end")

    def on_exception(self, error: BaseException) -> None:
        """Call ``on_exception``."""
        super().on_exception(error)
        try:
            self._call_plain("on_exception", error)
        except Exception as other:  # The first error matters.
            _log.warning("on_exception of a callback has failed: %s: %s", type(other).__name__, other)

    def on_save(self, path: Path) -> None:
        """Call ``on_save``."""
        super().on_save(path)
        self._reader.read_best(self._callbacks.state)
        self.control.reset("should_save")
        self._call_plain("on_save", path)
        if self._callbacks.saved_step != self.progress_checker.step:  # The end of an epoch or a run is saved again.
            self.call_event("on_save")
        self._callbacks.saved_step = self.progress_checker.step

    def on_load(self, path: Path) -> None:
        """Call ``on_load``."""
        super().on_load(path)
        if self._callbacks.is_pause:  # A callback has saved and stopped: the run goes on from there.
            self.progress_checker.stop_reason = None
        self._call_plain("on_load", path)

    # ----------------------------------------------------------------------------------------- epochs and steps

    def on_epoch_begin(self) -> None:
        """Call ``on_epoch_begin`` of plain callbacks."""
        super().on_epoch_begin()
        self._call_plain("on_epoch_begin")

    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Call Transformers' ``on_epoch_begin`` and ``on_epoch_end``, which comes before the logs of the epoch."""
        with super().epoch_context():
            self.control.reset("should_epoch_stop")
            self.call_event("on_epoch_begin")
            yield
        if self.progress_checker.stop_reason not in (SIGNALED, TIME_IS_UP):  # After these the epoch is resumed.
            self.call_event("on_epoch_end")

    def on_epoch_end(self) -> None:
        """Call ``on_epoch_end`` of plain callbacks."""
        super().on_epoch_end()
        self._call_plain("on_epoch_end")

    def on_step_begin(self, batch: Any) -> None:
        """Call ``on_step_begin``."""
        super().on_step_begin(batch)
        self.control.reset(*_BY_STEP)
        self._call_plain("on_step_begin", batch)
        self.call_event("on_step_begin")

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Call ``on_substep_end`` after each batch of a window but the last."""
        output = super().micro_step(batch, count)
        if self.current_run.activity.micro_index + 1 < count:
            self.call_event("on_substep_end")
        return output

    def optimizer_step(self) -> bool:
        """Call ``on_pre_optimizer_step`` and ``on_optimizer_step``."""
        self.call_event("on_pre_optimizer_step")
        stepped = super().optimizer_step()
        # Before the schedule is stepped: the rate that this step has used.
        self._callbacks.learning_rate = next(iter(self.optimization.learning_rates().values()), None)
        self.call_event("on_optimizer_step")
        return stepped

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Call ``on_step_end``."""
        super().on_step_end(outputs)
        self._callbacks.losses.add(outputs)
        self._call_plain("on_step_end", outputs)
        self.call_event("on_step_end")

    # ---------------------------------------------------------------------------------- evaluations and the logs

    def on_validation_begin(self) -> None:
        """Note the time, and the best before this validation."""
        super().on_validation_begin()
        self._reader.read_best(self._callbacks.state)
        self._begin_evaluation(self.current_run.valid_loader)
        self._callbacks.is_validating = True
        self._call_plain("on_validation_begin")

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        """Call ``on_evaluate``."""
        super().on_validation_end(metrics)
        self._callbacks.is_validating = False
        self._call_plain("on_validation_end", metrics)
        for evaluation in self._callbacks.evaluations:
            self._report_evaluation(evaluation)
        self._callbacks.evaluations = []
        self._reader.read_best(self._callbacks.state)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and call ``on_evaluate``."""
        self._begin_evaluation(args[0] if args else kwargs.get("loader"))
        metrics_or_outputs = super().evaluate(*args, **kwargs)
        if self._callbacks.is_validating:  # An override that a validation calls, which is reported as it ends.
            return metrics_or_outputs
        for prefix, metrics in trainer_state.evaluations_in(metrics_or_outputs).items():
            self._report_evaluation(metrics, prefix)
        return metrics_or_outputs

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, and call ``on_predict``."""
        self._begin_evaluation(args[0] if args else kwargs.get("loader"))
        outputs = super().predict(*args, **kwargs)
        metrics = getattr(outputs, "metrics", None)  # A PredictionOutput of Transformers has them.
        self.call_event("on_predict", metrics=self._with_speed({}, "test") if metrics is None else dict(metrics))
        return outputs

    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """Call ``on_prediction_step`` after each batch of an evaluation."""
        batches = super().evaluation_batches(loader)
        return self._follow_predictions(batches) if self._callbacks.wants("on_prediction_step") else batches

    def _follow_predictions(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self.call_event("on_prediction_step")

    def _begin_evaluation(self, loader: Any) -> None:
        self._callbacks.evaluation_began = time.monotonic()
        self._callbacks.evaluated = loader

    def _with_speed(self, metrics: dict[str, Any], split: str) -> dict[str, Any]:
        """Add how fast the evaluation was, and the epoch."""
        self._read_callback_state()
        seconds = time.monotonic() - self._callbacks.evaluation_began
        speed = trainer_state.speed(split, seconds, *trainer_state.counts_of(self._callbacks.evaluated))
        return {**metrics, **speed, "epoch": self._callbacks.state.epoch}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Call ``on_log``, and keep the record in ``log_history``; that of a validation with its ``on_evaluate``."""
        super().log(metrics, step)
        self._call_plain("on_log", metrics, step)
        logs = trainer_state.logs_of(metrics)
        if self._callbacks.is_validating and any(key.startswith("valid/") for key in metrics):
            loader = self.current_run.valid_loader
            sets = list(loader) if isinstance(loader, Mapping) else []
            self._callbacks.evaluations = trainer_state.logs_by_set(metrics, sets) if sets else [logs]
            return
        if "train/loss" in metrics:
            logs["loss"] = self._callbacks.losses.take_mean(self.progress_checker.step, self._mean_over_ranks)
        if "learning_rate" in logs and self._callbacks.learning_rate is not None:
            logs["learning_rate"] = self._callbacks.learning_rate
        self._log_callbacks(logs)

    def _mean_over_ranks(self, number: Tensor) -> float:
        return float(self.reduce(number)) / self.world_size

    def _report_evaluation(self, metrics: dict[str, Any], prefix: str = "eval") -> None:
        """Log an evaluation, and call ``on_evaluate``."""
        metrics = {key: value for key, value in metrics.items() if key != "epoch"}
        if f"{prefix}_runtime" not in metrics:
            metrics = self._with_speed(metrics, "eval")
        self._log_callbacks(metrics)
        self.control.reset("should_evaluate")
        self.call_event("on_evaluate", metrics=metrics)

    def _log_callbacks(self, logs: dict[str, Any]) -> None:
        """Keep a record, and call Transformers' ``on_log``."""
        self._read_callback_state()
        state = self._callbacks.state
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self.control.reset("should_log")
        self.call_event("on_log", logs=logs)

    # ------------------------------------------------------------------------------------------------- the state

    @property
    def _shared_state(self) -> dict[str, Any]:
        """What all ranks have alike."""
        return {
            "log_history": self._callbacks.state.log_history,
            "total_flos": self._callbacks.state.total_flos,
            "ends_epoch": self.current_run.extent.is_epoch_cut,
            "is_pause": self._callbacks.is_pause,
        }

    @_shared_state.setter
    def _shared_state(self, loaded: Mapping[str, Any]) -> None:
        self._callbacks.state.log_history = [dict(row) for row in loaded["log_history"]]
        self._callbacks.state.total_flos = loaded["total_flos"]
        self._callbacks.ends_epoch = loaded["ends_epoch"]
        self._callbacks.is_pause = loaded.get("is_pause", False)  # Older states do not have it.

    @property
    def _step_losses(self) -> dict[str, Any]:
        """The sums of the losses of steps."""
        return self._callbacks.losses.state_dict()

    @_step_losses.setter
    def _step_losses(self, state: Mapping[str, Any]) -> None:
        self._callbacks.losses.load_state_dict(state)

    @property
    def _callback_states(self) -> dict[str, Any]:
        """The states of the callbacks."""
        return self._callbacks.state_dict()

    @_callback_states.setter
    def _callback_states(self, states: Mapping[str, Any]) -> None:
        self._callbacks.load_state_dict(states)

    def adapt_state(self, entry: Any) -> Any:
        """Check the states of callbacks; a state that was saved without this add-on begins them."""
        if entry is None:
            return {"shared_state": self._shared_state, "callback_states": {}, "step_losses": self._step_losses}
        if isinstance(entry, Mapping):
            self._callbacks.check(entry.get("callback_states"))
            entry = {"step_losses": self._step_losses, **entry}  # Older states have none.
        return entry
