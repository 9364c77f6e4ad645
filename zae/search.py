"""Search for good hyperparameters with optuna, in a study that goes on after it was killed.

``from zae.search import search``. It needs the package optuna (``pip install zae[search]``), which is imported when a
search begins. optuna draws and keeps the trials; here is what makes a search that was killed end as one that was not.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch

from zae import random_state
from zae.addon import AddOnBase
from zae.arguments import Count, Interval, checked
from zae.arguments.paths import check_folder
from zae.checkpoint.locks import FolderLock
from zae.compose.options import option_value
from zae.device import release_memory
from zae.display.terminal import write_line
from zae.distributed.launcher import launched_world
from zae.errors import AddOnRequirement, ConfigError, NonFiniteError, printable
from zae.values.describe import describe_value

__all__ = ["BestRun", "PruningAddon", "hyperparameter_search", "load_study", "search"]

_log = logging.getLogger("zae")

_JOURNAL = "search.journal"
_STUDY = "search"
SamplerSeed: TypeAlias = Annotated[int, Interval(f"[0, {2**32})"), "a whole number of at least 0 and below 2**32"]
_SEED = "seed"  # Among the user attributes of the study.
_CAUGHT = (NonFiniteError, torch.OutOfMemoryError)


class PruningAddon(AddOnBase):
    """Report each validation to a trial of optuna, and stop the run where the pruner of the study ends the trial.

    Parameters
    ----------
    optuna_trial : optuna.Trial
        What `search` gives to the objective.
    optuna_objective : callable, optional
        Returns the score of the metrics of a validation. By default it is the metric that the trainer monitors.

    Examples
    --------
    >>> import torch, zae
    >>> from zae.search import PruningAddon
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    >>> def objective(trial):
    ...     trainer = Task.add_on(PruningAddon)(torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.SGD,
    ...                                         optuna_trial=trial)
    """

    layer = "control"
    process_attributes = {"optuna_trial": None}

    def __init__(
        self,
        *args: Any,
        optuna_trial: Any,
        optuna_objective: Callable[[Mapping[str, float]], float | None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.optuna_trial = optuna_trial
        self.optuna_objective = optuna_objective

    def setup(self) -> None:
        """Refuse several ranks: only one of them has the trial."""
        super().setup()
        if self.world_size > 1:
            raise ConfigError(
                "PruningAddon reports to a trial of optuna from one process, and this trainer has "
                f"{self.world_size} ranks; leave out PruningAddon, or train each trial in one process"
            )

    def check_better(self, metrics: Mapping[str, float]) -> bool:
        """Report the metrics, after they are compared with the best."""
        better = super().check_better(metrics)
        trial = self.optuna_trial
        score = self.score_of(metrics) if self.optuna_objective is None else self.optuna_objective(metrics)
        if trial is None or score is None or len(trial.study.directions) > 1:
            return better
        step = self.progress_checker.step
        # A trial that begins again after a kill repeats what it had reported.
        if step not in trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(score, step)
        if trial.should_prune():
            self.stop(f"trial {trial.number} is pruned")
        return better


@checked
def search(
    objective: Callable[[Any], float | Sequence[float]],
    n_trials: Count = 20,
    direction: str | Sequence[str] = "minimize",
    *,
    folder: str | Path,
    seed: SamplerSeed | None = None,
    sampler: Any = None,
    pruner: Any = None,
    timeout: float | None = None,
    catch: type[BaseException] | tuple[type[BaseException], ...] = _CAUGHT,
) -> Any:
    """Train trials with other hyperparameters each, in a study of optuna in a folder.

    It is ``optuna.Study.optimize`` that can be killed: called again, it takes up the trial that was running, with the
    same number and parameters, and adds what is left of ``n_trials``. Each draw and each trial has a seed of its own,
    so a search that was killed ends with the trials and the values of one that was not.

    Parameters
    ----------
    objective : callable
        Makes a trainer with the parameters of an ``optuna.Trial``, trains, and returns the score, or one for each
        direction. Everything that a trial saves needs a place of its own: ``f"runs/search/{trial.number}"``.
    n_trials : int
        The trials of this folder in all: finished, failed and pruned ones.
    direction : str or list of str
        "minimize" or "maximize"; one for each of several scores.
    folder : str or Path
        Where the study is kept.
    seed : int, optional
        The same seed gives the same trials. The global random streams are seeded for each trial, and put back after it.
    sampler : callable or optuna.samplers.BaseSampler, optional
        A function of ``seed`` that returns a sampler, such as the class ``optuna.samplers.RandomSampler``; by default
        ``TPESampler``. A sampler object is used as it is, and draws other parameters after a kill.
    pruner : optuna.pruners.BasePruner, optional
        Ends trials whose validations are worse than those of others, where the trainer has `PruningAddon`. By default
        it is optuna's, ``MedianPruner``.
    timeout : float, optional
        Seconds after which no further trial begins.
    catch : exception class or tuple of them
        Errors that fail a trial, with a warning. Any other one ends the search; the next call takes up its trial.

    Returns
    -------
    optuna.Study
        ``best_params``, ``best_value``, ``trials`` and ``trials_dataframe()``.

    Raises
    ------
    ConfigError
        An argument cannot be used; the folder has a search with another seed or direction.
    AddOnRequirement
        optuna is not installed.

    Examples
    --------
    >>> import optuna, tempfile, torch, zae
    >>> from zae.search import search
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}
    ...     test_step = train_step
    >>> batches = [torch.eye(4)] * 5
    >>> def objective(trial):
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1.0, log=True))
    ...     trainer = Task(model, "cpu", optimizer=optimizer, log_bar=False)
    ...     trainer.run(2, batches, batches)
    ...     return trainer.history.best["score"]
    >>> study = search(objective, n_trials=3, folder=tempfile.mkdtemp(), seed=0)
    >>> len(study.trials), study.best_value == min(trial.value for trial in study.trials)
    (3, True)
    """
    optuna = _load_optuna()
    directions = [direction] if isinstance(direction, str) else [*direction]
    with _locked(folder) as path:
        study = _open_study(optuna, path, directions, seed, sampler, pruner)
        deadline = None if timeout is None else time.monotonic() + timeout
        trials = study.get_trials(deepcopy=False)
        running = [trial.number for trial in trials if not trial.state.is_finished()]
        for number in [*running, *range(len(trials), n_trials)]:
            if deadline is not None and time.monotonic() > deadline:
                break
            trial = _trial_again(optuna, study, number) if number < len(trials) else study.ask()
            _conduct(optuna, study, trial, objective, catch)
            _show(optuna, study, number, n_trials)
    return study


def load_study(folder: str | Path) -> Any:
    """Return the study in the folder of a search, also of one that still runs.

    Parameters
    ----------
    folder : str or Path
        That of `search`.

    Returns
    -------
    optuna.Study
        With the trials so far; its plots and its dashboard read it too.

    Raises
    ------
    ConfigError
        The folder has no search.
    """
    path = Path(folder).expanduser()
    if not (path / _JOURNAL).exists():
        raise ConfigError(f"{path} has no search: {_JOURNAL} is missing; give the folder of zae.search.search")
    optuna = _load_optuna()
    return optuna.load_study(study_name=_STUDY, storage=_storage(optuna, path))


def _load_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise AddOnRequirement(
            f"a search needs the package optuna, which cannot be imported ({error}): pip install optuna"
        ) from error


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[Path]:
    """Lock the folder of a search, and mend the journal that a killed process left."""
    world = launched_world()
    if world is not None and world[1] > 1:
        raise ConfigError(
            f"a search runs in one process, and a launcher has started {world[1]} ranks; start it without the launcher"
        )
    path = Path(os.path.abspath(check_folder(folder, "folder")))
    lock = FolderLock(path, "folder")
    lock.acquire()
    try:
        # No other process writes: a line without its end, and optuna's lock, are of one that was killed.
        with contextlib.suppress(FileNotFoundError), (path / _JOURNAL).open("r+b") as journal:
            journal.truncate(journal.read().rfind(b"\n") + 1)
        with contextlib.suppress(FileNotFoundError):
            (path / f"{_JOURNAL}.lock").unlink()
        yield path
    finally:
        lock.release()


def _storage(optuna: Any, folder: Path) -> Any:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / _JOURNAL)))


def _open_study(optuna: Any, folder: Path, directions: list[str], seed: int | None, sampler: Any, pruner: Any) -> Any:
    """Return the study in a folder; ConfigError where it began with another seed or direction."""
    study = optuna.create_study(
        study_name=_STUDY, storage=_storage(optuna, folder), directions=directions, load_if_exists=True, pruner=pruner
    )
    if _SEED not in study.user_attrs:
        study.set_user_attr(_SEED, random.SystemRandom().randrange(2**31) if seed is None else seed)
    began_with = {
        "direction": [direction.name.lower() for direction in study.directions],
        "seed": study.user_attrs[_SEED],
    }
    for name, value in {"direction": directions, "seed": seed}.items():
        if value is not None and value != began_with[name]:
            raise ConfigError(
                f"folder={str(folder)!r} has another search: it began with {name}={began_with[name]!r}, and this one "
                f"has {name}={value!r}; choose another folder, or remove that one"
            )
    is_object = hasattr(sampler, "sample_independent") and not isinstance(sampler, type)
    make_sampler = sampler or optuna.samplers.TPESampler
    study.sampler = sampler if is_object else _SeededSampler(make_sampler, began_with["seed"])
    return study


def _seed_of(*parts: Any) -> int:
    """Return a seed from 0 to 2**32 - 1 that depends on the parts alone."""
    return zlib.crc32(repr(parts).encode())


class _SeededSampler:
    """Draw each parameter with a new sampler, whose seed depends on the trial and on the parameter's name.

    A trial that was killed between two draws then draws what it would have drawn.
    """

    def __init__(self, make_sampler: Callable[..., Any], seed: int) -> None:
        self._make_sampler = make_sampler
        self._seed = seed
        self._sampler = make_sampler(seed=_seed_of(seed))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        sampler = self._make_sampler(seed=_seed_of(self._seed, trial.number))
        sampler.infer_relative_search_space(study, trial)  # Some samplers keep what they infer.
        return sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        sampler = self._make_sampler(seed=_seed_of(self._seed, trial.number, name))
        return sampler.sample_independent(study, trial, name, distribution)


def _trial_again(optuna: Any, study: Any, number: int) -> Any:
    """Return a trial that was interrupted, with the parameters that it has drawn."""
    storage = study._storage
    study_id = storage.get_study_id_from_name(study.study_name)
    return optuna.trial.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


def _conduct(optuna: Any, study: Any, trial: Any, objective: Callable[[Any], Any], catch: Any) -> None:
    """Train one trial, and record how it ended; where an error or a signal ends the search, it stays open."""
    states = optuna.trial.TrialState
    with random_state.isolated():
        random_state.seed_everything(_seed_of(study.user_attrs[_SEED], trial.number))
        try:
            values = _values_of(optuna, trial, objective)
        except optuna.TrialPruned:
            study.tell(trial, state=states.PRUNED)
        except catch as error:
            text = printable(f"{type(error).__name__}: {error}", kept="")
            trial.set_user_attr("error", text)
            study.tell(trial, state=states.FAIL)
            _log.warning(f"trial {trial.number} of the search failed: {text}; its parameters: {trial.params}")
        except Exception as error:
            error.add_note(
                f"zae: in trial {trial.number} of a search, with {trial.params}. The next call takes up this trial; "
                f"catch={type(error).__name__} lets it fail, and the others continue"
            )
            raise
        else:
            study.tell(trial, values)  # One that is NaN fails, with a warning of optuna.
    release_memory()  # Trainers are part of reference cycles.


def _values_of(optuna: Any, trial: Any, objective: Callable[[Any], Any]) -> list[float]:
    """Return the scores of a trial; optuna.TrialPruned where what it reported prunes it, now or before a kill."""
    can_prune = len(trial.study.directions) == 1
    if can_prune and trial.should_prune():
        raise optuna.TrialPruned
    score = objective(trial)
    if can_prune and trial.should_prune():
        raise optuna.TrialPruned
    values = [*score] if isinstance(score, (list, tuple)) else [score]
    if len(values) == len(trial.study.directions) and all(isinstance(value, (int, float)) for value in values):
        return values
    count = "a number" if can_prune else f"{len(trial.study.directions)} numbers, one for each direction"
    raise ConfigError(
        f"the objective returned {describe_value(score)}; it must return {count}, for instance "
        "trainer.history.best['score']"
    )


def _show(optuna: Any, study: Any, number: int, n_trials: int) -> None:
    """Write a line of a trial that has ended, where optuna itself would log one."""
    if optuna.logging.get_verbosity() > optuna.logging.INFO:
        return
    trial = study.get_trials(deepcopy=False)[number]
    values = ", ".join(f"{value:.6g}" for value in trial.values or []) or "no value"
    line = f"trial {number} of {n_trials}, {trial.state.name.lower()}: {values}, with {trial.params}"
    write_line(printable(line, kept=""))


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
        The study of optuna, where Transformers has None.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Return the parameters that Transformers searches by default."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, float]) -> float | None:
    """Return the loss where there is no other metric, else the sum of all others, as Transformers does."""
    left_out = ("epoch", "eval_loss")
    summed = [
        value
        for name, value in metrics.items()
        if name not in left_out and not name.endswith(("_runtime", "_per_second"))
    ]
    return sum(summed) if summed else metrics.get("eval_loss")


def hyperparameter_search(
    make_trainer: Callable[[Any, dict[str, Any], Path], Any],
    run: Callable[[Any], Any],
    folder: str | Path,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
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
        Returns a new trainer for a trial of optuna, its parameters, and a folder of its own. Where it has
        `PruningAddon`, that is given the score of each validation.
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
        ``sampler``, ``pruner``, ``timeout``, ``catch`` and ``seed`` of `search`.

    Returns
    -------
    BestRun, or list of them
        The best trial, or with several directions all that no other one is better than.

    Raises
    ------
    ConfigError
        Another backend, or an argument of optuna that the folder takes the place of; otherwise as `search`.
    """
    if str(getattr(backend, "value", backend or "optuna")) != "optuna":
        raise ConfigError(f"backend={backend!r}; zae searches with optuna alone: write backend='optuna'")
    kwargs.pop("gc_after_trial", None)  # Memory is given back after each trial.
    for name in kwargs:
        if name not in ("sampler", "pruner", "timeout", "catch", "seed"):
            raise ConfigError(
                f"hyperparameter_search() does not take {name!r}: the study is in its folder, and one trial is trained "
                "after the other; it takes sampler, pruner, timeout, catch and seed"
            )

    def objective(trial: Any) -> Any:
        params = (hp_space or default_hp_space)(trial)
        name = f"run-{trial.number}" if hp_name is None else hp_name(trial)
        trainer = make_trainer(trial, params, Path(folder) / name)
        score = partial(_transformers_score, trainer, compute_objective or default_compute_objective)
        if isinstance(trainer, PruningAddon):
            trainer.optuna_objective = score
        result = run(trainer)
        metrics = trainer.history.test_metrics or result
        return score(metrics) if isinstance(metrics, Mapping) else result

    study = search(objective, n_trials, direction, folder=folder, **kwargs)
    if isinstance(direction, str):
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params, study)
    return [BestRun(str(trial.number), trial.values, trial.params, study) for trial in study.best_trials]


def _transformers_score(trainer: Any, compute_objective: Callable[[Any], Any], metrics: Mapping[str, float]) -> Any:
    """Return the score of metrics, with the names that ``transformers.Trainer.evaluate`` gives them."""
    if any(name.startswith("eval_") for name in metrics):  # What ``HuggingFaceAddon.evaluate`` returned.
        return compute_objective(dict(metrics))
    named = {f"eval_{name}": value for name, value in metrics.items()}
    sets = option_value(trainer, "eval_dataset")
    if isinstance(sets, Mapping):  # Transformers has those of each set alone: "near/loss" is "eval_near_loss".
        named = {
            f"eval_{part}_{name.removeprefix(f'eval_{part}/')}": value
            for name, value in named.items()
            for part in sets
            if name.startswith(f"eval_{part}/")
        }
    progress = trainer.progress_checker
    steps_in_epoch = trainer.current_run.extent.steps_in_epoch or progress.epoch_step or 1
    return compute_objective({**named, "epoch": float(progress.epoch + progress.epoch_step / steps_in_epoch)})
