"""Which checkpoints of a run to keep: the newest ones and the best; and the files of weights beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from zae.common.argument_checks import check_count
from zae.errors import ConfigError
from zae.loop.progress import Every, ProgressChecker

__all__ = ["Retention", "WeightFiles", "weight_files"]

_WEIGHTS = re.compile(r"weights-\d{8,18}\.(?:safetensors|ckpt)")


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
    """

    def __init__(self, folder: Path, model_format: str, every: Every | int | None, last: int | None) -> None:
        self.folder, self.suffix = folder, ".ckpt" if model_format == "ckpt" else ".safetensors"
        self.every = None if every is None else Every.parse(every, "save_weights_every", Every(epochs=1))
        self.last = check_count("keep_weights", last, optional=True)
        if self.last is not None and self.every is None:
            raise ConfigError(f"keep_weights={last} keeps nothing; write save_weights_every=Every(epochs=1) too")
        self._replaced: list[Path] = []  # Those of another run.
        self._step: int | None = None  # That of the last file: a moment has several occasions to save.

    def path_at(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"weights-{step:08d}{self.suffix}"

    def open(self, step: int, overwrite: bool) -> None:
        """Refuse files of another run, where this one begins and does not overwrite them."""
        others = [] if self.every is None or step else weight_files(self.folder)
        if others and not overwrite:
            raise ConfigError(
                f"save_path={str(self.folder)!r} contains {len(others)} file{'s' * (len(others) > 1)} of weights of "
                f"another run (newest: {others[-1].name}); give another save_path, or write overwrite=True to replace "
                "them"
            )
        self._replaced = others

    def is_due(self, progress: ProgressChecker) -> bool:
        """Return whether to save now, unless that was just done."""
        return self.every is not None and self.every.is_due(progress) and progress.step != self._step

    def save(self, step: int, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save the file of a step, on every rank, and then remove those that it replaces."""
        path = save_model(self.path_at(step))
        self._step, replaced, self._replaced = step, self._replaced, []
        if not is_main:
            return
        there = weight_files(self.folder)
        # A run that was resumed from an earlier step makes the later ones again.
        later = [each for each in there if each > path or (each in replaced and each != path)]
        present = [each for each in there if each not in later]
        for each in [*later, *(present[: -self.last] if self.last is not None else [])]:
            each.unlink(missing_ok=True)

    def plan_lines(self) -> list[str]:
        """Say when they are saved."""
        kept = "all are kept" if self.last is None else f"the newest {self.last} are kept"
        return [] if self.every is None else [f"the weights alone are saved too, {self.every!r}, and {kept}"]


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in the folder of a run, by their step."""
    return sorted(path for path in folder.glob("weights-*") if _WEIGHTS.fullmatch(path.name))
