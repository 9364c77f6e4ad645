"""Checkpoints: saved whole or not at all, kept by a rule, and resumed to the same end."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from zae.addon import AddOnBase, Description
from zae.addons.state_manager.checkpointer import (
    Checkpointer,
    Content,
    FolderCheckpointer,
    make_checkpointer,
    step_of_weights,
)
from zae.addons.state_manager.checkpoints import Checkpoints, Lineage
from zae.addons.state_manager.crash import EXACT, CrashSaver
from zae.addons.state_manager.load_check import LoadCheck
from zae.addons.state_manager.resume import Resumption, find, newest_whole, read
from zae.addons.state_manager.retention import Retention
from zae.addons.state_manager.shared_disk import check_shared_disk
from zae.addons.state_manager.start_from import Start
from zae.addons.state_manager.stop_signals import StopSignals
from zae.addons.state_manager.weight_files import WeightFiles
from zae.arguments import Count, CountOrZero
from zae.arguments.paths import check_folder, check_partial
from zae.checkpoint.group import Group
from zae.checkpoint.names import step_of
from zae.checkpoint.tensor_bytes import DTYPES
from zae.checkpoint.tensor_files import parse_format
from zae.compose.introspect import add_ons_of
from zae.errors import CheckpointError, CheckpointMismatch, ConfigError, MonitorError
from zae.loop.cadence import Every
from zae.loop.progress import SIGNALED
from zae.loop.rank_states import RankStates, load_from_file
from zae.model.weights import named_parameters

__all__ = ["StateManagerAddon"]

_log = logging.getLogger("zae")


class StateManagerAddon(AddOnBase):
    """Save the whole state of a run, and resume from it to bitwise the same end.

    A checkpoint is a folder ``step-00000012`` under ``save_path``. It is saved when ``save_every`` is due, when a
    validation was the best so far, at the end of a run, and at SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, which end the
    process with status 143, 129 or 130. After an exception the state is saved in ``crash-00000012``.

    ``trainer.checkpoints`` knows which checkpoints there are, and ``trainer.checkpointer`` stores them (see
    ``zae.addons.state_manager.Checkpointer``).

    Parameters
    ----------
    save_path : str or Path
        The folder of the checkpoints, created if missing.
    save_format : {"safetensors", "safetensor", "ckpt", "sharded"}
        The format of the weights. With "sharded" nothing is gathered: each rank writes the parts that it holds, of the
        weights, the optimizers and the averages, and rank 0 everything else; all ranks must share the disk. It loads
        into any engine, and with ``reshard=True`` into any number of processes. Where no tensor lies in parts, it is
        "safetensors".
    save_every : Every or int
        When to save: steps, or ``Every(epochs=1)``.
    keep_last : int or None
        How many of the newest to keep; None keeps all.
    keep_best : int
        How many of the best by ``monitor`` to keep beside them.
    resume : bool, "auto", str or Path
        False starts from scratch. True resumes from the newest checkpoint that is whole, or from a newer exact state of
        a failed run. "auto" does so if there is one. A path resumes from that checkpoint.
    mid_epoch : {"skip", "restart"}
        What a resume within an epoch does with the batches that were used. "skip" continues after them: a sampler
        skips their samples without loading them, a stream is read again. "restart" reads nothing again: the epoch
        begins again with the weights of the checkpoint, and its first batches come a second time.
    reshard : bool
        Whether to resume with another number of ranks or another batch size: every sample of the open epoch that was
        not used comes exactly once.
    overwrite : bool
        Whether to start from scratch in a folder with the checkpoints of an earlier run; they are removed when the
        first new one is complete.
    save_async : bool
        Continue training when the state is copied, while a thread writes it. A failure is raised after the next step.
    on_save_error : {"raise", "warn"}
        What happens if the disk refuses: the run ends, or it warns each time and continues.
    save_on_signal : bool
        Whether to handle signals; Python allows it only in the main thread.
    allow_partial : sequence of str
        Files of the checkpoint ``resume=path`` that may be missing or damaged, for instance ``["state.json"]``: what
        they contained starts from scratch.
    start_from : str or Path, optional
        Start a new run from a checkpoint, the newest one in a folder, or a file of weights: a fine-tune, or the
        cooldown of a schedule. It is read once, if ``resume`` finds nothing in ``save_path``.
    start_with : tuple of str, optional
        What to take from ``start_from``; the rest starts from scratch. Any of "model" (the default), "optimizer" (the
        state of each parameter; settings are the script's), "scheduler" (with its rates), "progress" (the counters),
        "random" (the random streams), and add-ons by class name, such as "EMAAddon".
    save_weights_every : Every or int, optional
        When to save the weights alone too, in a file ``weights-00000012.safetensors`` under ``save_path``, or ``.ckpt``
        with that format, as ``save_model`` does. ``apply_weights`` and ``start_from`` load it; a run resumes only from
        a checkpoint.
    keep_weights : int, optional
        How many of the newest of these files to keep; None keeps all.
    keep_best_weights : int
        How many of the best of these files by ``monitor`` to keep beside them. The weights are then also saved when a
        validation was the best so far; without ``save_weights_every``, only then.
    checkpointer : type or callable
        Where checkpoints are stored: a class derived from `zae.addons.state_manager.Checkpointer`, or a
        ``functools.partial`` of one; by default in folders under ``save_path``. ``FsspecCheckpointer.at("s3://run")``
        of `zae.addons.state_manager` stores them in any file system of fsspec, with the files of
        ``save_weights_every``; ``save_path`` is then a folder for temporary files, and in other functions the paths in
        it name the checkpoints.

    Raises
    ------
    ConfigError
        An option is invalid, or ``save_path`` is not a folder that can be written to.
    CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
        There is nothing to resume from, nothing whole, or the state has other add-ons.

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
    ...     print(first["step"], second["step"], trainer.last_path.name)
    5 15 step-00000015
    """

    layer = slot = "state"
    _option_places = {
        "save_format": "checkpoints.model_format",
        "keep_last": "checkpoints.retention.last",
        "keep_best": "checkpoints.retention.best",
        "save_async": "checkpoints.saver.background",
        "resume": "_resumption.resume",
        "mid_epoch": "_resumption.mid_epoch",
        "reshard": "_resumption.reshard",
        "allow_partial": "_resumption.allow_partial",
        "save_weights_every": "_weight_files.every",
        "keep_best_weights": "_weight_files.rule.best",
    }

    replicated_options = {
        "save_format": "save_state",
        "save_every": "checkpoint",
        "keep_last": "checkpoint",
        "keep_best": "checkpoint",
        "mid_epoch": "setup",
        "reshard": "setup",
        "save_async": "save_state",
        "on_save_error": "save_state",
        "save_weights_every": "checkpoint",
        "keep_best_weights": "checkpoint",
    }
    _resumption: Resumption
    checkpoints: Checkpoints
    _weight_files: WeightFiles
    _load_check: LoadCheck
    _stop_signals: StopSignals
    _crash: CrashSaver

    def __init__(
        self,
        *args: Any,
        save_path: str | Path,
        save_format: str = "safetensors",
        save_every: Every | int = Every(epochs=1),  # noqa: B008  (it is frozen)
        keep_last: Count | None = 2,
        keep_best: CountOrZero = 1,
        resume: bool | str | Path = False,
        mid_epoch: Literal["skip", "restart"] = "skip",
        reshard: bool = False,
        overwrite: bool = False,
        save_async: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        save_on_signal: bool = True,
        allow_partial: Sequence[str] = (),
        start_from: str | Path | None = None,
        start_with: Sequence[str] | None = None,
        save_weights_every: Every | int | None = None,
        keep_weights: Count | None = None,
        keep_best_weights: CountOrZero = 0,
        checkpointer: Annotated[
            Callable[[Path], Checkpointer],
            "a class derived from zae.addons.state_manager.Checkpointer, or a functools.partial of one",
        ] = FolderCheckpointer,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        model_format = format_for(self.unwrap(), save_format)
        folder = check_folder(save_path, "save_path").absolute()  # A script may change its present folder.
        self.save_path = folder
        self.save_every = Every.parse(save_every, "save_every", Every(epochs=1))
        self.on_save_error = on_save_error
        self.overwrite = overwrite
        self.save_on_signal = save_on_signal
        start = Start(start_from, start_with, type(self), folder, resume, allow_partial)
        self._resumption = Resumption(resume, mid_epoch, reshard, allow_partial, start)
        self.checkpointer = make_checkpointer(checkpointer, folder)
        direction = self.history.direction
        self._weight_files = WeightFiles(
            self.checkpointer,
            model_format,
            save_weights_every,
            keep_weights,
            keep_best_weights,
            direction,
            on_save_error,
        )
        self.checkpoints = Checkpoints(
            self.checkpointer,
            model_format,
            Retention(keep_last, keep_best, direction),
            Lineage([add_on.__name__ for add_on in add_ons_of(type(self))]),
            in_background=save_async,
            on_save_error=on_save_error,
            warns_of_nonfinite=self.nonfinite.policy != "raise",
        )
        self._load_check = LoadCheck()
        self._stop_signals = StopSignals()
        self._crash = CrashSaver(folder, self.checkpointer.list_saved)

    @property
    def last_path(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        return self.checkpoints.last

    @property
    def best_path(self) -> Path | None:
        """The checkpoint with the best score, None while nothing that was validated is saved."""
        return self.checkpoints.best

    def resume_from(self, resume: bool | str | Path) -> None:
        """Set the option ``resume`` before the first call of ``run``.

        Parameters
        ----------
        resume : bool, "auto", str or Path
            As the option.

        Raises
        ------
        ConfigError
            The trainer has run already.
        """
        self._resumption.begin_from(resume)

    # ---------------------------------------------------------------------------------------------- during a run

    def setup(self) -> None:
        """Resume, the first time."""
        resumption = self._resumption
        is_due = resumption.is_due(self.progress_checker.run_calls, self.progress_checker.is_seeded)
        super().setup()
        self._load_check.begin(self)
        if is_due:
            resumed = find(self.checkpoints, resumption.resume, resumption.allow_partial, self.local_shards())
            if resumed is None:
                resumption.news = resumption.start.apply(self)
            else:
                self._resume_from(*resumed)
                self._load_check.skip(self.optimization)
                resumption.note_resumed(resumed[0], self.progress_checker.run_calls)
                resumption.restart_epoch(self.progress_checker, self.loader_position)
        lineage = self.checkpoints.lineage
        lineage.run_id = lineage.run_id or secrets.token_hex(8)

    def on_run_begin(self) -> None:
        """Take the folder, refuse to mix the checkpoints of two runs in it, and listen to signals."""
        super().on_run_begin()
        self._crash.begin(self.progress_checker, self.gather(secrets.token_hex(8))[0])
        self.checkpoints.has_failed = False
        group = Group(self.rank, self.gather)
        group.together(self._open_folder, self.save_path)
        if self.world_size > 1 and isinstance(self.checkpointer, FolderCheckpointer):
            is_sharded = self.checkpoints.model_format == "sharded"
            check_shared_disk(self.save_path, group, writes_on_all_ranks=is_sharded)
        if self.is_main:
            self._resumption.warn_of_order(self.current_run.activity.loader)
        self._reload()
        if self.save_on_signal:
            self.current_run.requests.signals = self._stop_signals.install()
        news = self._resumption.take_news(self.current_run, self.checkpointer.shown)
        if news:
            self.current_run.report(news)

    def _open_folder(self) -> None:
        """Take the folder on the main rank."""
        if self.is_main:
            self.checkpoints.open(self.progress_checker.step, self.overwrite)
            self._weight_files.open(self.progress_checker.step, self.overwrite)
            self.checkpointer.begin()

    def _reload(self) -> None:
        """Load the checkpoint of a resume again where the script may have changed its state between calls of run."""
        path = self._resumption.must_reload(self.progress_checker.run_calls)
        if path is None:
            return
        progress = self.progress_checker
        position = dict(vars(self.loader_position))
        self._resume_from(path, read(self.checkpointer, path, self._resumption.allow_partial, self.local_shards()))
        # The position in the run and in the data stays as the beginning of this call has checked it.
        progress.pending_validation = self.progress_checker.pending_validation
        self.progress_checker = progress
        vars(self.loader_position).update(position)

    def checkpoint(self) -> None:
        """Save if it is due, or if the validation of this moment was the best; stop after a signal."""
        if self.current_run.requests.signals and self.progress_checker.stop_reason is None:
            self.stop(SIGNALED)  # Before super(), where several ranks agree on it.
        super().checkpoint()
        progress = self.progress_checker
        if progress.step > progress.skipped_steps and self._load_check.is_due(self.optimization):
            self._load_check.check(self)
        checkpoints = self.checkpoints
        self._crash.rest(progress)
        if checkpoints.saver.is_pending:  # Asked here: a step without a save makes no call.
            checkpoints.sync(self.gather)
        is_best = self.best.get("step") == progress.step
        in_epoch = progress.epoch_batch > 0
        is_due = self.save_every.is_due(progress)
        if not is_due and (is_best or not in_epoch):  # After a step, most often nothing is due.
            is_scored = not in_epoch and self._present_score() is not None
            is_due = checkpoints.retention.wants(checkpoints.path_at(progress.step).name, is_scored, is_best)
        # Before the checkpoint: killed in between, the run resumes before this step and comes here again.
        if self._weight_files.is_used:
            score = self._present_score() if self._weight_files.rule.best else None
            group = Group(self.rank, self.gather)
            self._weight_files.save_if_due(progress, self.save_model, group, score, is_best)
        requests = self.current_run.requests
        is_due = requests.decide(self, "should_checkpoint", is_due)
        if is_due or "save" in requests.actions:
            requests.actions.discard("save")
            self.save_state()

    def on_run_end(self) -> None:
        """Save the end of the run, unless that was just done; after a signal, end the process."""
        super().on_run_end()
        signal = next((first for first in self.gather(self._stop_signals.first) if first is not None), None)
        self.checkpoints.sync(self.gather)
        if self.checkpoints.saved_at != self.progress_checker.moment:
            self.save_state()
        if signal is not None:
            self._report_saved(signal)
            self._stop_signals.end(signal)

    def _report_saved(self, signal: int) -> None:
        """Say what was saved because of a signal, and where."""
        saved_place = "nowhere" if self.last_path is None else self.checkpointer.shown(self.last_path)
        is_resumed = self._resumption.resume is not False
        outlook = "started again, the run continues from there" if is_resumed else "resume='auto' continues from there"
        self.current_run.report(
            f"signal {signal}: saved at {self.current_run.place}, in {saved_place}; {outlook}", logging.WARNING
        )

    def on_exception(self, error: BaseException) -> None:
        """Save the state apart; nothing that fails here hides the error."""
        super().on_exception(error)
        self.checkpoints.has_failed = True
        progress = self.progress_checker
        has_batch = self.current_run.activity.batch is not None
        in_step = self._crash.was_in_step(progress, has_batch)  # None before the first step.
        if progress.pending_validation and in_step is not None:
            in_step = False  # The state is that before the validation, which a resumed run repeats.
        if not isinstance(error, Exception) or isinstance(error, CheckpointError) or in_step is None:
            return
        signal = self._stop_signals.first
        if signal is not None and not in_step and self.world_size == 1:
            self.save_state()  # The signal has hit a worker of the loader too: the state is that of the last step.
            self._report_saved(signal)
            self._stop_signals.end(signal)

        def write(target: Path, older: Sequence[Path], info: Mapping[str, Any]) -> None:
            is_exact = not in_step and self.world_size == 1  # One of several ranks has only its own random streams.
            is_exact = is_exact and self._crash.is_exact(progress, self.loader_position)
            info = {**info, "in_step": in_step, EXACT: is_exact, "score": None}
            with contextlib.suppress(MonitorError):  # The state is saved, whatever the monitor.
                info["score"] = self._present_score()
            self._write_state(target, older, info)

        may_write = write if self.engine.can_save_alone else None
        self._crash.save(progress.step, self.rank, self.world_size, may_write, error)

    def teardown(self) -> None:
        """Wait for the last save, and give back the folder and the signals."""
        self._crash.end()
        self._resumption.leave(self.progress_checker.run_calls)
        with contextlib.ExitStack() as steps:  # The last first, whatever fails.
            steps.callback(self._stop_signals.restore)
            steps.callback(self._end_by_signal)
            steps.callback(super().teardown)
            steps.callback(self.checkpoints.close)
            self.checkpoints.settle()

    def _end_by_signal(self) -> None:
        """End the process if a signal has come, also while the last save was awaited; an exception ends a run first."""
        if self._stop_signals.first is not None and not self.checkpoints.has_failed:
            self._stop_signals.end(self._stop_signals.first)

    # ---------------------------------------------------------------------------------------------------- saving

    def save_state(self, path: str | Path | None = None) -> Path:
        """Save a checkpoint now.

        Parameters
        ----------
        path : str or Path, optional
            A folder for it; by default one under ``save_path``, to which ``keep_last`` and ``keep_best`` then apply.

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        CheckpointError
            The disk refuses; what was there is unchanged.
        """
        checkpoints = self.checkpoints
        progress = self.progress_checker
        checkpoints.settle()  # One save at a time: the one before may still be written.
        if path is None and self._resumption.belongs_to_later_call(progress.run_calls):
            return self._resumption.skip_save()
        target = checkpoints.path_at(progress.step) if path is None else Path(path).expanduser()
        self.engine.rendezvous("save_state")
        score = self._present_score()
        entry = (target.name, score) if path is None else None
        is_saved = False
        with checkpoints.add(entry, progress.moment) as replaces:  # It may swallow an error: then nothing is saved.
            self._write_state(target, replaces, {"score": score})
            is_saved = True
        if is_saved:
            self.on_save(target)
        return target

    def _write_state(self, target: Path, replaces: Sequence[Path], info: Mapping[str, Any]) -> None:
        """Read the state on every rank, and write it: on the main rank, or after an exception on this one."""
        checkpoints = self.checkpoints
        has_failed = checkpoints.has_failed
        self._check_moment(target)
        in_shards = checkpoints.model_format == "sharded"
        state = RankStates.read_state(self, in_parts=in_shards and not has_failed, has_rows=False)
        info = {"monitor": self.monitor, **info}
        checkpoints.write(
            target,
            state,
            self.history.rows,
            checkpoints.lineage.describe(self.progress_checker, self.world_size, info),
            replaces=replaces,
            trained={name for name, weight in named_parameters(self.unwrap()).items() if weight.requires_grad},
            group=Group(self.rank, partial(self.engine.gather, in_background=True)),
        )

    def _check_moment(self, target: Path) -> None:
        """Refuse to save within an evaluation, and warn within a step."""
        activity = self.current_run.activity
        if activity.evaluation.is_running:
            raise CheckpointError(
                f"{target} was not saved: an evaluation is running, with other weights and random numbers than "
                "training; call save_state() in on_epoch_end(), which comes after the validation"
            )
        if activity.batch is not None and self.is_main and not self.checkpoints.has_failed:
            _log.warning(
                "%s is saved in the middle of a step, so that what resumes from it is not exact; call save_state() in "
                "checkpoint() or in on_epoch_end()",
                target,
            )

    def _present_score(self) -> float | None:
        """Return the monitored metric if it was measured on the present weights."""
        return self.history.score_at(self.progress_checker.step, self.current_run.valid_loader is not None)

    # --------------------------------------------------------------------------------------------------- loading

    def load_state(
        self, path: str | Path | None = None, strict: bool = True, allow_partial: Sequence[str] = ()
    ) -> None:
        """Load a checkpoint: everything, or on an error nothing.

        Parameters
        ----------
        path : str or Path, optional
            A checkpoint, or a folder of them, of which the newest whole one is taken; by default ``save_path``.
        strict : bool
            Refuse the state of add-ons that this trainer does not have, and weights that do not fit.
        allow_partial : sequence of str
            Files that may be missing or damaged: what they contained stays as it is.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            With what to do.
        """
        self.current_run.activity.check_load()
        self.checkpoints.settle()
        files = check_partial(allow_partial)
        place = self.save_path if path is None else Path(path).expanduser()
        loaded_path, content = newest_whole(self.checkpointer, place, files, self.local_shards())
        self._load_content(loaded_path, content, strict, files)

    def continue_from(self, state: Mapping[str, Any] | str | Path) -> None:
        """Continue the call of ``run`` that is under way from another state, when the present step is done.

        Checkpoints of later steps are replaced by the next one.

        Parameters
        ----------
        state : mapping, str or Path
            As for ``Trainer.continue_from``: what ``state_dict`` returned, a checkpoint, or a folder with checkpoints.
        """
        if isinstance(state, Mapping):
            super().continue_from(state)
        else:
            self.current_run.continuation.request(partial(self._go_back, Path(state).expanduser()))

    def _go_back(self, place: Path) -> None:
        """Load a checkpoint of the call of run that is under way."""
        self.checkpoints.settle()
        loaded_path, content = newest_whole(self.checkpointer, place, (), self.local_shards())
        self.current_run.continuation.check_state(content[2])
        self._load_content(loaded_path, content, True, ())

    def _resume_from(self, path: Path, content: Content) -> None:
        """Load the checkpoint that the run continues from; it counts the calls of run of this script, not its own."""
        index = self.progress_checker.run_calls.index
        try:
            self._load_content(path, content, True, self._resumption.allow_partial)
        except CheckpointMismatch as error:
            if "strict=False" in str(error):  # A resume is always strict.
                error.add_note(
                    "zae: with resume=False, call trainer.load_state(strict=False) before run(), which then trains all "
                    "of its epochs"
                )
            raise
        self.progress_checker.run_calls.index = index

    def _load_content(self, path: Path, content: Content, strict: bool, allow_partial: Sequence[str]) -> None:
        """Load what was read of a checkpoint."""
        manifest, model, state = content
        if allow_partial and not (model and state):
            _log.warning("%s is damaged: %s starts a new run", path, "all but the weights" if model else "the model")
        if allow_partial and not state:
            self.apply_weights(model, strict)
        else:
            if self._resumption.reshard:
                state["position"] = {**state["position"], "may_reshard": True}
            load_from_file(self, {"model": model or self.model_state(), **state}, strict)
            self.checkpoints.adopt(path, manifest, self.progress_checker.moment)
            _log.info("loaded %s (step %d)", path, self.progress_checker.step)
        self.on_load(path)

    def restore_best(self) -> Path:
        """Load the weights of the best checkpoint into the model (and an average of them, if there is one).

        Returns
        -------
        Path
            The checkpoint.

        Raises
        ------
        CheckpointNotFound
            Nothing that was validated has been saved, or not by the run that this trainer continues; or the best was
            not saved, or is not kept.
        """
        if self.best_path is None and self._resumption.resume is not False:
            with self.ready():  # It resumes as it is set up.
                pass
        path = self.checkpoints.require_best(self.monitor, self.history.best, bool(self.history.valid))
        _, model, state = read(self.checkpointer, path)
        self.load_evaluation_state({"model": model, **state})
        return path

    # ------------------------------------------------------------------------------------------- state and plan

    def describe(self) -> list[Description]:
        """Tell when it saves, and what it keeps."""
        return [*super().describe(), Description("checkpoints", self._plan_lines, where="checkpoint")]

    def _plan_lines(self, plan: Any) -> list[str]:
        """Set in a plan when is saved, and describe what is kept."""
        plan.save(self.save_every)
        retention = self.checkpoints.retention
        at_best = "; and where a validation is the best so far" if retention.best and plan.validates_at else ""
        return [
            f"checkpoints are saved in {self.save_path}, and {retention}{at_best}",
            *self._weight_files.plan_lines(),
        ]

    def state_dict(self) -> dict[str, Any]:
        """Add the name of the run, and the scores of the checkpoints that are kept."""
        state = super().state_dict()
        lineage = self.checkpoints.lineage.state_dict()
        entry = {**lineage, "scores": dict(self.checkpoints.retention.scores)}
        if self._weight_files.rule.scores:
            entry["weight_scores"] = dict(self._weight_files.rule.scores)
        return {**state, "StateManagerAddon": entry}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the list of checkpoints, with scores by the present monitor."""
        entry, inner_state = self.take(state, "StateManagerAddon", strict=False)  # A run without it has no such entry.
        if entry is not None and not (isinstance(entry, Mapping) and isinstance(entry.get("scores"), Mapping)):
            raise CheckpointMismatch("the state of StateManagerAddon does not contain a list of scores")
        super().load_state_dict(inner_state, strict)
        if entry is None:
            return
        scores = dict(entry["scores"])
        weight_scores = dict(entry.get("weight_scores", {}))
        if not self.history.has_criterion_of(inner_state["records"]):  # They are those by another monitor.
            by_step = {step: row["score"] for step, row in self.history.scores_by_step().items()}
            scores = {name: by_step.get(step_of(name) or 0) for name in scores}
            weight_scores = {name: by_step.get(step_of_weights(name)) for name in weight_scores}
        self.checkpoints.lineage.load_state_dict(entry)
        self.checkpoints.restore(scores)
        self._weight_files.rule.scores = weight_scores


def format_for(model: nn.Module, save_format: str) -> str:
    """Return the name of a format that can hold the weights of a model; errors name the option."""
    try:
        kind = "sharded" if save_format == "sharded" else parse_format(save_format)
    except ConfigError as error:
        raise ConfigError(f"save_format={save_format!r}: {error}") from None
    if kind == "ckpt":
        return kind
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.dtype not in DTYPES.values():
            alternative = "" if tensor.is_quantized else "write save_format='ckpt', or "
            raise ConfigError(
                f"save_format={save_format!r} cannot hold {tensor.dtype}, the dtype of {name!r}; {alternative}convert "
                "the model"
            )
    return kind
