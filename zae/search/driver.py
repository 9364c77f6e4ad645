"""`search`: train many times with other parameters, and return which were best."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from zae.checkpoint.locks import FolderLock
from zae.common.argument_checks import check_count, check_flags
from zae.display.terminal import write_line
from zae.display.text import duration, number
from zae.errors import ConfigError, printable
from zae.search import arguments, huggingface
from zae.search.conduct import Search
from zae.search.huggingface import BestRun
from zae.search.result import SearchResult
from zae.search.scores import OtherDirectionError
from zae.search.study import load_optuna, repair
from zae.search.trial import Trial

__all__ = ["hyperparameter_search", "search"]

_log = logging.getLogger("zae")


def search(
    make_trainer: Callable[[Trial], Any],
    space: Any = None,
    n_trials: int = 20,
    direction: str | Sequence[str] | None = None,
    pruner: Any = None,
    *,
    run: Callable[..., Any],
    folder: str | Path,
    objective: Callable[[Any], Any] | None = None,
    sampler: Any = None,
    seed: int | None = None,
    max_time: float | timedelta | None = None,
    catch: type[BaseException] | Sequence[type[BaseException]] | None = None,
    name: Callable[[Trial], str] | None = None,
    log_bar: bool = True,
) -> SearchResult:
    """Search for the best parameters of a run with optuna: each trial has its own trainer and its own folder.

    A search that was ended, by a signal for instance, continues when it is called again: finished trials are kept, and
    an interrupted one is begun again, or continues from its own checkpoint where its trainer has StateManagerAddon with
    ``resume="auto"``. With a sampler that is seeded, it ends as it would have without the interruption.

    Parameters
    ----------
    make_trainer : callable
        Returns a new trainer with a new model for a `Trial`, a mapping of the parameters. Give ``trial.folder`` to what
        it saves and logs.
    space : dict or callable, optional
        For each parameter a range ``(low, high)``, ``(low, high, "log")`` or ``(low, high, step)``, of ints or floats,
        or a list of choices; or a function of an optuna trial that returns the parameters. None where ``make_trainer``
        calls ``trial.suggest_float`` and the like.
    n_trials : int
        The trials of this folder in all: finished, failed and pruned ones.
    direction : str or list of str, optional
        "minimize" or "maximize"; one for each of several scores. None is that of the trainer's monitor, and with
        ``objective`` "minimize".
    pruner : optuna.pruners.BasePruner, optional
        Ends trials whose validations are worse than those of others. None prunes nothing.
    run : callable
        Trains: ``run(trainer)`` or ``run(trainer, trial)``. It may return the score, or one for each direction, or the
        metrics of an evaluation, which are then scored.
    folder : str or Path
        Where the study and a folder for each trial are written.
    objective : callable, optional
        Returns the score of the metrics of a validation. By default it is the metric that the trainer monitors. The
        score of a trial is its best one; with several directions, its last ones.
    sampler : callable or optuna.samplers.BaseSampler, optional
        A function of ``seed`` that returns a sampler, such as the class ``optuna.samplers.RandomSampler``; by default
        ``TPESampler``. A sampler that exists already begins from its own state when a search is continued.
    seed : int, optional
        The same seed gives the same trials. The global random streams have their own seed in each trial
        and are put back after it.
    max_time : float or timedelta, optional
        Seconds after which no further trial begins.
    catch : exception class or list of them, optional
        Errors that fail one trial, with a warning in the log, and not the search. By default all, once a trial has
        ended; before that only NonFiniteError and torch.OutOfMemoryError. The next call continues the trial of any
        other error.
    name : callable, optional
        Returns the name of the folder of a trial; by default ``trial-0000`` and so on.
    log_bar : bool
        Whether to write a line for each trial to standard error.

    Returns
    -------
    SearchResult
        Its trials; it prints as a table.

    Raises
    ------
    ConfigError
        An argument cannot be used; the folder has another search; all trials have failed.
    AddOnRequirement
        optuna is not installed.

    Examples
    --------
    >>> import torch, zae, tempfile
    >>> from zae.search import search
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}
    ...     test_step = train_step
    >>> def make_trainer(trial):
    ...     optimizer = lambda parameters: torch.optim.SGD(parameters, lr=trial["lr"])
    ...     return Task(lambda: torch.nn.Linear(4, 1), "cpu", optimizer=optimizer, seed=0, log_bar=False)
    >>> batches = [torch.eye(4)] * 5
    >>> found = search(make_trainer, {"lr": (1e-4, 1.0, "log")}, n_trials=3, seed=0, folder=tempfile.mkdtemp(),
    ...                run=lambda trainer: trainer.run(2, batches, batches))
    >>> len(found.trials), found.best_value == min(trial.value for trial in found.trials)
    (3, True)
    """
    given = arguments.check_arguments(
        make_trainer, run, space, direction, pruner, objective, sampler, seed, catch, name
    )
    n_trials = check_count("n_trials", n_trials)
    (log_bar,) = check_flags(log_bar=log_bar)
    seconds = arguments.check_seconds(max_time)
    load_optuna()
    made = Search(folder=arguments.check_directory(folder), **given)
    lock = FolderLock(made.folder, "folder")
    lock.acquire()
    try:
        _conduct_all(made, n_trials, seconds, log_bar)
    except KeyboardInterrupt:
        if made.is_open:
            _log.warning(f"the search was interrupted, and continues when it is called again:\n{made.result()}")
        raise
    finally:
        lock.release()
    return _checked(made.result())


def _checked(result: SearchResult) -> SearchResult:
    """Return a result; ConfigError if all trials have failed."""
    if result.trials and all(each.state == "fail" for each in result.trials):
        first = result.trials[0]
        raise ConfigError(
            f"all {len(result.trials)} trials of the search in {result.folder} have failed; the first one: "
            f"{first.error}; its parameters: {first.params}"
        )
    return result


def _conduct_all(made: Search, n_trials: int, seconds: float, shows: bool) -> None:
    """Continue the interrupted trials, then begin new ones."""
    try:
        _conduct_each(made, n_trials, seconds, shows)
        return
    except OtherDirectionError as found:  # Of the first trial's trainer; nothing has been trained.
        made.settings = {**made.settings, "directions": [found.direction]}
    _conduct_each(made, n_trials, seconds, shows)


def _conduct_each(made: Search, n_trials: int, seconds: float, shows: bool) -> None:
    repair(made.folder)
    made.open()
    tasks: list[int | None] = [*made.interrupted()]
    tasks += [None] * (n_trials - len(made.frozen()))
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    for task in tasks:
        if time.monotonic() > deadline:
            break
        asked = made.ask(task)
        made.conduct(asked)
        made.warn_of_failure(asked.number)
        if shows:
            write_line(f"{_line(made, asked.number, n_trials)}; {duration(time.monotonic() - began)}")


def _line(made: Search, at: int, count: int) -> str:
    """Return the line that is shown of a trial that has ended."""
    result = made.result()
    each = result.trials[at]
    score = ", ".join(map(number, each.values)) if each.values else each.state
    params = " ".join(f"{name}={number(value)}" for name, value in each.params.items())
    best = result.best_trials[:1] if len(made.directions) == 1 else []
    said = "".join(f"; best {number(one.values[0])} in trial {one.number}" for one in best)
    return printable(f"trial {at + 1} of {max(count, at + 1)}: {score} ({params}){said}", kept="")


def hyperparameter_search(
    make_trainer: Callable[[Trial], Any],
    run: Callable[..., Any],
    folder: str | Path,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], float] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Search as ``transformers.Trainer.hyperparameter_search`` does, with `search`.

    Parameters
    ----------
    make_trainer : callable
        Returns a new trainer for a trial, a mapping of the parameters.
    run : callable
        Trains a trainer, with its validations, or returns the metrics of an evaluation.
    folder : str or Path
        Where the search is.
    hp_space : callable, optional
        Returns the parameters of a trial of optuna; by default those of Transformers.
    compute_objective : callable, optional
        Returns the score of the metrics of a validation, whose names begin with ``eval_``. By default the loss, or the
        sum of all other metrics. The score of a trial is that of its last validation.
    n_trials : int
        Trials in all.
    direction : str or list of str
        "minimize" or "maximize"; one for each of several scores.
    backend : str, optional
        Only "optuna".
    hp_name : callable, optional
        Returns the name of the folder of a trial; by default ``run-0`` and so on.
    **kwargs : object
        ``sampler``, ``pruner``, ``timeout`` and ``catch`` of optuna, and ``seed``.

    Returns
    -------
    BestRun, or list of them
        The best trial, or with several directions all that no other one is better than.

    Raises
    ------
    ConfigError
        Another backend; otherwise as `search`.
    """
    chosen = str(getattr(backend, "value", backend or "optuna"))
    if chosen != "optuna":
        raise ConfigError(
            f"backend={chosen!r}; zae searches with optuna alone: write backend='optuna', or leave it out"
        )
    objective = huggingface.LastScore(compute_objective)
    space = hp_space or huggingface.default_hp_space
    name = hp_name or huggingface.name_of
    given = {"pruner": None, **huggingface.options_of(kwargs), "objective": objective, "name": name}
    scored = huggingface.RunAndScore(run, objective)
    found = search(make_trainer, space, n_trials, direction, run=scored, folder=folder, **given)
    best = [
        BestRun(str(each.number), each.values[0] if isinstance(direction, str) else each.values, each.params, found)
        for each in found.best_trials
    ]
    return best[0] if isinstance(direction, str) and best else best
