"""Checkpoints: saved whole or not at all, kept by a rule, and resumed to the same end."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zae.addon import AddOnBase
from zae.common.argument_checks import check_count, check_flags, check_folder, check_partial
from zae.errors import CheckpointError, CheckpointMismatch, NonFiniteError
from zae.loop import addon_state
from zae.loop.progress import Every
from zae.loop.state import load_weights_of
from zae.saving.crash import forget_claims, save_crash, was_in_step
from zae.saving.resume import (
    Resumed,
    check_resume,
    find_checkpoint,
    foreign_checkpoints,
    load_from,
    restart_epoch,
)
from zae.saving.retention import Retention, best_of, present_score, score_or_none, scores_now
from zae.saving.saver import Saver, format_for, job_of
from zae.saving.start_from import Start
from zae.saving.stop_signals import StopSignals
from zae.storage.checkpoint import load_checkpoint, newest_valid, put_back
from zae.storage.locks import FolderLock
from zae.storage.names import checkpoint_name

__all__ = ["StateManagerAddon"]

_log = logging.getLogger("zae")
_SIGNALED = "a signal asked for the end"


class StateManagerAddon(AddOnBase):
    """Save the whole state of a run, and go on from it to bitwise the same end.

    A checkpoint is a folder ``step-00000012`` under ``save_path``: the weights under the keys of the model's own
    ``state_dict``, everything else, and a manifest with the SHA-256 of each file. It is written beside its place and
    renamed, and no file of it is ever read by pickle. It is saved when ``save_every`` says so, when a validation was
    the best so far, and at the end of a run. At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the step is finished, the state
    saved, and the process ends with status 143, 129 or 130; a validation is given up between two batches, and is the
    first that the resumed run does. After an exception the state goes to ``crash-00000012``, which is never resumed
    from by itself; of several ranks the one that fails first saves it, without the others' random streams.

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
    mid_epoch : {"skip", "restart"}
        What a resume in the middle of an epoch does with the batches that were used. "skip" goes on after them: a
        sampler passes over their samples without loading them, a stream is read again. "restart" reads nothing again:
        the epoch begins anew from the weights of the checkpoint, and its first batches come a second time.
    reshard : bool
        Whether to go on from a checkpoint of another number of ranks or another batch size: every sample of the open
        epoch that was not used comes exactly once.
    overwrite : bool
        Whether to begin afresh in a folder that holds the checkpoints of an earlier run; they are removed once the
        first new one is complete.
    save_async : bool
        Go on training once the state is copied, while a thread writes it. A failure is raised after the next step.
    on_save_error : {"raise", "warn"}
        What a disk that refuses does: end the run, or warn each time and train on.
    save_on_signal : bool
        Whether to deal with the signals at all; Python allows it in the main thread only.
    allow_partial : sequence of str
        Files of the checkpoint ``resume=path`` that may be absent or damaged, for instance ``["state.json"]``: what
        they held begins afresh.
    start_from : str or Path, optional
        A checkpoint, or a folder of them, whose newest whole one is taken, to begin a new run from: a fine-tune, or the
        cooldown of a schedule. It is read once, where ``resume`` finds nothing in ``save_path``.
    start_with : tuple of str, optional
        What to take from ``start_from``; the rest begins afresh. Any of "model" (the default is ``("model",)``),
        "optimizer" (the state of each parameter; every setting of the groups is the script's), "scheduler" (with its
        rates), "progress" (the counters of epochs, steps and batches), "random" (the random streams), and add-ons by
        the names of their classes, "EMAAddon" for instance.

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
        mid_epoch: str = "skip",
        reshard: bool = False,
        overwrite: bool = False,
        save_async: bool = False,
        on_save_error: str = "raise",
        save_on_signal: bool = True,
        allow_partial: Sequence[str] = (),
        start_from: str | Path | None = None,
        start_with: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.save_format = format_for(self.unwrap(), save_format)
        self.save_path = check_folder(save_path, "save_path").absolute()  # Wherever the script goes meanwhile.
        self.save_every = Every.parse(save_every, "save_every", Every(epochs=1))
        self.keep_last = check_count("keep_last", keep_last, optional=True)
        self.keep_best = check_count("keep_best", keep_best, least=0)
        self._start = Start(self, start_from, start_with, resume, allow_partial)
        check_resume(resume, on_save_error, allow_partial, mid_epoch)
        self.resume, self.mid_epoch, self.on_save_error = resume, mid_epoch, on_save_error
        flags = {"reshard": reshard, "overwrite": overwrite, "save_async": save_async, "save_on_signal": save_on_signal}
        self.reshard, self.overwrite, self.save_async, self.save_on_signal = check_flags(**flags)
        self.allow_partial, self.run_id, self._token = check_partial(allow_partial), "", ""
        self._retention = Retention(self.keep_last, self.keep_best, 1 if self.monitor_mode == "min" else -1)
        self._saver, self._stop_signals = Saver(self.save_async), StopSignals()
        self._folder_lock, self._resumed, self._run_failed = FolderLock(self.save_path), Resumed(), False
        self._folder_lock.check()
        self._began_at = self._rested_at = -1  # Batches used when the run began, and when it was last between steps.
        self._passed_over, self._to_replace = set[str](), list[Path]()
        self._saved_at: tuple[int, int, str] | None = None
        self._undo_save: tuple[dict[str, float | None], list[Path]] = ({}, [])

    @property
    def last_path(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        self._settle_save()
        return self.save_path / max(self._retention.scores) if self._retention.scores else None

    @property
    def best_path(self) -> Path | None:
        """The checkpoint with the best score, None while nothing that was validated is saved."""
        self._settle_save()
        return self._retention.best_in(self.save_path)

    def setup(self) -> None:
        """Resume, the first time."""
        is_due = self._resumed.is_due(self)
        super().setup()
        if is_due:
            self._resumed.path, content, self._passed_over = find_checkpoint(self.resume, self.save_path)
            if (found := self._resumed.path) is None:
                self._start.take(self)
            else:
                with self._resumed.strictly(self):
                    load_from(self, found, resuming=True, content=content)
                if self.mid_epoch == "restart":
                    restart_epoch(self)
        self.run_id = self.run_id or secrets.token_hex(8)

    def on_run_begin(self) -> None:
        """Take the folder, refuse to mix the checkpoints of two runs in it, and listen to signals."""
        super().on_run_begin()
        self._run_failed, self._began_at, self._rested_at = False, self.progress_checker.batch, -1
        self._token = self.gather(secrets.token_hex(8))[0]
        if self.is_main:
            self._folder_lock.acquire()
            forget_claims(self.save_path)
            put_back(self.save_path)
            known, step = self._retention.scores.keys() | self._passed_over, self.progress_checker.step
            self._to_replace = foreign_checkpoints(self.save_path, known, self.overwrite, self.run_id, step)
        self._resumed.put_back(self, partial(load_from, self, resuming=True))
        if self.save_on_signal:
            self.current_run.signals = self._stop_signals.install()

    def checkpoint(self) -> None:
        """Save when it is due, or when the validation of this moment was the best; end after a signal."""
        if self.current_run.signals and self.progress_checker.stop_reason is None:
            self.stop(_SIGNALED)  # Before super(), where several ranks agree on it.
        super().checkpoint()
        progress = self.progress_checker
        self._rested_at = progress.batch
        if self._saver.is_open:
            self._share_save()
        every, step = self.save_every, progress.step
        if progress.epoch_batch:  # After a step: most often nothing is due.
            due = every.due_at_step(step)
        else:
            due = every.due_at_epoch(progress.epoch) or self._retention.lacks_score(self._path_at(step).name, self)
        best = self.keep_best and self.best.get("step") == step
        if due or (best and self._retention.ranked()[:1] != [self._path_at(step).name]):
            self.save_state()

    def on_run_end(self) -> None:
        """Save the end of the run, unless that was just done; after a signal, leave."""
        super().on_run_end()
        progress = self.progress_checker
        signal = next((each for each in self.gather(self._stop_signals.received) if each is not None), None)
        self._share_save()
        if self._saved_at != (progress.epoch, progress.step, progress.pending_validation):
            self.save_state()
        if signal is not None:
            self._settle_save()
            _log.warning("signal %d: saved at step %d, in %s", signal, progress.step, self.last_path)
            self._stop_signals.end(signal)

    def on_exception(self, error: BaseException) -> None:
        """Save apart what there is; nothing that fails here hides the error."""
        super().on_exception(error)
        self._run_failed = True
        in_step = was_in_step(self, error, self._began_at, self._rested_at)  # None before the first step.
        if not isinstance(error, Exception) or isinstance(error, CheckpointError) or in_step is None:
            return
        if (signal := self._stop_signals.received) is not None and not in_step and self.world_size == 1:
            self.save_state()  # The signal has hit a worker of the loader too: the state is that of the last step.
            self._stop_signals.end(signal)
        if step := self.progress_checker.step:
            ranks, write = (self.rank, self.world_size), partial(self._write_crash, in_step)
            save_crash(self.save_path, step, ranks, self._token, write, error)

    def _write_crash(self, in_step: bool, target: Path, older: Sequence[Path], info: Mapping[str, Any]) -> None:
        self._hand_over(target, older, {**info, "in_step": in_step, "score": score_or_none(self)})
        self._saver.wait()

    def teardown(self) -> None:
        """Wait for the last save, and give folder and signals back."""
        self._began_at = self._rested_at = -1
        self._resumed.leave(self)
        try:
            self._settle_save()
        finally:
            self._folder_lock.release()
            signal = None if self._run_failed else self._stop_signals.received
            try:
                super().teardown()
            finally:
                if signal is not None:
                    self._stop_signals.end(signal)
                self._stop_signals.restore()

    def _path_at(self, step: int) -> Path:
        return self.save_path / checkpoint_name(step)

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
        self._settle_save()
        if path is None and self._resumed.is_ahead(self):
            return self._resumed.keep()
        progress = self.progress_checker
        target = self._path_at(progress.step) if path is None else Path(path).expanduser()
        self._undo_save = (dict(self._retention.scores), self._to_replace)
        self._saver.begin(self.world_size)
        if path is None:
            self._retention.scores[target.name] = present_score(self)
            doomed = self._retention.doomed()
            replaces = [self.save_path / name for name in doomed]
            replaces += [each for each in self._to_replace if each.name not in self._retention.scores]
        try:
            self._hand_over(target, replaces if path is None else [])
            if path is None:
                self._saved_at, self._to_replace = (progress.epoch, progress.step, progress.pending_validation), []
                for name in doomed:
                    del self._retention.scores[name]
        except BaseException as error:
            self._take_save_back(error)
        self.barrier()
        return target

    def _hand_over(self, target: Path, replaces: Sequence[Path], info: Mapping[str, Any] | None = None) -> None:
        """Hand the state to the saver, on the rank that saves: after an exception, this one."""
        state = addon_state.gather_entries(self, self.state_dict())
        if self.is_main or self._run_failed:
            self._folder_lock.keep(target)
            info = {"monitor": self.monitor, **(info or {"score": present_score(self)})}
            about = {"run_id": self.run_id or "unset", "world_size": self.world_size, "info": info}
            self._saver.save(job_of(self, target, state, self.save_format, about, replaces))

    def _settle_save(self, wait: bool = True) -> None:
        """Take note of what became of a background save."""
        try:
            self._saver.wait() if wait else self._saver.poll()
        except BaseException as error:
            self._take_save_back(error)

    def _share_save(self) -> None:
        """Take note on every rank of what became of the last save: all decide by that what is due."""
        self._settle_save(wait=False)
        if self._saver.learns(self.gather):
            (self._retention.scores, self._to_replace), self._saved_at = self._undo_save, None

    def _take_save_back(self, error: BaseException) -> None:
        """Forget a save that failed; what was there is still there."""
        (self._retention.scores, self._to_replace), self._saved_at = self._undo_save, None
        by_disk = isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)
        not_finite = isinstance(error, NonFiniteError) and self.nonfinite.policy != "raise"
        if not ((by_disk and self.on_save_error == "warn") or not_finite or (self._run_failed and by_disk)):
            raise error
        _log.warning("not saved at step %d: %s", self.progress_checker.step, error)

    def load_state(
        self, path: str | Path | None = None, strict: bool = True, allow_partial: Sequence[str] = ()
    ) -> None:
        """Load a checkpoint: everything, or on an error nothing.

        Parameters
        ----------
        path : str or Path, optional
            A checkpoint, or a folder of them, of which the newest whole one is taken; by default ``save_path``.
        strict : bool
            Refuse the state of add-ons that are not here, and weights that do not fit.
        allow_partial : sequence of str
            Files that may be absent or damaged: what they held stays as it is.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            With what to do.
        """
        self._settle_save()
        found = Path(path).expanduser() if path is not None else self.save_path
        found, content, _ = newest_valid(found, load_checkpoint) or (found, None, [])
        self.allow_partial = check_partial(allow_partial)
        load_from(self, found, strict, content=content)

    def restore_best(self) -> Path:
        """Load the weights of the best checkpoint into the model (and an average of them, where there is one).

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        CheckpointNotFound
            Nothing that was validated has been saved, or none of it by the run that this trainer goes on with.
        """
        path = best_of(self)
        load_weights_of(self, path)
        return path

    def plan_lines(self, plan: Any) -> list[str]:
        """Say when it saves, and what room that takes."""
        return [*super().plan_lines(plan), *plan.keep(self.save_every, self.keep_last, self.keep_best, self.save_path)]

    def state_dict(self) -> dict[str, Any]:
        """Add the run's name, and what is kept with which score."""
        state = super().state_dict()
        if state["progress"]["stop_reason"] == _SIGNALED:
            state["progress"]["stop_reason"] = None  # It goes on when it is resumed.
        own = {"run_id": self.run_id, "scores": dict(self._retention.scores), **self._resumed.unsaved.state_dict(self)}
        return {**state, "StateManagerAddon": own}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take the list of checkpoints over."""
        own, rest = self.take(state, "StateManagerAddon", strict=False)  # The state of a run without it is welcome.
        if own is not None and not (isinstance(own, Mapping) and isinstance(own.get("scores"), Mapping)):
            raise CheckpointMismatch("the state of StateManagerAddon does not contain a list of scores")
        super().load_state_dict(rest, strict)
        if own is not None:
            self._retention.take_over(scores_now(self, own["scores"], rest), self.save_path)
            self.run_id, self._resumed.unsaved.names = own.get("run_id", ""), list(own.get("unsaved", ()))
