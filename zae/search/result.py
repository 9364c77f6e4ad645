"""The result of a search: its trials, which print as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.display.text import duration, table
from zae.errors import ConfigError
from zae.search.study import NAME, load_optuna, quiet

__all__ = ["SearchResult", "TrialResult", "read", "read_study"]


@dataclass
class TrialResult:
    """One trial of a search.

    Attributes
    ----------
    number : int
        Counts from 0.
    state : str
        "complete", "pruned", "fail", or "running" for one that was interrupted.
    params : dict of str to object
        Its parameters.
    values : list of float
        Its score, or one for each direction; of a pruned trial the last report. Empty for others.
    folder : Path
        What it saved and logged.
    seconds : float
        The time that it took.
    error : str
        Why it failed.
    reports : dict of int to float
        The score of each validation, by optimizer step.
    """

    number: int
    state: str
    params: dict[str, Any]
    values: list[float]
    folder: Path
    seconds: float = 0.0
    error: str = ""
    reports: dict[int, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Refuse a trial that is used as the dict of its parameters."""
        raise ConfigError(
            f"a TrialResult is not the dict of its parameters ({name!r} was asked for); give .params, or best_params "
            "of the search: make_trainer(found.best_params)"
        )

    @property
    def value(self) -> float | None:
        """The score; None where there is not one."""
        return self.values[0] if len(self.values) == 1 else None


@dataclass
class SearchResult:
    """The trials of a search; it prints as a table.

    Attributes
    ----------
    trials : list of TrialResult
        In the order in which they began.
    directions : list of str
        "minimize" or "maximize", one for each score.
    folder : Path
        Where the search is.
    """

    trials: list[TrialResult]
    directions: list[str]
    folder: Path

    @property
    def best_trials(self) -> list[TrialResult]:
        """The best trial; with several directions, those that no other one is better than in all of them."""
        ended = [each for each in self.trials if each.state == "complete"]
        best = []
        for each in ended:
            if not any(self._is_better(other, each) for other in ended):
                best.append(each)
        return best[:1] if len(self.directions) == 1 else best

    @property
    def best_trial(self) -> TrialResult:
        """The best trial of a search in one direction.

        Raises
        ------
        ConfigError
            There are several directions, or no trial has ended with a score.
        """
        if len(self.directions) > 1:
            raise ConfigError(f"this search has {len(self.directions)} directions, and not one best trial: best_trials")
        if not self.best_trials:
            raise ConfigError(f"no trial of the search in {self.folder} has ended with a score yet")
        return self.best_trials[0]

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """The score of the best trial."""
        return self.best_trial.values[0]

    def _is_better(self, one: TrialResult, other: TrialResult) -> bool:
        signs = [1 if direction == "minimize" else -1 for direction in self.directions]
        mine = [sign * value for sign, value in zip(signs, one.values)]
        its = [sign * value for sign, value in zip(signs, other.values)]
        return all(a <= b for a, b in zip(mine, its)) and mine != its

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, with the same columns."""
        count = len(self.directions)
        scores = [f"score_{at}" for at in range(count)] if count > 1 else ["score"]
        names = dict.fromkeys(name for each in self.trials for name in each.params)
        rows = []
        for each in self.trials:
            row: dict[str, Any] = {"trial": each.number}
            row |= dict(zip(scores, each.values)) if each.values else dict.fromkeys(scores)
            row |= {name: each.params.get(name) for name in names}
            row |= {"state": each.state, "time": each.seconds}
            rows.append(row)
        return rows

    def study(self) -> Any:
        """Return the study of optuna: ``optuna.visualization`` draws it, ``trials_dataframe()`` is a table of pandas.

        Returns
        -------
        optuna.Study
            As it is in the folder now.
        """
        return _load_study(self.folder)

    def __str__(self) -> str:
        if not self.trials:
            return "no trial has begun"
        rows, marks = self._shown()
        return f"{table(rows, marks)}\n{self._conclusion()}"

    __repr__ = __str__

    def _shown(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows as they are shown, and the marks of the best ones."""
        best = [each.number for each in self.best_trials]
        rows = [{**row, "time": duration(row["time"])} for row in self.rows()]
        return rows, ["best" if row["trial"] in best else "" for row in rows]

    def _conclusion(self) -> str:
        """Return the counts of the trials."""
        names = {"complete": "finished", "pruned": "pruned", "fail": "failed", "running": "interrupted"}
        counts = Counter(each.state for each in self.trials)
        found = ", ".join(f"{counts[state]} {said}" for state, said in names.items() if counts[state])
        return f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}: {found or 'none'}"


def read(folder: str | Path) -> SearchResult:
    """Return the trials of a search, also of one that still runs.

    Parameters
    ----------
    folder : str or Path
        The ``folder`` of `search`.

    Raises
    ------
    ConfigError
        There is no search.
    """
    path = Path(folder).expanduser()
    if not (path / NAME).exists():
        raise ConfigError(f"{path} has no search: {NAME} is missing; give the folder of zae.search.search")
    return read_study(_load_study(path), path)


def _load_study(folder: Path) -> Any:
    """Return the study of optuna in the folder of a search."""
    optuna = load_optuna()
    with quiet(optuna):
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / NAME)))
        return optuna.load_study(study_name=optuna.get_all_study_names(storage)[0], storage=storage)


def read_study(study: Any, folder: Path) -> SearchResult:
    """Return the trials of a study of optuna."""
    trials = []
    for each in study.get_trials(deepcopy=False):
        about: Mapping[str, Any] = each.user_attrs
        params = {**each.params, **about.get("params", {})}
        values = list(each.values or [])
        place = folder / about.get("folder", "")
        reports = dict(each.intermediate_values)
        seconds = about.get("seconds", 0.0)
        error = about.get("error", "")
        state = each.state.name.lower()
        trials.append(TrialResult(each.number, state, params, values, place, seconds, error, reports))
    return SearchResult(trials, [each.name.lower() for each in study.directions], folder)
