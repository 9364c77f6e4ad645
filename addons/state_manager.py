"""Checkpoints: saved whole or not at all, kept by a rule, and resumed to the same end."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zae import files
from zae.addon import AddOnBase
from zae.checks import check_count, check_folder
from zae.compose import add_ons_of
from zae.errors import CheckpointMismatch, CheckpointNotFound, ConfigError
from zae.progress import Every

__all__ = ["StateManagerAddon"]

_log = logging.getLogger("zae")


class StateManagerAddon(AddOnBase):
    """Save the whole state of a run, and go on from it to bitwise the same end.

    A checkpoint is a folder ``step-00000012`` under ``save_path``: the weights under the keys of the model's own
    ``state_dict``, everything else, and a manifest with the SHA-256 of each file. It is written beside its place and
    renamed, and no file of it is ever read by pickle. It is saved when ``save_every`` says so, when a validation was
    the best so far, and at the end of a run.

    Parameters
    ----------
    save_path : str or Path
        The folder of the checkpoints; it is made when missing.
    save_format : {"safetensors", "safetensor", "ckpt"}
        The format of the weights.
    save_every : Every or int
        When to save: steps, or ``Every(epochs=1)``.
    keep_last : int or None
        How many of the newest to keep; None keeps all.
    keep_best : int
        How many of the best by ``monitor`` to keep beside them.
    resume : bool, "auto", str or Path
        False begins afresh. True goes on from the newest checkpoint that is whole. "auto" does so where there is
        one. A path goes on from that checkpoint.
    overwrite : bool
        Whether to begin afresh in a folder that holds the checkpoints of an earlier run; they are removed once the
        first new one is complete.

    Raises
    ------
    ConfigError
        An option cannot be meant, or ``save_path`` is not a folder that can be written to.
    CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
        There is nothing to resume from, nothing whole, or the state of another composition.

    Examples
    --------
    >>> import tempfile, torch
    >>> from zae import Trainer
    >>> from zae.addons import StateManagerAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> def train(folder, n_epoch):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     trainer = Task.add_on(StateManagerAddon)(
    ...         model, "cpu", optimizer=optimizer, save_path=folder, resume="auto")
    ...     return trainer.run(n_epoch, [torch.ones(8, 2)] * 5), trainer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first, _ = train(folder, 1)
    ...     second, trainer = train(folder, 3)
    ...     first["step"], second["step"], trainer.last_path.name
    (5, 15, 'step-00000015')
    """

    layer = "state"
    slot = "state"

    def __init__(
        self,
        *args: Any,
        save_path: str | Path,
        save_format: str = "safetensors",
        save_every: Every | int = Every(epochs=1),  # noqa: B008  (it is frozen)
        keep_last: int | None = 2,
        keep_best: int = 1,
        resume: bool | str | Path = False,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        try:
            self.save_format = files.parse_format(save_format)
        except ConfigError as error:
            raise ConfigError(f"save_format={save_format!r}: {error}") from None
        self.save_path = check_folder(save_path, "save_path")
        self.save_every = Every.parse(save_every, "save_every", Every(epochs=1))
        self.keep_last = check_count("keep_last", keep_last, optional=True)
        self.keep_best = check_count("keep_best", keep_best, least=0)
        if not isinstance(resume, (bool, str, Path)):
            raise ConfigError(f"resume={resume!r}; it must be False, True, 'auto' or the path of a checkpoint")
        self.resume, self.overwrite = resume, overwrite
        self.run_id = ""
        self._scores: dict[str, float | None] = {}
        self._resumed = False
        self._passed_over: set[str] = set()
        self._to_replace: list[Path] = []
        self._saved_at: tuple[int, int] | None = None

    @property
    def last_path(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        return self.save_path / max(self._scores) if self._scores else None

    @property
    def best_path(self) -> Path | None:
        """The checkpoint with the best score, None while nothing that was validated is saved."""
        ranked = self._ranked()
        return self.save_path / ranked[0] if ranked else None

    def setup(self) -> None:
        """Resume, the first time."""
        super().setup()
        if not self._resumed:
            self._resumed = True
            found = self._find_resume()
            if found is not None:
                calls = self._calls
                self.load_state(found)
                self._calls = calls  # The calls of run that this script has made, not those that were saved.
        self.run_id = self.run_id or secrets.token_hex(8)

    def _find_resume(self) -> Path | None:
        """The checkpoint that ``resume`` means."""
        if self.resume is False:
            return None
        folder = self.save_path if self.resume in (True, "auto") else Path(self.resume)  # type: ignore[arg-type]
        if folder != self.save_path and not files.list_checkpoints(folder):
            return folder
        found = files.newest_valid(folder)
        if found is None:
            if self.resume == "auto":
                _log.info("no checkpoint in %s: beginning afresh", folder)
                return None
            raise CheckpointNotFound(
                f"resume={self.resume!r}, and {folder} holds no checkpoint; write resume='auto' to begin afresh then"
            )
        path, _, passed_over = found
        self._passed_over = {damaged.name for damaged, _ in passed_over}
        for damaged, why in passed_over:
            _log.warning("passed over %s, which is damaged (%s); resuming from %s", damaged, why, path)
        return path

    def on_run_begin(self) -> None:
        """Refuse to mix the checkpoints of two runs in one folder."""
        super().on_run_begin()
        if not self.is_main:
            return
        others = [
            p for p in files.list_checkpoints(self.save_path) if p.name not in self._scores.keys() | self._passed_over
        ]
        if others and not self.overwrite:
            raise ConfigError(
                f"save_path={str(self.save_path)!r} holds {len(others)} checkpoints of another run, or newer than this "
                f"one (newest: {others[0].name}); write resume='auto' to go on from it, another save_path, or "
                "overwrite=True to replace them"
            )
        self._to_replace = others

    def checkpoint(self) -> None:
        """Save when it is due, or when the validation of this moment was the best."""
        super().checkpoint()
        progress = self.progress_checker
        between = progress.epoch_batch == 0
        due = self.save_every.due_at_epoch(progress.epoch) if between else self.save_every.due_at_step(progress.step)
        best = (
            self.keep_best and self.best.get("step") == progress.step and self.best_path != self._path_of(progress.step)
        )
        if due or best:
            self.save_state()

    def on_run_end(self) -> None:
        """Save the end of the run, unless that was just done."""
        super().on_run_end()
        if self._saved_at != (self.progress_checker.epoch, self.progress_checker.step):
            self.save_state()

    def _path_of(self, step: int) -> Path:
        return self.save_path / files.checkpoint_name(step)

    def save_state(self, path: str | Path | None = None) -> Path:
        """Save a checkpoint now.

        Parameters
        ----------
        path : str or Path, optional
            A folder for it; by default one under ``save_path``, which the rule of ``keep_last`` and ``keep_best``
            then covers.

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        CheckpointError
            The disk refuses; what was there is intact.
        """
        progress = self.progress_checker
        target = self._path_of(progress.step) if path is None else Path(path)
        kept = dict(self._scores)
        if path is None:
            self._scores[target.name] = self._present_score()
        state = self.state_dict()
        if self.is_main:
            about = {
                "run_id": self.run_id or "unset",
                "step": progress.step,
                "epoch": progress.epoch,
                "composition": [add_on.__name__ for add_on in add_ons_of(type(self))],
                "world_size": self.world_size,
                "info": {"score": self._present_score(), "monitor": self.monitor},
            }
            rest = {key: value for key, value in state.items() if key != "model"}
            try:
                files.save_checkpoint(target, state["model"], rest, model_format=self.save_format, manifest_info=about)
            except BaseException:
                self._scores = kept
                raise
        if path is None:
            self._saved_at = (progress.epoch, progress.step)
            self._prune()
        self.barrier()
        return target

    def _present_score(self) -> float | None:
        """The monitored metric, when it was measured on these very weights."""
        progress = self.progress_checker
        history = self.valid_history or ([] if self._valid[0] is not None else self.train_history)
        if not history or history[-1]["step"] != progress.step:
            return None
        return self.score_of(self.test_metrics if self.valid_history else self.train_metrics)

    def _ranked(self) -> list[str]:
        """Checkpoints that have a score, best first; of equal ones the older."""
        sign = 1 if self.monitor_mode == "min" else -1
        scored = [(sign * score, name) for name, score in self._scores.items() if score is not None and score == score]
        return [name for _, name in sorted(scored)]

    def _prune(self) -> None:
        """Remove what neither rule keeps; only called when a new checkpoint is complete."""
        names = sorted(self._scores)
        kept = set(names if self.keep_last is None else names[-self.keep_last :]) | set(
            self._ranked()[: self.keep_best]
        )
        for name in names:
            if name not in kept:
                del self._scores[name]
                if self.is_main:
                    with contextlib.suppress(CheckpointNotFound):  # Somebody made room by hand.
                        files.remove_checkpoint(self.save_path / name)
        for path in self._to_replace:
            if path.name not in self._scores and self.is_main:
                files.remove_checkpoint(path)
        self._to_replace = []

    def load_state(self, path: str | Path | None = None, strict: bool = True) -> None:
        """Load a checkpoint: everything, or on an error nothing.

        Parameters
        ----------
        path : str or Path, optional
            A checkpoint, or a folder of them, of which the newest whole one is taken; by default ``save_path``.
        strict : bool
            Refuse the state of add-ons that are not here, and weights that do not fit.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            With what to do.
        """
        found = Path(path) if path is not None else self.save_path
        if files.list_checkpoints(found):
            newest = files.newest_valid(found)
            found = newest[0] if newest else found
        manifest, model, state = files.load_checkpoint(found)
        self.load_state_dict({"model": model, **state}, strict)
        self.run_id = manifest["run_id"]
        if found in files.list_checkpoints(self.save_path):
            self._scores.setdefault(found.name, None)  # It itself was not yet in its own list.
        self._saved_at = (self.progress_checker.epoch, self.progress_checker.step)
        _log.info("loaded %s (step %d)", found, self.progress_checker.step)

    def restore_best(self) -> Path:
        """Load the weights of the best checkpoint into the model (and an average of them, where there is one).

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        CheckpointNotFound
            Nothing that was validated has been saved.
        """
        path = self.best_path
        if path is None:
            raise CheckpointNotFound(
                f"no checkpoint in {self.save_path} has a score ({self.monitor}); give run() a valid_loader"
            )
        _, model, state = files.load_checkpoint(path)
        self.load_evaluation_state({"model": model, **state})
        return path

    def state_dict(self) -> dict[str, Any]:
        """Add the run's name, and what is kept with which score."""
        own = {"run_id": self.run_id, "scores": dict(self._scores)}
        return {**super().state_dict(), "StateManagerAddon": own}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take the list of checkpoints over."""
        own, rest = self.take(state, "StateManagerAddon", strict=False)  # The state of a run without it is welcome.
        if own is not None and not (isinstance(own, Mapping) and isinstance(own.get("scores"), Mapping)):
            raise CheckpointMismatch("the state of StateManagerAddon holds no list of scores")
        super().load_state_dict(rest, strict)
        if own is not None:
            # What was kept when this was saved may be gone by now, or be in another folder.
            listed = {path.name for path in files.list_checkpoints(self.save_path)}
            self._scores = {name: score for name, score in own["scores"].items() if name in listed}
            self.run_id = own["run_id"]
