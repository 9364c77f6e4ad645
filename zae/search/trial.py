"""One trial of a search: its parameters and its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zae.errors import did_you_mean

__all__ = ["Trial"]


class Trial(Mapping[str, Any]):
    """The parameters of one trial, by name; `search` gives it to ``make_trainer`` and ``run``.

    The methods of optuna's trial, ``suggest_float`` and the like, can be called on it too.

    Attributes
    ----------
    number : int
        Counts the trials of a search from 0.
    folder : Path
        The folder of this trial, which exists: give it to ``save_path``, ``jsonl_path`` and the like.
    seed : int
        A number that differs between trials and is the same when the trial is begun again. The random streams of the
        process are seeded with it before ``make_trainer`` is called.
    params : dict of str to object
        All parameters.
    is_continued : bool
        Whether it was interrupted before.

    Examples
    --------
    >>> trial = Trial(None, {"lr": 0.1, "width": 16}, 3, Path("runs/trial-0003"), 0)
    >>> trial["lr"], dict(trial), trial.folder.name
    (0.1, {'lr': 0.1, 'width': 16}, 'trial-0003')
    """

    def __init__(self, asked: Any, given: Mapping[str, Any], number: int, folder: Path, seed: int) -> None:
        self.asked, self._given = asked, dict(given)
        self.number = number
        self.folder = folder
        self.seed = seed
        self.is_pruned = False
        self.is_continued = False
        self.read = set[str]()  # The names that were asked for.

    @property
    def params(self) -> dict[str, Any]:
        return dict(self)

    def report(self, score: float, step: int) -> None:
        """Record the score at an optimizer step, and ask whether the trial is pruned.

        What was reported before an interruption stays.
        """
        known = self.asked.study.get_trials(deepcopy=False)[self.number].intermediate_values
        if step not in known:
            self.asked.report(score, step)
        self.is_pruned = self.is_pruned or self.asked.should_prune()

    def __getitem__(self, name: str) -> Any:
        found = self._all()
        if name not in found:
            raise KeyError(f"no parameter {name!r} in the space{did_you_mean(name, found)}; it has {', '.join(found)}")
        self.read.add(name)
        return found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self.asked, name):
            raise AttributeError(f"a trial has no attribute {name!r}; parameters are entries: trial[{name!r}]")
        found = getattr(self.asked, name)
        return partial(self._suggest, found) if name.startswith("suggest_") else found

    def _suggest(self, suggest: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what optuna suggests; who asks for it has read it."""
        self.read.add(name)
        return suggest(name, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Trial({self.number}, {self._all()})"

    def _all(self) -> dict[str, Any]:
        """Return what the space gave, and what was suggested since."""
        suggested = {} if self.asked is None else self.asked.params
        return {**self._given, **{name: value for name, value in suggested.items() if name not in self._given}}
