"""Files of weights alone beside the checkpoints of a run: when they are saved, and which of them stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zae.addons.state_manager.checkpointer import Checkpointer
from zae.addons.state_manager.retention import Retention
from zae.checkpoint.group import Group
from zae.errors import CheckpointError, ConfigError
from zae.loop.cadence import Every
from zae.loop.progress import ProgressChecker

__all__ = ["WeightFiles"]

_log = logging.getLogger("zae")


class WeightFiles:
    """Files of weights alone beside the checkpoints of a run, ``weights-00000012.safetensors``, and which to keep.

    Parameters
    ----------
    checkpointer : Checkpointer
        Where they are stored.
    model_format : {"safetensors", "ckpt", "sharded"}
        That of the checkpoints.
    every : Every, int or None
        The option ``save_weights_every``: when to save; None saves none.
    last : int or None
        The option ``keep_weights``: how many of the newest to keep; None keeps all.
    best : int
        The option ``keep_best_weights``: how many of the best to keep beside them. They are saved when a validation
        was the best so far, too.
    direction : {"min", "max"}
        Whether the best has the smallest or the largest score.
    on_save_error : {"raise", "warn"}
        What happens if the disk refuses.

    Attributes
    ----------
    rule : Retention
        The scores of the files by name, and the rule for which of them stay.
    is_used : bool
        Whether the run saves any.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        model_format: str,
        every: Every | int | None,
        last: int | None,
        best: int,
        direction: str,
        on_save_error: str,
    ) -> None:
        self.checkpointer = checkpointer
        self.suffix = ".ckpt" if model_format == "ckpt" else ".safetensors"
        self.every = None if every is None else Every.parse(every, "save_weights_every", Every(epochs=1))
        if last is not None and self.every is None:
            raise ConfigError(f"keep_weights={last} keeps nothing; write save_weights_every=Every(epochs=1) too")
        if best and last is None and self.every is not None:
            raise ConfigError(f"keep_best_weights={best}, but all files are kept; write keep_weights=1 too")
        # Where only the best are saved, the newest was the best so far.
        self.rule = Retention(1 if self.every is None else last, best, direction)
        self._on_save_error = on_save_error
        self.is_used = self.every is not None or best > 0
        self._replaced: list[Path] = []  # Those of another run.
        self._step: int | None = None  # That of the last file: a moment has several occasions to save.

    def path_at(self, step: int) -> Path:
        """Return the file of a step."""
        return self.checkpointer.folder / f"weights-{step:08d}{self.suffix}"

    def open(self, step: int, overwrite: bool) -> None:
        """Refuse files of another run, where this one begins and does not overwrite them."""
        foreign = [] if self.every is None or step else self.checkpointer.list_weights()
        if foreign and not overwrite:
            count = f"{len(foreign)} file{'s' * (len(foreign) > 1)}"
            raise ConfigError(
                f"save_path={str(self.checkpointer.folder)!r} contains {count} of weights of another run (newest: "
                f"{foreign[-1].name}); give another save_path, or write overwrite=True to replace them"
            )
        self._replaced = foreign

    def save_if_due(
        self,
        progress: ProgressChecker,
        save_model: Callable[[Path], Path],
        group: Group,
        score: float | None,
        is_best: bool,
    ) -> None:
        """Save the weights if that is due; all ranks call it, and if one fails, all of them raise its error."""
        if not self._is_due(progress, score, is_best):
            return
        save = partial(self._save, progress.step, score, save_model, group.rank == 0)
        try:
            group.together(save, self.checkpointer.folder)
        except CheckpointError as error:
            if error.errno is None or self._on_save_error != "warn":
                raise
            if error.from_rank is None:
                _log.warning("not saved at step %d: %s", progress.step, error)

    def _is_due(self, progress: ProgressChecker, score: float | None, is_best: bool) -> bool:
        """Return whether to save now, or to note the score of what was just saved."""
        if progress.step == self._step:
            return score is not None and self.rule.is_unscored(self.path_at(progress.step).name)
        return (self.every is not None and self.every.is_due(progress)) or (self.rule.best > 0 and is_best)

    def _save(self, step: int, score: float | None, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save the file of a step, on every rank, and then remove those that it replaces."""
        path = self.path_at(step)
        if step != self._step:
            self.checkpointer.store_weights(path, save_model, is_main)
        self.rule.scores[path.name] = score
        self._step = step
        replaced = self._replaced
        self._replaced = []
        if not is_main:
            return
        names = self.checkpointer.list_weights()
        # A run that was resumed from an earlier step makes the later ones again.
        later = [file for file in names if file > path or (file in replaced and file != path)]
        present = [file for file in names if file not in later]
        self.rule.scores = {file.name: self.rule.scores.get(file.name) for file in present}
        for file in [*later, *(path.with_name(name) for name in self.rule.to_delete())]:
            self.checkpointer.remove_weights(file)
            self.rule.scores.pop(file.name, None)

    def plan_lines(self) -> list[str]:
        """Say when they are saved."""
        if not self.is_used:
            return []
        if self.every is None:
            return [f"the weights alone are saved after each best validation, and the best {self.rule.best} are kept"]
        return [f"the weights alone are saved too, {self.every!r}, and {self.rule}"]
