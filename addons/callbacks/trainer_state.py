"""What callbacks read and set, under the names of Transformers and Forgather: the state, the control, the arguments.

None of it needs Transformers. `RunReader` fills them from a trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.compose.introspect import slots_of
from zae.compose.options import option_value
from zae.data.loaders import length_of
from zae.distributed.launcher import local_rank
from zae.errors import MissingError, did_you_mean
from zae.loop.limits import remaining
from zae.loop.metric_rows import split_prefix
from zae.loop.progress import NO_LIMIT

if TYPE_CHECKING:
    from zae.loop.cadence import Every

__all__ = [
    "CallbackArguments",
    "RunReader",
    "StepLosses",
    "TrainerControl",
    "TrainerState",
    "counts_of",
    "evaluations_in",
    "logs_by_set",
    "logs_of",
    "speed",
]

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
            names = [*type(self).__annotations__]
            raise MissingError(f"control has no {name!r}{did_you_mean(name, names)}; it has {', '.join(names)}")
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
    """Return a record of ``Trainer.log`` under Transformers' names: the rate of the first group, and last.

    Examples
    --------
    >>> logs_of({"train/loss": 0.5, "lr": 0.1, "lr/1": 0.2, "valid/acc": 0.9})
    {'loss': 0.5, 'eval_acc': 0.9, 'learning_rate': 0.1}
    """
    logs = {}
    for key, value in metrics.items():
        split, name = split_prefix(key)
        if key != "lr" and not key.startswith("lr/"):
            logs[f"eval_{name}".replace("/", "_") if split == "valid" else name] = value
    rate = next((value for key, value in metrics.items() if key == "lr" or key.startswith("lr/")), None)
    return logs if rate is None else {**logs, "learning_rate": rate}


def logs_by_set(metrics: Mapping[str, float], names: list[str]) -> list[dict[str, Any]]:
    """Return the record of each of several sets of a validation.

    Examples
    --------
    >>> logs_by_set({"valid/loss": 2.0, "valid/a/loss": 1.0, "valid/b/loss": 3.0}, ["a", "b"])
    [{'eval_a_loss': 1.0}, {'eval_b_loss': 3.0}]
    """
    return [logs_of({key: metrics[key] for key in metrics if key.startswith(f"valid/{name}/")}) for name in names]


def evaluations_in(metrics: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return what ``evaluate`` has returned for each set, by the prefix of its names.

    Examples
    --------
    >>> evaluations_in({"eval_a_loss": 1.0, "eval_a_runtime": 0.1, "eval_b_loss": 2.0, "eval_b_runtime": 0.1})["eval_b"]
    {'eval_b_loss': 2.0, 'eval_b_runtime': 0.1}
    >>> evaluations_in({"loss": 1.0})
    {'eval': {'eval_loss': 1.0}}
    """
    prefixes = [key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")]
    if not prefixes:
        return {"eval": {key if key.startswith("eval_") else f"eval_{key}": value for key, value in metrics.items()}}
    records: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    for key, value in metrics.items():
        owner = max((prefix for prefix in prefixes if key.startswith(f"{prefix}_")), key=len, default=None)
        if owner is not None:
            records[owner][key] = value
    return records


class StepLosses:
    """The sum of the losses of steps, since the last record and in the whole run: each step counts the same."""

    def __init__(self) -> None:
        self._since_log: Any = 0.0
        self._before = 0.0
        self._logged_at = 0
        self._began_at = 0

    def begin(self, step: int) -> None:
        """Begin a run at a step."""
        self.load_state_dict({"since_log": 0.0, "before": 0.0, "logged_at": step, "began_at": step})

    def add(self, outputs: Sequence[Any]) -> None:
        """Add the loss of a step, the mean over its batches; several optimizers have a loss each, and no sum."""
        losses = [output.loss.detach() * output.weight for output in outputs if isinstance(output.loss, Tensor)]
        if losses:
            self._since_log = self._since_log + sum(losses) / sum(output.weight for output in outputs)

    def take_mean(self, step: int, mean: Callable[[Tensor], float]) -> float:
        """Return the mean over the steps since the last record, and over the ranks."""
        total = mean(torch.as_tensor(self._since_log))
        steps = max(step - self._logged_at, 1)
        self._before += total
        self._since_log = 0.0
        self._logged_at = step
        return total / steps

    def mean_of_run(self, step: int, mean: Callable[[Tensor], float]) -> float | None:
        """Return the mean over the steps of the run; None where it has none."""
        total = self._before + mean(torch.as_tensor(self._since_log))
        return total / (step - self._began_at) if step > self._began_at else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the steps at which they begin."""
        return {
            "since_log": float(self._since_log),
            "before": self._before,
            "logged_at": self._logged_at,
            "began_at": self._began_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self._since_log = state["since_log"]
        self._before = state["before"]
        self._logged_at = state["logged_at"]
        self._began_at = state["began_at"]


def counts_of(loader: Any) -> tuple[int | None, int | None]:
    """Return how many samples and batches a loader has, or several by name together; None is unknown."""
    loaders = list(loader.values()) if isinstance(loader, Mapping) else [loader]
    datasets = [getattr(part, "dataset", None) for part in loaders]
    samples = [length_of(dataset) for dataset in datasets]
    batches = [length_of(part) for part in loaders]
    return _sum(samples), _sum(batches)


def _sum(counts: list[int | None]) -> int | None:
    counts_known = [count for count in counts if count is not None]
    return sum(counts_known) if len(counts_known) == len(counts) else None


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
    in_epoch, batches : int or None
        Optimizer steps and batches of an epoch; None is unknown.
    """

    trainer: Any
    in_epoch: int | None = None
    batches: int | None = None

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

    @property
    def begin_of_call(self) -> tuple[int, int]:
        """The epoch and the step at which the present call of ``run`` began: Transformers counts from there."""
        start: tuple[int, int] = self.trainer.progress_checker.run_calls.present_start
        return start

    def read(self, state: TrainerState) -> None:
        """Set where the run stands."""
        progress = self.trainer.progress_checker
        share = min(progress.epoch_batch / self.batches, 1.0) if self.batches else 0.0
        first_epoch, first_step = self.begin_of_call
        state.epoch = progress.epoch - first_epoch + share
        state.global_step = progress.step - first_step

    def batches_in_epoch(self) -> int | None:
        """Return how many batches an epoch has on this rank."""
        run = self.trainer.current_run
        limit = run.limits.steps_per_epoch
        counts = [length_of(run.activity.loader), limit and limit * self.trainer.step_window.batches]
        return min((count for count in counts if count), default=None)

    def begin(self, state: TrainerState) -> None:
        """Set what holds for a whole call of ``run``."""
        run = self.trainer.current_run
        progress = self.trainer.progress_checker
        steps = remaining(progress, run.extent.last_epoch, run.extent.last_step, self.in_epoch)[1]
        first_epoch, first_step = self.begin_of_call
        state.max_steps = 0 if steps is None else progress.step - first_step + steps
        state.num_train_epochs = 0 if run.extent.last_epoch == NO_LIMIT else run.extent.last_epoch - first_epoch
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
        is_known = dict.get(best, "split") == "valid"  # Transformers knows the best of evaluations alone.
        path = self.trainer.best_path if saves and is_known else None
        state.best_metric = best["score"] if is_known else None
        state.best_global_step = best["step"] - self.begin_of_call[1] if is_known and saves else None
        state.best_model_checkpoint = None if path is None else str(path)

    def end_logs(self, seconds: float, first_step: int, loss: float | None) -> dict[str, Any]:
        """Return what is logged when a run ends: its speed, and its mean loss."""
        steps = self.trainer.progress_checker.step - first_step
        samples = counts_of(self.trainer.current_run.user_loader)[0]
        trained = None if samples is None or not self.in_epoch else samples * steps / self.in_epoch
        logs = {**speed("train", seconds, trained, steps), "total_flos": 0.0}
        return logs if loss is None else {**logs, "train_loss": loss}
