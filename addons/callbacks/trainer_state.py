"""What callbacks read and set, under the names of Transformers and Forgather: the state, the control, the arguments.

None of it needs Transformers. `RunReader` fills them from a trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zae.compose.introspect import slots_of
from zae.compose.options import option_value
from zae.data.loaders import length_of
from zae.distributed.spawn import local_rank
from zae.errors import MissingError, did_you_mean
from zae.loop.history import split_prefix
from zae.loop.limits import remaining
from zae.loop.progress import NO_LIMIT

if TYPE_CHECKING:
    from zae.loop.progress import Every

__all__ = ["CallbackArguments", "RunReader", "TrainerControl", "TrainerState", "counts_of", "logs_of", "speed"]

# What Transformers has for a cadence and a folder that are not given.
_STEPS = 500
_FOLDER = "trainer_output"


@dataclass
class TrainerState:
    """How far a run is, as callbacks of Transformers and Forgather read it.

    It is read from the trainer before each event; a callback that changes it changes nothing else, ``log_history``
    excepted, which checkpoints contain.

    Attributes
    ----------
    epoch : float
        Epochs so far; the decimal part is the share of the open epoch. 0 in it where the loader has no length.
    global_step : int
        Optimizer steps so far.
    max_steps : int
        The optimizer step at which the run ends at the latest; 0 is unknown.
    num_train_epochs : int
        The epoch at which it ends at the latest; 0 is unknown.
    logging_steps, eval_steps, save_steps : int
        Optimizer steps between two logs, validations and saves; a cadence of epochs is counted in steps.
    train_batch_size : int or None
        The batch size of the loader.
    log_history : list of dict
        What was logged, under Transformers' names: "loss", "learning_rate", "eval_loss", "epoch", "step".
    best_metric : float or None
        The best value of the monitored metric, before the validation whose ``on_evaluate`` is called.
    best_global_step : int or None
        The step at which it was measured.
    best_model_checkpoint : str or None
        The checkpoint of it, with StateManagerAddon.
    is_local_process_zero, is_world_process_zero : bool
        Whether this is the first process of this machine, and of all.

    Examples
    --------
    >>> state = TrainerState(global_step=3, max_steps=10)
    >>> state.epoch, state.log_history, state.is_world_process_zero
    (0.0, [], True)
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = _STEPS
    eval_steps: int = _STEPS
    save_steps: int = _STEPS
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None


@dataclass
class TrainerControl:
    """What callbacks ask of the trainer: they set a flag, and may return the object.

    Attributes
    ----------
    should_training_stop : bool
        End the run after this step.
    should_epoch_stop : bool
        End this epoch after this step.
    should_save, should_evaluate, should_log : bool
        Save, validate, and log the training metrics, after this step.

    Examples
    --------
    >>> control = TrainerControl()
    >>> control.should_save = True
    >>> control.flags()
    ['should_save']
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a flag that does not exist, which would do nothing."""
        if name.startswith("should_") and name not in type(self).__annotations__:
            known = [*type(self).__annotations__]
            raise MissingError(f"control has no {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}")
        super().__setattr__(name, value)

    def flags(self) -> list[str]:
        """Return the names of the flags that are set."""
        return [name for name in type(self).__annotations__ if getattr(self, name)]

    def reset(self, *names: str) -> None:
        """Take flags back."""
        for name in names:
            setattr(self, name, False)


class CallbackArguments:
    """The ``args`` of a run without TrainingArguments: the fields that callbacks read, taken from the trainer."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingError(
            f"args has no {name!r} here; it has {', '.join(vars(self))}. Give the arguments that the callback reads: "
            "callback_args=TrainingArguments(...)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(vars(self), indent=2, default=str)


def _metric_of(monitor: str | None) -> str | None:
    """Return the name that a callback of Transformers looks for, which adds the ``eval_`` of a validation itself."""
    return split_prefix(monitor)[1] if monitor is not None and split_prefix(monitor)[0] == "valid" else monitor


def _strategy(every: Every | None) -> str:
    """Return the name of a cadence in TrainingArguments."""
    return "no" if every is None else "epoch" if every.steps is None else "steps"


def _steps(every: Every | None, in_epoch: int | None) -> int:
    """Return a cadence in optimizer steps."""
    if every is None:
        return _STEPS
    return every.steps or (in_epoch or _STEPS) * (every.epochs or 1)


def logs_of(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return a record of ``Trainer.log`` under Transformers' names, with the learning rates last.

    Examples
    --------
    >>> logs_of({"train/loss": 0.5, "lr": 0.1, "valid/acc": 0.9})
    {'loss': 0.5, 'eval_acc': 0.9, 'learning_rate': 0.1}
    """
    logs = {}
    for key, value in metrics.items():
        split, name = split_prefix(key)
        name = f"learning_rate{key[2:]}" if key == "lr" or key.startswith("lr/") else name
        logs[f"eval_{name}".replace("/", "_") if split == "valid" else name] = value
    rates = [key for key in logs if key.startswith("learning_rate")]
    return {**{key: value for key, value in logs.items() if key not in rates}, **{key: logs[key] for key in rates}}


def counts_of(loader: Any) -> tuple[int | None, int | None]:
    """Return how many samples and batches a loader has, or several by name together; None is unknown."""
    loaders = list(loader.values()) if isinstance(loader, Mapping) else [loader]
    datasets = [getattr(each, "dataset", None) for each in loaders]
    samples = [length_of(each) for each in datasets]
    batches = [length_of(each) for each in loaders]
    return _sum(samples), _sum(batches)


def _sum(counts: list[int | None]) -> int | None:
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


def speed(split: str, seconds: float, samples: float | None, steps: float | None) -> dict[str, Any]:
    """Return how fast something was."""
    counts = {"samples": samples, "steps": steps}
    rates = {
        f"{split}_{name}_per_second": round(n / max(seconds, 1e-9), 3) for name, n in counts.items() if n is not None
    }
    return {f"{split}_runtime": round(seconds, 4), **rates}


@dataclass
class RunReader:
    """Read of a run what callbacks are shown of it.

    Attributes
    ----------
    trainer : Trainer
        The trainer.
    in_epoch : int or None
        Optimizer steps of an epoch; None is unknown.
    """

    trainer: Any
    in_epoch: int | None = None

    def arguments(self) -> CallbackArguments:
        """Return what a run is made of under the names of TrainingArguments."""
        run = self.trainer.current_run
        saves = option_value(self.trainer, "save_every")
        folder = option_value(self.trainer, "save_path")
        limits = run.limits
        rates = list(self.trainer.optimization.learning_rates().values())
        validates = limits.valid_every if run.valid_loader is not None else None
        sizes = [getattr(loader, "batch_size", None) for loader in (run.user_loader, run.valid_loader)]
        return CallbackArguments(
            {
                "output_dir": _FOLDER if folder is None else str(folder),
                "run_name": None,
                "num_train_epochs": limits.n_epoch,
                "max_steps": -1 if limits.max_steps is None else limits.max_steps,
                "learning_rate": rates[0] if rates else None,
                "gradient_accumulation_steps": self.trainer.step_window.batches,
                "max_grad_norm": self.trainer.gradient_clip,
                "seed": self.trainer.seed,
                "device": self.trainer.device,
                "world_size": self.trainer.world_size,
                "process_index": self.trainer.rank,
                **dict.fromkeys(("train_batch_size", "per_device_train_batch_size"), sizes[0]),
                **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), sizes[1]),
                "logging_strategy": _strategy(self.trainer.log_every),
                "logging_steps": self.trainer.log_every.steps or _STEPS,
                "logging_first_step": False,
                "eval_strategy": _strategy(validates),
                "eval_steps": validates.steps if validates is not None else None,
                "eval_delay": 0,
                "save_strategy": _strategy(saves),
                "save_steps": (saves.steps if saves is not None else None) or _STEPS,
                "metric_for_best_model": _metric_of(self.trainer.monitor),
                "greater_is_better": self.trainer.history.direction == "max",
                "load_best_model_at_end": False,
                "disable_tqdm": self.trainer.log_bar in (False, "lines"),
            }
        )

    def read(self, state: TrainerState) -> None:
        """Set where the run stands."""
        progress = self.trainer.progress_checker
        share = min(progress.epoch_step / self.in_epoch, 1.0) if self.in_epoch else 0.0
        state.epoch = progress.epoch + share
        state.global_step = progress.step

    def begin(self, state: TrainerState) -> None:
        """Set what holds for a whole call of ``run``."""
        run = self.trainer.current_run
        progress = self.trainer.progress_checker
        steps = remaining(progress, run.extent.last_epoch, run.extent.last_step, self.in_epoch)[1]
        state.max_steps = 0 if steps is None else progress.step + steps
        state.num_train_epochs = 0 if run.extent.last_epoch == NO_LIMIT else run.extent.last_epoch
        if not state.num_train_epochs and self.in_epoch and state.max_steps:
            state.num_train_epochs = math.ceil(state.max_steps / self.in_epoch)
        saves = option_value(self.trainer, "save_every")
        for name, every in (("logging", self.trainer.log_every), ("eval", run.limits.valid_every), ("save", saves)):
            setattr(state, f"{name}_steps", _steps(every, self.in_epoch))
        state.train_batch_size = getattr(run.user_loader, "batch_size", None)
        state.is_world_process_zero = self.trainer.is_main
        state.is_local_process_zero = self.trainer.is_main or (self.trainer.world_size > 1 and local_rank() == 0)

    def read_best(self, state: TrainerState) -> None:
        """Set the best score so far."""
        saves = "state" in slots_of(type(self.trainer))
        best = self.trainer.best
        path = self.trainer.best_path if saves else None
        state.best_metric = best["score"] if dict.__contains__(best, "score") else None
        state.best_global_step = best["step"] if dict.__contains__(best, "step") else None
        state.best_model_checkpoint = None if path is None else str(path)

    def mean_loss(self, first_step: int) -> float | None:
        """Return the mean of the training loss by optimizer step, from a step on; None where no loss is recorded."""
        total = 0.0
        before = first_step
        for row in self.trainer.train_history:
            if row["step"] > before and "train_loss" in list(row):
                total = total + row["train_loss"] * (row["step"] - before)
                before = row["step"]
        open_loss = self.trainer.log_train.means().get("loss") if self.trainer.progress_checker.epoch_batch else None
        if open_loss is not None:
            total = total + open_loss * (self.trainer.progress_checker.step - before)
            before = self.trainer.progress_checker.step
        return total / (before - first_step) if before > first_step else None

    def end_logs(self, seconds: float, first_step: int) -> dict[str, Any]:
        """Return what is logged when a run ends: its speed, and its mean loss."""
        steps = self.trainer.progress_checker.step - first_step
        loss = self.mean_loss(first_step)
        samples = counts_of(self.trainer.current_run.user_loader)[0]
        trained = None if samples is None or not self.in_epoch else samples * steps / self.in_epoch
        logs = {**speed("train", seconds, trained, steps), "total_flos": 0.0}
        return logs if loss is None else {**logs, "train_loss": loss}
