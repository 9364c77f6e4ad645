"""Which checkpoints of a run to keep: the newest ones and the best; and the files of weights beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from zae.common.argument_checks import check_count
from zae.errors import ConfigError
from zae.loop.progress import Every, ProgressChecker

__all__ = ["Retention", "WeightFiles", "WeightFolder", "weight_files"]

_WEIGHTS = re.compile(r"weights-(\d{8,18})\.(?:safetensors|ckpt)")


class Retention:
    """The scores of checkpoints by name, and the rule that keeps some of them."""

    def __init__(self, last: int | None, best: int, sign: int) -> None:
        self.last, self.best, self.sign = last, best, sign
        self.scores: dict[str, float | None] = {}

    @classmethod
    def parse(cls, keep_last: int | None, keep_best: int, direction: str) -> Retention:
        """Return the rule for the options ``keep_last`` and ``keep_best``, where the best is the "min" or the "max"."""
        last = check_count("keep_last", keep_last, optional=True)
        best = check_count("keep_best", keep_best, least=0)
        return cls(last, best or 0, 1 if direction == "min" else -1)

    def best_first(self) -> list[str]:
        """Return the names with a score, best first and of equal ones the older; NaN is not a score."""
        scored = [(self.sign * score, name) for name, score in self.scores.items() if score is not None]
        return [name for score, name in sorted(pair for pair in scored if pair[0] == pair[0])]

    def to_delete(self) -> list[str]:
        """Return the names that neither rule keeps; the newest is never among them."""
        names = sorted(self.scores)
        kept = set(names if self.last is None else names[-self.last :]) | set(self.best_first()[: self.best])
        return [name for name in names if name not in kept]

    def wants(self, name: str, is_scored: bool, is_best: bool) -> bool:
        """Return whether to save what was just validated: to note its score, or because it is the best so far."""
        return (is_scored and self.is_unscored(name)) or (is_best and self.best > 0 and self.best_first()[:1] != [name])

    def is_unscored(self, name: str) -> bool:
        """Return whether a checkpoint was saved before its score was known, and scores matter."""
        return self.best > 0 and name in self.scores and self.scores[name] is None


class WeightFiles:
    """Files of weights alone beside the checkpoints of a run, ``weights-00000012.safetensors``, and which to keep.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    model_format : {"safetensors", "ckpt", "sharded"}
        That of the checkpoints.
    every : Every, int or None
        The option ``save_weights_every``: when to save; None saves none.
    last : int or None
        The option ``keep_weights``: how many of the newest to keep; None keeps all.
    best : int
        The option ``keep_best_weights``: how many of the best to keep beside them. They are saved when a validation
        was the best so far, too.
    sign : {1, -1}
        1 where the best score is the smallest.

    Attributes
    ----------
    rule : Retention
        The scores of the files by name, and the rule for which of them stay.
    is_used : bool
        Whether the run saves any.
    storage : WeightFolder
        Where they are.
    """

    def __init__(
        self,
        folder: Path,
        model_format: str,
        every: Every | int | None,
        last: int | None,
        best: int = 0,
        sign: int = 1,
    ) -> None:
        self.folder, self.suffix = folder, ".ckpt" if model_format == "ckpt" else ".safetensors"
        self.every = None if every is None else Every.parse(every, "save_weights_every", Every(epochs=1))
        kept = check_count("keep_weights", last, optional=True)
        best = check_count("keep_best_weights", best, least=0) or 0
        if kept is not None and self.every is None:
            raise ConfigError(f"keep_weights={last} keeps nothing; write save_weights_every=Every(epochs=1) too")
        if best and kept is None and self.every is not None:
            raise ConfigError(f"keep_best_weights={best}, but all files are kept; write keep_weights=1 too")
        # Where only the best are saved, the newest was the best so far.
        self.rule = Retention(1 if self.every is None else kept, best, sign)
        self.is_used = self.every is not None or best > 0
        self._replaced: list[Path] = []  # Those of another run.
        self._step: int | None = None  # That of the last file: a moment has several occasions to save.
        self.storage = WeightFolder(folder)

    def path_at(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"weights-{step:08d}{self.suffix}"

    def open(self, step: int, overwrite: bool) -> None:
        """Refuse files of another run, where this one begins and does not overwrite them."""
        others = [] if self.every is None or step else self.storage.list_saved()
        if others and not overwrite:
            raise ConfigError(
                f"save_path={str(self.folder)!r} contains {len(others)} file{'s' * (len(others) > 1)} of weights of "
                f"another run (newest: {others[-1].name}); give another save_path, or write overwrite=True to replace "
                "them"
            )
        self._replaced = others

    def is_due(self, progress: ProgressChecker, score: float | None, is_best: bool) -> bool:
        """Return whether to save now, or to note the score of what was just saved."""
        if progress.step == self._step:
            return score is not None and self.rule.is_unscored(self.path_at(progress.step).name)
        return (self.every is not None and self.every.is_due(progress)) or (self.rule.best > 0 and is_best)

    def save(self, step: int, score: float | None, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save the file of a step, on every rank, and then remove those that it replaces."""
        path = self.path_at(step)
        if step != self._step:
            self.storage.save(path, save_model, is_main)
        self.rule.scores[path.name] = score
        self._step, replaced, self._replaced = step, self._replaced, []
        if not is_main:
            return
        there = self.storage.list_saved()
        # A run that was resumed from an earlier step makes the later ones again.
        later = [each for each in there if each > path or (each in replaced and each != path)]
        present = [each for each in there if each not in later]
        self.rule.scores = {each.name: self.rule.scores.get(each.name) for each in present}
        for each in [*later, *(self.folder / name for name in self.rule.to_delete())]:
            self.storage.remove(each)
            self.rule.scores.pop(each.name, None)

    def plan_lines(self) -> list[str]:
        """Say when they are saved."""
        last, best = self.rule.last, self.rule.best
        if not self.is_used:
            return []
        if self.every is None:
            return [f"the weights alone are saved after each best validation, and the best {best} are kept"]
        kept = "all are kept" if last is None else f"the newest {last}{f' and the best {best}' * (best > 0)} are kept"
        return [f"the weights alone are saved too, {self.every!r}, and {kept}"]


class WeightFolder:
    """The folder of files of weights; a subclass keeps them elsewhere, under the same names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_saved(self) -> list[Path]:
        """List the files by their step."""
        return weight_files(self.folder)

    def save(self, path: Path, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save a file, whole or absent; every rank calls it."""
        save_model(path)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in the folder of a run, by their step."""
    return sorted(path for path in folder.glob("weights-*") if _WEIGHTS.fullmatch(path.name))


def step_of_weights(name: str) -> int:
    """Return the step in the name of a file of weights; 0 for another name."""
    found = _WEIGHTS.fullmatch(name)
    return int(found[1]) if found else 0
