"""`hyperparameter_search` with the signature of Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zae.compose.options import option_value
from zae.errors import OptionError, did_you_mean
from zae.search.trial import Trial

__all__ = [
    "BestRun",
    "LastScore",
    "RunAndScore",
    "default_hp_space",
    "name_of",
    "new_folder",
    "options_of",
]

_STUDY = ("sampler", "pruner")  # Arguments of optuna's create_study that are carried,
_OPTIMIZE = {"timeout": "max_time", "catch": "catch"}  # and of optimize.
_REFUSED = {
    "storage": "the study is in the folder, search.journal",
    "study_name": "a folder has one study; give another folder",
    "load_if_exists": "a search continues in its folder by itself",
    "directions": "write direction=[...]",
    "n_jobs": "trials are trained one after the other; leave it out, or start a search with another folder and seed "
    "for each device",
}


class BestRun(NamedTuple):
    """The best trial of a search, as Transformers returns it.

    Attributes
    ----------
    run_id : str
        The number of the trial.
    objective : float or list of float
        Its score, or one for each direction.
    hyperparameters : dict of str to object
        Its parameters.
    run_summary : object
        The `SearchResult`, where Transformers has None for optuna.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Return the parameters that Transformers searches by default, of a trial of optuna."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, float]) -> float | None:
    """Return the loss where there is no other metric, else the sum of all others, as Transformers does."""
    left_out = ("epoch", "eval_loss")
    others = [
        value
        for name, value in metrics.items()
        if name not in left_out and not name.endswith(("_runtime", "_per_second"))
    ]
    return sum(others) if others else metrics.get("eval_loss")


@dataclass
class LastScore:
    """The objective of a search, of metrics with the names that Transformers gives them.

    Attributes
    ----------
    compute_objective : callable or None
        What the user gave; None is the default of Transformers.
    trainer : Trainer or None
        The trainer of the trial that trains now, which knows the epoch and the names of its evaluation sets.
    """

    compute_objective: Callable[[Any], Any] | None
    trainer: Any = None

    def __call__(self, metrics: Mapping[str, float]) -> Any:
        return (self.compute_objective or default_compute_objective)(self._named(metrics))

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation as ``transformers.Trainer.evaluate`` does."""
        if any(name.startswith("eval_") for name in [*metrics]):  # What ``HuggingFaceAddon.evaluate`` returned.
            return dict(metrics)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        if self.trainer is None:
            return named
        sets = option_value(self.trainer, "eval_dataset")
        if isinstance(sets, Mapping):  # Transformers has those of each set alone: "a/loss" is "eval_a_loss".
            of_sets = {}
            for name, value in named.items():
                for each in sets:
                    if name.startswith(f"eval_{each}/"):
                        of_sets[name.replace(f"eval_{each}/", f"eval_{each}_", 1)] = value
            named = of_sets
        return {**named, "epoch": _epochs_of(self.trainer)}


def _epochs_of(trainer: Any) -> float:
    """Return the epochs that were trained, with the part of the open one."""
    progress = trainer.progress_checker
    in_epoch = trainer.current_run.extent.steps_in_epoch
    return float(progress.epoch + progress.epoch_step / (in_epoch or progress.epoch_step or 1))


@dataclass(frozen=True)
class RunAndScore:
    """Train a trial; its score is that of the last validation, or of the metrics that ``run`` returns."""

    run: Callable[..., Any]
    objective: LastScore

    def __call__(self, trainer: Any, trial: Trial) -> Any:
        self.objective.trainer = trainer
        try:
            found = self.run(trainer)
            if trial.is_pruned:
                return None
            metrics = trainer.history.test_metrics or found
            return self.objective(metrics) if isinstance(metrics, Mapping) else found
        finally:
            self.objective.trainer = None  # It is freed before the next trial.


def new_folder(place: str | Path) -> Path:
    """Return the first folder ``search-1``, ``search-2`` and so on in a place that does not exist."""
    number = 1
    while Path(place, f"search-{number}").exists():
        number += 1
    return Path(place, f"search-{number}")


def name_of(trial: Trial) -> str:
    return f"run-{trial.number}"


def options_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `search` that Transformers' keyword arguments are."""
    found = {}
    for name, value in kwargs.items():
        if name in _REFUSED:
            raise OptionError(f"hyperparameter_search(): {name} is not taken: {_REFUSED[name]}")
        if name == "gc_after_trial":
            continue  # Memory is given back after each trial.
        if name not in (*_STUDY, *_OPTIMIZE, "seed", "log_bar"):
            hint = did_you_mean(name, (*_STUDY, *_OPTIMIZE, "seed"))
            raise OptionError(f"hyperparameter_search() has no argument {name!r}{hint}")
        found[_OPTIMIZE.get(name, name)] = value
    return found
